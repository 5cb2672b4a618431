"""Bytes that a rank of the course's trainer holds: what stays, what waits for backward, and the highest moment.

    a step      update ............ forward .. backward .. forward .. backward ............ update
    what stays  weights, gradients (from the first backward on), masters, moments
    waits       activations of each micro-batch from its F to its B (with W apart: inputs and gradients until W)
    a moment    of all that lives for less than a layer's time only the highest point counts. It is found among four:
                head (a chunk's logits and softmax), layer (SwiGLU's products, a layer done again), embedding (the cast
                of its gradient), update (copies). Where ZeRO cuts, whole units of weights and gradients go with each.

The bound is their sum. It is held against the dry run, which counts every tensor: tests/test_plan.py.
"""

from functools import lru_cache
from typing import NamedTuple

from common.schedules import Action, Place
from theory.layouts import Layout, balance, network, schedule_of, stages
from theory.shapes import Shape, end_weights, layer_weights

CHUNK = 2048  # tokens whose logits exist at the same time, unless --loss-chunk says otherwise


class Piece(NamedTuple):
    """A micro-batch on one rank."""

    m: Shape
    batch: int  # sequences
    seq: int  # tokens that this rank has of each
    e: int  # bytes of an element
    wide: int  # bytes of an element of what is added up
    tp: int = 1
    sp: bool = True
    recompute: str = "none"
    on_cpu: bool = False
    chunk: int = CHUNK

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.batch * self.seq

    @property
    def own(self) -> float:
        """Those that the rank has between blocks."""
        return self.tokens / self.tp if self.sp else self.tokens

    @property
    def rows(self) -> int:
        """Of the vocabulary's matrices."""
        return -(-self.m.vocab_size // self.tp)

    @property
    def chunked(self) -> bool:
        """Whether the loss is taken in several chunks."""
        return 0 < self.chunk < self.tokens


def norm_bytes(p: Piece) -> float:
    """What a norm keeps of a token: its input, one wide number; on a CPU also what its kernels keep."""
    return p.m.dim * p.e + p.wide + p.on_cpu * p.m.dim * (2 * p.wide - p.e if p.e < p.wide else p.wide)


def layer_bytes(p: Piece, experts: bool) -> float:
    """What one layer keeps until its backward; all inside the blocks is 1/tp wide, with SP all between is, too.

    Two norms. Attention: input, q, k, v, output and a number a head. MLP: input, gate, up, silu(gate), the product.
    Experts: the same for each that a token visits, and their outputs. With full recomputation only the layer's input
    stays, with selective recomputation also what matrices and attention have made.
    """
    m, e, wide, tp = p.m, p.e, p.wide, p.tp
    if p.recompute == "full":
        return p.own * m.dim * e
    kv_dim = m.kv_dim * max(1, tp / m.n_kv_heads)
    kept_kv = kv_dim if p.on_cpu or e == 2 else m.dim  # a GPU's kernels in fp32 want as many k as q
    scores = wide * m.n_heads
    if p.recompute == "selective":
        attention = e * (2 * m.dim + 2 * kv_dim) + scores
        mlp = 2 * m.ffn_dim * e if not experts else e * 2 * m.expert_width * (m.experts_per_token + m.shared_experts)
        outputs = e * m.dim * (2 if not experts else 1 + m.experts_per_token + m.shared_experts)
        return p.own * m.dim * e + p.tokens * ((attention + mlp) / tp + outputs + experts * m.experts * wide)
    attention = m.dim * e + (e * (2 * m.dim + 2 * kept_kv) + scores) / tp
    mlp = m.dim * e + 4 * m.ffn_dim * e / tp
    if experts:
        visits = m.experts_per_token * e * (2 * m.dim + 4 * m.expert_width / tp)
        mlp = visits + (m.dim * wide if wide != e else m.dim * e) + 2 * m.experts * wide
        mlp += m.shared_experts * 4 * m.expert_width * e / tp
    return p.own * 2 * norm_bytes(p) + p.tokens * (attention + mlp)


def waiting_bytes(p: Piece, experts: bool) -> tuple[float, float]:
    """What one layer keeps between B and W: the inputs of its matrices, and the gradients of their outputs."""
    m, kv_dim = p.m, p.m.kv_dim * max(1, p.tp / p.m.n_kv_heads)
    visits, width = (m.experts_per_token + m.shared_experts, m.expert_width) if experts else (1, m.ffn_dim)
    inputs = m.dim + m.dim / p.tp + visits * (m.dim + width / p.tp)  # that of q, k and v, as that of gate and up, once
    gradients = (m.dim + 2 * kv_dim) / p.tp + m.dim + visits * (2 * width / p.tp + m.dim)
    return p.tokens * p.e * inputs, p.tokens * p.e * gradients


def end_bytes(p: Piece) -> float:
    """What norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities.

    In chunks: the gradients of the hidden states and of the head, which are known since forward.
    """
    head = p.m.dim * p.e * p.tokens
    loss = p.rows * p.m.dim * p.e if p.chunked else p.tokens * p.wide * p.rows
    return p.own * norm_bytes(p) + head + loss


class Kept(NamedTuple):
    """Bytes of one micro-batch on a stage."""

    whole: float  # from F to B
    inputs: float  # of them, until W
    gradients: float  # from B to W
    layers: int


def stage_bytes(p: Piece, place: Place) -> Kept:
    """What a stage keeps. Tables of RoPE are shared by its layers; what was done again is kept until W from B on."""
    kinds = [p.m.has_experts(n) for n in place.layers]
    tables = 2 * p.seq * p.m.head_dim * p.wide
    ends = (place.before is None) * (p.tp > 1) * 9 * p.tokens + (place.after is None) * end_bytes(p)
    each = {flag: (layer_bytes(p, flag), *waiting_bytes(p, flag)) for flag in set(kinds)}
    whole, inputs, gradients = (sum(each[flag][i] for flag in kinds) for i in range(3))
    if p.recompute != "none":
        inputs, gradients = 0.0, inputs + gradients
    return Kept(whole + tables + ends, inputs, gradients, len(kinds))


def most_kept(row: list[Action], kept: dict[int, Kept], backward: bool = True) -> float:
    """The most that a rank's list of actions keeps at a time; `kept` by stage.

    In the last layer of B what the others leave for W is there already. Not `backward`: of what is born in forward.
    """
    held, most, split = 0.0, 0.0, any(action.kind == "W" for action in row)
    for kind, _, stage in row:
        k = kept[stage]
        waits = split * (k.inputs + k.gradients * backward)
        if kind == "B" and backward:
            most = max(most, held + max(0.0, waits - k.whole) * (1 - 1 / max(1, k.layers)))
        held += {"F": k.whole, "B": waits - k.whole, "W": -waits}[kind]
        most = max(most, held) if kind == "F" else most
    return most


def cast(p: Piece) -> int:
    """Bytes of a weight's gradient from autograd: as it is made, and as wide as it is added up."""
    return p.e + p.wide * (p.e < p.wide)


def head_moment(p: Piece, split: bool, unit: float) -> float:
    """The loss above what it leaves: logits, softmax and their gradients, wide; then the gradient of the matrix.

    Where tp cuts the vocabulary, the logits' gradient is a sum of two. `unit`: the buffer to which ZeRO moves the
    matrix' gradient, which a split backward adds later.
    """
    logits, matrix = p.rows * min(p.tokens, p.chunk or p.tokens), p.rows * p.m.dim
    loss, added = p.wide * logits * (3 if p.tp == 1 else 4), max(cast(p) * matrix, p.wide * matrix + unit) * (not split)
    if p.chunked:  # two gradients of the matrix: the sum, and that of the chunk before
        return max(p.wide * matrix + max(loss, p.e * (logits + matrix)), added - p.e * matrix)
    return max(loss, p.e * (logits + matrix), added) - p.wide * logits


def layer_moment(p: Piece, experts: bool, split: bool) -> float:
    """Backward of a layer above what it has left: what is done again, and gradients of the products of SwiGLU."""
    again = layer_bytes(p._replace(recompute="none"), experts) - layer_bytes(p, experts)
    width, visits = (p.m.expert_width, p.m.experts_per_token) if experts else (p.m.ffn_dim, 1)
    inner = p.tokens * visits * width / p.tp * p.e
    matrix = 0 if split else cast(p) * width * p.m.dim / p.tp * (p.m.experts if experts else 1)
    return again + max(2 * inner, inner + matrix) + p.tokens * p.m.dim * p.e * visits + p.own * p.m.dim * p.e


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


@lru_cache(maxsize=4096)
def rank_places(m: Shape, schedule: str, pp: int, chunks: int) -> tuple[dict[int, Place], ...]:
    """By pipeline rank its stages: number and place."""
    found = schedule_of(Layout(pp=pp, schedule=schedule, chunks=chunks))
    places = balance(m, found.places(m.n_layers, pp, stages(found, pp)))
    return tuple({s: place for s, place in enumerate(places) if place.rank == rank} for rank in range(pp))


@lru_cache(maxsize=4096)
def lists_of(schedule: str, pp: int, chunks: int, n: int) -> list[list[Action]]:
    """The lists of all ranks for n micro-batches."""
    found = schedule_of(Layout(pp=pp, schedule=schedule, chunks=chunks))
    return [found.actions(pp, n, stages(found, pp), rank) for rank in range(pp)]


@lru_cache(maxsize=100_000)
def rank_numbers(m: Shape, schedule: str, pp: int, chunks: int, tp: int, ep: int) -> tuple[tuple[float, float], ...]:
    """By pipeline rank: numbers of weights (that dp x cp ranks hold alike, of its experts). Tied ones count once."""
    (embedding, head), found = end_weights(m, tp), []
    for places in rank_places(m, schedule, pp, chunks):
        first, last = (any(getattr(place, end) is None for place in places.values()) for end in ("before", "after"))
        norm = m.dim * (1 + m.gpt)
        shared, own = float(embedding * (first or (last and m.tied)) + last * (norm if m.tied else head)), 0.0
        for n in {n for place in places.values() for n in place.layers}:
            more = layer_weights(m, m.has_experts(n), tp, ep)
            shared, own = shared + more[0], own + more[1]
        found.append((shared, own))
    return tuple(found)


class Rank(NamedTuple):
    """One pipeline rank, and what it does in a step."""

    m: Shape
    x: Layout
    p: Piece
    places: dict[int, Place]  # its stages
    parts: dict[int, Kept]  # what a micro-batch keeps on each
    split: bool  # W comes apart from B
    data: int  # ranks over which ZeRO cuts

    def ends(self) -> tuple[bool, bool]:
        """Whether it has the embedding, and the head."""
        return tuple(any(getattr(place, to) is None for place in self.places.values()) for to in ("before", "after"))


def highest_moment(r: Rank) -> float:
    """The most that lives for less than a layer's time, above what waits. See the head of this file.

    `sliced`: a unit's gradient on its way, with the slice that is its sum. It stays until the next one's is complete,
    `before` also from one micro-batch to the next. With W apart from B, units of weights stay gathered from B to W, and
    a tied matrix whose stages are both here holds the head's gradient back until the embedding's has come.
    """
    m, x, p, split, (first, last) = r.m, r.x, r.p, r.split, r.ends()
    kinds = [m.has_experts(n) for place in r.places.values() for n in place.layers]
    layer, end = max((sum(layer_weights(m, flag, x.tp, x.ep)) for flag in kinds), default=0.0), p.rows * m.dim
    whole, gathered, hidden = p.wide * (x.zero >= 2), p.e * (x.zero == 3), p.own * m.dim * p.e
    sliced = whole * (1 + 1 / r.data)
    before = sliced * max(layer, end * (first or last)) * (x.micro_batches > 1)
    held_back = p.wide * end * (m.tied and first and last and len(r.places) > 1 and x.schedule != "dualpipe")
    there = gathered * layer * (len(kinds) if split else min(2, len(kinds)))

    at_layer = max((layer_moment(p, flag, split) for flag in set(kinds)), default=0.0) + there
    if split:
        at_layer += before + gathered * end * last
    else:
        at_layer += whole * layer + sliced * (end if last else layer) - end_bytes(p) * (last and len(r.places) == 1)
    found = [at_layer]
    if last:
        found.append(head_moment(p, split, whole * end) + before + gathered * end)
    for stage, place in r.places.items():  # a micro-batch is done, or waits for W
        gone = r.parts[stage].whole - (r.parts[stage].inputs + r.parts[stage].gradients) * split
        if place.before is None or (split and place.after is None):
            added = max(cast(p) * end, (p.wide + whole + p.e * split) * end, 3 * held_back)
            found.append(added + sliced * layer + (there + gathered * end) * split + hidden - gone)
        if split:
            matrix = cast(p) * m.dim * max(m.dim, m.ffn_dim) / x.tp
            found.append(whole * layer + before + matrix + there + held_back - gone)
    return max(found)


def rank_bytes(m: Shape, x: Layout, rank: int, e: int = 2, wide: int = 4, on_cpu: bool = False) -> Held:
    """What a pipeline rank holds at the highest point of a step, by kind. AdamW; masters, if weights are narrow."""
    way, data = (x.schedule, x.pp, x.chunks), network(x, "shard").ranks
    p = Piece(m, x.micro_batch_size, m.seq_len // x.cp, e, wide, x.tp, x.sp, x.recompute, on_cpu)
    count = x.micro_batches if x.schedule == "afab" else min(x.micro_batches, 4 * x.pp + x.micro_batches % x.pp)
    row, places = lists_of(*way, count)[rank], rank_places(m, *way)[rank]
    parts = {stage: stage_bytes(p, place) for stage, place in places.items()}
    here = Rank(m, x, p, places, parts, any(action.kind == "W" for action in row), data)
    kept = most_kept(row, parts)

    shared, own = rank_numbers(m, *way, x.tp, x.ep)[rank]
    cut = shared / data + own / network(x, "expert shard").ranks
    sizes = (3, e), (2, wide), (1, wide * (3 if e < wide else 2))
    state = [n_bytes * (cut if x.zero >= stage else shared + own) for stage, n_bytes in sizes]

    first, last = here.ends()
    both = shared + own if x.schedule == "dualpipe" else p.rows * m.dim * (m.tied and first != last)
    update = wide * (both / (data if x.zero else 1) + cut * (x.zero == 1))  # copies of what two ranks sum; slices
    messages = 2 * p.own * m.dim * e * (x.pp > 1)
    tokens = 16 * (x.global_batch_size * m.seq_len + x.micro_batches * p.tokens)
    return Held(*state, kept, max(highest_moment(here), update - kept) + messages + tokens)
