"""The staircase: bytes over time for ZeRO stages 0 to 3, and bytes per parameter; draws zero_memory.png.

    python -m tests.bench zero_memory                      the figure in tests/bench/figures, four ranks on a CPU
    python -m tests.bench zero_memory --out /tmp --grad-dtype same

Every flag of step03_zero.py is understood. Weights have 16 bits, and the model is one whose weights outweigh its
activations. The figure shows rank 0's first two steps: moments are there from the beginning.
"""

import contextlib
import dataclasses
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import step03_zero as step03
from common import UserError
from services import plots
from services.checks import check_zero
from services.flags import main as run_main
from services.predictions import shape_of
from services.state import held
from services.tables import bytes_of, table
from tests.pool import Hang, Pool, RankError
from theory.memory import memory_rows, zero_memory_rows

KINDS = ("parameters", "gradients", "masters", "moments")


@dataclass
class Config(step03.Config):
    """Step 3's flags, for two steps in each stage."""

    ranks: int = 4  # processes to start
    dim: int = 160  # width of the residual stream
    n_layers: int = 16  # number of layers
    ffn_dim: int = 448  # width of the MLP
    seq_len: int = 64  # sequence length, in tokens
    global_batch_size: int = 8  # sequences per optimizer step, all ranks together
    micro_batch_size: int = 1  # sequences per forward and backward
    dtype: Literal["bf16", "fp16"] = "bf16"  # of weights and compute
    device: Literal["auto", "cuda", "cpu"] = "cpu"  # where to compute
    steps: int = 2  # optimizer steps
    profile_memory: int = 2  # draw memory over time for the first N steps
    save_every: int = 0  # steps between checkpoints; 0: none
    eval_every: int = 0  # steps between validations; 0: never
    out: str = "tests/bench/figures"  # folder for the figure; the runs themselves are not kept


def per_parameter(config: Config) -> list[tuple[float, float]]:
    """Runs on every rank: train; returns for each kind of tensor the bytes per parameter, (predicted, measured)."""
    measured: dict[str, int] = {}

    def observe(_, optimizer):  # the last call is in the second step, when gradients are complete
        now = held(optimizer, on_disk=config.offload_optimizer == "disk")
        measured.update({kind: bytes_of(tensors) for kind, tensors in now.items()})

    with contextlib.redirect_stdout(sys.stderr):
        model, optimizer, _ = step03.train(config, observe)
    m, n = model.config, sum(p.numel() for p in model.parameters())
    if config.zero:
        predicted = zero_memory_rows(config, m, [shape_of(u) for u in optimizer.units], optimizer.dtype, on_cpu=True)
    else:
        factored = sum(sum(p.shape) for p in model.parameters())
        predicted = memory_rows(config, m, n, factored, optimizer.dtype, on_cpu=True)
    return [(predicted[kind] / n, measured[kind] / n) for kind in KINDS]


def bench(config: Config):
    """Train in each stage, draw the figure, print the table."""
    if config.ranks < 2:
        raise UserError(f"--ranks {config.ranks}: there is nothing to cut in one")
    check_zero(config, config.ranks)
    pool, rows = Pool(config.ranks), [["stage", *KINDS, "sum"]]
    with tempfile.TemporaryDirectory() as folder:
        runs = {f"stage {stage}": Path(folder, str(stage)) for stage in range(4)}
        try:
            for stage, (name, directory) in enumerate(runs.items()):
                one = dataclasses.replace(config, zero=stage, out=str(directory))
                bytes_by_rank = torch.tensor(pool.run(per_parameter, one, timeout=3600))
                predicted, measured = bytes_by_rank.mean(0).T.tolist()
                pairs = zip([*predicted, sum(predicted)], [*measured, sum(measured)], strict=True)
                rows.append([name, *(f"{theory:.3f} / {found:.3f}" for theory, found in pairs)])
        except (RankError, Hang) as error:
            sys.exit(str(error))  # the rank's traceback, or where each one stood
        pool.stop()
        Path(config.out).mkdir(parents=True, exist_ok=True)
        figure = Path(config.out, "zero_memory.png")
        plots.memory_side_by_side(runs, figure, f"rank 0 of {config.ranks}, {config.dtype}, two training steps")
    print(
        f"{config.ranks} ranks, {config.dtype}, gradients: {config.grad_dtype}; bytes per parameter, predicted / "
        f"measured (mean of all ranks)\n\n{table(rows)}\n\nsee {figure}"
    )


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
