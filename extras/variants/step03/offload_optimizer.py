"""ZeRO's masters and moments in host memory or in files (`--offload-optimizer`; Ren et al. 2021, "ZeRO-Offload").

    cpu     masters and moments are in host memory, and are updated there
    disk    the same in memory-mapped files of the run directory, without names: they end with the process

The update (in step 3 it would be `Zero1.step`) goes unit by unit, because rules skip what has no gradient. With a GPU,
copies use a stream of their own: the next unit's gradient is copied while the host updates this one. (Pinned host
memory is rounded up to a power of two.)
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from common import UserError
from common.comm import Mesh, all_reduce
from extras.variants import Parts
from step03_zero import Config, Unit, Zero1

SINCE = Config


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU to copy to."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return host.copy_(tensor)


def to_file(folder: Path, tensor: Tensor) -> Tensor:
    """A copy in a file of `folder` without a name. Raises OSError if the disk is full: space is taken now."""
    with tempfile.TemporaryFile(dir=folder) as file:
        n_bytes = max(1, tensor.nbytes)
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, n_bytes)
        file.truncate(n_bytes)
        mapped = mmap.mmap(file.fileno(), n_bytes)
    return torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


def require_space(folder: Path, n_bytes: int, mesh: Mesh, device: torch.device):
    """Raises UserError on all ranks, before any takes space, if one's disk has less than its local ranks will want."""
    n_bytes *= int(os.environ.get("LOCAL_WORLD_SIZE", mesh.world))
    free = shutil.disk_usage(folder).free
    short = torch.tensor(float(free < n_bytes), device=device)
    for dim in mesh.sizes:
        all_reduce(short, mesh[dim]).wait()
    if short:
        raise UserError(f"--offload-optimizer disk: {n_bytes} bytes do not fit in {folder}, {free} are free: set --out")


def move(zero: Zero1, unit: Unit, master: Tensor):
    """Let a unit's master, with its shards, be this one. The rule keeps its tensors: only what they hold moves."""
    unit.master = master
    for name in unit.trained:
        if name in zero.masters:
            zero.masters[name].data = unit.view_shard(master, name)


class Update:
    """The update of ZeRO's units, one by one, where their masters are."""

    def __init__(self, optimizer: Zero1, home: Callable[[Tensor], Tensor]):
        """`home`: copies a tensor to where the state is kept."""
        self.optimizer, self.home = optimizer, home
        self.units = [unit for unit in optimizer.units if unit.trained]
        self.moved: set[Tensor] = set()  # masters whose moments are at home
        self.beside = any(unit.flat.is_cuda and not unit.master.is_cuda for unit in self.units)
        if self.beside:  # gradients arrive in two buffers in turn
            self.stream, longest = torch.cuda.Stream(), max(self.units, key=lambda unit: unit.length)
            self.buffers = [to_host(longest.master) for _ in range(2)]

    def send(self, i: int, gradient: Tensor) -> tuple[Tensor, Callable]:
        """Start to copy the gradient of unit i to its master; where it will be, and what waits for it."""
        if not self.beside:
            return gradient, lambda: None
        there, arrived = self.buffers[i % 2][: len(gradient)], torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            there.copy_(gradient, non_blocking=True)
            arrived.record()
        return there, arrived.synchronize

    def step(self, lr: float):
        """Replaces `Zero1.step`."""
        zero, rule = self.optimizer, self.optimizer.torch_optimizer
        for group in rule.param_groups:
            group["lr"] = lr
        if self.beside:
            self.stream.wait_stream(torch.cuda.current_stream())  # the gradients are summed on that one
        gradients = [unit.grad_shard for unit in self.units]
        for unit in self.units:
            unit.grad_shard = None  # a unit has one while it is updated: so rules know which that is
        coming = [self.send(0, gradients[0])] if self.units else []
        for i, unit in enumerate(self.units):
            if i + 1 < len(self.units):
                coming.append(self.send(i + 1, gradients[i + 1]))  # into the buffer of unit i - 1, which is updated
            unit.grad_shard, wait = coming.pop(0)
            wait()
            masters = {name: zero.masters[name] for name in unit.trained if name in zero.masters}
            for name, master in masters.items():
                master.grad = unit.view_shard(unit.grad_shard, name)
            rule.step()
            rule.zero_grad()
            for master in {master for master in masters.values() if rule.state[master]} - self.moved:  # just made
                rule.state[master] |= {key: self.home(t) for key, t in rule.state[master].items() if t.dim()}
                self.moved.add(master)
            unit.gradient = unit.reduced_shard = unit.grad_shard = gradients[i] = None
            for param in unit.trained.values():
                param.grad = None
        zero.publish()


@dataclass
class Flags:
    """Offload of optimizer state."""

    offload_optimizer: Literal["none", "cpu", "disk"] = "none"  # where masters and moments live, are updated


NEEDS = [("offload_optimizer", "zero", 1, 2, 3)]  # there must be shards to move


def attach(config: Any, parts: Parts):
    """Move masters, and moments when they have been made. Raises UserError."""
    if config.offload_optimizer == "none":
        return
    zero, home = parts.optimizer, to_host
    if config.offload_optimizer == "disk":
        folder = Path(config.out or "runs")
        folder.mkdir(parents=True, exist_ok=True)
        n_bytes = 3 * sum(unit.master.nbytes for unit in zero.units)  # two moments at the most
        require_space(folder, n_bytes, parts.mesh, zero.units[0].flat.device)
        home = partial(to_file, folder)
    for unit in zero.units:
        move(zero, unit, home(unit.master))
    parts.instead(zero, "step", Update(zero, home).step, by=__name__)
