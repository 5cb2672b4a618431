"""Runs extras/launch/slurm.sh under a real SLURM, with two nodes in one machine.

The test needs root and `apt-get install slurmctld slurmd slurm-client munge`.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from extras.tests.test_launch import rows, run

ROOT = Path(__file__).parents[2]
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
FLAGS = "--model debug,seq_len=32 --dtype fp64 --device cpu --steps 60"
FLAGS += " --global-batch-size 2 --micro-batch-size 1"
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.sock
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=a,b Default=YES
"""


def wait(ready: Callable[[], bool], log: Path):
    """Wait until `ready` returns True. Raises AssertionError, with the log, after two minutes."""
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end, log.read_text() if log.exists() else "nothing was logged"
        time.sleep(0.5)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Start SLURM on two nodes of one CPU each. Yields a function that runs a command and returns
    its output.
    """
    if os.geteuid() or not all(map(shutil.which, NEEDED)):
        pytest.skip(
            f"needs root, {', '.join(NEEDED)}: apt-get install slurmctld slurmd slurm-client munge"
        )
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [free.getsockname()[1] for free in sockets]
    folder = tmp_path / "slurm"
    for name in ("state", "a", "b"):
        (folder / name).mkdir(parents=True)
    (folder / "slurm.conf").write_text(
        CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=ports)
    )
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")

    def call(*words: str) -> str:
        return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    files = [f"--{name}-file={folder}/{name}" for name in ("pid", "log", "seed")]
    call("munged", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.sock", *files)
    for words in ("slurmctld -c", "slurmd -N a", "slurmd -N b"):
        call(*words.split())
    wait(
        lambda: call("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"],
        folder / "slurmctld.log",
    )
    yield call
    for name in ("a.pid", "b.pid", "slurmctld.pid", "pid"):
        os.kill(int((folder / name).read_text()), 15)


@pytest.mark.exhaustive
def test_a_job_saves_at_a_signal_and_is_queued_again(slurm, tmp_path):
    """At a signal, a job on two nodes saves and is queued again. It resumes, and has the losses of
    one process.
    """
    (tmp_path / "text.txt").write_text((ROOT / "step01_single_gpu.py").read_text())
    flags = f"{FLAGS} --dataset {tmp_path / 'text.txt'}".split()
    alone = ["step01_single_gpu.py", *flags, "--out", str(tmp_path / "one")]
    assert run(0, alone, tmp_path / "log")[0] == 0
    out = tmp_path / "two"
    log = tmp_path / "job.log"
    words = ["extras/launch/slurm.sh", "step02_ddp.py", *flags, "--out", str(out)]
    job = slurm("sbatch", "--parsable", "--gpus-per-node=0", f"--output={log}", *words).strip()

    def state() -> str:
        return slurm("squeue", "-h", "-j", job, "-o", "%T").strip()

    wait(lambda: len(rows(out)) >= 3, log)
    slurm("scancel", "--signal=USR1", "--batch", job)
    wait(lambda: state() == "PENDING", log)
    saved = len(rows(out))
    assert 3 <= saved < 60
    assert (out / f"checkpoints/step-{saved:08d}").exists()
    # A job that starts in the second in which it was queued again is refused: "credential revoked".
    time.sleep(2)
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # else SLURM waits for two minutes
    wait(lambda: state() in ("", "COMPLETED"), log)
    ours = [row["loss"] for row in rows(out)]
    assert ours == pytest.approx([row["loss"] for row in rows(tmp_path / "one")], rel=1e-10)
    assert len(ours) == 60
