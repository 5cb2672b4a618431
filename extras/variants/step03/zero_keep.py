"""ZeRO 3 that keeps what it has gathered until the update (`--zero-keep`; Llama 3: Dubey et al. 2024, 3.3.2).

A pipeline has many micro-batches in a step. Step 3 gathers a layer twice in each: 2 m all-gathers of weights that have
not changed. Kept, they are gathered once a step, by the first micro-batch that uses them, and dropped by `publish`:

    elements a rank sends, x (n-1)/n    m (3 P - e)   becomes   (m+1) P, as in stage 2
    it holds, beside its shards         two units     becomes   all of its units

So between steps it holds as little as stage 3, within one as much as stage 2; the update is sharded in all of them, and
no all-gather stands after it: the first forward hides what stage 2 shows.

`--zero-keep-mb M` keeps units of at most M MiB alone, as the persistence threshold of DeepSpeed's stage 3 does. A small
unit costs a message each time, and little memory; a large one, as the experts of a layer, is freed as in step 3.

In step 3, `ShardedUnit.free` would be called by `publish` alone.
"""

from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from extras.variants import Parts
from step03_zero import Config, ShardedUnit

SINCE = Config


def keep():
    """In the place of `ShardedUnit.free`: others will use it in this step."""


def publish(units: list[ShardedUnit]):
    """In the place of `Zero3.publish`: round the masters, and really drop all that is gathered."""
    for unit in units:
        unit.shard.copy_(unit.master)
        ShardedUnit.free(unit)


@dataclass
class Flags:
    """What stage 3 keeps."""

    zero_keep: bool = False  # with --zero 3: gather a unit once a step, and drop it after the update
    zero_keep_mb: float = 0.0  # with --zero-keep: keep units of at most so many MiB alone; 0: all


TRIED = dict(zero_keep_mb=0.06)
NEEDS = [("zero_keep", "zero", 3), ("zero_keep_mb", "zero_keep")]


def attach(config: Any, parts: Parts):
    """Keep what is small enough."""
    most = config.zero_keep_mb * 2**20 or inf
    if config.zero_keep:
        for unit in parts.units:
            if unit.nbytes <= most:
                parts.instead(unit, "free", keep, by=__name__)
        parts.instead(parts.optimizer, "publish", partial(publish, parts.units), by=__name__)
