"""What a lab consists of. labs/__init__.py says how the parts work together."""

import importlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import UserError

ROOT = Path(__file__).parents[1]

# Norm-wise relative, in fp64: a million roundings, for whatever order and kernels a processor adds in.
BOUND = 1e-10


@dataclass(frozen=True)
class Most:
    """An upper limit, where `expected` would say a number."""

    value: float


class Case:
    """One input of a criterion: `sizes` as attributes, `mesh` (ranks along each dimension), numbers from a seed."""

    def __init__(self, seed: int, mesh: dict[str, int] | None = None, **sizes: Any):
        self.seed, self.mesh, self.sizes = seed, mesh or dict(dp=1), sizes
        self.ranks = math.prod(self.mesh.values())
        vars(self).update(sizes)

    def draw(self, name: str, *shape: int) -> Tensor:
        """Normal numbers in fp64, a pure function of the seed, the name and the shape: the same on all ranks."""
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {name}").getrandbits(60))
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def ids(self, name: str, below: int, *shape: int) -> Tensor:
        """int64 from 0 to below - 1."""
        generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {name}").getrandbits(60))
        return torch.randint(below, shape, generator=generator)

    def __str__(self) -> str:
        ranks = [f"{dim}={n}" for dim, n in self.mesh.items() if n > 1]
        return ", ".join(ranks + [f"{name}={value}" for name, value in self.sizes.items()])


@dataclass(frozen=True)
class Criterion:
    """One demand. `explain(case, rank, key, found, expected)`: more words about a wrong value, or "".

    `keys`: only the keys of `expected` that contain one of these are judged. `whole`: the file is judged as it stands,
    without the project's functions in other tasks' holes.
    """

    says: str
    points: int
    on_rank: Callable[[Any, Case, Any], dict[str, Any]]
    expected: Callable[[int, Case], dict[str, Any]]
    cases: tuple[dict[str, Any], ...]
    bound: float = BOUND
    explain: Callable[[Case, int, str, Any, Any], str] | None = None
    keys: tuple[str, ...] = ()
    whole: bool = False

    def wanted(self, rank: int, case: Case) -> dict[str, Any]:
        """What has to be found, by key."""
        found = self.expected(rank, case)
        return {key: found[key] for key in found if not self.keys or any(word in key for word in self.keys)}


def demands(on_rank: Callable, expected: Callable, cases: tuple, *rows: tuple, **more: Any) -> tuple[Criterion, ...]:
    """Several criteria of the same cases; rows of (what it says, points, keys ...)."""
    return tuple(Criterion(s, points, on_rank, expected, cases, keys=tuple(keys), **more) for s, points, *keys in rows)


@dataclass(frozen=True)
class Task:
    """Some functions to write. `faults`: rows of tests/faults.py to recognise."""

    name: str
    minutes: int
    holes: tuple[str, ...]
    read: str
    hints: tuple[str, str, str]
    criteria: tuple[Criterion, ...]
    faults: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """What the task is worth."""
        return sum(criterion.points for criterion in self.criteria)


@dataclass(frozen=True)
class Question:
    """The written question of a lab. `text` is a format string over what `draw` returns, `answer` is of the same.

    `mistakes`: by what they show, other numbers that a student may have found.
    """

    text: str
    draw: Callable[[random.Random], dict[str, Any]]
    answer: Callable[[dict[str, Any]], float]
    points: int = 2
    mistakes: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = ()

    def values(self, student: str) -> dict[str, Any]:
        """The numbers of a student's question."""
        return self.draw(random.Random(f"{student} {self.text}"))

    def judge(self, student: str, found: Any) -> str:
        """What is wrong with an answer, without the right number; "" if it is within a thousandth."""
        if found in ("", None):
            return "not answered yet: `answer` in answers.toml"
        if isinstance(found, bool) or not isinstance(found, int | float) or not -1e300 < found < 1e300:
            return f"`answer` in answers.toml has to be a number, and is {str(found)[:40]}"
        values = self.values(student)
        right = self.answer(values)
        if abs(found - right) <= 0.001 * abs(right):
            return ""
        for meaning, mistake in self.mistakes:
            other = mistake(values)
            if abs(other - right) > 0.001 * abs(right) and abs(found - other) <= 0.001 * abs(other):
                return f"{found:.12g} is not it: {meaning}"
        return f"{found:.12g} is too {'large' if found > right else 'small'}"


@dataclass(frozen=True)
class Lab:
    """A lab. `modules`: those that the student gets, in the order of their imports; the last is the step."""

    number: int
    title: str
    modules: tuple[str, ...]
    tasks: tuple[Task, ...]
    question: Question
    ranks: int = 4  # of `python -m labs run`
    flags: str = ""  # an example for it

    @property
    def points(self) -> int:
        """What the lab is worth."""
        return sum(task.points for task in self.tasks) + self.question.points

    def holes(self, module: str, *tasks: int) -> dict[str, int]:
        """The holes in a module, of all or some tasks (numbers from 1): name -> task."""
        found = {}
        for number, task in enumerate(self.tasks, 1):
            for hole in task.holes if not tasks or number in tasks else ():
                home, _, name = hole.rpartition(":")
                if (home or self.modules[-1]) == module:
                    found[name] = number
        return found

    def task(self, number: int) -> Task:
        """A task by its number. Raises UserError."""
        if not 1 <= number <= len(self.tasks):
            raise UserError(f"lab {self.number} has tasks 1 to {len(self.tasks)}, and no task {number}")
        return self.tasks[number - 1]


def cases_of(lab: Lab, task: int, criterion: Criterion, student: str) -> list[Case]:
    """The cases of a criterion with the numbers of a student."""
    seed = random.Random(f"{student} lab {lab.number} task {task}").randrange(10**6)
    return [Case(seed, **sizes) for sizes in criterion.cases]


def path_of(module: str) -> Path:
    """The project's file of a module."""
    return ROOT / (module.replace(".", "/") + ".py")


def file_of(module: str) -> str:
    """Its name in a student's folder."""
    return module.rpartition(".")[2] + ".py"


def numbers() -> list[int]:
    """The labs that there are."""
    return sorted(int(path.stem[3:]) for path in Path(__file__).parent.glob("lab[0-9].py"))


def load(number: int) -> Lab:
    """A lab by its number. Raises UserError if there is none."""
    if number not in numbers():
        raise UserError(f"there is no lab {number}; there are {', '.join(map(str, numbers()))}")
    return importlib.import_module(f"labs.lab{number}").LAB
