"""`--pp-split 3,3,2` sets the number of layers of each stage, first to last; `--pp-split cost` balances their cost.

A pipeline is as fast as its slowest stage, and the last stage also computes the head. By default layers are divided
evenly, with one more in some stages. With the flag, the places of the schedule get other numbers of layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import UserError
from common.model import PRESETS
from common.schedules import SCHEDULES, Place, Schedule
from extras.theory.layouts import balance, deal
from extras.theory.shapes import shape_of
from extras.variants import Parts
from step06_pipeline import Config as SINCE  # noqa: F401


@dataclass
class Flags:
    """Stages."""

    pp_split: str = ""  # layers of each stage, like 3,3,2; cost: balance the cost, head included; default: evenly


NEEDS = [("pp_split", "pp")]


def given(places: list[Place], split: str, n_layers: int) -> list[Place]:
    """Give the stages, first to last, the numbers of layers that `split` lists. Raises UserError if they do not fit."""
    n = len(places) // sum(place.before is None for place in places)
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in split.split(",")]
    if len(lengths) != n or min(lengths) < 1 or sum(lengths) != n_layers:
        raise UserError(f"--pp-split {split}: give {n} numbers of layers from 1 on, {n_layers} in all")
    return deal(places, lengths)


def check(config: Any, world: int):
    """Raises UserError for numbers of layers that do not fit the stages."""
    if config.pp_split:
        schedule = with_split(SCHEDULES[config.schedule], config)
        schedule.places(PRESETS[config.model].n_layers, config.pp, schedule.v)


def prepare(config: Any, parts: Parts):
    """Give the layers of --pp-split to the schedule that the flags select."""
    if config.pp_split:
        parts.around(SCHEDULES, config.schedule, with_split, by=__name__)


def with_split(plain: Callable[[Any], Schedule], config: Any) -> Schedule:
    """Wrap an entry of SCHEDULES: the same schedule, with the layers that --pp-split gives its places."""
    schedule, split = plain(config), config.pp_split
    if split != "cost":
        return schedule._replace(places=lambda n, p, v: given(schedule.places(n, p, v), split, n))
    m = shape_of(PRESETS[config.model], config)
    return schedule._replace(places=lambda n, p, v: balance(m, schedule.places(n, p, v)))
