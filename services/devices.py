"""Which device and dtype a rank computes with, and how fast that could be."""

import os
import re
import resource
import sys
import time
from pathlib import Path
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

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}  # NVIDIA's for Linux, by the major version of CUDA


def driver_version(about: Path = Path("/proc/driver/nvidia/version")) -> str:
    """NVIDIA's driver, as its kernel module says of itself; "" if there is none."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", about.read_text()) if about.exists() else None
    return found[1] if found else ""


def unusable_gpu(files: Path = Path("/dev")) -> tuple[str, str]:
    """(problem, mend) if this PyTorch is built for GPUs and one is here that it cannot use; else ("", "").

    Whoever hides the GPUs, CUDA_VISIBLE_DEVICES= or -1, wants it so.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    there = sorted(files.glob("nvidia[0-9]*"))
    if hidden or not there or not torch.version.cuda or torch.cuda.is_available():
        return "", ""
    wheel, driver = f"torch {torch.__version__}, built for CUDA {torch.version.cuda},", driver_version()
    oldest = OLDEST_DRIVERS.get(int(torch.version.cuda.split(".")[0]), 0)
    problem = f"{there[0]} is a GPU, but {wheel} cannot use it (driver {driver or 'unknown'})"
    if driver and int(driver.split(".")[0]) >= oldest:
        return problem, "see what nvidia-smi says"
    return problem, f"update the driver to {oldest} or newer, or install a torch wheel for an older CUDA"


def choose_device(name: str) -> torch.device:
    """`--device` -> the device of this process: one GPU a local rank, shared in turn where there are fewer GPUs.

    With a GPU, the host draws the initial weights and updates what is offloaded: with its share of the cores, not with
    the one thread that torchrun gives a rank. (Another number in OMP_NUM_THREADS is the user's, and stays.) Raises
    UserError if there is a GPU that was not renounced, and cannot be used.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu or auto")
    problem, mend = unusable_gpu() if name == "auto" else ("", "")
    if problem:  # hours later somebody would notice how slow it is
        raise UserError(f"{problem}: {mend}; or train on the CPU on purpose, with --device cpu")
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
