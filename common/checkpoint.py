"""Checkpoints: full tensors under step01's parameter names, written so that a crash never costs the previous one.

    OUT/checkpoints/step-00000050/tensors.pt      weights, fp32 masters, moments: {"model": {name: tensor}, ...}
                                  meta.json       format, step, config, loss scale, and a checksum of both files

A checkpoint is written under a hidden name, flushed to the disk, then renamed; one to be removed is renamed back to a
hidden name first. So a directory that bears a final name is complete. The last two are kept.
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


def checksum(path: Path, meta: dict[str, Any]) -> str:
    """SHA-256 of a file and of everything else that `meta` says."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
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


def save(run_directory: Path, step: int, tensors: dict[str, Any], meta: dict[str, Any], keep: int = 2) -> Path:
    """Write a checkpoint of `step` and remove all but the last `keep`; returns its directory.

    Those of later steps go too: the run went back to an earlier one, and they are not its future. Raises UserError if
    the disk is full or not writable; what was saved before is then untouched.
    """
    parent = Path(run_directory) / "checkpoints"
    final, partial = parent / f"step-{step:08d}", parent / f".step-{step:08d}.partial"
    try:
        sweep(parent)
        partial.mkdir(parents=True)
        torch.save(tensors, partial / "tensors.pt")
        meta = dict(format=FORMAT, step=step) | meta
        meta["sha256"] = checksum(partial / "tensors.pt", meta)
        (partial / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
        for path in (partial / "tensors.pt", partial / "meta.json", partial):
            sync_to_disk(path)
        if final.exists():
            final.rename(parent / f".{final.name}.old")
        partial.rename(final)
        found = sorted(parent.glob("step-*"))
        own = found.index(final) + 1
        for old in found[: max(0, own - keep)] + found[own:]:
            old.rename(parent / f".{old.name}.old")
        sync_to_disk(parent)
        sweep(parent)
    except (OSError, RuntimeError) as error:  # torch.save reports a failed write as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        kept = newest(Path(run_directory))
        raise UserError(
            f"--out {run_directory}: saving step {step} failed ({reason}); "
            + (f"the checkpoint {kept} is intact" if kept else "there is no earlier checkpoint")
        ) from error
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
    except ValueError:
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise UserError(
            f"--resume {path}: meta.json is damaged or of another program; give a checkpoint written by these scripts"
        )
    file = path / "tensors.pt"
    if not file.exists() or checksum(file, meta) != meta.get("sha256"):
        raise UserError(f"--resume {path}: a file is missing, truncated or altered; resume from an earlier checkpoint")
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True), meta
