"""A variant for step 2: gradients summed in fewer bits (--compress).

It replaces the all-reduce of a bucket and is lossy. What was not sent is kept and added to the next
step's gradient, "error feedback" (Seide et al. 2014; Karimireddy et al. 2019), so that it is late, not lost.
Checkpoints hold it, too.

    bf16   16 bits                                                      1/2 of the bytes of fp32
    int8   8 bits, and an fp32 scale per 256 values                     (1 + 4/256) / 4
    topk   the largest --topk-fraction of values, with their places     n x fraction: gathered, so it grows with n
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, Mesh, Pending, all_gather, all_reduce, all_to_all
from common.layout import Layout, Split, layout_of
from services.checkpoint import Checkpoint, Piece
from theory.traffic import BLOCK


def quantise(values: Tensor) -> Tensor:
    """[..., 256] floats -> int8 [..., 260]: the values in units of scale = max/127, then the scale's four bytes."""
    scale = (values.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat(((values / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(blocks: Tensor) -> Tensor:
    """The inverse of `quantise`: int8 [..., 260] -> fp32 [..., 256]."""
    return blocks[..., :BLOCK] * blocks[..., BLOCK:].contiguous().view(torch.float32)


def narrow_sum(values: Tensor, group: Group, config: Any) -> tuple[Tensor, Tensor]:
    """Sum in 16 or 8 bits. Takes this rank's values [elements]; returns (sum over the group, what of ours was lost).

    Adding in so few bits would round at every rank, or overflow. So rank r receives slice r of everyone (all-to-all),
    adds up in fp32, and makes the sum narrow again for all to gather; what that loses, rank r keeps.
    """
    narrow, widen = (quantise, dequantise) if config.compress == "int8" else (Tensor.bfloat16, Tensor.float)
    length = len(values)
    ours = F.pad(values, (0, -length % (group.size * BLOCK))).view(group.size, -1, BLOCK)
    sent = narrow(ours)
    lost = ours - widen(sent)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group).wait()
    total = widen(received).sum(0)
    summed = narrow(total)
    lost[group.rank] += total - widen(summed)
    all_gather(received.view(-1), summed.view(-1), group).wait()
    return widen(received).view(-1)[:length].to(values.dtype), lost.view(-1)[:length]


def topk_sum(values: Tensor, group: Group, config: Any) -> tuple[Tensor, Tensor]:
    """Sum only the largest values of each rank; takes and returns the same as `narrow_sum`.

    Every rank gathers everyone's top values (fp32) with their indices in the buffer (int32), and adds them up.
    """
    count = max(1, int(config.topk_fraction * len(values)))
    places = values.abs().topk(count).indices
    message = torch.stack((values[places].float().view(torch.int32), places.int()))
    everyone = message.new_empty(group.size, 2, count)
    all_gather(everyone.view(-1), message.view(-1), group).wait()
    lost, total = values.clone(), torch.zeros_like(values)
    lost[places] -= values[places].float()
    for numbers, at in everyone:
        total[at.long()] += numbers.view(torch.float32)
    return total, lost


COMPRESSED_SUMS = {"bf16": narrow_sum, "int8": narrow_sum, "topk": topk_sum}


class CompressedSum:
    """An all-reduce that sends fewer bytes; `lost`: what each buffer still owes, by the address of its memory."""

    def __init__(self, config: Any):
        self.config, self.sum = config, COMPRESSED_SUMS[config.compress]
        self.lost: dict[int, Tensor] = {}

    def __call__(self, buffer: Tensor, group: Group) -> Pending:
        """Replace `buffer` [elements] by its sum over the group; done when it returns. It is the same in every step."""
        if group.size == 1:
            return all_reduce(buffer, group)
        owed = self.lost.get(buffer.data_ptr(), 0.0)
        total, self.lost[buffer.data_ptr()] = self.sum(buffer + owed, group, self.config)
        buffer.copy_(total)
        return Pending(group, [])


def row_of(param: Tensor, mesh: Mesh) -> Layout:
    """The record of what this rank owes of a gradient: a row of [n, *shape], for n ranks that add it up."""
    layout, row, n = layout_of(param), 0, 1
    for dim in (*layout.partial_over, layout.replicas):
        if dim in mesh.groups:
            row, n = row * mesh[dim].size + mesh[dim].rank, n * mesh[dim].size
    return Layout((Split(0, "owed", row, row + 1, n), *(replace(split, dim=split.dim + 1) for split in layout.splits)))


def owed(sync: Any, optimizer: Any, mesh: Mesh) -> Iterator[Piece]:
    """What this rank's compressed sums owe, of each parameter; nothing without --compress, or before the first sum."""
    lost = getattr(getattr(sync, "all_reduce", None), "lost", {})
    names = {param: name for name, param in optimizer.model.named_parameters()}
    for bucket in sync.buckets if lost else ():
        if bucket.flat.data_ptr() in lost:
            parts = lost[bucket.flat.data_ptr()].split([param.numel() for param in bucket.params])
            for param, part in zip(bucket.params, parts, strict=True):
                yield Piece("owed", names[param], part, (1, *param.shape), row_of(param, mesh))


def take_over(sync: Any, optimizer: Any, mesh: Mesh, found: Checkpoint):
    """Owe what a checkpoint says: each rank its own row or, if they were more or fewer ranks, an equal share of all."""
    stored = found.meta["tensors"].get("owed", {})
    if not stored or not isinstance(getattr(sync, "all_reduce", None), CompressedSum):
        return
    dtype = getattr(torch, next(iter(stored.values()))["dtype"])
    for bucket in sync.buckets:
        if bucket.group.size > 1:
            sync.all_reduce.lost[bucket.flat.data_ptr()] = torch.zeros_like(bucket.flat, dtype=dtype)
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
