"""Gradients in 16 bits (`--grad-dtype same`): two bytes less for each parameter, and for what is sent of it.

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
from step02_ddp import Bucket, BucketSync
from step03_zero import Unit


def gradients(optimizer: Optimizer, plain: Callable) -> dict[str, Tensor]:
    """Around step 1's finished gradients: converts them to the masters' dtype."""
    for name, param in optimizer.params.items():
        gradient, param.grad = param.grad, None
        param.grad_dtype = optimizer.masters[name].dtype
        param.grad = gradient.to(param.grad_dtype)
    return plain()


def zero_grad(optimizer: Optimizer, plain: Callable):
    """Around `zero_grad`: the next gradients are narrow again."""
    plain()
    for param in optimizer.params.values():
        param.grad_dtype = param.dtype


def widen(units: list[Unit], finish: Callable):
    """Around ZeRO's sums over ranks: converts shards of gradients to the masters' dtype."""
    finish()
    for unit in units:
        unit.grad_shard = unit.grad_shard.to(unit.master.dtype)


def make_room(unit: Unit):
    """Replaces the unit's own: a flat buffer of zeros, as narrow as the weights."""
    unit.gradient = torch.zeros_like(unit.flat)


def make_narrow(bucket: Bucket):
    """Give a bucket a buffer for narrow gradients."""
    bucket.flat = bucket.flat.to(bucket.params[0].grad_dtype)
    sizes = [param.numel() for param in bucket.params]
    bucket.views = [part.view_as(p) for part, p in zip(bucket.flat.split(sizes), bucket.params, strict=True)]


@dataclass
class Flags:
    """The dtype of gradients."""

    grad_dtype: Literal["fp32", "same"] = "fp32"  # of gradients in 16-bit training: fp32 sums, or 16 bits as well


NEEDS = [("grad_dtype", "dtype", "bf16", "fp16", "auto")]


def attach(config: Any, parts: Parts):
    """Change dtypes that the optimizer has chosen: of gradients, and of their buffers."""
    if config.grad_dtype == "fp32":
        return
    for param in parts.model.parameters():
        param.grad_dtype = param.dtype
    if parts.units:
        parts.around(parts.sync, "finish", partial(widen, parts.units), by=__name__)
    else:
        parts.around(parts.optimizer, "gradients", partial(gradients, parts.optimizer), by=__name__)
        parts.around(parts.optimizer, "zero_grad", partial(zero_grad, parts.optimizer), by=__name__)
    for unit in parts.units:
        parts.instead(unit, "make_room", partial(make_room, unit), by=__name__)
    for bucket in parts.sync.buckets if isinstance(parts.sync, BucketSync) else ():
        make_narrow(bucket)
