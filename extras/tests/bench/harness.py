"""Shared by the contests: contestants that take turns, times with their spread, peak memory, and the table.

A contestant is a `train(config, run)`: a step's own, or one of peers.py, which trains by PyTorch's own parallelism. It
runs in a thread that waits before each step, so that several take turns in the same processes: whatever else the
machine does slows all of them alike. A ratio compares neighbours of the same round.
"""

import gc
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from extras.services.memory import MemoryTimeline
from extras.services.ranks import gather_objects
from extras.services.seam import OpenRun, check, compose
from extras.services.tables import human, table


class Entry(NamedTuple):
    """A contestant: the `train` of a step's module under these flags, or the function of peers.py named `train`."""

    step: str
    flags: dict[str, Any]
    train: str = ""


class Result(NamedTuple):
    """The numbers of one entry."""

    seconds: list[float]  # of a step on the slowest rank, by round
    peak: int  # bytes of rank 0's tensors, at most, in the second step


class Bare(OpenRun):
    """A run that prints and writes nothing."""

    def __init__(self, entry: Entry):
        step = importlib.import_module(entry.step)
        config = compose(step)(**dict(steps=10**6, warmup_steps=10**3, out="unused") | entry.flags)
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        super().__init__(config)
        self.first, self.ours, self.train = False, not entry.train, step.train
        if entry.train:
            self.train = getattr(importlib.import_module("extras.tests.bench.peers"), entry.train)

    def built(self, **parts: Any):
        """Attach the variants, if this is a step's own `train`."""
        self.began = time.perf_counter()
        if self.ours:
            self.open(**parts)


class AllTensors(MemoryTimeline):
    """Also sees the local tensors of DTensors, whose operators call those of local tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Skip operators of DTensors, which call those of their local tensors."""
        theirs = any(kind.__name__ == "DTensor" for kind in types)  # importing it takes a second
        return NotImplemented if theirs else super().__torch_dispatch__(func, types, args, kwargs)


class Contestant(Bare):
    """A `train` that waits before each step; `step()` lets it do one. Its record is then the last of `history`.

    `peak`: the most bytes of tensors in its second step, without what kernels allocate inside.
    """

    def __init__(self, entry: Entry):
        super().__init__(entry)
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        threading.Thread(target=self.work, daemon=True).start()
        self.wait()

    def work(self):
        """Train, in the thread."""
        try:
            with ExitStack() as self.watching, self:
                self.timeline = self.watching.enter_context(AllTensors())
                self.train(self.config, self)
        except BaseException as error:
            self.error = error
            self.done.release()

    def wait(self):
        """Block until the thread waits for its next step. Raises what the thread has raised."""
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def steps(self, **parts: Any) -> Iterator[int]:
        """Wait before each step. The first two are watched, so they take longer."""
        self.built(**parts)
        for step in range(self.config.steps):
            if step == 1:
                before = len(self.timeline.events)
            if step == 2:
                self.watching.close()
                self.peak = max(list(accumulate(event.bytes for event in self.timeline.events))[before:])
            self.done.release()
            self.go.acquire()
            yield step

    def step(self):
        """Let the thread train one step."""
        self.go.release()
        self.wait()


def take_turns(made: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step on this rank, by name and round, after a round that warms up.

    In a round each contestant makes three steps in a row. Every other round goes through the names backwards.
    """
    found: dict[str, list[float]] = {name: [] for name in made}
    finished = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for turn in range(rounds + 1):
        for name in list(made)[:: -1 if turn % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                made[name].step()
            finished()
            found[name].append((time.perf_counter() - start) / 3)
    return {name: turns[1:] for name, turns in found.items()}


def contest(entries: dict[str, Entry], rounds: int, bound: float) -> dict[str, Result]:
    """Runs on every rank. Raises RuntimeError if the losses of two contestants ever differ by more than `bound`."""
    made, found = {}, {}
    for name, entry in entries.items():
        gc.collect()
        made[name] = Contestant(entry)
        for _ in range(2):
            made[name].step()
    ranks = gather_objects(take_turns(made, rounds))
    first = next(iter(made.values()))
    for name, one in made.items():
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(one.history, first.history, strict=True))
        if apart > bound:
            raise RuntimeError(f"{name}: its loss differs by {apart:.3g} from that of the first")
        found[name] = Result([max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)], one.peak)
    return found


def report(found: dict[str, Result], beside: dict[str, str]) -> str:
    """The table of a contest. `beside`: for each name, the one by whose times its own are divided, round by round."""
    rows = [["", "step time", "beside", "time, and its range", "peak memory"]]
    for name, (seconds, peak) in found.items():
        ratios = [a / b for a, b in zip(seconds, found[beside[name]].seconds, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        rows.append([name, f"{1e3 * median(seconds):.1f} ms", beside[name], spread, human(peak)])
    return table(rows)
