"""`--pp-split 3,3,2`: how many layers each stage has, first to last, if not as equal as can be.

The first stage also has the embedding, the last one norm and head; so they may have fewer layers. In step 6,
`round_robin` of common/schedules.py would take its bounds from the flag. Here every entry of the menu of schedules is
asked for its places, and their layers are dealt anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import step06_pipeline as step06
from common import UserError
from common.schedules import SCHEDULES, Place, Schedule
from variants import dualpipe, zb_auto, zero_bubble  # noqa: F401  their entries are in the menu

SINCE = step06.Config


@dataclass
class Flags:
    """Uneven stages."""

    pp_split: str = ""  # layers of each stage, like 3,3,2; default: as equal as can be


def deal(places: list[Place], split: str, n_layers: int) -> list[Place]:
    """The same places with the layers of `split`; dualpipe's two ways have the same. Raises UserError."""
    n = len(places) // sum(place.before is None for place in places)
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in split.split(",")]
    if len(lengths) != n or min(lengths) < 1 or sum(lengths) != n_layers:
        raise UserError(f"--pp-split {split}: give {n} numbers of layers from 1 on, {n_layers} in all")
    bounds = list(accumulate(lengths, initial=0))
    return [place._replace(layers=range(*bounds[s % n : s % n + 2])) for s, place in enumerate(places)]


def with_split(make: Callable[[Any], Schedule]) -> Callable[[Any], Schedule]:
    """An entry of the menu that also reads `--pp-split`."""

    def entry(config: Any) -> Schedule:
        plain = make(config)
        if not getattr(config, "pp_split", ""):
            return plain
        return plain._replace(places=lambda n, p, v: deal(plain.places(n, p, v), config.pp_split, n))

    return entry


for name, make in SCHEDULES.items():
    SCHEDULES[name] = with_split(make)
