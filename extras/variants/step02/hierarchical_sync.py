"""Sums gradients inside nodes, then between them (`--sync hierarchical`; BlueConnect: Cho et al. 2019).

Links inside a node are many times faster than those between nodes. So the N ranks of a node reduce-scatter, each
all-reduces its shard with the ranks of other nodes that have the same one, and the ranks of a node all-gather:

    n = 4, N = 2                  node 0: rank 0   rank 1        node 1: rank 2   rank 3
        at first                          a0 b0    a1 b1                 a2 b2    a3 b3
        reduce-scatter inside                b01   a01                      b23   a23         N-1 rounds
        all-reduce between                   b0123 a0123                    b0123 a0123       2 (K-1) rounds, K nodes
        all-gather inside                 a b      a b                   a b      a b         N-1 rounds

With S bytes a rank sends 2 (N-1)/N S inside and 2 (K-1)/K S/N between: together the 2 (n-1)/n S of --sync ring. All 2
(n-1) rounds of a ring over n = N K ranks wait for a link between nodes; here 2 (K-1) do, and all N ranks of a node send
at once. In step 2, `RingSync.sum_up` would be three calls of its own loop, each over some of the ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from common.comm import Group, Mesh, exchange
from common.model import Decoder
from step02_ddp import SYNCS, NaiveSync


def pass_round(shards: list[Tensor], peers: list[int], group: Group, rounds: range):
    """Runs rounds of step 2's ring over n `peers`: rounds 0 to n-2 reduce-scatter, rounds n-1 to 2n-3 all-gather."""
    n, r = len(peers), peers.index(group.rank)
    for s in rounds:
        outgoing, target = shards[(r - s) % n], shards[(r - s - 1) % n]
        incoming = torch.empty_like(target)
        exchange([(outgoing, peers[(r + 1) % n])], [(incoming, peers[(r - 1) % n])], group).wait()
        if s < n - 1:
            target += incoming
        else:
            target.copy_(incoming)


class HierarchicalSync(NaiveSync):
    """Sums gradients one by one, in two levels."""

    def __init__(self, model: Decoder, config: Any, mesh: Mesh):
        super().__init__(model, config, mesh)
        self.node = config.ranks_per_node

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place."""
        nodes: dict[int, list[int]] = {}  # node -> ranks in the group
        for r, rank in enumerate(dist.get_process_group_ranks(group.handle)):
            nodes.setdefault(rank // self.node, []).append(r)
        inside = next(peers for peers in nodes.values() if group.rank in peers)
        n, place = len(inside), inside.index(group.rank)
        across, shards = [peers[place] for peers in nodes.values()], gradient.view(-1).tensor_split(n)
        pass_round(shards, inside, group, range(n - 1))
        ours = shards[(place + 1) % n]  # its sum over this node is complete
        pass_round(ours.tensor_split(len(across)), across, group, range(2 * (len(across) - 1)))
        pass_round(shards, inside, group, range(n - 1, 2 * (n - 1)))


SYNCS["hierarchical"] = HierarchicalSync


@dataclass
class Flags:
    """Sums in two levels."""

    ranks_per_node: int = 8  # with --sync hierarchical: ranks 0 to N-1 are in the first node, N to 2N-1 in the second


TRIED = dict(ranks_per_node=2)
NEEDS = [("ranks_per_node", "sync", "hierarchical")]


def check(config: Any, world: int):
    """Every group must have equally many ranks in each of its nodes. Raises UserError."""
    node, world = config.ranks_per_node, config.dry_run or world
    for size in (world // getattr(config, "pp", 1), getattr(config, "tp", 1), getattr(config, "ep", 1)):
        if config.sync == "hierarchical" and size % node and node % size:
            raise UserError(f"--ranks-per-node {node} must divide, or be a multiple of, {size} neighbouring ranks")
