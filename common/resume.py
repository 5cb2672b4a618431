"""Which checkpoint a run resumes from, and which flags it must keep: each flag that both scripts
have, also --steps, on which the learning rate depends; except those of the three sets below.
"""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint, find, seen_by_rank_0
from common.flags import spelled
from common.ranks import Ranks

# FREE: where a run computes and writes, when it saves, how it is watched. (dataset: another path
# may have the same tokens, which the fingerprint shows. dtype: only the rounding changes.)
FREE = {"dataset", "out", "resume", "save_every", "timeout", "profile", "device", "dtype"}
# WORK: in which pieces, with how much memory and in which messages the work is done. (But see
# `may_change`: with an auxiliary loss, micro_batch_size must stay.)
WORK = {"micro_batch_size", "recompute", "compile", "sync", "bucket_mb", "zero", "keep"}
# LAYOUT: on which ranks (`ranks` is no flag, but their number, which `Run` adds)
LAYOUT = {"ranks", "tp", "sp", "tp_overlap", "cp", "cp_mode", "pp", "schedule", "chunks", "ep"}


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
    # If --out has checkpoints, only its own newest may be resumed into it: else new checkpoints
    # would stand among those of another run
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
    """Raise UserError unless the data are the saved run's, and so is each flag that may not
    change.
    """
    # An optional technique may have saved state that fits only its own rank, such as the errors of
    # a sync that compresses gradients: then the layout must stay
    free = FREE if saved.has_state else may_change(flags)
    for name, value in flags.items():
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            what = "the number of ranks" if name == "ranks" else spelled(name)
            raise UserError(f"--resume {saved.folder}: {what} was {before}: keep it")
    # A fingerprint "" is that of converted weights, which have seen no data: any may follow
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than at that time")
