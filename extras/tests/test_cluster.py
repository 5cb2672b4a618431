"""Tests emulated nodes (extras/tools/cluster.py): two nodes train as one process does, and nothing
is left.
"""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from common import UserError
from extras.tests.test_launch import rows, run, start
from extras.tools import cluster

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--model debug,n_layers=4 --dtype fp64 --global-batch-size 4 --micro-batch-size 1 --device cpu"
)


@pytest.fixture
def text(tmp_path):
    """A small text. Skips the test if no cluster is allowed here."""
    try:
        cluster.probe()
    except UserError as refused:
        pytest.skip(str(refused))
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "RESULTS.md").read_text())
    return path


def words_of(text: Path, out: Path, steps: int) -> list[str]:
    """A pipeline over two nodes of one rank each, at 0.1 Gbit/s."""
    flags = f"{FLAGS} --dataset {text} --steps {steps} --out {out} --pp 2".split()
    return ["-m", "extras.tools.cluster", "--gbit", "0.1", "--", "step06_pipeline.py", *flags]


def test_two_nodes_train_as_one_process(text, tmp_path):
    """Losses and gradient norms of a pipeline over two nodes equal those of one process."""
    status, said = run(0, words_of(text, tmp_path / "two", 4), tmp_path / "log")
    assert status == 0, said
    one = f"step01_single_gpu.py {FLAGS} --dataset {text} --steps 4 --out {tmp_path / 'one'}"
    assert run(0, one.split(), tmp_path / "log")[0] == 0
    numbers = [
        [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / name)]
        for name in ("one", "two")
    ]
    for expected, found in zip(*numbers, strict=True):
        assert found == pytest.approx(expected, rel=1e-10)


def test_nothing_is_left_after_sigkill(text, tmp_path):
    """The processes of all nodes end, and the nodes' network is never visible on the host."""
    out = tmp_path / "run"
    job = start(0, words_of(text, out, 10**6), tmp_path / "log")
    while not rows(out):
        assert job.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.1)
    assert not {"switch", "port0"} & set(os.listdir("/sys/class/net"))
    job.send_signal(signal.SIGKILL)
    job.wait(20)
    end = time.monotonic() + 10
    while subprocess.run(["pgrep", "-f", str(out)], capture_output=True).stdout:
        assert time.monotonic() < end
        time.sleep(0.1)


MISTAKES = [
    ("", "-- step02_ddp.py"),
    ("--nodes 0 -- step02_ddp.py", "--nodes is 0"),
    ("--gbit 0 -- step02_ddp.py", "--gbit 1e-6 to 1000"),
    ("-- step02_ddp.py", cluster.NO_RIGHTS),
]


@pytest.mark.parametrize("line, named", MISTAKES)
def test_a_mistake_is_one_line(monkeypatch, line, named):
    """Wrong flags, or a kernel that refuses namespaces, are errors before anything is created."""
    monkeypatch.setattr(cluster, "ENTER", "false")
    with pytest.raises(UserError, match=re.escape(named)):
        cluster.main(line.split())
