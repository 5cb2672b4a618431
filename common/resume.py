"""Which checkpoint a run resumes from (`choose_checkpoint` has the table), and which flags may then
differ from the saved run's.

Flags that decide what is computed must stay: for example those of the model, of the batch and of
the learning rate, and --steps, on which the learning rate depends. If one has changed, the run ends
with a line such as "--resume runs/a/checkpoints/step-00000050: --lr was 0.003: keep it".

FREE lists the flags that may change (a flag that is not listed must stay):

    what a run reads and writes    --dataset (the same tokens from another path: a hash of them is
                                   compared), --out, ...
    where, and in which dtype      --device, --dtype
    how ranks divide the work      their number, --tp, --zero, ...
    what is kept in memory         --recompute, --keep (step 3), ...

Except --dtype, they change the results at most by rounding, which in step 7 may choose another
expert. --dtype changes more. Its default, auto, is bf16 on a GPU that has it, and fp32 on a CPU. So
if a run moves from a GPU to a CPU, give --dtype bf16, and from a CPU to a GPU --dtype fp32:
otherwise the dtype changes, and nothing notices, because --dtype is not compared.

--micro-batch-size may change, too, unless experts have an auxiliary loss (step 7, --balance loss).

checkpoint.py restores weights and optimizer state, in any layout. Data and learning rate follow
from the step's number.

A run of one of steps 1 to 6 may be resumed by the script of another of these, such as
`step03_zero.py --resume runs/step02_ddp`. A flag that only one of the two has is not compared.
(Step 7 has another model.)
"""

from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Checkpoint
from common.flags import spelled
from common.ranks import Ranks
from common.storage import candidates, find_sound

FREE = {
    # What the run reads and writes, and when it gives up
    "dataset",
    "out",
    "resume",
    "save_every",
    "timeout",
    "profile",
    # Where it computes, and in which dtype
    "device",
    "dtype",
    # How the ranks divide and do the work, and what they keep in memory
    "ranks",  # their number, which `Run` adds
    "recompute",
    "compile",
    "sync",
    "bucket_mb",
    "zero",
    "keep",
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

    `resume`             what it selects
    "auto"               the newest sound one in --out; None if --out has no checkpoint
    ""                   None; an error if --out has checkpoints
    a run's directory    its newest sound checkpoint; if --out has checkpoints, it must be --out
    a checkpoint         that one; if --out has checkpoints, it must be the newest of them

    A sound checkpoint has no damaged or missing file. The resumed run's directory is not changed if
    --out is another one. A collective. Raises UserError if `resume` names a path without
    checkpoints, if there are some but none is sound, if a rank does not see their files, if the
    checkpoints of two runs would be mixed, or if --out has newer checkpoints than the one named.
    """
    if resume == "auto":
        return find_sound(out, ranks)
    existing = candidates(out, ranks)
    refusal = (
        f"--out {out} has checkpoints: set --resume {out} to continue from its newest, or "
        "another --out"
    )
    if resume == "":
        if existing:
            raise UserError(refusal)
        return None
    where = Path(resume)
    if not candidates(where, ranks):
        raise UserError(f"--resume {resume}: no checkpoint is there")
    if existing:
        newest = existing[0]
        # Refuse another run's checkpoint, and an older one of --out: newer ones are there already
        if where.resolve() not in (out.resolve(), newest.resolve()):
            raise UserError(refusal)
    return find_sound(where, ranks)


def may_differ(flags: dict[str, Any]) -> set[str]:
    """The flags that may differ between two runs: a saved one and the one that resumes it, or the
    two of compare.py. `flags`: one run's, in `check_flags` the new one's. (If --balance has
    changed, that is refused anyway.)
    """
    # Step 7's auxiliary loss depends on the size of a micro-batch. There is none with --balance
    # none or bias
    if flags.get("balance", "none") in ("none", "bias"):  # steps 1 to 6 have no --balance
        return FREE | {"micro_batch_size"}
    return FREE


def check_flags(saved: Checkpoint, flags: dict[str, Any], fingerprint: str):
    """Raise UserError if the data, or a flag that must stay, differ from the saved run's."""
    free = may_differ(flags)
    for name, value in flags.items():
        # A flag that the saved run did not have is not compared
        before = saved.about["flags"].get(name, value)
        if before != value and name not in free:
            raise UserError(f"--resume {saved.folder}: {spelled(name)} was {before}: keep it")
    # A tool that converts another format's weights writes "": then no data are compared
    if saved.about["fingerprint"] not in ("", fingerprint):
        raise UserError(f"--resume {saved.folder}: --dataset has other tokens than the saved run's")
