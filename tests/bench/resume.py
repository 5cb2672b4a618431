"""Saved under one layout, resumed under another: the next losses beside those of one device that never stopped.

python -m tests.bench resume               all pairs, fp64 on a CPU
python -m tests.bench resume --only cp     those with "cp" in their name
"""

import functools
import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.flags import main as run_main
from services.state import full_state
from services.tables import table
from tests import equivalence
from tests.equivalence import SMALL, difference
from tests.pool import Pools

BEFORE, AFTER = 3, 5  # steps before and after the checkpoint
# At a learning rate of 0.05, Adam makes 1e-10 of rounding in 8 steps, with or without a checkpoint; so less.
BASE = dict(SMALL, optimizer="adamw", steps=BEFORE + AFTER, save_every=100, lr=0.01, global_batch_size=12)


class Saved(NamedTuple):
    """A layout: how many ranks, which step, with which flags."""

    ranks: int
    step: str
    flags: dict[str, Any]

    def __str__(self) -> str:
        flags = " ".join(
            f"{'no-' * (v is False)}{k.replace('_', '-')} {'' if v is False else v}" for k, v in self.flags.items()
        )
        return f"{self.step[:6]}, {self.ranks} rank{'s' * (self.ranks > 1)}: {flags}".strip(": ")


def one(**flags: Any) -> Saved:
    """Step 1."""
    return Saved(1, "step01_single_gpu", flags)


def dp(ranks: int, **flags: Any) -> Saved:
    """Step 2."""
    return Saved(ranks, "step02_ddp", flags)


def zero(ranks: int, stage: int, **flags: Any) -> Saved:
    """Step 3."""
    return Saved(ranks, "step03_zero", dict(zero=stage) | flags)


def tp(ranks: int, tp: int, stage: int, **flags: Any) -> Saved:
    """Step 4."""
    return Saved(ranks, "step04_tp_sp", dict(tp=tp, zero=stage) | flags)


def cp(ranks: int, cp: int, tp: int, stage: int, **flags: Any) -> Saved:
    """Step 5."""
    return Saved(ranks, "step05_cp_ring", dict(cp=cp, tp=tp, zero=stage) | flags)


def pp(ranks: int, pp: int, cp: int, tp: int, stage: int, schedule: str, **flags: Any) -> Saved:
    """Step 6."""
    return Saved(ranks, "step06_pipeline", dict(pp=pp, cp=cp, tp=tp, zero=stage, schedule=schedule) | flags)


def ep(ranks: int, pp: int, cp: int, tp: int, ep: int, stage: int, **flags: Any) -> Saved:
    """Step 7, with experts."""
    return Saved(ranks, "step07_moe_ep", dict(pp=pp, cp=cp, tp=tp, ep=ep, zero=stage) | flags)


EXPERTS = dict(
    experts=4, expert_dim=16, balance="bias"
)  # of pairs of step 7, which are compared with it in one process
OFFLOADED = dict(offload_optimizer="disk", offload_params="cpu")
PAIRS: list[tuple[Saved, Saved]] = [
    (one(), dp(2)),
    (dp(4, sync="overlap"), one()),
    (dp(3), zero(2, 1)),
    (zero(2, 1), zero(3, 3)),
    (zero(3, 3), zero(4, 2)),
    (zero(4, 2), one()),
    (zero(2, 3, **OFFLOADED), dp(3)),
    (one(), zero(3, 1, offload_optimizer="cpu")),
    (tp(4, 2, 1), tp(4, 4, 0)),  # padded rows of the vocabulary (259 = 4 x 65 - 1), two copies of each kv head
    (tp(4, 4, 0), one()),
    (tp(4, 4, 0, sp=False), tp(4, 2, 3)),
    (cp(2, 2, 1, 1), cp(4, 4, 1, 0, cp_mode="ring")),
    (cp(4, 2, 2, 3, cp_mode="ulysses"), zero(3, 2)),
    (cp(4, 4, 1, 2, cp_mode="allgather"), cp(4, 2, 2, 3)),
    (one(), cp(4, 2, 2, 2)),
    (pp(2, 2, 1, 1, 1, "1f1b"), one()),
    (one(), pp(4, 2, 1, 2, 3, "zbv")),
    (pp(4, 4, 1, 1, 0, "zb-h1"), cp(4, 2, 2, 1)),
    (cp(4, 2, 2, 3), pp(4, 2, 2, 1, 2, "dualpipe")),
    (pp(4, 2, 2, 1, 3, "interleaved"), zero(3, 2)),
    (ep(1, 1, 1, 1, 1, 0), ep(4, 1, 1, 2, 2, 1)),
    (ep(4, 1, 2, 1, 4, 3), ep(4, 2, 1, 1, 2, 2)),
    (ep(8, 2, 2, 2, 2, 1), ep(1, 1, 1, 1, 1, 0)),
    (ep(4, 2, 2, 1, 2, 0, schedule="dualpipe"), ep(8, 2, 2, 2, 2, 3)),
]


def train_on_rank(step: str, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Runs on every rank (or here): train; returns the losses and all weights."""
    module = importlib.import_module(step)
    with equivalence.without_instruments():
        trained = module.train(module.Config(**options))
    return [row["loss"] for row in trained.history], full_state(trained.optimizer, equivalence.job())["model"]


def run(pools: Pools, layout: Saved, options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train under a layout; returns rank 0's losses and weights."""
    options = options | layout.flags
    if layout.ranks == 1:
        return train_on_rank(layout.step, options)
    return pools(layout.ranks).run(train_on_rank, layout.step, options)[0]


@functools.cache
def uninterrupted(alone: str, options: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run of one process, with the step and the flags given as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        return train_on_rank(alone, json.loads(options) | dict(out=folder))


def worst_difference(pools: Pools, saved: Saved, resumed: Saved, folder: Path, base: dict[str, Any]) -> float:
    """The worst relative difference of the losses after the checkpoint, and of the final weights, to step 1."""
    options, alone = BASE | dict(n_layers=4) | base, one()  # a layer for each stage of the pipelines
    if saved.step.startswith("step07"):
        options, alone = options | EXPERTS, ep(1, 1, 1, 1, 1, 0)
    losses, weights = uninterrupted(alone.step, json.dumps(options | alone.flags))
    run(pools, saved, options | dict(out=str(folder / "saved"), stop_after=BEFORE))
    later, found = run(pools, resumed, options | dict(out=str(folder / "on"), resume=str(folder / "saved")))
    assert len(losses) == BEFORE + AFTER and found.keys() == weights.keys()
    pairs = list(zip(later[-AFTER:], losses[BEFORE:], strict=True))
    return max([difference(a, b) for a, b in pairs] + [difference(found[name], weights[name]) for name in weights])


@dataclass
class Config:
    """Flags of this measurement."""

    only: str = ""  # pairs with this in their name


def bench(config: Config):
    """Print the table."""
    pools, rows = Pools(), [["saved under", "resumed under", "worst difference"]]
    torch.set_num_threads(1)
    try:
        for saved, resumed in PAIRS:
            if config.only in f"{saved} {resumed}":
                with tempfile.TemporaryDirectory() as folder:
                    worst = worst_difference(pools, saved, resumed, Path(folder), {})
                rows.append([str(saved), str(resumed), f"{worst:.1e}"])
    finally:
        pools.stop()
    print(table(rows))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
