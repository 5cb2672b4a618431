"""The mesh of ranks and its collectives.

    mesh = Mesh({"dp": 2, "tp": 4}, device, ledger)      ranks 0-7 as arange(8).view(2, 4), tp along the row

        dp 0      [0  1  2  3]        mesh["tp"] of rank 5: the group {4, 5, 6, 7}, in which it is number 1
        dp 1      [4  5  6  7]        mesh["dp"] of rank 5: the group {1, 5}

Every function takes the group it works in. In a group of one it sends nothing, so the same code runs on one process.
The ledger (services/ledger.py) sees every byte of them, booked as a ring sends them, per rank, for n ranks and a full
tensor of S bytes (the whole input of a reduction, the whole output of a gather):

    all_reduce 2 (n-1)/n S     reduce_scatter (n-1)/n S     all_gather (n-1)/n S     all_to_all (n-1)/n S     send S
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed two collectives; both names are served.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Rows = list[int] | None  # of each part of an uneven exchange
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]


@dataclass
class Group:
    """The ranks along one mesh dimension. `rank` counts inside the group; `handle` is None for a group of one."""

    name: str
    device: torch.device
    ledger: Any
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    narrow: Any = None  # if set, does what is asked of this group in fewer bits (services/activations.py)

    def share(self, total: int) -> slice:
        """This rank's part, in order, of `total` things."""
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    @property
    def gloo(self) -> bool:
        """Whether messages go through the host (gloo), and so have to be staged there if they live on a GPU."""
        return self.handle is not None and dist.get_backend(self.handle) == "gloo"


class Mesh:
    """Named dimensions over the ranks: `mesh["tp"]` is this rank's group along tp."""

    def __init__(self, sizes: dict[str, int], device: torch.device, ledger: Any, timeout: timedelta | None = None):
        """`sizes`: dimension -> number of ranks, slowest first; their product is the world size.

        `timeout` of every group's collectives; None: the backend's own, 10 minutes for NCCL, 30 for gloo.
        """
        self.sizes, self.device, self.ledger, self.timeout = sizes, device, ledger, timeout
        self.world = math.prod(sizes.values())
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.groups: dict[str, Group] = {}
        ranks = torch.arange(self.world).view(list(sizes.values()))
        for dim, (name, size) in enumerate(sizes.items()):
            self.join(name, ranks.movedim(dim, -1).reshape(-1, size))

    def join(self, name: str, ranks: Tensor):
        """Make the groups of a dimension, the rows of `ranks` int64 [groups, size]; enter the one with this rank."""
        self.groups[name] = Group(name, self.device, self.ledger)
        for row in ranks.tolist() if ranks.shape[1] > 1 else ():
            handle = dist.new_group(row, timeout=self.timeout)  # every rank takes part in making every group
            if self.rank in row:
                self.groups[name] = Group(name, self.device, self.ledger, row.index(self.rank), len(row), handle)

    def __getitem__(self, name: str) -> Group:
        """This rank's group along a dimension."""
        return self.groups[name]

    @property
    def data(self) -> Group:
        """The ranks that hold the same model and see other tokens: dp or, where sequences are cut too, dp x cp."""
        return self.groups["data" if "data" in self.groups else "dp"]

    def add(self, name: str, size: int, stride: int):
        """One more dimension, across those there are: each group has `size` ranks, `stride` apart.

        (cp 2, tp 2) joined as one dimension of 4 has stride 1; (dp 2, cp 2) of a mesh (dp 2, cp 2, tp 2) has stride 2.
        """
        self.join(name, torch.arange(self.world).view(-1, size, stride).movedim(1, -1).reshape(-1, size))

    def add_blocks(self, count: int):
        """Two more dimensions: "shard", the neighbours in one of `count` blocks of `data`; "replicas", across them."""
        size, stride = self.data.size // count, self.sizes.get("tp", 1)
        self.add("replicas", count, size * stride)
        self.groups["shard"] = self.data
        if count > 1:
            self.add("shard", size, stride)

    def add_pairs(self, name: str, of: str):
        """One more dimension, that pairs the ranks of dimension `of` from both ends: first with last, and so on."""
        lines = torch.arange(self.world).view(*self.sizes.values()).movedim(list(self.sizes).index(of), -1)
        half = self.sizes[of] // 2
        self.join(name, torch.stack((lines[..., :half], lines.flip(-1)[..., :half]), -1).reshape(-1, 2))


class Pending:
    """Communication under way. `wait` returns when its results may be used, and books the time it took."""

    def __init__(self, group: Group | None, works: list[dist.Work], *then: Callable[[], Any]):
        self.group, self.works, self.then = group, works, list(then)
        self.result: Callable[[], Any] = lambda: None

    def returning(self, result: Callable[[], Any]) -> "Pending":
        """Let `wait` return what `result` makes of the data that have arrived."""
        self.result = result
        return self

    def wait(self) -> Any:
        """Wait until done (on a GPU: let the compute stream wait). A second call does not wait."""
        if self.works:
            with self.group.ledger.waiting(self.group):
                for work in self.works:
                    work.wait()
                for action in self.then:
                    action()
        self.works = []
        return self.result()


def _collective(
    operation: str, output: Tensor, tensor: Tensor, group: Group, n_bytes: float, start: Callable[..., dist.Work]
) -> Pending:
    """Book a collective and `start` it, through host memory if a GPU's tensors meet gloo. In a group of one, copy."""
    if group.narrow is not None:
        return group.narrow.start(operation.split()[0], output, tensor)
    if group.size == 1:
        if output is not tensor:
            output.copy_(tensor)
        return Pending(group, [])
    group.ledger.book(group, operation.strip(), n_bytes)
    options = dict(group=group.handle, async_op=True)
    if group.gloo and output.is_cuda:
        host_in = tensor.cpu()
        host_out = host_in if tensor is output else torch.empty_like(output, device="cpu")
        return Pending(group, [start(host_out, host_in, **options)], lambda: output.copy_(host_out))
    return Pending(group, [start(output, tensor, **options)])


def all_reduce(tensor: Tensor, group: Group, purpose: str = "") -> Pending:
    """Sum `tensor` (any shape, contiguous) over the group, in place. `purpose` names its row in the ledger."""
    sent = 2 * (group.size - 1) / group.size * tensor.nbytes
    start = lambda out, _, **options: dist.all_reduce(out, **options)  # noqa: E731
    return _collective(f"all_reduce {purpose}", tensor, tensor, group, sent, start)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group) -> Pending:
    """`output` [k] = this rank's part of the sum over the n ranks' `tensor` [n k]."""
    sent = (group.size - 1) / group.size * tensor.nbytes
    if not group.gloo or group.narrow is not None:
        return _collective("reduce_scatter", output, tensor, group, sent, _reduce_scatter)
    # gloo's own all-reduces a copy of the whole. Here each rank receives its part from every rank and adds these up.
    parts = torch.empty_like(tensor)
    pending = _collective("reduce_scatter", parts, tensor, group, sent, dist.all_to_all_single)
    pending.then.append(lambda: torch.sum(parts.view(group.size, *output.shape), 0, out=output))
    return pending


def all_gather(output: Tensor, tensor: Tensor, group: Group, purpose: str = "") -> Pending:
    """`output` [n k] = the `tensor` [k] of every rank of the group, in order. `purpose` as in `all_reduce`."""
    sent = (group.size - 1) / group.size * output.nbytes
    return _collective(f"all_gather {purpose}", output, tensor, group, sent, _all_gather)


def all_to_all(
    output: Tensor, tensor: Tensor, group: Group, received: Rows = None, sent: Rows = None, purpose: str = ""
) -> Pending:
    """Send the r-th part of `tensor` (along dim 0) to rank r, receive everyone's in order into `output`.

    `sent`, `received`: rows of each part, if they are uneven. Booked is what leaves this rank: all parts but its own.
    """
    stays = sent[group.rank] if sent else tensor.shape[0] // group.size
    n_bytes = (tensor.shape[0] - stays) * (tensor.nbytes // max(1, tensor.shape[0]))
    start = lambda out, x, **options: dist.all_to_all_single(out, x, received, sent, **options)  # noqa: E731
    return _collective(f"all_to_all {purpose}", output, tensor, group, n_bytes, start)


def _header(tensor: Tensor) -> Tensor:
    """Shape and dtype as int64 [8]."""
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (6 - tensor.dim())])


def exchange(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group, check: bool = True
) -> Pending:
    """Point-to-point messages in one batch: (tensor, peer's rank in the group) each; receives fill their tensor.

    Tensors must be contiguous, those to send unchanged until `wait`. gloo silently accepts another shape, so with
    `check`, which both ends may leave out, shape and dtype go first, and `wait` raises RuntimeError if they differ.
    """
    if group.size == 1 or not (sends or receives):
        return Pending(group, [])
    if group.narrow is not None:
        return group.narrow.exchange(sends, receives, check)
    check, operations, arriving = check and group.gloo, [], []

    def post(operation: Callable, tensor: Tensor, peer: int):
        operations.append(dist.P2POp(operation, tensor, group=group.handle, group_peer=peer))

    for tensor, peer in sends:
        group.ledger.book(group, "send", tensor.nbytes)
        if check:
            post(dist.isend, _header(tensor), peer)
        post(dist.isend, tensor.cpu() if group.gloo else tensor, peer)
    for tensor, peer in receives:
        header = torch.empty(8, dtype=torch.int64)
        if check:
            post(dist.irecv, header, peer)
        buffer = torch.empty_like(tensor, device="cpu") if group.gloo and tensor.is_cuda else tensor
        post(dist.irecv, buffer, peer)
        arriving.append((tensor, buffer, header, peer))

    def finish():
        for tensor, buffer, header, peer in arriving:
            if check and not torch.equal(header, _header(tensor)):
                code, n_dims, *shape = header.tolist()
                raise RuntimeError(
                    f"rank {group.rank} of {group.name} expects {list(tensor.shape)} {tensor.dtype} from rank {peer}, "
                    f"which sent {shape[:n_dims]} {DTYPES[code]}"
                )
            if buffer is not tensor:
                tensor.copy_(buffer)
        operations.clear()  # until here they kept headers and host copies alive

    return Pending(group, dist.batch_isend_irecv(operations), finish)


def sum_over(group: Group, *values: float | Tensor) -> list[float]:
    """Sums over the group of a few numbers (loss, flags), the same on every rank."""
    numbers = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=group.device) for v in values])
    all_reduce(numbers, group, "(metrics)").wait()
    return numbers.tolist()
