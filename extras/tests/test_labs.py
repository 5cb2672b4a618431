"""The labs judged: holes give nothing away, right solutions earn all points in any style, wrong ones lose theirs."""

import ast
import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import UserError
from extras.labs import folder as folders
from extras.labs import source
from extras.labs.__main__ import parser
from extras.labs.course import ROOT, file_of, load, numbers, path_of
from extras.labs.grade import restore
from extras.labs.judge import Folder, Judge, Result, check
from extras.labs.launch import project_files
from extras.labs.ranks import complaint
from extras.labs.suite import Suite
from extras.tests import sabotage
from extras.tests.faults import FAULTS
from extras.tests.styles import HOLES, STYLES, restyled

LABS = numbers()
ID = "some.student-1"
S4 = "step04_tp_sp"
EXHAUSTIVE = pytest.mark.exhaustive


def handed_in(path: Path, number: int, *changes: tuple[str, str], only: int = 0, answer: bool = False) -> Folder:
    """A folder with the project's code, but for texts (old, new); `only`: in the holes of one task alone."""
    folders.start(number, path, ID)
    lab = load(number)
    for module in lab.modules:
        text = path_of(module).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{text.count(old)} times {old!r}"
            text = text.replace(old, new)
        holes = {name: task for name, task in lab.holes(module).items() if only and task != only}
        (path / file_of(module)).write_text(source.hollow(text, holes, number) if holes else text)
    if answer:
        right = lab.question.right(ID)
        (path / "answers.toml").write_text(f'id = "{ID}"\nanswer = {right!r}\n')
    return folders.open_folder(path)


def judged(folder: Folder, *tasks: int, seconds: float = 120) -> list[Result]:
    """The results of some tasks."""
    return list(check(folder, *tasks, seconds=seconds))


# --- what stands in the folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LABS)
def test_a_lab_is_complete(number):
    """Four to six tasks; holes are there, have a docstring, or their class has one, and no hole is in two tasks."""
    lab = load(number)
    assert 4 <= len(lab.tasks) <= 6
    holes = [hole for task in lab.tasks for hole in task.holes]
    assert len(holes) == len(set(holes))
    for module in lab.modules:
        tree = ast.parse(path_of(module).read_text())
        found, classes = source.definitions(tree), {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        for hole in lab.holes(module):
            assert ast.get_docstring(found[hole]) or ast.get_docstring(classes[hole.partition(".")[0]]), hole
    for task in lab.tasks:
        assert task.read and task.criteria and all(len(hint) > 20 for hint in task.hints)
    assert any(criterion.whole for task in lab.tasks for criterion in task.criteria), "no run of the whole file"


@pytest.mark.parametrize("number", LABS)
def test_a_starter_gives_nothing_away(tmp_path, number):
    """Signatures and docstrings stay; no line of a body that was taken out stands anywhere in the folder."""
    folders.start(number, tmp_path / "lab", ID)
    lab, shown = load(number), "".join(p.read_text() for p in (tmp_path / "lab").rglob("*.*") if p.is_file())
    lines = {line.strip() for line in shown.splitlines()}
    for module in lab.modules:
        text = path_of(module).read_text()
        before, after = (
            source.definitions(ast.parse(t)) for t in (text, (tmp_path / "lab" / file_of(module)).read_text())
        )
        outside = text.splitlines()
        bodies = {}
        for name in lab.holes(module):
            code = source.code_of(before[name])
            bodies[name] = [line.strip() for line in outside[code[0].lineno - 1 : code[-1].end_lineno]]
            for i in range(code[0].lineno - 1, code[-1].end_lineno):
                outside[i] = ""
            assert ast.unparse(before[name].args) == ast.unparse(after[name].args)
            assert ast.get_docstring(before[name]) == ast.get_docstring(after[name]) and source.is_hole(after[name])
        kept = {line.strip() for line in outside}
        for name, body in bodies.items():
            assert not [line for line in body if len(line) > 12 and line in lines - kept], name


@pytest.mark.parametrize("number", LABS)
def test_a_question_differs_by_id_and_names_mistakes(number):
    """The right number passes, a known mistake is named, and nothing that a file can contain stops the judge."""
    question = load(number).question
    assert len({str(question.values(f"student{i}")) for i in range(12)}) > 6
    right = question.right(ID)
    assert question.judge(ID, right) == ""
    for words, mistake in question.mistakes.items():
        assert words in question.judge(ID, question.answer(**question.values(ID) | mistake))
    for answer in ("", "x", True, None, [1], {}, float("inf"), float("nan"), right * 1.37 + 2, 10**400):
        text = question.judge(ID, answer)
        assert text and f"{right:.6g}" not in text


def test_progress_hints_and_words(tmp_path):
    """Three hints, one at a time; the bar knows the last check of each task, and which is next."""
    folder = handed_in(tmp_path / "lab", 4)
    assert [folders.hint(folder, 4)[:7] for _ in range(3)] == ["1 of 3:", "2 of 3:", "3 of 3:"]
    assert "all hints" in folders.hint(folder, 4)
    assert "next: task 1" in folders.progress(folder)
    folders.note(folder.path, f"check of task 1: {folder.lab.tasks[0].points} of {folder.lab.tasks[0].points}")
    assert "next: task 2" in folders.progress(folder) and "[###-" in folders.progress(folder)
    same = [Result(1, "one", 2, "an error"), Result(1, "two", 2, "an error"), Result(1, "three", 1, "")]
    assert "".join(folders.lines_of(folder, same, {})).count("an error") == 1
    with pytest.raises(UserError, match="not empty"):
        folders.start(4, tmp_path / "lab", ID)
    with pytest.raises(UserError, match="no lab"):
        folders.open_folder(tmp_path)
    commands = re.findall(r"^python -m extras.labs ([^#\n]+)", (tmp_path / "lab" / "LAB.md").read_text(), re.MULTILINE)
    assert len(commands) == 4 and all(parser().parse_args(c.split(" -- ")[0].split()) for c in commands)


# --- points ----------------------------------------------------------------------------------------------------------

TASKS = [(lab, task) for lab in LABS for task in range(1, len(load(lab).tasks) + 1)]
SHOWN = {(1, 2), (2, 3), (3, 1), (4, 2), (5, 2), (6, 1), (7, 1)}  # quick ones, for the default run
SABOTAGES = [(*place, row) for place, rows in sabotage.ROWS.items() for row in rows]
SABOTAGES += [
    (lab, task, (name, FAULTS[name].owner, FAULTS[name].old, FAULTS[name].new))
    for lab, task in TASKS
    for name in load(lab).faults(task)
]


def tier(cases: list[tuple], shown: set) -> list:
    """Parameters; the first of each place in `shown` is not exhaustive."""
    names = [f"lab{lab}-{task}{''.join(f'-{name}' for name, *_ in row)}" for lab, task, *row in cases]
    seen = [case[:2] for case in cases]
    marks = [() if place in shown and place not in seen[:i] else EXHAUSTIVE for i, place in enumerate(seen)]
    return [pytest.param(*case, marks=mark, id=name) for case, mark, name in zip(cases, marks, names, strict=True)]


@pytest.mark.parametrize("number, task", tier(TASKS, SHOWN))
def test_one_solved_task_earns_its_points(tmp_path, number, task):
    """With the project's code in this task's holes alone, but for the whole file; the next task has none."""
    folder = handed_in(tmp_path / "lab", number, only=task)
    criteria = load(number).tasks[task - 1].criteria
    wrong = [
        r.text for r, criterion in zip(judged(folder, task), criteria, strict=True) if r.text and not criterion.whole
    ]
    assert not wrong
    for result in judged(folder, task % len(folder.lab.tasks) + 1):
        assert result.text.startswith("not written yet: lab") and "same numbers" not in result.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", LABS)
def test_the_project_earns_all_points(tmp_path, number):
    """Under two ids."""
    for student in ("a", "b"):
        folder = handed_in(tmp_path / student, number)
        folder.student, lab = student, folder.lab
        folder.answer = lab.question.right(student)
        assert not [r.text for r in judged(folder, *range(1, len(lab.tasks) + 1), 0) if r.text]


def sabotaged(path: Path, number: int, row: tuple[str, ...]) -> Folder:
    """A folder with the project's code, but for one change."""
    folder = handed_in(path, number)
    folder.sources = sabotage.changed(folder.sources, *row[1:])
    return folder


@pytest.mark.parametrize("number, task, row", tier(SABOTAGES, SHOWN))
def test_a_wrong_solution_loses_points(tmp_path, monkeypatch, number, task, row):
    """Each sabotage, in its own task."""
    monkeypatch.setattr(Judge, "words", lambda *_: "")  # what kind it is takes more runs
    results = judged(sabotaged(tmp_path / "lab", number, row), task, seconds=20)
    texts = [result.text for result in results if result.text]
    assert texts, f"{row[0]}: {sum(r.points for r in results)} points"
    print(row[0], "->", texts[0][:160])


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", LABS)
def test_a_last_task_is_judged_strictly(tmp_path, number):
    """As when folders are graded, behind walls: the project earns all points of it, and a sabotage loses some."""
    task = len(load(number).tasks)
    assert not [r.text for r in check(handed_in(tmp_path / "right", number), task, strict=True) if r.text]
    folder = sabotaged(tmp_path / "wrong", number, sabotage.ROWS[number, task][0])
    assert [r.text for r in check(folder, task, strict=True) if r.text]


def test_the_suite_judges_every_fault():
    """A mistake of extras/tests/faults.py stands in a hole of a task, or the row that shows it is one of the lab's."""
    for lab in map(load, LABS):
        rows = {case["name"] for t in lab.tasks for c in t.criteria if c.kind is Suite for case in c.cases}
        rows |= {"resume", "law: units"}
        held = {name for number in range(1, len(lab.tasks) + 1) for name in lab.faults(number)}
        for name, fault in FAULTS.items():
            assert fault.module not in lab.modules or name in held or fault.judge in rows, name


@pytest.mark.exhaustive
def test_one_timeout_ends_a_task_and_three_minutes_a_folder(tmp_path):
    """The rest is not tried."""
    folder = handed_in(tmp_path / "lab", 4, (GATHER, "    while True:\n        pass\n"))
    began = time.monotonic()
    texts = [r.text for r in judged(folder, 1, seconds=5)]
    assert sum("no answer" in text for text in texts) == 2 and time.monotonic() - began < 60
    folder.left[0] = 0.0
    assert all("time" in r.text or "no answer" in r.text for r in judged(folder, 2))


def test_schedules_are_drawn_in_the_folder(tmp_path):
    """By the student's file."""
    folder = handed_in(tmp_path / "lab", 6)
    path = folder.path / "schedules.py"
    path.write_text(path.read_text().replace("print(name, draw(", 'print("mine", draw('))
    words = [sys.executable, "-m", "common.schedules", "2", "4", "2"]
    assert subprocess.run(words, cwd=folder.path, capture_output=True, text=True).stdout.count("mine") == 3


def test_every_task_has_wrong_solutions():
    """At least two, each with a name of its own."""
    for place in TASKS:
        names = [row[0] for *where, row in SABOTAGES if tuple(where) == place]
        assert len(names) == len(set(names)) >= 2, place


@pytest.mark.exhaustive
def test_a_fault_is_named_and_hedged(tmp_path):
    """The numbers of a known fault are recognised; a wrong scale and a wrong slice of the vocabulary are told."""
    fault = FAULTS["g_sums_in_backward_too"]
    folder = sabotaged(tmp_path / "a", 4, ("", fault.owner, fault.old, fault.new))
    texts = " ".join(r.text for r in judged(folder, 2))
    alike = "g_sums_in_backward_too|conjugate_is_itself"  # without SP these two are one
    assert re.search(rf"the same numbers as with ({alike}): \w+", texts)
    folder = sabotaged(tmp_path / "b", 4, ("", "VocabParallelEmbedding", " * held[..., None]", ""))
    assert re.search(r"token \d+ belongs to rank \d, which has ids \d+ to \d+: .* zero", judged(folder, 3)[0].text)


@pytest.mark.exhaustive
def test_a_crash_costs_its_own_criterion_alone(tmp_path):
    """A loss that raises leaves the embedding its points."""
    line = "        held = (targets >= ids.start) & (targets < ids.stop)\n"
    results = judged(handed_in(tmp_path / "lab", 4, (line, line + "        raise ValueError('oh')\n")), 3)
    assert [bool(result.text) for result in results] == [False, True, True, True, True]
    assert "ValueError: oh (step04_tp_sp.py:" in results[1].text and "in forward" in results[1].text


def test_gloos_words_are_quoted():
    """A mismatched collective: what gloo says, and where, without its path."""
    error = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] op.preamble.length <= op.nbytes. 8 vs 4"
    )
    assert complaint(error).endswith(": [pair.cc:534] op.preamble.length <= op.nbytes. 8 vs 4")


# --- right solutions in other styles ---------------------------------------------------------------------------------

TRIED = ("from __future__ import annotations", "lab 3: masks and narrow")  # in the default run


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in TRIED else EXHAUSTIVE) for n in STYLES | HOLES])
def test_a_right_solution_in_another_style_earns_all_points(tmp_path, name):
    """Right numbers, bytes and order are enough."""
    number, task, other = (STYLES | HOLES)[name]
    folder = handed_in(tmp_path / "lab", number, *(other if name in STYLES else ()))
    folder.sources |= restyled(number, other if name in HOLES else {})
    assert not [r.text for r in judged(folder, task) if r.text]


# --- hostile folders -------------------------------------------------------------------------------------------------

GATHER = "    shards = x.new_empty(group.size, *x.shape)  # [n, batch, seq/n, dim]\n"
FORK = """    import os, time
    if os.fork() == 0:
        os.setsid()
        time.sleep(4)
        open({!r}, "w").write("here")
"""
HOSTILE = {  # what it does, and what every failing criterion says
    "a syntax error": (("def gather_tokens(", "def gather_tokens(("), "SyntaxError"),
    "a loop that sleeps": (
        (GATHER, "    import time\n    time.sleep(1000)\n"),
        r"no answer within .* in gather_tokens",
    ),
    "an endless loop": ((GATHER, "    while True:\n        pass\n"), r"no answer within .* in gather_tokens"),
    "a rank that leaves out a collective": (
        (GATHER, "    if group.rank:\n        return x\n" + GATHER),
        "no answer|do not match|without an answer|shape",
    ),
    "os._exit": ((GATHER, "    import os\n    os._exit(0)\n"), "ended without an answer .*output.txt"),
    "a crash of one rank": (
        (GATHER, "    import os\n    group.rank or os.abort()\n" + GATHER),
        "ended without an answer",
    ),
    "os._exit at import": (("@dataclass\n", "import os\nx = os._exit(0)\n\n\n@dataclass\n"), "ended without an answer"),
    "a patched clock": (
        (GATHER, "    import time\n    time.monotonic = time.time = lambda: 0\n    while True:\n        pass\n"),
        "no answer",
    ),
    "20,000 unary minuses": (("@dataclass\n", f"x = {'-' * 20000}1\n\n\n@dataclass\n"), "Error|without an answer"),
    "a gigabyte of output": ((GATHER, "    while True:\n        print('x' * 10**6)\n"), "Error|no answer"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "os._exit" else EXHAUSTIVE) for n in HOSTILE])
def test_hostile_code_costs_its_criteria_and_never_the_run(tmp_path, monkeypatch, name):
    """The criteria of gather_tokens say why; nothing is left running."""
    change, says = HOSTILE[name]
    folder = handed_in(tmp_path / "lab", 4, *([change] if change[0] != "@dataclass\n" else []))
    if change[0] == "@dataclass\n":
        folder.sources[S4] = folder.sources[S4].replace(*change, 1)
    before = children()
    for seconds in (5, 20, 60):  # a busy machine may need longer to come as far as the student's line
        texts = [r.text for r in judged(folder, 1, seconds=seconds) if "gather" in r.says]
        if all(re.search(says, text) for text in texts):
            break
    assert all(re.search(says, text) for text in texts), texts
    assert children() <= before


def children() -> set[str]:
    """Processes of ours."""
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def command(*words: object, folder: Path = ROOT, status: int | None = 0) -> str:
    """`python -m extras.labs ...`; what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "extras.labs", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive
def test_no_folder_stops_or_touches_another(tmp_path):
    """Each evil folder first, then a right one: all points; what was done is in the table; the exit status is 0."""
    copy, mark, n = tmp_path / "project", tmp_path / "results.json", load(1).points
    for path in [*project_files(), *(path.relative_to(ROOT) for path in ROOT.glob("extras/tests/*.py"))]:
        if path.suffix in (".py", ".md"):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes((ROOT / path).read_bytes())
    target = copy / "common" / "__init__.py"
    kept = target.read_text()
    evil = {
        "deep": ("", 'id = "x"\nanswer = ' + "[" * 100000),
        "infinite": ("", 'id = "x"\nanswer = inf'),
        "huge": ("", 'id = "x"\nanswer = 1e400'),
        "minuses": (f"x = {'-' * 20000}1\n", None),
        "parentheses": (f"x = {'(' * 300000}\n", None),
        "daemon": (FORK.format(str(mark)).replace("\n    ", "\n")[4:], None),
        "writer": (f"open({str(target)!r}, 'a').write('raise SystemExit\\n')\n", None),
        "clock": ("math.cos = lambda x: 1.0\n", None),
        "killer": ("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n", None),
    }
    for name, (code, answers) in evil.items():
        folder = handed_in(tmp_path / name, 1)
        (folder.path / "step01_single_gpu.py").write_text(folder.sources["step01_single_gpu"] + "\n" + code)
        if answers:
            (folder.path / "answers.toml").write_text(answers)
    handed_in(tmp_path / "right", 1, answer=True)
    handed_in(
        tmp_path / "too", 1, ("loss = loss + micro_loss.detach()", "loss = micro_loss.detach() + loss"), answer=True
    )
    (tmp_path / "empty").mkdir()
    order, table = [*evil, "empty", "right", "too"], tmp_path / "points.csv"
    said = command(
        "grade", *(tmp_path / x for x in order), "--csv", table, "--gradescope", tmp_path / "upload", folder=copy
    )
    assert "Traceback" not in said and target.read_text() == kept and not mark.exists()
    with table.open(newline="") as file:
        rows = {Path(row["folder"]).name: row for row in csv.DictReader(file)}
    assert [*rows] == order and rows["right"]["points"] == rows["too"]["points"] == str(n)
    assert rows["writer"]["points"] == "0" or rows["writer"]["project files changed"] == "common/__init__.py"
    assert "open" in rows["writer"]["reaches for"] and "os.kill" in rows["killer"]["reaches for"]
    assert "no lab" in rows["empty"]["error"] and not rows["right"].get("ended early")
    assert rows["clock"]["changed its judge"] == "yes" and not rows["right"]["changed its judge"]
    results = json.loads((tmp_path / "upload" / "right" / "results.json").read_text())
    assert results["score"] == n and sum(test["max_score"] for test in results["tests"]) == n
    table.write_text(table.read_text().replace(f"{tmp_path / 'too'},", f"{tmp_path / 'too'},being judged"))
    command("grade", *(tmp_path / x for x in ("right", "too")), "--csv", table, folder=copy)  # after a kill
    with table.open(newline="") as file:
        again = {Path(row["folder"]).name: row for row in csv.DictReader(file)}
    assert "grader was killed" in again["too"]["error"] and again["right"] == rows["right"]
    for name in ("deep", "infinite", "huge"):
        assert rows[name]["points"] == str(n - load(1).question.points) and rows[name]["question"] == "0"
    assert int(rows["right"]["same as the project's file"]) == len(load(1).holes("step01_single_gpu"))


def test_a_table_shows_what_a_teacher_should_see(tmp_path, monkeypatch):
    """Copies of a folder and of the project, with other names of variables; what a source reaches for; `restore`."""
    text = path_of("step01_single_gpu").read_text()
    holes = {"step01_single_gpu": load(1).holes("step01_single_gpu")}
    project = {"step01_single_gpu": text}
    assert source.facts(project, project, holes)["same"] == len(holes["step01_single_gpu"])
    renamed = {"step01_single_gpu": text.replace("progress", "p")}
    assert source.facts(renamed, project, holes)["same"] == len(holes["step01_single_gpu"])
    for line, word in (
        ("import extras.labs.lab1", "labs"),
        ("eval('1')", "eval"),
        ("x = getattr(torch, '__builtins__')", "__b"),
        ("torch.nn.functional.linear = None", "torch.nn.functional.linear"),
        ("torch.save(1, 'x')", "torch.save"),
        ("getattr(torch, 'sa' + 've')", "getattr("),
        ("os.kill(1, 9)", "os.kill"),
    ):
        found = source.facts({"step01_single_gpu": text + "\n" + line}, project, holes)["reaches"]
        assert any(word in name for name in found), (line, found)
    before = {tmp_path / "kept": b"1"}
    monkeypatch.setattr("extras.labs.grade.ROOT", tmp_path)
    monkeypatch.setattr("extras.labs.course.ROOT", tmp_path)
    (tmp_path / "kept").write_bytes(b"2")
    (tmp_path / "new").write_bytes(b"2")
    assert restore(before) == ["kept", "new"] and restore(before) == []


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_folder_runs_by_itself(tmp_path):
    """In its own folder: a check, and training with the student's file, which is seen to run."""
    handed_in(tmp_path / "lab", 4, ("class Conjugate(", "print('mine')\n\n\nclass Conjugate("), answer=True)
    assert "8 of 49 points; next: task 2" in command("check", ".", "--task", "1", folder=tmp_path / "lab")
    flags = "--tp 2 --no-sp --steps 2 --global-batch-size 4 --model debug --device cpu"
    said = command("run", ".", "--ranks", "2", "--", *flags.split(), folder=tmp_path / "lab")
    assert said.count("mine") >= 2 and (tmp_path / "lab" / "runs" / "step04_tp_sp" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def handout(tmp_path_factory):
    """`handout(4)`: the folder with lab 4's handout, made once: what its whole file should find takes a while."""
    folder = tmp_path_factory.mktemp("handouts")

    def make(number: int) -> Path:
        copy = folder / str(number)
        if not copy.exists():
            command("handout", number, copy)
        return copy

    return make


HANDED_OUT = [  # number, and a line of its solution
    (1, "return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))"),
    pytest.param(4, "return shards.movedim(0, 1).flatten(1, 2)", marks=EXHAUSTIVE),
]


@pytest.mark.parametrize("number, line", HANDED_OUT, ids=["1", "4"])
def test_a_handout_has_no_solution(handout, number, line):
    """Steps of labs not given yet are holes; tests and variants of them are missing."""
    copy, lab = handout(number), load(number)
    (module,) = lab.modules
    found = source.definitions(ast.parse((copy / file_of(module)).read_text()))
    assert all(source.is_hole(found[name]) for name in lab.holes(module))
    kept = {path.name for path in copy.glob("extras/tests/**/*.py")}  # what trains, and no table that quotes solutions
    assert kept == {"__init__.py", "equal.py", "warm.py"}
    for given in (path_of(before) for n in range(1, number) for before in load(n).modules):
        assert (copy / given.name).read_text() == given.read_text()
    assert line in path_of(module).read_text()
    assert not [path for path in copy.rglob("*.py") if line in path.read_text()]


@pytest.mark.exhaustive
def test_a_lab_is_done_in_a_handout(tmp_path, handout):
    """It starts, is judged, and runs; task 5 is judged by rows, which are there without the tests."""
    copy, folder = handout(4), tmp_path / "lab"
    command("start", 4, folder, folder=copy)
    assert "not written yet" in command("check", folder, "--task", 1, folder=copy, status=1)
    (folder / "step04_tp_sp.py").write_text(path_of("step04_tp_sp").read_text())
    assert "9 of 9" in command("check", folder, "--task", 5, folder=copy)
    flags = ["--steps", 1, "--model", "debug", "--device", "cpu", "--tp", 2, "--global-batch-size", 2]
    assert "step 1: loss" in command("run", folder, "--ranks", 2, "--", *flags, folder=copy)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", LABS)
def test_a_handout_judges_the_whole_file(tmp_path, handout, number):
    """The project's files earn all points in it, but for the tests of schedules, which a handout does not have."""
    handed_in(tmp_path / "lab", number, answer=True)
    said = command("check", tmp_path / "lab", folder=handout(number), status=None)
    failed = [text for text in re.findall("FAIL (.*)", said) if "tests of schedules" not in text]
    assert said.count("ok  ") > 10 and not failed


COMMANDS = {  # and the first handout in which they work
    "step03_zero.py --model debug --device cpu --dry-run 1": 4,
    "step04_tp_sp.py --model debug --device cpu --dry-run 1": 5,
    "-m common.schedules 2 4 2": 7,
    "-m extras.theory.plan --gpus 1 --largest": 7,
    "-m extras.theory.plan --model debug --gpus 2 --explain=--tp=2": 7,
    "-m extras.services.pages pages": 8,
    "step07_moe_ep.py --model debug --device cpu --dry-run 1": 8,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", range(1, 8))
def test_a_handout_says_in_a_line_what_is_missing(handout, number):
    """A command that needs solutions of labs to come ends with one line; all others work."""
    copy = handout(number)
    for words, first in COMMANDS.items():
        done = subprocess.run([sys.executable, *words.split()], cwd=copy, capture_output=True, text=True, timeout=300)
        assert (done.returncode == 0) == (number >= first), (words, done.stderr)
        if done.returncode:
            (line,) = done.stderr.splitlines()
            assert line.startswith("error: ") and f"without solutions of lab {number} and later ones" in line
