"""Sliding-window attention (`--window W`; Beltagy et al. 2020, "Longformer"; Mistral 7B): a query sees the last W keys.

    keys ->      0 1 2 3 4 5 6 7      W = 4, two ranks of cp, --cp-mode ring: the tokens are in order
    query 3      # # # +              A triangle (+) is causal attention. So is the triangle at the other end of the
    ------------------------          window (x), if queries and keys are taken in reverse order. Between them
    query 4        x # # +            are rectangles (#). Each part is one that step 5's kernels can compute.
    query 5          x # # +
    query 6            x # # +        Rank 1 needs keys 1, 2, 3 of rank 0, its HALO: W-1 tokens.

Every rank but the first has the same work, so zigzag is not needed. There is no ring: a rank receives its halo from the
rank before it, and in backward sends the halo's gradients back. Let k and v of a token have b bytes. A rank in the
middle sends (W-1) b forward and (W-1) b backward in a layer and micro-batch, whatever s is, and computes at most W s/n
pairs for its s/n tokens, so work grows as s, not as s^2. With --cp-mode ulysses sequences are whole and need no halo.
`windowed_attention` would replace `attend` in common/model.py, and `ring_attention` in step 5.
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
from extras.variants.record import SET, But, Refusal
from extras.variants.step05.allgather import FORMULAS, gathered_attention
from extras.variants.step05.ulysses import swapped_attention
from step04_tp_sp import Conjugate

TURNED = "turned"


def band(queries: int, keys: int, window: int) -> list[tuple[slice, slice, bool | str]]:
    """Splits the pairs with 0 <= query - key < window into parts (queries, keys, shape), one for each kernel call.

    Queries and keys end at the same token. Slices count from their first. Shapes: False (rectangle), True, TURNED.
    """
    blocks, first = [], keys - queries
    q0 = first
    while q0 < keys:
        moving = q0 >= window - 1  # else all earlier keys are in the window
        q1 = min(keys, q0 + window - 1 if moving else window - 1)  # the two triangles must not overlap
        left = q1 - window + 1 if moving else 0
        parts = [(q0 - window + 1, left, TURNED)] * moving + [(left, q0, False)] * (left < q0) + [(q0, q1, True)]
        blocks += [(slice(q0 - first, q1 - first), slice(k0, k1), shape) for k0, k1, shape in parts]
        q0 = q1
    return blocks


def with_turned(kernel: tuple[Callable, Callable]) -> tuple[Callable, Callable]:
    """Extend a kernel (step05/allgather.py) to TURNED parts, which are causal once queries and keys are reversed."""

    def turning(function: Callable, *given: Any) -> tuple[Tensor, ...]:
        *tensors, shape = given
        if shape != TURNED:
            return function(*given)
        return tuple(x.flip(2) for x in function(*(x.flip(2) for x in tensors), True))

    return tuple(partial(turning, function) for function in kernel)


def add_halo(kv: Tensor, group: Group, halo: int) -> Tensor:
    """Exchange halos: k and v [2, batch, s/n, kv_heads, d] -> the same, preceded by `halo` tokens, except on rank 0."""
    last, received = kv[:, :, -halo:].contiguous(), torch.empty_like(kv[:, :, -halo:])
    before, after = group.rank > 0, group.rank + 1 < group.size  # whether there is a neighbour
    exchange([(last, group.rank + 1)] * after, [(received, group.rank - 1)] * before, group).wait()
    return torch.cat([received, kv], 2) if before else kv


def return_halo(grad: Tensor, group: Group, halo: int) -> Tensor:
    """The backward of `add_halo`: send the halo's gradients to the previous rank, and add those from the next."""
    before, after = group.rank > 0, group.rank + 1 < group.size
    theirs, ours = grad.tensor_split([halo * before], 2)
    ours, received = ours.clone(), torch.empty_like(ours[:, :, -halo:])
    exchange([(theirs.contiguous(), group.rank - 1)] * before, [(received, group.rank + 1)] * after, group).wait()
    if after:
        ours[:, :, -halo:] += received
    return ours


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, group: Group | None = None, kernel: tuple = FORMULAS
) -> Tensor:
    """Sliding-window attention: q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d] -> like q. No group: n = 1."""
    if group is not None:
        forwards, backwards = (partial(one, halo=window - 1) for one in (add_halo, return_halo))
        k, v = Conjugate.apply(torch.stack((k, v)), group, forwards, backwards)
    blocks = band(q.shape[1], k.shape[1], window)
    return gathered_attention(q, k, v, Group("cp", 0, 1, None), lambda *_: blocks, with_turned(kernel))


@dataclass
class Flags:
    """Sliding windows."""

    window: int = 0  # number of tokens that each token attends to, itself included; 0: no limit


TRIED = dict(window=5)
COMPUTED = True
REFUSES = [
    Refusal(
        dict(window=SET, cp=SET, cp_mode=But(("ring", "ulysses"))),
        "with windows all ranks have the same work, so tokens stay in order; use --cp-mode ring or ulysses",
    ),
    Refusal(dict(window=(1,)), "a token sees itself and at least one before it; use 2 or more, or 0", None),
    Refusal(dict(window=SET, documents=SET), "each divides attention into parts of its own; choose one of them", None),
]


def attach(config: Any, parts: Parts):
    """Limit attention in every layer to the window. Raises UserError if a halo (W-1 tokens) is longer than a shard."""
    if not config.window:
        return
    attend = partial(windowed_attention, window=config.window)
    if getattr(config, "cp", 1) > 1:
        whole, group = config.cp_mode == "ulysses", parts.mesh["cp"]
        if not whole and config.window > len(parts.positions) + 1:
            raise UserError(f"--window {config.window} reaches over two ranks: use {len(parts.positions) + 1} at most")
        attend = partial(swapped_attention, group=group, attend=attend) if whole else partial(attend, group=group)
    for layer in parts.model.model.layers.values():
        parts.instead(layer.self_attn, "attend", attend, by=__name__)
