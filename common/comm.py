"""A thin layer over torch.distributed. Ranks form a mesh with named dimensions, and send one
another messages.

A *rank* is one of the processes that torchrun starts, and also its number, from 0. All run the same
script; each has its own memory, and its own GPU if there are any. A *group* is some of the ranks,
or all. Ranks communicate by *collectives*, calls that all ranks of a group make, and by messages
between two ranks (`exchange`).

              tp ->
        dp  [0  1  2  3]      Mesh(dp=2, tp=4) lays the ranks out as arange(8).reshape(2, 4)
         |  [4  5  6  7]

On rank 5, mesh["tp"] is the group {4, 5, 6, 7}, in which its number is 1, and mesh["dp"] the group
{1, 5}; mesh["all"] has all ranks. What four collectives do, on two ranks:

                      rank 0 has     rank 1 has          then rank 0 has     and rank 1
    all_reduce        1 2            10 20               11 22               11 22
    reduce_scatter    1 2            10 20               11                  22
    all_gather        1              2                   1 2                 1 2
    all_to_all        1 2            10 20               1 10                2 20

A message between two ranks has the rank that it goes to, or comes from:

    exchange([(x, right)], [(received, left)], group)    sends x to rank `right` of the group, and
                                                         fills `received` by what `left` sends

Each of these four, and `exchange`, starts its messages and returns a `Pending`; Python goes on
while they travel:

    pending = all_reduce(gradient, mesh["dp"])
    ...                                            computation that overlaps the message
    pending.wait()                                 now `gradient` may be used

Always call `wait`. Until then, neither change the tensor that is sent nor read the one that is
filled; in `all_reduce` they are one. All tensors must be contiguous. All ranks of a group must
start their collectives in the same order.

Let S be the bytes of the whole tensor: the one that all_reduce sums, all_gather fills, or
reduce_scatter is given. In a ring of n ranks each sends

    all_reduce                    2 (n-1)/n S       S = 8 MB, n = 4: 12 MB
    all_gather, reduce_scatter    (n-1)/n S         S = 8 MB, n = 4: 6 MB

(Step 2's `RingSync` shows why.) `Mesh.sent` counts the bytes that a rank sends: by these three
calls according to the formulas, although NCCL may choose something else than a ring; by
`all_to_all` and `exchange` what goes to other ranks.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from common import UserError


@dataclass
class Group:
    """Ranks that communicate, such as those along one mesh dimension."""

    name: str
    rank: int  # this rank's number in the group
    size: int
    handle: dist.ProcessGroup | None  # PyTorch's object for the group; None for a group of one
    # Bytes that this rank sends, by (group's name, operation). All groups of a mesh share this
    sent: Counter = field(default_factory=Counter)

    def share(self, total: int, flag: str) -> slice:
        """The slice of `total` things for this rank. Raises UserError, naming `flag`, unless `size`
        divides `total`.
        """
        if total % self.size:
            raise UserError(
                f"{flag} {total} must be a multiple of the {self.size} ranks of {self.name}"
            )
        length = total // self.size
        return slice(self.rank * length, (self.rank + 1) * length)


class Mesh:
    """Named dimensions over all ranks: `mesh["tp"]` is this rank's group along tp."""

    def __init__(self, **sizes: int):
        """`sizes`: ranks along each dimension; neighbours differ in the last one. All ranks must
        make the same mesh. Raises UserError unless the product of the sizes is the number of ranks.
        """
        self.sizes = sizes
        self.world = 1
        self.rank = 0
        if dist.is_initialized():
            self.world = dist.get_world_size()
            self.rank = dist.get_rank()
        # In steps 4 to 7, if the other sizes do not divide the number of ranks, dp has been rounded
        # down, and the product is too small
        if math.prod(sizes.values()) != self.world:
            asked = " x ".join(f"--{name} {size}" for name, size in sizes.items() if name != "dp")
            raise UserError(
                f"{asked} must divide the number of ranks, which is {self.world} (--nproc_per_node)"
            )
        self.sent: Counter = Counter()  # of all groups
        everyone = dist.group.WORLD if self.world > 1 else None
        self.groups = {"all": Group("all", self.rank, self.world, everyone, self.sent)}
        self.handles: dict[tuple, dist.ProcessGroup] = {}  # by (ranks, queue): see `add_groups`
        self.grid = np.arange(self.world).reshape(*sizes.values())
        # A group along each dimension. Ignore `queue` until step 5: see `add_groups`
        for name in sizes:
            queue = "gradients" if name == "dp" else "activations"
            self.add_groups_along(name, name, queue=queue)

    def __getitem__(self, name: str) -> Group:
        """This rank's group along a dimension, or another group by its name, such as "all"."""
        return self.groups[name]

    def rows(self, *dims: str) -> np.ndarray:
        """The ranks of each group along `dims`: int [groups, size], a row for each group.

        In the figure at the top of this file, rows("dp") is [[0 4] [1 5] [2 6] [3 7]]. A group can
        span several dimensions: with Mesh(dp=2, cp=2, tp=2), rows("dp", "cp") is
        [[0 2 4 6] [1 3 5 7]].
        """
        axes = [list(self.sizes).index(dim) for dim in dims]
        others = [axis for axis in range(self.grid.ndim) if axis not in axes]
        size = math.prod(self.sizes[dim] for dim in dims)
        # `axes` become the last ones, so that the ranks of a group become a row
        return self.grid.transpose(others + axes).reshape(-1, size)

    def add_groups_along(self, name: str, *dims: str, queue: str):
        """Create the groups along `dims`; self[name] is the one that has this rank."""
        self.add_groups(name, self.rows(*dims), queue)

    def add_groups(self, name: str, rows: np.ndarray, queue: str):
        """Create a group for each row of `rows` [groups, size], whose ranks must ascend. The one
        that has this rank becomes self[name]. All ranks must call this.

        `queue`: "gradients" or "activations". Groups that are made here, of the same ranks, share a
        handle if they have the same queue ("all" has PyTorch's own). Step 5's cp and data, which
        with dp 1 have the same ranks, have different ones: NCCL sends the messages of a handle in
        order, and k and v, which are needed immediately, would wait behind a large bucket of
        gradients.
        """
        for row in rows.tolist():
            ranks = tuple(row)
            handle = self.handle_of(ranks, queue)
            if self.rank in ranks:
                own = ranks.index(self.rank)
                self.groups[name] = Group(name, own, len(ranks), handle, self.sent)

    def handle_of(self, ranks: tuple[int, ...], queue: str) -> dist.ProcessGroup | None:
        """PyTorch's group of these ranks for this queue, created at the first call; None for one
        rank.
        """
        if ranks != tuple(sorted(ranks)):
            raise ValueError(f"new_group numbers ranks in ascending order, so sort {ranks}")
        if len(ranks) == 1:
            return None
        if (ranks, queue) not in self.handles:
            # All ranks must call new_group, also those that are not in the group. A handle costs
            # memory, so it is shared
            self.handles[ranks, queue] = dist.new_group(ranks)
        return self.handles[ranks, queue]


class Pending:
    """Messages that are under way, if any. `wait` waits for them, then calls `then`."""

    def __init__(
        self,
        group: Group | None = None,
        works: Sequence[dist.Work] = (),
        tensors: Sequence[Tensor] = (),
        then: Callable | None = None,
    ):
        """`works`: what PyTorch returned, to wait for. `tensors`: those that are being sent, kept
        alive here because their caller may drop them. `then`: what is left to do when the messages
        have arrived.
        """
        self.group = group
        self.works = works
        self.tensors = tensors
        self.then = then

    def wait(self):
        """Wait until the results may be used. On a CPU, this blocks Python. On a GPU, it only sets
        an order: what is launched later runs after the messages. A second call does nothing.
        """
        if not self.works:
            return
        with record_function(f"wait {self.group.name}"):  # the name of the wait in a profile
            for work in self.works:
                work.wait()
            if self.then is not None:
                self.then()
        self.works = ()
        self.tensors = ()
        self.then = None


def count_sent(operation: str, group: Group, nbytes: float):
    """Count the bytes that this rank sends, or would send in a ring."""
    group.sent[group.name, operation] += round(nbytes)


# torch.compile must not trace it, because it changes a counter that is no tensor.
# (torch.compiler.disable would do the same, but importing the compiler takes seconds.)
count_sent._torchdynamo_disable = True


def all_reduce(tensor: Tensor, group: Group) -> Pending:
    """Sum `tensor` over the group, in place."""
    if group.size == 1:
        return Pending()
    count_sent("all_reduce", group, 2 * (group.size - 1) / group.size * tensor.nbytes)
    return Pending(group, [dist.all_reduce(tensor, group=group.handle, async_op=True)])


def exchange(
    sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group
) -> Pending:
    """Send and receive messages, each (tensor, the peer's rank in the group). If a rank sends
    another one several messages, they are received in the order in which they are sent. Both must
    agree on shape and dtype, which PyTorch does not check.
    """
    if group.size == 1:  # a ring of one
        for (outgoing, _), (incoming, _) in zip(sends, receives, strict=True):
            incoming.copy_(outgoing)
        return Pending()
    operations = []
    for tensor, peer in receives:
        operations.append(dist.P2POp(dist.irecv, tensor, group=group.handle, group_peer=peer))
    for tensor, peer in sends:
        count_sent("send", group, tensor.nbytes)
        operations.append(dist.P2POp(dist.isend, tensor, group=group.handle, group_peer=peer))
    if not operations:
        return Pending()
    sent_tensors = [tensor for tensor, _ in sends]
    return Pending(group, dist.batch_isend_irecv(operations), sent_tensors)


# torch 2.13 has renamed the next two collectives, and warns of the old names, which torch 2.11 and
# 2.12 need
if hasattr(dist, "all_gather_single"):
    torch_all_gather = dist.all_gather_single
    torch_reduce_scatter = dist.reduce_scatter_single
else:
    torch_all_gather = dist.all_gather_into_tensor
    torch_reduce_scatter = dist.reduce_scatter_tensor


def all_gather(output: Tensor, tensor: Tensor, group: Group) -> Pending:
    """Fill `output` [n * k, ...] with the `tensor` [k, ...] of all n ranks, rank 0's rows first.
    `tensor` may be a view of this rank's own rows of `output`.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending()
    count_sent("all_gather", group, (group.size - 1) / group.size * output.nbytes)
    work = torch_all_gather(output, tensor, group=group.handle, async_op=True)
    return Pending(group, [work], [tensor])


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group) -> Pending:
    """Sum the `tensor` [n * k, ...] of all n ranks; `output` [k, ...] gets this rank's shard, on
    rank 0 the first k rows of the sum.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending()
    count_sent("reduce_scatter", group, (group.size - 1) / group.size * tensor.nbytes)
    if dist.get_backend(group.handle) != "gloo":
        work = torch_reduce_scatter(output, tensor, group=group.handle, async_op=True)
        return Pending(group, [work], [tensor])
    # Gloo's own reduce-scatter all-reduces everything. Instead, an all-to-all brings each rank the
    # n ranks' versions of its shard, and it adds them up: it sends (n-1)/n S, as the formula says.
    # Until `wait`, `versions` takes S bytes more
    versions = torch.empty_like(tensor)
    work = dist.all_to_all_single(versions, tensor, group=group.handle, async_op=True)

    def add_up():
        torch.sum(versions.view(group.size, -1), 0, out=output.view(-1))

    return Pending(group, [work], [tensor], then=add_up)


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    group: Group,
    sent_rows: list[int] | None = None,
    received_rows: list[int] | None = None,
) -> Pending:
    """Send sent_rows[0] rows of `tensor` to rank 0, the next sent_rows[1] to rank 1, and so on;
    `output` gets received_rows[0] rows from rank 0, and so on. None: the same number for each.

    With sent_rows [2, 1], rows 0 and 1 go to rank 0, and row 2 to rank 1.
    """
    if group.size == 1:
        output.copy_(tensor)
        return Pending()
    # Rows for this rank itself are not sent
    if sent_rows is None:
        own_bytes = tensor.nbytes / group.size
    else:
        own_bytes = tensor[: sent_rows[group.rank]].nbytes  # any slice of as many rows is as large
    count_sent("all_to_all", group, tensor.nbytes - own_bytes)
    work = dist.all_to_all_single(
        output,
        tensor,
        output_split_sizes=received_rows,
        input_split_sizes=sent_rows,
        group=group.handle,
        async_op=True,
    )
    return Pending(group, [work], [tensor])
