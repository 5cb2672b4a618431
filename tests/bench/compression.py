"""What lossy gradients cost: bytes sent and loss reached for every --compress; draws compression.png.

    python -m tests.bench compression                      the figure in tests/bench/figures, two ranks on a CPU
    python -m tests.bench compression --out /tmp --steps 20

Every flag of step02_ddp.py is understood. All runs have the same seed, and so the same weights and batches.
"""

import contextlib
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import step02_ddp as step02
from common import UserError
from services import plots
from services.checks import check_dp
from services.flags import main as run_main
from services.tables import human, table
from tests.pool import Hang, Pool, RankError

MODES = ("none", "bf16", "int8", "topk")


@dataclass
class Config(step02.Config):
    """Step 2's flags, for one short run of each --compress."""

    ranks: int = 2  # processes to start
    steps: int = 100  # optimizer steps of each run
    out: str = "tests/bench/figures"  # folder for the figure; the runs themselves are not kept
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 100  # steps between validations (and one at the end)


def history(config: Config) -> list[dict]:
    """Runs on every rank: train and return the metrics."""
    with contextlib.redirect_stdout(sys.stderr):
        return step02.train(config).history


def gradient_bytes(row: dict) -> float:
    """Bytes that a rank sent for gradients in a step: all but small sums like that of the loss, named in brackets."""
    return sum(n_bytes for operation, n_bytes in row["traffic"]["dp"].items() if "(" not in operation)


def bench(config: Config):
    """Train once for each mode, draw the figure, print the table."""
    if config.ranks < 2:
        raise UserError(f"--ranks {config.ranks}: it takes two to send anything")
    for mode in MODES:
        check_dp(dataclasses.replace(config, compress=mode), config.ranks)
    pool, last = Pool(config.ranks), {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {mode: Path(folder, mode) for mode in MODES}
        try:
            for mode, directory in runs.items():
                one = dataclasses.replace(config, compress=mode, out=str(directory))
                last[mode] = pool.run(history, one, timeout=3600)[0][-1]
        except (RankError, Hang) as error:
            sys.exit(str(error))  # the rank's traceback, or where each one stood
        pool.stop()
        Path(config.out).mkdir(parents=True, exist_ok=True)
        figure = Path(config.out, "compression.png")
        plots.loss_curves(runs, figure, f"--compress on {config.ranks} ranks, {config.model}, same seed")
    rows = [["--compress", "sent a step", "of none", "loss", "validation loss"]]
    for mode, row in last.items():
        sent, share = gradient_bytes(row), gradient_bytes(row) / gradient_bytes(last["none"])
        validation = f"{row['validation_loss']:.4f}" if "validation_loss" in row else "-"
        rows.append([mode, human(sent), f"{share:.1%}", f"{row['loss']:.4f}", validation])
    print(
        f"{config.ranks} ranks, {config.model}, {config.steps} steps of {config.global_batch_size} sequences; "
        f"topk sends {config.topk_fraction:.1%} of the values\n\n{table(rows)}\n\nsee {figure}"
    )


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
