"""Runs a chapter's tests on a student's files, in a folder and a process group of their own, and counts points.

The tests run in a process that has imported the student's file. Malicious code can therefore forge the report, and
can read and write all that you can: use a container to grade the files of strangers.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from common import UserError
from extras.labs import ROOT, step_of


class Result(NamedTuple):
    """The result of one test of a task, over all values of the test's parameters."""

    test: str
    task: str
    points: int
    wrong: str  # why it earns no points, or ""


def chapter(lab: int) -> str:
    """The path of the file with the chapter's tests."""
    return f"tests/test_step{lab:02d}.py"


def lay_out(lab: int, folder: Path, texts: dict[str, str]):
    """Copy what a chapter needs, but not tests/faults.py, which has solutions. Then write the files in `texts`."""
    others = {"tests/faults.py"} | {f"tests/{path.name}" for path in ROOT.glob("tests/test_*.py")} - {chapter(lab)}
    paths = [*ROOT.glob("common/*.py"), *ROOT.glob("tests/*.py"), ROOT / "pyproject.toml"]
    paths += [path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)]
    for path in paths:
        name = path.relative_to(ROOT)
        if str(name) not in others:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
    for file, text in texts.items():
        (folder / file).write_text(text)


def run(place: Path, seconds: float, *words: str):
    """Run Python in its own process group. Raises UserError if it takes longer than `seconds`."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    job = subprocess.Popen(
        [sys.executable, *words],
        cwd=place,
        env=kept | dict(SECONDS_A_TEST="40", PYTHONDONTWRITEBYTECODE="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"the tests have not ended after {seconds:g} seconds: raise --seconds") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # also ends ranks that are still running
        job.wait()


def judge(lab: int, texts: dict[str, str], seconds: float) -> list[Result]:
    """Run the tests of all tasks with these files. Raises UserError if they could not run to the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        lay_out(lab, Path(place), texts)
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", "-m"]
        words += ["task and not exhaustive", "--junit-xml=report.xml", chapter(lab)]
        run(Path(place), seconds, *words)
        try:
            cases = list(ElementTree.parse(Path(place, "report.xml")).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            cases = []
    if not cases:
        raise UserError("the process of the tests ended without a report")
    found: dict[tuple[str, str], Result] = {}
    for case in cases:
        own = {each.get("name"): each.get("value") for each in case.iter("property")}
        wrong = [each for each in case if each.tag in ("failure", "error")]
        if not own:  # the file could not be imported
            lines = re.findall("^E +(.+)", wrong[0].text or "", re.MULTILINE)
            raise UserError(f"{step_of(lab)} cannot be imported: {lines[-1] if lines else wrong[0].get('message')}")
        key = own["test"], own["task"]
        if key not in found or not found[key].wrong:  # a test earns its points if it passes with all parameters
            message = (wrong[0].get("message") or "error") if wrong else ""
            found[key] = Result(*key, int(own["points"]), message)
    return list(found.values())
