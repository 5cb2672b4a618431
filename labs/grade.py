"""Judge a folder: every criterion of every task, what it found in one line, and the points."""

import ast
import csv
import json
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import UserError
from labs import ranks
from labs.bench import Bench, Wrong
from labs.course import Criterion, Lab, Task, load, path_of, read
from labs.ranks import Failed, World, complaint
from labs.source import graft, missing


@dataclass
class Result:
    """A criterion, the points earned, and why not all of them; `seconds` that it took."""

    task: Task
    criterion: Criterion
    earned: int
    text: str
    seconds: float


@dataclass
class Folder:
    """A student's folder: its lab, the id that inputs are drawn from, the answers, the sources by module."""

    path: Path
    lab: Lab
    student: str
    answers: dict[str, Any]
    sources: dict[str, str]
    complaint: str = ""  # why answers.toml could not be read


def open_folder(path: Path) -> Folder:
    """Read a folder. Raises UserError if it is not a lab's; a damaged answers.toml or source costs points only."""
    path, found = Path(path).resolve(), re.search(r"lab (\d)", text_of(Path(path) / "LAB.md"))
    if not found:
        raise UserError(f"{path} is no lab: it has no LAB.md; python -m labs start N {path} makes one")
    lab, trouble = load(int(found[1])), ""
    try:
        answers = read(path / "answers.toml")
    except UserError as error:
        answers, trouble = {}, str(error)
        quoted = re.search(r'^id\s*=\s*"(.*)"', text_of(path / "answers.toml"), re.MULTILINE)
        answers = {"id": quoted[1]} if quoted else {}
    sources = {module: text_of(path / file) for file, module in lab.files.items()}
    return Folder(path, lab, str(answers.get("id", "")), answers, sources, trouble)


def text_of(path: Path) -> str:
    """The text of a file, or nothing."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def world_for(folder: Folder, task: Task, output: Path | None) -> World:
    """The student's functions of one task among the project's. Raises Failed if a source cannot be parsed."""
    modules = {}
    for file, module in folder.lab.files.items():
        if module in task.functions:
            where = str(folder.path / file)
            if not folder.sources[module].strip():
                raise Failed(f"{file} is missing or empty")
            try:
                project = path_of(module).read_text()
                tree = graft(folder.sources[module], project, set(task.functions[module]))
                lost = set(missing(folder.sources[module], project)) & set(task.functions[module])
            except (SyntaxError, ValueError, RecursionError) as error:
                if isinstance(error, SyntaxError):
                    error.filename = where
                raise Failed(complaint(error, [where])) from error
            if lost:
                raise Failed(f"{file} has no {sorted(lost)[0]} any more")
            modules[module] = ast.fix_missing_locations(tree), where
    return World(modules, folder.path, output)


def judge(folder: Folder, task: Task, seconds: float, output: Path | None) -> Iterable[Result]:
    """The results of one task, one by one."""
    names = {question.name: question for question in folder.lab.questions}
    bench = None
    for criterion in task.criteria:
        start, text = time.monotonic(), ""
        try:
            if criterion.check in names:
                if folder.complaint:
                    raise Wrong(folder.complaint)
                names[criterion.check].judge(folder.student, folder.answers)
            else:
                if bench is None:
                    world = world_for(folder, task, output)
                    bench = Bench(folder.lab.number, task.number, folder.student, world, task.faults, seconds)
                getattr(folder.lab.module, criterion.check)(bench)
        except (Wrong, Failed) as error:
            text = str(error)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError) as error:
            text = f"the answer of the ranks has an unexpected form ({type(error).__name__}: {error})"
        yield Result(task, criterion, 0 if text else criterion.points, text, time.monotonic() - start)


def check(folder: Folder, tasks: list[Task], seconds: float = 60.0, output: Path | None = None) -> Iterable[Result]:
    """The results of some tasks, one by one. `seconds`: the limit of one run of a student's code."""
    for task in tasks:
        yield from judge(folder, task, seconds, output)


def whole(folder: Folder, seconds: float = 120.0) -> str:
    """What is wrong with the file as it stands, all tasks together: nothing, or one line. It earns no points."""
    modules = {}
    try:
        for file, module in folder.lab.files.items():
            modules[module] = ast.parse(folder.sources[module], file), str(folder.path / file)
        (size, layout), base = folder.lab.module.WHOLE, folder.lab.module.RUN
        args = folder.lab.step, json.dumps(base | layout)
        run = ranks.run(World(modules, folder.path), size, "labs.training:losses", args, seconds)
        args = folder.lab.alone, json.dumps(base)
        expected = ranks.run(World(), 1, "labs.training:losses", args, seconds)[0]
    except SyntaxError as error:
        return complaint(error, [])
    except Failed as failed:
        return str(failed)
    for mine, theirs in zip(run[0], expected, strict=True):
        if abs(mine - theirs) > 1e-10 * abs(theirs):
            return f"a loss is {mine!r}, on one device it is {theirs!r}"
    return ""


def gradescope(folder: Folder, results: list[Result]) -> dict[str, Any]:
    """The results as Gradescope's public specification wants them in results.json."""
    tests = [
        dict(
            name=f"task {r.task.number}, {r.task.name}: {r.criterion.says}",
            number=f"{r.task.number}.{r.task.criteria.index(r.criterion) + 1}",
            score=r.earned,
            max_score=r.criterion.points,
            status="passed" if r.earned == r.criterion.points else "failed",
            output=r.text or "ok",
            visibility="visible",
        )
        for r in results
    ]
    return dict(
        score=sum(r.earned for r in results),
        execution_time=round(sum(r.seconds for r in results), 1),
        output=f"lab {folder.lab.number}, id {folder.student}",
        visibility="visible",
        tests=tests,
    )


def grade(paths: list[Path], seconds: float, target: Path | None, table: Path | None):
    """Grade folders for a teacher; nothing that a folder contains stops the others. Prints a line for each."""
    if target and len(paths) != 1:
        raise UserError("--gradescope takes one folder: a submission has one results.json; --csv takes many")
    rows = []
    for path in paths:
        try:
            folder = open_folder(path)
        except UserError as error:
            print(f"{path}: {error}")
            rows.append(dict(folder=str(path), error=str(error)))
            if target:
                entry = dict(score=0, output=str(error), visibility="visible", tests=[])
                target.write_text(json.dumps(entry, indent=1))
            continue
        with tempfile.TemporaryDirectory() as scratch:
            results = list(check(folder, folder.lab.tasks, seconds, Path(scratch) / "output.txt"))
        earned = sum(r.earned for r in results)
        print(f"{path}: {earned} of {folder.lab.points}")
        row = dict(folder=str(path), lab=folder.lab.number, id=folder.student, points=earned, of=folder.lab.points)
        for task in folder.lab.tasks:
            row[f"task {task.number}"] = sum(r.earned for r in results if r.task is task)
        rows.append(row)
        if target:
            target.write_text(json.dumps(gradescope(folder, results), indent=1))
    if table:
        with table.open("w", newline="") as file:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
