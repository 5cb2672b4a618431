"""A run with everything around it: flags of all variants and services, and what they attach to a step's parts.

main(train, Config)      what common/trainer.py's `main` calls: parse all flags, train with a `ServedRun`
compose(step)            the step's Config with the flags of all variants and services
attach(config, parts)    let every variant change what a step has built
"""

import dataclasses
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor

import variants
from common.comm import Group
from common.trainer import Run
from services import devices, dry_run, failures, screen
from services.ledger import Ledger
from services.screen import Screen
from services.watchdog import Guard

SERVICES = [
    devices,
    dry_run,
    screen,
]  # those with flags, or with a `check`


@lru_cache
def plugins() -> list[ModuleType]:
    """All variants, by name, and services. To import them adds their entries to the menus."""
    names = sorted(info.name for info in pkgutil.iter_modules(variants.__path__))
    return [*(importlib.import_module(f"variants.{name}") for name in names), *SERVICES]


def offered(cls: type) -> list[ModuleType]:
    """Those whose flags a step with this Config has."""
    return [plugin for plugin in plugins() if issubclass(cls, getattr(plugin, "SINCE", object))]


@lru_cache
def compose(step: ModuleType) -> type:
    """The step's Config with the flags of everything that attaches to it."""
    flags = [plugin.Flags for plugin in offered(step.Config) if hasattr(plugin, "Flags")]
    made = type("Config", (step.Config, *flags), dict(__module__=step.__name__, __doc__=step.Config.__doc__))
    return dataclasses.dataclass(made)


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
        """Before `train`."""
        if not self.config.dry_run:
            devices.join(self.config)
        super().__enter__()
        self.guard = Guard(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any):
        """After `train`, or after the error that ended it."""
        self.guard.stop(error)
        super().__exit__(kind, error, trace)
        if error is not None:
            failures.report(error)

    def steps(self, **parts: Any) -> Iterator[int]:
        """As the plain run's, after everything has been attached."""
        parts = SimpleNamespace(**parts)
        attach(self.config, parts)
        self.screen = Screen(self, parts, self.ledger)
        for step in super().steps(**vars(parts)):
            self.screen.begin(step)
            yield step
        self.screen.finish()

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """The observer: book it by operation, too."""
        super().count(operation, group, tensor, share)
        self.ledger.book(operation, group, tensor, share)

    def record(self, step: int, tokens: int, **numbers: float):
        """As the plain run's, with more numbers."""
        super().record(step, tokens, **numbers, **self.screen.more(step, tokens))
        self.screen.line(self.history[-1])


def surround(train: Callable) -> tuple[Callable, type, type]:
    """What runs instead of a step alone: its `train`, its Config with all flags, and a Run with everything around it.

    The script runs as `__main__`; what attaches imports it by its name, so that module's `train` is taken.
    """
    step = importlib.import_module(Path(inspect.getfile(train)).stem)
    return dry_run.instead_of(step.train, attach), compose(step), ServedRun
