"""What a run adds to its steps on the host: step 1's `train` beside a bare loop of the same computation.

    python -m tests.bench overhead
    python -m tests.bench overhead --model smollm-135m --rounds 3

Both train the same model on the same batches, in turns. The bare loop has no `run`: no log, no phases, no checks, no
memory table. It reads its batches from the same data set. Its medians, of all steps but the first three of a round, are
subtracted from those of `train`. Validation and checkpoints are off.
"""

import contextlib
import itertools
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace

import torch

import step01_single_gpu as step01
from common.layout import materialize
from common.model import Decoder
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.readers import open_tokens
from services.tables import table

WARM_UP = 3  # steps of a round that are not counted: in the first ones every tensor is watched


@dataclass
class Config(step01.Config):
    """Step 1's flags, for short runs that keep nothing."""

    model: str = "debug"  # preset
    steps: int = 40  # optimizer steps of a round
    rounds: int = 5  # rounds of each
    global_batch_size: int = 8  # sequences per optimizer step
    micro_batch_size: int = 2  # sequences per forward and backward
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 0  # steps between validations; 0: none


def bare(config: Config) -> list[float]:
    """Train without a `run`; returns the seconds at which steps ended."""
    device = choose_device(config.device)
    m, size, ends = config.model_config(), config.global_batch_size, []
    data = open_tokens(config.dataset, m.seq_len, size, config.seed, m.vocab_size)
    with torch.device("meta"):
        model = Decoder(m)
    materialize(model, config.seed, device, choose_dtype(config.dtype, device))
    step01.wrap_layers(model, config)
    optimizer = step01.Optimizer(model, config)
    for step in range(config.steps):
        batch, total = data.batch(step), 0.0
        for start in range(0, size, config.micro_batch_size):
            rows = slice(start, start + config.micro_batch_size)
            loss = model.lm_head.loss(model(batch.tokens[rows].to(device)), batch.targets[rows].to(device))
            loss = loss / batch.n_targets
            (loss * optimizer.loss_scale).backward()
            total = total + loss.detach()
        if not math.isfinite(float(total)):
            raise RuntimeError("the loss is not finite")
        optimizer.step(config.lr, optimizer.grad_norm())
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return ends


def trained(config: Config) -> list[float]:
    """Train by step 1; returns the seconds at which steps had their gradients."""
    seen: list[float] = []
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):
        step01.train(replace(config, out=out), observe=lambda *_: seen.append(time.perf_counter()))
    return seen


def bench(config: Config):
    """Print the table."""
    seconds: dict[str, list[float]] = {"bare loop": [], "step 1": []}
    for _ in range(config.rounds):
        for name, run in zip(seconds, (bare, trained), strict=True):
            seconds[name] += [later - first for first, later in itertools.pairwise(run(config)[WARM_UP:])]
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rows = [["a step of", "milliseconds", "more"]]
    rows += [
        [name, f"{1e3 * each:.3f}", f"{1e3 * (each - medians['bare loop']):.3f}"] for name, each in medians.items()
    ]
    print(table(rows))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
