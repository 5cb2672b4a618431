"""Muon updates a matrix by its orthogonalised momentum (`--optimizer muon`).

AdamW updates each number by itself, so a rank can update any shard. Muon needs whole matrices. With
gradient G and momentum M of a matrix W [out, in], learning rate lr and weight decay d:

    M = 0.95 M + 0.05 G      U = 0.95 M + 0.05 G         each number by itself (Nesterov)
    O = orthogonal(U)        U = X S Y^T -> about X Y^T  all of U: five Newton-Schulz iterations
    W = (1 - lr d) W - lr 0.2 sqrt(max(out, in)) O       each number by itself

The factor 0.2 sqrt(max) makes an update as large as AdamW's, so --lr and --weight-decay mean the
same for both. Muon updates the hidden matrices, `*_proj.weight`, and AdamW all other parameters.

EACH MATRIX HAS AN OWNER, one of the ranks that hold a part of it. The others send it their parts of
U, it computes O, and sends each its part of O. M, W and the moments of AdamW stay sharded. Example:
ZeRO on two ranks, and a unit of three matrices a, b, c. Only a third of b is sent, there and back:

    unit       [ a  a  a  b | b  b  c  c ]
    holder       0  0  0  0   1  1  1  1        rank 0 sends U of its part of b to rank 1, which
    owner        0  0  0  1   1  1  1  1        computes O of b, and sends back O of that part

The owner is the holder that has the least work so far, when matrices are assigned from the largest
to the smallest. If several ranks hold the same part (without ZeRO all ranks of dp do), only the
first of them, counted from the owner, sends it.

THE LAW. A matrix with r rows and c >= r columns (or transposed) costs its owner 5 (4 r^2 c + 2 r^3)
FLOPs. All hidden matrices have S bytes, 2 a number, because they travel in bf16, in which the
iterations compute (fp64 stays fp64). Of n ranks, each sends

    without ZeRO, over dp     (n-1)/n S               parts of O; every rank has all of U
    without ZeRO, over tp     2 (n-1)/n S/n           parts of U, then of O
    with ZeRO, over dp        at most 2 S/n on average; far less if most matrices are on one rank

For tiny, S = 2 x 737,280 = 1,474,560 bytes in 28 matrices, on 4 ranks:

                    bytes that a rank sends      FLOPs of a rank
    --zero 0        1,105,920                    560,988,160, a quarter of all
    --zero 0 --tp 4   552,960                    560,988,160
    --zero 1        8,704 to 42,496              545,259,520 to 608,174,080

(If instead all ranks gathered all matrices, each would send 3 S/4 with ZeRO, and compute all of O.)

Source: Jordan et al. 2024, "Muon"; Liu et al. 2025, "Muon is Scalable for LLM Training" (the
factor). In PyTorch, torch.optim.Muon, for whole matrices; owners as in Megatron-LM's pull request
6425.

Run it:    torchrun --nproc_per_node=4 -m extras step04_tp_sp.py --tp 2 --optimizer muon
"""

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.checkpoint import place_of
from common.comm import Group, all_gather, exchange
from common.layout import record_of
from step01_single_gpu import ADAMW, OPTIMIZERS, Optimizer, decay_groups

MOMENTUM = 0.95
A, B, C = 3.4445, -4.7750, 2.0315  # A x + B x^3 + C x^5 drives singular values to 0.7 ... 1.2
ITERATIONS = 5


def orthogonal(x: Tensor) -> Tensor:
    """Set the singular values of a matrix [rows, columns] to about 1; keep its singular vectors."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T
    x = x / x.norm().clamp(min=1e-7)  # no singular value is above 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = A * x + (B * gram + C * (gram @ gram)) @ x
    return x


class Part(NamedTuple):
    """What a rank holds of a matrix: elements first ... last-1 of a flattened block of it.

    The block, in tensor parallelism a shard of the matrix and otherwise all of it, begins at (row,
    column) of the matrix and has rows of `width` elements. The range is ZeRO's; it may be empty.
    """

    row: int
    column: int
    width: int
    first: int
    last: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.last - self.first

    def places(self, whole: Tensor) -> Tensor:
        """Where the elements are in the flattened matrix `whole`, int64 [size]."""
        i = torch.arange(self.first, self.last, device=whole.device)
        row = self.row + i // self.width
        return row * whole.shape[1] + self.column + i % self.width


@dataclass(eq=False)
class Matrix:
    """A hidden matrix, of which the ranks of a group hold parts."""

    shape: list[int]  # [rows, columns], with the padding of shards
    scale: float  # of its update
    part: Part  # this rank's
    parts: list[Part] | None = None  # of all ranks
    owner: int | None = None
    senders: list[int] | None = None  # ranks that send their part to the owner
    update: Tensor | None = None  # this rank's part of U, and then of O
    whole: Tensor | None = None  # on the owner: U, and then O

    def flops(self) -> int:
        """The FLOPs of `orthogonal`."""
        r, c = sorted(self.shape)
        return ITERATIONS * (4 * r * r * c + 2 * r**3)


def matrices_of(param: nn.Parameter, span: tuple[int, int], mesh: Any) -> list[Matrix]:
    """The matrices of a parameter: one, or one for each expert of the whole parameter.

    `param` is [rows, columns] or [experts, rows, columns], perhaps a shard, of which this rank
    updates the elements in `span`. `mesh` is None in step 1.
    """
    place = place_of(param, span)
    padded_shape = list(param.shape)
    shard = record_of(param).shard
    if shard is not None:
        padded_shape[shard.dim] *= mesh[shard.over].size
    row, column = (start for start, _ in place.box[-2:])  # where this rank's shard begins
    first_expert = place.box[0][0] if param.dim() == 3 else 0
    scale = 0.2 * max(place.full_shape[-2:]) ** 0.5
    size = param.shape[-2:].numel()
    matrices = []
    for number in range(math.prod(place.full_shape[:-2])):
        offset = (number - first_expert) * size  # of this matrix in the flattened `param`
        first, last = (min(max(end - offset, 0), size) for end in span)
        part = Part(row, column, param.shape[-1], first, last)
        matrices.append(Matrix(padded_shape[-2:], scale, part))
    return matrices


def choose_owners(matrices: list[Matrix], group: Group, device: torch.device):
    """Tell one another the parts of all matrices; choose the owner and the senders of each."""
    n = group.size
    own_parts = [matrix.part for matrix in matrices]
    row = torch.tensor(own_parts, device=device)  # int64 [matrices, 5]
    table = row.new_empty(n, *row.shape)
    all_gather(table.view(-1), row.view(-1), group).wait()
    for matrix, rows in zip(matrices, table.transpose(0, 1).tolist(), strict=True):
        matrix.parts = [Part(*numbers) for numbers in rows]
    work = [0] * n
    for matrix in sorted(matrices, key=Matrix.flops, reverse=True):
        holders = [rank for rank in range(n) if matrix.parts[rank].size]
        matrix.owner = min(holders, key=work.__getitem__)
        work[matrix.owner] += matrix.flops()
        first = holders.index(matrix.owner)
        senders: dict[Part, int] = {}
        for rank in holders[first:] + holders[:first]:  # of equal parts, the first is sent
            senders.setdefault(matrix.parts[rank], rank)
        matrix.senders = list(senders.values())


def gather(matrices: list[Matrix], group: Group):
    """Put U together, on the owner of each matrix, from the parts in `update`."""
    sends = []
    receives = []
    arrived = []  # (matrix, part, its values)
    for matrix in matrices:
        if group.rank != matrix.owner:
            if group.rank in matrix.senders:
                sends.append((matrix.update, matrix.owner))
            continue
        matrix.whole = matrix.update.new_zeros(matrix.shape)
        for rank in matrix.senders:
            values = matrix.update
            if rank != group.rank:
                values = values.new_empty(matrix.parts[rank].size)
                receives.append((values, rank))
            arrived.append((matrix, matrix.parts[rank], values))
    exchange(sends, receives, group).wait()
    for matrix, part, values in arrived:
        matrix.whole.view(-1)[part.places(matrix.whole)] = values


def scatter(matrices: list[Matrix], group: Group):
    """Overwrite every rank's `update` with its part of the owner's matrix."""
    sends = []
    receives = []
    for matrix in matrices:
        if group.rank != matrix.owner:
            if matrix.part.size:
                receives.append((matrix.update, matrix.owner))
            continue
        flat = matrix.whole.flatten()
        for rank, part in enumerate(matrix.parts):
            values = flat[part.places(matrix.whole)]
            if rank == group.rank:
                matrix.update.copy_(values)
            elif part.size:
                sends.append((values, rank))
        matrix.whole = None
    exchange(sends, receives, group).wait()


def stage_group(mesh: Any) -> Group:
    """The ranks between which parts travel: all of this pipeline stage."""
    if mesh is None:
        return Group("muon", 0, 1, None)
    dims = [dim for dim in mesh.sizes if dim != "pp"]
    mesh.add_groups_along("muon", *dims, queue="gradients")
    return mesh["muon"]


class Muon:
    """An optimizer like those of torch.optim: Muon for the hidden matrices, AdamW for the rest."""

    def __init__(self, optimizer: Optimizer):
        """`optimizer`: step 1's, or ZeRO. All ranks of a pipeline stage call this together."""
        self.hidden: dict[str, list[Matrix]] = {}
        for name, span in optimizer.spans().items():
            if name.endswith("_proj.weight"):
                param = optimizer.model.get_parameter(name)
                self.hidden[name] = matrices_of(param, span, optimizer.mesh)
        self.matrices = list(chain(*self.hidden.values()))
        self.group = stage_group(optimizer.mesh)
        param = next(optimizer.model.parameters())
        choose_owners(self.matrices, self.group, param.device)
        dtype = torch.float64 if param.dtype == torch.float64 else torch.bfloat16
        self.like = torch.empty(0, dtype=dtype, device=param.device)

        self.masters = optimizer.masters
        rest = {name: master for name, master in self.masters.items() if name not in self.hidden}
        self.adamw = torch.optim.AdamW(decay_groups(rest, optimizer.config), **ADAMW)
        self.rates = dict(weight_decay=optimizer.config.weight_decay)  # of the hidden matrices
        self.state = self.adamw.state
        self.param_groups = [*self.adamw.param_groups, self.rates]

    def zero_grad(self):
        """Drop the gradients."""
        for master in self.masters.values():
            master.grad = None

    def momentum(self, name: str) -> Tensor:
        """Update this rank's part of M; return its part of U, flat. It may have none."""
        if name not in self.masters:
            return self.like
        master = self.masters[name]
        state = self.state[master]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(master)
        momentum = state["momentum_buffer"].lerp_(master.grad, 1 - MOMENTUM)
        return master.grad.lerp(momentum, MOMENTUM).flatten().to(self.like)

    @torch.no_grad()
    def step(self):
        """Update the masters. All ranks of a pipeline stage call this together."""
        updates = {name: self.momentum(name) for name in self.hidden}
        for name, matrices in self.hidden.items():
            parts = updates[name].split([matrix.part.size for matrix in matrices])
            for matrix, part in zip(matrices, parts, strict=True):
                matrix.update = part
        gather(self.matrices, self.group)
        for matrix in self.matrices:
            if matrix.whole is not None:
                matrix.whole = matrix.scale * orthogonal(matrix.whole)
        scatter(self.matrices, self.group)
        rate = self.rates["lr"]
        for name, update in updates.items():
            if name in self.masters:
                master = self.masters[name]
                master.mul_(1 - rate * self.rates["weight_decay"])
                master.sub_(update.view_as(master).to(master), alpha=rate)
        self.adamw.step()


OPTIMIZERS["muon"] = Muon
