"""Layers as compiled graphs (`--compile`): torch.compile fuses norms, RoPE, SiLU and additions into a few kernels.

All layers share one graph. It breaks where a layer communicates (steps 4, 5, 7); a line after the first step says how
often. In step 1 this would follow `RECOMPUTE[config.recompute](model)`, so recomputation is part of the graph. Across a
break that is impossible: there each graph of a layer is recomputed to its end. (Without --compile the last matrix,
down_proj, is not recomputed, because backward does not need its output.)
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from extras.variants import Parts
from extras.variants.record import HAS, SET, Refusal


class Breaks:
    """Where graphs break. Dynamo itself says nothing: it runs the operators one by one."""

    def __init__(self):
        from torch._dynamo.utils import counters  # takes seconds to import

        self.said = False
        self.counters, self.before = counters, {kind: Counter(counters[kind]) for kind in ("graph_break", "stats")}

    def notes(self) -> list[str]:
        """A line, the first time that one has broken: how many graphs, with how many calls, and why."""
        why, stats = (Counter(self.counters[kind]) - self.before[kind] for kind in ("graph_break", "stats"))
        reasons = Counter()
        for text, times in why.items():
            reasons[text.strip().split("\n")[0]] += times
        if self.said or not reasons:
            return []
        self.said, each = True, "; ".join(f"{text} (x{times})" for text, times in reasons.most_common())
        graphs = f"{stats['unique_graphs']} graphs with {stats['calls_captured']} calls in all"
        return [f"--compile: the layers are broken into {graphs}, by: {each}"]


def without_gradients(params: list[nn.Parameter], forward: Callable, *inputs: Tensor, **how: Any) -> Tensor:
    """A layer's forward, during which its parameters have no `.grad`.

    Dynamo looks at it, and where it is fp32 and the weight bf16 (in steps 2 to 7 a view of a buffer, from before the
    first forward on) it gives up each operation that has this weight.
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
    Refusal(dict(compile=SET, recompute=("elementwise",), tp=SET), MESSAGE, None),
    Refusal(dict(compile=SET, recompute=("elementwise",), cp=SET), MESSAGE, None),
]


def attach(config: Any, parts: Parts) -> Breaks | None:
    """Hooks on a layer stay outside; where messages break its graph, what recomputes it, too."""
    if not config.compile:
        return None
    broken = max(getattr(config, dim, 1) for dim in ("tp", "cp")) > 1
    for layer in parts.model.model.layers.values():
        params, forward = list(layer.parameters()), layer.forward
        if config.recompute == "full" and broken:  # step 1's partial(checkpoint, forward, ...)
            graph = partial(without_gradients, params, torch.compile(forward.args[0]))
            graph = partial(forward.func, graph, **forward.keywords)
        else:
            graph = partial(without_gradients, params, torch.compile(forward))
        parts.instead(layer, "forward", graph, by=__name__)
    # What looks on at messages is no part of a graph: there sizes may be symbols, which it cannot add up.
    parts.instead(parts.run, "count", torch.compiler.disable(parts.run.count), by=__name__)
    return Breaks()
