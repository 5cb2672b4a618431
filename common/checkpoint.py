"""Checkpoints: full tensors under step01's parameter names, written so that a crash never costs the previous one.

    OUT/checkpoints/step-00000050/tensors.pt      weights, fp32 masters, moments: {"model": {name: tensor}, ...}
                                  meta.json       format, step, config, loss scale, RNG, size and checksum of tensors.pt

A checkpoint is written under another name, flushed to the disk, then renamed: a directory that bears the final name is
complete. The last two are kept.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from common.run import UserError

FORMAT = "nd-parallel checkpoint, version 1"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(path: Path):
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(run_directory: Path, step: int, tensors: dict[str, Any], meta: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint of `step` and remove all but the last `keep`; returns its directory.

    Raises UserError if the disk is full or not writable; what was saved before is then untouched.
    """
    parent = Path(run_directory) / "checkpoints"
    final, partial = parent / f"step-{step:08d}", parent / f".step-{step:08d}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        torch.save(tensors, partial / "tensors.pt")
        size, digest = (partial / "tensors.pt").stat().st_size, checksum(partial / "tensors.pt")
        meta = dict(format=FORMAT, step=step, bytes=size, sha256=digest) | meta
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        for path in (partial / "tensors.pt", partial / "meta.json", partial):
            sync_to_disk(path)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_to_disk(parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a failed write as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        kept = newest(Path(run_directory))
        raise UserError(
            f"--out {run_directory}: saving step {step} failed ({reason}); "
            + (f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint")
        ) from error
    for old in sorted(parent.glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(run_directory: Path) -> Path | None:
    """The last complete checkpoint of a run directory."""
    found = sorted((run_directory / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def load(where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read (tensors on the CPU, meta) from a checkpoint, or from the newest one of a run directory.

    Raises UserError, naming the file and what to do, if it is missing, truncated, altered or not one of ours.
    """
    path = Path(where)
    if not (path / "meta.json").exists():
        path = newest(path) or path
    if not (path / "meta.json").exists():
        raise UserError(f"--resume {where}: no checkpoint there; give a run directory or one of its checkpoints/step-*")
    try:
        meta = json.loads((path / "meta.json").read_text())
        known = isinstance(meta, dict) and meta.get("format") == FORMAT
    except ValueError:
        known = False
    if not known:
        raise UserError(
            f"--resume {path}: meta.json is damaged or of another program; give a checkpoint written by these scripts"
        )
    file = path / "tensors.pt"
    if not file.exists() or file.stat().st_size != meta["bytes"] or checksum(file) != meta["sha256"]:
        raise UserError(
            f"--resume {path}: tensors.pt is missing, truncated or altered; resume from an earlier checkpoint"
        )
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True), meta
