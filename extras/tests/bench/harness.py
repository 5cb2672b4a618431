"""What all measurements share: ranks, contestants that take turns, times with their spread, peak memory, tables.

A contestant is a `train(config, run)`: a step's own, or one of peers.py, which trains by PyTorch's own parallelism. It
runs in a thread that waits before each step, so several of them can take turns in the same processes: whatever else the
machine does hits all of them alike. A ratio compares neighbours of the same round. CPU seconds hardly depend on load.
"""

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common import UserError, comm
from common.trainer import parse
from extras.services.launch import gather_objects
from extras.services.memory import MemoryTimeline
from extras.services.seam import OpenRun, check, compose
from extras.services.tables import human, table
from extras.tests.pool import Pool

WARM_UP = 1  # rounds that do not count


class Entry(NamedTuple):
    """A contestant: the `train` of a step's module under these flags, or that of peers.py which has this name."""

    step: str
    flags: dict[str, Any]
    train: str = ""  # of peers.py


class Result(NamedTuple):
    """What a contest has found of one entry. By round: seconds of a step, and CPU seconds of all ranks together."""

    seconds: list[float]
    cpu: list[float]
    row: dict[str, Any]  # of the last step; of PyTorch's own it is not known what is sent
    peak: int  # bytes of rank 0's tensors, at most, in the second step


def command(bench: Callable[[Any], None], cls: type, argv: list[str]):
    """Parse the flags, measure; a mistake is one line."""
    try:
        bench(parse(cls, argv))
    except UserError as error:
        sys.exit(f"error: {error}")


def on_ranks(world: int, function: Callable, *args: Any) -> list[Any]:
    """Call a function of a module on so many fresh processes, with a GPU each if there are enough; results by rank."""
    pool = Pool(world, "cuda" if torch.cuda.device_count() >= world else "cpu")
    try:
        return pool.run(function, *args, seconds=86400.0)
    finally:
        pool.stop()


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
        """All parts are there: attach the variants to those of a step."""
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
        """The thread."""
        try:
            with self:
                self.train(self.config, self)
        except BaseException as error:
            self.error = error
            self.done.release()

    def wait(self):
        """Until it waits itself."""
        self.done.acquire()
        if self.error is not None:
            raise self.error

    def steps(self, **parts: Any) -> Iterator[int]:
        """Instead of the bar: wait."""
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
    """Sees also the local tensors of PyTorch's DTensors, which come after these."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Leave DTensors to themselves."""
        theirs = any(kind.__name__ == "DTensor" for kind in types)  # to import it takes a second
        return NotImplemented if theirs else super().__torch_dispatch__(func, types, args, kwargs)


class Watched(Bare):
    """Two steps, whose tensors are seen; `before`: how many events are before the second."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Instead of the bar."""
        self.built(**parts)
        yield 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.before = len(self.timeline.events)
        yield 1


def peak_bytes(entry: Entry) -> int:
    """The most bytes of tensors that this rank holds in the second step: every allocation and release is seen.

    On a CPU without what kernels allocate and release inside.
    """
    gc.collect()
    run = Watched(entry)
    run.timeline = AllTensors()
    if torch.cuda.is_available() and run.config.device != "cpu":
        with run:
            run.train(run.config, run)
        return torch.cuda.max_memory_allocated()
    with run.timeline, run:
        run.train(run.config, run)
    return max(list(accumulate(event.bytes for event in run.timeline.events))[run.before :])


def meet():
    """All ranks are here."""
    if dist.is_initialized():
        dist.barrier()


def take_turns(steps: dict[str, Callable[[], Any]], rounds: int, n_steps: int = 1) -> dict[str, list[tuple]]:
    """Runs on every rank: (seconds of one step on the slowest rank, CPU seconds of all ranks), by name and round.

    One round goes through the names forwards, the next one backwards. The first does not count.
    """
    found: dict[str, list[tuple]] = {name: [] for name in steps}
    finished = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for turn in range(rounds + WARM_UP):
        for name in list(steps)[:: -1 if turn % 2 else 1]:
            meet()
            start, busy = time.perf_counter(), time.process_time()
            for _ in range(n_steps):
                steps[name]()
            finished()
            took = (time.perf_counter() - start) / n_steps, (time.process_time() - busy) / n_steps
            found[name].append(took)
    seconds = gather_objects(found)
    return {
        name: [
            (max(each[name][turn][0] for each in seconds), sum(each[name][turn][1] for each in seconds))
            for turn in range(WARM_UP, rounds + WARM_UP)
        ]
        for name in steps
    }


def contest(entries: dict[str, Entry], rounds: int, n_steps: int, bound: float, peak: bool) -> dict[str, Result]:
    """Runs on every rank. Raises RuntimeError if the losses of two contestants ever differ by more than `bound`."""
    peaks = {name: peak_bytes(entry) if peak else 0 for name, entry in entries.items()}
    made = {name: Contestant(entry) for name, entry in entries.items()}
    times = take_turns({name: one.step for name, one in made.items()}, rounds, n_steps)
    first = next(iter(made.values()))
    for name, one in made.items():
        apart = max(abs(a["loss"] - b["loss"]) for a, b in zip(one.history, first.history, strict=True))
        if apart > bound:
            raise RuntimeError(f"{name}: its loss differs by {apart:.3g} from that of the first")
    return {
        name: Result(
            *map(list, zip(*times[name], strict=True)),
            one.history[-1] | ({} if one.ours else dict(sent={})),
            peaks[name],
        )
        for name, one in made.items()
    }


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{median(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


def report(found: dict[str, Result], beside: dict[str, str]) -> str:
    """The table of a contest. `beside`: for each name, whose times its own are divided by, round by round."""
    rows = [["", "step time", "beside", "time", "CPU time", "sent a step", "peak memory"]]
    for name, result in found.items():
        base = found[beside[name]]
        ratios = [
            spread([a / b for a, b in zip(getattr(result, what), getattr(base, what), strict=True)])
            for what in ("seconds", "cpu")
        ]
        shown = [human(n) if n else "-" for n in (sum(result.row["sent"].values()), result.peak)]
        rows.append([name, f"{1e3 * median(result.seconds):.1f} ms", beside[name], *ratios, *shown])
    return table(rows)


def where(world: int) -> str:
    """The machine, in words."""
    gpu = torch.cuda.is_available()
    load = f"{os.cpu_count()} CPU cores, one thread a rank, load {os.getloadavg()[0]:.1f}"
    return f"{world} rank{'s' * (world > 1)} on {torch.cuda.get_device_name() if gpu else load}"


@dataclass
class Sizes:
    """How long to measure (extras/tests/bench/harness.py)."""

    rounds: int = 8  # turns of each contestant, after one to warm up
    steps_a_turn: int = 3  # steps of each in a turn
