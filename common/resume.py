"""Which checkpoint a run resumes from, and which flags it must keep."""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, candidates, find
from common.flags import spelled
from common.ranks import Ranks

# A resumed run keeps its flags (also --steps, because the learning rate follows it), but for two
# sets. The first: where files are, and how precisely and where numbers are computed. (--dataset may
# be another path; the fingerprint of its tokens must be the same.)
FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
# The second: which rank computes what, and in which pieces. (nproc_per_node: the number of all
# ranks.) These must be kept only if there is state besides parameters, the optimizer's and buffers:
# then each rank has its own, such as rounding errors that a sync adds to its next sum.
LAYOUT = {"nproc_per_node", "micro_batch_size", "recompute", "compile", "sync", "bucket_mb"}
LAYOUT |= {"zero", "keep", "tp", "sp", "tp_overlap", "cp", "cp_mode", "pp", "schedule", "chunks"}
LAYOUT |= {"ep", "ep_mode"}


def choose_checkpoint(resume: str, out: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that --resume selects, the same on all ranks; None to start anew.

    "auto": the newest sound one in --out, if there is any. Else a run directory, or a checkpoint.
    Raises UserError if none is there, or if --out has checkpoints that would be mixed with others.
    """
    where = out if resume == "auto" else Path(resume)
    if resume not in ("", "auto") and not candidates(where):
        raise UserError(f"--resume {resume}: no checkpoint is there")
    own = candidates(out)
    if own and resume != "auto":
        advice = f"set --resume {out} to continue from its newest, or another --out"
        if not resume or where.resolve() not in (out.resolve(), own[0].resolve()):
            raise UserError(f"--out {out} has checkpoints: {advice}")
    return find(where, ranks) if resume else None


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError unless a run with these flags and data continues what the saved one did."""
    free = FREE if saved.has_state else FREE | LAYOUT
    if flags.get("balance", "none") not in ("none", "bias"):
        free = free - {"micro_batch_size"}  # experts are balanced within each micro-batch
    for name, value in flags.items():
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            raise UserError(f"--resume {saved.folder}: {spelled(name)} was {before}: keep it")
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
