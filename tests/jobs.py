"""Real commands as subprocesses: start them, wait for what they do, find and signal their ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.plots import read_metrics

ROOT = Path(__file__).parents[1]


def as_flags(options: dict) -> list[str]:
    """Options of a Config as a command line."""
    words = []
    for key, value in options.items():
        flag = key.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def launch(*arguments: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen:
    """Python with these arguments, at the project's root; if it has to be aborted, it says where it was."""
    environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", PYTHONFAULTHANDLER="1")
    pipes = dict(stdout=subprocess.PIPE, stderr=stderr, text=True)
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, start_new_session=True, **pipes)


def torchrun(*arguments: str, **options) -> subprocess.Popen:
    """torchrun with these arguments."""
    return launch("-m", "torch.distributed.run", *arguments, **options)


def ranks_of(job: subprocess.Popen) -> dict[int, int]:
    """Process ids of a job's ranks by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0") if parent == job.pid else []
        except OSError:
            continue
        for entry in variables:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(path.name)
    return found


def end(job: subprocess.Popen, how: signal.Signals = signal.SIGKILL):
    """A signal to a job and its ranks (torchrun gives each a session of its own), if it is still there."""
    if job.poll() is None:
        for pid in [*ranks_of(job).values(), job.pid]:
            os.kill(pid, how)


def wait_for(what: Callable[[], object], job: subprocess.Popen, seconds: float = 240.0):
    """Until `what()` is true. Fails with what the job printed if it ends before, or is aborted after that time.

    (Importing torch can take a minute where its files have to be read from a slow disk again.)
    """
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            end(job, signal.SIGABRT)
            job.wait()
        assert job.poll() is None, "\n".join(filter(None, job.communicate()))
        time.sleep(0.003)


def steps_done(out: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        return read_metrics(out)[-1]["step"]
    except (OSError, IndexError):
        return 0
