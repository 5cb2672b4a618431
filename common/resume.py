"""Which checkpoint a run resumes from, and which flags must stay as they were.

A flag that decides what is computed must stay: model, data, batch, learning rate, and also --steps,
on which the learning rate depends. Two sets of flags may change: FREE, where the run computes, in
which dtype, and what it writes; and WORK, how the ranks divide and do the work, and what they keep
in memory. The data are compared by the fingerprint of their tokens, not by their path.
"""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, candidates, find
from common.flags import spelled
from common.ranks import Ranks

FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
WORK = {
    "micro_batch_size",  # but see `may_change`
    "recompute",
    "compile",
    "sync",
    "bucket_mb",
    "zero",
    "keep",
    "ranks",  # no flag, but their number, which `Run` adds
    "tp",
    "sp",
    "tp_overlap",
    "cp",
    "cp_mode",
    "pp",
    "schedule",
    "chunks",
    "ep",
}


def choose_checkpoint(resume: str, out: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that --resume selects, the same on all ranks; None to start anew.

    `resume`: ""      None
              "auto"  the newest sound one in --out; None if --out has no checkpoint
              a path  that run's newest sound one, or that checkpoint

    Raises UserError if a path has none, if all are damaged, or if --out has checkpoints, and this
    run would not continue from their newest. A collective.
    """
    if resume == "auto":
        return find(out, ranks)
    if resume != "" and not candidates(Path(resume), ranks):
        raise UserError(f"--resume {resume}: no checkpoint is there")
    own = candidates(out, ranks)
    if own:
        # --resume must be --out itself, or the newest in it: else old and new checkpoints would mix
        continues = resume != "" and Path(resume).resolve() in (out.resolve(), own[0].resolve())
        if not continues:
            raise UserError(
                f"--out {out} has checkpoints: set --resume {out} to continue from its newest, or "
                "another --out"
            )
    if resume == "":
        return None
    return find(Path(resume), ranks)


def may_change(flags: dict[str, Any], has_state: bool = False) -> set[str]:
    """The flags that do not change what is computed, but for rounding.

    `has_state`: an optional technique has saved state that fits only its own rank, such as the
    errors of a sync that compresses gradients. Then WORK must stay, too.
    """
    if has_state:
        return FREE
    free = FREE | WORK
    # An auxiliary loss (step 7's --balance loss, and those of optional balances) is a mean over
    # each micro-batch, so the size of a micro-batch decides what is computed
    if flags.get("balance", "none") not in ("none", "bias"):
        free.remove("micro_batch_size")
    return free


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError unless the data are the saved run's, and so is each flag of both runs that
    may not change.
    """
    free = may_change(flags, has_state=bool(saved.state))
    for name, value in flags.items():
        before = saved.about["flags"].get(name, value)  # a flag of both scripts
        if before != value and name not in free:
            what = "the number of ranks" if name == "ranks" else spelled(name)
            raise UserError(f"--resume {saved.folder}: {what} was {before}: keep it")
    # Weights converted from another format have the fingerprint "": any data may follow
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
