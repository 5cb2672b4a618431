"""The labs: a folder reveals no solution, correct solutions earn all points, and wrong ones lose points."""

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from extras.labs import ROOT, TASKS, definitions, holes, hollow, ours, step_of
from extras.labs.__main__ import opened, start
from extras.labs.judge import chapter, judge

LABS, SECONDS = list(TASKS), 900


def command(*words: object, status: int = 0) -> str:
    """Run `python -m extras.labs` with these words, and return what it prints."""
    words = [sys.executable, "-m", "extras.labs", *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_complete(lab):
    """Each task has a section that begins with its name, a time in minutes, a text and three hints."""
    text = (ROOT / f"extras/labs/lab{lab}.md").read_text()
    titles = re.findall(r"^## (.+) \(\d+ min\)\n\n.+\n\n(?:\d\. .+\n){3}\n", text, re.MULTILINE)
    assert [title[: len(task)] for title, task in zip(titles, TASKS[lab], strict=True)] == [*TASKS[lab]]


@pytest.mark.parametrize("lab", LABS)
def test_a_starter_gives_nothing_away(tmp_path, lab):
    """A folder has all signatures and docstrings, and no long line of a solution, unless an earlier step has it."""
    start(lab, tmp_path / "lab", "ada")
    assert opened(tmp_path / "lab") == (lab, "ada", hollow(lab))
    shown = {line.strip() for path in (tmp_path / "lab").rglob("*.*") for line in path.read_text().splitlines()}
    steps = [path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)]  # the student has these
    earlier = {line.strip() for path in steps for line in path.read_text().splitlines()}
    for file, names in holes(lab).items():
        texts = ours(lab)[file], hollow(lab)[file]
        before, after = map(definitions, texts)
        for name in names:
            assert ast.unparse(before[name].args) == ast.unparse(after[name].args)
            assert ast.get_docstring(before[name]) == ast.get_docstring(after[name])
        whole, left = ({line.strip() for line in text.splitlines()} for text in texts)
        told = {line for line in whole - left if len(line) > 40 and line[-1] != ":"}  # a loop's head reveals nothing
        assert told and not told & (shown - earlier), file


def test_mistakes_are_a_line(tmp_path):
    """A command that cannot be carried out gives an error of one line."""
    folder = tmp_path / "lab"
    assert "open LAB.md" in command("start", 4, folder)
    for words in ("start", 4, folder), ("start", 9, tmp_path / "x"), ("check", tmp_path):
        said = command(*words, status=2)
        assert said.startswith("error: ") and said.count("\n") == 1


def test_grading_folders(tmp_path):
    """Grade correct, wrong, unchanged, broken and missing folders. A folder's own tests/ and common/ are ignored."""
    names, step = ["right", "wrong", "starter", "error", "none"], step_of(2)
    for name in names[:4]:
        start(2, tmp_path / name, f"={name}")
    (tmp_path / "right" / step).write_text(ours(2)[step])
    (tmp_path / "wrong" / step).write_text(ours(2)[step].replace("range(2 * (n - 1))", "range(n - 1)"))
    (tmp_path / "right" / chapter(2)).write_text("def test_fill_buckets():\n    assert False\n")
    (tmp_path / "right/common/comm.py").write_text("raise SystemExit\n")
    (tmp_path / "starter" / chapter(2)).write_text("def test_fill_buckets():\n    pass\n")
    (tmp_path / "error" / step).write_text("def (\n")
    said = command("grade", *(tmp_path / name for name in names))
    rows = {Path(row["folder"]).name: row for row in csv.DictReader(said.splitlines())}
    assert list(rows) == names and rows["right"]["student"] == "'=right"
    earned, total = ([int(rows[name][key]) for name in names] for key in ("points", "of"))
    assert earned[0] == total[0] > earned[1] > 0 and earned[2:] == [0, 0, 0], rows["right"]["lost"]
    assert total[:3] == total[:1] * 3 and "the sum is wrong" in rows["wrong"]["lost"]
    assert "task ring: RingSync.sum_up" in rows["starter"]["lost"]
    assert f"{step} cannot be imported: SyntaxError" in rows["error"]["error"]
    assert "no folder of a lab" in rows["none"]["error"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("lab", LABS)
def test_points_of_the_project_and_of_a_starter(lab):
    """The project's files earn all points, in every task. An unchanged folder earns none."""
    found = judge(lab, ours(lab), SECONDS)
    assert {result.task for result in found if result.points} == set(TASKS[lab])
    assert not [result for result in found if result.wrong]
    assert not [result for result in judge(lab, hollow(lab), SECONDS) if not result.wrong]
