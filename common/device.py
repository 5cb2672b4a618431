"""The device and the dtype of a run."""

import os
from typing import Any

import torch

from common import UserError

# "auto": `choose_device` chooses
DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def choose_device(config: Any) -> tuple[torch.device, torch.dtype]:
    """This process's device and dtype, by --device and --dtype.

    --device auto: this process's GPU if PyTorch sees any, else the CPU. --dtype auto: bf16 if that
    GPU has it, else fp32. Raises UserError if this process should have a GPU, but there is none for
    it.
    """
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = own_gpu() if kind == "cuda" else torch.device("cpu")
    dtype = DTYPES[config.dtype]
    if dtype is None:
        # GPUs before Ampere, which has compute capability 8.0, only emulate bf16
        has_bf16 = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        dtype = torch.bfloat16 if has_bf16 else torch.float32
    return device, dtype


def own_gpu() -> torch.device:
    """The GPU of this process. It becomes PyTorch's current one, which is used by NCCL and by
    functions of torch.cuda that are given no device. Raises UserError if PyTorch sees too few GPUs.
    """
    # From torchrun: this process's number on its node (machine). Step 1 is one process
    index = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise UserError("--device cuda: PyTorch sees no GPU here: use --device cpu")
    if index >= gpus:
        raise UserError(
            f"--device: each rank needs a GPU of its own, and PyTorch sees {gpus} here: "
            "lower --nproc_per_node, or use --device cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device
