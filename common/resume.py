"""Which checkpoint a run resumes from, and which flags it must keep."""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, candidates, find
from common.flags import spelled
from common.ranks import Ranks

# A resumed run keeps the flags that both scripts have (also --steps, because the learning rate
# follows it), but for two sets.

# Where a run computes and writes. (--dataset may be another path to the same tokens; --dtype
# changes only the rounding.)
FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
# On which ranks, in which pieces and with how much memory it is computed. (These must be kept, too,
# if a checkpoint has state that fits only its own rank. No step has such state; a sync that
# compresses gradients has.)
LAYOUT = {
    *("ranks", "micro_batch_size", "recompute", "compile", "sync", "bucket_mb", "zero", "keep"),
    *("tp", "sp", "tp_overlap", "cp", "cp_mode", "pp", "schedule", "chunks", "ep", "ep_mode"),
}


def choose_checkpoint(resume: str, out: Path, ranks: Ranks) -> Path | None:
    """The checkpoint that --resume selects, the same on all ranks; None to start anew.

    `resume`: ""      None
              "auto"  the newest sound one in --out; None if there is none
              a path  that run's newest sound one, or that checkpoint

    Raises UserError if none is there, or if --out has checkpoints that would be mixed with others.
    A collective.
    """
    if resume == "auto":
        return find(out, ranks)
    # What rank 0 sees decides: on a network's disk, another rank may not see a new folder yet
    own = ranks.gather(candidates(out))[0]
    advice = f"set --resume {out} to continue from its newest, or another --out"
    mixed = f"--out {out} has checkpoints: {advice}"
    if resume == "":
        if own:
            raise UserError(mixed)
        return None
    where = Path(resume)
    if not ranks.gather(candidates(where))[0]:
        raise UserError(f"--resume {resume}: no checkpoint is there")
    # Into --out only its own newest checkpoint is continued: others would be mixed with later ones
    if own and where.resolve() not in (out.resolve(), own[0].resolve()):
        raise UserError(mixed)
    return find(where, ranks)


def may_change(flags: dict[str, Any]) -> set[str]:
    """The flags that do not change what is computed, but for rounding."""
    if flags.get("balance", "none") in ("none", "bias"):
        return FREE | LAYOUT
    # Step 7's other balances act within each micro-batch, so its size changes what is computed
    return (FREE | LAYOUT) - {"micro_batch_size"}


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError unless flags and data are those of the saved run, but for the sets above."""
    free = FREE if saved.has_state else may_change(flags)
    for name, value in flags.items():
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            what = "the number of ranks" if name == "ranks" else spelled(name)
            raise UserError(f"--resume {saved.folder}: {what} was {before}: keep it")
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
