"""The mesh of ranks, its collectives, and the ledger that sees every byte.

    with open_mesh({"dp": 2, "tp": 4}, device, "auto") as mesh:      ranks 0-7 as arange(8).view(dp=2, tp=4)

                 tp 0  1  2  3
        dp 0      [0  1  2  3]        mesh["tp"] of rank 5: the group {4, 5, 6, 7}, in which it is number 1
        dp 1      [4  5  6  7]        mesh["dp"] of rank 5: the group {1, 5}

Every function takes the group it works in. A group of one is a no-op, so the same code runs on one process. Bytes are
booked as a ring sends them, per rank, for n ranks and a full tensor of S bytes (the whole input of a reduction, the
whole output of a gather):

    all_reduce 2 (n-1)/n S     reduce_scatter (n-1)/n S     all_gather (n-1)/n S     all_to_all (n-1)/n S     send S
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed two collectives; both names are served.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8]


@dataclass
class Ledger:
    """Calls and bytes sent by this rank, by (mesh dimension, operation), and seconds waited, since the last `take`."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    wait_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[tuple[str, Any, Any]] = field(default_factory=list)
    entered: int = 0  # calls since the start, for the watchdog
    last: str = ""  # the one entered last

    def book(self, group: "Group", operation: str, n_bytes: float):
        """Enter one call that sends `n_bytes` from this rank."""
        self.entered, self.last = self.entered + 1, f"{group.name} {operation}"
        self.calls[group.name, operation] += 1
        self.bytes[group.name, operation] += n_bytes

    @contextmanager
    def waiting(self, group: "Group") -> Iterator[None]:
        """Book the enclosed time, during which this rank (or its GPU's compute stream) does nothing but wait."""
        if group.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self.events.append((group.name, first, last))
        else:
            start = time.perf_counter()
            yield
            self.wait_seconds[group.name] += time.perf_counter() - start

    def take(self) -> dict[str, Any]:
        """The entries as metrics, `traffic` {dim: {operation: bytes}}, `calls` and `wait_seconds`; then start anew."""
        for name, first, last in self.events:
            last.synchronize()
            self.wait_seconds[name] += first.elapsed_time(last) / 1e3
        traffic, calls = defaultdict(dict), defaultdict(dict)
        for (dim, operation), n_bytes in self.bytes.items():
            traffic[dim][operation] = n_bytes
            calls[dim][operation] = self.calls[dim, operation]
        taken = dict(traffic=dict(traffic), calls=dict(calls), wait_seconds=dict(self.wait_seconds))
        for entries in (self.calls, self.bytes, self.wait_seconds, self.events):
            entries.clear()
        return taken


@dataclass
class Group:
    """The ranks along one mesh dimension. `rank` counts inside the group; `handle` is None for a group of one."""

    name: str
    device: torch.device
    ledger: Ledger
    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None

    @property
    def gloo(self) -> bool:
        """Whether messages go through the host (gloo), and so have to be staged there if they live on a GPU."""
        return self.handle is not None and dist.get_backend(self.handle) == "gloo"


class Mesh:
    """Named dimensions over the ranks: `mesh["tp"]` is this rank's group along tp."""

    def __init__(self, sizes: dict[str, int], device: torch.device):
        """`sizes`: dimension -> number of ranks, slowest first; their product is the world size."""
        self.sizes, self.device, self.ledger = sizes, device, Ledger()
        self.world = math.prod(sizes.values())
        self.rank = dist.get_rank() if self.world > 1 else 0
        self.groups: dict[str, Group] = {}
        ranks = torch.arange(self.world).view(*sizes.values())
        for dim, (name, size) in enumerate(sizes.items()):
            self.join(name, ranks.movedim(dim, -1).reshape(-1, size))

    def join(self, name: str, ranks: Tensor):
        """Make the groups of a dimension, the rows of `ranks`, int64 [groups, size], and enter the one this rank is in.

        (DeviceMesh would make groups along all dimensions of each layout, three times as many; they have threads.)
        """
        self.groups[name] = Group(name, self.device, self.ledger)
        for row in ranks.tolist() if ranks.shape[1] > 1 else ():
            handle = dist.new_group(row)  # every rank takes part in making every group
            if self.rank in row:
                self.groups[name] = Group(name, self.device, self.ledger, row.index(self.rank), len(row), handle)

    def __getitem__(self, name: str) -> Group:
        """This rank's group along a dimension."""
        return self.groups[name]

    def add(self, name: str, size: int, stride: int):
        """One more dimension, across those there are: each group has `size` ranks, `stride` apart.

        (cp 2, tp 2) joined as one dimension of 4 has stride 1; (dp 2, cp 2) of a mesh (dp 2, cp 2, tp 2) has stride 2.
        """
        self.join(name, torch.arange(self.world).view(-1, size, stride).movedim(1, -1).reshape(-1, size))

    def add_pairs(self, name: str, of: str):
        """One more dimension, that pairs the ranks of dimension `of` from both ends: first with last, and so on."""
        lines = torch.arange(self.world).view(*self.sizes.values()).movedim(list(self.sizes).index(of), -1)
        half = self.sizes[of] // 2
        self.join(name, torch.stack((lines[..., :half], lines.flip(-1)[..., :half]), -1).reshape(-1, 2))

    def picture(self) -> str:
        """Which rank is where: the last dimension from left to right, the others from row to row."""
        *outer, inner = self.sizes
        lines = [f"mesh: {' x '.join(f'{name} {size}' for name, size in self.sizes.items())} ({inner} along the row)"]
        places = product(*(range(self.sizes[name]) for name in outer))
        for place, ranks in zip(places, torch.arange(self.world).view(-1, self.sizes[inner]).tolist(), strict=True):
            label = "  ".join(f"{name} {index}" for name, index in zip(outer, place, strict=True))
            lines.append(f"  {label}  [" + " ".join(f"{rank:2d}" for rank in ranks) + " ]")
        return "\n".join(lines)


def world_size() -> int:
    """Ranks of this job: of the process group if there is one, else what the launcher announces."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def gather_objects(thing: Any, mesh: Mesh | None) -> list[Any]:
    """Small Python objects from all ranks, in their order (set-up and reports; not in the ledger)."""
    if mesh is None or mesh.world == 1:
        return [thing]
    everyone = [None] * mesh.world
    dist.all_gather_object(everyone, thing)
    return everyone


class Pending:
    """Communication under way. `wait` returns when its results may be used, and books the time it took."""

    def __init__(self, group: Group, works: list[dist.Work], then: Callable[[], None] | None = None):
        self.group, self.works, self.then = group, works, then

    def wait(self):
        """Wait until done (on a GPU: let the compute stream wait). A second call does nothing."""
        if self.works:
            with self.group.ledger.waiting(self.group):
                for work in self.works:
                    work.wait()
                if self.then is not None:
                    self.then()
        self.works = []


def _run(group: Group, inputs: Tensor, output: Tensor, start: Callable[[Tensor, Tensor], dist.Work]) -> Pending:
    """Start a collective from `inputs` to `output`, through host memory if a GPU's tensors meet gloo."""
    if group.gloo and output.is_cuda:
        host_in = inputs.cpu()
        host_out = host_in if inputs is output else torch.empty_like(output, device="cpu")
        return Pending(group, [start(host_out, host_in)], lambda: output.copy_(host_out))
    return Pending(group, [start(output, inputs)])


def all_reduce(tensor: Tensor, group: Group, purpose: str = "") -> Pending:
    """Sum `tensor` (any shape, contiguous) over the group, in place. `purpose` names its row in the ledger."""
    if group.size == 1:
        return Pending(group, [])
    n_bytes = 2 * (group.size - 1) / group.size * tensor.nbytes
    group.ledger.book(group, f"all_reduce {purpose}".strip(), n_bytes)
    return _run(group, tensor, tensor, lambda out, _: dist.all_reduce(out, group=group.handle, async_op=True))


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group) -> Pending:
    """`output` [k] = this rank's k-th of the sum over the group of `tensor` [n k]."""
    if group.size == 1:
        output.copy_(tensor)
        return Pending(group, [])
    group.ledger.book(group, "reduce_scatter", (group.size - 1) / group.size * tensor.nbytes)
    return _run(group, tensor, output, lambda out, x: _reduce_scatter(out, x, group=group.handle, async_op=True))


def all_gather(output: Tensor, tensor: Tensor, group: Group, purpose: str = "") -> Pending:
    """`output` [n k] = the `tensor` [k] of every rank of the group, in order. `purpose` as in `all_reduce`."""
    if group.size == 1:
        output.copy_(tensor)
        return Pending(group, [])
    group.ledger.book(group, f"all_gather {purpose}".strip(), (group.size - 1) / group.size * output.nbytes)
    return _run(group, tensor, output, lambda out, x: _all_gather(out, x, group=group.handle, async_op=True))


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    received: list[int] | None = None,
    sent: list[int] | None = None,
    purpose: str = "",
) -> Pending:
    """Send the r-th part of `tensor` (along dim 0) to rank r, receive everyone's in order into `output`.

    `sent`, `received`: rows of each part, if they are uneven. Booked is what leaves this rank: all parts but its own.
    `purpose` as in `all_reduce`.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending(group, [])
    own = sent[group.rank] if sent else tensor.shape[0] // group.size
    n_bytes = (tensor.shape[0] - own) * (tensor.nbytes // max(1, tensor.shape[0]))
    group.ledger.book(group, f"all_to_all {purpose}".strip(), n_bytes)

    def start(out: Tensor, x: Tensor) -> dist.Work:
        return dist.all_to_all_single(out, x, received, sent, group=group.handle, async_op=True)

    return _run(group, tensor, output, start)


def _header(tensor: Tensor) -> Tensor:
    """Shape and dtype as int64 [8]."""
    return torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *[0] * (6 - tensor.dim())])


def exchange(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group, check: bool = True
) -> Pending:
    """Point-to-point messages in one batch: (tensor, peer's rank in the group) each; receives fill their tensor.

    Under gloo, which would silently accept most things, each message is preceded by its shape and dtype, and `wait`
    raises RuntimeError if the peer sent something else (more bytes than expected end the process in gloo itself). That
    costs as much as a small message; without `check`, which both ends must leave out alike, it is saved.
    Tensors must be contiguous, those to send unchanged until `wait`.
    """
    if group.size == 1 or not (sends or receives):
        return Pending(group, [])
    operations, headers, staged = [], [], []
    for tensor, peer in sends:
        group.ledger.book(group, "send", tensor.nbytes)
        if group.gloo:
            if check:
                operations.append(dist.P2POp(dist.isend, _header(tensor), group=group.handle, group_peer=peer))
            tensor = tensor.cpu()
        operations.append(dist.P2POp(dist.isend, tensor, group=group.handle, group_peer=peer))
    for tensor, peer in receives:
        if group.gloo:
            if check:
                headers.append((torch.empty(8, dtype=torch.int64), tensor, peer))
                operations.append(dist.P2POp(dist.irecv, headers[-1][0], group=group.handle, group_peer=peer))
            if tensor.is_cuda:
                staged.append((tensor, torch.empty_like(tensor, device="cpu")))
                tensor = staged[-1][1]
        operations.append(dist.P2POp(dist.irecv, tensor, group=group.handle, group_peer=peer))

    def finish():
        for header, tensor, peer in headers:
            if not torch.equal(header, _header(tensor)):
                code, n_dims, *shape = header.tolist()
                raise RuntimeError(
                    f"rank {group.rank} of {group.name} expects {list(tensor.shape)} {tensor.dtype} from rank {peer}, "
                    f"which sent {shape[:n_dims]} {DTYPES[code]}"
                )
        for target, source in staged:
            target.copy_(source)
        operations.clear()  # until here they kept headers and host copies alive

    return Pending(group, dist.batch_isend_irecv(operations), finish)


def sum_over(group: Group, *values: float | Tensor) -> list[float]:
    """Sums over the group of a few numbers (loss, flags), the same on every rank."""
    numbers = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=group.device) for v in values])
    all_reduce(numbers, group, "(metrics)").wait()
    return numbers.tolist()
