"""Compares the speed and memory of a step's flags with one another and with PyTorch's own
parallelism.

A contestant is a function `train(config, run)`: the step's own, or one of peers.py (`peer`). A
contest times whole training steps, from the batch to the update. Contestants take turns in the same
processes, so whatever else the machine does for long slows all of them. Each contestant runs in a
thread that waits before each training step. A ratio divides the times of two contestants in the
same round. The losses of all contestants must agree.
"""

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Queue
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.flags import flag, parse
from common.trainer import Run
from extras.__main__ import techniques, with_flags
from extras.plan.tables import table
from extras.tools.memory import Memory, human
from tests.pool import Pool


class Contest(NamedTuple):
    """A step's contestants. `rows`: name of a contestant -> (its flags, and the function of
    peers.py that trains; "": the step's own `train`). `shared`: flags that all have.
    """

    ranks: int
    step: str
    rows: dict[str, tuple[str, str]]
    shared: str = ""


def beside_torch(schedules: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Rows of step 6: each schedule, then PyTorch's own."""
    rows = {}
    for ours, torchs in schedules.items():
        rows[f"--schedule {ours}"] = (f"--schedule {ours}", "")
        rows[f"Schedule{torchs}"] = (f"--schedule {ours}", "pipelining")
    return rows


TORCH_SCHEDULES = {  # the step's schedule -> PyTorch's
    "afab": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
CONTESTS = {
    "step1": Contest(
        1,
        "step01_single_gpu",
        {
            "eager": ("", ""),
            "--compile": ("--compile", ""),
            "--recompute full": ("--recompute full", ""),
        },
    ),
    "step2": Contest(
        2,
        "step02_ddp",
        {
            "--sync bucket": ("--sync bucket", ""),
            "DistributedDataParallel": ("--sync bucket", "ddp"),
            "--sync ring": ("--sync ring", ""),
            "--sync naive": ("--sync naive", ""),
        },
    ),
    "step3": Contest(
        2,
        "step03_zero",
        {
            "--zero 3": ("--zero 3", ""),
            "fully_shard": ("--zero 3", "fsdp"),
            "--zero 1": ("--zero 1", ""),
            "--zero 3 --keep": ("--zero 3 --keep", ""),
        },
    ),
    "step4": Contest(
        2,
        "step04_tp_sp",
        {
            "--no-sp": ("--no-sp", ""),
            "DTensor": ("--no-sp", "dtensor"),
            "--sp": ("--sp", ""),
            "DTensor SequenceParallel": ("--sp", "dtensor"),
            "--sp --tp-overlap": ("--sp --tp-overlap", ""),
        },
        "--tp 2 --zero 0",
    ),
    "step6": Contest(
        4,
        "step06_pipeline",
        beside_torch(TORCH_SCHEDULES),
        "--pp 4 --zero 0 --model tiny,n_layers=8 --micro-batch-size 2",
    ),
}


@dataclass
class Config:
    """Flags of a contest."""

    model: str = flag("tiny", "preset of the shape, perhaps with changes")
    rounds: int = flag(8, "turns of each contestant that are timed, after one to warm up")


class Result(NamedTuple):
    """The measured times and memory of one contestant."""

    seconds: list[float]  # of a training step on the slowest rank, by round
    peak: int  # most bytes of rank 0's tensors at any time in the second training step


class AllTensors(Memory):
    """Memory of DTensors, too: it records their local tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Skip an operator on DTensors, which then calls operators on local tensors: these are
        recorded.
        """
        if any(kind.__name__ == "DTensor" for kind in types):  # importing DTensor takes a second
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


class Contestant(Run):
    """Runs `train` in a thread that waits before each training step; `step()` lets it train one.

    `peak`: the most bytes that tensors occupy in the second one; 0 with --compile, because it is
    not known. Temporary memory in kernels does not count.
    """

    def __init__(self, step: str, flags: str, peer: str = ""):
        """`peer`: the function of peers.py that trains; "": the step's own `train`."""
        module = importlib.import_module(step)
        words = f"--steps {10**6} --warmup-steps {10**3} --out unused {flags}".split()
        super().__init__(parse(with_flags(module.Config, techniques()), words))
        self.first = False  # no files, no screen
        self.train: Callable = module.train
        if peer:
            self.train = getattr(importlib.import_module("extras.bench.peers"), peer)
        self.go = threading.Semaphore(0)
        self.done: Queue = Queue()
        threading.Thread(target=self.work, daemon=True).start()
        self.wait()

    def work(self):
        """Train; this method runs in the thread. An exception is passed on to `wait`."""
        try:
            with ExitStack() as self.watching, self:
                self.memory = AllTensors()
                if not self.config.compile:  # under a mode torch.compile gives up, for good
                    self.watching.enter_context(self.memory)
                self.train(self.config, self)
        except BaseException as error:
            self.done.put(error)

    def wait(self):
        """Block until the thread waits for its next training step. Raises what the thread has
        raised.
        """
        error = self.done.get()
        if error is not None:
            raise error

    def steps(self, **parts: Any) -> Iterator[int]:
        """Wait before each training step. The memory of the first two is recorded, which slows
        them.
        """
        for step in range(self.config.steps):
            if step == 1:
                before = len(self.memory.events)
            if step == 2:
                self.watching.close()
                self.peak = 0
                if not self.config.compile:
                    self.peak = sum(self.memory.peak(since=before).values())
            self.done.put(None)
            self.go.acquire()
            yield step

    def record(self, step: int, tokens: int, **numbers: float):
        """Keep the loss."""
        self.history.append(numbers)

    def step(self):
        """Let the thread train one step."""
        self.go.release()
        self.wait()


def take_turns(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Seconds of a training step on this rank, by contestant and round, without the first round.

    In a round each contestant makes three training steps in a row. Their order is reversed after
    each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        names = list(contestants)
        if turn % 2:
            names.reverse()
        for name in names:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                contestants[name].step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - start) / 3)
    return {name: turns[1:] for name, turns in seconds.items()}


def contest(entries: dict[str, tuple], rounds: int, bound: float) -> dict[str, Result]:
    """Run a contest on this rank. `entries`: name -> arguments of `Contestant`.

    Raises RuntimeError if losses differ by more than `bound`.
    """
    contestants = {}
    for name, entry in entries.items():
        gc.collect()
        contestants[name] = Contestant(*entry)
        for _ in range(2):
            contestants[name].step()
    own = take_turns(contestants, rounds)
    all_ranks = [own]
    if dist.is_initialized():
        all_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, own)
    first = next(iter(contestants.values()))
    results = {}
    for name, contestant in contestants.items():
        for row, first_row in zip(contestant.history, first.history, strict=True):
            if abs(row["loss"] - first_row["loss"]) > bound:
                raise RuntimeError(
                    f"{name}: a loss is {row['loss']}, and {first_row['loss']} of the first"
                )
        by_round = zip(*(rank[name] for rank in all_ranks), strict=True)
        results[name] = Result([max(turn) for turn in by_round], contestant.peak)
    return results


def report(results: dict[str, Result], beside: dict[str, str]) -> str:
    """The table of a contest. `beside`: a contestant -> the one with which it is compared."""
    rows = [["", "step time", "beside", "time / its time (range)", "peak memory"]]
    for name, (seconds, peak) in results.items():
        other = results[beside[name]].seconds
        ratios = [time / other_time for time, other_time in zip(seconds, other, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        step_time = f"{1e3 * median(seconds):.1f} ms"
        rows.append([name, step_time, beside[name], spread, human(peak) if peak else "-"])
    return table(rows)


def main(name: str, argv: list[str]):
    """Run one contest: let all of its contestants train in turns, and print the table."""
    config = parse(Config, argv)
    ranks, step, rows, shared = CONTESTS[name]
    # Of a flag that is given twice, the last value counts
    shared = f"--model {config.model} --micro-batch-size 4 --global-batch-size 16 {shared}"
    entries = {}
    beside = {}
    before = next(iter(rows))
    for row, (flags, peer) in rows.items():
        entries[row] = (step, f"{shared} {flags}", peer)
        beside[row] = before if peer else next(iter(rows))  # a peer: with our row before it
        before = row
    cuda = torch.cuda.device_count() >= ranks  # a GPU for each rank; if there are fewer, CPUs
    pool = Pool(ranks, "cuda" if cuda else "cpu")
    try:
        results, *_ = pool.run(
            contest, entries, config.rounds, 0.05 if cuda else 1e-3, seconds=86400.0
        )
    finally:
        pool.stop()
    device = f"{os.cpu_count()} CPU cores, one thread a rank"
    if cuda:
        device = torch.cuda.get_device_name()
    print(f"{name}, flags of all: {shared}; ranks: {ranks}, on {device}\n")
    print(report(results, beside))
    print(
        f"medians (and range) of {config.rounds} rounds in turns; a ratio is of one round's times"
    )
