"""The table of layouts x behaviours: what a row does, one process does too. A new technique adds its rows here.

Rows have techniques, or services, in them. Layouts of the course alone are in tests/ (test_step02.py and on).

Row(ranks, step, layout, base, tier)     `layout` are the flags of the run that is tested; `base` those that it has
                                         in common with the one process that it is compared with
"""

from typing import Any, NamedTuple

DEFAULT, EXHAUSTIVE = "default", "exhaustive"
EQUALS = ("equals",)  # BEHAVIOURS of extras/tests/test_layouts.py
ALL = ("equals", "drifts", "stays_near", "evaluates", "goes_on", "launches")
LAUNCHES, STAYS_NEAR = ("equals", "launches"), ("equals", "stays_near")
NEAR = dict(dtype="bf16", optimizer="adamw", lr=0.01, steps=3)  # how `stays_near` trains
UNEVEN = dict(dataset="uneven-targets")  # many do not count; extras/tests/equal.py knows these data sets
FROZEN, EXACT = dict(patch="frozen"), dict(patch="not_rounded")  # extras/tests/faults.py
COMPILED = dict(patch="graphs_without_code")  # there, too
SGD, TIED, MHA = dict(optimizer="sgd", lr=0.5), dict(tied=True), dict(n_kv_heads=4)
LARGE_HEADS = dict(dim=128, n_heads=1, n_kv_heads=1, n_layers=2, seq_len=131)
EXPERTS, MUON = dict(experts=4), dict(optimizer="muon")
AHEAD = dict(schedule="ahead", chunks=1, ep_overlap=True)
LOSSY = (
    (dict(compress="topk", topk_fraction=1.0), 0.0),  # loses nothing; slices, messages, what is owed: as in the others
    (dict(compress="bf16"), 0.02),
    (dict(compress="int8"), 0.2),
    (dict(compress="topk", topk_fraction=0.8), 0.4),
)
SLOW = dict(optimizer="sgd", lr=0.1, global_batch_size=24)  # so what is lost in one step does not grow in the next
WIDE = SLOW | dict(patch="wide")  # what fp16 does, without its rounding: scales are powers of two
BIAS = dict(balance="bias", bias_speed=0.1)
GROUPS = dict(experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2, n_layers=4, moe_every=2)
SPLIT = ("zb-h1", "zb-h2", "zb-auto", "zbv", "dualpipe")
CUBE, UNEVEN_STAGES = dict(pp=2, cp=2, tp=2, ep=2), dict(pp=2, schedule="zbv", pp_split="2,1,1,1")
RAMP = dict(batch_ramp="4,2", global_batch_size=12, steps=4)
BACK = dict(skip_spikes=2.0, roll_back=2, steps=5, patch="fourth_is_a_spike")
WINDOW, DEEP, PARTED = dict(window=7), dict(n_layers=4), dict(sp=False, pp_scatter=True)
MASK = dict(documents="mask", end_token=32)  # a document ends with each blank
DROP, STALE = dict(dropout=0.2), dict(stale=1, steps=3)


class Row(NamedTuple):
    """One layout."""

    ranks: int
    step: str
    layout: dict[str, Any] = {}  # noqa: RUF012
    base: dict[str, Any] = {}  # noqa: RUF012
    tier: str = DEFAULT
    bound: float = 0.0  # of a lossy technique; 0: what the dtype holds
    does: tuple[str, ...] = EQUALS
    swept: tuple[str, ...] = ()  # what it also does, which only the sweep looks at


def sized(row: Row) -> Row:
    """With a batch of three micro-batches on each rank, or in a pipeline of two for each stage, of a layer more."""
    pp, cp, tp, size = (row.layout.get(name, 1) for name in ("pp", "cp", "tp", "micro_batch_size"))
    batch = row.ranks // (pp * cp * tp) * max(3, 2 * pp) * size
    return row._replace(base=dict(global_batch_size=batch, n_layers=2 + (pp > 1)) | row.base)


ROWS = [
    # each step in a layout that has all that came before, with every behaviour; others: tests/test_step02.py ...
    Row(2, "step02_ddp", dict(bucket_mb=0.01), does=ALL),
    Row(2, "step03_zero", dict(zero=3), TIED, does=ALL),
    Row(4, "step04_tp_sp", dict(tp=2, zero=1), does=ALL),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, zero=2), TIED, does=ALL),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, zero=1), TIED, does=ALL),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, schedule="zb-h1"), does=LAUNCHES, swept=ALL[1:-1]),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=3), EXPERTS | dict(aux_loss_coeff=0.0), does=ALL),
    # what many targets do not count in, what does not train
    Row(4, "step06_pipeline", dict(pp=2, schedule="zb-h1"), UNEVEN | SGD),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, schedule="zb-h2", zero=2), FROZEN | TIED),
    # what GPUs have other kernels for: heads of 128, lengths that no tile divides, experts in 16 bits
    Row(2, "step03_zero", dict(zero=1), LARGE_HEADS, does=("stays_near",)),
    Row(2, "step07_moe_ep", dict(ep=2, expert_matmul="grouped"), EXPERTS, does=("stays_near",)),
    # step 1: variants of the trainer
    Row(1, "step01_single_gpu", dict(recompute="elementwise")),
    Row(3, "step02_ddp", {}, dict(optimizer="adafactor")),
    Row(2, "step06_pipeline", dict(zero=1, dtype="bf16"), bound=0.05, does=("goes_on",)),
    Row(2, "step02_ddp", dict(compress="int8"), does=("goes_on",)),
    Row(2, "step03_zero", dict(zero=2, compress="topk"), does=("goes_on",)),
    Row(2, "step06_pipeline", dict(pp=2, zero=0, recompute="elementwise"), TIED | dict(optimizer="adafactor")),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, zero=3, recompute="elementwise")),
    Row(4, "step07_moe_ep", dict(cp=2, ep=2, zero=2, recompute="elementwise"), EXPERTS),
    Row(2, "step02_ddp", dict(loss_chunk=5), SGD),
    Row(2, "step04_tp_sp", dict(tp=2, sp=False, loss_chunk=7)),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, loss_chunk=5), TIED, swept=("evaluates",)),
    Row(2, "step03_zero", dict(zero=3, loss_chunk=5), TIED | SGD, does=("equals", "evaluates")),
    Row(3, "step03_zero", dict(zero=2), MUON),
    Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), MUON),
    Row(4, "step04_tp_sp", dict(tp=2, zero=3, offload_optimizer="disk"), MUON, EXHAUSTIVE),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, zero=0), MUON | TIED),
    Row(4, "step07_moe_ep", dict(tp=2, ep=2, zero=3), MUON | EXPERTS),
    *(Row(2, "step03_zero", dict(zero=zero, grad_dtype="same", dtype="bf16"), WIDE, bound=1e-10) for zero in (0, 1)),
    *(
        Row(2, "step03_zero", dict(zero=n, grad_dtype="same", dtype="bf16"), SLOW, EXHAUSTIVE if n else DEFAULT, 0.3)
        for n in (0, 1, 2)
    ),
    Row(1, "step01_single_gpu", dict(dtype="fp16"), SLOW, bound=0.05),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=2, dtype="fp16", loss_chunk=5), SLOW | EXPERTS, bound=0.1),
    Row(1, "step01_single_gpu", dict(dtype="fp16"), WIDE, bound=1e-10),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=2, dtype="fp16", loss_chunk=5), WIDE | EXPERTS, bound=1e-10),
    Row(4, "step06_pipeline", dict(pp=2, zero=0, dtype="fp16"), WIDE | TIED | dict(grad_clip=0.0), bound=1e-10),
    Row(1, "step01_single_gpu", dict(compile=True, recompute="elementwise"), SGD | COMPILED),
    Row(1, "step01_single_gpu", dict(compile=True, fused_gradients=True), SGD | COMPILED, EXHAUSTIVE),
    Row(2, "step02_ddp", dict(fused_gradients=True, bucket_mb=0.01), TIED | SGD),
    Row(2, "step03_zero", dict(zero=3, fused_gradients=True, recompute="full"), SGD),
    Row(2, "step03_zero", dict(zero=2, fused_gradients=True, loss_chunk=5), SGD, EXHAUSTIVE),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, fused_gradients=True, zero=1, zero_overlap=True), SGD, EXHAUSTIVE),
    Row(4, "step07_moe_ep", dict(tp=2, ep=2, fused_gradients=True), SGD | EXPERTS, EXHAUSTIVE),
    Row(2, "step03_zero", dict(compile=True, zero=3), SGD | COMPILED),
    Row(2, "step04_tp_sp", dict(compile=True, tp=2, recompute="full"), SGD | COMPILED, EXHAUSTIVE),
    Row(2, "step06_pipeline", dict(compile=True, pp=2), SGD | COMPILED, EXHAUSTIVE),
    Row(2, "step02_ddp", {}, dict(skip_spikes=1.001, steps=12, global_batch_size=4)),
    Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), BACK),
    Row(2, "step02_ddp", dict(bucket_mb=0.01, prefetch=True), RAMP | SGD),
    Row(4, "step06_pipeline", dict(pp=2, zero=3, schedule="interleaved"), RAMP | DROP | dict(n_layers=4)),
    Row(4, "step07_moe_ep", dict(ep=2, cp=2, zero=2), RAMP | EXPERTS | SGD | dict(aux_loss_coeff=1.0)),
    Row(2, "step05_cp_ring", dict(sync="torch", micro_batch_size=2), RAMP | MASK, EXHAUSTIVE),
    Row(4, "step06_pipeline", dict(pp=2, schedule="dualpipe", recompute="full"), RAMP | MASK | DROP, EXHAUSTIVE),
    Row(4, "step06_pipeline", dict(pp=2, zero=3), BACK | MUON, EXHAUSTIVE),
    Row(2, "step03_zero", dict(zero=3, attention="scores"), SGD),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, attention="scores", recompute="selective", schedule="zb-h1"), TIED),
    Row(2, "step07_moe_ep", dict(ep=2, attention="scores", recompute="elementwise"), EXPERTS, EXHAUSTIVE),
    Row(1, "step01_single_gpu", dict(compile=True, attention="scores", recompute="selective"), COMPILED, EXHAUSTIVE),
    Row(2, "step02_ddp", {}, DROP | SGD, EXHAUSTIVE, does=("equals", "goes_on")),
    Row(2, "step02_ddp", dict(sync="torch", micro_batch_size=2), DROP | SGD, EXHAUSTIVE),
    Row(4, "step04_tp_sp", dict(tp=2, zero=3, recompute="full"), DROP),
    Row(2, "step04_tp_sp", dict(tp=2, sp=False, recompute="elementwise", micro_batch_size=2), DROP | SGD | TIED),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, recompute="full"), DROP | TIED, swept=("evaluates",)),
    Row(4, "step07_moe_ep", dict(pp=2, tp=2, ep=2, schedule="zb-h1", zero=2), DROP | EXPERTS | dict(dense_layers=1)),
    *(
        Row(4, "step07_moe_ep", dict(pp=2, tp=2, ep=2, sp=False, **more), DROP | EXPERTS | dict(n_layers=4), EXHAUSTIVE)
        for name in ("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "dualpipe")
        for more in (dict(schedule=name, recompute="full"), dict(schedule=name, recompute="elementwise", zero=1))
    ),
    Row(8, "step07_moe_ep", CUBE | dict(zero=3), DROP | EXPERTS, EXHAUSTIVE),
    # several that change the same calls, whoever attaches first
    *(Row(2, "step03_zero", dict(zero=n, dtype="fp16", offload_optimizer="cpu"), WIDE, bound=1e-10) for n in (1, 2)),
    Row(2, "step03_zero", dict(zero=3, dtype="fp16", offload_params="cpu"), WIDE, bound=1e-10),
    Row(4, "step07_moe_ep", dict(ep=2, zero=1, offload_optimizer="cpu"), EXPERTS | BIAS),
    Row(
        *(2, "step07_moe_ep", dict(zero=2, offload_optimizer="disk", dtype="fp16")),
        *(WIDE | EXPERTS | BIAS | dict(z_loss=0.1), DEFAULT, 1e-10),
    ),
    Row(2, "step07_moe_ep", dict(ep=2, dtype="fp16"), WIDE | EXPERTS | dict(z_loss=0.1), bound=1e-10),
    Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), dict(skip_spikes=1.001, steps=12)),
    Row(
        *(4, "step03_zero", dict(zero=1, zero_replicas=2, grad_dtype="same", dtype="bf16", offload_optimizer="cpu")),
        *(WIDE, DEFAULT, 1e-10),
    ),
    Row(2, "step07_moe_ep", dict(ep=2, expert_matmul="grouped", dtype="fp32"), EXPERTS | SGD, bound=1e-5),
    # variants of gradient sums
    Row(3, "step02_ddp", dict(sync="server"), SGD),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, zero=0), STALE | SGD),
    Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), STALE | MUON, EXHAUSTIVE),
    Row(2, "step03_zero", dict(zero=3), STALE, EXHAUSTIVE),
    Row(4, "step02_ddp", dict(sync="hierarchical", ranks_per_node=2), SGD),
    Row(4, "step04_tp_sp", dict(sync="hierarchical", ranks_per_node=2, zero=0, tp=2), SGD, EXHAUSTIVE),
    Row(3, "step02_ddp", dict(sync="tree"), SGD),
    Row(4, "step02_ddp", dict(sync="overlap"), TIED | SGD),
    Row(3, "step02_ddp", dict(sync="torch", bucket_mb=0.01), TIED | SGD),
    Row(4, "step05_cp_ring", dict(sync="torch", zero=0, cp=2, recompute="full")),
    *(Row(3, "step02_ddp", dict(bucket_mb=0.001, **lossy), SLOW, bound=bound) for lossy, bound in LOSSY),
    *(
        Row(4, "step06_pipeline", dict(pp=2, zero=zero, **lossy), SLOW, EXHAUSTIVE if zero else DEFAULT, bound)
        for zero, (lossy, bound) in enumerate(LOSSY[:3])
    ),
    Row(3, "step03_zero", dict(zero=3, compress="topk", topk_fraction=1.0), TIED | SGD),
    # variants of ZeRO
    Row(2, "step03_zero", dict(zero=3, zero_keep=True), TIED | SGD, does=("equals", "evaluates")),
    Row(2, "step07_moe_ep", dict(ep=2, zero=3, zero_keep=True, zero_keep_mb=0.06), EXPERTS),  # all but the experts
    Row(4, "step06_pipeline", dict(pp=2, zero=3, zero_keep=True, schedule="zb-h1", zero_replicas=2), TIED),
    Row(2, "step03_zero", dict(zero=1, zero_overlap=True), TIED),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=1, zero_overlap=True, schedule="zbv"), EXPERTS | TIED | DEEP),
    Row(4, "step03_zero", dict(zero=1, zero_overlap=True, zero_replicas=2, offload_optimizer="cpu"), SGD),
    *(Row(4, "step03_zero", dict(zero=zero, zero_replicas=2), SGD) for zero in (1, 3)),
    Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu")),
    Row(2, "step03_zero", dict(zero=3, offload_optimizer="disk"), TIED),
    Row(2, "step03_zero", dict(zero=3, offload_params="cpu"), SGD, does=STAYS_NEAR),
    Row(4, "step04_tp_sp", dict(tp=2, zero=3, offload_params="cpu", offload_optimizer="cpu")),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, zero=2, zero_replicas=2), TIED),
    # variants of tensor parallelism
    Row(2, "step04_tp_sp", dict(tp=2, tp_overlap=True), SGD),
    Row(4, "step04_tp_sp", dict(tp=2, tp_overlap=True, sp=False, zero=3, recompute="full"), TIED),
    Row(2, "step04_tp_sp", dict(tp=2, compress_activations="bf16"), SGD, bound=0.01),
    *(
        Row(2, "step06_pipeline", dict(compress_activations="bf16") | layout, SGD | EXACT)
        for layout in (
            dict(tp=2, tp_overlap=True),
            dict(tp=2, sp=False),
            dict(pp=2, schedule="afab"),
            dict(pp=2, schedule="zb-h1"),
        )
    ),
    Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8", tp_overlap=True), SGD, bound=0.03),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, compress_activations="int8", sp=False), SGD, bound=0.03),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, compress_activations="int8", schedule="zb-h1"), SGD, bound=0.03),
    Row(4, "step04_tp_sp", dict(tp=4, zero=1), SGD),  # two key/value heads
    Row(4, "step05_cp_ring", dict(cp=1, tp=4, sp=False, recompute="full"), dict(n_kv_heads=1)),
    Row(8, "step05_cp_ring", dict(cp=2, tp=4, zero=3), SGD | TIED, EXHAUSTIVE),
    # variants of context parallelism
    Row(3, "step05_cp_ring", dict(cp=3, cp_mode="ring"), SGD | dict(seq_len=18)),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", recompute="full"), TIED, does=STAYS_NEAR),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", sp=False), dict(seq_len=14)),  # 7 tokens a rank of cp
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="allgather", zero=3), SGD, does=STAYS_NEAR),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), SGD, does=STAYS_NEAR),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="ulysses", zero=2)),  # twice as many ranks as key/value heads
    Row(4, "step05_cp_ring", dict(cp=2, cp_kernel="flash", tp=2), SGD, does=STAYS_NEAR),
    Row(2, "step05_cp_ring", dict(cp=2, cp_kernel="flash", cp_mode="allgather", documents="mask"), MASK | SGD),
    Row(2, "step05_cp_ring", dict(cp=2, cp_kernel="cudnn"), SGD, EXHAUSTIVE),  # on a CPU as flash
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp", ulysses=2), SGD),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp", cp_kernel="flash", documents="mask", zero=3), MASK | TIED),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="usp", recompute="full"), MHA, does=("equals", "evaluates")),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="ring"), WINDOW | TIED),  # a window reaches over two ranks
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), WINDOW | SGD, EXHAUSTIVE),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses", cp_kernel="flash"), WINDOW | SGD),
    Row(1, "step05_cp_ring", dict(cp_kernel="flash"), WINDOW | SGD),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", cp_kernel="flash", zero=3), WINDOW | SGD),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, cp_mode="ring", schedule="zb-h1"), WINDOW, does=("equals", "evaluates")),
    Row(1, "step05_cp_ring", dict(documents="reset"), MASK),  # RoPE is relative
    Row(4, "step05_cp_ring", dict(cp=2, micro_batch_size=3), MASK | SGD),
    Row(3, "step05_cp_ring", dict(cp=3, cp_mode="ring", documents="reset"), MASK | SGD | dict(seq_len=18)),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="allgather", zero=3, recompute="full"), MASK | TIED),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="balanced", documents="reset", micro_batch_size=2), MASK | SGD),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, cp_mode="balanced", cp_kernel="flash", schedule="zb-h1"), MASK | TIED),
    Row(2, "step07_moe_ep", dict(cp=2, cp_mode="balanced", ep=2), MASK | EXPERTS, does=("equals", "evaluates")),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses", documents="reset"), MASK, does=("equals", "evaluates")),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, documents="reset"), MASK, does=("equals", "evaluates")),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, schedule="interleaved", recompute="full"), MASK | dict(n_layers=4)),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, schedule="zb-h1", documents="reset"), MASK | SGD),
    # variants of pipelines
    Row(2, "step06_pipeline", dict(pp=2, schedule="zb-h1", zero=1)),
    Row(4, "step06_pipeline", dict(pp=4, schedule="zb-h2", zero=3), dict(n_layers=4), does=LAUNCHES),
    Row(2, "step06_pipeline", dict(pp=2, schedule="zbv"), TIED | dict(n_layers=4)),
    Row(2, "step06_pipeline", dict(pp=2, schedule="zbv", zero=3), TIED | dict(n_layers=4), does=LAUNCHES),
    Row(2, "step06_pipeline", UNEVEN_STAGES | dict(zero=2, recompute="full"), TIED | dict(n_layers=5)),
    Row(2, "step06_pipeline", dict(pp=2, schedule="zb-auto", zb_memory=2.0, zero=2), SGD),
    Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipe"), TIED),
    Row(2, "step06_pipeline", dict(pp=2, schedule="rounds", round_size=3), dict(n_layers=4, global_batch_size=7)),
    Row(3, "step06_pipeline", dict(pp=3, schedule="rounds", zero=2), dict(n_layers=6, global_batch_size=2), EXHAUSTIVE),
    Row(2, "step06_pipeline", dict(pp=2, pp_split="1,2", sync="naive"), SGD),
    *(
        Row(4, "step06_pipeline", dict(pp=2, schedule=schedule, zero=zero), TIED | dict(n_layers=4), EXHAUSTIVE)
        for schedule in ("rounds", "ahead", *SPLIT, "dualpipev", "v-half")
        for zero in (0, 1, 2, 3)
    ),
    *(
        Row(4, "step07_moe_ep", dict(pp=2, ep=2, schedule=name, zero=zero), EXPERTS | dict(n_layers=4), EXHAUSTIVE)
        for name in ("rounds", *SPLIT, "v-min")
        for zero in (0, 1, 2, 3)
    ),
    Row(4, "step07_moe_ep", dict(pp=4, schedule="dualpipe", zero=2), EXPERTS | dict(n_layers=4)),
    Row(4, "step07_moe_ep", dict(pp=2, tp=2, schedule="zb-h2", zero=1), EXPERTS | TIED),
    Row(4, "step07_moe_ep", dict(pp=2, cp=2, ep=2, schedule="dualpipe", zero=3), EXPERTS | TIED, does=LAUNCHES),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, schedule="zb-h2", zero=3, recompute="full"), EXPERTS | TIED),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, schedule="dualpipev", zero=2), TIED | SGD | dict(n_layers=4)),
    Row(2, "step06_pipeline", dict(pp=2, schedule="v-half"), dict(n_layers=4)),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, schedule="v-min", zero=3), EXPERTS | TIED | dict(n_layers=4)),
    Row(4, "step06_pipeline", dict(pp=2, tp=2) | PARTED, TIED, swept=("evaluates",)),
    Row(
        4, "step06_pipeline", dict(pp=2, tp=2, compress_activations="bf16", schedule="zbv") | PARTED, SGD | EXACT | DEEP
    ),
    # variants of experts
    Row(4, "step07_moe_ep", dict(cp=2, ep=4, ep_mode="rows", zero=3), EXPERTS),
    Row(4, "step07_moe_ep", dict(tp=2, ep=2, ep_mode="rows"), EXPERTS | dict(capacity_factor=0.6)),
    Row(4, "step07_moe_ep", dict(cp=2, ep=2, ep_mode="allgather", zero=1), EXPERTS | SGD),
    Row(4, "step07_moe_ep", dict(ep=4, ep_mode="nodes", recompute="full"), GROUPS),
    Row(4, "step07_moe_ep", dict(pp=2, tp=2, ep=2, ep_mode="nodes", schedule="zb-h1", zero=3), EXPERTS | TIED),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, schedule="dualpipe", ep_overlap=True, zero=2), EXPERTS | TIED),
    Row(8, "step07_moe_ep", dict(pp=2, tp=2, ep=2, schedule="zbv", ep_overlap=True), EXPERTS | SGD | DEEP, EXHAUSTIVE),
    Row(4, "step07_moe_ep", dict(pp=2, tp=2, ep=2, **AHEAD, zero=3, zero_keep=True), EXPERTS | dict(recompute="full")),
    Row(2, "step07_moe_ep", dict(ep=2, capacity_factor=4.0), EXPERTS, does=LAUNCHES),  # no choice is dropped
    Row(4, "step07_moe_ep", dict(cp=2, ep=2), EXPERTS | BIAS | dict(capacity_factor=0.6)),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, schedule="dualpipe", zero=2), EXPERTS | BIAS | dict(z_loss=0.1)),
    Row(4, "step07_moe_ep", dict(tp=2, cp=2, zero=2), EXPERTS | dict(shared_experts=1, z_loss=0.1, balance="none")),
    Row(4, "step07_moe_ep", dict(ep=4, ep_mode="rows", recompute="full"), GROUPS),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, ep_mode="rows", schedule="zbv", zero=3), GROUPS | dict(shared_experts=2)),
]
