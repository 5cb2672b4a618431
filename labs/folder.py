"""A student's folder: made, with its text and its questions; hints, solutions, and the file that notes progress."""

import re
import shutil
import textwrap
import time
from pathlib import Path

from common import UserError
from labs.course import HERE, ROOT, Lab, Task, load, path_of
from labs.grade import Folder, Result, check
from labs.source import diff, hollow

PROGRESS = "progress.txt"


def start(number: int, path: Path, student: str) -> Path:
    """Make the folder of a lab. Raises UserError if there is something already."""
    lab, path = load(number), path.expanduser().resolve()
    if not re.fullmatch(r"[\w.@-]{1,64}", student):
        raise UserError(f"--id {student}: letters, digits and .@_- please")
    if path.exists() and any(path.iterdir()):
        raise UserError(f"{path} is not empty: name a new folder")
    path.mkdir(parents=True, exist_ok=True)
    for file, module in lab.files.items():
        holes = {name: f"lab {number}, task {t.number}" for t in lab.tasks for name in t.functions.get(module, [])}
        (path / file).write_text(hollow(path_of(module).read_text(), holes))
    (path / "answers.toml").write_text(answers_text(lab, student))
    (path / "LAB.md").write_text(lab_text(lab, path))
    shutil.copy(HERE / "AGENTS.md", path / "AGENTS.md")
    note(path, f"started lab {number}, id {student}")
    return path


def answers_text(lab: Lab, student: str) -> str:
    """answers.toml: the id, and each question with the student's numbers, unanswered."""
    lines = ["# All inputs and numbers of this lab are drawn from the id: leave it as it is.", f'id = "{student}"', ""]
    for question in lab.questions:
        lines += [f"# {line}" for line in question.ask(student).splitlines()]
        lines += [f'{question.name} = ""  # a number, no quotes', ""]
    return "\n".join(lines)


def lab_text(lab: Lab, path: Path) -> str:
    """LAB.md: what to do, in which order, with which commands."""
    first, command = next(iter(lab.files)), f"python -m labs {{}} {path}"
    lines = [
        f"# {lab.title} (lab {lab.number})",
        "",
        f"Needs: {lab.needs}. {lab.points} points, about {sum(t.minutes for t in lab.tasks)} minutes.",
        "",
        *textwrap.wrap(
            f"In {' and '.join(f'`{file}`' for file in lab.files)} some functions only raise `NotImplementedError`. "
            "Write them. Signature and docstring are the specification. Do the tasks in order. Each task is judged "
            "alone, with the project's own code around it, on inputs drawn from the id in `answers.toml`. So it can "
            "earn its points before the others are written.",
            112,
        ),
        "",
        "Run all commands in the project's folder, with its environment active:",
        "```bash",
        f"cd {ROOT}",
        f"{command.format('check')} --task 1  # one task",
        f"{command.format('check')}  # all of it: points, and what differs first",
        f"{command.format('hint')} 1  # the next of three hints for task 1",
        f"{command.format('solution')} 1 --give-up  # the project's code beside yours, before the task has passed",
        f"{command.format('report')}  # report.html, with pictures of a run of your file",
        "```",
        "`check --task 1 --watch` runs again at every save. What your code prints goes to `output.txt`. `progress.txt`",
        "keeps notes. To go on elsewhere, take the folder along, and name its new place in these commands. A criterion",
        "prints the first number that differs, and the kind of the fault if it is a known one.",
        "",
    ]
    for task in lab.tasks:
        lines += [f"## Task {task.number}: {task.name} ({task.minutes} min, {task.points} points)", ""]
        for module, names in task.functions.items():
            file = next((f for f, m in lab.files.items() if m == module), first)
            lines.append(f"Write in `{file}`: {', '.join(f'`{name}`' for name in names)}.")
        if not task.functions:
            lines.append("Answer in `answers.toml`: " + ", ".join(f"`{c.check}`" for c in task.criteria) + ".")
        lines += [f"Read first: {task.read}.", ""]
        lines += [f"- {c.says} ({c.points})" for c in task.criteria] + [""]
    return "\n".join(lines)


def note(path: Path, text: str):
    """Add a line to the progress file."""
    with (path / PROGRESS).open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M')}  {text}\n")


def noted(path: Path, pattern: str) -> int:
    """How many lines of the progress file have this."""
    text = (path / PROGRESS).read_text() if (path / PROGRESS).exists() else ""
    return len(re.findall(pattern, text, re.MULTILINE))


def task_of(folder: Folder, number: int) -> Task:
    """A task by its number. Raises UserError if there is none."""
    for task in folder.lab.tasks:
        if task.number == number:
            return task
    raise UserError(f"lab {folder.lab.number} has tasks 1 to {len(folder.lab.tasks)}, and no task {number}")


def hint(folder: Folder, number: int) -> str:
    """The next hint of a task; after the last, all of them again."""
    task = task_of(folder, number)
    taken = noted(folder.path, rf"hint \d for task {number}$")
    if taken >= len(task.hints):
        return "\n".join(f"{i}. {text}" for i, text in enumerate(task.hints, 1)) + "\n(these are all hints)"
    note(folder.path, f"hint {taken + 1} for task {number}")
    return f"{taken + 1} of {len(task.hints)}: {task.hints[taken]}"


def solution(folder: Folder, number: int, give_up: bool) -> str:
    """The diff from the student's functions to the project's, if the task has passed or the student gives up."""
    task = task_of(folder, number)
    if not task.functions:
        raise UserError(f"task {number} has no functions, so there is no diff")
    if not give_up:
        earned = sum(result.earned for result in check(folder, [task]))
        if earned < task.points:
            raise UserError(f"task {number} has {earned} of {task.points} points: --give-up shows it, and is noted")
    note(folder.path, f"solution of task {number} seen" + (", given up" if give_up else ""))
    parts = [diff(folder.sources[m], path_of(m).read_text(), names) for m, names in task.functions.items()]
    return "\n".join(parts) or "yours is the project's code"


def table(folder: Folder, results: list[Result]) -> str:
    """Points by task and criterion, and why a criterion failed, for the terminal."""
    lines = []
    for task in folder.lab.tasks:
        own = [result for result in results if result.task is task]
        if own:
            lines.append(f"task {task.number}  {task.name}: {sum(r.earned for r in own)} of {task.points}")
        for result in own:
            mark = "ok  " if not result.text else "FAIL"
            lines.append(f"    {mark} {result.earned}/{result.criterion.points}  {result.criterion.says}")
            lines += [f"              {result.text}"] if result.text else []
    return "\n".join(lines)
