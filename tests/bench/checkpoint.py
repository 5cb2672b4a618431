"""Checkpoints beside torch.save and torch.distributed.checkpoint (DCP), of the same tensors: seconds, bytes, in turns.

    python -m tests.bench checkpoint                            300 MB of weights and moments, one process
    python -m tests.bench checkpoint --dim 1024 --rounds 5

All flush what they write to the disk. Ours also computes checksums when it saves, and compares them when it loads;
"pause" is how long training stands still with --save-async. Below: what DCP does that ours must not do.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

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
    kinds = ("theirs", "dcp", "ours", "pause", "load theirs", "load dcp", "load ours")
    found: dict[str, list[float]] = {key: [] for key in kinds}
    warnings.filterwarnings("ignore", module="torch")  # that there is one process, and an earlier checkpoint there
    with tempfile.TemporaryDirectory() as name:
        folder, plain = Path(name), Path(name) / "plain.pt"
        for step in range(config.rounds):
            state = {f"{piece.kind} {piece.name}": piece.tensor for piece in pieces(optimizer)}
            found["theirs"].append(seconds(flushed_save, state, plain))
            found["dcp"].append(seconds(lambda state=state: dcp.save(state, checkpoint_id=folder / "dcp")))
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
            found["load dcp"].append(seconds(lambda state=state: dcp.load(state, checkpoint_id=folder / "dcp")))
            found["load ours"].append(seconds(load_ours))
        ours = sum(path.stat().st_size for path in find(str(folder), folder).path.iterdir())
        theirs, apart = plain.stat().st_size, sum(path.stat().st_size for path in (folder / "dcp").iterdir())
    median = {key: f"{statistics.median(times):.3f} s" for key, times in found.items()}
    print(
        f"weights and state of {sum(p.numel() for p in model.parameters()):,} parameters, {config.dtype}, one process"
    )
    rows = [
        ["", "save", "pause", "load", "bytes"],
        ["torch.save, torch.load", median["theirs"], median["theirs"], median["load theirs"], human(theirs)],
        ["DCP's save and load", median["dcp"], median["dcp"], median["load dcp"], human(apart)],
        ["checkpoint", median["ours"], median["ours"], median["load ours"], human(ours)],
        ["checkpoint, --save-async", "", median["pause"], "", ""],
    ]
    print(table(rows))
    for ours, theirs in (("ours", "theirs"), ("ours", "dcp"), ("load ours", "load theirs"), ("load ours", "load dcp")):
        ratios = [a / b for a, b in zip(found[ours], found[theirs], strict=True)]
        what, of = "load" if "load" in ours else "save", "DCP" if "dcp" in theirs else "torch"
        print(
            f"{what}, ours / {of}: median {statistics.median(ratios):.2f}, rounds from {min(ratios):.2f} to "
            f"{max(ratios):.2f}"
        )
    with tempfile.TemporaryDirectory() as name:
        habits(Path(name))


def habits(folder: Path):
    """Print what DCP keeps in memory while it writes, what it flushes to the disk, and how it takes a flipped bit."""
    copies: list[weakref.ref] = []
    alive, flushed, save = [], [], torch.save

    def counting(tensor, *args, **options):
        copies.append(weakref.ref(tensor))
        alive.append(sum(copy().nbytes for copy in copies if copy() is not None))
        save(tensor, *args, **options)

    slices = {f"{i}": part for i, part in enumerate(torch.zeros(2**24).split(2**18))}
    with mock.patch("torch.save", counting):
        dcp.save(slices, checkpoint_id=folder / "slices")
    print(f"DCP, 64 slices of one buffer of {human(2**26)}: copies of up to {human(max(alive))} while it writes")
    with mock.patch("os.fsync", lambda file: flushed.append(os.fstat(file).st_size)):
        dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=folder / "one")
    size = (folder / "one" / ".metadata").stat().st_size
    print(f"DCP, one tensor: {flushed[-1]} of the {size} bytes of .metadata are in the file when it is flushed")
    path, read = folder / "one" / "__0_0.distcp", {"w": torch.zeros(1000)}
    content = bytearray(path.read_bytes())
    content[2000] ^= 4
    path.write_bytes(content)
    dcp.load(read, checkpoint_id=folder / "one")
    print(f"DCP, a flipped bit: no error, {(read['w'] != torch.arange(1000.0)).sum()} of 1000 numbers differs")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
