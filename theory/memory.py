"""Bytes that a rank of the course's trainer holds: what stays, what waits for backward, and the highest moment.

    a step      update ............ forward .. backward .. forward .. backward ............ update
    what stays  weights, gradients (from the first backward on), masters, moments
    waits       activations of each micro-batch from its F to its B (with W apart: inputs and gradients until W)

A rank's list of actions is walked once, module by module, and the highest point kept (`most_kept`). e, w: bytes of an
element, and of one that is added up. T: tokens. h: dim. V, f: a rank's rows of the vocabulary, and part of ffn_dim.
U: numbers of a ZeRO unit. N: numbers of a matrix. For a moment, five terms rise above what waits:

    logits      2 w T V, over tp w T V (16 bits: and e T V); in chunks of C tokens 1 w C V more, and w V h + e T h
    casts       (e + w) N: a gradient as autograd makes it and as it is added up; w N + w U as ZeRO moves it (`added`)
    units       of ZeRO: e U of each that is gathered; w U (1 + 1/n) of a gradient that is being summed over n ranks
    products    2 e T f besides the four that SwiGLU keeps, 3 e T f with W apart; before it, what is done again
    update      w of what two ranks sum (`sum_tied`, `sum_partial_gradients`), and of ZeRO 1's sums (`reduce`)

The bound is held against the dry run, which counts every tensor: tests/test_plan.py.
"""

from functools import lru_cache
from typing import NamedTuple

from common.schedules import Action, Place
from theory.layouts import Layout, balance, network, schedule_of, stages
from theory.shapes import Shape, end_weights, layer_weights

MOST = 2**30  # bytes of a chunk's logits, wide (variants/chunked_loss.py)
CHUNK = 2048  # tokens whose logits exist at the same time: --loss-chunk, as the planner has it


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
    def routed(self) -> float:
        """Those that its routers see; then so many choices reach its experts, if all are equally busy."""
        return self.tokens / self.tp

    @property
    def rows(self) -> int:
        """Of the vocabulary's matrices."""
        return -(-self.m.vocab_size // self.tp)

    @property
    def at_once(self) -> int:
        """Tokens whose logits exist at the same time."""
        most = max(1, MOST // (self.rows * self.wide))
        return min(self.tokens, self.chunk, most) if self.chunk else self.tokens


def norm_bytes(p: Piece) -> float:
    """What a norm keeps of a token: its input, one wide number; on a CPU also what its kernels keep."""
    return p.m.dim * p.e + p.wide + p.on_cpu * p.m.dim * (2 * p.wide - p.e if p.e < p.wide else p.wide)


def layer_bytes(p: Piece, experts: bool) -> float:
    """What one layer keeps until its backward; all inside the blocks is 1/tp wide, with SP all between is, too.

    Two norms. Attention: input, q, k, v, output and a number a head. MLP: input, gate, up, silu(gate), the product.
    Experts, of 1/tp of the tokens: the same for each that a token visits, and their outputs. With full recomputation
    only the layer's input stays, with selective recomputation also what matrices and attention have made.
    """
    m, e, wide, tp = p.m, p.e, p.wide, p.tp
    if p.recompute == "full":
        return p.own * m.dim * e
    kv_dim = m.kv_dim * max(1, tp / m.n_kv_heads)
    kept_kv = kv_dim if p.on_cpu or e == 2 else m.dim  # a GPU's kernels in fp32 want as many k as q
    scores = wide * m.n_heads
    if p.recompute == "selective":
        attention = e * (2 * m.dim + 2 * kv_dim) + scores
        mlps = m.shared_experts * m.expert_width if experts else m.ffn_dim
        outputs = e * m.dim * (1 + (m.shared_experts > 0 if experts else 1))
        visits = experts * (m.experts_per_token * e * (2 * m.expert_width + m.dim) + m.experts * wide)
        return p.own * m.dim * e + p.tokens * ((attention + 2 * mlps * e) / tp + outputs) + p.routed * visits
    attention = m.dim * e + (e * (2 * m.dim + 2 * kept_kv) + scores) / tp
    mlp = m.dim * e + 4 * m.ffn_dim * e / tp
    if experts:
        visits = m.experts_per_token * e * (2 * m.dim + 4 * m.expert_width)
        mlp = (visits + m.dim * wide + 2 * m.experts * wide) / tp
        mlp += m.shared_experts * 4 * m.expert_width * e / tp + (m.shared_experts > 0 and tp > 1) * m.dim * e
    return p.own * 2 * norm_bytes(p) + p.tokens * (attention + mlp)


def waiting_bytes(p: Piece, experts: bool) -> tuple[float, float]:
    """What one layer keeps between B and W: the inputs of its matrices, and the gradients of their outputs."""
    m, kv_dim = p.m, p.m.kv_dim * max(1, p.tp / p.m.n_kv_heads)
    inputs, gradients = m.dim + m.dim / p.tp, (m.dim + 2 * kv_dim) / p.tp + m.dim  # the input of q, k and v once
    mlps, width = (m.shared_experts, m.expert_width) if experts else (1, m.ffn_dim)
    inputs, gradients = inputs + mlps * (m.dim + width / p.tp), gradients + mlps * (m.dim + 2 * width / p.tp)
    visits = experts * m.experts_per_token / p.tp
    inputs, gradients = inputs + visits * (m.dim + width), gradients + visits * (m.dim + 2 * width)
    return p.tokens * p.e * inputs, p.tokens * p.e * gradients


def end_bytes(p: Piece) -> float:
    """What norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities.

    In chunks: the gradients of the hidden states and of the head, which are known since forward.
    """
    head = p.m.dim * p.e * p.tokens
    loss = p.rows * p.m.dim * p.e if p.at_once < p.tokens else p.tokens * p.wide * p.rows
    return p.own * norm_bytes(p) + head + loss


class Kept(NamedTuple):
    """Bytes of one micro-batch on a stage."""

    whole: float  # from F to B
    inputs: float  # of them, until W
    gradients: float  # from B to W


def stage_bytes(p: Piece, place: Place) -> Kept:
    """What a stage keeps. Tables of RoPE are shared by its layers; what was done again is kept until W from B on."""
    kinds = [p.m.has_experts(n) for n in place.layers]
    tables = 2 * p.seq * p.m.head_dim * p.wide
    ends = (place.before is None) * (p.tp > 1) * 9 * p.tokens + (place.after is None) * end_bytes(p)
    each = {flag: (layer_bytes(p, flag), *waiting_bytes(p, flag)) for flag in set(kinds)}
    whole, inputs, gradients = (sum(each[flag][i] for flag in kinds) for i in range(3))
    if p.recompute != "none":
        inputs, gradients = 0.0, inputs + gradients
    return Kept(whole + tables + ends, inputs, gradients)


class Module(NamedTuple):
    """Backward of a module, in bytes above what was there when it began."""

    unit: str  # of ZeRO, whose gradient it completes
    rise: float  # at its highest point
    change: float = 0.0  # at its end
    sends: float = 0.0  # of these, of the gradient that is then under way


def most_kept(row: list[Action], kept: dict[int, Kept], modules: dict | None = None, backward: bool = True) -> float:
    """The most that a rank's list of actions keeps at a time; `kept` by stage, `modules` by (kind, stage), in order.

    A gradient under way lands when the next one leaves, or its unit makes another. Not `backward`: of what is born in
    forward.
    """
    held, most, unit, way, split = 0.0, 0.0, "", 0.0, any(action.kind == "W" for action in row)
    for kind, _, stage in row:
        k, here = kept[stage], held
        for module in (modules or {}).get((kind, stage), ()):
            way *= module.unit != unit
            most = max(most, here + way + module.rise)
            here += module.change
            unit, way = (module.unit, module.sends) if module.sends else (unit, way)
        waits = split * (k.inputs + k.gradients * backward)
        held += {"F": k.whole, "B": waits - k.whole, "W": -waits}[kind]
        most = max(most, held + way)
    return most


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
    """One pipeline rank in a step. From `cast` on: bytes a number."""

    p: Piece
    ep: int
    places: dict[int, Place]  # its stages
    split: bool  # W comes apart from B
    matrix: int  # numbers of the embedding, and of the head
    tied: bool  # both are one, and serve the same micro-batches
    cast: int  # of a gradient as it is made, and as wide as it is added up
    buffer: int  # of a gradient that ZeRO moves into its unit's
    sent: float  # the same, with the slice that is its sum
    gathered: int  # of weights that ZeRO gathers
    slices: float  # of experts' gradients: the slice that is their sum


def largest(r: Rank, experts: bool) -> float:
    """Numbers of a layer's largest matrix."""
    m = r.p.m
    mlp = m.dim / r.p.tp * max(m.dim, m.ffn_dim)
    return m.dim * m.experts / r.ep * m.expert_width if experts else mlp


def logits_at_once(p: Piece) -> float:
    """Wide tensors of the logits' shape: logarithms, two gradients; over tp the gradient, and logits, also narrow."""
    return 3 if p.tp == 1 else 2 + (p.e < p.wide) * p.e / p.wide


def head_module(r: Rank) -> Module:
    """Gradients of the softmax and the logits; then the matrix'.

    In chunks all but its cast was in forward. With W apart it is added later, and if tied with the embedding's.
    """
    p, later, chunked = r.p, r.split or r.tied, r.p.at_once < r.p.tokens
    made, added = r.cast * r.matrix, (p.wide + r.buffer) * r.matrix * (not later)
    softmax = p.wide * p.rows * p.tokens
    rise = max((logits_at_once(p) - 1) * softmax, max(p.e / p.wide * softmax + p.e * r.matrix, made, added) - softmax)
    rise = max(made, added - p.e * r.matrix) if chunked else rise
    change = p.wide * r.matrix * later - end_bytes(p)
    return Module("head" * (not later), rise + p.own * p.m.dim * p.e, change, r.sent * r.matrix * (not later))


def layer_module(r: Rank, experts: bool) -> Module:
    """What is done again, the gradients of SwiGLU's products, and that of a matrix, unless W makes it.

    With experts, before these, in wide numbers: the gradients of out, and of the products of rows and scores. Where
    forward is done again, its rows are there four times when they come home: as they left and as they came, twice.
    """
    p, m, e, matrix = r.p, r.p.m, r.p.e, largest(r, experts)
    again = layer_bytes(p._replace(recompute="none"), experts) - layer_bytes(p, experts)
    shared, own = layer_weights(m, experts, p.tp, r.ep)
    width, visits = (m.expert_width, m.experts_per_token) if experts else (m.ffn_dim, 1)
    product, gathered = p.routed * visits * width * e, p.tokens * m.dim * e * (p.tp > 1 and p.sp)
    output = p.routed * visits * m.dim * e if experts else gathered  # its gradient, of all rows or tokens
    made = (1 + experts) * e * matrix  # of experts one by one, and then in one tensor
    moved = made + (e < p.wide) * p.wide * matrix if experts else p.wide * matrix
    added = r.buffer * (own or shared) + max(moved, 2 * product)
    most = output + 3 * product if r.split else max(output + product + made, r.cast * matrix, added)
    scored = p.routed * m.dim * p.wide * (2 * visits + (e < p.wide))
    visiting = 4 * output * (r.ep > 1 and p.recompute == "full")
    most = max(most, scored, visiting) if experts else most
    change = sum(waiting_bytes(p, experts)) * r.split - layer_bytes(p, experts)
    rise = p.own * m.dim * e + max(max(output, gathered) * (1 + (p.batch > 1)), again + most)
    return Module("", rise, change, r.sent * shared * (not r.split))


def embedding_module(r: Rank) -> Module:
    """The gradient of its matrix; if that is tied, also the sum with the head's, which has waited."""
    p, apart = r.p, r.split
    added = 0 if apart else max(2 * p.wide, r.buffer) if r.tied else p.wide + r.buffer
    rise = max(p.tokens * p.m.dim * p.e + p.e * r.matrix, max(r.cast, added) * r.matrix)
    change = p.wide * r.matrix * (1 if apart else -r.tied)
    return Module("embedding" * (not apart), rise, change, r.sent * r.matrix * (not apart))


def modules_of(r: Rank) -> dict[tuple[str, int], list[Module]]:
    """By kind of action and stage. With W apart, B finds the gradients of both ends, and adds them at its end.

    Such gradients are held by others too, so autograd keeps a copy (`copied`) if there is nothing to add it to. Of a
    layer's two units, experts end before the rest: only the rest is under way when the layer is done. But the experts'
    sum starts while their last gradient is still there (`slices`).
    """
    p, m, found, layers = r.p, r.p.m, {}, [n for place in r.places.values() for n in place.layers]
    each = {flag: layer_module(r, flag) for flag in {m.has_experts(n) for n in layers}}
    units = {flag: layer_weights(m, flag, p.tp, r.ep) for flag in each}
    waits, copied = p.wide * r.matrix * (r.tied and r.split), p.wide * (r.buffer > 0)
    there = r.gathered * max(map(sum, units.values()), default=0) * (len(layers) if r.split else min(2, len(layers)))
    there += r.gathered * r.matrix * r.tied + waits
    moved = {flag: r.buffer * sum(numbers) + r.slices * numbers[1] for flag, numbers in units.items()}
    added = {flag: there + moved[flag] + max(r.cast, p.e + copied) * largest(r, flag) for flag in each}
    for stage, (_, numbers, before, after) in r.places.items():
        kinds = [(f"{n}", m.has_experts(n)) for n in reversed(numbers)]
        found["W", stage] = [Module(name, added[flag], 0.0, r.sent * units[flag][0]) for name, flag in kinds]
        found["B", stage] = [each[flag]._replace(unit=name * (not r.split)) for name, flag in kinds]
        found["B", stage] += [embedding_module(r)] * (before is None)
        if r.split and None in (before, after):
            rise = max((copied + r.buffer) * r.matrix, waits)
            found["B", stage].append(Module("head" if after is None else "embedding", rise, 0.0, r.sent * r.matrix))
        found["B", stage] = [module._replace(rise=module.rise + there) for module in found["B", stage]]
        if after is None:
            head, gathered = head_module(r), r.gathered * r.matrix
            found["B", stage].insert(0, head._replace(rise=head.rise + gathered + there * r.split))
            if p.at_once < p.tokens:  # loss and gradients, in forward
                logits = p.rows * p.at_once
                most = max(p.wide * logits * logits_at_once(p), p.e * (logits + r.matrix))
                most += p.wide * r.matrix + p.tokens * m.dim * p.e + gathered
                found["F", stage] = [Module("", stage_bytes(p, r.places[stage]).whole + most)]
    return found


def rank_bytes(m: Shape, x: Layout, rank: int, e: int = 2, wide: int = 4, on_cpu: bool = False) -> Held:
    """What a pipeline rank holds at the highest point of a step, by kind. AdamW; masters, if weights are narrow."""
    way, data = (x.schedule, x.pp, x.chunks), network(x, "shard").ranks
    p = Piece(m, x.micro_batch_size, m.seq_len // x.cp, e, wide, x.tp, x.sp, x.recompute, on_cpu)
    count = x.micro_batches if x.schedule == "afab" else min(x.micro_batches, 4 * x.pp + x.micro_batches % x.pp)
    row, places = lists_of(*way, count)[rank], rank_places(m, *way)[rank]
    parts = {stage: stage_bytes(p, place) for stage, place in places.items()}
    first, last = (any(getattr(place, to) is None for place in places.values()) for to in ("before", "after"))
    matrix, whole, tied = p.rows * m.dim, wide * (x.zero >= 2), m.tied and first and last and x.schedule != "dualpipe"
    split = any(action.kind == "W" for action in row)
    a_number = e + wide * (e < wide), whole, whole * (1 + 1 / data), e * (x.zero == 3 and not x.zero_keep)
    here = Rank(p, x.ep, places, split, matrix, tied, *a_number, whole / network(x, "expert shard").ranks)
    kept, highest = most_kept(row, parts), most_kept(row, parts, modules_of(here))

    shared, own = rank_numbers(m, *way, x.tp, x.ep)[rank]
    cut = shared / data + own / network(x, "expert shard").ranks
    sizes = (3, e), (2, wide), (1, wide * (3 if e < wide else 2))
    state = [n_bytes * (cut if x.zero >= stage else shared + own) for stage, n_bytes in sizes]
    state[0] += e * (shared + own) * x.zero_keep

    if x.schedule == "dualpipe":
        both = cut if x.zero else shared + own
    else:
        both = matrix * (m.tied and first != last) / (data if x.zero else 1)
    update = wide * (both + cut * (x.zero == 1))  # copies of what two ranks sum; slices
    messages = 2 * p.own * m.dim * e * (x.pp > 1)
    tokens = 16 * (x.global_batch_size * m.seq_len + x.micro_batches * p.tokens)
    return Held(*state, kept, max(highest, update) - kept + messages + tokens)
