"""Predicts the time of one step: the sum of its matmuls, passes over memory and exposed messages.

    matmul        FLOPs / (peak x part reached) + bytes of its three matrices / memory bandwidth + a launch
    elementwise   bytes / memory bandwidth + a launch
    collective    bytes sent by a rank / bandwidth + a start + hops; `within` a node, or `between` nodes x the ranks
                  of the group that a node has, which send side by side
    all-to-all    rows for ranks of the same node at `within`; at the same time, rows for other nodes at `between`
    pipeline      its lists, simulated with the mean stage; all else takes the time of the busiest rank
    update        bytes of weights, gradients, masters and moments / memory bandwidth

The bytes in the formula of a matmul say why small ones are slow: time is FLOPs x (1 / peak + (1/N + 1/M + 1/K) / HBM).

How a network slows down as it grows (the laws of NCCL, ncclTopoTuneModel in its src/graph/tuning.cc):

    ring          a gather or a scatter over n ranks on k nodes has n - 1 hops, n - k within nodes and k - 1 between
    tree          each half of an all-reduce has n/k - 1 hops within a node and log2 k between; never more than a ring
    contention    on some networks: bandwidth between k > 2 nodes / (1 + contention x log2(k / 2))

With more ranks, a ring's messages become smaller, but its hops grow with n: from some n on, nothing hides them.
"""

from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from common.schedules import simulate
from extras.theory.activations import MicroBatch, products_of
from extras.theory.gpus import Gpu
from extras.theory.layouts import Layout, Network, network
from extras.theory.memory import rank_numbers
from extras.theory.pipelines import depth, ends_of, lists_of, places_of, rank_places, splits, ways_of
from extras.theory.shapes import Shape, end_weights, layer_counts

FLASH = 0.75  # the part of a large matmul's speed that fused attention reaches (FlashAttention-2 and 3, their tables)
PARTS = ("matmul", "attention", "memory", "again", "tp", "cp", "ep")  # again: recomputation; after it: messages
SENDS_AGAIN = ("elementwise", "full")  # recomputation that repeats messages
BothWays = tuple[float, float]  # seconds of a forward pass, and of its backward pass


class Recipe(NamedTuple):
    """The choices of one training software. `COURSE` is the course's trainer; others predict published runs."""

    name: str
    flash: bool = False  # attention is one kernel: scores never reach memory, and half of them are not computed
    gradient: float = 2  # bytes of a weight's gradient, as it is accumulated and sent
    stops: bool = False  # recomputation stops before a layer's last matmul, as torch.utils.checkpoint does
    overlap_dp: bool = False  # sums gradients during backward
    overlap_tp: bool = False  # with SP: in backward, hides a second gather of inputs behind weight gradients
    scatter: bool = True  # tp ranks send a slice each over a pipeline boundary, also without SP
    library: float = 1.0  # the part of `Gpu.matmul` that its matmul library reached


COURSE = Recipe("course", flash=True, gradient=4, stops=True, overlap_dp=True, scatter=False)


def by_part(**seconds: float) -> np.ndarray:
    """Seconds as an array [len(PARTS)], 0 for the parts that are not given."""
    return np.array([seconds.get(part, 0.0) for part in PARTS])


def matmul_seconds(gpu: Gpu, rows: float, inner: float, outer: float, count: float = 1) -> float:
    """Seconds of `count` products [rows, inner] x [inner, outer] in one launch."""
    flops, numbers = 2 * rows * inner * outer, rows * inner + inner * outer + rows * outer
    return count * (flops / (gpu.flops * gpu.matmul) + gpu.number * numbers / gpu.hbm) + gpu.launch


def memory_seconds(gpu: Gpu, n_bytes: float, kernels: int = 1) -> float:
    """Seconds in which so many kernels read and write `n_bytes` in all."""
    return n_bytes / gpu.hbm + kernels * gpu.launch


def card(gpu: Gpu, net: Network) -> float:
    """Bytes/s at which a rank of this group sends to other nodes while the node's other ranks do the same."""
    return gpu.between / (1 + gpu.contention * log2(max(net.nodes, 2) / 2))


def hops_seconds(gpu: Gpu, net: Network, tree: bool) -> float:
    """Seconds until one rank's number has reached all others: over a ring, or a tree of nodes with chains inside."""
    if tree:
        return (net.in_node - 1) * gpu.hop + ceil(log2(net.nodes)) * gpu.hop_between
    return (net.ranks - net.nodes) * gpu.hop + (net.nodes - 1) * gpu.hop_between


def ring(net: Network, n_bytes: float) -> float:
    """Bytes that each rank sends to gather (or to reduce and scatter) a whole of `n_bytes`."""
    return (net.ranks - 1) / net.ranks * n_bytes


def collective_seconds(gpu: Gpu, net: Network, sent: float, messages: float = 1, tree: bool = False) -> float:
    """Seconds of a collective in which each rank sends `sent` bytes in `messages`, while other groups do the same.

    `tree`: it is half of an all-reduce, for which NCCL may use a tree. All other collectives are rings.
    """
    if net.ranks == 1:
        return 0.0
    bandwidth = min(gpu.within, net.in_node * card(gpu, net)) if net.leaves else gpu.within
    return sent / bandwidth + messages * (gpu.start + hops_seconds(gpu, net, tree))


def all_to_all_seconds(gpu: Gpu, net: Network, n_bytes: float) -> float:
    """Seconds of an all-to-all: each rank has `n_bytes`, in equal parts for all ranks of the group, itself included.

    In a ring one rank of a node sends to the next node, over the cards of all. Here each rank has rows for all ranks of
    other nodes and sends them over its own card, while rows for its own node travel over the links there.
    """
    if not net.leaves:
        return collective_seconds(gpu, net, ring(net, n_bytes))
    slower = max((net.in_node - 1) / gpu.within, (net.ranks - net.in_node) / card(gpu, net))
    return n_bytes / net.ranks * slower + gpu.start + hops_seconds(gpu, net, tree=False)


def product_seconds(p: MicroBatch, gpu: Gpu, experts: bool) -> tuple[float, float, float]:
    """Seconds of a layer's matrix products: forward, the gradients of the inputs, and those of the weights."""
    products = products_of(p, experts) + [(p.share, p.m.dim, p.m.experts, 1)] * experts  # the router
    return (
        sum(matmul_seconds(gpu, rows, inner, outer, n) for rows, inner, outer, n in products),
        sum(matmul_seconds(gpu, rows, outer, inner, n) for rows, inner, outer, n in products),
        sum(matmul_seconds(gpu, inner, rows, outer, n) for rows, inner, outer, n in products),
    )


def attention_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe) -> BothWays:
    """Seconds of one layer's attention core, between the projections."""
    m, x = p.m, p.x
    if recipe.flash:
        busiest = 2 - 1 / x.cp if x.cp_mode == "ring" else 1  # a plain ring's last rank has most keys
        keys = m.seq_len / 2 * busiest  # the mean over tokens
        forward = p.tokens * keys * 4 * m.dim / x.tp / (gpu.flops * gpu.matmul * FLASH)
        return forward + gpu.launch, 2.5 * forward + gpu.launch
    heads, scores = x.micro_batch_size * m.n_heads / x.tp, p.tokens * m.seq_len * m.n_heads / x.tp
    one = matmul_seconds(gpu, m.seq_len, m.head_dim, m.seq_len, heads)
    # softmax reads and writes 2 bytes; dropout reads 2 and writes 2 and its mask; their backwards read what they need
    return 2 * one + memory_seconds(gpu, 9 * scores, 2), 4 * one + memory_seconds(gpu, 11 * scores, 2)


def elementwise_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool) -> BothWays:
    """Seconds of one layer's passes over memory between its matmuls."""
    m, x = p.m, p.x
    width = p.share * m.ffn_dim
    if experts:
        width = (p.visits + p.share * m.shared_experts) * m.expert_width
    between = p.own * m.dim * gpu.number * (11 if m.gpt else 10)  # norms 2 x 2, residual sums (with GPT's dropout)
    qkv = p.tokens * (m.dim / x.tp + 2 * p.kv) * (2 if recipe.flash else 6)
    inside = gpu.number * (qkv + width * (2 if m.gpt else 3))
    rows = experts * p.visits * m.dim * gpu.number * 2 * 3  # rows are sorted, sent, and put back
    forward = memory_seconds(gpu, between + inside + rows, 12)
    return forward, memory_seconds(gpu, 1.5 * between + 1.7 * inside + rows, 20)


def tp_seconds(p: MicroBatch, gpu: Gpu, recipe: Recipe, experts: bool, w: float) -> BothWays:
    """Seconds of one layer's messages over tp. Backward includes those of recomputation, and excludes hidden ones.

    They are halves of all-reduces: a block has a gather and a scatter, or an all-reduce. Experts have none, but shared
    experts have SP's, and without SP the experts' outputs are gathered. Recomputation does not need a layer's last
    matmul, so a recipe that `stops` does not sum it again. `w`: seconds of weights' gradients, which hide messages.
    """
    m, x, net = p.m, p.x, network(p.x, "tp", gpu.node)
    half = collective_seconds(gpu, net, ring(net, p.tokens * m.dim * gpu.number), tree=not x.sp)
    shared = m.shared_experts > 0
    halves, needed = (2 + 2 * shared + (not x.sp), 2 + shared) if experts else (4, 3 if x.sp else 2)
    again = needed if recipe.stops or x.recompute == "elementwise" else halves
    there, sent = halves * half, again * half * (x.recompute in SENDS_AGAIN)
    if not recipe.overlap_tp:
        return there, there + sent
    regather = (1 if experts else 2) * half * x.sp
    return there, there + regather - min(there / 2 + regather, w) + sent


def cp_seconds(p: MicroBatch, gpu: Gpu, core: BothWays) -> BothWays:
    """Seconds of one layer's messages over cp that its attention, `core`, does not hide.

    A ring's messages overlap with attention. A gather of keys precedes it, and the fp32 sum of their gradients follows
    it. Ulysses exchanges q, k and v before it and o after it; gradients go the other way.
    """
    x, net = p.x, network(p.x, "cp", gpu.node)
    q, kv = p.share * p.m.dim, p.tokens * 2 * p.kv
    if net.ranks == 1:
        return 0.0, 0.0
    if x.cp_mode == "ulysses":
        one_way = sum(all_to_all_seconds(gpu, net, n * gpu.number) for n in (q + kv, q))
        return one_way, one_way
    sent = (x.cp - 1) * kv * gpu.number  # keys and values of all others
    if x.cp_mode == "allgather":
        return collective_seconds(gpu, net, sent), collective_seconds(gpu, net, (x.cp - 1) * kv * 4)
    back = sent + x.cp * kv * 4  # their gradients travel with them
    hidden = zip((sent, back), core, strict=True)
    return tuple(max(0.0, collective_seconds(gpu, net, n) - seconds) for n, seconds in hidden)


def layer_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, experts: bool) -> np.ndarray:
    """Seconds of one layer on one rank, for one micro-batch: [forward, input's gradient, weights' gradient; part].

    Elementwise recomputation keeps the outputs of matmuls but sends as much again as full recomputation, as the dry run
    counts. Full recomputation may stop before an MLP's last matmul, whose output is not needed. Selective
    recomputation computes the scores again.
    """
    p = MicroBatch(m, x)
    f, b, w = product_seconds(p, gpu, experts)
    core, memory = attention_seconds(p, gpu, recipe), elementwise_seconds(p, gpu, recipe, experts)
    tp, cp = tp_seconds(p, gpu, recipe, experts, w), cp_seconds(p, gpu, core)
    ep = 2 * all_to_all_seconds(gpu, network(x, "ep", gpu.node), experts * p.visits * m.dim * gpu.number)  # and back
    last = matmul_seconds(gpu, p.tokens, m.ffn_dim / x.tp, m.dim) if recipe.stops and not experts else 0.0
    full = f + core[0] + memory[0] - last
    again = dict(none=0.0, selective=core[0], elementwise=memory[0] / 2, full=full)[x.recompute]
    sent = x.recompute in SENDS_AGAIN
    forward = by_part(matmul=f, attention=core[0], memory=memory[0], tp=tp[0], cp=cp[0], ep=ep)
    backward = dict(tp=tp[1], cp=cp[1] + sent * cp[0], ep=ep + sent * ep)
    backward = by_part(matmul=b, attention=core[1], memory=memory[1], again=again, **backward)
    return np.stack([forward, backward, by_part(matmul=w)])


def head_work(m: Shape, x: Layout, gpu: Gpu) -> np.ndarray:
    """As `layer_work`, for the output projection and the loss, which are never recomputed."""
    tokens, vocab, net = MicroBatch(m, x).tokens, m.vocab_size / x.tp, network(x, "tp", gpu.node)
    gather = collective_seconds(gpu, net, ring(net, tokens * m.dim * gpu.number), tree=not x.sp)
    logits = memory_seconds(gpu, 14 * tokens * vocab, 5)  # 16 bits, then fp32: maximum, exponential, sum
    f = by_part(matmul=matmul_seconds(gpu, tokens, m.dim, vocab), memory=logits, tp=gather)
    b = by_part(matmul=matmul_seconds(gpu, tokens, vocab, m.dim), memory=logits / 2, tp=gather)
    return np.stack([f, b, by_part(matmul=matmul_seconds(gpu, m.dim, tokens, vocab))])


def layer_layout(x: Layout) -> Layout:
    """A layout with only the fields that decide the work of a layer."""
    keep = dict(micro_batch_size=x.micro_batch_size, recompute=x.recompute, sp=x.sp, cp_mode=x.cp_mode)
    return Layout(cp=x.cp, tp=x.tp, ep=x.ep, **keep)


@lru_cache(maxsize=100_000)
def works(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> np.ndarray:
    """For a `layer_layout`: [layer without experts, layer with experts, head; forward ...; part]."""
    gpu = gpu._replace(matmul=gpu.matmul * recipe.library)
    dense = layer_work(m, x, gpu, recipe, False)
    return np.stack([dense, layer_work(m, x, gpu, recipe, True) if m.experts else dense, head_work(m, x, gpu)])


def model_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> np.ndarray:
    """Seconds of one micro-batch in the whole model, for a `layer_layout`: [forward ..., part]."""
    return np.tensordot((*layer_counts(m).values(), 1), works(m, x, gpu, recipe), 1)


@lru_cache(maxsize=200_000)
def rank_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, way: tuple[str, int, int]) -> tuple:
    """Seconds of one micro-batch on the busiest rank, [part], and f, b, w of the mean stage, for a `layer_layout`.

    If micro-batches pass the ranks in two directions, half of them take each.
    """
    loads = []  # of each rank: its layers without experts, those with experts, and heads
    for places in rank_places(m, *way):
        kinds = [m.has_experts(n) for place in places.values() for n in place.layers]
        loads.append((kinds.count(False), kinds.count(True), ends_of(places)[1]))
    ranks = np.tensordot(np.array(loads) / ways_of(*way), works(m, x, gpu, recipe).sum(axis=1), 1)
    return max(ranks, key=np.sum), tuple((model_work(m, x, gpu, recipe).sum(axis=1) / depth(*way)).tolist())


@lru_cache(maxsize=100_000)
def pipeline_ratio(schedule: str, p: int, chunks: int, n: int, b: float, w: float, message: float) -> float:
    """Makespan of a schedule in units of a stage's forward; the other costs are ratios to it.

    Of a long step only the first micro-batches are simulated: after 2 p of them each further p add the same.
    """
    places, costs = places_of(schedule, p, chunks), dict(F=1.0, B=b if splits(schedule, p, chunks) else b + w, W=w)
    few = min(n, 2 * p + n % p)
    short, longer = (
        simulate(lists_of(schedule, p, chunks, count), places, costs, message)[-1][0] for count in (few, few + p)
    )
    return short + (n - few) / p * (longer - short)


def least_bubble(x: Layout, f: float, b: float, w: float) -> float:
    """A lower bound of the bubble, in seconds, for any order of actions.

    The rank that micro-batches reach last waits for its first forward; if no W fills the gap, another rank also waits
    for the last backward. Besides, one micro-batch passes all stages in turn, forward and backward.
    """
    ends, passed = x.pp // ways_of(*x.way) - 1, depth(*x.way)
    return max(ends * (f if splits(*x.way) else f + b + w), passed * (f + b - x.micro_batches / x.pp * (f + b + w)))


def boundary_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of a message over a pipeline boundary."""
    size, crosses = MicroBatch(m, x).tokens * m.dim * gpu.number, network(x, "pp", gpu.node).in_node == 1
    scatter = recipe.scatter and not x.sp
    sent = size / x.tp if scatter or x.sp else size
    seconds = sent / (gpu.between if crosses else gpu.within) + gpu.start + (gpu.hop_between if crosses else gpu.hop)
    if scatter:
        tp = network(x, "tp", gpu.node)
        seconds += collective_seconds(gpu, tp, ring(tp, size))
    return seconds


class Seconds(NamedTuple):
    """Where the time of a step goes; `exposed`: communication that nothing hides, by dimension."""

    compute: float
    recompute: float
    bubble: float
    exposed: dict[str, float]
    update: float

    @property
    def parts(self) -> dict[str, float]:
        """All parts by name."""
        parts = dict(compute=self.compute, again=self.recompute, bubble=self.bubble)
        return parts | self.exposed | dict(update=self.update)

    @property
    def step(self) -> float:
        """The whole step."""
        return sum(self.parts.values())


def step_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE, simulated: bool = True) -> Seconds:
    """Seconds of one layout's step. Unless `simulated`, its bubble is the lower bound, `least_bubble`."""
    n = x.micro_batches
    busy, (f, b, w) = rank_work(m, layer_layout(x), gpu, recipe, x.way)
    bubble, exposed = 0.0, {}
    if x.pp > 1:
        message = boundary_seconds(m, x, gpu, recipe)
        bubble = least_bubble(x, f, b, w)
        if simulated:
            b, w = round(b / f, 2), round(w / f, 2)
            ratio = pipeline_ratio(*x.way, n, b, w, float(f"{message / f:.2g}"))
            idle = f * (ratio - n * (1 + b + w) * depth(*x.way) / x.pp)
            exposed["pp"] = min(idle, 2 * (x.pp - 1) * message)  # to fill the pipeline and to drain it
            bubble = idle - exposed["pp"]
    parts = dict(zip(PARTS, (n * busy).tolist(), strict=True))
    exposed |= {dim: parts[dim] for dim in ("tp", "cp", "ep")} | dict(dp=data_seconds(m, x, gpu, recipe, busy.sum()))
    compute = parts["matmul"] + parts["attention"] + parts["memory"]
    exposed = {dim: seconds for dim, seconds in exposed.items() if seconds}
    return Seconds(compute, parts["again"], bubble, exposed, update_seconds(m, x, gpu, recipe))


def fullest_numbers(m: Shape, x: Layout) -> tuple[float, float]:
    """The number of weights on the fullest rank: (replicated over dp x cp, of its experts)."""
    return max(rank_numbers(m, *x.way, x.tp, x.ep), key=sum)


def pair_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of summing the gradients of weights that two pipeline ranks share. Nothing hides them.

    If a schedule has two directions, pairs share all their weights; else the first and last stage share a tied matrix.
    """
    places, two = places_of(*x.way), ways_of(*x.way) > 1
    if not two and (not m.tied or places[0].rank == places[-1].rank):
        return 0.0
    shared, own = fullest_numbers(m, x) if two else (end_weights(m, x.tp)[0], 0.0)
    if x.zero:
        shared, own = shared / network(x, "shard").ranks, own / network(x, "expert shard").ranks
    pair = Network(2, 1 if network(x, "pp", gpu.node).leaves else 2)
    return collective_seconds(gpu, pair, 2 * ring(pair, (shared + own) * recipe.gradient))


def data_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, micro_batch: float) -> float:
    """Exposed seconds of summing gradients and gathering weights over dp x cp (and slices over replicas, once a step).

    With `overlap_dp`, an all-reduce is hidden behind the last micro-batch, and the sums of ZeRO 2 and 3 behind all of
    them, but for a twentieth: the last unit's gradient is sent when nothing is left to compute. Such software sends a
    layer at a time; other software sends all at once.
    """
    n, hidden, exposed = x.micro_batches, 0.0, pair_seconds(m, x, gpu, recipe)
    layers = m.n_layers / x.pp if recipe.overlap_dp else 1
    sums, late_sums, gathers, late_gathers = {  # how often: during computation, or after it
        0: (2, 0, 0, 0),  # an all-reduce has two halves
        1: (x.zero_overlap, not x.zero_overlap, 0, 1),
        2: (n, 0, 0, 1),
        3: (n, 0, 1 if x.zero_keep else 2 * n, 0),
    }[x.zero]
    far = network(x, "replicas", gpu.node)
    for numbers, dim in zip(fullest_numbers(m, x), ("shard", "expert shard"), strict=True):
        net = network(x, dim, gpu.node)
        if net.ranks == 1 or not numbers:
            continue
        if far.ranks > 1 and dim == "shard":
            exposed += 2 * collective_seconds(gpu, far, ring(far, numbers / net.ranks * 4), layers, tree=True)
        summed = collective_seconds(gpu, net, ring(net, numbers * recipe.gradient), layers, tree=x.zero == 0)
        gathered = collective_seconds(gpu, net, ring(net, numbers * gpu.number), layers)
        hidden += sums * summed + gathers * gathered
        exposed += late_sums * summed + late_gathers * gathered
    if recipe.overlap_dp:
        hidden = max(hidden - micro_batch * (n if x.zero >= 2 else 1), 0.05 * hidden)
    return hidden + exposed


def update_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of norm, clip and AdamW on a rank's part: read and write weights, gradients, masters and moments."""
    shared, own = fullest_numbers(m, x)
    data, expert = (network(x, dim).ranks if x.zero else 1 for dim in ("shard", "expert shard"))
    passes = 2 * 12 + 4 * recipe.gradient + 8
    return memory_seconds(gpu, (shared / data + own / expert) * passes + 4 * (shared + own), 50)
