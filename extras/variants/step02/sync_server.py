"""One rank sums for all (`--sync server`): a parameter server, the first way to train on several machines.

Rank 0 receives all gradients, adds them up, and sends the sum back (Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server"; there the server also updates, and sends weights, which have as many bytes).

                  rank 0 sends    rank 0 receives    any other rank sends, and receives
    server        (n-1) S         (n-1) S            S
    all-reduce    2 (n-1)/n S     the same           the same: less than 2 S, whatever n is (step 2)

All bytes pass through one link, so the sum takes n/2 times as long as a ring's. In step 2 this would be one more
`sum_up`.
"""

import torch
from torch import Tensor

from common.comm import Group, exchange
from step02_ddp import SYNCS, NaiveSync


class ServerSync(NaiveSync):
    """Sums gradients one by one, on rank 0."""

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place."""
        if group.rank > 0:
            exchange([(gradient, 0)], [], group).wait()
            exchange([], [(gradient, 0)], group).wait()
            return
        others = [(torch.empty_like(gradient), rank) for rank in range(1, group.size)]
        exchange([], others, group).wait()
        for other, _ in others:
            gradient += other
        exchange([(gradient, rank) for _, rank in others], [], group).wait()


SYNCS["server"] = ServerSync
