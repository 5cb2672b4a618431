"""Judge a folder: every criterion of every task, what it found in one line, and the points."""

import importlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import UserError
from extras.labs import ranks
from extras.labs.course import FOUND, ROOT, Case, Criterion, Lab, Row, at_most, path_of
from extras.labs.ranks import LATE, Failed, World
from extras.labs.suite import KEPT, Suite, kept, plain_rows, there

CHANGED = "what should be found is another number than it is: the code has changed its judge"
SEEDS = 4  # different inputs of a task: so what the project's file finds in them serves several folders
finds: dict[str, list[list[Row]] | Failed] = {}  # what the project's file finds in a case, by `key_of`


@dataclass
class Folder:
    """What a student has handed in, in memory: nothing that runs later can change it."""

    path: Path
    lab: Lab
    student: str  # the id that numbers are drawn from
    answer: Any
    sources: dict[str, str]  # by module
    files: dict[str, bytes]  # other Python files, by name
    trouble: str = ""  # why answers.toml could not be read
    attempts: int = 0
    others: tuple[Path, ...] = ()  # folders that are graded with it, which its code must not change
    left: list[float] = field(default_factory=lambda: [math.inf])  # seconds that its code's runs may still take


@dataclass
class Result:
    """What a criterion has earned, and why not all; task 0 is the question."""

    task: int
    says: str
    points: int
    text: str

    @property
    def earned(self) -> int:
        """All of its points, or none."""
        return 0 if self.text else self.points


def distance(a: Any, b: Any) -> float:
    """Norm-wise relative difference of two numbers or tensors; inf if they differ in shape or in what is not finite."""
    a, b = (torch.as_tensor(x) for x in (a, b))
    if a.shape != b.shape or a.is_complex() != b.is_complex():
        return math.inf
    a, b, finite = a.double(), b.double(), b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite], b[~finite]):
        return math.inf
    a, b = a[finite], b[finite]
    return (a - b).norm().item() / (b.norm().item() or 1.0)


def is_number(x: Any) -> bool:
    """Whether a value is one; True and False are none."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def mistake(found: Any, expected: Any, bound: float) -> str:
    """In words, the first thing that is wrong with a number, a tensor, a text or a container of them; or ""."""
    both = found, expected
    if isinstance(expected, dict) and "at most" in expected:
        fits = is_number(found) and found <= expected["at most"]
        return "" if fits else f"is {found}, and has to be at most {expected['at most']:g}"
    if all(isinstance(x, dict) for x in both):
        keys = sorted(found.keys() | expected.keys(), key=str)
        texts = ((key, mistake(found.get(key, "nothing"), expected.get(key, "nothing"), bound)) for key in keys)
        return next((f"{key} {text}" for key, text in texts if text), "")
    if isinstance(found, list) and isinstance(expected, list | tuple):
        return mistake_in_list(found, expected, bound)
    if all(isinstance(x, Tensor) for x in both):
        return mistake_in_tensor(found, expected, bound)
    if all(is_number(x) or isinstance(x, Tensor) for x in both):
        right = distance(found, expected) <= bound
    else:
        right = type(found) is type(expected) and found == expected
    if right:
        return ""
    return f"- {str(found)[:120]}" if isinstance(expected, str) and not expected else instead(found, expected)


def instead(found: Any, expected: Any) -> str:
    """Both values, as far as a line has room."""
    return f"is {str(found)[:120]} instead of {str(expected)[:120]}"


def mistake_in_list(found: list, expected: Sequence, bound: float) -> str:
    """The same of a list: all of it, if it is short; else its first wrong entry, or its length."""
    pairs = enumerate(zip(found, expected, strict=False))
    wrong = [f"at {i}: {text}" for i, (a, b) in pairs if (text := mistake(a, b, bound))]
    if not wrong and len(found) == len(expected):
        return ""
    if len(f"{found}{expected}") <= 100:
        return instead(found, expected)
    return wrong[0] if wrong else f"has {len(found)} entries, and should have {len(expected)}"


def mistake_in_tensor(found: Tensor, expected: Tensor, bound: float) -> str:
    """The same of a tensor: its shape; or how far it is off, and where one sees it."""
    if (off := distance(found, expected)) <= bound:
        return ""
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
    limit = bound * float(expected.double().norm())
    wrong = ~torch.isclose(found.double(), expected.double(), rtol=bound, atol=limit)
    place = tuple(wrong.nonzero()[0].tolist() if wrong.any() else [0] * found.dim())
    a, b = (float(x.double()[place]) for x in (found, expected))
    return f"differs by {off:.3g} (relative): at {[*place]} it is {a:.6g} instead of {b:.6g}"


def scale_words(found: Any, expected: Any, n: int) -> str:
    """What it tells if `found` is a multiple of `expected`, on n ranks; "" if it is not."""
    if not all(isinstance(x, float | Tensor) for x in (found, expected)):
        return ""
    a, b = (torch.as_tensor(x).double().flatten() for x in (found, expected))
    if a.shape != b.shape or not b.norm() or not (a + b).isfinite().all():
        return ""
    c = float(a @ b / (b @ b))
    if not 1e-3 < abs(c) < 1e4 or abs(c - 1) < 1e-6 or distance(a, c * b) > 1e-6:
        return ""
    kinds = {-1.0: "the negative of what it should be", 2.0: "twice what it should be: counted or summed twice?"}
    kinds[0.5] = "half of what it should be"
    if n > 1:
        kinds[float(n)] = f"{n} times too large: summed over the {n} ranks although it was complete (or summed twice)?"
        kinds[1 / n] = f"1/{n} of what it should be: averaged over the {n} ranks, where a sum is wanted?"
    return next((text for value, text in kinds.items() if abs(c - value) < 1e-6), f"{c:.4g} times what it should be")


def key_of(case: Case) -> str:
    """By which what the project's file finds in a case is kept."""
    return f"{type(case).__module__} {type(case).__name__} {case.seed} {case.mesh} {case.sizes}"


def cases_of(lab: Lab, number: int, turn: int) -> Iterator[list[Case]]:
    """By criterion of a task, what this copy of the project can judge, under one of the seeds; some share cases."""
    seed, made = random.Random(f"lab {lab.number} task {number} {turn}").randrange(10**6), {}
    for criterion in lab.task(number).criteria:
        kind = criterion.kind
        some = [sizes for sizes in criterion.cases if kind is not Suite or there(sizes["name"])]
        made |= {(kind, str(sizes)): kind(seed, **sizes) for sizes in some if (kind, str(sizes)) not in made}
        yield [made[kind, str(sizes)] for sizes in some]


def learn(lab: Lab, cases: list[Case]):
    """Let the project's file find what it finds, in processes of its own; a copy with holes has kept it."""
    known = kept()["finds"]
    finds.update((key, known[key]) for key in map(key_of, cases) if key in known)
    for n in sorted({case.ranks for case in cases}):
        some = {key_of(case): case for case in cases if case.ranks == n and key_of(case) not in finds}
        finds.update(zip(some, ranks.run(World(lab.modules), [*some.values()], 120.0), strict=True))


def keep(lab: Lab, target: Path):
    """For a handout: write what the project's file finds in a lab's cases, but in rows of variants and patches."""
    rows = plain_rows(lab)
    tasks = ((number, turn) for number in range(1, len(lab.tasks) + 1) for turn in range(SEEDS))
    cases = [case for task in tasks for some in cases_of(lab, *task) for case in some]
    cases = [case for case in cases if not isinstance(case, Suite) or case.name in rows]
    learn(lab, cases)
    found = {key_of(case): finds[key_of(case)] for case in cases}
    for key, answers in found.items():
        if isinstance(answers, Failed):
            raise UserError(f"the project's own {lab.modules[-1]}.py fails in {key}: {answers}")
    torch.save(dict(rows=rows, finds=found), target)


def resolved(outcome: list[list[Row]], right: list[list[Row]]) -> list[list[Row]]:
    """Rows in which what should be found stands in full: it comes from the project's own run, rows of the same key."""
    found: list[list[Row]] = []
    for rows, ours in zip(outcome, right, strict=True):
        known: dict[str, list[Row]] = {row[0]: [] for row in (*ours, *rows)}
        for row in ours:
            known[row[0]].append(row)
        found.append([in_full(row, known[row[0]].pop(0) if known[row[0]] else None) for row in rows])
        found[-1] += [(key, "nothing", theirs) for rest in known.values() for key, theirs, _ in rest]
    return found


def in_full(row: Row, ours: Row | None) -> Row:
    """A student's row, and what should be found by the project's; None: it has no such row.

    What a student's process says should be found is never used; if it is another value, the row says so.
    """
    key, value, wanted = row
    _, theirs, clean = ours or (key, "nothing", wanted)
    if isinstance(wanted, dict) and wanted == FOUND:
        return key, value, theirs
    if isinstance(wanted, dict) and "at most times" in wanted:
        return key, value, at_most(theirs * wanted["at most times"] if isinstance(theirs, int | float) else 0.0)
    changed = str(wanted) != str(clean) if isinstance(wanted, dict) else mistake(wanted, clean, 1e-8)
    return key, CHANGED if changed else value, clean


class Judge:
    """One task of one student. `output`: a file for what the student's code prints.

    `strict`: no words about what kind of mistake it is; the student's code does not see the project's file, and changes
    none of `folder.others`.
    """

    def __init__(
        self, folder: Folder, task: int, seconds: float = 60.0, output: Path | None = None, strict: bool = False
    ):
        self.folder, self.number, self.seconds, self.output, self.strict = folder, task, seconds, output, strict
        self.walls = (ROOT, *folder.others, *map(path_of, folder.lab.modules)) if strict else ()
        self.lab, self.task, self.late = folder.lab, folder.lab.task(task), False  # late: one run took too long
        self.project = {module: path_of(module).read_text() for module in self.lab.modules}
        turn = random.Random(f"{folder.student} lab {self.lab.number} task {task}").randrange(SEEDS)
        self.cases = [*cases_of(self.lab, task, turn)]  # by criterion
        for module in (self.lab.modules[-1], "torch._dynamo"):  # the second takes an optimizer's first step seconds
            importlib.import_module(module)  # and what it imports: forked processes have it then

    def results(self) -> Iterator[Result]:
        """One by one. What fails with the project's functions in other tasks' holes is tried as the file stands."""
        criteria, written = self.task.criteria, sum(len(task.holes) for task in self.lab.tasks)
        written -= sum(text.count("raise NotImplementedError(") for text in self.folder.sources.values())
        first = self.texts([i for i, c in enumerate(criteria) if not c.whole], given=True)
        again = {i for i, text in first.items() if text and "not written yet" not in text}
        again = again if written > len(self.task.holes) else set()  # else there is nothing of other tasks to rely on
        second = self.texts([i for i, c in enumerate(criteria) if c.whole or i in again], given=False)
        for i, criterion in enumerate(criteria):
            both = [texts[i] for texts in (first, second) if i in texts]
            yield Result(self.number, criterion.says, criterion.points, "" if "" in both else both[0])

    def texts(self, places: list[int], given: bool) -> dict[int, str]:
        """What is wrong, by place, of some criteria, or "". `given`: other tasks' holes are the project's."""
        own = {module: self.lab.holes(module, self.number).keys() for module in self.lab.modules}
        rest = {module: self.lab.holes(module).keys() - own[module] if given else () for module in self.lab.modules}
        world = World(
            *(self.lab.modules, self.folder.sources, self.project, rest, own, self.folder.files, self.output),
            left=self.folder.left,
            walls=self.walls,
        )
        cases = dict.fromkeys(case for i in places for case in self.cases[i])  # criteria may share them
        learn(self.lab, [*cases])
        outcomes: dict[Case, list[Any] | Failed] = {}
        for n in sorted({case.ranks for case in cases}):
            some = [case for case in cases if case.ranks == n]
            if self.late:
                outcomes |= dict.fromkeys(some, Failed(LATE))
                continue
            for case, outcome in zip(some, ranks.run(world, some, self.seconds), strict=True):
                self.late = self.late or (isinstance(outcome, Failed) and outcome.late)
                right = finds[key_of(case)]
                if isinstance(right, Failed):
                    outcome = Failed(f"this copy of the project cannot judge it: {right}")
                outcomes[case] = outcome if isinstance(outcome, Failed) else resolved(outcome, right)
        found = dict.fromkeys(places, "")
        for i in places:
            if not self.cases[i]:
                copy = f"use one made by python -m extras.labs handout {self.lab.number}"
                found[i] = f"this copy cannot judge it: {'the whole project can' if KEPT.exists() else copy}"
            wrong = [self.wrong(self.task.criteria[i], case, outcomes[case]) for case in self.cases[i]]
            found[i] = next(filter(None, sorted(wrong, key=LATE.__eq__)), found[i])
        return found

    def wrong(self, criterion: Criterion, case: Case, outcome: list[Any] | Failed) -> str:
        """What is wrong with an outcome; "" if nothing is."""
        where, bound = f"[{case}] " if len(criterion.cases) > 1 else "", case.bound or criterion.bound
        if isinstance(outcome, Failed):
            if str(outcome).startswith("not written yet"):
                ours = f"lab {self.lab.number}," in str(outcome)
                return f"{outcome}{'' if ours else f'; take a copy: python -m extras.labs handout {self.lab.number}'}"
            return str(outcome) if outcome.fatal or str(outcome) == LATE else f"{where}{outcome}"
        for rank, rows in enumerate(criterion.judged(rows) for rows in outcome):
            for key, found, value in rows:
                if text := mistake(found, value, bound):
                    who = f"rank {rank} of {case.ranks}: " if case.ranks > 1 else ""
                    more = "" if self.strict else self.words(criterion, case, outcome, rank, (key, found, value))
                    return f"{where}{who}{key} {text}{more and f' - {more}'}"
            if not rows:
                return f"{where}nothing was found"
        return ""

    def words(self, criterion: Criterion, case: Case, outcome: list[list[Row]], rank: int, row: Row) -> str:
        """What kind of mistake this may be."""
        key, found, value = row
        if text := case.explain(rank, key, found, value):
            return text
        bound = case.bound or criterion.bound
        wrong = {name: number for name, number, right in outcome[rank] if mistake(number, right, bound)}
        for name in (name for name in wrong if "nobody has waited for" in name and name != key):
            return f"a wait is missing: {name}: {wrong[name]}"
        for fault, answers in self.under_faults(case):
            theirs = {name: number for name, number, _ in answers[rank]} if isinstance(answers, list) else {}
            if not any(mistake(number, theirs.get(name, ""), 1e-8) for name, number in wrong.items()):
                return f"the same numbers as with {fault}"
        if bound < 1e-6 and not mistake(found, value, 1e-6):
            return "as near as roundings of fp32 would be: is anything in fp32 that should be in fp64?"
        if isinstance(found, Tensor) and found.numel() and not found.any():
            return "it is zero: has anything been written there?"
        for other, rows in enumerate(outcome):
            if other != rank and any(name == key and not mistake(found, theirs, 1e-8) for name, _, theirs in rows):
                return f"the same numbers as rank {other} should have"
        return scale_words(found, value, case.ranks)

    def under_faults(self, case: Case) -> Iterator[tuple[str, Any]]:
        """(fault and meaning, what the project's code answers with it); none in a copy without tests or solutions."""
        for name in () if isinstance(case, Suite) else self.lab.faults(self.number):
            faults = importlib.import_module("extras.tests.faults")
            world = World(self.lab.modules, before=lambda _job, name=name, faults=faults: faults.injected(name))
            (answers,) = ranks.run(world, [case], 20.0)
            if isinstance(answers, list):
                answers = resolved(answers, finds[key_of(case)])
            yield f"{name}: {faults.FAULTS[name].meaning}", answers


def check(
    folder: Folder, *tasks: int, seconds: float = 60.0, output: Path | None = None, strict: bool = False
) -> Iterator[Result]:
    """The results of some tasks, one by one; 0 is the question. `seconds`: the limit of one run."""
    for number in tasks:
        if number:
            yield from Judge(folder, number, seconds, output, strict).results()
        else:
            text = folder.trouble or folder.lab.question.judge(folder.student, folder.answer)
            yield Result(0, "the question in answers.toml", folder.lab.question.points, text)
