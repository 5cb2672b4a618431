"""Compiles layers (`--compile`): torch.compile fuses norms, RoPE, SiLU and additions into a few kernels.

All layers share one graph. It breaks where a layer communicates (steps 4, 5, 7); TORCH_LOGS=graph_breaks shows where.
In step 1 layers would be compiled after `RECOMPUTE[config.recompute](model)`, so that recomputation is part of the
graph. If the graph breaks, this is impossible: recomputation stays outside, and runs each graph of a layer to its end,
even the product with down_proj. (Without --compile it stops before that product, whose output backward does not need.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from extras.variants import Parts
from extras.variants.record import HAS, SET, Refusal


def without_gradients(params: list[nn.Parameter], forward: Callable, *inputs: Tensor, **how: Any) -> Tensor:
    """Run a layer's forward while its parameters have no `.grad`.

    Dynamo, the tracer of torch.compile, inspects `.grad`. If `.grad` is fp32 and the weight bf16, Dynamo compiles no
    operation with this weight. From chapter 2 on, `.grad` is by default an fp32 view of a buffer, even before backward.
    """
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        return forward(*inputs, **how)
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


@dataclass
class Flags:
    """Compiled layers."""

    compile: bool = False  # torch.compile each decoder layer


ROUTER = "the graph of a layer breaks at its router, so nothing would be compiled; use --recompute none"
MESSAGE = "the graph of a layer breaks at each message, so nothing would be compiled; use --recompute full or none"
REFUSES = [
    Refusal(dict(compile=SET, recompute=("full", "elementwise"), experts=HAS), ROUTER, None),
    *(Refusal({"compile": SET, "recompute": ("elementwise",), dim: SET}, MESSAGE, None) for dim in ("tp", "cp")),
]


def attach(config: Any, parts: Parts):
    """Compile each layer's forward, but not its hooks. If messages break the graph, `checkpoint` stays outside it.

    `run.count`, which adds up bytes of messages, is not compiled: in a graph, sizes may be symbols, not numbers.
    """
    if not config.compile:
        return
    broken = max(getattr(config, dim, 1) for dim in ("tp", "cp")) > 1
    for layer in parts.model.model.layers.values():
        forward = layer.forward  # if it recomputes or offloads: a partial, such as step 1's partial(checkpoint, ...)
        outside = config.recompute == "offload" or (config.recompute == "full" and broken)
        compiled = torch.compile(forward.args[0] if outside else forward)
        graph = partial(without_gradients, list(layer.parameters()), compiled)
        graph = partial(forward.func, graph, **forward.keywords) if outside else graph
        parts.instead(layer, "forward", graph, by=__name__)
    parts.instead(parts.run, "count", torch.compiler.disable(parts.run.count), by=__name__)
