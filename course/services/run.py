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
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import variants
from common.trainer import Run
from services import evaluation, health, launch, readers, replicas, resume, shapes

SERVICES = [
    launch,
    shapes,
    readers,
    resume,
    evaluation,
    health,
    replicas,
]  # attached like variants, and named below where a run calls them


@lru_cache
def plugins() -> list[ModuleType]:
    """All variants, by name. To import them adds their entries to the menus."""
    names = sorted(info.name for info in pkgutil.iter_modules(variants.__path__))
    return [importlib.import_module(f"variants.{name}") for name in names]


def offered(cls: type) -> list[ModuleType]:
    """Those whose flags a step with this Config has."""
    return [plugin for plugin in plugins() + SERVICES if issubclass(cls, getattr(plugin, "SINCE", object))]


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
        launch.join(config)

    def __enter__(self) -> "ServedRun":
        """Open the run directory, unless the run only generates; from now on signals are caught."""
        self.first = self.first and not self.config.generate
        self.kept = resume.move_aside(self) if self.first else ""
        self.keeper = resume.Keeper(self, offered(type(self.config)))
        return super().__enter__()

    def __exit__(self, error: type | None, *rest):
        """The end, or an error."""
        self.keeper.close()
        super().__exit__(error, *rest)

    def steps(self, **parts: Any) -> Iterator[int]:
        """As the plain run's, after everything has been attached, from where --resume goes on."""
        parts = self.parts = SimpleNamespace(**parts)
        attach(self.config, parts)
        start = self.keeper.start(parts, self.kept, weights_only=bool(self.config.generate))
        if self.config.generate:
            evaluation.answer(self.config, parts)
            return
        for step in super().steps(**vars(parts)):
            if step < start:
                self.bar.update()
                continue
            yield step
            if self.keeper.leave(step):
                return

    def record(self, step: int, tokens: int, **numbers: float):
        """With what services add to the numbers of a step."""
        before = time.perf_counter()
        numbers |= health.metrics(self.parts)
        if hasattr(self.parts, "mesh"):
            replicas.check_replicas(self.config, self.parts, step)
        numbers |= evaluation.metrics(self.config, self.parts, step, self.keeper.end)
        self.began += time.perf_counter() - before  # not a part of the step's seconds
        super().record(step, tokens, **numbers)


def surround(train: Callable) -> tuple[Callable, type, type]:
    """What runs instead of a step alone: its `train`, its Config with all flags, and a Run with everything around it.

    The script runs as `__main__`; what attaches imports it by its name, so that module's `train` is taken.
    """
    step = importlib.import_module(Path(inspect.getfile(train)).stem)
    return step.train, compose(step), ServedRun
