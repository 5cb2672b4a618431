"""Commands in processes of their own. A fresh Python takes seconds to import torch; here one server has, and forks.

python tests/jobs.py      reads jobs, a line of JSON each: {"ranks", "folder", "words", "log", "env"}; answers a status

With ranks 0 a job is `python words`, otherwise `torchrun --standalone --nproc_per_node=ranks words`: the launcher is
torch's own, but its ranks are forked as well. The server imports nothing of ours: a job finds what is in its folder.
"""

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

SECONDS = 400  # that a job may take


def run_script(script: str, *words: str):
    """`python script words`, in a process that has already been forked."""
    sys.argv, sys.path[0] = [script, *words], os.getcwd()
    runpy.run_path(script, run_name="__main__")


def run_rank(script: str, *words: str):
    """A rank under a forked torchrun. It must return where a real one leaves by os._exit(0): torchrun waits for it."""
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(which, signal.SIG_DFL)
    leave = os._exit
    with mock.patch.object(os, "_exit", lambda status: leave(status) if status else sys.exit(0)):
        try:
            run_script(script, *words)
        except SystemExit as done:
            if done.code:
                raise


def run_torchrun(*words: str):
    """torchrun itself, whose ranks are forked from it."""
    from torch.distributed import run

    run.run_script_path = run_rank
    run.main(["--run-path", "--start-method=fork", *words])


def live(job: dict):
    """The life of a forked job."""
    os.setsid()
    signal.alarm(SECONDS)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(log, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(job["folder"])
    os.environ |= job["env"]
    status = 0
    try:
        if job["ranks"]:
            run_torchrun("--standalone", f"--nproc_per_node={job['ranks']}", *job["words"])
        else:
            run_script(*job["words"])
    except SystemExit as done:
        status = done.code or 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    sys.stderr.flush()
    os._exit(status)


def serve():
    """Jobs come in, exit statuses go out."""
    import matplotlib.figure  # noqa: F401
    import torch._dynamo  # what an optimizer's first step imports: seconds
    import torch.distributed.run
    import tqdm  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            live(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


class Server:
    """The server as seen by a test."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def run(self, folder: Path, ranks: int, *words: str, log: Path | None = None, **env: str) -> tuple[int, str]:
        """(exit status, everything printed) of a job in a folder; ranks 0: without torchrun. `env` adds variables."""
        log = log or folder / "log.txt"
        job = dict(folder=str(folder), ranks=ranks, words=words, log=str(log), env=env)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return status, log.read_text()

    def stop(self):
        """The end of its input ends it."""
        self.process.stdin.close()
        self.process.wait()


def environment() -> dict[str, str]:
    """Of a process that finds no module of ours but in its own folder."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return kept | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


if __name__ == "__main__":
    serve()
