"""A variant for step 3: ZeRO's slices in host memory or in a file (Ren et al. 2021, "ZeRO-Offload").

--offload-optimizer cpu keeps masters and moments in host memory and updates there; disk keeps them in memory-mapped
files of the run directory. --offload-params cpu (stage 3) keeps the weight slices on the host, and so the update too.
Everything streams unit by unit. The files never have a name: they vanish with the process and are never mistaken for a
checkpoint.

A home is a function from a tensor to the tensor that lives where it is to live, the same one or a copy.

With a GPU, copies travel on a stream of their own, while GPU and host compute. `Ahead`: the gradient of the next unit
comes to the host while the host updates this one. `gather_beside`: the weights of the next unit (--offload-params) go
to the GPU while it computes with this one.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from common import UserError
from common.comm import Mesh, sum_over
from services.tables import human
from theory.memory import MOMENTS

Home = Callable[[Tensor], Tensor]


def here(tensor: Tensor) -> Tensor:
    """The tensor, where it is."""
    return tensor


def to_host(stack: ExitStack, tensor: Tensor) -> Tensor:
    """A copy in pages of host memory, pinned until `stack` ends where there is a GPU to copy to.

    `pin_memory` of PyTorch takes the next power of two in bytes: up to twice as much.
    """
    host = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
    if torch.cuda.is_available():
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, tensor.nbytes, 0))
        stack.callback(runtime.cudaHostUnregister, address)
    return host.copy_(tensor)


def reserve(file: BinaryIO, n_bytes: int):
    """Give a file so many bytes of the disk now. Raises OSError if it is full, which a write into the map could not."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, n_bytes)
        return
    zeros = bytes(2**20)  # macOS has no such call: there the bytes are written
    for start in range(0, n_bytes, len(zeros)):
        file.write(zeros[: n_bytes - start])
    file.flush()


def to_file(folder: Path, tensor: Tensor) -> Tensor:
    """A copy in a file of `folder`, its space reserved at once. The file has no name, so it ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        reserve(file, max(1, tensor.nbytes))
        mapped = mmap.mmap(file.fileno(), max(1, tensor.nbytes))
    return torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


class Homes(NamedTuple):
    """Where ZeRO's weight slices (stage 3) live, and where masters and moments do."""

    slices: Home = here
    states: Home = here
    one_by_one: bool = False  # units are updated so, and not together


def homes(config: Any, stack: ExitStack, device: torch.device) -> Homes:
    """What --offload-params and --offload-optimizer say; `stack` ends with the run.

    Units are updated one by one where they go to the host and back, where they are whole matrices (muon), and on a CPU:
    there no time goes to the start of a kernel, and the first weights travel while the next ones are updated.
    """
    host = partial(to_host, stack)
    states = dict(none=here, cpu=host, disk=partial(to_file, Path(config.out or "runs")))
    away = (config.offload_optimizer, config.offload_params) != ("none", "none")
    slices = host if config.offload_params == "cpu" else here
    alone = away or config.optimizer == "muon" or device.type == "cpu"
    return Homes(slices, states[config.offload_optimizer], alone)


class Ahead:
    """The update of units whose masters are on the host: gradients arrive one unit ahead, in two buffers in turn."""

    def __init__(self, updates: list[Any], stack: ExitStack):
        """`updates`: those of step 3's ZeRO, of a unit each."""
        self.updates, self.stream = [update for update in updates if update.units], torch.cuda.Stream()
        units = [unit for update in self.updates for unit in update.units]
        n = max((unit.length for unit in units), default=0)
        self.buffers = [to_host(stack, torch.empty(n, dtype=units[0].wide)) for _ in range(min(2, len(units)))]

    def send(self, i: int) -> tuple[Tensor, torch.cuda.Event]:
        """Start to copy the gradient of unit i; where it will be, and what to wait for."""
        (unit,) = self.updates[i].units
        gradient = unit.grad_slice
        arrived, there = torch.cuda.Event(), self.buffers[i % 2][: len(gradient)]
        with torch.cuda.stream(self.stream):
            there.copy_(gradient, non_blocking=True)
            arrived.record()
        return there, arrived

    def update(self, lr: float, factor: float):
        """Instead of the update of step 3's ZeRO."""
        self.stream.wait_stream(torch.cuda.current_stream())  # the gradients are summed on that one
        coming = [self.send(0)] if self.updates else []
        for i, update in enumerate(self.updates):
            if i + 1 < len(self.updates):
                coming.append(self.send(i + 1))  # into the buffer of unit i - 1, which is updated
            update.units[0].grad_slice, arrived = coming.pop(0)
            arrived.synchronize()
            update.step(lr, factor)


def gather_beside(stream: torch.cuda.Stream, unit: Any, gather: Callable[[], None]):
    """Start to copy and gather a unit's weights after what the GPU was told so far, and beside what comes next.

    The memory of whole units is then this stream's. It is free again as soon as the host says so, while kernels may
    still read it; but the stream first waits for them. `unit.ready` waits for what is pending: for NCCL, and for this
    stream, which in a group of one is alone with the copy.
    """
    before = unit.pending
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gather()
        if unit.pending is not before:  # else it was there already
            arrived = torch.cuda.Event()
            arrived.record()
            unit.pending.works.append(arrived)


def travel_beside(optimizer: Any, stack: ExitStack):
    """Let offloaded units of ZeRO travel while GPU and host compute, in place; nothing without a GPU."""
    units = getattr(optimizer, "units", [])
    if any(unit.flat.is_cuda and not unit.master.is_cuda for unit in units):
        optimizer.update = Ahead(optimizer.updates, stack).update
    beside = torch.cuda.Stream() if any(unit.flat.is_cuda and not unit.slice.is_cuda for unit in units) else None
    for unit in units if beside is not None else ():
        unit.gather = partial(gather_beside, beside, unit, unit.gather)


def on_host(config: Any) -> set[str]:
    """The kinds of the memory table that lie in host memory. A slice of weights that does takes its update there."""
    weights, states = (getattr(config, f"offload_{what}", "none") for what in ("params", "optimizer"))
    found = {"parameters"} if weights == "cpu" else set()
    if states == "cpu" or (weights == "cpu" and states == "none"):
        found |= {"masters", "moments"}
    return found


def require_disk(config: Any, model: nn.Module, dtype: torch.dtype, mesh: Mesh):
    """Refuse before training if a rank's disk cannot hold masters and moments (of all local ranks).

    Raises UserError on all ranks.
    """
    each = max(4, dtype.itemsize) * (1 + MOMENTS[config.optimizer])
    n_bytes = each * config.zero_replicas * sum(param.numel() for param in model.parameters())
    folder = Path(config.out or "runs")
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if any(sum_over(mesh.data, free < n_bytes)):  # nobody takes space before everybody has looked
        raise UserError(
            f"--offload-optimizer disk needs {n_bytes} bytes ({human(n_bytes)}) in {folder}, which has {free}: "
            "set --out to another disk"
        )
