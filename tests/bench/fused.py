"""What each part of --fuse-gradients saves, on the roofline of an H100, by the dry run.

    python -m tests.bench fused
    python -m tests.bench fused --models smollm-1.7b

A part is left out by putting what it replaces in its place.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch.nn.functional as F

from common import UserError
from common.model import apply_rope
from common.moe import GroupedLinear
from services import fused_gradients
from services.fake_device import can_fake_cuda
from services.flags import main as run_main
from services.tables import table
from tests import dry_cases

CASES = {  # step, ranks, which one, flags
    "smollm-1.7b": (1, 1, 0, dict(seq_len=2048, micro_batch_size=4, global_batch_size=16)),
    "llama3-8b": (4, 8, 0, dict(tp=2, zero=1, micro_batch_size=1, global_batch_size=16, recompute="selective")),
    "mixtral-8x7b": (7, 32, 8, dict(pp=4, ep=8, seq_len=4096, micro_batch_size=1, global_batch_size=64)),
}
CASES["mixtral-8x7b"][3].update(cp=1, tp=1, zero=1)
PARTS = {  # of services/fused_gradients.py: the name to replace, and by what
    "dx of linear layers": ("plain_project", None),
    "RoPE": ("Rotation", SimpleNamespace(apply=apply_rope)),
    "head": ("fused_cross_entropy", lambda loss, factor, *tensors: loss.apply(*tensors)),
    "embedding": ("FusedLookUp", SimpleNamespace(apply=F.embedding)),
    "experts": ("FusedGrouped", GroupedLinear),
}


@dataclass
class Config:
    """Flags of this benchmark."""

    models: str = ",".join(CASES)  # of these


def seconds(model: str, fused: bool, left_out: str = "") -> float:
    """All operators of a step, by the roofline."""
    step, world, rank, options = CASES[model]
    name, other = PARTS.get(left_out, ("__doc__", None))
    with mock.patch.object(fused_gradients, name, other):
        seen = dry_cases.run(step, world, rank, options | dict(model=model, dtype="bf16", fuse_gradients=fused))
    return seen.meter.seconds


def bench(config: Config):
    """Print the table."""
    if not can_fake_cuda():
        raise UserError("this needs g++, to build services/fake_cuda.cpp with")
    rows = [["model", "without", "with", "of these saved: dW of linear layers", *PARTS]]
    for model in config.models.split(","):
        without, fused = seconds(model, False), seconds(model, True)
        saved = [seconds(model, True, part) - fused for part in PARTS]
        row = [f"{n:.3f} s" for n in (without, fused)]
        rows.append([model, *row, *(f"{n / without:.2%}" for n in (without - fused - sum(saved), *saved))])
    print(table(rows))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
