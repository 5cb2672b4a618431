"""The dry run beside real ranks, beside laws, and beside an H100."""

import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.trainer import Run
from extras.tools.dry_run import config_type, count_step, main
from tests.tape import Live

SMALL = dict(model="debug,n_layers=4", global_batch_size=4, micro_batch_size=1, device="cpu")
# All tokens visit all experts, so the experts are equally busy, as the dry run assumes.
EXPERTS = dict(experts=4, experts_per_token=4, ep=2)
LAYOUTS = [
    (1, "step01_single_gpu", dict(recompute="full", dtype="bf16")),
    (2, "step02_ddp", dict(sync="ring")),
    (2, "step03_zero", dict(zero="3")),
    (4, "step05_cp_ring", dict(model="debug", cp=2, tp=2, zero="2")),
    (4, "step06_pipeline", dict(pp=2, tp=2, sp=False)),
    (4, "step07_moe_ep", EXPERTS | dict(pp=2, zero="1", schedule="interleaved")),
]
GIB = 2**30


def count(step: str, flags: dict, ranks: int = 1, rank: int = 0) -> dict[str, Any]:
    """The dry run's counts of one rank."""
    module = importlib.import_module(step)
    config = config_type(module)(**SMALL | flags, ranks=ranks, rank=rank)
    return count_step(module.train, config)


class Peak(Live):
    """`most`: the largest number of bytes that were alive after an operator."""

    most = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        """Run an operator, and add up the storages that are alive."""
        result = super().__torch_dispatch__(*args, **kwargs)
        self.made = {key: ref for key, ref in self.made.items() if not ref.expired()}
        alive = (torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values())
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))
        return result


class WatchedRun(Run):
    """A real run. `held`: the bytes that are alive when the gradients are complete."""

    def require_finite(self, step: int, **numbers: float):
        """Measure, several times: gloo's thread frees tensors a moment after their message."""
        self.held = min(self.live.bytes for _ in range(3))
        super().require_finite(step, **numbers)


def train_real(step: str, flags: dict, out: str) -> tuple[int, int, dict[str, int]]:
    """Runs on every rank: two steps -> bytes held, at the peak, and sent in the second step."""
    module = importlib.import_module(step)
    config = module.Config(**SMALL | flags, steps=2, out=out)
    # With gloo, comm.py's reduce_scatter needs memory that it does not need with NCCL.
    like_nccl = mock.patch.object(dist, "get_backend", lambda *_: "")
    with like_nccl, Peak() as live, WatchedRun(config) as run:
        run.live = live
        module.train(config, run)
        batch = run.parts["data"].batch(0)
    tokens = sum(tensor.nbytes for tensor in batch)  # numpy's memory, which `Live` does not see
    return run.held + tokens, live.most + tokens, run.history[1]["sent"]


@pytest.mark.parametrize("ranks, step, flags", LAYOUTS, ids=str)
def test_real_ranks(pools, tmp_path, ranks, step, flags):
    """Real ranks send exactly what the dry run counts, and hold what it counts within 1 %.

    Their peak is within 5 %: gloo may keep tensors for a moment after the wait for their message.
    """
    real = pools(ranks).run(train_real, step, flags, str(tmp_path))
    for rank in {0, ranks - 1}:
        held, peak, sent = real[rank]
        counts = count(step, flags, ranks, rank)
        by_group: Counter = Counter()
        for key, n in counts["sent"].items():
            by_group[key.split()[0]] += n
        assert dict(by_group) == sent
        assert sum(counts["held"].values()) == pytest.approx(held, rel=0.01)
        assert sum(counts["peak"].values()) == pytest.approx(peak, rel=0.05)
