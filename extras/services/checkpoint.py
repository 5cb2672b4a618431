"""Checkpoints that know no layout: boxes of whole tensors, written by ranks that hold them, read by those that need.

    OUT/checkpoints/step-00000050/rank-00000.safetensors    boxes of tensors (extras/services/boxes.py)
                                  rank-00001.safetensors    ...
                                  index.json                step, flags; which box of which tensor is where; a SHA-256
                                                            of every file, and of index.json itself

WRITING. Ranks tell each other which boxes they hold, never the numbers. What several hold, they write in turn.

CRASHES. Everything is written under a hidden name and flushed to the disk, index.json last; then the directory is
renamed. One to be removed is renamed back to a hidden name first. So a directory with a final name is complete, and
checksums tell whether it still is what was written. The last two are kept. (Several nodes need a shared folder.)

READING. Whoever needs some boxes copies where theirs and the stored ones overlap:
any layout reads what any other wrote.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from extras.services.boxes import Box, Piece, overlap, place_in
from extras.services.launch import gather_objects

FORMAT = "course checkpoint 1"
OWN = ("auto", "required")  # values of --resume that name --out
PART = 2**26  # bytes that are read or written at a time
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


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


def save_file(tensors: dict[str, Tensor], path: Path) -> str:
    """Write a safetensors file, a header and then the bytes. Returns its SHA-256."""
    header, stop, digest = {}, 0, hashlib.sha256()
    for key, tensor in tensors.items():
        start, stop = stop, stop + tensor.nbytes
        header[key] = dict(dtype=DTYPES[tensor.dtype], shape=list(tensor.shape), data_offsets=[start, stop])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        bodies = (tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors.values())
        for body in (memoryview(len(text).to_bytes(8, "little") + text), *bodies):
            file.write(body)
            digest.update(body)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


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
        held = {
            (p.kind, p.name, p.whole_shape, str(p.tensor.dtype)[6:], box): view
            for p in pieces
            for box, view in p.boxes()
        }
        if self.rank == 0:
            self.attempt(self.make_room)
        everyone = gather_objects((self.error, list(held)))  # and nobody writes before the directory is there
        self.give_up([error for error, _ in everyone])
        holders: dict[tuple, list[int]] = defaultdict(list)
        for rank, (_, keys) in enumerate(everyone):
            for key in keys:
                holders[key].append(rank)
        tensors: dict[str, Tensor] = {}
        index: dict[str, dict[str, dict]] = defaultdict(dict)
        for i, (key, ranks) in enumerate(holders.items()):
            kind, name, shape, dtype, box = key
            writer = ranks[i % len(ranks)]
            row = index[kind].setdefault(name, dict(shape=shape, dtype=dtype, boxes=[]))
            row["boxes"].append([writer, str(i), box.start, box.size])
            if writer == self.rank:
                tensors[str(i)] = held[key].detach().to("cpu", copy=True).contiguous()
        self.index = dict(format=FORMAT, step=step, **about, tensors=index)
        self.thread = threading.Thread(target=self.attempt, args=(self.write, tensors), daemon=True)
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

    def write(self, tensors: dict[str, Tensor]):
        """This rank's file. The thread takes part in no collective: ranks may be in different steps."""
        self.digest = save_file(tensors, self.hidden / file_name(self.rank))

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
    """A complete checkpoint to read from: `index`, and its files, opened when they are needed."""

    def __init__(self, path: Path):
        try:
            from safetensors import safe_open  # a run that reads no checkpoint trains without it
        except ModuleNotFoundError as error:
            raise UserError(f"to read {path}: pip install safetensors") from error
        self.path, self.index, self.files, self.opened = path, read_index(path), {}, ExitStack()
        self.open = lambda rank: safe_open(path / file_name(rank), "pt")

    def kinds(self, name: str) -> set[str]:
        """What is stored of a parameter: "master", "exp_avg", ..."""
        return {kind for kind, tensors in self.index["tensors"].items() if name in tensors}

    def about(self, kind: str, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Whole shape and dtype of a stored tensor."""
        entry = self.index["tensors"][kind][name]
        return tuple(entry["shape"]), getattr(torch, entry["dtype"])

    def read(self, rank: int, key: str, stored: Box, wanted: Box) -> Tensor:
        """A part of a stored box, from the file of a rank."""
        if rank not in self.files:
            self.files[rank] = self.opened.enter_context(self.open(rank))
        if not stored.size:
            return self.files[rank].get_tensor(key)
        return self.files[rank].get_slice(key)[place_in(stored, wanted)]

    def fill(self, piece: Piece):
        """Copy into `piece` what is stored of it, in its dtype and on its device. Raises UserError if some is not."""
        rows = self.index["tensors"].get(piece.kind, {}).get(piece.name, {}).get("boxes", ())
        for box, view in piece.boxes():
            filled = 0
            for rank, key, start, size in rows:
                stored = Box(tuple(start), tuple(size))
                if common := overlap(box, stored):
                    view[place_in(box, common)] = self.read(rank, key, stored, common).to(view.device, view.dtype)
                    filled += prod(common.size)
            if filled < prod(box.size):
                raise UserError(f"--resume {self.path}: it lacks {piece.kind} of {piece.name}: give another checkpoint")

    def whole(self, kind: str, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        shape, dtype = self.about(kind, name)
        tensor = torch.empty(shape, dtype=dtype)
        self.fill(Piece(kind, name, tensor, shape))
        return tensor


def find(where: str, out: Path) -> Checkpoint | None:
    """What `--resume` names: a checkpoint, or the newest sound one of a run directory; OWN: of `out`. A collective.

    All ranks look at the files together, and at the same. A damaged one is named, and the one before it is taken. None
    if there is nothing to go on from and that is fine ("auto"). Raises UserError if there is none, or none is sound.
    """
    root = out if where in OWN else Path(where)
    candidates = sorted((root / "checkpoints").glob("step-*"), reverse=True)
    if where not in OWN and (re.fullmatch(r"step-\d+", root.name) or (root / "index.json").exists()):
        candidates = [root] if root.is_dir() else []
    everyone = gather_objects(candidates)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for path in everyone[0]:
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
