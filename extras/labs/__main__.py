"""The labs' commands `start`, `check` and `grade`: see `python -m extras.labs --help`."""

import argparse
import ast
import csv
import re
import sys
from pathlib import Path
from typing import Any

from common import UserError
from common.launch import print_error
from extras.labs import ROOT, TASKS, definitions, holes, hollow, step_of
from extras.labs.judge import judge, lay_out, path_of_tests, read

COLUMNS = ["folder", "lab", "points", "of", "error", "lost"]  # of the table of grades
# What a student launches in the end, on two ranks from lab 2 on
FLAGS = {1: "", 2: "", 3: " --zero 3", 4: " --tp 2", 5: " --cp 2", 6: " --pp 2", 7: " --ep 2"}
INTRODUCTION = """# Lab {lab}: {step}

In {files} some functions only raise `NotImplementedError`. Write them:
signature and docstring are the specification. Nothing else is judged: keep helper functions in the
same file. Do the tasks in order. Two cores and 2 GB suffice. In this folder, with the project's
environment active:

    pytest {tests}      all tests; `-k task_loop`: those of a task; `--lf`: those that failed
    {launch} --model debug      your step, once it is whole; `--help` lists its flags

In the project's folder:

    python -m extras.labs check {folder}     points by task, as they will be graded

The tests say what is demanded of each function: read one that fails. A test that hangs fails after
a minute, and says in which call each rank waits. A task may also fail because of an earlier one.
Keep the last lines of the file, from `if __name__ == "__main__":` on: the tests import your file.

{tasks}

Each task has a section with its minutes, what to read, and three hints, from vague to plain: try
without them first.

{text}"""


def start(lab: int, folder: Path):
    """Make a student's folder. Raises UserError if there is no such lab, or the folder exists."""
    if lab not in TASKS:
        raise UserError(f"lab {lab}: there are labs 1 to {max(TASKS)}")
    if folder.exists():
        raise UserError(f"{folder} is there already: choose a new folder")
    lay_out(lab, folder, hollow(lab))
    tasks = []
    for n, (name, names) in enumerate(TASKS[lab].items(), 1):
        functions = ", ".join(f"`{name.rpartition(':')[2]}`" for name in names.split())
        work = f"write {functions}." if functions else "the whole file; nothing to add."
        tasks.append(f'{n}. Task "{name}": {work}')
    launcher = "torchrun --nproc_per_node=2" if lab > 1 else "python"
    words = INTRODUCTION.format(
        lab=lab,
        step=step_of(lab),
        files=" and ".join(holes(lab)),
        tests=path_of_tests(lab),
        launch=f"{launcher} {step_of(lab)}{FLAGS[lab]}",
        folder=folder.resolve(),
        tasks="\n".join(tasks),
        text=(Path(__file__).parent / f"lab{lab}.md").read_text().partition("\n\n")[2],
    )
    (folder / "LAB.md").write_text(words, encoding="utf-8")


def lab_of(folder: Path) -> int:
    """The lab of a folder. Raises UserError or OSError without a valid LAB.md."""
    found = re.search(r"^\W*Lab ([1-7]):", read(folder / "LAB.md"), re.MULTILINE)
    if not found:
        raise UserError(f"{folder}/LAB.md lacks the first line that `start` writes")
    return int(found[1])


def submitted(folder: Path, lab: int) -> dict[str, str]:
    """The files that a student hands in, by name. Raises OSError if one is missing."""
    return {file: read(folder / file) for file in holes(lab)}


def check(folder: Path) -> int:
    """Print the points of each task, and why tests failed; returns 0 if all passed, else 1.

    Of each failed test: its name, the first line of its claim, and that of the error.
    """
    lab = lab_of(folder)
    found = judge(lab, submitted(folder, lab))
    tests = definitions((ROOT / path_of_tests(lab)).read_text())
    for task in TASKS[lab]:
        own = [result for result in found if result.task == task]
        earned = sum(result.points for result in own if not result.wrong)
        print(f"{task}: {earned} of {sum(result.points for result in own)} points")
        for result in own:
            if result.wrong:
                claim = ast.get_docstring(tests[result.test]).partition("\n")[0]
                print(f"  {result.test}: {claim}\n    {result.wrong}")
    return int(any(result.wrong for result in found))


def row(folder: Path) -> list[Any]:
    """Judge a folder; returns its row of the table. Whatever it contains, this does not raise."""
    lab = 0
    found = []
    error = ""
    try:
        lab = lab_of(folder)
        found = judge(lab, submitted(folder, lab))
    except Exception as problem:  # the other folders are graded all the same
        error = str(problem) or type(problem).__name__
    points = 0
    lost = []
    for result in found:
        if result.wrong:
            lost.append(f"{result.test}: {result.wrong}"[:200])
        else:
            points += result.points
    total = sum(result.points for result in found)
    return [folder, lab, points, total, error, " | ".join(lost)]


def grade(folders: list[Path]):
    """Print the table row by row: if the grader is stopped, the results so far remain."""
    writer = csv.writer(sys.stdout)
    writer.writerow(COLUMNS)
    for folder in folders:
        writer.writerow(row(folder))
        sys.stdout.flush()


def main() -> int:
    """Run a command; returns the exit status."""
    top = argparse.ArgumentParser(
        prog="python -m extras.labs", description="Each step as an evening's work."
    )
    verbs = top.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("start", help="make a student's folder")
    verb.add_argument("lab", type=int)
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser("check", help="points by task; exit status 0 if all were earned")
    verb.add_argument("folder", type=Path)
    verb = verbs.add_parser(
        "grade", help="for teachers: judge folders, and print a table in CSV; exit status 0"
    )
    verb.add_argument("folders", nargs="+", type=Path)
    args = top.parse_args()
    sys.stdout.reconfigure(errors="replace")  # a message of a student's may contain any character
    if args.verb == "check":
        return check(args.folder)
    if args.verb == "grade":
        grade(args.folders)
    else:
        start(args.lab, args.folder)
        print(f"{args.folder}: open LAB.md")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as problem:
        sys.exit(print_error(problem))
