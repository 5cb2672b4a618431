"""How the ranks of a job find one another, tell each other small things, and agree (`--backend`).

`join` runs before a step's `join_ranks`, which then finds that everyone has met.
"""

import os
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from common import UserError
from common.trainer import choose
from step02_ddp import Config as SINCE


@dataclass
class Flags:
    """How ranks meet (services/launch.py)."""

    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed; auto: nccl if each rank has a GPU


def join(config: Any, timeout: float = 600.0):
    """Meet the other processes of torchrun, and see that all were started with the same flags. A collective.

    `timeout` in seconds: how long a rank waits for another in a collective. Raises UserError.
    """
    if "RANK" not in os.environ or dist.is_initialized() or not isinstance(config, SINCE):
        return
    device, _ = choose(config)
    if config.backend == "nccl" and device.type != "cuda":
        raise UserError("--backend nccl needs one GPU for each rank; use --backend gloo or auto")
    chosen = config.backend if config.backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
    rank, world, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), fresh_store(timeout)
    where = {} if store is None else dict(store=store, rank=rank, world_size=world)
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout), **where)
    require_same_flags(config)


def fresh_store(timeout: float) -> dist.Store | None:
    """Where the ranks that torchrun started find each other's addresses; None without torchrun.

    Its agents keep one store over all restarts (torch 2.13), and in it the addresses of processes that are gone: a rank
    that comes first would call them. So rank 0 draws a prefix that is new, and every rank shows it a number of its own:
    the prefix under which rank 0 has answered with this number is not one of an earlier attempt.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, world, own = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), uuid.uuid4().hex
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
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
    raise RuntimeError(f"timed out: rank {rank} waited {timeout:g} s for rank 0 to start")


def require_same_flags(config: Any):
    """Every rank shows its flags. Raises UserError on all ranks, naming the flag that differs. A collective."""
    everyone = gather_objects(asdict(config))
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items():
            if theirs[name] != value:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"rank {rank} was started with {flag} {theirs[name]}, rank 0 with {value}: use the same"
                )


def gather_objects(thing: Any) -> list[Any]:
    """Small Python objects from all ranks, in their order (set-up and reports; no step's own traffic)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [thing]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def agree(*questions: bool) -> list[bool]:
    """For each question, whether it is true on any rank: all ranks get the same answers. A collective, of few bytes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(questions)
    answers = torch.tensor(questions, dtype=torch.int32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(answers, op=dist.ReduceOp.MAX)
    return answers.bool().tolist()
