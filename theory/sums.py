"""Small sums for theory/claims.py: what texts count, put together from the formulas of the other files and schedules.

N: numbers of a model. p: pipeline ranks. m: micro-batches. v: stages on a rank.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from common.model import PRESETS
from common.schedules import Action, round_robin, simulate
from theory.footprint import gpt_layer_bytes, held
from theory.gpus import GPUS, NODE, Gpu
from theory.layouts import Layout, Network
from theory.memory import Held
from theory.recipes import COURSE, RECIPES, Recipe
from theory.seconds import boundary_seconds, collective_seconds, ring, step_seconds
from theory.shapes import GPTS, Shape, flops_per_token, gpt, total_weights
from theory.traffic import Passes, Traffic, context_traffic, unit_traffic

L1, L8, L70, L405 = (Shape(**vars(PRESETS[f"llama3{name}"])) for name in (".2-1b", "-8b", "-70b", "-405b"))
GPT3, GPT1T, A100, H100 = GPTS["gpt3-175b"], GPTS["gpt3-1t"], GPUS["a100-80"], GPUS["h100-80"]
EFA = GPUS["h100-80-efa"]
MEGATRON, GPT2B = RECIPES["megatron-2021"], gpt(2304, 24, 24)
MANY = 1024  # ranks, where a formula is near its limit


def state(zero: int = 0, ranks: int = 1, recipe: Recipe = MEGATRON) -> Held:
    """Bytes for each of N that a rank holds between two steps, by kind."""
    held_bytes = held(L8, Layout(zero=zero, dp=ranks, global_batch_size=ranks), recipe)
    return Held(*(part / total_weights(L8) for part in held_bytes[:3]), 0.0, 0.0)


def fullest(m: Shape, seq_len: int, **layout) -> float:
    """GB of the course's fullest rank, as planned."""
    return held(replace(m, seq_len=seq_len), Layout(**layout), COURSE).total / 1e9


def sent(zero: int) -> float:
    """What a rank of many sends in a step of one micro-batch, in N."""
    return sum(unit_traffic("dp", MANY, 1, 1, 1, reductions=1, gatherings=2 if zero == 3 else 1).values())


def kept(m: Shape, seq_len: int = 2048, recompute: str = "none", tp: int = 1, sp: bool = True) -> float:
    """Bytes a token and channel that a layer of GPT keeps: 34 + 5 a s / h. "selective" leaves the scores out."""
    m = replace(m, seq_len=seq_len)
    return gpt_layer_bytes(m, Layout(tp=tp, sp=sp), recompute) / (seq_len * m.dim)


def activations(m: Shape, seq_len: int, recompute: str = "none") -> float:
    """GB that all layers keep of one sequence."""
    return m.n_layers * seq_len * m.dim * kept(m, seq_len, recompute) / 1e9


def forward_twice(m: Shape) -> float:
    """FLOPs of a token if all layers go forward again: Megatron's convention."""
    return flops_per_token(m)[0] * 4 / 3 - 2 * m.vocab_size * m.dim


def planned(m: Shape, **layout) -> float:
    """Seconds of Megatron's step on A100s, as planned."""
    return step_seconds(m, Layout(sp=False, zero=0, **layout), A100, MEGATRON).step


def speed(tp: int, dp: int, sp: bool = True) -> float:
    """Planned tokens/s of an H100: Llama 3 70B, 4,096 tokens, elementwise recomputation, a sequence for each GPU."""
    x = Layout(tp=tp, dp=dp, sp=sp, global_batch_size=tp * dp, recompute="elementwise")
    return 4096 / step_seconds(replace(L70, seq_len=4096), x, H100, COURSE).step


def boundary(**layout) -> float:
    """Seconds of a pipeline's message, without latency: 4,096 tokens x 8,192 channels in BF16 at 50 GB/s."""
    m, gpu = replace(L70, seq_len=4096), H100._replace(between=50e9)
    return boundary_seconds(m, Layout(pp=2, **layout), gpu, COURSE) - gpu.start - gpu.hop_between


def data_speed(dp: int, batch: int, zero: int = 3, gpu: Gpu = H100, m: Shape = L8) -> float:
    """Planned tokens/s of a GPU: `batch` sequences of 4,096 tokens, recomputed in full, so that all stages fit."""
    x = Layout(dp=dp, zero=zero, global_batch_size=batch, recompute="full")
    return 4096 * batch / dp / step_seconds(replace(m, seq_len=4096), x, gpu, COURSE).step


def breaks_down(batch: int = 0, **more) -> int:
    """The first power of two of dp at which a GPU is 5% slower than in one node. Without `batch`, a sequence a GPU."""
    alone = data_speed(NODE, batch or NODE, **more)
    return next(dp for dp in (2**n for n in range(4, 18)) if data_speed(dp, batch or dp, **more) < 0.95 * alone)


def all_reduce(nodes: int, size: float, gpu: Gpu = H100) -> float:
    """Seconds for `size` bytes on all GPUs of so many nodes, as planned."""
    net = Network(NODE * nodes, NODE)
    return 2 * collective_seconds(gpu, net, ring(net, size), tree=True)


def layer(traffic: Callable[..., Traffic], n: int, *more, **changes) -> Counter:
    """What a rank of n sends for a layer of Llama 3 8B: by operation, in activations of 8,192 tokens."""
    sizes = dict(m=L8, tokens=8192, layers=1, routers=0, embeddings=0, heads=0, e=2, wide=2, recompute=False)
    sent = traffic(Passes(**sizes | changes), n, *more)
    return Counter({operation: size / (2 * 8192 * L8.dim) for (_, operation), size in sent.items()})


def ring_blocks(n: int) -> float:
    """Blocks of keys and values that a rank of a ring sends in forward: what full recomputation adds."""
    again, once = (layer(context_traffic, n, 1, tokens=8192 // n, recompute=full).total() for full in (True, False))
    return (again - once) * n * L8.dim / (2 * L8.kv_dim)


def run(make: Callable, p: int, m: int, v: int = 1, b: float = 2) -> list[tuple]:
    """A schedule's (end, rank, start, action), simulated. A forward takes 1, a backward b."""
    lists = [make(p, m, v, rank) for rank in range(p)]
    return simulate(lists, round_robin(p * v, p, v), dict(F=1, B=b))


def bubble(make: Callable, p: int, m: int, v: int = 1, b: float = 2, of_step: bool = False) -> float:
    """The time that a rank waits, over the time that it works, or over both."""
    step, work = run(make, p, m, v, b)[-1][0], m * v * (1 + b)
    return (step - work) / (step if of_step else work)


def start(make: Callable, p: int, m: int, *action) -> float:
    """When an action starts, if a backward takes as long as a forward."""
    return next(start for _, _, start, done in run(make, p, m, b=1) if done == Action(*action))


def in_flight(make: Callable, p: int, m: int, v: int = 1) -> float:
    """The most that rank 0 keeps, in micro-batches of all its stages."""
    kinds = [action.kind for action in make(p, m, v, 0)]
    return max(kinds[:n].count("F") - kinds[:n].count("B") for n in range(len(kinds) + 1)) / v


def as_drawn(make: Callable, *rows: str) -> int:
    """How many actions stand where a drawing has them."""
    lists = [make(len(rows), len(rows[0].split()) // 2, 1, rank) for rank in range(len(rows))]
    ours = [f"{action.kind}{action.micro_batch}" for row in lists for action in row]
    return sum(a == b for a, b in zip(ours, " ".join(rows).split(), strict=True))


def wrong_by(columns: bool) -> float:
    """The largest error of attention's probabilities if two ranks cut W_q and W_k, and add nothing before softmax."""
    x, wq, wk = torch.randn(3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = []
    for head in (slice(0, 4), slice(4, 8)):
        rows = slice(0, 8) if columns else head  # of W, and so channels of x
        whole = (x @ wq[:, head] @ (x @ wk[:, head]).T).softmax(-1)
        own = (x[:, rows] @ wq[rows, head] @ (x[:, rows] @ wk[rows, head]).T).softmax(-1)
        errors.append((whole - own).abs().max().item())
    return max(errors)


def first_step(optimizer: type) -> float:
    """w1 in S1's example: weights 1 to 4, the loss (x sum(w))^2 / 2, x = 1 and 2 on two ranks, learning rate 0.1."""
    w = torch.arange(1.0, 5.0, requires_grad=True)
    sum((x * w.sum()) ** 2 / 4 for x in (1, 2)).backward()
    optimizer([w], lr=0.1).step()
    return w[0].item()


def pcie(transfers: float) -> float:
    """GB/s one way over 16 lanes at so many GT/s: 128 of 130 bits are data."""
    return transfers * 16 * 128 / 130 / 8
