"""The table of layouts and behaviours: each row must do the same as one process.

A row covers what pairs of flags (pairs.py) do not: a lossy technique with its bound, other sizes and numbers of ranks,
or a behaviour besides `equals`. More layouts of the course alone are in tests/test_step0*.py.

Row(ranks, step, layout, base)     `layout`: flags of the tested run alone; `base`: flags that it shares with the one
                                   process with which it is compared
"""

from typing import Any, NamedTuple

EQUALS = ("equals",)  # names in BEHAVIOURS of test_layouts.py
ALL = ("equals", "drifts", "stays_near", "evaluates", "goes_on")
STAYS_NEAR, EVALUATES = (("equals", other) for other in ("stays_near", "evaluates"))
MEETS = dict(sync="diloco", inner_steps=1, outer_lr=1.0, outer_momentum=0.0)
NEAR = dict(dtype="bf16", optimizer="adamw", lr=0.01, steps=3)  # how `stays_near` trains
FROZEN = dict(patch="frozen")  # see PATCHES in faults.py
SGD, TIED = dict(optimizer="sgd", lr=0.5), dict(tied=True)
UNCLIPPED = SGD | dict(grad_clip=0.0)
EXPERTS, MUON = dict(experts=4), dict(optimizer="muon")
LOSSY = (
    (dict(compress="topk", topk_fraction=1.0), 0.0),  # loses nothing, but sends the same kind of messages
    (dict(compress="bf16"), 0.02),
    (dict(compress="int8"), 0.2),
    (dict(compress="topk", topk_fraction=0.8), 0.4),
)
SLOW = dict(optimizer="sgd", lr=0.1, global_batch_size=24)  # a small lr, so that errors hardly grow
BIAS = dict(balance="bias", bias_speed=0.1)
GROUPS = dict(experts=8, experts_per_token=3, expert_groups=4, groups_per_token=2, n_layers=4, moe_every=2)
WINDOW = dict(window=7)
MASK = dict(documents="mask", end_token=32)  # each space ends a document
DROP = dict(dropout=0.2)


class Row(NamedTuple):
    """A layout, the flags that it shares with its reference, and the behaviours that are tested."""

    ranks: int
    step: str
    layout: dict[str, Any] = {}  # noqa: RUF012
    base: dict[str, Any] = {}  # noqa: RUF012
    bound: float = 0.0  # relative error allowed to a lossy technique; 0: the bound of the dtype
    does: tuple[str, ...] = EQUALS


def sized(row: Row) -> Row:
    """Set the batch size and the number of layers, if `base` lacks them. With a pipeline, both are larger."""
    pp, cp, tp, size = (row.layout.get(name, 1) for name in ("pp", "cp", "tp", "micro_batch_size"))
    batch = row.ranks // (pp * cp * tp) * max(3, 2 * pp) * size
    return row._replace(base=dict(global_batch_size=batch, n_layers=2 + (pp > 1)) | row.base)


ROWS = [
    # all behaviours, for one or two layouts of each step from 2 to 7
    Row(2, "step02_ddp", dict(bucket_mb=0.01), does=ALL),
    Row(2, "step03_zero", dict(zero=3), TIED, does=ALL),
    Row(4, "step04_tp_sp", dict(tp=2, zero=1), does=ALL),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, zero=2), TIED, does=ALL),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, zero=1), TIED, does=ALL),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, schedule="zb-h1"), does=ALL),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=3), EXPERTS | dict(aux_loss_coeff=0.0), does=ALL),
    # parameters that do not train
    Row(4, "step06_pipeline", dict(pp=2, tp=2, schedule="zb-h2", zero=2), FROZEN | TIED),
    # step 1: variants of the trainer
    Row(2, "step06_pipeline", dict(zero=1, dtype="bf16"), bound=0.05, does=("goes_on",)),
    Row(2, "step02_ddp", dict(compress="int8"), does=("goes_on",)),
    Row(2, "step03_zero", dict(zero=2, compress="topk"), does=("goes_on",)),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, loss_chunk=5), TIED, does=EVALUATES),
    Row(3, "step03_zero", dict(zero=2), MUON),
    Row(1, "step01_single_gpu", dict(dtype="fp16"), SLOW, bound=0.05),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, zero=2, dtype="fp16", loss_chunk=5), SLOW | EXPERTS, bound=0.1),
    Row(4, "step06_pipeline", dict(pp=2, cp=2, recompute="full"), DROP | TIED, does=EVALUATES),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, recompute="offload", zero=3), TIED, does=EVALUATES),
    # variants of gradient sums
    Row(3, "step02_ddp", dict(sync="tree"), SGD),
    # DiLoCo: ranks of dp that meet after each step
    Row(3, "step02_ddp", MEETS, TIED | UNCLIPPED, does=("meets",)),
    Row(2, "step02_ddp", dict(sync="diloco", inner_steps=1), does=("goes_on",)),
    Row(4, "step04_tp_sp", MEETS | dict(tp=2), UNCLIPPED, does=("meets",)),
    Row(4, "step05_cp_ring", MEETS | dict(cp=2), UNCLIPPED, does=("meets",)),
    Row(4, "step06_pipeline", MEETS | dict(pp=2), TIED | UNCLIPPED, does=("meets",)),
    Row(4, "step07_moe_ep", MEETS | dict(cp=2), EXPERTS | UNCLIPPED, does=("meets",)),
    *(Row(3, "step02_ddp", dict(bucket_mb=0.001, **lossy), SLOW, bound=bound) for lossy, bound in LOSSY),
    # variants of ZeRO
    Row(2, "step03_zero", dict(zero=3, zero_keep=True), TIED | SGD, does=EVALUATES),
    Row(2, "step03_zero", dict(zero=3, offload_optimizer="cpu", offload_params="cpu"), SGD, does=STAYS_NEAR),
    # variants of tensor parallelism
    Row(2, "step04_tp_sp", dict(tp=2, compress_activations="bf16"), SGD, bound=0.01),
    Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), SGD, bound=0.03),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, compress_activations="int8", sp=False), SGD, bound=0.03),
    Row(4, "step04_tp_sp", dict(tp=4, zero=1), SGD),  # two key/value heads for four ranks
    # variants of context parallelism
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", recompute="full"), TIED, does=STAYS_NEAR),
    Row(4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", sp=False), dict(seq_len=14)),  # 7 tokens on a rank of cp
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="allgather", zero=3), SGD, does=STAYS_NEAR),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), SGD, does=STAYS_NEAR),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="ulysses", zero=2)),  # twice as many ranks as key/value heads
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp", cp_kernel="flash", documents="mask", zero=3), MASK | TIED),
    Row(4, "step05_cp_ring", dict(cp=4, cp_mode="ring"), dict(window=5) | TIED),  # a rank sends all its 4 tokens
    Row(3, "step05_cp_ring", dict(cp=3, cp_mode="ring"), MASK | SGD | dict(seq_len=18)),
    Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), MASK, does=EVALUATES),
    # variants of pipelines
    Row(4, "step06_pipeline", dict(pp=4, schedule="zb-h2", zero=3), dict(n_layers=4)),
    Row(2, "step06_pipeline", dict(pp=2, schedule="rounds", round_size=3), dict(n_layers=4, global_batch_size=7)),
    # variants of experts
    Row(4, "step07_moe_ep", dict(cp=2, ep=4, ep_mode="rows", zero=3), EXPERTS),
    Row(4, "step07_moe_ep", dict(ep=4, ep_mode="nodes", recompute="full"), GROUPS),
    Row(2, "step07_moe_ep", dict(ep=2, capacity_factor=4.0), EXPERTS),  # no choice is dropped
    # techniques that have kernels or streams of their own on a GPU: try them there with `--device cuda -m ""`
    Row(4, "step05_cp_ring", dict(cp=4, cp_kernel="flash"), does=STAYS_NEAR),
    Row(2, "step05_cp_ring", dict(cp=2, cp_kernel="flash"), MASK, does=STAYS_NEAR),
    Row(2, "step04_tp_sp", dict(tp=2, fused_gradients=True), does=STAYS_NEAR),
    Row(4, "step04_tp_sp", dict(tp=2, tp_overlap=True), does=STAYS_NEAR),
    Row(4, "step03_zero", dict(zero=1, zero_overlap=True), does=STAYS_NEAR),
    Row(4, "step06_pipeline", dict(pp=2, tp=2, schedule="dualpipe", zero=3), dict(n_layers=4), does=STAYS_NEAR),
    Row(4, "step07_moe_ep", dict(ep=2, tp=2, expert_matmul="grouped"), EXPERTS, does=STAYS_NEAR),
    Row(4, "step07_moe_ep", dict(pp=2, ep=2, ep_overlap=3), EXPERTS),
]
