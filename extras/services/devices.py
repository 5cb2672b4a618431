"""Chooses this process's GPU and initialises the process group: NCCL with one GPU for each rank, gloo on CPUs."""

import os
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from timeit import repeat
from typing import Any

import torch
import torch.distributed as dist

from common import UserError
from common.trainer import choose_device
from extras.services.ranks import gather_objects
from extras.plan.gpus import GPUS
from extras.variants.record import spelled
from step02_ddp import join_ranks

ENVIRONMENT = {  # read by CUDA and NCCL when they start; values that the user has set stay
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # else tensors of changing sizes fragment the memory
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # hardware queues: in one, the run's nine or so streams would wait in turn
    "TORCH_NCCL_HIGH_PRIORITY": "1",  # a message that is ready runs before waiting matmuls
}


@dataclass
class Flags:
    """Communication between ranks."""

    timeout: float = 600.0  # seconds that a step may take; then each rank prints where it is, and the job ends


def set_environment():
    """Set the environment that CUDA and NCCL read. Call it before anything uses a GPU."""
    for name, value in ENVIRONMENT.items() if torch.version.cuda else ():
        os.environ.setdefault(name, value)


def fresh_store(timeout: float) -> dist.Store:
    """Open the store in which the ranks find each other's addresses.

    torchrun keeps one store over all restarts of a job (torch 2.13). It still has the addresses of processes that are
    gone, so rank 0 draws a new prefix for all keys, and every other rank draws a number. Rank 0 stores these numbers
    under its prefix: a rank that finds its own number there knows that this prefix is not of an earlier attempt.
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


def find_ranks(gpu: str, timeout: float) -> dist.Store:
    """Return the job's store, once all ranks have opened it. `gpu`: the UUID of this rank's GPU; "" on a CPU.

    Ranks compare UUIDs, because a launcher may show each rank only its own GPU, which then has the number 0.
    Raises UserError if a rank is missing after `timeout` s, or if two ranks have the same GPU.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = fresh_store(timeout)
        store.set(f"the GPU of rank {rank}", gpu)
        used = {store.get(f"the GPU of rank {other}") for other in range(world)}  # an error names the missing rank
    except dist.DistError as error:
        missing = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({str(error).partition(chr(10))[0]})"
        advice = "start all ranks, or unset RANK and WORLD_SIZE if no launcher has set them"
        raise UserError(f"rank {rank} has waited {timeout:g} s for other ranks at {missing}: {advice}") from error
    if gpu and len(used) < world:
        raise UserError(f"two of the {world} ranks have the same GPU: lower --nproc_per_node, or use --device cpu")
    return store


def meet(config: Any):
    """Select this process's GPU and, from step 2 on, initialise the process group.

    Collectives of gloo raise after twice `--timeout`, later than the watchdog (failures.py). Raises UserError on all
    ranks if two of them have the same GPU.
    """
    gpus, gpu = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0, ""
    if gpus:
        os.environ["LOCAL_RANK"] = str(int(os.environ.get("LOCAL_RANK", 0)) % gpus)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        gpu = str(torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"])).uuid)
    if "RANK" in os.environ and hasattr(config, "sync") and not dist.is_initialized():
        device, timeout = torch.device("cuda" if gpus else "cpu"), 2 * config.timeout
        where = dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
        store = find_ranks(gpu, min(300.0, timeout))
        join_ranks(device, store=store, timeout=timedelta(seconds=timeout), **where)


def join(config: Any):
    """Join the other ranks, and print the devices and the backend. UserError if ranks differ in flags or dtype."""
    meet(config)
    device, dtype = choose_device(config)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    everyone = gather_objects((name, asdict(config) | dict(dtype=str(dtype))))
    require_same_flags([flags for _, flags in everyone])
    parts = [f"{n} rank{'s' * (n > 1)} on {name}" for name, n in Counter(name for name, _ in everyone).items()]
    backend = f"backend {dist.get_backend()}" if len(everyone) > 1 else "no backend"
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"device: {', '.join(parts)}; {backend}", flush=True)


def require_same_flags(everyone: list[dict[str, Any]]):
    """Compare the flags of all ranks. Raises UserError on every rank, naming the first flag that differs."""
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs.get(name) != value:
                said = f"rank {rank} was started with {spelled(name, theirs.get(name))}, rank 0 with {value}"
                raise UserError(f"{said}: use the same")


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float) -> float:
    """This rank's peak in FLOP/s: from the flag, else from the planner's table of GPUs, else from a timed matmul."""
    if override_tflops:
        return override_tflops * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for known, gpu in GPUS.items():
        if known.split("-")[0].upper() in name and "PCIe" not in name and "NVL" not in name:  # these are slower
            return {2: gpu.flops, 4: gpu.single, 8: gpu.single / 2}[dtype.itemsize]
    n = 512 if device.type == "cpu" else 8192
    a = torch.randn(n, n, dtype=dtype, device=device)
    return 2 * n**3 / min(repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=20))  # `item` waits for a GPU
