"""Dispatch in two levels (`--ep-mode nodes --ep-inside N`; DeepEP: DeepSeek-V3, 3.2.2): once over each slow link.

Of the ranks of ep, N neighbours are in a node, and there are K = ep / N nodes. A token that visits experts on three
ranks of another node is sent once, to the rank of that node that has the same place as its own, which forwards it
inside:

    token of node 0, rank 1      between: rank 1 of node 0 -> rank 1 of node 1      inside: -> ranks 0, 1, 3 of node 1

Each level is `--ep-mode rows` (expert_rows.py) over its own group; to the first, the experts are on whole nodes. On the
way back ranks add up what they have, so one row a node returns. A rank sends, in a layer and micro-batch, forward, and
again backward, with e bytes an element, w a gate, h = dim, E experts:

    between    R (h e + E/K w) + A h e      and 8 (K-1) for the counts: R nodes of its tokens but its own, A received
    inside     R (h e + E/ep w) + A h e     and 8 (N-1): R ranks, but itself, of the tokens that it forwards

With --groups-per-token M, and no group in two nodes, R between is at most M a token: rows sends N times as many. In
step 7, this would stand where `MoE.forward` calls `self.experts`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import step07_moe_ep as step07
from common import UserError
from extras.variants import Parts
from extras.variants.step07.expert_rows import at_home, send_rows
from extras.variants.step07.routing import RoutedMoE
from step07_moe_ep import DISPATCH

SINCE = step07.Config
DISPATCH["nodes"] = at_home


@dataclass
class Flags:
    """Nodes of experts."""

    ep_inside: int = 2  # with --ep-mode nodes: of the ranks of ep, so many neighbours are in a node


TRIED = dict(ep_inside=1)
NEEDS = [("ep_inside", "ep_mode", "nodes")]


def check(config: Any, world: int):
    """Nodes are full. Raises UserError."""
    if config.ep_mode == "nodes" and config.ep % config.ep_inside:
        raise UserError(f"--ep-inside {config.ep_inside} must divide --ep {config.ep}")


def attach(config: Any, parts: Parts):
    """Make the two groups, and let the layers send their tokens over both."""
    if config.ep_mode != "nodes":
        return
    mesh, inside = parts.mesh, config.ep_inside
    rows = mesh.ranks.reshape(-1, config.ep // inside, inside)  # [ep groups, nodes, ranks of a node]
    mesh.enter("ep inside", rows.reshape(-1, inside), urgent=True)
    mesh.enter("ep between", rows.swapaxes(1, 2).reshape(-1, config.ep // inside), urgent=True)
    visit = partial(send_rows, mesh["ep between"], visit=partial(send_rows, mesh["ep inside"]))
    for module in parts.model.modules():
        if isinstance(module, RoutedMoE):
            parts.instead(module, "visit", visit, by=__name__)
