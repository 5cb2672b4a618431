"""What a lab consists of, as labs/stepNN.toml says it."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import UserError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same parser
    try:
        import tomli as tomllib
    except ModuleNotFoundError as missing:
        raise SystemExit("The labs read TOML: take Python 3.11 or newer, or pip install tomli.") from missing

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Criterion:
    """One check: a function of labs/labNN.py (or the name of a question), its points, and what it demands."""

    check: str
    points: int
    says: str


@dataclass(frozen=True)
class Task:
    """Some functions to write. `functions`: by module, the names of the holes. `faults`: what to recognise, by name."""

    number: int
    name: str
    minutes: int
    functions: dict[str, list[str]]
    read: str
    hints: list[str]
    criteria: list[Criterion]
    faults: list[str]

    @property
    def points(self) -> int:
        """What the task is worth."""
        return sum(criterion.points for criterion in self.criteria)


@dataclass(frozen=True)
class Lab:
    """A lab. `files`: by name in the student's folder, the module of the project whose place it takes."""

    number: int
    title: str
    needs: str
    files: dict[str, str]
    tasks: list[Task]

    @property
    def points(self) -> int:
        """What the lab is worth."""
        return sum(task.points for task in self.tasks)

    @property
    def step(self) -> str:
        """The module of the step, whose `train` ends in what one device finds."""
        (path,) = ROOT.glob(f"step{self.number:02d}_*.py")
        return path.stem

    @property
    def module(self) -> Any:
        """labs/labNN.py, the criteria."""
        return importlib.import_module(f"labs.lab{self.number:02d}")

    @property
    def alone(self) -> str:
        """The step that one device runs for comparison: step 1, which knows no experts, or the module's ALONE."""
        return getattr(self.module, "ALONE", "step01_single_gpu")

    @property
    def questions(self) -> list[Any]:
        """labs/askedNN.py, the accounting questions."""
        return importlib.import_module(f"labs.asked{self.number:02d}").QUESTIONS


def path_of(module: str) -> Path:
    """The project's file of a module."""
    return ROOT / (module.replace(".", "/") + ".py")


def numbers() -> list[int]:
    """The labs that there are."""
    return sorted(int(path.stem[4:]) for path in HERE.glob("step*.toml"))


def read(path: Path) -> dict[str, Any]:
    """A TOML file. Raises UserError with the line, if it is not one."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {error}") from error


def load(number: int) -> Lab:
    """The lab of a step. Raises UserError if there is none."""
    if number not in numbers():
        there = ", ".join(map(str, numbers()))
        raise UserError(f"there is no lab {number}; there are {there}")
    data = read(HERE / f"step{number:02d}.toml")
    first, tasks = next(iter(data["files"].values())), []
    for place, entry in enumerate(data["task"], 1):
        functions: dict[str, list[str]] = {}
        for word in entry.get("functions", []):
            module, _, name = word.rpartition(":")
            functions.setdefault(module or first, []).append(name)
        criteria = [Criterion(**criterion) for criterion in entry["criteria"]]
        parts = [entry[key] for key in ("name", "minutes")], [entry[key] for key in ("read", "hints")]
        tasks.append(Task(place, *parts[0], functions, *parts[1], criteria, entry.get("faults", [])))
    return Lab(number, data["title"], data["needs"], data["files"], tasks)
