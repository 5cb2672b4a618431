"""Splits backward into dx (B) and dW (W), for every --schedule with W (zero_bubble.py, dualpipe.py).

For y = x W^T, B computes dx = dy W, for which the previous rank waits. No rank waits for dW = dy^T x, so the action W
computes it in gaps (Qi et al. 2023, "Zero Bubble"). x and dy of matrices are kept until W, attention's graph until B.

B asks autograd for the gradients of a stage's input and of all its parameters except the layers' matrices, whose
backward only stores a function that computes dW. W runs these functions, and adds all gradients of layers to `.grad`.
B adds those of embedding, final norm and head. In step 6 this would be in `backward` and one more method.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

import step06_pipeline as step06
from common.model import wide
from common.schedules import Place
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from extras.variants.step07.grouped_matmul import Product, ProductLinear, of_experts
from step04_tp_sp import COLUMNS, ROWS

UNIT = dict(F=1, B=1, W=1)  # how long the actions of a schedule with W take
step06.ACTS["W"] = "weights"
Left = tuple[nn.Parameter, Callable[[], Tensor]]  # B stores this for W: a parameter, and a function for its gradient


def parameters_of(model: nn.Module, place: Place) -> list[nn.Parameter]:
    """Returns the trained parameters of a stage, each once, even a matrix that is both embedding and head."""
    trunk = model.model
    first, last = [trunk.embed_tokens], [trunk.norm, model.lm_head]
    layers = [trunk.layers[str(n)] for n in place.layers]
    modules = first * (place.before is None) + layers + last * (place.after is None)
    return list(dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad))


class SplitBackward:
    """Computes the actions B and W of a pipeline."""

    def __init__(self, config: Any, parts: Parts):
        self.pipeline, self.expert_matmul = parts.pipeline, getattr(config, "expert_matmul", "each")
        self.left: list[Left] = []  # filled by the linear layers' backward, in the B that is running
        self.waiting: dict[tuple[int, int], list[Left]] = {}  # (micro-batch, stage) -> what its B has left
        layers, model = parts.model.model.layers, parts.model
        self.layer = {param: int(n) for n, layer in layers.items() for param in layer.parameters()}
        linears = [one for name, one in layers.named_modules() if name.split(".")[-1] in COLUMNS + ROWS]
        for linear in linears:
            parts.instead(linear, "forward", torch.compiler.disable(partial(self.linear, linear)), by=__name__)
        split = {linear.weight for linear in linears}
        mine = {s: place for s, place in enumerate(parts.pipeline.places) if place.rank == parts.pipeline.group.rank}
        self.leaves = {s: [p for p in parameters_of(model, place) if p not in split] for s, place in mine.items()}
        self.tied = model.lm_head.weight if model.config.tied and {0, parts.way[-1]} <= mine.keys() else None
        self.of_head: Tensor | None = None  # the head's gradient, kept until the embedding's is computed

    def linear(self, module: nn.Module, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """Replaces the forward of a linear layer or, with `counts`, of an `ExpertLinear`."""
        product = Product() if counts is None else of_experts(self.expert_matmul, counts)
        return ProductLinear.apply(x, module.weight, product, lambda *left: self.left.append(left))

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """B: from a stage's output gradient (None for a loss), compute its input gradient (None for tokens)."""
        x, edge = self.pipeline.graphs.pop((i, stage))
        leaves, inputs = self.leaves[stage], [x] if x.requires_grad else []  # tokens have no gradient
        gradients = torch.autograd.grad((edge,), leaves + inputs, None if dy is None else (dy,))
        left, self.left = self.left, []
        for param, gradient in zip(leaves, gradients, strict=False):
            if param in self.layer:
                left.append((param, lambda gradient=gradient: gradient))
            elif param is self.tied:
                self.add_tied(gradient, stage)
            else:
                self.add(param, gradient)
        self.waiting[i, stage] = sorted(left, key=lambda one: -self.layer[one[0]])  # last layer first, as ZeRO expects
        return gradients[-1] if inputs else None

    def weights(self, i: int, stage: int, _input: None):
        """W: compute gradients of matrices, and add those of layers (with --ep-overlap, several for a parameter)."""
        left = self.waiting.pop((i, stage))
        for param in dict.fromkeys(param for param, _ in left):
            self.add(param, reduce(torch.add, [gradient() for one, gradient in left if one is param]))

    def add(self, param: nn.Parameter, gradient: Tensor):
        """Add a gradient to `.grad`; hooks run as usual."""
        torch.autograd.backward((param,), (gradient,))

    def add_tied(self, gradient: Tensor, stage: int):
        """Add a tied matrix's two gradients in one call, as hooks expect: the head's waits for the embedding's."""
        self.of_head = gradient.to(wide(gradient.dtype)) if self.of_head is None else self.of_head.add_(gradient)
        if stage == 0:
            whole, self.of_head = self.of_head, None
            self.add(self.tied, whole.to(gradient.dtype))


SPLIT = ("zb-h1", "zb-h2", "dualpipe", "zbv", "dualpipev", "v-half", "v-min")  # schedules with W
ITSELF = "W computes the gradients of weights in its own way; leave one out"
REFUSES = [Refusal({"schedule": SPLIT, other: SET}, ITSELF) for other in ("tp_overlap", "fused_gradients")]


def attach(config: Any, parts: Parts):
    """Split backward if the schedule has W."""
    if "W" in parts.kinds:
        split = SplitBackward(config, parts)
        parts.instead(parts.pipeline, "backward", split.backward, by=__name__)
        parts.pipeline.weights = split.weights
