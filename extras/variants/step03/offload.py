"""Keeps ZeRO's tensors in host memory (`--offload-optimizer`, `--offload-params`).

    --offload-optimizer cpu     masters and moments are kept and updated on the host ("ZeRO-Offload", Ren et al. 2021)
    --offload-params cpu        in stage 3, the shards of the weights are in host memory, too ("ZeRO-Infinity",
                                Rajbhandari et al. 2021; it also uses disks). The GPU holds one or two units of
                                weights, the gradients' shards, and activations

The host updates one unit at a time: only this unit has gradients, and update rules skip parameters without gradients.
In step 3, `Update.step` would be `Zero1.step`. On a GPU, copies use streams of their own: gradients of later units are
copied while the host updates one, and shards are copied and gathered while the GPU computes. (The size of pinned memory
is rounded up to a power of two.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from common.comm import Pending, all_gather
from extras.variants import Parts
from step03_zero import ShardedUnit, Unit, Zero1


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, which is pinned if there is a GPU."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return host.copy_(tensor)


def move(zero: Zero1, unit: Unit, master: Tensor):
    """Replace a unit's master by its copy `master`, and make the update rule's tensors views of the copy."""
    unit.master = master
    for name in unit.trained:
        if name in zero.masters:
            zero.masters[name].data = unit.view_shard(master, name)


class Update:
    """Updates ZeRO's units one by one on the host, where their masters are."""

    def __init__(self, optimizer: Zero1):
        self.optimizer, self.first = optimizer, True
        self.units = [unit for unit in optimizer.units if unit.trained]
        self.stream = torch.cuda.Stream() if self.units[0].flat.is_cuda else None

    def send(self, gradient: Tensor) -> tuple[Tensor, Callable]:
        """Start to copy a gradient to the host -> the copy, and a function that waits for it."""
        if self.stream is None:
            return gradient, lambda: None
        with torch.cuda.stream(self.stream):
            there, arrived = gradient.to("cpu", non_blocking=True), torch.cuda.Event()  # into pinned memory
            arrived.record()
        return there, arrived.synchronize

    def step(self, lr: float):
        """Replaces `Zero1.step`: wait for each unit's gradient and update its masters; then publish all weights."""
        zero, rule = self.optimizer, self.optimizer.torch_optimizer
        for group in rule.param_groups:
            group["lr"] = lr
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # until gradients are summed
        gradients = [unit.grad_shard for unit in self.units]  # the list keeps their memory until all are copied
        for unit in self.units:
            unit.grad_shard = None  # only the unit that is updated has one, so that rules recognise it
        for unit, (gradient, wait) in zip(self.units, [*map(self.send, gradients)], strict=True):
            wait()
            unit.grad_shard = gradient
            masters = {name: zero.masters[name] for name in unit.trained if name in zero.masters}
            for name, master in masters.items():
                master.grad = unit.view_shard(gradient, name)
            rule.step()
            rule.zero_grad()
            for master in masters.values() if self.first else ():  # this update created its moments
                rule.state[master] |= {key: to_host(t) for key, t in rule.state[master].items() if t.dim()}
            unit.grad_shard = None
        self.first = False
        zero.publish()


def gather_beside(unit: ShardedUnit, stream: torch.cuda.Stream):
    """Replaces `ShardedUnit.gather`: copy the shard to the GPU and gather it, while the GPU computes.

    This unit may reuse the memory of a freed unit. So `stream` first waits for the kernels that still read that memory.
    Waiting for the unit also waits for `stream`, because in a group of one there is no collective to wait for.
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
    """Offload of ZeRO's tensors."""

    offload_optimizer: Literal["none", "cpu"] = "none"  # where masters and moments are kept and updated
    offload_params: Literal["none", "cpu"] = "none"  # with --zero 3: where shards of weights are kept


NEEDS = [("offload_optimizer", "zero", 1, 2, 3)]  # there must be shards to move
NEEDS += [("offload_params", "zero", 3), ("offload_params", "offload_optimizer", "cpu")]


def attach(config: Any, parts: Parts):
    """Move masters and, with --offload-params, shards of weights to the host. The first update moves the moments."""
    if config.offload_optimizer == "none":
        return
    zero = parts.optimizer
    beside = torch.cuda.Stream() if zero.units[0].flat.is_cuda else None
    for unit in zero.units:
        move(zero, unit, to_host(unit.master))
        if config.offload_params != "none":
            unit.shard = to_host(unit.shard)
            if beside is not None:
                parts.instead(unit, "gather", partial(gather_beside, unit, beside), by=__name__)
    parts.instead(zero, "step", Update(zero).step, by=__name__)
