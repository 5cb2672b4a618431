"""Finds all techniques and services, adds their flags to those of a course step, and attaches them to its run.

compose(step)            the course step's Config with the flags of all techniques and services
check(config, world)     sets flags that are left open, then refuses combinations that cannot work
OpenRun(config)          the plain run with all techniques and services: the base class of ServedRun and dry runs
"""

import dataclasses
import importlib
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from common import UserError
from common.comm import Mesh
from common.trainer import Run
from extras import variants
from extras.services import legal
from extras.variants import Parts, name_of
from extras.variants.record import Refusal, need

# Attached after the techniques, in this order. These are names, not modules, because some modules import this file.
SERVICES = "stages devices shapes legal readers resume evaluation profile dry_run screen"


@lru_cache
def plugins() -> list[ModuleType]:
    """Import all techniques, sorted by chapter and name, then services. Each may add values to flags such as --sync."""
    files = sorted(Path(variants.__file__).parent.glob("step0*/*.py"))
    names = [f"extras.variants.{path.parent.name}.{path.stem}" for path in files]
    names += [f"extras.services.{name}" for name in SERVICES.split()]
    return [importlib.import_module(name) for name in names]


def serves(plugin: ModuleType, cls: type) -> bool:
    """Whether a file serves the course step of this Config. A technique serves one course step and all later ones."""
    if hasattr(plugin, "SINCE"):  # the Config of its first step, if that is not the step of its folder
        return issubclass(cls, plugin.SINCE)
    folder = plugin.__name__.split(".")[-2]
    return not folder.startswith("step0") or folder <= cls.__module__  # a service without SINCE serves all steps


@lru_cache
def offered(cls: type, function: str) -> tuple[ModuleType, ...]:
    """The techniques and services that define `function` ("attach", "Flags", ...), for the step of this Config."""
    return tuple(plugin for plugin in plugins() if serves(plugin, cls) and hasattr(plugin, function))


@lru_cache
def compose(step: ModuleType) -> type:
    """A subclass of a course step's Config, with the flags of all techniques and services that serve this step."""
    flags = [plugin.Flags for plugin in offered(step.Config, "Flags")]
    fields = [("save_every", int, 100)]  # on by default here, as only the last two are kept
    made = dataclasses.make_dataclass("Config", fields, bases=(step.Config, *flags))
    made.__doc__, made.__module__ = step.Config.__doc__, step.__name__  # a run's directory is named after the module
    return made


@lru_cache
def defaults(cls: type) -> dict[str, Any]:
    """The default of each flag of a Config."""
    return {field.name: field.default for field in dataclasses.fields(cls)}


@lru_cache
def refusals(cls: type) -> tuple[Refusal, ...]:
    """The rules in NEEDS and REFUSES of all files that serve a course step: which flags exclude or need one another."""
    plain = defaults(cls)
    needs = (line for plugin in offered(cls, "NEEDS") for line in plugin.NEEDS if {*line[:2]} <= plain.keys())
    return *(need(plain, *line) for line in needs), *(one for file in offered(cls, "REFUSES") for one in file.REFUSES)


def refuse(config: Any):
    """Raises UserError for the first rule that the flags break."""
    plain, value = defaults(type(config)), partial(getattr, config)
    for refusal in refusals(type(config)):
        if refusal.holds(value, plain):
            raise UserError(refusal.text(value, plain))


def check(config: Any, world: int):
    """Check the mesh, set flags that are left open, then refuse combinations that cannot work. Raises UserError."""
    legal.check_mesh(config, world)
    for plugin in offered(type(config), "settle"):
        plugin.settle(config, world)
    refuse(config)
    for plugin in offered(type(config), "check"):
        plugin.check(config, world)


class OpenRun(Run):
    """The plain run, extended: techniques and services may change what flags select, then attach to the run's parts."""

    def __enter__(self) -> "OpenRun":
        """Change what flags select, such as the schedule of --schedule 1f1b; `open` undoes it once parts are built."""
        self.parts = Parts(self)
        for plugin in offered(type(self.config), "prepare"):
            plugin.prepare(self.config, self.parts)
        return super().__enter__()

    def __exit__(self, *error: Any):
        """Restore what flags select, also after an error that came before the run's parts were built."""
        self.parts.give_back()
        super().__exit__(*error)

    def restore(self, **_: Any) -> int:
        """Restore nothing: extras/services/resume.py saves and restores."""
        return 0

    def save(self, step: int, **_: Any):
        """Save nothing: extras/services/resume.py saves and restores."""

    def open(self, **parts: Any) -> Parts:
        """Attach techniques and services to the parts of a run, before its first step; returns the parts."""
        self.parts.give_back()
        mesh = parts.pop("mesh", None) or Mesh(dp=1)  # step 1 has none
        self.parts = dataclasses.replace(self.parts, mesh=mesh, **parts)
        for plugin in offered(type(self.config), "attach"):
            self.parts.kept[name_of(plugin.__name__)] = plugin.attach(self.config, self.parts)
        return self.parts
