"""Nodes that are namespaces, joined by cables: two machines train as one process does, and leave nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import UserError
from extras.services import cluster
from extras.services.plots import read_metrics
from extras.tests import equal
from extras.tests.bench.cluster import count, off, rows
from extras.tests.bench.nodes import on_nodes
from extras.tests.faults import Fault, injected

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "RESULTS.md"
SHAPE = dict(equal.SMALL, n_layers=4)
FLAGS = dict(equal.BASE, experts=4, global_batch_size=4, steps=4)


SILENT = {  # a layout; a mistake that changes no number of it, and that no observer is shown
    "a sum sent twice": ("--sync naive", Fault(
        "step02_ddp", "NaiveSync", "dist.all_reduce(gradient, group=group.handle)",
        "[dist.all_reduce(g, group=group.handle) for g in (gradient.clone(), gradient)]", "one sum is thrown away",
    )),
    "a message sent twice": ("--sync ring", Fault(
        "common.comm", "exchange", "*(dist.batch_isend_irecv(operations) if",
        "*(dist.batch_isend_irecv(operations) + dist.batch_isend_irecv(operations) if", "the second is as the first",
    )),
}  # fmt: skip


def words(flags: dict) -> list[str]:
    """Flags as on a command line."""
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


class Job:
    """A cluster that runs; `say` types a line, `until` waits for something that the job has written."""

    def __init__(self, out: Path, *line: str, **flags: object):
        line = [part for word in line for part in (("-m", "extras", word) if word.startswith("step") else (word,))]
        command = [sys.executable, "-m", "extras.services.cluster", *words(flags), "--", *line, "--out", str(out)]
        self.out, self.log = out, out.with_suffix(".log")
        with open(self.log, "w") as log:
            streams = dict(stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
            self.process = subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"), **streams)

    def say(self, line: str):
        """On the cluster's keyboard."""
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def rows(self) -> list[dict]:
        """What the run's metrics have so far."""
        return read_metrics(self.out)

    def until(self, steps: int, seconds: float = 200):
        """Wait for so many steps; less if the job ends. Skips the test if this machine cannot have a cluster."""
        end = time.monotonic() + seconds
        while len(self.rows()) < steps and self.process.poll() is None:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def wait(self, seconds: float = 200) -> int:
        """Its exit status. Skips the test if this machine cannot have a cluster."""
        status, said = self.process.wait(seconds), self.log.read_text()
        if cluster.NO_RIGHTS in said:
            pytest.skip(next(line for line in said.splitlines() if cluster.NO_RIGHTS in line))
        return status


@pytest.fixture
def job(tmp_path):
    """Starts clusters, and ends them. Skips the test where tools are missing."""
    if lacks := cluster.missing():
        pytest.skip(lacks)
    made = []

    def start(*line: str, **flags: object) -> Job:
        made.append(Job(tmp_path / f"run{len(made)}", *line, **flags))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.wait()


def alive(text: str) -> list[str]:
    """Processes whose command lines have it."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        found += [entry] * (text.encode() in line)
    return found


def test_two_nodes_train_as_one_process(job, pools, tmp_path):
    """README's line for two nodes, with fewer ranks: stages on different nodes. In the middle the cable is pulled."""
    (tmp_path / "text.txt").write_text(RESULTS.read_text())
    flags = FLAGS | SHAPE | dict(dataset=str(tmp_path / "text.txt"))
    run = job("step07_moe_ep.py", *words(flags), "--pp", "2", nodes=2, gbit=0.1)
    run.until(1)
    run.say("cable 1 off")
    time.sleep(0.5)
    seen = len(run.rows())
    time.sleep(0.5)
    assert len(run.rows()) == seen < FLAGS["steps"]
    run.say("cable 1 on")
    one = pools(1).run(equal.record, "step07_moe_ep", flags)[0]
    assert run.wait() == 0, run.log.read_text()
    for row, loss, norm in zip(run.rows(), one.losses, one.norms, strict=True):
        assert equal.difference([row["loss"], row["grad_norm"]], [loss, norm]) < equal.BOUND["fp64"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left(job, number):
    """However it is told to end: processes of all nodes are gone, and no network of theirs is seen outside."""
    run = job("step02_ddp.py", nodes=3)
    while len(alive(str(run.out))) < 4 and run.process.poll() is None:
        time.sleep(0.02)
    if run.process.poll() is not None:
        run.wait()
    assert not {"switch", "port0"} & {*os.listdir("/sys/class/net")}
    run.process.send_signal(number)
    run.process.wait(20)
    end = time.monotonic() + 5
    while alive(str(run.out)):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "-- step02_ddp.py"),
        (["--nodes", "0", "--", "step02_ddp.py"], "--nodes is 1 to 200"),
        (["--gbit", "0", "--", "step02_ddp.py"], "--gbit"),
    ],
)
def test_a_mistake_is_one_line(capsys, words, says):
    """Before anything is made."""
    assert cluster.main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error


def test_what_is_missing_is_one_line(capsys, monkeypatch):
    """Another system; no iproute2; a kernel that refuses."""
    line = ["--", "step02_ddp.py"]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert cluster.main(line) == 2 and "this is darwin" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
        assert cluster.main(line) == 2 and "no ip, tc here: install iproute2" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "missing", lambda: "")
        patch.setattr(cluster, "USERS", 1)  # no flag of unshare's: it refuses, and has done nothing
        assert cluster.main(line) == 2 and cluster.NO_RIGHTS in capsys.readouterr().err


def test_the_cable_is_as_fast_as_asked():
    """A burst is a millisecond's if that is 64 KiB; else two packets, or a tenth of a millisecond's."""
    assert cluster.speed(1.0) == f"rate 1000000kbit burst 125000 limit {2**26}"
    assert cluster.speed(0.4) == f"rate 400000kbit burst 5000 limit {2**26}"
    assert cluster.speed(0.01) == f"rate 10000kbit burst 3028 limit {2**26}"


def counts(*args: object, **cluster_flags: object) -> list:
    """`on_nodes`, where this machine allows it; else the test is skipped."""
    if lacks := cluster.missing():
        pytest.skip(lacks)
    try:
        return on_nodes(*args, **cluster_flags)
    except UserError as error:
        if cluster.NO_RIGHTS in str(error):
            pytest.skip(str(error))
        raise


def with_and_without() -> dict[str, tuple[float, float]]:
    """Runs on every rank: by mistake how far the cable's bytes are off the law, without it and with it."""
    found = {}
    for name, (flags, fault) in SILENT.items():
        entries = {"": next(entry for row, (_, entry) in rows().items() if flags in row)}
        found[name] = tuple(off(count(entries, 1, mistake)[""]) for mistake in ("", fault))
    return found


def test_the_kernel_counts_what_the_law_says():
    """Within 1 %; and what is sent behind the observer's back is nearly as much again."""
    for name, (right, wrong) in counts(with_and_without, gbit=10.0)[0].items():
        assert abs(right) < 0.01, (name, right)
        assert 0.9 < wrong < 1.1, (name, wrong)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", sorted({ranks for ranks, _ in rows().values()}))
def test_every_dimension_that_crosses_the_cable(ranks):
    """Each sum, stage of ZeRO, way of tp, cp and ep, and schedule."""
    entries = {name: entry for name, (n, entry) in rows().items() if n == ranks}
    for name, one in counts(count, entries, 2, ranks=ranks, gbit=10.0)[0].items():
        assert abs(off(one)) < 0.01, (name, one)


@pytest.mark.parametrize("name", SILENT)
def test_a_silent_mistake_is_in_the_program(name):
    """Its text is there, so the test above has seen it."""
    with injected(SILENT[name][1]):
        pass


LONG = dict(equal.BASE, steps=16, save_every=4, resume="auto", timeout=20) | equal.SMALL


@pytest.fixture(scope="module")
def undisturbed(pools):
    """Losses and gradient norms of two ranks to which nothing happens."""
    options = {name: value for name, value in LONG.items() if name not in ("resume", "timeout")}
    seen = pools(2).run(equal.record, "step02_ddp", options)[0]
    return list(zip(seen.losses, seen.norms, strict=True))


def numbers(run: Job) -> list[tuple[float, float]]:
    """The same of a job."""
    return [(row["loss"], row["grad_norm"]) for row in run.rows()]


def long_job(job, *options: str, **flags: float) -> Job:
    """A job of two nodes that has done some steps, of a third of a second each."""
    run = job(*options, "step02_ddp.py", *words(LONG), **dict(nodes=2, gbit=0.01) | flags)
    run.until(6)
    if len(run.rows()) < 6:
        run.wait()
    return run


@pytest.mark.exhaustive
def test_a_cable_is_pulled_for_a_while(job, undisturbed):
    """TCP sends again what was lost: the same bits, later."""
    run = long_job(job)
    run.say("cable 1 off")
    time.sleep(3)
    run.say("cable 1 on")
    assert run.wait() == 0 and numbers(run) == undisturbed, run.log.read_text()


@pytest.mark.exhaustive
def test_a_cable_is_pulled_for_good(job):
    """All ranks end by themselves, and each says where it stands. (torchrun itself waits on its node.)"""
    run = long_job(job)
    run.say("cable 1 off")
    assert run.wait() != 0
    said = run.log.read_text()
    assert "node0: error: rank 0: step" in said and "node1: error: rank 1: step" in said, said


@pytest.mark.exhaustive
def test_a_node_dies_and_comes_back(job, undisturbed, monkeypatch):
    """It is switched on again, both nodes meet anew, and go on from the checkpoint to the same bits.

    torchrun's agents share a store, whose address node 0 writes down once, for the first round alone (torch 2.13): an
    agent that is new in a later round would wait for it in vain. The variable turns this sharing off.
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run = long_job(job, "--max-restarts=3")
    run.say("kill 1")
    time.sleep(5)
    run.say("start 1")
    assert run.wait(400) == 0, run.log.read_text()
    assert "going on from" in run.log.read_text() and numbers(run) == undisturbed


@pytest.mark.exhaustive
def test_a_node_dies_and_the_other_goes_on(job, undisturbed):
    """With --nnodes=1:2 one node takes over all sequences: the numbers of two, up to rounding."""
    run = long_job(job, "--max-restarts=3", "--nnodes=1:2")
    run.say("kill 1")
    assert run.wait(400) == 0, run.log.read_text()
    assert equal.difference(numbers(run), undisturbed) < equal.BOUND["fp64"]


@pytest.mark.exhaustive
def test_a_node_comes_late(job, undisturbed):
    """The first waits for it."""
    run = job("step02_ddp.py", *words(LONG), nodes=2, gbit=0.1)
    run.say("kill 1")
    time.sleep(8)
    assert not run.rows()
    run.say("start 1")
    assert run.wait() == 0 and numbers(run) == undisturbed, run.log.read_text()


@pytest.mark.exhaustive
def test_a_slow_node_is_named(job):
    """--log-ranks: the straggler waits least, and the other one for it."""
    run = job("step02_ddp.py", *words(LONG), "--log-ranks", nodes=2, gbit=1.0)
    run.until(1)
    run.say("slow 1 10")
    assert run.wait() == 0, run.log.read_text()
    waited = [sum(row["ranks"][rank]["waited_seconds"] for row in run.rows()[2:]) for rank in range(2)]
    assert waited[0] > 2 * waited[1], waited
