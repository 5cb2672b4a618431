"""The labs: starters reveal nothing, right solutions earn all points, a mistake costs its own."""

import ast
import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from common import UserError
from extras.labs import ROOT, TASKS, definitions, holes, hollow, ours, step_of, with_bodies
from extras.labs.__main__ import lab_of, start, submitted
from extras.labs.judge import Result, judge, path_of_tests, read_report

LABS = list(TASKS)


def command(*words: object, status: int = 0) -> str:
    """Run `python -m extras.labs` with these words, and return what it prints."""
    words = [sys.executable, "-m", "extras.labs", *map(str, words)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_complete(lab):
    """Each task has a section with its name, a time in minutes, a text and three hints."""
    text = (ROOT / f"extras/labs/lab{lab}.md").read_text()
    titles = re.findall(r"^## (.+) \(\d+ min\)\n\n.+\n\n(?:\d\. .+\n){3}\n", text, re.MULTILINE)
    for title, task in zip(titles, TASKS[lab], strict=True):
        assert title.startswith(task)


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
    start(lab, folder)
    assert (lab_of(folder), submitted(folder, lab)) == (lab, hollow(lab))
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
    with pytest.raises(UserError, match="lab is there already"):
        start(4, folder)
    with pytest.raises(UserError, match="there are labs 1 to 7"):
        start(9, tmp_path / "x")
    line = command("check", tmp_path, status=2)
    assert line.startswith("error: ") and line.count("\n") == 1 and "LAB.md" in line


ENDINGS = {
    "import os\nos._exit(3)": "pytest ended early, with status 3",
    "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True:\n    pass": "no "
    "result within 30 s",
}


@pytest.mark.parametrize("statement", ENDINGS)
def test_a_function_that_ends_or_holds_the_process(monkeypatch, statement):
    """The folder cannot be judged, and the reason is told. (The loop ignores a test's limit.)"""
    monkeypatch.setattr("extras.labs.judge.SECONDS", 30)
    step = step_of(1)
    text = with_bodies(ours(1)[step], {"learning_rate": statement})
    with pytest.raises(UserError, match=ENDINGS[statement]):
        judge(1, {step: text})


CASE = """<testcase><properties><property name="task" value="ring"/><property name="points"
value="2"/><property name="test" value="{}"/></properties>{}</testcase>"""


def test_a_test_passes_if_all_its_cases_do(tmp_path):
    """A case that is skipped, or fails without a message, does not pass."""
    failed, skipped = '<failure message="first&#10;second"/>', '<skipped message=""/>'
    cases = ("a", ""), ("a", ""), ("b", failed), ("b", ""), ("c", ""), ("c", skipped)
    text = "".join(CASE.format(*case) for case in cases) + "<testcase/>"  # was interrupted
    (tmp_path / "report.xml").write_text(f"<testsuite>{text}</testsuite>")
    wrong = dict(a="", b="first", c="failed")
    expected = [Result(test, "ring", 2, reason) for test, reason in wrong.items()]
    assert read_report(tmp_path / "report.xml") == expected


def graded(*folders: Path) -> dict[str, dict[str, str]]:
    """The table of grades: name of the folder -> its row."""
    table = csv.DictReader(command("grade", *folders).splitlines())
    return {Path(row["folder"]).name: row for row in table}


def test_grading_folders(tmp_path):
    """A folder gets the points of what is solved in it, whatever its tests and other files say."""
    right, begun = tmp_path / "right", tmp_path / "begun"
    start(2, right)
    # As editors of Windows save it
    (right / step_of(2)).write_text(ours(2)[step_of(2)], encoding="utf-8-sig", newline="\r\n")
    (right / path_of_tests(2)).write_text("def test_fill_buckets():\n    assert False\n")
    (right / "common/comm.py").write_text("raise SystemExit\n")
    start(1, begun)
    solved = definitions(ours(1)[step_of(1)])["learning_rate"].body
    text = with_bodies(hollow(1)[step_of(1)], {"learning_rate": ast.unparse(solved)})
    (begun / step_of(1)).write_text(text)
    (begun / path_of_tests(1)).write_text("def test_adamw_and_what_decays():\n    pass\n")
    rows = graded(right, begun)
    assert rows["right"]["points"] == rows["right"]["of"] == "32", rows["right"]["lost"]
    assert (rows["begun"]["points"], rows["begun"]["of"]) == ("3", "38")
    assert "NotImplementedError: task adamw: adamw" in rows["begun"]["lost"]


def test_each_folder_of_a_class_gets_a_row(tmp_path):
    """A broken folder does not stop the grader: its row gives the reason."""
    step = step_of(1)
    errors = dict(
        broken=f"imported: SyntaxError: invalid syntax ({step}:3)",
        bytes="(unicode error) 'utf-8' codec can't decode byte 0xff",
        lost=f"lost/{step}",
        empty="empty/LAB.md lacks the first line",
        nowhere="nowhere/LAB.md",
    )
    folders = [tmp_path / name for name in errors]
    for folder in folders[:4]:
        start(1, folder)
    (folders[0] / step).write_text("import os\n\ndef (\n")
    (folders[1] / step).write_bytes(b"x = '\xff'\n")
    (folders[2] / step).unlink()
    (folders[3] / "LAB.md").write_bytes(b"\xff\xfe\x00")
    rows = graded(*folders)
    assert [*rows] == [*errors]
    for name, error in errors.items():
        assert error in rows[name]["error"] and rows[name]["points"] == "0"


@pytest.mark.exhaustive
@pytest.mark.parametrize("lab", LABS)
def test_points_of_the_project_and_of_a_starter(lab):
    """The project's files earn all points, in every task. An unchanged folder earns none."""
    found = judge(lab, ours(lab))
    assert {result.task for result in found if result.points} == set(TASKS[lab])
    assert not [result for result in found if result.wrong]
    assert not [result for result in judge(lab, hollow(lab)) if not result.wrong]


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
            "enter_parallel": """if sp:
    return GatherFromSequenceParallel.apply(x, group)
y = x.view_as(x)
y.register_hook(lambda dy: sum_over_ranks(dy, group))
return y""",
            "leave_parallel": """if sp:
    return ReduceScatterToSequenceParallel.apply(term, group)
return term + (sum_over_ranks(term.detach(), group) - term.detach())""",
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
            "OneForwardOneBackward.execute": """m = len(self.stage.tokens)
ahead = min(m, self.group.size - 1 - self.group.rank)
x = self.recv_forward(0)
for k in range(m + ahead):
    following = k + 1 if k + 1 < m else None
    if k < m:
        y = self.stage.forward(k, x)
    if k < ahead:
        receives = []
        if following is not None and self.group.rank > 0:
            x = empty_message(self.stage.tokens[following], self.model, self.sp_ranks)
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
            "MoE.outputs_of_choices": """order_N = ids_TK.flatten().argsort(stable=True)
out_ND = self.run_experts(x_TD.repeat_interleave(self.top_k, 0)[order_N], counts_E)
return torch.zeros_like(out_ND).index_copy(0, order_N, out_ND).view(*ids_TK.shape, -1)""",
        },
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("style", STYLES)
def test_another_right_solution_passes(style):
    """The step's tests judge what a function returns and sends, not how it is written."""
    lab, tasks, bodies = STYLES[style]
    found = judge(lab, {step_of(lab): with_bodies(ours(lab)[step_of(lab)], bodies)})
    tried = [result for result in found if result.task in tasks]
    assert tried and not [result for result in tried if result.wrong]
