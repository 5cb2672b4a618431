"""Where a step is in memory, bubble and time, as pictures from theory alone: nothing is measured.

    python -m extras.theory.pictures FOLDER     memory_by_sequence.png, memory_by_ranks.png, bubble.png, speed.png

    memory   Llama 3 8B in BF16 on the fullest rank: against tokens, without and with recomputation; against ranks,
             under each stage of ZeRO, and under tp. Weights, gradients and state are 18 N, cut as step 3 says
    bubble   idle time over the time of the step, (p-1) / (v m + p-1), against m
    speed    tokens/s of an H100 against dp: with a batch that grows with dp, and with one of 4M tokens for all. Where a
             line bends down, hops of rings are no longer hidden; on EFA, nor are bytes that contend for its links

Every point is one call of a formula or of the planner.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from common.model import PRESETS
from extras.theory.gpus import GPUS, Gpu
from extras.theory.layouts import RECOMPUTE, Layout
from extras.theory.memory import Held, held
from extras.theory.seconds import step_seconds
from extras.theory.shapes import Shape

H100, EFA, L8 = GPUS["h100-80"], GPUS["h100-80-efa"], Shape(**vars(PRESETS["llama3-8b"]))
TOKENS, RANKS, MANY = [2**n for n in range(10, 18)], [1, 2, 4, 8], [2**n for n in range(3, 12)]
MICRO_BATCHES = [2**n for n in range(8)]
Line = tuple[str, list[int], list[float]]  # of a picture: its name, x and y


def holds(tokens: int = 4096, **layout) -> Held:
    """What the fullest rank holds, with one sequence on each."""
    x = Layout(**dict(zero=0) | layout)
    return held(replace(L8, seq_len=tokens), replace(x, global_batch_size=x.dp))


def by_sequence() -> Iterator[Line]:
    """GB against tokens of a sequence, on one GPU."""
    for kind in ("weights", "gradients", "optimizer"):
        yield kind, TOKENS, [getattr(holds(n), kind) / 1e9 for n in TOKENS]
    for recompute in RECOMPUTE:
        kept = [holds(n, recompute=recompute).activations / 1e9 for n in TOKENS]
        yield f"activations, recompute {recompute}", TOKENS, kept


def by_ranks() -> Iterator[Line]:
    """GB against ranks, of all that stays and waits; a sequence of 4,096 tokens on each rank of dp, or on all of tp."""
    ways = {f"dp, ZeRO {zero}": ("dp", dict(zero=zero)) for zero in range(4)}
    ways |= {"tp, with SP": ("tp", {}), "tp, without SP": ("tp", dict(sp=False))}
    for name, (dim, more) in ways.items():
        yield name, RANKS, [sum(holds(**more | {dim: n})[:4]) / 1e9 for n in RANKS]


def bubbles() -> Iterator[Line]:
    """The idle part of a step against micro-batches: 1F1B, or interleaved with v stages a rank."""
    for p, v in (4, 1), (8, 1), (8, 2), (8, 4), (16, 1):
        yield f"p = {p}, v = {v}", MICRO_BATCHES, [(p - 1) / (v * m + p - 1) for m in MICRO_BATCHES]


def speeds() -> Iterator[Line]:
    """Tokens/s of a GPU against dp: Llama 3 8B, 4,096 tokens a sequence, recomputed in full, so that all stages fit."""

    def speed(dp: int, batch: int, zero: int, gpu: Gpu) -> float:
        x = Layout(dp=dp, zero=zero, global_batch_size=batch, recompute="full")
        return 4096 * batch / dp / step_seconds(replace(L8, seq_len=4096), x, gpu).step

    few = [n for n in MANY if n <= 1024]
    for gpu, where in (H100, ""), (EFA, ", on EFA"):
        yield f"ZeRO 3, a sequence a GPU{where}", MANY, [speed(n, n, 3, gpu) for n in MANY]
        yield f"ZeRO 1, 1,024 sequences in all{where}", few, [speed(n, 1024, 1, gpu) for n in few]


PICTURES: dict[str, tuple[Callable[[], Iterator[Line]], str, str]] = {  # name -> its lines, and what x and y are
    "memory_by_sequence": (by_sequence, "tokens of a sequence", "GB on one GPU"),
    "memory_by_ranks": (by_ranks, "ranks", "GB on the fullest rank"),
    "bubble": (bubbles, "micro-batches of a rank", "idle part of a step"),
    "speed": (speeds, "ranks of data parallelism", "planned tokens/s of an H100"),
}


def draw(name: str, target: Path):
    """Draw a picture and save it."""
    lines, x, y = PICTURES[name]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots(subplot_kw=dict(xlabel=x, ylabel=y))
    for label, *points in lines():
        axes.plot(*points, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m extras.theory.pictures", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        draw(name, folder / f"{name}.png")
