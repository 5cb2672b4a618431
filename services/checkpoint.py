"""Checkpoints that know no layout: boxes of full tensors, written by the ranks that hold them, read by those that need.

    OUT/checkpoints/step-00000050/rank-00000.bin    raw numbers, one box after another
                                  rank-00001.bin    ...
                                  meta.json         step, config, data position, loss scale; which box of which tensor
                                                    is where; a SHA-256 of every file, and of meta.json itself

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

WRITING. Ranks exchange their lists of boxes, never the numbers: what several hold is written by one of them, in turn.
Each rank streams its boxes into its own file; nothing is gathered. READING. Whoever needs some boxes maps the files
into memory and copies where theirs and the stored ones overlap. So any layout reads what any other wrote.

CRASHES. Everything is written under a hidden name and flushed to the disk; meta.json comes last; then the directory is
renamed. One to be removed is renamed back to a hidden name first. So a directory with a final name is complete, and
checksums tell whether it still is what was written. The last two are kept. (Several nodes need a shared folder.)
"""

import hashlib
import json
import mmap
import os
import re
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import UserError
from common.comm import Mesh
from common.layout import Layout
from services.launch import gather_objects

FORMAT = "nd-parallel checkpoint, version 2"
WHOLE = Layout()
ALIGNMENT = 8  # bytes: where a box begins in its file


# --- boxes


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


def index(shares: list[list[Entry]]) -> dict[str, dict[str, Any]]:
    """Where every box is: {kind: {name: {shape, dtype, boxes: [[rank's file, byte, start, size], ...]}}}."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for rank, entries in enumerate(shares):
        at = 0
        for entry in entries:
            tensor = found[entry.kind].setdefault(entry.name, dict(shape=entry.shape, dtype=entry.dtype, boxes=[]))
            tensor["boxes"].append([rank, at, entry.box.start, entry.box.size])
            at += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return dict(found)


# --- writing


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


def write_boxes(path: Path, tensors: Iterable[Tensor]) -> str:
    """Write tensors one after another, flushed to the disk; returns the SHA-256 of the file."""
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for tensor in tensors:
            raw = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            for data in (memoryview(raw), bytes(-len(raw) % ALIGNMENT)):
                digest.update(data)
                file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sync_to_disk(path: Path):
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sweep(parent: Path):
    """Delete what bears a hidden name: checkpoints half written, or to be removed."""
    for path in parent.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


class Saver:
    """Writes the checkpoints of a run, together with those of the other ranks; at most one is under way at a time."""

    def __init__(self, run_directory: Path, mesh: Mesh | None = None, keep: int = 2):
        self.out, self.mesh, self.keep = Path(run_directory), mesh, keep
        self.rank, self.world = (0, 1) if mesh is None else (mesh.rank, mesh.world)
        self.parent = self.out / "checkpoints"
        self.busy = False  # a checkpoint has been begun and not yet settled
        self.thread: threading.Thread | None = None

    def save(self, step: int, pieces: Iterable[Piece], meta: dict[str, Any], background: bool = False):
        """Write a checkpoint of `step` and remove all but the last `keep`. A collective.

        Those of later steps go too: the run went back to an earlier one, and they are not its future. Raises UserError
        on every rank if a disk is full or not writable; what was saved before is then untouched. In the `background`,
        the tensors are copied, and what goes wrong is raised by the next `save` or `settle`.
        """
        self.settle()
        self.step, self.error, self.busy = step, None, True
        self.partial = self.parent / f".step-{step:08d}.partial"
        self.written, self.cancelled = threading.Event(), threading.Event()
        held = [(p, box, view) for p in pieces for box, view in p.boxes()]
        entries = [Entry(p.kind, p.name, p.full_shape, str(view.dtype)[6:], box) for p, box, view in held]
        if self.rank == 0:
            with self.noting_errors():
                sweep(self.parent)
                self.partial.mkdir(parents=True)
        everyone = gather_objects((self.error, entries), self.mesh)  # and nobody writes before the directory is there
        self.give_up([error for error, _ in everyone])
        shares = divide([theirs for _, theirs in everyone])
        self.meta = dict(format=FORMAT, step=step) | meta | dict(tensors=index(shares) if self.rank == 0 else None)
        views: dict[tuple[str, str], list[tuple[Box, Tensor]]] = defaultdict(list)
        for piece, box, view in held:
            views[piece.kind, piece.name].append((box, view))
        own = [
            next(part(view, box, e.box) for box, view in views[e.kind, e.name] if overlap(box, e.box) == e.box)
            for e in shares[self.rank]
        ]
        if background:
            own = [view.detach().to("cpu", copy=True) for view in own]
            self.thread = threading.Thread(target=self.write_and_commit, args=(own,), daemon=True)
            self.thread.start()
        else:
            self.write(own)
            self.settle()

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """What the operating system reports inside is kept for `give_up`; in a thread, whatever goes wrong."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and self.thread is None:
                raise
            self.error = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"

    def write(self, own: list[Tensor]):
        """This rank's file, and beside it its checksum, which tells rank 0 that it is complete."""
        with self.noting_errors():
            digest = write_boxes(self.partial / file_name(self.rank), own)
            (self.partial / f"{file_name(self.rank)}.sha256").write_text(digest)
        self.written.set()

    def write_and_commit(self, own: list[Tensor]):
        """The background thread. It takes part in no collective: ranks may be in different steps."""
        self.write(own)
        if self.rank == 0 and self.error is None:
            self.commit()

    def digests(self) -> dict[str, str]:
        """The checksums that ranks have left so far."""
        found = {}
        for name in map(file_name, range(self.world)):
            side = self.partial / f"{name}.sha256"
            text = side.read_text() if side.exists() else ""
            if len(text) == 64:
                found[name] = text
        return found

    def commit(self):
        """Rank 0: when all files are complete, write meta.json, give the directory its name, remove old ones."""
        final = self.parent / f"step-{self.step:08d}"
        with self.noting_errors():
            while len(files := self.digests()) < self.world:
                if self.cancelled.wait(0.01):
                    return
            self.meta["files"] = files
            self.meta["sha256"] = meta_checksum(self.meta)
            (self.partial / "meta.json").write_text(json.dumps(self.meta) + "\n")
            for name in files:
                (self.partial / f"{name}.sha256").unlink()
            for path in (self.partial / "meta.json", self.partial):
                sync_to_disk(path)
            if final.exists():
                final.rename(self.parent / f".{final.name}.old")
            self.partial.rename(final)
            found = sorted(self.parent.glob("step-*"))
            own = found.index(final) + 1
            for old in found[: max(0, own - self.keep)] + found[own:]:
                old.rename(self.parent / f".{old.name}.old")
            sync_to_disk(self.parent)
            sweep(self.parent)

    def join(self):
        """Wait for the background thread of this rank alone (all ranks end alike, but not in step)."""
        if self.thread is not None:
            self.thread.join()

    def settle(self):
        """Wait until the checkpoint under way is complete. A collective. Raises UserError if it failed on any rank."""
        if not self.busy:
            return
        self.written.wait()
        self.give_up(gather_objects(self.error, self.mesh))
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        elif self.rank == 0:
            self.commit()
        self.give_up(gather_objects(self.error, self.mesh))
        self.busy = False

    def give_up(self, errors: list[str | None]):
        """If any rank failed, clean up and say so on all ranks."""
        reasons = [f"rank {rank}: {error}" if self.world > 1 else error for rank, error in enumerate(errors) if error]
        if reasons:
            self.busy = False
            self.cancelled.set()
            self.join()
            self.thread = None
            if self.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            kept = newest(self.out)
            raise UserError(
                f"--out {self.out}: saving step {self.step} failed ({reasons[0]}); "
                + (f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint")
            )


# --- reading


def meta_checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of all that meta.json says, but this."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def newest(run_directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory."""
    found = sorted((Path(run_directory) / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises ValueError, in a few words, if it is not one of ours or not as it was."""
    try:
        meta = json.loads((path / "meta.json").read_text())
    except FileNotFoundError:
        raise ValueError("meta.json is missing") from None
    except OSError as error:
        raise ValueError(f"meta.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError("meta.json is damaged") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise ValueError("meta.json is damaged, or of another program or version")
    if meta.get("sha256") != meta_checksum(meta):
        raise ValueError("meta.json is altered")
    if re.fullmatch(r"step-\d+", path.name) and path.name != f"step-{meta['step']:08d}":
        raise ValueError(f"it is of step {meta['step']}")
    return meta


def problem(path: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint, or "". Each of `ranks` looks at its share of the files, all at meta.json."""
    try:
        for name, expected in list(read_meta(path)["files"].items())[rank::ranks]:
            digest = hashlib.sha256()
            with open(path / name, "rb") as file:
                while block := file.read(2**20):
                    digest.update(block)
            if digest.hexdigest() != expected:
                return f"{name} is truncated or altered"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""


class Checkpoint:
    """A complete checkpoint to read from: `meta`, and its tensors mapped into memory."""

    def __init__(self, path: Path):
        self.path, self.meta = path, read_meta(path)
        self.mapped: dict[int, mmap.mmap] = {}

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Full shapes by name."""
        return {name: tuple(tensor["shape"]) for name, tensor in self.meta["tensors"].get(kind, {}).items()}

    def stored(self, file: int, at: int, box: Box, dtype: torch.dtype) -> Tensor:
        """A stored box: its pages are read from the disk when they are touched."""
        if file not in self.mapped:
            with open(self.path / file_name(file), "rb") as opened:  # copy on write: torch wants writable memory
                self.mapped[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self.mapped[file], dtype=dtype, count=prod(box.size), offset=at).view(box.size)

    def fill(self, piece: Piece) -> bool:
        """Copy into `piece` what is stored of it, in its dtype and on its device; False if there is nothing."""
        found = self.meta["tensors"].get(piece.kind, {}).get(piece.name)
        if found is None:
            return False
        for box, view in piece.boxes():
            for file, at, start, size in found["boxes"]:
                stored = Box(tuple(start), tuple(size))
                if common := overlap(box, stored):
                    source = self.stored(file, at, stored, getattr(torch, found["dtype"]))
                    part(view, box, common).copy_(part(source, stored, common))
        return True

    def full(self, kind: str, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        found = self.meta["tensors"][kind][name]
        tensor = torch.empty(found["shape"], dtype=getattr(torch, found["dtype"]))
        self.fill(Piece(kind, name, tensor, tuple(found["shape"])))
        return tensor


def find(where: str, run_directory: Path, mesh: Mesh | None = None) -> Checkpoint | None:
    """What `--resume` names: a checkpoint, or the newest sound one of a run directory; "auto": of this run's own.

    All ranks look at the files together, and at the same. A damaged one is named, and the one before it is taken. None
    if there is nothing to go on from and that is fine ("auto"). Raises UserError if there is none, or none is sound.
    """
    root = run_directory if where == "auto" else Path(where)
    candidates = sorted((root / "checkpoints").glob("step-*"), reverse=True)
    if where != "auto" and (re.fullmatch(r"step-\d+", root.name) or (root / "meta.json").exists()):
        candidates = [root] if root.is_dir() else []
    candidates, *_ = gather_objects(candidates, mesh)
    rank, ranks = (0, 1) if mesh is None else (mesh.rank, mesh.world)
    for number, path in enumerate(candidates):
        found = [text for text in gather_objects(problem(path, rank, ranks), mesh) if text]
        if not found:
            return Checkpoint(path)
        if number + 1 == len(candidates):
            advice = (
                "give another checkpoint" if number == 0 else "none of this run is sound: start anew in another --out"
            )
            raise UserError(f"--resume {where}: {path} is damaged ({found[0]}); {advice}")
        if rank == 0:
            print(f"{path} is damaged ({found[0]}): trying {candidates[number + 1]}", file=sys.stderr, flush=True)
    if where != "auto":
        raise UserError(f"--resume {where}: no checkpoint there; give a run directory or one of its checkpoints/step-*")
    return None
