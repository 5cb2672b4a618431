"""Compares the speed and memory of a chapter's variants with one another and with PyTorch's own parallelism.

A contestant is a function `train(config, run)`: the chapter's own, or one of peers.py (`peer`). A contest times whole
training steps, from the batch to the update. Contestants take turns in the same processes, so whatever else the machine
does for long slows all of them. Each contestant runs in a thread that waits before each training step. A ratio divides
the times of two contestants in the same round. The losses of all contestants must agree.
"""

import gc
import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from queue import Queue
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from common.trainer import parse
from extras.services.memory import MemoryTimeline
from extras.services.ranks import gather_objects
from extras.services.seam import OpenRun, check, compose
from extras.services.tables import human, table
from extras.tests.pool import Pool


class Contest(NamedTuple):
    """A chapter's contestants. `rows`: name of a contestant -> its flags. `shared`: flags that all contestants have."""

    ranks: int
    step: str
    rows: dict[str, dict[str, Any]]
    shared: dict[str, Any] = {}  # noqa: RUF012


CONTESTS = {
    "step1": Contest(
        1, "step01_single_gpu",
        {"eager": {}, "--compile": dict(compile=True)}
        | {f"--recompute {way}": dict(recompute=way) for way in ("elementwise", "full")},
    ),
    "step2": Contest(
        2, "step02_ddp",
        {"--sync bucket": {}, "DistributedDataParallel": dict(peer="ddp"), "--bucket-mb 0": dict(bucket_mb=0.0)}
        | {f"--sync {way}": dict(sync=way) for way in ("ring", "naive")},
    ),
    "step3": Contest(
        2, "step03_zero",
        {"--zero 3": dict(zero=3), "fully_shard": dict(peer="fsdp")},
    ),
    "step4": Contest(
        2, "step04_tp_sp",
        {"--no-sp": dict(sp=False), "DTensor": dict(sp=False, peer="dtensor"),
         "--sp": {}, "DTensor SequenceParallel": dict(peer="dtensor"), "--sp --tp-overlap": dict(tp_overlap=True)},
        dict(tp=2, zero=0),
    ),
    "step6": Contest(
        4, "step06_pipeline",
        {name: row for s in ("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe") for name, row in
         {f"--schedule {s}": dict(schedule=s), f"torch {s}": dict(schedule=s, peer="pipelining")}.items()},
        dict(pp=4, zero=0, n_layers=8, micro_batch_size=2),
    ),
}  # fmt: skip


@dataclass
class Config:
    """Flags of a contest."""

    model: str = "tiny"  # name of a preset
    rounds: int = 8  # turns of each contestant that are timed, after one to warm up


class Result(NamedTuple):
    """The measured times and memory of one contestant."""

    seconds: list[float]  # of a step on the slowest rank, by round
    peak: int  # most bytes of rank 0's tensors at any time in the second step


class Bare(OpenRun):
    """A run that prints and writes nothing."""

    def __init__(self, step: str, flags: dict[str, Any], peer: str = ""):
        """`peer`: the function of peers.py that trains; "": the chapter's `train` with the techniques of `flags`."""
        module = importlib.import_module(step)
        config = compose(module)(**dict(steps=10**6, warmup_steps=10**3, out="unused") | flags)
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        super().__init__(config)
        self.first, self.peer, self.train = False, peer, module.train
        if peer:
            self.train = getattr(importlib.import_module("extras.bench.peers"), peer)

    def built(self, **parts: Any):
        """Attach the techniques to the parts of the run, unless a peer trains."""
        self.began = time.perf_counter()
        if not self.peer:
            self.open(**parts)


class AllTensors(MemoryTimeline):
    """A memory timeline for DTensors, too: it records their local tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Skip an operator on DTensors. DTensor then calls operators on local tensors, and these calls are recorded."""
        theirs = any(kind.__name__ == "DTensor" for kind in types)  # by name: importing DTensor takes a second
        return NotImplemented if theirs else super().__torch_dispatch__(func, types, args, kwargs)


class Contestant(Bare):
    """Runs `train` in a thread that waits before each step; `step()` lets it train one step.

    `peak`: the most bytes that tensors occupy in the second step. Temporary memory inside kernels does not count.
    """

    def __init__(self, *entry: Any):
        super().__init__(*entry)
        self.go, self.done = threading.Semaphore(0), Queue()
        threading.Thread(target=self.work, daemon=True).start()
        self.wait()

    def work(self):
        """Train; this method runs in the thread. An exception is passed on to `wait`."""
        try:
            with ExitStack() as self.watching, self:
                self.timeline = self.watching.enter_context(AllTensors())
                self.train(self.config, self)
        except BaseException as error:
            self.done.put(error)

    def wait(self):
        """Block until the thread waits for its next step. Raises what the thread has raised."""
        if (error := self.done.get()) is not None:
            raise error

    def steps(self, **parts: Any) -> Iterator[int]:
        """Wait before each step. The memory of the first two steps is recorded, which makes them slower."""
        self.built(**parts)
        for step in range(self.config.steps):
            if step == 1:
                before = len(self.timeline.events)
            if step == 2:
                self.watching.close()
                self.peak = max(list(accumulate(event.bytes for event in self.timeline.events))[before:])
            self.done.put(None)
            self.go.acquire()
            yield step

    def step(self):
        """Let the thread train one step."""
        self.go.release()
        self.wait()


def take_turns(made: dict[str, Contestant], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step on this rank, by contestant and round. The first round, which only warms up, is left out.

    In a round each contestant makes three steps in a row. The order of the contestants is reversed after each round.
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


def contest(entries: dict[str, tuple], rounds: int, bound: float) -> dict[str, Result]:
    """Run a contest. `entries`: name -> arguments of `Bare`. Raises RuntimeError if losses differ by over `bound`."""
    made, found = {}, {}
    for name, entry in entries.items():
        gc.collect()
        made[name] = Contestant(*entry)
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
    """The table of a contest. `beside`: a contestant's name -> the name of the contestant with which it is compared."""
    rows = [["", "step time", "beside", "time, and its range", "peak memory"]]
    for name, (seconds, peak) in found.items():
        ratios = [a / b for a, b in zip(seconds, found[beside[name]].seconds, strict=True)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        rows.append([name, f"{1e3 * median(seconds):.1f} ms", beside[name], spread, human(peak)])
    return table(rows)


def main(name: str, argv: list[str]):
    """Run one contest: let all of its contestants train in turns, and print the table."""
    config, (ranks, step, rows, shared) = parse(Config, argv), CONTESTS[name]
    shared = dict(model=config.model, micro_batch_size=4, global_batch_size=16) | shared
    entries, beside, before = {}, {}, ""
    for row, flags in rows.items():
        peer = flags.get("peer", "")
        entries[row] = step, shared | {key: value for key, value in flags.items() if key != "peer"}, peer
        beside[row] = before if peer else next(iter(rows))  # a peer is compared with our row before it
        before = row
    cuda = torch.cuda.device_count() >= ranks  # a GPU for each rank; if there are fewer, all train on CPUs
    pool = Pool(ranks, "cuda" if cuda else "cpu")
    try:
        found, *_ = pool.run(contest, entries, config.rounds, 0.05 if cuda else 1e-3, seconds=86400.0)  # bf16, fp32
    finally:
        pool.stop()
    device = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores, one thread a rank"
    print(f"{name}: {config.model}; ranks: {ranks}, on {device}\n\n{report(found, beside)}")
    print(f"medians (and range) of {config.rounds} rounds in turns; a ratio divides two times of the same round")
