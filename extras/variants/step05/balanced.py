"""Balances documents over ranks (`--cp-mode balanced`): blocks of tokens are distributed by their work.

Zigzag balances the work if a sequence is one document. With several documents, a token attends only to its own, so the
rank with the end of a long document has the most work, and all others wait for it. But each block's work is known from
the ends of documents (PyTorch's load balancer uses it, too). Two ranks, blocks of one token, documents of 5 and 3:

    token     0 1 2 3 4 | 5 6 7      From the most to the least expensive, each goes to the rank that has least to do
    pairs     1 2 3 4 5 | 1 2 3      and still has room: 4 7 6 5 (5+3+2+1 = 11) to rank 0, 3 2 1 0 (10) to rank 1

Blocks are distributed anew for each sequence. Every rank computes this by itself, because it reads the whole batch.
Keys are gathered, as with --cp-mode allgather; bytes are the same. Law: with 8 blocks a rank, the busiest rank has at
most 1.1 times the mean number of pairs in the test's three kinds of batches (with zigzag, up to 3 times). In step 5
`train` would take `x[mine].gather(1, here)`, with different positions for each sequence.
"""

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from extras.variants import Parts
from extras.variants.record import SET, Refusal
from extras.variants.step01.documents import KINDS, Documents
from extras.variants.step05.allgather import gathered_attention
from step05_cp_ring import CONTEXT, ContextMode, zigzag_positions

BLOCKS = 8  # a rank


def deal(numbers: Tensor, n: int) -> Tensor:
    """Deals tokens to ranks: their documents, int64 [s] -> each rank's positions, int64 [n, s/n], each row sorted."""
    s = len(numbers)
    starts = (numbers.diff(prepend=numbers[:1] - 1) != 0).nonzero().flatten()
    pairs = torch.arange(s) - starts[numbers - numbers[0]] + 1  # of each query with keys of its document
    room = gcd(s // n, BLOCKS)
    work = pairs.view(n * room, -1).sum(1)
    load, dealt = [0] * n, [[] for _ in range(n)]
    for block in work.argsort(descending=True, stable=True).tolist():
        rank = min((r for r in range(n) if len(dealt[r]) < room), key=load.__getitem__)
        dealt[rank].append(block)
        load[rank] += int(work[block])
    return torch.arange(s).view(n * room, -1)[torch.tensor(dealt).sort(1).values].flatten(1)


class Dealt(Documents):
    """Masks documents, and deals their tokens to ranks by their work."""

    def __init__(self, config: Any, parts: Parts):
        super().__init__(config, parts)
        self.deal, self.rank = partial(deal, n=config.cp), parts.mesh["cp"].rank

    def batch(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Wraps `Data.batch`: move each token to a place of its rank in zigzag."""
        tensors = super().batch(read, step)
        slots = self.fixed(None).flatten().argsort()  # by place in a sequence: rank and token
        order = torch.cat([one.positions.flatten(1) for one in self.all])[:, slots]
        rows = torch.arange(len(tensors[0]))[self.mine]
        return tuple(x.index_copy(0, rows, x[rows].gather(1, order)) for x in tensors)

    def places(self) -> Tensor:
        """int64 [batch, this rank's tokens]: the positions that this rank has been dealt."""
        return self.now.positions[:, self.rank].to(self.device)


CONTEXT["balanced"] = ContextMode(zigzag_positions, gathered_attention)
KINDS["balanced"] = Dealt
REFUSES = [
    Refusal(
        dict(capacity_factor=SET, cp_mode=("balanced",), documents=SET),
        "an expert takes the first tokens of a sequence, which are now on other ranks; choose another --cp-mode",
    )
]
