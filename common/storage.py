"""The directory of a run's checkpoints: saving a checkpoint, removing old ones, finding the newest
sound one.

    OUT/checkpoints/.step-00000100/rank-00000.pt     while the ranks write their files
    OUT/checkpoints/step-00000100/rank-00000.pt      when all have

A checkpoint is written under a hidden name, and gets its own when every rank's file is there. So a
run that is killed while it saves leaves no checkpoint of which only a part was written. In its own
directory a run keeps its last two checkpoints (it may have resumed the older of these), and removes
what is older. If it has resumed an older one because the newest could not be read, that one stays
for a while: perhaps the disk has failed only for a moment (`remove_older`).

DAMAGE. A disk may change or lose what was written. A .pt file (checkpoint.py) is a zip archive with
checksums, and each rank's says how many files there are. So before a run resumes, the ranks share
the files out among them, read them all, and find out whether some are damaged or missing. If so,
they try the next older checkpoint. (If none is left, or if --resume names the damaged one itself,
the run ends.) A file that is there but cannot be read counts as damaged, too. A checkpoint without
damage is called *sound*.

A NETWORK DISK. What one rank has written, another may see only some seconds later. So when a run
resumes, rank 0 says which checkpoints and files there are, and a rank that does not see one of them
looks again for up to a minute. When it saves, rank 0 waits in the same way for the files of all
ranks. If a file is not there then, the run ends: most likely the nodes do not share the directory.
"""

import shutil
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

from common import UserError
from common.checkpoint import Piece, files_of, read_file, write_file
from common.ranks import Ranks

PATIENCE = 60.0  # seconds in which a rank looks again for files

# --- Saving ---------------------------------------------------------------------------------------


def wait_for(paths: list[Path]):
    """Return when this rank sees all these files. Raises OSError if it does not within a minute."""
    give_up = time.monotonic() + PATIENCE
    for path in paths:
        while not path.exists():
            if time.monotonic() > give_up:
                raise OSError(f"{path.name} is not there: nodes must share this folder")
            time.sleep(0.1)


def name_checkpoint(hidden: Path, folder: Path, n_ranks: int):
    """Give a checkpoint its name when all files are there. Raises OSError if one does not come."""
    wait_for([hidden / f"rank-{rank:05d}.pt" for rank in range(n_ranks)])
    # A damaged one may be there: the run resumed from before it, and has come to this step again
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)


def remove_older(folder: Path, previous: Path):
    """Remove the checkpoints beside `folder` that are older than `previous`. If `previous` is not
    one of these (but another run's, or a copy with another name), none is known to be older: remove
    nothing.

    A checkpoint newer than `previous` may be one that counted as damaged. It may be sound, if only
    a disk failed for a moment. So it stays until `previous` is newer, or until the run saves the
    same step again (`name_checkpoint`). For example, a run that could not read step 100 has resumed
    from 50, and saves 70, 90, 110 and 130: step 100 goes when 130 is saved.
    """
    paths = checkpoints_of(folder.parent)  # newest first
    resolved = [path.resolve() for path in paths]
    if previous.resolve() in resolved:
        for path in paths[resolved.index(previous.resolve()) + 1 :]:
            shutil.rmtree(path, ignore_errors=True)  # (it leaves a symbolic link as it is)


def remove_hidden(parent: Path):
    """Remove unfinished checkpoints, also those that killed runs have left."""
    for path in parent.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def save_checkpoint(
    folder: Path,
    content: dict[str, Any],
    pieces: dict[str, Piece],
    ranks: Ranks,
    previous: Path | None = None,
):
    """Save a checkpoint in `folder`. A collective. Raises UserError if any rank cannot write.

    `content`: as for `write_file`. `previous`: the checkpoint before, which this run has saved, or
    resumed. It stays; older ones go (`remove_older`).
    """
    hidden = folder.with_name(f".{folder.name}")
    path = hidden / f"rank-{ranks.rank:05d}.pt"
    content = content | dict(rank=ranks.rank, ranks=ranks.world)
    try:
        # No rank writes before rank 0 has cleaned up
        ranks.attempt(remove_hidden, folder.parent, first_only=True)
        ranks.attempt(write_file, path, content, pieces)
        ranks.attempt(name_checkpoint, hidden, folder, ranks.world, first_only=True)
        if previous is not None:
            ranks.attempt(remove_older, folder, previous, first_only=True)
    except UserError as error:
        # By all ranks: on nodes that do not share the directory, each has hidden files
        remove_hidden(folder.parent)
        raise UserError(f"--out: cannot save {folder}: {error}") from error


# --- Finding a sound checkpoint -------------------------------------------------------------------


def checkpoints_of(parent: Path) -> list[Path]:
    """The checkpoints in a directory, newest (the highest step) first. (A folder with another name,
    such as a copy that a user keeps, is never removed, and is resumed only if --resume names it.)
    """
    return sorted(parent.glob("step-" + "[0-9]" * 8), reverse=True)


def candidates(where: Path, ranks: Ranks) -> list[Path]:
    """The checkpoints to try, newest first. `where`: a run's directory, or one checkpoint. A
    collective: all ranks return what rank 0 sees.
    """
    paths = [where] if files_of(where) else checkpoints_of(where / "checkpoints")
    return ranks.gather(paths)[0]  # rank 0's, on all ranks


def find_sound(where: Path, ranks: Ranks) -> Path | None:
    """The newest sound checkpoint; None if the run has none. `where`: a run's directory, or one
    checkpoint.

    A collective: all ranks return the same. Reports damaged ones. Raises UserError if there are
    checkpoints, but none is sound; or if a rank does not see rank 0's files, which is no damage.
    """
    folders = candidates(where, ranks)
    for folder in folders:
        paths = ranks.gather(files_of(folder))[0]
        try:
            ranks.attempt(wait_for, paths)
        except UserError as error:
            raise UserError(f"--resume: {folder}, as rank 0 sees it: {error}") from error
        found = ranks.gather(problem_of(paths, ranks))
        problems = [problem for problem in found if problem]
        if not problems:
            return folder
        if ranks.rank == 0:
            text = " ".join(problems[0].split())  # on one line
            print(f"{folder} is not sound: {text}", file=sys.stderr, flush=True)
    if folders:
        raise UserError(
            f"--resume: no checkpoint in {where} is sound: if it is one of a run's checkpoints, "
            "name the run's directory, to try older ones; or start anew in another --out"
        )
    return None


def problem_of(paths: list[Path], ranks: Ranks) -> str:
    """What is wrong with the first bad file of this rank's share, or "". (Each rank checks some of
    a checkpoint's files.)
    """
    if not paths:
        return "it is empty"  # a folder with the name of a checkpoint, and without files
    for number in range(ranks.rank, len(paths), ranks.world):
        path = paths[number]
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()  # compares checksums
            content = read_file(path)
            if broken or (content["rank"], content["ranks"]) != (number, len(paths)):
                return f"{path.name} is damaged, or another file is missing"
        except Exception as error:  # of almost any type, if bytes are random
            return f"{path.name} is damaged: {error}"
    return ""
