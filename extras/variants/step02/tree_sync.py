"""Sums gradients over a tree (`--sync tree`, `server`): partial sums move up, and the whole sum moves down.

    tree, n = 6    rank    0     1     2     3     4     5
    up             round 0       1->0        3->2        5->4        each sends its partial sum, and is done
                   round 1             2->0
                   round 2                         4->0              rank 0 has the sum
    down           the same messages in the opposite direction, last one first

For a tensor of S bytes a ring takes 2 (n-1) rounds of S/n, this tree 2 ceil(log2 n) rounds of S. With latency t a
round and bandwidth w, the tree is faster if t (n-1 - log2 n) > (log2 n - (n-1)/n) S/w, that is, for small tensors. NCCL
has two such trees, in which no rank is an inner node of both (Sanders et al. 2009), so that all links are busy.

With `server`, rank 0 is the parent of all others: a parameter server, an early way to train on several machines (Li et
al. 2014, "Scaling Distributed Machine Learning with the Parameter Server"; there the server also updates, and sends
weights, which have as many bytes). All bytes pass one link, so with t = 0 the sum takes n times as long as a ring's.

Every rank but 0 sends S up, and every rank sends S down to each child. Together they send 2 (n-1) S, as in the ring,
but unevenly. With a server, rank 0 sends (n-1) S, and any other rank S. In step 2, this would be another `sum_up`.
"""

import torch
from torch import Tensor

from common.comm import Group, exchange
from step02_ddp import SYNCS, NaiveSync


class TreeSync(NaiveSync):
    """Sums gradients one by one, each over a binomial tree of ranks."""

    def rounds(self, n: int) -> list[list[tuple[int, int]]]:
        """Returns the messages up the tree as (child, parent), by round."""
        distances = [1 << i for i in range((n - 1).bit_length())]
        return [[(child, child - d) for child in range(d, n, 2 * d)] for d in distances]

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place."""
        rounds, r = self.rounds(group.size), group.rank
        for pairs in rounds:
            received = [(torch.empty_like(gradient), child) for child, parent in pairs if parent == r]
            exchange([(gradient, parent) for child, parent in pairs if child == r], received, group).wait()
            for part, _ in received:
                gradient += part
        for pairs in reversed(rounds):
            whole = [(gradient, parent) for child, parent in pairs if child == r]
            exchange([(gradient, child) for child, parent in pairs if parent == r], whole, group).wait()


class ServerSync(TreeSync):
    """Sums gradients one by one on rank 0, which sends the sums to all others."""

    def rounds(self, n: int) -> list[list[tuple[int, int]]]:
        """One round, in which all other ranks send to rank 0."""
        return [[(child, 0) for child in range(1, n)]]


SYNCS["tree"] = TreeSync
SYNCS["server"] = ServerSync
