"""Who attaches to a step: it finds all variants and services, gives a step their flags, and lets them attach.

compose(step)            the step's Config with the flags of all variants and services
check(config, world)     let all settle what is open, then refuse what cannot work
OpenRun(config)          the plain run, with everything attached to its parts: what all other runs build on
"""

import dataclasses
import importlib
import os
import pkgutil
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any

import variants
from common.trainer import Run
from services import stages
from variants import Parts

# Attached after the variants, in this order; by name, as some of them build on this file.
SERVICES = "devices shapes legal readers resume evaluation health replicas dry_run screen"


@lru_cache
def plugins() -> list[ModuleType]:
    """All variants, by name, then services. To import them adds their entries to the menus."""
    names = sorted(f"variants.{info.name}" for info in pkgutil.iter_modules(variants.__path__))
    found = [importlib.import_module(name) for name in names]
    stages.extend_menu()
    return [*found, stages, *(importlib.import_module(f"services.{name}") for name in SERVICES.split())]


def offered(cls: type, function: str) -> list[ModuleType]:
    """Those whose flags a step with this Config has, and that hold this."""
    found = (plugin for plugin in plugins() if issubclass(cls, getattr(plugin, "SINCE", object)))
    return [plugin for plugin in found if hasattr(plugin, function)]


def choose_sizes(config: Any):
    """Let 0 ranks mean: 2 if those that other flags leave are an even number (for ep, experts too), else 1."""
    sizes = {dim: getattr(config, dim, 1) for dim in ("pp", "cp", "tp")}
    left = (config.dry_run or int(os.environ.get("WORLD_SIZE", 1))) // prod(size or 1 for size in sizes.values())
    for dim in [dim for dim, size in sizes.items() if size == 0]:
        sizes[dim] = 1 + (left % 2 == 0)
        setattr(config, dim, sizes[dim])
        left //= sizes[dim]
    if getattr(config, "ep", 1) == 0:
        config.ep = 1 + (left * sizes["cp"] * sizes["tp"] % 2 == config.experts % 2 == 0)


@lru_cache
def compose(step: ModuleType) -> type:
    """The step's Config with the flags of everything that attaches to it."""
    flags = [plugin.Flags for plugin in offered(step.Config, "Flags")]
    about = step.Config.__doc__ + " --pp, --cp, --tp, --ep 0: 2, if it divides, else 1." * hasattr(step.Config, "tp")
    about = dict(__module__=step.__name__, __doc__=about, __post_init__=choose_sizes)
    return dataclasses.dataclass(type("Config", (step.Config, *flags), about))


def check(config: Any, world: int):
    """Let all set the flags that are left open, and then refuse those that cannot work. Raises UserError."""
    for plugin in offered(type(config), "settle"):
        plugin.settle(config)
    for plugin in offered(type(config), "check"):
        plugin.check(config, world)


class OpenRun(Run):
    """A run to whose parts variants and services are attached, and nothing else."""

    def open(self, **parts: Any) -> Parts:
        """What `steps` begins with."""
        self.parts = Parts(run=self, **parts)
        for plugin in offered(type(self.config), "attach"):
            self.parts.kept[plugin.__name__] = plugin.attach(self.config, self.parts)
        return self.parts
