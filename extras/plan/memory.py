"""Estimates the most bytes that a rank of the course's trainer holds in a step, by formulas that fit on a page.

    state       weights, gradients (from the first backward on), masters, moments: whole, or the shards of ZeRO
    waiting     activations of each micro-batch, from its F to its B (and W), along the rank's list of actions
    moment      what an action needs in addition, while it runs

The moment depends on these sizes of one rank:

    T, h, V, f  tokens of a micro-batch, width of the model, rows of the vocabulary, a part of ffn_dim
    N, M, U     how many weights the embedding or the head (N = V h), a layer's largest matrix and a whole layer have
    e, w        bytes of a number: e = 2; but w = 4 for logits, and for gradients that accumulate
    Z           Z = w from ZeRO 2 on, because a unit's gradients are sent from a buffer; else Z = 0

While activations wait, the moment is the largest of `loss`, `head`, `layer` and `weights`:

    loss        3 w T V for logits, their logarithms and their gradient; in chunks of C tokens, 3 w C V + w N
    head        (e + w + Z) N for its gradient: as autograd makes it, as it is accumulated, and in ZeRO's buffer.
                What head and loss have kept is free by then, and is subtracted
    layer       3 e T f + e T h for gradients of activations, and the activations that are recomputed
    weights     (e + w) M for the largest gradient of a weight: as autograd makes it, and as it is accumulated
    buffer      Z U is added to `weights` if W is a separate action, else to the larger of `layer` and `weights`

    embedding   (e + w) N, when no activation waits any more. w N is added for one more copy of the gradient, if
                the rank also has the tied head, or if W is a separate action under ZeRO 2 or 3
    always      Z U for the unit that is being sent, or Z N if that is more; ZeRO 3 adds 2 e U for two gathered layers
    update      w for each gradient that is summed into a new tensor: ZeRO 1's shards, and weights that two ranks share

For 199 of 200 random layouts, the estimate is within 20% of the dry run's count; for one, 29% above (test_plan.py).
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from common.schedules import Action, Place
from extras.plan.gpus import COMMUNICATOR, CONTEXT
from extras.plan.layouts import Layout, lists_of, network, pipeline_of, rank_places
from extras.plan.shapes import Shape, end_weights, layer_weights

NARROW, WIDE = 2, 4  # bytes of a number, and of one that is accumulated
MOST = 2**30  # most bytes of a chunk's logits in 32 bits (extras/variants/step01/chunked_loss.py)
CHUNK = 2048  # tokens whose logits exist at the same time: a plan's --loss-chunk


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


class MicroBatch(NamedTuple):
    """The sizes of a micro-batch on one rank of a layout."""

    m: Shape
    x: Layout
    tokens: int  # of the micro-batch on this rank
    own: float  # tokens that the rank holds between blocks
    share: float  # its share of the work inside blocks, in tokens; also the number of tokens that it routes
    visits: float  # rows that its experts compute if all experts are equally busy
    kv: float  # channels of its keys; its values have as many
    rows: int  # of the vocabulary, in its shard of the embedding or of the head
    at_once: int  # tokens whose logits exist at the same time
    norm: int  # bytes that a norm keeps of a token: its input and one wide number


def micro_batch(m: Shape, x: Layout) -> MicroBatch:
    """The sizes of one micro-batch of a model under a layout."""
    tokens, rows = x.micro_batch_size * m.seq_len // x.cp, -(-m.vocab_size // x.tp)
    own, share, kv = tokens / (x.tp if x.sp else 1), tokens / x.tp, m.kv_dim / min(x.tp, m.n_kv_heads)
    at_once = min(tokens, CHUNK, max(1, MOST // (rows * WIDE)))
    visits, norm = share * m.experts_per_token, m.dim * NARROW + WIDE
    return MicroBatch(m, x, tokens, own, share, visits, kv, rows, at_once, norm)


def products_of(p: MicroBatch, experts: bool) -> list[tuple[float, float, float, float]]:
    """A layer's products on one rank, except the router's, each as (rows, inner, outer, products in one launch).

    Matrices that multiply the same input are counted as one matrix: q, k and v as one, gate and up as another.
    """
    m, tp, up = p.m, p.x.tp, 1 if p.m.gpt else 2
    width = m.shared_experts * m.expert_width if experts else m.ffn_dim  # of the MLP that every token visits
    products = [(p.tokens, m.dim, m.dim / tp + 2 * p.kv, 1), (p.tokens, m.dim / tp, m.dim, 1)]
    if width:
        products += [(p.tokens, m.dim, up * width / tp, 1), (p.tokens, width / tp, m.dim, 1)]
    if experts:
        here, width = m.experts / p.x.ep, m.expert_width
        products += [(p.visits / here, m.dim, up * width, here), (p.visits / here, width, m.dim, here)]
    return products


def layer_bytes(p: MicroBatch, experts: bool, recompute: str) -> float:
    """Bytes that a layer keeps until backward. tp shards activations inside blocks; SP shards those between blocks.

    Attention keeps its input, q, k, v, its output and a number for each head of each token. An MLP keeps its input,
    gate, up, silu(gate) and silu(gate) * up. For each of its tokens, an expert keeps these five and its output. Full
    recomputation keeps only the layer's input; elementwise also keeps the outputs of matrix products and attention.
    """
    m, e, cheap = p.m, NARROW, recompute == "elementwise"
    if recompute == "full":
        return p.own * m.dim * e
    whole, products = p.tokens * m.dim * e, 2 if cheap else 4  # whole: a block's input, or its last output
    kept = whole + p.tokens * 2 * p.kv * e + p.share * (2 * m.dim * e + WIDE * m.n_heads)
    kept += p.own * (m.dim * e if cheap else 2 * p.norm)
    if not experts:
        return kept + whole + p.share * e * products * m.ffn_dim
    kept += p.visits * e * (products * m.expert_width + 2 * m.dim) + p.share * WIDE * (m.dim + 2 * m.experts)
    return kept + (m.shared_experts > 0) * whole + p.share * e * products * m.shared_experts * m.expert_width


def end_bytes(p: MicroBatch) -> float:
    """Bytes that norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities.

    A loss in chunks keeps two gradients, which its forward computes, instead of the head's input and the logarithms.
    """
    kept = p.own * p.norm + p.tokens * p.m.dim * NARROW
    return kept + p.rows * (p.m.dim * NARROW if p.at_once < p.tokens else p.tokens * WIDE)


def stage_bytes(p: MicroBatch, place: Place, split: bool) -> tuple[float, float]:
    """Bytes that a stage keeps of a micro-batch: (from F to B, from B to W). Without `split`, there is no W.

    From B to W it keeps the inputs of its matrix products, and the gradients of their outputs.
    """
    kinds = [p.m.has_experts(n) for n in place.layers]
    kept = sum(layer_bytes(p, kind, p.x.recompute) for kind in kinds) + (place.after is None) * end_bytes(p)
    products = [product for kind in kinds for product in products_of(p, kind)] if split else []
    return kept, NARROW * sum(n * rows * (inner + outer) for rows, inner, outer, n in products)


def kept_along(row: list[Action], kept: dict[int, tuple[float, float]]) -> list[float]:
    """Bytes that a rank keeps before each action of its list, and after the last. `kept`: stage -> `stage_bytes`."""
    changes = []
    for kind, _, stage in row:
        until_b, until_w = kept[stage]
        changes.append({"F": until_b, "B": until_w - until_b, "W": -until_w}[kind])
    return [*accumulate(changes, initial=0.0)]


def ends_of(places: dict[int, Place]) -> tuple[bool, bool]:
    """Whether a rank has the embedding, and whether it has the head."""
    return tuple(any(getattr(place, end) is None for place in places.values()) for end in ("before", "after"))


@lru_cache(maxsize=100_000)
def rank_numbers(m: Shape, schedule: str, pp: int, chunks: int, tp: int, ep: int) -> tuple[tuple[float, float], ...]:
    """The number of weights on each pipeline rank: (those replicated over dp x cp, those of its experts)."""
    (embedding, head), numbers = end_weights(m, tp), []
    for places in rank_places(m, schedule, pp, chunks):
        first, last = ends_of(places)
        shared, own = float(embedding * (first or (last and m.tied)) + last * (m.dim if m.tied else head)), 0.0
        for n in {n for place in places.values() for n in place.layers}:
            more = layer_weights(m, m.has_experts(n), tp, ep)
            shared, own = shared + more[0], own + more[1]
        numbers.append((shared, own))
    return tuple(numbers)


def numbers_of(m: Shape, x: Layout, rank: int) -> tuple[float, float]:
    """How many weights a pipeline rank has, and how many of them are in its ZeRO shards."""
    shared, own = rank_numbers(m, *x.way, x.tp, x.ep)[rank]
    return shared + own, shared / network(x, "shard").ranks + own / network(x, "expert shard").ranks


def state_bytes(m: Shape, x: Layout, rank: int) -> tuple[float, ...]:
    """Bytes that a pipeline rank always holds: (weights, gradients, optimizer: masters and AdamW's moments)."""
    whole, slices = numbers_of(m, x, rank)
    weights, gradients, optimizer = (slices if x.zero >= stage else whole for stage in (3, 2, 1))
    return NARROW * weights, WIDE * gradients, 3 * WIDE * optimizer


def moment_bytes(p: MicroBatch, places: dict[int, Place], split: bool) -> tuple[float, float, float]:
    """Bytes that a rank needs besides state and kept activations: (always, while some are kept, when none are kept).

    Only the rank's largest layer counts. Its experts are one ZeRO unit; their gate matrices are one tensor.
    """
    m, x, (first, last) = p.m, p.x, ends_of(places)
    kinds = {m.has_experts(n) for place in places.values() for n in place.layers}
    rest, experts = max((layer_weights(m, kind, x.tp, x.ep) for kind in kinds), key=sum)
    made, summed, matrix = NARROW + WIDE, WIDE * (x.zero >= 2), p.rows * m.dim
    if experts:
        largest, gradients = m.experts / x.ep * m.dim * m.expert_width, p.visits * (m.dim + 3 * m.expert_width)
    else:
        largest, gradients = m.dim * max(m.dim, m.ffn_dim) / x.tp, p.tokens * m.dim + p.share * 3 * m.ffn_dim
    again = max(layer_bytes(p, kind, "none") - layer_bytes(p, kind, x.recompute) for kind in kinds)
    work = again + NARROW * gradients
    unit, cast = summed * max(rest, experts), made * largest
    layer = max(work, unit + cast) if split else unit + max(work, cast)

    in_chunks = p.at_once < p.tokens  # if not, `end_bytes` counts the logarithms
    loss = WIDE * p.rows * ((2 + in_chunks) * p.at_once + in_chunks * m.dim)
    head = (made + summed) * matrix - end_bytes(p)
    along = summed * (max(rest, matrix) if first or last else rest) + NARROW * 2 * (rest + experts) * (x.zero == 3)
    copied = WIDE * ((m.tied and first and last and pipeline_of(*x.way).ways == 1) or (split and x.zero >= 2))
    return along, max(layer, last * loss, last * head), first * (made + copied) * matrix


def rank_bytes(m: Shape, x: Layout, rank: int) -> Held:
    """The most bytes that a pipeline rank holds in a step, by kind."""
    p, places, pipeline = micro_batch(m, x), rank_places(m, *x.way)[rank], pipeline_of(*x.way)
    few = 4 * x.pp + x.micro_batches % x.pp  # more micro-batches need no more memory, except under afab
    row = lists_of(*x.way, x.micro_batches if x.schedule == "afab" else min(x.micro_batches, few))[rank]
    kept = {stage: stage_bytes(p, place, pipeline.split) for stage, place in places.items()}
    waiting, (along, beside, alone) = max(kept_along(row, kept)), moment_bytes(p, places, pipeline.split)

    whole, slices = numbers_of(m, x, rank)
    copied = slices if x.zero == 1 else 0.0
    if pipeline.ways > 1:  # a pair of ranks sums the gradients of all its weights
        copied += slices if x.zero else whole
    most = max(along + max(waiting + beside, alone), WIDE * copied)
    return Held(*state_bytes(m, x, rank), waiting, most - waiting)


def held(m: Shape, x: Layout) -> Held:
    """Bytes that a layout's fullest rank holds on a GPU, including CUDA's context and buffers of NCCL's communicators.

    PyTorch's allocator counts neither. If there are more than eight pipeline ranks, only five of them are tried.
    """
    ranks = range(x.pp) if x.pp <= 8 else (0, 1, x.pp // 2, x.pp - 2, x.pp - 1)
    most = max((rank_bytes(m, x, rank) for rank in ranks), key=sum)
    sizes = [x.pp, x.cp, x.tp, x.dp * x.cp, x.dp * (x.cp > 1), pipeline_of(*x.way).ways]
    sizes += [x.ep, x.cp * x.tp, x.dp * x.cp * x.tp // x.ep] * (m.experts > 0)
    groups = (x.world > 1) + sum(size > 1 for size in sizes)
    return most._replace(moment=most.moment + CONTEXT + groups * COMMUNICATOR)
