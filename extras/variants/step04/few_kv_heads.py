"""Allows more --tp ranks than key/value heads: neighbours hold the same head (Megatron, Narayanan et al. 2021).

    tp = 4, two kv heads:      rank 0   rank 1   rank 2   rank 3         groups of ranks:
    query heads                0 1      2 3      4 5      6 7
    key/value head             0        0        1        1             kv parts 0-2, 1-3      kv copies 0-1, 2-3

k_proj and v_proj are sharded over `kv parts`, so that a rank holds one head of each. A rank computes only the terms of
their gradients that come from its own queries. So these gradients are partial, and are summed over `kv copies`. In the
layout of k_proj and v_proj the two groups replace tp, so gradient sums, global norm and checkpoints need no special
case. In step 4 this would be another rule in `HEADS`.
"""

from typing import Any

from torch import nn

from common import UserError
from common.comm import Mesh
from common.layout import layout_of, note_layout
from common.model import PRESETS, ModelConfig
from extras.variants import Parts
from step04_tp_sp import HEADS, shard_param


def copy_heads(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """Replaces `shard_heads`: k_proj or v_proj [kv_heads * head_dim, dim] -> the rows of one head. Raises UserError."""
    tp, heads = mesh["tp"].size, config.n_kv_heads
    if tp % heads or config.n_heads % tp:
        raise UserError(f"--tp {tp} must divide {config.n_heads} heads, and divide {heads} kv heads or be a multiple")
    rows, copies = mesh.join("tp", "tp"), tp // heads  # int [groups, tp]
    mesh.enter("kv copies", rows.reshape(-1, copies))
    mesh.enter("kv parts", rows.reshape(-1, heads, copies).swapaxes(1, 2).reshape(-1, heads))
    part = shard_param(weight, 0, mesh["kv parts"])  # the weight itself if there is one head
    note_layout(part, partial_over=(*layout_of(part).partial_over, "kv copies"))
    return part


def prepare(config: Any, parts: Parts):
    """If --tp does not divide the key/value heads, replace step 4's `shard_heads`, which would raise UserError."""
    if PRESETS[config.model].n_kv_heads % config.tp:
        for name in HEADS:
            parts.instead(HEADS, name, copy_heads, by=__name__)
