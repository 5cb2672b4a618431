"""`--pp-split cost` gives the stages of a pipeline numbers of layers that make them cost about the same.

A pipeline is as fast as its slowest stage, and the last stage also computes the head. By default layers are divided
evenly, with one more in some stages. With the flag, the places of the schedule get other numbers of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from common.model import PRESETS
from common.schedules import SCHEDULES, Schedule
from extras.theory.layouts import balance
from extras.theory.shapes import shape_of
from extras.variants import Parts
from step06_pipeline import Config as SINCE  # noqa: F401


@dataclass
class Flags:
    """Stages."""

    pp_split: Literal["even", "cost"] = "even"  # even: equally many layers a stage; cost: equal cost, head included


NEEDS = [("pp_split", "pp")]


def prepare(config: Any, parts: Parts):
    """Change the schedule that the flags select, if --pp-split asks for it."""
    if config.pp_split == "cost":
        parts.around(SCHEDULES, config.schedule, balanced, by=__name__)


def balanced(plain: Callable[[Any], Schedule], config: Any) -> Schedule:
    """Wrap an entry of SCHEDULES: the same schedule, with places whose layers are balanced by cost."""
    schedule, m = plain(config), shape_of(PRESETS[config.model], config)
    return schedule._replace(places=lambda n, p, v: balance(m, schedule.places(n, p, v)))
