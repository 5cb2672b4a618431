"""A run with all services: the `Run` that extras/__main__.py passes to a step."""

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import comm
from common.comm import Group
from extras.services import devices, evaluation, failures, resume
from extras.services.checkpoint import on_ranks
from extras.services.screen import Screen
from extras.services.seam import OpenRun, check
from extras.services.tables import Ledger


class ServedRun(OpenRun):
    """A run with all techniques and services that its flags select."""

    def __init__(self, config: Any):
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        super().__init__(config)
        self.ledger = Ledger()

    def __enter__(self) -> "ServedRun":
        """Open the run. An error here is printed once per job."""
        try:
            return self if self.config.dry_run else self.meet()  # a dry run has no other ranks, and writes nothing
        except Exception as error:
            failures.report(error, early=True)
            raise

    def meet(self) -> "ServedRun":
        """Initialise process groups, catch signals from now on, and create the watchdog."""
        devices.join(self.config)
        self.first = self.first and not self.config.generate
        self.keeper = resume.Keeper(self)
        super().__enter__()
        self.watchdog = failures.Watchdog(self.config.timeout)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, frames: Any):
        """Finish the run, or report the error that ended it."""
        if not self.config.dry_run:
            comm.waiting = nullcontext
            self.watchdog.pause()
            super().__exit__(kind, error, frames)
            self.keeper.close()
            trace = self.parts.kept.get("profile")
            if isinstance(error, torch.OutOfMemoryError) and trace is not None and trace.recording:
                error.add_note(trace.snapshot())
        if error is not None:
            failures.report(error, early=not self.began)

    def begin(self):
        """Move an earlier run's files aside, unless this run resumes it; begin as the plain run does. A collective."""
        on_ranks(self.out, partial(self.keeper.make_way, super().begin))

    def introduce(self, **parts: Any):
        """Print nothing: `Screen` prints its own introduction."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Attach everything, restore what --resume names, then yield steps as the plain run does."""
        self.start = self.keeper.start(self.open(**parts))
        if self.config.generate:
            evaluation.answer(self.config, self.parts)
            return
        self.screen = Screen(self, self.parts, self.ledger)
        for step in super().steps(**parts):
            self.screen.begin(step)
            self.watchdog.begin(step)
            yield step
            self.watchdog.pause()
            if self.keeper.leave(step):
                break
        self.screen.finish()

    def restore(self, **_: Any) -> int:
        """The number of steps done; `steps` has restored everything already."""
        return self.start

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Serve as `comm.observer`: count an operation as the plain run does, and also by its kind, in the ledger."""
        super().count(operation, group, tensor, share)
        self.ledger.book(operation, group, tensor, share)

    def record(self, step: int, tokens: int, **numbers: float):
        """Record a step as the plain run does, with the services' numbers added."""
        numbers |= self.screen.more(tokens)
        before = time.perf_counter()
        numbers |= evaluation.metrics(self.config, self.parts, step, self.keeper.end)
        self.began += time.perf_counter() - before  # not a part of the step's seconds
        super().record(step, tokens, **numbers)
        self.screen.line(self.history[-1])
