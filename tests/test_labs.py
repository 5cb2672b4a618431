"""The labs judged: holes give nothing away, the project earns all points, wrong files lose theirs and are told why."""

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import UserError
from labs import course, folder, grade, ranks, source
from labs.__main__ import main, parser
from labs.bench import Bench, Run, Wrong, applied, meaning
from labs.course import Lab, Task, load, path_of
from labs.ranks import Failed, World
from tests.diff import ROOT
from tests.jobs import end, forked, lines_until

LABS = course.numbers()
CASES = [(lab, task.number) for lab in LABS for task in load(lab).tasks]
SOME = [(7, 4)]  # in the default run
TASKS = [pytest.param(*case, marks=() if case in SOME else pytest.mark.exhaustive) for case in CASES]
ID = "some.student-1"


def holes(lab: Lab, module: str, tasks: list[Task]) -> dict[str, str]:
    """What `start` takes out of a module for some tasks."""
    return {name: f"lab {lab.number}, task {t.number}" for t in tasks for name in t.functions.get(module, [])}


def handed_in(path: Path, number: int, solved: list[int] | None = None, change: dict | None = None) -> grade.Folder:
    """A folder in which the tasks `solved` (None: all) are the project's; `change`: by module (old, new)."""
    folder.start(number, path, ID)
    lab = load(number)
    left = [] if solved is None else [task for task in lab.tasks if task.number not in solved]
    for file, module in lab.files.items():
        text = path_of(module).read_text()
        for old, new in [change[module]] if change and module in change else []:
            assert text.count(old) == 1, f"{module} has {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        (path / file).write_text(source.hollow(text, holes(lab, module, left)))
    if solved is None or len(lab.tasks) in solved:
        lines = [f"{q.name} = {q.answer(q.values(ID))!r}" for q in lab.questions]
        (path / "answers.toml").write_text("\n".join([f'id = "{ID}"', *lines]))
    return grade.open_folder(path)


def judged(found: grade.Folder, *numbers: int, seconds: float = 120) -> list[grade.Result]:
    """The results of some tasks."""
    return list(grade.check(found, [t for t in found.lab.tasks if t.number in numbers], seconds))


# --- what stands in the folder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", LABS)
def test_a_lab_is_complete(number):
    """Four to seven tasks, three hints each; functions, criteria and faults are there, and no hole is in two tasks."""
    lab = load(number)
    assert 4 <= len(lab.tasks) <= 7
    names = [(module, name) for task in lab.tasks for module, parts in task.functions.items() for name in parts]
    assert len(names) == len(set(names))
    questions = {question.name for question in lab.questions}
    for task in lab.tasks:
        assert len(task.hints) == 3 and task.read and task.points > 0
        for module, parts in task.functions.items():
            assert module in lab.files.values()
            found = source.definitions(ast.parse(path_of(module).read_text()))
            assert not set(parts) - found.keys()
            assert all(ast.get_docstring(found[name]) for name in parts if not name.endswith("__init__"))
        for criterion in task.criteria:
            assert criterion.check in questions or callable(getattr(lab.module, criterion.check))
        for fault in task.faults:
            with applied(fault):  # raises if the source that it changes is no longer there
                assert meaning(fault)


@pytest.mark.parametrize("number", LABS)
def test_a_starter_gives_nothing_away(tmp_path, number):
    """Signatures and docstrings stay; no line of a body that was taken out stands anywhere in the folder."""
    folder.start(number, tmp_path / "lab", ID)
    lab, everything = load(number), "".join(p.read_text() for p in (tmp_path / "lab").iterdir())
    lines = {line.strip() for line in everything.splitlines()}
    for file, module in lab.files.items():
        text = path_of(module).read_text()
        before, after = (source.definitions(ast.parse(t)) for t in (text, (tmp_path / "lab" / file).read_text()))
        taken, kept = holes(lab, module, lab.tasks), text.splitlines()
        bodies = [source.body_lines(before[name]) for name in taken]
        inside = {i for first, last in bodies for i in range(first - 1, last)}
        outside = {line.strip() for i, line in enumerate(kept) if i not in inside}
        for name, (first, last) in zip(taken, bodies, strict=True):
            assert ast.unparse(before[name].args) == ast.unparse(after[name].args)
            assert ast.get_docstring(before[name]) == ast.get_docstring(after[name])
            body = {line.strip() for line in kept[first - 1 : last]}
            shown = {line for line in body & lines - outside if len(line) > 12}
            assert not shown, f"{name}: {shown}"


def test_questions_differ_and_name_mistakes():
    """Another id has other numbers; the right number passes, a known mistake is named, and the answer is not told."""
    for number in LABS:
        for question in load(number).questions:
            asked = {question.ask(f"student{i}") for i in range(12)}
            assert len(asked) > 3, question.name
            right = question.answer(question.values(ID))
            question.judge(ID, {question.name: right})
            for words, mistake in question.mistakes.items():
                wrong = mistake(question.values(ID))
                if abs(wrong - right) > question.tolerance * right:
                    with pytest.raises(grade.Wrong, match=re.escape(words)):
                        question.judge(ID, {question.name: wrong})
            for answer in ("", "x", True, right * 1.37 + 2):
                with pytest.raises(grade.Wrong) as told:
                    question.judge(ID, {question.name: answer})
                assert not re.search(rf"(?<![\d.]){re.escape(f'{right:.6g}')}(?![\d.])", str(told.value))


def test_hints_and_solutions(tmp_path, capsys):
    """Three hints, one at a time; the diff only when given up, or after the task has passed; all of it is noted."""
    found = handed_in(tmp_path / "lab", 4, [])
    hints = [folder.hint(found, 4) for _ in range(4)]
    assert [h[:7] for h in hints[:3]] == ["1 of 3:", "2 of 3:", "3 of 3:"] and "all hints" in hints[3]
    with pytest.raises(UserError, match="0 of 6 points: --give-up"):
        folder.solution(found, 4, give_up=False)
    diff = folder.solution(found, 4, give_up=True)
    assert "+    parts = x.new_empty(group.size, *x.shape)" in diff and "enter_block" not in diff
    notes = (found.path / "progress.txt").read_text()
    assert notes.count("hint") == 3 and "solution of task 4 seen, given up" in notes
    with pytest.raises(UserError, match="not empty"):
        folder.start(4, tmp_path / "lab", ID)
    with pytest.raises(UserError, match="no lab"):
        grade.open_folder(tmp_path)


def test_commands_of_the_lab_are_commands(tmp_path):
    """Every command of LAB.md and of TEACHING.md parses, and the cheap ones run as they stand."""
    folder.start(4, tmp_path / "lab", ID)
    text = (tmp_path / "lab" / "LAB.md").read_text()
    commands = re.findall(r"^python -m labs ([^#\n]+)", text, re.MULTILINE)
    assert len(commands) == 5
    teaching = (ROOT / "labs" / "TEACHING.md").read_text()
    for command in commands + re.findall(r"^python -m labs ([^#\n]+)", teaching, re.MULTILINE):
        assert isinstance(parser().parse_args(command.replace("...", "").split()), argparse.Namespace)
    assert f"cd {ROOT}" in text
    (hint,) = [command for command in commands if command.startswith("hint")]
    out = subprocess.run([sys.executable, "-m", "labs", *hint.split()], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    assert b"1 of 3" in out.stdout


def test_watch_checks_again_at_every_save(tmp_path):
    """As a student works: answers saved, a file saved by renaming, a folder that is broken for a while; Ctrl-C ends."""
    lab, said = tmp_path / "lab", []
    handed_in(lab, 4, [])
    job = forked("labs", "check", str(lab), "--task", "6", "--watch")

    def save(path: Path, text: str):
        (lab / "saving").write_text(text)
        (lab / "saving").rename(path)

    def waits():
        said.extend(lines_until(job, "waiting for a save"))

    try:
        waits()
        lines = [f"{q.name} = {q.answer(q.values(ID))!r}" for q in load(4).questions]
        save(lab / "answers.toml", "\n".join([f'id = "{ID}"', *lines]))
        waits()
        save(lab / "step04_tp_sp.py", "x = (")
        waits()
        (lab / "LAB.md").rename(lab / "elsewhere")
        waits()
        save(lab / "helper.py", "x = 1")
        (lab / "elsewhere").rename(lab / "LAB.md")
        waits()
        job.send_signal(signal.SIGINT)
        said.append(job.communicate()[0])
        assert job.wait(60) == 0
    finally:
        end(job)
    found = re.findall(r"^(\d+) of 8 points|no lab", "".join(said), re.MULTILINE)
    assert found[:4] == ["0", "8", "8", ""] and found[-1] == "8", said


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", LABS)
def test_all_commands_of_the_lab_run(tmp_path, number):
    """On a right folder, each ends with status 0."""
    handed_in(tmp_path / "lab", number)
    text = (tmp_path / "lab" / "LAB.md").read_text()
    for command in re.findall(r"^python -m labs ([^#\n]+)", text, re.MULTILINE):
        subprocess.run([sys.executable, "-m", "labs", *command.split()], cwd=ROOT, check=True)
    page = (tmp_path / "lab" / "report.html").read_text()
    assert f"{load(number).points} of {load(number).points} points" in page and page.count("data:image/png") >= 1
    assert "does not run yet" not in page


def test_nobody_imports_the_labs():
    """labs/ may import all of the project; only its own test imports it."""
    for path in ROOT.rglob("*.py"):
        inside = path.relative_to(ROOT).parts[0]
        if inside not in ("labs", ".venv") and path.name != "test_labs.py":
            assert not re.search(r"^\s*(from|import) labs\b", path.read_text(), re.MULTILINE), path


# --- points ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, task", TASKS)
def test_one_solved_task_raises_its_own_points(tmp_path, number, task):
    """With the project's code in this task's holes alone: all its points; the next task, untouched, has none."""
    found = handed_in(tmp_path / "lab", number, [task])
    results = judged(found, task)
    assert [r.text for r in results] == [""] * len(results) and sum(r.earned for r in results) > 0
    other = task % len(found.lab.tasks) + 1
    for result in judged(found, other):
        assert not result.earned and re.search("not written yet: lab|not answered yet", result.text), result.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", LABS)
def test_the_project_earns_all_points(tmp_path, number):
    """Under three ids; and the whole file trains as one device."""
    for student in ("a", "b", "c"):
        found = handed_in(tmp_path / student, number)
        found.student = student
        found.answers = {q.name: q.answer(q.values(student)) for q in found.lab.questions}
        results = list(grade.check(found, found.lab.tasks))
        assert [r.text for r in results] == [""] * len(results)
        assert grade.whole(found) == ""


S1, S2, S3, S4 = "step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp"
S5, S6, S7 = "step05_cp_ring", "step06_pipeline", "step07_moe_ep"
C, LISTS, M, L, MOE = "services.compression", "common.schedules", "common.model", "common.layout", "common.moe"
WIDE = "    wide = torch.promote_types(hidden.dtype, torch.float32)\n"
CUT = "return part[start:stop]"
ADD = "received + pieces[(r - s - 1) % n] if adding else received"
REDUCE = "            all_reduce(param.grad, group).wait()\n"
FINISH = "            bucket.pending.wait()\n"
SAVE = "        ctx.save_for_backward(x, *weights)\n        full = gather(x, group).wait()"
NORMS = '        note_gradient_sum([p for p in model.parameters() if p.dim() == 1], "tp")'
KV = '            note_gradient_sum([linear.weight], "kv")'
APPLY = "            return list(ColumnParallelLinear.apply(x, self.group, self.gather, self.reduce, *weights))"
EACH = "            return [ColumnParallelLinear.apply(x, self.group, self.gather, self.reduce, w)[0] for w in weights]"
F1B = "    warm_up = min(m, p - 1 - rank)\n"
ZERO = "            return [0 * grad.flatten(0, -2).T @ full for"
LSE = "    lse.copy_(torch.logaddexp(lse, block_lse))"
SOURCE = "    if source == rank:\n"
NEXT = "        next_kv = buffers[hop % 2]\n"
BLOCK_P = "    p = (block_scores(q, k, causal) - lse[..., None]).exp()\n"
ADD_DQ = "        d_q[:, rows] += block_q\n"
LOOK = "            for some, rows, keys, causal in cut(source, visible(group.rank,"
PART = "                these = d_out[some], q[some], kv[:, some],"
HOME = "        sending.wait()\n        return d_q"
RING = "            return RingAttention.apply(q, k, v, self.group, self.mode, self.cut)"
REPEAT = "            k, v = repeat_heads(k, q), repeat_heads(v, q)\n"
DATA = '    mesh.add("data", mesh["dp"].size * group.size,'
EACH_GROUP = "by_group.topk(each).values.sum(-1)"
OUTER = "grouped_outer(grad, x, counts) if"
GATES = "        visits = (gates != 0).T"
LOCAL = "within_capacity(all_chosen, m.experts, capacity)[:, self.local_tokens]"
OWN = "within_capacity(chosen.view(*x.shape[:-1], -1), m.experts, -(-capacity * x.shape[1] // m.seq_len))"
SCALAR = "grad.new_full((), ctx.scale, dtype=torch.float64)"
FRACTION = "count(all_chosen, m.experts).to(p.dtype) / all_chosen.numel()"
SENT = "        self.dim, self.dtype = rows.shape[1], gates.dtype\n"
ROUND = "        gates = gates.to(rows.dtype).to(gates.dtype)\n"
OUT = "            out = self.over_tp(experts, *Travel.apply(there, False, *tie), route.most, route.n_choices)"
LEAVE = "leave_block(experts(x, gates, n_choices), self.tp, self.sp)[:rows]"
ORDERED = "gather_tokens(chosen.int(), group).wait()[:, places]"
RECORD = "            if ep > 1:\n                record"
ROUTER = '            note_gradient_sum([moe.router.weight], "tp")'
WRONG = [  # lab, task, module, right, wrong, what check must say
    (
        1,
        1,
        M,
        "return angle.cos(), angle.sin()",
        "return angle.cos().bfloat16().to(wide), angle.sin()",
        "tables_in_bf16",
    ),
    (1, 2, M, "self.o_proj(self.attend(", "self.o_proj(attend(", "calls of the cores"),
    (1, 3, M, WIDE, WIDE + "    chunk_tokens = len(hidden)\n", "all logits at once"),
    (1, 3, M, "target != IGNORE", "target == target", "ignored_targets_counted"),
    (1, 4, S1, "clip and norm > clip", "clip", "scaled_up_to_the_clip"),
    (1, 5, S1, "/ batch.n_targets", "/ (targets != -100).sum().clamp(min=1)", "targets_of_the_micro_batch"),
    (1, 6, S1, 'if config.recompute == "selective":', "if False:", "that is what full keeps"),
    (3, 1, S3, CUT, CUT.replace("stop", "stop - (self.place[name][1] > self.first + self.length)"), "piece_off_by_one"),
    (3, 2, S3, "            self.flat.untyped_storage().resize_(0)\n", "", "bytes of `flat` after"),
    (3, 3, S3, "if factor != 1:", "if False:", "factor_left_out"),
    (3, 4, S3, "if unit.grad_slice is None else unit", "if True else unit", "slices_not_accumulated"),
    (3, 5, S3, "self.drop(i + 1, keep=i)", "pass", "whose weights are there"),
    (3, 6, L, "copies(sizes) ** 0.5", "copies(sizes) ** 0", "replicas_counted_in_the_norm"),
    (2, 1, S2, "for s in range(2 * (n - 1)):", "for s in range(n - 1):", "second_half_left_out"),
    (2, 1, S2, ADD, "received", "replaced_instead_of_added"),
    (2, 2, S2, REDUCE, REDUCE.replace("grad", "data"), "weights_reduced_instead_of_gradients|not the same"),
    (2, 2, S2, REDUCE, REDUCE + "            param.grad /= group.size\n", "averaged over the"),
    (2, 3, S2, "for param in reversed(groups):", "for param in groups:", "buckets, by number of the parameters"),
    (2, 4, S2, "        if self.armed:\n", "        if True:\n", "early_buckets"),
    (2, 4, S2, FINISH, FINISH + "            bucket.flat /= bucket.group.size\n", "averaged: The all-reduce divides"),
    (2, 5, C, "    lost[group.rank] += total - widen(summed)\n", "", "something is missing"),
    (2, 5, C, "        owed = self.lost.get(buffer.data_ptr(), 0.0)", "        owed = 0.0", "no_error_feedback"),
    (4, 1, S4, "else (sum_tokens, keep_tokens)", "else (sum_tokens, sum_tokens)", "g_sums_in_backward_too"),
    (4, 1, S4, "else (keep_tokens, sum_tokens)))", "else (keep_tokens, keep_tokens)))", "f_does_not_sum_in_backward"),
    (4, 2, S4, APPLY, EACH, "one_collective_a_matrix"),
    (4, 2, S4, SAVE, SAVE + "\n        ctx.full = full", "gathered_input_kept"),
    (4, 3, S4, "everyone[:, 1].sum(0)", "everyone[:, 1].mean(0)", "the loss differs by"),
    (4, 4, S4, "parts.movedim(0, -3).flatten", "parts.movedim(0, -2).flatten", "parts_beside_one_another"),
    (4, 5, S4, NORMS, "        pass", "norm_gradients_not_summed"),
    (6, 1, LISTS, F1B, F1B.replace("p - 1 - rank", "m"), "all forwards come first, as in afab"),
    (6, 1, LISTS, F1B, F1B.replace("p - 1 - rank", "p - 2 - rank"), "idle for|stands|deadlock"),
    (6, 2, LISTS, "for chunk in reversed(range(v)) for _", "for chunk in range(v) for _", "deadlock|follows"),
    (6, 3, LISTS, "lag = min(m - warm_up, depth * rank)", "lag = 0", "idle for"),
    (6, 4, LISTS, "in sorted(spans, key=lambda entry: entry[1].end):", "in spans:", "before|deadlock"),
    (6, 5, S6, "popped, self.waiting = self.waiting, []", "popped = self.waiting", "closures that wait"),
    (6, 5, S6, "            return [grad.flatten(0, -2).T @ full for", ZERO, "weight gradient after W"),
    (4, 5, S4, KV, "            pass", "kv_gradients_not_summed"),
    (5, 1, S5, LSE, LSE[:-1] + ".bfloat16())", "lse_in_bf16"),
    (5, 1, S5, "    out -= share * (out", "    out -= 0.5 * (out", "blocks_averaged"),
    (5, 2, S5, '    if n == 1 or mode in ("ring", "ulysses"):', "    if True:", "contiguous_chunks"),
    (5, 2, S5, SOURCE, "    source += source != rank\n" + SOURCE, "wrong_source"),
    (5, 3, S5, NEXT, NEXT.replace("buffers[hop % 2]", "torch.empty_like(kv)"), "a_buffer_for_each_hop"),
    (5, 3, S5, "        sending.wait()\n        kv = next_kv", "        kv = next_kv", "part of hop|kv must|is zero"),
    (5, 4, S5, BLOCK_P, "    lse = block_scores(q, k, causal).logsumexp(-1)\n" + BLOCK_P, "softmax_of_the_block"),
    (5, 4, S5, "wide_v) - delta)", "wide_v))", "d_left_out"),
    (5, 4, S5, ADD_DQ, ADD_DQ.replace("+=", "="), "d_q after half a part"),
    (5, 5, S5, LOOK, '            ctx.parts = [*getattr(ctx, "parts", []), kv.clone()]\n' + LOOK, "parts_kept"),
    (5, 5, S5, PART, PART.replace("kv[", "(kv if allgather else kept)["), "kv_of_hop_0_in_backward"),
    (5, 5, S5, HOME, "        next_d_kv = next_d_kv if allgather else d_kv\n" + HOME, "no_final_rotation"),
    (5, 6, S5, RING, REPEAT + RING, "kv_heads_repeated_before_the_ring"),
    (5, 6, S5, DATA, DATA.replace(" * group.size", ""), "not_summed_over_cp"),
    (7, 1, MOE, EACH_GROUP, "by_group.amax(-1)", "groups_by_their_best"),
    (7, 2, MOE, OUTER, "grouped_outer(grad, x, counts) / 2 if", "experts_averaged"),
    (7, 2, MOE, GATES, "        gates = gates.detach()\n" + GATES, "gates_not_differentiated"),
    (7, 3, MOE, FRACTION, FRACTION.replace("all_chosen", "chosen"), "balanced_by_own_tokens"),
    (7, 3, MOE, LOCAL, OWN, "drops_by_own_tokens"),
    (7, 3, MOE, SCALAR, SCALAR.replace("ctx.scale", "2 * ctx.scale"), "counted_twice_in_recomputation"),
    (7, 4, S7, SENT, SENT + ROUND, "gates_rounded"),
    (7, 4, S7, "wanted.T.nonzero_static", "visits.any(-1).T.flip(1).nonzero_static", "as .target rank, token"),
    (7, 5, S7, OUT, OUT + ".roll(1, 0)", "returned_in_another_order"),
    (
        7,
        5,
        S7,
        LEAVE,
        LEAVE.replace("leave_block(experts", "(leave_block if self.sp else lambda x, *_: x)(experts"),
        "part_of",
    ),
    (7, 6, S7, ORDERED, "chosen.repeat(1, group.size, 1)", "balanced_by_own_tokens"),
    (7, 6, S7, RECORD, "            if ep > 8:\n                record", "experts_summed_over_all_data"),
    (7, 6, S7, ROUTER, "            pass", "router_not_summed_over_tp"),
]
SHOWN = ("ignored_targets_counted", "g_sums_in_backward_too")  # by default


@pytest.mark.parametrize(
    "case",
    [pytest.param(w, marks=() if w[5] in SHOWN else pytest.mark.exhaustive, id=w[5][:20]) for w in WRONG],
)
def test_a_wrong_file_loses_its_task_alone_and_is_told_why(tmp_path, case):
    """The grader imports the student's file: the fault costs points of its task, is named, and costs no other's."""
    number, task, module, right, wrong, says = case
    found = handed_in(tmp_path / "lab", number, change={module: (right, wrong)})
    results = judged(found, task)
    assert sum(r.earned for r in results) < found.lab.tasks[task - 1].points
    assert re.search(says, " ".join(r.text for r in results)), [r.text for r in results]
    other = task - 1 or task + 1
    assert not [r.text for r in judged(found, other) if r.text]


class Faulty(Bench):
    """A bench on which a student has handed in the project's code with one fault."""

    fault = ""

    def ranks(self, size: int, function: Callable, *args: Any, project: bool = False) -> Run:
        """As ever, the ranks under the fault. Raises Failed if it makes them fail."""
        if project:
            return super().ranks(size, function, *args, project=True)
        name = f"{function.__module__}:{function.__name__}"
        world = [[self.fault], name, args]
        answers = [found for (found,) in ranks.run(World(), size, "labs.bench:under_faults", tuple(world), 60)]
        run = Run(answers, size, name, args)
        for answer in answers:
            if isinstance(answer, dict) and answer.keys() == {""}:
                raise self.recognised(Failed(answer[""]), run)
        return run


FAULTS = [(lab, task.number, fault) for lab in LABS for task in load(lab).tasks for fault in task.faults]
TRIED = ("neighbours_rotated", "parts_beside_one_another")  # by default: on one rank and on several


@pytest.mark.parametrize(
    "number, task, fault", [pytest.param(*f, marks=() if f[2] in TRIED else pytest.mark.exhaustive) for f in FAULTS]
)
def test_every_fault_of_a_task_loses_a_criterion_and_is_named(number, task, fault):
    """The project's code with the fault: some criterion of the task fails, and the first that does says its name."""
    lab = load(number)
    bench, texts = Faulty(number, task, ID, World(), lab.tasks[task - 1].faults, 60), []
    bench.fault = fault
    questions = {question.name for question in lab.questions}
    for criterion in lab.tasks[task - 1].criteria:
        try:
            if criterion.check not in questions:
                getattr(lab.module, criterion.check)(bench)
        except (Wrong, Failed) as error:
            texts.append(str(error))
    assert texts and any(f" - {fault}: " in text for text in texts), texts


def test_a_right_file_passes_whatever_the_project_has(tmp_path, monkeypatch):
    """The other way round: with the project's own functions broken, the student's right ones earn the points."""
    found, broken = handed_in(tmp_path / "lab", 4), tmp_path / "broken.py"
    text = path_of(S4).read_text()
    broken.write_text(source.hollow(text, holes(found.lab, S4, found.lab.tasks[3:4])))
    monkeypatch.setattr(grade, "path_of", lambda module: broken)
    assert not [r.text for r in judged(found, 4) if r.text]
    found.sources[S4] = broken.read_text()
    assert not any(r.earned for r in judged(found, 4))


GATHER = "    parts = x.new_empty(group.size, *x.shape)\n"
ALONE = "    if group.rank:\n        return keep_tokens(x, group)\n"
LOOP = "    while True:\n        pass\n"
IDLE = "    import time\n    while True:\n        time.sleep(1)\n"
CLOCK = "    import time\n    time.monotonic = time.time = lambda: 0\n"
DEAF = "    import signal\n    for s in (1, 2, 10, 15):\n        signal.signal(s, signal.SIG_IGN)\n"
HOSTILE = {  # name: right, wrong, what every failing criterion says
    "a syntax error": ("def gather_tokens(", "def gather_tokens((", "SyntaxError"),
    "a loop that sleeps": (GATHER, IDLE, r"no answer within .* in gather_tokens"),
    "an endless loop": (GATHER, LOOP, r"no answer within .* in gather_tokens"),
    "a rank that leaves out a collective": (GATHER, ALONE + GATHER, "no answer|do not match|without an answer"),
    "os._exit": (GATHER, "    import os\n    os._exit(0)\n", "ended without an answer"),
    "a crash of one rank": (
        GATHER,
        "    import os\n    group.rank or os.abort()\n" + GATHER,
        "ended without an answer",
    ),
    "os._exit at import": ("@dataclass\n", "import os\nx = os._exit(0)\n\n\n@dataclass\n", "ended without an answer"),
    "a patched clock": (GATHER, CLOCK + LOOP, "no answer"),
    "ignored signals": (GATHER, DEAF + LOOP, "no answer"),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "a loop that sleeps" else pytest.mark.exhaustive) for n in HOSTILE],
)
def test_hostile_code_costs_its_criteria_and_never_the_run(tmp_path, name):
    """Every criterion of the task says why; nothing is left running."""
    old, new, says = HOSTILE[name]
    found = handed_in(tmp_path / "lab", 4)
    found.sources[S4] = found.sources[S4].replace(old, new, 1)
    for seconds in (4, 12, 60):  # a busy machine may need longer to come as far as the student's line
        results = judged(found, 4, seconds=seconds)
        if all(re.search(says, r.text) for r in results):
            break
    assert not any(r.earned for r in results) and all(re.search(says, r.text) for r in results), results
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    names = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    assert not [name for name in names if name == Path("/proc/self/cmdline").read_text()]


# --- for teachers ----------------------------------------------------------------------------------------------------


def test_grading_writes_gradescopes_fields_and_a_table(tmp_path, capsys, monkeypatch):
    """Exit status 0 whatever is handed in; results.json has the public specification's fields; --csv has a row each."""
    cheap = load(4).tasks[-1]
    monkeypatch.setattr(grade, "load", lambda number: course.Lab(4, "t", "n", load(4).files, [cheap]))
    handed_in(tmp_path / "right", 4)
    handed_in(tmp_path / "empty", 4, [])
    (tmp_path / "other").mkdir()
    (tmp_path / "empty" / "answers.toml").write_text('id = "x"\nbytes_per_step = [')
    target, table = tmp_path / "results.json", tmp_path / "points.csv"
    assert main(["grade", str(tmp_path / "right"), "--gradescope", str(target)]) == 0
    found = json.loads(target.read_text())
    assert found["score"] == cheap.points == sum(test["max_score"] for test in found["tests"])
    for test in found["tests"]:
        assert test.keys() == {"name", "number", "score", "max_score", "status", "output", "visibility"}
        assert test["status"] == "passed" and test["visibility"] == "visible"
    folders = [str(tmp_path / name) for name in ("right", "empty", "other")]
    assert main(["grade", *folders, "--csv", str(table)]) == 0
    rows = table.read_text().splitlines()
    assert len(rows) == 4 and f",{cheap.points},{cheap.points}," in rows[1] and ",0," in rows[2] and "no lab" in rows[3]
    assert main(["check", str(tmp_path / "right"), "--task", "6", "--gradescope", str(target)]) == 0
    assert main(["check", str(tmp_path / "empty"), "--task", "6"]) == 1
    assert "answers.toml" in capsys.readouterr().out
