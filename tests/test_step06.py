"""Pipeline parallelism: equal to one device under every schedule; traffic, activations; faults are noticed.

Every equivalence is in fp64 to 1e-10 against step01, on every rank: losses, norms, gathered gradients and parameters;
and all ranks together show every gradient and parameter.
"""

import io
import itertools
import os
import signal
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import step01_single_gpu as step01
import step06_pipeline as step06
from common import UserError
from common.layout import materialize
from common.model import Decoder
from common.schedules import SCHEDULES, Action, Plan, place_stages
from common.trainer import start
from services import variants
from services.checks import check_pp, choose_chunks, plan_pipeline, split_layers
from services.launch import open_mesh
from services.run import Run
from tests import bounds, equivalence, faults
from tests.equivalence import SMALL, check, difference, label
from tests.pool import RankError, with_figures
from theory.bubble import in_flight
from theory.flops import balance
from theory.memory import cp_activation_bytes, stage_parts
from theory.traffic import UnitShape, zero_stage_traffic

STEP = "step06_pipeline"
CPU = torch.device("cpu")
BASE = dict(optimizer="sgd", n_layers=4, global_batch_size=8, steps=2)
PLAIN = dict(cp=1, tp=1)
NAMES = [*SCHEDULES, "zb-auto"]


# --- equal to one device ---------------------------------------------------------------------------------------------


@pytest.mark.picked(5, 7, 10, 22, 24, 25, 27, 28)
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("p, m", [(4, 5), (2, 8), (4, 8), (2, 3)], ids=str)
def test_equals_one_device(pools, schedule, p, m):
    """Every schedule, with few and many micro-batches; layers that do not divide."""
    stages = p * (2 if schedule in ("interleaved", "zbv") else 1)
    base = BASE | dict(n_layers=stages + 1, global_batch_size=m, steps=equivalence.STEPS)
    check(pools(p), STEP, base, PLAIN | dict(pp=p, schedule=schedule))


@pytest.mark.picked(2, 3)
@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "dualpipe"])
def test_equals_one_device_on_three_ranks(pools, schedule):
    """An odd number of stages, seven layers or nine; AdamW."""
    layout = PLAIN | dict(pp=3, schedule=schedule)
    check(pools(3), STEP, BASE | dict(n_layers=7, optimizer="adamw", global_batch_size=4), layout)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", NAMES)
def test_equals_one_device_on_eight_ranks(pools, schedule):
    """Eight ranks, up to sixteen stages, nine micro-batches."""
    base = BASE | dict(n_layers=16 if schedule in ("interleaved", "zbv") else 9, global_batch_size=9)
    check(pools(8), STEP, base, PLAIN | dict(pp=8, schedule=schedule))


@pytest.mark.picked(7)
@pytest.mark.parametrize(
    "layout",
    [
        dict(pp=2, cp=1, tp=2, zero=3, schedule="zbv"),
        dict(pp=2, cp=2, tp=2, zero=0, schedule="zb-h2", cp_mode="ring"),
        dict(pp=2, cp=2, tp=1, zero=3, schedule="interleaved"),
        dict(pp=2, cp=2, tp=1, zero=2, schedule="dualpipe", cp_mode="allgather"),
        dict(pp=4, cp=1, tp=1, zero=1, schedule="zb-h1"),
        dict(pp=4, cp=1, tp=2, sp=False, schedule="1f1b"),
        dict(pp=2, cp=1, tp=4, sp=False, tp_overlap=False, schedule="zbv"),
        dict(pp=4, cp=2, tp=1, zero=3, schedule="dualpipe", cp_mode="ulysses"),
        dict(pp=4, cp=1, tp=2, zero=1, schedule="zb-auto", zb_memory=2.0, zb_costs="18.522,18.086,9.337,0.601"),
    ],
    ids=label,
)
def test_equals_one_device_with_all_dimensions(pools, layout):
    """Pp x tp, pp x cp, pp x dp x ZeRO on eight ranks, with sequence parallelism and without."""
    base = BASE | dict(n_heads=8, seq_len=16, n_layers=5, tied=True, optimizer="adamw", global_batch_size=12)
    check(pools(8), STEP, base, layout)


@pytest.mark.picked(0, 3, 7, 10)
@pytest.mark.parametrize(
    "base, layout",
    [
        (dict(tied=True, n_layers=5), dict(pp=4, schedule="1f1b", zero=0)),
        (dict(tied=True, n_layers=8), dict(pp=4, schedule="zbv", zero=0)),
        (dict(tied=True, n_layers=8), dict(pp=4, schedule="interleaved", zero=2)),
        (dict(tied=True, optimizer="adamw"), dict(pp=4, schedule="dualpipe", zero=0)),
        (dict(recompute="full"), dict(pp=4, schedule="zb-h1")),
        (dict(recompute="selective"), dict(pp=2, tp=2, schedule="zb-h2")),
        (dict(recompute="full"), dict(pp=2, tp=2, sp=False, schedule="zbv", zero=0)),
        (dict(recompute="selective"), dict(pp=2, cp=2, schedule="dualpipe", zero=3)),
        (dict(n_kv_heads=1), dict(pp=2, tp=2, schedule="interleaved", zero=3)),
        (dict(micro_batch_size=2, grad_clip=0.0), dict(pp=2, schedule="1f1b")),
        (dict(n_layers=7), dict(pp=2, schedule="interleaved", chunks=3, pp_split="1,2,1,1,1,1", zero=3)),
        (dict(), dict(pp=4, schedule="1f1b", sync="naive", zero=0)),
        (dict(), dict(pp=2, schedule="zb-h1", sync="overlap", zero=0)),
    ],
    ids=label,
)
def test_equals_one_device_for_every_kind_of_model(pools, base, layout):
    """Tied weights, recomputation, few key/value heads, several sequences at once, splits by hand, every sync."""
    check(pools(4), STEP, BASE | base, PLAIN | layout)


@pytest.mark.picked(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_equals_one_device_with_uneven_targets(pools, uneven_data, schedule):
    """Micro-batches with few or no targets, AdamW, dp 2."""
    base = dict(optimizer="adamw", dataset=uneven_data, steps=4)
    check(pools(4), STEP, BASE | base, PLAIN | dict(pp=2, schedule=schedule, zero=1))


@pytest.mark.picked(1)
@pytest.mark.parametrize(
    "layout", [dict(pp=4, schedule="zb-h1", zero=0), dict(pp=2, schedule="zbv", zero=3)], ids=label
)
def test_equals_one_device_with_frozen_parameters(pools, layout):
    """A matrix and a norm that do not train get no gradient and stay."""
    check(pools(4), STEP, BASE, PLAIN | layout, "frozen")


@pytest.mark.exhaustive
@pytest.mark.parametrize("times", ["p", "p+1", "2p", "4p"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_every_schedule_equals_one_device(pools, p, schedule, tied, times):
    """The full product, SGD, ZeRO 1."""
    if schedule == "dualpipe" and p % 2:
        pytest.skip("an even number of ranks")
    m = dict(zip(("p", "p+1", "2p", "4p"), (p, p + 1, 2 * p, 4 * p), strict=True))[times]
    base = BASE | dict(n_layers=2 * p + 1, tied=tied, global_batch_size=m)
    check(pools(p), STEP, base, PLAIN | dict(pp=p, schedule=schedule))


SIZES = [(2, 1, 1, True), (2, 2, 1, True), (4, 2, 1, True), (4, 1, 1, True)]
SIZES += [(*sizes, sp) for sizes in ((2, 1, 2), (2, 2, 2), (4, 1, 2)) for sp in (True, False)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("number, layout", list(enumerate(itertools.product(SIZES, NAMES))), ids=str)
def test_every_layout_of_eight_ranks_equals_one_device(pools, number, layout):
    """All sizes x schedules; the stages of ZeRO, tied weights and recomputation take turns."""
    (pp, cp, tp, sp), schedule = layout
    turns = dict(tied=number % 2 == 0, recompute=("none", "selective", "full")[number % 3])
    base = BASE | turns | dict(n_heads=8, n_layers=9, optimizer="adamw", global_batch_size=16)
    check(pools(8), STEP, base, dict(pp=pp, cp=cp, tp=tp, schedule=schedule, zero=number // 7 % 4, sp=sp))


@pytest.mark.picked(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_fp32_drifts_by_rounding_only(pools, schedule):
    """fp32 gradients, losses and parameters stay within 1e-5 of one device."""
    check(pools(2), STEP, BASE | dict(dtype="fp32", lr=0.01), PLAIN | dict(pp=2, schedule=schedule))


def column_on_rank(options: dict, key: str = "loss") -> list[float]:
    """Runs on every rank: train; returns one column of the metrics."""
    return columns_on_rank(options, key)[0]


def history_on_rank(options: dict) -> list[dict]:
    """Runs on every rank: train, and draw the figures of a run."""
    return step06.train(step06.Config(**options)).history


def columns_on_rank(options: dict, *keys: str) -> list[list[float]]:
    """Runs on every rank: train; returns columns of the metrics."""
    with equivalence.without_instruments():
        history = step06.train(step06.Config(**options)).history
    return [[row[key] for row in history if key in row] for key in keys]


@pytest.mark.numerics
@pytest.mark.picked(0)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_stay_near(pools, tmp_path, dtype):
    """Within `bounds.DRIFT` nats of one device's training over 10 steps, on all ranks alike; W sums in fp32, too."""
    options = SMALL | BASE | dict(optimizer="adamw", dtype=dtype, lr=0.01, steps=10)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    layout = PLAIN | dict(pp=2, schedule="zb-h1", out=str(tmp_path / "two"))
    losses = pools(2).run(column_on_rank, options | layout)
    assert losses[0] == losses[1]
    assert max(abs(a - row["loss"]) for a, row in zip(losses[0], expected, strict=True)) < bounds.DRIFT


def test_validation_is_one_devices(pools, tmp_path, uneven_data):
    """Validation during training gives step01's numbers, and leaves training as it is."""
    options = SMALL | BASE | dict(eval_every=1, eval_sequences=6, dataset=uneven_data)
    expected = step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history
    layouts = (
        dict(pp=4, schedule="1f1b", zero=0),
        dict(pp=2, cp=2, schedule="dualpipe"),
        dict(pp=2, schedule="zbv", zero=3),
    )
    for layout in layouts:
        more = PLAIN | layout | dict(out=str(tmp_path / "four"))
        for found in pools(4).run(columns_on_rank, options | more, "validation_loss", "loss"):
            for key, column in zip(("validation_loss", "loss"), found, strict=True):
                assert column == pytest.approx([row[key] for row in expected], rel=1e-10)


def test_one_process_equals_step01(tmp_path):
    """pp 1 on one process is step01, under every schedule that one rank can run."""
    options = SMALL | dict(micro_batch_size=8)
    rows = [row["loss"] for row in step01.train(step01.Config(**options, out=str(tmp_path / "one"))).history]
    for schedule in ("1f1b", "afab", "zb-h1", "interleaved", "zbv"):
        more = dict(zero=0, schedule=schedule, out=str(tmp_path / "six"))
        assert columns_on_rank(options | more, "loss")[0] == pytest.approx(rows, rel=bounds.RUN["fp64"])


# --- whose layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers, n, first, last", [(5, 3, 0, 0), (9, 4, 0, 2.5), (7, 7, 1, 1), (12, 5, 0.3, 3)])
def test_balance_is_the_best_split(n_layers, n, first, last):
    """Compared with all splits: the smallest dearest stage, then the least sum of squares."""
    costs = [1.0] * n_layers
    costs[0] += first
    costs[-1] += last

    def cost(lengths) -> tuple[float, float]:
        ends = list(itertools.accumulate(lengths))
        sums = [sum(costs[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
        return max(sums), sum(x * x for x in sums)

    splits = [s for s in itertools.product(range(1, n_layers + 1), repeat=n) if sum(s) == n_layers]
    assert cost(balance(costs, n)) == pytest.approx(min(map(cost, splits)))


def test_the_head_counts_in_the_split():
    """A large vocabulary takes layers away from the last stage; --pp-split overrides."""
    m = step06.Config(model="tiny", n_layers=8, vocab_size=20000).model_config()
    assert split_layers(step06.Config(), m, 4)[-1] == 1
    even = step06.Config(model="tiny", n_layers=8).model_config()
    assert split_layers(step06.Config(), even, 4) == [2, 2, 2, 2]
    assert split_layers(step06.Config(pp_split="1,1,1,5"), even, 4) == [1, 1, 1, 5]


def stage_on_rank(options: dict) -> tuple[list[str], list[tuple[bool, bool, list[str]]]]:
    """Runs on every rank: names of the parameters kept, after their values were compared with step01's; the chunks."""
    config = step06.Config(**options)
    with torch.device("meta"):
        plain, model = Decoder(config.model_config()), Decoder(config.model_config())
    materialize(plain, config.seed, CPU, torch.float64)
    expected, world = dict(plain.named_parameters()), torch.distributed.get_world_size()
    with open_mesh({"pp": world, "dp": 1, "cp": 1, "tp": 1}, CPU, "gloo") as mesh:
        placements = place_stages(config.schedule, world, choose_chunks(config))
        lengths = split_layers(config, model.config, len(placements[0]))
        chunks = step06.keep_stage(model, mesh, Plan(placements, lengths, lists=[]))
        materialize(model, config.seed, CPU, torch.float64)
        for name, param in model.named_parameters():
            assert torch.equal(param, expected[name]), name
        return [name for name, _ in model.named_parameters()], [(c.first, c.last, list(c.layers)) for c in chunks]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", NAMES)
def test_stages_keep_global_names_and_initial_values(pools, schedule, tied):
    """Every parameter is on one rank (a tied one on two, dualpipe's too), with step01's name and first value."""
    options = SMALL | dict(n_layers=9, tied=tied, schedule=schedule)
    found = pools(4).run(stage_on_rank, options)
    names = list(itertools.chain.from_iterable(names for names, _ in found))
    with torch.device("meta"):
        expected = dict(Decoder(step06.Config(**options).model_config()).named_parameters())
    assert set(names) == set(expected)
    both = {"model.embed_tokens.weight"} if tied and schedule not in ("zbv",) else set()
    for name in expected:
        assert names.count(name) == (2 if schedule == "dualpipe" or name in both else 1), name
    chunks = [chunk for _, chunks in found for chunk in chunks]
    assert sum(first for first, _, _ in chunks) == sum(last for _, last, _ in chunks) == 1 + (schedule == "dualpipe")


def embeddings_on_rank(options: dict) -> Tensor | None:
    """Runs on every rank: train; the embedding, where there is one."""
    model = step06.train(step06.Config(**options)).model
    return model.model.embed_tokens.weight.detach() if model.model.embed_tokens is not None else None


def test_the_two_copies_of_a_tied_embedding_stay_equal(pools, tmp_path):
    """Bit for bit, after training."""
    options = SMALL | BASE | PLAIN | dict(tied=True, optimizer="adamw", pp=4, zero=0, out=str(tmp_path / "run"))
    first, *middle, last = pools(4).run(embeddings_on_rank, options)
    assert torch.equal(first, last) and middle == [None, None]


# --- backward in two parts -------------------------------------------------------------------------------------------


@pytest.mark.numerics
def test_a_weight_gradient_waits_for_its_w():
    """Backward gives the input's gradient alone; running the closure gives the weight's, and adds to what is there."""
    torch.manual_seed(0)
    x, store = torch.randn(2, 3, 5, dtype=torch.float64), step06.WeightGradStore()
    plain, split = (torch.nn.Linear(5, 4, bias=False, dtype=torch.float64) for _ in range(2))
    plain.weight.data.copy_(split.weight.data)
    split.forward = partial(step06.split_linear, split, store)
    for times in (1, 2):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        for module, leaf in ((plain, leaves[0]), (split, leaves[1])):
            module(leaf).square().sum().backward()
        assert difference(leaves[1].grad, leaves[0].grad) < bounds.FP64
        assert times == 2 or split.weight.grad is None
        (weight_gradient,) = store.pop()
        weight_gradient()
        assert difference(split.weight.grad, plain.weight.grad) < bounds.FP64 and not store.pop()


def test_gradients_of_16_bit_weights_add_up_in_fp32():
    """What W computes goes through autograd's own accumulation, with its gradient dtype and its hooks."""
    linear, seen = torch.nn.Linear(5, 4, bias=False, dtype=torch.bfloat16), []
    weight = linear.weight
    weight.grad_dtype = torch.float32
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(None if param.grad is None else 1))
    store = step06.WeightGradStore()
    x = torch.ones(1, 5, dtype=torch.bfloat16, requires_grad=True)
    step06.split_linear(linear, store, x).sum().backward()
    for weight_gradient in store.pop():
        weight_gradient()
    assert weight.grad.dtype == torch.float32 and seen[-1] == 1


def split_layers_on_rank(options: dict) -> list[str]:
    """Runs on every rank: which weights wait in the store after one backward pass of a stage."""
    found: list[str] = []
    right, make = step06.WeightGradStore.put, step06.Pipeline.__init__
    names: dict[int, str] = {}

    def spy(self, weights, gradients):
        found.extend(names[id(w)] for w in weights)
        return right(self, weights, gradients)

    def init(self, model, *args):
        make(self, model, *args)
        names.update({id(p): name for name, p in model.named_parameters()})

    with (
        mock.patch.object(step06.WeightGradStore, "put", spy),
        mock.patch.object(step06.Pipeline, "__init__", init),
        equivalence.without_instruments(),
    ):
        step06.train(step06.Config(**options))
    return sorted(set(found))


@pytest.mark.picked(0, 1)
@pytest.mark.parametrize("mode", [{}, dict(sp=False), dict(tp_overlap=False)], ids=label)
def test_all_linear_layers_are_split(pools, tmp_path, mode):
    """Of every layer of a stage seven matrices wait, with tensor parallelism, too."""
    options = SMALL | BASE | dict(pp=2, tp=2, cp=1, schedule="zb-h1", steps=1, zero=0, out=str(tmp_path / "run")) | mode
    for names in pools(4).run(split_layers_on_rank, options):
        assert len(names) == 2 * 7 and all(".self_attn." in name or ".mlp." in name for name in names)


# --- laws ------------------------------------------------------------------------------------------------------------


def costs_on_rank(options: dict, fault: str = "") -> tuple[dict, dict, dict]:
    """Runs on every rank: train; bytes sent in the last step, predicted traffic, memory measured and predicted."""
    seen: dict = {}
    options = dict(options)
    instruments = nullcontext if options.pop("watched", False) else equivalence.without_instruments
    finish = Run.finish

    def spy(self, predicted, traffic):
        seen.update(predicted=traffic, memory=(self.measured, predicted))
        finish(self, predicted, traffic)

    with mock.patch.object(Run, "finish", spy), instruments(), faults.applied(fault):
        history = step06.train(step06.Config(**options)).history
    sent = {(d, o): n for d, operations in history[-1]["traffic"].items() for o, n in operations.items()}
    return sent, seen["predicted"], seen["memory"]


TRAFFIC = [
    dict(pp=4),
    dict(pp=4, schedule="zbv"),
    dict(pp=2, schedule="interleaved", chunks=3, zero=3),
    dict(pp=2, schedule="dualpipe", zero=2),
    dict(pp=2, tp=2, schedule="zb-h1"),
    dict(pp=2, tp=2, sp=False, schedule="zb-h2"),
    dict(pp=2, tp=2, sp=False, schedule="zbv", zero=3),
    dict(pp=2, cp=2, schedule="zbv", zero=3),
    dict(pp=2, cp=2, schedule="interleaved", cp_mode="ulysses", zero=0),
    dict(pp=2, tp=2, schedule="dualpipe", recompute="full"),
]


@pytest.mark.picked(2, 5, 8, 9)
@pytest.mark.parametrize("layout", TRAFFIC, ids=label)
def test_traffic_is_what_theory_says(pools, tmp_path, layout):
    """Every byte in the ledger, on every rank, dimension by dimension."""
    options = SMALL | BASE | dict(n_layers=9, tied=True, global_batch_size=6, steps=1) | PLAIN | layout
    for sent, predicted, _ in pools(4).run(costs_on_rank, options | dict(out=str(tmp_path / "run"))):
        for purpose in ("(metrics)", "(state)", "(check)"):
            sent = {key: n for key, n in sent.items() if not key[1].endswith(purpose)}
        assert sent.keys() | {k for k, n in predicted.items() if n} == sent.keys()
        for name, n_bytes in sent.items():
            assert n_bytes == pytest.approx(predicted[name], rel=1e-12), name


@pytest.mark.parametrize("tp", [1, 2])
def test_what_stages_keep_adds_up_to_the_model(tp):
    """Layers, RoPE's tables, embedding and head; the embedding keeps something only if tp cuts it: 9 bytes a token."""
    config = step06.Config(**SMALL | BASE)
    m, about = config.model_config(), (torch.float32, True)
    parts = stage_parts(config, m, tp, 1, *about)
    whole = m.n_layers * parts.layer + parts.rope + parts.embedding + parts.head
    assert whole == cp_activation_bytes(config, m, tp, 1, *about)
    assert parts.embedding == (9 * config.micro_batch_size * m.seq_len if tp > 1 else 0)


def test_a_rank_has_its_share_of_micro_batches():
    """Of 24 sequences on 3 data ranks, two at a time: each list of the pipeline goes forward with four."""
    config = step06.Config(**SMALL | BASE | dict(global_batch_size=24, micro_batch_size=2, schedule="1f1b", chunks=1))
    plan = plan_pipeline(config, config.model_config(), dict(pp=2, dp=3, cp=1, tp=1))
    assert [sum(action.kind == "F" for action in actions) for actions in plan.lists] == [4, 4]


def test_a_weight_gradient_begins_no_turn():
    """By hand: ZeRO 3 gathers a chunk's unit when its F or B follows another chunk's; each W sends a gradient."""
    actions = [Action(kind, 0, chunk) for kind, chunk in (("F", 0), ("F", 1), ("B", 1), ("B", 0), ("W", 1), ("W", 0))]
    units = [UnitShape("dp", 2, 10, True, 4, 2), UnitShape("dp", 2, 100, True, 4, 2)]
    assert zero_stage_traffic(units, 3, [[0], [1]], actions) == {
        ("dp", "reduce_scatter"): 4 * (10 + 100),
        ("dp", "all_gather"): 2 * (2 * 10 + 100),
    }


@pytest.mark.picked(2, 3)
@pytest.mark.parametrize("layout", [dict(), dict(tp=2), dict(tp=2, sp=False), dict(cp=2)], ids=label)
def test_bytes_over_a_boundary(pools, tmp_path, layout):
    """1F1B: each rank but the last sends x, each but the first sends dx: b s h e / (cp tp) for every micro-batch."""
    config = SMALL | BASE | PLAIN | dict(pp=2, micro_batch_size=2, out=str(tmp_path / "run")) | layout
    dp = 4 // 2 // config["tp"] // config["cp"]
    unit = config["micro_batch_size"] * config["seq_len"] * config["dim"] * 8 // config["cp"] // config["tp"]
    micro_batches = config["global_batch_size"] // dp // config["micro_batch_size"]
    for sent, _, _ in pools(4).run(costs_on_rank, config):
        assert sent["pp", "send"] == micro_batches * unit


def graphs_on_rank(options: dict) -> int:
    """Runs on every rank: train; the most autograd graphs that the executor held at once."""
    most, right = [0], step06.Pipeline.forward

    def spy(self, *args):
        right(self, *args)
        most[0] = max(most[0], len(self.graphs))

    with mock.patch.object(step06.Pipeline, "forward", spy), equivalence.without_instruments():
        step06.train(step06.Config(**options))
    return most[0]


def plan_of(options: dict) -> Plan:
    """What 4 ranks run, all of them stages."""
    config = step06.Config(**options)
    return plan_pipeline(config, config.model_config(), dict(pp=4, dp=1, cp=1, tp=1))


@pytest.mark.picked(1, 2, 4, 6)
@pytest.mark.parametrize("schedule", NAMES)
def test_activations_in_flight_are_the_schedules(pools, tmp_path, schedule):
    """The executor holds as many graphs as the list says: 1f1b and zb-h1 p - rank, zb-h2 at most 2(p-rank) - 1."""
    options = SMALL | BASE | PLAIN | dict(pp=4, n_layers=8, global_batch_size=9, steps=1, schedule=schedule)
    found = pools(4).run(graphs_on_rank, options | dict(out=str(tmp_path / "run")))
    assert found == in_flight(plan_of(options).lists)
    law = {"afab": [9] * 4, "1f1b": [4, 3, 2, 1], "zb-h1": [4, 3, 2, 1]}
    assert found == law.get(schedule, found)
    if schedule == "zb-h2":
        assert all(n <= 2 * (4 - rank) - 1 for rank, n in enumerate(found))


@pytest.mark.picked(4, 6)
@pytest.mark.parametrize("schedule", NAMES)
def test_measured_activations_are_the_predicted_ones(pools, tmp_path, schedule):
    """Bytes alive at the worst moment: those in flight by the list; and boundary tensors that are on their way.

    A sender keeps them until it hears from the receiver: at most one for each micro-batch that is not done with its W.
    """
    options = SMALL | BASE | PLAIN | dict(pp=4, n_layers=8, global_batch_size=9, steps=1, schedule=schedule, zero=0)
    boundary, lists = options["seq_len"] * options["dim"] * 8, plan_of(options).lists
    found = pools(4).run(costs_on_rank, options | dict(out=str(tmp_path / "run"), watched=True))
    for rank, (_, _, (measured, predicted)) in enumerate(found):
        (held,) = in_flight([lists[rank]], until="W")
        extra = measured["activations"] - predicted["activations"]
        assert -0.05 * predicted["activations"] <= extra <= (held + 2) * boundary + 0.02 * predicted["activations"]
        assert measured["parameters"] == predicted["parameters"]


@pytest.mark.picked(3)
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.parametrize("flags", [dict(), dict(sp=False), dict(tp_overlap=False)], ids=label)
def test_inputs_wait_for_w_as_they_are_kept(pools, tmp_path, schedule, flags):
    """With SP, s/n tokens of the input of a column-parallel layer wait for W, which gathers them again: not all s."""
    layout = dict(pp=2, tp=2, n_layers=4, global_batch_size=5, steps=1, schedule=schedule, zero=0, seq_len=64) | flags
    options = SMALL | BASE | PLAIN | layout | dict(out=str(tmp_path / "run"), watched=True)
    boundary, v = options["seq_len"] * options["dim"] * 8 // 2, choose_chunks(step06.Config(schedule=schedule))

    def too_much(fault: str) -> list[bool]:
        found = []
        for rank, (_, _, (measured, predicted)) in enumerate(pools(4).run(costs_on_rank, options, fault)):
            (held,) = in_flight([SCHEDULES[schedule](2, 5, v, rank // 2)], until="W")
            extra = measured["activations"] - predicted["activations"]
            assert extra >= -0.05 * predicted["activations"]
            found.append(extra > (held + 2) * boundary + 0.02 * predicted["activations"])
        return found

    assert not any(too_much(""))
    if not flags:
        assert any(too_much("gathered_inputs_wait"))


def test_no_input_gradient_where_none_is_wanted():
    """The input of the first layer may need none: backward then computes no dx, and leaves dW to the store."""
    store, weight = step06.WeightGradStore(), torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    x = torch.ones(1, 4, 2, dtype=torch.float64)
    with mock.patch.object(step06, "input_gradient", side_effect=AssertionError("dx computed")):
        (y,) = step06.SplitFunction.apply(x, None, step06.keep_tokens, step06.keep_tokens, store, weight)
        y.sum().backward()
        with pytest.raises(AssertionError, match="dx computed"):
            step06.SplitFunction.apply(x.requires_grad_(), None, step06.keep_tokens, step06.keep_tokens, store, weight)[
                0
            ].sum().backward()
    for weight_gradient in store.pop():
        weight_gradient()
    assert torch.equal(weight.grad, torch.full_like(weight, 8.0))


# --- messages --------------------------------------------------------------------------------------------------------


def overlap_on_rank(patience: float, fault: str, key: str) -> bool:
    """Runs on two ranks: afab. Rank 1 begins when rank 0 has done all its forward passes, or after so many seconds.

    Returns whether it had; it says so under this key of the store.
    """
    flags = dict(pp=2, n_layers=2, zero=0, schedule="afab", seq_len=512, dim=256, global_batch_size=4, dtype="fp32")
    config = step06.Config(**SMALL | PLAIN | flags)
    with start(config) as run, faults.applied(fault):
        plan = run.plan_pipeline()
        with torch.device("meta"):
            model = Decoder(run.shape)
        chunks = step06.keep_stage(model, run.mesh, plan)
        pipeline = step06.Pipeline(model, chunks, plan, torch.arange(512), None, config, run)
        tokens, store, done = torch.zeros(1, 512, dtype=torch.int64), _get_default_store(), []
        if run.mesh.rank == 1:
            with suppress(RuntimeError):  # it has waited in vain
                store.wait([key], timedelta(seconds=patience))
                done.append("F")

        @contextmanager
        def phase(_name: str, action: Action | None = None):
            yield
            if action is not None:
                done.append(action.kind)
            if run.mesh.rank == 0 and done == ["F"] * 4:
                store.set(key, "")

        had = bool(done)
        end = lambda i, hidden: model.lm_head.loss(hidden, tokens)  # noqa: E731
        pipeline.run([tokens] * 4, end, pipeline.program, phase)
        return had


def test_sends_do_not_wait(pools, tmp_path):
    """Rank 0 has done all its forward passes before rank 1 looks at the first; with blocking messages it has not."""
    assert pools(2).run(overlap_on_rank, 120.0, "", f"{tmp_path}/1")[1]
    assert not pools(2).run(overlap_on_rank, 1.0, "blocking_messages", f"{tmp_path}/2")[1]


# --- what peers got wrong --------------------------------------------------------------------------------------------


@pytest.mark.picked(0, 2, 3, 4, 5, 6, 7, 8, 9)
@pytest.mark.parametrize(
    "fault, base, layout, complaint",
    [
        ("gradients_times_micro_batches", {}, dict(pp=2), "the gradient of"),
        ("gradients_times_micro_batches", dict(optimizer="adamw", grad_clip=0.0), dict(pp=2), "the gradient of"),
        ("drawn_by_stage", {}, dict(pp=2), "the loss"),
        ("tied_gradient_not_summed", dict(tied=True), dict(pp=2), "the gradient of model.embed_tokens"),
        ("copies_not_summed", {}, dict(pp=2, schedule="dualpipe"), "the gradient of"),
        ("norm_of_the_own_stage", {}, dict(pp=2), "the gradient norm"),
        ("tied_counted_twice", dict(tied=True), dict(pp=2), "the gradient norm"),
        ("weight_gradients_lost", {}, dict(pp=2, schedule="zb-h1"), "gradient"),
        ("weight_gradients_twice", {}, dict(pp=2, schedule="zb-h1"), "the gradient of"),
        ("messages_swapped", {}, dict(pp=2, schedule="afab"), "the gradient of"),
    ],
    ids=str,
)
def test_faults_are_noticed(pools, tmp_path, fault, base, layout, complaint):
    """What peers got wrong makes the comparison with one device fail, whatever the optimizer hides."""
    options = SMALL | BASE | base
    ours = options | PLAIN | dict(zero=0) | layout | dict(out=str(tmp_path / "run"))
    args = equivalence.on_rank, STEP, ours, str(equivalence.reference(options)), 1e-10, [fault]
    found = pools(2).run(equivalence.complaint_on_rank, *args)
    assert any(complaint in text for text in found), found


# --- the trainer around it -------------------------------------------------------------------------------------------


def few_tokens() -> Any:
    """A context: a text is 40 tokens long, some of them beyond the sequence."""
    return mock.patch.object(variants, "generate", partial(variants.generate, n_tokens=40))


def text_on_rank(options: dict, folder: str) -> str:
    """Runs on every rank: continue a text with the model of a checkpoint."""
    out = io.StringIO()
    with redirect_stdout(out), few_tokens():
        step06.train(step06.Config(**options | dict(resume=folder, generate="def ")))
    return out.getvalue()


@pytest.mark.picked(0)
@pytest.mark.parametrize(
    "layout", [dict(pp=4), dict(pp=2, cp=2, schedule="zbv", zero=3), dict(pp=2, tp=2, schedule="dualpipe")], ids=label
)
def test_generates_step01s_text(pools, tmp_path, capsys, layout):
    """From step01's checkpoint, in fp32 as in fp64 the same tokens are drawn."""
    one = str(tmp_path / "one")
    options = SMALL | BASE | dict(save_every=100, steps=1)
    step01.train(step01.Config(**options, out=one))
    capsys.readouterr()
    with few_tokens():
        step01.train(step01.Config(**options | dict(resume=one, generate="def ")))
    expected = capsys.readouterr().out
    found = pools(4).run(text_on_rank, options | PLAIN | layout, one)
    assert found[0] == expected and len(expected) > 10 and set(found[1:]) == {""}


def signalled_on_rank(options: dict) -> int:
    """Runs on every rank: train; one rank gets SIGTERM in step 2. The number of steps done."""

    def observe(step, optimizer):
        if step == 1 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return len(step06.train(step06.Config(**options), observe).history)


def test_a_signal_to_one_rank_stops_all(pools, tmp_path):
    """After the same step."""
    options = SMALL | BASE | PLAIN | dict(pp=4, steps=6, out=str(tmp_path / "run"))
    counts = pools(4).run(signalled_on_rank, options)
    assert len(set(counts)) == 1 and counts[0] in (2, 3)


def test_a_run_leaves_its_timeline(pools, tmp_path):
    """timeline.json has every action of every stage, in order, without overlap; timeline.png is drawn from it."""
    import json

    options = SMALL | BASE | PLAIN | dict(pp=4, schedule="zb-h1", out=str(tmp_path / "run"))
    pools(4).run(with_figures, history_on_rank, options)
    panel = json.loads((tmp_path / "run" / "timeline.json").read_text())["panels"]["zb-h1"]
    for rank, row in enumerate(panel["ranks"]):
        assert [Action(*entry[:3]) for entry in row] == SCHEDULES["zb-h1"](4, 8, 1, rank)
        assert all(a[4] <= b[3] for a, b in itertools.pairwise(row)) and all(entry[3] < entry[4] for entry in row)
    assert 0 < panel["idle"] < 1 and 0 < panel["simulated_idle"] < 1
    assert (tmp_path / "run" / "timeline.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "flags, world, complaint",
    [
        (dict(pp=3), 4, "--pp 3 does not divide the 4 ranks"),
        (dict(pp=16), 8, "--pp 16 does not divide the 8 ranks"),
        (
            dict(pp=2, cp=2, tp=4),
            8,
            "--pp 2 x --cp 2 x --tp 4 = 16 does not divide the 8 ranks that were started: use --pp among",
        ),
        (dict(pp=4, n_layers=3), 4, "--n-layers 3 cannot be cut into 4 stages (--pp 4 x 1 chunks"),
        (dict(pp=2, schedule="zbv", n_layers=3), 2, "--n-layers 3 cannot be cut into 4 stages (--pp 2 x 2 chunks"),
        (dict(pp=2, schedule="interleaved", chunks=3, n_layers=5), 2, "cannot be cut into 6 stages"),
        (dict(pp=3, schedule="dualpipe", n_layers=6), 3, "even number of ranks"),
        (dict(pp=2, schedule="zbv", chunks=3), 2, "--chunks 2"),
        (dict(pp=2, chunks=2), 2, "--chunks 1"),
        (dict(pp=2, pp_split="1,2"), 2, "--pp-split 1,2: give 2 numbers"),
        (dict(pp=2, pp_split="a,b"), 2, "--pp-split a,b"),
        (dict(pp=2, pp_split="4,0"), 2, "--pp-split 4,0"),
        (dict(pp=2, sync="torch", zero=0), 2, "--sync torch"),
        (dict(pp=2, schedule="zb-auto", zb_memory=0.4), 2, "--zb-memory 0.4 of --pp 2 is not one micro-batch: use at"),
        (dict(pp=2, schedule="zb-auto", zb_memory=float("nan")), 2, "--zb-memory nan"),
        (dict(pp=2, schedule="zb-auto", zb_costs="1,2,3"), 2, "--zb-costs 1,2,3: give the times of F, B and W"),
        (dict(pp=2, schedule="zb-auto", zb_costs="1,2,0,1"), 2, "--zb-costs 1,2,0,1"),
        (dict(pp=2, schedule="zb-auto", zb_costs="1,2,x,1"), 2, "--zb-costs 1,2,x,1"),
    ],
    ids=str,
)
def test_bad_flags(flags, world, complaint):
    """One line that names the flag, on every rank before the first collective."""
    with pytest.raises(UserError, match=complaint.replace("(", r"\(")):
        check_pp(step06.Config(**SMALL | BASE | PLAIN | flags), world)


def test_bad_flags_reach_every_rank(pools, tmp_path):
    """The same error on all, and nobody hangs."""
    options = SMALL | BASE | PLAIN | dict(pp=4, n_layers=2, out=str(tmp_path / "run"))
    with pytest.raises(RankError, match="cannot be cut into 4 stages"):
        pools(4).run(column_on_rank, options)
