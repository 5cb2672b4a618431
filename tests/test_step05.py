"""Context parallelism: equal to one device in every mode; traffic, work, memory, precision; faults are noticed.

Every equivalence is in fp64 to 1e-10 against step01, on every rank: losses, norms, gathered gradients and parameters.
"""

import os
import re
import signal
import tempfile
import time
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import step01_single_gpu as step01
import step04_tp_sp as step04
import step05_cp_ring as step05
from common import UserError, trainer
from common.comm import Mesh, sum_over
from common.layout import materialize
from common.model import Decoder
from services.checks import check_cp
from services.devices import choose_dtype
from services.evaluation import generate, look_through
from services.launch import gather_objects, open_mesh
from services.memory import MemoryTimeline
from services.readers import open_tokens
from tests import bounds, equivalence, faults
from tests.bench.cp_work import pairs, watched
from tests.equivalence import SMALL, check, difference, label
from tests.pool import RankError
from theory.memory import cp_activation_bytes

STEP = "step05_cp_ring"
CPU = torch.device("cpu")
BASE = dict(optimizer="sgd", n_layers=2, global_batch_size=4, micro_batch_size=2)
THIRDS = dict(dim=36, n_heads=6, n_kv_heads=3, seq_len=12)
EIGHTHS = dict(n_heads=8, micro_batch_size=1)
MODES = ["zigzag", "ring", "allgather", "ulysses"]


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cp, shape", [(2, {}), (3, THIRDS), (4, {})], ids=["cp2", "cp3", "cp4-kv2"])
def test_equals_one_device(pools, cp, shape, mode):
    """Every mode on 2, 3 and 4 ranks; with cp 4, ulysses gives each key/value head to two ranks."""
    check(pools(cp), STEP, BASE | shape, dict(cp=cp, cp_mode=mode))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        *(dict(cp=8, cp_mode=mode) for mode in MODES),
        dict(cp=2, tp=2, zero=3),
        dict(cp=2, tp=4, zero=0),
        dict(cp=2, tp=2, cp_mode="ulysses", zero=2),
        dict(cp=4, tp=2, cp_mode="allgather", sp=False),
        dict(cp=4, cp_mode="ring", zero=3),
        dict(cp=2, tp=2, cp_mode="ring", sp=False, zero=0),
    ],
    ids=label,
)
def test_equals_one_device_on_eight_ranks(pools, layout):
    """One token or two to a rank of eight; and cp x tp x dp, with and without sequence parallelism, under ZeRO."""
    check(pools(8), STEP, BASE | EIGHTHS, layout)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero, mode", [(0, "ulysses"), (1, "ring"), (2, "allgather"), (3, "zigzag")])
def test_equals_one_device_with_zero_and_uneven_targets(pools, uneven_data, zero, mode):
    """dp 2 x cp 2 in every stage of ZeRO, ranks and micro-batches with few or no targets, AdamW."""
    base = dict(optimizer="adamw", dataset=uneven_data, global_batch_size=8, micro_batch_size=1)
    check(pools(4), STEP, BASE | base, dict(cp=2, tp=1, zero=zero, cp_mode=mode))


@pytest.mark.picked(2, 4, 11, 14)
@pytest.mark.parametrize(
    "base, layout",
    [
        (dict(optimizer="adamw"), dict(cp=4, zero=0)),
        (dict(tied=True), dict(cp=4, cp_mode="ring")),
        (dict(tied=True, optimizer="adamw"), dict(cp=2, tp=2, cp_mode="ulysses")),
        (dict(n_kv_heads=4), dict(cp=4, cp_mode="ulysses")),
        (dict(n_kv_heads=1), dict(cp=4, cp_mode="ulysses", zero=0)),
        (dict(n_kv_heads=1, optimizer="adamw"), dict(cp=2, tp=2)),
        (dict(n_kv_heads=4), dict(cp=4, cp_mode="allgather", zero=2)),
        *((dict(recompute="full"), dict(cp=4, cp_mode=mode)) for mode in ("ring", "allgather")),
        *((dict(recompute="selective"), dict(cp=4, cp_mode=mode)) for mode in MODES),
        (dict(recompute="full"), dict(cp=2, tp=2, zero=3)),
        (dict(recompute="selective"), dict(cp=2, tp=2, zero=3, cp_mode="ulysses")),
        (dict(micro_batch_size=4, grad_clip=0.0), dict(cp=4)),
    ],
    ids=label,
)
def test_equals_one_device_for_every_kind_of_model(pools, base, layout):
    """AdamW, tied weights, more and fewer key/value heads, recomputation, several sequences at once, no clipping."""
    check(pools(4), STEP, BASE | base, layout)


@pytest.mark.picked(1)
@pytest.mark.parametrize("layout", [dict(cp=4, zero=0), dict(cp=2, tp=2, zero=3, cp_mode="ulysses")], ids=label)
def test_equals_one_device_with_frozen_parameters(pools, layout):
    """A matrix and a norm that do not train get no gradient and stay."""
    check(pools(4), STEP, BASE, layout, "frozen")


@pytest.fixture(scope="session")
def padded_data(tmp_path_factory):
    """`padded_data(n)`: a data set of sequences of 16 tokens in which only the first n have a target."""
    made: dict[int, str] = {}

    def make(n_valid: int) -> str:
        if n_valid not in made:
            rng, rows = np.random.default_rng(11), []
            for _ in range(200):
                tokens = rng.integers(0, 257, size=16)
                places = np.arange(16)  # a label is the target of the token before it
                labels = np.where((places > 0) & (places <= n_valid), tokens, -100)
                rows.append(dict(input_ids=tokens.tolist(), labels=labels.tolist()))
            made[n_valid] = str(tmp_path_factory.mktemp(f"padded-{n_valid}") / "data")
            datasets.Dataset.from_list(rows).save_to_disk(made[n_valid])
        return made[n_valid]

    return make


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n_valid, mode", [(8, "ring"), (8, "ulysses"), (2, "zigzag"), (2, "allgather"), (2, "ring")])
def test_equals_one_device_where_a_rank_has_no_target(pools, padded_data, n_valid, mode):
    """A padded tail takes all targets from two or three of four ranks; their loss is 0, not NaN."""
    dataset = padded_data(n_valid)
    positions = [step05.own_positions(16, rank, 4, mode) for rank in range(4)]
    targets = open_tokens(dataset, 16, 4, 0, 259).batch(0).targets
    assert sum(bool((targets[:, own] == -100).all()) for own in positions) >= 2
    check(pools(4), STEP, BASE | dict(dataset=dataset), dict(cp=4, cp_mode=mode))


@pytest.mark.picked(0, 3)
@pytest.mark.parametrize("mode", MODES)
def test_fp32_drifts_by_rounding_only(pools, mode):
    """fp32 gradients, losses and parameters stay within 1e-5 of one device."""
    check(pools(4), STEP, BASE | dict(dtype="fp32", lr=0.01), dict(cp=4, cp_mode=mode))


def column_on_rank(options: dict, key: str = "loss") -> list[float]:
    """Runs on every rank: train; returns one column of the metrics."""
    return columns_on_rank(options, key)[0]


def columns_on_rank(options: dict, *keys: str) -> list[list[float]]:
    """Runs on every rank: train; returns columns of the metrics."""
    with equivalence.without_instruments():
        history = step05.train(step05.Config(**options)).history
    return [[row[key] for row in history if key in row] for key in keys]


@pytest.mark.numerics
def test_bf16_stays_near(pools, tmp_path):
    """bf16 is within `bounds.DRIFT` nats of one device's bf16 run over 20 steps, on both ranks alike."""
    options = SMALL | BASE | dict(optimizer="adamw", dtype="bf16", lr=0.01, steps=20)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    losses = pools(2).run(column_on_rank, options | dict(cp=2, out=str(tmp_path / "two")))
    assert losses[0] == losses[1]
    assert max(abs(a - row["loss"]) for a, row in zip(losses[0], expected, strict=True)) < bounds.DRIFT


def test_validation_is_one_devices(pools, tmp_path, uneven_data):
    """Validation during training gives step01's numbers, and leaves training as it is."""
    options = SMALL | BASE | dict(eval_every=1, eval_sequences=6, dataset=uneven_data)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    for layout in (dict(cp=4, zero=0), dict(cp=2, tp=1, zero=3, cp_mode="ring")):
        more = dict(out=str(tmp_path / "four"))
        for found in pools(4).run(columns_on_rank, options | layout | more, "validation_loss", "loss"):
            for key, column in zip(("validation_loss", "loss"), found, strict=True):
                assert column == pytest.approx([row[key] for row in expected], rel=1e-10)


@pytest.mark.picked(1)
@pytest.mark.parametrize("base", [{}, dict(optimizer="adamw", tied=True)], ids=label)
def test_resumes_under_other_layouts(pools, tmp_path, base):
    """Steps 1-2 with zigzag on two ranks, 3-4 on one device, 5-6 with Ulysses, cp 2 x tp 2, ZeRO 3."""
    options = SMALL | BASE | base | dict(steps=6, save_every=100)
    whole = step01.train(step01.Config(**options, out=str(tmp_path / "whole"))).history
    a, b, c = (str(tmp_path / name) for name in "abc")
    losses = pools(2).run(column_on_rank, options | dict(cp=2, stop_after=2, out=a))[0]
    rows = step01.train(step01.Config(**options | dict(resume=a, stop_after=4, out=b))).history
    losses += [row["loss"] for row in rows]
    last = dict(cp=2, tp=2, cp_mode="ulysses", zero=3, resume=b, out=c)
    losses += pools(4).run(column_on_rank, options | last)[0]
    assert losses == pytest.approx([row["loss"] for row in whole], rel=1e-10)


def test_one_process_equals_step01(tmp_path):
    """cp 1 on one process is step01, bit for bit (without clipping: the norm is summed in another order)."""
    options = SMALL | dict(grad_clip=0.0, micro_batch_size=6)
    runs = [
        step01.train(step01.Config(**options, out=str(tmp_path / "one"))),
        step05.train(step05.Config(**options, zero=0, out=str(tmp_path / "five"))),
    ]
    rows = [[row["loss"] for row in run.history] for run in runs]
    assert rows[0] == rows[1]
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.picked(1)
@pytest.mark.parametrize("layout", [dict(cp=4, zero=0), dict(cp=2, tp=2, zero=2)], ids=label)
def test_loss_and_norm_are_the_same_on_every_rank(pools, tmp_path, uneven_data, layout):
    """Bit for bit."""
    options = SMALL | BASE | dict(dataset=uneven_data, out=str(tmp_path / "run")) | layout
    assert len(set(map(str, pools(4).run(columns_on_rank, options, "loss", "grad_norm")))) == 1


SIZES = [(8, 1, True), (4, 1, True), (2, 1, True)]
SIZES += [(cp, tp, sp) for cp, tp in ((4, 2), (2, 4), (2, 2)) for sp in (True, False)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number, layout", list(enumerate(product(SIZES, MODES, range(4)))), ids=str)
def test_every_layout_of_eight_ranks_equals_one_device(pools, number, layout):
    """All sizes x modes x stages of ZeRO; numbers of key/value heads, tied weights and optimizers take turns."""
    (cp, tp, sp), mode, zero = layout
    turns = dict(n_kv_heads=(1, 2, 8)[number % 3], tied=number % 2 == 0, optimizer=("sgd", "adamw")[number // 2 % 2])
    base = BASE | EIGHTHS | turns | dict(global_batch_size=8)
    check(pools(8), STEP, base, dict(cp=cp, tp=tp, cp_mode=mode, zero=zero, sp=sp))


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_recomputation_equals_one_device(pools, tp, mode, zero, recompute):
    """Recomputation sends keys and values again in backward, under every stage of ZeRO."""
    layout = dict(cp=2, tp=tp, cp_mode=mode, zero=zero)
    check(pools(4), STEP, BASE | dict(recompute=recompute, optimizer="adamw"), layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("mode", MODES)
def test_compiled_layers_equal_one_device(pools, mode, recompute):
    """torch.compile breaks its graphs at the attention and changes nothing but rounding."""
    base = dict(dtype="fp32", lr=0.01, recompute=recompute)
    options = SMALL | BASE | base | dict(cp=2, cp_mode=mode, compile=True)
    file = str(equivalence.reference(SMALL | BASE | base))
    with tempfile.TemporaryDirectory() as out:
        pools(2).run(equivalence.on_rank, STEP, options | dict(out=out), file, 1e-5, [""], timeout=600)


# --- one block, and the merge of two ---------------------------------------------------------------------------------


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


BLOCKS = {  # s_q, s_k, heads, kv_heads, causal
    "diagonal": (8, 8, 4, 2, True),
    "past": (6, 10, 4, 2, False),
    "long": (10, 3, 4, 4, False),
    "one kv head": (7, 7, 6, 1, True),
    "wide keys": (5, 9, 4, 1, True),
}


def block_inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """q, k, v, grad_out in the ring's shapes (batch 2, head_dim 6), and whether causal."""
    s_q, s_k, heads, kv_heads, causal = BLOCKS[name]
    q, grad = (normal(seed, 2, s_q, heads, 6, dtype=dtype) for seed in (1, 4))
    k, v = (normal(seed, 2, s_k, kv_heads, 6, dtype=dtype) for seed in (2, 3))
    return q, k, v, grad, causal


@pytest.mark.numerics
@pytest.mark.parametrize("name", BLOCKS)
def test_reference_block_and_its_backward(name):
    """Against autograd through a softmax written out, fp64 to 1e-12: GQA, causal or not, s_q unlike s_k."""
    q, k, v, grad, causal = block_inputs(name, torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide_k) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.arange(k.shape[1])[None] <= torch.arange(q.shape[1])[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), wide_v)
    expected.backward(grad)

    out, lse = step05.reference_block(q, k, v, causal)
    found = step05.reference_block_backward(grad, q, k, v, out, lse, causal)
    assert difference(out, expected.detach()) < bounds.FP64
    assert difference(lse, scores.detach().logsumexp(-1)) < bounds.FP64
    for mine, leaf in zip(found, leaves, strict=True):
        assert difference(mine, leaf.grad) < bounds.FP64


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["diagonal", "past", "long", "one kv head"])
def test_block_attention_is_the_reference(name, dtype):
    """The kernels agree with the formulas, on tensors that are not contiguous too.

    The lse is fp32 or wider, and exact enough that one in 16 bits, whatever it says of itself, would be noticed.
    """
    q, k, v, grad, causal = block_inputs(name, dtype)
    expected = step05.reference_block(q, k, v, causal)
    back = step05.reference_block_backward(grad, q, k, v, *expected, causal)
    strided = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (grad, q, k, v)]
    for g, *qkv in ((grad, q, k, v), strided):
        found = step05.block_attention(*qkv, causal)
        assert found[0].dtype == dtype and found[1].dtype == torch.promote_types(dtype, torch.float32)
        assert (found[1] - expected[1]).abs().max() < bounds.log_sum_exp(dtype)
        if dtype.itemsize == 2:
            assert (expected[1].to(dtype) - expected[1]).abs().max() > 2 * bounds.log_sum_exp(dtype)
        for mine, theirs in zip(
            (found[0], *step05.block_attention_backward(g, *qkv, *expected, causal)), (expected[0], *back), strict=True
        ):
            assert mine.shape == theirs.shape and mine.dtype == dtype
            assert difference(mine, theirs) < bounds.attention(dtype)


@pytest.mark.numerics
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_merge_is_the_softmax_over_the_union(scale):
    """Three blocks of keys in any order give one softmax over all, also where scores are far apart."""
    q, k, v = scale * normal(1, 2, 5, 4, 6), normal(2, 2, 12, 2, 6), normal(3, 2, 12, 2, 6)
    expected, expected_lse = step05.reference_block(q, k, v, False)
    parts = [step05.reference_block(q, k[:, keys], v[:, keys], False) for keys in torch.arange(12).split([5, 1, 6])]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        out, lse = (x.clone() for x in parts[order[0]])
        for i in order[1:]:
            step05.merge(out, lse, *parts[i])
        assert difference(out, expected) < bounds.FP64 and difference(lse, expected_lse) < bounds.FP64


# --- who holds and sees what -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", range(1, 9))
def test_every_token_has_one_owner(n, mode):
    """Positions are a partition of the sequence, in equal shares."""
    seq_len = 4 * n
    owned = [step05.own_positions(seq_len, rank, n, mode) for rank in range(n)]
    assert torch.cat(owned).sort().values.tolist() == list(range(seq_len))
    assert {len(own) for own in owned} == {4} and all((own.diff() > 0).all() for own in owned)


@pytest.mark.parametrize("zigzag", [True, False], ids=["zigzag", "ring"])
@pytest.mark.parametrize("n", range(2, 9))
def test_every_causal_pair_is_seen_once(n, zigzag):
    """The blocks of all ranks and hops, laid on the s x s square of queries and keys, tile its causal half."""
    seq_len = 6 * n
    count, where = torch.zeros(seq_len, seq_len, dtype=torch.int64), "zigzag" if zigzag else "ring"
    for own, hop in product(range(n), repeat=2):
        source = (own - hop) % n
        if block := step05.visible(own, source, seq_len // n, zigzag):
            rows, keys, causal = block
            queries, looked_at = (step05.own_positions(seq_len, rank, n, where) for rank in (own, source))
            queries, looked_at = queries[rows], looked_at[keys]
            seen = torch.ones(len(queries), len(looked_at), dtype=torch.int64)
            count[queries[:, None], looked_at] += seen.tril() if causal else seen
    assert torch.equal(count, torch.ones_like(count).tril())


def ring_on_rank() -> None:
    """Runs on every rank: what `around_the_ring` yields, its buffers, and what it sends."""
    n = torch.distributed.get_world_size()
    with open_mesh({"cp": n}, CPU, "gloo") as mesh:
        own, sources, addresses = torch.full((2, 3), float(mesh.rank)), [], set()
        for source, kv in step05.around_the_ring(own, mesh["cp"]):
            assert torch.equal(kv, torch.full((2, 3), float(source)))
            sources.append(source)
            addresses.add(kv.data_ptr())
        assert sources == [(mesh.rank - hop) % n for hop in range(n)]
        assert torch.equal(own, torch.full((2, 3), float(mesh.rank)))
        assert len(addresses) == min(3, n), "its own, and two buffers that take turns"
        taken = mesh.ledger.take()
        assert taken["calls"]["cp"] == dict(send=n - 1) and taken["traffic"]["cp"] == dict(send=(n - 1) * own.nbytes)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_part_comes_round_once(pools, world):
    """In the order of the ring, in two buffers, in n-1 hops; one's own part is left as it was."""
    pools(world).run(ring_on_rank)


def swap_on_rank() -> None:
    """Runs on every rank: SwapTokensAndHeads against its definition, there and back; and <S x, y> = <x, S^T y>."""
    n = torch.distributed.get_world_size()
    with open_mesh({"cp": n}, CPU, "gloo") as mesh:
        group, rank = mesh["cp"], mesh.rank
        full = normal(1, 2, 3 * n, 2 * n, 5)
        tokens, heads = full.chunk(n, 1)[rank], full.chunk(n, 2)[rank]
        swap = step05.SwapTokensAndHeads.apply
        assert torch.equal(swap(tokens, group, True), heads) and torch.equal(swap(heads, group, False), tokens)
        for x, to_heads in ((tokens, True), (heads, False)):
            leaf = x.clone().requires_grad_()
            out = swap(leaf, group, to_heads)
            cotangent = normal(2, 2, 3 * n, 2 * n, 5).chunk(n, 2 if to_heads else 1)[rank]
            out.backward(cotangent)
            inner = sum_over(group, (out.detach() * cotangent).sum().item(), (leaf.grad * x).sum().item())
            assert abs(inner[0] - inner[1]) < bounds.FP64 * abs(inner[0])


@pytest.mark.parametrize("world", [2, 4])
def test_swap_of_tokens_and_heads(pools, world):
    """Both directions, each the other's inverse and conjugate."""
    pools(world).run(swap_on_rank)


# --- each mode against one call on the whole sequence ----------------------------------------------------------------

Shape = tuple[int, int, int, int, int]  # batch, seq, heads, kv_heads, head_dim


def attention_inputs(shape: Shape, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, of the whole sequence."""
    batch, seq, heads, kv_heads, d = shape
    return [normal(i, batch, seq, h, d, dtype=dtype) for i, h in enumerate((heads, kv_heads, kv_heads, heads))]


def on_one_device(shape: Shape, dtype: torch.dtype, compute: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv of one SDPA call in `compute` on inputs rounded to `dtype`."""
    *qkv, grad = (x.to(compute) for x in attention_inputs(shape, dtype))
    qkv = [x.requires_grad_().transpose(1, 2) for x in qkv]
    out = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    return [x.transpose(1, 2).detach() for x in (out, *torch.autograd.grad(out, qkv, grad.transpose(1, 2)))]


def attention_on_rank(modes: list[str], shape: Shape, dtype: torch.dtype, fault: str = "") -> list[list[Tensor]]:
    """Runs on every rank: for each mode, out, dq, dk, dv, gathered in the order of the sequence."""
    n, found = torch.distributed.get_world_size(), []
    for mode in modes:
        with open_mesh({"cp": n}, CPU, "gloo") as mesh, faults.applied(fault):
            own = step05.own_positions(shape[1], mesh.rank, n, mode)
            *qkv, grad = (x[:, own] for x in attention_inputs(shape, dtype))
            before = [x.clone() for x in (*qkv, grad)]
            leaves = [x.requires_grad_() for x in qkv]
            out = step05.ContextAttention(mesh["cp"], mode)(*leaves)
            mine = [own, out.detach(), *torch.autograd.grad(out, leaves, grad)]
            assert all(torch.equal(a, b) for a, b in zip((*qkv, grad), before, strict=True)), "an input was modified"
            positions, *parts = zip(*gather_objects(mine, mesh), strict=True)
            found.append([torch.cat(part, 1)[:, torch.cat(positions).argsort()] for part in parts])
    return found


@pytest.mark.numerics
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_mode_is_one_call_on_the_whole_sequence(pools, world, kv_heads):
    """out, dq, dk and dv to 1e-12 in fp64, for two sequences at once."""
    shape = (2, 8 * world, 8, kv_heads, 6)
    modes = [mode for mode in MODES if mode != "ulysses" or 8 % world == 0]
    expected = on_one_device(shape, torch.float64, torch.float64)
    for mode, found in zip(modes, pools(world).run(attention_on_rank, modes, shape, torch.float64)[0], strict=True):
        for what, mine, theirs in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
            assert difference(mine, theirs) < bounds.FP64, (mode, what)


PRECISION = (1, 256, 8, 2, 32)


def precision(pools, world: int, modes: list[str], fault: str = "") -> dict[str, list[float]]:
    """By mode: the bf16 errors of out, dq, dk, dv against fp64, as multiples of those of one bf16 SDPA call."""
    exact, one = (on_one_device(PRECISION, torch.bfloat16, compute) for compute in (torch.float64, torch.bfloat16))
    base = [difference(mine, theirs) for mine, theirs in zip(one, exact, strict=True)]
    found = pools(world).run(attention_on_rank, modes, PRECISION, torch.bfloat16, fault)[0]
    return {
        mode: [difference(a, b) / c for a, b, c in zip(ours, exact, base, strict=True)]
        for mode, ours in zip(modes, found, strict=True)
    }


@pytest.mark.numerics
@pytest.mark.picked(1)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bf16_is_as_precise_as_on_one_device(pools, world):
    """Norm-wise errors of at most sqrt(2) times those of one call, for normal q, k, v: merging rounds once more."""
    for mode, ratios in precision(pools, world, MODES).items():
        assert max(ratios) < bounds.ONE_MORE_ROUNDING, (mode, ratios)


# --- what it costs ---------------------------------------------------------------------------------------------------


def bytes_on_rank(cases: list[tuple[str, int, torch.dtype]], fault: str = "") -> list[tuple[dict, dict]]:
    """Runs on every rank: for each (mode, kv_heads, dtype) the bytes sent by one attention, forward and backward."""
    n, found = torch.distributed.get_world_size(), []
    with open_mesh({"cp": n}, CPU, "gloo") as mesh, faults.applied(fault):
        for mode, kv_heads, dtype in cases:
            q = torch.ones(3, 4, 8, 6, dtype=dtype, requires_grad=True)
            k = torch.ones(3, 4, kv_heads, 6, dtype=dtype, requires_grad=True)
            mesh.ledger.take()
            out = step05.ContextAttention(mesh["cp"], mode)(q, k, k)
            forward = mesh.ledger.take()["traffic"]["cp"]
            out.backward(torch.ones_like(out))
            found.append((forward, mesh.ledger.take()["traffic"]["cp"]))
    return found


def docstring_bytes(mode: str, n: int, kv_heads: int, dtype: torch.dtype) -> tuple[dict, dict]:
    """The table in step05's docstring for the tensors of `bytes_on_rank`."""
    e, tokens = dtype.itemsize, 3 * 4
    big_k, big_w, big_q = (tokens * 6 * x for x in (2 * kv_heads * e, 2 * kv_heads * max(4, e), 8 * e))
    if mode == "allgather":
        return dict(all_gather=(n - 1) * big_k), dict(reduce_scatter=(n - 1) * big_w)
    if mode == "ulysses":
        there = dict(all_to_all=(n - 1) / n * (2 * big_q + big_k * max(kv_heads, n) / kv_heads))
        return there, there
    return dict(send=(n - 1) * big_k), dict(send=(n - 1) * big_k + n * big_w)


CASES = [
    (mode, kv_heads, dtype)
    for mode, kv_heads, dtype in product(MODES, (1, 2, 8), (torch.float64, torch.float32, torch.bfloat16))
]


@pytest.mark.picked(0, 1)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_of_a_layer_are_what_theory_says(pools, world):
    """The ledger's bytes equal the docstring's formulas on every rank, forward and backward apart, GQA included."""
    for found in pools(world).run(bytes_on_rank, CASES):
        for case, (forward, backward) in zip(CASES, found, strict=True):
            mode, kv_heads, dtype = case
            expected = docstring_bytes(mode, world, kv_heads, dtype)
            assert (forward, backward) == (pytest.approx(expected[0]), pytest.approx(expected[1])), case


def traffic_on_rank(options: dict) -> tuple[dict, dict]:
    """Runs on every rank: train; bytes over cp in the last step, and those that the run predicts."""
    predicted, predict = {}, trainer.predict

    def watching(run, sync):
        costs = predict(run, sync)
        predicted.update({operation: n for (dim, operation), n in costs.traffic.items() if dim == "cp"})
        return costs

    with mock.patch.object(trainer, "predict", watching):
        history = step05.train(step05.Config(**options)).history
    return history[-1]["traffic"]["cp"], predicted


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "flags",
    [*(dict(cp=4, tp=1, cp_mode=mode) for mode in MODES), *(dict(cp=2, tp=2, cp_mode=mode) for mode in MODES)],
    ids=label,
)
def test_traffic_of_a_step_is_what_theory_says(pools, tmp_path, flags):
    """What is predicted is sent over cp in a step, micro-batches x layers; in bf16 dk and dv travel in fp32."""
    options = SMALL | BASE | dict(dtype="bf16", steps=1, out=str(tmp_path / "run")) | flags
    for sent, predicted in pools(4).run(traffic_on_rank, options):
        assert sent and sent == pytest.approx(predicted, rel=1e-12)


def work_on_rank(modes: list[str], tokens: int, fault: str = "") -> list[tuple[int, int]]:
    """Runs on every rank: for each mode the query-key pairs x heads that are visible, and as the kernels are asked."""
    n, found, heads = torch.distributed.get_world_size(), [], 8
    with open_mesh({"cp": n}, CPU, "gloo") as mesh, faults.applied(fault):
        for mode in modes:
            blocks = [step05.visible(mesh.rank, source, tokens, mode != "ring") for source in range(n)]
            seen = sum(pairs(*(len(range(tokens)[part]) for part in b[:2]), b[2]) for b in blocks if b)
            with watched() as asked:
                step05.ContextAttention(mesh["cp"], mode)(*(torch.ones(1, tokens, h, 2) for h in (heads, 2, 2)))
            found.append((heads * seen, sum(work.pairs for work in asked)))
    return found


def require_balance(pools, world: int, mode: str, fault: str = ""):
    """Assert that every rank computes the same number of query-key pairs, to 1%."""
    counted = [found[0][1] for found in pools(world).run(work_on_rank, [mode], 16, fault)]
    assert max(counted) <= 1.01 * sum(counted) / world, counted


@pytest.mark.parametrize("mode", ["zigzag", "allgather", "ulysses"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_work_is_balanced(pools, world, mode):
    """Within 1%, as the kernels are asked for it."""
    require_balance(pools, world, mode)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_work_is_what_theory_says(pools, world):
    """Visible and computed pairs agree, and are exact.

    Of s (s+1) / 2 pairs, zigzag, allgather and ulysses (in pairs x heads) give every rank exactly 1/n for any s that
    they can cut. The contiguous ring gives rank r  c^2 (2r+1) / 2 + c / 2  with c = s/n: (2r+1) / n^2 of s^2 / 2, and
    half a diagonal.
    """
    c = 16
    total, heads = c * world * (c * world + 1) // 2, 8
    for rank, found in enumerate(pools(world).run(work_on_rank, MODES, c)):
        for mode, (seen, asked) in zip(MODES, found, strict=True):
            expected = (c * c * (2 * rank + 1) + c) // 2 if mode == "ring" else total / world
            assert asked == heads * expected, (mode, rank)
            assert seen == pytest.approx(heads * expected, abs=heads), (mode, rank)


def build(config: step05.Config, mesh: Mesh) -> tuple[Decoder, Tensor]:
    """The model as step05 cuts it, with its first values, and the positions of this rank's tokens."""
    with torch.device("meta"):
        model = Decoder(config.model_config())
    step04.shard_tensors(model, mesh, config.sp, config.tp_overlap)
    own = step05.shard_context(model, mesh, config.cp_mode)
    step01.wrap_layers(model, config)
    materialize(model, config.seed, CPU, choose_dtype(config.dtype, CPU))
    return model, own


def loss_of(model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
    """The summed loss of predicting each token from itself."""
    return model.lm_head.loss(model(tokens, positions), tokens)


def saved_on_rank(options: dict, variants: list[dict]) -> list[tuple[int, int]]:
    """Runs on every rank: for each variant, bytes that a forward pass leaves for backward, predicted and measured."""
    world, found = torch.distributed.get_world_size(), []
    for variant in variants:
        config = step05.Config(**options | variant)
        m, dtype, cp = config.model_config(), choose_dtype(config.dtype, CPU), world // config.tp
        with open_mesh({"dp": 1, "cp": cp, "tp": config.tp}, CPU, "gloo") as mesh:
            model, own = build(config, mesh)
            tokens = torch.arange(config.micro_batch_size * m.seq_len).view(-1, m.seq_len) % m.vocab_size
            timeline = MemoryTimeline()
            with timeline.phase("forward"):
                loss = loss_of(model, tokens[:, own], own)
            predicted = cp_activation_bytes(config, m, config.tp, cp, dtype, on_cpu=True, rank=mesh["cp"].rank)
            deadline = time.monotonic() + 30  # gloo's threads may hold a message's tensors for a moment
            while predicted and timeline.live("activations") > 1.05 * predicted and time.monotonic() < deadline:
                time.sleep(0.01)
            found.append((predicted, timeline.live("activations")))
            del loss
    return found


@pytest.mark.picked(2)
@pytest.mark.parametrize("every", [5, 1])
@pytest.mark.parametrize("world", [2, 4])
def test_saved_activations_are_what_theory_says(pools, world, every):
    """Within 5% on every rank, in every mode, with and without tp and recomputation, fp32 and bf16, kv heads < cp.

    `every`: how many of the variants are left out between two that are tried.
    """
    variants = [
        dict(cp_mode=mode, recompute=recompute, dtype=dtype, tp=tp, n_kv_heads=kv_heads)
        for mode, recompute, dtype, tp, kv_heads in product(
            MODES, ("none", "full"), ("fp32", "bf16"), {1, world // 2}, (2, 8)
        )
    ][::every]
    options = dict(model="debug", n_heads=8, micro_batch_size=2, device="cpu")
    for found in pools(world).run(saved_on_rank, options, variants):
        for variant, (predicted, measured) in zip(variants, found, strict=True):
            assert measured == pytest.approx(predicted, rel=0.05), variant


def test_selective_recomputation_saves_memory(pools):
    """Less than without, more than with full. What is cached depends on mode and rank: within 5% of theory."""
    for mode in MODES:
        variants = [dict(cp_mode=mode, recompute=recompute) for recompute in ("none", "selective", "full")]
        options = dict(model="debug", n_heads=8, micro_batch_size=2, device="cpu", dtype="fp32", tp=1)
        for found in pools(2).run(saved_on_rank, options, variants):
            (_, none), (predicted, selective), (_, full) = found
            assert none > selective > full and selective == pytest.approx(predicted, rel=0.05), (mode, found)


def peaks_on_rank(modes: list[str], tokens: int) -> list[tuple[int, int]]:
    """Runs on every rank: for each mode the most bytes alive in forward, and in forward and backward, of attention."""
    n, found = torch.distributed.get_world_size(), []
    with open_mesh({"cp": n}, CPU, "gloo") as mesh:
        for mode in modes:
            turns = []
            for _ in range(2):
                q, k, v = (torch.ones(1, tokens, h, 4, requires_grad=True) for h in (16, 8, 8))
                timeline, highest = MemoryTimeline(), []
                with timeline.phase("forward"):
                    out = step05.ContextAttention(mesh["cp"], mode)(q, k, v)
                    highest.append(max(timeline.curves()[1]["activations"]))
                    out.backward(torch.ones_like(out))
                    highest.append(max(timeline.curves()[1]["activations"]))
                turns.append(highest)
            found.append(tuple(map(min, *turns)))  # gloo's threads may let a buffer go a moment later than they must
    return found


def buffers_on_rank(mode: str) -> list[tuple[int, int]]:
    """Runs on every rank: of attention's forward and of its backward, the messages and the buffers they come into."""
    seen, right = [], step05.exchange

    def watch(sends, receives, *more, **options):
        seen.append(receives[0][0].data_ptr())
        return right(sends, receives, *more, **options)

    n = torch.distributed.get_world_size()
    with open_mesh({"cp": n}, CPU, "gloo") as mesh, mock.patch.object(step05, "exchange", watch):
        q, k, v = (torch.ones(1, 8, 2, 4, requires_grad=True) for _ in range(3))
        out = step05.ContextAttention(mesh["cp"], mode)(q, k, v)
        forward = seen.copy()
        seen.clear()
        out.backward(torch.ones_like(out))
    return [(len(addresses), len(set(addresses))) for addresses in (forward, seen)]


@pytest.mark.parametrize("mode", ["ring", "zigzag"])
def test_a_ring_receives_into_the_same_buffers(pools, mode):
    """Not into a new one at each hop: on a GPU the allocator would get each back late, as another stream used it.

    On 4 ranks: k and v in 3 hops, into two buffers; in backward again, with their gradients in 4 hops, into a third.
    """
    assert pools(4).run(buffers_on_rank, mode) == [[(3, 2), (7, 3)]] * 4


def test_peak_memory_of_each_mode(pools):
    """With s/n fixed, 4 and 8 ranks need the same with ring, zigzag and Ulysses; with the all-gather it grows."""
    modes, tokens = ["zigzag", "ring", "ulysses", "allgather"], 32
    by_world = [pools(world).run(peaks_on_rank, modes, tokens)[-1] for world in (2, 4, 8)]  # the last has work each hop
    for i, mode in enumerate(modes):
        forward, both = ([peaks[i][j] for peaks in by_world] for j in (0, 1))
        if mode == "allgather":
            kv = 2 * tokens * 8 * 4 * 4
            assert all(b - a >= more * kv for (a, b), more in zip(pairwise(forward), (2, 4), strict=True)), forward
            assert both[2] > 1.5 * both[1] > 2 * both[0], both
        else:
            for few, some, many in (forward, both):
                assert few <= some and many == pytest.approx(some, rel=0.02), (mode, few, some, many)


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.picked(0, 2, 4, 6, 7, 9, 10, 11)
@pytest.mark.parametrize(
    "fault, cp, base, layout, complaint",
    [
        ("not_summed_over_cp", 2, {}, dict(zero=0), "the gradient of"),
        ("not_summed_over_cp", 2, {}, dict(zero=1), "the gradient of"),
        ("positions_ignored", 2, {}, {}, "the loss"),
        ("positions_ignored", 2, {}, dict(cp_mode="ring"), "the loss"),
        ("tables_in_bf16", 2, dict(dtype="fp32"), {}, "the loss|the gradient of"),
        ("wrong_source", 2, {}, {}, "the loss"),
        ("wrong_source", 3, THIRDS, dict(cp_mode="ring"), "the loss"),
        ("kv_of_hop_0_in_backward", 2, {}, dict(cp_mode="ring"), "the gradient of"),
        ("no_final_rotation", 2, {}, {}, "the gradient of"),
        ("no_final_rotation", 3, THIRDS, dict(cp_mode="ring"), "the gradient of"),
        ("labels_shifted_after_the_cut", 2, {}, dict(cp_mode="ring"), "the loss"),
        ("loss_summed_over_dp_only", 2, {}, {}, "the loss"),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_faults_are_noticed(pools, tmp_path, fault, cp, base, layout, complaint, optimizer):
    """What peers got wrong makes the comparison with one device fail, whatever the optimizer hides."""
    options = SMALL | BASE | base | dict(optimizer=optimizer, steps=2)
    ours = options | dict(cp=cp, tp=1) | layout | dict(out=str(tmp_path / "run"))
    bound = bounds.RUN[options["dtype"]]
    found = pools(cp).run(
        equivalence.complaint_on_rank,
        equivalence.on_rank,
        STEP,
        ours,
        str(equivalence.reference(options)),
        bound,
        [fault],
    )
    assert any(re.search(f"({complaint}).* differs by", text) for text in found), found


@pytest.mark.numerics
@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
def test_a_log_sum_exp_in_bf16_is_noticed(pools, mode):
    """The law of precision sees it, first of all in dq."""
    ratios = precision(pools, 4, [mode], "lse_in_bf16")[mode]
    assert ratios[1] == max(ratios) > 1.5 * bounds.ONE_MORE_ROUNDING, ratios


@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
def test_repeated_key_value_heads_are_noticed(pools, mode):
    """Right numbers at heads / kv_heads times the price: only the law of bytes sees it."""
    shape = (2, 16, 8, 2, 6)
    (found,) = pools(2).run(attention_on_rank, [mode], shape, torch.float64, "kv_heads_repeated_before_the_ring")[0]
    for mine, theirs in zip(found, on_one_device(shape, torch.float64, torch.float64), strict=True):
        assert difference(mine, theirs) < bounds.FP64
    dtype = torch.float32
    for sent in pools(2).run(bytes_on_rank, [(mode, 2, dtype)], "kv_heads_repeated_before_the_ring"):
        forward, backward = docstring_bytes(mode, 2, 2, dtype)
        assert sent != [(forward, backward)]
        assert {op: n / 4 for op, n in sent[0][0].items()} == forward


@pytest.mark.parametrize("world", [2, 4])
def test_contiguous_chunks_are_noticed(pools, world):
    """Right numbers, but the last rank does most of the work: only the law of work sees it."""
    shape = (2, 4 * world, 8, 2, 6)
    (found,) = pools(world).run(attention_on_rank, ["zigzag"], shape, torch.float64, "contiguous_chunks")[0]
    for mine, theirs in zip(found, on_one_device(shape, torch.float64, torch.float64), strict=True):
        assert difference(mine, theirs) < bounds.FP64
    with pytest.raises(AssertionError):
        require_balance(pools, world, "zigzag", "contiguous_chunks")


# --- the trainer around it -------------------------------------------------------------------------------------------


def text_of(model: Decoder, positions: Tensor, mesh: Mesh | SimpleNamespace) -> str:
    """Fifteen bytes that the model says after "def "."""
    return generate(partial(look_through, model, positions), model, positions, mesh, "def ", 15, 0)


def text_on_rank(options: dict) -> str:
    """Runs on every rank: sample from a cut model that has not been trained, so that every token is likely."""
    config, world = step05.Config(**options), torch.distributed.get_world_size()
    with open_mesh({"dp": 1, "cp": world // config.tp, "tp": config.tp}, CPU, "gloo") as mesh:
        return text_of(*build(config, mesh), mesh)


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize("layout", [dict(tp=1), dict(tp=2), dict(tp=1, cp_mode="ulysses")], ids=label)
def test_generates_step01s_text(pools, layout):
    """Logits put together from all ranks' tokens give the same text on every rank."""
    with torch.device("meta"):
        model = Decoder(step01.Config(**SMALL).model_config())
    materialize(model, 0, CPU, torch.float64)
    expected = text_of(model, torch.arange(SMALL["seq_len"]), SimpleNamespace(groups={}))
    assert pools(4).run(text_on_rank, SMALL | layout) == [expected] * 4


def interrupted_on_rank(options: dict) -> int:
    """Runs on every rank: train; one rank is told to stop in step 2. Returns the number of steps done."""

    def observe(step, _):
        if step == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return len(step05.train(step05.Config(**options), observe).history)


@pytest.mark.parametrize("layout", [dict(cp=4), dict(cp=2, tp=2)], ids=label)
def test_a_signal_to_one_rank_stops_all(pools, tmp_path, layout):
    """All ranks, of every dimension, agree on the last step, and save together."""
    options = SMALL | BASE | dict(steps=6, out=str(tmp_path / "run")) | layout
    done = pools(4).run(interrupted_on_rank, options)
    assert len(set(done)) == 1 and done[0] < 6
    assert (tmp_path / "run" / "checkpoints" / f"step-{done[0]:08d}" / "meta.json").exists()


@pytest.mark.parametrize(
    "flags, world, message",
    [
        (dict(cp=8), 4, r"--cp 8 does not divide the 4 ranks that were started: use one of \[1, 2, 4\]"),
        (dict(cp=3), 4, r"--cp 3 does not divide the 4 ranks that were started: use one of \[1, 2, 4\]"),
        (dict(cp=-1), 2, r"--cp -1 does not divide the 2 ranks that were started: use one of \[1, 2\]"),
        (dict(cp=4, seq_len=20), 4, r"--seq-len 20 .* 8 chunks of --cp 4 --cp-mode zigzag: use a multiple of 8"),
        (dict(cp=4, seq_len=20, cp_mode="allgather"), 4, r"--seq-len 20 .* allgather: use a multiple of 8"),
        (dict(cp=4, seq_len=18, cp_mode="ring"), 4, r"--seq-len 18 .* 4 chunks .* ring: use a multiple of 4"),
        (dict(cp=4, seq_len=18, cp_mode="ulysses"), 4, r"--seq-len 18 .* ulysses: use a multiple of 4"),
        (
            dict(cp=2, tp=2, seq_len=18, cp_mode="ring"),
            4,
            r"the 9 tokens of a --cp 2 rank cannot be split over --tp 2: use --no-sp, or --seq-len a multiple of 4",
        ),
        (
            dict(cp=8, cp_mode="ulysses"),
            8,
            r"--cp-mode ulysses .* --cp 8 .* 4 query and 2 key/value heads .* \[1, 2, 4\]",
        ),
        (
            dict(cp=4, tp=2, cp_mode="ulysses"),
            8,
            r"--cp-mode ulysses .* --cp 4 .* 2 query and 1 key/value heads .* \[1, 2\]",
        ),
        (
            dict(cp=2, dim=36, n_heads=6, n_kv_heads=3, cp_mode="ulysses"),
            2,
            r"--cp-mode ulysses .* 6 query and 3 key/value heads .* \[1, 3, 6\]",
        ),
        (dict(cp=2, global_batch_size=5), 4, r"--global-batch-size 5 cannot be dealt to 2 ranks"),
    ],
)
def test_bad_flags_are_refused(flags, world, message):
    """With the flag and the legal values, before any process group."""
    with pytest.raises(UserError, match=message):
        check_cp(step05.Config(**SMALL | dict(tp=1) | flags), world)


def test_a_rank_refuses_before_it_communicates(pools):
    """Through `train`, on every rank alike."""
    with pytest.raises(RankError, match=r"(?s)also \[1\].*--cp 3 does not divide the 2 ranks"):
        pools(2).run(column_on_rank, SMALL | dict(cp=3))


@pytest.mark.parametrize("seq_len, layout", [(18, dict(cp_mode="ring", sp=False)), (20, dict(cp_mode="zigzag"))])
def test_what_the_messages_propose_works(pools, seq_len, layout):
    """Nine tokens a rank without sequence parallelism; chunks of five tokens."""
    check(pools(4), STEP, BASE | dict(seq_len=seq_len), dict(cp=2, tp=2) | layout)
