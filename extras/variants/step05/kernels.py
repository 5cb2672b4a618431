"""A library: step 5's ring with any kernel.

A *kernel* is a pair of functions such as step 5's `part_attention` and `part_gradients`: forward and backward of one
part of the keys. The ring, the rule of what is visible, and `merge` are those of step 5.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.comm import Group, Pending, exchange
from common.model import wide
from step05_cp_ring import merge, part_attention, part_gradients, travel, zigzag_visible

FORMULAS = part_attention, part_gradients


class KernelRing(torch.autograd.Function):
    """As `RingAttention` of step 5."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable, kernel: tuple) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> like q."""
        attention, ctx.gradients = kernel
        own = torch.stack((k, v))
        o = torch.zeros_like(q, dtype=wide(q.dtype))
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, kv in travel(own, group):
            for queries, keys, causal in visible(group.rank, source, q.shape[2]):
                merge(o[:, :, queries], lse[:, :, queries], *attention(q[:, :, queries], *kv[:, :, :, keys], causal))
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own, o, lse)
        ctx.group, ctx.visible = group, visible
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
            for queries, keys, causal in ctx.visible(ctx.group.rank, source, q.shape[2]):
                do_i, q_i, o_i, lse_i = (x[:, :, queries] for x in (do, q, o, lse))
                part_dq, *part_dkv = ctx.gradients(do_i, q_i, *kv[:, :, :, keys], o_i, lse_i, causal)
                dq[:, :, queries] += part_dq
                for total, part in zip(found, part_dkv, strict=True):
                    total[:, :, keys] += part
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
