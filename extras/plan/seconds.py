"""Predicts the time of one step: the sum of its matmuls, passes over memory and exposed messages.

    matmul        FLOPs / the reached part of the peak + bytes of its matrices / memory bandwidth
                  + a launch
    elementwise   bytes / memory bandwidth + a launch
    collective    bytes sent by a rank / bandwidth + a start + hops. The bandwidth is `within` in a
                  node; across nodes, it is `between` x the group's ranks in one node, which send at
                  the same time
    all-to-all    rows go to ranks of the same node at `within` and, at the same time, to other
                  nodes at `between`
    pipeline      step 6's bubble, and messages that ranks wait for, as if all stages took equal
                  time
    update        bytes of weights, gradients, masters and moments / memory bandwidth

The bytes explain why small matmuls are slow: [N, K] x [K, M] takes
FLOPs x (1 / peak + (1/N + 1/M + 1/K) / bandwidth).

In a ring of n ranks on k nodes, data makes n - k hops within nodes and k - 1 between nodes (NCCL's
ncclTopoTuneModel, in src/graph/tuning.cc). With more ranks, messages become smaller, but there are
more hops. A network is assumed to be as fast between many nodes as between two.

Left out: contention between messages of a pipeline, of neighbouring groups on shared links, or in a
network of many nodes; NVLink SHARP.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from extras.plan.gpus import Gpu
from extras.plan.layouts import Layout, Network, network, rank_counts
from extras.plan.memory import (
    NARROW,
    MicroBatch,
    micro_batch,
    rank_weights,
    sharded_weights,
)
from extras.plan.shapes import Shape

# The part of a large matmul's speed that fused attention reaches (FlashAttention-2 and 3, tables).
FLASH = 0.75


class Recipe(NamedTuple):
    """The choices of one training framework. Other recipes than COURSE predict published runs."""

    name: str
    flash: bool = False  # attention is one kernel: no scores in memory, and half are not computed
    gradient: float = 2  # bytes of a weight's gradient, as it is accumulated and sent
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch's does
    overlap_dp: bool = False  # sums gradients during backward
    overlap_tp: bool = False  # hides half of backward's messages behind the gradients of weights
    scatter: bool = True  # tp ranks send a slice each over a pipeline boundary, also without SP
    balanced: bool = False  # stages cost the same: the last one has fewer layers, and the head
    library: float = 1.0  # the part of `Gpu.matmul` that its matmul library reached


COURSE = Recipe("course", flash=True, gradient=4, stops=True, overlap_dp=True, scatter=False)


class Seconds(NamedTuple):
    """Where the time of a step goes."""

    compute: float
    again: float  # recomputation
    bubble: float  # a pipeline rank waits for others, and for messages between stages
    tp: float  # `tp`, `cp`, `ep`, `dp`: messages that nothing hides
    cp: float
    ep: float
    dp: float
    update: float

    @property
    def step(self) -> float:
        """The time of the whole step."""
        return sum(self)


def matmul_seconds(gpu: Gpu, rows: float, inner: float, outer: float, count: float = 1) -> float:
    """Seconds of `count` products [rows, inner] x [inner, outer] in one launch."""
    flops = 2 * rows * inner * outer
    numbers = rows * inner + inner * outer + rows * outer
    one = flops / (gpu.flops * gpu.matmul) + NARROW * numbers / gpu.hbm
    return count * one + gpu.launch


def memory_seconds(gpu: Gpu, n_bytes: float, kernels: int = 1) -> float:
    """Seconds to read and write `n_bytes` in all, by a number of kernels."""
    return n_bytes / gpu.hbm + kernels * gpu.launch


def hops_seconds(gpu: Gpu, net: Network) -> float:
    """The latency of a ring: seconds until a few bytes from one rank have reached all others."""
    return gpu.start + (net.ranks - net.nodes) * gpu.hop + (net.nodes - 1) * gpu.hop_between


def collective_seconds(gpu: Gpu, net: Network, n_bytes: float, messages: float = 1) -> float:
    """Seconds to gather (or reduce and scatter) `n_bytes` in a number of messages.

    Other groups are assumed to do the same at the same time.
    """
    if net.ranks == 1:
        return 0.0
    bandwidth = min(gpu.within, net.in_node * gpu.between) if net.nodes > 1 else gpu.within
    sent = (net.ranks - 1) / net.ranks * n_bytes
    return sent / bandwidth + messages * hops_seconds(gpu, net)


def all_to_all_seconds(gpu: Gpu, net: Network, n_bytes: float) -> float:
    """Seconds of an all-to-all. Each rank has `n_bytes`, in equal parts for all ranks and itself.

    In a ring, a node sends to another from one rank, over the cards of all its ranks in the group.
    Here each rank sends rows to other nodes over its own card, while rows for its own node use the
    links inside the node.
    """
    if net.ranks == 1:
        return 0.0
    slower = max((net.in_node - 1) / gpu.within, (net.ranks - net.in_node) / gpu.between)
    return n_bytes / net.ranks * slower + hops_seconds(gpu, net)


def gather_seconds(p: MicroBatch, gpu: Gpu) -> float:
    """Seconds to gather the input of a block, or to reduce and scatter its output, over tp."""
    return collective_seconds(gpu, network(p.x, "tp"), p.tokens * p.m.dim * NARROW)


def products_of(p: MicroBatch, experts: bool) -> list[tuple[float, float, float, float]]:
    """A layer's products on one rank, as (rows, inner, outer, products in one launch).

    Matrices that multiply the same input count as one: q, k and v; gate and up.
    """
    m = p.m
    tp = p.x.tp
    up = 1 if m.gpt else 2
    products = [(p.tokens, m.dim, m.dim / tp + 2 * p.kv, 1), (p.tokens, m.dim / tp, m.dim, 1)]
    width = m.shared_experts * m.expert_width if experts else m.ffn_dim  # visited by all tokens
    if width:
        products += [(p.tokens, m.dim, up * width / tp, 1), (p.tokens, width / tp, m.dim, 1)]
    if experts:
        n_experts = m.experts / p.x.ep
        rows = p.visits / n_experts
        products.append((rows, m.dim, up * m.expert_width, n_experts))
        products.append((rows, m.expert_width, m.dim, n_experts))
        products.append((p.share, m.dim, m.experts, 1))  # the router
    return products


def attention_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe) -> tuple[float, float]:
    """Seconds of one layer's attention without its projections: (forward, backward)."""
    m = p.m
    tp = p.x.tp
    if recipe.flash:  # a token sees half of the keys, on average
        flops = p.tokens * m.seq_len / 2 * 4 * m.dim / tp
        forward = flops / (gpu.flops * gpu.matmul * FLASH)
        return forward + gpu.launch, 2.5 * forward + gpu.launch
    heads = p.x.micro_batch_size * m.n_heads / tp
    scores = p.tokens * m.seq_len * m.n_heads / tp
    product = matmul_seconds(gpu, m.seq_len, m.head_dim, m.seq_len, heads)
    # Bytes a score: softmax reads 2 and writes 2; dropout reads 2, writes 2 and a mask of 1. In
    # backward they move 6 and 5.
    forward = 2 * product + memory_seconds(gpu, 9 * scores, 2)
    return forward, 4 * product + memory_seconds(gpu, 11 * scores, 2)


def elementwise_seconds(
    p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool
) -> tuple[float, float]:
    """Seconds of one layer's passes over memory between its matmuls: (forward, backward)."""
    m = p.m
    # between the blocks: 2 norms x 2 passes, 2 sums x 3; GPT has 2 masks of 1 byte
    between = p.own * m.dim * NARROW * (11 if m.gpt else 10)
    width = p.share * m.ffn_dim
    rows = 0.0
    if experts:
        width = (p.visits + p.share * m.shared_experts) * m.expert_width
        rows = p.visits * m.dim * NARROW * 2 * 3  # rows are sorted, sent, and put back
    qkv = p.tokens * (m.dim / p.x.tp + 2 * p.kv) * (2 if recipe.flash else 6)
    inside = NARROW * (qkv + width * (2 if m.gpt else 3))
    forward = memory_seconds(gpu, between + inside + rows, 12)
    return forward, memory_seconds(gpu, 1.5 * between + 1.7 * inside + rows, 20)


def tp_seconds(
    p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool, repeats: bool, matmul: float
) -> float:
    """Exposed seconds of one layer's messages over tp.

    A block gathers and scatters (without SP, in one all-reduce). Routed experts only gather, and
    only without SP; shared experts gather and scatter. `repeats`: recomputation repeats forward's
    messages; if `recipe.stops`, without those after the last matmul. `matmul`: seconds of all
    matmuls in forward.
    """
    sp = p.x.sp
    halves = 4  # messages in forward
    until_last = 3 if sp else 2
    if experts:
        shared = p.m.shared_experts > 0
        halves = 2 + 2 * shared + (not sp)
        until_last = 2 + shared
    repeated = repeats * (until_last if recipe.stops else halves)
    half = gather_seconds(p, gpu)
    hidden = min(halves * half / 2, matmul) if recipe.overlap_tp else 0.0
    return (2 * halves + repeated) * half - hidden


def cp_seconds(p: MicroBatch, gpu: Gpu, core: tuple[float, float]) -> float:
    """Seconds of a ring's messages that one layer's attention (`core`) does not hide.

    Recomputation repeats forward's messages. Full recomputation repeats attention, too; selective
    has kept its output, so nothing hides them.
    """
    cp = p.x.cp
    net = network(p.x, "cp")
    keys = p.tokens * 2 * p.kv * cp  # numbers of all ranks' keys and values
    # bytes of a number, and of its gradient in fp32, which makes one hop more
    both = NARROW + 4 * cp / max(1, cp - 1)
    ring = collective_seconds(gpu, net, keys * NARROW)
    forward = max(0.0, ring - core[0])
    again = {"none": 0.0, "selective": ring, "full": forward}[p.x.recompute]
    backward = max(0.0, collective_seconds(gpu, net, keys * both) - core[1])
    return forward + again + backward


def layer_work(p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool) -> list[float]:
    """Seconds of one layer: computation, recomputation, exposed messages over tp, cp and ep."""
    products = [matmul_seconds(gpu, *product) for product in products_of(p, experts)]
    matmul = sum(products)
    core = attention_seconds(p, gpu, recipe)
    passes = elementwise_seconds(p, gpu, recipe, experts)
    skipped = products[-1] if recipe.stops and not experts else 0.0
    again = {
        "none": 0.0,
        "selective": passes[0] / 2,  # norms, silu, ...
        "full": core[0] + passes[0] + matmul - skipped,
    }[p.x.recompute]
    repeats = p.x.recompute != "none"
    tp = tp_seconds(p, gpu, recipe, experts, repeats, matmul)
    ep = 0.0
    if experts:  # there and back, in forward and in backward
        rows = p.visits * p.m.dim * NARROW
        ep = 2 * (2 + repeats) * all_to_all_seconds(gpu, network(p.x, "ep"), rows)
    compute = 3 * matmul + sum(core) + sum(passes)  # two gradients take as long each
    return [compute, again, tp, cp_seconds(p, gpu, core), ep]


def head_work(p: MicroBatch, gpu: Gpu) -> list[float]:
    """The same of the output projection and the loss."""
    vocab = p.m.vocab_size / p.x.tp
    matmul = matmul_seconds(gpu, p.tokens, p.m.dim, vocab)
    # 16 bits, then fp32: maximum, exponential, sum
    logits = memory_seconds(gpu, 14 * p.tokens * vocab, 5)
    return [3 * matmul + 1.5 * logits, 0.0, 2 * gather_seconds(p, gpu), 0.0, 0.0]


@lru_cache(maxsize=100_000)
def works(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> np.ndarray:
    """Seconds of a layer without experts, of one with experts, and of the head: [3, part]."""
    gpu = gpu._replace(matmul=gpu.matmul * recipe.library)
    p = micro_batch(m, x)
    layers = [layer_work(p, gpu, recipe, kind and m.experts > 0) for kind in (False, True)]
    return np.array([*layers, head_work(p, gpu)])


def rank_works(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> np.ndarray:
    """Seconds of one micro-batch on each pipeline rank: [pp, part], as `layer_work` lists them."""
    # Flags on which the work does not depend have one value, so that the cache finds it again
    cut = replace(x, pp=1, dp=1, zero=0, global_batch_size=0, schedule="1f1b", chunks=2)
    layer, *others = works(m, cut, gpu, recipe)
    each = rank_counts(m, x.pp, x.stages)[:, :3] @ [layer, *others]
    if recipe.balanced and x.pp > 1:  # each has the same number of layers, or one less
        mean = each.mean(0)
        layers = mean.sum() / layer.sum()
        each[0] = mean * ceil(layers) / layers
        each[1:] = (mean * x.pp - each[0]) / (x.pp - 1)
    return each


def messages_waited_for(x: Layout) -> int:
    """How many messages between stages nothing hides.

    The first micro-batch moves down through all stages, and the last one up again. In 1F1B a rank
    also waits for its neighbour's messages in between. In an interleaved schedule it does not, if a
    message takes no longer than a stage's forward.
    """
    n_messages = 2 * (x.pp * x.stages - 1)
    if x.schedule == "1f1b":
        n_messages += 2 * ((x.micro_batches - 1) * (x.pp - 1) // x.pp)
    return n_messages


def message_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of a message between two stages."""
    sent = (p.share if recipe.scatter else p.own) * p.m.dim * NARROW
    if network(p.x, "pp").in_node == 1:
        seconds = gpu.start + sent / gpu.between + gpu.hop_between
    else:
        seconds = gpu.start + sent / gpu.within + gpu.hop
    if recipe.scatter and not p.x.sp:
        seconds += gather_seconds(p, gpu)
    return seconds


def bubble_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe, stage: float) -> float:
    """Seconds in which a pipeline rank waits for others, and for messages between stages.

    Every stage is assumed to take the mean, `stage` seconds.
    """
    idle = (p.x.pp - 1) * stage
    return idle + messages_waited_for(p.x) * message_seconds(p, gpu, recipe)


def data_seconds(
    x: Layout, gpu: Gpu, recipe: Recipe, weights: list[float], layers: float, micro_batch: float
) -> float:
    """Seconds of exposed sums of gradients and gathers of weights, over ZeRO's ranks.

    `weights`, `layers`: of a rank. `micro_batch`: seconds of one. With `overlap_dp`, gradients are
    sent layer by layer: the last micro-batch can hide the all-reduce of ZeRO 0; all micro-batches
    can hide the sums of ZeRO 2 and 3, and the gathers of ZeRO 3. At least a twentieth of these
    messages is exposed: the last gradient is sent when nothing is left to compute.
    """
    n = x.micro_batches
    messages = layers if recipe.overlap_dp else 1
    sums, late_sums, gathers, late_gathers = {  # `late`: after computation
        0: (2, 0, 0, 0),  # an all-reduce has two halves
        1: (0, 1, 0, 1),
        2: (n, 0, 0, 1),
        3: (n, 0, 2 * n, 0),
    }[x.zero]
    hidden = 0.0
    exposed = 0.0
    for number, dim in zip(weights, ("shard", "expert shard"), strict=True):
        if number:
            net = network(x, dim)
            summed = collective_seconds(gpu, net, number * recipe.gradient, messages)
            gathered = collective_seconds(gpu, net, number * NARROW, messages)
            hidden += sums * summed + gathers * gathered
            exposed += late_sums * summed + late_gathers * gathered
    if recipe.overlap_dp:
        hidden = max(hidden - micro_batch * (n if x.zero >= 2 else 1), 0.05 * hidden)
    return hidden + exposed


def update_seconds(x: Layout, gpu: Gpu, recipe: Recipe, weights: list[float]) -> float:
    """Seconds of clipping and AdamW on a rank's part of the state, by the bytes that they move."""
    passes = 2 * 12 + 4 * recipe.gradient + 8
    updated = sharded_weights(x, weights) if x.zero else sum(weights)
    return memory_seconds(gpu, updated * passes + 4 * sum(weights), 50)


def step_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> Seconds:
    """Seconds of a step under one layout."""
    each = rank_works(m, x, gpu, recipe)
    busiest = max(each.tolist(), key=sum)
    compute, again, tp, cp, ep = (x.micro_batches * part for part in busiest)
    stage = float(each.sum()) / x.pp / x.stages
    bubble = bubble_seconds(micro_batch(m, x), gpu, recipe, stage)
    weights = max(rank_weights(m, x), key=sum)
    dp = data_seconds(x, gpu, recipe, weights, m.n_layers / x.pp, sum(busiest))
    update = update_seconds(x, gpu, recipe, weights)
    return Seconds(compute, again, bubble, tp, cp, ep, dp, update)
