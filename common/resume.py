"""Which checkpoint a run resumes from, and which flags must stay as they were.

A flag must stay unless it is in one of two sets. So all stay that decide what is computed: model,
batch, learning rate, and also --steps, on which the learning rate depends.

    FREE    where the run computes, in which dtype, what it reads and writes, when it gives up.
            (--dataset is free as a path: its tokens are compared, by their fingerprint.)
    WORK    how the ranks divide and do the work, and what they keep in memory. (But
            --micro-batch-size must stay if experts have an auxiliary loss: see `may_differ`.)

A flag that only one of the two scripts has is not compared. If another flag has changed, the run
ends with a line such as "--resume runs/a/checkpoints/step-00000050: --lr was 0.003: keep it".
"""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, candidates, find
from common.flags import spelled
from common.ranks import Ranks

FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
WORK = {
    "micro_batch_size",  # but see `may_differ`
    "recompute",
    "compile",
    "sync",
    "bucket_mb",
    "zero",
    "keep",
    "ranks",  # no flag, but their number, which `Run` adds
    "tp",
    "sp",
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

    Raises UserError if a path has none; if all are damaged; or if --out has checkpoints, and
    `resume` is neither --out nor its newest (checkpoints of two runs would lie in one directory). A
    collective.
    """
    if resume == "auto":
        return find(out, ranks)
    own = candidates(out, ranks)
    continues_own = False
    if resume != "":
        if not candidates(Path(resume), ranks):
            raise UserError(f"--resume {resume}: no checkpoint is there")
        allowed = [path.resolve() for path in (out, *own[:1])]
        continues_own = Path(resume).resolve() in allowed
    if own and not continues_own:
        raise UserError(
            f"--out {out} has checkpoints: set --resume {out} to continue from its newest, or "
            "another --out"
        )
    if resume == "":
        return None
    return find(Path(resume), ranks)


def may_differ(flags: dict[str, Any]) -> set[str]:
    """The flags that `check_flags` lets change: they do not change what is computed, but for
    rounding. (Of --dataset it compares the tokens.)
    """
    names = FREE | WORK
    # Step 7's auxiliary loss is a mean over each micro-batch, so the size of a micro-batch decides
    # what is computed
    if flags.get("balance", "none") not in ("none", "bias"):
        names.remove("micro_batch_size")
    return names


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError if the data differ from the saved run's, or a flag that must stay."""
    free = may_differ(flags)
    for name, value in flags.items():
        # The saved run's script may not have this flag: then there is nothing to compare
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            raise UserError(f"--resume {saved.folder}: {spelled(name)} was {before}: keep it")
    # Weights converted from another format have the fingerprint "": any data may follow
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
