"""The labs' commands; `python -m extras.labs --help`."""

import argparse
import contextlib
import os
import sys
import time
import uuid
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import torch  # noqa: F401
except ModuleNotFoundError:
    sys.exit("labs: this Python has no PyTorch: activate the project's environment (README.md, Installation)")

from common import UserError
from extras.labs import folder as folders
from extras.labs.grade import grade
from extras.labs.judge import Result, check
from extras.labs.launch import handout, run


def parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    top = argparse.ArgumentParser(prog="python -m extras.labs", description="Each chapter as an evening's work.")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(name: str, says: str, *words: str) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=says, description=says)
        for word in words:
            made.add_argument(word, type=int if word in ("lab", "task") else Path)
        return made

    made = verb("start", "make a folder for a lab", "lab", "folder")
    made.add_argument("--id", default=uuid.uuid4().hex[:8], help="inputs and the question are drawn from it")
    made = verb("check", "judge a folder; exit status 0 if all points were earned", "folder")
    made.add_argument("--task", type=int, help="this task alone")
    made.add_argument("--question", action="store_true", help="the question alone")
    made.add_argument("--watch", action="store_true", help="again at every save, until Ctrl-C")
    made.add_argument("--seconds", type=float, default=60, help="limit of one run of your code (default 60)")
    verb("hint", "the next of three hints for a task", "folder", "task")
    made = verb("run", "train with your file: python -m extras.labs run FOLDER -- FLAGS OF THE STEP", "folder")
    made.add_argument("--ranks", type=int, default=0, help="how many processes; default: the step's launch line")
    verb("handout", "for teachers: a copy of the project without solutions of this lab and later ones", "lab", "folder")
    made = verb("grade", "for teachers: judge folders; exit status 0 whatever they contain")
    made.add_argument("folders", nargs="+", type=Path)
    made.add_argument("--csv", type=Path, metavar="FILE", help="a row for each folder; rows that are there stay")
    made.add_argument("--gradescope", type=Path, metavar="DIR", help="for each folder a results.json in DIR")
    made.add_argument("--lab", type=int, default=0, help="judge as this lab, whatever LAB.md says")
    made.add_argument("--seconds", type=float, default=60, help="limit of one run of a student's code (default 60)")
    return top


def checked(args: argparse.Namespace) -> int:
    """`check`, once; the exit status."""
    folder = folders.open_folder(args.folder)
    if args.task:
        folder.lab.task(args.task)
    print(f"lab {folder.lab.number}, {folder.lab.title}; id {folder.student}")
    output = folder.path / "output.txt"
    output.unlink(missing_ok=True)
    results: list[Result] = []
    only = [args.task] * bool(args.task) + [0] * args.question
    for number in only or [*range(1, len(folder.lab.tasks) + 1), 0]:
        before = {result.text: result.says for result in results if result.text}
        results += (own := list(check(folder, number, seconds=args.seconds, output=output)))
        print("\n".join(folders.lines_of(folder, own, before)), flush=True)
        earned, points = sum(r.earned for r in own), sum(r.points for r in own)
        folders.note(folder.path, f"check of task {number}: {earned} of {points}")
    print(folders.progress(folder))
    return 1 if any(result.text for result in results) else 0


def watched(args: argparse.Namespace) -> int:
    """`check` again whenever a Python file or answers.toml of the folder is saved, until Ctrl-C; 0."""
    seen = None
    try:
        while True:
            saved = {}
            for path in (*args.folder.glob("*.py"), args.folder / "answers.toml", args.folder / "LAB.md"):
                with contextlib.suppress(OSError):
                    saved[path] = path.stat().st_mtime_ns
            if saved != seen:
                seen = saved
                try:
                    checked(args)
                except UserError as error:  # an editor may be writing a new file and renaming it
                    print(f"labs: {error}")
                print("-- waiting for a save; Ctrl-C ends", flush=True)
            time.sleep(0.3)
    except KeyboardInterrupt:
        print()
        return 0


def main(argv: list[str]) -> int:
    """Run a command; returns the exit status."""
    cut = argv.index("--") if "--" in argv else len(argv)  # what follows are a step's flags
    args, flags = parser().parse_args(argv[:cut]), argv[cut + 1 :]
    if args.verb == "start":
        path = folders.start(args.lab, args.folder, args.id)
        print(f"{path}: open LAB.md, then: cd {path}; python -m extras.labs check . --task 1")
    elif args.verb == "check":
        return watched(args) if args.watch else checked(args)
    elif args.verb == "hint":
        print(folders.hint(folders.open_folder(args.folder), args.task))
    elif args.verb == "run":
        return run(folders.open_folder(args.folder), args.ranks, flags)
    elif args.verb == "handout":
        handout(args.folder, args.lab)
    else:
        grade(args.folders, args.csv, args.lab, args.seconds, args.gradescope)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"labs: {error}", file=sys.stderr)
        sys.exit(2)
