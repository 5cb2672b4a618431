"""The dry run beside real ranks, beside laws, and beside an H100."""

import importlib
import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.model import model_shape
from common.trainer import Run
from extras.tools import dry_run
from extras.tools.dry_run import config_type, count_step, main
from tests.tape import Live

MODEL = "debug,n_layers=4,vocab_size=259,tied=True"
SMALL = dict(model=MODEL, global_batch_size=8, micro_batch_size=2, device="cpu")
# Tokens visit all experts, so experts are equally busy, as the dry run assumes.
EXPERTS = dict(experts=4, experts_per_token=4, ep=2)
LAYOUTS = [
    (1, "step01_single_gpu", dict(recompute="full", dtype="bf16")),
    (2, "step02_ddp", dict(sync="ring")),
    (2, "step03_zero", dict(zero="3")),
    (4, "step05_cp_ring", dict(cp=2, tp=2, zero="2")),
    (4, "step06_pipeline", dict(pp=2, tp=2, sp=False)),
    (4, "step07_moe_ep", EXPERTS | dict(pp=2, zero="1", schedule="interleaved")),
]


class Watched(Run):
    """A real run, which also keeps the bytes of all tensors when the gradients are complete."""

    def require_finite(self, step: int, **numbers: float):
        """Measure, then do as usual."""
        self.held = self.live.bytes
        super().require_finite(step, **numbers)


class LivePeak(Live):
    """`peak`: most bytes of tensors that were alive after an operator."""

    peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.made = {key: ref for key, ref in self.made.items() if not ref.expired()}
        held = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values()]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in held))
        return result


def measured(step: str, flags: dict, out: str) -> tuple[int, int, dict[str, int]]:
    """Runs on every rank: train two steps; return bytes held, peak, and bytes sent in the second step by group."""
    module = importlib.import_module(step)
    config = module.Config(**flags, steps=2, out=out)
    no_gloo = mock.patch.object(dist, "get_backend", lambda *_: "")  # with gloo, comm.py needs more memory
    with no_gloo, LivePeak() as live, Watched(config) as run:
        run.live = live
        module.train(config, run)
    return run.held, live.peak, run.history[1]["sent"]
