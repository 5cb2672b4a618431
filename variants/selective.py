"""Selective recomputation (`--recompute selective`; Korthikanti et al. 2022, section 5): keep what is dear to remake.

Full recomputation does a layer's whole forward again. This keeps what matrix products and attention have made, and does
only the cheap rest again: norms, RoPE, SiLU. With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, and e bytes
an element, a token of a layer keeps for backward:

    none       e (6 h + 2 k + 4 f) + 4 a + 8
    selective  e (5 h + 2 k + 2 f) + 4 a
    full       e h

A router (step 7) chooses once: where a layer has one, its choice is kept, also with `full`. Computed again, a last bit
may differ, and with it who goes where: then counts and rows would not be those that backward is for.

In step 1 it would be `recompute_layers` with one more argument: a list of operators whose outputs `checkpoint` keeps.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from common.model import MLP, Decoder, attend
from step01_single_gpu import RECOMPUTE

aten = torch.ops.aten
PRODUCTS = [aten.mm.default, aten._grouped_mm.default]
ATTENTION = [
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]


CHOICE = [aten.topk.default]


def recompute_selectively(model: Decoder):
    """Let every layer keep its input and the outputs of these operators. Gradients do not change.

    Attention that step 5 has replaced is done again, with its messages: it adds to what an operator has made, in place.
    """
    for layer in model.model.layers.values():
        kept = PRODUCTS + CHOICE + (ATTENTION if layer.self_attn.attend is attend else [])
        contexts = partial(create_selective_checkpoint_contexts, kept)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def recompute_but_choices(model: Decoder, plain: Callable = RECOMPUTE["full"]):
    """As in step 1; layers with a router also keep what it chooses."""
    plain(model)
    for layer in model.model.layers.values():
        if not isinstance(layer.mlp, MLP):  # it takes time to look at every operator
            contexts = partial(create_selective_checkpoint_contexts, CHOICE)
            layer.forward = partial(layer.forward, context_fn=contexts)


RECOMPUTE |= dict(selective=recompute_selectively, full=recompute_but_choices)
