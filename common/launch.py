"""How a script starts and ends. Three parts: `main`, which every script calls; `connect_ranks` and
`compare_launches`, for several ranks; `check_environment`, which refuses some launches.

torchrun starts the same script once for each rank. If flags, code or the version of PyTorch differ
between ranks, messages may no longer match: the run hangs, or trains on nonsense. So the ranks
compare how they were started as soon as they can communicate (`compare_launches`).
"""

import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from common import UserError
from common.flags import parse
from common.ranks import Ranks
from common.run import Run

# --- The start and the end of a script ------------------------------------------------------------


def main(train: Callable[[Any, Run], None], cls: type, run_type: type[Run] = Run):
    """Parse the flags and train. Exit with status 0; after an Exception, with the status that
    `print_error` returns.

    `cls`: the step's Config. `run_type`: `Run`, or a subclass of it.

    With several ranks the process ends by os._exit, because threads of NCCL or gloo can block
    Python's own shutdown. If one blocked after an error, all would hang: the other ranks wait for
    it, and torchrun ends them only when it has ended. (--help, and Ctrl-C outside the steps, are no
    Exception: they end Python as usual.)
    """
    several_ranks = int(os.environ.get("WORLD_SIZE", 1)) > 1
    status = 0
    try:
        config = parse(cls)
        check_environment()
        train(config, run_type(config))
        # PyTorch wants this at the end. After an error it could wait for ranks that are gone
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:
        status = print_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    if several_ranks:
        os._exit(status)
    sys.exit(status)


def print_error(error: Exception) -> int:
    """If the user can fix the error, print one line and return 2. Otherwise print its traceback and
    return 1.

    The user can fix a UserError, an OSError (most likely of a path or a disk), and
    torch.OutOfMemoryError.
    """
    fixable = isinstance(error, UserError | OSError)
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        fixable = True
        text = (
            "--micro-batch-size: lower it, use --recompute full, or shard the model, as "
            f"step03_zero.py --zero 3 does: {error}"
        )
    if not fixable:
        traceback.print_exception(error)
        return 1
    if os.environ.get("RANK", "0") != "0":
        # Usually all ranks have this error. So every rank but rank 0 waits here. Meanwhile rank 0
        # prints the error and ends, and torchrun then ends this rank, too. If this rank is still
        # alive after 10 seconds, rank 0 does not have the error, or is on another node: so this
        # rank prints it
        time.sleep(10)
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2


# --- From step 2 on: several ranks ----------------------------------------------------------------


def connect_ranks(backend: str, **options: Any):
    """Initialise the process group (dist.init_process_group). Raises UserError if that fails, most
    often because ranks do not find one another.
    """
    try:
        dist.init_process_group(backend, **options)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the ranks cannot be connected: {error} (If they do not find one another, check "
            "MASTER_ADDR, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME)"
        ) from error


def compare_launches():
    """Raise UserError on all ranks unless all agree on

    - the script's name and its flags, as text and in the same order
    - the versions of torch, and of NumPy, which draws the order of the data
    - the source files of the course, in the root and in common/
    - the instruction set of the CPU, on which the last bits of initial weights depend
    """
    ranks = Ranks()
    script = Path(sys.argv[0]).name  # nodes may have it in different places
    ranks.require_same(" ".join([script, *sys.argv[1:]]), "the commands differ")
    ranks.require_same(
        f"{torch.__version__}, {np.__version__}", "the versions of torch or NumPy differ"
    )
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted([*root.glob("*.py"), *root.glob("common/*.py")]):
        digest.update(path.read_bytes())
    ranks.require_same(digest.hexdigest()[:8], "the source files differ")
    ranks.require_same(
        torch.backends.cpu.get_cpu_capability(),
        "the CPUs' instructions differ, and so would initial weights: "
        "set ATEN_CPU_CAPABILITY=default on all nodes",
    )


# --- The environment of a launch ------------------------------------------------------------------

# torchrun sets these. init_process_group reads all but LOCAL_RANK, which chooses a process's GPU
NEEDED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
# Variables in which other launchers (SLURM, Open MPI, MPICH) put the number of processes
SET_BY_OTHERS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def check_environment():
    """Raise UserError if environment variables show that this launch cannot work, or was most
    likely not meant.
    """
    # (Clusters may set MASTER_ADDR and MASTER_PORT: they do not show that torchrun was used)
    if os.environ.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
        check_torchrun()
    else:
        check_other_launchers()


def check_torchrun():
    """Raise UserError if only some of NEEDED are set, perhaps left over in the shell; or if
    --max-restarts is set so that restarted ranks cannot connect.
    """
    present = sorted(NEEDED & os.environ.keys())
    missing = sorted(NEEDED - os.environ.keys())
    if missing:
        names = " ".join(present)
        raise UserError(
            f"{names} is set, but not {' '.join(missing)}: use torchrun, or first unset {names}"
        )
    # With --max-restarts, torchrun starts all ranks again if one fails. Ranks find one another by a
    # table of addresses, torchrun's store. By default all starts share one store, which still has
    # the old ranks' addresses: the new ranks cannot connect. With
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 makes a new store for each start; torchrun then
    # sets TORCHELASTIC_USE_AGENT_STORE to "False"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "False":
        raise UserError(
            f"--max-restarts {restarts}: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before "
            "torchrun, and use --standalone (one node) or --rdzv-backend c10d"
        )


def check_other_launchers():
    """Raise UserError if another launcher seems to have started several processes: each would train
    alone, and all would write to the same directory.
    """
    for name in SET_BY_OTHERS:
        n = os.environ.get(name)
        if n not in (None, "1"):
            raise UserError(
                f"{name} is {n}, but RANK is not set: start torchrun, once on each node; or unset "
                f"{name} to use one device"
            )
