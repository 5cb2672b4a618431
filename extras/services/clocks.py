"""Times each phase of a step, and each action of a pipeline, by wrapping the calls that begin them.

data       until the first forward                      backward   from the end of a forward to the next, or to ...
forward    the model's own call, or a pipeline's F      optimizer  ... the call of the optimizer's `step`
waiting    between a pipeline's actions                 weights    a pipeline's W

Each call is also a range in a trace (profile.py): `forward`, `optimizer` or, for an action, `F3.1` (micro-batch.stage).
"""

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from extras.variants import Parts
from step06_pipeline import ACTS

PHASES = {"F": "forward", "B": "backward", "W": "weights"}


class Clock:
    """Tracks this rank's phase, and the seconds of each phase since `begin`; calls listeners at every change."""

    def __init__(self, parts: Parts, host: bool = False):
        """`host`: use the host's time, also with a GPU."""
        self.cuda = next(parts.model.parameters()).is_cuda and not host
        self.listeners: list[Callable[[str], None]] = []
        self.marks: list[tuple[str, tuple, Any]] = []  # (phase, an action's (kind, micro-batch, stage) or (), start)
        self.mark("data")
        around = partial(parts.around, by=__name__)
        around(parts.optimizer, "step", partial(self.timed, "optimizer", "data"))
        if parts.pipeline is None:
            around(parts.model, "forward", partial(self.timed, "forward", "backward"))
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

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two results of `now`. Waits for a GPU to reach `end`."""
        if not self.cuda:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def mark(self, phase: str, *action: Any):
        """Begin a phase; `action`: a pipeline's (kind, micro-batch, stage), or nothing."""
        self.marks.append((phase, action, self.now()))
        for listener in self.listeners:
            listener(phase)

    def timed(self, phase: str, following: str, call: Callable, *given: Any) -> Any:
        """Wrap a call that is a phase; the phase `following` begins when it returns."""
        self.mark(phase)
        with record_function(phase):
            output = call(*given)
        self.mark(following)
        return output

    def act(self, kind: str, call: Callable, i: int, stage: int, x: Tensor | None) -> Tensor | None:
        """Wrap an action of a pipeline, for micro-batch i and a stage."""
        self.mark(PHASES[kind], kind, i, stage)
        with record_function(f"{kind}{i}.{stage}"):
            output = call(i, stage, x)
        self.mark("waiting")
        return output

    def begin(self):
        """Begin a step: forget the one before."""
        self.marks.clear()
        self.mark("data")

    def take(self) -> dict[str, float]:
        """The seconds of each phase of the step."""
        self.mark("data")
        seconds: dict[str, float] = defaultdict(float)
        for (phase, _, start), (*_, end) in pairwise(self.marks):
            seconds[f"{phase}_seconds"] += self.between(start, end)
        return dict(seconds)

    def timeline(self) -> list[list]:
        """[kind, micro-batch, stage, start, end] of each action in this step, in seconds from the step's start."""
        *_, first = self.marks[0]
        acts = [(action, start, end) for (_, action, start), (*_, end) in pairwise(self.marks) if action]
        return [[*action, self.between(first, start), self.between(first, end)] for action, start, end in acts]
