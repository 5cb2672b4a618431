"""What all ranks of a run must agree on: how it was launched, and each decision during the run.

A launcher (torchrun) starts the same script on every rank, perhaps on many machines. If one of them
has other flags or another version of the code, messages no longer match, and the run hangs or
trains on nonsense. So ranks compare what they were started with before they form groups.

Later on, some decisions depend on what only one rank sees: a full disk, a damaged file, a signal.
`Ranks` tells all ranks, so all decide alike. Its messages are tiny, are sent by the CPUs, and are
not counted in `sent`.
"""

import hashlib
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import UserError

ROOT = Path(__file__).parents[1]
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these
OTHER_LAUNCHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # their numbers of processes


def check_environment():
    """Raise UserError if another launcher than torchrun started this process beside others."""
    present = [name for name in (*NEEDED[:2], "LOCAL_RANK") if name in os.environ]
    if present and not set(NEEDED) <= os.environ.keys():
        names = " ".join(present)
        raise UserError(f"no launcher has set {names}: use torchrun, or first unset {names}")
    for name in OTHER_LAUNCHERS:
        if not present and os.environ.get(name, "1") != "1":
            raise UserError(
                f"{name} is {os.environ[name]}, but these processes would not find one another: "
                f"let each node start torchrun once, or unset {name} to train on one device"
            )


def source_hash() -> str:
    """A short hash of the course's source files."""
    digest = hashlib.sha256()
    for path in sorted([*ROOT.glob("step*.py"), *ROOT.glob("common/*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def require_same(everyone: list[dict[str, Any]]):
    """Raise UserError unless all ranks have the same facts. `everyone`: those of each rank."""
    for rank, facts in enumerate(everyone):
        for name, expected in everyone[0].items():
            if facts.get(name) != expected:
                found = facts.get(name, "nothing")
                raise UserError(f"{name} is {found} on rank {rank}, and {expected} on rank 0")


def compare_launches(facts: dict[str, Any]) -> dist.Store | None:
    """Raise UserError on all ranks unless all were started with the same `facts` and code.

    They meet in the launcher's store, so no process group exists yet. Keep the returned store until
    the end: if rank 0 hosts it, other ranks still use it.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return None
    facts = facts | {"the version of torch": torch.__version__, "the source": source_hash()}
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=5)))
        own_keys = dist.PrefixStore("launch", store)
        own_keys.set(str(rank), json.dumps(facts))
        everyone = [json.loads(own_keys.get(str(other))) for other in range(world)]
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"the ranks cannot meet at {address} (MASTER_ADDR): {reason}") from error
    require_same(everyone)
    return store


class Ranks:
    """All ranks of a run. Every method but `__init__`, which creates a group, is a collective."""

    def __init__(self):
        """On GPUs, create a group for the CPUs: its messages do not wait for any kernel."""
        self.rank = 0
        self.world = 1
        self.group = None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            if dist.get_backend() != "gloo":
                self.group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def attempt(self, action: Callable, *args: Any, first_only: bool = False):
        """Call `action` on all ranks, or on rank 0. If one raises OSError, raise UserError on all."""
        problem = ""
        try:
            if self.rank == 0 or not first_only:
                action(*args)
        except OSError as error:
            problem = f"rank {self.rank}: {error.strerror or error}"
        problems = [text for text in self.gather(problem) if text]
        if problems:
            raise UserError(problems[0])
