"""Checkpoints that any layout can read: the files of a plain run, and an index that maps them to whole tensors.

    OUT/checkpoints/step-00000050/rank-00000.pt    as the plain run writes it (common/trainer.py): what rank 0 updates
                                  rank-00001.pt    ...
                                  index.json       step, flags, model; each piece's place in its whole tensor
                                                   (services/pieces.py); a SHA-256 of every file, and of index.json

A plain run (a step started without extras) writes no index. `find` lets services/places.py add one.

CRASHES. All files are written into a folder with a hidden name and flushed to the disk, index.json last; then the
folder is renamed. Before a folder is removed, it gets a hidden name again. So a folder with a final name is complete,
and checksums tell if files were altered later. The last two checkpoints are kept. Several nodes need a shared folder.

READING. A rank assembles one whole tensor at a time, in host memory, and keeps only its own part.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from extras.services.pieces import Piece, assemble, pieces_of
from extras.services.ranks import gather_objects

FORMAT = "course checkpoint 2"
OWN = ("auto", "required")  # values of --resume that stand for the directory --out


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.pt"


def folder_name(step: int) -> str:
    """The name of the folder of a checkpoint that is saved after `step` steps."""
    return f"step-{step:08d}"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def index_checksum(index: dict[str, Any]) -> str:
    """SHA-256 of everything in index.json but this checksum itself."""
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def flush(path: Path):
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_file(saved: dict[str, Any], path: Path) -> str:
    """Serialise `saved` in host memory, and write it to the file `path`; returns the file's SHA-256. Raises OSError."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    content = buffer.getbuffer()
    path.write_bytes(content)
    flush(path)
    return hashlib.sha256(content).hexdigest()


def write_index(folder: Path, index: dict[str, Any]):
    """Write index.json with its checksum, under a hidden name until it is complete. Raises OSError."""
    hidden = folder / ".index.json"
    hidden.write_text(json.dumps(index | dict(sha256=index_checksum(index))))
    flush(hidden)
    hidden.rename(folder / "index.json")


def newest(out: Path) -> Path | None:
    """The last complete checkpoint of a run directory; None if it has none."""
    return max((out / "checkpoints").glob("step-*"), default=None)


def rank_here() -> int:
    """This process's rank; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def on_ranks(out: Path, what: Callable[[], Any], everywhere: bool = False) -> list[Any]:
    """Call `what`, which writes into `out`, on rank 0 or, if `everywhere`, on all ranks. A collective.

    Returns the results of all ranks. Raises UserError on every rank if `what` raised OSError or UserError on any.
    """
    result, wrong = None, ""
    try:
        result = what() if everywhere or rank_here() == 0 else None
    except OSError as error:
        wrong = f"--out {out}: rank {rank_here()} cannot write ({error.strerror or error})"
    except UserError as error:
        wrong = str(error)
    everyone = gather_objects((result, wrong))
    if wrong := max(wrong for _, wrong in everyone):
        raise UserError(wrong)
    return [result for result, _ in everyone]


class Saver:
    """Writes a run's checkpoints together with the Savers of the other ranks, at most one checkpoint at a time."""

    def __init__(self, out: Path):
        self.out, self.folder = out, out / "checkpoints"
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None  # writes this rank's file of a checkpoint

    def save(self, step: int, pieces: Iterable[Piece], about: dict[str, Any], background: bool = False):
        """Write a checkpoint after `step` steps and remove all but the last two. A collective.

        Checkpoints of later steps, which exist if the run resumed from an earlier step, are removed, too. Raises
        UserError on every rank if a disk is full or not writable; earlier checkpoints are then untouched. With
        `background`, tensors are copied now, a thread writes this rank's file, and `settle` completes the checkpoint.
        """
        self.settle()
        self.step, self.hidden = step, self.folder / f".{folder_name(step)}.partial"
        state, places = defaultdict(dict), {}
        for piece in pieces:
            state[piece.name][piece.kind] = piece.tensor.detach().to("cpu", copy=True)
            places.setdefault(piece.name, piece.place())
        on_ranks(self.out, self.make_room)
        self.index = dict(format=FORMAT, step=step, **about, places=gather_objects(places))
        flags = about["config"] | dict(nproc_per_node=len(self.index["places"]))
        saved = dict(step=step, flags=flags, state=dict(state))
        self.pending = self.thread.submit(save_file, saved, self.hidden / file_name(rank_here()))
        if not background:
            self.settle()

    def settle(self):
        """Complete the checkpoint that is being written, if any. A collective. UserError if any rank cannot write."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            digests = on_ranks(self.out, pending.result, everywhere=True)
            self.index["files"] = {file_name(rank): digest for rank, digest in enumerate(digests)}
            on_ranks(self.out, self.commit)

    def writing(self) -> bool:
        """Whether this rank is still writing its file."""
        return self.pending is not None and not self.pending.done()

    def make_room(self):
        """Rank 0: make the hidden folder, before any rank writes into it."""
        self.sweep()
        self.hidden.mkdir(parents=True)

    def sweep(self):
        """Rank 0: delete all folders with hidden names. These are checkpoints that are incomplete or replaced."""
        for path in self.folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)

    def commit(self):
        """Rank 0, when all files are complete: write the index, rename the folder, and remove old checkpoints."""
        final = self.folder / folder_name(self.step)
        write_index(self.hidden, self.index)
        flush(self.hidden)
        if final.exists():
            final.rename(self.folder / f".{final.name}.old")
        self.hidden.rename(final)
        before = sorted(path for path in self.folder.glob("step-*") if path < final)
        for old in {*self.folder.glob("step-*")} - {final, *before[-1:]}:
            old.rename(self.folder / f".{old.name}.old")
        flush(self.folder)
        self.sweep()


# --- reading


def read_index(path: Path) -> dict[str, Any]:
    """Read index.json of a checkpoint. Raises ValueError if it is missing, altered or of another version."""
    try:
        index = json.loads((path / "index.json").read_bytes())
        if index["format"] == FORMAT and index["sha256"] == index_checksum(index):
            return index
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError("index.json is missing, altered or of another version")


def problem(path: Path, rank: int, ranks: int) -> str:
    """The first problem that a rank finds in a checkpoint, or "". A rank checks the index and its part of the files."""
    try:
        for name, expected in list(read_index(path)["files"].items())[rank::ranks]:
            if checksum(path / name) != expected:
                return f"{name} is truncated or altered"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


class Checkpoint:
    """A complete checkpoint to read from: `index`, and its files, which are opened when they are needed."""

    def __init__(self, path: Path):
        self.path, self.index = path, read_index(path)

    @cached_property
    def stored(self) -> dict[str, dict[str, list[Piece]]]:
        """The pieces of all ranks by name and kind; the files are memory-mapped."""
        found: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for rank, places in enumerate(self.index["places"]):
            state = torch.load(self.path / file_name(rank), mmap=True, map_location="cpu")["state"]
            for piece in pieces_of(state, places):
                found[piece.name][piece.kind].append(piece)
        return found

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """The shapes of all whole tensors of a kind, by name."""
        return {name: kinds[kind][0].whole_shape for name, kinds in self.stored.items() if kind in kinds}

    def whole(self, kind: str, name: str) -> Tensor:
        """One whole tensor, on the CPU. Raises UserError if some of it is missing."""
        try:
            return assemble(self.stored.get(name, {})[kind])
        except (KeyError, ValueError) as error:
            raise UserError(f"--resume {self.path}: it lacks {kind} of {name}: give another checkpoint") from error

    def fill(self, piece: Piece):
        """Copy into `piece` its part of the stored tensor. UserError if the tensor is missing or has another shape."""
        whole = self.whole(piece.kind, piece.name)
        if tuple(whole.shape) != piece.whole_shape:
            advice = "use the flags that it was trained with"
            raise UserError(f"--resume {self.path}: its {piece.name} does not fit this model: {advice}")
        piece.tensor.copy_(piece.cut(whole))


def complete(path: Path):
    """If a plain run's checkpoint has no index, let services/places.py write one, in a process of its own."""
    if (path / file_name(0)).exists() and not (path / "index.json").exists():
        alone = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
        words = [sys.executable, "-m", "extras.services.places", str(path.resolve())]
        subprocess.run(words, cwd=Path(__file__).parents[2], env=alone)


def find(where: str, out: Path) -> Checkpoint | None:
    """Open checkpoint `where` or, if it is a run, its newest undamaged one. "auto" and "required" mean the run `out`.

    A collective: ranks share the work of verifying files. A damaged checkpoint is reported, and the next older one is
    tried. Raises UserError if all are damaged, or if there is none; but "auto" returns None if there is none.
    """
    root = out if where in OWN else Path(where)
    runs = sorted(root.glob("checkpoints/step-*"), reverse=True)
    everyone = gather_objects([root] if (root / file_name(0)).exists() else runs)
    for path in everyone[0]:  # all ranks use the list of rank 0
        if rank_here() == 0:
            complete(path)
        gather_objects(None)  # the others wait for the index
        wrong = max(gather_objects(problem(path, rank_here(), len(everyone))))
        if not wrong:
            return Checkpoint(path)
        if rank_here() == 0:
            print(f"{path} is damaged ({wrong})", file=sys.stderr, flush=True)
    if everyone[0]:
        raise UserError(f"--resume {where}: no checkpoint there is sound: give another, or start anew in another --out")
    if where != "auto":
        raise UserError(f"--resume {where}: no checkpoint in {root}: give a run, a checkpoints/step-* of it, or auto")
    return None
