"""Other ways to send tokens to experts: `--ep-mode rows`, and `allgather`. Step 7 sends a row for each choice.

    rows        a token is sent once to each rank, however many of its experts are there, together with its gates. The
                rank that computes also weighs and adds up, so as many rows return. With --groups-per-token M, and no
                group on two ranks, a token is sent at most M times
    allgather   every rank gets all tokens of the group, and the weighted sums are reduce-scattered: no counts, no
                sorting of messages, but also bytes for tokens that no expert here needs

Bytes that a rank sends over ep in a layer and micro-batch, forward: h = dim, e bytes an element, w a gate (4; fp64: 8),
T tokens of the rank, R rows sent to other ranks, A received. Backward sends as many.

    rows        R (h e + E/ep w) + A h e         and 8 (ep-1) for the counts
    allgather   (ep-1) T (2 h e + E w)

When tokens arrive, the CPU waits for a GPU to count them: twice a layer and micro-batch in `rows` (what leaves and
arrives, then the rows of each expert), once in `allgather`.

WHEN. Of a token's k choices, step 7 sends (1 - 1/ep) k rows; `rows` sends (ep-1) (1 - (1 - 1/ep)^k), if choices are
independent: 4.6 instead of 7 with k 8 and ep 8, but 1.6 instead of 1.75 with k 2. So use it where tokens visit many
experts or few groups, and `allgather` where nearly every rank is visited by nearly every token.

In step 7, these functions would stand where `MoE.forward` calls `self.experts`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import step07_moe_ep as step07
from common.comm import Group, all_to_all
from extras.variants import Parts
from extras.variants.step07.routing import RoutedMoE
from extras.variants.step07.visits import add_rows, places, visit_local
from step04_tp_sp import Conjugate, enter_block, leave_block
from step07_moe_ep import DISPATCH

SINCE = step07.Config


def travel(rows: Tensor, group: Group, in_rows: list[int], out_rows: list[int]) -> Tensor:
    """Rows [n, dim], sorted by rank, go there -> those that arrive, sorted by rank."""
    arrived = rows.new_empty(sum(out_rows), rows.shape[1])
    all_to_all(arrived, rows.contiguous(), group, in_rows, out_rows).wait()
    return arrived


def send_rows(group: Group, experts: Callable, tokens: Tensor, gates: Tensor, visit: Callable = visit_local) -> Tensor:
    """tokens [n, dim], gates [n, all experts], zero where a token does not go -> the weighted sums [n, dim], wide.

    `visit`: what happens to tokens that have arrived.
    """
    gates = gates.unflatten(1, (group.size, -1))
    visits = (gates != 0).any(-1).T
    leaving = visits.sum(1)
    coming = torch.empty_like(leaving)
    all_to_all(coming, leaving, group).wait()
    leaving, coming = torch.stack((leaving, coming)).tolist()  # the CPU waits once for both
    rank, token = places(visits, sum(leaving))  # sorted by rank
    there = partial(travel, in_rows=leaving, out_rows=coming)
    home = partial(travel, in_rows=coming, out_rows=leaving)
    visitors, their_gates = (Conjugate.apply(x, group, there, home) for x in (tokens[token], gates[token, rank]))
    out = visit(experts, visitors, their_gates).to(tokens.dtype)
    return add_rows(Conjugate.apply(out, group, home, there), token, len(tokens))


def gather_all(group: Group, experts: Callable, tokens: Tensor, gates: Tensor) -> Tensor:
    """As `send_rows`, by step 4's pair of all-gather and reduce-scatter, over ep."""
    tokens, gates = (enter_block(x[None], group, sp=True)[0] for x in (tokens, gates))
    part = visit_local(experts, tokens, gates.chunk(group.size, 1)[group.rank])
    return leave_block(part.to(tokens.dtype)[None], group, sp=True)[0]


def at_home(experts: Callable, group: Group, *rows: Tensor) -> Tensor:
    """Replaces `Experts.forward`: the rows have come already."""
    return experts(*rows)


MODES = {"rows": send_rows, "allgather": gather_all}
DISPATCH["rows"] = DISPATCH["allgather"] = at_home


def attach(config: Any, parts: Parts):
    """Let the layers send their tokens this way."""
    for module in parts.model.modules():
        if isinstance(module, RoutedMoE) and config.ep > 1 and config.ep_mode in MODES:
            parts.instead(module, "visit", partial(MODES[config.ep_mode], parts.mesh["ep"]), by=__name__)
