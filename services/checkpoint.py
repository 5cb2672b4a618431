"""Checkpoints that know no layout: boxes of full tensors, written by the ranks that hold them, read by those that need.

    OUT/checkpoints/step-00000050/rank-00000.bin    boxes of tensors (services/boxes.py), one torch.save archive each
                                  rank-00001.bin    ...
                                  meta.json         step, config, data position, loss scale; which box of which tensor
                                                    is where; a SHA-256 of every file, and of meta.json itself
                                  .metadata         where the boxes are, for the tools of torch.distributed.checkpoint

services/saver.py writes them. READING. Whoever needs some boxes maps the files into memory and copies where theirs and
the stored ones overlap. So any layout reads what any other wrote.

OTHERS READ THEM, TOO: `dcp_to_torch_save(step-00000050, file)` of torch.distributed.checkpoint.format_utils makes one
file {kind: {name: tensor}}, whose "model" fits `load_state_dict`. It compares no checksums. And it opens `.metadata`,
a pickle: a stranger's may run any program. What is here opens only meta.json and numbers, which run nothing.
"""

import hashlib
import json
import mmap
import re
import sys
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.comm import Mesh
from services.boxes import Box, Piece, overlap, part
from services.launch import gather_objects

FORMAT = "nd-parallel checkpoint, version 3"
READABLE = FORMAT, "nd-parallel checkpoint, version 2"  # before, a file held numbers alone, and there was no .metadata


def file_name(rank: int) -> str:
    """Of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


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
    if not isinstance(meta, dict) or meta.get("format") not in READABLE:
        raise ValueError("meta.json is damaged, or of another program or version")
    if meta.get("sha256") != meta_checksum(meta):
        raise ValueError("meta.json is altered")
    if re.fullmatch(r"step-\d+", path.name) and path.name != f"step-{meta['step']:08d}":
        raise ValueError(f"it is of step {meta['step']}")
    return meta


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def problem(path: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint, or "". Each of `ranks` looks at its share of the files, all at meta.json."""
    try:
        for name, expected in list(read_meta(path)["files"].items())[rank::ranks]:
            if checksum(path / name) != expected:
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
