"""Loss curves of bf16 training, cut over tp and on one device; draws tp_bf16.png.

    python -m tests.bench tp_bf16                      the figure in tests/bench/figures, two ranks on a CPU
    python -m tests.bench tp_bf16 --out /tmp --steps 20 --no-sp

Every flag of step04_tp_sp.py is understood. Same seed, so the same weights and batches; 16 bits round each rank's part
of a sum before the parts are added, so the curves are close, not equal. An fp32 run shows how close is close.
"""

import contextlib
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import step01_single_gpu as step01
import step04_tp_sp as step04
from common import UserError
from services import plots
from services.checks import check_tp
from services.flags import main as run_main
from services.tables import table
from tests.pool import Hang, Pool, RankError


@dataclass
class Config(step04.Config):
    """Step 4's flags, for one short run on `--tp` ranks, and its like on one device."""

    tp: int = 2  # ranks that share each matrix; as many are started
    steps: int = 50  # optimizer steps of each run
    warmup_steps: int = 10  # steps of linear warm-up
    lr: float = 1e-3  # peak learning rate: at step 1's, so short a warm-up makes rounding grow into spikes
    global_batch_size: int = 16  # sequences per optimizer step
    dtype: Literal["bf16", "fp16"] = "bf16"  # of weights and compute
    device: Literal["auto", "cuda", "cpu"] = "cpu"  # where to compute
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 0  # steps between validations; 0: never
    out: str = "tests/bench/figures"  # folder for the figure; the runs themselves are not kept


def history(config: Config) -> list[dict]:
    """Runs on every rank: train and return the metrics."""
    with contextlib.redirect_stdout(sys.stderr):
        return step04.train(config).history


def alone(config: Config, out: Path, dtype: str) -> list[dict]:
    """The same run on one device."""
    flags = {field.name: getattr(config, field.name) for field in dataclasses.fields(step01.Config)}
    with contextlib.redirect_stdout(sys.stderr):
        return step01.train(step01.Config(**flags | dict(out=str(out), dtype=dtype))).history


def bench(config: Config):
    """Train three times, draw the figure, print the table."""
    if config.tp < 2:
        raise UserError(f"--tp {config.tp}: there is nothing to cut in one")
    check_tp(config, config.tp)
    labels = [f"step 4, {config.dtype}, --tp {config.tp}", f"step 1, {config.dtype}", "step 1, fp32"]
    pool = Pool(config.tp)
    with tempfile.TemporaryDirectory() as folder:
        runs = {label: Path(folder, str(number)) for number, label in enumerate(labels)}
        try:
            cut = pool.run(history, dataclasses.replace(config, out=str(runs[labels[0]])), timeout=3600)[0]
        except (RankError, Hang) as error:
            sys.exit(str(error))  # the rank's traceback, or where each one stood
        pool.stop()
        found = [cut, alone(config, runs[labels[1]], config.dtype), alone(config, runs[labels[2]], "fp32")]
        Path(config.out).mkdir(parents=True, exist_ok=True)
        figure = Path(config.out, "tp_bf16.png")
        plots.loss_curves(runs, figure, f"{config.model}, same seed and batches")
    base, rows = found[1], [["", "last loss", "largest difference", "mean difference"]]
    for label, ours in zip(labels, found, strict=True):
        apart = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, base, strict=True)]
        rows.append([label, f"{ours[-1]['loss']:.4f}", f"{max(apart):.4f}", f"{sum(apart) / len(apart):.4f}"])
    print(
        f"{config.model}, {config.steps} steps of {config.global_batch_size} sequences; differences of the loss, "
        f"in nats, from step 1 in {config.dtype}\n\n{table(rows)}\n\nsee {figure}"
    )


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
