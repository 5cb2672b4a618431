"""`--pp-split 3,3,2`: how many layers each stage has, first to last; `--pp-split cost`: so that all cost about alike.

A pipeline is as fast as its dearest stage, and the last one also has the head. Without the flag, layers are dealt as
equally as can be. With it, every entry of the menu of schedules is asked for its places, and deals their layers anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from common import UserError
from common.model import PRESETS
from common.schedules import SCHEDULES, Place, Schedule
from step06_pipeline import Config as SINCE  # noqa: F401
from theory.layouts import balance, deal
from theory.shapes import shape_of


@dataclass
class Flags:
    """Stages (services/stages.py)."""

    pp_split: str = ""  # layers of each stage, like 3,3,2; cost: balanced, the head counted; default: as many in each


NEEDS = [("pp_split", "pp")]


def given(places: list[Place], split: str, n_layers: int) -> list[Place]:
    """The same places with the layers of `split`. Raises UserError."""
    n = len(places) // sum(place.before is None for place in places)
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in split.split(",")]
    if len(lengths) != n or min(lengths) < 1 or sum(lengths) != n_layers:
        raise UserError(f"--pp-split {split}: give {n} numbers of layers from 1 on, {n_layers} in all")
    return deal(places, lengths)


def check(config: Any, world: int):
    """Raises UserError for numbers of layers that do not fit the stages."""
    if config.pp_split:
        schedule = SCHEDULES[config.schedule](config)
        schedule.places(PRESETS[config.model].n_layers, config.pp, schedule.stages)


def with_split(make: Callable[[Any], Schedule]) -> Callable[[Any], Schedule]:
    """An entry of the menu that also reads `--pp-split`, if it is set: the flags of a step alone do not have it."""

    @wraps(make)
    def entry(config: Any) -> Schedule:
        plain, split = make(config), getattr(config, "pp_split", "")
        if not split:
            return plain
        if split != "cost":
            return plain._replace(places=lambda n, p, v: given(plain.places(n, p, v), split, n))
        m = shape_of(PRESETS[config.model], config)
        return plain._replace(places=lambda n, p, v: balance(m, plain.places(n, p, v)))

    return entry


def extend_menu():
    """Let every schedule read the flag: called once, when all variants have added theirs."""
    SCHEDULES.update({name: with_split(make) for name, make in SCHEDULES.items()})
