"""Predicts the time of one step: the sum of its matmuls, passes over memory and exposed messages.

    matmul        FLOPs / the reached part of the peak + bytes of its three matrices / memory bandwidth + a launch
    elementwise   bytes / memory bandwidth + a launch
    collective    bytes sent by a rank / bandwidth + a start + hops. The bandwidth is `within` inside a node;
                  across nodes, it is `between` x the group's ranks in one node, which send at the same time
    all-to-all    rows go to ranks of the same node at `within` and, at the same time, to other nodes at `between`
    pipeline      its lists of actions are simulated; all stages are assumed to take the same time
    update        bytes of weights, gradients, masters and moments / memory bandwidth

The bytes explain why small matmuls are slow: [N, K] x [K, M] takes FLOPs x (1 / peak + (1/N + 1/M + 1/K) / bandwidth).

In a ring of n ranks on k nodes, data makes n - k hops within nodes and k - 1 between nodes (NCCL's ncclTopoTuneModel,
in src/graph/tuning.cc). With more ranks, messages become smaller, but there are more hops. A network is assumed to be
as fast between many nodes as between two.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from common.schedules import simulate
from extras.plan.gpus import Gpu
from extras.plan.layouts import Layout, Network, lists_of, network, pipeline_of, rank_places
from extras.plan.memory import MicroBatch, ends_of, micro_batch, products_of, rank_numbers
from extras.plan.shapes import Shape, layer_counts

FLASH = 0.75  # the part of a large matmul's speed that fused attention reaches (FlashAttention-2 and 3, their tables)


class Recipe(NamedTuple):
    """The choices of one training framework. `COURSE` is the course's trainer; other recipes predict published runs."""

    name: str
    flash: bool = False  # attention is one kernel: scores never reach memory, and half of them are not computed
    gradient: float = 2  # bytes of a weight's gradient, as it is accumulated and sent
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch.utils.checkpoint does
    overlap_dp: bool = False  # sums gradients during backward
    overlap_tp: bool = False  # hides half of backward's messages behind the gradients of weights
    scatter: bool = True  # tp ranks send a slice each over a pipeline boundary, also without SP
    library: float = 1.0  # the part of `Gpu.matmul` that its matmul library reached


COURSE = Recipe("course", flash=True, gradient=4, stops=True, overlap_dp=True, scatter=False)


class Seconds(NamedTuple):
    """Where the time of a step goes. The fields of dimensions (tp, ...) are communication that nothing hides."""

    compute: float
    again: float  # recomputation
    bubble: float
    tp: float
    cp: float
    pp: float
    ep: float
    dp: float
    update: float

    @property
    def step(self) -> float:
        """The time of the whole step."""
        return sum(self)


def matmul_seconds(gpu: Gpu, rows: float, inner: float, outer: float, count: float = 1) -> float:
    """Seconds of `count` products [rows, inner] x [inner, outer] in one launch."""
    flops, numbers = 2 * rows * inner * outer, rows * inner + inner * outer + rows * outer
    return count * (flops / (gpu.flops * gpu.matmul) + gpu.number * numbers / gpu.hbm) + gpu.launch


def memory_seconds(gpu: Gpu, n_bytes: float, kernels: int = 1) -> float:
    """Seconds to read and write `n_bytes` in all. `kernels` is the number of kernels that are launched for this."""
    return n_bytes / gpu.hbm + kernels * gpu.launch


def hops_seconds(gpu: Gpu, net: Network) -> float:
    """The latency of a ring: seconds until a message of a few bytes from one rank has reached all other ranks."""
    return gpu.start + (net.ranks - net.nodes) * gpu.hop + (net.nodes - 1) * gpu.hop_between


def ring(net: Network, n_bytes: float) -> float:
    """Bytes that each rank sends to gather (or to reduce and scatter) a tensor of `n_bytes`."""
    return (net.ranks - 1) / net.ranks * n_bytes


def collective_seconds(gpu: Gpu, net: Network, n_bytes: float, messages: float = 1) -> float:
    """Seconds to gather (or reduce and scatter) `n_bytes` in `messages` parts, while other groups do the same."""
    if net.ranks == 1:
        return 0.0
    bandwidth = min(gpu.within, net.in_node * gpu.between) if net.leaves else gpu.within
    return ring(net, n_bytes) / bandwidth + messages * hops_seconds(gpu, net)


def all_to_all_seconds(gpu: Gpu, net: Network, n_bytes: float) -> float:
    """Seconds of an all-to-all: each rank has `n_bytes`, in equal parts for all ranks of the group, itself included.

    In a ring, a node sends to another from one rank, over the cards of all its ranks in the group. Here each rank
    sends rows to other nodes over its own card, while rows for its own node use the links inside the node.
    """
    if net.ranks == 1:
        return 0.0
    slower = max((net.in_node - 1) / gpu.within, (net.ranks - net.in_node) / gpu.between)
    return n_bytes / net.ranks * slower + hops_seconds(gpu, net)


def attention_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe) -> tuple[float, float]:
    """Seconds of one layer's attention without its projections: (forward, backward)."""
    m, x = p.m, p.x
    if recipe.flash:  # a token sees half of the keys, on average
        forward = p.tokens * m.seq_len / 2 * 4 * m.dim / x.tp / (gpu.flops * gpu.matmul * FLASH)
        return forward + gpu.launch, 2.5 * forward + gpu.launch
    heads, scores = x.micro_batch_size * m.n_heads / x.tp, p.tokens * m.seq_len * m.n_heads / x.tp
    one = matmul_seconds(gpu, m.seq_len, m.head_dim, m.seq_len, heads)
    # bytes a score: softmax reads 2, writes 2; dropout reads 2, writes 2 and a mask of 1; in backward they move 6 and 5
    return 2 * one + memory_seconds(gpu, 9 * scores, 2), 4 * one + memory_seconds(gpu, 11 * scores, 2)


def elementwise_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool) -> tuple[float, float]:
    """Seconds of one layer's passes over memory between its matmuls: (forward, backward)."""
    m, x = p.m, p.x
    width = (p.visits + p.share * m.shared_experts) * m.expert_width if experts else p.share * m.ffn_dim
    between = p.own * m.dim * gpu.number * (11 if m.gpt else 10)  # 2 norms x 2, 2 sums x 3; GPT: 2 masks of 1 byte
    qkv = p.tokens * (m.dim / x.tp + 2 * p.kv) * (2 if recipe.flash else 6)
    inside = gpu.number * (qkv + width * (2 if m.gpt else 3))
    rows = experts * p.visits * m.dim * gpu.number * 2 * 3  # rows are sorted, sent, and put back
    forward = memory_seconds(gpu, between + inside + rows, 12)
    return forward, memory_seconds(gpu, 1.5 * between + 1.7 * inside + rows, 20)


def layer_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, experts: bool) -> list[float]:
    """Seconds of one layer on one rank, forward and backward of one micro-batch: [part].

    The first five parts are computation, recomputation, and exposed messages over tp, over cp and over ep. Parts 6 and
    7, a forward pass and the gradients of weights, only repeat seconds that are already in the first five.

    A block gathers and scatters over tp (without SP, in one all-reduce). Routed experts only gather, and only without
    SP; shared experts gather and scatter. A ring's messages overlap with attention. Full and elementwise recomputation
    repeat forward's messages; if `recipe.stops`, they skip an MLP's last matmul and the tp messages after it.
    """
    p, last, ep = micro_batch(m, x), 0.0, 0.0
    products = products_of(p, experts) + [(p.share, m.dim, m.experts, 1)] * experts  # the router
    matmul = sum(matmul_seconds(gpu, *product) for product in products)  # each of the two gradients takes as long
    core, memory = attention_seconds(p, gpu, recipe), elementwise_seconds(p, gpu, recipe, experts)
    if recipe.stops and not experts:
        last = matmul_seconds(gpu, p.tokens, m.ffn_dim / x.tp, m.dim)
    full = matmul + core[0] + memory[0] - last
    again = dict(none=0.0, selective=core[0], elementwise=memory[0] / 2, full=full)[x.recompute]
    sent = x.recompute in ("elementwise", "full")

    net, shared = network(x, "tp", gpu.node), m.shared_experts > 0
    halves, needed = (2 + 2 * shared + (not x.sp), 2 + shared) if experts else (4, 3 if x.sp else 2)
    half, repeated = collective_seconds(gpu, net, p.tokens * m.dim * gpu.number), needed if recipe.stops else halves
    hidden = min(halves * half / 2, matmul) * recipe.overlap_tp
    net, keys = network(x, "cp", gpu.node), p.tokens * 2 * p.kv * x.cp  # numbers of all ranks' keys and values
    there = max(0.0, collective_seconds(gpu, net, keys * gpu.number) - core[0])
    each = gpu.number + 4 * x.cp / max(1, x.cp - 1)  # bytes of a number, and of its gradient, which makes one hop more
    back = max(0.0, collective_seconds(gpu, net, keys * each) - core[1])
    if experts:
        ep = 2 * all_to_all_seconds(gpu, network(x, "ep", gpu.node), p.visits * m.dim * gpu.number)  # and back
    exposed = (2 * halves + sent * repeated) * half - hidden, (1 + sent) * there + back, (2 + sent) * ep
    forward = matmul + core[0] + memory[0] + halves * half + there + ep
    return [3 * matmul + sum(core) + sum(memory), again, *exposed, forward, matmul]


def head_work(m: Shape, x: Layout, gpu: Gpu) -> list[float]:
    """The seven times that `layer_work` lists, here for output projection and loss. These are never recomputed."""
    tokens, vocab = micro_batch(m, x).tokens, m.vocab_size / x.tp
    logits = memory_seconds(gpu, 14 * tokens * vocab, 5)  # 16 bits, then fp32: maximum, exponential, sum
    tp = collective_seconds(gpu, network(x, "tp", gpu.node), tokens * m.dim * gpu.number)
    matmul = matmul_seconds(gpu, tokens, m.dim, vocab)
    return [3 * matmul + 1.5 * logits, 0.0, 2 * tp, 0.0, 0.0, matmul + logits + tp, matmul]


@lru_cache(maxsize=100_000)
def works(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> np.ndarray:
    """Seconds of a layer without experts, a layer with experts, and the head: [3, part]. `layer_layout` makes `x`."""
    gpu = gpu._replace(matmul=gpu.matmul * recipe.library)
    layers = [layer_work(m, x, gpu, recipe, kind and m.experts > 0) for kind in (False, True)]
    return np.array([*layers, head_work(m, x, gpu)])


def model_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> np.ndarray:
    """Seconds of one micro-batch in the whole model, by the parts of `layer_work`: [part]."""
    return np.array([*layer_counts(m).values(), 1]) @ works(m, layer_layout(x), gpu, recipe)


def layer_layout(x: Layout) -> Layout:
    """A layout that keeps only the fields that decide a layer's work; the others have their defaults."""
    return Layout(cp=x.cp, tp=x.tp, ep=x.ep, micro_batch_size=x.micro_batch_size, recompute=x.recompute, sp=x.sp)


@lru_cache(maxsize=200_000)
def rank_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, way: tuple[str, int, int]) -> np.ndarray:
    """Seconds of one micro-batch on the busiest pipeline rank: [part]. `layer_layout` makes `x`; `way` is `Layout.way`.

    If micro-batches pass the ranks in two directions, half of them go each way.
    """
    loads = []  # of each rank: how many layers without experts, layers with experts, and heads it has
    for places in rank_places(m, *way):
        kinds = [m.has_experts(n) for place in places.values() for n in place.layers]
        loads.append((kinds.count(False), kinds.count(True), ends_of(places)[1]))
    return max(np.array(loads) / pipeline_of(*way).ways @ works(m, x, gpu, recipe), key=lambda work: work[:5].sum())


@lru_cache(maxsize=100_000)
def pipeline_ratio(schedule: str, p: int, chunks: int, n: int, b: float, w: float, message: float) -> float:
    """The time that `n` micro-batches take on `p` ranks. All times are in units of a stage's forward.

    Of many micro-batches, few are simulated: after 2 p + n mod p, every p more are assumed to add the same time.
    """
    pipeline, few = pipeline_of(schedule, p, chunks), min(n, 2 * p + n % p)
    costs = dict(F=1.0, B=b if pipeline.split else b + w, W=w)
    short, longer = (
        simulate(lists_of(schedule, p, chunks, count), pipeline.places, costs, message)[-1][0]
        for count in (few, few + p)
    )
    return short + (n - few) / p * (longer - short)


def least_bubble(x: Layout, f: float, b: float, w: float) -> float:
    """A lower bound of the bubble, for any order of actions. f, b and w: seconds of a stage's F, B and W.

    The rank that micro-batches reach last is idle until the first one arrives. While the other ranks run the last
    backward, it is idle again unless it has W to run. No step is shorter than a micro-batch's way to the loss and back.
    """
    pipeline, whole = pipeline_of(*x.way), f + b + w
    ends = x.pp // pipeline.ways - 1
    return max(ends * (f if pipeline.split else whole), pipeline.depth * (f + b - x.micro_batches / x.pp * whole))


def pipeline_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, simulated: bool) -> tuple[float, float]:
    """Seconds of the bubble, and of exposed messages between stages.

    Every stage is assumed to cost the mean over all stages. Unless `simulated`, the bubble is `least_bubble`.
    """
    pipeline, work = pipeline_of(*x.way), model_work(m, x, gpu, recipe)
    f, w = work[5] / pipeline.depth, work[6] / pipeline.depth
    b = work[:5].sum() / pipeline.depth - f - w
    if not simulated:
        return least_bubble(x, f, b, w), 0.0
    p, crosses = micro_batch(m, x), network(x, "pp", gpu.node).in_node == 1
    sent = (p.share if recipe.scatter else p.own) * m.dim * gpu.number
    message = sent / (gpu.between if crosses else gpu.within) + gpu.start + (gpu.hop_between if crosses else gpu.hop)
    if recipe.scatter and not x.sp:
        message += collective_seconds(gpu, network(x, "tp", gpu.node), p.tokens * m.dim * gpu.number)
    b, w = round(b / f, 2), round(w / f, 2)
    ratio = pipeline_ratio(*x.way, x.micro_batches, b, w, float(f"{message / f:.2g}"))
    idle = f * (ratio - x.micro_batches * (1 + b + w) * pipeline.depth / x.pp)
    exposed = min(idle, 2 * (x.pp - 1) * message)  # to fill the pipeline and to drain it
    return idle - exposed, exposed


def step_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE, simulated: bool = True) -> Seconds:
    """Seconds of a step under one layout. Unless `simulated`, they are a lower bound."""
    busy = rank_work(m, layer_layout(x), gpu, recipe, x.way)[:5]
    bubble, pp = pipeline_seconds(m, x, gpu, recipe, simulated) if x.pp > 1 else (0.0, 0.0)
    compute, again, tp, cp, ep = (x.micro_batches * busy).tolist()
    dp, update = data_seconds(m, x, gpu, recipe, busy.sum()), update_seconds(m, x, gpu, recipe)
    return Seconds(*map(float, (compute, again, bubble, tp, cp, pp, ep, dp, update)))


def fullest_numbers(m: Shape, x: Layout) -> tuple[float, float]:
    """The number of weights on the fullest rank: (those replicated over dp x cp, those of its experts)."""
    return max(rank_numbers(m, *x.way, x.tp, x.ep), key=sum)


def data_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, micro_batch: float) -> float:
    """Seconds of exposed sums of gradients and gathers of weights, over dp x cp (experts: over dp x cp x tp / ep).

    With `overlap_dp`, gradients are sent layer by layer. The last micro-batch can hide the all-reduce of ZeRO 0. All
    micro-batches can hide the sums of ZeRO 2 and 3, and the gathers of ZeRO 3. At least a twentieth of these messages
    is exposed: the last gradient is sent when nothing is left to compute. If a schedule has two directions, pairs of
    pipeline ranks hold the same weights, and nothing hides the sum of their gradients.
    """
    n, hidden, exposed = x.micro_batches, 0.0, 0.0
    layers = m.n_layers / x.pp if recipe.overlap_dp else 1
    sums, late_sums, gathers, late_gathers = {  # how often in a step; the `late` ones come after computation
        0: (2, 0, 0, 0),  # an all-reduce has two halves
        1: (0, 1, 0, 1),
        2: (n, 0, 0, 1),
        3: (n, 0, 2 * n, 0),
    }[x.zero]
    pair = Network(2, 1 if network(x, "pp", gpu.node).leaves else 2)
    for numbers, dim in zip(fullest_numbers(m, x), ("shard", "expert shard"), strict=True):
        net = network(x, dim, gpu.node)
        if not numbers:
            continue
        summed = collective_seconds(gpu, net, numbers * recipe.gradient, layers)
        gathered = collective_seconds(gpu, net, numbers * gpu.number, layers)
        hidden += sums * summed + gathers * gathered
        exposed += late_sums * summed + late_gathers * gathered
        if pipeline_of(*x.way).ways > 1:
            own = numbers / net.ranks if x.zero else numbers
            exposed += 2 * collective_seconds(gpu, pair, own * recipe.gradient)
    if recipe.overlap_dp:
        hidden = max(hidden - micro_batch * (n if x.zero >= 2 else 1), 0.05 * hidden)
    return hidden + exposed


def update_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of clipping and AdamW on a rank's part of the state, by the bytes that they read and write."""
    shared, own = fullest_numbers(m, x)
    data, expert = (network(x, dim).ranks if x.zero else 1 for dim in ("shard", "expert shard"))
    passes = 2 * 12 + 4 * recipe.gradient + 8
    return memory_seconds(gpu, (shared / data + own / expert) * passes + 4 * (shared + own), 50)
