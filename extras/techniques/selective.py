"""Recompute only what costs little (`--recompute selective`, `--recompute all-but-attention`).

`--recompute full` keeps a layer's input and computes everything else again, about a quarter more
FLOPs. But some results take much memory and few FLOPs, and others the opposite. So a layer keeps
the results of operators that it names, and backward computes the rest again:

    --recompute         keeps besides the input          computes again
    selective           matrix products, attention       norms, RoPE, SiLU: number by number
    all-but-attention   attention                        also matrix products, except down_proj

THE LAW. With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, and e bytes a number, a
layer keeps, in bytes for each token (and what step 1 says of norms on a CPU):

    none                  e (6 h + 2 k + 4 f) + 4 a + 8      tiny in bf16:  4,648
    selective             e (5 h + 2 k + 2 f) + 4 a                         2,976
    all-but-attention     e 2 h + 4 a                                         544
    full                  e h                                                 256

Attention takes 4 h FLOPs for each pair of tokens, so in long sequences it is what should be kept.
Without a fused kernel it would be the opposite: softmax(q k^T / sqrt(d)) has a s scores for each of
s tokens, many bytes and few FLOPs. What Korthikanti et al. call selective recomputation keeps all
but these: for GPT-3, 34 h bytes in place of (34 + 80) h, for less than 3 % more FLOPs. A fused
kernel (FlashAttention) does this by itself, tile by tile.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation", section 5; in PyTorch
torch.utils.checkpoint.create_selective_checkpoint_contexts, which step 7 uses, too.

Run it:    python -m extras step01_single_gpu.py --recompute selective
"""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from common.model import Decoder
from step01_single_gpu import RECOMPUTE, recompute_layers

aten = torch.ops.aten
MATRIX_PRODUCTS = [aten.mm.default]
ATTENTION = [  # one for each kind of kernel that F.scaled_dot_product_attention chooses from
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
CHOICES = [aten.topk.default]  # of step 7's router


def keep(operators: list, model: Decoder, **options: Any):
    """Recompute everything but the results of these operators. (`options` are not used: step 7's
    would keep the choices of experts, and CHOICES are among the operators.)
    """
    saved = partial(create_selective_checkpoint_contexts, operators)
    recompute_layers(model, context_fn=saved)


selective = partial(keep, [*CHOICES, *ATTENTION, *MATRIX_PRODUCTS])
all_but_attention = partial(keep, [*CHOICES, *ATTENTION])
RECOMPUTE["selective"] = selective
RECOMPUTE["all-but-attention"] = all_but_attention
