"""Runs a step's tests on a student's files, in a folder of their own, and counts points.

The tests run in a process that has imported the student's files (run_tests.py). Malicious code can
therefore forge the results, and can read and write all that you can: use a container to grade the
files of strangers.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common import UserError
from extras.labs import ROOT, holes, step_of

ENVIRONMENT = dict(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTHONPATH="")
ENVIRONMENT |= dict(PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONBREAKPOINT="0")
EXITED = "it ends the program (os._exit)"


class Result(NamedTuple):
    """The result of one test of a task, over all values of the test's parameters."""

    test: str
    task: str
    points: int
    wrong: str  # why it earns no points, or ""


def path_of_tests(lab: int) -> str:
    """The path of the file with the tests of the step."""
    return f"tests/test_step{lab:02d}.py"


def require_packages():
    """Raise UserError if pytest, or a package of requirements.txt, is not installed."""
    names = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    for name in (*names, "pytest"):
        if not importlib.util.find_spec(name.replace("-", "_")):
            fix = f"in {ROOT}, run pip install -r requirements-dev.txt"
            raise UserError(f"{name} is not installed: {fix}")


def lay_out(lab: int, folder: Path, texts: dict[str, str]):
    """Copy what a step needs, without tests/faults.py, which has solutions; write `texts`."""
    others = {ROOT / "tests/faults.py", *ROOT.glob("tests/test_*.py")} - {ROOT / path_of_tests(lab)}
    paths = {ROOT / "pyproject.toml", *ROOT.glob("common/*.py"), *ROOT.glob("tests/*.py")} - others
    paths |= {path for path in ROOT.glob("step0*.py") if path.name < step_of(lab)}
    for path in paths:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)  # without the permissions: the project may be read-only
    for file, text in texts.items():
        (folder / file).write_text(text, encoding="utf-8")


def run(place: Path, lab: int, cases: list[str], seconds: float, end: float) -> list[list]:
    """Run cases in a process of their own; returns the events that run_tests.py describes.

    A case that takes longer than `seconds` fails. The process ends when time.monotonic() is `end`.
    If a case or an import ends the process, or hangs, the last event says so.
    """
    for record in ("journal", "stack"):
        (place / record).write_text("")
    job = subprocess.Popen(
        [sys.executable, place / "run_tests.py", ",".join(holes(lab)), *cases],
        cwd=place,
        env=os.environ | ENVIRONMENT | dict(SECONDS_A_TEST=str(int(seconds))),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        cause = wait(job, place, 2 * seconds + 20, end)  # a case may start several pools of ranks
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # also ends ranks that are still running
        job.wait()
    events = [json.loads(line) for line in (place / "journal").read_text().splitlines()]
    kind, what = events[-1][:2] if events else ("", "")
    if kind == "began" and ("::" not in what or time.monotonic() < end):
        events.append(["ended", what, cause])
    return events


def wait(job: subprocess.Popen, place: Path, seconds: float, end: float) -> str:
    """Wait until the process ends, or has written no event for so many seconds; returns why."""
    size, limit, cause = 0, end, ""
    while job.poll() is None and not cause:
        time.sleep(0.1)
        before, size = size, (place / "journal").stat().st_size
        if size > before:
            limit = min(end, time.monotonic() + seconds)
        if time.monotonic() > limit:
            cause = "it does not end"
            job.send_signal(signal.SIGUSR1)
            time.sleep(0.5)  # run_tests.py writes `stack`
    if not cause:
        killed = job.returncode < 0
        cause = f"it is killed by {signal.Signals(-job.returncode).name}" if killed else EXITED
    stack = (place / "stack").read_text()
    calls = re.findall(rf'File "{place}/((?:common/|step).+?)", line (\d+) in (\S+)', stack)
    return cause + "".join(f", in {function} ({file}:{line})" for file, line, function in calls[:3])


def results(events: list[list], unjudged: str) -> tuple[list[Result], list[str]]:
    """The results, and the cases left to run. `unjudged`: what is wrong with the tests of these."""
    found = {case: words for kind, case, *words in events if kind == "found"}
    ended = {what: words[0] for kind, what, *words in reversed(events) if kind == "ended"}
    tests: dict[tuple[str, str], Result] = {}
    left = []
    for case, (test, task, points) in found.items():
        if (test, task) not in tests or not tests[test, task].wrong:  # the first failed case counts
            tests[test, task] = Result(test, task, points, ended.get(case, unjudged))
        if case not in ended and tests[test, task].wrong == unjudged:
            left.append(case)
    return list(tests.values()), left


def judge(lab: int, texts: dict[str, str], seconds: float, a_case: float = 40.0) -> list[Result]:
    """Run the tests of all tasks with these files. Raises UserError if they cannot run.

    A case may take `a_case` seconds, but at most a tenth of `seconds` (and at least 5). What has no
    result after `seconds` earns no points; all else keeps its result.
    """
    a_case = min(a_case, max(5.0, seconds / 10))
    unjudged = f"not judged within {seconds:g} seconds: raise --seconds"
    end = time.monotonic() + seconds
    events: list[list] = []
    found: list[Result] = []
    before, left = [], [path_of_tests(lab)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        lay_out(lab, place, texts)
        shutil.copy(Path(__file__).with_name("run_tests.py"), place)
        while left and left != before and time.monotonic() < end:
            events += run(place, lab, left, a_case, end)
            for kind, what, *words in [] if found else events:
                if kind == "ended" and what in texts and words[0]:
                    raise UserError(f"{what} cannot be imported: {words[0]}")
            before = left
            found, left = results(events, unjudged)
    if not found:
        raise UserError("the process of the tests ended without a report")
    return found
