"""Runs code as a script, in a process of its own. It starts at once, because it is forked from the
server of pool.py, which has imported torch.
"""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.pool import PRELOADED, ROOT


class Ended(NamedTuple):
    """A process that has ended."""

    status: int
    output: str  # what it has written to stdout and stderr


def serve(code: str, flags: tuple, variables: dict[str, str], log: Path):
    """What the process does."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ |= variables
    sys.argv = ["script.py", *flags]
    exec(compile(code, "script.py", "exec"), dict(__name__="__main__"))


class Script:
    """A script that runs."""

    def __init__(self, code: str, *flags: str, log: Path, **variables: str):
        """Start it. `log`: a new file for its output. `variables`: of the environment."""
        context = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(PRELOADED)
        self.log = log
        args: Any = (code, flags, variables, log)
        self.process = context.Process(target=serve, args=args, daemon=True)
        self.process.start()

    def end(self) -> Ended:
        """Wait for its end."""
        self.process.join()
        return Ended(self.process.exitcode, self.log.read_text())


def step(name: str) -> str:
    """The code of one of the course's scripts: "step01_single_gpu"."""
    return f"import runpy; runpy.run_path('{name}.py', run_name='__main__')"
