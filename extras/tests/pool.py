"""Starts command lines and pools of ranks. The pools are those of tests/pool.py; their server also imports extras."""

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import pool
from tests.pool import ROOT as ROOT
from tests.pool import RankError as RankError

pool.PRELOADED.extend(["step07_moe_ep", "extras.services.run", "extras.tests.equal"])


# Prefixes of the variables that torchrun sets. If torchrun has started the tests, `start` removes them.
OUTER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_")


def error_of(kind: type[Exception], function: Callable, *args: Any) -> str:
    """Runs on every rank: call a function; returns the message if it raises an error of this kind, else ""."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return ""


def start(ranks: int, words: list[str], **options: Any) -> subprocess.Popen:
    """Start `python words` or, if `ranks` > 0, `torchrun words`. Each process has one thread. `options` go to Popen."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    ours = {key: value for key, value in os.environ.items() if not key.startswith((*OUTER, "PYTHONPATH"))}
    options["env"] = ours | dict(OMP_NUM_THREADS="1") | options.pop("env", {})
    return subprocess.Popen([sys.executable, *torchrun, *words], cwd=ROOT, start_new_session=True, **options)


def run(ranks: int, words: list[str], log: Path, **env: str) -> tuple[int, str]:
    """Call `start`, and wait for the process; returns (exit status, all output). `env`: more environment variables."""
    with log.open("w") as file:
        return start(ranks, words, stdout=file, stderr=file, env=env).wait(400), log.read_text()


def alone(function: Callable, *args: Any) -> Any:
    """Runs in a pool of one rank: call a function as plain `python` would, without the variables of torchrun."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return function(*args)


class Pool(pool.Pool):
    """A pool that first waits until no other pool of this user computes. Two pools at once would take longer."""

    def run(self, function: Callable, *args: Any, seconds: float = 300.0) -> list[Any]:
        """Call a function on all ranks. Raises RankError if one fails or hangs; the next call starts new workers."""
        with open(os.path.join(tempfile.gettempdir(), f"ranks-{os.getuid()}.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed
            return super().run(*([alone] if self.world == 1 else []), function, *args, seconds=seconds)
