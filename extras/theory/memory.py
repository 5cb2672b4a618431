"""Bounds the bytes that a rank of the course's trainer holds in a step, by formulas that fit on a page.

    state       weights, gradients (from the first backward on), masters, moments, or what ZeRO leaves of them
    waiting     activations of each micro-batch, from its F to its B (and W), along the rank's list of actions
    a moment    bytes beyond both, while an action runs

A number has e = 2 bytes, an accumulated one w = 4. T: tokens. h: dim. V, f: a rank's rows of the vocabulary, and its
part of ffn_dim. N = V h: numbers of the head's matrix, or the embedding's. U: of a layer, M: of its largest matrix.
Z = w from ZeRO 2 on, else 0: a gradient is copied into its unit's buffer, until the next unit's gradient is sent.

    in addition to all that waits, the largest of
    loss        3 w T V: logits, their logarithms, their gradient; in chunks of C tokens 3 w C V + w N
    head        (e + w + Z) N: its gradient from autograd, accumulated, and in ZeRO's buffer; minus what head and loss
                have kept, which is freed by then
    layer       3 e T f + e T h, gradients of SwiGLU's products and of the output, and the layer itself, if it is
                recomputed. (On a CPU, whose norm is ten operators, 5 w T h, if that is more)
    weights     (e + w) M: a gradient from autograd, and accumulated. Z U is added here or, without separate actions W,
                to the larger one of layer and weights
    when nothing waits any more
    embedding   (e + w) N; w N more if a gradient is kept and then copied: the head's by autograd, if both have one
                matrix; ZeRO 2's by B, if W is separate
    all along   Z U for the unit being sent (on end ranks Z N, if more); with ZeRO 3 2 e U, weights of neighbours
    update      w for copies that are summed: of ZeRO 1's slices; of weights that a pair of ranks shares

The dry run counts every tensor. The bound is within 20% of its count, either way (extras/tests/test_plan.py).
"""

from functools import lru_cache
from typing import NamedTuple

from common.schedules import Place
from extras.theory.activations import NARROW, WIDE, MicroBatch, end_bytes, kept_along, layer_bytes, stage_bytes
from extras.theory.gpus import COMMUNICATOR, CONTEXT
from extras.theory.layouts import Layout, communicators, network
from extras.theory.pipelines import ends_of, lists_of, rank_places, splits, ways_of
from extras.theory.shapes import Shape, end_weights, layer_weights


class Held(NamedTuple):
    """Bytes that a rank holds, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    moment: float

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return sum(self)


@lru_cache(maxsize=100_000)
def rank_numbers(m: Shape, schedule: str, pp: int, chunks: int, tp: int, ep: int) -> tuple[tuple[float, float], ...]:
    """For each pipeline rank: (weights replicated over dp x cp, weights of its experts). Tied weights count once."""
    (embedding, head), numbers = end_weights(m, tp), []
    for places in rank_places(m, schedule, pp, chunks):
        first, last = ends_of(places)
        norm = m.dim * (1 + m.gpt)
        shared, own = float(embedding * (first or (last and m.tied)) + last * (norm if m.tied else head)), 0.0
        for n in {n for place in places.values() for n in place.layers}:
            more = layer_weights(m, m.has_experts(n), tp, ep)
            shared, own = shared + more[0], own + more[1]
        numbers.append((shared, own))
    return tuple(numbers)


def numbers_of(m: Shape, x: Layout, rank: int) -> tuple[float, float]:
    """How many weights a pipeline rank has, and how many are in its ZeRO shards."""
    shared, own = rank_numbers(m, *x.way, x.tp, x.ep)[rank]
    return shared + own, shared / network(x, "shard").ranks + own / network(x, "expert shard").ranks


def state_bytes(m: Shape, x: Layout, rank: int) -> tuple[float, float, float]:
    """Bytes that a pipeline rank always holds: weights; gradients; masters and AdamW's moments."""
    whole, slices = numbers_of(m, x, rank)
    weights = NARROW * (slices if x.zero == 3 else whole)
    if x.zero_keep:  # extras/variants/step03/zero_keep.py: gathered once, and kept until the update
        weights += NARROW * whole
    return weights, WIDE * (slices if x.zero >= 2 else whole), 3 * WIDE * (slices if x.zero >= 1 else whole)


def loss_bytes(p: MicroBatch) -> float:
    """Bytes at the loss, for the tokens of a chunk: logits, their logarithms and their gradient, in 4 bytes each.

    With tp the gradient overwrites the logits, while their narrow copy still exists. One chunk's
    logarithms are counted in `end_bytes`, as they are kept. With several, the head's gradient exists since forward.
    """
    copies = 2 * WIDE + NARROW if p.x.tp > 1 else 3 * WIDE
    if p.at_once < p.tokens:
        return copies * p.rows * p.at_once + WIDE * p.rows * p.m.dim
    return (copies - WIDE) * p.rows * p.at_once


def work_bytes(p: MicroBatch, experts: bool) -> float:
    """Bytes in a layer's backward: what is recomputed, and gradients in its MLP (on a CPU in a norm, if more)."""
    m = p.m
    again = layer_bytes(p, experts, "none") - layer_bytes(p, experts, p.x.recompute)
    made = p.visits * (m.dim + 3 * m.expert_width) if experts else p.tokens * m.dim + p.share * 3 * m.ffn_dim
    return again + max(NARROW * made, p.on_cpu * 5 * WIDE * p.own * m.dim)


def moment_bytes(p: MicroBatch, places: dict[int, Place], split: bool) -> tuple[float, float, float]:
    """Extra bytes of a pipeline rank: at all times, on top of all that waits, and when nothing waits any more.

    Only its largest layer counts. The layer's experts are a unit of their own, and one matrix.
    """
    m, x, (first, last) = p.m, p.x, ends_of(places)
    kinds = {m.has_experts(n) for place in places.values() for n in place.layers}
    rest, experts = max((layer_weights(m, kind, x.tp, x.ep) for kind in kinds), key=sum)
    matrix, work = p.rows * m.dim, max(work_bytes(p, kind) for kind in kinds)
    largest = m.experts / x.ep * m.dim * m.expert_width if experts else m.dim * max(m.dim, m.ffn_dim) / x.tp
    made, summed = NARROW + WIDE, WIDE if x.zero >= 2 else 0
    unit, cast = summed * max(rest, experts), made * largest

    along = summed * (max(rest, matrix) if first or last else rest)
    if x.zero == 3 and not x.zero_keep:
        along += NARROW * 2 * (rest + experts)
    layer = max(work, unit + cast) if split else unit + max(work, cast)
    one_matrix = m.tied and first and last and ways_of(*x.way) == 1
    copied = WIDE * (one_matrix or (split and x.zero >= 2))
    head = (made + summed) * matrix - end_bytes(p)
    return along, max(layer, last * loss_bytes(p), last * head), first * (made + copied) * matrix


def rank_bytes(m: Shape, x: Layout, rank: int, on_cpu: bool = False) -> Held:
    """The most bytes that a pipeline rank holds in a step, by kind."""
    p, places, split = MicroBatch(m, x, on_cpu), rank_places(m, *x.way)[rank], splits(*x.way)
    few = 4 * x.pp + x.micro_batches % x.pp  # more of them would not wait at once, but in afab
    row = lists_of(*x.way, x.micro_batches if x.schedule == "afab" else min(x.micro_batches, few))[rank]
    waiting = max(kept_along(row, {stage: stage_bytes(p, place, split) for stage, place in places.items()}))
    along, beside, alone = moment_bytes(p, places, split)

    whole, slices = numbers_of(m, x, rank)
    copied = slices if x.zero == 1 else 0.0
    if ways_of(*x.way) > 1:  # a pair of ranks sums all that it holds
        copied += slices if x.zero else whole
    most = max(along + max(waiting + beside, alone), WIDE * copied)
    return Held(*state_bytes(m, x, rank), waiting, most - waiting)


def outside(m: Shape, x: Layout) -> float:
    """Bytes that PyTorch's allocator does not see: CUDA's context, and the buffers of each communicator."""
    return CONTEXT + communicators(m, x) * COMMUNICATOR


def held(m: Shape, x: Layout) -> Held:
    """Bytes that a layout's fullest rank holds on a GPU. Up to eight pipeline ranks are all tried, of more five."""
    ranks = range(x.pp) if x.pp <= 8 else (0, 1, x.pp // 2, x.pp - 2, x.pp - 1)
    most = max((rank_bytes(m, x, rank) for rank in ranks), key=sum)
    return most._replace(moment=most.moment + outside(m, x))
