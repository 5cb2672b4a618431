"""A layout is the flags of a run that decide its memory and its time; the planner compares layouts.

This file says which layouts are legal, which layers and which actions each pipeline rank has, and
over how many nodes the ranks of each dimension are spread. As in the course's mesh, ranks are
counted with tp innermost, then cp, dp and pp.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from common import UserError
from common.flags import AT_LEAST_2, flag, parse
from common.schedules import interleaved, one_f_one_b
from extras.plan.gpus import NODE
from extras.plan.shapes import Shape, divisors

ORDERS = {"1f1b": one_f_one_b, "interleaved": interleaved}  # of the course
# Selective recomputation keeps matrix products and attention.
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Flags:
    """The flags of step 7 that decide memory and time, with the defaults of step 7."""

    pp: int = flag(1, "ranks that share the layers", least=1)
    cp: int = flag(1, "ranks that share each sequence", least=1)
    tp: int = flag(1, "ranks that share each matrix", least=1)
    ep: int = flag(1, "ranks, of dp x cp x tp, that share the experts", least=1)
    zero: int = flag(0, "ZeRO stage: 0 shards nothing, 3 shards everything")
    micro_batch_size: int = flag(4, "sequences per forward and backward", least=1)
    global_batch_size: int = flag(0, "sequences per step, all ranks together; 0: the plan's")
    schedule: str = flag("1f1b", "order of the work in a pipeline", ORDERS)
    chunks: int = flag(2, "stages on each rank", least=1, needs={"schedule": ["interleaved"]})
    recompute: str = flag("none", "what backward computes again", RECOMPUTE)
    sp: bool = flag(True, "between the blocks, shard the tokens over tp", needs={"tp": AT_LEAST_2})


@dataclass(frozen=True)
class Layout(Flags):
    """Flags, and what follows from them and the number of GPUs."""

    dp: int = 1  # ranks with different sequences: all that the other sizes leave

    @property
    def world(self) -> int:
        """The number of all ranks. ep adds none: its ranks are taken from dp x cp x tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a rank computes in a step."""
        return -(-self.global_batch_size // self.dp // self.micro_batch_size)

    @property
    def stages(self) -> int:
        """The number of stages on each pipeline rank (v)."""
        return self.chunks if self.schedule == "interleaved" and self.pp > 1 else 1

    def flags(self) -> str:
        """The flags that differ from the defaults of step 7 (without experts, of step 6)."""
        words = []
        for field in fields(Flags):
            value = getattr(self, field.name)
            if value != field.default:
                name = field.name.replace("_", "-")
                words.append("--no-sp" if field.name == "sp" else f"--{name} {value}")
        return " ".join(words)


class Network(NamedTuple):
    """The ranks of one collective: how many there are, and how many of them share a node."""

    ranks: int
    in_node: int

    @property
    def nodes(self) -> int:
        """The number of nodes that the ranks are on."""
        return -(-self.ranks // self.in_node)


def network(x: Layout, dim: str) -> Network:
    """How the ranks of a dimension are spread over nodes.

    ZeRO shards the weights of experts over "expert shard", dp x cp x tp / ep ranks, and all other
    weights over "shard", dp x cp ranks.
    """
    ranks, stride = {  # stride: by how much the numbers of two neighbours differ
        "tp": (x.tp, 1),
        "cp": (x.cp, x.tp),
        "pp": (x.pp, x.tp * x.cp * x.dp),
        "ep": (x.ep, 1),
        "shard": (x.dp * x.cp, x.tp),
        "expert shard": (x.dp * x.cp * x.tp // x.ep, x.ep),
    }[dim]
    return Network(ranks, max(1, min(ranks, NODE // stride)))


def rank_stages(m: Shape, p: int, v: int, rank: int) -> dict[int, range]:
    """A rank's stages, of v on each of p: {number of the stage: its layers}, cut as in step 6."""
    n_stages = p * v
    stages = {}
    for stage in range(rank, n_stages, p):
        bounds = [m.n_layers * n // n_stages for n in (stage, stage + 1)]
        stages[stage] = range(*bounds)
    return stages


@lru_cache(maxsize=100_000)
def rank_counts(m: Shape, p: int, v: int) -> np.ndarray:
    """What each of p ranks with v stages has, [p, 4]: dense layers, layers with experts, head,
    embedding.
    """
    counts = []
    for rank in range(p):
        layers = [n for stage in rank_stages(m, p, v, rank).values() for n in stage]
        experts = sum(m.has_experts(n) for n in layers)
        counts.append([len(layers) - experts, experts, m.n_layers - 1 in layers, 0 in layers])
    return np.array(counts)


def broken_size_rules(m: Shape, x: Layout) -> Iterator[str]:
    """Yield a message for each rule that the sizes of a layout break."""
    tokens = m.seq_len // x.cp  # of a sequence, on a rank
    if m.n_kv_heads % x.tp and (x.tp % m.n_kv_heads or m.n_heads % x.tp):
        yield f"--tp {x.tp} must divide {m.n_heads} heads, and fit {m.n_kv_heads} key/value heads"
    if x.cp > 1 and m.seq_len % (2 * x.cp):
        yield f"--cp {x.cp}: the sequence length {m.seq_len} must be a multiple of {2 * x.cp}"
    if x.sp and tokens % x.tp:
        yield f"--tp {x.tp} must divide a rank's {tokens} tokens, or use --no-sp"
    if m.n_layers < x.pp * x.stages:
        yield f"--pp {x.pp}: {m.n_layers} layers for {x.pp * x.stages} stages: lower pp or chunks"
    if x.zero > 3:
        yield f"--zero {x.zero}: the stages are 0, 1, 2 and 3"
    if x.ep > 1 and not m.experts:
        yield f"--ep {x.ep}: the model has no experts; give --experts"


def broken_batch_rules(x: Layout) -> Iterator[str]:
    """Yield a message for each rule about the batch that a layout breaks."""
    if x.global_batch_size % x.dp:
        yield f"--global-batch-size {x.global_batch_size} must be a multiple of {x.dp} ranks of dp"
    if x.stages > 1 and x.micro_batches % x.pp:
        yield f"--schedule interleaved: --pp {x.pp} must divide the {x.micro_batches} micro-batches"
    if x.global_batch_size // x.dp % x.micro_batch_size:  # equal ones are timed
        yield f"--micro-batch-size {x.micro_batch_size} must divide the sequences of a rank"


def broken_expert_rules(m: Shape, x: Layout) -> Iterator[str]:
    """Yield a message for each rule about experts that the sizes of a layout break."""
    inner = x.dp * x.cp * x.tp
    if m.experts % x.ep or inner % x.ep:
        yield f"--ep {x.ep} must divide --experts {m.experts} and the {inner} ranks of dp x cp x tp"
    if m.experts_per_token > m.experts:
        yield f"--experts-per-token {m.experts_per_token} is more than --experts {m.experts}"
    if m.dense_layers >= m.n_layers:
        yield "no layer has experts: lower --dense-layers"
    if x.tp > 1 and not x.sp:
        yield "--no-sp: ranks of tp would all route the same tokens: leave it out"


def illegal(m: Shape, x: Layout) -> str:
    """Why a layout's sizes do not fit the model or one another; "" if they do."""
    broken = [*broken_size_rules(m, x), *broken_batch_rules(x)]
    if m.experts:
        broken += broken_expert_rules(m, x)
    return broken[0] if broken else ""


def read_layout(text: str, m: Shape, world: int, batch: int = 0) -> Layout:
    """The layout that flags describe, on `world` GPUs. Raises UserError if it is not legal.

    `batch`: the global batch size if the flags do not give it.
    """
    given = parse(Flags, text.split())
    inner = given.pp * given.cp * given.tp
    if world % inner:
        raise UserError(f"pp x cp x tp = {inner} does not divide --gpus {world}: change one")
    x = Layout(**vars(given), dp=world // inner)
    x = replace(x, global_batch_size=x.global_batch_size or batch)
    reason = illegal(m, x)
    if reason:
        raise UserError(reason)
    return x


def meshes(m: Shape, world: int, batch: int) -> Iterator[Layout]:
    """Yield every legal mesh, once for each micro-batch size that divides a rank's sequences.

    Flags other than the sizes of the mesh and of the batch have their defaults.
    """
    for pp, cp, tp in product(divisors(world), repeat=3):
        if world % (pp * cp * tp):
            continue
        dp = world // (pp * cp * tp)
        for ep in divisors(max(1, m.experts)):
            sizes = dict(pp=pp, cp=cp, tp=tp, ep=ep, dp=dp, global_batch_size=batch)
            x = Layout(**sizes, micro_batch_size=1)
            if not illegal(m, x):
                for size in divisors(batch // dp):
                    yield replace(x, micro_batch_size=size)


def variants(m: Shape, mesh: Layout) -> list[Layout]:
    """All layouts to try on a mesh: they differ in the schedule, --chunks and the stage of ZeRO.

    ZeRO is not tried if there are no ranks to shard over.
    """
    zeros = [0] if mesh.dp * mesh.cp == 1 else [0, 1, 2, 3]
    orders = [mesh]
    if mesh.pp > 1:
        for chunks in divisors(m.n_layers // mesh.pp):
            interleaving = replace(mesh, schedule="interleaved", chunks=chunks)
            if chunks > 1 and not illegal(m, interleaving):
                orders.append(interleaving)
    return [replace(x, zero=zero) for x, zero in product(orders, zeros)]
