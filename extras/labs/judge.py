"""Runs a step's tests on a student's files, in a folder of their own, and counts points.

The student's code runs in the process of the tests. Malicious code can therefore forge the results,
and can read and write all that you can: use a container to grade the files of strangers.
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

import pytest

from common import UserError
from extras.labs import ROOT, step_of

# A test that takes longer than 40 seconds fails; so does one whose ranks take 20.
ENVIRONMENT = dict(SECONDS_A_TEST="40", PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
# os._exit: a thread that a student's function has started cannot keep the process from ending.
PYTEST = "import os, sys, pytest; os._exit(pytest.main(sys.argv[1:]))"
SECONDS = 600  # for all tests of a folder


class Result(NamedTuple):
    """The result of one test of a task, over all values of the test's parameters."""

    test: str
    task: str
    points: int
    wrong: str  # why it earns no points, or ""


def path_of_tests(lab: int) -> str:
    """The path of the file with the tests of the step."""
    return f"tests/test_step{lab:02d}.py"


def read(path: Path) -> str:
    """The text of a file. Bytes that are not UTF-8 stay as they are: Python will refuse them."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def write(path: Path, text: str):
    """The reverse of `read`."""
    path.write_text(text, encoding="utf-8", errors="surrogateescape")


def lay_out(lab: int, folder: Path, texts: dict[str, str]):
    """Copy what a step needs, without tests/faults.py, which has solutions; write `texts`."""
    helpers = {*ROOT.glob("tests/*.py")} - {ROOT / "tests/faults.py", *ROOT.glob("tests/test_*.py")}
    earlier = {path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)}
    own = ROOT / "pyproject.toml", ROOT / path_of_tests(lab)
    for path in (*ROOT.glob("common/*.py"), *helpers, *earlier, *own):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # without the permissions: the project may be read-only
    for file, text in texts.items():
        write(folder / file, text)


def run(place: Path, words: list[str]) -> int:
    """Run pytest; returns its exit status. Raises UserError if it takes too long."""
    job = subprocess.Popen(
        [sys.executable, "-c", PYTEST, *words],
        cwd=place,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return job.wait(SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"no result within {SECONDS} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # also ends ranks that are still running
        job.wait()


def read_report(report: Path) -> list[Result]:
    """The results in pytest's XML. Raises UserError if the tests could not be imported."""
    found: dict[tuple[str, str], Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        own = [each.get("value") for each in case.iter("property")]
        problems = case.findall("*[@message]")  # failed, or skipped
        if own:
            task, points, test = own  # as tests/conftest.py writes them
            wrong = ""
            if problems:
                wrong = problems[0].get("message").partition("\n")[0] or "failed"
            if wrong or (test, task) not in found:  # a test passes if all its cases do
                found[test, task] = Result(test, task, int(points), wrong[:300])
        elif problems:
            raise UserError(f"the files cannot be imported: {last_error(problems[0].text)}")
    return list(found.values())


def last_error(text: str) -> str:
    """The last line of a traceback, and the last place that it names."""
    places = re.findall(r'(\w+\.py)(?:", line |:)(\d+)', text)
    return text.splitlines()[-1].removeprefix("E").strip() + " ({}:{})".format(*places[-1])


def judge(lab: int, texts: dict[str, str]) -> list[Result]:
    """Run the tests of all tasks with these files, in one process. Raises UserError if this does
    not give the results of all.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        place = Path(name)
        lay_out(lab, place, texts)
        report = place / "report.xml"
        words = ["-s", f"--junit-xml={report}", "-m", "task and not exhaustive"]
        status = run(place, [*words, path_of_tests(lab)])
        found = read_report(report) if report.exists() else []
        if not found or status > pytest.ExitCode.TESTS_FAILED:
            raise UserError(f"pytest ended early, with status {status}")
        return found
