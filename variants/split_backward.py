"""Backward in two parts, for every --schedule with W (variants/zero_bubble.py, dualpipe.py, zb_auto.py).

For y = x W^T, B finds dx = dy W, for which the rank before waits. W finds dW = dy^T x, for which nobody waits: it fills
gaps (Qi et al. 2023, "Zero Bubble"). A layer's inputs and dy stay until then, its attention matrices do not.

In step 6, `backward` would ask autograd for the gradients of x and the norms only (`torch.autograd.grad`), a layer's
matrices would leave their dW in a list, and a second method, for the action W, would add all of these to `.grad`.
Embedding, final norm and head are as ever: their gradients are added in B.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step06_pipeline as step06
from common import UserError
from common.model import wide
from common.schedules import SCHEDULES
from step04_tp_sp import COLUMNS, ROWS
from variants import Parts
from variants.grouped_matmul import PRODUCTS

SINCE = step06.Config
step06.ACTS["W"] = "weights"


class Product(NamedTuple):
    """How y, dx and dW are found: of (x, W), (dy, W) and (dy, x)."""

    y: Callable[[Tensor, Tensor], Tensor] = F.linear
    dx: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    dw: Callable[[Tensor, Tensor], Tensor] = lambda dy, x: dy.flatten(0, -2).T @ x.flatten(0, -2)


def of_experts(way: str, counts: list[int]) -> Product:
    """The same for step 7's experts: x [n, in], `counts` of its rows for each; W [experts, out, in]."""
    matmul, outer = (partial(function, counts=counts) for function in PRODUCTS[way])
    return Product(lambda x, w: matmul(x, w.mT), matmul, outer)


class SplitLinear(torch.autograd.Function):
    """A linear layer whose backward finds dx, and calls `later` with its weight and a function that finds dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, product: Product, later: Callable) -> Tensor:
        """x [..., in] -> [..., out]."""
        ctx.save_for_backward(x)
        ctx.arguments = weight, product, later  # the parameter itself, wherever its values are by then
        return product.y(x, weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy -> dx."""
        (weight, product, later), x, dy = ctx.arguments, ctx.saved_tensors[0].detach(), dy.contiguous()
        if weight.requires_grad:
            later(weight, lambda: product.dw(dy, x))
        return product.dx(dy, weight) if ctx.needs_input_grad[0] else None, None, None, None


class SplitBackward:
    """The acts B and W of a pipeline."""

    def __init__(self, config: Any, parts: Parts):
        self.way = getattr(config, "expert_matmul", "each")
        model, pipeline = parts.model, parts.pipeline
        self.pipeline, self.waiting = pipeline, {}  # (micro-batch, stage) -> [(parameter, function for its gradient)]
        self.found: list[tuple[nn.Parameter, Callable]] = []  # what a B has left so far
        split, trunk, places = set(), model.model, pipeline.places
        for name, module in trunk.layers.named_modules():
            if name.split(".")[-1] in COLUMNS + ROWS:
                linear = torch.compiler.disable(partial(self.linear, module))
                parts.instead(module, "forward", linear, by=__name__)
                split.add(module.weight)
        self.layer = {param: int(n) for n, layer in trunk.layers.items() for param in layer.parameters()}
        self.leaves = {}  # by stage: the parameters whose gradients B finds
        for stage, (rank, layers, before, after) in enumerate(places):
            if rank == pipeline.group.rank:
                held = [*([trunk.embed_tokens] if before is None else []), *(trunk.layers[str(n)] for n in layers)]
                held += [trunk.norm, model.lm_head] if after is None else []
                params = dict.fromkeys(param for part in held for param in part.parameters() if param.requires_grad)
                self.leaves[stage] = [param for param in params if param not in split]
        self.last, self.held = 0, None  # where the way of stage 0 ends; the gradient of its tied matrix, see `add`
        while places[self.last].after is not None:
            self.last = places[self.last].after
        self.tied = model.lm_head.weight if model.config.tied and {0, self.last} <= self.leaves.keys() else None

    def linear(self, module: nn.Module, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """In the place of a linear layer's forward, or of the experts'."""
        product = Product() if counts is None else of_experts(self.way, counts)
        return SplitLinear.apply(x, module.weight, product, lambda *left: self.found.append(left))

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """B: from the gradient of a stage's output, or from the loss, to that of its input."""
        x, edge = self.pipeline.graphs.pop((i, stage))
        leaves = [*self.leaves[stage], *([x] if x.requires_grad else [])]
        gradients = torch.autograd.grad((edge,), leaves, None if dy is None else (dy,))
        found, self.found = self.found, []
        for param, gradient in zip(self.leaves[stage], gradients, strict=False):
            if param in self.layer:
                found.append((param, lambda gradient=gradient: gradient))
            else:
                self.add(param, gradient, stage)
        self.waiting[i, stage] = sorted(found, key=lambda left: -self.layer[left[0]])  # so ZeRO's units end in turn
        return gradients[-1] if x.requires_grad else None

    def add(self, param: nn.Parameter, gradient: Tensor, stage: int):
        """Add to `.grad`. That of a tied matrix whose two stages are both here gets one addition a micro-batch, too.

        The head's part waits until the embedding's is there.
        """
        if param is self.tied and self.last:
            self.held = gradient.to(wide(gradient.dtype)) + (0 if self.held is None else self.held)
            if stage:
                return
            gradient, self.held = self.held.to(gradient.dtype), None
        torch.autograd.backward((param,), (gradient,))  # hooks see it as ever

    def weights(self, i: int, stage: int, _input: None):
        """W: add what B has left of a micro-batch."""
        for param, gradient in self.waiting.pop((i, stage)):
            torch.autograd.backward((param,), (gradient(),))


def check(config: Any, world: int):
    """What finds weight gradients in a way of its own has no place beside W. Raises UserError."""
    schedule = SCHEDULES[config.schedule](config)
    if all(action.kind != "W" for action in schedule.actions(config.pp, 2 * config.pp, schedule.v, 0)):
        return
    if config.tp_overlap:
        raise UserError(f"--schedule {config.schedule} has weight gradients on their own: --no-tp-overlap")


def attach(config: Any, parts: Parts):
    """Split what the pipeline's schedule has in two parts."""
    if "W" in parts.kinds:
        split = SplitBackward(config, parts)
        parts.instead(parts.pipeline, "backward", split.backward, by=__name__)
        parts.pipeline.weights = split.weights
