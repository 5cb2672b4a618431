"""Other ways to send tokens to experts: `--ep-mode rows`, `allgather` and `nodes`. Step 7 sends a row for each choice.

    rows        a token is sent once to each rank that has experts for it, together with its gates (scores). That
                rank also weights and sums the experts' outputs, so it returns one row for the token
    nodes       the same in two levels, so each slow link carries a token once (DeepEP: DeepSeek-V3, 3.2.2). A node is
                --ep-inside N neighbouring ranks of ep. A token that visits experts on three ranks of another node is
                sent once, to the rank there that has the same place as its own rank, which forwards it inside:
                node 0, rank 1 -> node 1, rank 1 -> ranks 0, 1, 3 of node 1. Each node returns one row
    allgather   every rank gets all tokens of the group, and the weighted sums are reduce-scattered: no counts, no
                sorting of messages, but ranks also receive tokens that none of their experts needs

Bytes a rank sends over ep in a layer's forward of a micro-batch; backward swaps R and A, and sends no counts. h = dim,
e bytes an element, w bytes a gate (4; fp64: 8), T tokens here, R rows sent to others, A received, K = ep / N nodes:

    rows             R (h e + E/ep w) + A h e     and 8 (ep-1) for the counts
    nodes, between   R (h e + E/K w) + A h e      and 8 (K-1): R and A as if a node were a rank
    nodes, inside    R (h e + E/ep w) + A h e     and 8 (N-1): R and A of the tokens that have come to this rank
    allgather        (ep-1) T (2 h e + E w)

In each level of `rows` or `nodes`, the CPU waits once for the GPU's row counts; in all modes, once for the experts'.

When to use which: for a token with k choices, step 7 sends (1 - 1/ep) k rows, and `rows` (ep-1) (1 - (1 - 1/ep)^k), if
choices are independent. If ep = 8: for k = 8, 7 and 4.6; for k = 2, 1.75 and 1.6. With --groups-per-token M, and no
group on two ranks (or nodes), at most M rows are sent. `allgather` is for tokens that visit nearly all ranks.

In step 7, `by_gates` would be `MoE.forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from common.comm import Group, Mesh, all_to_all
from common.model import wide
from extras.variants import Parts
from step04_tp_sp import Conjugate, enter_block, leave_block
from step07_moe_ep import DISPATCH, AddLoss, MoE


def add_rows(rows: Tensor, place: Tensor, n: int) -> Tensor:
    """Sums rows [any number, dim], each at its `place` (int64) -> [n, dim], in fp32 or wider, in a fixed order.

    So ranks that repeat a computation get equal sums. On a GPU only `index_put` has a fixed order, because it sorts.
    """
    sums, rows = rows.new_zeros(n, rows.shape[1], dtype=wide(rows.dtype)), rows.to(wide(rows.dtype))
    return sums.index_put((place,), rows, accumulate=True) if rows.is_cuda else sums.index_add(0, place, rows)


def visit_local(experts: Callable, tokens: Tensor, gates: Tensor, send: bool = False) -> Tensor:
    """Applies `experts`: tokens [n, dim], gates [n, experts] (0: not chosen) -> weighted sums [n, dim], fp32 or wider.

    `send`: `experts` sends the counts of rows, then rows, to other ranks, as `visit_experts` and --ep-overlap do.
    """
    visits = (gates != 0).T
    counts = visits.sum(1)
    known = counts.cpu()  # the only wait of the CPU
    expert, token = torch.nonzero_static(visits, size=sum(known.tolist())).unbind(1)  # sorted by expert, no wait
    out = experts(tokens[token], counts if send else known)  # NCCL sends counts from a GPU
    return add_rows(out * gates[token, expert][:, None], token, len(tokens))


def travel(rows: Tensor, group: Group, in_rows: list[int], out_rows: list[int]) -> Tensor:
    """Send rows [n, dim], sorted by receiving rank -> the rows received, sorted by sending rank."""
    arrived = rows.new_empty(sum(out_rows), rows.shape[1])
    all_to_all(arrived, rows.contiguous(), group, in_rows, out_rows).wait()
    return arrived


def send_rows(group: Group, experts: Callable, tokens: Tensor, gates: Tensor, visit: Callable = visit_local) -> Tensor:
    """Like `visit_local`, with experts on several ranks. `visit` applies experts to the tokens that a rank received."""
    gates = gates.unflatten(1, (group.size, -1))
    visits = (gates != 0).any(-1).T
    leaving = visits.sum(1)
    coming = torch.empty_like(leaving)
    all_to_all(coming, leaving, group).wait()
    leaving, coming = torch.stack((leaving, coming)).tolist()  # the CPU waits once for both
    rank, token = torch.nonzero_static(visits, size=sum(leaving)).unbind(1)  # sorted by rank
    there = partial(travel, in_rows=leaving, out_rows=coming)
    home = partial(travel, in_rows=coming, out_rows=leaving)
    visitors, their_gates = (Conjugate.apply(x, group, there, home) for x in (tokens[token], gates[token, rank]))
    out = visit(experts, visitors, their_gates).to(tokens.dtype)
    return add_rows(Conjugate.apply(out, group, home, there), token, len(tokens))


def gather_all(group: Group, experts: Callable, tokens: Tensor, gates: Tensor) -> Tensor:
    """Like `send_rows`, but by an all-gather and a reduce-scatter: step 4's f and g, over ep."""
    tokens, gates = (enter_block(x[None], group, sp=True)[0] for x in (tokens, gates))
    part = visit_local(experts, tokens, gates.chunk(group.size, 1)[group.rank])
    return leave_block(part.to(tokens.dtype)[None], group, sp=True)[0]


def by_gates(moe: MoE, visit: Callable, x: Tensor) -> Tensor:
    """Replaces `MoE.forward`: x [batch, seq, dim] -> like x. `visit` is `visit_local`, `send_rows` or `gather_all`."""
    tokens = x.flatten(0, 1)
    p, scores, chosen = moe.route(tokens)
    out = visit(moe.experts, tokens, torch.zeros_like(p).scatter(1, chosen, scores)).to(x.dtype).view_as(x)
    return AddLoss.apply(out, moe.aux_loss(p, F.one_hot(chosen.flatten(), p.shape[-1]).sum(0)), moe.coeff)


def at_home(experts: Callable, group: Group, *rows: Tensor) -> Tensor:
    """Replaces step 7's dispatch: compute at once, because the rows have arrived already."""
    return experts(*rows)


DISPATCH["rows"] = DISPATCH["nodes"] = DISPATCH["allgather"] = at_home


@dataclass
class Flags:
    """Nodes of expert parallelism."""

    ep_inside: int = 2  # with --ep-mode nodes: number of neighbouring ep ranks in a node


TRIED = dict(ep_inside=1)
NEEDS = [("ep_inside", "ep_mode", "nodes")]


def check(config: Any, world: int):
    """Raises UserError unless --ep-inside divides --ep."""
    if config.ep_mode == "nodes" and config.ep % config.ep_inside:
        raise UserError(f"--ep-inside {config.ep_inside} must divide --ep {config.ep}")


def over_nodes(mesh: Mesh, ep: int, inside: int) -> Callable:
    """Create groups between and inside nodes. Returns a `send_rows` that sends between nodes, then inside them."""
    rows = mesh.ranks.reshape(-1, ep // inside, inside)  # [ep groups, nodes, ranks of a node]
    mesh.enter("ep inside", rows.reshape(-1, inside), urgent=True)
    mesh.enter("ep between", rows.swapaxes(1, 2).reshape(-1, ep // inside), urgent=True)
    return partial(send_rows, mesh["ep between"], visit=partial(send_rows, mesh["ep inside"]))


def attach(config: Any, parts: Parts):
    """Let layers use `by_gates` in this file's modes and with --capacity-factor: choices over capacity are not sent."""
    mode = config.ep_mode if config.ep > 1 else "alltoall"
    if mode == "alltoall" and not config.capacity_factor:
        return
    visit = partial(visit_local, send=config.ep > 1)
    if mode == "nodes":
        visit = over_nodes(parts.mesh, config.ep, config.ep_inside)
    if mode in ("rows", "allgather"):
        visit = partial(send_rows if mode == "rows" else gather_all, parts.mesh["ep"])
    for module in parts.model.modules():
        if isinstance(module, MoE):
            parts.instead(module, "forward", partial(by_gates, module, visit), by=__name__)
