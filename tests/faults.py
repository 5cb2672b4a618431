"""Mistakes that others made, as public reports tell them. A test must notice each.

pytest tests/test_faults.py                   checks that each text below occurs once in its file
pytest tests/test_faults.py -m exhaustive     makes each mistake in a copy of the course, where its
                                              test must fail
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake: a replacement in the source text, and the test that must fail with it."""

    module: str  # the file, such as "step02_ddp" or "common.comm"
    old: str  # text that occurs once in the file
    new: str  # the text that replaces it
    test: str  # "file::test", in tests/: the test that must fail
    report: str  # where others have told of this mistake, or one close to it
    meaning: str  # what goes wrong


FAULTS = [
    Fault(
        "step01_single_gpu",
        "model(x, y) / n_targets",
        "model(x, y) / (y != IGNORE).sum().clamp(min=1) / len(xs)",
        "test_step01::test_train",
        "https://github.com/huggingface/transformers/issues/24725",
        "the mean of the micro-batches' means, whatever their numbers of targets",
    ),
    Fault(
        "step01_single_gpu",
        "(targets != IGNORE).sum()",
        "torch.tensor(targets.numel())",
        "test_step01::test_train",
        "https://github.com/pytorch/torchtitan/pull/2206",
        "ignored targets are counted",
    ),
    Fault(
        "step01_single_gpu",
        "learning_rate(step, config)\n",
        "learning_rate(2 * step, config)\n",
        "test_step01::test_train",
        "https://github.com/huggingface/accelerate/issues/662",
        "the schedule runs too fast",
    ),
    Fault(
        "common.model",
        "self.config, wide(x.dtype))",
        "self.config, x.dtype)",
        "test_step01::test_rope_has_at_least_fp32_in_a_bf16_run",
        "https://github.com/huggingface/transformers/pull/29285",
        "RoPE's angles are computed in bf16",
    ),
    Fault(
        "common.data",
        "self.seed, epoch)[place]",
        "self.seed, 0)[place]",
        "test_data::test_each_epoch_has_every_window_once_in_another_order",
        "https://github.com/lucidrains/DALLE-pytorch/pull/230",
        "every epoch has the same order",
    ),
    Fault(
        "common.readers",
        "default_rng(0)",
        'default_rng(int(os.environ.get("RANK", 0)))',
        "test_step02::test_launch",
        "https://github.com/jzhang38/TinyLlama/issues/67",
        "each rank reads the files in its own order",
    ),
    Fault(
        "common.layout",
        "value = shard_of(value, shard)",
        'value = draw(torch.empty(param.shape), "", model.config.n_layers, seed)',
        "test_step01::test_materialize_cuts_shards_from_whole_matrices",
        "https://github.com/modelscope/ms-swift/pull/7944",
        "all ranks draw the same shard",
    ),
    Fault(
        "common.layout",
        "setattr(module, key, new)",
        "setattr(module, key, nn.Parameter(new.detach().clone()))",
        "test_step01::test_materialize_keeps_what_is_tied_or_frozen",
        "https://github.com/facebookresearch/lingua/pull/75",
        "the tie between embedding and head is cut",
    ),
    Fault(
        "step02_ddp",
        "sync.begin(len(xs))",
        "sync.begin(1)",
        "test_step02::test_flags_of_step_1_keep_their_meaning",
        "https://github.com/deepspeedai/DeepSpeed/pull/7985",
        "buckets are sent after the first micro-batch (here a sync refuses the second one)",
    ),
    Fault(
        "step02_ddp",
        "        for pending in self.pending:\n            pending.wait()",
        "        self.pending[-1].wait()",
        "test_step02::test_bucket_sync_sums_micro_batches_and_ranks",
        "https://github.com/deepspeedai/DeepSpeed/issues/8061",
        "only the last sum is waited for",
    ),
    Fault(
        "step02_ddp",
        "learning_rate(step, config)",
        "learning_rate(step * mesh.world, config)",
        "test_step02::test_flags_of_step_1_keep_their_meaning",
        "https://github.com/huggingface/accelerate/issues/662",
        "the schedule runs faster with more ranks",
    ),
    Fault(
        "step02_ddp",
        "(targets != IGNORE).sum()",
        'mesh["dp"].size * (targets[own] != IGNORE).sum()',
        "test_step02::test_flags_of_step_1_keep_their_meaning",
        "https://github.com/pytorch/torchtitan/pull/2206",
        "each rank divides by its own number of targets",
    ),
    Fault(
        "step03_zero",
        "dtype=wide(self.flat.dtype))",
        "dtype=self.flat.dtype)",
        "test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
        "https://github.com/pytorch/pytorch/issues/106395",
        "gradients are summed over ranks in 16 bits",
    ),
    Fault(
        "step03_zero",
        "unit.summed_grad += unit.new_sum",
        "unit.summed_grad = unit.new_sum + (unit.summed_grad if unit.group.size > 1 else 0)",
        "test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
        "https://github.com/ServiceNow/Fast-LLM/pull/551",
        "in a group of one, a sum replaces the accumulated gradient",
    ),
    Fault(
        "step03_zero",
        "global_norm(model, optimizer.gradients(), mesh, optimizer.sharded)",
        "torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()",
        "test_step03::test_zero_trains_to_step_1s_numbers",
        "https://github.com/karpathy/llm.c/pull/524",
        "each rank uses the norm of its own shards",
    ),
    Fault(
        "common.layout",
        ".double().square() / copies",
        ".double().square()",
        "test_step03::test_global_norm",
        "https://github.com/NVIDIA-NeMo/RL/pull/3788",
        "every copy of an element counts in the norm",
    ),
    Fault(
        "step04_tp_sp",
        "sum_partial_gradients(model, optimizer.gradients(), mesh)",
        "pass",
        "test_step04::test_tp_with_other_flags",
        "https://github.com/NVIDIA/Megatron-LM/issues/1446",
        "norms keep the gradient of their own tokens alone",
    ),
    Fault(
        "step05_cp_ring",
        "micro_loss = model(x, y, positions) / n_targets",
        'micro_loss = model(x, y, positions) / n_targets * mesh["cp"].size',
        "test_step05::test_cp_trains_to_step_1s_numbers",
        "https://github.com/NVIDIA/Megatron-LM/issues/906",
        "the loss is multiplied by cp",
    ),
    Fault(
        "step05_cp_ring",
        "        loss = 0.0\n        sync",
        "        ys = tuple(x.roll(-1, 1) for x in xs)\n        loss = 0.0\n        sync",
        "test_step05::test_what_is_given_to_the_model_and_sent",
        "https://github.com/huggingface/transformers/pull/36607",
        "targets are shifted after the sequence is sharded",
    ),
    Fault(
        "step05_cp_ring",
        "o = torch.zeros_like(q, dtype=wide(q.dtype))",
        "o = torch.zeros_like(q)",
        "test_step05::test_ring_of_bf16",
        "https://github.com/zhuzilin/ring-flash-attention/issues/42",
        "partial results are merged in 16 bits",
    ),
    Fault(
        "step05_cp_ring",
        "for source, (source_k, source_v) in travel(own_kv, ctx.group):\n            own_term",
        "for source, _ in travel(own_kv, ctx.group):\n"
        "            source_k, source_v = own_kv\n"
        "            own_term",
        "test_step05::test_ring_backward",
        "https://github.com/huggingface/diffusers/issues/14265",
        "backward uses the k and v of another hop, although forward is right",
    ),
    Fault(
        "step05_cp_ring",
        "            arriving.wait()\n            dkv",
        "            dkv",
        "test_step05::test_ring_backward",
        "https://github.com/deepspeedai/DeepSpeed/issues/8061",
        "dkv is used before it has arrived",
    ),
    Fault(
        "step06_pipeline",
        "self.graphs.pop(i)\n",
        "self.graphs.pop(i)\n"
        "        [p.grad.zero_() for p in self.model.parameters() if i and p.grad is not None]\n",
        "test_step06::test_a_step_equals_one_device",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/3530",
        "gradients are cleared between micro-batches, although the loss is right",
    ),
    Fault(
        "step06_pipeline",
        "exchange(sends, receives, self.group).wait()",
        "exchange(sends, receives, self.group)",
        "test_step06::test_each_x_and_dx_is_one_message",
        "https://github.com/deepspeedai/DeepSpeed/issues/8061",
        "messages are never waited for",
    ),
    Fault(
        "step06_pipeline",
        "global_norm(model, optimizer.gradients(), mesh, optimizer.sharded)",
        "sum(g.double().square().sum() for g in optimizer.gradients().values()).sqrt().item()",
        "test_step06::test_pp_trains_to_step_1s_numbers",
        "https://github.com/pytorch/torchtitan/issues/596",
        "each stage clips by its own norm",
    ),
    Fault(
        "step06_pipeline",
        '        sum_tied(model, optimizer.gradients(), mesh["pp"])',
        "        pass",
        "test_step06::test_pp_trains_to_step_1s_numbers",
        "https://github.com/uw-syfi/piper/issues/13",
        "the two gradients of a tied matrix are not summed",
    ),
    Fault(
        "step07_moe_ep",
        "precise = wide(x_TD.dtype)",
        "precise = x_TD.dtype",
        "test_step07::test_a_layer_of_bf16_routes_in_fp32",
        "https://github.com/ViperEkura/AstrAI/pull/57",
        "ties in bf16 select other experts",
    ),
    Fault(
        "step07_moe_ep",
        "ctx.coeff, dtype",
        "2 * ctx.coeff, dtype",
        "test_step07::test_add_loss",
        "https://github.com/NVIDIA/Megatron-LM/issues/1330",
        "the auxiliary loss counts twice, as if recomputation added it again",
    ),
    Fault(
        "step07_moe_ep",
        "return dispatch(grad_ND, group,",
        "return dispatch(grad_ND * group.size, group,",
        "test_step07::test_run_experts_on_their_ranks",
        "https://github.com/deepspeedai/DeepSpeed/pull/6546",
        "experts' gradients are ep times too large, which Adam hides",
    ),
    Fault(
        "step07_moe_ep",
        'partial_over=("tp",)',
        "partial_over=()",
        "test_step07::test_groups",
        "https://github.com/pytorch/torchtitan/issues/2387",
        "the router's gradient is not summed over tp, so its copies drift apart",
    ),
]
