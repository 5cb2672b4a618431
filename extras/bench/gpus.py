"""What one to eight GPUs do with the course: a text to paste into an issue.

    python -m extras.bench gpus                                  on all GPUs of this machine
    python -m extras.bench gpus --ranks 2 --model tiny           without a GPU: to try the command

It has three parts: the machine (card, versions, speed of a copy, of a matrix product and of an
all-reduce); whole training steps of several layouts, beside the dry run's lower bound and the
planner's prediction; and the steps beside PyTorch's own parallelism (contests.py). Each training
run is started as a user starts it, has `--limit` seconds, and if it fails, its last line is shown
in place of numbers. What does not fit into `--minutes` is named, and left out.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from common import UserError
from common.flags import flag, parse
from common.shapes import model_shape
from extras.plan.gpus import GPUS
from extras.plan.layouts import read_layout
from extras.plan.report import rates
from extras.plan.search import evaluate
from extras.plan.shapes import Experts, shape_of
from extras.plan.tables import table
from extras.tools.memory import human
from tests.pool import ROOT, Pool

SKIPPED = 4  # steps of a run that are not timed
TIMED = 8


@dataclass
class Config:
    """Flags of the measurement."""

    ranks: int = flag(0, "GPUs to use: 1, 2, 4 or 8; 0: as many of these as there are", least=0)
    model: str = flag("smollm-1.7b", "preset of the shape, perhaps with changes")
    gpu: str = flag("h100-80", "whose constants dry run and planner use", GPUS)
    minutes: float = flag(12.0, "for everything")
    limit: float = flag(120.0, "seconds of one training run")


class Row(NamedTuple):
    """A training run."""

    step: str
    flags: str


def layouts(ranks: int) -> list[Row]:
    """The runs on this number of GPUs: one device's variants, or each dimension alone."""
    if ranks == 1:
        step = "step01_single_gpu"
        return [Row(step, ""), Row(step, "--compile"), Row(step, "--recompute full")]
    return [
        Row("step02_ddp", ""),
        Row("step03_zero", "--zero 1"),
        Row("step03_zero", "--zero 3"),
        Row("step04_tp_sp", f"--tp {ranks}"),
        Row("step05_cp_ring", f"--cp {ranks} --zero 1"),
        Row("step06_pipeline", f"--pp {ranks}"),
    ]


# --- The machine


def seconds_of(work, device: torch.device, repeats: int = 10) -> float:
    """The median time of a call of `work`, in seconds."""
    times = []
    for _ in range(repeats + 2):
        if dist.is_initialized():
            dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return median(times[2:])


def speeds(kind: str) -> dict[str, str]:
    """The speed of a copy, of a matrix product and, on several ranks, of an all-reduce."""
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    scale = 1 if kind == "cuda" else 16
    x = torch.empty(2**29 // scale, dtype=torch.bfloat16, device=device)
    y = torch.empty_like(x)
    size = 8192 // scale
    a = torch.randn(size, size, device=device).bfloat16()
    copy = seconds_of(lambda: y.copy_(x), device)
    product = seconds_of(lambda: a @ a, device)
    found = {
        "a copy reads and writes": f"{2 * x.nbytes / copy / 1e9:,.0f} GB/s",
        f"{size} x {size} x {size} in bf16": f"{2 * size**3 / product / 1e12:,.2f} TFLOP/s",
    }
    n = dist.get_world_size() if dist.is_initialized() else 1
    if n > 1:
        reduce = seconds_of(lambda: dist.all_reduce(x), device)
        sent = 2 * (n - 1) / n * x.nbytes
        found[f"an all-reduce of {human(x.nbytes)} sends"] = (
            f"{sent / reduce / 1e9:,.2f} GB/s a rank"
        )
    return found


def versions(kind: str) -> dict[str, str]:
    """Card, driver and libraries."""
    found = {"torch": torch.__version__, "Python": sys.version.split()[0]}
    if kind == "cpu":
        return {"device": f"{os.cpu_count()} CPU cores"} | found
    words = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(words, capture_output=True, text=True, check=False)
    found["driver, power limit"] = (smi.stdout.splitlines() or ["unknown"])[0]
    found["CUDA, NCCL"] = f"{torch.version.cuda}, {torch.cuda.nccl.version()}"
    return {"device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"} | found


# --- Runs


def run_limited(words: list[str], seconds: float) -> tuple[str, str]:
    """Run a command and its children -> what it printed, and why it failed ("": it did not)."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            out = process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "", f"no result within {seconds:.0f} s"
        log.seek(0)
        errors = [line for line in log.read().splitlines() if line.startswith("error: ")]
    if process.returncode:
        return out, errors[0] if errors else f"status {process.returncode}"
    return out, ""


def flags_of(row: Row, ranks: int, config: Config) -> list[str]:
    """The flags of a run: four micro-batches of 4 sequences for each GPU."""
    words = [f"--model={config.model}", f"--global-batch-size={16 * ranks}"]
    return [*words, "--micro-batch-size=4", *row.flags.split()]


def trained(row: Row, ranks: int, kind: str, config: Config, limit: float) -> list[str]:
    """Train; return tokens/s, MFU and peak memory of a GPU, or why there are none."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryDirectory() as out:
        words = [*launcher, f"--nproc_per_node={ranks}", f"{row.step}.py", f"--out={out}"]
        words += [f"--steps={SKIPPED + TIMED}", f"--device={kind}", *flags_of(row, ranks, config)]
        problem = run_limited(words, limit)[1]
        if problem:
            return [problem, "", ""]
        lines = Path(out, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[SKIPPED:]]
    rate = median(row["tokens_per_second"] for row in rows)
    mfu = median(row.get("mfu", 0.0) for row in rows)
    peak = max(row.get("peak_memory", 0) for row in rows)
    return [f"{rate:,.0f}", f"{mfu:.1%}" if mfu else "-", human(peak) if peak else "-"]


def dry(row: Row, ranks: int, config: Config, limit: float) -> list[str]:
    """What the dry run says of rank 0: the largest possible MFU, and the peak of its memory."""
    words = [sys.executable, "-m", "extras.tools.dry_run", f"{row.step}.py", f"--ranks={ranks}"]
    words += [f"--gpu={config.gpu}", "--json", *flags_of(row, ranks, config)]
    out, problem = run_limited(words, limit)
    if problem:
        return [problem, ""]
    counts = json.loads(out)
    return [f"{counts['mfu']:.1%}", human(sum(counts["peak"].values()))]


def planned(row: Row, ranks: int, config: Config) -> list[str]:
    """What the planner predicts: MFU and memory, or why it cannot."""
    if row.step == "step01_single_gpu" and "--compile" in row.flags:
        return ["-", "-"]  # it does not know compiled layers
    shape = shape_of(model_shape(config.model), Experts())
    try:
        layout = read_layout(f"{row.flags} --micro-batch-size 4", shape, ranks, 16 * ranks)
    except UserError as error:  # such as too few layers for the stages
        return [f"error: {error}", ""]
    plan = evaluate(shape, layout, GPUS[config.gpu])
    return [f"{rates(shape, plan, GPUS[config.gpu])[0]:.1%}", human(plan.held.total)]


HEADER = ["run", "tokens/s", "MFU", "memory", "dry: MFU <", "memory", "plan: MFU", "memory"]


def choose_ranks(config: Config) -> tuple[int, str]:
    """The number of ranks, and the kind of their devices. Raises UserError."""
    gpus = torch.cuda.device_count()
    ranks = config.ranks
    if not ranks:
        ranks = max(n for n in (1, 2, 4, 8) if n <= max(gpus, 1))
    if ranks not in (1, 2, 4, 8):
        raise UserError(f"--ranks {ranks}: give 1, 2, 4 or 8")
    return ranks, "cuda" if gpus >= ranks else "cpu"


def remaining(config: Config, end: float) -> float:
    """The seconds that a run may take: --limit, or what is left until `end`."""
    return max(0.0, min(config.limit, end - time.monotonic()))


def show_layouts(ranks: int, kind: str, config: Config, end: float) -> list[str]:
    """Train each layout until `end`, and print their table; return those that were left out."""
    rows = [HEADER]
    left_out = []
    for row in layouts(ranks):
        words = f"{row.step} {row.flags}".strip()
        seconds = remaining(config, end)
        if seconds < 20:
            left_out.append(words)
            continue
        measured = trained(row, ranks, kind, config, seconds)
        expected = dry(row, ranks, config, remaining(config, end)) + planned(row, ranks, config)
        rows.append([words, *measured, *expected])
    print(f"\n{config.model} on {ranks} ranks, {16 * ranks} sequences of a step\n")
    print(table(rows), flush=True)
    return left_out


def show_contests(ranks: int, config: Config, end: float) -> list[str]:
    """Run the contests until `end`, and print their tables; return those that were left out."""
    left_out = []
    for contest, least in (("step1", 1), ("step2", 2), ("step3", 2), ("step4", 2), ("step6", 4)):
        seconds = remaining(config, end)
        if ranks < least or seconds < 20:
            left_out.append(f"bench {contest}")
            continue
        words = [sys.executable, "-m", "extras.bench", contest, "--rounds=3"]
        out, problem = run_limited(words, seconds)
        print(f"\n{out or contest + ': '}{problem}", flush=True)
    return left_out


def main(name: str, argv: list[str]):
    """Measure, and print each part as soon as it is known. Raises UserError."""
    config = parse(Config, argv)
    ranks, kind = choose_ranks(config)
    end = time.monotonic() + 60 * config.minutes
    pool = Pool(ranks, kind)
    try:
        machine = versions(kind) | pool.run(speeds, kind, seconds=config.limit)[0]
    finally:
        pool.stop()
    print(table([["machine", ""], *([key, value] for key, value in machine.items())]), flush=True)
    left_out = show_layouts(ranks, kind, config, end) + show_contests(ranks, config, end)
    if left_out:
        print(f"\nleft out, for want of GPUs or time: {', '.join(left_out)}")
