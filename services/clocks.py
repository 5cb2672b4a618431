"""Seconds by phase of a step, and who did what when in a pipeline, from hooks on the run's parts.

data       until the first forward                      backward   from the end of a forward to the next, or to ...
forward    the model's own call, or a pipeline's F      optimizer  ... the call of the optimizer's `step`
waiting    between a pipeline's actions                 weights    a pipeline's W

`waited_seconds` {mesh dimension: seconds} of all phases: the host, or a GPU's compute stream, waits for messages.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.comm import Pending
from services.ledger import Ledger

PHASES = {"F": "forward", "B": "backward", "W": "weights"}


class Timed(Pending):
    """What `comm.Pending` is during a run: each wait is noted, for the group that the ledger was told of last."""

    def __init__(self, clock: "Clock", ledger: Ledger, *works: Any, then: Callable | None = None):
        super().__init__(*works, then=then)
        self.clock, self.dim = clock, ledger.last.split(" ")[0]

    def wait(self):
        """As ever, and note when."""
        start, waits = self.clock.now(), bool(self.works)
        super().wait()
        self.clock.waits += [(self.dim, start, self.clock.now())] * waits


class Clock:
    """Which phase this rank is in, and the seconds of each since the last `take`. Listeners hear of every change."""

    def __init__(self, parts: SimpleNamespace, host: bool = False):
        """`host`: take the host's time, also with a GPU."""
        self.cuda = next(parts.model.parameters()).is_cuda and not host
        self.phase, self.listeners = "data", []
        self.marks: list[tuple[str, Any]] = [("data", self.now())]
        self.spans: list[tuple[str, int, int, Any, Any]] = []  # (kind, micro-batch, stage, start, end)
        self.waits: list[tuple[str, Any, Any]] = []  # (mesh dimension, start, end)
        self.call(parts.optimizer, "step", "optimizer")
        if not hasattr(parts, "pipeline"):
            parts.model.register_forward_pre_hook(lambda *_: self.mark("forward"))
            parts.model.register_forward_hook(lambda *_: self.mark("backward"))
        elif hasattr(parts.pipeline, "acts"):
            parts.pipeline.acts = {kind: self.timed(kind, act) for kind, act in parts.pipeline.acts.items()}
        else:
            parts.pipeline.forward = self.timed("F", parts.pipeline.forward)
            parts.pipeline.backward = self.timed("B", parts.pipeline.backward)

    def now(self) -> Any:
        """Seconds, or an event in a GPU's stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two of them. Waits for a GPU."""
        if not self.cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def mark(self, phase: str):
        """From now on it is this phase."""
        self.phase = phase
        self.marks.append((phase, self.now()))
        for listener in self.listeners:
            listener(phase)

    def call(self, owner: Any, method: str, phase: str):
        """Let a method's call begin a phase."""
        right = getattr(owner, method)

        def wrapped(*args, **kwargs):
            self.mark(phase)
            return right(*args, **kwargs)

        setattr(owner, method, wrapped)

    def timed(self, kind: str, act: Callable) -> Callable:
        """An action of a pipeline, that notes its start and its end."""

        def wrapped(i: int, stage: int, x: Tensor | None) -> Tensor | None:
            self.mark(PHASES.get(kind, "backward"))
            start = self.marks[-1][1]
            output = act(i, stage, x)
            self.mark("waiting")
            self.spans.append((kind, i, stage, start, self.marks[-1][1]))
            return output

        return wrapped

    def begin(self):
        """A step begins."""
        self.marks.clear()
        self.spans.clear()
        self.waits.clear()
        self.mark("data")

    def take(self) -> dict[str, Any]:
        """Seconds of each phase of the step, and those waited for messages."""
        self.mark("data")
        seconds: dict[str, float] = defaultdict(float)
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds[f"{phase}_seconds"] += self.between(start, end)
        waited: dict[str, float] = defaultdict(float)
        for dim, start, end in self.waits:
            waited[dim] += self.between(start, end)
        return dict(seconds, waited_seconds=dict(waited))

    def timeline(self) -> list[list]:
        """[kind, micro-batch, stage, start, end] of the actions of this step, in seconds from its begin."""
        first = self.marks[0][1]
        return [[*what, self.between(first, start), self.between(first, end)] for *what, start, end in self.spans]
