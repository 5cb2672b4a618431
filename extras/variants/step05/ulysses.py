"""Ulysses (`--cp-mode ulysses`; Jacobs et al. 2023): swap tokens for heads, attend as one device would, swap back.

    before     rank r has s/n tokens of all heads                 attention cannot be computed
    between    rank r has all s tokens of 1/n of the heads        heads are independent: it can
    after      rank r has s/n tokens of all heads

Each swap is an all-to-all, whose backward is the reverse one. A rank's tokens are in order: shard r of n. With Q and B
bytes of q, and of k and v, for s/n tokens, a rank sends in a layer and micro-batch

    (n-1)/n (2 Q + B) forward, and as much backward: less, the more ranks.

But n must divide the heads (with --tp, those of a rank: heads / tp). Key/value heads that are fewer than ranks are
repeated before they are sent. In step 5, `ring_attention` would be `swapped_attention`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, all_to_all
from common.model import attend
from extras.variants.step05.ring import ordered_positions
from step05_cp_ring import CONTEXT, Config, ContextMode

SINCE = Config


class Swap(torch.autograd.Function):
    """[batch, s/n, heads, d] -> [batch, s, heads/n, d], or the reverse; each is the other's backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, to_heads: bool) -> Tensor:
        """`to_heads`: from our tokens of all heads to all tokens of our heads."""
        ctx.group, ctx.to_heads = group, to_heads
        cut, join = (2, 1) if to_heads else (1, 2)
        parts = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
        swapped = torch.empty_like(parts)
        all_to_all(swapped, parts, group).wait()
        return swapped.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The reverse."""
        return Swap.apply(grad, ctx.group, not ctx.to_heads), None, None


def swapped_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, attend: Callable = attend, **more: Any) -> Tensor:
    """q [batch, s/n, heads, head_dim]; k, v [batch, s/n, kv_heads, head_dim] -> like q. `attend` gets what is more."""
    copies = max(1, group.size // k.shape[2])
    q, k, v = (Swap.apply(x.repeat_interleave(c, 2), group, True) for x, c in ((q, 1), (k, copies), (v, copies)))
    return Swap.apply(attend(q, k, v, **more), group, False)


CONTEXT["ulysses"] = ContextMode(ordered_positions, swapped_attention)
