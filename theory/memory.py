"""Bytes that a rank of the course's trainer holds at most in a step: a bound that can be derived on a page.

    state       weights, gradients (from the first backward on), masters, moments, or what ZeRO leaves of them
    waiting     activations: of each micro-batch from its F to its B, as the rank's list of actions has it
    a moment    what rises above both for a while, and is gone when the action is over (`moments_of`)

e, w: bytes of an element, and of one that is added up. T: tokens. h: dim. V, f: a rank's rows of the vocabulary, and
part of ffn_dim. N = V h: numbers of the head's matrix, or the embedding's. U: of a layer, M: of its largest matrix.
Z = w from ZeRO 2 on: a gradient is moved into its unit's buffer, and there until the next unit's is on its way.

    loss        3 w T V: logits, their logarithms, their gradient; in chunks of C tokens 3 w C V + w N
    head        (e + w + Z) N: its gradient as autograd makes it, as it is added up, and where ZeRO wants it
    layer       Z U, and the larger of (e + w) M and 3 e T f + e T h, gradients of SwiGLU's products and of the output,
                with the layer itself, if it is done again
    embedding   as the head; but of its micro-batch nothing waits any more
    all four    Z for the unit before, on its way; with ZeRO 3 also e 2 U, weights of two neighbours
    update      w for what two ranks sum (`sum_tied`, `sum_partial_gradients`), and for ZeRO 1's slices (`reduce`)

The dry run counts every tensor. The bound is within 20% of its count (tests/test_plan.py).
"""

from functools import lru_cache
from typing import NamedTuple

from common.schedules import Action, Place
from theory.activations import Kept, Piece, end_bytes, kept_along, kept_of, layer_bytes
from theory.layouts import Layout, network
from theory.pipelines import ends_of, lists_of, rank_places, ways_of
from theory.shapes import Shape, end_weights, layer_weights


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
    (embedding, head), found = end_weights(m, tp), []
    for places in rank_places(m, schedule, pp, chunks):
        first, last = ends_of(places)
        norm = m.dim * (1 + m.gpt)
        shared, own = float(embedding * (first or (last and m.tied)) + last * (norm if m.tied else head)), 0.0
        for n in {n for place in places.values() for n in place.layers}:
            more = layer_weights(m, m.has_experts(n), tp, ep)
            shared, own = shared + more[0], own + more[1]
        found.append((shared, own))
    return tuple(found)


class Moment(NamedTuple):
    """Bytes above what is kept when an action begins; and those of the gradient that it then leaves on its way."""

    rise: float
    sends: float = 0.0


def highest(row: list[Action], kept: dict[int, Kept], moments: dict[tuple[str, int], list[Moment]]) -> float:
    """The most that a rank holds at a time, as it does its list of actions. `moments`: by (kind, stage), in order.

    A gradient is on its way until the next one leaves.
    """
    most = way = 0.0
    for (kind, _, stage), held in zip(row, kept_along(row, kept), strict=False):
        for rise, sends in moments[kind, stage]:
            most = max(most, held + way + rise)
            way = sends or way
    return most


def loss_bytes(p: Piece) -> float:
    """At the loss, of the tokens that are there at a time: logits, their logarithms and their gradient, wide.

    Of one chunk alone the logarithms are kept anyway; of several, the head's gradient is there, too, since forward.
    """
    copies = 3 * p.wide
    if p.tp > 1:  # the gradient takes the place of the logits; narrow ones are still there
        copies = 2 * p.wide + (p.e if p.e < p.wide else 0)
    if p.at_once < p.tokens:
        return copies * p.rows * p.at_once + p.wide * p.rows * p.m.dim
    return (copies - p.wide) * p.rows * p.at_once


def work_bytes(p: Piece, experts: bool) -> float:
    """In a layer's backward: what is done again, and the gradients of what it makes."""
    m, e = p.m, p.e
    again = layer_bytes(p._replace(recompute="none"), experts) - layer_bytes(p, experts)
    if experts:
        return again + p.share * m.experts_per_token * e * (m.dim + 3 * m.expert_width)
    return again + p.tokens * m.dim * e + p.share * 3 * m.ffn_dim * e


def largest_matrix(m: Shape, x: Layout, experts: bool) -> float:
    """Numbers of a layer's largest matrix on a rank; the experts' are one."""
    return m.experts / x.ep * m.dim * m.expert_width if experts else m.dim * max(m.dim, m.ffn_dim) / x.tp


def moments_of(p: Piece, x: Layout, places: dict[int, Place], split: bool) -> dict[tuple[str, int], list[Moment]]:
    """By (kind, stage): how high the actions of a rank rise. `split`: W comes apart from B.

    The head's gradient is added `later` if W is apart, when B ends, or if the head is tied to an embedding on the same
    way, with the embedding's. Till then it waits, in wide numbers; then somebody else holds it, so a copy is added.
    """
    m, e, wide, matrix, found = p.m, p.e, p.wide, p.rows * p.m.dim, {}
    first, last = ends_of(places)
    layers = [m.has_experts(n) for place in places.values() for n in place.layers]
    rest, experts = max((layer_weights(m, kind, x.tp, x.ep) for kind in layers), key=sum)  # of the largest layer
    made = e + wide if e < wide else e  # of a gradient's number: as autograd makes it, and as it is added up
    summed = wide if x.zero >= 2 else 0
    gathered = e if x.zero == 3 and not x.zero_keep else 0
    tied = m.tied and first and last and ways_of(x.schedule, x.pp, x.chunks) == 1
    later = tied or split

    neighbours = gathered * (rest + experts) * (len(layers) if split else 2)  # with W apart B lets none go
    if tied:
        neighbours += gathered * matrix
    at_head = gathered * matrix + (neighbours if split else 0)
    waits = wide * matrix if later and last else 0
    units = summed * experts, summed * rest  # one after the other
    cast = max(made * largest_matrix(m, x, kind) for kind in layers)
    work = max(work_bytes(p, kind) for kind in layers)

    for stage, place in places.items():
        (until_b, until_w), backward = kept_of(p, place, split), []
        found["F", stage] = [Moment(until_b + neighbours)]
        if place.after is None:
            found["F", stage] = [Moment(until_b + at_head + loss_bytes(p))]
            head = made if later else made + summed
            sends = 0 if split else summed * (m.dim if tied else matrix)  # if it is tied, the norm alone
            backward.append(Moment(at_head + head * matrix - end_bytes(p), sends))
        if split:
            backward.append(Moment(neighbours + waits + work))
            found["W", stage] = [Moment(neighbours + unit + cast, unit) for unit in units]
        else:
            backward += [Moment(neighbours + waits + unit + max(work, cast), unit) for unit in units]
        if place.before is None or (place.after is None and split):
            end = summed + (2 * wide if later else made)
            backward.append(Moment(end * matrix - until_b + until_w, summed * matrix))
        found["B", stage] = backward
    return found


def rank_bytes(m: Shape, x: Layout, rank: int, e: int = 2, wide: int = 4, on_cpu: bool = False) -> Held:
    """The most that a pipeline rank holds in a step, by kind. AdamW; masters, if weights are narrow."""
    way = x.schedule, x.pp, x.chunks
    places, (shared, own) = rank_places(m, *way)[rank], rank_numbers(m, *way, x.tp, x.ep)[rank]
    whole, slices = shared + own, shared / network(x, "shard").ranks + own / network(x, "expert shard").ranks
    weights = e * (slices if x.zero == 3 else whole)
    if x.zero_keep:  # variants/zero_keep.py: gathered once, and there until the update
        weights += e * whole
    gradients = wide * (slices if x.zero >= 2 else whole)
    optimizer = wide * (3 if e < wide else 2) * (slices if x.zero >= 1 else whole)

    p = Piece(m, x.micro_batch_size, m.seq_len // x.cp, e, wide, x.tp, x.sp, x.recompute, on_cpu, gathered=x.gathered)
    few = 4 * x.pp + x.micro_batches % x.pp  # no more wait at a time than of these; but afab lets all wait
    row = lists_of(*way, x.micro_batches if x.schedule == "afab" else min(x.micro_batches, few))[rank]
    split = any(action.kind == "W" for action in row)
    kept = {stage: kept_of(p, place, split) for stage, place in places.items()}
    activations = max(kept_along(row, kept))

    copied = slices if x.zero == 1 else 0.0
    first, last = ends_of(places)
    if ways_of(*way) > 1:  # a pair of ranks sums all that it holds
        copied += slices if x.zero else whole
    elif m.tied and first != last:
        copied += end_weights(m, x.tp)[0] / (network(x, "shard").ranks if x.zero else 1)
    most = max(highest(row, kept, moments_of(p, x, places, split)), wide * copied)
    return Held(weights, gradients, optimizer, activations, most - activations)
