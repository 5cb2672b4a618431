"""Defines a layout (the flags of a run that decide its memory and its time), and lists the legal ones of the planner.

It also finds the stages of each pipeline rank, and the list of actions that the rank runs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import inf
from typing import Any, NamedTuple

from common import UserError
from common.schedules import SCHEDULES, Action, Place, Schedule
from common.trainer import among
from extras.plan.gpus import NODE
from extras.plan.shapes import Shape, divisors, visited_weights

RECOMPUTE = ("none", "elementwise", "full")  # no "selective": it recomputes scores, and fused attention stores none
BOTH_ENDS = ("zigzag", "allgather", "usp")  # modes in which a rank has a chunk of each half of the sequence


@dataclass(frozen=True)
class Layout:
    """The flags of step 7 that decide memory and time, as far as the planner models them."""

    pp: int = 1  # ranks that share the layers
    cp: int = 1  # ranks that share each sequence
    tp: int = 1  # ranks that share each matrix
    ep: int = 1  # ranks, of dp x cp x tp, that share the experts
    zero: int = among(dict.fromkeys(range(4)), 1)  # ZeRO stage: 0 shards nothing, ... 3 everything
    micro_batch_size: int = 1  # sequences per forward and backward
    global_batch_size: int = 1  # sequences per step, all ranks together
    schedule: str = among(SCHEDULES, "1f1b")  # order of the work in a pipeline
    chunks: int = 2  # stages on each rank, for schedules that leave it open
    recompute: str = among(dict.fromkeys(RECOMPUTE), "none")  # what the backward pass computes again
    sp: bool = True  # split the tokens over tp between the blocks
    cp_mode: str = "zigzag"  # how queries reach the keys of other ranks; the planner times only zigzag
    zero_replicas: int = 1  # groups of ranks, each with all slices of ZeRO; the planner assumes 1
    dp: int = 1  # ranks with different sequences: the number of all ranks divided by pp x cp x tp

    @property
    def world(self) -> int:
        """The number of all ranks. ep does not add to it: its ranks are taken from dp x cp x tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def micro_batches(self) -> int:
        """Micro-batches that a rank computes in a step."""
        return -(-self.global_batch_size // self.dp // self.micro_batch_size)

    @property
    def way(self) -> tuple[str, int, int]:
        """The flags that describe the pipeline: --schedule, --pp and --chunks."""
        return self.schedule, self.pp, self.chunks

    def flags(self) -> str:
        """The layout as flags of step 7, or of step 6 for a model without experts."""
        always = ("pp", "cp", "tp", "zero", "micro_batch_size", "global_batch_size", "recompute")
        open_chunks, words = self.pp > 1 and has_chunks(self.schedule), []
        for field in fields(self)[:-1]:  # without dp, which follows from the others
            name, value = field.name, getattr(self, field.name)
            if name in always or (value != field.default and (name != "chunks" or open_chunks)):
                flag = name.replace("_", "-")
                words.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag} {value}")
        words += ["--cp-kernel flash"] * (self.cp > 1)  # as the predictions assume
        return " ".join(words)


class Network(NamedTuple):
    """The ranks of one collective: how many there are, and how many of them share a node."""

    ranks: int
    in_node: int

    @property
    def leaves(self) -> bool:
        """Whether the ranks are on more than one node."""
        return self.ranks > self.in_node

    @property
    def nodes(self) -> int:
        """The number of nodes that the ranks are on."""
        return -(-self.ranks // self.in_node)


# Dimension -> (how many ranks it has, by how much the numbers of two neighbours differ). ZeRO shards the parameters of
# experts over the dp x cp x tp / ep ranks of "expert shard", and all others over the dp x cp ranks of "shard".
STRIDES = {
    "tp": lambda x: (x.tp, 1),
    "cp": lambda x: (x.cp, x.tp),
    "pp": lambda x: (x.pp, x.tp * x.cp * x.dp),
    "ep": lambda x: (x.ep, 1),
    "shard": lambda x: (x.dp * x.cp, x.tp),
    "expert shard": lambda x: (x.dp * x.cp * x.tp // x.ep, x.ep),
}


def network(x: Layout, dim: str, node: int = NODE) -> Network:
    """How the ranks of a dimension are spread over nodes of `node` ranks."""
    ranks, stride = STRIDES[dim](x)
    return Network(ranks, max(1, min(ranks, node // stride)))


@lru_cache(maxsize=4096)
def refusal(actions: Callable, pp: int, n: int, v: int) -> str:
    """The reason why a schedule cannot have n micro-batches and v stages on each of pp ranks; "" if it can."""
    few = min(n, 2 * pp + n % pp)  # if a schedule can have these, it can have n; a short list takes less time
    if few < n and not refusal(actions, pp, few, v):
        return ""
    try:
        actions(pp, n, v, 0)
    except UserError as error:
        return str(error)
    return ""


def broken(m: Shape, x: Any, schedule: Schedule) -> Iterator[str]:
    """Yield a message for each rule that the sizes of a layout break.

    The planner applies these rules, and so does extras/services/legal.py before a run.
    """
    pp, dp, cp, tp, seq, batch = x.pp, x.dp, x.cp, x.tp, m.seq_len, x.global_batch_size
    cut, here = 2 * cp if x.cp_mode in BOTH_ENDS else cp, seq // cp  # parts of a sequence; tokens of it on a rank
    heads, kv_heads = m.n_heads // tp, max(1, m.n_kv_heads // tp)
    v, ranks = schedule.v if pp > 1 else 1, dp * cp * tp

    # what is split over dp, tp and cp
    if batch % dp:
        yield f"--global-batch-size {batch} must be a multiple of the {dp} ranks of dp"
    if m.n_kv_heads % tp and (tp % m.n_kv_heads or m.n_heads % tp):
        both = f"the {m.n_heads} heads, and divide the {m.n_kv_heads} key/value heads"
        yield f"--tp {tp} must divide {both} or be a multiple of them"
    if x.sp and seq % tp:
        yield f"--tp {tp} must divide the {seq} tokens of a sequence; or use --no-sp"
    if x.sp and cp > 1 and here % tp:
        yield f"--tp {tp} must divide the {here} tokens that --cp leaves a rank: use --no-sp"
    if cp > 1 and seq % cut:
        yield f"--cp {cp} --cp-mode {x.cp_mode}: the sequence length {seq} must be a multiple of {cut}"
    if cp > 1 and x.cp_mode == "ulysses" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        yield f"--cp-mode ulysses: --cp {cp} does not divide {heads} heads ({kv_heads} kv): use zigzag"

    if m.n_layers < pp * v:
        yield f"--pp {pp}: {m.n_layers} layers for {pp * v} stages: lower --pp or --chunks"
    if reason := refusal(schedule.actions, pp, x.micro_batches, v):
        yield reason
    if dp * cp % x.zero_replicas:
        yield f"--zero-replicas {x.zero_replicas} must divide the {dp * cp} ranks over which ZeRO cuts"

    # experts
    if x.ep > 1 and not any(map(m.has_experts, range(m.n_layers))):
        yield f"--ep {x.ep}: no layer has experts; lower --dense-layers or --moe-every"
    if m.experts and (m.experts % x.ep or ranks % x.ep):
        yield f"--ep {x.ep} must divide --experts {m.experts}, and the {ranks} ranks of dp x cp x tp"
    if m.experts and m.experts_per_token > m.experts:
        yield f"--experts-per-token {m.experts_per_token} is more than --experts {m.experts}"
    if m.experts and batch // dp % x.micro_batch_size:
        part = f"--micro-batch-size {x.micro_batch_size} must divide the {batch // dp} sequences of a rank"
        yield f"{part}: the auxiliary loss is a mean over them"
    if m.experts and here % tp:
        yield f"--no-sp: --tp {tp} must divide the {here} tokens of a sequence, to route them"


def illegal(m: Shape, x: Layout) -> str:
    """The reason why a layout's sizes do not fit, or why the planner cannot time it; "" if it is legal."""
    schedule = schedule_of(x.schedule, x.chunks)
    if message := next(broken(m, x, schedule), ""):
        return message
    return f"--schedule {x.schedule}: the planner does not know R; use --dry-run" if "R" in schedule.costs else ""


@lru_cache
def schedule_of(name: str, chunks: int) -> Schedule:
    """The schedule of this name, for layouts with this number of chunks."""
    return SCHEDULES[name](Layout(chunks=chunks))


def has_chunks(name: str) -> bool:
    """Whether --chunks decides how many stages a rank has under this schedule."""
    return schedule_of(name, 99).v == 99


@lru_cache(maxsize=4096)
def balanced(m: Shape, n: int) -> tuple[int, ...]:
    """How many layers each of n stages gets, so that the most expensive stage costs as little as possible.

    A layer's cost is the number of its multiply-adds for one token. The cost of the last layer includes the head's.
    """
    costs = [visited_weights(m, m.has_experts(layer)) + 2 * m.seq_len * m.dim for layer in range(m.n_layers)]
    costs[-1] += m.vocab_size * m.dim
    until, limit = [0, *accumulate(costs)], sum(costs) / n + max(costs)  # in a best split no stage costs more
    best = {0: (0, 0, ())}  # number of layers so far -> (largest cost of a stage, sum of squares, layers of each stage)
    for stage in range(n):
        best = {
            stop: min(
                (
                    (max(dearest, cost), squares + cost**2, (*lengths, stop - start))
                    for start, (dearest, squares, lengths) in best.items()
                    if start < stop and (cost := until[stop] - until[start]) <= limit
                ),
                default=(inf, inf, ()),
            )
            for stop in range(stage + 1, m.n_layers - n + stage + 2)
        }
    return best[m.n_layers][2]


def balance(m: Shape, places: list[Place]) -> list[Place]:
    """Give each stage new layers, so that all stages cost about the same (--pp-split cost, services/stages.py).

    Both directions of dualpipe get the same layers.
    """
    bounds = [0, *accumulate(balanced(m, len(places) // sum(place.before is None for place in places)))]
    stages = [range(*bound) for bound in pairwise(bounds)]
    return [place._replace(layers=stages[s % len(stages)]) for s, place in enumerate(places)]


class Pipeline(NamedTuple):
    """The properties of a pipeline that --schedule, --pp and --chunks decide; they do not depend on the model."""

    places: list[Place]  # of all stages, for a model with just enough layers
    ways: int  # directions in which micro-batches pass the ranks; if 2, pairs of ranks hold the same weights
    split: bool  # whether the gradients of weights are computed by separate actions, W

    @property
    def depth(self) -> int:
        """The number of stages that a micro-batch passes."""
        return len(self.places) // self.ways


@lru_cache(maxsize=4096)
def pipeline_of(schedule: str, pp: int, chunks: int) -> Pipeline:
    """The pipeline of `pp` ranks under a schedule."""
    entry = schedule_of(schedule, chunks)
    places = entry.places(pp * max(2, chunks), pp, entry.v if pp > 1 else 1)
    split = any(action.kind == "W" for action in lists_of(schedule, pp, chunks, 2 * pp)[0])
    return Pipeline(places, sum(place.before is None for place in places), split)


@lru_cache(maxsize=4096)
def rank_places(m: Shape, schedule: str, pp: int, chunks: int) -> tuple[dict[int, Place], ...]:
    """For each pipeline rank, its stages: {number of the stage: place}."""
    entry = schedule_of(schedule, chunks)
    places = balance(m, entry.places(m.n_layers, pp, entry.v if pp > 1 else 1))
    return tuple({s: place for s, place in enumerate(places) if place.rank == rank} for rank in range(pp))


@lru_cache(maxsize=4096)
def lists_of(schedule: str, pp: int, chunks: int, n: int) -> list[list[Action]]:
    """The lists of actions of all ranks, for n micro-batches."""
    entry = schedule_of(schedule, chunks)
    return [entry.actions(pp, n, entry.v if pp > 1 else 1, rank) for rank in range(pp)]


def meshes(m: Shape, world: int, batch: int) -> Iterator[Layout]:
    """Yield every legal mesh, once for each micro-batch size that divides a rank's number of sequences.

    Flags other than the sizes of the mesh and of the batch have their defaults.
    """
    for pp in [d for d in divisors(world) if d <= m.n_layers]:
        for tp in [d for d in divisors(world // pp) if m.n_heads % d == 0]:
            for cp in [d for d in divisors(world // pp // tp) if d == 1 or m.seq_len % (2 * d) == 0]:
                dp = world // pp // tp // cp
                for ep in [d for d in divisors(max(1, m.experts)) if dp * cp * tp % d == 0]:
                    x = Layout(pp, cp, tp, ep, global_batch_size=batch, dp=dp)
                    if not illegal(m, x):
                        yield from (replace(x, micro_batch_size=size) for size in divisors(batch // dp))


def zero_ways(m: Shape, mesh: Layout) -> list[int]:
    """The ZeRO stages to try: only 0 if there are no ranks to shard over. The last has the smallest training state."""
    shards = [network(mesh, dim).ranks for dim in ("shard", "expert shard")[: 1 + (m.experts > 0)]]
    return [0] if max(shards) == 1 else [0, 1, 2, 3]


def variants(m: Shape, mesh: Layout) -> list[Layout]:
    """All layouts to try on a mesh. They differ in the schedule, in --chunks and in the stage of ZeRO."""
    ways = [("1f1b", 1)] if mesh.pp == 1 else product(SCHEDULES, divisors(m.n_layers // mesh.pp))
    each = [replace(mesh, schedule=name, chunks=v) for name, v in ways]
    legal = [x for x in each if not illegal(m, x) and has_chunks(x.schedule) == (x.chunks > 1)]
    return [replace(x, zero=zero) for x, zero in product(legal, zero_ways(m, mesh))]
