"""A run with everything around it: flags of all variants and services, and what they attach to a step's parts.

surround(train)          what common/trainer.py's `main` asks for: a step's `train`, all flags, and a `ServedRun`
compose(step)            the step's Config with the flags of all variants and services
attach(config, parts)    let every variant change what a step has built
"""

import dataclasses
import importlib
import inspect
import os
import pkgutil
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

import variants
from common import comm
from common.comm import Group, Pending
from common.trainer import Run
from services import (
    devices,
    dry_run,
    evaluation,
    failures,
    health,
    legal,
    readers,
    replicas,
    resume,
    screen,
    shapes,
    stages,
)
from services.clocks import Timed
from services.ledger import Ledger
from services.screen import Screen
from services.watchdog import Guard

# Attached like variants, and named below where a run calls them.
SERVICES = [devices, shapes, stages, legal, readers, resume, evaluation, health, replicas, dry_run, screen]


@lru_cache
def plugins() -> list[ModuleType]:
    """All variants, by name, but `LAST` ones last; then services. To import them adds their entries to the menus."""
    names = sorted(info.name for info in pkgutil.iter_modules(variants.__path__))
    found = [importlib.import_module(f"variants.{name}") for name in names]
    stages.extend_menu()
    return [*sorted(found, key=lambda plugin: hasattr(plugin, "LAST")), *SERVICES]


def offered(cls: type) -> list[ModuleType]:
    """Those whose flags a step with this Config has."""
    return [plugin for plugin in plugins() if issubclass(cls, getattr(plugin, "SINCE", object))]


def choose_sizes(config: Any):
    """Let 0 ranks mean: 2 if those that other flags leave are an even number (for ep, experts too), else 1."""
    sizes = {dim: getattr(config, dim, 1) for dim in ("pp", "cp", "tp")}
    left = (config.dry_run or int(os.environ.get("WORLD_SIZE", 1))) // prod(size or 1 for size in sizes.values())
    for dim in [dim for dim, size in sizes.items() if size == 0]:
        sizes[dim] = 1 + (left % 2 == 0)
        setattr(config, dim, sizes[dim])
        left //= sizes[dim]
    if getattr(config, "ep", 1) == 0:
        config.ep = 1 + (left * sizes["cp"] % 2 == config.experts % 2 == 0)


@lru_cache
def compose(step: ModuleType) -> type:
    """The step's Config with the flags of everything that attaches to it."""
    flags = [plugin.Flags for plugin in offered(step.Config) if hasattr(plugin, "Flags")]
    about = step.Config.__doc__ + " --pp, --cp, --tp, --ep 0: 2, if it divides, else 1." * hasattr(step.Config, "tp")
    about = dict(__module__=step.__name__, __doc__=about, __post_init__=choose_sizes)
    return dataclasses.dataclass(type("Config", (step.Config, *flags), about))


def check(config: Any, world: int):
    """Let every variant refuse flags that cannot work, before anything is built. Raises UserError."""
    for plugin in offered(type(config)):
        if hasattr(plugin, "check"):
            plugin.check(config, world)


def attach(config: Any, parts: SimpleNamespace):
    """Let every variant change what a step has built."""
    for plugin in offered(type(config)):
        if hasattr(plugin, "attach"):
            plugin.attach(config, parts)


class ServedRun(Run):
    """The plain run with what the flags ask for around it."""

    def __init__(self, config: Any):
        super().__init__(config)
        check(config, int(os.environ.get("WORLD_SIZE", 1)))
        self.ledger = Ledger()
        self.first = self.first and not config.dry_run  # which leaves nothing behind

    def __enter__(self) -> "ServedRun":
        """Meet the other ranks; open the run directory, unless the run only generates; catch signals from now on."""
        if not self.config.dry_run:
            devices.join(self.config)
        self.first = self.first and not self.config.generate
        self.kept = resume.move_aside(self) if self.first else ""
        self.keeper = resume.Keeper(self, offered(type(self.config)))
        super().__enter__()
        self.guard = Guard(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any):
        """The end, or the error that ended it."""
        comm.Pending = Pending
        self.guard.stop(error)
        self.keeper.close()
        super().__exit__(kind, error, trace)
        if error is not None:
            failures.report(error)

    def steps(self, **parts: Any) -> Iterator[int]:
        """As the plain run's, after everything has been attached, from where --resume goes on."""
        parts = self.parts = SimpleNamespace(run=self, **parts)
        attach(self.config, parts)
        start = self.keeper.start(parts, self.kept, weights_only=bool(self.config.generate))
        if self.config.generate:
            evaluation.answer(self.config, parts)
            return
        self.screen = Screen(self, parts, self.ledger)
        comm.Pending = partial(Timed, self.screen.clock, self.ledger)
        for step in super().steps(**vars(parts)):
            if step < start:
                self.bar.update()
                continue
            self.screen.begin(step)
            yield step
            if self.keeper.leave(step):
                break
        self.screen.finish()

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """The observer: book it by operation, too."""
        super().count(operation, group, tensor, share)
        self.ledger.book(operation, group, tensor, share)

    def record(self, step: int, tokens: int, **numbers: float):
        """With what services add to the numbers of a step."""
        numbers |= self.screen.more(step, tokens)
        numbers |= health.metrics(self.parts, numbers["waited_seconds"])
        before = time.perf_counter()
        if hasattr(self.parts, "mesh"):
            replicas.check_replicas(self.config, self.parts, step)
        numbers |= evaluation.metrics(self.config, self.parts, step, self.keeper.end)
        self.began += time.perf_counter() - before  # not a part of the step's seconds
        super().record(step, tokens, **numbers)
        self.screen.line(self.history[-1])


def surround(train: Callable) -> tuple[Callable, type, type]:
    """What runs instead of a step alone: its `train`, its Config with all flags, and a Run with everything around it.

    The script runs as `__main__`; what attaches imports it by its name, so that module's `train` is taken.
    """
    devices.prepare()
    step = importlib.import_module(Path(inspect.getfile(train)).stem)
    return dry_run.instead_of(step.train, attach), compose(step), ServedRun
