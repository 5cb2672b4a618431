"""The plain ring (`--cp-mode ring`): tokens stay in order, rank r has part r of n (Liu et al. 2023, "Ring Attention").

    keys of part ->         0 1 2 3
    rank 0: queries of 0    +               +: half of the pairs of a #, the part itself
    rank 1: queries of 1    # +             #: all pairs of two parts
    rank 2: queries of 2    # # +           nothing is computed with later keys, but they travel all the same
    rank 3: queries of 3    # # # +         work of rank r: (2r+1) / n^2 of the whole. Zigzag: 1/n for each

All wait for the last rank, which has almost twice the mean. Messages and bytes are those of zigzag.

In step 5 other tokens, and other blocks of them: `zigzag_positions` and `zigzag_visible` would be the two below.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from common import UserError
from step05_cp_ring import CONTEXT, ContextMode, ring_attention


def ordered_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """int64 [seq_len / n]: the tokens of a rank, part `rank` of n. Raises UserError."""
    if seq_len % n:
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {n}")
    return torch.arange(seq_len).chunk(n)[rank]


def ordered_visible(rank: int, source: int, length: int) -> list[tuple]:
    """As `zigzag_visible`: earlier parts whole, our own one causally, nothing of later ones."""
    everything = np.s_[:, :, :length]
    return [(everything, everything, source == rank)] if source <= rank else []


CONTEXT["ring"] = ContextMode(ordered_positions, partial(ring_attention, visible=ordered_visible))
