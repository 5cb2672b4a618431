"""Ulysses swaps tokens for heads, computes attention, and swaps back (`--cp-mode ulysses`; Jacobs et al. 2023). USP
runs step 5's ring between the swaps (`--cp-mode usp --ulysses U`; Fang and Zhao 2024, "USP").

    before     rank r has s/n tokens of all heads                 attention needs all tokens
    between    rank r has all s tokens of 1/n of the heads        attention can be computed: heads are independent
    after      rank r has s/n tokens of all heads

Each swap is an all-to-all, and its backward is the reverse swap. Tokens stay in order: rank r has shard r of n. Let q
of s/n tokens have Q bytes, and k and v together B. In a layer and micro-batch, a rank sends q, k, v and the output:

    (n-1)/n (2 Q + B) forward, and as much backward. The more ranks, the less each sends: Q and B fall as 1/n.

But n must divide the number of heads (with --tp, the heads of a rank: heads / tp). If there are fewer key/value heads
than ranks, these heads are repeated before they are sent. The ring has no such limit. In `usp`, U neighbouring ranks
swap, and the R = cp / U ranks that then have the same heads form a ring:

    cp = 4, U = 2, R = 2      rank 0     rank 1     rank 2     rank 3
    chunks of tokens, of 8    0 7        1 6        2 5        3 4          as in zigzag with 4 ranks
    after the swap            0 1 6 7    0 1 6 7    2 3 4 5    2 3 4 5      put in order: as in zigzag with R ranks
    heads                     first 1/2  last 1/2   first 1/2  last 1/2     ulysses: 0-1, 2-3    ring: 0-2, 1-3

Let gradients of k and v have G bytes. With U or more key/value heads (with fewer, copies add to B and G), a rank sends

    over ulysses    (U-1)/U (2 Q + B) forward, and as much backward
    over ring       (R-1) B forward, (R-1) B + R G backward           in R hops instead of cp

In step 5, `ring_attention` would be `swapped_attention`; for `usp`, `shard_context` would create the two groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.comm import Group, all_to_all
from common.model import PRESETS, attend
from extras.variants import Parts
from extras.variants.step05.allgather import FORMULAS
from extras.variants.step05.flash import kernel_ring
from extras.variants.step05.ring import ordered_positions
from step05_cp_ring import CONTEXT, ContextMode, zigzag_positions, zigzag_visible


class Swap(torch.autograd.Function):
    """Swaps tokens for heads, [batch, s/n, heads, d] -> [batch, s, heads/n, d], or the reverse. Backward undoes it."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, to_heads: bool) -> Tensor:
        """If `to_heads`: this rank's tokens of all heads -> all tokens of its heads. Otherwise the reverse."""
        ctx.group, ctx.to_heads = group, to_heads
        cut, join = (2, 1) if to_heads else (1, 2)
        parts = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
        swapped = torch.empty_like(parts)
        all_to_all(swapped, parts, group).wait()
        return swapped.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The reverse swap."""
        return Swap.apply(grad, ctx.group, not ctx.to_heads), None, None


def swapped_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, attend: Callable = attend, **more: Any) -> Tensor:
    """Swaps, calls `attend` with `more`, and swaps back: q [batch, s/n, heads, d]; k, v with kv_heads -> like q."""
    copies = max(1, group.size // k.shape[2])
    q, k, v = (Swap.apply(x.repeat_interleave(c, 2), group, True) for x, c in ((q, 1), (k, copies), (v, copies)))
    return Swap.apply(attend(q, k, v, **more), group, False)


CONTEXT["ulysses"] = ContextMode(ordered_positions, swapped_attention)


def turn_second(x: Tensor) -> Tensor:
    """Reverses the last n of a sequence's 2n chunks, as zigzag does: x [batch, sequences, 2, n, ...] -> same shape."""
    return torch.stack((x[:, :, 0], x[:, :, 1].flip(2)), 2)


def in_order(x: Tensor, n: int, chunk: int) -> Tensor:
    """Sorts tokens by sequence and position. They arrive sorted by rank: n ranks, each with two chunks a sequence."""
    return turn_second(x.unflatten(1, (n, -1, 2, chunk)).movedim(1, 3)).flatten(1, 4)


def by_rank(x: Tensor, n: int, chunk: int) -> Tensor:
    """The reverse of `in_order`: sorts tokens by rank again."""
    return turn_second(x.unflatten(1, (-1, 2, n, chunk))).movedim(3, 1).flatten(1, 4)


def ring_in_order(
    *qkv: Tensor, n: int, group: Group, chunk: int, visible: Callable = zigzag_visible, kernel: tuple = FORMULAS
) -> Tensor:
    """Sort by position the tokens that n ranks have swapped, compute ring attention, and undo the sorting.

    q [batch, tokens, heads, d]; k, v [batch, tokens, kv_heads, d] -> like q. A chunk has `chunk` tokens.
    """
    return by_rank(kernel_ring(*(in_order(x, n, chunk) for x in qkv), group, visible, kernel), n, chunk)


CONTEXT["usp"] = ContextMode(zigzag_positions, ring_in_order)  # `attach` puts it between two swaps


@dataclass
class Flags:
    """Ulysses and ring together."""

    ulysses: int = 2  # with --cp-mode usp: number of neighbouring cp ranks that swap tokens for heads


TRIED = dict(ulysses=1)
NEEDS = [("ulysses", "cp_mode", "usp")]


def check(config: Any, world: int):
    """UserError unless --ulysses divides --cp, a tp rank's heads, and its kv heads (or is a multiple of them)."""
    if config.cp_mode != "usp":
        return
    m, n, tp = PRESETS[config.model], config.ulysses, config.tp
    heads, kv_heads = m.n_heads // tp, max(1, m.n_kv_heads // tp)
    if config.cp % n:
        raise UserError(f"--ulysses {n} must divide --cp {config.cp}")
    if heads % n or (kv_heads % n and n % kv_heads):
        raise UserError(f"--ulysses {n} does not divide {heads} heads ({kv_heads} kv): lower it; the ring has no limit")


def attach(config: Any, parts: Parts):
    """With --cp-mode usp, create the groups "ulysses" and "ring", and let every layer's attention use them."""
    if config.cp_mode != "usp":
        return
    mesh, n = parts.mesh, config.ulysses
    rows = mesh.join("cp", "cp")  # int [groups, cp]
    mesh.enter("ulysses", rows.reshape(-1, n), urgent=True)
    mesh.enter("ring", rows.reshape(len(rows), -1, n).swapaxes(1, 2).reshape(-1, config.cp // n), urgent=True)
    inside = partial(ring_in_order, n=n, group=mesh["ring"], chunk=len(parts.positions) // 2)
    attend = partial(swapped_attention, group=mesh["ulysses"], attend=inside)
    for layer in parts.model.model.layers.values():
        parts.instead(layer.self_attn, "attend", attend, by=__name__)
