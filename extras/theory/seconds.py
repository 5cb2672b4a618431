"""The time of one step on paper: each matmul, each pass over memory and each message has its seconds.

    matmul        FLOPs / (peak x part reached) + bytes of its three matrices / memory bandwidth + a launch
    elementwise   bytes / memory bandwidth + a launch
    collective    bytes sent by a rank / bandwidth + a start + hops; `within` a node, or `between` nodes x the ranks
                  of the group that a node has, which send side by side
    all-to-all    what a rank has for others of its node at `within`, beside it what it has for other nodes at `between`
    pipeline      its lists, simulated with the mean stage; and the dearest stage for the rest
    update        bytes of weights, gradients, masters and moments / memory bandwidth

The bytes in the formula of a matmul say why small ones are slow: time is FLOPs x (1 / peak + (1/N + 1/M + 1/K) / HBM).

What makes a network worse as it grows (the laws of NCCL, ncclTopoTuneModel in its src/graph/tuning.cc):

    ring          a gather or a scatter over n ranks on k nodes has n - 1 hops, n - k within nodes and k - 1 between
    tree          each half of an all-reduce has n/k - 1 hops within a node and log2 k between; never more than a ring
    contention    on some networks: bandwidth between k > 2 nodes / (1 + contention x log2(k / 2))

A ring over many ranks sends each of them less and less, but its hops grow with n: from some n on, nothing hides them.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil, log2
from typing import NamedTuple

from common.schedules import simulate
from extras.theory.footprint import Recipe
from extras.theory.gpus import Gpu
from extras.theory.layouts import GATHERS, Layout, Network, network, schedule_of, stages
from extras.theory.memory import rank_numbers
from extras.theory.pipelines import lists_of, longest_wait, paired, places_of, rank_places, splits, ways_of
from extras.theory.shapes import Shape, end_weights, layer_counts

FLASH = 0.75  # the part of a large matmul's speed that fused attention reaches (FlashAttention-2 and 3, their tables)
COMPUTE = ("matmul", "attention", "memory")
ByPart = dict[str, float]  # seconds by part: matmul, attention, memory, tp, cp, ep


class Work(NamedTuple):
    """Seconds of forward, of the input's gradient (with what is computed again), and of the weights' gradient."""

    f: ByPart
    b: ByPart
    w: ByPart


def add(*parts: ByPart) -> ByPart:
    """Sums by part."""
    return {name: sum(p.get(name, 0.0) for p in parts) for name in {name: 0 for p in parts for name in p}}


def times(parts: ByPart, factor: float) -> ByPart:
    """Every part so many times."""
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: ByPart) -> float:
    """All parts together."""
    return sum(parts.values())


def tokens_of(m: Shape, x: Layout) -> int:
    """A micro-batch's on one rank of cp."""
    return x.micro_batch_size * m.seq_len // x.cp


def matmul_seconds(gpu: Gpu, rows: float, inner: float, outer: float, count: float = 1) -> float:
    """`count` products [rows, inner] x [inner, outer] in one launch."""
    flops, numbers = 2 * rows * inner * outer, rows * inner + inner * outer + rows * outer
    return count * (flops / (gpu.flops * gpu.matmul) + gpu.number * numbers / gpu.hbm) + gpu.launch


def memory_seconds(gpu: Gpu, n_bytes: float, kernels: int = 1) -> float:
    """Reading and writing so many bytes in all."""
    return n_bytes / gpu.hbm + kernels * gpu.launch


def card(gpu: Gpu, net: Network) -> float:
    """Bytes/s at which a rank of this group sends to other nodes while the node's other ranks do the same."""
    return gpu.between / (1 + gpu.contention * log2(max(net.nodes, 2) / 2))


def bandwidth(gpu: Gpu, net: Network) -> float:
    """Bytes/s at which a rank of this group sends in a ring while the node's other groups do the same."""
    return min(gpu.within, net.in_node * card(gpu, net)) if net.leaves else gpu.within


def hops_seconds(gpu: Gpu, net: Network, tree: bool) -> float:
    """Until a number of one rank has reached all others: over a ring, or over a tree of nodes, in each a chain."""
    if tree:
        return (net.in_node - 1) * gpu.hop + ceil(log2(net.nodes)) * gpu.hop_between
    return (net.ranks - net.nodes) * gpu.hop + (net.nodes - 1) * gpu.hop_between


def collective_seconds(gpu: Gpu, net: Network, sent: float, messages: float = 1, tree: bool = False) -> float:
    """A collective in which each rank sends so many bytes, cut into `messages`.

    `tree`: half of an all-reduce, for which NCCL has both ways, and takes the quicker. All others are rings.
    """
    if net.ranks == 1:
        return 0.0
    return sent / bandwidth(gpu, net) + messages * (gpu.start + hops_seconds(gpu, net, tree))


def all_to_all_seconds(gpu: Gpu, net: Network, n_bytes: float) -> float:
    """Each rank has `n_bytes`, as much for each rank of the group, itself too.

    Unlike a ring, of which one rank of a node sends to the next node over the cards of all, each rank has parts for all
    ranks of the other nodes, and sends them over its own card, while those for its own node go over the links there.
    """
    if not net.leaves:
        return collective_seconds(gpu, net, ring(net, n_bytes))
    slower = max((net.in_node - 1) / gpu.within, (net.ranks - net.in_node) / card(gpu, net))
    return n_bytes / net.ranks * slower + gpu.start + hops_seconds(gpu, net, tree=False)


def ring(net: Network, n_bytes: float) -> float:
    """Bytes that each rank sends to gather (or to reduce and scatter) a whole of `n_bytes`."""
    return (net.ranks - 1) / net.ranks * n_bytes


def attention_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> tuple[float, float]:
    """Forward and backward of one layer's attention core on one rank, for one micro-batch."""
    tokens = tokens_of(m, x)
    if recipe.flash:
        busiest = 2 - 1 / x.cp if x.cp_mode == "ring" else 1  # rank: a plain ring's last one has most keys
        keys = m.seq_len / 2 * busiest  # of a token, in the mean
        forward = tokens * keys * 4 * m.dim / x.tp / (gpu.flops * gpu.matmul * FLASH)
        return forward + gpu.launch, 2.5 * forward + gpu.launch
    heads, scores = x.micro_batch_size * m.n_heads / x.tp, tokens * m.seq_len * m.n_heads / x.tp
    one = matmul_seconds(gpu, m.seq_len, m.head_dim, m.seq_len, heads)
    # softmax reads and writes 2 bytes; dropout reads 2 and writes 2 and its mask; their backwards read what they need
    return 2 * one + memory_seconds(gpu, 9 * scores, 2), 4 * one + memory_seconds(gpu, 11 * scores, 2)


def context_seconds(m: Shape, x: Layout, gpu: Gpu, core: float, core_back: float) -> tuple[float, float]:
    """Messages over cp of one layer, forward and backward, that attention does not hide.

    A ring's travel beside it. Who gathers keys waits for them before, and for the sum of their gradients, in fp32,
    behind it. Ulysses' q, k and v come before, and o leaves after it; their gradients the other way.
    """
    net, tokens = network(x, "cp", gpu.node), tokens_of(m, x)
    if net.ranks == 1:
        return 0.0, 0.0
    kv = tokens * 2 * m.kv_dim / min(x.tp, m.n_kv_heads)
    if x.cp_mode == "ulysses":
        heads = tokens * m.dim / x.tp
        one_way = sum(all_to_all_seconds(gpu, net, n * gpu.number) for n in (heads + kv, heads))
        return one_way, one_way
    if x.cp_mode in GATHERS:
        sent = [ring(net, x.cp * kv * size) for size in (gpu.number, 4)]
        return collective_seconds(gpu, net, sent[0]), collective_seconds(gpu, net, sent[1])
    there = (x.cp - 1) * kv * gpu.number
    sent = there, there + x.cp * kv * 4  # gradients follow, in fp32
    return tuple(max(0.0, collective_seconds(gpu, net, n) - s) for n, s in zip(sent, (core, core_back), strict=True))


def matrices(m: Shape, tp: int, width: int) -> list[tuple[float, float]]:
    """(inner, outer) of an MLP's matrices on one rank; those that stand side by side are one."""
    return [(m.dim, (1 if m.gpt else 2) * width / tp), (width / tp, m.dim)]


def products_of(m: Shape, x: Layout, experts: bool) -> list[tuple[float, float, float, float]]:
    """A layer's matrix products on one rank: rows, inner and outer of each, and how many of it are one launch."""
    tp, tokens = x.tp, tokens_of(m, x)
    dense = [(m.dim, (m.dim + 2 * m.kv_dim) / tp), (m.dim / tp, m.dim)]
    dense += matrices(m, tp, m.expert_width) * m.shared_experts if experts else matrices(m, tp, m.ffn_dim)
    products = [(tokens, *matrix, 1) for matrix in dense]
    if experts:
        here, rows = m.experts / x.ep, tokens / tp * m.experts_per_token
        products += [(rows / here, *matrix, here) for matrix in matrices(m, 1, m.expert_width)]
        products.append((tokens / tp, m.dim, m.experts, 1))
    return products


def layer_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, experts: bool) -> Work:
    """One layer on one rank, for one micro-batch, if nothing is computed again."""
    tp, tokens = x.tp, tokens_of(m, x)
    own = tokens / tp if x.sp else tokens
    visits = tokens / tp * m.experts_per_token if experts else 0  # of this rank's experts, and whole ones
    width = visits * m.expert_width + tokens / tp * (m.shared_experts * m.expert_width if experts else m.ffn_dim)

    products = products_of(m, x, experts)
    f = sum(matmul_seconds(gpu, rows, inner, outer, n) for rows, inner, outer, n in products)
    b = sum(matmul_seconds(gpu, rows, outer, inner, n) for rows, inner, outer, n in products)
    w = sum(matmul_seconds(gpu, inner, rows, outer, n) for rows, inner, outer, n in products)
    core, core_back = attention_seconds(m, x, gpu, recipe)

    qkv = (m.dim + 2 * m.kv_dim) / tp
    between = own * m.dim * gpu.number * (11 if m.gpt else 10)  # norms 2 x 2, residual sums (with GPT's dropout)
    inside = gpu.number * (tokens * qkv * (2 if recipe.flash else 6) + width * (2 if m.gpt else 3))
    travels = visits * m.dim * gpu.number * 2 * 3  # rows are sorted, sent, and put back
    forward = memory_seconds(gpu, between + inside + travels, 12)
    backward = memory_seconds(gpu, 1.5 * between + 1.7 * inside + travels, 20)

    net, whole = network(x, "tp", gpu.node), tokens * m.dim * gpu.number
    gather = collective_seconds(gpu, net, ring(net, whole), tree=not x.sp)
    halves, _ = tp_halves(m, x, experts)
    there = halves * gather
    regather = (1 if experts else 2) * gather * (x.sp and recipe.overlap_tp)
    back = there + regather - (min(there / 2 + regather, w) if recipe.overlap_tp else 0.0)

    cp, cp_back = context_seconds(m, x, gpu, core, core_back)
    ep = 2 * all_to_all_seconds(gpu, network(x, "ep", gpu.node), visits * m.dim * gpu.number)
    return Work(
        dict(matmul=f, attention=core, memory=forward, tp=there, cp=cp, ep=ep),
        dict(matmul=b, attention=core_back, memory=backward, cp=cp_back, ep=ep, tp=back),
        dict(matmul=w),
    )


def tp_halves(m: Shape, x: Layout, experts: bool) -> tuple[int, int]:
    """Halves of an all-reduce over tp in a layer's forward, and of these, those that are done again in backward.

    A block has a gather and a scatter, or an all-reduce. The last of an MLP is not done again: nobody needs its output.
    Experts have none, but shared ones have SP's, and without SP their outputs are gathered.
    """
    if not experts:
        return 4, 3 if x.sp else 2
    shared = m.shared_experts > 0
    return 2 + 2 * shared + (not x.sp), 2 + shared


def done_again(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, f: ByPart, experts: bool) -> ByPart:
    """What a layer's backward computes again of its forward `f`.

    A recipe that `stops` does not do the last matmul of an MLP again, as nobody needs its output: with it goes the last
    of the collectives over tp (`tp_halves`). Elementwise recomputation keeps what matmuls made, and sends as much again
    as the full one: so counts the dry run. Selective recomputation computes the scores again.
    """
    if x.recompute in ("none", "selective"):
        return {} if x.recompute == "none" else dict(attention=f["attention"])
    halves, again = tp_halves(m, x, experts)
    sent = {dim: f[dim] for dim in ("tp", "cp", "ep")} | dict(tp=f["tp"] * again / halves)
    if x.recompute == "elementwise":
        return sent | dict(memory=f["memory"] / 2)
    if not recipe.stops:
        return f
    rows = tokens_of(m, x)
    last = 0.0 if experts else matmul_seconds(gpu, rows, m.ffn_dim / x.tp, m.dim)
    return f | sent | dict(matmul=f["matmul"] - last)


def head_work(m: Shape, x: Layout, gpu: Gpu) -> Work:
    """The output projection and the loss of one micro-batch, which nobody computes again."""
    tokens, vocab, net = tokens_of(m, x), m.vocab_size / x.tp, network(x, "tp", gpu.node)
    gather = collective_seconds(gpu, net, ring(net, tokens * m.dim * gpu.number), tree=not x.sp)
    logits = memory_seconds(gpu, 14 * tokens * vocab, 5)  # 16 bits, then fp32: maximum, exponential, sum
    f = dict(matmul=matmul_seconds(gpu, tokens, m.dim, vocab), memory=logits, tp=gather)
    b = dict(matmul=matmul_seconds(gpu, tokens, vocab, m.dim), memory=logits / 2, tp=gather)
    return Work(f, b, dict(matmul=matmul_seconds(gpu, m.dim, tokens, vocab)))


@lru_cache(maxsize=100_000)
def pipeline_ratio(schedule: str, p: int, chunks: int, n: int, b: float, w: float, message: float) -> float:
    """Makespan of a schedule in units of a stage's forward; the other costs are ratios to it.

    After 3 p micro-batches every further p of them add the same time, so the rest is continued from there.
    """
    places, split = places_of(schedule, p, chunks), splits(schedule, p, chunks)

    def simulated(n: int) -> float:
        lists = lists_of(schedule, p, chunks, n)
        return simulate(lists, places, dict(F=1.0, B=b if split else b + w, W=w), message)[-1][0]

    fewer = 2 * p + n % p
    if n <= fewer + p:
        return simulated(n)
    first, second = simulated(fewer), simulated(fewer + p)
    return second + (n - fewer - p) / p * (second - first)


def stages_of(x: Layout) -> int:
    """Stages that a micro-batch passes on each rank."""
    return stages(schedule_of(x), x.pp)


def least_bubble(x: Layout, f: float, b: float, w: float) -> float:
    """Seconds that no order of work can save.

    Some rank waits for its first forward; where no W fills the gap, another also for the last backward. And one
    micro-batch passes all stages in turn, there and back.
    """
    p, v, way = x.pp, stages_of(x), (x.schedule, x.pp, x.chunks)
    ends = longest_wait(*way) * (f if splits(*way) else f + b + w)
    return max(ends, p * v * (f + b) - x.micro_batches * v * (f + b + w))


def boundary_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """A message over a pipeline boundary."""
    size, net = tokens_of(m, x) * m.dim * gpu.number, network(x, "pp", gpu.node)
    crosses = net.in_node == 1
    scatter = (recipe.scatter or x.pp_scatter) and not x.sp
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
    exposed: ByPart
    update: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.recompute + self.bubble + sum(self.exposed.values()) + self.update


class LayerWorks(NamedTuple):
    """A micro-batch: the work of a layer, by whether it has experts; the head's."""

    layers: dict[bool, Work]
    head: Work


def layer_layout(x: Layout) -> Layout:
    """The part of a layout that decides the work of a layer."""
    keep = dict(micro_batch_size=x.micro_batch_size, recompute=x.recompute, sp=x.sp, cp_mode=x.cp_mode)
    return Layout(cp=x.cp, tp=x.tp, ep=x.ep, **keep)


@lru_cache(maxsize=100_000)
def layer_works(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> LayerWorks:
    """What stages are made of, for a layout of one micro-batch and stage (`layer_layout`)."""
    gpu = gpu._replace(matmul=gpu.matmul * recipe.library)
    if x.recompute == "none":
        layers = {flag: layer_work(m, x, gpu, recipe, flag) for flag, n in layer_counts(m).items() if n}
        return LayerWorks(layers, head_work(m, x, gpu))
    once = layer_works(m, replace(x, recompute="none"), gpu._replace(matmul=gpu.matmul / recipe.library), recipe)
    layers = {
        flag: work._replace(b=add(work.b, done_again(m, x, gpu, recipe, work.f, flag)))
        for flag, work in once.layers.items()
    }
    return LayerWorks(layers, once.head)


@lru_cache(maxsize=4096)
def loads(m: Shape, schedule: str, pp: int, chunks: int) -> set[tuple[float, float, float]]:
    """The different loads of ranks: (layers without, layers with experts, heads), in micro-batches of the step."""
    different, share = set(), 1 / ways_of(schedule, pp, chunks)  # of the micro-batches
    for places in rank_places(m, schedule, pp, chunks):
        kinds = [m.has_experts(n) for place in places.values() for n in place.layers]
        heads = sum(place.after is None for place in places.values())
        different.add((kinds.count(False) * share, kinds.count(True) * share, heads * share))
    return different


def together(work: LayerWorks, load: tuple[float, float, float]) -> ByPart:
    """A micro-batch of a rank with this load: forward and both backwards, by part."""
    parts = [times(part, n) for flag, n in zip((False, True), load, strict=False) if n for part in work.layers[flag]]
    return add(*parts, *(times(part, load[2]) for part in work.head if load[2]))


@lru_cache(maxsize=100_000)
def model_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> Work:
    """One micro-batch in the whole model."""
    work, counts = layer_works(m, x, gpu, recipe), layer_counts(m)
    return Work(*(add(work.head[i], *(times(one[i], counts[k]) for k, one in work.layers.items())) for i in range(3)))


def most_hidden(busy: ByPart) -> float:
    """Of a micro-batch's messages of experts, those that another one's computation hides, if always one is beside it.

    It computes as long as this one does. The gradients of weights count, though a schedule may have them apart.
    """
    return min(busy.get("ep", 0.0), sum(busy.get(part, 0.0) for part in COMPUTE))


class RankWork(NamedTuple):
    """One micro-batch on the busiest rank, by part, with and without doing again; a mean stage's f, b and w."""

    busy: ByPart
    once: ByPart
    costs: tuple[float, float, float]


@lru_cache(maxsize=200_000)
def rank_work(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, schedule: str, pp: int, chunks: int) -> RankWork:
    """The work of a pipeline's ranks, for the `layer_layout` of a layout."""
    once, work = layer_works(m, replace(x, recompute="none"), gpu, recipe), layer_works(m, x, gpu, recipe)
    load = max(loads(m, schedule, pp, chunks), key=lambda load: total(together(work, load)))
    number = pp * stages_of(Layout(pp=pp, schedule=schedule, chunks=chunks))
    costs = tuple(total(part) / number for part in model_work(m, x, gpu, recipe))
    return RankWork(together(work, load), together(once, load), costs)


def hidden_seconds(x: Layout, busy: ByPart) -> float:
    """Of a micro-batch's messages of experts, those that --ep-overlap hides: where F has the B of another beside it."""
    return paired(x.schedule, x.pp, x.chunks, x.micro_batches) * most_hidden(busy) if x.ep_overlap else 0.0


def step_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, simulated: bool = True) -> Seconds:
    """The step of one layout; not `simulated`: with the least bubble that its schedule could have."""
    n, way = x.micro_batches, (x.schedule, x.pp, x.chunks)
    busy, once, (f, b, w) = rank_work(m, layer_layout(x), gpu, recipe, *way)
    bubble, exposed = 0.0, {}
    if x.pp > 1:
        message = boundary_seconds(m, x, gpu, recipe)
        bubble = least_bubble(x, f, b, w)
        if simulated:
            b, w = round(b / f, 2), round(w / f, 2)
            idle = pipeline_ratio(*way, n, b, w, float(f"{message / f:.2g}")) - n * (1 + b + w) * stages_of(x)
            exposed["pp"] = min(f * idle, 2 * (x.pp - 1) * message)  # to fill the pipeline and to drain it
            bubble = f * idle - exposed["pp"]
    exposed |= {dim: n * busy[dim] for dim in ("tp", "cp", "ep") if busy.get(dim)}
    if x.ep_overlap:
        exposed["ep"] -= n * hidden_seconds(x, busy)
    exposed |= data_seconds(m, x, gpu, recipe, total(busy))
    compute, plain = (n * sum(parts.get(part, 0.0) for part in COMPUTE) for parts in (busy, once))
    return Seconds(plain, compute - plain, bubble, exposed, update_seconds(m, x, gpu, recipe))


def fullest_numbers(m: Shape, x: Layout) -> tuple[float, float]:
    """Numbers of weights of the fullest rank: (replicated over dp x cp, of its experts)."""
    return max(rank_numbers(m, x.schedule, x.pp, x.chunks, x.tp, x.ep), key=sum)


def pair_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of summing over pairs of pipeline ranks the gradients of what both hold.

    With two ways that is all they have; else a tied matrix, in the first stage and in the last. Nothing hides it.
    """
    places, two = places_of(x.schedule, x.pp, x.chunks), ways_of(x.schedule, x.pp, x.chunks) > 1
    if not two and (not m.tied or places[0].rank == places[-1].rank):
        return 0.0
    shared, own = fullest_numbers(m, x) if two else (end_weights(m, x.tp)[0], 0.0)
    if x.zero:
        shared, own = shared / network(x, "shard").ranks, own / network(x, "expert shard").ranks
    pair = Network(2, 1 if network(x, "pp", gpu.node).leaves else 2)
    return collective_seconds(gpu, pair, 2 * ring(pair, (shared + own) * recipe.gradient))


def data_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe, micro_batch: float) -> ByPart:
    """Exposed seconds of summing gradients and gathering weights over dp x cp (and slices over replicas, once a step).

    Software that overlaps hides an all-reduce behind the last micro-batch, stages 2 and 3 behind all of them, but for
    the last twentieth: the last unit's gradient travels when nothing is left to compute. ZeRO's stage 1 sums at the
    end, unless told to overlap, and stages 1 and 2 gather the weights after the update. Stage 3 gathers them twice in
    each micro-batch, or keeps them. Software that overlaps sends a layer at a time, any other all at once.
    """
    n, hidden, open_ = x.micro_batches, 0.0, 0.0
    layers = m.n_layers / x.pp if recipe.overlap_dp else 1
    far = network(x, "replicas", gpu.node)
    for numbers, dim in zip(fullest_numbers(m, x), ("shard", "expert shard"), strict=True):
        net = network(x, dim, gpu.node)
        if net.ranks == 1 or not numbers:
            continue
        if far.ranks > 1 and dim == "shard":
            open_ += 2 * collective_seconds(gpu, far, ring(far, numbers / net.ranks * 4), layers, tree=True)
        reduced = collective_seconds(gpu, net, ring(net, numbers * recipe.gradient), layers, tree=x.zero == 0)
        gathered = collective_seconds(gpu, net, ring(net, numbers * gpu.number), layers)
        if x.zero == 0:
            hidden += 2 * reduced
        elif x.zero == 1:
            hidden, open_ = hidden + reduced * x.zero_overlap, open_ + reduced * (not x.zero_overlap) + gathered
        elif x.zero == 2:
            hidden, open_ = hidden + n * reduced, open_ + gathered
        else:
            hidden += n * reduced + (1 if x.zero_keep else 2 * n) * gathered
    if recipe.overlap_dp:
        hidden = max(hidden - micro_batch * (n if x.zero >= 2 else 1), 0.05 * hidden)
    seconds = hidden + open_ + pair_seconds(m, x, gpu, recipe)
    return {"dp": seconds} if seconds else {}


def update_seconds(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Norm, clip and AdamW on the rank's part: read and write weights, gradients, masters and moments."""
    shared, own = fullest_numbers(m, x)
    data, expert = (network(x, dim).ranks if x.zero else 1 for dim in ("shard", "expert shard"))
    passes = 2 * 12 + 4 * recipe.gradient + 8
    return memory_seconds(gpu, (shared / data + own / expert) * passes + 4 * (shared + own), 50)
