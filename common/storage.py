"""The directory of a run's checkpoints: saving a checkpoint, removing old ones, finding the newest
sound one.

    OUT/checkpoints/.step-00000100/rank-00000.pt     while the ranks write their files
    OUT/checkpoints/step-00000100/rank-00000.pt      when all have

A checkpoint is written under a hidden name, and gets its own when every rank's file is there. So a
run that is killed while it saves leaves no checkpoint of which only a part was written. In its own
directory a run keeps its last two checkpoints, and removes older ones (`remove_older`).

DAMAGE. A disk may change or lose what was written. A .pt file is a zip archive with checksums, and
also says how many files the checkpoint has. So before a run resumes, the ranks divide the files
among themselves, read them all, and find out whether some are damaged or missing. A file that
cannot be read counts as damaged. A checkpoint without damage is called *sound*. If a checkpoint is
not, the ranks try the next older one. If none is left, or if --resume names the damaged one, the
run ends. A damaged checkpoint may stay longer than others: `remove_older` says why.

A NETWORK DISK. A rank may see only some seconds later what another has written. So when a run
resumes, rank 0 says which checkpoints and files there are, and a rank that does not see one of them
looks again for up to a minute. When a run saves, rank 0 waits in the same way for the files of all
ranks. If a file does not come, the run ends: most likely the nodes do not share the directory.
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
    """Wait until this rank sees all these files. Raises OSError after a minute."""
    give_up = time.monotonic() + PATIENCE
    for path in paths:
        while not path.exists():
            if time.monotonic() > give_up:
                raise OSError(f"{path.name} is not there: nodes must share this folder")
            time.sleep(0.1)


def name_checkpoint(hidden: Path, folder: Path, n_ranks: int):
    """Give a checkpoint its name when all files are there. Raises OSError if one does not come."""
    wait_for([hidden / f"rank-{rank:05d}.pt" for rank in range(n_ranks)])
    # A damaged one may be there, if the run resumed from before it
    shutil.rmtree(folder, ignore_errors=True)
    hidden.rename(folder)


def remove_older(folder: Path, previous: Path):
    """Remove the checkpoints beside `folder` with a lower step number than `previous`. If
    `previous` is not one of the checkpoints there, but another run's, or a copy with another name,
    remove nothing.

    A checkpoint newer than `previous` may be one that could not be read. It stays until `previous`
    has a higher number: perhaps the disk failed only for a moment. For example, a run that could
    not read step 100 resumes from 50 with --save-every 40:

        saved    previous    then there are
        80       50          50 80 100
        120      80          80 100 120
        160      120         120 160
    """
    paths = checkpoints_of(folder.parent)  # newest first
    resolved = [path.resolve() for path in paths]
    if previous.resolve() in resolved:
        place = resolved.index(previous.resolve())
        for path in paths[place + 1 :]:
            shutil.rmtree(path, ignore_errors=True)  # a symbolic link stays


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

    `content`: as for `write_file`. `previous`: the checkpoint that this run has last saved, or
    resumed. It stays; older ones go (`remove_older`).
    """
    hidden = folder.with_name(f".{folder.name}")
    path = hidden / f"rank-{ranks.rank:05d}.pt"
    content = content | dict(rank=ranks.rank, ranks=ranks.world)
    what = f"--out: cannot save {folder}"
    try:
        # No rank writes before rank 0 has cleaned up
        ranks.attempt(what, remove_hidden, folder.parent, only_on_rank_0=True)
        ranks.attempt(what, write_file, path, content, pieces)
        ranks.attempt(what, name_checkpoint, hidden, folder, ranks.world, only_on_rank_0=True)
        if previous is not None:
            ranks.attempt(what, remove_older, folder, previous, only_on_rank_0=True)
    except UserError:
        # All ranks do this: without a shared directory each node has hidden files of its own
        remove_hidden(folder.parent)
        raise


# --- Finding a sound checkpoint -------------------------------------------------------------------


def checkpoints_of(parent: Path) -> list[Path]:
    """The checkpoints in a directory, newest (the highest step) first. A folder with another name,
    such as a user's copy, is never removed, and is resumed only if --resume names it.
    """
    return sorted(parent.glob("step-" + "[0-9]" * 8), reverse=True)


def candidates(where: Path, ranks: Ranks) -> list[Path]:
    """The checkpoints to try, newest first, as rank 0 sees them. A collective. `where`: a run's
    directory, or one checkpoint.
    """
    paths = [where] if files_of(where) else checkpoints_of(where / "checkpoints")
    return ranks.all_gather(paths)[0]


def find_sound(where: Path, ranks: Ranks) -> Path | None:
    """The newest sound checkpoint, the same on all ranks; None if there are no checkpoints.
    `where`: a run's directory, or one checkpoint.

    A collective. Reports damaged ones. Raises UserError if there are checkpoints, but none is
    sound; or if a rank does not see rank 0's files.
    """
    folders = candidates(where, ranks)
    for folder in folders:
        problems = problems_of(folder, ranks)
        if not problems:
            return folder
        if ranks.rank == 0:
            text = " ".join(problems[0].split())  # on one line
            print(f"{folder} is not sound: {text}", file=sys.stderr, flush=True)
    if folders:
        raise UserError(
            f"--resume: no checkpoint in {where} is sound: if that is a single checkpoint, name "
            "its run's directory, to try older ones; or start anew in another --out"
        )
    return None


def problems_of(folder: Path, ranks: Ranks) -> list[str]:
    """What the ranks have found wrong with a checkpoint: nothing, if it is sound. A collective.
    Raises UserError if a rank does not see rank 0's files.
    """
    paths = ranks.all_gather(files_of(folder))[0]
    ranks.attempt(f"--resume: {folder}, as rank 0 sees it", wait_for, paths)
    found = ranks.all_gather(problem_of(paths, ranks))
    return [problem for problem in found if problem]


def problem_of(paths: list[Path], ranks: Ranks) -> str:
    """Check this rank's share of a checkpoint's files. Returns what is wrong with the first bad
    one, or "".
    """
    if not paths:
        return "it is empty"  # a folder without files
    # `number`: the rank that wrote the file
    for number in range(ranks.rank, len(paths), ranks.world):
        path = paths[number]
        try:
            with zipfile.ZipFile(path) as archive:
                broken = archive.testzip()  # compares checksums
            if broken:
                return f"{path.name} is damaged"
            content = read_file(path)
            if (content["rank"], content["ranks"]) != (number, len(paths)):
                return f"{path.name} is of another checkpoint, or another file is missing"
        except Exception as error:  # of almost any type, if bytes are random
            return f"{path.name} is damaged: {error}"
    return ""
