"""Gradients in 16 bits (`--grad-dtype same`): two bytes less for each parameter, and for what is sent of it.

Autograd then adds micro-batches up in 16 bits, where a small addend vanishes beside a large sum. ZeRO 2 and 3 still add
micro-batches up in fp32, in their slices. The update is in fp32. In step 1 it would be the line that sets `grad_dtype`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from step01_single_gpu import Optimizer
from step02_ddp import BucketSync
from step03_zero import Unit


@dataclass
class Flags:
    """The dtype of gradients."""

    grad_dtype: Literal["fp32", "same"] = "fp32"  # of gradients in 16-bit training: fp32 sums, or 16 bits as well


def widened(optimizer: Optimizer, update: Callable) -> Callable:
    """Step 1's update, which gets the gradients in the masters' dtype."""

    def step(lr: float, factor: float):
        for name, param in optimizer.params.items():
            gradient, param.grad = param.grad, None
            param.grad_dtype = optimizer.masters[name].dtype
            param.grad = gradient.to(param.grad_dtype)
        update(lr, factor)
        for param in optimizer.params.values():
            param.grad_dtype = param.dtype

    return step


def make_room(unit: Unit):
    """Replaces the unit's own: a flat buffer of zeros, as narrow as the weights."""
    unit.gradient = torch.zeros_like(unit.flat)


def attach(config: Any, parts: SimpleNamespace):
    """Change what has been decided by the optimizer: dtypes of gradients, and of the buffers they lie in."""
    model, optimizer, sync = parts.model, parts.optimizer, getattr(parts, "sync", None)
    if config.grad_dtype == "fp32":
        return
    for param in model.parameters():
        param.grad_dtype = param.dtype
    if isinstance(optimizer, Optimizer):
        optimizer.step = widened(optimizer, optimizer.step)
        for bucket in sync.buckets if isinstance(sync, BucketSync) else ():
            bucket.__init__(bucket.params, bucket.group)
        return
    finish = sync.finish

    def widen():
        finish()
        for unit in optimizer.units:
            unit.grad_slice = unit.grad_slice.to(unit.master.dtype)

    sync.finish = widen
    for unit in optimizer.units:
        unit.make_room = make_room.__get__(unit)
