"""Traces N steps (`--profile N`): each rank writes a timeline of all its operators and messages.

OUT/trace-RANK.json.gz opens in https://ui.perfetto.dev and in chrome://tracing. It covers N steps, after one that is
untraced and one that warms up the profiler. Besides PyTorch's own events it has ranges named as in the chapters:

    forward, optimizer                   the model's call, and the update (clocks.py)
    F3.1, B3.1, W3.1                     the actions of a pipeline, for micro-batch 3 and stage 1 (clocks.py)
    sums of gradients                    `sync.finish`, which waits for these sums
    gather layers.0                      the call that starts an all-gather of ZeRO 3
    f, g, attend                         start and end of a block under tp, and attention, which under cp is a ring
    wait tp                              waiting for a message over tp (with NCCL, only the stream waits)

On a GPU, OUT/memory-RANK.pickle has the last 200,000 allocations and releases since before the first step, for
https://pytorch.org/memory_viz. It is written after the last traced step, or earlier if memory runs out.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from common import UserError, comm
from extras.variants import Parts

BLOCK = dict(enter="f", leave="g", attend="attend")  # method of a layer or block: its name in the chapters


@dataclass
class Flags:
    """A trace."""

    profile: int = 0  # trace so many steps, after the first two, to trace-RANK.json.gz; 0: none


def check(config: Any, world: int):
    """Raises UserError if the run ends before the traced steps do."""
    if config.profile and config.steps < config.profile + 2:
        raise UserError(f"--profile {config.profile}: it needs --steps {config.profile + 2}, as two steps come before")


def named(name: str, call: Callable, *given: Any, **more: Any) -> Any:
    """Make a call inside a profiler range of this name."""
    with record_function(name):
        return call(*given, **more)


def waiting(pending: comm.Pending) -> AbstractContextManager:
    """Serves as `comm.waiting`: a profiler range that lasts while the host waits for a message."""
    return record_function(f"wait {pending.group.name}") if pending.works else nullcontext()


class Trace:
    """Puts named ranges around the parts of a step, and profiles N steps."""

    def __init__(self, steps: int, parts: Parts, gpu: bool):
        """`gpu`: whether the run uses a GPU; if so, its allocations are recorded, too."""
        self.run, self.recording = parts.run, gpu
        for owner, method, name in self.calls(parts):
            parts.around(owner, method, partial(named, name), by=__name__)
        parts.around(parts.run, "record", self.step, by=__name__)
        comm.waiting = waiting
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
        when = schedule(wait=1, warmup=1, active=steps, repeat=1)
        # Without `acc_events`, torch 2.11 warns about events of earlier cycles, of which there are none.
        self.profiler = profile(activities=kinds, schedule=when, on_trace_ready=self.write, acc_events=True)
        if gpu:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self.profiler.start()

    def calls(self, parts: Parts) -> list[tuple[Any, str, str]]:
        """List (object, method, name of the range) for each method whose calls get a range here."""
        calls = [(parts.sync, "finish", "sums of gradients")] * (parts.sync is not None)
        for unit in parts.units:
            if hasattr(unit, "gather"):
                first = next(iter(unit.named)).removeprefix("model.")
                calls.append((unit, "gather", "gather " + ".".join(first.split(".")[:2])))
        for module in parts.model.modules():
            calls += [(module, method, name) for method, name in BLOCK.items() if hasattr(module, method)]
        return calls

    def step(self, record: Callable, *given: Any, **numbers: Any):
        """Wrap the run's `record`: tell the profiler that a step is over."""
        record(*given, **numbers)
        self.profiler.step()

    def write(self, profiler: profile):
        """Write the files, when the last of the N steps is over."""
        profiler.export_chrome_trace(str(self.run.out / f"trace-{self.run.rank}.json.gz"))
        if self.recording:
            self.snapshot()

    def snapshot(self) -> str:
        """On a GPU, write the recorded allocations into a file, and stop recording; returns the path of the file."""
        torch.cuda.memory._dump_snapshot(path := str(self.run.out / f"memory-{self.run.rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
        self.recording = False
        return path


def attach(config: Any, parts: Parts) -> Trace | None:
    """Start tracing, if the flag asks for it."""
    return Trace(config.profile, parts, next(parts.model.parameters()).is_cuda) if config.profile else None
