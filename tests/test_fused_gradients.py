"""--fuse-gradients: the same numbers as autograd's sums under every layout, one matmul for each product and sum."""

from collections import Counter

import pytest
import torch

import step01_single_gpu as step01
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.model import PRESETS, add_product, apply_rope, rope_tables
from services.checks import check as check_flags
from services.dry_run import Seen
from services.fused_gradients import Rotation
from tests import bounds, dry_cases, faults
from tests.equivalence import SMALL, Recording, check, compare, label, record, reference
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
    compare(ours, theirs, bounds.RUN["fp64"])


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


EXPERTS = BASE | dict(model="tiny-moe", shared_experts=1, expert_dim=16)


def test_equals_one_device_with_experts(pools):
    """Experts, the shared one among them."""
    check(pools(2), "step07_moe_ep", EXPERTS, dict(pp=1, cp=1, tp=1, ep=2, zero=1) | FUSED, against=step07)


@pytest.mark.picked(0, 4)
@pytest.mark.parametrize(
    "fault, where",
    [
        ("told_another_scale", "--fuse-gradients: the loss was to be scaled by"),
        ("weight_gradients_added_twice", r"model\.layers\.0\.\S+ differs by"),
        ("weight_gradients_replaced", r"the gradient of \S+ differs by"),
        ("rotated_on", r"the gradient of \S+ differs by"),
        ("tokens_counted_once", r"model\.embed_tokens\.weight differs by"),
    ],
)
def test_faults_are_noticed(pools, fault, where):
    """Another factor of the loss, before anything is compared; else by the first gradient that is wrong."""
    with pytest.raises(RankError, match=where):
        check(pools(2), "step04_tp_sp", BASE, dict(tp=1, zero=1) | FUSED, fault=fault)


@pytest.mark.exhaustive
def test_a_fault_of_experts_is_noticed(pools):
    """A product that is added, and given to autograd."""
    layout = dict(pp=1, cp=1, tp=1, ep=2, zero=1) | FUSED
    with pytest.raises(RankError, match=r"the gradient of model\.layers\.0\.mlp\.experts\.\S+ differs by"):
        check(pools(2), "step07_moe_ep", EXPERTS, layout, against=step07, fault="experts_added_twice")


def calls(seen: Seen) -> Counter:
    """How often each operator ran."""
    found = Counter()
    for (_, name), count in seen.meter.counts.items():
        found[name] += count.calls
    return found


@pytest.mark.picked(1, 3)
@pytest.mark.parametrize(
    "step, world, layout", [(1, 1, {}), (4, 4, dict(tp=2, zero=1)), (6, 4, dict(pp=2, cp=1, tp=1)), (7, 2, dict(pp=1))]
)
def test_every_product_is_added_by_its_matmul(step, world, layout):
    """In a layer and micro-batch, seven dW and, where autograd adds them, three of six dx; of experts, dW with a cast.

    An embedding's gradient of its own size is never made, and that of the head not kept until backward.
    """
    base = dict(model="debug", n_layers=2, dtype="fp32", micro_batch_size=1, global_batch_size=4)
    base |= dict(model="tiny-moe", cp=1, tp=1, ep=1) if step == 7 else {}
    plain, fused = (dry_cases.run(step, world, 0, base | layout | more, "cpu") for more in ({}, FUSED))
    tp, pp, more = layout.get("tp", 1), layout.get("pp", 1), calls(fused)
    more.subtract(calls(plain))
    layers, micro_batches = 2 // pp, 4 * tp * pp // world
    if step == 7:  # attention's; the experts' three are added by `add_`, as by autograd
        assert more["addmm_"] == (4 + 2) * layers * micro_batches
    else:
        assert more["addmm_"] == (7 + 3 * (tp == 1)) * layers * micro_batches
    assert more["index_add_"] == -more["embedding_dense_backward"] == micro_batches
    assert more["addcmul"] == (3 * 2) * layers * micro_batches and more["neg"] == -4 * layers * micro_batches
    assert fused.traffic == plain.traffic and fused.costs.memory == plain.costs.memory | dict(
        activations=fused.costs.memory["activations"]
    )
    head = 4 * plain.shape.dim * -(-plain.shape.vocab_size // tp) * (pp == 1)  # rank 0 of a pipeline has none
    for seen in (fused.held, fused.costs.memory), (plain.held, plain.costs.memory):
        assert seen[0]["activations"] == pytest.approx(seen[1]["activations"], rel=0.02)
    assert plain.held["activations"] - fused.held["activations"] == head


@pytest.mark.numerics
def test_a_rotation_and_its_gradient_are_rounded_once():
    """In bf16, of one sequence for all and of one each: as `apply_rope`, there, and in fp64 by autograd, back."""
    config = PRESETS["debug"]
    for positions in (torch.arange(1000, 1009), torch.arange(18).view(2, 9)):
        cos, sin = rope_tables(positions, config, torch.bfloat16)
        x, dy = (torch.randn(2, 9, 4, config.head_dim).bfloat16() for _ in range(2))
        narrow, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        Rotation.apply(narrow, cos, sin).backward(dy)
        apply_rope(wide, cos.double(), sin.double()).backward(dy.double())
        once, in_fp32 = bounds.roundings(torch.bfloat16, 1), bounds.roundings(torch.float32, 16)  # of numbers up to 5
        torch.testing.assert_close(Rotation.apply(x, cos, sin), apply_rope(x, cos, sin), rtol=2 * once, atol=in_fp32)
        torch.testing.assert_close(narrow.grad.double(), wide.grad, rtol=once, atol=in_fp32)


@pytest.mark.numerics
@pytest.mark.parametrize("dtype, total", [("float64", "float64"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
def test_a_product_is_added_in_place(dtype, total):
    """[6, 4] += [5, 6]^T [5, 4]; in 16 bits off by a rounding of the product at most (on a CPU), and of the sum."""
    dtype, total = getattr(torch, dtype), getattr(torch, total)
    dy, x, before = torch.randn(5, 6).to(dtype), torch.randn(5, 4).to(dtype), torch.randn(6, 4).to(total)
    found = before.clone()
    assert add_product(found, dy.T, x).data_ptr() == found.data_ptr()
    expected, sizes = before.double() + dy.double().T @ x.double(), dy.double().abs().T @ x.double().abs()
    off = bounds.products(dtype, 5) * sizes + bounds.roundings(total, 2) * (before.double().abs() + sizes)
    assert ((found.double() - expected).abs() <= off).all()


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
