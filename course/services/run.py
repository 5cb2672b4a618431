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

import variants
from common.trainer import Run


@lru_cache
def plugins() -> list[ModuleType]:
    """All variants, by name, and those that must be last. To import them adds their entries to the menus."""
    names = sorted(info.name for info in pkgutil.iter_modules(variants.__path__))
    found = [importlib.import_module(f"variants.{name}") for name in names]
    return sorted(found, key=lambda plugin: hasattr(plugin, "LAST"))


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

    def steps(self, **parts: Any) -> Iterator[int]:
        """As the plain run's, after everything has been attached."""
        parts = SimpleNamespace(**parts)
        attach(self.config, parts)
        yield from super().steps(**vars(parts))


def surround(train: Callable) -> tuple[Callable, type, type]:
    """What runs instead of a step alone: its `train`, its Config with all flags, and a Run with everything around it.

    The script runs as `__main__`; what attaches imports it by its name, so that module's `train` is taken.
    """
    step = importlib.import_module(Path(inspect.getfile(train)).stem)
    return step.train, compose(step), ServedRun
