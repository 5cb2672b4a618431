"""Every mistake of faults.py, put into a copy of the course, turns its chapter's own test red."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
NAMES = [f"{fault.module}: {fault.new.strip()[:40]}" for fault in FAULTS]


@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_the_text_is_there(fault: Fault):
    """Once in its file; and the test that must notice exists."""
    file, test = fault.test.split("::")
    assert (ROOT / f"{fault.module.replace('.', '/')}.py").read_text().count(fault.old) == 1
    assert f"def {test.split('[')[0]}(" in (ROOT / "tests" / f"{file}.py").read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=NAMES)
def test_a_fault_is_noticed(fault: Fault, tmp_path: Path):
    """The test fails with the mistake. (That it passes without is what the chapter's file shows.)"""
    for name in "common", "tests":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("step0*.py"), ROOT / "pyproject.toml"]:
        shutil.copy(path, tmp_path)
    path = tmp_path / f"{fault.module.replace('.', '/')}.py"
    path.write_text(path.read_text().replace(fault.old, fault.new))
    file, test = fault.test.split("::")
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", f"tests/{file}.py::{test}"]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    signal.alarm(0)  # what runs there has limits of its own
    env, log = kept | dict(SECONDS_A_TEST="40"), tmp_path / "log"
    with log.open("w") as file:  # no pipe: workers that hang would keep it open
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=file, stderr=file)
    assert done.returncode == 1, f"{fault.meaning}: not noticed\n{log.read_text()[-500:]}"
