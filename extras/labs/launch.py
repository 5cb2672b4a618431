"""A student's file as a program of its own, and a copy of the project for students."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from extras.labs.course import ROOT, file_of, files, load, numbers, path_of
from extras.labs.folder import new_folder
from extras.labs.judge import Folder, keep
from extras.labs.source import hollow
from extras.labs.suite import KEPT
from extras.services.launch import start

# What a handout's common/__init__.py ends with.
IN_A_LINE = '''

import sys


def _in_a_line(kind, error, trace):
    """This copy is a handout: whoever comes to a hole, or asks for a file that is left out, is told so in a line."""
    text, name = str(error), getattr(error, "name", None) or ""
    if (kind is NotImplementedError and text.startswith("lab ")) or name.split(".")[0] in ("variants", "tests"):
        print(f"error: {text}: this copy is a handout, without solutions of lab NUMBER and later ones", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _in_a_line
'''


def project_files() -> list[Path]:
    """Files of the project, by their paths in it; no tests, which quote the solutions, but for what trains."""
    skipped = ".git", ".venv", "runs", "tests", "__pycache__", ".pytest_cache", ".ruff_cache"
    more = [ROOT / f"extras/tests/{name}.py" for name in ("__init__", "equal", "warm")]
    more += (ROOT / "extras/tests/bench/figures").glob("*.png")  # of README.md and RESULTS.md
    return sorted(path.relative_to(ROOT) for path in [*files(*skipped), *filter(Path.exists, more)])


def run(folder: Folder, ranks: int, flags: list[str]) -> int:
    """Train with the student's file, as a script, in the folder; the exit status of its last process.

    The script lies in a copy of the project's Python files, so that what imports the step gets the student's.
    """
    with tempfile.TemporaryDirectory(prefix="lab-") as scratch:
        for path in project_files():
            if path.suffix == ".py" and path.parts[0] != "labs":
                (Path(scratch) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, Path(scratch) / path)
        for module in folder.lab.modules:
            (Path(scratch) / path_of(module).relative_to(ROOT)).write_text(folder.sources[module])
        for name, data in folder.files.items():
            (Path(scratch) / name).write_bytes(data)
        script, n = str(Path(scratch) / f"{folder.lab.modules[-1]}.py"), ranks or folder.lab.ranks
        many = f"--standalone --nproc_per_node={n} " if n > 1 else ""
        print(f"{many}{folder.lab.modules[-1]}.py {' '.join(flags)}".strip(), flush=True)
        same = dict(env=None, start_new_session=False, stderr=-1)
        done, ended = start(folder.path, n if n > 1 else 0, [script, *flags], **same), None
        while text := os.read(done.stderr.fileno(), 2**16):
            if not ended:  # torchrun ends a failed run with 35 lines of its own
                ended = re.search(rb"(?m)^[EW]\d{4} .*torch/distributed/", text)
                sys.stderr.buffer.write(text[: ended.start()] if ended else text)
                sys.stderr.flush()
        return done.wait()


def handout(target: Path, number: int):
    """A copy of the project without tests, in which the steps of lab `number` and of later labs are holes.

    Earlier steps stay: those after them build on them. Variants that import a step that does not stay are left out, as
    they hold parts of it; and those that import such a variant. A command that needs one of them says so in a line.
    Raises UserError.
    """
    lab, target = load(number), new_folder(target)
    holes = {module: (load(n), n) for n in numbers() if n >= number for module in load(n).modules}
    texts = {path: (ROOT / path).read_bytes() for path in project_files()}
    modules = {path: ".".join(path.with_suffix("").parts) for path in texts}
    variants, gone = [path for path in texts if path.parts[0] == "variants"], set(holes)
    while more := {modules[path] for path in variants if any(name.encode() in texts[path] for name in gone)} - gone:
        gone |= more
    for path, text in texts.items():
        module = modules[path]
        if module in gone - holes.keys():
            continue
        if module in holes and path.suffix == ".py":
            later, n = holes[module]
            text = hollow(text.decode(), later.holes(module), n).encode()
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(text)
    with (target / "common/__init__.py").open("a") as file:
        file.write(IN_A_LINE.replace("NUMBER", str(number)))
    keep(lab, target / KEPT.relative_to(ROOT))
    names = ", ".join(file_of(module) for module in holes)
    print(f"{target}: without the solutions in {names}; without tests, and without variants of these steps")
