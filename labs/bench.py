"""What a criterion works with: inputs drawn from the student's id, runs on ranks, comparisons that name a fault."""

import importlib
import math
import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from labs import ranks
from labs.ranks import Failed, World, complaint

# Norm-wise, for whatever order and kernels a processor adds in: a number of roundings of half a unit in the last place.
BOUND = 1e-10  # in fp64: a million
IN_FP32 = 1e-5  # 170; a value in 16 bits, or one rounding that is left out or made twice, is further off
IN_BF16 = 2**-8  # one of the largest, or three at random: each has a square mean of 0.41 of it


class Wrong(Exception):
    """A criterion is not met; the text is one line with the numbers."""


def numbers(seed: int, name: str, *shape: int) -> Tensor:
    """Normal numbers in fp64, a pure function of its arguments, so that ranks and grader draw the same."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed} {name}").getrandbits(60))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def applied(name: str) -> AbstractContextManager:
    """The fault called `name`, of labs/faults.py or of tests/faults.py."""
    from labs import faults as own
    from tests import faults

    return getattr(own if hasattr(own, name) else faults, name)()


def meaning(name: str) -> str:
    """The first line of a fault's docstring."""
    from labs import faults as own
    from tests import faults

    text = getattr(own if hasattr(own, name) else faults, name).__doc__
    return " ".join(text.split())


def under_faults(names: list[str], function: str, args: tuple) -> list[Any]:
    """Runs on every rank: what `function` returns under each fault; where it fails, {"": why}."""
    module, _, name = function.partition(":")
    call, found = getattr(importlib.import_module(module), name), []
    for fault in names:
        try:
            with applied(fault):
                found.append(call(*args))
        except Exception as error:
            found.append({"": complaint(error, [])})
    return found


def distance(a: Any, b: Any) -> float:
    """Norm-wise relative difference of two numbers, tensors or lists of them; 0 or inf for anything else."""
    if isinstance(a, int | float | Tensor) and isinstance(b, int | float | Tensor):
        a, b = (torch.as_tensor(x).double() for x in (a, b))
        if a.shape != b.shape or not a.isfinite().all():
            return math.inf
        scale = b.norm().item()
        return (a - b).norm().item() / (scale or 1.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max(map(distance, a, b), default=0.0)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return max((distance(a[key], b[key]) for key in b), default=0.0)
    return 0.0 if a == b else math.inf


def first_difference(found: Any, expected: Any, bound: float) -> str:
    """In words, with the numbers."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor):
        if found.shape != expected.shape:
            return f"has shape {list(found.shape)} instead of {list(expected.shape)}"
        off = ~torch.isclose(
            found.double(), expected.double(), rtol=bound, atol=bound * float(expected.double().norm())
        )
        place = off.nonzero()[0].tolist() if off.any() else [0] * found.dim()
        a, b = (float(x[tuple(place)]) for x in (found, expected))
        return f"differs by {distance(found, expected):.3g} (relative): at {place} it is {a:.6g} instead of {b:.6g}"
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys(), key=str):
            a, b = found.get(key, "nothing"), expected.get(key, "nothing")
            if distance(a, b) > bound:
                return f"{key} {first_difference(a, b, bound)}"
    if isinstance(found, list) and isinstance(expected, list):
        for place, (a, b) in enumerate(zip(found, expected, strict=False)):
            if distance(a, b) > bound:
                return f"at {place}: {first_difference(a, b, bound)}"
        return f"has {len(found)} entries instead of {len(expected)}"
    return f"is {found} instead of {expected}"


def factor(found: Any, expected: Any) -> float:
    """c, if `found` is c times `expected` and c is not 1; else nan."""
    if not all(isinstance(x, int | float | Tensor) for x in (found, expected)):
        return math.nan
    a, b = (torch.as_tensor(x).double().flatten() for x in (found, expected))
    if a.shape != b.shape or not b.norm() or not a.isfinite().all():
        return math.nan
    c = float(a @ b / (b @ b))
    return c if abs(c - 1) > 1e-6 and distance(a, c * b) < 1e-6 * max(1.0, abs(c)) else math.nan


class Run:
    """The answers of all ranks, and what has to be done again to find them under a fault."""

    def __init__(self, answers: list[Any], size: int, function: str, args: tuple):
        self.answers, self.size, self.function, self.args = answers, size, function, args


class Bench:
    """One task of one student. All draws are functions of the id and the task's number, the same in every criterion."""

    def __init__(self, lab: int, task: int, student: str, world: World, faults: list[str], seconds: float):
        self.world, self.faults, self.seconds = world, faults, seconds
        self.random = random.Random(f"{student} lab {lab} task {task}")
        self.runs: dict[tuple, Run | Failed] = {}
        self.under: dict[tuple, list] = {}

    def draws(self) -> random.Random:
        """A generator that starts anew: each criterion of a task draws the same."""
        copy = random.Random()
        copy.setstate(self.random.getstate())
        return copy

    def ranks(self, size: int, function: Callable, *args: Any, project: bool = False) -> Run:
        """Run a function of the lab's module on ranks with the student's code (or `project`: ours). Raises Failed.

        Runs are kept, so criteria can share one. `args`: numbers and strings.
        """
        key = size, function.__name__, args, project
        if key not in self.runs:
            name = f"{function.__module__}:{function.__name__}"
            try:
                world = World() if project else self.world
                self.runs[key] = Run(ranks.run(world, size, name, args, self.seconds), size, name, args)
            except Failed as failed:
                self.runs[key] = failed if project else self.recognised(failed, Run([], size, name, args))
        if isinstance(self.runs[key], Failed):
            raise self.runs[key]
        return self.runs[key]

    def recognised(self, failed: Failed, run: Run) -> Failed:
        """The failure with the name of a fault under which the project's code fails with the same words."""
        said = re.search(r"(\w+Error: .*?)( \([\w.]+:\d+ in \w+\))?$", str(failed))
        for name, answers in self.faulty(run).items() if said and self.faults else ():
            if any(answer == {"": said[1]} for answer in answers):
                return Failed(f"{failed} - {name}: {meaning(name)}")
        return failed

    def same(self, run: Run, expected: Callable[[int], dict[str, Any]], bound: float = BOUND):
        """Each rank's answer has, under each key of `expected(rank)`, that value. Raises Wrong at the first other."""
        for rank in range(run.size):
            for key, value in expected(rank).items():
                found = run.answers[rank][key]
                if not distance(found, value) <= bound:
                    where = f"rank {rank} of {run.size}: " if run.size > 1 else ""
                    text = f"{where}{key} {first_difference(found, value, bound)}"
                    raise Wrong(text + self.kind(run, rank, key, found, lambda r, k=key: expected(r).get(k), bound))

    def kind(self, run: Run, rank: int, key: str, found: Any, expected: Callable[[int], Any], bound: float) -> str:
        """What fault this is, if its signature is known: its name after " - "."""
        value = expected(rank)
        for name, answers in self.faulty(run).items():
            theirs = answers[rank].get(key)
            if theirs is not None and distance(found, theirs) < 1e-8 and distance(theirs, value) > bound:
                return f" - {name}: {meaning(name)}"
        if isinstance(found, Tensor) and found.numel() and not found.any():
            return " - it is zero: nothing has been written there"
        for other in range(run.size):
            if other != rank and distance(found, expected(other)) < 1e-8:
                return f" - it is what rank {other} should have"
        return self.words(factor(found, value), run.size)

    @staticmethod
    def words(c: float, n: int) -> str:
        """What a wrong scale tells."""
        if math.isnan(c):
            return ""
        kinds = {-1: "the negative of what it should be", 2: "twice what it should be: counted or summed twice"}
        kinds[0.5] = "half of what it should be"
        if n > 1:
            kinds[n] = f"{n} times too large: summed over the {n} ranks although it was complete (or summed twice)"
            kinds[1 / n] = f"1/{n} of what it should be: averaged over the {n} ranks, where a sum is wanted"
        for value, text in kinds.items():
            if abs(c - value) < 1e-6:
                return f" - {text}"
        return f" - {c:.6g} times what it should be"

    def faulty(self, run: Run) -> dict[str, list]:
        """By fault: the answers of all ranks of the project's code with that fault. Found when first needed."""
        key = run.size, run.function, run.args
        if key not in self.under:
            try:
                args = (self.faults, run.function, run.args)
                found = ranks.run(World(), run.size, "labs.bench:under_faults", args, max(self.seconds / 2, 20.0))
            except Failed:
                found = [[]] * run.size
            self.under[key] = found
        return dict(zip(self.faults, zip(*self.under[key], strict=True), strict=False))
