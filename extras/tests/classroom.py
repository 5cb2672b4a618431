"""A class that hands in its labs: right, wrong and hostile folders, graded by `python -m extras.labs grade`.

    python -m extras.tests.classroom DIR [--folders 100]

Of a hundred folders seventy are right: the project's code, with other names of variables, without its comments, or in
the styles of tests/styles.py; twenty-five hold a mistake of tests/sabotage.py; five attack the grader. All are made in
DIR, in an order of chance, so each kind meets each other kind. If the command is stopped, start it again: folders and
rows that are there stay. The exit status is 0 if each right folder has all points, each wrong one lost some in its own
task, and no file of a folder has changed.
"""

import argparse
import ast
import csv
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from extras.labs import folder as folders
from extras.labs.course import ROOT, file_of, load, numbers, path_of
from extras.tests import sabotage
from extras.tests.styles import HOLES, STYLES, restyled
from extras.theory.tables import table

SHARES = dict(right=0.70, wrong=0.25, hostile=0.05)
START = '\n\n\nif __name__ == "__main__":'  # of a script's end
HOSTILE = {  # what stands at the end of the file
    "kills the processes above": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "loops for ever": "while True:\n    pass",
    "leaves a process that writes into other folders": (
        "import glob, os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    time.sleep(2)\n"
        "    for name in glob.glob({others!r}):\n"
        "        open(name, 'w').write('')\n"
        "    os._exit(0)"
    ),
    "patches what judges it": "math.cos = lambda x: 1.0\ntorch.equal = torch.allclose = lambda *_, **__: True",
    "prints much, and ends its process": "import os\nprint('x' * 10**8)\nos._exit(0)",
}


def renamed(text: str) -> str:
    """The source in which local variables of functions have other names; comments are gone."""

    class Rename(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
            parts = [*ast.walk(node)]
            if not any(isinstance(part, ast.Lambda | ast.FunctionDef) for part in parts[1:]):  # no scope inside
                names = [part for part in parts if isinstance(part, ast.Name)]
                own = {part.id for part in names if isinstance(part.ctx, ast.Store)}
                own -= {part.arg for part in parts if isinstance(part, ast.arg)}
                for part in names:
                    part.id = f"my_{part.id}" if part.id in own else part.id
            return node

    return ast.unparse(Rename().visit(ast.parse(text)))


def sources(number: int) -> dict[str, str]:
    """The project's, by module."""
    return {module: path_of(module).read_text() for module in load(number).modules}


def right() -> Iterator[tuple[int, str, dict[str, str]]]:
    """(lab, what it is, sources), without end: each lab in two ways, and a style between them while there are any."""
    named, turn = [*(STYLES | HOLES).items()], 0
    while True:
        number = numbers()[turn % len(numbers())]
        plain = sources(number)
        yield number, "other names", {name: renamed(text) for name, text in plain.items()}
        if turn < len(named):
            name, (lab, _, other) = named[turn]
            texts = sources(lab) | restyled(lab, other if name in HOLES else {})
            for old, new in other if name in STYLES else ():
                texts = {module: text.replace(old, new) for module, text in texts.items()}
            yield lab, name, texts
        yield number, "no comments", {name: ast.unparse(ast.parse(text)) for name, text in plain.items()}
        turn += 1


def wrong() -> Iterator[tuple[int, str, dict[str, str]]]:
    """One mistake of each task, then a second of each, and so on; the task stands before the mistake's name."""
    for turn in range(max(map(len, sabotage.ROWS.values()))):
        for (number, task), rows in sorted(sabotage.ROWS.items(), key=lambda item: item[0][::-1]):
            if turn < len(rows):
                yield number, f"task {task}: {rows[turn][0]}", sabotage.changed(sources(number), *rows[turn][1:])


def hostile(others: str) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Each of them, in another lab."""
    for turn, (name, code) in enumerate(HOSTILE.items()):
        texts = sources(number := numbers()[turn % len(numbers())])
        last = [*texts][-1]
        texts[last] = texts[last].replace(START, f"\n\n\n{code.format(others=others)}{START}")
        yield number, name, texts


def plan(home: Path, n: int) -> list[tuple[str, int, str, dict[str, str]]]:
    """(kind, lab, what it is, sources) of n folders, in an order of chance."""
    counts = {kind: round(share * n) for kind, share in SHARES.items()} | dict(hostile=max(1, round(0.05 * n)))
    counts["wrong"] = n - counts["right"] - counts["hostile"]
    made = dict(right=right(), wrong=wrong(), hostile=hostile(f"{home}/*/step*.py"))
    some = [(kind, *next(made[kind])) for kind, count in counts.items() for _ in range(count)]
    random.Random(0).shuffle(some)
    return some


def hand_in(path: Path, number: int, texts: dict[str, str]):
    """A folder with these files and the right answer, unless it is there."""
    if not path.exists():
        folders.start(number, path, path.name)
        for module, text in texts.items():
            (path / file_of(module)).write_text(text)
        answer = load(number).question.right(path.name)
        (path / "answers.toml").write_text(f'id = "{path.name}"\nanswer = {answer!r}\n')


def fits(kind: str, number: int, says: str, row: dict[str, str]) -> bool:
    """Whether a folder's row says what it deserves; of a hostile one any row does."""
    if kind == "hostile" or row["error"]:
        return kind == "hostile"
    if kind == "right":
        return row["points"] == row["of"]
    task = says.split(":")[0]
    return int(row[task]) < load(number).task(int(task.split()[1])).points


def main() -> int:
    """Make the class, grade it, print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m extras.tests.classroom", description=__doc__.split("\n\n")[0])
    parser.add_argument("home", type=Path, metavar="DIR")
    parser.add_argument("--folders", type=int, default=100)
    args = parser.parse_args()
    home = args.home.resolve()
    some = plan(home, args.folders)
    paths = [home / f"student{i:03d}" for i in range(len(some))]
    for path, (_, number, _, texts) in zip(paths, some, strict=True):
        hand_in(path, number, texts)
    points, began = home / "points.csv", time.monotonic()
    there = len(points.read_text().splitlines()) - 1 if points.exists() else 0
    subprocess.run(
        [sys.executable, "-m", "extras.labs", "grade", *map(str, paths), "--csv", str(points)], cwd=ROOT, check=True
    )
    seconds = time.monotonic() - began
    with points.open(newline="") as file:
        rows = {row["folder"]: row for row in csv.DictReader(file)}
    counts, good = Counter(kind for kind, *_ in some), Counter()
    lines = [["folder", "kind", "lab", "what it is", "points", ""]]
    for path, (kind, number, says, texts) in zip(paths, some, strict=True):
        row = rows[str(path)]
        whole = all((path / file_of(module)).read_text() == text for module, text in texts.items())
        good[kind] += (ok := whole and fits(kind, number, says, row))
        found = row["error"] or f"{row['points']} of {row['of']}"
        lines.append([path.name, kind, str(number), says, found, "" if ok else "NOT AS IT SHOULD BE"])
    print(table(lines))
    print(
        f"right, with all points: {good['right']} of {counts['right']}; wrong, that lost points: {good['wrong']} of "
        f"{counts['wrong']}; hostile, that cost a row: {good['hostile']} of {counts['hostile']}; "
        f"{len(paths) - there} folders in {seconds:.0f} s"
    )
    return 0 if good == counts else 1


if __name__ == "__main__":
    sys.exit(main())
