"""A variant for every step: --fuse-gradients adds the weight gradients of linear layers where they add up, at once.

Autograd makes a product dy^T x in 16 bits, casts it, and adds it to the fp32 sum in `.grad`: 2 + (2 + 4) + (4 + 4 + 4)
= 20 bytes for each parameter and micro-batch. A GPU's matmul can add its fp32 product to the sum itself: 4 + 4 bytes,
while it computes (Megatron-LM's gradient_accumulation_fusion). The product is then not rounded to 16 bits either.

It takes the linear layers of attention and MLPs, plain or cut by step 4, once their `.grad` is there. Embedding, head,
norms and experts stay with autograd. Its hooks on `.grad` run as ever, after the addition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, Pending
from common.model import Decoder, add_product


class FusedLinear(torch.autograd.Function):
    """Linear layers of one input, as step 4's ColumnParallelLinear, whose backward adds dW to `.grad` by itself."""

    @staticmethod
    def forward(
        ctx, x: Tensor, group: Group | None, gather: Callable, reduce: Callable, *weights: nn.Parameter
    ) -> tuple[Tensor, ...]:
        """x [batch, seq, in], weights [out, in] -> [batch, seq, out] for each; `gather` x before, `reduce` dx after."""
        ctx.arguments = group, gather, reduce, weights  # themselves: a saved one may come back without its `.grad`
        ctx.save_for_backward(x)
        full = gather(x, group).wait()
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """dy of each -> dx; and dW, where there is no `.grad` yet. Gathers beside dx, reduces beside dW."""
        (group, gather, reduce, weights), (x,) = ctx.arguments, ctx.saved_tensors
        wanted, flat = ctx.needs_input_grad[4:], [grad.flatten(0, -2) for grad in grads]
        gathering = gather(x, group)
        if ctx.needs_input_grad[0]:
            dx = flat[0] @ weights[0]
            for dy, weight in zip(flat[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            reducing = reduce(dx.unflatten(0, grads[0].shape[:-1]), group)
        full = gathering.wait().flatten(0, -2)
        dW = [weight_gradient(w, dy, full) if want else None for w, dy, want in zip(weights, flat, wanted, strict=True)]
        return reducing.wait() if ctx.needs_input_grad[0] else None, None, None, None, *dW


def weight_gradient(weight: nn.Parameter, dy: Tensor, x: Tensor) -> Tensor | None:
    """dW of dy [tokens, out] and x [tokens, in]: added to `weight.grad`, or returned if that is not there yet."""
    if weight.grad is None:
        return dy.T @ x
    add_product(weight.grad, dy.T, x)
    return None


def stay(x: Tensor, group: Group | None) -> Pending:
    """No communication: the `gather` and the `reduce` of layers that are not cut by columns."""
    return Pending(group, []).returning(lambda: x.view_as(x))


def fused_project(project: Any, x: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Instead of step 4's `project` with --tp-overlap."""
    weights = [linear.weight for linear in linears]
    return list(FusedLinear.apply(x, project.group, project.gather, project.reduce, *weights))


def fused_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """Instead of the forward of a linear layer, plain or (with `add`) cut by rows."""
    (y,) = FusedLinear.apply(x, None, stay, stay, linear.weight)
    return linear.add(y) if hasattr(linear, "add") else y


def fuse_gradients(model: Decoder):
    """Take the linear layers of all blocks, in place."""
    for layer in model.model.layers.values():
        for block in layer.modules():
            project = getattr(block, "project", None)
            if getattr(project, "overlap", False):
                block.project = partial(fused_project, project)
            if isinstance(block, nn.Linear) or hasattr(block, "add"):
                block.forward = partial(fused_linear, block)
