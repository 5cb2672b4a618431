"""Backward in two parts, for every --schedule with W (zero_bubble.py, dualpipe.py, zb_auto.py, v_schedules.py).

For y = x W^T, B computes dx = dy W, for which the rank before waits. W computes dW = dy^T x, for which no rank waits,
so it fills gaps (Qi et al. 2023, "Zero Bubble"). A layer's inputs and dy are kept until then, attention's graph is not.

In step 6, `backward` would ask autograd for the gradients of x and of all parameters but the matrices of layers, which
would leave a function for each dW in a list; a second method, for the action W, would add all of these to `.grad`. The
gradients of embedding, final norm and head are added in B.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step06_pipeline as step06
from common.model import wide
from common.schedules import Place
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from extras.variants.step07.grouped_matmul import PRODUCTS
from step04_tp_sp import COLUMNS, ROWS

SINCE = step06.Config
UNIT = dict(F=1, B=1, W=1)  # how long the actions of a schedule with W take
step06.ACTS["W"] = "weights"


class Product(NamedTuple):
    """How y, dx and dW are found: of (x, W), (dy, W) and (dy, x)."""

    y: Callable[[Tensor, Tensor], Tensor] = F.linear
    dx: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    dw: Callable[[Tensor, Tensor], Tensor] = lambda dy, x: dy.flatten(0, -2).T @ x.flatten(0, -2)


def of_experts(way: str, counts: list[int]) -> Product:
    """The products of step 7's experts: x [n, in], `counts` of its rows for each; W [experts, out, in]."""
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


class Left(NamedTuple):
    """What B leaves for W: a parameter, and a function that finds its gradient."""

    param: nn.Parameter
    gradient: Callable[[], Tensor]


def parameters_of(model: nn.Module, place: Place) -> list[nn.Parameter]:
    """The parameters that train in a stage, each once, also a tied matrix."""
    trunk = model.model
    first, last = [trunk.embed_tokens], [trunk.norm, model.lm_head]
    layers = [trunk.layers[str(n)] for n in place.layers]
    modules = first * (place.before is None) + layers + last * (place.after is None)
    return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))


class SplitBackward:
    """The acts B and W of a pipeline.

    B asks autograd for the gradients of a stage's input and of all its parameters but the linear layers' weights. What
    belongs to layers waits for W: these gradients, and the functions that the linear layers have left meanwhile.
    """

    def __init__(self, config: Any, parts: Parts):
        self.pipeline, self.expert_matmul = parts.pipeline, getattr(config, "expert_matmul", "each")
        self.left: list[Left] = []  # by the linear layers, in the B that runs now
        self.waiting: dict[tuple[int, int], list[Left]] = {}  # by micro-batch and stage: what its B has left
        layers, model = parts.model.model.layers, parts.model
        self.layer = {param: int(n) for n, layer in layers.items() for param in layer.parameters()}
        linears = [one for name, one in layers.named_modules() if name.split(".")[-1] in COLUMNS + ROWS]
        for linear in linears:
            parts.instead(linear, "forward", torch.compiler.disable(partial(self.linear, linear)), by=__name__)
        split = {linear.weight for linear in linears}
        mine = {s: place for s, place in enumerate(parts.pipeline.places) if place.rank == parts.pipeline.group.rank}
        self.leaves = {s: [p for p in parameters_of(model, place) if p not in split] for s, place in mine.items()}
        self.tied = model.lm_head.weight if model.config.tied and {0, parts.way[-1]} <= mine.keys() else None
        self.of_head: Tensor | None = None  # its gradient as head, until that as embedding is there

    def linear(self, module: nn.Module, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """Replaces a linear layer's forward, or the experts'."""
        product = Product() if counts is None else of_experts(self.expert_matmul, counts)
        return SplitLinear.apply(x, module.weight, product, lambda *left: self.left.append(Left(*left)))

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """B: from the gradient of a stage's output, or from the loss, to that of its input."""
        x, edge = self.pipeline.graphs.pop((i, stage))
        leaves, inputs = self.leaves[stage], [x] if x.requires_grad else []  # tokens have no gradient
        gradients = torch.autograd.grad((edge,), leaves + inputs, None if dy is None else (dy,))
        left, self.left = self.left, []
        for param, gradient in zip(leaves, gradients, strict=False):
            if param in self.layer:
                left.append(Left(param, lambda gradient=gradient: gradient))
            elif param is self.tied:
                self.add_tied(gradient, stage)
            else:
                self.add(param, gradient)
        self.waiting[i, stage] = sorted(left, key=lambda one: -self.layer[one.param])  # so ZeRO's units end in turn
        return gradients[-1] if inputs else None

    def weights(self, i: int, stage: int, _input: None):
        """W: add what B has left of a micro-batch."""
        for param, gradient in self.waiting.pop((i, stage)):
            self.add(param, gradient())

    def add(self, param: nn.Parameter, gradient: Tensor):
        """To `.grad`; hooks run as usual."""
        torch.autograd.backward((param,), (gradient,))

    def add_tied(self, gradient: Tensor, stage: int):
        """A tied matrix whose two ends are here gets one addition a micro-batch; in B its part as head comes first."""
        self.of_head = gradient.to(wide(gradient.dtype)) if self.of_head is None else self.of_head.add_(gradient)
        if stage == 0:
            whole, self.of_head = self.of_head, None
            self.add(self.tied, whole.to(gradient.dtype))


SPLIT = ("zb-h1", "zb-h2", "zb-auto", "dualpipe", "zbv", "dualpipev", "v-half", "v-min")  # schedules with W
ITSELF = "W finds the gradients of weights by itself; leave one out"
REFUSES = [
    Refusal(dict(schedule=SPLIT, tp_overlap=SET), ITSELF),
    Refusal(dict(schedule=SPLIT, fused_gradients=SET), ITSELF),
]


def attach(config: Any, parts: Parts):
    """Split what the pipeline's schedule has in two parts."""
    if "W" in parts.kinds:
        split = SplitBackward(config, parts)
        parts.instead(parts.pipeline, "backward", split.backward, by=__name__)
        parts.pipeline.weights = split.weights
