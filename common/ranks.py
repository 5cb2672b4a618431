"""What all ranks must agree on, at the launch and during a run. (In step 1 there is one rank.)

A launcher (torchrun) starts the same script once for each rank, perhaps on several machines. If one
rank has other flags or another version of the code, messages no longer match: the run hangs, or
trains on nonsense. So ranks compare how they were started as soon as they can communicate, before
they create the groups of the mesh. With step 2, read `Ranks.gather`, `Ranks.require_same`,
`compare_launches` and `initialise`.

Later, some decisions depend on what only one rank sees: a signal, a checkpoint that cannot be
written, a damaged file. If only that rank stopped or saved, the next collective would hang. With
`Ranks.gather` each rank tells all what it has seen, so that all decide alike. Its messages are
small, and do not go through common/comm.py, so neither the steps' laws of bytes nor `sent` in
metrics.jsonl count them.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import UserError

# --- At the launch and during a run ---------------------------------------------------------------


class Ranks:
    """All ranks of a run. Every method is a collective; so is the constructor on GPUs, where it
    creates a group.
    """

    def __init__(self):
        """On GPUs the default group is NCCL's, whose messages are queued behind the GPU's work: a
        small one would wait for all kernels before it. So create a group of gloo, which sends from
        CPU to CPU at once.
        """
        self.rank = 0
        self.world = 1
        self.group = None
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            if dist.get_backend() != "gloo":
                self.group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank: any that can be pickled. (Slow: for decisions, not for
        tensors.)
        """
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value, self.group)
        return values

    def require_same(self, value: Any, what: str):
        """Raise UserError on all ranks if a value differs. It names the first rank that differs
        from rank 0.
        """
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(f"{what}: {other} on rank {rank}, but {values[0]} on rank 0")

    def attempt(self, action: Callable, *args: Any, first_only: bool = False):
        """Call action(*args) on all ranks, or with `first_only` on rank 0. If it raises OSError on
        any, raise UserError on all, with the first rank's message. (After another error of one rank
        the others wait for it in vain: torchrun ends them.)
        """
        problem = ""
        try:
            if self.rank == 0 or not first_only:
                action(*args)
        except OSError as error:
            problem = f"rank {self.rank}: {error.strerror or error}"
        for found in self.gather(problem):
            if found:
                raise UserError(found)


# --- At the launch only ---------------------------------------------------------------------------

# What init_process_group reads, and LOCAL_RANK, by which `choose_device` chooses a GPU
NEEDED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Variables in which other launchers (SLURM, Open MPI, MPICH) put the number of processes
SET_BY_OTHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# With --max-restarts, torchrun starts failed ranks again. Ranks find one another's addresses in a
# key-value store. Without this variable they use that of the first start again, and find there the
# addresses of ranks that are gone
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_environment():
    """Raise UserError if variables of the environment show that this launch cannot work:

    - some of RANK, LOCAL_RANK and WORLD_SIZE are set (they may be left over in the shell), but not
      all of NEEDED;
    - another launcher than torchrun seems to have started several processes: each would train
      alone, and all would write to the same directory;
    - torchrun has --max-restarts, without OWN_STORE.
    """
    present = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    missing = sorted(NEEDED - os.environ.keys())
    if present and missing:
        names = " ".join(present)
        raise UserError(
            f"{names} is set, but not {' '.join(missing)}: use torchrun, or first unset {names}"
        )
    if present:
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if restarts != "0" and os.environ.get(OWN_STORE) != "1":
            raise UserError(f"--max-restarts {restarts}: set {OWN_STORE}=1 before torchrun")
        return
    for name in SET_BY_OTHERS:
        n = os.environ.get(name)
        if n not in (None, "1"):
            raise UserError(
                f"{name} is {n}, but RANK is not set: start torchrun, once on each node; or unset "
                f"{name} to use one device"
            )


def own_sources() -> list[Path]:
    """The source files of this project that are loaded, sorted."""
    root = Path(__file__).resolve().parents[1]
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # "site-packages": a virtual environment may lie inside the project
        if file is not None and "site-packages" not in file:
            path = Path(file).resolve()  # the script may be a symbolic link
            if path.is_relative_to(root) and path.is_file():
                found.add(path)
    return sorted(found)


def compare_launches():
    """Raise UserError on all ranks unless all agree on: the script's name and its flags, as typed;
    the version of torch; the source files of this project that are loaded; and the instruction set
    of the CPU, on which initial weights are drawn.
    """
    ranks = Ranks()
    script = Path(sys.argv[0]).name  # nodes may have it in different places
    ranks.require_same(" ".join([script, *sys.argv[1:]]), "the flags differ")
    ranks.require_same(torch.__version__, "the versions of torch differ")
    digest = hashlib.sha256()
    for path in own_sources():
        digest.update(path.read_bytes())
    ranks.require_same(digest.hexdigest()[:8], "the source files differ")
    ranks.require_same(
        torch.backends.cpu.get_cpu_capability(),
        "the CPUs' instructions differ, and so would initial weights: "
        "set ATEN_CPU_CAPABILITY=default on all nodes",
    )


def initialise(backend: str, **options: Any):
    """dist.init_process_group. Raises UserError if it fails: most often, ranks do not find one
    another.
    """
    try:
        dist.init_process_group(backend, **options)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the ranks cannot be connected: {error} (If they do not find one another, check "
            "MASTER_ADDR, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME)"
        ) from error
