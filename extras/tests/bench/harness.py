"""What the contests share: contestants that take turns, times with their spread, peak memory, and the table.

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
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common import comm
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
    """What a contest has found of one entry. By round: seconds of a step, and CPU seconds of all ranks together."""

    seconds: list[float]
    cpu: list[float]
    sent: int  # bytes of rank 0 in the last step; 0 for PyTorch's own, of which it is not known
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


class Contestant(Bare):
    """A `train` that waits before each step; `step()` lets it do one."""

    def __init__(self, entry: Entry):
        super().__init__(entry)
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        threading.Thread(target=self.work, daemon=True).start()
        self.wait()

    def work(self):
        """Train, in the thread."""
        try:
            with self:
                self.train(self.config, self)
        except BaseException as error:
            self.error = error
            self.done.release()

    def wait(self):
        """Block until the thread waits. Raises what the thread has raised."""
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def steps(self, **parts: Any) -> Iterator[int]:
        """Wait before each step."""
        self.built(**parts)
        for step in range(self.config.steps):
            self.done.release()
            self.go.acquire()
            self.began = time.perf_counter()
            yield step

    def step(self):
        """One step; its record is then the last of `history`."""
        comm.observer = self.count
        self.go.release()
        self.wait()
        comm.observer = None


class AllTensors(MemoryTimeline):
    """Also sees the local tensors of DTensors, whose operators call those of local tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Leave DTensors to themselves."""
        theirs = any(kind.__name__ == "DTensor" for kind in types)  # importing it takes a second
        return NotImplemented if theirs else super().__torch_dispatch__(func, types, args, kwargs)


class Watched(Bare):
    """Trains two steps under a timeline of all tensors."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """The second one begins after `before` events."""
        self.built(**parts)
        yield 0
        self.before = len(self.timeline.events)
        yield 1


def peak_bytes(entry: Entry) -> int:
    """The most bytes of tensors that this rank holds in the second step, without what kernels allocate inside."""
    gc.collect()
    run, timeline = Watched(entry), AllTensors()
    run.timeline = timeline
    with timeline, run:
        run.train(run.config, run)
    return max(list(accumulate(event.bytes for event in timeline.events))[run.before :])


def take_turns(made: dict[str, Contestant], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds of a step on the slowest rank, CPU seconds of all ranks), by name and round, after one that warms up.

    In a round each contestant makes three steps in a row. Every other round goes through the names backwards.
    """
    found: dict[str, list[tuple]] = {name: [] for name in made}
    finished = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for turn in range(rounds + 1):
        for name in list(made)[:: -1 if turn % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(3):
                made[name].step()
            finished()
            found[name].append(((time.perf_counter() - start) / 3, (time.process_time() - busy) / 3))
    ranks = gather_objects(found)
    turns = {name: list(zip(*(each[name][1:] for each in ranks), strict=True)) for name in made}
    return {
        name: [(max(seconds for seconds, _ in turn), sum(cpu for _, cpu in turn)) for turn in turns[name]]
        for name in made
    }


def contest(entries: dict[str, Entry], rounds: int, bound: float) -> dict[str, Result]:
    """Runs on every rank. Raises RuntimeError if the losses of two contestants ever differ by more than `bound`."""
    peaks = {name: peak_bytes(entry) for name, entry in entries.items()}
    made = {name: Contestant(entry) for name, entry in entries.items()}
    times, found = take_turns(made, rounds), {}
    first = next(iter(made.values()))
    for name, one in made.items():
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(one.history, first.history, strict=True))
        if apart > bound:
            raise RuntimeError(f"{name}: its loss differs by {apart:.3g} from that of the first")
        seconds, cpu = map(list, zip(*times[name], strict=True))
        found[name] = Result(seconds, cpu, sum(one.history[-1]["sent"].values()) if one.ours else 0, peaks[name])
    return found


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{median(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


def report(found: dict[str, Result], beside: dict[str, str]) -> str:
    """The table of a contest. `beside`: for each name, whose times its own are divided by, round by round."""
    rows = [["", "step time", "beside", "time", "CPU time", "sent a step", "peak memory"]]
    for name, result in found.items():
        base = found[beside[name]]
        pairs = (result.seconds, base.seconds), (result.cpu, base.cpu)
        ratios = [spread([a / b for a, b in zip(*pair, strict=True)]) for pair in pairs]
        shown = [human(n) if n else "-" for n in (result.sent, result.peak)]
        rows.append([name, f"{1e3 * median(result.seconds):.1f} ms", beside[name], *ratios, *shown])
    return table(rows)
