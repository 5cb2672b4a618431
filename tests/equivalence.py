"""The proof that a layout trains to the same numbers as one device.

`reference` runs step01 once in this process and keeps every loss, gradient norm, gradient and final parameter. `check`
runs a step under a layout on a pool, and every rank compares what it sees with the reference, number by number.
"""

import dataclasses
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import step01_single_gpu as step01
from common import UserError
from services import plots
from services.run import Run
from services.state import full_gradients, full_state
from tests import bounds, faults
from tests.pool import FIGURES, Pool

SCRATCH = tempfile.TemporaryDirectory(prefix="equivalence-")
STEPS = 2  # of a comparison; 3 in the sweeps (conftest.py)
SMALL = dict(
    model="debug",
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=259,
    seq_len=16,
    steps=4,
    warmup_steps=2,
    global_batch_size=24,
    micro_batch_size=1,
    lr=0.05,
    grad_clip=0.5,
    dtype="fp64",
    device="cpu",
    save_every=0,
    eval_every=0,
    peak_tflops=1.0,
)


@dataclasses.dataclass
class Recording:
    """What a run showed: by step the loss, the gradient norm and all gradients; at the end all parameters."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


@contextmanager
def without_instruments() -> Iterator[None]:
    """Training draws no figures and does not watch its memory: both together take half of the time of a tiny model."""
    figures = dict.fromkeys(FIGURES, lambda *_: None)
    with mock.patch.multiple(plots, **figures), mock.patch.object(Run, "profiling", False):
        yield


def job() -> SimpleNamespace:
    """A stand-in for the mesh of a run on all ranks of this process group, or on this process alone."""
    return SimpleNamespace(world=dist.get_world_size() if dist.is_initialized() else 1)


def record(step: Any, config: Any) -> Recording:
    """Train with the given step's module, watching."""
    gradients: list[dict[str, Tensor]] = []
    mesh = SimpleNamespace(world=1) if step is step01 else job()

    def observe(_, optimizer):
        gradients.append(full_gradients(optimizer, mesh))

    with without_instruments():
        trained = step.train(config, observe)
    state = full_state(trained.optimizer, mesh)
    parameters = {name: p.clone() for kind in ("model", "buffer") for name, p in state.get(kind, {}).items()}
    history = trained.history
    return Recording([r["loss"] for r in history], [r["grad_norm"] for r in history], gradients, parameters)


def difference(a: Any, b: Any) -> float:
    """Norm-wise relative difference |a - b| / |b| (of numbers or tensors): unlike a cosine it sees a wrong scale."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    if a.shape != b.shape:
        return float("inf")
    scale = b.norm().item()
    distance = (a - b).norm().item()
    return distance / scale if scale > 0 else distance


def compare(ours: Recording, theirs: Recording, bound: float) -> float:
    """Raise AssertionError at the first number of `ours` that differs, naming step and parameter; returns the worst."""
    worst = 0.0

    def check(what: str, a: Any, b: Any):
        nonlocal worst
        found = difference(a, b)
        assert found <= bound, f"{what} differs by {found:.3g} (relative), more than {bound:g}"
        worst = max(worst, found)

    assert len(ours.losses) == len(theirs.losses), f"{len(ours.losses)} steps instead of {len(theirs.losses)}"
    for step, expected in enumerate(theirs.gradients):
        check(f"step {step + 1}: the loss", ours.losses[step], theirs.losses[step])
        for name, gradient in ours.gradients[step].items():
            check(f"step {step + 1}: the gradient of {name}", gradient, expected[name])
        check(f"step {step + 1}: the gradient norm", ours.norms[step], theirs.norms[step])
    for name, parameter in ours.parameters.items():
        check(f"after training: {name}", parameter, theirs.parameters[name])
    return worst


def require_all(ours: Recording, theirs: Recording):
    """Raise AssertionError unless the ranks together showed every gradient and parameter. A collective."""
    for what, mine, expected in (
        *(
            (f"step {i + 1}: gradients", *both)
            for i, both in enumerate(zip(ours.gradients, theirs.gradients, strict=True))
        ),
        ("parameters", ours.parameters, theirs.parameters),
    ):
        everyone = [mine.keys()]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, set(mine))
        missing = set().union(*everyone) ^ expected.keys()
        assert not missing, f"{what} that only one side has: {sorted(missing)}"


def reference(options: dict[str, Any], patch: str = "", step: Any = step01) -> Path:
    """Record step01 (or another `step` in one process) under `options`, once per session; returns the file with it."""
    key = hashlib.sha256(json.dumps([options, patch, step.__name__], sort_keys=True).encode()).hexdigest()[:16]
    path = Path(SCRATCH.name) / f"{key}.pt"
    if not path.exists():
        with faults.applied(patch):
            torch.save(vars(record(step, step.Config(**options, out=f"{SCRATCH.name}/{key}"))), path)
    return path


def on_rank(step_name: str, options: dict[str, Any], file: str, bound: float, patches: list[str]) -> float:
    """Runs on every rank: train under the layout, compare with the reference; returns the worst difference."""
    step = importlib.import_module(step_name)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(faults.applied(patch))
        ours = record(step, step.Config(**options))
    theirs = Recording(**torch.load(file))
    require_all(ours, theirs)
    return compare(ours, theirs, bound)


def check(
    pool: Pool,
    step_name: str,
    base: dict[str, Any],
    layout: dict[str, Any],
    patch: str = "",
    fault: str = "",
    against: Any = step01,
) -> float:
    """Assert that `step_name` with `base` and `layout` flags equals step01 with `base` on every rank.

    `patch` is applied to both sides (a frozen parameter, say), `fault` to the layout alone; `against`: the step to
    compare with, in one process, if it is not step01. Returns the worst difference.
    """
    options = SMALL | dict(steps=2 if fault else STEPS) | base
    file, bound = str(reference(options, patch, against)), bounds.RUN[options["dtype"]]
    with tempfile.TemporaryDirectory(dir=SCRATCH.name) as out:
        return max(pool.run(on_rank, step_name, options | layout | dict(out=out), file, bound, [patch, fault]))


def complaint_on_rank(function: Callable, *args) -> str:
    """Runs on every rank: what `function` fails with on this one. (An error would cost a new pool of ranks.)"""
    try:
        function(*args)
    except (AssertionError, UserError) as complaint:
        return str(complaint)
    return ""


def label(flags: dict) -> str:
    """A short test id for some flags."""
    return "-".join(f"{key}={Path(str(value)).name}" for key, value in flags.items()) or "default"
