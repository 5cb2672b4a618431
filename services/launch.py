"""How the ranks of a job find one another, and agree that they were started alike."""

import math
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from common import UserError
from common.comm import Mesh
from services.ledger import Ledger


def world_size() -> int:
    """Ranks of this job: of the process group if there is one, else what the launcher announces."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


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


@contextmanager
def open_mesh(sizes: dict[str, int], device: torch.device, backend: str, timeout: float = 600.0) -> Iterator[Mesh]:
    """Join the process group (torchrun's, or one that exists already) and lay the mesh over it; leave it at the end.

    `backend` auto: nccl if every local rank has a GPU of its own, else gloo. `timeout` in seconds: after twice that, a
    collective of gloo raises; NCCL's own watchdog aborts the communicator and ends the process. (In a training loop,
    services/watchdog.py is there first, and says more.) Raises UserError if the dimensions do not multiply to the world
    size.
    """
    world = world_size() if sizes else 1  # step 1 knows one device, whoever else is there
    if math.prod(sizes.values()) != world:
        dims = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"the mesh {dims} has {math.prod(sizes.values())} ranks, but torchrun started {world}")
    own_gpu = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()
    if backend == "nccl" and not own_gpu:
        raise UserError("--backend nccl needs one GPU for each local rank; use --backend gloo or auto")
    joins = world > 1 and not dist.is_initialized()
    if joins:
        chosen = backend if backend != "auto" else "nccl" if own_gpu else "gloo"
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")  # a message that is ready goes before waiting matmuls
        store = fresh_store(2 * timeout)
        where = {} if store is None else dict(store=store, rank=int(os.environ["RANK"]), world_size=world)
        dist.init_process_group(chosen, timeout=timedelta(seconds=2 * timeout), **where)
    mesh = Mesh(sizes, device, Ledger(), timedelta(seconds=2 * timeout))
    yield mesh
    # Only reached in order: after an error the peers may be gone, and leaving together would hang.
    if joins:
        dist.destroy_process_group()


def where_ranks_are(mesh: Mesh) -> str:
    """Which devices the ranks have, and how they talk. A collective."""
    gpu = mesh.device.type == "cuda"
    name = torch.cuda.get_device_name(mesh.device) if gpu else "cpu"
    ranks: dict[str, list[tuple]] = defaultdict(list)
    for theirs, *place in gather_objects((name, socket.gethostname(), mesh.device.index), mesh):
        ranks[theirs].append(tuple(place))
    parts = []
    for name, places in ranks.items():
        count = f"{len(set(places))} x " if name != "cpu" else ""
        parts.append(f"{len(places)} rank{'s' * (len(places) > 1)} on {count}{name}")
    return ", ".join(parts) + (f"; backend {dist.get_backend()}" if mesh.world > 1 else "; no backend")


def require_same_flags(config: Any, mesh: Mesh):
    """The first collective: every rank shows its flags. Raises UserError on all ranks, naming the flag that differs."""
    everyone = gather_objects(asdict(config), mesh)
    for rank, theirs in enumerate(everyone):
        for name, value in everyone[0].items() if theirs != everyone[0] else ():
            if theirs.get(name) != value:
                flag = "--" + name.replace("_", "-")
                ours = theirs.get(name)
                raise UserError(f"rank {rank} was started with {flag} {ours}, rank 0 with {value}: use the same")


def gather_objects(thing: Any, mesh: Mesh | None) -> list[Any]:
    """Small Python objects from all ranks, in their order (set-up and reports; not in the ledger)."""
    if mesh is None or mesh.world == 1:
        return [thing]
    everyone = [None] * mesh.world
    dist.all_gather_object(everyone, thing)
    return everyone
