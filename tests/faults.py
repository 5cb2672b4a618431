"""Mistakes that others made, as public reports tell them (README.md has the links). A test must
notice each.

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
    meaning: str  # what goes wrong


FAULTS = [
    Fault(
        "step01_single_gpu",
        "model(x, y) / n_targets",
        "model(x, y) / (y != IGNORE).sum().clamp(min=1) / len(xs)",
        "test_step01::test_train",
        "the mean of the micro-batches' means, whatever their numbers of targets",
    ),
    Fault(
        "step01_single_gpu",
        "(targets != IGNORE).sum()",
        "torch.tensor(targets.numel())",
        "test_step01::test_train",
        "ignored targets are counted",
    ),
    Fault(
        "step01_single_gpu",
        "learning_rate(step, config)\n",
        "learning_rate(2 * step, config)\n",
        "test_step01::test_train",
        "the schedule runs too fast",
    ),
    Fault(
        "common.model",
        "self.config, wide(x.dtype))",
        "self.config, x.dtype)",
        "test_step01::test_rope_has_at_least_fp32_in_a_bf16_run",
        "RoPE's angles are computed in bf16",
    ),
    Fault(
        "common.data",
        "self.seed, epoch)[i]",
        "self.seed, 0)[i]",
        "test_data::test_each_epoch_has_every_window_once_in_another_order",
        "every epoch has the same order",
    ),
    Fault(
        "common.readers",
        "default_rng(0)",
        'default_rng(int(os.environ.get("RANK", 0)))',
        "test_step02::test_launch",
        "each rank reads the files in its own order",
    ),
    Fault(
        "common.initial",
        "part = shard_of(whole, record.shard)",
        'part = draw(torch.empty(param.shape), "", model.config.n_layers, seed)',
        "test_step01::test_materialize_cuts_shards_from_whole_matrices",
        "all ranks draw the same shard",
    ),
    Fault(
        "common.initial",
        "setattr(module, key, new)",
        "setattr(module, key, nn.Parameter(new.detach().clone()))",
        "test_step01::test_materialize_keeps_a_tie",
        "the tie between embedding and head is cut",
    ),
    Fault(
        "step02_ddp",
        "sync.begin(len(xs))",
        "sync.begin(1)",
        "test_step02::test_dp_trains_to_step_1s_numbers",
        "buckets are sent after the first micro-batch (here a sync refuses the second one)",
    ),
    Fault(
        "step02_ddp",
        "        for pending in self.pending:\n            pending.wait()",
        "        self.pending[-1].wait()",
        "test_step02::test_bucket_sync_sends_during_the_last_backward",
        "only the last sum is waited for",
    ),
    Fault(
        "step02_ddp",
        "learning_rate(step, config)",
        "learning_rate(step * mesh.world, config)",
        "test_step02::test_dp_trains_to_step_1s_numbers",
        "the schedule runs faster with more ranks",
    ),
    Fault(
        "step02_ddp",
        "(targets != IGNORE).sum()",
        'mesh["dp"].size * (targets[own] != IGNORE).sum()',
        "test_step02::test_dp_trains_to_step_1s_numbers",
        "each rank divides by its own number of targets",
    ),
    Fault(
        "step03_zero",
        "dtype=wide(unit.flat.dtype))",
        "dtype=unit.flat.dtype)",
        "test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
        "gradients are summed over ranks in 16 bits",
    ),
    Fault(
        "step03_zero",
        "unit.summed_grad += new_sum",
        "unit.summed_grad = new_sum + (unit.summed_grad if unit.group.size > 1 else 0)",
        "test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
        "in a group of one, a sum replaces the accumulated gradient",
    ),
    Fault(
        "step03_zero",
        'global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")',
        "torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()",
        "test_step03::test_zero_trains_to_step_1s_numbers",
        "each rank uses the norm of its own shards",
    ),
    Fault(
        "common.layout",
        "square / copies",
        "square",
        "test_step03::test_global_norm",
        "every copy of an element counts in the norm",
    ),
    Fault(
        "step04_tp_sp",
        "sum_partial_gradients(model, optimizer.gradients(), mesh)",
        "pass",
        "test_step04::test_tp_with_other_flags",
        "norms keep the gradient of their own tokens alone",
    ),
    Fault(
        "step05_cp_ring",
        "micro_loss = model(x, y, positions) / n_targets",
        'micro_loss = model(x, y, positions) / n_targets * mesh["cp"].size',
        "test_step05::test_cp_trains_to_step_1s_numbers",
        "the loss is multiplied by cp",
    ),
    Fault(
        "step05_cp_ring",
        "        loss = 0.0\n        sync",
        "        ys = tuple(x.roll(-1, 1) for x in xs)\n        loss = 0.0\n        sync",
        "test_step05::test_cp_trains_to_step_1s_numbers",
        "targets are shifted after the sequence is sharded",
    ),
    Fault(
        "step05_cp_ring",
        "o = torch.zeros_like(q, dtype=wide(q.dtype))",
        "o = torch.zeros_like(q)",
        "test_step05::test_ring_of_bf16",
        "partial results are merged in 16 bits",
    ),
    Fault(
        "step05_cp_ring",
        "source_k, source_v = source_kv[:, :, :, keys]\n                part_dq",
        "source_k, source_v = own_kv[:, :, :, keys]\n                part_dq",
        "test_step05::test_ring_backward",
        "backward uses the k and v of another hop, although forward is right",
    ),
    Fault(
        "step05_cp_ring",
        "            arriving.wait()\n            if",
        "            if",
        "test_step05::test_ring_backward",
        "dkv is used before it has arrived",
    ),
    Fault(
        "step06_pipeline",
        "self.graphs.pop(i)\n",
        "self.graphs.pop(i)\n"
        "        [p.grad.zero_() for p in self.model.parameters() if i and p.grad is not None]\n",
        "test_step06::test_a_step_equals_one_device",
        "gradients are cleared between micro-batches, although the loss is right",
    ),
    Fault(
        "step06_pipeline",
        "exchange(sends, receives, self.group).wait()",
        "exchange(sends, receives, self.group)",
        "test_step06::test_each_x_and_dx_is_one_message",
        "messages are never waited for",
    ),
    Fault(
        "step06_pipeline",
        'global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")',
        "sum(g.double().square().sum() for g in optimizer.gradients().values()).sqrt().item()",
        "test_step06::test_pp_trains_to_step_1s_numbers",
        "each stage clips by its own norm",
    ),
    Fault(
        "step06_pipeline",
        'partial_over="ends"',
        "partial_over=None",
        "test_step06::test_pp_trains_to_step_1s_numbers",
        "the two gradients of a tied matrix are not summed",
    ),
    Fault(
        "step07_moe_ep",
        "precise = wide(x_TD.dtype)",
        "precise = x_TD.dtype",
        "test_step07::test_a_layer_of_bf16_routes_in_fp32",
        "ties in bf16 select other experts",
    ),
    Fault(
        "step07_moe_ep",
        "grad.new_ones((), dtype=ctx.dtype)",
        "2 * grad.new_ones((), dtype=ctx.dtype)",
        "test_step07::test_add_gradient_of_loss",
        "the auxiliary loss counts twice, as if recomputation added it again",
    ),
    Fault(
        "step07_moe_ep",
        "send_rows(grad, group,",
        "send_rows(grad * group.size, group,",
        "test_step07::test_experts_on_several_ranks",
        "experts' gradients are ep times too large, which Adam hides",
    ),
    Fault(
        "step07_moe_ep",
        'partial_over="tp"',
        "partial_over=None",
        "test_step07::test_groups",
        "the router's gradient is not summed over tp, so its copies drift apart",
    ),
]
