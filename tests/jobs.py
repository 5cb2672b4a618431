"""Commands in processes of their own: start them, wait for what they do, find and signal their ranks.

`launch` and `torchrun` start real ones: each Python takes six seconds of CPU to import what training needs. `forked`
and `forked_torchrun` start the same in a process forked from the pools' server, which has imported all of it.
"""

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from services.plots import read_metrics
from tests.pool import forkserver

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


class Forked:
    """A forked process that runs a function, and what a test asks of a Popen: its output is read line by line."""

    def __init__(self, function: Callable, *args: Any):
        context = forkserver()
        ours, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=run_apart, args=(theirs, function, *args))
        self.process.start()
        theirs.close()
        self.pid, self.stdout = self.process.pid, os.fdopen(os.dup(ours.fileno()))
        ours.close()

    @property
    def returncode(self) -> int | None:
        """Exit status, or minus the signal that ended it; None while it runs."""
        return self.process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends. Raises TimeoutExpired."""
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.process), timeout)
        return self.returncode

    def send_signal(self, which: signal.Signals):
        """To this process alone."""
        os.kill(self.pid, which)

    def communicate(self) -> tuple[str, None]:
        """What it has printed and nobody has read, once all have closed their output."""
        return self.stdout.read(), None


def run_apart(out: Connection, function: Callable, *args: Any):
    """A forked process' life: like a fresh one, with `out` as its output, in a session of its own."""
    os.setsid()
    for number in (1, 2):
        os.dup2(out.fileno(), number)
    out.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    function(*args)


def run_module(name: str, *arguments: str):
    """`python -m name arguments`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_rank(script: str, *arguments: str):
    """A rank under a forked torchrun: as in a fresh Python, signals do what they do by default.

    A rank that is done leaves by os._exit(0). Here it has to return: that is what torchrun waits for.
    """
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(which, signal.SIG_DFL)
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    sys.argv, leave = [script, *arguments], os._exit
    with mock.patch.object(os, "_exit", lambda status: leave(status) if status else sys.exit(0)):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as done:
            if done.code:
                raise


def run_torchrun(*arguments: str):
    """torchrun itself, whose ranks are forked from it.

    A rank that is done waits until torchrun has noticed. A torchrun that is told to end does not, and would let it wait
    for half a minute.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    close = MultiprocessContext._close

    def close_at_once(self, *args: Any, **kwargs: Any):
        self._worker_finished_event.set()
        close(self, *args, **kwargs)

    run.run_script_path = run_rank
    with mock.patch.object(MultiprocessContext, "_close", close_at_once):
        run.main(["--run-path", "--start-method=fork", *arguments])


def forked(module: str, *arguments: str) -> Forked:
    """`python -m module arguments`, forked."""
    return Forked(run_module, module, *arguments)


def forked_torchrun(*arguments: str) -> Forked:
    """torchrun with these arguments, forked: the launcher and its restarts are the real ones."""
    return Forked(run_torchrun, *arguments)


Job = subprocess.Popen | Forked


def ranks_of(job: Job) -> dict[int, int]:
    """Process ids of a job's ranks by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent != job.pid:
                continue
            forked_as = (path / "comm").read_bytes().strip().replace(b"rank ", b"RANK=")
            variables = [*(path / "environ").read_bytes().split(b"\0"), forked_as]
        except OSError:
            continue
        for entry in variables:
            if entry.startswith(b"RANK="):
                found[int(entry[5:])] = int(path.name)
    return found


def end(job: Job, how: signal.Signals = signal.SIGKILL):
    """A signal to a job and its ranks (torchrun gives each a session of its own), if it is still there."""
    if job.poll() is None:
        for pid in [*ranks_of(job).values(), job.pid]:
            os.kill(pid, how)


def wait_for(what: Callable[[], object], job: Job, seconds: float = 240.0):
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


def lines_until(job: Job, text: str) -> list[str]:
    """What a job prints, as far as the first line with this text."""
    lines = []
    for line in job.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def steps_done(out: Path) -> int:
    """The last step in metrics.jsonl."""
    try:
        return read_metrics(out)[-1]["step"]
    except (OSError, IndexError):
        return 0
