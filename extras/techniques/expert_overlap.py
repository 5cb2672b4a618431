"""Messages of experts hidden behind the experts' own computation (--balance loss+overlap).

The rows that a rank sends to one expert are cut into two chunks. While the rows of one chunk
travel, the rank computes those of the other (Hwang et al. 2023, "Tutel"):

    all-to-all    dispatch 0   dispatch 1   combine 0    combine 1
    compute                    experts 0    experts 1

Each entry of --balance has one with `+overlap`.

LAW. With n chunks, all messages but the first dispatch and the last combine are in flight while
experts compute, in forward and in backward: 2n-2 of 2n, here 2 of 4. The bytes are those of step 7,
in n times as many messages. Counts of rows are exchanged once, because sender
and receiver cut in the same way: of c rows, chunk i has rows i c // n to (i+1) c // n - 1, so 5
rows become 2 and 3. The price: an expert multiplies n smaller matrices, and adds up n gradients.

BACKWARD. Autograd first runs the nodes that forward created last. An exchange is two nodes, `Start`
and `Finish`, so backward goes through the figure from right to left without any code for it: the
backward of `Finish` starts an exchange of gradients, and the backward of `Start` waits for it.

DeepSeek-V3 (section 3.2.1) hides the messages behind another micro-batch, which the rank computes
at the same time. That hides almost all, but each layer must be cut into phases by hand.

Run it:    torchrun --nproc_per_node=2 -m extras step07_moe_ep.py --ep 2 --balance loss+overlap
You should see the losses of one process: python step07_moe_ep.py
"""

from collections.abc import Callable

import torch
from torch import Tensor

from common.comm import Group, all_to_all
from extras.techniques import routing  # its entries of BALANCE are extended, too
from step07_moe_ep import BALANCE, MoE, exchange_counts, transpose_blocks

N_CHUNKS = 2


class Exchange:
    """An all-to-all of rows and, in backward, the reverse all-to-all of their gradients."""

    def __init__(self, group: Group, sent_rows: list[int], received_rows: list[int]):
        self.group = group
        self.sent_rows = sent_rows  # for each rank
        self.received_rows = received_rows  # from each rank

    def start(self, rows: Tensor, sent_rows: list[int], received_rows: list[int]) -> Tensor:
        """Begin to send rows [sum(sent_rows), dim] -> the memory in which others will arrive."""
        self.received = rows.new_empty(sum(received_rows), rows.shape[1])
        rows = rows.contiguous()
        self.pending = all_to_all(self.received, rows, self.group, sent_rows, received_rows)
        return self.received

    def finish(self) -> Tensor:
        """Wait -> the rows that have arrived. Only the caller keeps them, and may free them."""
        self.pending.wait()
        received = self.received
        self.received = None
        return received


class Start(torch.autograd.Function):
    """Forward starts an exchange of rows; backward waits for the exchange of their gradients."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        """Return the memory in which rows arrive. Only `Finish` may read it."""
        ctx.exchange = exchange
        return exchange.start(rows, exchange.sent_rows, exchange.received_rows)

    @staticmethod
    def backward(ctx, _grad: Tensor):
        """Return the gradient of `rows`, which the backward of `Finish` has begun to receive."""
        return ctx.exchange.finish(), None


class Finish(torch.autograd.Function):
    """Forward waits for the rows; backward starts to send their gradients back."""

    @staticmethod
    def forward(ctx, received: Tensor, exchange: Exchange) -> Tensor:
        """Return the rows that have arrived."""
        ctx.exchange = exchange
        return exchange.finish().view_as(received)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Send `grad`. What is returned has only the right shape: see `Start.backward`."""
        ctx.exchange.start(grad, ctx.exchange.received_rows, ctx.exchange.sent_rows)
        return grad, None


def cut(sizes_GL: Tensor) -> Tensor:
    """Cut blocks of rows into n almost equal chunks: block sizes int64 [G, L] -> [n, G, L]."""
    bounds = torch.arange(N_CHUNKS + 1)[:, None, None] * sizes_GL // N_CHUNKS
    return bounds.diff(dim=0)


def run_in_chunks(experts: Callable, group: Group, sorted_ND: Tensor, counts_E: Tensor) -> Tensor:
    """What step 7's `run_experts` does with --ep, in chunks that overlap."""
    leaving_GL, arriving_GL, _ = exchange_counts(counts_E, group)
    leaving = cut(leaving_GL)
    arriving = cut(arriving_GL)
    sizes_nE = leaving.flatten(1)
    rows_by_chunk = transpose_blocks(sorted_ND, sizes_nE.T)  # they were sorted by expert
    chunks = rows_by_chunk.split(sizes_nE.sum(1).tolist())

    dispatches = []
    for i, rows in enumerate(chunks):
        exchange = Exchange(group, leaving[i].sum(1).tolist(), arriving[i].sum(1).tolist())
        dispatches.append((Start.apply(rows, exchange), exchange))
    combines = []
    for i, (received, exchange) in enumerate(dispatches):
        rows_RD = Finish.apply(received, exchange)  # sorted by rank, then by expert
        counts_L = arriving[i].sum(0).to(rows_RD.device)
        out_RD = experts(transpose_blocks(rows_RD, arriving[i]), counts_L)
        reverse = Exchange(group, exchange.received_rows, exchange.sent_rows)
        outgoing = transpose_blocks(out_RD, arriving[i].T)
        combines.append((Start.apply(outgoing, reverse), reverse))
    returned = [Finish.apply(received, exchange) for received, exchange in combines]
    return transpose_blocks(torch.cat(returned), sizes_nE)


class OverlappedMoE(MoE):
    """Hides messages. To be combined with a class that balances."""

    def run_experts(self, sorted_ND: Tensor, counts_E: Tensor) -> Tensor:
        """As `MoE.run_experts`."""
        if self.ep_group.size == 1:
            return self.experts(sorted_ND, counts_E)
        return run_in_chunks(self.experts, self.ep_group, sorted_ND, counts_E)


for name in ("none", "loss", "bias", *routing.BALANCES):
    BALANCE[f"{name}+overlap"] = type(f"{name}+overlap", (OverlappedMoE, BALANCE[name]), {})
