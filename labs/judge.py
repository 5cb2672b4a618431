"""Judge a folder: every criterion of every task, what it found in one line, and the points."""

import ast
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from labs import ranks
from labs.course import Case, Criterion, Lab, Most, cases_of, path_of
from labs.ranks import Failed, World
from labs.source import definitions, facts, is_hole


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
    """Norm-wise relative difference of two numbers, tensors or containers of them; 0 or inf for anything else."""
    if isinstance(b, Most):
        number = isinstance(a, int | float) and not isinstance(a, bool)
        return 0.0 if number and a <= b.value else math.inf
    if isinstance(a, bool | str) or isinstance(b, bool | str):
        return 0.0 if type(a) is type(b) and a == b else math.inf
    if isinstance(a, int | float | Tensor) and isinstance(b, int | float | Tensor):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape != b.shape or a.is_complex() != b.is_complex()):
            return math.inf
        a, b = (torch.as_tensor(x).double() for x in (a, b))
        if a.shape != b.shape or not torch.equal(a.isfinite(), b.isfinite()):
            return math.inf
        same = ~b.isfinite()
        if not torch.equal(a[same], b[same]):
            return math.inf
        a, b = a[~same], b[~same]
        scale = b.norm().item()
        return (a - b).norm().item() / (scale or 1.0)
    if isinstance(a, list) and isinstance(b, list | tuple) and len(a) == len(b):
        return max(map(distance, a, b), default=0.0)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((distance(a[key], b[key]) for key in b), default=0.0)
    return 0.0 if a is None and b is None else math.inf


def difference(found: Any, expected: Any, bound: float) -> str:
    """In words, with the first numbers that differ."""
    if isinstance(expected, Most):
        return f"is {found}, and has to be at most {expected.value:g}"
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
        if not found.numel():
            return "differs"
        limit = bound * float(expected.double().norm())
        off = ~torch.isclose(found.double(), expected.double(), rtol=bound, atol=limit)
        place = off.nonzero()[0].tolist() if off.any() else [0] * found.dim()
        a, b = (float(x[tuple(place)]) for x in (found, expected))
        return f"differs by {distance(found, expected):.3g} (relative): at {place} it is {a:.6g} instead of {b:.6g}"
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys(), key=str):
            a, b = found.get(key, "nothing"), expected.get(key, "nothing")
            if not distance(a, b) <= bound:
                return f"{key} {difference(a, b, bound)}"
    if isinstance(found, list) and isinstance(expected, list | tuple) and len(f"{found}{expected}") > 100:
        for place, (a, b) in enumerate(zip(found, expected, strict=False)):
            if not distance(a, b) <= bound:
                return f"at {place}: {difference(a, b, bound)}"
        return f"has {len(found)} entries instead of {len(expected)}"
    return f"is {str(found)[:120]} instead of {str(expected)[:120]}"


def factor(found: Any, expected: Any) -> float:
    """c, if `found` is c times `expected` and c is not 1; else nan."""
    if not all(isinstance(x, float | Tensor) for x in (found, expected)):
        return math.nan
    a, b = (torch.as_tensor(x).double().flatten() for x in (found, expected))
    if a.shape != b.shape or not b.norm() or not a.isfinite().all() or not b.isfinite().all():
        return math.nan
    c = float(a @ b / (b @ b))
    near = 1e-3 < abs(c) < 1e4 and abs(c - 1) > 1e-6
    return c if near and distance(a, c * b) < 1e-6 else math.nan


def scale_words(c: float, n: int) -> str:
    """What a wrong scale tells."""
    if math.isnan(c):
        return ""
    kinds = {-1.0: "the negative of what it should be", 2.0: "twice what it should be: counted or summed twice?"}
    kinds[0.5] = "half of what it should be"
    if n > 1:
        kinds[float(n)] = f"{n} times too large: summed over the {n} ranks although it was complete (or summed twice)?"
        kinds[1 / n] = f"1/{n} of what it should be: averaged over the {n} ranks, where a sum is wanted?"
    return next((text for value, text in kinds.items() if abs(c - value) < 1e-6), f"{c:.4g} times what it should be")


class Judge:
    """One task of one student. `output`: a file for what the student's code prints."""

    def __init__(self, folder: Folder, task: int, seconds: float = 60.0, output: Path | None = None):
        self.folder, self.number, self.seconds, self.output = folder, task, seconds, output
        self.lab, self.task = folder.lab, folder.lab.task(task)
        self.project = {module: path_of(module).read_text() for module in self.lab.modules}
        self.wanted = {module: set(self.lab.holes(module, task)) for module in self.lab.modules}
        for module in (self.lab.modules[-1], "torch._dynamo"):  # the second takes an optimizer's first step seconds
            importlib.import_module(module)  # and what it imports: forked processes have it then

    def world(self, given: bool) -> World:
        """The student's modules; with `given`, the holes of other tasks are the project's, as far as it has them."""
        others = {}
        for module in self.lab.modules if given else ():
            ours = definitions(ast.parse(self.project[module]))
            others[module] = {h for h in self.lab.holes(module) if not is_hole(ours[h])} - self.wanted[module]
        sources = self.folder.sources
        return World(self.lab.modules, sources, self.project, others, self.wanted, self.folder.files, self.output)

    def results(self) -> Iterator[Result]:
        """One by one. What fails with the project's other holes is tried with the file as it stands."""
        criteria = self.task.criteria
        texts = self.pass_over([i for i, c in enumerate(criteria) if not c.whole], self.world(given=True))
        again = [i for i, text in texts.items() if text and "not written yet" not in text and self.shared]
        stands = self.pass_over([i for i, c in enumerate(criteria) if c.whole or i in again], self.world(given=False))
        for place, text in stands.items():
            texts[place] = texts.get(place, text) and text and texts.get(place, text)
        for place, criterion in enumerate(self.task.criteria):
            yield Result(self.number, criterion.says, criterion.points, texts[place])

    @cached_property
    def shared(self) -> bool:
        """Whether the student has written other tasks' holes, which this one's may rely on."""
        holes = {module: self.lab.holes(module) for module in self.lab.modules}
        try:
            return ranks.call(facts, self.folder.sources, self.project, holes)["written"] > len(self.task.holes)
        except Failed:
            return False

    def pass_over(self, places: list[int], world: World) -> dict[int, str]:
        """What is wrong, by place, of some criteria; "" if nothing is."""
        by_place = {i: cases_of(self.lab, self.number, self.task.criteria[i], self.folder.student) for i in places}
        jobs = {case.identity: case for cases in by_place.values() for case in cases}  # criteria may share a case
        outcomes: dict[str, list[Any] | Failed] = {}
        for n in sorted({case.ranks for case in jobs.values()}):
            some = [name for name, case in jobs.items() if case.ranks == n]
            found = ranks.run(world, [jobs[name] for name in some], self.seconds)
            outcomes |= zip(some, found, strict=True)
        texts = dict.fromkeys(places, "")
        for place, cases in by_place.items():
            for case in cases:
                criterion = self.task.criteria[place]
                texts[place] = texts[place] or self.wrong(criterion, jobs[case.identity], outcomes[case.identity])
        return texts

    def wrong(self, criterion: Criterion, case: Case, outcome: list[Any] | Failed) -> str:
        """What is wrong with an outcome; "" if nothing is."""
        where = f"[{case}] " if len(criterion.cases) > 1 else ""
        if isinstance(outcome, Failed):
            if str(outcome).startswith("not written yet"):
                ours = f"lab {self.lab.number}," in str(outcome)
                return f"{outcome}{'' if ours else f'; use a copy made by python -m labs handout {self.lab.number}'}"
            return str(outcome) if outcome.fatal else f"{where}{outcome}"
        for rank in range(case.ranks):
            found, expected = outcome[rank], criterion.wanted(rank, case)
            for key, value in expected.items():
                if not isinstance(found, dict) or key not in found:
                    return f"{where}there is no {key}"
                if not distance(found[key], value) <= criterion.bound:
                    who = f"rank {rank} of {case.ranks}: " if case.ranks > 1 else ""
                    text = f"{where}{who}{key} {difference(found[key], value, criterion.bound)}"
                    more = self.words(criterion, case, rank, key, found[key], value)
                    return f"{text} - {more}" if more else text
        return ""

    def words(self, criterion: Criterion, case: Case, rank: int, key: str, found: Any, value: Any) -> str:
        """What kind of mistake this may be."""
        if text := case.explain(rank, key, found, value):
            return text
        for name, answers in self.under_faults(case):
            theirs = answers[rank].get(key) if isinstance(answers, list) and isinstance(answers[rank], dict) else None
            if theirs is not None and distance(found, theirs) < 1e-8 and not distance(theirs, value) <= criterion.bound:
                return f"the same numbers as with {name}: {meaning(name)}"
        if isinstance(found, Tensor) and found.numel() and not found.any():
            return "it is zero: has anything been written there?"
        for other in range(case.ranks):
            if other != rank and distance(found, case.wanted(other).get(key)) < 1e-8:
                return f"the same numbers as rank {other} should have"
        return scale_words(factor(found, value), case.ranks)

    def under_faults(self, case: Case) -> Iterator[tuple[str, Any]]:
        """(fault, what the project's code answers with it); nothing in a copy without tests or solutions."""
        try:
            from tests.faults import FAULTS, injected
        except ImportError:
            return
        names = [name for name in self.task.faults if name in FAULTS]
        if any("raise NotImplementedError(" in text for text in self.project.values()):
            return
        for name in names:
            world = World(self.lab.modules, before=lambda _job, name=name: injected(name))
            (answers,) = ranks.run(world, [case], 20.0)
            yield name, answers


def meaning(name: str) -> str:
    """What a fault of the table means."""
    from tests.faults import FAULTS

    return FAULTS[name].meaning


def check(folder: Folder, *tasks: int, seconds: float = 60.0, output: Path | None = None) -> Iterator[Result]:
    """The results of some tasks, one by one; 0 is the question. `seconds`: the limit of one run."""
    for number in tasks:
        if number:
            yield from Judge(folder, number, seconds, output).results()
        else:
            text = folder.trouble or folder.lab.question.judge(folder.student, folder.answer)
            yield Result(0, "the question in answers.toml", folder.lab.question.points, text)
