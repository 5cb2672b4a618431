"""The labs' commands; `python -m labs --help`."""

import argparse
import contextlib
import json
import os
import sys
import time
import uuid
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from common import UserError


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    top = argparse.ArgumentParser(
        prog="python -m labs", description="Each chapter as an evening's work, and its grader."
    )
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, says: str, *words: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=says, description=says)
        for word in words:
            made.add_argument(word, type=int if word in ("lab", "task") else Path)
        return made

    start = verb("start", "make a folder for a lab", "lab", "folder")
    start.add_argument("--id", default=uuid.uuid4().hex[:8], help="inputs and questions are drawn from it")
    check = verb("check", "judge a folder; exit status 0 if all points were earned", "folder")
    check.add_argument("--task", type=int, help="this task alone")
    check.add_argument("--watch", action="store_true", help="again at every save, until Ctrl-C")
    check.add_argument("--gradescope", type=Path, metavar="FILE", help="write the results as Gradescope reads them")
    check.add_argument("--seconds", type=float, default=60, help="limit of one run of your code (default 60)")
    verb("hint", "the next of three hints for a task", "folder", "task")
    solution = verb("solution", "a diff from your functions to the project's", "folder", "task")
    solution.add_argument("--give-up", action="store_true", help="before the task has passed; it is noted")
    verb("report", "write report.html: points, pictures of a run of your file, answers", "folder")
    grade = verbs.add_parser("grade", help="for teachers: judge folders; exit status 0 whatever they contain")
    grade.add_argument("folders", nargs="+", type=Path)
    grade.add_argument("--gradescope", type=Path, metavar="FILE", help="results.json, for one folder")
    grade.add_argument("--csv", type=Path, metavar="FILE", help="a row for each folder")
    grade.add_argument("--seconds", type=float, default=60, help="limit of one run of a student's code (default 60)")
    return top


def checked(args: argparse.Namespace) -> int:
    """`check`, once; the exit status."""
    from labs import folder as folders
    from labs import grade

    folder = grade.open_folder(args.folder)
    tasks = [folders.task_of(folder, args.task)] if args.task else folder.lab.tasks
    results = []
    print(f"lab {folder.lab.number}, {folder.lab.title}; id {folder.student}")
    (folder.path / "output.txt").unlink(missing_ok=True)
    for task in tasks:
        found = list(grade.judge(folder, task, args.seconds, folder.path / "output.txt"))
        print(folders.table(folder, found), flush=True)
        results += found
    earned, worth = sum(r.earned for r in results), sum(task.points for task in tasks)
    print(f"{earned} of {worth} points, {sum(r.seconds for r in results):.0f} s")
    which = f"task {args.task}" if args.task else "all"
    folders.note(folder.path, f"check of {which}: {earned} of {worth} points")
    if args.gradescope:
        args.gradescope.write_text(json.dumps(grade.gradescope(folder, results), indent=1))
    if not args.task and earned == worth:
        trouble = grade.whole(folder)
        print(f"your file as it stands: {trouble or 'trains to the numbers of one device'}")
    return 0 if earned == worth else 1


def watched(args: argparse.Namespace) -> int:
    """`check` again whenever a Python file or answers.toml of the folder is saved, until Ctrl-C; 0.

    A folder that cannot be read is told and waited for: an editor may write a new file and rename it.
    """
    seen = None
    try:
        while True:
            saved = times_of(args.folder)
            if saved != seen:
                seen = saved
                try:
                    checked(args)
                except UserError as error:
                    print(f"labs: {error}")
                print("-- waiting for a save; Ctrl-C ends", flush=True)
            time.sleep(0.3)
    except KeyboardInterrupt:
        print()
        return 0


def times_of(folder: Path) -> dict[Path, int]:
    """When each file that `--watch` looks at was saved, as far as it is there just now."""
    found = {}
    for path in (*folder.glob("*.py"), folder / "answers.toml", folder / "LAB.md"):
        with contextlib.suppress(OSError):
            found[path] = path.stat().st_mtime_ns
    return found


def main(argv: list[str]) -> int:
    """Run a command; returns the exit status."""
    args = parser().parse_args(argv)
    from labs import folder as folders
    from labs import grade

    if args.verb == "start":
        path = folders.start(args.lab, args.folder, args.id)
        print(f"{path}: open LAB.md, then python -m labs check {path} --task 1")
    elif args.verb == "check":
        return watched(args) if args.watch else checked(args)
    elif args.verb == "hint":
        print(folders.hint(grade.open_folder(args.folder), args.task))
    elif args.verb == "solution":
        print(folders.solution(grade.open_folder(args.folder), args.task, args.give_up))
    elif args.verb == "report":
        from labs.report import report

        print(report(grade.open_folder(args.folder)))
    else:
        grade.grade(args.folders, args.seconds, args.gradescope, args.csv)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"labs: {error}", file=sys.stderr)
        sys.exit(2)
