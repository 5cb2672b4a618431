"""Checkpoints beside plain torch.save and torch.load of the same tensors: seconds and bytes, in turns.

    python -m tests.bench checkpoint                            300 MB of weights and moments, one process
    python -m tests.bench checkpoint --dim 1024 --rounds 5

Both flush what they write to the disk. Ours also computes checksums when it saves, and compares them when it loads;
"pause" is how long training stands still with --save-async.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import step01_single_gpu as step01
from common.layout import materialize
from common.model import Decoder
from services.checkpoint import find
from services.devices import choose_dtype
from services.flags import main as run_main
from services.resume import load
from services.saver import Saver
from services.state import pieces
from services.tables import human, table


@dataclass
class Config(step01.Config):
    """Step 1's flags, for a model that is built and never trained for long."""

    dim: int = 512  # width of the residual stream
    n_layers: int = 8  # number of layers
    ffn_dim: int = 1408  # width of the MLP
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "fp32"  # of weights
    rounds: int = 5  # measurements of each, in turns


def seconds(function, *args) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def flushed_save(state: dict, path: Path):
    """torch.save, to the disk."""
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def bench(config: Config):
    """Print the table."""
    dtype = choose_dtype(config.dtype, torch.device("cpu"))
    with torch.device("meta"):
        model = Decoder(config.model_config())
    materialize(model, 0, torch.device("cpu"), dtype)
    optimizer = step01.Optimizer(model, config)
    for param in optimizer.params.values():
        param.grad = torch.randn_like(param, dtype=param.grad_dtype)
    optimizer.step(1e-3, optimizer.grad_norm())
    meta = dict(config={}, model={})
    found: dict[str, list[float]] = {key: [] for key in ("theirs", "ours", "pause", "load theirs", "load ours")}
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name), Path(name) / "plain.pt"
        for step in range(config.rounds):
            state = {f"{piece.kind} {piece.name}": piece.tensor for piece in pieces(optimizer)}
            found["theirs"].append(seconds(flushed_save, state, plain))
            saver = Saver(folder)
            for i, (kind, background) in enumerate((("ours", False), ("pause", True)), 2 * step):
                found[kind].append(seconds(saver.save, i, pieces(optimizer), meta | dict(step=i), background))
            saver.settle()

            def load_plain(state=state):
                for key, tensor in torch.load(plain).items():
                    state[key].copy_(tensor)

            def load_ours():
                with contextlib.redirect_stdout(sys.stderr):
                    load(optimizer, find(str(folder), folder), weights_only=False)

            found["load theirs"].append(seconds(load_plain))
            found["load ours"].append(seconds(load_ours))
        ours = sum(path.stat().st_size for path in find(str(folder), folder).path.iterdir())
        theirs = plain.stat().st_size
    median = {key: f"{statistics.median(times):.3f} s" for key, times in found.items()}
    print(
        f"weights and state of {sum(p.numel() for p in model.parameters()):,} parameters, {config.dtype}, one process"
    )
    rows = [
        ["", "save", "pause", "load", "bytes"],
        ["torch.save, torch.load", median["theirs"], median["theirs"], median["load theirs"], human(theirs)],
        ["checkpoint", median["ours"], median["ours"], median["load ours"], human(ours)],
        ["checkpoint, --save-async", "", median["pause"], "", ""],
    ]
    print(table(rows))
    for ours, theirs in (("ours", "theirs"), ("load ours", "load theirs")):
        ratios = [a / b for a, b in zip(found[ours], found[theirs], strict=True)]
        what = "load" if "load" in ours else "save"
        print(
            f"{what}, ours / theirs: median {statistics.median(ratios):.2f}, rounds from {min(ratios):.2f} to "
            f"{max(ratios):.2f}"
        )


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
