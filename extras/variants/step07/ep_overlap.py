"""Hides the all-to-alls of experts behind the computation of experts (`--ep-overlap N`; Hwang et al. 2023, "Tutel").

The rows that a rank sends to one expert are a block, which is cut into N chunks. While the rows of one chunk are sent,
a rank computes those of another. With N = 2:

    all-to-all    dispatch 0 | dispatch 1 | combine 0 | combine 1
    compute                  |  experts 0 | experts 1 |

Law: of N dispatches and N combines, all but the first dispatch and the last combine are under way while experts
compute, in forward and in backward. The bytes are the same, in N times as many messages. The counts are exchanged once,
because sender and receiver cut a block at the same rows. An expert computes N smaller matrix products, and adds up N
gradients of its weights, so a large N costs time.

No code is needed to order backward. Autograd first runs the nodes that forward created last. Since start and wait are
separate nodes, backward goes through the figure from right to left: the backward of `Wait` starts the exchange of the
gradients, and the backward of `Start` waits for it.

DeepSeek-V3 (3.2) and Megatron hide the messages behind another micro-batch instead, which the rank computes at the same
time. That hides almost all of them, but each layer's forward and backward must be cut into phases by hand.

In step 7, `visit_in_chunks` would replace `visit_experts`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.comm import Group, all_to_all
from extras.variants import Parts
from step07_moe_ep import MoE, transpose_blocks


class Exchange:
    """An all-to-all of rows [sum(in_rows), dim] and, in backward, the reverse all-to-all of their gradients."""

    def __init__(self, group: Group, in_rows: list[int], out_rows: list[int]):
        self.group, self.in_rows, self.out_rows = group, in_rows, out_rows

    def start(self, rows: Tensor, back: bool = False):
        """Begin to send rows or, if `back`, the gradients of the rows that were received."""
        in_rows, out_rows = (self.out_rows, self.in_rows) if back else (self.in_rows, self.out_rows)
        self.received = rows.new_empty(sum(out_rows), rows.shape[1])
        self.pending = all_to_all(self.received, rows.contiguous(), self.group, in_rows, out_rows)

    def wait(self) -> Tensor:
        """Wait for the exchange -> the received rows, or gradients."""
        self.pending.wait()
        received, self.received = self.received, None  # so that memory is not kept until backward
        return received


class Start(torch.autograd.Function):
    """Forward begins an exchange of rows; backward waits for the exchange of their gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        """Returns the tensor into which the rows are received. It is the input of `Wait`."""
        ctx.exchange = exchange
        exchange.start(rows)
        return exchange.received

    @staticmethod
    def backward(ctx, _grad: Tensor):
        """Returns the gradient of the rows, which `Wait.backward` has begun to receive."""
        return ctx.exchange.wait(), None


class Wait(torch.autograd.Function):
    """Forward waits for the rows; backward begins to send their gradients back."""

    @staticmethod
    def forward(ctx, received: Tensor, exchange: Exchange) -> Tensor:
        """Returns the received rows."""
        ctx.exchange = exchange
        return exchange.wait().view_as(received)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Start to send `grad`. Return it only for its shape: `Start.backward` returns the received gradients."""
        ctx.exchange.start(grad, back=True)
        return grad, None


def chunks_of(counts_Ge: Tensor, n: int) -> np.ndarray:
    """Cut each block of rows into n chunks of almost equal size: block sizes int64 [G, e] -> chunk sizes [n, G, e]."""
    counts = np.reshape(counts_Ge.flatten().tolist(), counts_Ge.shape)
    return np.diff(np.arange(n + 1)[:, None, None] * counts // n, axis=0)


def visit_in_chunks(n: int, experts: Callable, group: Group, sorted_ND: Tensor, counts_E: Tensor) -> Tensor:
    """Replaces `visit_experts` of step 7: the same result, but in n chunks that overlap."""
    leaving_Ge = counts_E.view(group.size, -1)
    arriving_Ge = torch.empty_like(leaving_Ge)
    all_to_all(arriving_Ge, leaving_Ge, group).wait()
    leaving, arriving = (chunks_of(counts_Ge, n) for counts_Ge in torch.stack((leaving_Ge, arriving_Ge)).cpu())
    by_chunk_ND = transpose_blocks(sorted_ND, leaving.reshape(n, -1).T)

    exchanges = [Exchange(group, leaving[i].sum(1).tolist(), arriving[i].sum(1).tolist()) for i in range(n)]
    chunks = by_chunk_ND.split([sum(exchange.in_rows) for exchange in exchanges])
    received = [Start.apply(chunks[i], exchanges[i]) for i in range(n)]
    home = []
    for i in range(n):
        rows_RD = transpose_blocks(Wait.apply(received[i], exchanges[i]), arriving[i])
        out_RD = experts(rows_RD, arriving[i].sum(0))
        back = Exchange(group, exchanges[i].out_rows, exchanges[i].in_rows)
        home.append((Start.apply(transpose_blocks(out_RD, arriving[i].T), back), back))
    return transpose_blocks(torch.cat([Wait.apply(*one) for one in home]), leaving.reshape(n, -1))


@dataclass
class Flags:
    """Messages of experts."""

    ep_overlap: int = 1  # chunks of an expert's rows: while one is computed, others are sent; 1: no overlap


TRIED = dict(ep_overlap=2)
NEEDS = [("ep_overlap", "ep"), ("ep_overlap", "ep_mode", "alltoall")]


def attach(config: Any, parts: Parts):
    """Let the rows of all layers visit experts in chunks."""
    for module in parts.model.modules() if config.ep_overlap > 1 else ():
        if isinstance(module, MoE):
            plain = module.experts.forward.args  # bound to `visit_experts`: the experts' own forward, the group
            parts.instead(module.experts, "forward", partial(visit_in_chunks, config.ep_overlap, *plain), by=__name__)
