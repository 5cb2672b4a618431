"""Muon: PyTorch's own on one device, the same numbers under every layout, bytes by law, checkpoints, faults noticed."""

import importlib
import inspect
from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
from torch.optim import _muon

import step01_single_gpu as step01
import step07_moe_ep as step07
from services import variants
from services.muon import A, B, C, is_hidden, orthogonal
from services.state import full_state
from tests import bounds, equivalence
from tests.equivalence import SMALL, Recording, difference, job, label, on_rank
from theory.flops import newton_schulz_flops
from theory.traffic import muon_traffic

BASE = dict(optimizer="muon", lr=0.05)
EXPERTS = BASE | dict(n_layers=2, experts=4, experts_per_token=2, expert_dim=12, balance_weight=0.5)
EXPERTS |= dict(global_batch_size=8, micro_batch_size=2)
ALONE = dict(pp=1, cp=1, tp=1, ep=1)
SHAPES = [(24, 32), (32, 24), (128, 128), (352, 128)]


def in_its_own_dtype():
    """torch's Newton-Schulz iterations with the cast to bf16 taken out of their source."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    assert source.count("grad.bfloat16()") == 1
    names = dict(vars(_muon))
    exec(source.replace("grad.bfloat16()", "grad.clone()"), names)
    return mock.patch.object(_muon, "_zeropower_via_newtonschulz", names["_zeropower_via_newtonschulz"])


class TorchsOwn:
    """torch.optim.Muon for the hidden matrices, and the rule so far for the rest."""

    def __init__(self, optimizer, config):
        self.hidden = [master for name, master in optimizer.masters.items() if is_hidden(name)]
        options = dict(momentum=0.95, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        self.muon, self.adamw = torch.optim.Muon(self.hidden, lr=0.0, **options), optimizer.inner
        self.param_groups, self.state = self.muon.param_groups + self.adamw.param_groups, self.adamw.state

    def step(self):
        """Both."""
        self.muon.step()
        for master in self.hidden:
            master.grad = None
        self.adamw.step()


def torchs_own(optimizer, config, mesh):
    """Instead of `take_over`."""
    optimizer.inner = TorchsOwn(optimizer, config)


# --- one device ------------------------------------------------------------------------------------------------------


def added_alike(shape: tuple[int, int]) -> float:
    """How far Newton-Schulz iterations in bf16 may be from torch's, which takes one matrix at a time, not a stack.

    0, if this processor's matmuls of a stack and of one matrix add in the same order; else 15 roundings.
    """
    stack = torch.randn(3, *sorted(shape), generator=torch.Generator().manual_seed(0)).bfloat16()
    grams = stack @ stack.mT
    one_by_one = [
        (x @ x.T, torch.addmm(gram, gram, gram, beta=B, alpha=C)) for x, gram in zip(stack, grams, strict=True)
    ]
    both = grams, torch.baddbmm(grams, grams, grams, beta=B, alpha=C)
    alike = all(map(torch.equal, both, map(torch.stack, zip(*one_by_one, strict=True))))
    return 0.0 if alike else bounds.roundings(torch.bfloat16, 15)


@pytest.mark.numerics
@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_made_orthogonal_as_torch_does(shape):
    """Bit for bit in bf16 (if matmuls add alike), else to rounding, each of a stack alone; singular values near 1."""
    stack = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = [_muon._zeropower_via_newtonschulz(x, (A, B, C), 5, 1e-7) for x in stack]
    assert difference(orthogonal(stack.bfloat16()), torch.stack(expected)) <= added_alike(shape)
    with in_its_own_dtype():
        expected = [_muon._zeropower_via_newtonschulz(x, (A, B, C), 5, 1e-7) for x in stack]
    found = orthogonal(stack)
    assert difference(found, torch.stack(expected)) < bounds.FP64
    if shape[0] != shape[1]:  # a square random matrix has singular values near 0, which take more iterations
        values = torch.linalg.svdvals(found)
        assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.numerics
@pytest.mark.picked(0)
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_one_device_is_torchs_own(tmp_path, dtype):
    """Four clipped steps with weight decay equal torch.optim.Muon beside AdamW: in fp64 to rounding, else bit for bit.

    (If the matmuls of this processor add alike.)
    """
    config = step01.Config(**SMALL | BASE | dict(dtype=dtype, out=str(tmp_path / "run")))
    ours = equivalence.record(step01, config)
    dtypes = in_its_own_dtype() if dtype == "fp64" else nullcontext()
    with dtypes, mock.patch.object(variants, "take_over", torchs_own):
        theirs = equivalence.record(step01, config)
    bound = bounds.RUN["fp64"] if dtype == "fp64" else max(map(added_alike, [(32, 32), (16, 32), (48, 32), (32, 48)]))
    equivalence.compare(ours, theirs, bound)


def test_fp16_steps_that_are_skipped_leave_the_momentum(tmp_path):
    """A scale of 2^60 overflows: no weight moves, and momentum is still zero."""
    config = step01.Config(**SMALL | BASE | dict(dtype="fp16", steps=2, out=str(tmp_path / "run")))
    init = step01.Optimizer.__init__

    def overflowing(self, model, config):
        init(self, model, config)
        self.loss_scale = 2.0**60

    with mock.patch.object(step01.Optimizer, "__init__", overflowing), equivalence.without_instruments():
        trained = step01.train(config)
    state = full_state(trained.optimizer, job())
    assert trained.optimizer.loss_scale == 2.0**58
    assert state["momentum_buffer"] and not any(t.any() for t in state["momentum_buffer"].values())


# --- every layout ----------------------------------------------------------------------------------------------------


@pytest.mark.picked(6)
@pytest.mark.parametrize("tp, zero", list(product((1, 2, 4), (3, 2, 1, 0))))
def test_equals_one_device(pools, tp, zero):
    """dp x tp on four ranks in every stage; with tp 4, two ranks share each key/value head."""
    step = "step04_tp_sp" if tp > 1 else "step03_zero"
    equivalence.check(pools(4), step, BASE, dict(zero=zero) | (dict(tp=tp) if tp > 1 else {}))


@pytest.mark.picked(0, 20)
@pytest.mark.parametrize(
    "layout",
    [dict(ep=ep, tp=tp, zero=zero) for tp, ep, zero in product((2, 1), (2, 1), (2, 0, 1, 3))]
    + [dict(ep=4, zero=1), dict(ep=2, cp=2, zero=3), dict(pp=2, tp=2, schedule="zb-h1", zero=3)]
    + [dict(pp=2, ep=2, schedule="zbv", n_layers=4, zero=2), dict(pp=2, schedule="dualpipe", n_layers=4, zero=0)],
    ids=label,
)
def test_experts_equal_one_process(pools, layout):
    """Each expert's matrices alone, wherever they lie; and pipelines, with weight gradients put off."""
    base = EXPERTS | dict(n_layers=layout.get("n_layers", 2))
    equivalence.check(pools(4), "step07_moe_ep", base, ALONE | layout, against=step07)


@pytest.mark.picked(0)
@pytest.mark.parametrize("offload", [dict(offload_optimizer="disk"), dict(offload_params="cpu"), {}], ids=label)
def test_equals_one_device_on_eight_ranks_and_offloaded(pools, offload):
    """Slices on the host or in a file. Of the 26 elements of this layer, the last of eight ranks has none."""
    base = BASE | dict(n_layers=1, dim=2, n_heads=1, n_kv_heads=1, ffn_dim=1)
    equivalence.check(pools(8), "step03_zero", base, dict(zero=3) | offload)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", range(4))
def test_equals_one_device_with_frozen_parameters(pools, zero):
    """A frozen matrix stays, and does not disturb its neighbours in the unit."""
    equivalence.check(pools(2), "step03_zero", BASE, dict(zero=zero), "frozen")


# --- laws ------------------------------------------------------------------------------------------------------------


def sent_on_rank(step: str, options: dict) -> tuple[int, float, int]:
    """Runs on every rank: calls and bytes of Muon's gathers in the last step, and bytes of momentum."""
    with equivalence.without_instruments():
        trained = importlib.import_module(step).train(importlib.import_module(step).Config(**options))
    last, optimizer = trained.history[-1], trained.optimizer
    calls = sum(each.get("all_gather (muon)", 0) for each in last["calls"].values())
    sent = sum(each.get("all_gather (muon)", 0) for each in last["traffic"].values())
    rules = [update.rule for update in getattr(optimizer, "updates", ())] or [optimizer.inner]
    states = [entry for rule in rules if rule is not None for entry in rule.state.values()]
    return calls, sent, sum(entry["momentum_buffer"].nbytes for entry in states if "momentum_buffer" in entry)


@pytest.mark.picked(0)
@pytest.mark.parametrize("dtype, e", [("fp32", 2), ("fp64", 8)])
def test_bytes_are_the_laws(pools, tmp_path, dtype, e):
    """ZeRO: one gather a layer of its padded slices. tp: one a matrix. Momentum: one number an element, in slices."""
    layers, dim, kv, ffn = SMALL["n_layers"], SMALL["dim"], SMALL["dim"] // 2, SMALL["ffn_dim"]
    matrices = 2 * dim * dim + 2 * kv * dim + 3 * ffn * dim
    wide = 8 if dtype == "fp64" else 4
    options = SMALL | BASE | dict(dtype=dtype, steps=1, out=str(tmp_path / "run"))
    found = pools(4).run(sent_on_rank, "step03_zero", options | dict(zero=1))
    unit = -(-(matrices + 2 * dim) // 4)
    assert [(calls, sent) for calls, sent, _ in found] == [(layers, layers * 3 * unit * e)] * 4
    assert sum(momentum for *_, momentum in found) == layers * matrices * wide
    found = pools(4).run(sent_on_rank, "step04_tp_sp", options | dict(zero=0, tp=2))
    assert found == [(7 * layers, layers * matrices / 2 * e, layers * matrices / 2 * wide)] * 4


def test_theory_by_hand():
    """Two gathers of one dimension add up, a group of one sends nothing; one iteration of a 2 x 3 matrix."""
    gathered = [("dp", 4, 10), ("dp", 4, 5), ("tp", 2, 6), ("expert_data", 1, 9)]
    assert muon_traffic(gathered, 2) == {("dp", "all_gather (muon)"): 90, ("tp", "all_gather (muon)"): 12}
    assert newton_schulz_flops(3, 2, 1) == 2 * (2 * 3 * 2) + 2 * (2 * 2 * 2) + 2 * (2 * 2 * 3)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def state_on_rank(options: dict) -> dict:
    """Runs on every rank: train step 7; returns all full tensors of the end, by kind and name."""
    with equivalence.without_instruments():
        return full_state(step07.train(step07.Config(**options)).optimizer, job())


def test_a_checkpoint_goes_on_under_any_layout(pools, tmp_path):
    """ZeRO 3 with ep and tp, then one process, then ZeRO 1 with cp: as four steps of one process, momentum included."""
    options = SMALL | EXPERTS | dict(steps=3, warmup_steps=1, save_every=1) | ALONE
    whole = equivalence.reference(options | dict(save_every=0), step=step07)
    places = [str(tmp_path / name) for name in "abc"]
    first = options | dict(zero=3, ep=2, tp=2, stop_after=1, out=places[0])
    last = options | dict(zero=1, cp=2, resume=places[1], out=places[2])
    pools(4).run(state_on_rank, first)
    state_on_rank(options | dict(zero=0, stop_after=2, resume=places[0], out=places[1]))
    found = pools(4).run(state_on_rank, last)[0]
    for name, parameter in Recording(**torch.load(whole)).parameters.items():
        assert difference((found["model"] | found["buffer"])[name], parameter) < 1e-10, name
    assert all(is_hidden(name) for name in found["momentum_buffer"])
    assert found["momentum_buffer"].keys() | found["exp_avg"].keys() == found["model"].keys()


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, layout",
    [
        ("each_shard_made_orthogonal_alone", dict(tp=2, zero=0)),
        ("each_slice_made_orthogonal_alone", dict(zero=2)),
        ("experts_made_orthogonal_together", dict(ep=2, zero=0)),
    ],
)
def test_faults_are_noticed(pools, tmp_path, fault, layout):
    """Each makes the comparison with one process fail on every rank."""
    base = SMALL | EXPERTS | dict(steps=2)
    reference = str(equivalence.reference(base, step=step07))
    options = base | ALONE | layout | dict(out=str(tmp_path / "run"))
    for found in pools(2).run(
        equivalence.complaint_on_rank, on_rank, "step07_moe_ep", options, reference, 1e-10, [fault]
    ):
        assert "differs by" in found
