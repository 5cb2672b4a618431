"""ZeRO's weight shards in host memory (`--offload-params cpu`; "ZeRO-Infinity", Rajbhandari et al. 2021).

In stage 3 a unit's weights are gathered before they are used. Here the shards stay on the host, and are copied to the
GPU one unit ahead, on a stream of their own, while it computes. Masters and update are on the host as well
(offload_optimizer.py); the GPU holds one or two units of weights, the gradients' shards, and activations. In step 3,
`ShardedUnit.gather` would copy the shard first.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from common.comm import Pending, all_gather
from extras.variants import Parts
from extras.variants.step03.offload_optimizer import Update, move, to_host
from step03_zero import ShardedUnit


def gather_beside(unit: ShardedUnit, stream: torch.cuda.Stream):
    """Replaces `ShardedUnit.gather`: copy the shard to the GPU and gather it, while the GPU computes.

    The stream first waits for the kernels that may still read the memory, which the host has already freed. To wait for
    the unit is also to wait for this stream: in a group of one there is no collective to wait for.
    """
    if unit.gathered:
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        unit.flat.untyped_storage().resize_(unit.nbytes)
        pending = all_gather(unit.flat, unit.shard.to(unit.flat.device, non_blocking=True), unit.group)
        arrived = torch.cuda.Event()
        arrived.record()
    unit.gathering, unit.gathered = Pending(unit.group, *pending.works, arrived), True


@dataclass
class Flags:
    """Offload of weights."""

    offload_params: Literal["none", "cpu"] = "none"  # with --zero 3: where shards of weights, and masters, are kept


NEEDS = [("offload_params", "zero", 3)]  # there must be shards to move


def attach(config: Any, parts: Parts):
    """Move the shards of the weights, and the masters unless --offload-optimizer moves these."""
    if config.offload_params == "none":
        return
    zero = parts.optimizer
    beside = torch.cuda.Stream() if zero.units[0].flat.is_cuda else None
    for unit in zero.units:
        unit.shard = to_host(unit.shard)
        if config.offload_optimizer == "none":
            move(zero, unit, unit.shard.to(unit.master.dtype))  # the shard itself, if it is wide enough
        if beside is not None:
            parts.instead(unit, "gather", partial(gather_beside, unit, beside), by=__name__)
    if config.offload_optimizer == "none":
        parts.instead(zero, "step", Update(zero, lambda moment: moment).step, by=__name__)
