"""A library: attention to the keys of several ranks with any kernel, and step 5's ring with it.

A *kernel* is a pair of functions such as step 5's `part_attention` and `part_gradients`: forward and backward of one
part of the keys. The ring, the rule of what is visible, and `merge` are those of step 5.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, Pending, exchange
from common.model import wide
from step05_cp_ring import merge, part_attention, part_gradients, travel, zigzag_visible

FORMULAS = part_attention, part_gradients


def attend_to(ctx: Any, parts: Iterable[tuple[int, Tensor]], q: Tensor, attention: Callable) -> tuple[Tensor, Tensor]:
    """Attention of q [batch, heads, s/n, d] to all `parts`, (rank, its k and v) -> o like q, lse [batch, heads, s/n].

    `ctx` has the group, and the rule of what is `visible`.
    """
    o = torch.zeros_like(q, dtype=wide(q.dtype))
    lse = torch.full_like(o[..., 0], -torch.inf)
    for source, kv in parts:
        for queries, keys, causal in ctx.visible(ctx.group.rank, source, q.shape[2]):
            merge(o[:, :, queries], lse[:, :, queries], *attention(q[:, :, queries], *kv[:, :, :, keys], causal))
    return o.to(q.dtype), lse


def add_gradients(ctx: Any, rows: tuple[Tensor, ...], source: int, kv: Tensor, dq: Tensor, dkv: Tensor):
    """Add in place what k and v of rank `source` give to dq, and their own gradients to dkv. `rows`: do, q, o, lse."""
    for queries, keys, causal in ctx.visible(ctx.group.rank, source, dq.shape[2]):
        do, q, o, lse = (x[:, :, queries] for x in rows)
        part_dq, *part_dkv = ctx.gradients(do, q, *kv[:, :, :, keys], o, lse, causal)
        dq[:, :, queries] += part_dq
        for total, part in zip(dkv, part_dkv, strict=True):
            total[:, :, keys] += part


class KernelRing(torch.autograd.Function):
    """As `RingAttention` of step 5."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable, kernel: tuple) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> like q."""
        ctx.group, ctx.visible, (attention, ctx.gradients) = group, visible, kernel
        own = torch.stack((k, v))
        o, lse = attend_to(ctx, travel(own, group), q, attention)
        ctx.save_for_backward(q, own, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """dkv follows k and v round the ring."""
        q, own, o, lse = ctx.saved_tensors
        right, left = (ctx.group.rank + 1) % ctx.group.size, (ctx.group.rank - 1) % ctx.group.size
        dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, own))
        arriving = Pending()
        for source, kv in travel(own, ctx.group):
            found = torch.zeros_like(dkv)
            add_gradients(ctx, (do, q, o, lse), source, kv, dq, found)
            arriving.wait()
            dkv += found
            outgoing, dkv = dkv, torch.empty_like(dkv)
            arriving = exchange([(outgoing, right)], [(dkv, left)], ctx.group)
        arriving.wait()
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None, None


def kernel_ring(
    q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable = zigzag_visible, kernel: tuple = FORMULAS
) -> Tensor:
    """q [batch, s/n, heads, head_dim]; k, v [batch, s/n, kv_heads, head_dim] -> like q."""
    return KernelRing.apply(*(x.transpose(1, 2) for x in (q, k, v)), group, visible, kernel).transpose(1, 2)
