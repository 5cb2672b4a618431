"""Sliding windows (`--window W`; Beltagy et al. 2020, "Longformer"; Mistral 7B): a query sees W keys, its own the last.

    keys ->      0 1 2 3 4 5 6 7      W = 4, two ranks of cp, --cp-mode ring: the tokens are in order
    query 3      # # # +              A triangle (+) is causal attention. So is the triangle at the other end of the
    ------------------------          window (x), if queries and keys are read from the last to the first. Between them
    query 4        x # # +            are rectangles (#). Each part is one that step 5's kernels can compute.
    query 5          x # # +
    query 6            x # # +        Rank 1 needs keys 1, 2, 3 of rank 0, its HALO: W-1 tokens.

Every rank but the first has the same work, so zigzag is not needed. There is no ring: a rank receives its halo from the
ranks before it, and sends them the gradients in backward. With b bytes of k and v a token, a rank in the middle sends
in a layer and micro-batch (W-1) b forward and (W-1) b backward, and computes at most W s/n pairs for its s/n tokens:
neither grows with s. With --cp-mode ulysses sequences are whole and need no halo.

In common/model.py `attend`, and in step 5 `ring_attention`, would be `windowed_attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.comm import Group, exchange
from extras.variants import Parts
from extras.variants.record import SET, Refusal, but
from extras.variants.step05.allgather import FORMULAS, gathered_attention
from extras.variants.step05.ulysses import swapped_attention

TURNED = "turned"


def band(queries: range, keys: range, window: int) -> list[tuple[slice, slice, bool | str]]:
    """The parts of two runs of positions with 0 <= query - key < window: (queries, keys, False, True or TURNED).

    Slices count from the starts of the runs. A query's first key is keys.start until the window moves past it; its last
    one is itself until keys end.
    """
    first, last = max(queries.start, keys.start), min(queries.stop, keys.stop + window - 1)
    cuts = {keys.start + window - 1, keys.stop} & {*range(first, last)}
    blocks, q0 = [], first
    while q0 < last:
        moving, growing = q0 >= keys.start + window - 1, q0 < keys.stop  # the first key, and the last one
        q1 = min([last, *(cut for cut in cuts if cut > q0)])
        q1 = min(q1, q0 + window - 1) if moving and growing else q1  # the two triangles must not overlap
        left, right = q1 - window + 1 if moving else keys.start, q0 if growing else keys.stop
        parts = [(q0 - window + 1, left, TURNED)] * moving + [(left, right, False)] * (left < right)
        for k0, k1, shape in parts + [(q0, q1, True)] * growing:
            block = slice(q0 - queries.start, q1 - queries.start), slice(k0 - keys.start, k1 - keys.start)
            blocks.append((*block, shape))
        q0 = q1
    return blocks


def with_turned(kernel: tuple[Callable, Callable]) -> tuple[Callable, Callable]:
    """A kernel of step 5 that knows TURNED beside True and False: causal, both read from the last to the first."""

    def turning(function: Callable, *given: Any) -> tuple[Tensor, ...]:
        *tensors, shape = given
        if shape != TURNED:
            return function(*given)
        return tuple(x.flip(2) for x in function(*(x.flip(2) for x in tensors), True))

    return tuple(partial(turning, function) for function in kernel)


class Halo(torch.autograd.Function):
    """k and v of the tokens before this rank's own, in front of these."""

    @staticmethod
    def forward(ctx, kv: Tensor, group: Group, reach: int) -> Tensor:
        """[2, batch, s/n, kv_heads, d] -> [2, batch, up to `reach` + s/n, kv_heads, d]."""
        own, r = kv.shape[2], group.rank
        tokens = [min(own, reach - d) for d in range(0, reach, own)]  # from the rank before, the one before that, ...
        ctx.before = [(t, r - d) for d, t in enumerate(tokens, 1) if d <= r]
        ctx.after = [(t, r + d) for d, t in enumerate(tokens, 1) if r + d < group.size]
        ctx.group, ctx.own = group, own
        received = [(torch.empty_like(kv[:, :, :t]), peer) for t, peer in ctx.before]
        exchange([(kv[:, :, own - t :].contiguous(), peer) for t, peer in ctx.after], received, group).wait()
        return torch.cat([*(part for part, _ in reversed(received)), kv], 2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Send the gradients of the halo to the ranks that own its keys."""
        *parts, own = grad.split([*(t for t, _ in reversed(ctx.before)), ctx.own], 2)
        own = own.clone()
        sends = [(part.contiguous(), peer) for part, (_, peer) in zip(reversed(parts), ctx.before, strict=True)]
        received = [(torch.empty_like(own[:, :, :t]), peer) for t, peer in ctx.after]
        exchange(sends, received, ctx.group).wait()
        for part, _ in received:
            own[:, :, ctx.own - part.shape[2] :] += part
        return own, None, None


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, group: Group | None = None, kernel: tuple = FORMULAS
) -> Tensor:
    """q [batch, s/n, heads, head_dim]; k, v [batch, s/n, kv_heads, head_dim], in order -> like q. No group: all s."""
    own, alone = q.shape[1], Group("cp", 0, 1, None)
    if group is not None:
        k, v = Halo.apply(torch.stack((k, v)), group, window - 1)
    blocks = band(range(k.shape[1] - own, k.shape[1]), range(k.shape[1]), window)
    return gathered_attention(q, k, v, alone, lambda *_: blocks, with_turned(kernel))


@dataclass
class Flags:
    """Sliding windows."""

    window: int = 0  # a token sees so many tokens, itself the last of them; 0: all before it


TRIED = dict(window=5)
COMPUTED = True
REFUSES = [
    Refusal(
        dict(window=SET, cp=SET, cp_mode=but("ring", "ulysses")),
        "with windows all ranks have the same work, so tokens stay in order; use --cp-mode ring or ulysses",
    ),
    Refusal(dict(window=SET, documents=SET), "each divides attention into parts of its own; choose one of them", None),
]


def check(config: Any, world: int):
    """Raises UserError for a window without other tokens."""
    if config.window == 1:
        raise UserError("--window 1: a token sees itself and at least one before it; use 2 or more, or 0")


def attach(config: Any, parts: Parts):
    """Limit the attention of every layer to the window."""
    if not config.window:
        return
    attend = partial(windowed_attention, window=config.window)
    if getattr(config, "cp", 1) > 1:
        whole, group = config.cp_mode == "ulysses", parts.mesh["cp"]
        attend = partial(swapped_attention, group=group, attend=attend) if whole else partial(attend, group=group)
    for layer in parts.model.model.layers.values():
        parts.instead(layer.self_attn, "attend", attend, by=__name__)
