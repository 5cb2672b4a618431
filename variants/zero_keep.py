"""ZeRO 3 that keeps what it has gathered until the update (`--zero-keep`; Llama 3: Dubey et al. 2024, 3.3.2).

A pipeline has many micro-batches in a step. Step 3 gathers a layer twice in each: 2 m all-gathers of weights that have
not changed. Kept, they are gathered once a step, by the first micro-batch that uses them, and dropped by `publish`:

    elements a rank sends, x (n-1)/n    m (3 P - e)   becomes   (m+1) P, as in stage 2
    it holds, beside its shards         two units     becomes   all of its units

So between steps it holds as little as stage 3, within one as much as stage 2; the update is sharded in all of them, and
no all-gather stands after it: the first forward hides what stage 2 shows.

In step 3, `ShardedUnit.free` would be called by `publish` alone.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from step03_zero import Config, ShardedUnit
from variants import Parts

SINCE = Config


@dataclass
class Flags:
    """What stage 3 keeps."""

    zero_keep: bool = False  # with --zero 3: gather a unit once a step, and drop it after the update


NEEDS = [("zero_keep", "zero", 3)]


def gathered(config: Any, parts: Parts) -> float:
    """Bytes of whole units, beside the shards."""
    return sum(unit.group.size * unit.shard.nbytes for unit in parts.units) if config.zero_keep else 0.0


def sends(config: Any, parts: Parts, w: Any, said: dict[str, Counter]) -> dict[str, Counter]:
    """Each unit is gathered once."""
    found = Counter()
    for unit in parts.units:
        found[unit.group.name, "all_gather"] += (unit.group.size - 1) * unit.shard.nbytes
    return dict(weights=found) if config.zero_keep else {}


def keep():
    """In the place of `ShardedUnit.free`: others will use it in this step."""


def publish(units: list[ShardedUnit]):
    """In the place of `Zero3.publish`: after the update, really drop them."""
    for unit in units:
        ShardedUnit.free(unit)


def attach(config: Any, parts: Parts):
    """Keep every unit."""
    if config.zero_keep:
        for unit in parts.units:
            parts.instead(unit, "free", keep, by=__name__)
        parts.instead(parts.optimizer, "publish", partial(publish, parts.units), by=__name__)
