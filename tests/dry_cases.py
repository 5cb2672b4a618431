"""Layouts of up to 16,384 ranks, drawn from a seed, and what the dry run of one of their ranks counts beside theory."""

import dataclasses
import importlib
import json
import os
import random
import time
import traceback
from pathlib import Path
from typing import Any

from common import UserError
from services.checks import check
from services.dry_run import Seen, run_rank, work
from services.fake_device import can_fake_cuda
from tests.fake_cuda import STEPS
from theory.gpus import GPUS

MOST = 16384
SHAPES = dict(
    wide=dict(model="llama3-8b", vocab_size=32000, seq_len=2048),
    many_heads=dict(model="llama3-405b", seq_len=4096),
    tied=dict(model="llama3.2-1b", seq_len=1024),
    small=dict(model="tiny"),
)
VALUES = dict(
    dtype=("bf16", "bf16", "fp32"),
    grad_dtype=("fp32", "same"),
    recompute=("none", "none", "full", "selective"),
    micro_batch_size=(1, 2),
    zero=(0, 1, 2, 3),
    tp=(1, 2, 4, 8),
    sp=(True, True, False),
    tp_overlap=(True, True, False),
    cp=(1, 2, 4),
    cp_mode=("zigzag", "ring", "allgather", "ulysses"),
    pp=(1, 2, 4),
    schedule=("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe"),
    ep=(1, 2, 4),
    ep_mode=("alltoall", "alltoall", "allgather"),
    shared_experts=(0, 1),
    balance=("loss", "bias"),
)


def draw(seed: int) -> dict[str, Any]:
    """A case: step, ranks, the rank to be, and flags that the step takes on so many ranks."""
    rng = random.Random(seed)
    while True:
        step = rng.choice((3, 4, 5, 6, 6, 7, 7))
        config_of = importlib.import_module(STEPS[step - 1]).Config
        names = {field.name for field in dataclasses.fields(config_of)}
        options = {name: rng.choice(values) for name, values in VALUES.items() if name in names}
        options |= rng.choice([*SHAPES.values()]) if step < 7 else dict(model="mixtral-8x7b", seq_len=2048)
        if options.get("cp", 1) > 1:
            options["dtype"] = "bf16"  # in fp32, no fused kernel of a GPU returns what a ring needs
        options["optimizer"] = "adamw" if seed % 20 else "muon"
        options["n_layers"] = rng.choice((2, 3)) * options.get("pp", 1)
        inner = options.get("tp", 1) * options.get("cp", 1) * options.get("pp", 1)
        dp = rng.choice([n for n in (1, 2, 3, 4, 16, 48, 128, 1024, 4096, 16384) if 2 <= n * inner <= MOST])
        options["global_batch_size"] = dp * options["micro_batch_size"] * rng.choice((1, 2, options.get("pp", 1) + 1))
        try:
            check(config_of(**options), dp * inner)
        except UserError:
            continue
        return dict(step=step, world=dp * inner, rank=rng.randrange(dp * inner), options=options)


def run(step: int, world: int, rank: int, options: dict, device: str = "cuda") -> Seen:
    """The dry run of one rank of a case."""
    module = importlib.import_module(STEPS[step - 1])
    alone = dict(steps=1, save_every=0, eval_every=0, profile_memory=1, peak_tflops=1.0, device=device)
    return run_rank(module.train, module.Config(**options | alone), rank, world, GPUS["h100-80"], 67e12)


def compared(seen: Seen) -> dict[str, Any]:
    """What was counted beside what theory says: traffic, FLOPs, and bytes by kind, with their peak in all."""
    said = seen.costs.traffic
    sent = {" ".join(key): (n, said.get(key)) for key, n in seen.traffic.items() if key[1].split("(")[-1] != "metrics)"}
    sent |= {" ".join(key): (0.0, n) for key, n in said.items() if key not in seen.traffic and n}
    held = {kind: (seen.held.get(kind, 0), n) for kind, n in seen.costs.memory.items()}
    peak = seen.meter.memory.peak()
    return dict(sent=sent, held=held, peak=peak, work={k: (n, seen.costs.work[k]) for k, n in work(seen).items()})


def main(cases: str, results: str):
    """Run the cases of one file, {name: case}, and append what each came to to another, by line."""
    assert can_fake_cuda()
    parent = os.getppid()
    for name, case in json.loads(Path(cases).read_text()).items():
        if os.getppid() != parent:
            return
        started = time.process_time()
        try:
            found = compared(run(**case))
        except Exception:
            found = dict(error=traceback.format_exc())
        with open(results, "a") as file:
            file.write(json.dumps(dict(name=name, seconds=time.process_time() - started) | found) + "\n")
