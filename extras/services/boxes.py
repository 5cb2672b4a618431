"""What a rank holds, as boxes of whole tensors.

Whole tensors have step 1's names, whatever the layout. A rank says what it holds as `Piece`s: its record of cuts and,
under ZeRO, a range of the cut tensor's elements. That is at most a few boxes (rectangles) of the whole tensor:

    q_proj.weight [8, 6]; tp rank 1 of 2 holds rows 4-7, and its ZeRO slice elements 4-19 of these 24:

        . . . . . .
        . . . . . .        elements 4-5     box at (4, 4), 1 x 2      the end of a row
        . . . . . .        elements 6-17    box at (5, 0), 2 x 6      whole rows
        . . . . . .        elements 18-19   box at (7, 0), 1 x 2      the beginning of a row
        . . . . 1 1
        2 2 2 2 2 2
        2 2 2 2 2 2
        3 3 . . . .
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.layout import Shard, layout_of
from extras.services.launch import agree
from extras.services.tables import full_shape
from extras.variants import Parts

HELD = ("master", "buffer", "owed")  # what a rank holds; all other kinds are the update rule's state of a master


class Box(NamedTuple):
    """A rectangle of a tensor: indices start[d] .. start[d] + size[d] - 1 of each dimension d."""

    start: tuple[int, ...]
    size: tuple[int, ...]


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements start .. stop-1 of a tensor of this shape, counted in memory order, as boxes in that order.

    The end of a first row, whole rows, the beginning of a last one; the same again inside these two rows.
    """
    if not shape and start < stop:
        yield Box((), ())
        return
    row = prod(shape[1:])
    while start < stop:
        i, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            count = (stop - start) // row
            yield Box((i, *[0] * (len(shape) - 1)), (count, *shape[1:]))
            start += count * row
        else:
            end = min(stop, (i + 1) * row)
            for box in flat_boxes(shape[1:], inside, end - i * row):
                yield Box((i, *box.start), (1, *box.size))
            start = end


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes have in common, if anything."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(i + n, j + m) - k for i, n, j, m, k in zip(*a, *b, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def place_in(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Where the box `inner` lies in a tensor that holds `outer`."""
    places = zip(inner.start, inner.size, outer.start, strict=True)
    return tuple(slice(i - first, i - first + n) for i, n, first in places)


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one whole tensor, and where it lies in memory: to be saved from, or to be filled.

    `kind`: "master", "buffer", or a name in the update rule's state, such as "exp_avg".
    `tensor`: contiguous, elements `first`, `first` + 1, ... of this rank's part, which has `shape` after its `shards`.
    """

    kind: str
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    first: int = 0

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the tensor that this is a piece of."""
        return tuple(full_shape(self.shape, self.shards))

    def place(self) -> list:
        """Where it lies, for JSON."""
        return [list(self.shape), [astuple(shard) for shard in self.shards], self.first]

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """The piece as boxes of the whole tensor, each with its view of the memory; padding is left out."""
        flat, done = self.tensor.view(-1), 0
        for box in flat_boxes(tuple(self.shape), self.first, self.first + len(flat)):
            view = flat[done : done + prod(box.size)].view(box.size)
            done += view.numel()
            start, size = list(box.start), list(box.size)
            for shard in reversed(self.shards):
                start[shard.dim] += shard.start
                size[shard.dim] = min(size[shard.dim], shard.full - start[shard.dim])
            if all(n > 0 for n in size):
                yield Box(tuple(start), tuple(size)), view[tuple(slice(n) for n in size)]


def masters(parts: Parts) -> Iterator[Piece]:
    """What this rank updates: the masters, whole parameters in step 1's optimizer, shards in ZeRO's."""
    optimizer, params = parts.optimizer, dict(parts.model.named_parameters())
    units = {name: unit for unit in parts.units for name in unit.named}
    for name, master in optimizer.masters.items():
        first = max(0, units[name].first - units[name].span[name][0]) if units else 0
        yield Piece("master", name, master, tuple(params[name].shape), layout_of(params[name]).shards, first)


def state_piece(kind: str, master: Piece, value: Tensor, shape: tuple[int, ...]) -> Piece:
    """The update rule's `value` for a master: like it, or with dimensions of size 1, or a number.

    `shape` of the value before ZeRO shards it. A dimension that is as long as the parameter's is sharded as that is.
    """
    alike = len(shape) == len(master.shape)
    shards = tuple(s for s in master.shards if alike and shape[s.dim] == master.shape[s.dim])
    return Piece(kind, master.name, value, shape, shards, master.first if shape == master.shape else 0)


def stored_shape(master: Piece, value: Tensor) -> tuple[int, ...]:
    """Of the update rule's value for a master, before ZeRO shards it."""
    return master.shape if value.shape == master.tensor.shape else tuple(value.shape)


def pieces_of(state: dict[str, dict[str, Tensor]], places: dict[str, list]) -> Iterator[Piece]:
    """What a rank's file has, by name and kind, as pieces: `places` says of each name what `Piece.place` said."""
    for name, held in state.items():
        shape, shards, first = places[name]
        one = Piece("", name, next(iter(held.values())), tuple(shape), tuple(Shard(*shard) for shard in shards), first)
        for kind, tensor in held.items():
            if kind in HELD:
                yield replace(one, kind=kind, tensor=tensor)
            else:
                yield state_piece(kind, one, tensor, stored_shape(one, tensor))


def pieces(parts: Parts) -> Iterator[Piece]:
    """All that this rank holds from one step to the next: masters, the update rule's state, and buffers."""
    for master in masters(parts):
        yield master
        for kind, value in parts.optimizer.torch_optimizer.state.get(master.tensor, {}).items():
            yield state_piece(kind, master, value, stored_shape(master, value))
    for name, buffer in parts.model.named_buffers():
        yield Piece("buffer", name, buffer, tuple(buffer.shape), layout_of(buffer).shards)
    for name, owed, key, _ in debts(parts):
        if key in owed:
            yield Piece("owed", name, owed[key], tuple(owed[key].shape))


def debts(parts: Parts) -> Iterator[tuple[str, dict, Any, tuple[int, int]]]:
    """(name, what is owed, key in it, shape) of each sum of which something may be owed; no other rank owes it."""
    names = {param: name for name, param in parts.model.named_parameters()}
    sums = [(bucket, bucket.params) for bucket in getattr(parts.sync, "buckets", ())]
    sums += [(unit, unit.named.values()) for unit in parts.units]
    for kept, (key, params) in product(parts.keeps("owed"), sums):
        n, length = key.group.size, sum(param.numel() for param in params)
        whose = f"rank {parts.mesh.rank}: {' '.join(names[param] for param in params)}"
        yield whose, kept.owed, key, (n, -(-length // n))


def take_debts(parts: Parts, stored: Any):
    """Owe what a checkpoint says, if all ranks did under the same layout; else begin without. A collective."""
    about = stored.shapes("owed")
    owing = [debt for debt in debts(parts) if debt[0] in about]
    (lost,) = agree(bool(about) and not (owing and all(about[name] == shape for name, *_, shape in owing)))
    for name, owed, key, _ in () if lost else owing:
        owed[key] = stored.whole("owed", name).to(next(parts.model.parameters()).device)
    if lost and parts.mesh.rank == 0:
        print("what sums of gradients still owed belongs to another layout, and is left out", flush=True)


def room_for(kind: str, master: Piece, stored: tuple[int, ...], dtype: torch.dtype) -> Piece:
    """A piece of zeros for the update rule's state of a master, of which the `stored` whole tensor has this shape."""
    if stored == master.whole_shape:
        zeros = torch.zeros_like(master.tensor, dtype=dtype)
        return state_piece(kind, master, zeros, master.shape)
    alike = zip(stored, master.whole_shape, master.shape, strict=True) if len(stored) == len(master.shape) else ()
    shape = tuple(ours if n == whole else n for n, whole, ours in alike)
    zeros = torch.zeros(shape, dtype=dtype, device=master.tensor.device)
    return state_piece(kind, master, zeros, shape)


def take(parts: Parts, stored: Any, moments: bool):
    """Fill what this rank holds from a checkpoint (services/checkpoint.py), and let the weights follow the masters.

    Without `moments` the update rule begins anew.
    """
    optimizer = parts.optimizer
    for master in masters(parts):
        stored.fill(master)
        for kind in stored.stored[master.name].keys() - HELD if moments else ():
            room = room_for(kind, master, *stored.about(kind, master.name))
            stored.fill(room)
            optimizer.torch_optimizer.state[master.tensor][kind] = room.tensor
    for name, buffer in parts.model.named_buffers():
        stored.fill(Piece("buffer", name, buffer, tuple(buffer.shape), layout_of(buffer).shards))
    optimizer.publish()
    if moments:
        take_debts(parts, stored)
