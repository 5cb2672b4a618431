"""--fuse-gradients: the same numbers as autograd's sums under every layout, one matmul for each product and sum."""

import pytest
import torch

import step01_single_gpu as step01
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.model import add_product
from services.checks import check as check_flags
from tests import dry_cases, faults
from tests.equivalence import BOUNDS, SMALL, Recording, check, compare, label, record, reference
from tests.pool import RankError

FUSED = dict(fuse_gradients=True)
BASE = dict(n_layers=2, steps=2, global_batch_size=12)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_equals_autograd_on_one_device(tmp_path, recompute, optimizer):
    """Twelve micro-batches, recomputed or not, a matrix that does not train among them."""
    options = SMALL | BASE | dict(recompute=recompute, optimizer=optimizer)
    theirs = Recording(**torch.load(reference(options, "frozen")))
    with faults.applied("frozen"):
        ours = record(step01, step01.Config(**options, **FUSED, out=str(tmp_path)))
    compare(ours, theirs, BOUNDS["fp64"])


@pytest.mark.picked(1, 5)
@pytest.mark.parametrize(
    "step, ranks, base, layout",
    [
        ("step02_ddp", 2, dict(), dict(sync="overlap")),
        ("step02_ddp", 2, dict(), dict(sync="bucket", bucket_mb=0.01)),
        ("step02_ddp", 2, dict(), dict(sync="naive")),
        ("step04_tp_sp", 2, dict(n_kv_heads=1), dict(tp=2, zero=1)),
        ("step04_tp_sp", 4, dict(recompute="full"), dict(tp=2, sp=False, zero=0)),
        ("step06_pipeline", 4, dict(recompute="selective", tied=True), dict(pp=2, cp=1, tp=2, zero=1)),
        ("step06_pipeline", 4, dict(), dict(pp=2, cp=2, tp=1, zero=1, schedule="interleaved", n_layers=4)),
        ("step06_pipeline", 2, dict(), dict(pp=1, cp=1, tp=2, tp_overlap=False, zero=1)),
    ],
    ids=lambda value: label(value) if isinstance(value, dict) else value,
)
def test_equals_one_device(pools, step, ranks, base, layout):
    """Buckets, ZeRO 1, matrices cut by columns and rows, stages."""
    base = base | {name: layout.pop(name) for name in ("n_layers",) if name in layout}
    check(pools(ranks), step, BASE | base, layout | FUSED)


@pytest.mark.exhaustive
def test_equals_one_device_with_experts(pools):
    """Experts stay with autograd, the shared one and attention do not."""
    base = BASE | dict(model="tiny-moe", shared_experts=1, expert_dim=16)
    check(pools(2), "step07_moe_ep", base, dict(pp=1, cp=1, tp=1, ep=2, zero=1) | FUSED, against=step07)


@pytest.mark.parametrize("fault", ["weight_gradients_added_twice", "weight_gradients_replaced"])
def test_faults_are_noticed(pools, fault):
    """A product that is added and given to autograd as well; one that takes the place of the sum."""
    with pytest.raises(RankError, match=r"the gradient of model\.layers\.0\.\S+ differs by"):
        check(pools(2), "step04_tp_sp", BASE, dict(tp=1, zero=1) | FUSED, fault=fault)


@pytest.mark.parametrize(
    "step, world, layout", [(1, 1, {}), (4, 4, dict(tp=2, zero=1)), (6, 4, dict(pp=2, cp=1, tp=1))]
)
def test_every_product_is_added_by_its_matmul(step, world, layout):
    """Seven matrices a layer and micro-batch; in step 1, where there is no sum yet, the first one is autograd's."""
    base = dict(model="debug", n_layers=4, dtype="fp32", micro_batch_size=1, global_batch_size=12)
    plain, fused = (dry_cases.run(step, world, 0, base | layout | more, "cpu") for more in ({}, FUSED))
    adds = [sum(n.calls for (_, name), n in seen.meter.counts.items() if name == "addmm_") for seen in (plain, fused)]
    layers, micro_batches = 4 // layout.get("pp", 1), 12 * layout.get("tp", 1) * layout.get("pp", 1) // world
    assert adds[1] - adds[0] == 7 * layers * (micro_batches - (step == 1))
    assert fused.traffic == plain.traffic and fused.held == plain.held


@pytest.mark.parametrize("dtype, total", [("float64", "float64"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_a_product_is_added_in_place(dtype, total):
    """[6, 4] += [5, 6]^T [5, 4]; in 16 bits off by a rounding of the product at most (on a CPU), and of the sum."""
    dtype, total = getattr(torch, dtype), getattr(torch, total)
    dy, x, before = torch.randn(5, 6).to(dtype), torch.randn(5, 4).to(dtype), torch.randn(6, 4).to(total)
    found = before.clone()
    assert add_product(found, dy.T, x).data_ptr() == found.data_ptr()
    expected = before.double() + dy.double().T @ x.double()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.06)


@pytest.mark.parametrize(
    "flags, world, complaint",
    [
        (dict(zero=2), 2, "--fuse-gradients: --zero 2 .* use --zero 0 or 1"),
        (dict(compile=True), 1, "--fuse-gradients .* --compile"),
        (dict(sync="torch", zero=0, pp=1, dtype="fp32"), 2, "--sync torch .* leave --fuse-gradients away"),
        (dict(schedule="zb-h1", pp=2), 2, "--schedule zb-h1 .* leave --fuse-gradients away, or use 1f1b"),
    ],
)
def test_flags_that_exclude_it(flags, world, complaint):
    """Refused before anything starts."""
    with pytest.raises(UserError, match=complaint):
        check_flags(step06.Config(**SMALL | dict(cp=1, tp=1) | FUSED | flags), world)
