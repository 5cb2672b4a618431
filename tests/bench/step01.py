"""Speed and memory of training on one device: tokens/s, MFU, HFU, peak memory.

    python -m tests.bench step01                                                            a CPU
    python -m tests.bench step01 --model smollm-1.7b --seq-len 2048 --dtype bf16 --compile  a GPU

Every flag of step01_single_gpu.py is understood. With --compile there are two rows, without it and with it.
"""

import contextlib
import dataclasses
import gc
import statistics
import sys
import tempfile
from dataclasses import dataclass

import torch

import step01_single_gpu as step01
from common import UserError
from services.flags import main as run_main
from services.tables import human, table

WARM_UP = 3  # steps that are not counted: compilation, autotuning, the allocator


@dataclass
class Config(step01.Config):
    """Step 1's flags, for a short run that keeps nothing."""

    steps: int = 10  # optimizer steps, of which the first three are not counted
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 0  # steps between validations; 0: none


def measure(config: Config) -> list[str]:
    """Train under `config`; returns the cells of its row, medians over the steps counted."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        history = step01.train(dataclasses.replace(config, out=out)).history[WARM_UP:]
    gc.collect()
    torch.cuda.empty_cache()
    speed, mfu, hfu = (statistics.median(row[key] for row in history) for key in ("tokens_per_second", "mfu", "hfu"))
    m = config.model_config()
    shape = [config.model, str(m.seq_len), f"{config.micro_batch_size} of {config.global_batch_size}"]
    how = [config.recompute, "yes" if config.compile else "no"]
    return [*shape, *how, f"{speed:,.0f}", f"{mfu:.1%}", f"{hfu:.1%}", human(history[-1]["peak_memory_bytes"])]


def bench(config: Config):
    """Print the table."""
    if config.steps <= WARM_UP:
        raise UserError(f"--steps {config.steps}: the first {WARM_UP} are not counted, give more")
    header = ["model", "seq", "micro-batch", "recompute", "compile", "tokens/s", "MFU", "HFU", "peak memory"]
    rows = [measure(dataclasses.replace(config, compile=c)) for c in ([False, True] if config.compile else [False])]
    print(table([header, *rows]))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
