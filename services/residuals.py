"""What compressed sums of gradients owe (services/compression.py), as pieces of a checkpoint.

Each rank owes something else of the same parameter. So the full tensor has one dimension more: [n, *shape] for the n
ranks over which the parameter's gradient is summed. Under the same layout a rank reads its own row, and goes on bit for
bit. Other ranks share the sum of all rows equally: together they owe as much. (One rank alone sums nothing, and owes
nothing.)
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from common.comm import Mesh
from common.layout import Layout, Split, layout_of
from services.boxes import Piece
from services.checkpoint import Checkpoint


def row_of(param: Tensor, mesh: Mesh) -> Layout:
    """The record of what this rank owes of a gradient: a row of [n, *shape], for n ranks that add it up."""
    layout, row, n = layout_of(param), 0, 1
    for dim in (*layout.partial_over, layout.replicas):
        if dim in mesh.groups:
            row, n = row * mesh[dim].size + mesh[dim].rank, n * mesh[dim].size
    return Layout((Split(0, "owed", row, row + 1, n), *(replace(split, dim=split.dim + 1) for split in layout.splits)))


def owed(sync: Any, optimizer: Any, mesh: Mesh) -> Iterator[Piece]:
    """What this rank's compressed sums owe, of each parameter; nothing without --compress, or before the first sum."""
    lost = getattr(getattr(sync, "sum_up", None), "lost", {})
    names = {param: name for name, param in optimizer.model.named_parameters()}
    for bucket in sync.buckets if lost else ():
        if bucket.flat.data_ptr() in lost:
            parts = lost[bucket.flat.data_ptr()].split([param.numel() for param in bucket.params])
            for param, part in zip(bucket.params, parts, strict=True):
                yield Piece("owed", names[param], part, (1, *param.shape), row_of(param, mesh))


def take_over(sync: Any, optimizer: Any, mesh: Mesh, found: Checkpoint):
    """Owe what a checkpoint says: each rank its own row or, if they were more or fewer ranks, an equal share of all."""
    stored = found.meta["tensors"].get("owed", {})
    if not stored or not hasattr(getattr(sync, "sum_up", None), "lost"):
        return
    dtype = getattr(torch, next(iter(stored.values()))["dtype"])
    for bucket in sync.buckets:
        if bucket.group.size > 1:
            sync.sum_up.lost[bucket.flat.data_ptr()] = torch.zeros_like(bucket.flat, dtype=dtype)
    for piece in owed(sync, optimizer, mesh):
        mine, *cuts = piece.layout.splits
        n = stored[piece.name]["shape"][0] if piece.name in stored else 0
        if n == mine.full:
            found.fill(piece)
            continue
        for row in range(n):
            splits = replace(mine, start=row, stop=row + 1, full=n), *cuts
            part = replace(piece, tensor=torch.zeros_like(piece.tensor), layout=Layout(splits))
            found.fill(part)
            piece.tensor.add_(part.tensor, alpha=1 / mine.full)
