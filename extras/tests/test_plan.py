"""The planner: its layouts are legal, its bytes what the dry run counts, its search complete, its errors bounded."""

import csv
import importlib
import json
import random
import re
import shlex
from dataclasses import fields, replace
from itertools import accumulate, product
from types import SimpleNamespace
from unittest import mock

import pytest

import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError, schedules
from common.model import PRESETS, ModelConfig
from common.schedules import SCHEDULES, Action
from common.trainer import parse
from extras.services.dry_run import Counted, run_rank
from extras.services.legal import layout_of_flags
from extras.services.seam import check, compose
from extras.tests.bench import plan as bench
from extras.theory import guide, pictures, plan, seconds
from extras.theory.activations import Kept, MicroBatch, kept_along, layer_bytes
from extras.theory.footprint import COURSE, held
from extras.theory.gpus import GPUS, HOP, HOP_BETWEEN, START
from extras.theory.layouts import (
    RECOMPUTE,
    Layout,
    Network,
    all_have_pairs,
    balanced,
    illegal,
    meshes,
    network,
    variants,
)
from extras.theory.memory import rank_bytes, rank_numbers
from extras.theory.pipelines import lists_of, paired, places_of, rank_places, splits
from extras.theory.search import count_legal, evaluate, fits, floor_seconds, search, smallest
from extras.theory.seconds import ring, step_seconds
from extras.theory.shapes import divisors, flops_per_token, gpt, layer_counts, shape_of, total_weights, visited_weights
from extras.variants.step07.ep_overlap import PAIRED
from extras.variants.step07.paired_actions import program_of

H100, MODELS = GPUS["h100-80"], plan.models()
LLAMA, MIXTRAL = MODELS["llama3-8b"], MODELS["mixtral-8x7b"]
EXPERTS = dict(experts=4, expert_dim=512)
ORDERS = [name for name in SCHEDULES if not illegal(LLAMA, Layout(2, global_batch_size=4, schedule=name))]


def config_of(x: Layout, shape: dict, **flags) -> object:
    """Step 7's flags (without experts: step 6's) of a layout."""
    PRESETS["drawn"] = ModelConfig(**shape)
    step = step07 if "experts" in flags else step06
    names = {field.name for field in fields(step.Config)} | {"zero_replicas", "zero_keep", "zero_overlap", "pp_scatter"}
    flags |= {name: value for name, value in vars(x).items() if name in names}
    flags |= dict(cp_kernel="flash") if x.cp > 1 else {}  # as `flags` of a layout says it
    return compose(step)(model="drawn", dry_run=x.world, device="cpu", pp_split="cost", loss_chunk=2048, **flags)


class Reached(Exception):
    """The first step would begin: nothing has been refused."""


def refused_by_the_steps(config: object) -> bool:
    """Whether a step itself, with its variants, refuses what it is to build."""
    first = mock.patch.object(Counted, "steps", mock.Mock(side_effect=Reached))
    with first, pytest.raises((UserError, Reached)) as found:
        run_rank(step07.train if hasattr(config, "experts") else step06.train, config, 0)
    return found.type is not Reached


def test_what_the_rules_refuse_the_steps_refuse():
    """60 random layouts of up to 64 ranks: one list of rules, for flags and planner, says what the steps say."""
    shape = dict(dim=32, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=48, vocab_size=64, seq_len=48)
    draw, verdicts = random.Random(0), []
    pick = lambda *options: draw.choice(options)  # noqa: E731
    while len(verdicts) < 60:
        pp, tp, cp, dp = pick(1, 1, 2, 3, 4, 9), pick(1, 2, 4, 8, 3, 16), pick(1, 1, 2, 3, 4), pick(1, 2, 3, 4)
        ep, zero, mbs, schedule = pick(1, 1, 2, 3), pick(0, 1), pick(1, 2, 3), pick(*ORDERS)
        x = Layout(pp, cp, tp, ep, zero, mbs, pick(dp * mbs, dp * mbs * 4, 12, 16), schedule, dp=dp)
        x = replace(x, chunks=pick(1, 2, 3), sp=draw.random() < 0.8, cp_mode=pick("zigzag", "ring", "allgather"))
        if x.world <= 64:
            experts = dict(experts=4, experts_per_token=2) if x.ep > 1 or x.micro_batch_size == 2 else {}
            config = config_of(x, shape, **experts)
            m = shape_of(PRESETS["drawn"], config)
            assert layout_of_flags(config, 1) == replace(x, ep=x.ep if experts else 1)
            verdicts.append(bool(illegal(m, x)))
            assert verdicts[-1] == refused_by_the_steps(config), (illegal(m, x), x)
    assert 15 <= sum(verdicts) <= 45


def test_no_legal_layout_is_left_out():
    """Of 24 ranks, all products of sizes that the rules allow are listed; and all schedules, stages, recomputations."""
    m, sizes = replace(MODELS["tiny-moe"], n_layers=8, n_heads=16), [1, 2, 3, 4, 6, 8, 12, 24]
    listed = {(x.pp, x.cp, x.tp, x.ep, x.micro_batch_size) for x in meshes(m, 24, 24)}
    every = [(pp, cp, tp, ep) for pp in sizes for cp in sizes for tp in sizes for ep in sizes]
    for pp, cp, tp, ep in (each for each in every if 24 % (each[0] * each[1] * each[2]) == 0):
        x = Layout(pp, cp, tp, ep, global_batch_size=24, dp=24 // (pp * cp * tp))
        for size in divisors(24 // x.dp):
            assert ((pp, cp, tp, ep, size) in listed) == (not illegal(m, replace(x, micro_batch_size=size))), x
    mesh, dense = Layout(2, dp=2, global_batch_size=32), replace(LLAMA, n_layers=8)
    chunked = ("interleaved", "rounds", "ahead")
    ways = [(name, 1) for name in ORDERS if name not in chunked] + [(name, v) for name in chunked for v in (2, 4)]
    zeros = [(zero, zero == 1 and more, zero == 3 and more) for zero in range(4) for more in (False, True)]
    expected = {(*way, *zero, kind) for way in ways for zero in zeros for kind in RECOMPUTE}
    found = {(x.schedule, x.chunks, x.zero, x.zero_overlap, x.zero_keep, x.recompute) for x in variants(dense, mesh)}
    assert found == expected
    assert count_legal(dense, [mesh, replace(mesh, pp=1, schedule="1f1b")]) == len(expected) + 6 * 3


@pytest.mark.parametrize("vocab", [64, 700, 5000])
def test_the_dearest_stage_costs_least(vocab):
    """Of all ways to deal 7 layers, every third with experts, and the head; then the least sum of squares."""
    m = replace(MODELS["tiny-moe"], n_layers=7, moe_every=3, vocab_size=vocab)
    costs = [visited_weights(m, m.has_experts(n)) + 2 * m.seq_len * m.dim for n in range(7)]
    costs[-1] += m.dim * vocab

    def cost(lengths: tuple[int, ...]) -> tuple[int, int]:
        stages = [sum(costs[stop - n : stop]) for n, stop in zip(lengths, accumulate(lengths), strict=True)]
        return max(stages), sum(stage**2 for stage in stages)

    for n in range(1, 8):
        ways = [lengths for lengths in product(range(1, 8), repeat=n) if sum(lengths) == 7]
        dearest, squares = cost(balanced(m, n))
        least = min(map(cost, ways))
        assert dearest == least[0] and squares <= 1.05 * least[1], n


def drawn_run(seed: int, with_experts: bool) -> tuple[Layout, dict, dict, str, int]:
    """A legal layout, a shape of some size (it is counted, not computed), its experts, a dtype, and a rank."""
    draw, experts = random.Random(seed), {}
    pick = lambda *options: draw.choice(options)  # noqa: E731
    while True:
        pp, dp, cp, tp = pick(1, 1, 2, 4), pick(1, 2, 4), pick(1, 1, 2), pick(1, 2, 4)
        schedule = pick(*ORDERS) if pp > 1 else "1f1b"
        layers = seconds.stages_of(Layout(pp, schedule=schedule)) * pp * (2 if pp < 4 else 1)
        dim = pick(1024, 2048, 4096)
        shape = dict(dim=dim, n_layers=max(2, layers), n_heads=32, n_kv_heads=pick(8, 32))
        shape |= dict(ffn_dim=dim * pick(11, 14) // 4, vocab_size=pick(32000, 128256))
        shape |= dict(seq_len=pick(1024, 2048, 4096), tied=draw.random() < 0.3)
        mbs, n = pick(1, 2, 4), 2 if pp == 1 else pp if schedule == "interleaved" else pick(2, 4)
        x = Layout(pp, cp, tp, 1, pick(0, 1, 2, 3), mbs, dp * mbs * n, schedule, dp=dp)
        x = replace(x, recompute=pick("none", "none", "elementwise", "full"), sp=draw.random() < 0.7)
        more = dict(zero_keep=x.zero == 3, pp_scatter=x.tp > 1 and pp > 1 and not x.sp, zero_overlap=x.zero == 1)
        x = replace(x, **{name: can and draw.random() < 0.5 for name, can in more.items()})
        if with_experts:
            experts = dict(experts=pick(4, 8), experts_per_token=pick(1, 2), moe_every=pick(1, 1, 2))
            experts |= dict(expert_dim=shape["ffn_dim"] // pick(1, 2, 4), dense_layers=pick(0, 0, 1))
            x = replace(x, ep=pick(1, 2, 4))
        if not illegal(shape_of(ModelConfig(**shape), SimpleNamespace(**experts)), x):
            return x, shape, experts, pick("bf16", "bf16", "bf16", "fp32"), draw.randrange(x.world)


@pytest.mark.parametrize("with_experts", [False, True])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(2, 100))])
def test_the_bound_of_the_peak(seed, with_experts):
    """Within 20% of the peak that the dry run counts, on the kernels of a CPU."""
    x, shape, experts, dtype, rank = drawn_run(seed, with_experts)
    config = config_of(x, shape, dtype=dtype, **experts)
    seen = run_rank((step07 if experts else step06).train, config, rank)
    m, peak = shape_of(PRESETS["drawn"], config), sum(seen.meter.peak().values())
    ours = rank_bytes(m, x, rank * x.pp // x.world, dict(bf16=2, fp32=4)[dtype], 4, on_cpu=True)
    assert 1 / 1.2 <= ours.total / peak <= 1.2, (ours.total / peak, x, shape, experts, dtype, rank)
    state = sum(seen.held[kind] for kind in ("parameters", "masters", "moments"))
    assert ours.weights + ours.optimizer == pytest.approx(state, rel=0.005)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_a_layer_keeps_what_the_dry_run_counts(recompute):
    """One layer more, without experts: to the byte what more waits for backward."""
    shape = dict(dim=64, n_heads=8, n_kv_heads=4, ffn_dim=96, vocab_size=64, seq_len=32)
    for (tp, sp), (dtype, e) in product(((1, True), (2, True), (2, False)), (("bf16", 2), ("fp32", 4))):
        x = Layout(tp=tp, sp=sp, recompute=recompute, global_batch_size=1)
        runs = (config_of(x, shape | dict(n_layers=n), dtype=dtype) for n in (1, 2))
        few, more = (run_rank(step06.train, config, 0).held["activations"] for config in runs)
        m = shape_of(PRESETS["drawn"], x)
        assert more - few == layer_bytes(MicroBatch(m, x, e, 4, on_cpu=True), False, recompute), (tp, sp, dtype)


@pytest.mark.parametrize(
    "recompute", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name != "elementwise")) for name in RECOMPUTE]
)
def test_gathered_keys_are_counted(recompute):
    """A rank keeps k and v of all ranks of cp, or gathers them again: the peak is so much higher, within 4%."""
    shape = dict(dim=512, n_layers=4, n_heads=16, n_kv_heads=16, ffn_dim=512, vocab_size=1024, seq_len=8192)
    ours, counted = [], []
    for mode in ("zigzag", "balanced"):
        x = Layout(cp=4, recompute=recompute, cp_mode=mode)
        config = config_of(x, shape, dtype="bf16")
        seen = run_rank(step06.train, config, 0)
        counted.append(sum(seen.meter.peak().values()))
        ours.append(rank_bytes(shape_of(PRESETS["drawn"], config), x, 0, on_cpu=True).total)
        assert ours[-1] == pytest.approx(counted[-1], rel=0.15)
    assert ours[1] - ours[0] == pytest.approx(counted[1] - counted[0], abs=0.04 * counted[0])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_zero_keeps_is_counted(schedule):
    """--zero-keep: whole weights beside their slices, and their all-gathers once; the peak within 10%."""
    x = Layout(2, 1, 1, 1, 3, 1, 8, schedule, zero_keep=True, dp=2)
    shape = dict(dim=1024, n_layers=8, n_heads=32, n_kv_heads=8, ffn_dim=2816, vocab_size=32000, seq_len=1024)
    config = config_of(x, shape, dtype="bf16")
    seen, m = run_rank(step06.train, config, 0), shape_of(PRESETS["drawn"], config)
    ours, peak = rank_bytes(m, x, 0, 2, 4, on_cpu=True), sum(seen.meter.peak().values())
    assert 0.95 * peak <= ours.total <= 1.10 * peak, ours.total / peak
    far = replace(x, pp=1, dp=64, schedule="1f1b", global_batch_size=1024)
    times = [step_seconds(m, replace(far, zero_keep=flag), GPUS["h100-80"], COURSE).step for flag in (True, False)]
    assert times[0] <= times[1]


def test_weights_and_flops():
    """GPT-3 has 175e9 weights; Llama's and Mixtral's are what their cards say; a rank has its share."""
    for m, size in ((gpt(12288, 96, 96), 175e9), (LLAMA, 8.03e9), (MODELS["llama3-405b"], 405.8e9), (MIXTRAL, 46.7e9)):
        assert total_weights(m) == pytest.approx(size, rel=0.01)
    assert sum(sum(rank) for rank in rank_numbers(LLAMA, "1f1b", 4, 1, 1, 1)) == total_weights(LLAMA)
    model, executed = flops_per_token(LLAMA, recompute=True)
    assert model == 6 * (total_weights(LLAMA) - LLAMA.dim * (LLAMA.vocab_size + 65)) + 12 * 32 * 8192 * 4096
    assert executed > 1.2 * model
    m = replace(MIXTRAL, moe_every=2, dense_layers=2)
    assert layer_counts(m) == {False: 17, True: 15} and m.has_experts(3) and not m.has_experts(2)


@pytest.mark.parametrize("recipe", bench.RECIPES.values(), ids=bench.RECIPES)
def test_memory_grows_and_shrinks_as_it_must(recipe):
    """More with larger micro-batches, less recomputation and lower ZeRO stages; less with tp."""
    m, base = LLAMA if recipe is COURSE else gpt(4096, 32, 32), Layout(2, 1, 2, 1, 1, 1, 64, dp=4)
    for sizes in (
        [held(m, replace(base, micro_batch_size=mbs), recipe).total for mbs in (1, 2, 4)],
        [
            held(m, replace(base, recompute=kind), recipe).activations
            for kind in ("full", "elementwise", "selective", "none")
        ],
        [sum(held(m, replace(base, zero=zero), recipe)[:3]) for zero in (3, 2, 1, 0)],
    ):
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert held(m, replace(base, tp=4, dp=2), recipe).weights < held(m, base, recipe).weights
    m, one = LLAMA, MicroBatch(replace(LLAMA, seq_len=1), Layout())  # variants/step01/elementwise.py
    assert layer_bytes(one, False, "elementwise") == 2 * (5 * m.dim + 2 * m.kv_dim + 2 * m.ffn_dim) + 4 * m.n_heads


@pytest.mark.parametrize("schedule", ORDERS)
def test_a_long_pipeline_is_continued_from_a_short_one(schedule):
    """`pipeline_ratio` is the whole's within 1%, `least_bubble` at most its bubble.

    As much waits in the first 4 p + m % p micro-batches as in all; only afab goes on and on.
    """
    v = {"interleaved": 3}.get(schedule, 1)
    apart = splits(schedule, 4, v)
    kept = {stage: Kept(1.0, 1.0 if apart else 0.0) for stage in range(4 * max(2, v))}
    for rank in range(4):
        few, all_ = (max(kept_along(lists_of(schedule, 4, v, n)[rank], kept)) for n in (16, 40))
        assert (few == all_) == (schedule != "afab")
    cases = (4, 64, 1.0, 1.0, 0.0), (4, 60, 1.6, 0.7, 0.05), (6, 90, 2.0, 1.0, 0.2), (4, 4, 1, 1, 0)
    for p, n, b, w, message in cases:
        lists = lists_of(schedule, p, v, n)
        places = {s: place for row in rank_places(LLAMA, schedule, p, v) for s, place in row.items()}
        costs = dict(F=1.0, B=b if any(action.kind == "W" for action in lists[0]) else b + w, W=w)
        whole = schedules.simulate(lists, places, costs, message)[-1][0]
        assert seconds.pipeline_ratio(schedule, p, v, n, b, w, message) == pytest.approx(whole, rel=0.01)
        x = Layout(p, global_batch_size=n, schedule=schedule, chunks=v)
        assert seconds.least_bubble(x, 1.0, b, w) <= whole - n * (1 + b + w) * seconds.stages_of(x) + 1e-9


def test_small_things():
    """Two ranks, one micro-batch: F, message, F, B, message, B. Small matmuls are slow, large ones reach a constant."""
    lists, places = [[Action("F", 0, r), Action("B", 0, r)] for r in range(2)], schedules.round_robin(2, 2, 1)
    assert schedules.simulate(lists, places, dict(F=1.0, B=2.0), 0.5)[-1][0] == 7.0
    part = [2 * n**3 / seconds.matmul_seconds(H100, n, n, n) / H100.flops for n in (256, 1024, 4096, 65536)]
    assert part == sorted(part) and part[0] < 0.02 and part[-1] == pytest.approx(H100.matmul, rel=0.03)


@pytest.mark.parametrize("schedule", ORDERS)
def test_messages_of_experts_are_hidden_where_a_list_has_pairs(schedule):
    """Its part of forwards is that of the program that runs, on the rank with fewest pairs; in 1F1B that is none."""
    for p, n in ((2, 8), (4, 8), (4, 12), (4, 32)):
        programs = program_of(lists_of(schedule, p, 2, n), places_of(schedule, p, 2))
        pairs = [sum(len(line.actions) == 2 for line in program) for program in programs]
        forwards = sum(action.kind == "F" for action in lists_of(schedule, p, 2, n)[0])
        assert paired(schedule, p, 2, n) == pytest.approx(min(pairs) / forwards, abs=1 / forwards), (p, n)
    actions, _, v, _ = SCHEDULES[schedule](Layout(4))
    assert all_have_pairs(actions, v, 4) == (schedule in PAIRED)
    x = Layout(4, 1, 1, 8, global_batch_size=64, schedule=schedule, dp=8)
    plain, hidden = (step_seconds(MIXTRAL, replace(x, ep_overlap=flag), H100, COURSE) for flag in (False, True))
    saved = plain.exposed["ep"] - hidden.exposed["ep"]
    assert plain.step - hidden.step == pytest.approx(saved) and 0 <= saved < plain.exposed["ep"]
    assert (saved > 0) == (schedule in (*PAIRED, "afab"))


@pytest.mark.parametrize("sp", [True, False])
def test_messages_take_their_time(sp):
    """Sent again over tp: of a forward's four collectives three (of two all-reduces, one), as the dry run counts.

    Between two stages, in a node or not: a rank's own tokens, a start and a hop; Megatron cuts them always.
    """
    shape = dict(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=96, vocab_size=64, seq_len=32)
    m, course, megatron = shape_of(ModelConfig(**shape), Layout()), COURSE, bench.RECIPES["megatron-2021"]
    whole, times = 2 * m.seq_len * m.dim, 4 * m.n_layers * (3 if sp else 2)
    for recompute in ("full", "elementwise"):
        again = Layout(1, 1, 4, 1, 1, 1, 8, recompute=recompute, sp=sp, dp=2)
        net, both = network(again, "tp"), (again, replace(again, recompute="none"))
        counted = [run_rank(step06.train, config_of(x, shape, dtype="bf16"), 0).taken["traffic"]["tp"] for x in both]
        sent = [sum(traffic.values()) for traffic in counted]
        took = [step_seconds(m, x, H100, course).exposed["tp"] for x in both]
        assert sent[0] - sent[1] == pytest.approx(times * ring(net, whole))
        assert took[0] - took[1] == pytest.approx(times * seconds.collective_seconds(H100, net, ring(net, whole)))
    gather = 0.0 if sp else seconds.collective_seconds(H100, net, ring(net, whole))
    for dp, speed, hop in ((1, H100.within, HOP), (4, H100.between, HOP_BETWEEN)):
        x = Layout(2, 1, 4, global_batch_size=8, sp=sp, dp=dp)
        ours, theirs = (seconds.boundary_seconds(m, x, H100, recipe) for recipe in (course, megatron))
        assert ours == pytest.approx(whole / (4 if sp else 1) / speed + START + hop)
        assert theirs == pytest.approx(whole / 4 / speed + START + hop + gather)


@pytest.mark.parametrize("in_node, nodes", [*product((1, 2, 8), (1, 2, 5, 64))])
def test_hops_are_those_of_a_ring_and_of_a_tree(in_node, nodes):
    """Walked: from rank to rank; or up from the last node to the first, halving its number each time, and the chain."""
    net = Network(nodes * in_node, in_node)
    ring_hops = [HOP if here // in_node == (here - 1) // in_node else HOP_BETWEEN for here in range(1, net.ranks)]
    ups = next(n for n in range(nodes) if (nodes - 1) >> n == 0)
    assert seconds.hops_seconds(H100, net, tree=False) == pytest.approx(sum(ring_hops))
    assert seconds.hops_seconds(H100, net, tree=True) == pytest.approx((in_node - 1) * HOP + ups * HOP_BETWEEN)
    assert seconds.hops_seconds(H100, net, tree=True) <= seconds.hops_seconds(H100, net, tree=False) + 1e-12


def test_a_network_gets_worse_as_it_grows():
    """Contention is between more than two nodes only; ZeRO 3 shows what its 3 messages a layer do not hide of hops."""
    for nodes, doublings in (1, 0), (2, 0), (4, 1), (64, 5):
        slower = seconds.bandwidth(H100, Network(nodes, 1)) / seconds.bandwidth(GPUS["h100-80-efa"], Network(nodes, 1))
        assert slower == pytest.approx(1 + GPUS["h100-80-efa"].contention * doublings)
    m, shown = replace(LLAMA, seq_len=4096), {}
    for dp in 1024, 2048:
        x = Layout(dp=dp, zero=3, global_batch_size=dp, recompute="full")
        shown[dp] = step_seconds(m, x, H100, COURSE).exposed["dp"]
    more_hops = (1024 - 128) * HOP + 128 * HOP_BETWEEN
    more_bytes = 8 * total_weights(LLAMA) * (2047 / 2048 - 1023 / 1024) / (8 * H100.between)
    assert shown[2048] - shown[1024] == pytest.approx(3 * m.n_layers * more_hops + more_bytes, rel=1e-3)


def test_an_entry_has_its_own_nodes_numbers_and_hops():
    """tp of 8 leaves nodes of 4, whose cards then share its messages; 32 bits are twice as many bytes."""
    m, x, whole = LLAMA, Layout(tp=8, global_batch_size=1), LLAMA.seq_len * LLAMA.dim
    for number, (node, speed, hops) in product((2, 4), ((8, H100.within, 7), (4, 4 * H100.between, 6 + 10))):
        gpu = H100._replace(node=node, number=number, start=100.0, hop=1.0, hop_between=10.0)
        took = step_seconds(m, x, gpu, COURSE).exposed["tp"]
        assert took == pytest.approx((8 * m.n_layers + 2) * (7 / 8 * whole * number / speed + 100.0 + hops))
    compute = [step_seconds(m, x, H100._replace(launch=t), COURSE).compute for t in (0.0, 1.0)]
    assert compute[1] - compute[0] > 32 * m.n_layers


def test_rows_for_other_nodes_go_over_a_card_of_their_own():
    """Counted rank by rank: of two nodes of four, whoever is slower, a card or a link; inside a node, a ring's time."""
    gpu, size = H100._replace(start=0.0, hop=0.0, hop_between=0.0), 8e9
    inside, far = Network(8, 8), Network(8, 4)
    assert seconds.all_to_all_seconds(gpu, inside, size) == seconds.collective_seconds(gpu, inside, ring(inside, size))
    for within, between in ((gpu.within, gpu.between), (1e9, 1e12)):
        gpu = gpu._replace(within=within, between=between)
        links, cards = (sum(size / 8 for other in range(1, 8) if (other < 4) == same) for same in (True, False))
        expected = max(links / gpu.within, cards / gpu.between)
        assert seconds.all_to_all_seconds(gpu, far, size) == pytest.approx(expected)


def test_parts_have_signs_and_experts_take_their_time():
    """Rows to the experts and back, forward and backward; a rank reads the matrices of its own experts only."""
    m, x = MIXTRAL, Layout(1, 1, 2, 4, 1, 1, 8, dp=8)
    for layout in (x, Layout(4, 2, 2, 4, 1, 1, 64, "zb-h1", recompute="full", dp=4)):
        took = step_seconds(m, layout, H100, COURSE)
        assert min(took.compute, took.recompute, took.bubble, *took.exposed.values()) >= 0
        assert (took.recompute > 0) == (layout.recompute == "full")
    net, rows = network(x, "ep"), m.seq_len * m.experts_per_token // x.tp  # tp ranks route different tokens
    one_way = seconds.collective_seconds(H100, net, ring(net, 2 * rows * m.dim))
    assert step_seconds(m, x, H100, COURSE).exposed["ep"] == pytest.approx(4 * m.n_layers * one_way)
    layouts = (Layout(ep=ep, global_batch_size=8, dp=8) for ep in (1, 4))
    one, four = (seconds.layer_work(m, layout, H100, COURSE, True).f["matmul"] for layout in layouts)
    assert one - four == pytest.approx(2 * 3 * m.dim * m.expert_width * (m.experts - m.experts // 4) / H100.hbm)


def test_pairs_of_ranks_sum_what_both_hold():
    """dualpipe: all gradients of a pair, over a card's bandwidth; 1F1B: a tied matrix."""
    x, pair = Layout(4, 1, 4, global_batch_size=64, zero=0, schedule="dualpipe", dp=8), seconds.pair_seconds
    numbers = sum(max(rank_numbers(LLAMA, "dualpipe", 4, 2, 4, 1), key=sum))
    assert pair(LLAMA, x, H100, COURSE) == pytest.approx(numbers * 4 / H100.between, rel=0.01)
    plain = replace(x, schedule="1f1b")
    assert pair(LLAMA, plain, H100, COURSE) == 0 < pair(replace(LLAMA, tied=True), plain, H100, COURSE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_search_finds_what_trying_everything_finds(more):
    """The five best meshes of a small model on 8 GPUs, among all layouts one by one."""
    m, best = replace(MODELS["smollm-360m"], n_layers=4, **more), {}
    for mesh in meshes(m, 8, 16):
        for x in variants(m, mesh):
            found = evaluate(m, x, H100)
            way = dict(recompute=x.recompute, ep_overlap=x.ep_overlap)
            assert floor_seconds(m, replace(mesh, **way), H100) <= found.seconds.step * (1 + 1e-9)
            if fits(found.held, H100):
                best[mesh] = min(best.get(mesh, float("inf")), found.seconds.step)
    found = [entry.seconds.step for entry in search(m, 8, 16, H100, count=5).best]
    assert found == pytest.approx(sorted(best.values())[:5], rel=1e-9)


@pytest.mark.exhaustive
def test_the_largest_plan_does_little_work():
    """llama3-405b on 16,384 GPUs: of all legal layouts, some 2% are bounded one by one, few are simulated."""
    bounded, memory = mock.Mock(side_effect=step_seconds), mock.Mock(side_effect=held)
    with mock.patch("extras.theory.search.step_seconds", bounded), mock.patch("extras.theory.search.held", memory):
        found = search(MODELS["llama3-405b"], 16384, 16384, H100)
    assert len(found.best) == 10 and found.legal > 350_000
    assert memory.call_count < 0.03 * found.legal and bounded.call_count < 0.03 * found.legal
    simulated = [call for call in bounded.call_args_list if call.kwargs.get("simulated", True)]
    assert len(simulated) == found.timed < found.legal / 2000


def test_what_fits():
    """The longest sequence, and not an eighth more; the largest model."""
    tokens = int(plan.longest(LLAMA, plan.Flags(gpus=2)).split()[-2])
    ours = [smallest(replace(LLAMA, seq_len=n), 2, 2).held for n in (tokens, tokens * 9 // 8)]
    assert [fits(each, H100) for each in ours] == [True, False]
    known = {name: MODELS[name] for name in ("llama3-8b", "mixtral-8x7b", "gpt3-1t")}
    assert plan.largest(plan.Flags(), known, iter).endswith("fits on 8 h100-80: llama3-8b")


def test_errors_beside_published_runs():
    """Means and choices of the table in RESULTS.md; of a rank correlation, what it is of the same and the reverse."""
    assert bench.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)  # ties share a rank
    assert bench.choice([2.0, 1.0], [1.0, 3.0]) == (-1, 1.0)
    cases, lines = bench.read_rows(bench.Config().rows), bench.read_vtrain(bench.Config().vtrain)
    known = [case for case in cases if case.recipe is not COURSE]
    errors = [abs(bench.error(case, bench.predict(case), bench.time_figure(case))) for case in known]
    assert len(known) == 9 and sum(errors) / len(errors) <= 0.05 and max(errors) <= 0.06
    took, ours = [c.published["step_s"] for c in lines], [bench.predict(c)["step_s"] for c in lines]
    assert sum(abs(b / a - 1) for a, b in zip(took, ours, strict=True)) / len(lines) <= 0.08
    for name, group in bench.groups_of(lines).items():
        correlation, regret = bench.choice([took[i] for i in group], [ours[i] for i in group])
        # lines of 39.1e9 weights with tp 2 and 4 are slower than any rule says
        assert (correlation >= 0.9 and regret <= 0.05) or name.startswith("39.1e9"), (name, correlation, regret)


def test_files_with_gaps_and_in_another_order(tmp_path, capsys):
    """The same predictions with rows and columns shuffled; blanks and NaN are figures that a source does not give."""
    draw, sources = random.Random(3), (bench.Config().rows, bench.Config().vtrain)
    rows, lines = (list(csv.DictReader(bench.lines_of(source)))[::6] for source in sources)
    cases = {case.id: bench.predict(case) for case in bench.read_rows(sources[0])}
    rows[1] |= {name: "NaN" for name in bench.FIGURES}
    lines[1]["iteration time (ms)"] = ""
    paths, out = [tmp_path / "rows.csv", tmp_path / "vtrain.csv"], tmp_path / "predicted.json"
    for path, found in zip(paths, (rows, lines), strict=True):
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, draw.sample(list(found[0]), len(found[0])))
            writer.writeheader()
            writer.writerows(draw.sample(found, len(found)))
    bench.main("plan", ["--rows", str(paths[0]), "--vtrain", str(paths[1]), "--json", str(out)])
    entries = json.loads(out.read_text())
    ours, theirs = entries[: len(rows)], entries[len(rows) :]
    assert {entry["id"]: entry["predicted"] for entry in ours} == {row["id"]: cases[row["id"]] for row in rows}
    assert sorted(len(entry["published"]) for entry in theirs) == [0] + [1] * (len(lines) - 1)
    assert "vTrain group" in capsys.readouterr().out
    paths[0].write_text(paths[0].read_text().replace("A100-80", "abacus"))
    with pytest.raises(UserError, match="abacus"):
        bench.read_rows(str(paths[0]))


@pytest.mark.parametrize("model, also", [(LLAMA, ""), (MIXTRAL, " --expert-matmul grouped")], ids=["dense", "experts"])
def test_the_launch_line_has_what_a_gpu_wants(model, also):
    """Stages dealt by cost, a loss in chunks, batches read ahead, one matmul for all experts: step 7 knows them."""
    text = plan.show(model, [evaluate(model, Layout(2, 1, 2, 1, 1, 2, 64, dp=2), H100)], H100)
    always, layout = re.search(r"^flags after .* --seq-len \d+ (.*):\n 1  (.*)$", text, re.M).groups()
    assert always == f"--pp-split cost --loss-chunk 2048 --prefetch{also}"
    config = parse(compose(step07), shlex.split(f"{always} {layout}"))
    assert (config.pp_split, config.loss_chunk, config.prefetch) == ("cost", 2048, True)
    assert config.expert_matmul == (also.split()[-1] if also else "each")


def test_the_command(capsys, tmp_path):
    """Layouts whose printed flags step 7 takes as the same, tables, a file; a report's sums are the layout's."""
    arguments, file = "--model smollm-1.7b --gpus 8 --gpu a100-80 --global-batch-size 64", tmp_path / "plan.json"
    assert plan.main([*arguments.split(), "--json", str(file)]) == 0
    out, entries = capsys.readouterr().out, json.loads(file.read_text())
    assert "\n10  --pp" in out and "bubble" in out and "obvious alternatives" in out and len(entries) == 10
    for x in (Layout(**entry["layout"]) for entry in entries):
        config = parse(compose(step07), shlex.split(f"--model smollm-1.7b --dry-run 8 --seq-len 2048 {x.flags()}"))
        check(config, 1)
        assert x.flags() in out and layout_of_flags(config, 1) == replace(x, chunks=config.chunks)
    assert plan.main([*arguments.split(), "--explain", "--tp 2 --pp 2 --micro-batch-size 2"]) == 0
    out, x = capsys.readouterr().out, Layout(2, 1, 2, 1, 1, 2, 64, dp=2)
    found = evaluate(MODELS["smollm-1.7b"], x, GPUS["a100-80"])
    memory, times = (
        [float(cell) for cell in re.findall(r"(?<= )[\d.]+(?= |$)", row)] for row in re.findall(r"^1 .*", out, re.M)
    )
    assert memory[5] == round(found.held.total / 2**30, 1) == pytest.approx(sum(memory[:5]), abs=0.3)
    assert times[-2] == round(found.seconds.step, 3) == pytest.approx(sum(times[:-2]), abs=0.005)


MISTAKES = {
    "--gpu abacus": "invalid choice",
    "--model gpt5": "no such model",
    "--model llama3-405b --gpus 8 --global-batch-size 8": "GiB too much",
    "--gpus 8 --explain '--tp 3 --pp 1'": "does not divide",
    "--gpus 8 --global-batch-size 7 --explain '--tp 2 --pp 1'": "must be a multiple of the 4 ranks of dp",
    "--gpus 16 --model mixtral-8x7b --explain '--pp 2 --ep 2 --ep-overlap'": "in --schedule 1f1b a rank has no",
    "--gpus 8 --explain '--pp 2 --schedule zb-auto'": "--schedule zb-auto: the planner has no times",
    "--gpus 8 --explain '--pp 2 --tp 2 --pp-scatter'": "leave it out, or use --no-sp",
    "--gpus 8 --explain '--tp 2 \"'": "No closing quotation",
    "--gpus 37 --global-batch-size 3": "no layout of 37 GPUs is legal",
    "--gpus 8 --largest --longest": "one at a time",
    "--model gpt3-175b --gpus 8 --longest": "GiB too much",
    "--json nowhere/all.json": "no folder nowhere",
    "--gpus 1000000": "counts up to",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(capsys, arguments):
    """On stderr, with status 2; a model that fits nowhere says what would be needed."""
    assert plan.main(shlex.split(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and MISTAKES[arguments] in error


@pytest.mark.parametrize(
    "name, gpus, sequence",
    [
        ("llama3-8b", 8, 8192),
        pytest.param("llama3-70b", 64, 32768, marks=pytest.mark.exhaustive),
        pytest.param("mixtral-8x7b", 32, 4096, marks=pytest.mark.exhaustive),
    ],
)
def test_the_guide_ends_in_a_line_that_is_legal_and_fits(name, gpus, sequence):
    """Read by the step's own parser, checked as a run checks it: it is the layout that was found, on all GPUs."""
    m = replace(MODELS[name], seq_len=sequence)
    best = search(m, gpus, 256, H100).best[0]
    assert fits(best.held, H100)
    text = guide.guide(name, m, best, H100)
    start, nodes, each, _, _, script, *words = shlex.split(text.splitlines()[-1])
    assert start == "torchrun" and int(nodes.split("=")[1]) * int(each.split("=")[1]) == gpus
    config = parse(compose(importlib.import_module(script.removesuffix(".py"))), words)
    check(config, gpus)
    assert layout_of_flags(config, gpus) == replace(best.layout, chunks=config.chunks)
    assert config.chunks == best.layout.chunks or best.layout.schedule != "interleaved"
    asked = [line for line in text.splitlines() if re.match(r"\d+\. ", line)]
    assert len(asked) == 6 + (best.layout.pp > 1) + (gpus > 8) + (m.experts > 0)


def test_the_points_of_the_pictures_are_the_laws(tmp_path):
    """State: 18 N, cut by ZeRO. Bubbles: those of the simulated lists. Activations: as much for each more token."""
    n = total_weights(LLAMA)
    for zero, ranks in product(range(4), pictures.RANKS):
        cut = (0, 12, 16, 18)[zero]
        assert sum(pictures.holds(zero=zero, dp=ranks)[:3]) == pytest.approx((18 - cut + cut / ranks) * n, 2e-3)
    for series in pictures.bubbles():
        p, v = map(int, re.findall(r"\d+", series.name))
        for m, idle in zip(series.x, series.y, strict=True):
            if m % p == 0 or v == 1:
                lists = lists_of("interleaved", p, v, m)
                took = schedules.simulate(lists, places_of("interleaved", p, v), dict(F=1, B=2))[-1][0]
                assert idle == pytest.approx(1 - 3 * m * v / took)
    for kind, size in ("weights", 2), ("gradients", 4), ("optimizer", 12):
        (line,) = [series for series in pictures.by_sequence() if series.name == kind]
        assert line.y == pytest.approx([size * n / 1e9] * len(line.x))
    for recompute in RECOMPUTE:
        few, more, most = (pictures.holds(2**n, recompute=recompute).activations for n in (12, 13, 14))
        assert most - more == pytest.approx(2 * (more - few), rel=1e-6)  # the head's gradient does not grow
    for name in pictures.SERIES:
        pictures.draw(name, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
