"""Maps the tensors that a rank holds to whole tensors and back, so that any layout can read any layout's checkpoint.

Whole tensors have step 1's names and shapes under every layout. A rank holds a `Piece` of a tensor. The parameter's
record (common/layout.py) says which shard of it the rank has; with ZeRO the piece is a range of that shard's elements:

    q_proj.weight [8, 6]: rank 1 of tp 2 has rows 4-7, and its ZeRO slice has elements 4-19 of these 24

         .  .  .  .  4  5
         6  7  8  9 10 11        shards = (Shard(dim 0, rows 4-7 of 8),)
        12 13 14 15 16 17        shape = (4, 6)
        18 19  .  .  .  .        first = 4, tensor = [16]

`assemble` makes the whole tensor from the pieces of all ranks, and `Piece.cut` cuts one rank's piece out of a whole
tensor, as `materialize` does with initial values.
"""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from common.layout import Shard, layout_of, shard_of
from extras.services.tables import full_shape
from extras.variants import Parts


@dataclass(frozen=True)
class Piece:
    """The part of one whole tensor that a rank holds.

    `kind`: "master", "buffer", "owed" (see `debts`), or a name in the update rule's state, such as "exp_avg".
    `shards` cut a part of shape `shape` out of the whole; `tensor` has the part's elements `first`, `first` + 1, ...
    """

    kind: str
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    first: int = 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(full_shape(self.shape, self.shards))

    def place(self) -> list:
        """The fields `shape`, `shards` and `first`, in a form for JSON."""
        return [list(self.shape), [list(astuple(shard)) for shard in self.shards], self.first]

    def like(self, kind: str, value: Tensor) -> "Piece":
        """Make a Piece for `value`, a state of this master: at the same place or, if shapes differ, a whole tensor."""
        if value.shape == self.tensor.shape:
            return replace(self, kind=kind, tensor=value)
        return Piece(kind, self.name, value, tuple(value.shape))

    def cut(self, whole: Tensor) -> Tensor:
        """Cut this piece's elements out of `whole`. Return a `whole` of another shape, such as a step count, uncut."""
        if tuple(whole.shape) != self.whole_shape:
            return whole
        for shard in self.shards:
            whole = shard_of(whole, shard)
        return whole.flatten()[self.first : self.first + self.tensor.numel()].view_as(self.tensor)


def assemble(pieces: Iterable[Piece]) -> Tensor:
    """Assemble a whole tensor, on the CPU, from all ranks' pieces. Raises ValueError if a part is missing.

    The elements of the whole are numbered. Cutting these numbers like a piece tells where the piece's elements belong.
    """
    different = {(piece.shards, piece.first, piece.tensor.numel()): piece for piece in pieces}.values()
    shape, dtype = next((piece.whole_shape, piece.tensor.dtype) for piece in different)
    numbers = torch.arange(1, prod(shape) + 1).view(shape)  # 0 is padding
    whole, found = torch.empty(prod(shape) + 1, dtype=dtype), torch.zeros(prod(shape) + 1, dtype=torch.bool)
    for piece in different:
        places = piece.cut(numbers).flatten()
        whole[places] = piece.tensor.flatten()
        found[places] = True
    if not found[1:].all():
        raise ValueError(f"some of {piece.kind} {piece.name} is on no rank")
    return whole[1:].view(shape)


def pieces_of(state: dict[str, dict[str, Tensor]], places: dict[str, list]) -> Iterator[Piece]:
    """Yield the pieces in a rank's file: for each name the tensor that `places` describes, then that tensor's state."""
    for name, held in state.items():
        (kind, tensor), *rest = held.items()
        shape, shards, first = places[name]
        piece = Piece(kind, name, tensor, tuple(shape), tuple(Shard(*shard) for shard in shards), first)
        yield piece
        for kind, tensor in rest:
            yield piece.like(kind, tensor)


def masters(parts: Parts) -> Iterator[Piece]:
    """Yield the masters that this rank updates: of its trained parameters or, with ZeRO, of its slices of these."""
    optimizer, params = parts.optimizer, dict(parts.model.named_parameters())
    units = {name: unit for unit in parts.units for name in unit.named}
    for name, master in optimizer.masters.items():
        first = max(0, units[name].first - units[name].span[name][0]) if units else 0
        yield Piece("master", name, master, tuple(params[name].shape), layout_of(params[name]).shards, first)


def buffers(parts: Parts) -> Iterator[Piece]:
    """Yield the buffers of the model, such as the biases of routers."""
    for name, buffer in parts.model.named_buffers():
        yield Piece("buffer", name, buffer, tuple(buffer.shape), layout_of(buffer).shards)


def own(parts: Parts) -> str:
    """A suffix for the names of moments: "@1" on rank 1 of dp if ranks' moments differ (--sync diloco), else ""."""
    return f"@{parts.mesh['dp'].rank}" if parts.keeps("between") else ""


def pieces(parts: Parts) -> Iterator[Piece]:
    """Yield all that this rank keeps from step to step: masters, the update rule's state, buffers and `debts`."""
    for master in masters(parts):
        yield master
        for kind, value in parts.optimizer.torch_optimizer.state.get(master.tensor, {}).items():
            yield master.like(kind + own(parts), value)
    yield from buffers(parts)
    for name, (owed, key) in debts(parts).items():
        if key in owed:
            yield Piece("owed", name, owed[key], tuple(owed[key].shape))


def debts(parts: Parts) -> dict[str, tuple[dict, Any]]:
    """Where --compress keeps its errors for the next step: name -> (dict, key); a key is a bucket or a unit.

    The name contains all that an error depends on, so a run with another layout does not find the error.
    """
    names = {param: name for name, param in parts.model.named_parameters()}
    sums = {bucket: bucket.params for bucket in getattr(parts.sync, "buckets", ())}
    sums |= {unit: unit.named.values() for unit in parts.units}
    found = {}
    for kept, (key, params) in product(parts.keeps("owed"), sums.items()):
        sizes = f"rank {parts.mesh.rank} of {parts.mesh.sizes}, {key.flat.numel()} over {key.group.size}"
        found[" ".join([sizes, *(names[param] for param in params)])] = kept.owed, key
    return found


def take(parts: Parts, saved: Any, moments: bool):
    """Restore, from a checkpoint (services/checkpoint.py), all tensors that this rank holds. Raises UserError.

    Without `moments`, the update rule and `debts` start anew. Else `debts` are restored only under an unchanged layout.
    """
    optimizer, device = parts.optimizer, next(parts.model.parameters()).device
    for master in masters(parts):
        saved.fill(master)
        there = saved.stored[master.name].keys() - {"master"} if moments else set()
        for kind in {name.partition("@")[0] for name in there}:
            name = next(name for name in (kind + own(parts), f"{kind}@0", kind) if name in there)  # ours, or any rank's
            value = master.cut(saved.whole(name, master.name)).to(master.tensor.device)
            optimizer.torch_optimizer.state[master.tensor][kind] = value
    for buffer in buffers(parts):
        saved.fill(buffer)
    optimizer.publish()
    for name, (owed, key) in debts(parts).items() if moments else ():
        if name in saved.stored:
            owed[key] = saved.whole("owed", name).to(device)
