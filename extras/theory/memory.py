"""Bytes that a rank of the course's trainer holds at most in a step: a bound that can be derived on a page.

    state       weights, gradients (from the first backward on), masters, moments, or what ZeRO leaves of them
    waiting     activations: of each micro-batch from its F to its B (and W), as the rank's list of actions has it
    a moment    what rises above both while an action runs (`Moments`)

e, w: bytes of an element, and of one that is added up. T: tokens. h: dim. V, f: a rank's rows of the vocabulary, and
part of ffn_dim. N = V h: numbers of the head's matrix, or the embedding's. U: of a layer, M: of its largest matrix.
Z = w from ZeRO 2 on, else 0: a gradient is moved into its unit's buffer, and there until the next unit's is on its way.

    when        what
    all along   Z for the unit before, on its way (N, if the rank has an end); with ZeRO 3 e 2 U, weights of neighbours
    F ends      loss: 3 w T V: logits, their logarithms, their gradient; in chunks of C tokens 3 w C V + w N
    B begins    head: (e + w + Z) N: its gradient as autograd makes it, as it is added up, and where ZeRO wants it.
                What it and the loss have kept is gone then
    B           layer: 3 e T f + e T h, gradients of SwiGLU's products and of the output, with the layer itself, if it
                is done again. (On a CPU, whose norm is ten operators, 5 w T h, if that is more.) What W needs comes
    W           weights: Z U + (e + w) M. Where W is not apart, Z U is in B, and the larger of the rest counts
    B ends      embedding: (e + w) N; nothing of its micro-batch waits for B any more. w N more where a gradient is kept
                that is then copied: the head's by autograd, if both are one; ZeRO 2's by B, if W is apart
    update      w for what is copied as it is summed: ZeRO 1's slices; what a pair of ranks has twice

The dry run counts every tensor. The bound is within 20% of its count, either way (extras/tests/test_plan.py).
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from common.schedules import Action, Place
from extras.theory.activations import Kept, MicroBatch, end_bytes, kept_along, kept_of, layer_bytes
from extras.theory.layouts import Layout, network
from extras.theory.pipelines import ends_of, lists_of, rank_places, splits, ways_of
from extras.theory.shapes import Shape, end_weights, layer_weights


class Held(NamedTuple):
    """Bytes by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    moment: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


@lru_cache(maxsize=100_000)
def rank_numbers(m: Shape, schedule: str, pp: int, chunks: int, tp: int, ep: int) -> tuple[tuple[float, float], ...]:
    """By pipeline rank: numbers of weights (that dp x cp ranks hold alike, of its experts). Tied ones count once."""
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


class Moments(NamedTuple):
    """Bytes above what waits. `along`: always; the others beside it."""

    along: float
    loss: float  # when a micro-batch's last F ends
    head: float  # when its first B begins
    layer: float  # in a B
    weights: float  # in a W
    embedding: float  # when its last B ends


def heights(
    row: list[Action], places: dict[int, Place], kept: dict[int, Kept], ends: float, m: Moments
) -> Iterator[float]:
    """What a rank holds at each moment of its list of actions. `ends`: what head and loss keep until B begins."""
    waiting = kept_along(row, kept)
    for (kind, _, stage), before, after in zip(row, waiting, waiting[1:], strict=False):
        first, last = places[stage].before is None, places[stage].after is None
        if kind == "F":
            yield after + (m.loss if last else 0.0)
        elif kind == "W":
            yield before + m.weights
        else:
            if last:
                before -= ends
                yield before + m.head
            yield max(before, after) + m.layer
            if first:
                yield after + m.embedding


def loss_bytes(p: MicroBatch) -> float:
    """At the loss, of the tokens that are there at a time: logits, their logarithms and their gradient, wide.

    Of one chunk alone the logarithms are kept anyway; of several, the head's gradient is there, too, since forward.
    """
    copies = 3 * p.wide
    if p.x.tp > 1:  # the gradient takes the place of the logits; narrow ones are still there
        copies = 2 * p.wide + (p.e if p.e < p.wide else 0)
    if p.at_once < p.tokens:
        return copies * p.rows * p.at_once + p.wide * p.rows * p.m.dim
    return (copies - p.wide) * p.rows * p.at_once


def work_bytes(p: MicroBatch, experts: bool) -> float:
    """In a layer's backward: what is done again; beside it the gradients of what it makes or, on a CPU, a norm's."""
    m, e = p.m, p.e
    again = layer_bytes(p, experts, "none") - layer_bytes(p, experts, p.x.recompute)
    norm = 5 * p.wide * p.own * m.dim if p.on_cpu else 0.0
    if experts:
        return again + max(p.share * m.experts_per_token * e * (m.dim + 3 * m.expert_width), norm)
    return again + max(p.tokens * m.dim * e + p.share * 3 * m.ffn_dim * e, norm)


def largest_matrix(m: Shape, x: Layout, experts: bool) -> float:
    """Numbers of a layer's largest matrix on a rank; the experts' are one."""
    return m.experts / x.ep * m.dim * m.expert_width if experts else m.dim * max(m.dim, m.ffn_dim) / x.tp


def moments_of(p: MicroBatch, places: dict[int, Place], split: bool) -> Moments:
    """How high the actions of a pipeline rank rise. Of its layers, the largest; its experts are a unit of their own."""
    m, x, e, wide, matrix = p.m, p.x, p.e, p.wide, p.rows * p.m.dim
    first, last = ends_of(places)
    kinds = {m.has_experts(n) for place in places.values() for n in place.layers}
    rest, experts = max((layer_weights(m, kind, x.tp, x.ep) for kind in kinds), key=sum)
    made = e + wide if e < wide else wide  # of a gradient's number: as autograd makes it, and as it is added up
    summed = wide if x.zero >= 2 else 0
    gathered = e if x.zero == 3 and not x.zero_keep else 0
    one_matrix = m.tied and first and last and ways_of(x.schedule, x.pp, x.chunks) == 1
    unit, work = summed * max(rest, experts), max(work_bytes(p, kind) for kind in kinds)
    cast = max(made * largest_matrix(m, x, kind) for kind in kinds)
    return Moments(
        along=summed * (max(rest, matrix) if first or last else rest) + gathered * 2 * (rest + experts),
        loss=loss_bytes(p),
        head=(made + summed) * matrix,
        layer=work if split else unit + max(work, cast),
        weights=unit + cast,
        embedding=(made + wide if one_matrix or (split and summed) else made) * matrix,
    )


def numbers_of(m: Shape, x: Layout, rank: int) -> tuple[float, float]:
    """Of a pipeline rank's weights: all, and those in its slices of ZeRO."""
    shared, own = rank_numbers(m, x.schedule, x.pp, x.chunks, x.tp, x.ep)[rank]
    return shared + own, shared / network(x, "shard").ranks + own / network(x, "expert shard").ranks


def state_bytes(m: Shape, x: Layout, rank: int, e: int = 2, wide: int = 4) -> tuple[float, float, float]:
    """What a pipeline rank always holds: weights, gradients; AdamW's moments, and masters if weights are narrow."""
    whole, slices = numbers_of(m, x, rank)
    weights = e * (slices if x.zero == 3 else whole)
    if x.zero_keep:  # extras/variants/step03/zero_keep.py: gathered once, and there until the update
        weights += e * whole
    gradients = wide * (slices if x.zero >= 2 else whole)
    return weights, gradients, wide * (3 if e < wide else 2) * (slices if x.zero >= 1 else whole)


def rank_bytes(m: Shape, x: Layout, rank: int, e: int = 2, wide: int = 4, on_cpu: bool = False) -> Held:
    """The most that a pipeline rank holds in a step, by kind."""
    way = x.schedule, x.pp, x.chunks
    places, (whole, slices) = rank_places(m, *way)[rank], numbers_of(m, x, rank)
    p = MicroBatch(m, x, e, wide, on_cpu)
    few = 4 * x.pp + x.micro_batches % x.pp  # no more wait at a time than of these; but afab lets all wait
    row = lists_of(*way, x.micro_batches if x.schedule == "afab" else min(x.micro_batches, few))[rank]
    split = splits(*way)
    kept = {stage: kept_of(p, place, split) for stage, place in places.items()}
    activations, moments = max(kept_along(row, kept)), moments_of(p, places, split)

    copied = slices if x.zero == 1 else 0.0
    if ways_of(*way) > 1:  # a pair of ranks sums all that it holds
        copied += slices if x.zero else whole
    most = max(moments.along + max(heights(row, places, kept, end_bytes(p), moments)), wide * copied)
    return Held(*state_bytes(m, x, rank, e, wide), activations, most - activations)
