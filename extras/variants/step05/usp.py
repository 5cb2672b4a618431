"""Ulysses inside, the ring outside (`--cp-mode usp --ulysses U`; Fang and Zhao 2024, "USP").

Ulysses sends less the more ranks there are, but cannot use more ranks than heads. The ring has no such limit. Of cp
ranks, U neighbours swap tokens for heads, and R = cp / U ranks with the same heads form a ring:

    cp = 4, U = 2, R = 2      rank 0     rank 1     rank 2     rank 3       chunks of 8, as zigzag deals them to 4
    tokens                    0 7        1 6        2 5        3 4
    after the swap            0 1 6 7    0 1 6 7    2 3 4 5    2 3 4 5      as zigzag deals them to R, if put in order
    heads                     first 1/2  last 1/2   first 1/2  last 1/2     ulysses: 0-1, 2-3    ring: 0-2, 1-3

With Q and B bytes of q, and of k and v, for s/n tokens, and G of the gradients of the latter, a rank sends in a layer
and micro-batch, if there are at least U key/value heads (else each is repeated, and B and G grow with them):

    over ulysses    (U-1)/U (2 Q + B) forward, and as much backward
    over ring       (R-1) B forward, (R-1) B + R G backward           U times fewer messages than a ring of n

In step 5, `ring_attention` would be `crossed_attention`, over two groups that `shard_context` would make of cp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.comm import Group
from common.model import PRESETS
from extras.variants import Parts
from extras.variants.step05.allgather import gathered_attention
from extras.variants.step05.kernels import FORMULAS, kernel_ring
from extras.variants.step05.ulysses import Swap
from step05_cp_ring import CONTEXT, Config, ContextMode, zigzag_positions, zigzag_visible

SINCE = Config


def turn_second(x: Tensor) -> Tensor:
    """[batch, sequences, 2, n, ...]: the second of each two the other way round, as zigzag deals second chunks."""
    return torch.stack((x[:, :, 0], x[:, :, 1].flip(2)), 2)


def in_order(x: Tensor, n: int, chunk: int) -> Tensor:
    """Tokens of n ranks, rank by rank, two chunks of each sequence on each -> each sequence's in order of position."""
    return turn_second(x.unflatten(1, (n, -1, 2, chunk)).movedim(1, 3)).flatten(1, 4)


def by_rank(x: Tensor, n: int, chunk: int) -> Tensor:
    """The reverse of `in_order`."""
    return turn_second(x.unflatten(1, (-1, 2, n, chunk))).movedim(3, 1).flatten(1, 4)


def crossed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Group,
    ring: Group,
    chunk: int,
    visible: Callable = zigzag_visible,
    kernel: tuple = FORMULAS,
) -> Tensor:
    """q [batch, tokens, heads, head_dim]; k, v [batch, tokens, kv_heads, head_dim] -> like q.

    `group` swaps, `ring` passes on. `tokens`: two chunks of `chunk` tokens each of one or more sequences.
    """
    n, copies = group.size, max(1, group.size // k.shape[2])
    attend = kernel_ring if ring.size > 1 else gathered_attention  # a ring of one would send to itself
    q, k, v = (Swap.apply(x.repeat_interleave(c, 2), group, True) for x, c in ((q, 1), (k, copies), (v, copies)))
    out = attend(*(in_order(x, n, chunk) for x in (q, k, v)), ring, visible, kernel)
    return Swap.apply(by_rank(out, n, chunk), group, False)


CONTEXT["usp"] = ContextMode(zigzag_positions, crossed_attention)


@dataclass
class Flags:
    """Ulysses and ring together."""

    ulysses: int = 2  # with --cp-mode usp: of the ranks of cp, so many neighbours swap tokens for heads


TRIED = dict(ulysses=1)
NEEDS = [("ulysses", "cp_mode", "usp")]


def check(config: Any, world: int):
    """The ranks must divide cp, and the heads. Raises UserError."""
    if config.cp_mode != "usp":
        return
    m, n, tp = PRESETS[config.model], config.ulysses, config.tp
    heads, kv_heads = m.n_heads // tp, max(1, m.n_kv_heads // tp)
    if config.cp % n:
        raise UserError(f"--ulysses {n} must divide --cp {config.cp}")
    if heads % n or (kv_heads % n and n % kv_heads):
        raise UserError(f"--ulysses {n} does not divide {heads} heads ({kv_heads} kv): lower it; the ring has no limit")


def attach(config: Any, parts: Parts):
    """Make the two groups, and give them to every layer."""
    if config.cp_mode != "usp":
        return
    mesh, n = parts.mesh, config.ulysses
    rows = mesh.join("cp", "cp")  # int [groups, cp]
    mesh.enter("ulysses", rows.reshape(-1, n), urgent=True)
    mesh.enter("ring", rows.reshape(len(rows), -1, n).swapaxes(1, 2).reshape(-1, config.cp // n), urgent=True)
    groups = dict(group=mesh["ulysses"], ring=mesh["ring"], chunk=len(parts.positions) // 2)
    for layer in parts.model.model.layers.values():
        parts.instead(layer.self_attn, "attend", partial(crossed_attention, **groups), by=__name__)
