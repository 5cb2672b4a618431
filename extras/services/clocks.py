"""Follows the phases of a step, and times each action of a pipeline, by wrapping the calls that begin them.

data       from an update to the first forward      backward   after a forward, until the next phase; or a pipeline's B
forward    a call of the model; a pipeline's F, R   optimizer  a call of the optimizer's `step`
waiting    between a pipeline's actions             weights    a pipeline's W

Each call is also a range in a trace (profile.py): `forward`, `optimizer` or, for an action, `F3.1` (micro-batch.stage).
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from extras.variants import Parts
from step06_pipeline import ACTS

PHASES = {"F": "forward", "R": "forward", "B": "backward", "W": "weights"}


class Clock:
    """Tells listeners when a phase of this rank begins, and times the actions of a pipeline since `begin`."""

    def __init__(self, parts: Parts, host: bool = False):
        """`host`: use the host's clock, even if the model is on a GPU."""
        self.cuda = next(parts.model.parameters()).is_cuda and not host
        self.listeners: list[Callable[[str], None]] = []
        self.actions: list[tuple] = []  # (kind, micro-batch, stage, start, end)
        around = partial(parts.around, by=__name__)
        around(parts.optimizer, "step", partial(self.follow, "optimizer", "data"))
        if parts.pipeline is None:
            around(parts.model, "forward", partial(self.follow, "forward", "backward"))
        for kind, method in ACTS.items():
            if hasattr(parts.pipeline, method):
                around(parts.pipeline, method, partial(self.act, kind))

    def now(self) -> Any:
        """The present time: seconds, or an event in a GPU's stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, end: Any) -> float:
        """Seconds from `begin` to `end`, a result of `now`. If `end` is a GPU's event, wait for the GPU to reach it."""
        if not self.cuda:
            return end - self.start
        end.synchronize()
        return self.start.elapsed_time(end) / 1e3

    def tell(self, phase: str):
        """Tell the listeners that a phase begins."""
        for listener in self.listeners:
            listener(phase)

    def follow(self, phase: str, following: str, call: Callable, *given: Any) -> Any:
        """Wrap a call: before it, tell the listeners that `phase` begins, and after it, that `following` begins."""
        self.tell(phase)
        with record_function(phase):
            output = call(*given)
        self.tell(following)
        return output

    def act(self, kind: str, call: Callable, i: int, stage: int, x: Tensor | None) -> Tensor | None:
        """Wrap an action of a pipeline, on micro-batch i and a stage: note when it starts and when it ends."""
        self.tell(PHASES[kind])
        start = self.now()
        with record_function(f"{kind}{i}.{stage}"):
            output = call(i, stage, x)
        self.actions.append((kind, i, stage, start, self.now()))
        self.tell("waiting")
        return output

    def begin(self):
        """Begin a step: forget the actions of the previous one, and note the present time as the start."""
        self.actions.clear()
        self.start = self.now()

    def timeline(self) -> list[list]:
        """[kind, micro-batch, stage, start, end] of each action in this step, in seconds from the step's start."""
        return [[*action, self.seconds(start), self.seconds(end)] for *action, start, end in self.actions]
