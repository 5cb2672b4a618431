"""Seconds to draw the initial weights on each rank of a host, under some layouts of 8 ranks.

    python -m tests.bench start
    python -m tests.bench start --threads 1 --rounds 5

A rank's first layer, its embedding and its head are drawn here as `train` would draw them, in bf16, by so many threads.
Its other layers take as long as the first. CPU seconds stand beside: they do not depend on who else uses the machine.
Copies to a GPU are not among them.
"""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

import step06_pipeline as step06
from common.comm import Mesh
from common.layout import layout_of, materialize
from common.model import PRESETS, Decoder
from services.checks import plan_pipeline
from services.fake_device import fake_ranks
from services.flags import main as run_main
from services.ledger import Ledger
from services.tables import table

LAYOUTS = [dict(dp=8), dict(tp=8), dict(pp=2, dp=2, tp=2)]


@dataclass
class Config:
    """Flags of this benchmark."""

    model: str = "llama3-8b"  # preset
    threads: str = "1,2"  # of a rank, one after another: as many as the machine has cores for
    rounds: int = 3  # of which the fastest counts


class Spent(NamedTuple):
    """What drawing takes."""

    seconds: float
    cpu_seconds: float


def meta_rank(preset: str, sizes: dict[str, int], rank: int) -> Decoder:
    """The part of the model that a rank has, on the meta device, with its records."""
    sizes = dict(pp=1, dp=1, cp=1, tp=1) | sizes
    config = step06.Config(model=preset, pp=sizes["pp"], tp=sizes["tp"], cp=1)
    with fake_ranks(rank, 8):
        mesh = Mesh(sizes, torch.device("cpu"), Ledger())
        with torch.device("meta"):
            model = Decoder(PRESETS[preset])
        step06.keep_stage(model, mesh, plan_pipeline(config, model.config, mesh.sizes))
        step06.shard_tensors(model, mesh, config.sp, config.tp_overlap)
    return model


def drawn(model: Decoder) -> int:
    """How many numbers are drawn for these parameters."""
    total, block = 0, 2**20
    for param in dict.fromkeys(param for param in model.parameters() if param.dim() > 1):
        full = layout_of(param).full_shape(param.shape)
        rows, row = layout_of(param).rows(full[0]), full[1:].numel()
        first = rows.start * row // block * block
        total += min(-(-(rows.stop * row - first) // block) * block, full.numel() - first)
    return total


def draw(preset: str, sizes: dict[str, int], layer: bool, rounds: int) -> Spent:
    """Draw the first layer of rank 0, or all that it has but layers."""
    spent = []
    for _ in range(rounds):
        model = meta_rank(preset, sizes, rank=0)
        names = [name for name, _ in model.named_parameters()]
        names = [name for name in names if name.startswith("model.layers.0." if layer else ("model.embed", "lm_head"))]
        before, cpu = time.perf_counter(), time.process_time()
        materialize(model, 0, torch.device("cpu"), torch.bfloat16, names)
        spent.append(Spent(time.perf_counter() - before, time.process_time() - cpu))
    return Spent(*map(min, zip(*spent, strict=True)))


def bench(config: Config):
    """Print the table."""
    rows = [["layout", "held", "drawn", "threads", "seconds", "CPU seconds", "numbers a CPU second"]]
    for sizes in LAYOUTS:
        model = meta_rank(config.model, sizes, rank=0)
        held, numbers, layers = sum(p.numel() for p in model.parameters()), drawn(model), len(model.model.layers)
        for threads in map(int, config.threads.split(",")):
            torch.set_num_threads(threads)
            layer, others = (draw(config.model, sizes, layer, config.rounds) for layer in (True, False))
            seconds, cpu = (layers * one + rest for one, rest in zip(layer, others, strict=True))
            where = " ".join(f"{name} {size}" for name, size in sizes.items())
            rows.append([where, f"{held / 1e9:.2f} G", f"{numbers / 1e9:.2f} G", str(threads), f"{seconds:.1f}"])
            rows[-1] += [f"{cpu:.1f}", f"{numbers / cpu / 1e6:.0f} M"]
    print(f"rank 0 of 8, {config.model}, bf16: all layers as long as the first\n\n{table(rows)}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
