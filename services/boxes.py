"""What a rank holds, as boxes of full tensors; and who writes which of them.

Full tensors have step 1's names, whatever the layout. A rank says what it holds as `Piece`s: its record of cuts and,
under ZeRO, a range of the cut tensor's elements. That is at most a few boxes (rectangles) of the full tensor:

    q_proj.weight [8, 6]; tp rank 1 of 2 holds rows 4-7, and its ZeRO slice elements 4-19 of these 24:

        . . . . . .
        . . . . . .        elements 4-5     box at (4, 4), 1 x 2      the end of a row
        . . . . . .        elements 6-17    box at (5, 0), 2 x 6      whole rows
        . . . . . .        elements 18-19   box at (7, 0), 1 x 2      the beginning of a row
        . . . . 1 1
        2 2 2 2 2 2
        2 2 2 2 2 2
        3 3 . . . .

Checkpoints, comparisons of replicas and of layouts all speak of boxes (services/checkpoint.py, replicas.py, state.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from common.comm import Mesh
from common.layout import Layout
from services.launch import gather_objects

WHOLE = Layout()


class Box(NamedTuple):
    """A rectangle of a tensor: indices start[d] .. start[d] + size[d] - 1 of each dimension d."""

    start: tuple[int, ...]
    size: tuple[int, ...]


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements start .. stop-1 of a tensor of this shape, counted in memory order, as boxes in that order.

    The end of a first row, whole rows, the beginning of a last one; the same again inside these two rows.
    """
    if start >= stop:
        return
    if not shape:
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


def without(a: Box, b: Box) -> list[Box]:
    """`a` less what `b` covers of it, as disjoint boxes."""
    common, found = overlap(a, b), []
    if common is None:
        return [a]
    start, size = list(a.start), list(a.size)
    for d in range(len(start)):  # what lies before and behind in dimension d, inside the overlap in those before d
        end, inner_end = start[d] + size[d], common.start[d] + common.size[d]
        for low, high in ((start[d], common.start[d]), (inner_end, end)):
            if low < high:
                found.append(Box((*start[:d], low, *start[d + 1 :]), (*size[:d], high - low, *size[d + 1 :])))
        start[d], size[d] = common.start[d], common.size[d]
    return found


def part(view: Tensor, box: Box, inner: Box) -> Tensor:
    """Of a tensor that holds `box`, the part that is `inner`: a view."""
    places = zip(inner.start, inner.size, box.start, strict=True)
    return view[tuple(slice(i - first, i - first + n) for i, n, first in places)]


@dataclass(frozen=True)
class Piece:
    """What a rank holds of one full tensor, and where it lies in memory: to be saved from, or to be filled.

    `kind`: "model" (weights), "master", "buffer", or a name in the update rule's state, such as "exp_avg".
    `tensor`: contiguous, the elements `start`, `start` + 1, ... of the cut tensor, which has `shape` and `layout`.
    """

    kind: str
    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    layout: Layout = WHOLE
    start: int = 0

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of the tensor that this is a part of."""
        return tuple(self.layout.full_shape(torch.Size(self.shape)))

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """The piece as boxes of the full tensor, each with its view of the memory; padding is left out."""
        flat, done = self.tensor.view(-1), 0
        for box in flat_boxes(tuple(self.shape), self.start, self.start + flat.numel()):
            view = flat[done : done + prod(box.size)].view(box.size)
            done += view.numel()
            start, size = list(box.start), list(box.size)
            for split in reversed(self.layout.splits):
                start[split.dim] += split.start
                size[split.dim] = min(size[split.dim], split.full - start[split.dim])
            if all(n > 0 for n in size):
                yield Box(tuple(start), tuple(size)), view[tuple(slice(n) for n in size)]


def gather(pieces: Iterable[Piece], mesh: Mesh | None) -> dict[str, dict[str, Tensor]]:
    """Full tensors on every rank, by kind and name (for small models: comparisons). A collective."""
    held = [(p.kind, p.name, p.full_shape, box, view.dtype, view) for p in pieces for box, view in p.boxes()]
    parts = [view.cpu().reshape(-1).view(torch.uint8) for *_, view in held]
    own = [entry[:-1] for entry in held], torch.cat([torch.empty(0, dtype=torch.uint8), *parts])  # quick to pickle
    found: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for entries, data in [*gather_objects(own, mesh), own]:  # one's own last: a copy that differs shows on its rank
        parts = data.split([prod(box.size) * dtype.itemsize for *_, box, dtype in entries])
        for (kind, name, shape, box, dtype), values in zip(entries, parts, strict=True):
            full = found[kind].setdefault(name, torch.zeros(shape, dtype=dtype))
            part(full, Box((0,) * len(shape), shape), box).copy_(values.clone().view(dtype).view(box.size))
    return dict(found)


# --- who writes what


class Entry(NamedTuple):
    """One box of a full tensor, as ranks tell each other of it."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return prod(self.box.size) * getattr(torch, self.dtype).itemsize


def divide(everyone: list[list[Entry]]) -> list[list[Entry]]:
    """From the boxes that each rank holds, those that it is to write: each element once, by whoever has least to do.

    Raises RuntimeError if a tensor is not whole, or ranks disagree about its shape or dtype.
    """
    held: dict[tuple[str, str], dict[Entry, list[int]]] = defaultdict(dict)
    for rank, entries in enumerate(everyone):
        for entry in entries:
            held[entry.kind, entry.name].setdefault(entry, []).append(rank)
    whole: list[tuple[Entry, list[int]]] = []
    for (kind, name), owners in held.items():
        shapes = {(entry.shape, entry.dtype) for entry in owners}
        if len(shapes) > 1:
            raise RuntimeError(f"{kind} of {name}: ranks hold parts of different tensors, {sorted(shapes)}")
        [(shape, _)] = shapes
        if sum(prod(entry.box.size) for entry in owners) > prod(shape):  # cut differently on different ranks
            owners = disjoint(owners)
        if sum(prod(entry.box.size) for entry in owners) != prod(shape):
            raise RuntimeError(f"{kind} of {name}: no rank holds some of its {prod(shape)} elements")
        whole += owners.items()
    shares: list[list[Entry]] = [[] for _ in everyone]
    written = [0] * len(everyone)
    for entry, ranks in sorted(whole, key=lambda item: (len(item[1]), -item[0].nbytes)):  # who has a choice comes last
        owner = min(ranks, key=written.__getitem__)
        shares[owner].append(entry)
        written[owner] += entry.nbytes
    return shares


def disjoint(owners: dict[Entry, list[int]]) -> dict[Entry, list[int]]:
    """The same elements in boxes that do not overlap."""
    found: dict[Entry, list[int]] = {}
    for entry, ranks in owners.items():
        rest = [entry.box]
        for other in found:
            rest = [smaller for box in rest for smaller in without(box, other.box)]
        found |= {entry._replace(box=box): ranks for box in rest}
    return found
