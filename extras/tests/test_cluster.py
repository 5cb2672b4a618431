"""Emulated nodes (services/cluster.py): two machines train as one process does, and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from extras.services import cluster
from extras.services.plots import read_metrics
from extras.tests import equal
from extras.variants.record import spelled

ROOT = Path(__file__).parents[2]
TRAINING = dict(equal.BASE, n_layers=4, experts=4, global_batch_size=4, steps=4)
LONG = dict(equal.BASE, steps=16, save_every=4) | equal.SMALL


class Job:
    """A training run in a cluster: `say` types a line, `until` waits for steps."""

    def __init__(self, out: Path, step: str, training: dict, *options: str, **flags: object):
        """`options` of torchrun come before the step. `flags` are the cluster's."""
        before, line = ([spelled(*flag) for flag in each.items()] for each in (flags, training | dict(out=out)))
        words = ["-m extras.services.cluster", *before, "--", *options, "-m extras", step, *line]
        command = [sys.executable, *" ".join(words).split()]
        self.out, self.log = out, out.with_suffix(".log")
        with open(self.log, "w") as log:
            streams = dict(stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"), **streams)

    def say(self, line: str):
        """Type a line on the cluster's keyboard."""
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def numbers(self) -> list[tuple[float, float]]:
        """Losses and gradient norms so far."""
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(self.out)]

    def until(self, steps: int):
        """Wait until so many steps are done."""
        end = time.monotonic() + 200
        while len(self.numbers()) < steps:
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def allowed():
    """Skips the tests if this machine does not allow a cluster."""
    line = [sys.executable, "-m", "extras.services.cluster", "--nodes", "1", "--", "--help"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stderr
    if cluster.NO_RIGHTS in said:
        pytest.skip(said)


@pytest.fixture
def job(allowed, tmp_path):
    """Starts a cluster, and ends it."""
    made = []

    def start(*same: object, **flags: object) -> Job:
        made.append(Job(tmp_path / "run", *same, **flags))
        return made[0]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def test_two_nodes_train_as_one_process(job, pools, tmp_path):
    """README's launch line for two nodes, with fewer ranks and a stage on each. Meanwhile the cable is pulled."""
    (tmp_path / "text.txt").write_text((ROOT / "RESULTS.md").read_text())
    flags = TRAINING | dict(dataset=str(tmp_path / "text.txt"))
    run = job("step07_moe_ep.py", equal.SMALL | flags | dict(pp=2), nodes=2, gbit=0.1)
    run.until(1)
    run.say("cable 1 off")
    time.sleep(0.5)
    seen = len(run.numbers())
    time.sleep(0.5)
    assert len(run.numbers()) == seen < 4
    run.say("cable 1 on")
    one = pools(1).run(equal.record, "step07_moe_ep", flags)[0]
    assert run.process.wait(200) == 0, run.log.read_text()
    assert equal.difference(run.numbers(), [*zip(one.losses, one.norms, strict=True)]) < equal.BOUND["fp64"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left(job, number):
    """After either signal, the processes of all nodes end. Their network is never visible outside."""
    run = job("step02_ddp.py", equal.BASE | equal.SMALL | dict(steps=1000), nodes=3)

    def alive() -> int:
        found = 0
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                found += str(run.out).encode() in line.read_bytes()
        return found

    while alive() < 4:
        assert run.process.poll() is None, run.log.read_text()
        time.sleep(0.02)
    assert not {"switch", "port0"} & {*os.listdir("/sys/class/net")}
    run.process.send_signal(number)
    run.process.wait(20)
    end = time.monotonic() + 5
    while alive():
        assert time.monotonic() < end
        time.sleep(0.02)


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
    """The line comes before anything is created, also if the kernel refuses namespaces."""
    monkeypatch.setattr(cluster, "USERS", 1)  # not a flag of unshare, so it refuses and does nothing
    assert cluster.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


@pytest.mark.parametrize("only, gbit", [(" --sync ring", 0.1), pytest.param("", 10.0, marks=pytest.mark.exhaustive)])
def test_the_kernel_counts_what_the_law_says_at_the_speed_of_the_cable(allowed, only, gbit):
    """Both agree within 1 %, so nothing is sent twice, or without the observer's knowledge."""
    line = [sys.executable, "-m", "extras.tests.bench", "cluster-bytes", f"--only={only}", f"--gbit={gbit}"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout
    took = float(re.search(r" Gbit/s: ([\d.]+) s$", said, re.M)[1])
    assert 0.015 / gbit < took < 2  # 2 MB at 0.1 Gbit/s take 0.16 s, and longer on a busy machine
    found = re.findall(r"^step.* ([+-][\d.]+)% ", said, re.M)
    assert found and all(abs(float(off)) < 1 for off in found), said


FAULTS = {  # torchrun's options; steps before the first line; lines to type, or seconds to wait; how it ends
    "a cable is pulled for a while": ([], 6, ["cable 1 off", 3, "cable 1 on"], "same bits"),
    "a cable is pulled for good": ([], 6, ["cable 1 off"], "error"),
    "a node dies and comes back": (["--max-restarts=3"], 6, ["kill 1", 5, "start 1"], "same bits"),
    "a node dies for good": (["--max-restarts=3", "--nnodes=1:2"], 6, ["kill 1"], "rounding"),
    "a node comes late": ([], 0, ["kill 1", 8, "start 1"], "same bits"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_as_the_table_says(job, pools, monkeypatch, name):
    """See the table in extras/tests/README.md. A restarted job resumes from its last checkpoint.

    The torchruns share a store, whose address node 0 publishes only in the first round (torch 2.13): a torchrun that
    joins a later round would wait for it in vain. The variable turns this sharing off.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    options, steps, typed, end = FAULTS[name]
    run = job("step02_ddp.py", LONG | dict(resume="auto", timeout=20), *options, nodes=2, gbit=0.01 if steps else 1.0)
    run.until(steps)
    for line in typed:
        time.sleep(line) if isinstance(line, int) else run.say(line)
    status, said = run.process.wait(400), run.log.read_text()
    if end == "error":  # (torchrun itself waits on its node)
        assert status and "node0: error: rank 0: step" in said and "node1: error: rank 1: step" in said, said
        return
    seen = pools(2).run(equal.record, "step02_ddp", LONG)[0]
    undisturbed = [*zip(seen.losses, seen.norms, strict=True)]
    assert status == 0 and ("resuming from" in said) == bool(options), said
    assert equal.difference(run.numbers(), undisturbed) <= (equal.BOUND["fp64"] if end == "rounding" else 0.0)
