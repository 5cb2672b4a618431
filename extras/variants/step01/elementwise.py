"""Recomputes elementwise operations only (`--recompute elementwise`), because they are cheap to compute again.

Full recomputation repeats the whole forward of a layer. Here a layer keeps the outputs of matrix products and
attention, and repeats only norms, RoPE and SiLU. With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, and
e = bytes of an element, a layer keeps for each token these bytes:

    none         e (6 h + 2 k + 4 f) + 4 a + 8
    elementwise  e (5 h + 2 k + 2 f) + 4 a
    full         e h

PyTorch calls this "selective activation checkpointing"; what papers call selective recomputation is `--recompute
selective` (attention_scores.py). In step 1 `recompute_layers` would pass the kept operators to `checkpoint`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from common.model import MLP
from extras.variants import Parts
from step01_single_gpu import RECOMPUTE

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten._grouped_mm.default]
ATTENTION = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]
CHOICE = [aten.topk.default]  # a router's choice (step 7): if computed again, it might send tokens to other experts
RECOMPUTE["elementwise"] = RECOMPUTE["full"]  # `attach` does the rest


def keep(operators: list, recompute: Callable, *inputs: Tensor) -> Tensor:
    """Wraps the forward of a layer that recomputes (step 1's `recompute_layers`): keep the outputs of `operators`."""
    return recompute(*inputs, context_fn=partial(create_selective_checkpoint_contexts, operators))


def attach(config: Any, parts: Parts):
    """Choose the outputs that layers keep. With --recompute full, a layer that has a router keeps the router's choice.

    With --cp, attention and its messages are repeated, because chapter 5 changes an operator's output in place.
    """
    kept = PRODUCTS + CHOICE + (ATTENTION if getattr(config, "cp", 1) == 1 else [])
    for layer in parts.model.model.layers.values():
        if config.recompute == "elementwise":
            parts.around(layer, "forward", partial(keep, kept), by=__name__)
        elif config.recompute == "full" and not isinstance(layer.mlp, MLP):
            parts.around(layer, "forward", partial(keep, CHOICE), by=__name__)
