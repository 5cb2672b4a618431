"""The course that stands alone grows in course/, with tests of its own: its modules have the names of those here.

So they run in a process of their own. When it holds everything, it takes the place of the files here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COURSE = Path(__file__).parents[1] / "course"
FIRST = (
    "house",
    "not_yet",
    "layouts",
    "laws",
    "faults",
    "checkpoint",
)  # the others are for the sweep, and for its folder


def run_tests(*arguments: str):
    """Run the course's tests. Raises AssertionError with the end of what they print."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=COURSE, env=clean, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", FIRST)
def test_the_course(name):
    """The rules of its house, every row of its table of layouts, its laws, its faults, its checkpoints."""
    run_tests(f"tests/test_{name}.py")


@pytest.mark.exhaustive
@pytest.mark.parametrize("marker", ["not exhaustive", "exhaustive"])
def test_all_of_the_course(marker):
    """All its tests, and its sweeps."""
    run_tests("-m", marker)
