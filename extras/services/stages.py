"""`--pp-split cost` divides the layers among the stages of a pipeline so that all stages cost about the same.

A pipeline is as fast as its slowest stage, and the last stage also computes the head. By default layers are divided
evenly: stages differ by at most one layer. With the flag, `balance` chooses the layers of each stage by their cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from common.model import PRESETS
from common.schedules import SCHEDULES, Schedule
from extras.plan.layouts import balance
from extras.plan.shapes import shape_of
from extras.variants import Parts
from step06_pipeline import Config as SINCE  # noqa: F401


@dataclass
class Flags:
    """Stages."""

    pp_split: Literal["even", "cost"] = "even"  # even: equally many layers a stage; cost: equal cost, head included


NEEDS = [("pp_split", "pp")]


def prepare(config: Any, parts: Parts):
    """With --pp-split cost, wrap the entry of SCHEDULES that --schedule selects."""
    if config.pp_split == "cost":
        parts.around(SCHEDULES, config.schedule, balanced, by=__name__)


def balanced(plain: Callable[[Any], Schedule], config: Any) -> Schedule:
    """Wrap an entry of SCHEDULES: return its schedule, in which `balance` chooses the layers of each stage."""
    schedule, m = plain(config), shape_of(PRESETS[config.model], config)
    return schedule._replace(places=lambda n, p, v: balance(m, schedule.places(n, p, v)))
