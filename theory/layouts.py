"""A layout: how many ranks each dimension has, and what else decides memory and time. Which layouts are legal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from common.schedules import chunks_per_rank, place_stages
from theory.flops import balanced_layers, matmul_weights
from theory.gpus import NODE
from theory.shapes import Shape, layer_counts


@dataclass(frozen=True)
class Layout:
    """One way to train: the flags of step 7 (`mbs`, `gbs`: sequences of a micro-batch, of a step)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 1
    mbs: int = 1
    gbs: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: str = "none"
    sp: bool = True
    cp_mode: str = "zigzag"
    replicas: int = 1  # of what ZeRO cuts (--zero-replicas)

    @property
    def world(self) -> int:
        """All ranks; ep lies inside dp x cp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return self.gbs // self.dp // self.mbs

    def flags(self) -> str:
        """What to write after torchrun's script, step07_moe_ep.py."""
        sizes = f"--pp {self.pp} --cp {self.cp} --tp {self.tp} --ep {self.ep} --zero {self.zero}"
        batch = f"--micro-batch-size {self.mbs} --global-batch-size {self.gbs}"
        pipeline = f" --schedule {self.schedule} --chunks {self.chunks}" if self.pp > 1 else ""
        sp = " --no-sp" if self.tp > 1 and not self.sp else ""
        cp_mode = f" --cp-mode {self.cp_mode}" if self.cp > 1 else ""
        replicas = f" --zero-replicas {self.replicas}" if self.replicas > 1 else ""
        return f"{sizes} {batch}{pipeline} --recompute {self.recompute}{sp}{cp_mode}{replicas}"


class Network(NamedTuple):
    """The ranks of one collective: how many, how many of them in a node, and whether they leave it."""

    ranks: int
    in_node: int

    @property
    def leaves(self) -> bool:
        """Whether its ranks are on more than one node."""
        return self.ranks > self.in_node


# (how many ranks, how far apart) of a dimension. tp is innermost, then cp, dp, pp; all others lie in dp x cp
STRIDES = {
    "tp": lambda x: (x.tp, 1),
    "cp": lambda x: (x.cp, x.tp),
    "dp": lambda x: (x.dp, x.tp * x.cp),
    "pp": lambda x: (x.pp, x.tp * x.cp * x.dp),
    "ep": lambda x: (x.ep, x.tp),
    "data": lambda x: (x.dp * x.cp, x.tp),
    "shard": lambda x: (x.dp * x.cp // x.replicas, x.tp),  # over which ZeRO cuts; and of the experts:
    "expert shard": lambda x: (x.dp * x.cp // x.ep // x.replicas, x.tp * x.ep),
    "replicas": lambda x: (x.replicas, x.tp * (x.dp * x.cp // x.replicas)),
}


def network(layout: Layout, dim: str) -> Network:
    """Where the ranks of a dimension are."""
    ranks, stride = STRIDES[dim](layout)
    return Network(ranks, max(1, min(ranks, NODE // stride)))


def illegal(m: Shape, layout: Layout) -> str:
    """Why the course's steps refuse a layout, or "": the rules of `check` in services/checks.py, without its words."""
    pp, dp, cp, tp, ep, v = layout.pp, layout.dp, layout.cp, layout.tp, layout.ep, layout.chunks
    heads, kv_heads = m.n_heads // tp, max(1, m.n_kv_heads // tp)
    stages = pp if layout.schedule == "dualpipe" else pp * v
    rules = {
        "the batch cannot be dealt to dp": layout.gbs % (layout.mbs * dp) or layout.gbs < layout.mbs * dp,
        "tp does not divide the heads": m.n_heads % tp,
        "tp does not divide the MLP": m.ffn_dim % tp,
        "tp and the kv heads do not divide": m.n_kv_heads % tp and tp % m.n_kv_heads,
        "tp does not divide the tokens": layout.sp and tp > 1 and (m.seq_len % tp or m.seq_len // cp % tp),
        "cp does not divide the tokens": cp > 1
        and m.seq_len % (2 * cp if layout.cp_mode in ("zigzag", "allgather") else cp),
        "cp has no whole heads": cp > 1
        and layout.cp_mode == "ulysses"
        and (heads % cp or (kv_heads % cp and cp % kv_heads)),
        "the schedule has another number of chunks": v != (chunks_per_rank(layout.schedule) or v) or v < 1,
        "dualpipe wants an even pp": layout.schedule == "dualpipe" and pp % 2,
        "more stages than layers": m.n_layers < stages,
        "ep does not divide dp x cp": dp * cp % ep,
        "ep needs experts": ep > 1 and not layer_counts(m)[True],
        "ep does not divide the experts": ep > 1 and m.experts % ep,
        "the replicas do not divide dp x cp / ep": layout.replicas < 1 or dp * cp // ep % layout.replicas,
        "replicas need ZeRO": layout.replicas > 1 and not layout.zero,
        "tp does not divide an expert": layer_counts(m)[True] and m.expert_width % tp,
    }
    return next((reason for reason, broken in rules.items() if broken), "")


@cache
def divisors(n: int) -> list[int]:
    """All of them, in order."""
    return sorted({d for low in range(1, int(n**0.5) + 1) if n % low == 0 for d in (low, n // low)})


def meshes(m: Shape, world: int, gbs: int) -> Iterator[Layout]:
    """Every legal (pp, dp, cp, tp, ep, micro-batch size), as layouts with all other choices at their defaults."""
    for pp in [d for d in divisors(world) if d <= m.n_layers]:
        for tp in [d for d in divisors(world // pp) if m.n_heads % d == 0]:
            for cp in [d for d in divisors(world // pp // tp) if d == 1 or m.seq_len % (2 * d) == 0]:
                dp = world // pp // tp // cp
                for ep in [d for d in divisors(max(1, m.experts)) if dp * cp % d == 0]:
                    layout = Layout(pp, dp, cp, tp, ep, gbs=gbs)
                    if not illegal(m, layout):
                        yield from (replace(layout, mbs=mbs) for mbs in divisors(gbs // dp))


def schedules(m: Shape, pp: int) -> list[tuple[str, int]]:
    """Every legal schedule of a pipeline, with its chunks; without a pipeline there is nothing to choose."""
    if pp == 1:
        return [("1f1b", 1)]
    found = [("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("zb-h2", 1), ("zbv", 2), ("dualpipe", 2)]
    found += [("interleaved", v) for v in range(2, m.n_layers // pp + 1) if m.n_layers // pp % v == 0]
    return [way for way in found if not illegal(m, Layout(pp=pp, schedule=way[0], chunks=way[1]))]


def zero_stages(mesh: Layout) -> tuple[int, ...]:
    """The stages of ZeRO that differ on a mesh."""
    return (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,)


RECOMPUTE = ("none", "selective", "full")


def variants(m: Shape, mesh: Layout) -> Iterator[Layout]:
    """Every legal schedule, ZeRO stage and recomputation on a mesh."""
    for schedule, chunks in schedules(m, mesh.pp):
        for zero in zero_stages(mesh):
            for recompute in RECOMPUTE:
                yield replace(mesh, schedule=schedule, chunks=chunks, zero=zero, recompute=recompute)


@cache
def split_layers(m: Shape, stages: int) -> tuple[int, ...]:
    """Layers of each stage, as the course deals them by default."""
    return tuple(balanced_layers(m, stages))


@cache
def stage_layers(m: Shape, schedule: str, pp: int, chunks: int, split: str) -> tuple[int, ...]:
    """Layers of each stage of a pipeline, by a recipe's way of dealing them."""
    stages = len(place_stages(schedule, pp, chunks)[0])
    if split == "balanced":
        return split_layers(m, stages)
    if split == "even":
        return tuple(m.n_layers // stages + (i < m.n_layers % stages) for i in range(stages))
    if split == "ends":  # Llama 3, section 3.3.2: one layer less in the first and in the last stage
        even = [(m.n_layers + 2) // stages + (i < (m.n_layers + 2) % stages) for i in range(stages)]
        return tuple(length - (i in (0, stages - 1)) for i, length in enumerate(even))
    one, head = matmul_weights(m)
    share, found = (m.n_layers * one + head) / stages, [0]
    for layer in range(1, m.n_layers + 1):  # nanotron: a stage is closed as soon as its share is reached
        found[-1] += 1
        if layer * one >= share * len(found) and len(found) < stages:
            found.append(0)
    return tuple(found)
