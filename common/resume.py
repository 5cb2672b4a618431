"""Which checkpoint a run resumes from, and which flags it must keep."""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, find, seen_by_rank_0
from common.flags import spelled
from common.ranks import Ranks

# A resumed run must keep each flag that both scripts have (also --steps: the learning rate depends
# on it), except those of these three sets.

# Where a run computes and writes, when it saves, how it is watched. (dataset: another path may have
# the same tokens, which the fingerprint shows. dtype: only the rounding changes.)
FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
# In which pieces, with how much memory and in which messages the work is done
WORK = {"micro_batch_size", "recompute", "compile", "sync", "bucket_mb", "zero", "keep"}
# On which ranks (`ranks` is no flag, but their number, which `Run` adds)
LAYOUT = {"ranks", "tp", "sp", "tp_overlap", "cp", "cp_mode", "pp", "schedule", "chunks", "ep"}
# (An optional technique may save state that fits only its own rank, such as the errors of a sync
# that compresses gradients. Then only FREE is free: `has_state` in `check_flags`.)


def refuse_to_mix(out: Path):
    """Raise UserError: this run would write its checkpoints among those of another run in --out."""
    raise UserError(
        f"--out {out} has checkpoints: set --resume {out} to continue from its newest, or another "
        "--out"
    )


def choose_checkpoint(resume: str, out: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that --resume selects, the same on all ranks; None to start anew.

    `resume`: ""      None
              "auto"  the newest sound one in --out; None if there is none
              a path  that run's newest sound one, or that checkpoint

    Raises UserError if a path has none, if all are damaged, or if --out has checkpoints that would
    be mixed with others. A collective.
    """
    if resume == "auto":
        return find(out, ranks)
    own = seen_by_rank_0(out, ranks)
    if resume == "":
        if own:
            refuse_to_mix(out)
        return None
    where = Path(resume)
    if not seen_by_rank_0(where, ranks):
        raise UserError(f"--resume {resume}: no checkpoint is there")
    # Into --out only its own newest checkpoint is continued: others would be mixed with later ones
    if own and where.resolve() not in (out.resolve(), own[0].resolve()):
        refuse_to_mix(out)
    return find(where, ranks)


def may_change(flags: dict[str, Any]) -> set[str]:
    """The flags that do not change what is computed, but for rounding."""
    free = FREE | WORK | LAYOUT
    # An auxiliary loss (step 7's --balance loss, and those of optional balances) is a mean over
    # each micro-batch, so the size of a micro-batch decides what is computed
    if flags.get("balance", "none") not in ("none", "bias"):
        free.remove("micro_batch_size")
    return free


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError unless flags and data are those of the saved run, but for the sets above."""
    free = FREE if saved.has_state else may_change(flags)
    for name, value in flags.items():
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            what = "the number of ranks" if name == "ranks" else spelled(name)
            raise UserError(f"--resume {saved.folder}: {what} was {before}: keep it")
    # "": it was converted from other weights, and has read no data
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
