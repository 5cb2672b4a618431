"""Keeps gradients in 16 bits (`--grad-dtype same`), which saves two bytes a parameter in memory and in messages.

Autograd then accumulates micro-batches in 16 bits, where a small addend vanishes beside a large sum. ZeRO 2 and 3 still
accumulate in fp32, in their shards, and the update is in fp32. In step 1 this would be the line that sets `grad_dtype`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from extras.variants import Parts
from step01_single_gpu import Optimizer
from step03_zero import Unit


def gradients(parts: Parts, plain: Callable) -> dict[str, Tensor]:
    """Wraps `gradients` of the optimizer: convert the gradients, or ZeRO's shards of them, to the masters' dtype."""
    for unit in parts.units:
        unit.grad_shard = unit.grad_shard.to(unit.master.dtype)
    for name, param in getattr(parts.optimizer, "params", {}).items():
        gradient, param.grad = param.grad, None
        param.grad_dtype = parts.optimizer.masters[name].dtype
        param.grad = gradient.to(param.grad_dtype)
    return plain()


def zero_grad(optimizer: Optimizer, plain: Callable):
    """Wraps `Optimizer.zero_grad`: the next gradients are in 16 bits again."""
    plain()
    for param in optimizer.params.values():
        param.grad_dtype = param.dtype


def make_room(unit: Unit):
    """Replaces `Unit.make_room`: allocate a flat buffer of zeros in the dtype of the weights."""
    unit.gradient = torch.zeros_like(unit.flat)


@dataclass
class Flags:
    """The dtype of gradients."""

    grad_dtype: Literal["fp32", "same"] = "fp32"  # gradients in 16-bit training: summed in fp32, or in 16 bits as well


NEEDS = [("grad_dtype", "dtype", "bf16", "fp16", "auto")]


def attach(config: Any, parts: Parts):
    """Give gradients and their buffers the dtype of the weights, instead of the one that the optimizer has chosen."""
    if config.grad_dtype == "fp32":
        return
    for param in parts.model.parameters():
        param.grad_dtype = param.dtype
    parts.around(parts.optimizer, "gradients", partial(gradients, parts), by=__name__)
    for unit in parts.units:
        parts.instead(unit, "make_room", partial(make_room, unit), by=__name__)
    for bucket in getattr(parts.sync, "buckets", ()):
        bucket.__init__(bucket.params, bucket.group)  # allocates its buffers in the new dtype
    if not parts.units:
        parts.around(parts.optimizer, "zero_grad", partial(zero_grad, parts.optimizer), by=__name__)
