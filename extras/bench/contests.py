"""Compares the speed and memory of a step's flags with one another and with PyTorch's own
parallelism.

A contestant trains by the step's own `train`, or by that of peers.py. In its turn, it trains four
steps, of which the last three are timed: whole training steps, from the batch to the update.
Contestants take turns in the same processes, so whatever else the machine does for long slows all
of them. A ratio divides the times of two contestants in the same round. The losses of all
contestants must agree.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from common.flags import flag, parse
from common.run import Run
from extras.__main__ import techniques, with_flags
from extras.bench.peers import (
    TORCH_SCHEDULES,
    build_ddp,
    build_dtensor,
    build_fsdp,
    build_pipelining,
)
from extras.bench.peers import train as train_by_torch
from extras.plan.tables import table
from extras.tools.memory import Memory, human
from tests.pool import Pool


class Contest(NamedTuple):
    """A step's contestants: variants of the step by their flags, and PyTorch's own beside some of
    them: flags -> (its name, the function of peers.py that builds it).
    """

    ranks: int
    step: str
    variants: list[str]
    torchs: dict[str, tuple[str, Callable]]
    shared: str = ""  # flags that all have


PIPELINES = {
    f"--schedule {ours}": (torchs, build_pipelining) for ours, torchs in TORCH_SCHEDULES.items()
}
CONTESTS = {
    "step1": Contest(1, "step01_single_gpu", ["--no-compile", "--compile", "--recompute full"], {}),
    "step2": Contest(
        2,
        "step02_ddp",
        ["--sync bucket", "--sync ring", "--sync naive"],
        {"--sync bucket": ("DistributedDataParallel", build_ddp)},
    ),
    "step3": Contest(
        2,
        "step03_zero",
        ["--zero 3", "--zero 1", "--zero 3 --keep"],
        {"--zero 3": ("fully_shard", build_fsdp)},
    ),
    "step4": Contest(
        2,
        "step04_tp_sp",
        ["--no-sp", "--sp"],
        {
            "--no-sp": ("DTensor", build_dtensor),
            "--sp": ("DTensor SequenceParallel", build_dtensor),
        },
        "--tp 2 --zero 0",
    ),
    "step6": Contest(
        4,
        "step06_pipeline",
        list(PIPELINES),
        PIPELINES,
        "--pp 4 --zero 0 --model tiny,n_layers=8 --micro-batch-size 2",
    ),
}


@dataclass
class Config:
    """Flags of a contest."""

    model: str = flag("tiny", "preset of the shape, perhaps with changes")
    rounds: int = flag(
        8, "turns of each contestant that are timed, after one that watches memory", least=1
    )


class Turn(NamedTuple):
    """One turn of a contestant on one rank."""

    seconds: float  # of a training step
    peak: int  # most bytes of the rank's tensors in a step, if it was watched
    losses: list[float]


class AllTensors(Memory):
    """Memory of DTensors, too: it records their local tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Skip an operator on DTensors, which then calls operators on local tensors: these are
        recorded.
        """
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class TimedRun(Run):
    """Trains four steps. `seconds`: the mean time of the last three."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Let `train` train, and nothing else: no files, no screen."""
        yield 0
        self.before = len(self.memory.events)
        began = now()
        yield from range(1, 4)
        self.seconds = (now() - began) / 3

    def record(self, step: int, tokens: int, **numbers: float):
        """Keep the loss."""
        self.history.append(numbers)


def now() -> float:
    """The time in seconds when all ranks have come here, and this rank's GPU is done."""
    if dist.is_initialized():
        dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def take_turn(step: str, flags: str, build: Callable | None, watched: bool) -> Turn:
    """Runs on every rank. `build`: of peers.py; None: the step's own `train`.

    `watched`: record the memory of tensors, which slows the steps. Temporary memory in kernels does
    not count; that of compiled ones is not known.
    """
    torch._dynamo.reset()  # what an earlier turn has compiled counts towards a limit
    module = importlib.import_module(step)
    words = f"--steps {10**6} --warmup-steps {10**3} --out unused {flags}".split()
    run = TimedRun(parse(with_flags(module.Config, techniques()), words))
    run.is_rank_0 = False
    run.memory = AllTensors()
    watched = watched and not run.config.compile  # under a mode torch.compile gives up, for good
    with run.memory if watched else nullcontext():
        if build is None:
            module.train(run.config, run)
        else:
            train_by_torch(build, run.config, run)
    peak = sum(run.memory.peak(since=run.before).values()) if watched else 0
    return Turn(run.seconds, peak, [row["loss"] for row in run.history])


def contest(ranks: int, kind: str, entries: dict[str, tuple], rounds: int) -> dict[str, list]:
    """The turns of each contestant, [round][rank]; in the first round they are watched, not timed.

    `kind`: of the devices. `entries`: name -> the first arguments of `take_turn`. The order is
    reversed after each round. Raises RuntimeError if losses differ.
    """
    pool = Pool(ranks, kind)
    turns: dict[str, list] = {name: [] for name in entries}
    names = list(entries)
    try:
        for number in range(rounds + 1):
            for name in names:
                words = entries[name]
                turns[name].append(pool.run(take_turn, *words, number == 0, seconds=86400.0))
            names.reverse()
    finally:
        pool.stop()
    bound = 0.05 if kind == "cuda" else 1e-3
    expected = turns[names[0]][0][0].losses
    for name, by_round in turns.items():
        losses = by_round[0][0].losses
        if any(abs(x - y) > bound for x, y in zip(losses, expected, strict=True)):
            raise RuntimeError(f"{name}: the losses are {losses}, and {expected} of another")
    return turns


def report(turns: dict[str, list], beside: dict[str, str]) -> str:
    """The table of a contest. `beside`: a contestant -> the one with which it is compared."""
    slowest = {}
    for name, by_round in turns.items():
        slowest[name] = [max(turn.seconds for turn in by_rank) for by_rank in by_round[1:]]
    rows = [["", "step time", "beside", "time / its time (range)", "peak memory"]]
    for name, seconds in slowest.items():
        other = slowest[beside[name]]
        ratios = [time / other_time for time, other_time in zip(seconds, other, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        step_time = f"{1e3 * median(seconds):.1f} ms"
        peak = turns[name][0][0].peak
        rows.append([name, step_time, beside[name], spread, human(peak) if peak else "-"])
    return table(rows)


def main(name: str, argv: list[str]):
    """Run one contest: let all of its contestants train in turns, and print the table."""
    config = parse(Config, argv)
    ranks, step, variants, torchs, shared = CONTESTS[name]
    # Of a flag that is given twice, the last value counts
    shared = f"--model {config.model} --micro-batch-size 4 --global-batch-size 16 {shared}"
    entries = {}
    beside = {}
    for flags in variants:
        entries[flags] = (step, f"{shared} {flags}", None)
        beside[flags] = variants[0]
        if flags in torchs:
            torchs_name, build = torchs[flags]
            entries[torchs_name] = (step, f"{shared} {flags}", build)
            beside[torchs_name] = flags
    device = f"{os.cpu_count()} CPU cores, one thread a rank"
    kind = "cpu"
    if torch.cuda.device_count() >= ranks:  # a GPU for each rank; if there are fewer, CPUs
        device = torch.cuda.get_device_name()
        kind = "cuda"
    turns = contest(ranks, kind, entries, config.rounds)
    print(f"{name}, flags of all: {shared}; ranks: {ranks}, on {device}\n")
    print(report(turns, beside))
    print(f"medians (and range) of {config.rounds} rounds; a ratio is of one round's times")
