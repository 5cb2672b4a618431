"""Times each phase of a step, and each action in a pipeline, by hooks on the run's parts.

data       until the first forward                      backward   from the end of a forward to the next, or to ...
forward    the model's own call, or a pipeline's F      optimizer  ... the call of the optimizer's `step`
waiting    between a pipeline's actions                 weights    a pipeline's W

`waited_seconds` {mesh dimension: seconds}: how long the host waits for messages, in any phase. A GPU's waits are not
timed: each would need two events, and a ring alone waits thousands of times a step. (--profile shows them.)
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from common.comm import Pending
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
        self.waits: list[tuple[str, Any, Any]] = []  # (mesh dimension, start, end)
        self.mark("data")
        parts.around(parts.optimizer, "step", self.update, by=__name__)
        if parts.pipeline is None:
            parts.model.register_forward_pre_hook(lambda *_: self.mark("forward"))
            parts.model.register_forward_hook(lambda *_: self.mark("backward"))
        for kind, method in ACTS.items():
            if hasattr(parts.pipeline, method):
                parts.around(parts.pipeline, method, partial(self.timed, kind), by=__name__)

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

    def update(self, step: Callable, lr: float):
        """Wrap the optimizer's step: the phase "optimizer" begins."""
        self.mark("optimizer")
        step(lr)

    def timed(self, kind: str, act: Callable, i: int, stage: int, x: Tensor | None) -> Tensor | None:
        """Wrap an action of a pipeline: note its start and its end."""
        self.mark(PHASES[kind], kind, i, stage)
        output = act(i, stage, x)
        self.mark("waiting")
        return output

    @contextmanager
    def waiting(self, pending: Pending) -> Iterator[None]:
        """Serve as `comm.waiting`: note how long the run waits for a message, and in which group."""
        timed = bool(pending.works) and not self.cuda
        start = self.now() if timed else None
        yield
        if timed:
            self.waits.append((pending.group.name, start, self.now()))

    def begin(self):
        """Begin a step: forget the one before."""
        self.marks.clear()
        self.waits.clear()
        self.mark("data")

    def take(self) -> dict[str, Any]:
        """The seconds of each phase of the step and, without a GPU, the seconds of waiting for messages."""
        self.mark("data")
        seconds: dict[str, float] = defaultdict(float)
        for (phase, _, start), (*_, end) in pairwise(self.marks):
            seconds[f"{phase}_seconds"] += self.between(start, end)
        waited: dict[str, float] = defaultdict(float)
        for dim, start, end in self.waits:
            waited[dim] += self.between(start, end)
        return dict(seconds) | (dict(waited_seconds=dict(waited)) if not self.cuda else {})

    def timeline(self) -> list[list]:
        """[kind, micro-batch, stage, start, end] of each action in this step, in seconds from the step's start."""
        *_, first = self.marks[0]
        acts = [(action, start, end) for (_, action, start), (*_, end) in pairwise(self.marks) if action]
        return [[*action, self.between(first, start), self.between(first, end)] for action, start, end in acts]
