"""Checkpoints that know no layout: the files of a plain run, and an index of what lies where.

    OUT/checkpoints/step-00000050/rank-00000.pt    as the plain run writes it (common/trainer.py): what rank 0 updates
                                  rank-00001.pt    ...
                                  index.json       step, flags; the place of each shard in its whole tensor; a SHA-256
                                                   of every file, and of index.json itself

What a plain run has saved gets its index when it is first read: a dry run of each rank says the places.

CRASHES. Everything is written under a hidden name and flushed to the disk, index.json last; then the directory is
renamed. One to be removed is renamed back to a hidden name first. So a directory with a final name is complete, and
checksums tell whether it still is what was written. The last two are kept. (Several nodes need a shared folder.)

READING. Whoever needs some boxes (extras/services/boxes.py) copies where theirs and the stored ones overlap: any layout
reads what any other wrote.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from extras.services.boxes import HELD, Piece, overlap, pieces_of, place_in
from extras.services.launch import gather_objects

FORMAT = "course checkpoint 2"
OWN = ("auto", "required")  # values of --resume that name --out
PART = 2**26  # bytes that are read at a time


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.pt"


def folder_name(step: int) -> str:
    """Of a checkpoint."""
    return f"step-{step:08d}"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(PART):
            digest.update(part)
    return digest.hexdigest()


def index_checksum(index: dict[str, Any]) -> str:
    """SHA-256 of all that index.json says, but this."""
    rest = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def flush(path: Path):
    """Have a file or directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save_file(saved: dict[str, Any], path: Path) -> str:
    """Write a rank's file, and have it on the disk. Returns its SHA-256."""
    try:
        torch.save(saved, path)
    except RuntimeError as error:  # of torch's own writer
        raise OSError(errno.ENOSPC, "cannot be written") from error
    flush(path)
    return checksum(path)


def sweep(folder: Path):
    """Delete what bears a hidden name: checkpoints half written, or to be removed."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def newest(out: Path) -> Path | None:
    """The last complete checkpoint of a run directory."""
    return max((out / "checkpoints").glob("step-*"), default=None)


class Saver:
    """Writes the checkpoints of a run, together with those of the other ranks; at most one is under way at a time."""

    def __init__(self, out: Path, keep: int = 2):
        self.out, self.folder, self.keep = out, out / "checkpoints", keep
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.thread: threading.Thread | None = None
        self.busy = False  # a checkpoint has been begun and not yet settled

    def save(self, step: int, pieces: Iterable[Piece], about: dict[str, Any], background: bool = False):
        """Write a checkpoint of `step` and remove all but the last `keep`. A collective.

        Those of later steps go too: the run went back to an earlier one, and they are not its future. Raises UserError
        on every rank if a disk is full or not writable; what was saved before is then untouched. In the `background`,
        tensors are copied, and the rest is done by a thread and by `settle`.
        """
        self.settle()
        self.step, self.hidden, self.error, self.busy = step, self.folder / f".{folder_name(step)}.partial", "", True
        state, self.places = defaultdict(dict), {}
        for piece in pieces:
            state[piece.name][piece.kind] = piece.tensor.detach().to("cpu", copy=True)
            if piece.kind in HELD:
                self.places[piece.name] = piece.place()
        if self.rank == 0:
            self.attempt(self.make_room)
        everyone = gather_objects((self.error, self.places))  # and nobody writes before the directory is there
        self.give_up([error for error, _ in everyone])
        self.index = dict(format=FORMAT, step=step, **about, places=[places for _, places in everyone])
        flags = about["config"] | dict(nproc_per_node=len(everyone))
        self.thread = threading.Thread(
            target=self.attempt, args=(self.write, dict(step=step, flags=flags, state=dict(state))), daemon=True
        )
        self.thread.start()
        if not background:
            self.settle()

    def attempt(self, what: Callable, *args: Any):
        """Do it; what goes wrong is kept for `give_up`."""
        try:
            what(*args)
        except OSError as error:
            self.error = error.strerror or str(error)

    def make_room(self):
        """Rank 0: a hidden directory."""
        sweep(self.folder)
        self.hidden.mkdir(parents=True)

    def write(self, saved: dict[str, Any]):
        """This rank's file. The thread takes part in no collective: ranks may be in different steps."""
        self.digest = save_file(saved, self.hidden / file_name(self.rank))

    def writing(self) -> bool:
        """Whether this rank's file is still being written."""
        return self.thread is not None and self.thread.is_alive()

    def settle(self):
        """Complete the checkpoint under way. A collective. Raises UserError if it failed on any rank."""
        if not self.busy:
            return
        self.thread.join()
        everyone = gather_objects((self.error, getattr(self, "digest", "")))
        self.give_up([error for error, _ in everyone])
        if self.rank == 0:
            self.index["files"] = {file_name(rank): digest for rank, (_, digest) in enumerate(everyone)}
            self.attempt(self.commit)
        self.give_up(gather_objects(self.error))
        self.busy = False

    def commit(self):
        """Rank 0, when all files are complete: write the index, give the directory its name, remove old ones."""
        final, path = self.folder / folder_name(self.step), self.hidden / "index.json"
        path.write_text(json.dumps(self.index | dict(sha256=index_checksum(self.index))))
        flush(path)
        flush(self.hidden)
        if final.exists():
            final.rename(self.folder / f".{final.name}.old")
        self.hidden.rename(final)
        folders = sorted(self.folder.glob("step-*"))
        own = folders.index(final) + 1
        for old in folders[: max(0, own - self.keep)] + folders[own:]:
            old.rename(self.folder / f".{old.name}.old")
        flush(self.folder)
        sweep(self.folder)

    def give_up(self, errors: list[str]):
        """If any rank failed, clean up and say so on all ranks."""
        reasons = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        if reasons:
            self.busy = False
            if self.rank == 0:
                shutil.rmtree(self.hidden, ignore_errors=True)
            kept = newest(self.out)
            raise UserError(
                f"--out {self.out}: saving step {self.step} failed ({reasons[0]}); "
                + (f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint")
            )


# --- reading


def read_index(path: Path) -> dict[str, Any]:
    """index.json of a checkpoint. Raises ValueError, in a few words, if it is not one of ours or not as it was."""
    try:
        index = json.loads((path / "index.json").read_text())
    except FileNotFoundError:
        raise ValueError("index.json is missing") from None
    except (OSError, ValueError, RecursionError):
        raise ValueError("index.json is damaged") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError("index.json is damaged, or of another program or version")
    if index.get("sha256") != index_checksum(index):
        raise ValueError("index.json is altered")
    if re.fullmatch(r"step-\d+", path.name) and path.name != folder_name(index["step"]):
        raise ValueError(f"it is of step {index['step']}")
    return index


def problem(path: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint, or "". Each of `ranks` looks at its share of the files, all at index.json."""
    try:
        for name, expected in list(read_index(path)["files"].items())[rank::ranks]:
            if checksum(path / name) != expected:
                return f"{name} is truncated or altered"
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return ""


class Checkpoint:
    """A complete checkpoint to read from: `index`, and its files, which are opened when they are needed."""

    def __init__(self, path: Path):
        self.path, self.index = path, read_index(path)

    @cached_property
    def stored(self) -> dict[str, dict[str, list[Piece]]]:
        """What all ranks have saved, by name and kind; a file's bytes are read when they are used."""
        found: dict[str, dict[str, list[Piece]]] = defaultdict(lambda: defaultdict(list))
        for rank, places in enumerate(self.index["places"]):
            state = torch.load(self.path / file_name(rank), mmap=True, map_location="cpu")["state"]
            for piece in pieces_of(state, places):
                found[piece.name][piece.kind].append(piece)
        return found

    def shapes(self, kind: str) -> dict[str, tuple[int, ...]]:
        """Of all whole tensors of a kind, by name."""
        return {name: kinds[kind][0].whole_shape for name, kinds in self.stored.items() if kind in kinds}

    def about(self, kind: str, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Whole shape and dtype of a stored tensor."""
        one = self.stored[name][kind][0]
        return one.whole_shape, one.tensor.dtype

    def fill(self, piece: Piece):
        """Copy into `piece` what is stored of it, in its dtype and on its device. Raises UserError if some is not."""
        pieces = self.stored.get(piece.name, {}).get(piece.kind, ())
        boxes = {box: view for one in pieces for box, view in one.boxes()}  # what several ranks hold, once
        for box, view in piece.boxes():
            missing = torch.ones(box.size, dtype=torch.bool)
            for other, stored in boxes.items():
                if common := overlap(box, other):
                    view[place_in(box, common)] = stored[place_in(other, common)].to(view.device, view.dtype)
                    missing[place_in(box, common)] = False
            if missing.any():
                raise UserError(f"--resume {self.path}: it lacks {piece.kind} of {piece.name}: give another checkpoint")

    def whole(self, kind: str, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        shape, dtype = self.about(kind, name)
        tensor = torch.empty(shape, dtype=dtype)
        self.fill(Piece(kind, name, tensor, shape))
        return tensor


def complete(path: Path):
    """Let a process of its own write the index of what a plain run has saved (extras/services/places.py)."""
    if (path / file_name(0)).exists() and not (path / "index.json").exists():
        alone = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
        words = [sys.executable, "-m", "extras.services.places", str(path.resolve())]
        subprocess.run(words, cwd=Path(__file__).parents[2], env=alone)


def find(where: str, out: Path) -> Checkpoint | None:
    """What `--resume` names: a checkpoint, or the newest sound one of a run directory; OWN: of `out`. A collective.

    All ranks look at the files together, and at the same. A damaged one is named, and the one before it is taken. None
    if there is nothing to go on from and that is fine ("auto"). Raises UserError if there is none, or none is sound.
    """
    root = out if where in OWN else Path(where)
    candidates = sorted((root / "checkpoints").glob("step-*"), reverse=True)
    if where not in OWN and (re.fullmatch(r"step-\d+", root.name) or (root / file_name(0)).exists()):
        candidates = [root] if root.is_dir() else []
    everyone = gather_objects(candidates)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for path in everyone[0]:
        if rank == 0:
            complete(path)
        gather_objects(None)  # none looks before
        wrong = [text for text in gather_objects(problem(path, rank, len(everyone))) if text]
        if not wrong:
            return Checkpoint(path)
        if rank == 0:
            print(f"{path} is damaged ({wrong[0]})", file=sys.stderr, flush=True)
    if everyone[0]:
        raise UserError(f"--resume {where}: no checkpoint there is sound: give another, or start anew in another --out")
    if where != "auto":
        raise UserError(f"--resume {where}: no checkpoint in {root}: give a run, a checkpoints/step-* of it, or auto")
    return None
