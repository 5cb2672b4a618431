"""Launch lines, and the course's pools of ranks (tests/pool.py): their server has also imported what is around it."""

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from extras.services.launch import start
from tests import pool
from tests.pool import RankError as RankError

pool.PRELOADED.extend(["step07_moe_ep", "extras.services.run", "extras.tests.equal"])


def error_of(kind: type[Exception], function: Callable, *args: Any) -> str:
    """Runs on every rank: what the error of this kind says with which a function ends; "" if it ends without one."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    return ""


def run(ranks: int, words: list[str], log: Path, **env: str) -> tuple[int, str]:
    """(exit status, everything printed) of a launch line; ranks 0: without torchrun. `env` adds variables."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("w") as file:
        job = start(pool.ROOT, ranks, words, stdout=file, stderr=file, env=kept | dict(OMP_NUM_THREADS="1") | env)
        return job.wait(400), log.read_text()


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
