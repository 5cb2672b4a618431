"""Run a step of the course with the techniques of this folder in its menus, and with their flags.

torchrun --nproc_per_node=4 -m extras step04_tp_sp.py --tp 2 --optimizer muon
"""

import dataclasses
import importlib
import sys
from inspect import get_annotations
from pathlib import Path
from types import ModuleType

from common import UserError
from common.launch import main
from extras.start import start
from extras.state import StatefulRun


def techniques() -> list[ModuleType]:
    """Import all files of techniques/. Importing one adds its entries to the menus of a step, and
    does nothing else.
    """
    paths = sorted(Path(__file__).with_name("techniques").glob("[a-z]*.py"))
    return [importlib.import_module(f"extras.techniques.{path.stem}") for path in paths]


def with_flags(config: type, modules: list[ModuleType]) -> type:
    """A step's Config, extended by the flags of those techniques whose `Flags` extend it or an
    earlier step's.
    """
    added = []
    for module in modules:
        flags = getattr(module, "Flags", None)
        if flags is not None and issubclass(config, flags.__base__):
            own = get_annotations(flags)
            added += [
                (field.name, field.type, field)
                for field in dataclasses.fields(flags)
                if field.name in own
            ]
    extended = dataclasses.make_dataclass("Config", added, bases=(config,))
    extended.__module__ = config.__module__
    extended.__doc__ = "Techniques"
    return extended


def step_of(argv: list[str]) -> ModuleType:
    """The step whose file is the first word, such as "step02_ddp.py". Raises UserError."""
    if not argv or not Path(argv[0]).is_file():
        raise UserError("give a step's file first, such as step01_single_gpu.py")
    return importlib.import_module(argv[0].removesuffix(".py").replace("/", "."))


def run(argv: list[str]):
    """Train by the step that the line names. Raises UserError."""
    step = step_of(argv)
    del sys.argv[1]
    main(step.train, with_flags(step.Config, techniques()), StatefulRun)


if __name__ == "__main__":
    start(run)
