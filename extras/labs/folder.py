"""A student's folder: made, with its text and its question; read; hints; the file that notes progress."""

import contextlib
import re
import textwrap
import time
from pathlib import Path

from common import UserError
from extras.labs.course import ROOT, Lab, file_of, load, path_of
from extras.labs.judge import Folder, Result
from extras.labs.source import hollow

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same parser
    import tomli as tomllib

PART = '''"""So that `python -m {name}` runs this folder's file, too."""
import os, runpy, sys

sys.path[0] = {root!r}
sys.modules.pop("{package}", None)
runpy.run_path(os.path.join(os.path.dirname(__file__), "..", "{file}"), run_name="__main__")
'''
PROGRESS = "progress.txt"
MOST = 2**20  # bytes of a student's file
SHIM = f'''"""So that `python -m extras.labs` works in this folder, too."""
import os, runpy, sys

ROOT = {str(ROOT)!r}
if __name__ == "__main__":
    if not os.path.isdir(os.path.join(ROOT, "labs")):
        sys.exit(f"labs: the project is not at {{ROOT}} any more: write its new place into labs.py")
    sys.path[0] = ROOT
    sys.modules.pop("labs", None)
    runpy.run_module("labs", run_name="__main__", alter_sys=True)
'''


def new_folder(path: Path) -> Path:
    """Its whole path. Raises UserError if there is something already."""
    path = path.expanduser().resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is not empty: name a new folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def start(number: int, path: Path, student: str) -> Path:
    """Make the folder of a lab. Raises UserError if there is something already."""
    lab = load(number)
    if not re.fullmatch(r"[\w.@-]{1,64}", student):
        raise UserError(f"--id {student}: letters, digits and .@_- please")
    path = new_folder(path)
    for module in lab.modules:
        (path / file_of(module)).write_text(hollow(path_of(module).read_text(), lab.holes(module), number))
    asked = lab.question.text.format(**lab.question.values(student)).splitlines()
    lines = ["# The inputs of this lab are drawn from the id: leave it as it is.", f'id = "{student}"', ""]
    lines += [f"# {line}" for line in asked] + ['answer = ""  # a number, no quotes', ""]
    (path / "answers.toml").write_text("\n".join(lines))
    (path / "LAB.md").write_text(text_of_lab(lab, path))
    (path / "labs.py").write_text(SHIM)
    for name in lab.modules[:-1]:  # common.schedules
        (target := path / f"{name.replace('.', '/')}.py").parent.mkdir(exist_ok=True)
        package = name.partition(".")[0]
        target.write_text(PART.format(name=name, root=str(ROOT), package=package, file=file_of(name)))
    note(path, f"started lab {number}, id {student}")
    return path


def text_of_lab(lab: Lab, path: Path) -> str:
    """LAB.md, filled in: what to do, in which order, with which commands."""
    parts = []
    for number, task in enumerate(lab.tasks, 1):
        names = {file_of(module): ", ".join(f"`{n}`" for n in lab.holes(module, number)) for module in lab.modules}
        write = "\n".join(f"Write in `{file}`: {some}." for file, some in names.items() if some)
        read = textwrap.fill(f"Read first: {task.read}.", 112)
        criteria = "\n".join(f"- {criterion.says} ({criterion.points})" for criterion in task.criteria)
        title = f"## Task {number}: {task.name} ({task.minutes} min, {task.points} points)"
        parts.append(f"{title}\n\n{write}\n{read}\n\n{criteria}\n")
    minutes, files = sum(task.minutes for task in lab.tasks), " and ".join(f"`{file_of(m)}`" for m in lab.modules)
    text = (ROOT / "extras/labs/LAB.md").read_text()
    return text.format(lab=lab, path=path, minutes=minutes, files=files, tasks="\n".join(parts))


def text_in(path: Path) -> str:
    """The text of a file, or nothing."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if path.is_file() and path.stat().st_size <= MOST:
            return path.read_text()
    return ""


def open_folder(path: Path, number: int = 0) -> Folder:
    """Read a folder into memory, as lab `number` (0: what LAB.md says). Raises UserError if it is not a lab's."""
    path = Path(path).resolve()
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    said = re.search(r"\(lab (\d)\)", text_in(path / "LAB.md"))
    if not number and not said:
        raise UserError(f"{path} is no lab's folder: LAB.md is missing; python -m extras.labs start N {path} makes one")
    lab, trouble, answers = load(number or int(said[1])), "", {}
    try:
        answers = tomllib.loads(text_in(path / "answers.toml"))
    except Exception as error:  # of a file that may contain anything: also RecursionError
        trouble = f"answers.toml: {type(error).__name__}: {str(error)[:100]}"
        quoted = re.search(r'^id\s*=\s*"(.{1,64})"', text_in(path / "answers.toml"), re.MULTILINE)
        answers = {"id": quoted[1]} if quoted else {}
    sources = {module: text_in(path / file_of(module)) for module in lab.modules}
    taken = {"labs.py", *map(file_of, lab.modules)}
    files = {p.name: text_in(p).encode() for p in sorted(path.glob("*.py"))[:50] if p.name not in taken}
    attempts = len(re.findall("check of", text_in(path / PROGRESS)))
    return Folder(
        path, lab, str(answers.get("id", ""))[:64], answers.get("answer", ""), sources, files, trouble, attempts
    )


def note(path: Path, text: str):
    """Add a line to the progress file."""
    with (path / PROGRESS).open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M')}  {text}\n")


def hint(folder: Folder, number: int) -> str:
    """The next hint of a task; after the last, all of them again."""
    hints = folder.lab.task(number).hints
    taken = len(re.findall(rf"hint \d for task {number}$", text_in(folder.path / PROGRESS), re.MULTILINE))
    if taken >= len(hints):
        return "\n".join(f"{i}. {text}" for i, text in enumerate(hints, 1)) + "\n(these are all hints)"
    note(folder.path, f"hint {taken + 1} for task {number}")
    return f"{taken + 1} of {len(hints)}: {hints[taken]}"


def lines_of(folder: Folder, own: list[Result], seen: dict[str, str]) -> list[str]:
    """Points of a task, and why a criterion failed; what has been `seen` (text -> criterion) is not said again."""
    number = own[0].task
    name = f"task {number}  {folder.lab.tasks[number - 1].name}" if number else "the question"
    lines = [f"{name}: {sum(r.earned for r in own)} of {sum(r.points for r in own)}"]
    for result in own:
        lines.append(f"    {'FAIL' if result.text else 'ok  '} {result.earned}/{result.points}  {result.says}")
        if result.text:
            again = f"the same as of: {seen[result.text]}" if result.text in seen else result.text
            seen.setdefault(result.text, result.says)
            lines.append(f"              {again}")
    return lines


def progress(folder: Folder) -> str:
    """A bar over all tasks, by the last check of each, and which task is next."""
    text, total, following = text_in(folder.path / PROGRESS), 0, ""
    parts = [(number, task.name, task.points) for number, task in enumerate(folder.lab.tasks, 1)]
    for number, name, points in [*parts, (0, "the question", folder.lab.question.points)]:
        said = re.findall(rf"check of task {number}: (\d+) of", text)
        earned = int(said[-1]) if said else 0
        total += earned
        if earned < points and not following:
            following = f"next: task {number}, {name}" if number else "next: the question in answers.toml"
    filled = 24 * total // folder.lab.points  # not full before all points are there
    return f"[{'#' * filled}{'-' * (24 - filled)}] {total} of {folder.lab.points} points; {following or 'all done'}"
