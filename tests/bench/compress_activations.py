"""What lossy activations cost: bytes sent and loss reached for every --compress-activations; draws a figure.

    python -m tests.bench compress_activations         compress_activations.png in tests/bench/figures: tp 2 x pp 2
    python -m tests.bench compress_activations --out /tmp --steps 20 --no-sp

Every flag of step06_pipeline.py is understood. All runs have the same seed, and so the same weights and batches.
"""

import contextlib
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import step06_pipeline as step06
from services import plots
from services.checks import check
from services.flags import main as run_main
from services.tables import human, table
from tests.pool import Hang, Pool, RankError

MODES = ("none", "bf16", "int8")


@dataclass
class Config(step06.Config):
    """Step 6's flags, for one short run of each --compress-activations."""

    ranks: int = 4  # processes to start
    pp: int = 2  # ranks that share the layers
    cp: int = 1  # ranks that share each sequence
    tp: int = 2  # ranks that share each matrix
    steps: int = 100  # optimizer steps of each run
    out: str = "tests/bench/figures"  # folder for the figure; the runs themselves are not kept
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 100  # steps between validations (and one at the end)


def history(config: Config) -> list[dict]:
    """Runs on every rank: train and return the metrics."""
    with contextlib.redirect_stdout(sys.stderr):
        return step06.train(config).history


def activation_bytes(row: dict, dim: str) -> float:
    """Bytes that a rank sent over a dimension in a step: all but sums of gradients and metrics, named in brackets."""
    sent = row["traffic"].get(dim, {}).items()
    return sum(n_bytes for operation, n_bytes in sent if "(" not in operation or "(boundary)" in operation)


def bench(config: Config):
    """Train once for each mode, draw the figure, print the table."""
    for mode in MODES:
        check(dataclasses.replace(config, compress_activations=mode), config.ranks)
    pool, last = Pool(config.ranks), {}
    with tempfile.TemporaryDirectory() as folder:
        runs = {mode: Path(folder, mode) for mode in MODES}
        try:
            for mode, directory in runs.items():
                one = dataclasses.replace(config, compress_activations=mode, out=str(directory))
                last[mode] = pool.run(history, one, timeout=3600)[0][-1]
        except (RankError, Hang) as error:
            sys.exit(str(error))  # the rank's traceback, or where each one stood
        pool.stop()
        Path(config.out).mkdir(parents=True, exist_ok=True)
        figure = Path(config.out, "compress_activations.png")
        title = f"--compress-activations, --pp {config.pp} --tp {config.tp}, {config.model}, same seed"
        plots.loss_curves(runs, figure, title)
    rows = [["--compress-activations", "over tp", "of none", "over pp", "of none", "loss", "validation loss"]]
    for mode, row in last.items():
        rows.append([mode])
        for dim in ("tp", "pp"):
            sent, whole = activation_bytes(row, dim), activation_bytes(last["none"], dim)
            rows[-1] += [human(sent), f"{sent / whole:.1%}" if whole else "-"]
        validation = f"{row['validation_loss']:.4f}" if "validation_loss" in row else "-"
        rows[-1] += [f"{row['loss']:.4f}", validation]
    print(
        f"{config.ranks} ranks, {config.model}, {config.steps} steps of {config.global_batch_size} sequences; "
        f"bytes that rank 0 sends in a step\n\n{table(rows)}\n\nsee {figure}"
    )


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
