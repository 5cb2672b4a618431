"""What a lab consists of. extras/labs/__init__.py says how the parts work together."""

import ast
import importlib
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common import UserError
from common.comm import Mesh
from extras.labs.source import definitions

Row = tuple[str, Any, Any]  # of an experiment: a name, what was found, what should have been
ROOT = Path(__file__).parents[2]

# Norm-wise relative, in fp64: a million roundings, for whatever order and kernels a processor adds in.
BOUND = 1e-10


def at_most(limit: float) -> dict[str, float]:
    """An upper limit, in the place of the number that has to be found."""
    return {"at most": limit}


# In the place of a number: what the project's file finds in the same case.
FOUND = {"as": "the project's file"}


def at_most_times(factor: float) -> dict[str, float]:
    """So many times what the project's file finds is an upper limit."""
    return {"at most times": factor}


class Case:
    """One input of a criterion: `sizes` as attributes, `mesh` (ranks along each dimension), numbers from a seed.

    A lab derives its experiments from it: what they draw, what a student's code makes of it, what has to come out.
    `setup` runs in the grader, before any of the student's code; `run` on every rank.
    """

    bound: float | None = None  # norm-wise relative, if it is another than the criterion's

    def __init__(self, seed: int, mesh: dict[str, int] | None = None, **sizes: Any):
        self.seed, self.mesh, self.sizes = seed, mesh or dict(dp=1), sizes
        self.ranks = math.prod(self.mesh.values())
        vars(self).update(sizes)
        self.setup()

    def setup(self):
        """What all ranks begin with."""

    @classmethod
    def prepare(cls):
        """What is imported before the ranks are forked, and after the student's file."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        """(name, what the student's functions make of it, what it should be), one after another."""
        raise NotImplementedError

    def explain(self, rank: int, key: str, found: Any, expected: Any) -> str:
        """More words about a wrong value, or ""."""
        return ""

    def source(self, name: str) -> torch.Generator:
        """Of numbers that are a pure function of the seed, the name and their shape: the same on all ranks."""
        return torch.Generator().manual_seed(random.Random(f"{self.seed} {name}").getrandbits(60))

    def draw(self, name: str, *shape: int) -> Tensor:
        """Normal numbers in fp64."""
        return torch.randn(shape, generator=self.source(name), dtype=torch.float64)

    def drawn(self, module: nn.Module) -> nn.Module:
        """The module, its parameters drawn in fp64."""
        for name, param in module.named_parameters():
            param.data = self.draw(name, *param.shape) / 3
        return module

    def ids(self, name: str, below: int, *shape: int) -> Tensor:
        """int64 from 0 to below - 1."""
        return torch.randint(below, shape, generator=self.source(name))

    def __str__(self) -> str:
        ranks = [f"{dim}={n}" for dim, n in self.mesh.items() if n > 1]
        plain = {name: value for name, value in self.sizes.items() if isinstance(value, int | float | str)}
        return ", ".join(ranks + [f"{name}={value}" for name, value in plain.items()])


@dataclass(frozen=True)
class Criterion:
    """One demand: what experiments of one kind find in some cases (sizes) is what it should be.

    `keys`: only rows whose names contain one of these are judged. `whole`: the file is judged as it stands,
    without the project's functions in other tasks' holes.
    """

    says: str
    points: int
    kind: type[Case]
    cases: tuple[dict[str, Any], ...] = ({},)
    keys: tuple[str, ...] = ()
    bound: float = BOUND
    whole: bool = False

    def judged(self, rows: list[Row]) -> list[Row]:
        """Those that count."""
        return [row for row in rows if not self.keys or any(word in row[0] for word in self.keys)]


def as_ours(found: dict[str, Any]) -> Iterator[Row]:
    """A row for each name: it has to be what the project's file finds."""
    yield from ((name, value, FOUND) for name, value in found.items())


def demands(kind: type[Case], cases: tuple, *rows: tuple, **more: Any) -> tuple[Criterion, ...]:
    """Several criteria of the same cases; rows of (what it says, points, keys ...)."""
    return tuple(Criterion(says, points, kind, cases, tuple(keys), **more) for says, points, *keys in rows)


@dataclass
class Task:
    """Some functions to write. The rest stands in the lab's text."""

    holes: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    name: str = ""
    minutes: int = 0
    read: str = ""
    hints: list[str] = field(default_factory=list)

    @property
    def points(self) -> int:
        """What the task is worth."""
        return sum(criterion.points for criterion in self.criteria)


@dataclass
class Question:
    """The written question of a lab. `numbers`: what each is drawn from; the text and the formulas have them by name.

    `mistakes`: by what they show, keywords with which the formula gives another number that a student may have found.
    """

    numbers: dict[str, Sequence[int]]
    answer: Callable[..., float]
    mistakes: dict[str, dict[str, float]]
    points: int = 2
    text: str = ""

    def values(self, student: str) -> dict[str, int]:
        """The numbers of a student's question."""
        draw = random.Random(f"{student} {self.text}")
        return {name: draw.choice(some) for name, some in self.numbers.items()}

    def right(self, student: str) -> float:
        """The answer."""
        return self.answer(**self.values(student))

    def judge(self, student: str, found: Any) -> str:
        """What is wrong with an answer, without the right number; "" if it is within a thousandth."""
        if found in ("", None):
            return "not answered yet: `answer` in answers.toml"
        if isinstance(found, bool) or not isinstance(found, int | float) or not -1e300 < found < 1e300:
            return f"`answer` in answers.toml has to be a number, and is {str(found)[:40]}"
        right = self.right(student)
        if abs(found - right) <= 0.001 * abs(right):
            return ""
        for meaning, mistake in self.mistakes.items():
            other = self.answer(**self.values(student) | mistake)
            if abs(other - right) > 0.001 * abs(right) and abs(found - other) <= 0.001 * abs(other):
                return f"{found:.12g} is not it: {meaning}"
        return f"{found:.12g} is too {'large' if found > right else 'small'}"


@dataclass
class Lab:
    """A lab. `modules`: those that the student gets, in the order of their imports; the last is the step.

    Its text, labs/labN.md: the title; for each task its name, its minutes, what to read and three hints; the question.
    """

    number: int
    modules: tuple[str, ...]
    tasks: tuple[Task, ...]
    question: Question
    ranks: int = 4  # of `python -m extras.labs run`
    flags: str = ""  # an example for it, in the lab's own dimension

    def __post_init__(self):
        title, *parts = (ROOT / f"extras/labs/lab{self.number}.md").read_text().split("\n## ")
        self.title = title[2:].strip()
        *parts, (_, self.question.text) = [part.split("\n\n", 1) for part in parts]
        for task, (name, text) in zip(self.tasks, parts, strict=True):
            task.name, task.minutes = name.split(" (")[0], int(name.split(" (")[1].split()[0])
            task.read, *task.hints = (
                line.removeprefix(f"{i}. ") for i, line in enumerate(filter(None, text.split("\n")))
            )

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

    def faults(self, number: int) -> list[str]:
        """Names of the mistakes in extras/tests/faults.py whose text stands in a hole of a task; none in a handout."""
        found: list[str] = []
        known = (
            importlib.import_module("extras.tests.faults").FAULTS if (ROOT / "extras/tests/faults.py").exists() else {}
        )
        for module in self.modules:
            text = path_of(module).read_text()
            nodes = definitions(ast.parse(text))
            for hole in self.holes(module, number):
                part = ast.get_source_segment(text, nodes[hole])
                some = ((name, fault) for name, fault in known.items() if fault.module == module)
                found += [n for n, fault in some if fault.owner == hole.partition(".")[0] and fault.old in part]
        return [*dict.fromkeys(found)]

    def task(self, number: int) -> Task:
        """A task by its number. Raises UserError."""
        if not 1 <= number <= len(self.tasks):
            raise UserError(f"lab {self.number} has tasks 1 to {len(self.tasks)}, and no task {number}")
        return self.tasks[number - 1]


def files(*skipped: str) -> list[Path]:
    """The project's files, but for folders of these names and links."""
    found = []
    for home, inside, names in os.walk(ROOT):
        inside[:] = sorted(set(inside) - set(skipped))
        found += [path for path in (Path(home, name) for name in sorted(names)) if not path.is_symlink()]
    return found


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
