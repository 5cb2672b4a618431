"""The proof, during a run, that ranks that hold the same numbers hold the same bits.

This may be asked on GPUs, too, though two runs differ there in their last bits (the backward of flash attention adds by
atomics). What several ranks hold alike has come to them from one reduction. Or each has computed it from the same bits,
by operators that add in a fixed order; common/moe.py's `add_rows` takes care of that.
"""

from typing import Any

import torch
from torch import Tensor

from common.comm import Mesh, all_gather
from common.layout import replica_group
from common.model import Decoder
from services.launch import gather_objects
from services.state import pieces

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # integers by size in bytes


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers, their bits taken for integers: int64, a scalar."""
    return tensor.contiguous().view(-1).view(BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def require_same_parameters(model: Decoder, mesh: Mesh):
    """Prove that all replicas hold the same weights, rather than copy rank 0's and hide why they differ.

    Compares a sum over each parameter's bits. Raises RuntimeError on every rank, naming the first that differs.
    """
    alike: dict[str, list[str]] = {}  # name of a group -> parameters of which its ranks hold the same
    for name, param in model.named_parameters():
        alike.setdefault(replica_group(param, mesh).name, []).append(name)
    for dim, names in alike.items():
        group = mesh[dim]
        if group.size == 1:
            continue
        sums = torch.stack([bit_sum(model.get_parameter(name).detach()) for name in names])
        everyone = sums.new_empty(group.size, len(sums))
        all_gather(everyone.view(-1), sums, group, "(check)").wait()
        for name, column in zip(names, everyone.T, strict=True):
            if (column != column[0]).any():
                raise RuntimeError(f"{name} is not the same on all ranks of {dim}: bit sums {column.tolist()}")


def require_same_replicas(optimizer: Any, mesh: Mesh):
    """Prove that whatever several ranks hold, along any dimension, is the same: weights, masters, moments, slices.

    Each rank tells of the boxes of full tensors that it holds (as for a checkpoint), with a sum over each one's bits.
    Raises RuntimeError on every rank, naming the first that differs. Cheap: the numbers stay where they are.
    """
    held = [(piece, *found) for piece in pieces(optimizer) for found in piece.boxes()]
    sums = [bit_sum(view).to(mesh.device) for *_, view in held]
    sums = torch.stack(sums).tolist() if sums else []  # one wait for a GPU
    own = {(piece.kind, piece.name, box): s for (piece, box, _), s in zip(held, sums, strict=True)}
    seen: dict[tuple, tuple[int, int]] = {}
    for rank, theirs in enumerate(gather_objects(own, mesh)):
        for (kind, name, box), bits in theirs.items():
            first, expected = seen.setdefault((kind, name, box), (rank, bits))
            if bits != expected:
                raise RuntimeError(
                    f"{kind} of {name} is not the same on ranks {first} and {rank}: bit sums {expected}, {bits} of the "
                    f"part that begins at {list(box.start)}"
                )
