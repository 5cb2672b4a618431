"""For teachers: judge folders. Whatever one of them contains, the others get their points, and the exit status is 0.

All folders are read, and the project's file has found what there is to find, before any student's code runs. Each is
judged in processes of its own, which start those of the ranks; in the end all descendants are killed. Where the kernel
allows it, ranks run in namespaces of their own: they see no other process and none of the solutions, and change no
folder. Then the project's files are compared with what they were, and restored. A folder's code has three minutes.

The table is written anew before and after each folder. If the grader itself is killed, start it again: rows that are
there stay, and the folder that was being judged is passed over. What to look at, beside the points:

    same as the project's file   functions that are the project's but for names (of "functions written")
    same as folder               others with the same functions but for names; compare `id` with your roster
    reaches for                  calls such as os.kill, torch.save, getattr by a computed name: a look at the grader
    changed its judge            numbers that should be found are other ones in the student's process than in ours
    project files changed        what its code wrote into the project; it has been put back
    error in the file, ended early, attempts (checks in progress.txt, which the student could edit)

Code can still read other files. Grade what strangers hand in inside a container.
"""

import csv
import hashlib
import importlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from common import UserError
from extras.labs import ranks
from extras.labs.course import ROOT, Case, files, load, numbers, path_of
from extras.labs.folder import open_folder
from extras.labs.judge import CHANGED, Folder, Judge, check, learn
from extras.labs.source import facts

RUNS = 3  # a folder's code has so many times what one run may take: three minutes
JUDGED, ENDED = "being judged", "the grader was killed while it judged this folder: look at it"


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


def points(folder: Folder, number: int, seconds: float) -> list[list]:
    """What each criterion of a task has earned: [what it says, earned, of, why not all]; 0 is the question."""
    return [[r.says, r.earned, r.points, r.text] for r in check(folder, number, seconds=seconds, strict=True)]


def same_as(prints: dict[str, list[str]], folder: str) -> str:
    """Folders with this one's functions but for names: at least four of five of those that are not the project's."""
    own, found = set(prints[folder]), []
    for other, theirs in prints.items():
        if other != folder and own and theirs and len(own & set(theirs)) >= 0.8 * max(len(own), len(theirs)):
            found.append(other)
    return " ".join(found)


def rows_in(table: Path | None) -> dict[str, dict[str, Any]]:
    """Of an earlier run that was killed."""
    if table is None or not table.exists():
        return {}
    with table.open(newline="") as file:
        return {row["folder"]: row | dict(error=row["error"].replace(JUDGED, ENDED)) for row in csv.DictReader(file)}


def read(paths: list[Path], number: int) -> dict[str, Folder | str]:
    """By path: what a student has handed in, or why it cannot be read."""
    found: dict[str, Folder | str] = {}
    for path in paths:
        try:
            found[str(path)] = open_folder(path, number)
        except UserError as error:
            found[str(path)] = str(error)
        except Exception as error:  # a folder that is a device, a loop of links, ...
            found[str(path)] = f"{type(error).__name__}: {error}"
    return found


def prepare(folders: list[Folder], seconds: float):
    """Before any student's code runs: import what is read from files, and let the project's file find what it finds."""
    for n in numbers():
        importlib.import_module(load(n).modules[-1])
    for folder in folders:
        folder.left[0], folder.others = RUNS * seconds, tuple(other.path for other in folders)
        for task in range(1, len(folder.lab.tasks) + 1):
            learn(folder.lab, [case for some in Judge(folder, task).cases for case in some])


def grade(paths: list[Path], table: Path | None, number: int, seconds: float, gradescope: Path | None = None):
    """Grade folders; prints a line for each, and writes a row. `number`: judge as this lab.

    `gradescope`: a folder; for each of ours a folder in it with Gradescope's results.json.
    """
    folders, rows, prints = read(paths, number), rows_in(table), {}
    waiting = [name for name in folders if name not in rows]
    prepare([folder for folder in folders.values() if isinstance(folder, Folder)], seconds)
    before = project()
    if rows:  # that a folder's judge was killed is seen even if none is left
        write(table, rows)
    for name in waiting:
        folder, results = folders[name], []
        rows[name] = dict(folder=name, error=folder if isinstance(folder, str) else JUDGED)
        write(table, rows)
        if isinstance(folder, Folder):
            rows[name] = row_of(name, folder, seconds, prints, results)
        if gradescope:
            upload(gradescope / Path(name).name, folder, results)
        if changed := restore(before):
            rows[name]["project files changed"] = " ".join(changed)[:300]
        print(f"{name}: {rows[name].get('error') or '{points} of {of}'.format(**rows[name])}", flush=True)
        for other in prints:
            rows[other]["same as folder"] = same_as(prints, other)
        write(table, rows)


def upload(target: Path, folder: Folder | str, results: list[list]):
    """Gradescope's results.json; `results`: [what a criterion says, earned, of, why not all]."""
    keys = "name", "score", "max_score", "output"
    tests = [dict(zip(keys, result, strict=True)) for result in results]
    found = dict(score=sum(test["score"] for test in tests), tests=tests)
    if isinstance(folder, str):
        found["output"] = folder
    target.mkdir(parents=True, exist_ok=True)
    (target / "results.json").write_text(json.dumps(found, indent=1))


def row_of(
    name: str, folder: Folder, seconds: float, prints: dict[str, list[str]], results: list[list]
) -> dict[str, Any]:
    """One row of the table; all criteria join `results`."""
    lab, tasks = folder.lab, [*range(1, len(folder.lab.tasks) + 1), 0]
    row: dict[str, Any] = dict(folder=name, error="", lab=lab.number, id=folder.student, points=0, of=lab.points)
    holes = {module: lab.holes(module) for module in lab.modules}
    texts = {module: path_of(module).read_text() for module in lab.modules}
    others = [data.decode() for data in folder.files.values()]
    jobs = [partial(facts, folder.sources, texts, holes, others)]
    jobs += [partial(points, folder, number, seconds) for number in tasks]
    (known, *earned) = ranks.run(ranks.World(("labs",)), [Job(0, does=job) for job in jobs], 2 * RUNS * seconds)
    if isinstance(known, ranks.Failed):
        row["error in the file"] = str(known)[:200]
    else:
        ((known,),) = known
        row["functions written"], row["same as the project's file"] = known["written"], known["same"]
        row["reaches for"], prints[name] = " ".join(known["reaches"]), known["prints"]
    for number, found in zip(tasks, earned, strict=True):
        some = [["all of this task", 0, 0, str(found)]] if isinstance(found, ranks.Failed) else found[0][0]
        row[f"task {number}" if number else "question"] = n = sum(earned for _, earned, *_ in some)
        row["points"] += n
        results += [[f"{number or 'question'}. {says}", *rest] for says, *rest in some]
    if any(CHANGED in text for *_, text in results):
        row["changed its judge"] = "yes"
    row["attempts"] = folder.attempts
    row["code"] = hashlib.sha256("".join(folder.sources.values()).encode()).hexdigest()[:12]
    if any(isinstance(found, ranks.Failed) for found in earned):
        row["ended early"] = "a process that judged it was killed, or time was up: look at this folder"
    return row


def write(table: Path | None, rows: dict[str, dict[str, Any]]):
    """All rows there are, as CSV, if it is wanted; a cell never begins with what a spreadsheet would run."""
    if table is None:
        return
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows.values():
            writer.writerow({key: re.sub(r"^[=+@-]", r"'\g<0>", str(value)) for key, value in row.items()})
