"""The time of one step on paper: each matmul, each pass over memory and each message has its seconds.

    matmul        FLOPs / (peak x part reached) + bytes of its three matrices / memory bandwidth + a launch
    elementwise   bytes / memory bandwidth + a launch
    collective    bytes sent by a rank / bandwidth + latency x hops; `within` a node, or `between` nodes x the ranks
                  of the group that a node has, which send side by side
    pipeline      from the simulator of common/schedules.py, with the mean stage; and the dearest stage for the rest
    update        bytes of weights, gradients, masters and moments / memory bandwidth

The bytes in the formula of a matmul say why small ones are slow: time is FLOPs x (1 / peak + (1/N + 1/M + 1/K) / HBM).
"""

from dataclasses import replace
from functools import lru_cache
from math import log2
from typing import NamedTuple

from common.schedules import SCHEDULES, Action, Costs, place_stages
from theory.bubble import quick_makespan
from theory.footprint import rank_numbers, rank_stages
from theory.gpus import LATENCY, LATENCY_BETWEEN, LAUNCH, Gpu
from theory.layouts import Layout, Network, network
from theory.recipes import Recipe
from theory.shapes import (
    Matmul,
    Shape,
    attention_matmuls,
    end_weights,
    head_widths,
    kv_width,
    layer_counts,
    mlp_matmuls,
)

FLASH = 0.75  # the part of a large matmul's speed that fused attention reaches (FlashAttention-2 and 3, their tables)
COMPUTE = ("matmul", "attention", "memory")
E = 2  # bytes of an activation
Parts = dict[str, float]  # seconds by part: matmul, attention, memory, tp, cp, ep


class Work(NamedTuple):
    """Seconds of forward, of the input's gradient (with what is computed again), and of the weights' gradient."""

    f: Parts
    b: Parts
    w: Parts


def add(*parts: Parts) -> Parts:
    """Sums by part."""
    return {name: sum(p.get(name, 0.0) for p in parts) for name in {name: 0 for p in parts for name in p}}


def times(parts: Parts, factor: float) -> Parts:
    """Every part so many times."""
    return {name: seconds * factor for name, seconds in parts.items()}


def total(parts: Parts) -> float:
    """All parts together."""
    return sum(parts.values())


def matmul_seconds(gpu: Gpu, rows: float, inner: float, outer: float, count: float = 1) -> float:
    """`count` products [rows, inner] x [inner, outer] in one launch."""
    flops, numbers = 2 * rows * inner * outer, rows * inner + inner * outer + rows * outer
    return count * (flops / (gpu.flops * gpu.matmul) + E * numbers / gpu.hbm) + LAUNCH


def memory_seconds(gpu: Gpu, n_bytes: float, kernels: int = 1) -> float:
    """Reading and writing so many bytes in all."""
    return n_bytes / gpu.hbm + kernels * LAUNCH


def bandwidth(gpu: Gpu, net: Network) -> float:
    """Bytes/s at which a rank of this group sends while the node's other groups do the same."""
    return min(gpu.within, net.in_node * gpu.between) if net.leaves else gpu.within


def collective_seconds(gpu: Gpu, net: Network, sent: float) -> float:
    """A collective in which each rank sends so many bytes; the latency grows with the tree of ranks."""
    if net.ranks == 1:
        return 0.0
    latency = (LATENCY_BETWEEN if net.leaves else LATENCY) * log2(net.ranks)
    return sent / bandwidth(gpu, net) + latency


def ring(net: Network, n_bytes: float) -> float:
    """Bytes that each rank sends to gather (or to reduce and scatter) a whole of `n_bytes`."""
    return (net.ranks - 1) / net.ranks * n_bytes


def attention_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> tuple[float, float]:
    """Forward and backward of one layer's attention core on one rank, for one micro-batch."""
    tokens, (qk, value), tp = layout.mbs * m.seq_len // layout.cp, head_widths(m), layout.tp
    if recipe.flash:
        forward = tokens * m.seq_len * (qk + value) / tp / (gpu.flops * gpu.matmul * FLASH)  # half of 2 x 2 s h
        return forward + LAUNCH, 2.5 * forward + LAUNCH
    heads, scores = layout.mbs * m.n_heads / tp, tokens * m.seq_len * m.n_heads / tp
    one = matmul_seconds(gpu, m.seq_len, qk / m.n_heads, m.seq_len, heads)
    # softmax reads and writes 2 bytes; dropout reads 2 and writes 2 and its mask; their backwards read what they need
    return 2 * one + memory_seconds(gpu, 9 * scores, 2), 4 * one + memory_seconds(gpu, 11 * scores, 2)


def layer_work(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe, experts: bool) -> Work:
    """One layer on one rank, for one micro-batch, if nothing is computed again."""
    tp, tokens = layout.tp, layout.mbs * m.seq_len // layout.cp
    fast = gpu._replace(flops=2 * gpu.flops) if recipe.fp8 else gpu
    own = tokens / tp if layout.sp else tokens
    dense = attention_matmuls(m) + ([] if experts else mlp_matmuls(m, m.ffn_dim))
    visits, shared = (tokens * m.experts_per_token, m.shared_experts) if experts else (0, 0)
    width = visits * m.expert_width + tokens * shared * m.expert_width + (not experts) * tokens * m.ffn_dim

    def product(matmul: Matmul, rows: float, which: str, count: float = 1) -> float:
        inner = matmul.inner / (tp if matmul.cut == "rows" else 1)
        outer = matmul.outer / (tp if matmul.cut == "columns" else 1)
        shapes = {"f": (rows, inner, outer), "b": (rows, outer, inner), "w": (inner, rows, outer)}
        cast = 3 * count * (rows * inner + inner * outer) * recipe.fp8  # read 2 bytes, write 1
        return matmul_seconds(fast, *shapes[which], count) + cast / gpu.hbm

    def products(which: str) -> float:
        found = sum(product(matmul, tokens, which) for matmul in dense)
        if experts:
            here = m.experts / layout.ep
            one = mlp_matmuls(m, m.expert_width)
            found += sum(product(matmul, visits / here, which, here) for matmul in one)
            found += sum(product(matmul, tokens, which) for matmul in one) * shared
            found += product(Matmul("router", m.dim, m.experts, ""), own, which)
        return found

    core, core_back = attention_seconds(m, layout, gpu, recipe)
    qkv = (head_widths(m)[0] + kv_width(m)) / tp
    slow = 1.0 if recipe.fused else 1.5  # an unfused operator is several passes
    between = own * m.dim * (22 if m.learned_positions else 20)  # norms 2 x 4, residual sums (with GPT's dropout)
    inside = tokens * qkv * (12 if not recipe.flash else 4) + width / tp * (4 if m.mlp_matrices == 2 else 6)
    travels = visits * m.dim * 4 * 3 if experts else 0  # rows are sorted, sent, and put back
    forward = memory_seconds(gpu, slow * (between + inside + travels), 12)
    backward = memory_seconds(gpu, slow * (1.5 * between + 1.7 * inside + travels), 20)

    net, whole = network(layout, "tp"), tokens * m.dim * E
    gather = collective_seconds(gpu, net, ring(net, whole))
    one_way = 4 * gather if tp > 1 else 0.0  # two blocks, each with a gather and a scatter (or an all-reduce)
    regather = 2 * gather * (layout.sp and not recipe.gathered and recipe.name != "megatron-2021")
    hidden = min(one_way / 2 + regather, products("w")) if recipe.overlap_tp and tp > 1 else 0.0

    net = network(layout, "cp")
    kv = tokens * kv_width(m) / max(1, min(tp, m.n_kv_heads)) * E
    hop = collective_seconds(gpu, net, kv) if layout.cp > 1 else 0.0
    exposed = [max(0.0, (layout.cp - 1) * hop * n - seconds) for n, seconds in ((1, core), (2, core_back))]

    net, rows = network(layout, "ep"), visits / (tp if layout.sp else 1)
    exchange = 2 * collective_seconds(gpu, net, ring(net, rows * m.dim * E)) if layout.ep > 1 else 0.0

    f = dict(matmul=products("f"), attention=core, memory=forward, tp=one_way, cp=exposed[0], ep=exchange)
    b = dict(matmul=products("b"), attention=core_back, memory=backward, cp=exposed[1], ep=exchange)
    b["tp"] = one_way + regather - hidden
    return Work(f, b, dict(matmul=products("w")))


def done_again(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe, f: Parts, experts: bool) -> Parts:
    """What a layer's backward computes again of its forward `f`.

    A recipe that `stops` does not do the last matmul of an MLP again, as nobody needs its output: with it goes the last
    of the collectives over tp, one of 4, or without sequence parallelism one of 2 all-reduces. Its selective
    recomputation keeps what matmuls made, and sends as much again as the full one. So says theory/traffic.py, too.
    """
    if layout.recompute == "none":
        return {}
    sent = {dim: f[dim] for dim in ("tp", "cp", "ep")} | dict(tp=f["tp"] * (0.75 if layout.sp else 0.5))
    if layout.recompute == "selective":
        kinds = {
            "attention": {} if recipe.flash else dict(attention=f["attention"]),
            "matmuls": dict(matmul=f["matmul"] / 2, memory=f["memory"]),
            "elementwise": dict(memory=f["memory"] / 2),
        }
        return kinds[recipe.selective] | (sent if recipe.stops else {})
    if not recipe.stops:
        return f
    rows = layout.mbs * m.seq_len // layout.cp
    last = 0.0 if experts else matmul_seconds(gpu, rows, m.ffn_dim / layout.tp, m.dim)
    return f | sent | dict(matmul=f["matmul"] - last)


def head_work(m: Shape, layout: Layout, gpu: Gpu) -> Work:
    """The output projection and the loss of one micro-batch, which nobody computes again."""
    tokens, vocab = layout.mbs * m.seq_len // layout.cp, m.vocab_size / layout.tp
    net = network(layout, "tp")
    gather = collective_seconds(gpu, net, ring(net, tokens * m.dim * E))
    logits = memory_seconds(gpu, 14 * tokens * vocab, 5)  # 16 bits, then fp32: maximum, exponential, sum
    f = dict(matmul=matmul_seconds(gpu, tokens, m.dim, vocab), memory=logits, tp=gather)
    b = dict(matmul=matmul_seconds(gpu, tokens, vocab, m.dim), memory=logits / 2, tp=gather)
    return Work(f, b, dict(matmul=matmul_seconds(gpu, m.dim, tokens, vocab)))


@lru_cache(maxsize=64)
def lists_of(schedule: str, p: int, m: int, v: int) -> list[list[Action]]:
    """The lists of all ranks."""
    return [SCHEDULES[schedule](p, m, v, rank) for rank in range(p)]


@lru_cache(maxsize=100_000)
def pipeline_ratio(schedule: str, p: int, m: int, v: int, b: float, w: float, comm: float) -> float:
    """Makespan of a schedule in units of a chunk's forward; the other costs are ratios to it.

    After 3 p micro-batches every further p of them add the same time, so the rest is continued from there.
    """

    def simulated(n: int) -> float:
        return quick_makespan(lists_of(schedule, p, n, v), place_stages(schedule, p, v), Costs(1.0, b, w, comm))

    fewer = 2 * p + m % p
    if m <= fewer + p:
        return simulated(m)
    first, second = simulated(fewer), simulated(fewer + p)
    return second + (m - fewer - p) / p * (second - first)


def least_bubble(layout: Layout, f: float, b: float, w: float) -> float:
    """Seconds that no order of work can save.

    Some rank waits for its first forward; with 1F1B and its kin, another also for the last backward. And one
    micro-batch passes all stages in turn, there and back.
    """
    p, chunks = layout.pp, 1 if layout.schedule == "dualpipe" else layout.chunks
    waits = {"zb-h1": p - 1, "zb-h2": p - 1, "zbv": p - 1, "dualpipe": p // 2 - 1}
    ends = waits[layout.schedule] * f if layout.schedule in waits else (p - 1) * (f + b + w)
    return max(ends, p * chunks * (f + b) - layout.micro_batches * chunks * (f + b + w))


def boundary_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """A message over a pipeline boundary."""
    size = layout.mbs * m.seq_len // layout.cp * m.dim * E
    net = network(layout, "pp")
    crosses = net.in_node == 1
    sent = size / layout.tp if recipe.scatter or layout.sp else size
    # without slices, the tp ranks of a node send the same bytes side by side
    seconds = sent / (gpu.between if crosses else gpu.within) + (LATENCY_BETWEEN if crosses else LATENCY)
    if recipe.scatter and not layout.sp and layout.tp > 1:
        tp = network(layout, "tp")
        seconds += collective_seconds(gpu, tp, ring(tp, size))
    return seconds


class Seconds(NamedTuple):
    """Where the time of a step goes; `exposed`: communication that nothing hides, by dimension."""

    compute: float
    recompute: float
    bubble: float
    exposed: Parts
    update: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.compute + self.recompute + self.bubble + sum(self.exposed.values()) + self.update


class Pieces(NamedTuple):
    """A micro-batch: the work of a layer, by whether it has experts; the head's."""

    layers: dict[bool, Work]
    head: Work


@lru_cache(maxsize=100_000)
def pieces(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> Pieces:
    """What stages are made of, for a layout of one micro-batch and stage (`piece_of`), if nothing is computed again."""
    gpu = gpu._replace(matmul=gpu.matmul * recipe.library)
    layers = {flag: layer_work(m, layout, gpu, recipe, flag) for flag, n in layer_counts(m).items() if n}
    return Pieces(layers, head_work(m, layout, gpu))


def piece_of(layout: Layout) -> Layout:
    """The part of a layout that decides the work of a layer."""
    return Layout(
        cp=layout.cp, tp=layout.tp, ep=layout.ep, mbs=layout.mbs, recompute=layout.recompute, sp=layout.sp,
        cp_mode=layout.cp_mode,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def loads(m: Shape, schedule: str, pp: int, chunks: int, split: str) -> tuple[tuple[int, int, float], ...]:
    """The different loads of ranks: (layers without, layers with experts, heads), in micro-batches of the step."""
    found = set()
    copies = 2 if schedule == "dualpipe" else 1  # a rank has two stages, and half of the micro-batches for each
    for stages in rank_stages(m, schedule, pp, chunks, split):
        layers = [n for stage in stages for n in stage.layers]
        count = sum(m.has_experts(n) for n in layers)
        found.add(((len(layers) - count) / copies, count / copies, sum(stage.last for stage in stages) / copies))
    return tuple(found)


def together(work: Pieces, load: tuple[float, float, float]) -> Parts:
    """A micro-batch of a rank with this load: forward and both backwards, by part."""
    parts = [times(part, n) for flag, n in zip((False, True), load, strict=False) if n for part in work.layers[flag]]
    return add(*parts, *(times(part, load[2]) for part in work.head if load[2]))


@lru_cache(maxsize=100_000)
def pieces_with_again(m: Shape, piece: Layout, gpu: Gpu, recipe: Recipe) -> Pieces:
    """`pieces`, with what is computed again."""
    once, gpu = (
        pieces(m, replace(piece, recompute="none"), gpu, recipe),
        gpu._replace(matmul=gpu.matmul * recipe.library),
    )
    layers = {}
    for flag, layer in once.layers.items():
        again = done_again(m, piece, gpu, recipe, layer.f, flag)
        layers[flag] = layer._replace(b=add(layer.b, again))
    return Pieces(layers, once.head)


@lru_cache(maxsize=100_000)
def model_costs(m: Shape, piece: Layout, gpu: Gpu, recipe: Recipe) -> tuple[float, float, float]:
    """Seconds of one micro-batch in the whole model: forward and both backwards."""
    work, counts = pieces_with_again(m, piece, gpu, recipe), layer_counts(m)
    sums = [sum(counts[flag] * total(layer[i]) for flag, layer in work.layers.items()) for i in range(3)]
    return tuple(sums[i] + total(work.head[i]) for i in range(3))


class RankWork(NamedTuple):
    """One micro-batch on the busiest rank, by part, with and without doing again; a mean chunk's f, b and w."""

    busy: Parts
    once: Parts
    costs: tuple[float, float, float]


@lru_cache(maxsize=200_000)
def rank_work(
    m: Shape, piece: Layout, gpu: Gpu, recipe: Recipe, schedule: str = "1f1b", pp: int = 1, chunks: int = 1
) -> RankWork:
    """The work of a pipeline's ranks, for the `piece_of` a layout."""
    once, work = pieces(m, replace(piece, recompute="none"), gpu, recipe), pieces_with_again(m, piece, gpu, recipe)
    load = max(loads(m, schedule, pp, chunks, recipe.split), key=lambda load: total(together(work, load)))
    number = pp * (1 if schedule == "dualpipe" else chunks)
    costs = tuple(cost / number for cost in model_costs(m, piece, gpu, recipe))
    return RankWork(together(work, load), together(once, load), costs)


def step_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe, simulated: bool = True) -> Seconds:
    """The step of one layout; not `simulated`: with the least bubble that its schedule could have."""
    way, n = (layout.schedule, layout.pp, layout.chunks), layout.micro_batches
    busy, once, (f, b, w) = rank_work(m, piece_of(layout), gpu, recipe, *way)
    bubble, exposed = 0.0, {}
    if layout.pp > 1:
        message = boundary_seconds(m, layout, gpu, recipe)
        bubble = least_bubble(layout, f, b, w)
        if simulated:
            args = (layout.schedule, layout.pp, n, layout.chunks, round(b / f, 2), round(w / f, 2))
            each = (1 + args[4] + args[5]) * (1 if layout.schedule == "dualpipe" else layout.chunks)
            idle = f * (pipeline_ratio(*args, float(f"{message / f:.2g}")) - n * each)
            exposed["pp"] = min(idle, 2 * (layout.pp - 1) * message)  # to fill the pipeline and to drain it
            bubble = idle - exposed["pp"]
    exposed |= {dim: n * busy[dim] for dim in ("tp", "cp", "ep") if busy.get(dim)}
    exposed |= data_seconds(m, layout, gpu, recipe, total(busy))
    compute, plain = (n * sum(parts.get(part, 0.0) for part in COMPUTE) for parts in (busy, once))
    return Seconds(plain, compute - plain, bubble, exposed, update_seconds(m, layout, gpu, recipe))


@lru_cache(maxsize=100_000)
def numbers_of(m: Shape, schedule: str, pp: int, chunks: int, split: str, tp: int, ep: int) -> tuple[float, float]:
    """Numbers of the fullest rank: (replicated over dp x cp, of its experts)."""
    return max(rank_numbers(m, schedule, pp, chunks, split, tp, ep), key=sum)


def fullest_numbers(m: Shape, layout: Layout, recipe: Recipe) -> tuple[float, float]:
    """Numbers of the fullest rank: (replicated over dp x cp, of its experts)."""
    return numbers_of(m, layout.schedule, layout.pp, layout.chunks, recipe.split, layout.tp, layout.ep)


def mirror_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Seconds of summing over pairs of pipeline ranks the gradients of what both hold.

    With dualpipe that is all they have; else a tied matrix, in the first stage and in the last. Nothing hides it.
    """
    if layout.pp == 1 or not (layout.schedule == "dualpipe" or (m.tied and layout.schedule != "zbv")):
        return 0.0
    data, expert = (network(layout, dim).ranks if layout.zero else 1 for dim in ("shard", "expert shard"))
    shared, own = fullest_numbers(m, layout, recipe)
    if layout.schedule != "dualpipe":
        shared, own = end_weights(m, layout.tp)[0], 0.0
    pair = Network(2, 1 if network(layout, "pp").leaves else 2)
    return collective_seconds(gpu, pair, 2 * ring(pair, (shared / data + own / expert) * recipe.reduced))


def data_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe, micro_batch: float) -> Parts:
    """Exposed seconds of summing gradients and gathering weights over dp x cp (and slices over replicas, once a step).

    Software that overlaps hides them behind a micro-batch (stages 2 and 3: behind all), but for the last twentieth:
    the last unit's gradient travels when nothing is left to compute.
    """
    n, seconds = layout.micro_batches, 0.0
    reductions = n if layout.zero >= 2 else 1
    gatherings = {0: recipe.reduced / E, 3: 2 * n}.get(layout.zero, 1)
    if layout.zero == 3 and recipe.resident and layout.pp > 1:
        reductions, gatherings = 1, 1
    far = network(layout, "replicas")
    for numbers, dim in zip(fullest_numbers(m, layout, recipe), ("shard", "expert shard"), strict=True):
        net = network(layout, dim)
        if far.ranks > 1 and numbers:
            seconds += collective_seconds(gpu, far, 2 * ring(far, numbers / net.ranks * 4))
        if net.ranks > 1 and numbers:
            seconds += reductions * collective_seconds(gpu, net, ring(net, numbers * recipe.reduced))
            seconds += gatherings * collective_seconds(gpu, net, ring(net, numbers * E))
    if recipe.overlap_dp:
        covered = micro_batch * (n if layout.zero >= 2 else 1)
        seconds = max(seconds - covered, 0.05 * seconds)
    seconds += mirror_seconds(m, layout, gpu, recipe)
    return {"dp": seconds} if seconds else {}


def update_seconds(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe) -> float:
    """Norm, clip and AdamW on the rank's part: read and write weights, gradients, masters and moments."""
    shared, own = fullest_numbers(m, layout, recipe)
    data, expert = network(layout, "shard").ranks, network(layout, "expert shard").ranks
    numbers = shared / (data if layout.zero else 1) + own / (expert if layout.zero else 1)
    passes = 2 * recipe.state + 4 * recipe.gradient + 8
    return memory_seconds(gpu, numbers * passes + 4 * (shared + own), 50)
