"""Estimates the most bytes that a rank holds in a step, by formulas that fit on a page.

    state       weights, gradients (from the first backward on), masters and moments: whole, or the
                shards of ZeRO
    waiting     activations of each micro-batch, from its F to its B, along the rank's actions
    temporary   what an action needs in addition, while it runs

The temporary bytes depend on these sizes of one rank:

    T, h, V, f  tokens of a micro-batch, width of the model, rows of the vocabulary, part of ffn_dim
    N, M, U     weights of embedding or head (V h), of a layer's largest matrix, of a layer
    e, w        bytes of a number: e = 2; but w = 4 for logits, and for gradients that accumulate
    Z           Z = w from ZeRO 2 on, because a unit's gradients are sent from a buffer; else 0

While activations wait, the temporary bytes are the largest of `loss`, `head` and `layer`:

    loss        3 w T V for logits, their logarithms and their gradient (the logarithms wait for B)
    head        (e + w + Z) N for its gradient: as autograd makes it, in fp32, and in ZeRO's buffer.
                What head and loss have kept is free by then, and is subtracted
    layer       Z U, and the larger of 3 e T f + e T h for gradients of activations, with the
                activations that are recomputed, and (e + w) M for a weight's largest gradient

    embedding   (e + w) N, when no activation waits any more; w N more beside a tied head
    always      Z U for the unit that is being sent, or Z N if that is more; in ZeRO 3 also 2 e U
                for two gathered layers
    update      w for each gradient that is summed into a new tensor: ZeRO 1's shards
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from extras.plan.gpus import COMMUNICATOR, CONTEXT
from extras.plan.layouts import ORDERS, Layout, network, rank_counts, rank_stages
from extras.plan.shapes import Shape, layer_weights

NARROW = 2  # bytes of a number
WIDE = 4  # bytes of a number that is accumulated


class Held(NamedTuple):
    """Bytes that a rank holds, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float

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
    share: float  # its share of the work inside blocks, in tokens; also the tokens that it routes
    visits: float  # rows that its experts compute if all experts are equally busy
    kv: float  # channels of its keys; its values have as many
    rows: int  # of the vocabulary, in its shard of the embedding or of the head


def micro_batch(m: Shape, x: Layout) -> MicroBatch:
    """The sizes of one micro-batch of a model under a layout."""
    tokens = x.micro_batch_size * (m.seq_len // x.cp)
    share = tokens / x.tp
    return MicroBatch(
        m,
        x,
        tokens,
        own=share if x.sp else tokens,
        share=share,
        visits=share * m.experts_per_token,
        kv=m.kv_dim / min(x.tp, m.n_kv_heads),
        rows=-(-m.vocab_size // x.tp),
    )


def norm_bytes(p: MicroBatch) -> float:
    """Bytes that a norm keeps: its input, and one wide number for each token."""
    return p.own * (p.m.dim * NARROW + WIDE)


def layer_bytes(p: MicroBatch, experts: bool, recompute: str) -> float:
    """Bytes that a layer keeps until backward.

    tp shards activations inside blocks; SP shards those between blocks. Attention keeps its input,
    q, k, v, its output and a number for each head of each token. An MLP keeps its input, gate, up,
    silu(gate) and silu(gate) * up. For each of its tokens, an expert keeps these five and its
    output. Full recomputation keeps only the layer's input; selective also keeps the outputs of
    matrix products and of attention.
    """
    m = p.m
    if recompute == "full":
        return p.own * m.dim * NARROW
    selective = recompute == "selective"
    products = 2 if selective else 4
    block = p.tokens * m.dim * NARROW  # a block's input, or its last output
    kept = block + p.tokens * 2 * p.kv * NARROW
    kept += p.share * (2 * m.dim * NARROW + WIDE * m.n_heads)
    kept += p.own * m.dim * NARROW if selective else 2 * norm_bytes(p)
    if not experts:
        return kept + block + p.share * NARROW * products * m.ffn_dim
    kept += p.visits * NARROW * (products * m.expert_width + 2 * m.dim)
    kept += p.share * WIDE * (m.dim + 2 * m.experts)  # of the router, in wide numbers
    if m.shared_experts:
        kept += block + p.share * NARROW * products * m.shared_experts * m.expert_width
    return kept


def end_bytes(p: MicroBatch) -> float:
    """Bytes that norm, head and loss keep: the inputs of norm and head, and all logarithms."""
    return norm_bytes(p) + p.tokens * p.m.dim * NARROW + p.rows * p.tokens * WIDE


def stage_bytes(p: MicroBatch, layers: Iterable[int]) -> float:
    """Bytes that a stage keeps of a micro-batch, from its F to its B."""
    each = [layer_bytes(p, experts, p.x.recompute) for experts in (False, True)]
    kept = sum(each[p.m.has_experts(n)] for n in layers)
    return kept + end_bytes(p) if p.m.n_layers - 1 in layers else kept


def waiting_bytes(m: Shape, x: Layout, rank: int) -> float:
    """The most bytes of activations that wait at the same time on a pipeline rank."""
    p = micro_batch(m, x)
    kept = {
        stage: stage_bytes(p, layers)
        for stage, layers in rank_stages(m, x.pp, x.stages, rank).items()
    }
    n = x.micro_batches
    n = min(n, 2 * x.pp + n % x.pp)  # the warm-up ends within two rounds; more need no more memory
    changes = []
    for action in ORDERS[x.schedule](x.pp, n, x.stages, rank):
        changes.append(kept[action.stage] if action.kind == "F" else -kept[action.stage])
    return max(accumulate(changes))


def rank_weights(m: Shape, x: Layout) -> list[list[float]]:
    """The weights on each pipeline rank: [those replicated over dp x cp, its experts']."""
    layers = [layer_weights(m, experts, x.tp, x.ep) for experts in (False, True)]
    matrix = -(-m.vocab_size // x.tp) * m.dim
    head = m.dim if m.tied else m.dim + matrix
    weights = rank_counts(m, x.pp, x.stages) @ np.array([*layers, (head, 0), (matrix, 0)])
    if m.tied and x.pp > 1:
        weights[-1, 0] += matrix  # the first rank and the last one have a copy each
    return weights.tolist()


def total_weights(m: Shape) -> float:
    """The number of weights of the whole model."""
    return sum(rank_weights(m, Layout())[0])


def sharded_weights(x: Layout, weights: list[float]) -> float:
    """How many of a rank's weights are in its ZeRO shards."""
    shared, own = weights
    return shared / network(x, "shard").ranks + own / network(x, "expert shard").ranks


def state_bytes(m: Shape, x: Layout, rank: int) -> tuple[float, float, float]:
    """Bytes that a rank always holds: (weights, gradients, optimizer: masters and two moments)."""
    weights = rank_weights(m, x)[rank]
    whole = sum(weights)
    shard = sharded_weights(x, weights)
    held, summed, updated = (shard if x.zero >= stage else whole for stage in (3, 2, 1))
    return NARROW * held, WIDE * summed, 3 * WIDE * updated


def head_temporary(p: MicroBatch) -> float:
    """Temporary bytes of head and loss: `loss` and `head` of this file's table."""
    matrix = p.rows * p.m.dim
    logits = WIDE * p.rows * p.tokens
    gradient = (NARROW + WIDE + WIDE * (p.x.zero >= 2)) * matrix
    return max(2 * logits, gradient - end_bytes(p))


def layer_temporary(p: MicroBatch, experts: bool) -> float:
    """Temporary bytes of a layer: `layer` of this file's table.

    Its experts are one ZeRO unit; their gate matrices are one tensor.
    """
    m = p.m
    x = p.x
    if experts:
        largest = m.experts / x.ep * m.dim * m.expert_width
        gradients = p.visits * (m.dim + 3 * m.expert_width)
    else:
        largest = m.dim * max(m.dim, m.ffn_dim) / x.tp
        gradients = p.tokens * m.dim + p.share * 3 * m.ffn_dim
    again = layer_bytes(p, experts, "none") - layer_bytes(p, experts, x.recompute)
    unit = WIDE * (x.zero >= 2) * max(layer_weights(m, experts, x.tp, x.ep))
    return unit + max(again + NARROW * gradients, (NARROW + WIDE) * largest)


def rank_temporary(p: MicroBatch, rank: int, waiting: float) -> float:
    """Temporary bytes of a pipeline rank, on which `waiting` bytes of activations may wait."""
    m = p.m
    x = p.x
    *layers, last, first = rank_counts(m, x.pp, x.stages)[rank].tolist()
    kinds = [experts for experts in (False, True) if layers[experts]]
    rest, experts = max((layer_weights(m, kind, x.tp, x.ep) for kind in kinds), key=sum)
    matrix = p.rows * m.dim
    always = 0.0
    if x.zero >= 2:
        always += WIDE * (max(rest, matrix) if first or last else rest)
    if x.zero == 3:
        always += NARROW * 2 * (rest + experts)
    running = [layer_temporary(p, kind) for kind in kinds]
    if last:
        running.append(head_temporary(p))
    embedding = first * (NARROW + WIDE + WIDE * (m.tied and last)) * matrix
    return always + max(max(running), embedding - waiting)


def rank_bytes(m: Shape, x: Layout, rank: int) -> Held:
    """The most bytes that a pipeline rank holds in a step, by kind."""
    state = state_bytes(m, x, rank)
    waiting = waiting_bytes(m, x, rank)
    temporary = rank_temporary(micro_batch(m, x), rank, waiting)
    # The update comes when nothing waits, and needs a third of the optimizer's bytes
    if x.zero == 1:
        temporary = max(temporary, state[2] / 3 - waiting)
    return Held(*state, waiting, temporary)


def held(m: Shape, x: Layout) -> Held:
    """Bytes that a layout's fullest rank holds on a GPU.

    They include CUDA's context and the buffers of NCCL's communicators, which PyTorch's allocator
    does not count.
    """
    ranks = {0, min(1, x.pp - 1), x.pp - 1}  # one of them is the fullest
    fullest = max((rank_bytes(m, x, rank) for rank in ranks), key=sum)
    sizes = [x.pp, x.cp, x.tp, x.dp * x.cp, x.dp * (x.cp > 1)]
    if m.experts:
        sizes += [x.ep, x.cp * x.tp, x.dp * x.cp * x.tp // x.ep]
    groups = (x.world > 1) + sum(size > 1 for size in sizes)
    outside = CONTEXT + groups * COMMUNICATOR
    return fullest._replace(temporary=fullest.temporary + outside)
