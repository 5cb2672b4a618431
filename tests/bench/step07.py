"""Experts: one grouped matmul against a loop over them; and all five dimensions against the best three.

    python -m tests.bench step07                      on a CPU
    python -m tests.bench step07 --device cuda        on a GPU

The same tokens, dealt to the experts unevenly; both take turns, medians count. Grouped is what PyTorch has for the
dtype and device. Then whole runs of step 7 on 8 ranks: 5D (pp 2 x cp 2 x tp 2, ep 2) and layouts of dp x tp x pp, which
have cp 1 and ep 1, in turns.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal
from unittest import mock

import torch

from common import UserError, moe
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.tables import table


@dataclass
class Config:
    """Flags of this benchmark."""

    tokens: int = 0  # rows of all experts together; 0: 16384 on a GPU, 2048 on a CPU
    dim: int = 0  # width of a token; 0: 2048 on a GPU, 256 on a CPU
    expert_dim: int = 0  # width of an expert; 0: 1024 on a GPU, 128 on a CPU
    rounds: int = 11  # rounds to measure, after one to warm up
    runs: int = 2  # runs of each layout, in turns; 0: leave them out
    steps: int = 4  # optimizer steps of a run, the first of which does not count
    model: str = "tiny-moe"  # preset that the layouts train
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of tokens and weights; auto: bf16 on a GPU, else fp32
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Time of one call."""
    finished = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finished()
    start = time.perf_counter()
    step()
    finished()
    return time.perf_counter() - start


def contest(config: Config, n: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Median seconds of a forward and backward pass of `n` experts, by way."""
    on_gpu = device.type == "cuda"
    tokens, dim = config.tokens or (16384 if on_gpu else 2048), config.dim or (2048 if on_gpu else 256)
    width = config.expert_dim or (1024 if on_gpu else 128)
    m = moe.MoEConfig(dim, 1, 1, 1, width, 257, 1, experts=n, experts_per_token=1)
    generator = torch.Generator().manual_seed(0)
    experts = moe.Experts(m)
    for param in experts.parameters():
        param.data.normal_(0, 0.02, generator=generator)
    experts.to(device, dtype)
    x = torch.randn(tokens, dim, generator=generator).to(device, dtype).requires_grad_()
    chosen = (torch.randn(tokens, generator=generator).abs() * n / 3).long().clamp(max=n - 1)
    gates = torch.nn.functional.one_hot(chosen, n).float().to(device)

    def grouped():
        experts(x, gates).sum().backward()

    def looped():
        with mock.patch.object(moe, "can_group", lambda *_: False):
            grouped()

    ways, timed = {"grouped": grouped, "looped": looped}, {"grouped": [], "looped": []}
    for turn in range(config.rounds + 1):
        for way in list(ways) if turn % 2 else list(ways)[::-1]:
            timed[way].append(seconds(ways[way], device))
    return {way: median(times[1:]) for way, times in timed.items()}


LAYOUTS = {
    "5D: pp 2 x cp 2 x tp 2, ep 2": "--pp 2 --cp 2 --tp 2 --ep 2",
    "5D, zbv": "--pp 2 --cp 2 --tp 2 --ep 2 --schedule zbv",
    "3D: pp 2 x dp 2 x tp 2": "--pp 2 --cp 1 --tp 2 --ep 1",
    "3D: pp 2 x dp 1 x tp 4": "--pp 2 --cp 1 --tp 4 --ep 1",
    "3D: pp 4 x dp 1 x tp 2": "--pp 4 --cp 1 --tp 2 --ep 1",
    "2D: pp 2 x dp 4": "--pp 2 --cp 1 --tp 1 --ep 1",
    "2D: dp 4 x tp 2": "--pp 1 --cp 1 --tp 2 --ep 1",
}


def step_seconds(flags: str, config: Config) -> list[float]:
    """Seconds of each step but the first of one run of step 7 on 8 ranks."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
        command += ["step07_moe_ep.py", "--model", config.model, "--steps", str(config.steps), "--out", out]
        command += ["--global-batch-size", "32", "--eval-every", "0", "--save-every", "0"]
        command += ["--device", config.device, *flags.split()]
        found = subprocess.run(command, env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True)
        if found.returncode:
            raise UserError(f"step 7 with {flags} failed: {found.stderr[-600:]}")
        return [json.loads(line)["seconds"] for line in Path(out, "metrics.jsonl").read_text().splitlines()][1:]


def layouts(config: Config):
    """The table of layouts."""
    timed: dict[str, list[float]] = {name: [] for name in LAYOUTS}
    for turn in range(config.runs):
        for name in list(LAYOUTS) if turn % 2 else list(LAYOUTS)[::-1]:
            timed[name] += step_seconds(LAYOUTS[name], config)
    best = min(median(times) for name, times in timed.items() if not name.startswith("5D"))
    rows = [["8 ranks", "step time", "best without cp and ep / this"]]
    rows += [[name, f"{median(times):.3f} s", f"{best / median(times):.2f}"] for name, times in timed.items()]
    print(f"\n{config.model}, {config.runs} runs of {config.steps} steps of 32 sequences, in turns\n\n{table(rows)}")


def bench(config: Config):
    """The tables."""
    if config.rounds < 1 or min(config.tokens, config.dim, config.expert_dim, config.runs) < 0 or config.steps < 2:
        raise UserError("--rounds must be at least 1, --steps at least 2, and no size negative")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    rows = [["experts", "grouped", "looped", "speed-up"]]
    for n in (4, 16, 64, 256):
        found = contest(config, n, device, dtype)
        ratio = found["looped"] / found["grouped"]
        rows.append([str(n), f"{1e3 * found['grouped']:.2f} ms", f"{1e3 * found['looped']:.2f} ms", f"{ratio:.2f}"])
    print(f"forward and backward, {dtype}, {device}\n\n{table(rows)}")
    if config.runs:
        layouts(config)


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
