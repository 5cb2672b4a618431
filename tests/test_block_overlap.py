"""Overlap: what is under way while what is computed. Matrices and collectives of a block's backward, in order."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common import comm
from variants.block_overlap import EnterLinears, start_gather, start_keep, start_scatter, start_total

B, S, DIM, OUT = 1, 6, 4, 5
STARTS = dict(sp=(start_gather, start_scatter), whole=(start_keep, start_total))
ORDER = dict(
    sp=["all_gather", "dx", "dx", "reduce_scatter", "wait", "dW", "dW", "wait"],
    whole=["dx", "dx", "all_reduce", "dW", "dW", "wait"],
)


class Order(TorchDispatchMode):
    """Notes matrix products by the shape of their results."""

    def __init__(self, seen: list[str]):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm_):
            self.seen.append("dW" if result.shape == (OUT, DIM) else "dx")
        return result


def order(name: str) -> tuple[list[str], list[torch.Size]]:
    """Runs on every rank: what backward does, and the shapes of what it kept of the input."""
    group, starts, seen = comm.Mesh(tp=dist.get_world_size())["tp"], STARTS[name], []
    x = torch.ones(B, S // group.size if name == "sp" else S, DIM, requires_grad=True)
    weights = [torch.ones(OUT, DIM, requires_grad=True) for _ in range(2)]
    outputs = EnterLinears.apply(x, group, *starts, *weights)
    kept, wait = outputs[0].grad_fn.saved_tensors[0].shape, comm.Pending.wait

    def noted(pending):
        if pending.works:
            seen.append("wait")
        wait(pending)

    comm.observer, comm.Pending.wait = lambda operation, *_: seen.append(operation), noted
    try:
        with Order(seen):
            sum(output.sum() for output in outputs).backward()
    finally:
        comm.observer, comm.Pending.wait = None, wait
    return seen, kept


@pytest.mark.parametrize("name", ORDER)
def test_collectives_hide_behind_matrices(pools, name):
    """The gathering is waited for after dx, the sum of dx after dW; with SP only s/n tokens are kept."""
    for seen, kept in pools(2).run(order, name):
        assert seen == ORDER[name]
        assert kept == (B, S // 2 if name == "sp" else S, DIM)
