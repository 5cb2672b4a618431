"""Sum gradients over a tree of ranks (`--sync tree`), or on one rank (`--sync server`).

Partial sums move up to rank 0, and the whole sum moves down again. A row shows who sends to whom:

    tree, n = 6    rank    0     1     2     3     4     5
    up             round 0       1->0        3->2        5->4        each sends its partial sum
                   round 1             2->0
                   round 2                         4->0              rank 0 has the sum
    down           the same messages in the opposite direction, the last one first

With `server`, all other ranks send to rank 0 in one round: a parameter server, an early way to
train on several machines (there the server also updates, and sends weights, which have as many
bytes).

THE LAW. S: the bytes of all gradients. Each rank but 0 sends S up, and each rank sends S down to
each of its children. For tiny (S = 4 x 804,224 bytes) on 4 ranks, ranks 0, 1, 2, 3 have 2, 0, 1, 0
children, so rank 0 sends 2 S = 6,433,792 bytes and rank 2 as many; with server rank 0 sends 3 S =
9,650,688. All ranks together send 2 (n-1) S, as in a ring, but unevenly.

WHEN. A ring takes 2 (n-1) rounds of S/n, this tree 2 ceil(log2 n) rounds of S. With latency t a
round and bandwidth w, the tree is faster if t (n-1 - log2 n) > (log2 n - (n-1)/n) S/w: for small
tensors. All of the server's bytes pass one link, so for large tensors it takes n times as long as a
ring. NCCL has two trees at once, in which no rank is an inner node of both, so that all links are
busy.

Source: Sanders et al. 2009 (two trees); Li et al. 2014, "Scaling Distributed Machine Learning with
the Parameter Server". On one machine, nn.DataParallel works like this server.

Run it:    torchrun --nproc_per_node=4 -m extras step02_ddp.py --sync tree
"""

import torch
from torch import Tensor

from common.comm import Group, exchange
from step02_ddp import SYNCS, NaiveSync


class TreeSync(NaiveSync):
    """Sums gradients one by one, each over a binomial tree of ranks."""

    def rounds(self, n: int) -> list[list[tuple[int, int]]]:
        """The messages up the tree, (child, parent), by round."""
        rounds = []
        distance = 1
        while distance < n:
            children = range(distance, n, 2 * distance)
            rounds.append([(child, child - distance) for child in children])
            distance *= 2
        return rounds

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place."""
        rounds = self.rounds(group.size)
        for pairs in rounds:
            self.move_up(gradient, pairs, group)
        for pairs in reversed(rounds):
            self.move_down(gradient, pairs, group)

    def move_up(self, gradient: Tensor, pairs: list[tuple[int, int]], group: Group):
        """Send our partial sum to our parent in this round; add those of our children to ours."""
        sends = [(gradient, parent) for child, parent in pairs if child == group.rank]
        children = [child for child, parent in pairs if parent == group.rank]
        receives = [(torch.empty_like(gradient), child) for child in children]
        exchange(sends, receives, group).wait()
        for term, _ in receives:
            gradient += term

    def move_down(self, gradient: Tensor, pairs: list[tuple[int, int]], group: Group):
        """Receive the sum from our parent in this round; send it to our children."""
        sends = [(gradient, child) for child, parent in pairs if parent == group.rank]
        receives = [(gradient, parent) for child, parent in pairs if child == group.rank]
        exchange(sends, receives, group).wait()


class ServerSync(TreeSync):
    """Sums gradients one by one on rank 0, which sends the sums to all others."""

    def rounds(self, n: int) -> list[list[tuple[int, int]]]:
        """One round, in which all other ranks send to rank 0."""
        return [[(child, 0) for child in range(1, n)]]


SYNCS["tree"] = TreeSync
SYNCS["server"] = ServerSync
