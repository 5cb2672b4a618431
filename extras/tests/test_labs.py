"""The labs: a folder reveals no solution, correct solutions earn all points in any style, wrong ones lose points."""

import ast
import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from extras.labs import ROOT, TASKS, definitions, holes, hollow, ours, step_of, text_of, unwritten, with_ours
from extras.labs.__main__ import hint, opened, start
from extras.labs.judge import chapter, judged, results, worth

LABS = list(TASKS)
S2, S4, SECONDS = step_of(2), step_of(4), 600


def changed(lab: int, *pairs: str, texts: dict[str, str] | None = None) -> dict[str, str]:
    """The project's files with text replaced: old, new, ... Each old text must occur once."""
    texts = texts or ours(lab)
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        (file,) = [name for name, text in texts.items() if old in text]
        assert texts[file].count(old) == 1, old
        texts = texts | {file: texts[file].replace(old, new)}
    return texts


def command(*words: object, status: int = 0) -> str:
    """Run `python -m extras.labs` with these words, and return what it prints."""
    words = [sys.executable, "-m", "extras.labs", *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- What a folder contains ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_complete(lab):
    """Each task has tests with points, a title, minutes, a text and three hints; each hole has a docstring."""
    assert {task for _, task in worth(lab)} == set(TASKS[lab]) and all(worth(lab).values())
    assert len(text_of(lab)) == len(TASKS[lab]) and all(len(hints) == 3 for *_, hints in text_of(lab))
    names = [name for task in TASKS[lab].values() for name in task.split()]
    assert len(names) == len(set(names))
    for file, own in holes(lab).items():
        classes = {node.name: node for node in ast.parse(ours(lab)[file]).body if isinstance(node, ast.ClassDef)}
        for name in own:
            node, owner = definitions(ours(lab)[file])[name], classes.get(name.partition(".")[0])
            assert ast.get_docstring(node) or ast.get_docstring(owner), name


@pytest.mark.parametrize("lab", LABS)
def test_a_starter_gives_nothing_away(tmp_path, lab):
    """Signatures and docstrings stay. No line of a removed body is anywhere in the folder."""
    start(lab, tmp_path / "lab", "ada")
    assert opened(tmp_path / "lab") == (lab, "ada", hollow(lab))
    shown = {line.strip() for path in (tmp_path / "lab").rglob("*.*") for line in path.read_text().splitlines()}
    steps = [path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)]  # they are given
    earlier = {line.strip() for path in steps for line in path.read_text().splitlines()}
    for file, names in holes(lab).items():
        text = ours(lab)[file]
        before, after, kept = definitions(text), definitions(hollow(lab)[file]), text.splitlines()
        for name in sorted(names, key=lambda name: -before[name].lineno):
            assert ast.unparse(before[name].args) == ast.unparse(after[name].args)
            assert ast.get_docstring(before[name]) == ast.get_docstring(after[name])
            code = before[name].body[ast.get_docstring(before[name]) is not None :]
            lines = [kept.pop(code[0].lineno - 1).strip() for _ in range(code[0].lineno, code[-1].end_lineno + 1)]
            left = {line.strip() for line in kept} | {line.strip() for line in hollow(lab)[file].splitlines()}
            told = [line for line in lines if len(line) > 40 and line[-1] != ":"]  # the head of a loop reveals nothing
            assert not set(told) & (shown - left - earlier), name


def test_hints_and_mistakes_are_a_line(tmp_path):
    """Hints come one at a time. A folder that exists, an unknown lab or task, or a folder of no lab gives one line."""
    folder = tmp_path / "lab"
    assert "open LAB.md" in command("start", 4, folder)
    assert [hint(folder, 3)[:7] for _ in range(4)] == ["1 of 3:", "2 of 3:", "3 of 3:", "3 of 3:"]
    for words in ("start", 4, folder), ("start", 9, tmp_path / "x"), ("check", tmp_path), ("hint", folder, 9):
        said = command(*words, status=2)
        assert said.startswith("error: ") and said.count("\n") == 1
    assert "collectives, f and g" in command("check", folder, "--task", "loops", status=2)


def test_the_projects_functions_stand_in_the_holes_of_other_tasks():
    """This works with a student's helpers and decorators, and without the imports that only our functions need."""
    texts = changed(4, "def enter_block", "def helper(f):\n    return f\n\n\n@helper\ndef enter_block", texts=hollow(4))
    texts = changed(4, "from step03_zero import STAGES, make_optimizer\n", "", texts=texts)
    given = with_ours(4, texts, "f and g")
    assert not unwritten(4, given, "vocabulary") and len(unwritten(4, given, "f and g")) == 4
    assert "def helper" in given[S4] and given[S4].endswith("from step03_zero import STAGES, make_optimizer\n")
    assert "@helper" not in with_ours(4, texts, "loop")[S4]


# --- Points ---------------------------------------------------------------------------------------------------------


def test_grading_folders(tmp_path):
    """A correct folder, an unchanged one, one that is no Python, and none. Its own tests/ and common/ are ignored."""
    names = ["right", "starter", "error", "none"]
    for name in names[:3]:
        start(2, tmp_path / name, f"={name}")
    (tmp_path / "right" / S2).write_text(ours(2)[S2])
    (tmp_path / "right" / chapter(2)).write_text("def test_fill_buckets():\n    assert False\n")
    (tmp_path / "right/common/comm.py").write_text("raise SystemExit\n")
    (tmp_path / "starter" / chapter(2)).write_text("def test_fill_buckets():\n    pass\n")
    (tmp_path / "error" / S2).write_text("def (\n")
    table, total = tmp_path / "points.csv", sum(worth(2).values())
    flags = "--csv", table, "--gradescope", tmp_path / "upload", "--seconds", 900
    said = command("grade", *(tmp_path / name for name in names), *flags)
    with table.open(newline="") as file:
        rows = {Path(row["folder"]).name: row for row in csv.DictReader(file)}
    assert list(rows) == names and said.count("\n") == 4
    assert [rows[name]["points"] for name in names] == [str(total), "0", "0", "0"], rows["right"]["lost"]
    assert rows["right"]["of"] == rows["starter"]["of"] == str(total) and rows["right"]["student"] == "'=right"
    assert "ring 0/" in rows["starter"]["tasks"] and "not written yet: RingSync.sum_up" in rows["starter"]["lost"]
    assert S2 in rows["error"]["error"] and "no folder of a lab" in rows["none"]["error"]
    for name in names:
        found = json.loads((tmp_path / "upload" / name / "results.json").read_text())
        assert found["score"] == sum(test["score"] for test in found["tests"]) == int(rows[name]["points"])
        assert sum(test["max_score"] for test in found["tests"]) == int(rows[name]["of"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("lab", LABS)
def test_points_of_the_project_and_of_a_starter(lab):
    """The project's files earn all points, and an unchanged folder none: no test passes with it."""
    assert not [result for result in results(lab, ours(lab), SECONDS)[0] if result.wrong]
    found = judged(lab, hollow(lab), SECONDS)
    passed = [key for key in worth(lab) if not found.get(key, "not run") and TASKS[lab][key[1]]]
    assert not passed


RAW = "    import torch.distributed as dist\n\n    dist.all_reduce(x, group=group.handle)\n    return x\n"
TWO = "        works = exchange([], receives, self.group), exchange(sends, [], self.group)\n"
TWO += "        for work in works:\n            work.wait()\n"
HANGS = "does not answer: it is in "
SOLUTIONS = [  # lab, task, old, new; what a message says; "": the solution is right, in another style
    (2, "buckets", "        lists[-1].append(param)\n", "        lists[-1] += (param,)\n", ""),
    (4, "collectives", "    all_reduce(x, group).wait()\n    return x\n", RAW, ""),
    (6, "messages", "        exchange(sends, receives, self.group).wait()\n", TWO, ""),
    (2, "ring", "range(2 * (n - 1))", "range(n - 1)", "the sum is wrong"),
    (4, "f and g", "sum_over_ranks, unchanged)", "sum_over_ranks, sum_over_ranks)", "3 times too large: summed twice"),
    (4, "partial gradients", "if grads and group.size > 1:", "if grads and group.size > 1 and mesh.rank:", HANGS),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("lab, task, old, new, says", SOLUTIONS)
def test_a_solution_is_judged(lab, task, old, new, says):
    """Correct numbers, bytes and order earn all points, in any style. Otherwise a message names the usual mistake.

    Where a rank leaves out a collective, the test ends in seconds, and names the call in which the others wait.
    """
    began = time.monotonic()
    found, _ = results(lab, changed(lab, old, new), SECONDS, task)
    wrong = [result.wrong for result in found if result.wrong]
    assert any(says in text for text in wrong) if says else not wrong, found
    assert says != HANGS or time.monotonic() - began < 200
