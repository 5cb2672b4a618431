"""Tests emulated nodes (services/cluster.py): two nodes train as one process does, and leave no process behind."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from extras.services import cluster
from extras.services.plots import read_metrics
from extras.tests import equal
from extras.tests.pool import ROOT, start
from extras.tests.pool import run as launch
from extras.variants.record import spelled


class Job:
    """A run of step 7, launched as in extras/README.md, on two nodes with one rank and one pipeline stage each."""

    def __init__(self, folder: Path, steps: int):
        self.out, self.log, text = folder / "run", folder / "log", folder / "text.txt"
        text.write_text((ROOT / "RESULTS.md").read_text())
        self.flags = dict(equal.BASE, n_layers=4, experts=4, global_batch_size=4, steps=steps, dataset=str(text))
        words = ["-m", "extras.tools.cluster", "--gbit", "0.1", "--", "-m", "extras", "step07_moe_ep.py"]
        for flag in (equal.SMALL | self.flags | dict(pp=2, out=self.out)).items():
            words += spelled(*flag).split()
        with open(self.log, "w") as log:
            self.process = start(0, words, stdout=log, stderr=log)

    def numbers(self) -> list[tuple[float, float]]:
        """Losses and gradient norms so far."""
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(self.out)]

    def begin(self):
        """Wait until the first step is recorded."""
        while not self.numbers():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)


@pytest.fixture
def job(tmp_path):
    """`job(steps)` starts a `Job`, which is killed after the test. Skips the test if no cluster is allowed here."""
    words = ["-m", "extras.tools.cluster", "--nodes", "1", "--", "--help"]
    if cluster.NO_RIGHTS in (said := launch(0, words, tmp_path / "help.log")[1]):
        pytest.skip(said)
    made = []
    yield lambda steps: made.append(Job(tmp_path, steps)) or made[0]
    for one in made:
        one.process.kill()
        one.process.wait()


def test_two_nodes_train_as_one_process(job, pools):
    """Losses and gradient norms of a pipeline over two nodes equal those of one process."""
    run = job(4)
    (one,) = pools(1).run(equal.record, "step07_moe_ep", run.flags)
    assert run.process.wait(400) == 0, run.log.read_text()
    assert equal.difference(run.numbers(), [*zip(one.losses, one.norms, strict=True)]) < equal.BOUND["fp64"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left(job, number):
    """After SIGKILL or SIGTERM, the processes of all nodes end. The nodes' network is never visible on the host."""
    run = job(10**6)
    alive = lambda: subprocess.run(["pgrep", "-f", str(run.out)], capture_output=True).stdout.split()  # noqa: E731
    run.begin()
    assert len(alive()) > 4 and not {"switch", "port0"} & {*os.listdir("/sys/class/net")}
    run.process.send_signal(number)
    run.process.wait(20)
    end = time.monotonic() + 5
    while alive():
        assert time.monotonic() < end
        time.sleep(0.02)
    assert any(run.out.glob("**/step-*")) == (number == signal.SIGTERM)  # only SIGTERM lets it save


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "-- step02_ddp.py"),
        (["--nodes", "0", "--", "step02_ddp.py"], "--nodes is 1 to 200"),
        (["--gbit", "0", "--", "step02_ddp.py"], "--gbit"),
        (["--", "step02_ddp.py"], cluster.NO_RIGHTS),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, words, says):
    """Wrong flags, or a kernel that refuses namespaces, give an error of one line before anything is created."""
    monkeypatch.setattr(cluster, "ENTER", "false")
    assert cluster.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_the_kernel_counts_what_the_law_says_at_the_speed_of_the_cable(job, tmp_path):
    """The Linux kernel counts the laws' bytes on the cable and, because gloo adds a few, less than 4 % more."""
    _, said = launch(0, ["-m", "extras.bench", "cluster-bytes", "--gbit=0.1"], tmp_path / "log")
    took = float(re.search(r" Gbit/s: ([\d.]+) s$", said, re.M)[1])
    assert 0.15 < took < 2  # 2 MB at 0.1 Gbit/s take 0.16 s, and longer on a busy machine
    found = re.findall(r"^step.* ([+-][\d.]+)% ", said, re.M)
    assert len(found) == 7 and all(-0.1 < float(off) < 4 for off in found), said
