"""Applies ZeRO to groups of dp / R ranks (`--zero-replicas R`; MiCS: Zhang et al. 2022; "hybrid sharding" in FSDP).

If weights are sharded over all dp ranks, every all-gather waits for the slowest link. With R replicas, dp / R
neighbours (those of a node, say) shard and gather the weights among themselves; R ranks hold the same shard.

    dp = 4, R = 2:     groups "shard": ranks 0 1, 2 3        groups "replicas": ranks 0 2, 1 3

    gather, reduce-scatter     over shard                                  as in step 3, with fewer ranks
    once a step                over replicas: all-reduce of shards' sums   2 (R-1)/R P R/n elements a rank; n = dp

A shard takes R times the memory; with R = dp nothing is sharded. In stage 1 these are the collectives of a two-level
(hierarchical) all-reduce (BlueConnect: Cho et al. 2019). In step 3 a unit's group would be "shard", and `finish` would
have two more lines. Norm and checkpoints read data_dim="shard" from a parameter's layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from common.comm import Mesh, all_reduce
from common.layout import layout_of, note_layout
from common.model import Decoder
from extras.variants import Parts
from step03_zero import STAGES


def with_replicas(
    stage: Callable, model: Decoder, config: Any, mesh: Mesh, device: torch.device, dtype: torch.dtype
) -> Any:
    """Wraps a ZeRO stage: create the groups "shard" and "replicas"; the stage shards all but experts over "shard"."""
    rows = mesh.join("data", *(dim for dim in ("dp", "cp") if dim in mesh.sizes))  # int [groups, dp x cp]
    shards = rows.reshape(len(rows), config.zero_replicas, -1)
    mesh.enter("shard", shards.reshape(-1, shards.shape[2]))
    mesh.enter("replicas", shards.swapaxes(1, 2).reshape(-1, config.zero_replicas))
    for param in model.parameters():
        if layout_of(param).data_dim in ("dp", "data"):
            note_layout(param, data_dim="shard")
    return stage(model, config, mesh, device, dtype)


def finish(parts: Parts, sum_over_shard: Callable):
    """Wraps `finish` of a ZeRO stage: also sum the shards' gradients over the replicas."""
    sum_over_shard()
    shards = [unit.grad_shard for unit in parts.units if unit.group.name == "shard"]
    for pending in [all_reduce(gradient, parts.mesh["replicas"]) for gradient in shards]:
        pending.wait()


@dataclass
class Flags:
    """Replicas of ZeRO's shards."""

    zero_replicas: int = 1  # R: shard over dp / R neighbours (of a node, say), and sum shards' gradients over R


TRIED = dict(zero_replicas=2)
NEEDS = [("zero_replicas", "zero", 1, 2, 3)]


def prepare(config: Any, parts: Parts):
    """Let ZeRO shard over dp / R ranks."""
    if config.zero_replicas > 1 and config.zero:
        parts.around(STAGES, config.zero, with_replicas, by=__name__)


def attach(config: Any, parts: Parts):
    """Also sum the shards' gradients over the replicas."""
    if config.zero_replicas > 1:
        parts.around(parts.sync, "finish", partial(finish, parts), by=__name__)
