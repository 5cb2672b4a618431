"""Chooses a run's devices and backend, initialises its process group, and prints what runs where.

Where a machine has fewer GPUs than ranks, the ranks share them in turn. NCCL refuses that, so their messages go through
the host, by gloo (`Staged`).
"""

import os
import re
import socket
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError
from extras.services.launch import gather_objects
from extras.theory.gpus import GPUS
from step02_ddp import join_ranks

# Dense peak in TFLOP/s without sparsity, from the vendors' data sheets: (16-bit matrix units, fp32 without TF32). By a
# part of the name that CUDA gives a GPU, the longer one first; in theory/gpus.py are those that the planner knows, too.
GPU_PEAKS = {
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.5, 60.0),
    **{name.split("-")[0].upper(): (gpu.flops / 1e12, gpu.single / 1e12) for name, gpu in GPUS.items()},
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10G": (70.0, 35.0),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}
ENVIRONMENT = {  # what CUDA and NCCL read when they start; what the user has set stays
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # else sizes that change leave gaps that nothing fits into
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # queues to a GPU: a run has some nine streams, and in one they would wait
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # a message that is ready goes before waiting matmuls
}


@dataclass
class Flags:
    """How ranks talk."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed, from step 2 on
    timeout: float = 600.0  # seconds that a step may take; then each rank prints where it is, and the job ends


def set_environment():
    """Set the environment that CUDA and NCCL read. Call it before anything uses a GPU."""
    for name, value in ENVIRONMENT.items() if torch.version.cuda else ():
        os.environ.setdefault(name, value)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def unusable_gpu() -> str:
    """The problem in words, if this PyTorch is built for GPUs and one is here that it cannot use; else "".

    A user who hides the GPUs with CUDA_VISIBLE_DEVICES= or -1 asks for the CPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    there = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if hidden or not there or not torch.version.cuda or torch.cuda.is_available():
        return ""
    wheel = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},"
    return f"{there[0]} is a GPU, but {wheel} cannot use it: compare nvidia-smi's driver and CUDA, and update one"


def has_kernels(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU runs what was built for these: "sm_80" runs on 8.0 to 8.9, "compute_80" on all from 8.0 on.

    (NVIDIA's CUDA Programming Guide, "Binary Compatibility" and "PTX Compatibility"; "sm_90a" runs on 9.0 alone.)
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        major, minor = divmod(int(re.match(r"\d+", number)[0]), 10)
        ours = (major, minor) == capability if number.endswith("a") else (major, minor) <= capability
        if ours and (kind == "compute" or major == capability[0]):
            return True
    return False


def own_gpu() -> int:
    """The number of this process's GPU, of those that are here."""
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


def settle(config: Any, world: int):
    """Let `--dtype auto` be fp32 on a GPU without bf16, and say so. Ranks whose GPUs differ are told by `introduce`."""
    if config.device == "cpu" or config.dtype != "auto" or not torch.cuda.is_available():
        return
    if torch.cuda.get_device_capability(own_gpu()) < (8, 0):
        config.dtype = "fp32"
        if int(os.environ.get("RANK", 0)) == 0:
            name = torch.cuda.get_device_name(own_gpu())
            print(f"--dtype auto is fp32: {name} has no bf16 (fp16 it has: --dtype fp16)", flush=True)


def check(config: Any, world: int):
    """Raises UserError for a device or backend that is not here, or a GPU that is here and that torch cannot use."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu or auto")
    if config.device != "cpu" and torch.version.cuda and torch.cuda.is_available():
        built, (major, minor) = torch.cuda.get_arch_list(), torch.cuda.get_device_capability(own_gpu())
        if built and not has_kernels(built, (major, minor)):
            gpu = f"{torch.cuda.get_device_name(own_gpu())} has the architecture {major}.{minor}, and torch"
            wheel = f"{gpu} {torch.__version__} is built for {', '.join(built)}"
            raise UserError(f"--device {config.device}: {wheel}: install a wheel for this GPU, or use --device cpu")
    if config.device == "auto" and (problem := unusable_gpu()):  # else the run would be slow, and not say why
        raise UserError(f"{problem}; or use --device cpu to train on the CPU on purpose")
    if config.backend == "nccl" and (config.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("--backend nccl needs one GPU for each rank; use --backend gloo or auto")


def local_ranks() -> int:
    """Ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class Staging(dist.Work):
    """Something that gloo does with copies on the host; `wait` brings the results to the device."""

    def __init__(self, work: dist.Work, results: list[tuple[Tensor, Tensor]]):
        """`results`: (where it belongs, the copy on the host) of each."""
        super().__init__()
        self.work, self.results = work, results

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done."""
        self.work.wait()
        for there, host in self.results:
            there.copy_(host)
        self.results = []
        return True


class Staged(dist.ProcessGroup):
    """A process group for several ranks on one GPU: tensors are copied to the host, gloo sends, results come back."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        """The name that `dist.get_backend` returns."""
        return "staged"

    def _get_backend(self, device: torch.device) -> dist.Backend:
        """torch 2.15 asks whether messages are to be coalesced: as gloo says, they are not."""
        return self.gloo

    def staged(self, operation: str, output: Tensor, tensor: Tensor, *rest: Any) -> Staging:
        """Start gloo's operation with copies on the host."""
        host = torch.empty_like(output, device="cpu")
        work = getattr(self.gloo, operation)(host, tensor.to("cpu", copy=True), *rest)
        return Staging(work, [(output, host)])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Staging:
        """In place."""
        hosts = [x.to("cpu", copy=True) for x in tensors]
        return Staging(self.gloo.allreduce(hosts, options), list(zip(tensors, hosts, strict=True)))

    def _allgather_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> Staging:
        return self.staged("_allgather_base", output, tensor, options)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, options: Any = None) -> Staging:
        return self.staged("_reduce_scatter_base", output, tensor, options)

    def alltoall_base(self, output: Tensor, tensor: Tensor, came: list, went: list, options: Any = None) -> Staging:
        """Rows to every rank, rows from every rank."""
        return self.staged("alltoall_base", output, tensor, came, went, options)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any = None) -> dist.Work:
        """Of tensors on the host: `all_gather_object`."""
        return self.gloo.allgather(outputs, tensors, options)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Staging:
        """A message."""
        return Staging(self.gloo.send([x.to("cpu", copy=True) for x in tensors], rank, tag), [])

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> Staging:
        """A message."""
        hosts = [torch.empty_like(x, device="cpu") for x in tensors]
        return Staging(self.gloo.recv(hosts, rank, tag), list(zip(tensors, hosts, strict=True)))

    # torch 2.13 renamed some.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base


def wait_for(absent: Callable[[], str], timeout: float):
    """Return when `absent()` names nobody; after 10 s print whom it names. Raises UserError after `timeout` seconds."""
    began, limits = time.monotonic(), [min(10.0, timeout / 2), timeout]
    while whom := absent():
        if time.monotonic() - began > limits[0]:
            text = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has waited {limits.pop(0):g} s for {whom}"
            if not limits:
                raise UserError(f"{text}: start all ranks, or unset RANK and WORLD_SIZE if no launcher has set them")
            print(f"{text}, and still waits", file=sys.stderr, flush=True)
        time.sleep(0.02)


def fresh_store(timeout: float) -> dist.Store:
    """Where the ranks find each other's addresses.

    Agents of torchrun keep one store over all restarts (torch 2.13), and in it addresses of processes that are gone: a
    rank that comes first would call them. So rank 0 draws a prefix that is new, and every rank shows it a number of its
    own: the prefix under which rank 0 has answered with this number is not one of an earlier attempt.
    """
    rank, world, own = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), uuid.uuid4().hex
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def server() -> str:
        with suppress(OSError), socket.create_connection((address, port), 1):
            return ""
        return f"rank 0, at {address}:{port}"

    if rank and not agents:
        wait_for(server, timeout)
    about = dict(is_master=rank == 0 and not agents, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    store = dist.TCPStore(address, port, **about)
    if not agents:
        return store
    if rank == 0:
        store.set("prefix", own)
        store.set(f"{own}/answer", b" ".join(store.get(f"{own}/{other}") for other in range(1, world)))
        return dist.PrefixStore(own, store)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        prefix = store.get("prefix").decode()
        store.set(f"{prefix}/{rank}", own)
        if store.check([f"{prefix}/answer"]) and own in store.get(f"{prefix}/answer").decode():
            return dist.PrefixStore(prefix, store)
        time.sleep(0.02)
    raise UserError(f"rank {rank} waited {timeout:g} s for rank 0 to start")


def own_gpus(store: dist.Store, gpus: int) -> bool:
    """Whether each rank has a GPU of its own. All show theirs to all: a rank may see one GPU alone, and call it 0."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gpu = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).uuid if gpus else ""
    store.set(f"gpu/{rank}", str(gpu))
    if rank == 0:
        keys = {f"gpu/{other}": f"rank {other}" for other in range(world)}
        wait_for(lambda: ", ".join(keys[key] for key in keys if not store.check([key])), store.timeout.total_seconds())
    shown = {store.get(f"gpu/{other}") for other in range(world)}
    return gpus > 0 and len(shown) == world


def meet(config: Any) -> int:
    """Take this process's GPU and, from step 2 on, initialise the process group. Returns how many GPUs are here.

    With a GPU, the host works with its share of the cores, not with the one thread that torchrun gives a rank.
    Collectives of gloo raise after twice `--timeout`, later than the watchdog (failures.py). Raises UserError on all
    ranks if --backend nccl is asked for and two of them share a GPU.
    """
    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    if gpus:
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        if os.environ.get("OMP_NUM_THREADS", "1") == "1":
            torch.set_num_threads(max(1, cores() // local_ranks()))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "RANK" in os.environ and hasattr(config, "sync") and not dist.is_initialized():
        store = fresh_store(2 * config.timeout)
        apart = own_gpus(store, gpus)
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
    """Before `train`: join the other ranks, and say where the run trains. Raises UserError if flags or GPUs differ."""
    gpus = meet(config)
    introduce(config, torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpus else torch.device("cpu"))


def introduce(config: Any, device: torch.device):
    """The first collective: gather each rank's device and flags. Rank 0 prints the devices and the backend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    everyone = gather_objects(((name, socket.gethostname(), device.index), asdict(config)))
    require_same_flags([flags for _, flags in everyone])
    places = defaultdict(list)
    for (name, *place), _ in everyone:
        places[name].append(tuple(place))
    parts = []
    for name, ranks in places.items():
        count = f"{len(set(ranks))} x " if name != "cpu" else ""
        parts.append(f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {count}{name}")
    backend = f"backend {dist.get_backend()}" if len(everyone) > 1 else "no backend"
    settings = [f"{key}={os.environ[key]}" for key in ENVIRONMENT if key in os.environ and device.type == "cuda"]
    if int(os.environ.get("RANK", 0)) == 0:
        print("; ".join([f"device: {', '.join(parts)}", backend, *settings]), flush=True)


def require_same_flags(everyone: list[dict[str, Any]]):
    """The flags of all ranks. Raises UserError on all of them, naming the flag that differs."""
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"rank {rank} was started with {flag} {theirs.get(name)}, rank 0 with {value}: use the same"
                )


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float) -> float:
    """FLOP/s that this rank could do at best: the flag, the table above or, for any other device, a timed matmul.

    Ranks that share a GPU share its peak.
    """
    shared = dist.is_initialized() and dist.get_backend() == "staged"
    share = min(1.0, torch.cuda.device_count() / local_ranks()) if shared else 1.0
    if override_tflops:
        return override_tflops * 1e12 * share
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if known := [peaks for part, peaks in GPU_PEAKS.items() if part in name]:
        half, single = known[0]
        return 1e12 * share * {2: half, 4: single, 8: single / 2}[dtype.itemsize]
    n, times, until = 512 if device.type == "cpu" else 8192, [], time.perf_counter() + 0.3
    a = torch.randn(n, n, dtype=dtype, device=device)
    while len(times) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)
