"""Runs in a copy of a student's folder: imports the student's files, then runs the step's tests.

    python run_tests.py step05_cp_ring.py tests/test_step05.py

The arguments are the files, joined by commas, and what pytest is to run. A case is a test with one
value of its parameters. Each event becomes a line of `journal` at once, so it remains if a function
of the student's ends the process, or if judge.py does because of a hang:

    ["found", CASE, TEST, TASK, POINTS]
    ["began", FILE or CASE]
    ["ended", FILE or CASE, WRONG]    WRONG: "" if it succeeded. The first of several counts

`stack` has the calls that led to SIGUSR1, or to a signal such as SIGSEGV that ends the process.
"""

import faulthandler
import importlib
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch  # noqa: F401  (refuse_training would slow down its import)

HERE = Path(__file__).resolve().parent


class TrainingError(Exception):
    """Training has begun during an import."""


REASONS = {
    TrainingError: 'training starts at import: keep the guard `if __name__ == "__main__":`',
    SystemExit: "it ends the program (sys.exit)",
    EOFError: "it waits for input",
}


def refuse_training(frame: FrameType, event: str, _: Any):
    """A profiler (sys.setprofile): raises TrainingError at a call of the course's main or train."""
    code = frame.f_code
    course = code.co_filename.startswith(str(HERE))
    if event == "call" and course and code.co_name in ("main", "train"):
        raise TrainingError


class Recorder:
    """Writes the journal: of imports, and as a plugin of pytest."""

    def write(self, *event: str | int):
        """Add an event to the journal."""
        with (HERE / "journal").open("a") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_runtest_logstart(self, nodeid: str):
        """A case begins."""
        self.write("began", nodeid)

    def import_file(self, file: str) -> bool:
        """Import a student's file; returns whether that was possible."""
        self.write("began", file)
        wrong = ""
        try:
            sys.setprofile(refuse_training)
            importlib.import_module(file.removesuffix(".py").replace("/", "."))
        except BaseException as error:
            calls = traceback.extract_tb(error.__traceback__)
            lines = [f" (line {at.lineno})" for at in calls if at.filename == str(HERE / file)]
            wrong = REASONS.get(type(error), f"{type(error).__name__}: {error}")
            wrong += "".join(lines[-1:])
        sys.setprofile(None)
        self.write("ended", file, wrong)
        return not wrong

    def pytest_collectreport(self, report: Any):
        """If the tests cannot be imported, they use a name that the student's file lacks."""
        if report.failed:
            last = report.longreprtext.splitlines()[-1]
            self.write("ended", sys.argv[1].partition(",")[0], last.removeprefix("E").strip())

    def pytest_collection_finish(self, session: Any):
        """Write which cases are going to run."""
        for item in session.items:
            own = dict(item.user_properties)
            self.write("found", item.nodeid, own["test"], own["task"], own["points"])

    def pytest_runtest_logreport(self, report: Any):
        """Write why a case has failed, and in which line of the course, or that it has passed."""
        if report.failed:
            text = report.longreprtext
            crash = getattr(report.longrepr, "reprcrash", None)
            wrong = (crash.message if crash else text)[:2000]
            lines = re.findall(r"^((?:step|common/)\S+: in \w+)", text, re.MULTILINE)
            self.write("ended", report.nodeid, wrong + "".join(f" ({line})" for line in lines[-1:]))
            if report.duration > int(os.environ["SECONDS_A_TEST"]) / 3:
                os._exit(0)  # ranks may still be computing: a new process runs the other tests
        elif report.when == "teardown":
            self.write("ended", report.nodeid, "")


def main():
    """Import the files and run the tests. In the end, no thread of a student's blocks the exit."""
    files, *words = sys.argv[1:]
    stack = (HERE / "stack").open("w")
    faulthandler.enable(stack, all_threads=False)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    recorder = Recorder()
    if all(recorder.import_file(file) for file in files.split(",")):
        os.chdir(HERE)
        words += ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=short"]
        pytest.main([*words, "-m", "task and not exhaustive"], plugins=[recorder])
    os._exit(0)


if __name__ == "__main__":
    main()
