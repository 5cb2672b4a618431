"""Layers as compiled graphs (`--compile`): torch.compile joins norms, RoPE, SiLU and additions into few kernels.

The graph of one layer serves all. Where a layer communicates inside (steps 4, 5, 7) the graph breaks there. In step 1
this would follow `RECOMPUTE[config.recompute](model)`: what recomputes a layer is in its graph.
"""

from dataclasses import dataclass
from typing import Any

import torch

from variants import Parts


@dataclass
class Flags:
    """Compiled layers."""

    compile: bool = False  # torch.compile each decoder layer


def attach(config: Any, parts: Parts):
    """Hooks on a layer stay outside."""
    for layer in parts.model.model.layers.values() if config.compile else ():
        parts.instead(layer, "forward", torch.compile(layer.forward), by=__name__)
