"""A variant for step 3: ZeRO's slices in host memory or in a file (Ren et al. 2021, "ZeRO-Offload").

--offload-optimizer cpu keeps masters and moments in host memory and updates there; disk keeps them in memory-mapped
files of the run directory. --offload-params cpu (stage 3) keeps the weight slices on the host, and so the update too.
Everything streams unit by unit. The files never have a name: they vanish with the process and are never mistaken for a
checkpoint.

A home is a function from a tensor to the tensor that lives where it is to live, the same one or a copy.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
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


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU to copy to."""
    host = tensor.to("cpu", copy=True)
    return host.pin_memory() if torch.cuda.is_available() else host


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


def homes(config: Any) -> Homes:
    """What --offload-params and --offload-optimizer say."""
    states = dict(none=here, cpu=to_host, disk=partial(to_file, Path(config.out or "runs")))
    return Homes(to_host if config.offload_params == "cpu" else here, states[config.offload_optimizer])


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
    n_bytes = each * sum(param.numel() for param in model.parameters())
    folder = Path(config.out or "runs")
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if any(sum_over(mesh.data, free < n_bytes)):  # nobody takes space before everybody has looked
        raise UserError(
            f"--offload-optimizer disk needs {n_bytes} bytes ({human(n_bytes)}) in {folder}, which has {free}: "
            "set --out to another disk"
        )
