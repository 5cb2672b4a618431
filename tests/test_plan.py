"""The planner: its layouts are legal, its bytes the trainer's, its search complete, its errors bounded."""

import random
import shlex
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

import step07_moe_ep as step07
from common import UserError, trainer
from common.model import PRESETS
from common.moe import MOE_PRESETS
from common.schedules import SCHEDULES, Costs, place_stages, simulate
from services.checks import check, mesh_sizes, split_layers
from services.flags import parse
from tests import equivalence
from tests.bench import plan as bench
from theory import layouts, plan
from theory.bubble import makespan
from theory.flops import matmul_weights, moe_flops_per_token
from theory.footprint import held, waiting_states
from theory.gpus import GPUS
from theory.layouts import Layout, illegal, meshes, variants
from theory.recipes import RECIPES
from theory.search import COURSE, evaluate, fits, floor_seconds, search
from theory.seconds import least_bubble, matmul_seconds, pipeline_ratio, step_seconds
from theory.shapes import MODELS, attention_matmuls, gpt, mlp_matmuls, model_flops, of_preset, total_weights, weights

H100 = GPUS["h100-80"]
SMALL = replace(MODELS["tiny-moe"], n_layers=8, n_heads=16, n_kv_heads=4, dim=512, ffn_dim=1536, expert_dim=768)
SMALL_FLAGS = dict(model="tiny-moe", n_layers=8, n_heads=16, n_kv_heads=4, dim=512, ffn_dim=1536, expert_dim=768)


# --- layouts ---------------------------------------------------------------------------------------------------------


def accepted(layout: Layout) -> bool:
    """Whether the course's own checks take these flags."""
    flags = dict(pp=layout.pp, cp=layout.cp, tp=layout.tp, ep=layout.ep, zero=layout.zero, schedule=layout.schedule)
    flags |= dict(micro_batch_size=layout.mbs, global_batch_size=layout.gbs, chunks=layout.chunks)
    flags |= dict(recompute=layout.recompute, sp=layout.sp, cp_mode=layout.cp_mode)
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


def predicted_on_rank(options: dict) -> dict[str, int]:
    """Runs on every rank: what the trainer predicts for its memory, as it would on a GPU."""
    seen: dict[str, int] = {}
    own = trainer.predict

    def as_on_gpu(run, sync):
        gpu = SimpleNamespace(type="cuda")
        proxy = SimpleNamespace(**{name: getattr(run, name) for name in vars(run) if not name.startswith("_")})
        proxy.device, proxy.config = gpu, replace(run.config, peak_tflops=1.0)
        seen.update(own(proxy, sync).memory)
        return own(run, sync)

    with mock.patch.object(trainer, "predict", as_on_gpu), equivalence.without_instruments():
        step07.train(step07.Config(**options))
    return seen


RUNS = [
    Layout(1, 4, 1, 1, zero=3, mbs=2, gbs=16),
    Layout(2, 1, 1, 2, zero=0, mbs=1, gbs=4),
    Layout(2, 2, 1, 1, zero=1, mbs=1, gbs=8, schedule="interleaved", chunks=2),
    Layout(1, 1, 2, 2, zero=2, mbs=2, gbs=4, recompute="full"),
]


@pytest.mark.parametrize("layout", RUNS, ids=lambda x: x.flags())
def test_bytes_are_those_that_the_trainer_predicts(pools, tmp_path, layout):
    """Of the fullest of four ranks, within 1% (slices are padded; temporary buffers are the planner's own)."""
    options = dict(
        model="debug", dim=128, n_layers=4, vocab_size=512, steps=1, dtype="bf16", device="cpu", save_every=0
    )
    options |= dict(eval_every=0, out=str(tmp_path / "run"), tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=1)
    options |= dict(zero=layout.zero, micro_batch_size=layout.mbs, global_batch_size=layout.gbs, tied=False)
    options |= dict(schedule=layout.schedule, chunks=layout.chunks, recompute=layout.recompute)
    m = replace(of_preset(MOE_PRESETS["debug"]), dim=128, n_layers=4, vocab_size=512)
    with mock.patch("theory.footprint.buffer_bytes", lambda *args: 0.0):
        ours = held(m, layout, COURSE)
    theirs = max(sum(found.values()) for found in pools(4).run(predicted_on_rank, options))
    assert ours.total == pytest.approx(theirs, rel=0.01)


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
        whole = makespan(simulate(lists, place_stages(schedule, p, v), Costs(1.0, b, w, comm)))
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
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(capsys, arguments):
    """On stderr, with status 2; a model that fits nowhere says what would be needed."""
    assert plan.main(shlex.split(arguments)) == 2
    error = capsys.readouterr().err.strip()
    assert "\n" not in error and MISTAKES[arguments] in error
