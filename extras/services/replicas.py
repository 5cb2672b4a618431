"""The proof, during a run, that ranks that hold the same numbers hold the same bits (`--check-replicas N`).

What several ranks hold alike has come to them from one reduction, or each has computed it from the same bits, by
operators that add in a fixed order. A rank whose memory or kernel errs, or a collective that was left out, shows here
long before it shows in the loss.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.layout import layout_of
from extras.services.boxes import Piece, pieces
from extras.services.launch import gather_objects
from extras.variants import Parts
from step02_ddp import Config as SINCE  # noqa: F401  # one process has no replicas

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # integers by size in bytes


@dataclass
class Flags:
    """Replicas (extras/services/replicas.py)."""

    check_replicas: int = 0  # steps between proofs that whatever several ranks hold is the same; 0: never


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers, their bits taken for integers: int64, a scalar."""
    return tensor.contiguous().view(-1).view(BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def compared(parts: Parts) -> Iterator[Piece]:
    """The pieces of a checkpoint, and the weights, unless they are in slices (ZeRO 3)."""
    yield from pieces(parts)
    for name, param in parts.model.named_parameters():
        if param.untyped_storage().size():
            yield Piece("weight", name, param.detach(), tuple(param.shape), layout_of(param).shards)


def check_replicas(config: Any, parts: Parts, step: int):
    """After an update, if it is time: whatever several ranks hold, along any dimension, is the same on all of them.

    Each rank tells of the boxes of whole tensors that it holds, with a sum over each one's bits. Raises RuntimeError on
    every rank, naming the first that differs. Cheap: the numbers stay where they are.
    """
    if not config.check_replicas or (step + 1) % config.check_replicas:
        return
    boxes = [(piece, *box) for piece in compared(parts) for box in piece.boxes()]
    sums = [bit_sum(view).to(next(parts.model.parameters()).device) for *_, view in boxes]
    sums = torch.stack(sums).tolist() if sums else []  # one wait for a GPU
    own = {(piece.kind, piece.name, box): s for (piece, box, _), s in zip(boxes, sums, strict=True)}
    seen: dict[tuple, tuple[int, int]] = {}
    for rank, theirs in enumerate(gather_objects(own)):
        for (kind, name, box), bits in theirs.items():
            first, expected = seen.setdefault((kind, name, box), (rank, bits))
            if bits != expected:
                text = (
                    f"step {step + 1}: {kind} of {name} is not the same on ranks {first} and {rank}: "
                    f"bit sums {expected}, {bits} of the part that begins at {list(box.start)}"
                )
                raise RuntimeError(text)
