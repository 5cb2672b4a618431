"""The proof that a layout trains to the same numbers as one device.

`record` trains with a step's own `train` and keeps every loss, gradient norm, gathered gradient and final parameter. A
layout is right if what its ranks gather equals what step 1 has in one process, to a norm-wise relative 1e-10 in fp64.
"""

import functools
import importlib
import io
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import data
from common.model import IGNORE, PRESETS, ModelConfig
from extras.services.launch import gather_objects
from extras.services.pieces import Piece, assemble, masters
from extras.services.run import ServedRun
from extras.services.seam import OpenRun, check, compose
from extras.variants import Parts

FEW = 150_000  # tokens: more than any test reads
SHAPE = list(ModelConfig.__dataclass_fields__)
BOUND = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-12, "fp16": 1e-12}  # 16 bits: only a process with itself
# A vocabulary that nothing divides.
SMALL = dict(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=259, seq_len=16)
BASE = dict(
    steps=2,  # the second shows what one update leaves to the next; the sweep takes four
    warmup_steps=2,
    global_batch_size=12,
    micro_batch_size=1,
    lr=0.05,
    grad_clip=0.5,
    dtype="fp64",
    device="cpu",
    peak_tflops=1.0,  # not measured
)


def read_uneven(_source: str) -> tuple[np.ndarray, np.ndarray]:
    """The usual tokens; a third of the targets do not count, and in every third sequence none does."""
    tokens = data.READERS[""]("")[0][:FEW]
    labels = tokens.astype(np.int64)
    labels[np.random.default_rng(0).random(len(labels)) < 1 / 3] = IGNORE
    n = SMALL["seq_len"]
    labels[1 : 1 + (len(labels) - 1) // n * n].reshape(-1, n)[::3] = IGNORE
    return tokens, labels


NAMED = {"uneven-targets": functools.lru_cache(read_uneven)}


def read_named(plain: Callable, source: str) -> tuple[np.ndarray, Any]:
    """Around the reader of the hub, which does not know the tests' own data sets."""
    return NAMED.get(source, plain)(source)


class Seeing:
    """What a run keeps of what it sees: a base beside `OpenRun`, or one of its kind."""

    def __enter__(self) -> Any:
        run = super().__enter__()
        self.parts.around(data.READERS, "hub", read_named, by=__name__)
        return run

    def open(self, **parts: Any) -> Parts:
        """Nothing is seen yet."""
        self.gradients, self.parameters = [], {}
        return super().open(**parts)

    def steps(self, **parts: Any) -> Iterator[int]:
        """After the last update, gather the weights."""
        yield from super().steps(**parts)
        optimizer = self.parts.optimizer
        self.parameters = self.gather(optimizer.masters)

    def require_finite(self, step: int, **numbers: float):
        """Gradients are complete, and not yet clipped: gather them."""
        self.gradients.append(self.gather(self.parts.optimizer.gradients()))
        super().require_finite(step, **numbers)

    def gather(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Masters, or their gradients, of all ranks -> whole tensors by name. A collective: all show theirs to all."""
        held = {piece.name: piece for piece in masters(self.parts)}
        some = {name: value.detach().contiguous() for name, value in local.items() if value.numel()}
        mine = [replace(held[name], tensor=value.double().numpy()) for name, value in some.items()]  # which pickle fast
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in (piece for theirs in gather_objects(mine) for piece in theirs):
            pieces[piece.name].append(replace(piece, tensor=torch.from_numpy(piece.tensor)))
        whole = {name: assemble(some) for name, some in pieces.items()}  # raises ValueError if some of it is on no rank
        for piece in (piece for some in pieces.values() for piece in some):
            same = torch.allclose(piece.cut(whole[piece.name]), piece.tensor, rtol=1e-9, atol=1e-12)
            assert same, f"{piece.name}: copies on different ranks differ"
        return whole


class Watch(Seeing, OpenRun):
    """A run that draws and writes nothing, and keeps what it sees."""

    def __enter__(self) -> "Watch":
        self.first = False
        return super().__enter__()

    def steps(self, **parts: Any) -> Iterator[int]:
        """With what attaches to its parts, and nothing else."""
        self.open(**parts)
        yield from super().steps(**parts)


class Served(Seeing, ServedRun):
    """A run with everything around it but pictures, which keeps what it sees, and writes into `--out`."""

    def __enter__(self) -> "Served":
        self.silence = ExitStack()
        for picture in ("extras.services.screen.plots", "common.trainer.draw_loss"):
            self.silence.enter_context(mock.patch(picture))
        self.silence.enter_context(redirect_stdout(io.StringIO()))
        return super().__enter__()

    def __exit__(self, *error: Any):
        try:
            super().__exit__(*error)
        finally:
            self.silence.close()


def config_of(step_name: str, options: dict[str, Any]) -> Any:
    """A small model's Config, with all flags: `options` are flags of the step, and fields of the model's shape."""
    PRESETS["test"] = ModelConfig(**SMALL | {name: options[name] for name in SHAPE if name in options})
    flags = {name: value for name, value in (BASE | options).items() if name not in SHAPE}
    return compose(importlib.import_module(step_name))(model="test", **flags)


def one_process(row: Any) -> str:
    """What a row of rows.py is compared with: step 1, but for flags that only step 7 has."""
    known = {*importlib.import_module("step01_single_gpu").Config.__dataclass_fields__, *SHAPE, "patch"}
    return "step01_single_gpu" if set(row.base) <= known else row.step


def watch(step_name: str, options: dict[str, Any], kind: type = Watch) -> Seeing:
    """Train under `options` of `config_of`; `patch` names changes of extras/tests/faults.py."""
    options = dict(out=tempfile.gettempdir(), patch="") | options
    patch, config = options.pop("patch"), config_of(step_name, options)
    check(config, dist.get_world_size() if dist.is_initialized() else 1)
    with ExitStack() as stack:
        for name in patch.split():
            stack.enter_context(importlib.import_module("extras.tests.faults").injected(name))
        run = stack.enter_context(kind(config))
        importlib.import_module(step_name).train(config, run)
    return run


def record(step_name: str, options: dict[str, Any], kind: type = Watch) -> SimpleNamespace:
    """What `watch` has seen: losses, norms and bytes of each step, gradients, and parameters after the last."""
    run = watch(step_name, options, kind)
    losses, norms, sent = ([row[key] for row in run.history] for key in ("loss", "grad_norm", "sent"))
    return SimpleNamespace(losses=losses, norms=norms, gradients=run.gradients, parameters=run.parameters, sent=sent)


def difference(a: Any, b: Any) -> float:
    """Norm-wise relative difference |a - b| / |b|: unlike a cosine it sees a wrong scale."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    if a.shape != b.shape:
        return float("inf")
    distance, scale = (a - b).norm().item(), b.norm().item()
    return distance / scale if scale else distance


def by_name(seen: SimpleNamespace) -> dict[str, Any]:
    """Every number and tensor of a record, under its step and parameter, in the order in which a run finds them."""
    found = {}
    for i, (loss, gradients, norm) in enumerate(zip(seen.losses, seen.gradients, seen.norms, strict=True)):
        found[f"step {i + 1}: the loss"] = loss
        found |= {f"step {i + 1}: the gradient of {name}": gradient for name, gradient in gradients.items()}
        found[f"step {i + 1}: the gradient norm"] = norm
    return found | {f"after training: {name}": param for name, param in seen.parameters.items()}


def compare(ours: SimpleNamespace, theirs: SimpleNamespace, bound: float):
    """Raise AssertionError at the first number that differs, naming step and parameter."""
    ours, theirs = by_name(ours), by_name(theirs)
    assert ours.keys() == theirs.keys(), "gradients or weights of other parameters"
    for what, value in ours.items():
        found = difference(value, theirs[what])
        assert found <= bound, f"{what} differs by {found:.3g} (relative), more than {bound:g}"


def on_rank(step_name: str, options: dict[str, Any], file: str, bound: float = 0.0):
    """Runs on every rank: train under the layout and compare with the reference."""
    compare(record(step_name, options), load_record(file), bound or BOUND[options.get("dtype", "fp64")])


def save_record(step_name: str, options: dict[str, Any], file: str):
    """Runs in one process: the reference. Tensors become numpy's arrays, which pickle takes faster."""
    seen = record(step_name, options)
    for tensors in (*seen.gradients, seen.parameters):
        tensors |= {name: value.numpy() for name, value in tensors.items()}
    Path(file).write_bytes(pickle.dumps(seen))


def load_record(file: str) -> SimpleNamespace:
    """What `save_record` has written."""
    return pickle.loads(Path(file).read_bytes())
