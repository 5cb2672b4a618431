"""Lets matmuls accumulate gradients (`--fused-gradients`), as Megatron-LM's "gradient accumulation fusion" does.

For y = x W^T, autograd computes dW = dy^T x in 16 bits, converts it to fp32, and adds that to `.grad`. These operations
move 2, 2 + 4 and 4 + 4 + 4 bytes for each number of dW. A matmul that accumulates in fp32 moves 4 + 4 bytes, and does
not round dW to 16 bits first. Also, q, k and v share one input, as do gate and up: autograd computes one dx for each of
them and adds these. Here each matmul adds to the same dx: dx = dv Wv, dx += dk Wk, dx += dq Wq.

This covers the matrices of layers and an untied head. Only CUDA can add a product of 16-bit matrices to fp32; elsewhere
autograd's three operations remain. In step 1, `Optimizer` would replace each `F.linear` by `SummingLinears`.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from extras.variants import Parts
from extras.variants.record import SET, Refusal

TOGETHER = ["q_proj k_proj v_proj", "gate_proj up_proj", "o_proj", "down_proj", "lm_head"]  # in each entry: one input


def adds_to_wide(weight: Tensor) -> bool:
    """Whether the weight's device can multiply matrices of the weight's dtype and add the product to an fp32 tensor."""
    factor, total = weight.new_zeros(8, 8), weight.new_zeros(8, 8, dtype=torch.float32)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def add_product(weight: nn.Parameter, dy: Tensor, x: Tensor, fused: bool):
    """Add dy^T x to `weight.grad`, and call the weight's hooks. The factors are dy [tokens, out] and x [tokens, in]."""
    total, wide = weight.grad, weight.grad_dtype
    if wide == x.dtype:
        weight.grad = dy.T @ x if total is None else total.addmm_(dy.T, x)
    elif fused and total is None:
        weight.grad = torch.mm(dy.T, x, out_dtype=wide)
    elif fused:
        torch.addmm(total, dy.T, x, out_dtype=wide, out=total)
    else:
        product = (dy.T @ x).to(wide)
        weight.grad = product if total is None else total.add_(product)
    for hook in (weight._post_accumulate_grad_hooks or {}).values():
        hook(weight)


class SummingLinears(torch.autograd.Function):
    """Linear layers that share an input. In backward, all add to one dx, and each adds dW to its weight's gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, linears: list[nn.Linear], fused: bool) -> tuple[Tensor, ...]:
        """Maps x [..., in] to each layer's [..., out]. Autograd gets no weights, or it would call their hooks, too."""
        ctx.save_for_backward(x)
        ctx.arguments = [linear.weight for linear in linears], fused  # the parameters: ZeRO 3 may move their values
        return tuple(F.linear(x, linear.weight) for linear in linears)

    @staticmethod
    def backward(ctx, *dys: Tensor):
        """The gradients of the outputs -> the gradient of x."""
        (weights, fused), (x,) = ctx.arguments, ctx.saved_tensors
        rows, dx = x.flatten(0, -2), None
        for weight, dy in reversed([*zip(weights, dys, strict=True)]):
            dy = dy.flatten(0, -2)
            if ctx.needs_input_grad[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if weight.requires_grad:
                add_product(weight, dy, rows, fused)
        return None if dx is None else dx.view_as(x), None, None


def multiply(linears: list[nn.Linear], ready: list[Tensor], fused: bool, i: int, x: Tensor) -> Tensor:
    """Replaces the forward of linears[i]. The first call computes all outputs; `ready` keeps them for later calls."""
    if not torch.is_grad_enabled():
        return F.linear(x, linears[i].weight)
    if i == 0:
        ready[:] = SummingLinears.apply(x, linears, fused)
    return ready.pop(0)


@dataclass
class Flags:
    """Fused gradient accumulation."""

    fused_gradients: bool = False  # matmuls add to gradients in place: of matrices, and of an input that several share


EITHER = "both replace the matmuls of a block; choose one of them"
REFUSES = [Refusal(dict(fused_gradients=SET, tp_overlap=SET), EITHER)]


def attach(config: Any, parts: Parts):
    """Replace the forward of linear layers (not of a tied head or a router); those with the same input run together."""
    if not config.fused_gradients:
        return
    fused = adds_to_wide(next(parts.model.parameters()))
    for names, block in product(TOGETHER, parts.model.modules()):
        linears = [getattr(block, name, None) for name in names.split()]
        if not isinstance(linears[0], nn.Linear) or (names == "lm_head" and parts.model.config.tied):
            continue
        ready: list[Tensor] = []
        for i, linear in enumerate(linears):
            call = partial(multiply, linears, ready, fused, i)
            parts.instead(linear, "forward", torch.compiler.disable(call), by=__name__)
