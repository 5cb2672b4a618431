"""Hides collectives of tensor parallelism behind weight gradients (`--tp-overlap`; Korthikanti et al. 2022).

In step 4 the backward of a block ends with dW and dx, the gradients of its first matrices and of their input, and then
the reduce-scatter of dx, during which all ranks wait. But dW does not depend on that sum. So here one autograd function
computes f (the block's all-gather) and multiplies by these matrices; its backward overlaps dW and the reduce-scatter:

    dx ->  reduce-scatter ------------.
           dW of q, k, v (or gate, up) '-> the next block's backward

On n ranks, f gathers all s tokens of a sequence, and autograd would keep them for dW. Here a rank keeps only its s/n
tokens, and gathers again while backward computes dx: two more all-gathers a layer and micro-batch, for 1/n of the
memory. In step 4, f would also compute these products, as `enter` does below. Experts have no f, and stay as they are.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, all_gather, reduce_scatter
from extras.variants import Parts
from step04_tp_sp import COLUMNS, gather_tokens


class EnterLinears(torch.autograd.Function):
    """Applies f, which gathers a block's input, and then the column-parallel linear layers that read f's output."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, *weights: Tensor) -> tuple:
        """Gathers x [batch, seq/n, dim]; multiplies it by each weight [out/n, dim] -> outputs [batch, seq, out/n]."""
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        full = gather_tokens(x, group)
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """Computes the gradients of x and of the weights from the gradients of the outputs."""
        (x, *weights), group = ctx.saved_tensors, ctx.group
        x, parts = x.contiguous(), x.new_empty(group.size, *x.shape)
        gathering = all_gather(parts.view(-1), x.view(-1), group)
        dx = grads[0] @ weights[0]  # while x is gathered
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            dx.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
        dx_parts = dx.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
        ours = torch.empty_like(x)
        reducing = reduce_scatter(ours.view(-1), dx_parts.view(-1), group)  # while dW are computed
        gathering.wait()
        full, wanted = parts.movedim(0, 1).flatten(0, 2), ctx.needs_input_grad[2:]
        dws = [dy.flatten(0, -2).T @ full if want else None for dy, want in zip(grads, wanted, strict=True)]
        reducing.wait()
        return ours, None, *dws


def enter(linears: list[nn.Linear], boxes: list[list], group: Group, x: Tensor) -> Tensor:
    """Replaces f: compute the outputs of the block's first linear layers, and put each into a box, for `hand_over`."""
    outputs = EnterLinears.apply(x, group, *(linear.weight for linear in linears))
    for box, output in zip(boxes, outputs, strict=True):
        box.append(output)
    return x


def hand_over(box: list[Tensor], _x: Tensor) -> Tensor:
    """Replaces the forward of a linear layer: return the output that `enter` put into the box, and empty the box."""
    return box.pop()


@dataclass
class Flags:
    """Overlap in tensor parallelism."""

    tp_overlap: bool = False  # with SP: hide collectives behind weight gradients; keep s/n tokens, and gather again


NEEDS = [("tp_overlap", "tp"), ("tp_overlap", "sp", True)]


def attach(config: Any, parts: Parts):
    """Replace f, and the forward of the first linear layers, in all blocks."""
    if not config.tp_overlap:
        return
    for layer in parts.model.model.layers.values():
        for block in (layer.self_attn, layer.mlp):
            linears = [child for name, child in block.named_children() if name in COLUMNS]
            boxes = [[] for _ in linears]
            for linear, box in zip(linears, boxes, strict=True):
                parts.instead(linear, "forward", partial(hand_over, box), by=__name__)
            if linears:  # experts have none
                parts.instead(block, "enter", partial(enter, linears, boxes, parts.mesh["tp"]), by=__name__)
