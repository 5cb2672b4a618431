"""For teachers: judge folders. Whatever one of them contains, the others get their points, and the exit status is 0.

All folders are read before any student's code runs. Each is judged in processes of its own, which start those of the
ranks; in the end all descendants are killed. Then the project's files are compared with what they were, and restored.
The table is written anew after each folder. What to look at in it, beside the points:

    same as the project's file   functions that are the project's but for names (of "functions written")
    same as folder               others with the same functions but for names; compare `id` with your roster
    reaches for                  names such as labs, sys, inspect, exec, a torch.x that it sets: a look at the grader
    project files changed        what its code wrote into the project; it has been put back
    error in the file, ended early, attempts (checks in progress.txt, which the student could edit)

This protects the run, not the machine: code can still read files and send signals. Grade what strangers hand in inside
a container.
"""

import csv
import hashlib
import importlib
import re
from functools import partial
from pathlib import Path
from typing import Any

from common import UserError
from labs import ranks
from labs.course import ROOT, Case, files, load, numbers, path_of
from labs.folder import open_folder
from labs.judge import Folder, check
from labs.source import facts


def project() -> dict[Path, bytes]:
    """All files of the project."""
    return {path: path.read_bytes() for path in files(".git", ".venv", "runs")}


def restore(before: dict[Path, bytes]) -> list[str]:
    """Put back what has changed; the names, but for caches."""
    now, changed = project(), []
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            if path in before:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(before[path])
            else:
                path.unlink(missing_ok=True)
            if not {"__pycache__", ".pytest_cache", ".ruff_cache"} & set(path.parts):
                changed.append(str(path.relative_to(ROOT)))
    return changed


class Job(Case):
    """What a process of its own finds out: `does()`."""

    def run(self, step: Any, mesh: Any) -> list[Any]:
        return [self.does()]


def points(folder: Folder, number: int, seconds: float) -> int:
    """What a task has earned; 0 is the question."""
    return sum(result.earned for result in check(folder, number, seconds=seconds))


def same_as(prints: dict[str, list[str]], folder: str) -> str:
    """Folders with this one's functions but for names: at least four of five of those that are not the project's."""
    own, found = set(prints[folder]), []
    for other, theirs in prints.items():
        if other != folder and own and theirs and len(own & set(theirs)) >= 0.8 * max(len(own), len(theirs)):
            found.append(other)
    return " ".join(found)


def grade(paths: list[Path], table: Path | None, number: int, seconds: float):
    """Grade folders; prints a line for each, and writes a row. `number`: judge as this lab."""
    folders: dict[str, Folder | str] = {}
    for path in paths:
        try:
            folders[str(path)] = open_folder(path, number)
        except UserError as error:
            folders[str(path)] = str(error)
        except Exception as error:  # a folder that is a device, a loop of links, ...
            folders[str(path)] = f"{type(error).__name__}: {error}"
    for n in numbers():  # nothing of the project is read from its files after a student's code has run
        importlib.import_module(load(n).modules[-1])
    before, rows, prints = project(), {}, {}
    for name, folder in folders.items():
        rows[name] = (
            dict(folder=name, error=folder) if isinstance(folder, str) else row_of(name, folder, seconds, prints)
        )
        if changed := restore(before):
            rows[name]["project files changed"] = " ".join(changed)[:300]
        print(f"{name}: {rows[name].get('error') or '{points} of {of}'.format(**rows[name])}", flush=True)
        for other in prints:
            rows[other]["same as folder"] = same_as(prints, other)
        if table:
            write(table, list(rows.values()))


def row_of(name: str, folder: Folder, seconds: float, prints: dict[str, list[str]]) -> dict[str, Any]:
    """One row of the table."""
    lab, tasks = folder.lab, [*range(1, len(folder.lab.tasks) + 1), 0]
    row: dict[str, Any] = dict(folder=name, lab=lab.number, id=folder.student, points=0, of=lab.points)
    holes = {module: lab.holes(module) for module in lab.modules}
    texts = {module: path_of(module).read_text() for module in lab.modules}
    others = [data.decode() for data in folder.files.values()]
    jobs = [partial(facts, folder.sources, texts, holes, others)]
    jobs += [partial(points, folder, number, seconds) for number in tasks]
    (known, *earned) = ranks.run(ranks.World(("labs",)), [Job(0, does=job) for job in jobs], 60 + 20 * seconds)
    if isinstance(known, ranks.Failed):
        row["error in the file"] = str(known)[:200]
    else:
        ((known,),) = known
        row["functions written"], row["same as the project's file"] = known["written"], known["same"]
        row["reaches for"], prints[name] = " ".join(known["reaches"]), known["prints"]
    for number, found in zip(tasks, earned, strict=True):
        row[f"task {number}" if number else "question"] = n = 0 if isinstance(found, ranks.Failed) else found[0][0]
        row["points"] += n
    row["attempts"] = folder.attempts
    row["code"] = hashlib.sha256("".join(folder.sources.values()).encode()).hexdigest()[:12]
    if any(isinstance(found, ranks.Failed) for found in earned):
        row["ended early"] = "a process that judged it was killed, or time was up: look at this folder"
    return row


def write(table: Path, rows: list[dict[str, Any]]):
    """All rows there are, as CSV; a cell never begins with what a spreadsheet would run."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({key: re.sub(r"^[=+@-]", r"'\g<0>", str(value)) for key, value in row.items()} for row in rows)
