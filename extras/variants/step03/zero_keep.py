"""Lets ZeRO 3 keep gathered weights until the update (`--zero-keep`; Llama 3: Dubey et al. 2024, 3.3.2).

In a step of m micro-batches, step 3 gathers each layer 2 m times, although its weights do not change. Here they are
gathered once, by the first micro-batch that uses them, and freed by `publish` (n, P, m, e: see step 3):

    elements a rank sends, x (n-1)/n    m (3 P - e)   becomes   (m+1) P, as in stage 2
    weights it holds, beside shards     two units     becomes   all of its units

Between steps a rank holds as little as in stage 3, within a step as much as in stage 2. The all-gather is hidden behind
the next step's first forward, instead of following the update. In step 3, only `publish` would call `ShardedUnit.free`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from extras.variants import Parts
from step03_zero import ShardedUnit


def keep():
    """Replaces `ShardedUnit.free`: do nothing, because later micro-batches of this step use the weights."""


def publish(units: list[ShardedUnit]):
    """Replaces `Zero3.publish`: round the masters into the shards, and free all units."""
    for unit in units:
        unit.shard.copy_(unit.master)
        ShardedUnit.free(unit)


@dataclass
class Flags:
    """Kept weights of ZeRO 3."""

    zero_keep: bool = False  # with --zero 3: gather a unit once a step, and free it after the update


NEEDS = [("zero_keep", "zero", 3)]


def attach(config: Any, parts: Parts):
    """Keep all units gathered from their first use to the update."""
    if config.zero_keep:
        for unit in parts.units:
            parts.instead(unit, "free", keep, by=__name__)
        parts.instead(parts.optimizer, "publish", partial(publish, parts.units), by=__name__)
