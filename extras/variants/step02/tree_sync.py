"""Sums up a tree and down again (`--sync tree`): few rounds, for tensors so small that only latency counts.

    n = 6     rank    0     1     2     3     4     5
    up        round 0       1->0        3->2        5->4        each sends its partial sum, and is done
              round 1             2->0
              round 2                         4->0              rank 0 has the sum
    down      the same messages in the opposite direction, last one first

A ring takes 2 (n-1) rounds of S/n bytes, a tree 2 ceil(log2 n) rounds of S. With latency t a round and bandwidth w the
tree is faster if t (n-1 - log2 n) > (log2 n - (n-1)/n) S/w, that is, if S is small. All ranks together send 2 (n-1) S,
as in the ring, but unevenly: each rank but 0 sends S up, and each sends S down to every rank that sends to it. NCCL has
two such trees, in which no rank is an inner node of both (Sanders et al. 2009), so that all links are busy. In step 2,
this would be another `sum_up`.
"""

import torch
from torch import Tensor

from common.comm import Group, exchange
from step02_ddp import SYNCS, NaiveSync


class TreeSync(NaiveSync):
    """Sums gradients one by one, by a tree."""

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place."""
        n, r = group.size, group.rank
        rounds = [(1 << i) for i in range((n - 1).bit_length())]  # how far apart sender and receiver are
        for distance in rounds:
            if r % (2 * distance) == distance:
                exchange([(gradient, r - distance)], [], group).wait()
            elif r % (2 * distance) == 0 and r + distance < n:
                incoming = torch.empty_like(gradient)
                exchange([], [(incoming, r + distance)], group).wait()
                gradient += incoming
        for distance in reversed(rounds):
            if r % (2 * distance) == 0 and r + distance < n:
                exchange([(gradient, r + distance)], [], group).wait()
            elif r % (2 * distance) == distance:
                exchange([], [(gradient, r - distance)], group).wait()


SYNCS["tree"] = TreeSync
