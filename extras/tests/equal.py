"""Checks that a layout, with the techniques that its flags select, computes the same numbers as one process.

`record` trains with a step's own `train` and keeps every loss, gradient norm, gathered gradient and final parameter. A
layout is correct if these equal the numbers of `one_process`'s step: in fp64, to a relative difference of 1e-10.
tests/equal.py defines which pieces a rank keeps, how they are assembled, and when two numbers are equal.
"""

import importlib
import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common import data
from common.model import PRESETS, ModelConfig
from extras.services.ranks import gather_objects
from extras.services.run import ServedRun
from extras.services.seam import OpenRun, check, compose
from tests import equal
from tests.equal import SHAPE, close, distance, together

SMALL = {name: size for name, size in SHAPE.items() if name != "tied"}
FIELDS = list(ModelConfig.__dataclass_fields__)
# BOUND: how much the numbers of two runs of a few steps may differ. It is well above the rounding errors of any
# processor (kernels add in different orders), and well below the errors of each mistake in faults.py: 1e-6 or more (in
# fp32, 1e-4).
BOUND = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-12, "fp16": 1e-12}  # 16 bits: one process, compared with itself
# FP64: the same for one layer, operator or collective in fp64. It is 9,000 times the error of one rounding.
FP64 = 1e-12
# DRIFT: how much losses (in nats) may differ between two 16-bit runs that round in different places. It is one bf16
# rounding, 2^-8, of the first loss, log(259) = 5.6. Sums and masters are fp32, so drift does not grow with the steps.
DRIFT = 0.02
# Two steps: the second shows whether the first update left the right state. With `peak_tflops`, no peak is measured.
BASE = equal.BASE | dict(steps=2, dataset="", peak_tflops=1.0)

DEFAULT_TOKENS = data.to_tokens(data.READERS[""]("")[1])
data.READERS[""] = lambda _source: ("text", DEFAULT_TOKENS)  # reading it takes longer than a tiny run


def read_named(plain: Callable, source: str) -> tuple[str, Any]:
    """Read the tests' data set `uneven` here, and pass any other source to the hub's reader, `plain`."""
    return equal.random_tokens(source) if source == "uneven" else plain(source)


class Seeing(equal.Watch):
    """A mixin for `OpenRun` and its subclasses: keeps the gradients and weights of a run."""

    def __enter__(self) -> Any:
        run = super().__enter__()
        self.parts.around(data.READERS, "hub", read_named, by=__name__)
        return run

    def pieces(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
        """Assemble masters, or their gradients, from the pieces of all ranks -> whole tensors by name. A collective."""
        return together([piece for theirs in gather_objects(super().pieces(local)) for piece in theirs])


class Watch(Seeing, OpenRun):
    """A run that itself prints and writes nothing, and keeps its gradients and weights."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Attach the techniques before the first step, as `ServedRun` does."""
        self.open(**parts)
        yield from super().steps(**parts)


class Apart(Watch):
    """A `Watch` that keeps no gradients, because with --sync diloco each rank of dp has gradients of its own."""

    def require_finite(self, step: int, **numbers: float):
        """Check the numbers as any run does; unlike `Seeing`, keep no gradients."""
        OpenRun.require_finite(self, step, **numbers)


class Served(Seeing, ServedRun):
    """A run with all services except pictures. It writes into `--out`, and keeps its gradients and weights."""

    def __enter__(self) -> "Served":
        super().__enter__()
        self.first = self.rank == 0
        return self


def config_of(step_name: str, options: dict[str, Any]) -> Any:
    """Make a small model's Config with all flags. `options`: flags of the step, or fields of the model's shape."""
    PRESETS["test"] = ModelConfig(**SHAPE | {name: options[name] for name in FIELDS if name in options})
    options = BASE | dict(device=equal.BASE["device"]) | options  # set by the pool of ranks
    flags = {name: value for name, value in options.items() if name not in FIELDS}
    return compose(importlib.import_module(step_name))(model="test", **flags)


def one_process(row: Any) -> str:
    """The module of a row's reference run: step 1's or, if step 1's Config lacks a flag of `base`, the row's own."""
    known = {*importlib.import_module("step01_single_gpu").Config.__dataclass_fields__, *FIELDS, "patch"}
    return "step01_single_gpu" if set(row.base) <= known else row.step


def world() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def watch(step_name: str, options: dict[str, Any], kind: type = Watch) -> Seeing:
    """Train with `options` (see `config_of`), and return the run. options["patch"] names PATCHES of faults.py."""
    options = dict(out=tempfile.gettempdir(), patch="") | options
    patch, config = options.pop("patch"), config_of(step_name, options)
    check(config, world())
    with ExitStack() as stack:
        for name in patch.split():
            stack.enter_context(importlib.import_module("extras.tests.faults").injected(name))
        if kind is Served:
            stack.enter_context(mock.patch("extras.services.screen.plots"))
            stack.enter_context(mock.patch("common.trainer.draw_loss"))
            stack.enter_context(redirect_stdout(io.StringIO()))
        run = stack.enter_context(kind(config))
        importlib.import_module(step_name).train(config, run)
    return run


def record(step_name: str, options: dict[str, Any], kind: type = Watch) -> SimpleNamespace:
    """Train, and return the loss, gradients, gradient norm and sent bytes of each step, and the final parameters.

    Tensors are returned as numpy arrays, which pickle faster.
    """
    run = watch(step_name, options, kind)
    losses, norms, sent = ([row[key] for row in run.history] for key in ("loss", "grad_norm", "sent"))
    *gradients, weights = (
        {name: value.numpy() for name, value in each.items()} for each in (*run.gradients, run.weights)
    )
    return SimpleNamespace(losses=losses, norms=norms, gradients=gradients, parameters=weights, sent=sent)


def difference(a: Any, b: Any) -> float:
    """Norm-wise relative difference |a - b| / |b|; inf if shapes differ. Unlike a cosine, it notices a wrong scale."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return distance(a, b) if a.shape == b.shape else float("inf")


def compare(ours: SimpleNamespace, theirs: SimpleNamespace, bound: float, n: int = 1):
    """Raise AssertionError at the first number that differs; its message names the number. n: number of ranks."""
    both = lambda mine, right: ((name, torch.from_numpy(mine[name]), torch.from_numpy(right[name])) for name in mine)  # noqa: E731
    for i, (mine, right) in enumerate(zip(ours.gradients, theirs.gradients, strict=True)):
        close(ours.losses[i], theirs.losses[i], f"step {i + 1}: the loss", n, bound)
        close(sorted(mine), sorted(right), "names of gradients")
        for name, found, expected in both(mine, right):
            close(found, expected, f"step {i + 1}: the gradient of {name}", n, bound)
        close(ours.norms[i], theirs.norms[i], f"step {i + 1}: the gradient norm", n, bound)
    close(sorted(ours.parameters), sorted(theirs.parameters), "names of parameters")
    for name, found, expected in both(ours.parameters, theirs.parameters):
        close(found, expected, f"after the last step: {name}", n, bound)


def on_rank(step_name: str, options: dict, theirs: SimpleNamespace, bound: float = 0.0, kind: type = Watch):
    """Runs on every rank: train with `options`, and compare with the reference `theirs`."""
    compare(record(step_name, options, kind), theirs, bound or BOUND[options.get("dtype", "fp64")], world())
