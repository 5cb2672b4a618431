"""Bugs that others had. Each is a public report, an edit that brings the bug into the course, and
the test that must notice it.

    pytest tests/test_bugs.py                 each text to edit occurs once, and each test exists
    pytest tests/test_bugs.py -m exhaustive   edits a copy of the course: there the test fails
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A reported bug, brought into the course by replacing `before` with `after`."""

    report: str  # its address
    meaning: str  # what went wrong
    file: str  # the file of the course to edit
    before: str  # text that occurs once in it
    after: str
    test: str  # "file::test" in tests/


BUGS = [
    # --- Step 1, model, data and initial values
    Bug(
        report="https://github.com/huggingface/transformers/issues/24725",
        meaning="means of micro-batches were averaged, whatever their numbers of targets",
        file="step01_single_gpu.py",
        before="micro_loss = model(x, y) / n_targets",
        after="micro_loss = model(x, y) / (y != IGNORE).sum().clamp(min=1) / len(xs)",
        test="test_step01::test_train",
    ),
    Bug(
        report="https://github.com/allenai/allennlp/pull/4706",
        meaning="the reported loss was that of the last micro-batch",
        file="step01_single_gpu.py",
        before="loss = loss + micro_loss.detach()",
        after="loss = micro_loss.detach()",
        test="test_step01::test_train",
    ),
    Bug(
        report="https://github.com/ServiceNow/Fast-LLM/issues/542",
        meaning="the weights of norms decayed",
        file="step01_single_gpu.py",
        before="dict(params=norms, weight_decay=0.0)",
        after="dict(params=norms, weight_decay=config.weight_decay)",
        test="test_step01::test_adamw_and_what_decays",
    ),
    Bug(
        report="https://github.com/NVIDIA/apex/pull/1731",
        meaning="bf16 weights had no fp32 masters, although these were asked for",
        file="step01_single_gpu.py",
        before="param.detach().to(wide(param.dtype))",
        after="param.detach()",
        test="test_step01::test_masters_keep_updates_that_bf16_would_lose",
    ),
    Bug(
        report="https://github.com/huggingface/transformers/pull/29285",
        meaning="RoPE's angles were computed in bf16",
        file="common/model.py",
        before="rope_tables(positions, self.config, wide(x.dtype))",
        after="rope_tables(positions, self.config, x.dtype)",
        test="test_step01::test_rope_has_at_least_fp32_in_a_bf16_run",
    ),
    Bug(
        report="https://github.com/NeuraLegion/shainet/pull/111",
        meaning="RoPE rotated neighbouring channels, not channels i and i + head_dim / 2",
        file="common/model.py",
        before="first, second = x.chunk(2, dim=-1)",
        after="first, second = x[..., ::2], x[..., 1::2]",
        test="test_step01::test_the_model_is_llama",
    ),
    Bug(
        report="https://github.com/modelscope/ms-swift/pull/7944",
        meaning="all shards of a matrix were drawn alike",
        file="common/layout.py",
        before="value = shard_of(value, shard)",
        after="value = draw(name, list(param.shape), model.config.n_layers, seed)",
        test="test_step01::test_materialize_cuts_shards_from_whole_matrices",
    ),
    Bug(
        report="https://github.com/facebookresearch/lingua/pull/75",
        meaning="the tie between embedding and head was cut",
        file="common/layout.py",
        before="setattr(module, key, new)",
        after="setattr(module, key, nn.Parameter(new.detach().clone()))",
        test="test_step01::test_materialize_keeps_what_is_tied_or_frozen",
    ),
    Bug(
        report="https://github.com/lucidrains/DALLE-pytorch/pull/230",
        meaning="every epoch had the order of the first",
        file="common/data.py",
        before="self.seed, epoch)[place]",
        after="self.seed, 0)[place]",
        test="test_data::test_each_epoch_has_every_window_once_in_another_order",
    ),
    Bug(
        report="https://github.com/jzhang38/TinyLlama/issues/67",
        meaning="each rank shuffled the names of the data files for itself",
        file="common/data.py",
        before="np.random.default_rng(0).permutation(len(paths))",
        after='np.random.default_rng(int(os.environ.get("RANK", 0))).permutation(len(paths))',
        test="test_step02::test_launch",
    ),
    # --- Step 2
    Bug(
        report="https://github.com/pytorch/torchtitan/pull/2206",
        meaning="each rank divided by its own number of targets",
        file="step02_ddp.py",
        before="n_targets = (targets != IGNORE).sum()",
        after="n_targets = mesh.world * (targets[own] != IGNORE).sum()",
        test="test_step02::test_flags_of_step_1_keep_their_meaning",
    ),
    Bug(
        report="https://github.com/huggingface/accelerate/issues/662",
        meaning="the learning-rate schedule advanced once for each process",
        file="step02_ddp.py",
        before="lr = learning_rate(step, config)",
        after="lr = learning_rate(step * mesh.world, config)",
        test="test_step02::test_flags_of_step_1_keep_their_meaning",
    ),
    Bug(
        report="https://github.com/deepspeedai/DeepSpeed/pull/7985",
        meaning="the last micro-batch's gradient was added after the sum over ranks",
        file="step02_ddp.py",
        before="bucket.missing = n_micro_batches * backwards",
        after="bucket.missing = (n_micro_batches - 1) * backwards",
        test="test_step02::test_bucket_sync_sums_micro_batches_and_ranks",
    ),
    Bug(
        report="https://github.com/deepspeedai/DeepSpeed/issues/8061",
        meaning="gradients were used while they were being summed",
        file="step02_ddp.py",
        before="            pending.wait()",
        after="            pass",
        test="test_step02::test_bucket_sync_sums_micro_batches_and_ranks",
    ),
    # --- Step 3, and the gradient norm
    Bug(
        report="https://github.com/pytorch/pytorch/issues/106395",
        meaning="gradients were summed over ranks in bf16",
        file="step03_zero.py",
        before="dtype=wide(self.flat.dtype))",
        after="dtype=self.flat.dtype)",
        test="test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
    ),
    Bug(
        report="https://github.com/ServiceNow/Fast-LLM/pull/551",
        meaning="in a group of one, a sum replaced the accumulated gradient",
        file="step03_zero.py",
        before="unit.summed_grad += unit.new_sum",
        after="unit.summed_grad = unit.new_sum + (unit.group.size > 1) * unit.summed_grad",
        test="test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
    ),
    Bug(
        report="https://github.com/deepspeedai/DeepSpeed/issues/8061",
        meaning="a sum over ranks was used before it had arrived",
        file="step03_zero.py",
        before="        pending.wait()\n        unit.summed_grad += unit.new_sum",
        after="        unit.summed_grad += unit.new_sum",
        test="test_step03::test_a_rank_gets_its_parts_of_summed_gradients",
    ),
    Bug(
        report="https://github.com/karpathy/llm.c/pull/524",
        meaning="the norm was not that of the summed gradient (here: of a rank's own shards)",
        file="step03_zero.py",
        before="norm = global_norm(model, optimizer.gradients(), mesh, optimizer.sharded)",
        after="norm = nn.utils.get_total_norm(optimizer.gradients().values()).item()",
        test="test_step03::test_zero_trains_to_step_1s_numbers",
    ),
    Bug(
        report="https://github.com/NVIDIA-NeMo/RL/pull/3788",
        meaning="every copy of an element counted in the norm",
        file="common/layout.py",
        before=".double().square() / copies",
        after=".double().square()",
        test="test_step03::test_global_norm",
    ),
    Bug(
        report="https://github.com/pytorch/torchtitan/issues/596",
        meaning="each pipeline stage clipped by the norm of that stage alone",
        file="common/layout.py",
        before="return list(mesh.sizes)",
        after='return [name for name in mesh.sizes if name != "pp"]',
        test="test_step03::test_global_norm",
    ),
]
