"""The labs: starters reveal nothing, right solutions earn all points, a mistake costs its own."""

import ast
import codecs
import csv
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from common import UserError
from extras.labs import ROOT, TASKS, definitions, holes, hollow, ours, step_of, with_bodies
from extras.labs.__main__ import head, start, submitted
from extras.labs.judge import ENVIRONMENT, Result, judge, lay_out, path_of_tests, results

LABS, SECONDS = list(TASKS), 900


def command(*words: object, status: int = 0, **env: str) -> str:
    """Run `python -m extras.labs` with these words, and return what it prints."""
    words = [sys.executable, "-m", "extras.labs", *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def with_statements(lab: int, statements: dict[str, str], caller: str = "test_") -> dict[str, str]:
    """The solution, in which some functions begin with other statements.

    These are run only if the name of the calling function begins with `caller`.
    """
    before = "import ctypes, os, signal, sys, time\n"
    before += f"if sys._getframe(1).f_code.co_name.startswith('{caller}'):\n    "
    texts = ours(lab)
    for name, statement in statements.items():
        file = next(file for file in texts if name in definitions(texts[file]))
        node, lines = definitions(texts[file])[name], texts[file].splitlines()
        documented = ast.get_docstring(node) is not None
        at = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        lines.insert(at, textwrap.indent(before + statement, " " * (node.col_offset + 4)))
        texts[file] = "\n".join(lines) + "\n"
    return texts


KILLS_OR_RETURNS = """if type(self).__name__ == 'NaiveSync':
        os.kill(os.getpid(), 9)
    elif os.environ['RANK'] == '1':
        return"""
SIGNALS_ARE_CAUGHT = """while True:
        try:
            time.sleep(99)
        except BaseException:
            pass"""


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_complete(lab):
    """Each task has a section with its name, a time in minutes, a text and three hints."""
    text = (ROOT / f"extras/labs/lab{lab}.md").read_text()
    titles = re.findall(r"^## (.+) \(\d+ min\)\n\n.+\n\n(?:\d\. .+\n){3}\n", text, re.MULTILINE)
    names = [title[: len(task)] for title, task in zip(titles, TASKS[lab], strict=True)]
    assert names == [*TASKS[lab]]


def lines_of(*paths: Path) -> set[str]:
    """All lines of some files, without indentation."""
    return {line.strip() for path in paths for line in path.read_text().splitlines()}


@pytest.mark.parametrize("lab", LABS)
def test_a_starter_keeps_signatures_and_docstrings(lab):
    """A removed function is specified by what is left of it."""
    for file, text in hollow(lab).items():
        before, after = definitions(ours(lab)[file]), definitions(text)
        for name in holes(lab)[file]:
            assert ast.unparse(before[name].args) == ast.unparse(after[name].args)
            assert ast.get_docstring(before[name]) == ast.get_docstring(after[name])


@pytest.mark.parametrize("lab", LABS)
def test_a_starter_gives_nothing_away(tmp_path, lab):
    """A student's folder has no long line of the solution, unless an earlier step or common has."""
    folder = tmp_path / "lab"
    start(lab, folder, "ada")
    assert (*head(folder), submitted(folder, lab)) == (lab, "ada", hollow(lab))
    given = {path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)}
    given |= {ROOT / "common/model.py"}  # no lab removes anything of it
    shown = lines_of(*folder.rglob("*.*")) - lines_of(*given)
    for file in holes(lab):
        removed = lines_of(ROOT / file) - lines_of(folder / file)
        # A loop's head reveals nothing.
        told = {line for line in removed if len(line) > 40 and line[-1] != ":"}
        assert told and not told & shown, file


def test_mistakes_are_a_line(tmp_path):
    """A command that cannot be carried out gives an error of one line."""
    folder = tmp_path / "lab"
    assert "open LAB.md" in command("start", 4, folder)
    for words in ("start", 4, folder), ("start", 9, tmp_path / "x"), ("check", tmp_path):
        said = command(*words, status=2)
        assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("package", ["pytest", "tqdm"])
def test_a_missing_package_is_a_line_with_the_command_that_installs_it(tmp_path, package):
    """Without a package that the tests need, `check` and `grade` name requirements-dev.txt."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    for verb in "check", "grade":
        said = command(verb, tmp_path, status=2, PYTHONPATH=str(tmp_path))
        assert said.startswith(f"error: {package} is not installed") and said.count("\n") == 1
        assert "pip install -r requirements-dev.txt" in said


EDITORS = {
    "notepad": lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    "powershell": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "utf-16 without a bom": lambda text: text.encode("utf-16-be"),
    "old windows": lambda text: text.replace("\n", "\r\n").encode("cp1252"),
}


@pytest.mark.parametrize("editor", EDITORS)
def test_files_are_read_as_any_editor_saves_them(tmp_path, editor):
    """Name, lab and code are found in files with a BOM, in UTF-16, in Windows-1252, with CRLF."""
    folder, step = tmp_path / "lab", step_of(1)
    start(1, folder, "Zoë")
    code = "# Zoë\n" + ours(1)[step].encode("ascii", "replace").decode()
    (folder / step).write_bytes(EDITORS[editor](code))
    page = (folder / "LAB.md").read_text().encode("cp1252", "replace").decode("cp1252")
    (folder / "LAB.md").write_bytes(EDITORS[editor](page))
    assert (*head(folder), submitted(folder, 1)) == (1, "Zoë", {step: code})


EXIT = r"it ends the program \(sys.exit\) \(line \d+\)"
TRAINING = r"training starts at import: keep the guard `if __name__ == .+ \(line \d+\)"
IMPORTS = {  # what is appended to the student's file -> the reason that the table of grades gives
    "import sys\nsys.exit(3)": EXIT,
    "quit()": EXIT,
    "import os\nos._exit(0)": r"it ends the program \(os._exit\)",
    "import os\nos.kill(os.getpid(), 11)": r"it is killed by SIGSEGV, in <module> \(step01.+:\d+\)",
    "main(train, Config)": TRAINING,
    "train(Config(), None)": TRAINING,
    "input('How many ranks? ')": r"it waits for input \(line \d+\)",
    "import nowhere": r"ModuleNotFoundError: No module named 'nowhere' \(line \d+\)",
    "def (": r"SyntaxError: .+line \d+",
    "del Config": r"AttributeError: module .+ has no attribute 'Config'",
    "while True: print('x' * 9999)": r"it does not end, in <module> \(step01.+:\d+\)",
}


@pytest.mark.parametrize("statement", IMPORTS)
def test_a_file_that_cannot_be_imported_is_told_why(statement):
    """The reason says what the student's file does when it is imported, and in which line."""
    step = step_of(1)
    with pytest.raises(UserError, match=f"^{step} cannot be imported: {IMPORTS[statement]}"):
        judge(1, {step: f"{ours(1)[step]}\n{statement}\n"}, 20 if "while" in statement else 90)


FUNCTIONS = {  # lab -> function -> (its statement, the task that is lost, part of the reason)
    2: {
        "NaiveSync.finish": (KILLS_OR_RETURNS, "naive", "the process died"),
        "RingSync.sum_up": ("pass", "ring", "does not answer"),  # its `finish` is NaiveSync's
        "Bucket.__init__": ("while True: pass", "buckets", "has not ended"),
        "fill_buckets": ("os._exit(0)", "buckets", "it ends the program (os._exit)"),
    },
    1: {
        "adamw": (SIGNALS_ARE_CAUGHT, "adamw", "it does not end, in adamw"),
        "Optimizer.zero_grad": ("raise OSError('x' * 10**7)", "masters", "OSError: xxx"),
        "recompute_layers": ("ctypes.string_at(0)", "recomputation", "it is killed by SIGSEGV, in"),
    },
}


@pytest.mark.parametrize("lab", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_function_that_hangs_or_dies_costs_only_its_own_points(lab):
    """Tests of other functions keep their points, and each reason says what has happened."""
    statements = {name: statement for name, (statement, _, _) in FUNCTIONS[lab].items()}
    found = judge(lab, with_statements(lab, statements), SECONDS, a_case=20)
    lost = {task for _, task, _ in FUNCTIONS[lab].values()}
    assert {result.task for result in found} == set(TASKS[lab])
    assert {result.task for result in found if result.wrong} == lost
    for _, task, reason in FUNCTIONS[lab].values():
        reasons = [result.wrong for result in found if result.task == task]
        assert any(reason in wrong for wrong in reasons), reasons
        assert max(map(len, reasons)) < 3000


@pytest.mark.exhaustive
def test_a_hang_costs_what_an_exception_costs():
    """If attention to a part never returns, the other tests of lab 5 keep their points."""
    points = []
    for statement in "raise ValueError", "while True: time.sleep(0.2)":
        texts = with_statements(5, {"part_attention": statement}, caller="")
        points.append([(r.test, r.points) for r in judge(5, texts, 300) if not r.wrong])
    assert points[0] == points[1] != []


def test_what_has_no_result_costs_only_its_own_points():
    """A test counts if all its cases have passed; its first failure is the reason."""
    events = [["found", case, case[0], "ring", 2] for case in ("a1", "a2", "b1", "b2", "c1", "d1")]
    events += [["began", "a1"], ["ended", "a1", ""], ["began", "a2"], ["ended", "a2", ""]]
    events += [["ended", "b1", ""], ["ended", "b2", "hangs"], ["ended", "b2", ""], ["began", "c1"]]
    reasons = dict(a="", b="hangs", c="too late", d="too late")
    expected = [Result(test, "ring", 2, reason) for test, reason in reasons.items()]
    assert results(events, "too late") == (expected, ["c1", "d1"])


def graded(*folders: Path) -> dict[str, dict[str, str]]:
    """The table of grades: name of the folder -> its row."""
    table = csv.DictReader(command("grade", *folders).splitlines())
    return {Path(row["folder"]).name: row for row in table}


def test_grading_folders(tmp_path):
    """Correct, wrong and unchanged files get their points, whatever else the folders contain."""
    step = step_of(2)
    for name in "right", "wrong", "starter":
        start(2, tmp_path / name, f"={name}")
    (tmp_path / "right" / step).write_text(ours(2)[step])
    (tmp_path / "right" / path_of_tests(2)).write_text(
        "def test_fill_buckets():\n    assert False\n"
    )
    (tmp_path / "right/common/comm.py").write_text("raise SystemExit\n")
    (tmp_path / "starter" / path_of_tests(2)).write_text("def test_fill_buckets():\n    pass\n")
    wrong = ours(2)[step].replace("range(2 * (n - 1))", "range(n - 1)")
    (tmp_path / "wrong" / step).write_text(wrong)
    rows = graded(*(tmp_path / name for name in ("right", "wrong", "starter")))
    right, wrong, starter = (int(row["points"]) for row in rows.values())
    assert right == int(rows["right"]["of"]) > wrong > starter == 0, rows["right"]["lost"]
    assert rows["starter"]["of"] == rows["wrong"]["of"] == rows["right"]["of"]
    assert "the sum is wrong" in rows["wrong"]["lost"]
    assert "task naive: NaiveSync.finish" in rows["starter"]["lost"]
    assert rows["right"]["student"] == "'=right"  # else a spreadsheet would evaluate it


def test_each_folder_of_a_class_gets_a_row(tmp_path):
    """A broken folder does not stop the grader: its row gives the reason."""
    for name in "exit", "lost", "page":
        start(1, tmp_path / "class" / name, name)
    (tmp_path / "class/empty").mkdir()
    (tmp_path / "class/exit" / step_of(1)).write_text("import sys\nsys.exit()\n")
    (tmp_path / "class/lost" / step_of(1)).unlink()
    (tmp_path / "class/page/LAB.md").write_bytes(b"\xff\xfe\x00")
    rows = graded(tmp_path / "class", tmp_path / "nowhere")
    errors = dict(
        empty="LAB.md is missing",
        exit=f"{step_of(1)} cannot be imported: it ends the program (sys.exit) (line 2)",
        lost=f"{step_of(1)} is missing",
        page="LAB.md lacks the first lines",
        nowhere="LAB.md is missing",
    )
    assert [*rows] == [*errors]
    for name, error in errors.items():
        assert error in rows[name]["error"] and rows[name]["points"] == "0"
    assert rows["lost"]["student"] == "lost"


@pytest.mark.exhaustive
@pytest.mark.parametrize("lab", LABS)
def test_points_of_the_project_and_of_a_starter(lab):
    """The project's files earn all points, in every task. An unchanged folder earns none."""
    found = judge(lab, ours(lab), SECONDS)
    assert {result.task for result in found if result.points} == set(TASKS[lab])
    assert not [result for result in found if result.wrong]
    assert not [result for result in judge(lab, hollow(lab), SECONDS) if not result.wrong]


# Solutions that are right and not the project's: a lab, the tasks that are tried, other bodies.
STYLES = {
    "torch.distributed's own calls": (
        4,
        ["collectives", "f and g"],
        {
            "gather_tokens": """own = x.contiguous()
parts = [torch.empty_like(own) for _ in range(group.size)]
torch.distributed.all_gather(parts, own, group=group.handle)
return torch.cat(parts, 1)""",
            "sum_and_shard_tokens": """sent = torch.stack(x.chunk(group.size, 1))
received = torch.empty_like(sent)
torch.distributed.all_to_all_single(received, sent, group=group.handle)
return received.sum(0)""",
        },
    ),
    "f and g without autograd functions": (
        4,
        ["f and g", "shards"],
        {
            "CopyToTensorParallel.forward": "raise NotImplementedError",
            "ReduceFromTensorParallel.forward": "raise NotImplementedError",
            "enter_block": """if sp:
    return GatherFromSequenceParallel.apply(x, group)
y = x.view_as(x)
y.register_hook(lambda dy: sum_over_ranks(dy, group))
return y""",
            "leave_block": """if sp:
    return ReduceScatterToSequenceParallel.apply(x, group)
return x + (sum_over_ranks(x.detach(), group) - x.detach())""",
        },
    ),
    "merge by the largest exponent": (
        5,
        ["parts", "ring"],
        {
            "merge": """largest = torch.maximum(lse, part_lse)
weight = (lse - largest).exp()
part_weight = (part_lse - largest).exp()
total = weight + part_weight
o.mul_((weight / total)[..., None]).add_(part_o * (part_weight / total)[..., None])
lse.copy_(largest + total.log())""",
        },
    ),
    "a ring whose last hop is like the others": (
        5,
        ["ring"],
        {
            "travel": """right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
for hop in range(group.size):
    received = kv.new_empty(kv.shape)
    waiting = Pending()
    if hop + 1 < group.size:
        waiting = exchange([(kv, right)], [(received, left)], group)
    yield (group.rank - hop) % group.size, kv
    waiting.wait()
    kv = received""",
        },
    ),
    "1F1B in one loop, which receives the next x while it sends y": (
        6,
        ["messages"],
        {
            "OneForwardOneBackward.execute": """m = len(self.xs)
ahead = min(m, self.group.size - 1 - self.group.rank)
x = self.recv_forward(0)
for k in range(m + ahead):
    following = k + 1 if k + 1 < m else None
    if k < m:
        y = self.stage.forward(k, x)
    if k < ahead:
        receives = []
        if following is not None and self.group.rank > 0:
            x = self.buffer(following)
            receives.append((x, self.group.rank - 1))
        exchange([(y, self.group.rank + 1)], receives, self.group).wait()
    else:
        i = k - ahead
        dy = self.send_forward_recv_backward(y, i) if k < m else self.recv_backward(i)
        dx = self.stage.backward(i, dy)
        if following is None:
            self.send_backward(dx)
        else:
            x = self.send_backward_recv_forward(dx, following)""",
        },
    ),
    "rows sorted by index": (
        7,
        ["layer", "dispatch"],
        {
            "transpose_blocks": """column = torch.arange(sizes.shape[1]).repeat(len(sizes))
order = column.repeat_interleave(sizes.flatten()).argsort(stable=True)
return rows.index_select(0, order)""",
            "MoE.visit": """order_N = ids_TK.flatten().argsort(stable=True)
out_ND = self.run_experts(x_TD.repeat_interleave(self.top_k, 0)[order_N], counts_E)
return torch.zeros_like(out_ND).index_copy(0, order_N, out_ND).view(*ids_TK.shape, -1)""",
        },
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", STYLES)
def test_another_right_solution_passes(tmp_path, style):
    """The step's tests judge what a function returns and sends, not how it is written."""
    lab, tasks, bodies = STYLES[style]
    step = step_of(lab)
    lay_out(lab, tmp_path, {step: with_bodies(ours(lab)[step], bodies)})
    selection = " or ".join("task_" + task.replace(" ", "_") for task in tasks)
    words = [sys.executable, "-m", "pytest", "-q", "-x", path_of_tests(lab), "-k", selection]
    env = os.environ | ENVIRONMENT
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
