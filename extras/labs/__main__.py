"""The labs' commands `start`, `check` and `grade`: see `python -m extras.labs --help`."""

import argparse
import csv
import re
import sys
from pathlib import Path
from typing import Any

from common import UserError
from extras.labs import TASKS, holes, hollow, step_of
from extras.labs.judge import chapter, judge, lay_out

COLUMNS = ("folder", "student", "lab", "points", "of", "error", "lost")  # columns of the table of grades
INTRODUCTION = """# Lab {lab}: {step}

Student: {student}

In {files} some functions only raise `NotImplementedError`. Write them: signature and
docstring are the specification. Nothing else is judged: keep helper functions in the same file. Do the tasks in order.
Two cores and 2 GB suffice. In this folder, with the project's environment active:

    pytest {tests}      all tests; with `-k task_{word}` those of a task, with `--lf` those that failed
    {launch}      your step, once it is whole; `--help` lists its flags

In the project's folder:

    python -m extras.labs check {folder}     points by task, as they will be graded

The tests say what is demanded of each function: read one that fails. A test that hangs fails after a minute, and
says in which call each rank waits. A task may also fail because of an earlier one.

{tasks}

Each task has a section with its minutes, what to read, and three hints, from vague to plain: try without them first.

{text}"""


def start(lab: int, folder: Path, student: str):
    """Make a student's folder. Raises UserError if there is no such lab, or if the folder exists already."""
    if lab not in TASKS:
        raise UserError(f"lab {lab}: there are labs 1 to {max(TASKS)}")
    if folder.exists():
        raise UserError(f"{folder} is there already: choose a new folder")
    lay_out(lab, folder, hollow(lab))
    files, task, tasks = " and ".join(holes(lab)), next(iter(TASKS[lab])), []
    for n, (name, names) in enumerate(TASKS[lab].items(), 1):
        functions = ", ".join(f"`{each.rpartition(':')[2]}`" for each in names.split())
        tasks.append(f'{n}. Task "{name}": ' + (f"write {functions}." if names else "the whole file; nothing to add."))
    words = dict(lab=lab, step=step_of(lab), student=student, files=files, folder=folder.resolve())
    words["launch"] = f"{'torchrun --nproc_per_node=2' if lab > 1 else 'python'} {step_of(lab)} --model debug"
    words |= dict(tests=chapter(lab), word=task.replace(" ", "_"), tasks="\n".join(tasks))
    text = (Path(__file__).parent / f"lab{lab}.md").read_text().partition("\n\n")[2]
    (folder / "LAB.md").write_text(INTRODUCTION.format(text=text, **words))


def opened(folder: Path) -> tuple[int, str, dict[str, str]]:
    """Read a folder: (lab, student, {file: text}). UserError without a valid LAB.md, OSError if a file is missing."""
    words = (folder / "LAB.md").read_text() if (folder / "LAB.md").is_file() else ""
    found = re.match(r"# Lab ([1-7]):.*\n\nStudent: ?(.*)", words)
    if not found:
        raise UserError(f"{folder} is no folder of a lab: it has no LAB.md as `start` writes it")
    lab = int(found[1])
    return lab, found[2], {file: (folder / file).read_text() for file in holes(lab)}


def check(folder: Path, seconds: float) -> int:
    """Print the points of each task, and why tests failed; returns 0 if all tests passed, else 1."""
    lab, _, texts = opened(folder)
    found = judge(lab, texts, seconds)
    for task in TASKS[lab]:
        own, said = [result for result in found if result.task == task], set()
        earned = sum(result.points for result in own if not result.wrong)
        print(f"{task}: {earned} of {sum(result.points for result in own)} points")
        for result in own:
            if result.wrong and result.wrong not in said:
                print(f"  {result.test}: " + "\n    ".join(result.wrong.splitlines()[:6]))
            said.add(result.wrong)
    return int(any(result.wrong for result in found))


def row(folder: Path, seconds: float) -> dict[str, Any]:
    """Judge a folder; returns its row of the table of grades. Whatever the folder contains, no exception is raised."""
    lab, student, found, error = 0, "", [], ""
    try:
        lab, student, texts = opened(folder)
        found = judge(lab, texts, seconds)
    except Exception as problem:  # such as a file that is no text: the other folders are graded all the same
        error = str(problem) or type(problem).__name__
    lost = " | ".join(f"{r.test}: {r.wrong}"[:200] for r in found if r.wrong)
    points, total = sum(r.points for r in found if not r.wrong), sum(r.points for r in found)
    cells = folder, student, lab, points, total, error, " ".join(lost.split())
    # No cell may begin with a character that makes a spreadsheet evaluate it.
    return {key: re.sub(r"^[=+@-]", r"'\g<0>", str(cell)) for key, cell in zip(COLUMNS, cells, strict=True)}


def main() -> int:
    """Run a command; returns the exit status."""
    top = argparse.ArgumentParser(prog="python -m extras.labs", description="Each chapter as an evening's work.")
    verbs = top.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("start", help="make a student's folder")
    verb.add_argument("lab", type=int)
    verb.add_argument("folder", type=Path)
    verb.add_argument("--student", default="", metavar="ID", help="noted in LAB.md, and in the table of grades")
    verb = verbs.add_parser("check", help="points by task; exit status 0 if all were earned")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("grade", help="for teachers: judge folders, and print a table in CSV; exit status 0")
    verb.add_argument("folders", nargs="+", type=Path)
    for verb in (verbs.choices["check"], verbs.choices["grade"]):
        verb.add_argument("--seconds", type=float, default=900, help="limit for a folder (default %(default)s)")
    args = top.parse_args()
    try:
        if args.verb == "start":
            start(args.lab, args.folder, args.student)
            print(f"{args.folder}: open LAB.md")
        elif args.verb == "check":
            return check(args.folder, args.seconds)
        else:
            writer = csv.DictWriter(sys.stdout, COLUMNS)
            writer.writeheader()
            for folder in args.folders:
                writer.writerow(row(folder, args.seconds))
                sys.stdout.flush()  # if the grader is stopped, the results so far remain
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
