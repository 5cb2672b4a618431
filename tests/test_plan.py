"""The planner: its layouts are legal, its bytes the trainer's, its search complete, its errors bounded."""

import csv
import json
import random
import re
import shlex
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import step07_moe_ep as step07
from common import UserError, schedules, trainer
from common.model import PRESETS
from common.moe import MOE_PRESETS
from common.schedules import SCHEDULES, chunks_per_rank, place_stages, simulate
from services.checks import check, mesh_sizes, split_layers
from services.flags import parse
from services.predictions import Costs, predict
from tests.bench import plan as bench
from theory import calibrate, layouts, plan
from theory.bubble import makespan, quick_makespan
from theory.flops import matmul_weights, moe_flops_per_token
from theory.footprint import (
    CONTEXT,
    buffer_bytes,
    course_moment,
    course_parts,
    held,
    rank_numbers,
    rank_stages,
    ranks_of,
    state_bytes,
    waiting_states,
)
from theory.gpus import GPUS, LATENCY, LATENCY_BETWEEN
from theory.layouts import RECOMPUTE, Layout, illegal, meshes, network, variants
from theory.recipes import RECIPES
from theory.search import COURSE, evaluate, fits, floor_seconds, search, smallest
from theory.seconds import (
    boundary_seconds,
    collective_seconds,
    layer_work,
    least_bubble,
    matmul_seconds,
    mirror_seconds,
    pipeline_ratio,
    ring,
    step_seconds,
)
from theory.sent import sent_bytes
from theory.shapes import (
    MODELS,
    attention_matmuls,
    gpt,
    layer_weights,
    mlp_matmuls,
    model_flops,
    of_preset,
    total_weights,
    weights,
)

H100 = GPUS["h100-80"]
SMALL = replace(MODELS["tiny-moe"], n_layers=8, n_heads=16, n_kv_heads=4, dim=512, ffn_dim=1536, expert_dim=768)
SMALL_FLAGS = dict(model="tiny-moe", n_layers=8, n_heads=16, n_kv_heads=4, dim=512, ffn_dim=1536, expert_dim=768)


# --- layouts ---------------------------------------------------------------------------------------------------------


def accepted(layout: Layout) -> bool:
    """Whether the course's own checks take these flags."""
    flags = dict(pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, zero=layout.zero, schedule=layout.schedule)
    flags |= dict(micro_batch_size=layout.mbs, global_batch_size=layout.gbs, chunks=layout.chunks)
    flags |= dict(recompute=layout.recompute, sp=layout.sp, cp_mode=layout.cp_mode, zero_replicas=layout.replicas)
    try:
        check(step07.Config(**SMALL_FLAGS, **flags), layout.world)
    except UserError:
        return False
    return True


def drawn_layouts(count: int) -> list[Layout]:
    """Random layouts of up to 16,384 ranks, many of them wrong in one way."""
    draw = random.Random(0)
    found = []
    while len(found) < count:
        pp, tp, cp = (draw.choice([1, 2, 3, 4, 8, 16, 32]) for _ in range(3))
        dp, mbs = draw.choice([1, 2, 3, 4, 8, 64]), draw.choice([1, 2, 3])
        schedule = draw.choice(list(SCHEDULES))
        chunks = draw.choice([1, 1, 2, 2, 3, 4])
        gbs = draw.choice([dp * mbs, dp * mbs * 4, 64])
        ep = draw.choice([1, 1, 2, 3, 8])
        modes = dict(sp=draw.random() < 0.8, cp_mode=draw.choice(["zigzag", "ring", "allgather", "ulysses"]))
        modes |= dict(replicas=draw.choice([1, 1, 1, 1, 2, 3]))
        layout = Layout(pp, dp, cp, tp, ep, draw.choice([0, 1, 2, 3]), mbs, gbs, schedule, chunks, **modes)
        if layout.world <= 16384:
            found.append(layout)
    return found


def test_legal_means_accepted_by_the_checks():
    """`illegal` says what `check` says, for 1,500 drawn layouts; at least 100 of them are of either kind."""
    verdicts = [(not illegal(SMALL, layout), accepted(layout), layout) for layout in drawn_layouts(1500)]
    assert not [layout for ours, theirs, layout in verdicts if ours != theirs]
    assert min(sum(ours for ours, _, _ in verdicts), sum(not ours for ours, _, _ in verdicts)) >= 100


def test_every_listed_layout_is_accepted():
    """Drawn from the planner's own lists, 8 to 16,384 ranks."""
    draw = random.Random(1)
    for world in (8, 48, 1024, 16384):
        found = list(meshes(SMALL, world, 4 * world))
        for mesh in draw.sample(found, min(12, len(found))):
            for layout in draw.sample(list(variants(SMALL, mesh)), 3):
                assert layout.world == world and accepted(layout), layout


def test_no_legal_mesh_is_left_out():
    """All products of pp, cp, tp, ep and micro-batch that the checks accept on 24 ranks are listed."""
    listed = {(x.pp, x.cp, x.tp, x.ep, x.mbs) for x in meshes(SMALL, 24, 24)}
    for pp in (1, 2, 3, 4, 8):
        for tp in (1, 2, 4, 8):
            for cp in (1, 2, 4):
                for ep in (1, 2, 4, 8):
                    for mbs in (1, 2, 4):
                        if 24 % (pp * tp * cp) == 0:
                            layout = Layout(pp, 24 // (pp * tp * cp), cp, tp, ep, mbs=mbs, gbs=24)
                            assert accepted(layout) == ((pp, cp, tp, ep, mbs) in listed), layout


@pytest.mark.parametrize("pp", [1, 2])
def test_no_legal_variant_is_left_out(pp):
    """All ZeRO stages, recomputations and schedules that the checks accept; chunks of whole layers, alike on all."""
    mesh = Layout(pp, 2, gbs=32)
    chunks = {schedule: chunks_per_rank(schedule) or 1 for schedule in SCHEDULES if pp > 1 or schedule == "1f1b"}
    ways = [*chunks.items(), *(("interleaved", v) for v in range(2, 9) if pp > 1 and SMALL.n_layers // pp % v == 0)]
    tried = product([way for way in ways if way != ("interleaved", 1)], range(4), RECOMPUTE)
    every = [replace(mesh, schedule=s, chunks=v, zero=zero, recompute=kind) for (s, v), zero, kind in tried]
    assert {*variants(SMALL, mesh)} == {layout for layout in every if accepted(layout)}


def test_printed_flags_run():
    """What is printed is parsed by step 7 and accepted, and stands for the same layout."""
    m = replace(MODELS["llama3-8b"], seq_len=8192)
    for found in search(m, 64, 128, H100).best:
        config = parse(step07.Config, shlex.split(f"--model llama3-8b {found.layout.flags()}"))
        check(config, 64)
        x = found.layout
        assert mesh_sizes(config, 64) == dict(pp=x.pp, dp=x.dp, cp=x.cp, tp=x.tp)
        assert (config.zero, config.ep, config.micro_batch_size, config.recompute) == (x.zero, x.ep, x.mbs, x.recompute)


def test_layers_are_dealt_as_the_trainer_does():
    """The planner's split is `split_layers`."""
    for name, stages in (("llama3-8b", 4), ("mixtral-8x7b", 8), ("llama3-70b", 16)):
        config = step07.Config(model=name)
        assert list(layouts.split_layers(MODELS[name], stages)) == split_layers(config, config.model_config(), stages)


# --- bytes -----------------------------------------------------------------------------------------------------------


class Seen(Exception):
    """What was looked for is there: no step need be made."""


def predicted(layout: Layout, rank: int, flags: dict) -> Costs:
    """services/predictions.py on one rank of so many that exist on paper only; memory as on a GPU."""
    found = []

    def look(run, sync):
        proxy = SimpleNamespace(**{name: getattr(run, name) for name in vars(run) if not name.startswith("_")})
        proxy.device, proxy.config = SimpleNamespace(type="cuda"), replace(run.config, peak_tflops=1.0)
        found.append(predict(proxy, sync))
        raise Seen

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        with (
            mock.patch.object(trainer, "predict", look),
            mock.patch.object(trainer, "require_same_flags"),
            mock.patch.object(trainer, "open_tokens"),
            mock.patch.object(trainer.Trainer, "require_same_parameters"),
            pytest.raises(Seen),
        ):
            step07.train(step07.Config(**flags))
    finally:
        dist.destroy_process_group()
    return found[0]


TINY = dict(dim=64, n_heads=16, n_kv_heads=4, n_layers=8, ffn_dim=96, vocab_size=260, seq_len=64)
TINY_MOE = dict(experts=4, expert_dim=48, shared_experts=1, dense_layers=1)


def drawn_runs(count: int) -> list[Layout]:
    """Legal layouts of up to 64 ranks, of all schedules and ZeRO stages, from a seed."""
    draw, found = random.Random(5), []
    m = replace(MODELS["tiny-moe"], **TINY, **TINY_MOE)
    while len(found) < count:
        pp, dp, cp, tp = (draw.choice(sizes) for sizes in ((1, 2, 4), (1, 2, 4), (1, 1, 2), (1, 2, 4, 8)))
        schedule = list(SCHEDULES)[len(found) % len(SCHEDULES)]
        chunks = {"interleaved": 2, "zbv": 2, "dualpipe": 2}.get(schedule, 1)
        options = dict(recompute=draw.choice(["none", "none", "full"]), sp=draw.random() < 0.7)
        options |= dict(cp_mode=draw.choice(["zigzag", "ring", "allgather"]), replicas=draw.choice([1, 1, 2]))
        x = Layout(pp, dp, cp, tp, draw.choice([1, 2, 4]), len(found) % 4, 1, 4 * dp, schedule, chunks, **options)
        if x.world <= 64 and not illegal(m, x) and (pp > 1 or schedule == "1f1b"):
            found.append(x)
    return found


@pytest.mark.parametrize("layout", drawn_runs(12), ids=lambda x: f"{x.world} ranks {x.flags()}")
def test_bytes_sent_and_state_are_those_that_the_trainer_predicts(tmp_path, layout):
    """By dimension and operation, byte for byte; and so weights, gradients, masters and moments."""
    x, draw = layout, random.Random(layout.flags())
    moe = x.ep > 1 or draw.random() < 0.3
    shape = TINY | (TINY_MOE if moe else dict(experts=0)) | dict(tied=draw.random() < 0.4)
    flags = shape | dict(model="tiny-moe", pp=x.pp, cp=x.cp, tp=x.tp, ep=x.ep, zero=x.zero, micro_batch_size=x.mbs)
    flags |= dict(global_batch_size=x.gbs, schedule=x.schedule, chunks=x.chunks, recompute=x.recompute, sp=x.sp)
    flags |= dict(cp_mode=x.cp_mode, dtype="bf16", device="cpu", save_every=0, eval_every=0, out=str(tmp_path / "run"))
    flags |= dict(zero_replicas=x.replicas)
    m, inner = replace(MODELS["tiny-moe"], **shape), x.tp * x.cp * x.dp
    for rank in {0, draw.randrange(x.pp) * inner + draw.randrange(inner), x.world - 1}:
        theirs = predicted(x, rank, flags)
        ours = sent_bytes(m, x, rank // inner, rank % inner // x.tp)
        assert ours == pytest.approx({name: n for name, n in theirs.traffic.items() if n}, rel=1e-12), rank
        ours = state_bytes(
            *rank_numbers(m, x.schedule, x.pp, x.chunks, "balanced", x.tp, x.ep)[rank // inner], x, COURSE
        )
        kinds = theirs.memory
        assert ours == (kinds["parameters"], kinds["gradients"], kinds["masters"] + kinds["moments"]), rank


RUNS = [
    Layout(1, 4, 1, 1, zero=3, mbs=2, gbs=16),
    Layout(2, 1, 1, 2, zero=0, mbs=1, gbs=4),
    Layout(2, 2, 1, 1, zero=1, mbs=1, gbs=8, schedule="interleaved", chunks=2),
    Layout(1, 1, 2, 2, zero=2, mbs=2, gbs=4, recompute="full"),
    Layout(2, 2, 1, 1, ep=2, zero=1, mbs=1, gbs=16, schedule="zb-h2"),
]


@pytest.mark.parametrize("layout", RUNS, ids=lambda x: x.flags())
def test_bytes_are_those_that_the_trainer_predicts(tmp_path, layout):
    """Of the fullest of four ranks, within 2% (slices are padded; temporary buffers are the planner's own).

    Activations of every rank, within 5%.
    """
    options = dict(
        model="debug", dim=128, n_layers=4, vocab_size=512, steps=1, dtype="bf16", device="cpu", save_every=0
    )
    options |= dict(eval_every=0, out=str(tmp_path / "run"), tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    options |= dict(zero=layout.zero, micro_batch_size=layout.mbs, global_batch_size=layout.gbs, tied=False)
    options |= dict(schedule=layout.schedule, chunks=layout.chunks, recompute=layout.recompute)
    options |= dict(experts=4 * (layout.ep > 1))
    m = replace(of_preset(MOE_PRESETS["debug"]), dim=128, n_layers=4, vocab_size=512, experts=options["experts"])
    with mock.patch("theory.footprint.buffer_bytes", lambda *args: 0.0):
        ours = held(m, layout, COURSE)
    theirs = [predicted(layout, rank, options).memory for rank in range(4)]
    # messages under way: only the trainer counts them
    assert ours.total == pytest.approx(max(sum(each.values()) for each in theirs), rel=0.02)
    ranks = ranks_of(m, replace(layout, dp=1, gbs=layout.micro_batches * layout.mbs), COURSE)
    kept = [ranks[rank * layout.pp // 4].activations for rank in range(4)]
    assert kept == pytest.approx([each["activations"] for each in theirs], rel=0.05)


def test_each_rank_of_a_ring_has_its_own_work(tmp_path):
    """Of two contiguous halves, the later one attends to three times as many pairs; the trainer predicts it by rank."""
    flags = TINY | dict(
        model="tiny-moe", experts=0, pp=1, cp=2, tp=1, cp_mode="ring", global_batch_size=4, device="cpu"
    )
    flags |= dict(save_every=0, eval_every=0, micro_batch_size=1, dtype="bf16", out=str(tmp_path / "run"))
    few, many = (predicted(Layout(cp=2, gbs=4), rank, flags).work["attention"] for rank in (0, 1))
    assert many == pytest.approx(3 * few)


def test_weights_and_flops_are_those_of_theory():
    """The planner's matrices are those of theory/flops.py, for every preset; GPT-3 has 175e9 weights."""
    for name, preset in PRESETS.items():
        m = MODELS[name]
        assert weights(attention_matmuls(m) + mlp_matmuls(m, m.ffn_dim)) == matmul_weights(preset)[0]
    for name in MOE_PRESETS:
        assert model_flops(MODELS[name]) == pytest.approx(moe_flops_per_token(MOE_PRESETS[name], "none")[0], rel=1e-12)
    assert total_weights(gpt(12288, 96, 96)) == pytest.approx(175e9, rel=0.01)


def test_memory_grows_and_shrinks_as_it_must():
    """More with larger micro-batches, less recomputation and lower ZeRO stages; less with tp."""
    m, base = MODELS["llama3-8b"], Layout(2, 4, 1, 2, zero=1, mbs=1, gbs=64)
    for recipe in RECIPES.values():
        sizes = [held(m, replace(base, mbs=mbs), recipe).total for mbs in (1, 2, 4)]
        assert sizes == sorted(sizes) and sizes[0] < sizes[2]
        sizes = [held(m, replace(base, recompute=kind), recipe).activations for kind in ("full", "selective", "none")]
        assert sizes == sorted(sizes)
        states = [sum(held(m, replace(base, zero=zero), recipe)[:3]) for zero in (2, 1, 0)]
        assert states == sorted(states) and states[0] < states[2]
        assert held(m, replace(base, tp=4, dp=2), recipe).weights < held(m, base, recipe).weights


@pytest.mark.parametrize("pp, units", [(1, 2), (4, 9)])
def test_gathered_units_are_two_layers_or_a_chunk(pp, units):
    """What ZeRO's stage 3 holds for a moment and stage 2 does not: this unit and the next; a pipeline's whole chunk."""
    m, layout = MODELS["llama3-8b"], Layout(pp, 8, gbs=8, zero=2)
    stages = rank_stages(m, "1f1b", pp, 1, "balanced")[pp // 2]  # of 4, this one has 9 layers
    found = [buffer_bytes(m, replace(layout, zero=zero), COURSE, stages) for zero in (2, 3)]
    assert found[1] - found[0] == units * sum(layer_weights(m, False, 1, 1)) * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_waits_is_seen_in_a_short_list(schedule):
    """As much waits in the first 4 p + m % p micro-batches as in all m; no schedule lets less wait than 1F1B does."""
    p, m, v = 4, 43, {"zbv": 2, "dualpipe": 2, "interleaved": 3}.get(schedule, 1)
    fullest = 0
    for rank in range(p):
        most = now = 0
        for kind, _, _ in SCHEDULES[schedule](p, m, v, rank):
            now += {"F": 1, "BW": -1, "W": -1}.get(kind, 0)
            most = max(most, now)
        states = waiting_states(schedule, p, m, v, rank)
        assert max(sum(map(sum, state)) for state in states) == most
        fullest = max(fullest, most)
    assert fullest >= p * v / (2 if schedule == "dualpipe" else 1)


# --- seconds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_long_pipeline_is_continued_from_a_short_one(schedule):
    """`pipeline_ratio` is the whole simulation's makespan within 1%; `least_bubble` is no more than its bubble."""
    v = {"zbv": 2, "dualpipe": 2, "interleaved": 3}.get(schedule, 1)
    for p, m, b, w, comm in ((4, 61, 1.0, 1.0, 0.0), (4, 64, 1.6, 0.7, 0.05), (6, 90, 2.0, 1.0, 0.2), (4, 3, 1, 1, 0)):
        lists = [SCHEDULES[schedule](p, m, v, rank) for rank in range(p)]
        whole = makespan(simulate(lists, place_stages(schedule, p, v), schedules.Costs(1.0, b, w, comm)))
        assert quick_makespan(lists, place_stages(schedule, p, v), schedules.Costs(1.0, b, w, comm)) == whole
        assert pipeline_ratio(schedule, p, m, v, b, w, comm) == pytest.approx(whole, rel=0.01), (p, m, b, w, comm)
        layout = Layout(pp=p, gbs=m, schedule=schedule, chunks=v)
        busy = m * (1 + b + w) * (1 if schedule == "dualpipe" else v)
        assert least_bubble(layout, 1.0, b, w) <= whole - busy + 1e-9


def test_ten_chunks_and_more():
    """A chunk's number may have two digits: every micro-batch goes forward and back through all twelve."""
    for rank in range(2):
        actions = SCHEDULES["interleaved"](2, 4, 12, rank)
        assert {(a.kind, a.micro_batch, a.chunk) for a in actions} == {
            (kind, i, chunk) for kind in ("F", "BW") for i in range(4) for chunk in range(12)
        }


def test_small_matmuls_are_slow_and_large_ones_reach_the_constant():
    """The part of the peak that is reached."""
    part = [2 * n**3 / matmul_seconds(H100, n, n, n) / H100.flops for n in (256, 1024, 4096, 65536)]
    assert part == sorted(part) and part[0] < 0.02 and part[-1] == pytest.approx(H100.matmul, rel=0.03)


def test_search_finds_what_trying_everything_finds():
    """The five best meshes of a small model on 16 GPUs, among all layouts one by one."""
    m, best = replace(MODELS["smollm-360m"], n_layers=8), {}
    for mesh in meshes(m, 16, 32):
        for layout in variants(m, mesh):
            bound = floor_seconds(m, replace(mesh, recompute=layout.recompute), H100)
            found = evaluate(m, layout, H100)
            assert bound <= found.seconds.step * (1 + 1e-9)
            if fits(found.held, H100):
                best[mesh] = min(best.get(mesh, float("inf")), found.seconds.step)
    found = [entry.seconds.step for entry in search(m, 16, 32, H100, count=5).best]
    assert found == pytest.approx(sorted(best.values())[:5], rel=1e-9)


def test_parts_add_up_and_have_signs():
    """Every part is at least 0, with and without pipelines, and recomputation costs time."""
    m = MODELS["mixtral-8x7b"]
    for layout in (Layout(1, 8, 1, 8, 8, gbs=64), Layout(4, 4, 2, 2, 4, gbs=64, schedule="zb-h1", recompute="full")):
        seconds = step_seconds(m, layout, H100, COURSE)
        assert min(seconds.compute, seconds.recompute, seconds.bubble, *seconds.exposed.values()) >= 0
        assert (seconds.recompute > 0) == (layout.recompute == "full")
        assert seconds.exposed["ep"] > 0


# --- held against what others measured -------------------------------------------------------------------------------


def test_errors_beside_published_runs():
    """The means and worst cases of the table in RESULTS.md, by group."""
    cases, lines = bench.read_rows(bench.Config().rows), bench.read_vtrain(bench.Config().vtrain)
    memory, times = [], []
    for case in cases:
        predicted = bench.predict(case)
        if case.id[0] in "XNT":
            memory.append(abs(bench.error(case, predicted, "mem_gib")) if "mem_gib" in case.published else 0.0)
        if case.id[0] in "SKL":
            times.append(abs(bench.error(case, predicted, bench.time_figure(case))))
    assert sum(memory) / len(memory) <= 0.05 and max(memory) <= 0.10
    assert sum(times) / len(times) <= 0.05 and max(times) <= 0.12
    took = [case.published["step_s"] for case in lines]
    seconds = [bench.predict(case)["step_s"] for case in lines]
    assert sum(abs(b / a - 1) for a, b in zip(took, seconds, strict=True)) / len(lines) <= 0.10
    groups = bench.groups_of(lines)
    choices = {
        name: bench.choice([took[i] for i in group], [seconds[i] for i in group]) for name, group in groups.items()
    }
    good = [name for name, (correlation, regret) in choices.items() if correlation >= 0.9 and regret <= 0.05]
    assert len(good) >= 3, choices  # of four: the lines of 39e9 weights with tp 2 and 4 are slower than any rule says


def test_files_with_gaps_and_in_another_order(tmp_path, capsys):
    """The same predictions with rows and columns shuffled; blanks and NaN are figures that a source does not give."""
    draw = random.Random(3)
    rows = list(csv.DictReader(bench.lines_of(bench.Config().rows)))[::3]
    lines = list(csv.DictReader(bench.lines_of(bench.Config().vtrain)))[:30:6]
    cases = {case.id: case for case in bench.read_rows(bench.Config().rows)}
    expected = {row["id"]: bench.predict(cases[row["id"]]) for row in rows}
    paths = [tmp_path / "rows.csv", tmp_path / "vtrain.csv"]
    rows[1] |= {name: "NaN" for name in bench.FIGURES}
    lines[1]["iteration time (ms)"] = ""
    for path, found in zip(paths, (rows, lines), strict=True):
        names = draw.sample(list(found[0]), len(found[0]))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(draw.sample(found, len(found)))
    out = tmp_path / "predicted.json"
    bench.bench(bench.Config(str(paths[0]), str(paths[1]), str(out)))
    entries = json.loads(out.read_text())
    assert {entry["id"]: entry["predicted"] for entry in entries[: len(rows)]} == expected
    assert sorted(len(entry["published"]) for entry in entries[len(rows) :]) == [0, 1, 1, 1, 1]
    assert [entry["id"] for entry in entries[len(rows) :]] == [1, 2, 3, 4, 5]
    assert "vTrain group" in capsys.readouterr().out
    paths[1].write_text(paths[1].read_text().splitlines()[0] + "\n")
    paths[0].write_text(paths[0].read_text().replace("A100-80", "abacus"))
    bench.bench(bench.Config(bench.Config().rows, str(paths[1])))
    with pytest.raises(UserError, match="abacus"):
        bench.read_rows(str(paths[0]))


def test_rank_correlation():
    """1 for the same order, -1 for the reverse, ties share a rank."""
    assert bench.spearman([1, 2, 3], [10, 20, 90]) == 1 and bench.spearman([1, 2, 3], [3, 2, 1]) == -1
    assert bench.spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert bench.choice([2.0, 1.0], [1.0, 3.0]) == (-1, 1.0)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(capsys, tmp_path):
    """Ten layouts, tables, alternatives, a picture; and a blackboard whose sums are the layout's."""
    picture = tmp_path / "plan.png"
    arguments = "--model smollm-1.7b --gpus 8 --gpu a100-80 --global-batch-size 64"
    assert plan.main([*arguments.split(), "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "\n10  --pp" in out and "bubble" in out and picture.stat().st_size > 10_000
    assert plan.main([*arguments.split(), "--explain", "--tp 2 --pp 2 --micro-batch-size 2"]) == 0
    out = capsys.readouterr().out
    layout = Layout(2, 2, 1, 2, mbs=2, gbs=64)
    found = evaluate(MODELS["smollm-1.7b"], layout, GPUS["a100-80"])
    assert f"{found.seconds.step:.3f} s" in out and f"{found.held.total / 2**30:.2f} GiB" in out
    *parts, whole = map(float, re.findall(r"^  \w.*? ([\d.]+) GiB", out, re.MULTILINE))
    assert len(parts) == 5 and sum(parts) == pytest.approx(whole, abs=0.03)
    times = re.findall(r"^(compute|bubble|exposed over \w+|update|step) +([\d.]+) s", out, re.MULTILINE)
    *parts, step = [float(seconds) for _, seconds in times]
    assert [*dict(times)][:2] == ["compute", "bubble"] and sum(parts) == pytest.approx(step, abs=0.003)
    kept = course_parts(MODELS["smollm-1.7b"], 2, 1, 2, True, "none", "zigzag", False).layer
    assert f"a layer keeps {kept / 2**20:.0f} MiB" in " ".join(out.split())


def test_what_fits(capsys, tmp_path):
    """The largest model, the longest sequence (and not an eighth more), and all layouts in a file."""
    assert plan.main(shlex.split("--gpus 8 --largest")) == 0
    out = capsys.readouterr().out
    m = MODELS["gpt3-22b"]
    assert "fits on 8 h100-80: gpt3-22b" in out and fits(smallest(m, 8, 8).held, H100)
    assert not fits(smallest(MODELS["mixtral-8x7b"], 8, 8).held, H100)
    assert plan.main(shlex.split("--model llama3-8b --gpus 2 --longest")) == 0
    tokens = int(capsys.readouterr().out.split("GPUs")[-1].split()[-2])
    longer = (replace(MODELS["llama3-8b"], seq_len=size) for size in (tokens, tokens * 9 // 8))
    assert [fits(smallest(x, 2, 2).held, H100) for x in longer] == [True, False]
    path = tmp_path / "all.csv"
    arguments = f"--model smollm-360m --gpus 2 --global-batch-size 4 --picture '' --list {path}"
    assert plan.main(shlex.split(arguments)) == 0
    rows = list(csv.DictReader(path.open()))
    legal, best = capsys.readouterr().out.split("legal layouts")[0].split()[-1], min(float(r["step_s"]) for r in rows)
    found = search(replace(MODELS["smollm-360m"]), 2, 4, H100).best[0]
    assert len(rows) == int(legal) and best == pytest.approx(found.seconds.step, abs=1e-4)


def test_calibration_says_if_there_is_no_gpu(capsys):
    """One line, exit status 2."""
    with mock.patch("torch.cuda.is_available", return_value=False):
        assert calibrate.main() == 2
    assert "PyTorch sees no GPU here" in capsys.readouterr().err


def test_constants_are_work_over_seconds():
    """If everything took a second: FLOPs of a matmul, and two reads and a write of 2^28 numbers in bf16."""
    rand = partial(torch.empty, device="meta")
    with (
        mock.patch.object(calibrate, "seconds", lambda *_: 1.0),
        mock.patch("torch.randn", lambda *shape, dtype, device: rand(shape, dtype=dtype)),
        mock.patch("torch.zeros", lambda *shape, device: rand(shape)),
    ):
        found = calibrate.measure()
    assert found == {"matmul, FLOP/s": 2 * 8192**3, "hbm, bytes/s": 3 * 2 * 2**28, "launch, s": 1.0}


def test_the_largest_plan_does_little_work():
    """llama3-405b on 16,384 GPUs: of all legal layouts, 1% are bounded one by one, and 1 in 5,000 is simulated."""
    bars, bounded, memory = [], mock.Mock(side_effect=step_seconds), mock.Mock(side_effect=held)
    with mock.patch("theory.search.step_seconds", bounded), mock.patch("theory.search.held", memory):
        found = search(MODELS["llama3-405b"], 16384, 16384, H100, bar=lambda tries: bars.append(len(tries)) or tries)
    assert len(found.best) == 10 and found.legal > 400_000 and bars == [bars[0]] * 2
    assert bars[0] < found.legal / 25  # pairs of a mesh and a kind of recomputation
    assert memory.call_count < 0.015 * found.legal and bounded.call_count < 0.01 * found.legal
    simulated = [call for call in bounded.call_args_list if call.kwargs.get("simulated", True)]
    assert len(simulated) == found.timed < found.legal / 5000


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_what_is_sent_again_over_tp_takes_its_time(sp, recompute):
    """Of the four collectives of a forward, three (of two all-reduces, one): in seconds as in bytes of the traffic."""
    again = Layout(1, 2, 1, 4, gbs=8, sp=sp, recompute=recompute)
    once, m = replace(again, recompute="none"), MODELS["llama3-8b"]
    net, whole = network(again, "tp"), 2 * m.seq_len * m.dim
    sent = [sum(n for (dim, _), n in sent_bytes(m, x).items() if dim == "tp") for x in (again, once)]
    seconds = [step_seconds(m, x, H100, COURSE).exposed["tp"] for x in (again, once)]
    times = again.micro_batches * m.n_layers * (3 if sp else 2)
    assert sent[0] - sent[1] == pytest.approx(times * ring(net, whole))
    assert seconds[0] - seconds[1] == pytest.approx(times * collective_seconds(H100, net, ring(net, whole)))


@pytest.mark.parametrize("sp", [True, False])
@pytest.mark.parametrize("dp", [1, 4])
def test_a_message_takes_its_bytes_and_a_latency(dp, sp):
    """A slice from each rank of tp over the boundary, within a node or between two; without SP, gathered there."""
    layout, m = Layout(2, dp, 1, 4, gbs=8, sp=sp), MODELS["llama3-8b"]
    whole, tp = 2 * m.seq_len * m.dim, network(layout, "tp")
    speed, latency = (H100.within, LATENCY) if dp == 1 else (H100.between, LATENCY_BETWEEN)
    gather = 0.0 if sp else collective_seconds(H100, tp, ring(tp, whole))
    assert boundary_seconds(m, layout, H100, COURSE) == pytest.approx(whole / 4 / speed + latency + gather, rel=1e-9)


@pytest.mark.parametrize("sp", [True, False])
def test_tokens_for_experts_take_their_time(sp):
    """To the experts and back, in a layer's forward and in its backward; with SP, each rank of tp sends its own."""
    layout, m = Layout(1, 8, 1, 2, ep=4, gbs=8, sp=sp), MODELS["mixtral-8x7b"]
    net, rows = network(layout, "ep"), m.seq_len * m.experts_per_token / (2 if sp else 1)
    one_way = collective_seconds(H100, net, ring(net, 2 * rows * m.dim))
    assert step_seconds(m, layout, H100, COURSE).exposed["ep"] == pytest.approx(4 * m.n_layers * one_way)


def test_a_rank_reads_the_experts_that_it_has():
    """With ep 4, as many tokens meet a quarter of the matrices: the others are not read from memory."""
    m = MODELS["mixtral-8x7b"]
    one, four = (layer_work(m, Layout(1, 8, ep=ep, gbs=8), H100, COURSE, True).f["matmul"] for ep in (1, 4))
    assert one - four == pytest.approx(2 * 3 * m.dim * m.expert_width * (m.experts - m.experts // 4) / H100.hbm)


@pytest.mark.parametrize("name", ["llama3", "megatron-2022"])
def test_selective_recomputation_does_attention_again_where_it_was_kept(name):
    """One kernel keeps no scores and has nothing to do again; several kernels have."""
    layout = Layout(1, 8, gbs=8, recompute="selective")
    seconds = step_seconds(MODELS["llama3-8b"], layout, H100, RECIPES[name])
    assert (seconds.recompute > 0) == (not RECIPES[name].flash)


def test_what_lives_for_a_moment_counts_against_the_memory():
    """By hand: without recomputation, backward of SwiGLU's product has three gradients of width f at a time."""
    m = replace(MODELS["llama3-8b"], vocab_size=8)  # no loss to speak of, and an MLP whose tokens weigh more than it
    layout, middle = Layout(zero=0, mbs=8, gbs=8), frozenset({False})
    moment = course_moment(m, layout, 1, middle, False, False)
    tokens = 8 * m.seq_len
    # the output's gradient and the three are there; the product that down_proj kept has gone
    assert moment == pytest.approx(2 * tokens * (m.dim + 3 * m.ffn_dim - m.ffn_dim), rel=1e-3)
    assert held(m, layout, COURSE).buffers == CONTEXT + course_moment(m, layout, 1, middle, True, True)


def test_the_vocabulary_counts_for_a_moment_where_it_is():
    """In backward of the first stage, the embedding's gradient; a stage in the middle has no vocabulary."""
    small, layout, layers = replace(MODELS["llama3-8b"], vocab_size=8), Layout(zero=0, gbs=8), frozenset({False})
    large = replace(small, vocab_size=2**20)
    first, middle = ([course_moment(m, layout, 1, layers, at, False) for m in (small, large)] for at in (True, False))
    assert middle[0] == middle[1] and first[1] > 2 * 2**20 * large.dim > first[0]


def test_dualpipe_pays_for_its_second_copy():
    """The gradients of a pair are summed: bytes over a card's bandwidth; and 1F1B sums only a tied matrix."""
    layout = Layout(4, 8, 1, 4, zero=0, gbs=64, schedule="dualpipe", chunks=2)
    m = MODELS["llama3-8b"]
    numbers = sum(rank_numbers(m, "dualpipe", 4, 2, "balanced", 4, 1)[0])
    assert mirror_seconds(m, layout, H100, COURSE) == pytest.approx(numbers * 4 / H100.between, rel=0.01)
    plain = replace(layout, schedule="1f1b", chunks=1)
    assert mirror_seconds(m, plain, H100, COURSE) == 0 < mirror_seconds(replace(m, tied=True), plain, H100, COURSE)


MISTAKES = {
    "--gpu abacus": "no such GPU",
    "--model gpt5": "no such model",
    "--gpus 0": "--gpus is 0",
    "--gpus many": "--gpus",
    "--model llama3-405b --gpus 8 --global-batch-size 8": "GiB too much",
    "--gpus 8 --explain '--tp 3'": "does not divide",
    "--gpus 8 --explain '--zero 9'": "--zero",
    "--gpus 8 --global-batch-size 7 --explain '--tp 2'": "cannot be dealt",
    "--nonsense": "--nonsense",
    "--gpus 8 --explain '--tp 2 \"'": "No closing quotation",
    "--gpus 8 --explain '--pp 2 --schedule zbv'": "another number of chunks",
    "--gpus 37 --global-batch-size 3": "no layout of 37 GPUs is legal",
    "--gpus 8 --largest --longest": "not allowed with",
    "--model gpt3-175b --gpus 8 --longest": "GiB too much",
    "--list nowhere/all.csv": "no folder nowhere",
    "--picture nowhere/plan.png": "no folder nowhere",
    "--gpus 1000000": "counts up to",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(capsys, arguments):
    """On stderr, with status 2; a model that fits nowhere says what would be needed."""
    assert plan.main(shlex.split(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and MISTAKES[arguments] in error
