"""Each bug of bugs.py, made in a copy of the course, must make its test fail."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bugs import BUGS, Bug

ROOT = Path(__file__).parents[1]
NAMES = [f"{bug.file}: {bug.meaning}" for bug in BUGS]


@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_a_bug_can_be_made(bug: Bug):
    """The text that it replaces occurs once in its file, and the test that must fail exists."""
    file, test = bug.test.split("::")
    assert (ROOT / bug.file).read_text().count(bug.before) == 1
    assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", BUGS, ids=NAMES)
def test_a_bug_is_noticed(bug: Bug, tmp_path: Path):
    """In a copy of the course that has the bug, its test fails."""
    for name in ("common", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("step0*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    path = tmp_path / bug.file
    path.write_text(path.read_text().replace(bug.before, bug.after))
    file, test = bug.test.split("::")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", f"tests/{file}.py::{test}"]
    environment = dict(os.environ, SECONDS_A_TEST="40")
    environment.pop("PYTHONPATH", None)
    signal.alarm(0)  # the tests that run there have their own time limit
    log = tmp_path / "log"
    with log.open("w") as output:  # a file, because workers that hang would keep a pipe open
        done = subprocess.run(words, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    assert done.returncode == 1, f"no failure although {bug.meaning}\n{log.read_text()[-500:]}"
