"""Ring without zigzag (`--cp-mode ring`): tokens stay in order, rank r has shard r (Liu et al. 2023, "Ring Attention").

    keys of rank ->    0 1 2 3
    queries of rank 0  +               +: the causal half of its own keys
    queries of rank 1  # +             #: every pair of a query and a key
    queries of rank 2  # # +           later keys are sent around as well, but nothing is computed with them
    queries of rank 3  # # # +         work of rank r: (2r+1) / n^2 of the whole. Zigzag: 1/n for each

All ranks wait for the last one, whose work is almost twice the mean. Messages and bytes are those of zigzag. In step 5
`zigzag_positions` and `zigzag_visible` would be the two functions below.
"""

from functools import partial

import torch
from torch import Tensor

from common import UserError
from step05_cp_ring import CONTEXT, ContextMode, ring_attention


def ordered_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """The positions of a rank's tokens, int64 [s/n]: shard `rank` of n. Raises UserError unless n divides s."""
    if seq_len % n:
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {n}")
    return torch.arange(seq_len).chunk(n)[rank]


def ordered_visible(rank: int, source: int, length: int) -> list[tuple[slice, slice, bool]]:
    """Replaces `zigzag_visible`: all pairs with earlier shards, and the causal half of our own."""
    whole = slice(0, length)
    return [(whole, whole, source == rank)] if source <= rank else []


CONTEXT["ring"] = ContextMode(ordered_positions, partial(ring_attention, visible=ordered_visible))
