"""Experts: equal to one process under every layout; balance, capacity, traffic, FLOPs; faults are noticed.

Every equivalence is in fp64 to 1e-10 against step07 in one process, on every rank: losses, norms, gathered gradients
and parameters. That process itself is checked against a loop over tokens, and without experts against step01.
"""

import re
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from math import comb, prod
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import step01_single_gpu as step01
import step04_tp_sp as step04
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import UserError, moe
from common.comm import Mesh
from common.layout import materialize
from common.model import Decoder
from services import evaluation, plots
from services.checks import check_ep
from services.devices import choose_dtype
from services.launch import open_mesh
from services.memory import MemoryTimeline
from services.run import Run
from services.state import held
from services.tables import bytes_of
from services.variants import Variants
from tests import bounds, equivalence, faults
from tests.bench import expert_load
from tests.equivalence import SMALL, difference, label
from tests.pool import RankError, with_figures
from theory.flops import flops_per_token, moe_flops_per_token
from theory.memory import cp_activation_bytes, expert_activation_bytes
from theory.traffic import ep_bytes, expert_tp_bytes, mean_rows, moe_traffic, tp_traffic

STEP = "step07_moe_ep"
CPU = torch.device("cpu")
MOE = dict(n_layers=2, experts=8, experts_per_token=2, expert_dim=12, balance_weight=0.5, z_loss=0.1)
BASE = MOE | dict(optimizer="sgd", global_batch_size=8, micro_batch_size=2, pp=1)  # tests/test_5d.py has pp


def check(pool, base: dict, layout: dict, patch: str = "", fault: str = "") -> float:
    """`equivalence.check` against step07 in one process."""
    return equivalence.check(pool, STEP, BASE | base, dict(tp=1, cp=1) | layout, patch, fault, step07)


# --- equal to one process --------------------------------------------------------------------------------------------


@pytest.mark.picked(6, 9)
@pytest.mark.parametrize(
    "optimizer, layout",
    [
        ("sgd", dict(ep=4, zero=0)),
        ("adamw", dict(ep=4, zero=1, ep_mode="allgather")),
        ("sgd", dict(ep=2, zero=2)),
        ("adamw", dict(ep=2, zero=3)),
        ("sgd", dict(ep=2, tp=2, zero=0)),
        ("adamw", dict(ep=2, tp=2, sp=False, zero=1)),
        ("sgd", dict(ep=2, tp=2, zero=3, ep_mode="allgather")),
        ("adamw", dict(ep=2, cp=2, tp=2, zero=3)),
        ("sgd", dict(ep=2, cp=4, zero=0)),
        ("adamw", dict(ep=4, cp=2, cp_mode="ring", zero=2)),
        ("sgd", dict(ep=1, cp=2, tp=2, zero=2)),
        ("adamw", dict(ep=1, tp=2, sp=False, zero=0)),
        ("sgd", dict(ep=2, zero=0, sync="naive")),
    ],
    ids=lambda flags: flags if isinstance(flags, str) else label(flags),
)
def test_equals_one_process(pools, optimizer, layout):
    """ep x dp, ep x cp, ep x tp with and without SP, all together, in every stage of ZeRO, both ways to exchange."""
    check(pools(4), dict(optimizer=optimizer), layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [dict(ep=8, zero=1), dict(ep=4, tp=2, zero=3), dict(ep=4, cp=2, tp=2, zero=0), dict(ep=2, cp=2, tp=2, zero=2)],
    ids=label,
)
def test_equals_one_process_on_eight_ranks(pools, layout):
    """One expert to a rank, and dp x cp x tp x ep."""
    check(pools(8), dict(micro_batch_size=1), layout)


@pytest.mark.picked(0, 9, 12, 15)
@pytest.mark.parametrize(
    "base, layout",
    [
        (dict(experts_per_token=1), dict(ep=4, zero=1)),
        (dict(experts_per_token=3, expert_groups=4, groups_per_token=2), dict(ep=4, zero=0)),
        (dict(experts_per_token=8), dict(ep=2, tp=2)),
        (dict(shared_experts=2), dict(ep=2, tp=2, zero=3)),
        (dict(shared_experts=1), dict(ep=2, tp=2, sp=False, zero=0)),
        (dict(n_layers=3, moe_every=2), dict(ep=2, cp=2, tp=2, zero=2)),
        (dict(n_layers=3, dense_layers=2, tied=True), dict(ep=4, zero=3)),
        (dict(expert_dim=0, experts=6, balance="none", z_loss=0.0), dict(ep=2, cp=2)),
        (dict(balance="bias", bias_speed=0.01, optimizer="adamw"), dict(ep=2, tp=2)),
        (dict(balance="bias", bias_speed=0.01), dict(ep=2, cp=2, zero=3)),
        *((dict(capacity_factor=factor), dict(ep=2, cp=2, tp=2)) for factor in (0.5, 1.0)),
        (dict(capacity_factor=1.0, micro_batch_size=1), dict(ep=2, tp=2, sp=False, zero=0)),
        (dict(capacity_factor=1.25, balance="none"), dict(ep=4, cp=4, cp_mode="ulysses")),
        (dict(recompute="full"), dict(ep=2, tp=2, zero=3)),
        (dict(recompute="selective", capacity_factor=1.0), dict(ep=2, cp=2, zero=2)),
        (dict(grad_clip=0.0, micro_batch_size=1), dict(ep=4, zero=2)),
    ],
    ids=label,
)
def test_equals_one_process_for_every_kind_of_model(pools, base, layout):
    """One expert a token to all; groups; shared experts; dense layers between; all kinds of balance; recomputation."""
    check(pools(4), base, layout)


@pytest.mark.picked(1, 3)
@pytest.mark.parametrize(
    "layout",
    [
        dict(ep=4, zero=0),
        dict(ep=4, zero=3, cp=2),
        dict(ep=2, tp=2, zero=2),
        dict(ep=2, tp=2, sp=False, zero=1),
        dict(ep=4, zero=1, ep_mode="allgather"),
    ],
    ids=label,
)
def test_equals_one_process_where_ranks_have_no_token(pools, layout):
    """All tokens go to three of eight experts: of four ranks, two get no token, and one has an expert without."""
    check(pools(4), {}, layout, "three_experts")


def test_equals_one_process_with_uneven_targets(pools, uneven_data):
    """Micro-batches with few or no targets still have a balance loss."""
    check(pools(4), dict(dataset=uneven_data, micro_batch_size=1), dict(ep=2, cp=2, zero=1))


@pytest.mark.picked(1)
@pytest.mark.parametrize("layout", [dict(ep=4, zero=0), dict(ep=2, tp=2, zero=3)], ids=label)
def test_equals_one_process_with_frozen_parameters(pools, layout):
    """Experts and a router that do not train get no gradient and stay."""
    check(pools(4), {}, layout, "frozen_experts")


@pytest.mark.picked(0)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_equals_one_process_with_weight_gradients_put_off(pools, recompute):
    """What W adds to a gradient reaches the parameter itself, although recomputation hands backward copies of it."""
    check(pools(2), dict(recompute=recompute), dict(ep=2, zero=0, schedule="zb-h1"))


@pytest.mark.picked(2)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("layout", [dict(ep=4), dict(ep=2, tp=2), dict(ep=2, cp=2, ep_mode="allgather")], ids=label)
def test_fp32_drifts_by_rounding_only(pools, layout, recompute):
    """With the grouped matmul: fp32 gradients, losses and parameters stay within 1e-5 of one process."""
    check(pools(4), dict(dtype="fp32", lr=0.01, recompute=recompute), layout)


def test_bf16_stays_near(pools, tmp_path):
    """bf16 with ep 2 is within 0.02 nats of one process' bf16 run over 6 steps, on both ranks alike."""
    options = SMALL | BASE | dict(optimizer="adamw", dtype="bf16", lr=0.01, steps=6, recompute="selective")
    (expected,) = columns_on_rank(options | dict(out=str(tmp_path / "one")), "loss")
    layout = dict(ep=2, tp=1, cp=1, out=str(tmp_path / "two"))
    (first,), (second,) = pools(2).run(columns_on_rank, options | layout, "loss")
    assert first == second
    assert max(abs(a - b) for a, b in zip(first, expected, strict=True)) < 0.02


@pytest.mark.numerics
@pytest.mark.parametrize("base", [dict(experts=0), dict(experts=0, recompute="full", tied=True)], ids=label)
def test_without_experts_it_is_step01(tmp_path, base):
    """But for the rounding of a loss that is multiplied instead of divided."""
    options, base = SMALL | dict(n_layers=2, grad_clip=0.0, micro_batch_size=6), dict(base)
    experts = dict(experts=base.pop("experts"))
    runs = [
        step01.train(step01.Config(**options | base, out=str(tmp_path / "one"))),
        step07.train(step07.Config(**options | base | experts, zero=0, out=str(tmp_path / "seven"))),
    ]
    rows = [[row["loss"] for row in run.history] for run in runs]
    assert rows[0] == pytest.approx(rows[1], rel=bounds.RUN["fp64"])
    for ours, theirs in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        assert difference(ours.detach(), theirs.detach()) < bounds.RUN["fp64"]


def columns_on_rank(options: dict, *keys: str) -> list[list]:
    """Runs on every rank: train; returns columns of the metrics."""
    with equivalence.without_instruments():
        history = step07.train(step07.Config(**options)).history
    return [[row[key] for row in history if key in row] for key in keys]


NUMBERS = ("expert_load", "drop_rate", "router_entropy", "balance_loss", "validation_loss")


def test_metrics_and_validation_are_one_processes(pools, tmp_path, uneven_data):
    """Loads, drops, entropy, balance loss and validation loss do not depend on layout or recomputation."""
    options = SMALL | BASE | dict(eval_every=2, eval_sequences=6, capacity_factor=1.0, dataset=uneven_data, steps=2)
    expected = columns_on_rank(options | dict(out=str(tmp_path / "one")), *NUMBERS)
    assert 0 < expected[1][0] < 1 and expected[3][0] > 1
    for load in expected[0][0].values():
        assert sum(load) == pytest.approx(1)
    for layout in (dict(ep=2, tp=2), dict(ep=2, cp=2, tp=1, recompute="full"), dict(ep=4, tp=1), dict(tp=2, sp=False)):
        more = dict(cp=1) | layout | dict(out=str(tmp_path / "four"))
        for found in pools(4).run(columns_on_rank, options | more, *NUMBERS):
            for name, mine, theirs in zip(NUMBERS, found, expected, strict=True):
                if name == "expert_load":
                    mine, theirs = (
                        [x for row in rows for load in row.values() for x in load] for rows in (mine, theirs)
                    )
                assert mine == pytest.approx(theirs, rel=1e-10), (layout, name)


def test_resumes_under_other_layouts(pools, tmp_path):
    """With biases: steps 1-2 with ep 4, 3-4 in one process, 5-6 with ep 2 x tp 2, ZeRO 3."""
    base = dict(optimizer="adamw", balance="bias", bias_speed=0.05, steps=6, save_every=100)
    options = SMALL | BASE | base
    whole = step07.train(step07.Config(**options, out=str(tmp_path / "whole"))).history
    a, b, c = (str(tmp_path / name) for name in "abc")
    first = dict(tp=1, cp=1, ep=4, stop_after=2, out=a)
    losses = pools(4).run(columns_on_rank, options | first, "loss")[0][0]
    rows = step07.train(step07.Config(**options | dict(resume=a, stop_after=4, out=b))).history
    losses += [row["loss"] for row in rows]
    last = dict(tp=2, cp=1, ep=2, zero=3, resume=b, out=c)
    losses += pools(4).run(columns_on_rank, options | last, "loss")[0][0]
    assert losses == pytest.approx([row["loss"] for row in whole], rel=1e-10)


# --- one layer against a loop over tokens ----------------------------------------------------------------------------


def balance_of(config: step07.Config) -> moe.Balance:
    """How the flags want the experts to be kept busy, on a CPU."""
    run = Variants()
    run.config, run.shape, run.device = config, config.model_config(), CPU
    return run.make_balance()


def build_layer(seed: int = 0, **flags) -> moe.MoE:
    """An MoE layer in fp64 with random weights, biases too, whose losses have scale 1."""
    config = step07.Config(**SMALL | BASE | dict(z_loss=0.3) | flags)
    m = config.model_config()
    layer = moe.MoE(m, 0, balance_of(config)).double()
    generator = torch.Generator().manual_seed(seed)
    for param in layer.parameters():
        param.data.normal_(0, 0.4, generator=generator)
    layer.router.bias = torch.empty(m.experts).normal_(0, 0.05, generator=generator)
    return layer


def oracle(layer: moe.MoE, x: Tensor) -> tuple[Tensor, Tensor, list[list[int]], int]:
    """x [batch, seq, dim] -> (out, balance and z-loss, each token's experts, dropped choices), token by token."""
    m, balance = layer.m, layer.balance
    k, experts = m.experts_per_token, layer.experts
    flat, outs, went, dropped = x.flatten(0, 1), [], [], 0
    limit = -(-balance.capacity_factor * len(flat) * k // m.experts) if balance.capacity_factor else len(flat)
    taken, p_sum, z = [0] * m.experts, 0, 0
    for token in flat:
        logits = layer.router.weight @ token
        p = logits.exp() / logits.exp().sum()
        z = z + logits.exp().sum().log() ** 2 / len(flat)
        p_sum = p_sum + p / len(flat)
        scores = (p + layer.router.bias).tolist()
        allowed = range(m.experts)
        if 0 < m.groups_per_token < m.expert_groups:
            width = m.experts // m.expert_groups
            groups = [range(g * width, (g + 1) * width) for g in range(m.expert_groups)]
            worth = [sum(sorted((scores[e] for e in g), reverse=True)[: k // m.groups_per_token]) for g in groups]
            best = sorted(range(len(groups)), key=lambda g: -worth[g])[: m.groups_per_token]
            allowed = [e for g in best for e in groups[g]]
        mine = sorted(allowed, key=lambda e: -scores[e])[:k]
        went.append(mine)
        out = torch.zeros_like(token)
        for e in mine:
            taken[e] += 1
            if taken[e] > limit:
                dropped += 1
                continue
            hidden = F.silu(experts.gate_proj.weight[e] @ token) * (experts.up_proj.weight[e] @ token)
            gate = p[e] / sum(p[other] for other in mine) if k > 1 else p[e]
            out = out + gate * (experts.down_proj.weight[e] @ hidden)
        if layer.shared_experts is not None:
            s = layer.shared_experts
            out = out + s.down_proj.weight @ (F.silu(s.gate_proj.weight @ token) * (s.up_proj.weight @ token))
        outs.append(out)
    choices = torch.tensor(went).flatten()
    fraction = torch.stack([(choices == e).double().mean() for e in range(m.experts)])
    loss = balance.weight * m.experts * (fraction * p_sum).sum() * (balance.kind == "loss")
    return torch.stack(outs).view_as(x), loss + balance.z_loss * z, went, dropped


@pytest.mark.numerics
@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(experts_per_token=1),
        dict(experts_per_token=3, shared_experts=2),
        dict(experts_per_token=4, expert_groups=4, groups_per_token=2),
        dict(experts_per_token=2, expert_groups=2, groups_per_token=1, balance="none"),
        dict(capacity_factor=0.7),
        dict(capacity_factor=0.4, experts_per_token=3, balance="bias"),
    ],
    ids=label,
)
def test_layer_is_a_loop_over_tokens(flags):
    """Output, gradients of input and weights with the balance and z-losses, counts: fp64, 1e-10, autograd's own."""
    layer = build_layer(**flags)
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(2, 16, 32, dtype=torch.float64, generator=generator) for _ in range(2))
    params = dict(layer.named_parameters())
    leaf = x.clone().requires_grad_()
    out, loss, went, dropped = oracle(layer, leaf)
    expected = torch.autograd.grad((out * weight).sum() + loss, [leaf, *params.values()], allow_unused=True)

    mine = x.clone().requires_grad_()
    found = layer(mine)
    (found * weight).sum().backward()
    assert difference(found.detach(), out.detach()) < 1e-10
    for name, ours, theirs in zip(
        ("x", *params), (mine.grad, *(p.grad for p in params.values())), expected, strict=True
    ):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert difference(ours, theirs) < 1e-10, name
    counted = layer.balance.counted[0]
    assert counted[:-3].tolist() == [sum(e in mine for mine in went) for e in range(8)]
    assert counted[-3] == dropped and (dropped > 0) == ("capacity_factor" in flags)


def test_an_evaluation_drops_and_counts_nothing():
    """Without gradients capacity does not bind, and metrics do not grow."""
    layer, free = build_layer(capacity_factor=0.4), build_layer()
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(layer(x), free(x))
    assert not layer.balance.counted.any()


def test_capacity_keeps_the_first():
    """By hand: expert 0 is wanted by four choices, of which two fit."""
    chosen = torch.tensor([[[0, 1], [2, 0]], [[0, 2], [1, 0]]])
    kept = moe.within_capacity(chosen, 3, 2)
    assert kept.tolist() == [[[True, True], [True, True]], [[False, True], [True, False]]]


def test_select_stays_within_groups():
    """Experts come from at most M groups, and from the best ones."""
    m = moe.MoEConfig(32, 1, 4, 2, 48, 259, 16, experts=12, experts_per_token=4, expert_groups=4, groups_per_token=2)
    scores = torch.rand(200, 12, generator=torch.Generator().manual_seed(0))
    for row, chosen in zip(scores, moe.select(scores, m), strict=True):
        assert len(set(chosen.tolist())) == 4 and len({e // 3 for e in chosen.tolist()}) <= 2
        worth = row.view(4, 3).topk(2).values.sum(-1).topk(2).indices.tolist()
        assert {e // 3 for e in chosen.tolist()} <= set(worth)


COUNTS = [[5, 0, 3], [0, 0, 8], [0, 0, 0], [8, 0, 0]]


@pytest.mark.numerics
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [16, 6])
def test_grouped_matmul_is_the_loop(counts, dtype, width):
    """Forward and backward, with experts that have no row, or no rows at all, and sizes the kernel does not take."""
    generator, n = torch.Generator().manual_seed(3), sum(counts)
    x, w, grad = (torch.randn(s, generator=generator).to(dtype) for s in ((n, width), (3, 8, width), (n, 8)))
    counts = torch.tensor(counts)
    x.requires_grad_()
    w.requires_grad_()
    out = moe.GroupedLinear.apply(x, w, counts)
    out.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    parts = [rows @ matrix.T for rows, matrix in zip(wide[0].split(counts.tolist()), wide[1], strict=True)]
    expected = torch.cat(parts)
    expected.backward(grad.double())
    assert out.dtype == dtype and out.shape == expected.shape
    for mine, theirs in ((out.detach(), expected.detach()), (x.grad, wide[0].grad), (w.grad, wide[1].grad)):
        assert difference(mine, theirs) < bounds.products(dtype, 16)  # 16 numbers at most are added
    assert not w.grad[counts == 0].any()


# --- balance ---------------------------------------------------------------------------------------------------------


def test_bias_moves_against_the_load():
    """By hand: experts above the mean go down by the speed, those below go up, and the losses leave it alone."""
    layer = build_layer(balance="bias", bias_speed=0.25, experts=4)
    with torch.device("meta"):
        model = Decoder(layer.m)
    model.model.layers["0"].mlp = layer
    layer.router.bias.zero_()
    counted = torch.tensor([[5.0, 1.0, 2.0, 0.0, 0, 0, 0]] * 2, dtype=torch.float64)
    layer.balance.adjust(model, counted)
    assert layer.router.bias.tolist() == [-0.25, 0.25, 0.0, 0.25]


def busiest(tmp_path: Path, name: str, **flags) -> float:
    """Train a small model a little; how many times its share the busiest expert of any layer has at the end."""
    options = SMALL | MOE | dict(dtype="fp32", steps=40, warmup_steps=5, global_batch_size=16, micro_batch_size=8)
    options |= dict(z_loss=0.0, lr=0.02, seq_len=32, out=str(tmp_path / name), optimizer="adamw", experts_per_token=1)
    rows = step07.train(step07.Config(**options | flags)).history[-5:]
    return max(sum(row["expert_load"][n][e] for row in rows) / 5 * 8 for n in ("0", "1") for e in range(8))


def test_balance_keeps_experts_busy(tmp_path):
    """Both ways bring the busiest expert nearer to its share than nothing does; the figure shows it."""
    none = busiest(tmp_path, "none", balance="none")
    loss = with_figures(partial(busiest, tmp_path, "loss", balance="loss", balance_weight=0.05))
    bias = busiest(tmp_path, "bias", balance="bias", bias_speed=0.02)
    assert none > 3 and loss < 0.7 * none and bias < 0.7 * none, (none, loss, bias)
    runs = {name: tmp_path / name for name in ("none", "loss", "bias")}
    with_figures(lambda: plots.expert_load(runs, tmp_path / "all.png"))
    assert (tmp_path / "all.png").stat().st_size > 10_000 and (tmp_path / "loss" / "expert_load.png").exists()


@pytest.mark.numerics
def test_experts_are_compared_by_what_they_make_of_the_same_tokens():
    """Equal up to a rotation and a factor: 1. Unrelated: near 0. Experts with one's weights: 1, and nothing counted."""
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4000, 16, generator=draw, dtype=torch.float64) for _ in range(2))
    turned = 3 * a @ torch.linalg.qr(torch.randn(16, 16, generator=draw, dtype=torch.float64))[0] + 5
    assert expert_load.linear_cka(a, turned) == pytest.approx(1) and expert_load.linear_cka(a, b) < 0.01
    config = step07.Config(**SMALL | BASE | dict(tp=1, cp=1))
    with torch.device("meta"):
        model, m = Decoder(config.model_config()), config.model_config()
        balance = moe.Balance(m, 1, CPU)
        moe.add_experts(model, balance)
    materialize(model, 0, CPU, torch.float64)
    tokens = torch.randint(m.vocab_size, (2, m.seq_len), generator=draw)
    first = expert_load.similarities(model, tokens)
    assert first.keys() == {"0", "1"} and max(first.values()) < 0.9
    for layer in model.model.layers["1"].mlp.experts.children():
        layer.weight.data[:] = layer.weight.data[:1]
    then = expert_load.similarities(model, tokens)
    assert then["1"] == pytest.approx(1) and then["0"] == pytest.approx(first["0"])
    assert not balance.counted.any() and not any(p.grad is not None for p in model.parameters())


# --- what it costs ---------------------------------------------------------------------------------------------------


def build(config: step07.Config, mesh: Mesh, ep: int) -> tuple[Decoder, Tensor]:
    """The model as step07 cuts it, with its first values, and the positions of this rank's tokens."""
    with torch.device("meta"):
        model = Decoder(config.model_config())
        moe.add_experts(model, balance_of(config))
    step07.shard_experts(model, mesh, config, ep)
    step04.shard_tensors(model, mesh, config.sp, config.tp_overlap)
    own = step05.shard_context(model, mesh, config.cp_mode)
    step01.wrap_layers(model, config)
    materialize(model, config.seed, CPU, choose_dtype(config.dtype, CPU))
    return model, own


@pytest.mark.numerics
@pytest.mark.parametrize("threads", [1, 4])
def test_rows_are_added_in_a_fixed_order(threads):
    """The same bits, however often, forward and backward, where several rows have the same place."""
    generator = torch.Generator().manual_seed(0)
    rows, x = (torch.randn(n, 128, generator=generator, requires_grad=True) for n in (4096, 256))
    place, grad = torch.randint(0, 256, (4096,), generator=generator), torch.randn(4096, 128, generator=generator)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        sums = [moe.add_rows(rows, place, 256, torch.float32) for _ in range(10)]
        grads = [torch.autograd.grad(moe.TakeRows.apply(x, place), x, grad)[0] for _ in range(10)]
    finally:
        torch.set_num_threads(before)
    for one, *others in (sums, grads):
        assert all(torch.equal(one, other) for other in others)
    assert difference(sums[0], torch.zeros(256, 128).index_add(0, place, rows)) < bounds.roundings(torch.float32, 64)


def test_an_overflow_moves_no_bias(tmp_path):
    """fp16: a step that is left out, as its gradient is not finite, leaves the routers' biases alone, too."""
    base = dict(model="debug", experts=4, dtype="fp16", balance="bias", steps=1, eval_every=0, device="cpu")
    config = step07.Config(**base, global_batch_size=4, micro_batch_size=2, out=str(tmp_path / "run"))

    def biases(observe=None) -> Tensor:
        model = step07.train(config, observe).model
        return torch.stack([layer.mlp.router.bias for layer in model.model.layers.values()])

    def overflow(step, optimizer):
        next(iter(optimizer.gradients().values())).view(-1)[0] = torch.inf

    assert biases().abs().max() > 0 and biases(overflow).abs().max() == 0


def exchange_on_rank(options: dict, ep: int, fault: str = "") -> tuple[dict, dict, list[int]]:
    """Runs on every rank: one layer forward and backward; bytes sent, bytes by formula from the routes, rows sent."""
    config = step07.Config(**options)
    m, dtype, world = config.model_config(), choose_dtype(config.dtype, CPU), torch.distributed.get_world_size()
    sizes = {"dp": world // config.cp // config.tp, "cp": config.cp, "tp": config.tp}
    with open_mesh(sizes, CPU, "gloo") as mesh, faults.applied(fault):
        model, own = build(config, mesh, ep)
        layer = model.model.layers["0"].mlp
        routes, seen, find_route = [], [], step07.find_route

        def watch(*args):
            routes.append(find_route(*args))
            return routes[-1]

        layer.experts.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        local = len(own) // (config.tp if config.sp else 1)
        seed = mesh.rank if config.sp else mesh.rank // config.tp
        shape = (config.micro_batch_size, local, m.dim)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()
        mesh.ledger.take()
        with mock.patch.object(step07, "find_route", watch):
            layer(x).sum().backward()
        taken = mesh.ledger.take()
        sent = taken["traffic"]
        if routes:  # rows and gates in one message there, rows home, and the same back; one exchange of counts
            assert taken["calls"]["ep"] == {"all_to_all": 4, "all_to_all (counts)": 1}
        tokens, e, own_rank = config.micro_batch_size * local, dtype.itemsize, mesh["ep"].rank
        expected: dict[str, dict[str, float]] = {}
        others = [0.0, 0.0]
        rows = tokens * ep if config.ep_mode == "allgather" else tokens
        if routes:
            there_and_back = routes[0].sent, routes[0].received
            others = [sum(n for r, n in enumerate(counts) if r != own_rank) for counts in there_and_back]
            rows = seen[0] // (config.tp if config.sp else 1)  # of each tp rank, after filling up
        even = ep == 1 or config.ep_mode == "allgather"
        if ep > 1:
            expected["ep"] = ep_bytes(config, m, tokens, ep, e, *others)
        if config.tp > 1:
            expected["tp"] = expert_tp_bytes(config, m, rows, config.tp, ep, e, even)
        n = mesh["sequence"].size
        if n > 1:
            expected["sequence"] = dict(all_gather=(n - 1) * tokens * m.experts_per_token * 4)
        return sent, expected, routes[0].sent if routes else []


@pytest.mark.picked(0, 5, 6, 8, 11, 13, 16)
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize(
    "flags, ep",
    [
        (dict(tp=1), 4),
        (dict(tp=1), 2),
        (dict(tp=1, cp=2), 4),
        (dict(tp=1, ep_mode="allgather"), 4),
        (dict(tp=2), 2),
        (dict(tp=2, sp=False), 2),
        (dict(tp=2, ep_mode="allgather"), 2),
        (dict(tp=2, cp=2), 1),
        (dict(tp=2, cp=2), 2),
    ],
    ids=lambda value: label(value) if isinstance(value, dict) else f"ep{value}",
)
def test_bytes_of_a_layer_follow_from_its_routing(pools, flags, ep, dtype):
    """The ledger's bytes equal the docstring's formulas, given how many rows went where, on every rank."""
    options = SMALL | BASE | dict(cp=1, dtype=dtype) | flags
    for sent, expected, _ in pools(4).run(exchange_on_rank, options, ep):
        assert sent.keys() == expected.keys()
        for dim, operations in expected.items():
            assert sent[dim] == pytest.approx(operations, rel=1e-12), dim


def order_on_rank(options: dict) -> list[str]:
    """Runs on every rank: what happens one after another in a layer's forward and backward."""
    config, seen, leave, arrive = step07.Config(**options), [], step07.Message.leave, step07.Message.arrive

    def leaving(self, rows, gates, back=False):
        seen.append("leave")
        return leave(self, rows, gates, back)

    def arriving(self, tie):
        seen.append("arrive")
        return arrive(self, tie)

    with open_mesh({"dp": 2, "cp": 1, "tp": 1}, CPU, "gloo") as mesh:
        model, _ = build(config, mesh, 2)
        layer = model.model.layers["0"].mlp
        layer.shared_experts.register_forward_hook(lambda *_: seen.append("shared"))
        layer.shared_experts.down_proj.weight.register_hook(lambda _: seen.append("shared backward"))
        layer.experts.register_forward_hook(lambda *_: seen.append("experts"))
        layer.experts.down_proj.weight.register_hook(lambda _: seen.append("experts backward"))
        x = torch.randn(2, config.seq_len, config.dim, dtype=torch.float64, requires_grad=True)
        with mock.patch.multiple(step07.Message, leave=leaving, arrive=arriving):
            layer(x).sum().backward()
    return seen


def test_shared_experts_compute_while_tokens_travel(pools):
    """Between departure and arrival of the tokens, and in backward between those of their gradients."""
    options = SMALL | BASE | dict(cp=1, tp=1, ep=2, shared_experts=1)
    forward = ["leave", "shared", "arrive", "experts", "leave", "arrive"]
    backward = ["leave", "arrive", "experts backward", "leave", "shared backward", "arrive"]
    assert pools(2).run(order_on_rank, options) == [forward + backward] * 2


def test_groups_save_bytes(pools):
    """With one group a rank, a token that may visit M of them is sent at most M times; without a limit more often."""
    options = SMALL | BASE | dict(experts_per_token=4, cp=1, tp=1, expert_groups=4)
    tokens, bytes_by_limit = 2 * 16, []
    for limit in (1, 2, 0):
        found = pools(4).run(exchange_on_rank, options | dict(groups_per_token=limit) | dict(experts=16), 4)
        assert all(sum(to) <= tokens * (limit or 4) for _, _, to in found)
        bytes_by_limit.append(sum(sent["ep"]["all_to_all"] for sent, _, _ in found))
    assert bytes_by_limit[0] < bytes_by_limit[1] < bytes_by_limit[2]


@pytest.mark.parametrize("experts, k, ep", [(8, 2, 4), (8, 1, 2), (16, 4, 8)])
def test_mean_rows(experts, k, ep):
    """Against a count over all sets of k experts."""
    m = moe.MoEConfig(32, 1, 4, 2, 48, 259, 16, experts=experts, experts_per_token=k)
    sets = [s for s in product(range(experts), repeat=k) if list(s) == sorted(set(s))] if k < 4 else []
    if sets:
        there = sum(len({e // (experts // ep) for e in s} - {0}) for s in sets) / comb(experts, k)
        assert mean_rows(m, 10, ep) == pytest.approx(10 * there)
    assert mean_rows(m, 10, ep) <= 10 * min(k, ep - 1)


@pytest.mark.parametrize("ep", [1, 2])
def test_sums_inside_experts_are_done_again_where_tokens_travel(ep):
    """With recomputation: a further reduce-scatter over tp of the rows that came; else the layer stops before it."""
    config = step07.Config(**SMALL | BASE | dict(tp=2, cp=1, ep=ep))
    m, chunk = config.model_config(), SimpleNamespace(layers=range(2))
    tokens = config.micro_batch_size * m.seq_len // 2
    rows = ep * round(mean_rows(m, tokens, ep) / max(1, ep - 1))
    kinds = [replace(config, recompute=kind) for kind in ("none", "full")]
    once, again = (moe_traffic(c, m, 2, 1, ep, torch.float32, chunk, 5)["tp", "reduce_scatter"] for c in kinds)
    assert again - once == (2 * 5 * rows * m.dim * 4 if ep > 1 else 0)


def step_on_rank(options: dict, ep: int) -> tuple[dict, dict]:
    """Runs on every rank: train a step in which all experts are as likely; traffic, and what step07 predicts."""
    config = step07.Config(**options)
    m, dtype = config.model_config(), choose_dtype(config.dtype, CPU)
    micro_batches = config.global_batch_size // (torch.distributed.get_world_size() // config.cp // config.tp)
    micro_batches //= config.micro_batch_size
    local = replace(m, seq_len=m.seq_len // config.cp)
    predicted = Counter(tp_traffic(config, local, config.tp, dtype, micro_batches))
    chunk = SimpleNamespace(layers=[str(n) for n in range(m.n_layers)])
    predicted.update(moe_traffic(config, m, config.tp, config.cp, ep, dtype, chunk, micro_batches))
    with equivalence.without_instruments():
        return step07.train(config).history[-1]["traffic"], dict(predicted)


@pytest.mark.parametrize(
    "flags, exact",
    [
        (dict(ep=2, tp=2, ep_mode="allgather", n_layers=3, moe_every=2), True),
        (dict(ep=2, tp=2, ep_mode="allgather", sp=False, shared_experts=1), True),
        (dict(ep=4, tp=1, experts_per_token=8), True),
        (dict(ep=2, tp=2, experts_per_token=8), True),
        (dict(ep=4, tp=1), False),
    ],
    ids=str,
)
def test_traffic_of_a_step_is_what_theory_says(pools, tmp_path, flags, exact):
    """Exactly where the rows do not depend on the routing, else within a fifth."""
    options = SMALL | BASE | dict(steps=1, cp=1, out=str(tmp_path / "run")) | flags
    for sent, predicted in pools(4).run(step_on_rank, options, flags["ep"]):
        for (dim, operation), n_bytes in predicted.items():
            assert sent[dim][operation] == pytest.approx(n_bytes, rel=1e-12 if exact else 0.2), (dim, operation)
        assert {(d, op) for d in sent if d in ("ep", "sequence") for op in sent[d]} <= predicted.keys()


def test_flops_are_those_of_the_visited_experts():
    """Counted by PyTorch in a forward pass of one layer with k of E experts, the router and a shared one."""
    layer = build_layer(experts_per_token=3, shared_experts=1)
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    m, dense = layer.m, replace(layer.m, experts=0)
    model, _ = moe_flops_per_token(m, "none")
    mlp = 3 * m.dim * m.ffn_dim
    per_layer = (model - flops_per_token(dense, "none")[0]) / m.n_layers / 3 + 2 * mlp
    assert counter.get_total_flops() == 32 * per_layer


def test_full_recomputation_does_the_experts_again():
    """Its FLOPs exceed those without by the whole forward pass of a layer with experts."""
    m = step07.Config().model_config()
    (model, executed), (same, again) = (moe_flops_per_token(m, mode) for mode in ("none", "full"))
    visited = 3 * m.dim * m.expert_width * 2 + m.dim * 8
    attention = m.dim * (2 * m.dim + 2 * m.n_kv_heads * m.head_dim)
    assert model == same and again - executed == m.n_layers * (2 * (visited + attention) + 4 * m.seq_len * m.dim)


@pytest.mark.parametrize(
    "name, total, used", [("mixtral-8x7b", 46.7e9, 12.9e9), ("deepseek-v3-like", 671e9, 38e9), ("tiny-moe", 2.4e6, 8e5)]
)
def test_presets_have_their_published_size(name, total, used):
    """Parameters in all, and those that a token uses."""
    m = step07.Config(model=name).model_config()
    with torch.device("meta"):
        model = Decoder(m)
        moe.add_experts(model, balance_of(step07.Config(model=name)))
    sizes = {name: prod(p.shape) for name, p in model.named_parameters()}
    assert sum(sizes.values()) == pytest.approx(total, rel=0.02)
    idle = sum(n for name, n in sizes.items() if ".experts." in name) * (1 - m.experts_per_token / m.experts)
    assert sum(sizes.values()) - idle == pytest.approx(used, rel=0.04)


def settled(timeline: MemoryTimeline, predicted: int) -> int:
    """Bytes of activations, once gloo's threads have let go of the tensors of finished collectives. A collective.

    So once all ranks together are near what is predicted for all, or after 20 seconds in any case.
    """
    for _ in range(400):
        live = timeline.live("activations")
        over = torch.tensor(live - 1.05 * predicted)
        torch.distributed.all_reduce(over)
        if over <= 0:
            break
        time.sleep(0.05)
    return live


def saved_on_rank(variants: list[dict]) -> list[tuple[int, int]]:
    """Runs on every rank: for each variant, bytes that a forward pass leaves for backward, predicted and measured."""
    world, found = torch.distributed.get_world_size(), []
    for variant in variants:
        config = step07.Config(**dict(model="debug", experts=4, device="cpu", ep=1) | variant)
        m, dtype = config.model_config(), choose_dtype(config.dtype, CPU)
        with open_mesh({"dp": world // config.tp, "cp": 1, "tp": config.tp}, CPU, "gloo") as mesh:
            model, own = build(config, mesh, config.ep)
            tokens = torch.arange(config.micro_batch_size * m.seq_len).view(-1, m.seq_len) % m.vocab_size
            timeline = MemoryTimeline()
            with timeline.phase("forward"):
                loss = model.lm_head.loss(model(tokens, own), tokens)
            predicted = cp_activation_bytes(config, m, config.tp, 1, dtype, on_cpu=True)
            chunk = SimpleNamespace(layers=model.model.layers)
            predicted += expert_activation_bytes(config, m, config.tp, 1, dtype, chunk)[0]
            found.append((predicted, settled(timeline, predicted)))
            del loss
    return found


def test_saved_activations_are_what_theory_says(pools):
    """Within 5%, in fp32 and bf16, with recomputation, tp with and without SP; with ep in the mean over the ranks."""
    variants = [
        dict(dtype=dtype, recompute=recompute, **cut)
        for dtype, recompute, cut in product(
            ("fp32", "bf16"),
            ("none", "full"),
            (dict(tp=1), dict(tp=2), dict(tp=2, sp=False), dict(tp=1, ep=2), dict(tp=1, shared_experts=1, moe_every=2)),
        )
    ]
    both = pools(2).run(saved_on_rank, variants)
    for variant, *found in zip(variants, *both, strict=True):
        measured = sum(measured for _, measured in found) / 2
        assert measured == pytest.approx(found[0][0], rel=0.05), variant


def held_on_rank(options: dict) -> tuple[dict, dict]:
    """Runs on every rank: train; bytes of each kind held at the end, and those predicted."""
    seen: dict[str, int] = {}
    predictions: list[dict] = []
    finish = Run.finish

    def observe(_, optimizer):
        seen.update({kind: bytes_of(tensors) for kind, tensors in held(optimizer, on_disk=False).items()})

    def spy(self, predicted, traffic):
        predictions.append(predicted)
        finish(self, predicted, traffic)

    with mock.patch.object(Run, "finish", spy), equivalence.without_instruments():
        step07.train(step07.Config(**options), observe)
    return seen, predictions[0]


@pytest.mark.picked(1, 3)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_is_what_theory_says(pools, tmp_path, zero):
    """Parameters, gradients and moments of a rank with two of eight experts."""
    options = SMALL | BASE | dict(ep=4, tp=1, cp=1, zero=zero, steps=2, optimizer="adamw", out=str(tmp_path / "run"))
    for seen, predicted in pools(4).run(held_on_rank, options):
        for kind in ("parameters", "gradients", "moments"):
            assert seen[kind] == pytest.approx(predicted[kind], rel=0.02), kind


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.picked(1, 2, 3, 4, 6, 7, 8, 9, 10, 11)
@pytest.mark.parametrize(
    "fault, base, layout, complaint",
    [
        ("balanced_by_own_tokens", {}, dict(cp=2), "the gradient of .* differs by"),
        ("balanced_by_own_tokens", {}, dict(tp=2), "the gradient of .* differs by"),
        ("drops_by_own_tokens", dict(capacity_factor=0.5, balance="none"), dict(cp=2), "differs by"),
        ("ranks_counted_for_ep_too", {}, dict(ep=2), "2 x 1 x 1 x 2 is not 2"),
        ("experts_summed_over_all_data", {}, dict(ep=2, zero=0), "the gradient of .*experts.* differs by"),
        ("experts_summed_over_all_data", {}, dict(ep=2, zero=2), "differs by"),
        ("experts_averaged", {}, dict(ep=2), "the gradient of .*experts.* differs by"),
        ("gates_not_differentiated", {}, dict(ep=2), "the gradient of .* differs by"),
        ("returned_in_another_order", {}, dict(ep=2), "the loss differs by"),
        ("counted_twice_in_recomputation", dict(recompute="full"), dict(ep=2), "the gradient of .* differs by"),
        ("experts_counted_once_in_the_norm", {}, dict(ep=2, zero=0), "the gradient norm differs by"),
        ("router_not_summed_over_tp", {}, dict(tp=2), "the gradient of .* differs by"),
    ],
)
def test_faults_are_noticed(pools, tmp_path, fault, base, layout, complaint):
    """What peers got wrong makes the comparison with one process fail."""
    options = SMALL | BASE | base | dict(steps=2)
    ours = options | dict(cp=1, tp=1, ep=1) | layout | dict(out=str(tmp_path / "run"))
    file = str(equivalence.reference(options, "", step07))
    found = pools(2).run(equivalence.complaint_on_rank, equivalence.on_rank, STEP, ours, file, 1e-10, [fault])
    assert any(re.search(complaint, text) for text in found), found


# --- the trainer around it -------------------------------------------------------------------------------------------


def text_on_rank(options: dict, ep: int) -> str:
    """Runs on every rank: sample from a cut model that has not been trained, so that every token is likely."""
    config, world = step07.Config(**options), torch.distributed.get_world_size() if ep else 1
    with open_mesh({"dp": world // config.tp // config.cp, "cp": config.cp, "tp": config.tp}, CPU, "gloo") as mesh:
        model, own = build(config, mesh, max(1, ep))
        look = partial(evaluation.look_through, model, own)
        return evaluation.generate(look, model, own, mesh, "def ", 15, 0)


@pytest.mark.picked(1, 2)
@pytest.mark.parametrize("layout", [dict(tp=1, cp=1), dict(tp=2, cp=1), dict(tp=1, cp=2)], ids=label)
def test_generates_one_processes_text(pools, layout):
    """Experts on two ranks, tokens of one text on one or two of them."""
    options = SMALL | BASE
    expected = text_on_rank(options | dict(tp=1, cp=1), 0)
    assert pools(4).run(text_on_rank, options | layout, 2) == [expected] * 4


@pytest.mark.parametrize(
    "flags, world, message",
    [
        (dict(ep=3), 4, r"--ep 3 does not divide dp x cp = 4 x 1 = 4 ranks, .*: use one of \[1, 2, 4\]"),
        (dict(ep=4, tp=2), 4, r"--ep 4 does not divide dp x cp = 2 x 1 = 2 ranks, .*: use one of \[1, 2\]"),
        (dict(ep=4, experts=6), 4, r"--experts 6 cannot be dealt to --ep 4 ranks: use --ep among \[1, 2\]"),
        (dict(ep=2, experts=0), 4, r"--ep 2 needs experts"),
        (dict(experts_per_token=9), 1, r"--experts-per-token 9 is more than --experts 8"),
        (dict(expert_groups=3), 1, r"--expert-groups 3 must divide --experts 8"),
        (
            dict(expert_groups=4, groups_per_token=1, experts_per_token=3),
            1,
            r"--groups-per-token 1 .* 2 experts",
        ),
        (dict(moe_every=0), 1, r"--moe-every is 0: it must be at least 1"),
        (dict(shared_experts=-1), 1, r"--shared-experts is -1: it must be at least 0"),
        (dict(capacity_factor=-1.0), 1, r"--capacity-factor is -1.0"),
        (dict(cp=3, tp=2), 8, r"--pp 1 x --cp 3 x --tp 2 = 6 does not divide the 8 ranks"),
        (dict(cp=2, tp=3), 8, r"--pp 1 x --cp 2 x --tp 3 = 6 does not divide the 8 ranks"),
        (dict(expert_dim=13, tp=2), 4, r"--tp 2 must divide the width of an expert, 13"),
        (dict(ep=2, zero=0, optimizer="adafactor"), 2, r"--optimizer adafactor .* --ep 1"),
    ],
)
def test_bad_flags_are_refused(flags, world, message):
    """With the flag and the legal values, before any process group."""
    with pytest.raises(UserError, match=message):
        check_ep(step07.Config(**SMALL | BASE | dict(tp=1, cp=1) | flags), world)


def test_a_rank_refuses_before_it_communicates(pools):
    """Through `train`, on every rank alike."""
    with pytest.raises(RankError, match=r"(?s)also \[1\].*--experts 7 cannot be dealt to --ep 2"):
        pools(2).run(columns_on_rank, SMALL | BASE | dict(tp=1, cp=1, ep=2, experts=7), "loss")
