"""Which device and dtype a rank computes with, and how fast that could be."""

import os
import resource
import sys
import time
from typing import Any

import torch

from common import UserError

# Dense peak in TFLOP/s without sparsity, from the vendors' data sheets: (16-bit matrix units, fp32 without TF32).
GPU_PEAKS = {
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.0),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
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


def choose_device(name: str) -> torch.device:
    """`--device` -> the device of this process: one GPU a local rank, shared in turn where there are fewer GPUs.

    With a GPU, the host draws the initial weights and updates what is offloaded: with its share of the cores, not with
    the one thread that torchrun gives a rank. (Another number in OMP_NUM_THREADS is the user's, and stays.)
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`--dtype` -> torch dtype; auto is bf16 on a GPU that has it, else fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float) -> float:
    """FLOP/s that this rank could do at best: the flag, the table above or, for any other device, a timed matmul.

    Ranks that share a GPU share its peak.
    """
    share = 1.0
    if device.type == "cuda":
        share = min(1.0, torch.cuda.device_count() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if override_tflops:
        return override_tflops * 1e12 * share
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (half, single) in GPU_PEAKS.items():
            if key in name:
                return 1e12 * share * {2: half, 4: single, 8: single / 2}[dtype.itemsize]
    n, times, until = 512 if device.type == "cpu" else 8192, [], time.perf_counter() + 0.3
    a = torch.randn(n, n, dtype=dtype, device=device)
    while len(times) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point so far: the allocator's on a GPU, the resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def moment(device: torch.device) -> Any:
    """Now: seconds, or an event in a GPU's stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
