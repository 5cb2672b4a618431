"""A second helping of step 3: tensors in host memory or in a file."""

import mmap
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from common import UserError
from common.comm import Group, sum_over
from services.tables import human


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where there is a GPU to copy to."""
    host = tensor.cpu()
    return host.pin_memory() if torch.cuda.is_available() else host


def map_file(folder: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor in a file of `folder`, its space reserved at once. The file has no name, so it ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, elements * dtype.itemsize)
        return torch.frombuffer(mmap.mmap(file.fileno(), elements * dtype.itemsize), dtype=dtype)


def require_disk(folder: Path, n_bytes: int, group: Group):
    """Refuse before training if a rank's disk cannot hold `n_bytes` (of all local ranks). Raises UserError on all."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if any(sum_over(group, free < n_bytes)):  # nobody takes space before everybody has looked
        raise UserError(
            f"--offload-optimizer disk needs {n_bytes} bytes ({human(n_bytes)}) in {folder}, which has {free}: "
            "set --out to another disk"
        )
