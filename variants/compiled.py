"""Layers as compiled graphs (`--compile`): torch.compile joins norms, RoPE, SiLU and additions into few kernels.

The graph of one layer serves all. Where a layer communicates inside (steps 4, 5, 7) the graph breaks there. In step 1
this would follow `RECOMPUTE[config.recompute](model)`: what recomputes a layer is in its graph.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class Flags:
    """Compiled layers."""

    compile: bool = False  # torch.compile each decoder layer


def attach(config: Any, parts: SimpleNamespace):
    """Hooks on a layer stay outside."""
    for layer in parts.model.model.layers.values() if config.compile else ():
        layer.forward = torch.compile(layer.forward)
