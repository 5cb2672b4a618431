"""What one to eight GPUs do with the course: a text to paste into an issue.

    python -m extras.bench gpus                                  on all GPUs of this machine
    python -m extras.bench gpus --ranks 2 --model tiny           without a GPU: to try the command

It has three parts: the machine (card, versions, speed of a copy, of a matrix product and of an
all-reduce); whole training steps of several layouts, beside the dry run's lower bound and the
planner's prediction; and the steps beside PyTorch's own parallelism (contests.py). Each training
run is started as a user starts it, has two minutes, and if it fails, its error is shown in place of
numbers. What does not fit into `--minutes` is named, and left out.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from common import UserError
from common.flags import flag, parse
from common.shapes import model_shape
from extras.bench.contests import CONTESTS, now
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
LIMIT = 120.0  # seconds of one command
LEAST = 20.0  # seconds that a row needs


@dataclass
class Config:
    """Flags of the measurement."""

    ranks: int = flag(0, "GPUs to use; 0: 1, 2, 4 or 8, as many as there are")
    model: str = flag("smollm-1.7b", "preset of the shape, perhaps with changes")
    gpu: str = flag("h100-80", "whose constants dry run and planner use", GPUS)
    minutes: float = flag(12.0, "for everything")


def layouts(ranks: int) -> list[str]:
    """The runs on this number of GPUs: one device's variants, or each dimension alone."""
    if ranks == 1:
        step = "step01_single_gpu.py"
        return [step, f"{step} --compile", f"{step} --recompute full"]
    return [
        "step02_ddp.py",
        "step03_zero.py --zero 1",
        "step03_zero.py --zero 3",
        f"step04_tp_sp.py --tp {ranks}",
        f"step05_cp_ring.py --cp {ranks} --zero 1",
        f"step06_pipeline.py --pp {ranks}",
    ]


# --- The machine


def seconds_of(work: Callable) -> float:
    """The mean time of a call of `work`, in seconds."""
    work()
    began = now()
    for _ in range(10):
        work()
    return (now() - began) / 10


def speeds(kind: str) -> list[list[str]]:
    """The speed of a copy, of a matrix product and, on several ranks, of an all-reduce."""
    scale = 1 if kind == "cuda" else 16
    x = torch.empty(2**29 // scale, dtype=torch.bfloat16, device=kind)
    y = torch.empty_like(x)
    size = 8192 // scale
    a = torch.randn(size, size, device=kind).bfloat16()
    copy = seconds_of(lambda: y.copy_(x))
    product = seconds_of(lambda: a @ a)
    rows = [
        ["a copy reads and writes", f"{2 * x.nbytes / copy / 1e9:,.0f} GB/s"],
        [f"{size} x {size} x {size} in bf16", f"{2 * size**3 / product / 1e12:,.2f} TFLOP/s"],
    ]
    n = dist.get_world_size()
    if n > 1:
        reduce = seconds_of(lambda: dist.all_reduce(x))
        rate = 2 * (n - 1) / n * x.nbytes / reduce / 1e9
        rows.append([f"an all-reduce of {human(x.nbytes)} sends", f"{rate:,.2f} GB/s a rank"])
    return rows


def versions(kind: str) -> list[list[str]]:
    """Card, driver and libraries."""
    rows = [["torch", torch.__version__], ["Python", sys.version.split()[0]]]
    if kind == "cpu":
        return [["device", f"{os.cpu_count()} CPU cores"], *rows]
    words = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(words, capture_output=True, text=True, check=False)
    return [
        ["device", f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"],
        *rows,
        ["driver, power limit", smi.stdout.partition("\n")[0]],
        ["CUDA, NCCL", f"{torch.version.cuda}, {torch.cuda.nccl.version()}"],
    ]


# --- Runs


def run_until(end: float, *words: str) -> tuple[str, str]:
    """Run a command and its children -> what it printed, and why it failed ("": it did not).

    It has LIMIT seconds, but not longer than until `end`.
    """
    seconds = max(0.0, min(LIMIT, end - time.monotonic()))
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, log = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "", f"no result within {seconds:.0f} s"
    if process.returncode == 0:
        return out, ""
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    return out, errors[0] if errors else f"status {process.returncode}"


def flags_of(config: Config, ranks: int) -> list[str]:
    """Flags of all runs: four micro-batches of 4 sequences for each GPU."""
    batch = f"--global-batch-size={16 * ranks}"
    return [f"--model={config.model}", batch, "--micro-batch-size=4"]


def trained(words: list[str], ranks: int, kind: str, end: float) -> list[str]:
    """Train; return tokens/s, MFU and peak memory of a GPU, or why there are none."""
    with tempfile.TemporaryDirectory() as out:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        more = [f"--steps={SKIPPED + TIMED}", f"--device={kind}", f"--out={out}"]
        problem = run_until(end, *launcher, *words, *more)[1]
        if problem:
            return [problem, "", ""]
        lines = Path(out, "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[SKIPPED:]]
    rate = median(row["tokens_per_second"] for row in rows)
    mfu = median(row.get("mfu", 0.0) for row in rows)
    peak = max(row.get("peak_memory", 0) for row in rows)
    return [f"{rate:,.0f}", f"{mfu:.1%}" if mfu else "-", human(peak) if peak else "-"]


def dry(words: list[str], ranks: int, gpu: str, end: float) -> list[str]:
    """What the dry run says of rank 0: the largest possible MFU, and the peak of its memory."""
    more = [f"--ranks={ranks}", f"--gpu={gpu}", "--json"]
    out, problem = run_until(end, "-m", "extras.tools.dry_run", *words, *more)
    if problem:
        return [problem, ""]
    counts = json.loads(out)
    return [f"{counts['mfu']:.1%}", human(sum(counts["peak"].values()))]


def planned(row: str, ranks: int, config: Config) -> list[str]:
    """What the planner predicts: MFU and memory; "-" for flags that it does not know."""
    shape = shape_of(model_shape(config.model), Experts())
    flags = row.partition(" ")[2]
    try:
        layout = read_layout(f"{flags} --micro-batch-size 4", shape, ranks, 16 * ranks)
    except UserError:
        return ["-", "-"]
    gpu = GPUS[config.gpu]
    plan = evaluate(shape, layout, gpu)
    return [f"{rates(shape, plan, gpu)[0]:.1%}", human(plan.held.total)]


HEADER = ["run", "tokens/s", "MFU", "memory", "dry: MFU <", "memory", "plan: MFU", "memory"]


def in_time(names: list[str], end: float) -> Iterator[str]:
    """Yield names as long as there is time for one more; name those that are left out."""
    for name in names:
        if end - time.monotonic() >= LEAST:
            yield name
        else:
            print(f"left out, for want of time: {name}", flush=True)


def show_layouts(ranks: int, kind: str, config: Config, end: float):
    """Train each layout until `end`, and print their table."""
    rows = [HEADER]
    for row in in_time(layouts(ranks), end):
        words = [*row.split(), *flags_of(config, ranks)]
        measured = trained(words, ranks, kind, end)
        expected = dry(words, ranks, config.gpu, end) + planned(row, ranks, config)
        rows.append([row, *measured, *expected])
    print(f"\n{config.model} on {ranks} ranks, {16 * ranks} sequences of a step\n")
    print(table(rows), flush=True)


def show_contests(ranks: int, end: float):
    """Run the contests until `end`, and print their tables."""
    for name in in_time(list(CONTESTS), end):
        if CONTESTS[name].ranks > ranks:
            print(f"left out, for want of GPUs: {name}")
            continue
        out, problem = run_until(end, "-m", "extras.bench", name, "--rounds=3")
        print(f"\n{out or name + ': '}{problem}", flush=True)


def main(_name: str, argv: list[str]):
    """Measure, and print each part as soon as it is known. Raises UserError."""
    config = parse(Config, argv)
    gpus = torch.cuda.device_count()
    ranks = config.ranks or max(n for n in (1, 2, 4, 8) if n <= max(gpus, 1))
    kind = "cuda" if gpus >= ranks else "cpu"
    end = time.monotonic() + 60 * config.minutes
    pool = Pool(ranks, kind)
    try:
        measured = pool.run(speeds, kind, seconds=LIMIT)[0]
    finally:
        pool.stop()
    print(table([["machine", ""], *versions(kind), *measured]), flush=True)
    show_layouts(ranks, kind, config, end)
    show_contests(ranks, end)
