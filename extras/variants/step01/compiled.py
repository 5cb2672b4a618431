"""Compiles layers (`--compile`): torch.compile fuses norms, RoPE, SiLU and additions into a few kernels.

All layers share one graph. It breaks where a layer communicates (steps 4, 5, 7); TORCH_LOGS=graph_breaks shows where.
In step 1 this would follow `RECOMPUTE[config.recompute](model)`, so recomputation is part of the graph. That is
impossible if the graph breaks: then recomputation stays outside, and each graph of a layer is recomputed to its end.
(Without --compile the product with down_proj is not recomputed, because backward does not need its output.)
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

    Dynamo inspects `.grad`. If that is fp32 and the weight bf16, it compiles no operation with this weight. In steps 2
    to 7, `.grad` is an fp32 view of a buffer from the beginning.
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
    """Compile the forward of every layer inside its hooks. Where messages break its graph, recomputation stays outside.

    The function that counts messages stays outside graphs, where sizes may be symbols, which it cannot add up.
    """
    if not config.compile:
        return
    broken = max(getattr(config, dim, 1) for dim in ("tp", "cp")) > 1
    for layer in parts.model.model.layers.values():
        forward = layer.forward  # partial(checkpoint, ...) of step 1, or a like one that offloads
        outside = config.recompute == "offload" or (config.recompute == "full" and broken)
        compiled = torch.compile(forward.args[0] if outside else forward)
        graph = partial(without_gradients, list(layer.parameters()), compiled)
        graph = partial(forward.func, graph, **forward.keywords) if outside else graph
        parts.instead(layer, "forward", graph, by=__name__)
    parts.instead(parts.run, "count", torch.compiler.disable(parts.run.count), by=__name__)
