"""All five dimensions at once: equal to one process under every legal layout of 8 ranks, and a sample of those of 16.

Every equivalence is in fp64 to 1e-10 against step07 in one process, on every rank: losses, norms, gathered gradients
and parameters; and all ranks together show every gradient and parameter.
"""

import itertools
import json
import random
from contextlib import nullcontext
from unittest import mock

import pytest

import step07_moe_ep as step07
from common import UserError
from common.schedules import SCHEDULES, chunks_per_rank
from services.checks import check_ep, choose_ep, mesh_sizes, refuse
from services.run import Run
from tests import equivalence
from tests.equivalence import SMALL, label
from tests.pool import RankError, with_figures

STEP = "step07_moe_ep"
MODES = ["zigzag", "ring", "allgather", "ulysses"]
MODEL = dict(
    model="tiny-moe",
    n_layers=5,
    n_heads=8,
    n_kv_heads=2,
    experts=8,
    experts_per_token=2,
    expert_dim=16,
    moe_every=2,
    shared_experts=1,
    balance_weight=0.5,
    z_loss=0.1,
    global_batch_size=8,
    micro_batch_size=1,
    steps=2,
)


def layouts(world: int) -> list[dict]:
    """Every legal layout: all factorizations x ep x ZeRO x SP; schedules, cp modes, exchanges and models take turns."""
    found, turn = [], itertools.count()
    sizes = [2**i for i in range(world.bit_length())]
    for pp, dp, cp, tp in itertools.product(sizes, repeat=4):
        if pp * dp * cp * tp != world or 8 % tp:
            continue
        for ep, zero, sp in itertools.product(sizes, range(4), (True, False) if tp > 1 else (True,)):
            if dp * cp % ep or 8 % ep:
                continue
            n = next(turn)
            names = [s for s in SCHEDULES if not refuse(s, pp, max(3, pp), chunks_per_rank(s) or 2)]
            mode = MODES[n % 4] if 8 // tp % cp == 0 else MODES[n % 3]
            flags = dict(pp=pp, cp=cp, tp=tp, ep=ep, zero=zero, sp=sp, schedule=names[n % len(names)], cp_mode=mode)
            found.append(flags | dict(ep_mode=["alltoall", "allgather"][n // 2 % 2]))
    return found


def base_of(number: int, layout: dict, world: int) -> dict:
    """The model of a layout: layers enough for its stages; tied or not, SGD or AdamW, kinds of balance, in turn.

    Each pipeline has three micro-batches, or as many as it has ranks.
    """
    stages = layout["pp"] * (2 if layout["schedule"] in ("interleaved", "zbv") else 1)
    shape = dict(n_layers=max(4, stages), seq_len=32 if layout["cp"] * layout["tp"] > 8 else 16)
    turns = dict(
        tied=number % 2 == 0, optimizer=["sgd", "adamw"][number // 2 % 2], balance=["loss", "bias"][number % 2]
    )
    turns["capacity_factor"] = 1.5 if number % 3 == 0 else 0.0
    dp = world // (layout["pp"] * layout["cp"] * layout["tp"])
    return MODEL | turns | shape | dict(global_batch_size=dp * max(3, layout["pp"]))


def check(pool, number: int, layout: dict) -> float:
    """`equivalence.check` against step07 in one process."""
    return equivalence.check(pool, STEP, base_of(number, layout, pool.world), layout, against=step07)


# --- equal to one process --------------------------------------------------------------------------------------------

EIGHT = [
    dict(pp=2, cp=2, tp=2, ep=2, zero=1, schedule="1f1b"),
    dict(pp=2, cp=2, tp=2, ep=2, zero=3, schedule="zbv", cp_mode="ring", ep_mode="allgather"),
    dict(pp=2, cp=2, tp=2, ep=2, zero=0, schedule="dualpipe", sp=False),
    dict(pp=2, cp=2, tp=1, ep=4, zero=2, schedule="interleaved", cp_mode="allgather"),
    dict(pp=4, cp=1, tp=1, ep=2, zero=3, schedule="zb-h1"),
    dict(pp=4, cp=2, tp=1, ep=2, zero=1, schedule="zb-h2", cp_mode="ulysses"),
    dict(pp=2, cp=1, tp=2, ep=2, zero=2, schedule="afab"),
    dict(pp=2, cp=1, tp=4, ep=1, zero=0, schedule="zb-h1", sp=False),
]


@pytest.mark.picked(1, 5)
@pytest.mark.parametrize("number, layout", list(enumerate(EIGHT)), ids=str)
def test_eight_ranks_equal_one_process(pools, number, layout):
    """ep x pp, and with cp, tp, dp and ZeRO."""
    check(pools(8), number, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "number, layout",
    [
        (0, dict(pp=2, cp=2, tp=2, ep=2, zero=1, schedule="1f1b")),
        (1, dict(pp=2, cp=2, tp=2, ep=4, zero=3, schedule="zbv")),
        (2, dict(pp=2, cp=2, tp=2, ep=2, zero=2, schedule="dualpipe", cp_mode="allgather", sp=False)),
    ],
    ids=str,
)
def test_sixteen_ranks_equal_one_process(pools, number, layout):
    """Five dimensions, every one of them at 2 (dp 2 x cp 2 x tp 2 x pp 2, ep 2 or 4 inside dp x cp)."""
    check(pools(16), number, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number, layout", list(enumerate(layouts(8))), ids=str)
def test_every_layout_of_eight_ranks_equals_one_process(pools, number, layout):
    """All factorizations x ep x ZeRO x SP."""
    check(pools(8), number, layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number, layout", random.Random(16).sample(list(enumerate(layouts(16))), 32), ids=str)
def test_layouts_of_sixteen_ranks_equal_one_process(pools, number, layout):
    """A sample drawn with a fixed seed."""
    check(pools(16), number, layout)


# --- the trainer around it -------------------------------------------------------------------------------------------


def run_on_rank(options: dict) -> tuple[list[dict], dict, dict]:
    """Runs on every rank: train; the history, bytes sent in the last step, bytes predicted.

    Only a run that is validated also draws its figures.
    """
    seen: dict = {}
    finish = Run.finish

    def spy(self, predicted, traffic):
        seen.update(traffic)
        finish(self, predicted, traffic)

    instruments = nullcontext if options["eval_every"] else equivalence.without_instruments
    with mock.patch.object(Run, "finish", spy), instruments():
        history = step07.train(step07.Config(**options)).history
    sent = {(dim, op): n for dim, by_operation in history[-1]["traffic"].items() for op, n in by_operation.items()}
    return history, sent, seen


@pytest.mark.picked(1)
@pytest.mark.parametrize(
    "layout",
    [
        dict(pp=2, cp=2, tp=2, ep=2, zero=1, schedule="1f1b"),
        dict(pp=2, cp=2, tp=2, ep=2, zero=3, schedule="interleaved", sp=False),
        dict(pp=2, cp=2, tp=1, ep=4, zero=0, schedule="dualpipe"),
    ],
    ids=label,
)
def test_traffic_is_what_theory_says(pools, tmp_path, layout):
    """Byte by byte on every rank in every dimension; where it depends on the routing, all experts being chosen."""
    options = SMALL | MODEL | dict(experts_per_token=8, tied=True, n_layers=6, steps=1, global_batch_size=4) | layout
    for _, sent, predicted in pools(8).run(run_on_rank, options | dict(out=str(tmp_path / "run"))):
        for purpose in ("(metrics)", "(state)", "(check)"):
            sent = {name: n for name, n in sent.items() if not name[1].endswith(purpose)}
        predicted = {name: n for name, n in predicted.items() if n}
        assert sent.keys() == predicted.keys()
        for name, n_bytes in sent.items():
            assert n_bytes == pytest.approx(predicted[name], rel=1e-12), name


@pytest.mark.parametrize(
    "world, sizes", [(1, (1, 1, 1, 1)), (2, (2, 1, 1, 1)), (4, (2, 1, 2, 1)), (8, (2, 1, 2, 2)), (16, (2, 2, 2, 2))]
)
def test_default_layouts_show_what_the_ranks_allow(world, sizes):
    """pp, dp, cp, tp without flags; ep 2 as soon as there are two data ranks."""
    config = step07.Config()
    pp, dp, cp, tp = mesh_sizes(config, world).values()
    assert (pp, dp, cp, tp) == sizes
    assert choose_ep(config, config.model_config(), dp * cp) == (2 if dp * cp > 1 else 1)
    check_ep(config, world)


def test_the_first_command_is_short():
    """Two slow cores took 0.41 s for a micro-batch, whatever is in it: 160 of them are to take about a minute."""
    config = step07.Config()
    (pp, dp, _, _), batch = mesh_sizes(config, 8).values(), config.global_batch_size
    micro_batches = batch // dp // config.micro_batch_size
    assert config.steps * micro_batches <= 160 and config.steps * batch * config.model_config().seq_len <= 170_000
    assert micro_batches >= 2 * pp  # else the picture of the pipeline shows little


def test_a_run_leaves_its_figures(pools, tmp_path, uneven_data):
    """Loss, timeline, traffic and load of the experts; the same metrics on every rank."""
    options = SMALL | MODEL | dict(eval_every=2, eval_sequences=4, global_batch_size=4, dtype="fp32")
    options |= dict(dataset=uneven_data, out=str(tmp_path / "run"))
    found = pools(8).run(with_figures, run_on_rank, options)
    for key in ("loss", "grad_norm", "validation_loss", "expert_load"):
        assert len({json.dumps([row.get(key) for row in history]) for history, _, _ in found}) == 1
    for name in ("loss.png", "timeline.png", "traffic.png", "expert_load.png"):
        assert (tmp_path / "run" / name).stat().st_size > 5_000


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (dict(pp=2, cp=2, tp=4), r"--pp 2 x --cp 2 x --tp 4 = 16 does not divide the 8 .* use --pp among \[1\]"),
        (dict(pp=2, cp=2, tp=2, ep=4), r"--ep 4 does not divide dp x cp = 1 x 2 = 2"),
        (dict(pp=1, cp=2, tp=2, ep=3), r"--ep 3 does not divide dp x cp = 2 x 2 = 4 .* \[1, 2, 4\]"),
        (dict(pp=1, cp=2, tp=1, ep=8, experts=12), r"--experts 12 cannot be dealt to --ep 8 ranks"),
        (dict(pp=8, n_layers=5), "--n-layers 5 cannot be cut into 8 stages"),
    ],
    ids=str,
)
def test_bad_flags(flags, complaint):
    """One line that names the flags and legal choices."""
    with pytest.raises(UserError, match=complaint):
        check_ep(step07.Config(**SMALL | MODEL | flags), 8)


def test_bad_flags_reach_every_rank(pools, tmp_path):
    """The same error on all, and nobody hangs."""
    with pytest.raises(RankError, match="does not divide the 8"):
        pools(8).run(run_on_rank, SMALL | MODEL | dict(pp=2, cp=2, tp=4, out=str(tmp_path / "run")))


def test_a_rank_without_experts_takes_part(pools):
    """A pipeline stage may hold dense layers only, while others exchange tokens."""
    base = MODEL | dict(n_layers=4, dense_layers=3, moe_every=1, optimizer="sgd")
    layout = dict(pp=2, cp=2, tp=1, ep=2, zero=1)
    assert equivalence.check(pools(4), STEP, base, layout, against=step07) < 1e-10
