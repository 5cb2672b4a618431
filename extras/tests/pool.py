"""Launch lines, and the course's pools of ranks (tests/pool.py): their server has also imported what is around it."""

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


# What a torchrun around us has set for its own ranks begins so; OMP_: it also lets each rank have one thread.
OUTER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_")


def error_of(kind: type[Exception], function: Callable, *args: Any) -> str:
    """Runs on every rank: what the error of this kind says with which a function ends; "" if it ends without one."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return ""


def start(ranks: int, words: list[str], **options: Any) -> subprocess.Popen:
    """Start `python words` with one thread; with ranks, by torchrun, whose own words come first. `options`: Popen's."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    ours = {key: value for key, value in os.environ.items() if not key.startswith((*OUTER, "PYTHONPATH"))}
    options["env"] = ours | dict(OMP_NUM_THREADS="1") | options.pop("env", {})
    return subprocess.Popen([sys.executable, *torchrun, *words], cwd=ROOT, start_new_session=True, **options)


def run(ranks: int, words: list[str], log: Path, **env: str) -> tuple[int, str]:
    """(exit status, everything printed) of a launch line; ranks 0: without torchrun. `env` adds variables."""
    with log.open("w") as file:
        return start(ranks, words, stdout=file, stderr=file, env=env).wait(400), log.read_text()


def alone(function: Callable, *args: Any) -> Any:
    """Runs in a pool of one: a process as `python step01_single_gpu.py` has it, which a dry run can make any rank."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return function(*args)


class Pool(pool.Pool):
    """One pool of a user computes at a time: ranks wait for one another, so two pools at once are slower."""

    def run(self, function: Callable, *args: Any, seconds: float = 300.0) -> list[Any]:
        """Raises RankError; the workers then start anew on next use."""
        with open(os.path.join(tempfile.gettempdir(), f"ranks-{os.getuid()}.lock"), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
            return super().run(*([alone] if self.world == 1 else []), function, *args, seconds=seconds)
