"""Gather all keys and values once (`--cp-mode allgather`; Llama 3: Dubey et al. 2024, section 3.3.2).

One all-gather before attention replaces the n-1 hops that hide behind it, and one reduce-scatter of gradients follows
its backward. A rank has the same tokens as with zigzag. It keeps k and v of all s tokens for backward, so they are not
sent again. With B bytes of k and v, G of their gradients (fp32), for s/n tokens, a rank sends in a layer and
micro-batch

    (n-1) B forward and (n-1) G backward            (the ring: (n-1) B forward, (n-1) B + n G backward)

In step 5, the two collectives would replace `exchange` in RingAttention's two loops.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.comm import Group, all_gather, reduce_scatter
from extras.variants.step05.kernels import FORMULAS, add_gradients, attend_to
from step05_cp_ring import CONTEXT, Config, ContextMode, zigzag_positions, zigzag_visible

SINCE = Config


class GatheredAttention(torch.autograd.Function):
    """Causal attention of a rank's queries to the keys and values of all ranks, which it has gathered."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable, kernel: tuple) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> like q."""
        ctx.group, ctx.visible, (attention, ctx.gradients) = group, visible, kernel
        own = torch.stack((k, v))
        parts = own.new_empty(group.size, *own.shape)  # k and v of each rank
        all_gather(parts.view(-1), own.view(-1), group).wait()
        o, lse = attend_to(ctx, enumerate(parts), q, attention)
        ctx.save_for_backward(q, parts, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """Each rank finds a part of the gradients of all keys and values; they are summed where these are from."""
        q, parts, o, lse = ctx.saved_tensors
        dq, dparts = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, parts))
        for source, kv in enumerate(parts):
            add_gradients(ctx, (do, q, o, lse), source, kv, dq, dparts[source])
        dkv = torch.empty_like(dparts[0])
        reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None, None


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable = zigzag_visible, kernel: tuple = FORMULAS
) -> Tensor:
    """q [batch, s/n, heads, head_dim]; k, v [batch, s/n, kv_heads, head_dim] -> like q."""
    return GatheredAttention.apply(*(x.transpose(1, 2) for x in (q, k, v)), group, visible, kernel).transpose(1, 2)


CONTEXT["allgather"] = ContextMode(zigzag_positions, gathered_attention)
