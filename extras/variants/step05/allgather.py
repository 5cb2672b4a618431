"""Gathers all keys and values once (`--cp-mode allgather`; Llama 3: Dubey et al. 2024, section 3.3.2).

One all-gather before attention replaces the ring's n-1 messages (which overlap with attention), and after attention's
backward one reduce-scatter sums the gradients. Tokens are distributed as in zigzag. A rank keeps all k and v for
backward, so they are sent only once. Let k and v of s/n tokens have B bytes, and their fp32 gradients G. In a layer and
micro-batch, a rank sends

    (n-1) B forward and (n-1) G backward            (the ring: (n-1) B forward, (n-1) B + n G backward)

As in step 5, `visible` is an argument. So is the *kernel*: the two functions that compute forward and backward for one
part of the keys, such as `part_attention` and `part_gradients`. In step 5, the collectives would replace the messages.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import step05_cp_ring as step05
from common.comm import Group, all_gather, reduce_scatter
from common.model import wide
from step05_cp_ring import merge, zigzag_positions, zigzag_visible

FORMULAS = step05.part_attention, step05.part_gradients


def attend_to(ctx: Any, parts: Iterable[tuple[int, Tensor]], q: Tensor, attention: Callable) -> tuple[Tensor, Tensor]:
    """Attend from q [batch, heads, s/n, d] to `parts`, each (rank, its k and v) -> o like q, lse [batch, heads, s/n].

    `ctx` has the group, and a function `visible` such as step 5's `zigzag_visible`.
    """
    o = torch.zeros_like(q, dtype=wide(q.dtype))
    lse = torch.full_like(o[..., 0], -torch.inf)
    for source, kv in parts:
        for queries, keys, causal in ctx.visible(ctx.group.rank, source, q.shape[2]):
            merge(o[:, :, queries], lse[:, :, queries], *attention(q[:, :, queries], *kv[:, :, :, keys], causal))
    return o.to(q.dtype), lse


def add_gradients(ctx: Any, rows: tuple[Tensor, ...], source: int, kv: Tensor, dq: Tensor, dkv: Tensor):
    """Compute gradients of attention with rank `source`'s `kv`; add them to dq and dkv. `rows` is (do, q, o, lse)."""
    for queries, keys, causal in ctx.visible(ctx.group.rank, source, dq.shape[2]):
        do, q, o, lse = (x[:, :, queries] for x in rows)
        part_dq, *part_dkv = ctx.gradients(do, q, *kv[:, :, :, keys], o, lse, causal)
        dq[:, :, queries] += part_dq
        for total, part in zip(dkv, part_dkv, strict=True):
            total[:, :, keys] += part


class GatheredAttention(torch.autograd.Function):
    """Causal attention of a rank's queries to the gathered keys and values of all ranks."""

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
        """Each rank computes its term of the gradients of all keys and values; a reduce-scatter sums the terms."""
        q, parts, o, lse = ctx.saved_tensors
        dq, dparts = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, parts))
        for source, kv in enumerate(parts):
            add_gradients(ctx, (do, q, o, lse), source, kv, dq, dparts[source])
        dkv = torch.empty_like(dparts[0])
        reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None, None


def attend(
    function: type[torch.autograd.Function],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    visible: Callable = zigzag_visible,
    kernel: tuple = FORMULAS,
) -> Tensor:
    """Puts heads before tokens, and applies `function`: q [batch, s/n, heads, d]; k, v with kv_heads -> like q."""
    return function.apply(*(x.transpose(1, 2) for x in (q, k, v)), group, visible, kernel).transpose(1, 2)


gathered_attention = partial(attend, GatheredAttention)
step05.CONTEXT["allgather"] = step05.ContextMode(zigzag_positions, gathered_attention)
