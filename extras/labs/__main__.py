"""The commands of the labs, such as start and grade: `python -m extras.labs --help`."""

import argparse
import csv
import re
import sys
from pathlib import Path
from typing import Any

from common import UserError
from extras.labs import TASKS, holes, hollow, question_of, step_of, text_of
from extras.labs.judge import chapter, judge, lay_out, worth

SECONDS = 900  # that a folder may take by default
INTRODUCTION = """# Lab {lab}: {step}

Student: {student}

In {files} some functions only raise `NotImplementedError`. Write them: signature and
docstring are the specification. Nothing else is judged: keep helper functions in the same file. Do the tasks in order.
Two cores and 2 GB suffice. In this folder, with the project's environment active:

    pytest {tests}      all tests; with `-k task_{word}` those of a task, with `--lf` those that failed
    {launch}      your step, once it is whole; `--help` lists its flags

In the project's folder:

    python -m extras.labs check {folder}     points by task, as they will be graded
    python -m extras.labs check {folder} --task "{task}"

The tests say what is demanded of each function: read one that fails. A test that hangs fails after a minute, and
says in which call each rank waits. A task may also fail because of an earlier one. The last section has three hints for
each task, from vague to plain.
"""


def start(lab: int, folder: Path, student: str):
    """Make a student's folder. Raises UserError."""
    if lab not in TASKS:
        raise UserError(f"lab {lab}: there are labs 1 to {max(TASKS)}")
    if folder.exists():
        raise UserError(f"{folder} is there already: choose a new folder")
    lay_out(lab, folder, hollow(lab))
    files, task = " and ".join(holes(lab)), next(iter(TASKS[lab]))
    words = dict(lab=lab, step=step_of(lab), student=student, files=files, folder=folder.resolve(), task=task)
    words["launch"] = f"{'torchrun --nproc_per_node=2' if lab > 1 else 'python'} {step_of(lab)} --model debug"
    lines = [INTRODUCTION.format(tests=chapter(lab), word=task.replace(" ", "_"), **words)]
    for i, ((name, names), (title, minutes, read, _)) in enumerate(zip(TASKS[lab].items(), text_of(lab), strict=True)):
        earned = sum(points for (_, other), points in worth(lab).items() if other == name)
        lines += [f'## {i + 1}. {title} (task "{name}", {minutes} minutes, {earned} points)\n']
        holes_of = ", ".join(f"`{each.rpartition(':')[2]}`" for each in names.split())
        lines += [f"Write: {holes_of}." if names else "Nothing new: all of it together."]
        lines += [f"Read: {read}.\n"]
    lines += ["## The question, to be answered in writing\n", question_of(lab), "## Hints\n"]
    for title, *_, hints in text_of(lab):
        lines += [f"### {title}\n", *(f"{n}. {hint}" for n, hint in enumerate(hints, 1)), ""]
    (folder / "LAB.md").write_text("\n".join(lines))


def opened(folder: Path) -> tuple[int, str, dict[str, str]]:
    """Read a student's folder: its lab, student and files. Raises UserError, or OSError."""
    words = (folder / "LAB.md").read_text() if (folder / "LAB.md").is_file() else ""
    found = re.match(r"# Lab ([1-7]):.*\n\nStudent: ?(.*)", words)
    if not found:
        raise UserError(f"{folder} is no folder of a lab: it has no LAB.md as `start` writes it")
    lab = int(found[1])
    return lab, found[2], {file: (folder / file).read_text() for file in holes(lab)}


def check(folder: Path, only: str, seconds: float) -> int:
    """Print points by task, and why some are missing; returns 0 if none is."""
    lab, _, texts = opened(folder)
    if (only := only.replace("_", " ")) and only not in TASKS[lab]:
        raise UserError(f"--task {only}: lab {lab} has {', '.join(TASKS[lab])}")
    found = judge(lab, texts, seconds, only)
    for task in TASKS[lab]:
        own, said = [result for result in found if result.task == task], set()
        if own:
            earned = sum(result.points for result in own if not result.wrong)
            print(f"{task}: {earned} of {sum(result.points for result in own)} points")
        for result in own:
            if result.wrong and result.wrong not in said:
                print(f"  {result.test}: " + "\n    ".join(result.wrong.splitlines()[:6]))
            said.add(result.wrong)
    return int(any(result.wrong for result in found))


def row(folder: Path, seconds: float) -> dict[str, Any]:
    """Judge a folder, whatever it contains: its row of the table."""
    lab, student, found, error = 0, "", [], ""
    try:
        lab, student, texts = opened(folder)
        found = judge(lab, texts, seconds)
    except Exception as problem:  # a file may be a device, or no text: the other folders are graded all the same
        error = str(problem) or type(problem).__name__
    sums = []
    for task in TASKS.get(lab, ()):
        own = [r for r in found if r.task == task]
        sums.append(f"{task} {sum(r.points for r in own if not r.wrong)}/{sum(r.points for r in own)}")
    lost = " | ".join(f"{r.test}: {r.wrong}"[:200] for r in found if r.wrong)
    points, total = sum(r.points for r in found if not r.wrong), sum(worth(lab).values()) if lab else 0
    cells = dict(folder=folder, student=student, lab=lab, points=points, of=total, error=error)
    cells |= dict(tasks="; ".join(sums), lost=" ".join(lost.split()))
    # No cell may begin with a character that makes a spreadsheet evaluate it.
    return {key: re.sub(r"^[=+@-]", r"'\g<0>", str(cell)) for key, cell in cells.items()}


def grade(folders: list[Path], table: Path | None, seconds: float):
    """Print a line for each folder, and write its row of the table."""
    rows: list[dict[str, Any]] = []
    for folder in folders:
        rows.append(row(folder, seconds))
        print("{folder}: {points} of {of} {error}".format(**rows[-1]), flush=True)
        if table:  # rewritten after each folder: if the grader is stopped, earlier results remain
            with table.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)


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
    verb.add_argument("--task", default="", help="this task alone, by its name")
    verb.add_argument("--seconds", type=float, default=SECONDS, help="limit (default %(default)s)")
    verb = verbs.add_parser("grade", help="for teachers: judge folders; exit status 0 whatever they contain")
    verb.add_argument("folders", nargs="+", type=Path)
    verb.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each folder")
    verb.add_argument("--seconds", type=float, default=SECONDS, help="limit for a folder (default %(default)s)")
    args = top.parse_args()
    try:
        if args.verb == "start":
            start(args.lab, args.folder, args.student)
            print(f"{args.folder}: open LAB.md")
        elif args.verb == "check":
            return check(args.folder, args.task, args.seconds)
        else:
            grade(args.folders, args.csv, args.seconds)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
