"""Variants of the trainer, beyond equality: what is skipped, what never exists, what is compiled."""

import importlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from common.trainer import DTYPES
from tests import equal
from variants import skip_spikes
from variants.fp16 import LossScaling

SLOW = dict(optimizer="sgd", lr=0.1, steps=3)


def exact_fp16_on_rank(step: str, options: dict, file: str) -> float:
    """The machinery of --dtype fp16, in fp64."""
    DTYPES["fp16"] = torch.float64
    try:
        return equal.on_rank(step, options | dict(dtype="fp16"), file, 1e-10)
    finally:
        DTYPES["fp16"] = torch.float16


@pytest.mark.parametrize(
    "ranks, step, layout, base",
    [
        (1, "step01_single_gpu", {}, SLOW),
        (4, "step07_moe_ep", dict(pp=2, ep=2, zero=2, loss_chunk=5), SLOW | dict(experts=4)),
        (4, "step06_pipeline", dict(pp=2, zero=0, grad_clip=0.0), SLOW | dict(tied=True, grad_clip=0.0)),
    ],
)
def test_loss_scaling_alone_changes_nothing(pools, tmp_path, ranks, step, layout, base):
    """In fp64 a scale, a power of two, is exact: only that fp16 is narrow makes a difference."""
    file = str(tmp_path / "reference.pt")
    pools(1).run(equal.save_record, step, base, file)
    pools(ranks).run(exact_fp16_on_rank, step, base | layout, file)


def overflow_on_rank(step: str, options: dict) -> tuple:
    """Train three steps; in the second, one rank's gradient is infinite. What the scaling has seen before each step."""
    seen, plain = [], LossScaling.step

    def sabotaged(self, lr: float, factor: float):
        pieces = getattr(self.optimizer, "pieces", None) or self.optimizer.masters
        if len(seen) == 1 and self.mesh.rank == self.mesh.world - 1:
            next(iter(self.unscaled_gradients().values())).fill_(torch.inf)
        before = {name: piece.detach().clone() for name, piece in pieces.items()}
        plain(self, lr, factor)
        moved = any(not torch.equal(before[name], piece) for name, piece in pieces.items())
        freed = all(param.grad is None for param in getattr(self.optimizer, "params", {}).values())
        seen.append((moved, freed, math.log2(self.scale)))

    LossScaling.step = sabotaged
    try:
        equal.record(step, options)
    finally:
        LossScaling.step = plain
    return seen


@pytest.mark.parametrize("layout", [dict(zero=0), dict(zero=2), dict(pp=2, zero=0, grad_clip=0.0)])
def test_an_overflow_on_one_rank_skips_the_update_on_all(pools, layout):
    """And halves the scale, on all; the next update is made."""
    options = SLOW | dict(dtype="fp16") | layout
    for seen in pools(2).run(overflow_on_rank, "step06_pipeline", options):
        assert seen == [(True, True, 16.0), (False, True, 15.0), (True, True, 15.0)]


def test_spikes_are_left_out_and_become_normal():
    """A value above K times its median, of which there must be enough; all values enter the median."""
    spikes = skip_spikes.Spikes(3.0)
    assert not any(spikes.is_spike(1.0, 100.0) for _ in range(7))
    assert not spikes.is_spike(50.0, 1.0)  # seven are not enough
    assert spikes.is_spike(3.1, 100.0) and spikes.is_spike(1.0, 301.0) and not spikes.is_spike(2.9, 299.0)
    assert not [spikes.is_spike(10.0, 100.0) for _ in range(40)][-1]


def test_a_spike_moves_nothing(monkeypatch):
    """The update is left out, gradients are freed, and the record says so."""
    monkeypatch.setattr(skip_spikes.Spikes, "is_spike", lambda self, *values: len(seen) == 1)
    step01, seen = importlib.import_module("step01_single_gpu"), []
    plain = equal.Watch.record

    def record(run, step, tokens, **numbers):
        plain(run, step, tokens, **numbers)
        masters = run.parts.optimizer.masters.values()
        freed = all(param.grad is None for param in run.parts.model.parameters())
        seen.append((sum(m.sum().item() for m in masters), numbers.get("skipped", 0), freed))

    monkeypatch.setattr(equal.Watch, "record", record)
    equal.record(step01.__name__, SLOW | dict(skip_spikes=2.0))
    sums, skipped, freed = zip(*seen, strict=True)
    assert skipped == (0, 1, 0) and all(freed)
    assert sums[0] == sums[1] != sums[2]


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator has made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run it, and look."""
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (equal.SMALL["vocab_size"],):
                self.numel = max(self.numel, tensor.numel())
        return made


@pytest.mark.parametrize("chunk", [0, 40, 64])
def test_logits_of_one_chunk_exist(chunk):
    """Of 64 tokens of a micro-batch, `chunk` have logits at a time; with 0, all."""
    with Largest() as largest:
        equal.record("step01_single_gpu", dict(steps=1, micro_batch_size=4, global_batch_size=4, loss_chunk=chunk))
    assert largest.numel == (chunk or 64) * equal.SMALL["vocab_size"]


def compiled_on_rank(step: str, options: dict, file: str) -> float:
    """--compile without generating code; more graphs than one layer's would be an error."""
    plain = torch.compile
    torch.compile = partial(plain, backend="aot_eager")
    try:
        return equal.on_rank(step, options | dict(compile=True), file)
    finally:
        torch.compile = plain
        torch.compiler.reset()


@pytest.mark.parametrize(
    "ranks, step, layout",
    [
        pytest.param(2, "step04_tp_sp", dict(tp=2, recompute="full"), marks=pytest.mark.exhaustive),
        pytest.param(2, "step06_pipeline", dict(pp=2), marks=pytest.mark.exhaustive),
        (1, "step01_single_gpu", dict(recompute="selective")),
        (2, "step03_zero", dict(zero=3)),
    ],
)
def test_compiled_layers_compute_the_same(pools, tmp_path, ranks, step, layout):
    """Whatever a layer sends, and recomputes."""
    file = str(tmp_path / "reference.pt")
    pools(1).run(equal.save_record, "step01_single_gpu", SLOW, file)
    pools(ranks).run(compiled_on_rank, step, SLOW | layout, file)


def test_masters_are_not_touched_by_a_skipped_update():
    """`skip_update` gives the rule its own step back."""
    from variants.fp16 import skip_update

    calls = []
    rule = type("Rule", (), dict(step=lambda self: calls.append("rule")))()
    optimizer = SimpleNamespace(rule=rule)
    skip_update(optimizer, lambda lr, factor: optimizer.rule.step(), 0.1)
    assert calls == []
    rule.step()
    assert calls == ["rule"]


def count_graphs(layers: int, steps: int) -> tuple[int, int]:
    """Graphs, and how often a function was compiled, with so many layers."""
    plain = torch.compile
    torch.compile = partial(plain, backend="aot_eager")
    torch.compiler.reset(), counters.clear()
    try:
        equal.record("step01_single_gpu", SLOW | dict(n_layers=layers, steps=steps, compile=True, global_batch_size=4))
    finally:
        torch.compile = plain
    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def test_one_graph_serves_all_layers(pools):
    """--compile does not give up after eight layers, as it would if each were compiled anew."""
    assert pools(1).run(count_graphs, 10, 2) == [(1, 1)]
