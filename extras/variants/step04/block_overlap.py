"""Hides collectives of tensor parallelism behind weight gradients (`--tp-overlap`; Korthikanti et al. 2022).

In step 4 the backward of a block ends with dW of q, k, v, then dx, then the collective of dx, for which all ranks wait.
But dW does not need it. So here one function computes f and the matrices after it, and overlaps the two:

    dx ->  all-reduce, or with --sp reduce-scatter  ---------.
           dW of q, k, v (or gate, up)                       '-> the next block's backward

With --sp, f has gathered s tokens from s/n, and autograd would keep all s for dW. Here a block keeps its s/n, and
gathers again in backward while dx is computed: two more all-gathers a layer and micro-batch, for 1/n of the memory.

In step 4, f would compute q_proj, k_proj and v_proj, too, as `enter` does below. Experts stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, all_gather, all_reduce, reduce_scatter
from extras.variants import Parts
from step04_tp_sp import COLUMNS

Ending = Callable[[], Tensor]


def start_keep(x: Tensor, group: Group) -> Ending:
    """Starts nothing: the result is x."""
    return lambda: x.view_as(x)  # a view, as `unchanged` of step 4


def start_total(x: Tensor, group: Group) -> Ending:
    """All-reduce: the sum of every rank's x, in a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    pending = all_reduce(x, group)
    return lambda: pending.wait() or x


def start_gather(x: Tensor, group: Group) -> Ending:
    """All-gather: [batch, seq/n, dim] of every rank -> [batch, seq, dim]."""
    parts, x = x.new_empty(group.size, *x.shape), x.contiguous()
    pending = all_gather(parts.view(-1), x.view(-1), group)
    return lambda: pending.wait() or parts.movedim(0, 1).flatten(1, 2)


def start_scatter(x: Tensor, group: Group) -> Ending:
    """Reduce-scatter: [batch, seq, dim] on every rank -> this rank's tokens of the sum, [batch, seq/n, dim]."""
    parts = x.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()
    part = torch.empty_like(parts[0])
    pending = reduce_scatter(part.view(-1), parts.view(-1), group)
    return lambda: pending.wait() or part


class EnterLinears(torch.autograd.Function):
    """Computes f, the entry of a block, and the column-parallel matrices that read its output."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, gather: Callable, reduce: Callable, *weights: Tensor) -> tuple:
        """Multiplies: x [batch, seq/n (SP) or seq, dim], weights [out/n, dim] -> one output each, [batch, seq, out/n].

        `gather` starts the forward of f, and `reduce` its backward: functions such as `start_gather`.
        """
        ctx.group, ctx.gather, ctx.reduce = group, gather, reduce
        ctx.save_for_backward(x, *weights)
        full = gather(x, group)()
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """The gradients of the outputs -> those of x and of the weights."""
        x, *weights = ctx.saved_tensors
        gathering = ctx.gather(x, ctx.group)
        dx = grads[0] @ weights[0]  # while x is gathered
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            dx.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
        reducing = ctx.reduce(dx, ctx.group)  # while dW are computed
        full, wanted = gathering().flatten(0, -2), ctx.needs_input_grad[4:]
        dws = [dy.flatten(0, -2).T @ full if want else None for dy, want in zip(grads, wanted, strict=True)]
        return reducing(), None, None, None, *dws


def enter(
    linears: list[nn.Linear], boxes: list[list], group: Group, gather: Callable, reduce: Callable, x: Tensor
) -> Tensor:
    """Replaces f: compute the outputs of the block's first matrices, and put each into its box, for `hand_over`."""
    outputs = EnterLinears.apply(x, group, gather, reduce, *(linear.weight for linear in linears))
    for box, output in zip(boxes, outputs, strict=True):
        box.append(output)
    return x


def hand_over(box: list[Tensor], _x: Tensor) -> Tensor:
    """Replaces the forward of a first matrix: return its output, and empty the box, so that it can be freed."""
    return box.pop()


@dataclass
class Flags:
    """Overlap in tensor parallelism."""

    tp_overlap: bool = False  # hide collectives behind weight gradients; with --sp keep s/n tokens and gather again


NEEDS = [("tp_overlap", "tp")]


def attach(config: Any, parts: Parts):
    """Replace f and the first matrices of all blocks."""
    if not config.tp_overlap:
        return
    starts = (start_gather, start_scatter) if config.sp else (start_keep, start_total)
    for layer in parts.model.model.layers.values():
        for block in (layer.self_attn, layer.mlp):
            linears = [child for name, child in block.named_children() if name in COLUMNS]
            boxes = [[] for _ in linears]
            for linear, box in zip(linears, boxes, strict=True):
                parts.instead(linear, "forward", partial(hand_over, box), by=__name__)
            if linears:  # experts have none
                parts.instead(block, "enter", partial(enter, linears, boxes, parts.mesh["tp"], *starts), by=__name__)
