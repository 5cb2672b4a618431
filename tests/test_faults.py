"""Each mistake of faults.py, made in a copy of the course, must make a test of its step fail."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
NAMES = [f"{fault.module}: {fault.meaning}" for fault in FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_text_is_there(fault: Fault):
    """A fault's text occurs once in its file, and the test that must fail exists."""
    file, test = fault.test.split("::")
    assert (ROOT / f"{fault.module.replace('.', '/')}.py").read_text().count(fault.old) == 1
    assert f"def {test.split('[')[0]}(" in (ROOT / "tests" / f"{file}.py").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path):
    """In a copy of the course that has the mistake, the fault's test fails. (In the course itself
    it passes.)
    """
    for name in "common", "tests":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("step0*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    path = tmp_path / f"{fault.module.replace('.', '/')}.py"
    path.write_text(path.read_text().replace(fault.old, fault.new))
    file, test = fault.test.split("::")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", f"tests/{file}.py::{test}"]
    signal.alarm(0)  # the tests that run there have their own time limit
    env = os.environ | dict(PYTHONPATH="", SECONDS_A_TEST="40")
    log = tmp_path / "log"
    with log.open("w") as file:  # a file, because workers that hang would keep a pipe open
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=file, stderr=file)
    assert done.returncode == 1, f"no failure although {fault.meaning}\n{log.read_text()[-500:]}"
