"""The bytes that one rank holds at the highest point of a step, by kind, under the ways of one software.

Of all pipeline ranks the fullest counts. Weights, gradients and optimizer state follow from what the recipe keeps of
each weight and from the ZeRO stage. What a layer keeps for backward is Korthikanti et al. 2022, section 4, with what
came after it: fused attention keeps no scores, SwiGLU has three matrices, RoPE copies queries and keys. How many
micro-batches wait at once is read off the schedule's lists.

The course's own trainer has its own functions, those of theory/memory.py, which its runs print.
"""

import re
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from common.schedules import SCHEDULES, place_stages
from theory import memory, peak
from theory.layouts import Layout, network, stage_layers
from theory.peak_gradients import FirstKept, Sync, Unit, Zero
from theory.peak_layers import Sizes
from theory.recipes import Recipe
from theory.shapes import Shape, end_weights, head_widths, kv_width, layer_weights
from theory.tape import Memory

E = 2  # bytes of an activation
SPLIT = {"zb-h1", "zb-h2", "zbv", "dualpipe"}  # schedules whose weight gradients wait
CONTEXT = int(1.5 * 2**30)  # bytes of CUDA's context and NCCL's buffers, which no framework counts as its own


class Held(NamedTuple):
    """Bytes by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


class Stage(NamedTuple):
    """What one stage is made of."""

    layers: range
    first: bool
    last: bool


@lru_cache(maxsize=4096)
def rank_stages(m: Shape, schedule: str, pp: int, chunks: int, split: str) -> tuple[tuple[Stage, ...], ...]:
    """By pipeline rank: its stages, by chunk."""
    lengths = stage_layers(m, schedule, pp, chunks, split)
    held: list[dict[int, Stage]] = [{} for _ in range(pp)]
    for placement in place_stages(schedule, pp, chunks):
        start = 0
        for number, place in enumerate(placement):
            layers = range(start, start + lengths[number])
            held[place.rank][place.chunk] = Stage(layers, number == 0, number == len(placement) - 1)
            start += lengths[number]
    return tuple(tuple(stages[chunk] for chunk in sorted(stages)) for stages in held)


@lru_cache(maxsize=100_000)
def waiting_states(schedule: str, p: int, m: int, v: int, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The largest states of a rank: for each chunk, micro-batches kept whole, and those kept for their W alone.

    What waits does not grow with more than 4 p micro-batches, except with afab.
    """
    count = m if schedule == "afab" else min(m, 4 * p + m % p)
    held = [[0, 0] for _ in range(v)]
    states = set()
    for kind, _, chunk in SCHEDULES[schedule](p, count, v, rank):
        if kind == "F":
            held[chunk][0] += 1
            states.add(tuple(tuple(pair) for pair in held))
        elif kind == "B":
            held[chunk][0] -= 1
            held[chunk][1] += 1
        else:
            held[chunk][kind == "W"] -= 1
    flat = {sum(state, ()): state for state in states}
    largest = [a for a in flat if not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for b in flat)]
    return tuple(flat[a] for a in largest)


@lru_cache(maxsize=10_000)
def layers_by_kind(m: Shape, stage: Stage) -> tuple[tuple[bool, int], ...]:
    """(Whether they have experts, how many) of a stage's layers, for the kinds that it has."""
    count = sum(m.has_experts(n) for n in stage.layers)
    return tuple((flag, n) for flag, n in ((True, count), (False, len(stage.layers) - count)) if n)


def layer_keeps(m: Shape, layout: Layout, recipe: Recipe, experts: bool, recompute: str) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward, on one rank."""
    tokens, tp = layout.mbs * m.seq_len // layout.cp, layout.tp
    own, (qk, value), kv = (tokens / tp if layout.sp else tokens), head_widths(m), kv_width(m)
    if recompute == "full":
        return E * own * m.dim
    widths = [m.ffn_dim] if not experts else [m.expert_width] * (m.experts_per_token + m.shared_experts)
    wide = sum(widths)
    if recompute == "selective" and recipe.selective == "matmuls":  # input, attention, and every second matmul
        return E * (own * 2 * m.dim + tokens / tp * (2 * value + kv / 2 + wide))
    blocks = tokens if recipe.gathered else own
    norms = own * E * 2 * m.dim + blocks * E * 2 * m.dim + own * 2 * m.dim * m.learned_positions  # dropout's masks
    core = E * (qk + kv + value) + recipe.keeps * (qk + kv / 2) + 4 * m.n_heads
    if m.latent:
        core += E * (2 * m.latent.q_rank + 2 * m.latent.kv_rank + m.latent.rope) * tp
    if not recipe.flash and recompute != "selective":
        core += 5 * m.n_heads * m.seq_len  # softmax, dropout's mask, and what it leaves
    mlp = E * wide * (2 if m.mlp_matrices == 2 else 2 + recipe.products)
    visits = E * 2 * m.dim * m.experts_per_token * tp if experts else 0  # rows sent to experts, and what they return
    return norms + tokens / tp * (core + mlp + visits)


@lru_cache(maxsize=100_000)
def rank_numbers(m: Shape, schedule: str, pp: int, chunks: int, split: str, tp: int, ep: int) -> tuple:
    """By pipeline rank: numbers (replicated over dp x cp, of its experts). A rank has a tied matrix once."""
    (embedding, head), found = end_weights(m, tp), []
    for stages in rank_stages(m, schedule, pp, chunks, split):
        first, last = (any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
        shared = embedding * first + (m.dim if m.tied and first else head) * last
        own = 0.0
        for stage in stages:
            for flag, n in layers_by_kind(m, stage):
                a, b = layer_weights(m, flag, tp, ep)
                shared, own = shared + n * a, own + n * b
        found.append((shared, own))
    return tuple(found)


def state_bytes(shared: float, own: float, layout: Layout, recipe: Recipe) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer state that stay; ZeRO cuts each over the ranks that hold it alike."""
    found = []
    for stage, n_bytes in ((3, recipe.weight), (2, recipe.gradient), (1, recipe.state)):
        cut = [network(layout, dim).ranks if layout.zero >= stage else 1 for dim in ("shard", "expert shard")]
        found.append(n_bytes * (shared / cut[0] + own / cut[1]))
    if layout.zero == 3 and recipe.resident and layout.pp > 1:  # FSDP in a pipeline: gathered once, for a whole step
        found[0] += E * (shared + own)
        found[1] += 4 * (shared + own)
    return found[0], found[1] + recipe.temporary * (shared + own), found[2]


def course_config(layout: Layout) -> Any:
    """The flags of a layout that the course's formulas ask for."""
    return SimpleNamespace(
        micro_batch_size=layout.mbs,
        recompute=layout.recompute,
        sp=layout.sp,
        tp_overlap=True,
        cp_mode=layout.cp_mode,
        ep_mode="alltoall",
        balance="loss",
        capacity_factor=0.0,
        grad_dtype="fp32",
        optimizer="adamw",
        compress="none",
    )


@lru_cache(maxsize=200_000)
def course_parts(
    m: Shape, mbs: int, cp: int, tp: int, sp: bool, recompute: str, cp_mode: str, experts: bool
) -> memory.StageParts:
    """The course's bytes of a stage's parts for one micro-batch on one rank; its layers with or without experts.

    Of the cp ranks, the last has most: all keys pass it.
    """
    config = course_config(Layout(mbs=mbs, cp=cp, tp=tp, sp=sp, recompute=recompute, cp_mode=cp_mode))
    parts = memory.stage_parts(config, m, tp, cp, torch.bfloat16, on_cpu=False, rank=cp - 1)
    if experts:
        chunk = Stage(range(m.dense_layers + m.moe_every - 1, m.dense_layers + m.moe_every), False, False)
        more, waiting = memory.expert_activation_bytes(config, m, tp, cp, torch.bfloat16, chunk)
        parts = parts._replace(layer=parts.layer + more, inputs=parts.inputs + waiting)
    return parts


def course_chunk(m: Shape, layout: Layout, stage: Stage) -> tuple[float, float]:
    """The course's bytes of one micro-batch on a stage: from F to B, and what of it stays until W."""
    key = (m, layout.mbs, layout.cp, layout.tp, layout.sp, layout.recompute, layout.cp_mode)
    layers = [(n, course_parts(*key, flag)) for flag, n in layers_by_kind(m, stage)]
    ends = course_parts(*key, False)
    whole = sum(n * parts.layer for n, parts in layers)
    whole += ends.rope + stage.last * ends.head + stage.first * ends.embedding
    return whole, sum(n * parts.inputs for n, parts in layers)


def plain_chunk(m: Shape, layout: Layout, recipe: Recipe, stage: Stage) -> tuple[float, float]:
    """The same for another software."""
    kept = [n * layer_keeps(m, layout, recipe, flag, layout.recompute) for flag, n in layers_by_kind(m, stage)]
    return sum(kept), sum(kept) / 2


@lru_cache(maxsize=10_000)
def kinds(m: Shape, stages: tuple[Stage, ...]) -> frozenset[bool]:
    """Whether there are layers with experts, and without."""
    return frozenset(m.has_experts(n) for stage in stages for n in stage.layers)


@lru_cache(maxsize=200_000)
def course_moment(m: Shape, layout: Layout, ranks: int, flags: frozenset[bool], first: bool, last: bool) -> float:
    """The course's bytes above what a stage keeps of one micro-batch, at the highest point of its forward and backward.

    Two layers of each kind show it: in backward one layer is at work, and a gradient of another on its way to `ranks`.
    """
    x, tokens, sp = layout, layout.mbs * m.seq_len // layout.cp, layout.sp and layout.tp > 1
    sizes = Sizes(
        *(m, x.mbs, tokens, tokens // x.tp if sp else tokens, E, 2 * E, x.tp, sp, x.tp > 1, x.cp, x.cp - 1, x.cp_mode),
        *(x.schedule in SPLIT, x.recompute, x.ep, True),
    )
    layers = [n for flag in sorted(flags) for n in [n for n in range(m.n_layers) if m.has_experts(n) == flag][:2]]
    chunk, tied = peak.Chunk(layers, first, last), m.tied and first and last
    if layout.zero < 2:
        return peak.Rank(sizes, 0, 2, tied, Sync(Memory())).moment(chunk)
    learnt = FirstKept(Memory())  # which weights there are
    peak.Rank(sizes, 0, 2, tied, learnt).moment(chunk)
    units: dict[str, list[str]] = {}
    for name in learnt.kept:
        module = re.match(r"model\.layers\.\d+|model\.embed_tokens|", name).group()
        units.setdefault(module + "experts" * (x.ep > 1 and ".experts." in name), []).append(name)
    sums = [(tuple(names), sum(learnt.kept[name].n for name in names)) for names in units.values()]
    parts = [Unit(names, n / 2, n, n / ranks, 0) for names, n in sums]
    return peak.Rank(sizes, 0, 2, tied, Zero(Memory(), 2, parts)).moment(chunk)


def buffer_bytes(m: Shape, layout: Layout, recipe: Recipe, stages: tuple[Stage, ...]) -> float:
    """Bytes of what lives for a moment: a layer computed again, units gathered by ZeRO 3, the loss of a chunk.

    Of the course's trainer, all temporaries of a micro-batch.
    """
    found, flags = 0.0, kinds(m, stages)
    unit = max((sum(layer_weights(m, flag, layout.tp, layout.ep)) for flag in flags), default=0)
    if recipe.name == "course":
        way, ranks = "zb-h1" if layout.schedule in SPLIT else "1f1b", network(layout, "data").ranks
        key = replace(layout, pp=1, dp=1, zero=2 * (layout.zero > 1), gbs=1, chunks=1, schedule=way)
        ranks = min(ranks, 16) if layout.zero > 1 else 1  # of more, a slice is little
        found = CONTEXT + max(course_moment(m, key, ranks, kinds(m, (s,)), s.first, s.last) for s in stages)
        if layout.zero == 3 and layout.pp > 1:  # a chunk's weights are there as long as it has its turn
            chunks = [layers_by_kind(m, stage) for stage in stages]
            unit = max(sum(n * sum(layer_weights(m, flag, layout.tp, layout.ep)) for flag, n in c) for c in chunks) / 2
        return found + (layout.zero == 3) * 2 * unit * E
    if layout.recompute == "full" and flags:
        found += max(layer_keeps(m, layout, recipe, flag, "none") for flag in flags)
    if layout.zero == 3 and not (recipe.resident and layout.pp > 1):
        found += 2 * unit * E + unit * 4  # this one and the next; and its gradient, about to travel
    return found


class Rank(NamedTuple):
    """One pipeline rank, whatever its ZeRO stage: its stages' weights, and the bytes that wait for backward."""

    stages: tuple[Stage, ...]
    numbers: tuple[float, float]
    activations: float
    logits: float


@lru_cache(maxsize=200_000)
def ranks_of(m: Shape, layout: Layout, recipe: Recipe) -> tuple[Rank, ...]:
    """The ranks among which the fullest is: all of up to eight, else the first and last two and one in the middle."""
    way = (layout.schedule, layout.pp, layout.chunks, recipe.split)
    everything, numbers = rank_stages(m, *way), rank_numbers(m, *way, layout.tp, layout.ep)
    pp, found = layout.pp, []
    for rank in range(pp) if pp <= 8 else (0, 1, pp // 2, pp - 2, pp - 1):
        stages = everything[rank]
        chunks = [
            course_chunk(m, layout, stage) if recipe.name == "course" else plain_chunk(m, layout, recipe, stage)
            for stage in stages
        ]
        activations = max(
            sum(whole * a + waits * b for (a, b), (whole, waits) in zip(state, chunks, strict=True))
            for state in waiting_states(layout.schedule, pp, layout.micro_batches, len(stages), rank)
        )
        last = any(stage.last for stage in stages)
        logits = last * recipe.logits * layout.mbs * m.seq_len // layout.cp * m.vocab_size / layout.tp
        found.append(Rank(stages, numbers[rank], activations, logits))
    return tuple(found)


def held(m: Shape, layout: Layout, recipe: Recipe, moments: bool = True) -> Held:
    """What the fullest rank of a layout holds; without `moments`, less what lives for a moment (and takes longest)."""
    p, count = layout.pp, layout.micro_batches
    if layout.schedule != "afab":
        count = min(count, 4 * p + count % p)
    plain = replace(layout, dp=1, zero=0, replicas=1, gbs=count * layout.mbs)  # what does not matter here, alike
    found = []
    for rank in ranks_of(m, plain, recipe):
        state = state_bytes(*rank.numbers, layout, recipe)
        buffers = buffer_bytes(m, layout, recipe, rank.stages) if moments else 0.0
        found.append(Held(*state, rank.activations, rank.logits, buffers))
    return Held(*(kind * recipe.reserved for kind in max(found, key=sum)))
