"""Chooses a run's devices and backend, initialises its process group, and prints which ranks run where.

If a machine has fewer GPUs than ranks, ranks share GPUs. NCCL refuses that, so gloo sends their messages from copies on
the host (`Staged`).
"""

import os
import socket
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from timeit import repeat
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from common.trainer import choose_device
from extras.services.ranks import gather_objects
from extras.theory.gpus import GPUS
from extras.variants.record import spelled
from step02_ddp import join_ranks

# Dense peak in TFLOP/s without sparsity, from the vendors' data sheets: (16-bit matrix units, fp32 without TF32). By a
# part of the name that CUDA gives a GPU, the longer one first.
GPU_PEAKS = {"H100 PCIe": (756.0, 51.0), "H100 NVL": (835.5, 60.0)}
GPU_PEAKS |= {name.split("-")[0].upper(): (gpu.flops / 1e12, gpu.single / 1e12) for name, gpu in GPUS.items()}
ENVIRONMENT = {  # read by CUDA and NCCL when they start; values that the user has set stay
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # else tensors of changing sizes fragment the memory
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: a run's nine or so streams would wait in one
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # a message that is ready runs before waiting matmuls
}


@dataclass
class Flags:
    """Communication between ranks."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed, from step 2 on
    timeout: float = 600.0  # seconds that a step may take; then each rank prints where it is, and the job ends


def set_environment():
    """Set the environment that CUDA and NCCL read. Call it before anything uses a GPU."""
    for name, value in ENVIRONMENT.items() if torch.version.cuda else ():
        os.environ.setdefault(name, value)


def check(config: Any, world: int):
    """Raises UserError if this torch cannot use the GPU that is here: the run would be slow without saying why.

    A user who hides the GPUs with CUDA_VISIBLE_DEVICES= or -1 asks for the CPU.
    """
    there, shown = sorted(Path("/dev").glob("nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip()
    wanted = config.device == "auto" and torch.version.cuda and there and shown not in ("", "-1")
    if wanted and not torch.cuda.is_available():
        wheel = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use it"
        advice = "compare nvidia-smi's driver and CUDA, and update one; or use --device cpu to train on the CPU"
        raise UserError(f"{there[0]} is a GPU, but {wheel}: {advice}")


class Staging(dist.Work):
    """An operation of gloo on copies on the host; `wait` copies its results to the device."""

    def __init__(self, work: dist.Work, results: list[Tensor], hosts: list[Tensor]):
        """`hosts`: the copies of `results`, in their order."""
        super().__init__()
        self.work, self.copies = work, list(zip(results, hosts, strict=True))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for gloo, then copy the results to the device."""
        self.work.wait()
        while self.copies:
            result, host = self.copies.pop()
            result.copy_(host)
        return True


def staged(operation: str) -> Callable[..., Staging]:
    """Make a method that starts gloo's operation on host copies. Its first argument: the output, or all tensors."""

    def start(group: "Staged", first: Tensor | list[Tensor], *rest: Any) -> Staging:
        tensors = [first] if isinstance(first, Tensor) else first
        hosts = [tensor.to("cpu", copy=True) for tensor in tensors]
        rest = [value.cpu() if isinstance(value, Tensor) else value for value in rest]
        work = getattr(group.gloo, operation)(hosts[0] if isinstance(first, Tensor) else hosts, *rest)
        return Staging(work, *((tensors, hosts) if operation != "send" else ([], [])))

    return start


class Staged(dist.ProcessGroup):
    """A process group for several ranks on one GPU: tensors are copied to the host, gloo sends, results come back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """The name that `dist.get_backend` returns."""
        return "staged"

    def _get_backend(self, device: torch.device) -> dist.Backend:
        """torch 2.15 asks the backend whether to coalesce messages; gloo's answer is no."""
        return self.gloo

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> dist.Work:
        """Gather tensors that are on the host already, for `all_gather_object`."""
        return self.gloo.allgather(outputs, tensors, options)

    allreduce, send, recv = map(staged, ("allreduce", "send", "recv"))
    _allgather_base = all_gather_single = staged("_allgather_base")  # torch 2.13 renamed these three
    _reduce_scatter_base = reduce_scatter_single = staged("_reduce_scatter_base")
    alltoall_base = all_to_all_single = staged("alltoall_base")


def fresh_store(timeout: float) -> dist.Store:
    """Open the store in which the ranks find each other's addresses.

    Agents of torchrun keep one store over all restarts (torch 2.13), which still has the addresses of processes that
    are gone. So rank 0 draws a new prefix, and every other rank a number. Rank 0 stores all these numbers under its
    prefix; a rank that finds its number there knows that the prefix is not one of an earlier attempt.
    """
    rank, world, own = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), uuid.uuid4().hex
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    about = dict(is_master=rank == 0 and not agents, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), **about)
    if not agents:
        return store
    if rank == 0:
        store.set("prefix", own)
        store.set(f"{own}/answer", b" ".join(store.get(f"{own}/rank {other}") for other in range(1, world)))
        return dist.PrefixStore(own, store)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        prefix = store.get("prefix").decode()
        store.set(f"{prefix}/rank {rank}", own)
        if store.check([f"{prefix}/answer"]) and own in store.get(f"{prefix}/answer").decode():
            return dist.PrefixStore(prefix, store)
        time.sleep(0.02)
    raise dist.DistStoreError("no answer of rank 0")


def find_ranks(gpus: int, timeout: float) -> tuple[dist.Store, bool]:
    """Return the job's store, and whether each rank has a GPU of its own. After 10 s, print that ranks are missing.

    Ranks compare UUIDs of GPUs, as each may see only its own, as number 0. Raises UserError after `timeout` s.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, after = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", min(10.0, timeout / 2)
    advice = "start all ranks, or unset RANK and WORLD_SIZE if no launcher has set them"
    text = f"rank {rank} has waited {after:g} s at {address} for other ranks, and still waits: {advice}"
    warning = threading.Timer(after, print, [text], dict(file=sys.stderr, flush=True))
    warning.daemon = True
    warning.start()
    try:
        store = fresh_store(timeout)
        gpu = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).uuid if gpus else ""
        store.set(f"the GPU of rank {rank}", str(gpu))
        shown = {store.get(f"the GPU of rank {other}") for other in range(world)}  # an error names the missing rank
        return store, gpus > 0 and len(shown) == world
    except dist.DistError as error:
        missing = str(error).partition("\n")[0]
        raise UserError(f"rank {rank} has waited {timeout:g} s at {address} ({missing}): {advice}") from error
    finally:
        warning.cancel()


def meet(config: Any) -> int:
    """Select this process's GPU and, from step 2 on, initialise the process group. Returns how many GPUs are here.

    With a GPU, the host uses its share of the cores instead of the one thread that torchrun gives a rank.
    Collectives of gloo raise after twice `--timeout`, later than the watchdog (failures.py). Raises UserError on all
    ranks if --backend nccl is asked for and two of them share a GPU.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        if os.environ.get("OMP_NUM_THREADS", "1") == "1":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, cores // ranks_here()))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "RANK" in os.environ and hasattr(config, "sync") and not dist.is_initialized():
        store, apart = find_ranks(gpus, 2 * config.timeout)
        if config.backend == "nccl" and not apart:
            raise UserError("--backend nccl needs one GPU for each rank; use --backend gloo or auto")
        backend = "nccl" if apart and config.backend != "gloo" else "staged" if gpus else "gloo"
        if backend == "staged":
            dist.Backend.register_backend("staged", Staged, devices=["cpu", "cuda"])
        where = dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=store)
        device = torch.device("cuda" if gpus else "cpu")
        join_ranks(device, backend=backend, timeout=timedelta(seconds=2 * config.timeout), **where)
    return gpus


def join(config: Any):
    """Join the other ranks, and print the devices and the backend. Raises UserError if flags or dtypes differ."""
    meet(config)
    device, dtype = choose_device(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    everyone = gather_objects(((name, socket.gethostname(), device.index), asdict(config) | dict(dtype=str(dtype))))
    require_same_flags([flags for _, flags in everyone])
    ranks, gpus = (Counter(name for name, *_ in some) for some in ([d for d, _ in everyone], {d for d, _ in everyone}))
    parts = [f"{n} rank{'s' * (n > 1)} on " + f"{gpus[name]} x " * (name != "cpu") + name for name, n in ranks.items()]
    backend = f"backend {dist.get_backend()}" if len(everyone) > 1 else "no backend"
    settings = [f"{key}={os.environ[key]}" for key in ENVIRONMENT if key in os.environ and device.type == "cuda"]
    if int(os.environ.get("RANK", 0)) == 0:
        print("; ".join([f"device: {', '.join(parts)}", backend, *settings]), flush=True)


def require_same_flags(everyone: list[dict[str, Any]]):
    """Compare the flags of all ranks. Raises UserError on every rank, naming the first flag that differs."""
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                said = f"rank {rank} was started with {spelled(name, theirs.get(name))}, rank 0 with {value}"
                raise UserError(f"{said}: use the same")


def ranks_here() -> int:
    """The number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float) -> float:
    """This rank's peak in FLOP/s: from the flag, the table above or, for any other device, a timed matmul.

    Ranks that share a GPU share its peak.
    """
    shared = dist.is_initialized() and dist.get_backend() == "staged"
    share = min(1.0, torch.cuda.device_count() / ranks_here()) if shared else 1.0
    if override_tflops:
        return override_tflops * 1e12 * share
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := [peaks for part, peaks in GPU_PEAKS.items() if part in name]:
        half, single = known[0]
        return 1e12 * share * {2: half, 4: single, 8: single / 2}[dtype.itemsize]
    n = 512 if device.type == "cpu" else 8192
    a = torch.randn(n, n, dtype=dtype, device=device)
    return 2 * n**3 / min(repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=20))  # `item` waits for a GPU
