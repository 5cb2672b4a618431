"""The dry run counts what real ranks send, compute and hold, in layouts drawn from a seed; and a GPU's kernels."""

import importlib
import random
from dataclasses import fields
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common import UserError
from extras.services.dry_run import Counted, Meter, Seen, instead_of, levels_of, run_rank
from extras.services.run import ServedRun
from extras.services.seam import check, compose, defaults, refusals
from extras.tests.equal import SMALL, config_of, watch
from extras.tests.pairs import STEPS, complete, covering, lighter, ranks_of, singles
from extras.theory.gpus import GPUS
from extras.variants.step07 import grouped_matmul
from extras.variants.step07.routing import RoutedMoE

SHAPE = dict(n_layers=4, n_heads=4, n_kv_heads=2, global_batch_size=4)
VALUES = dict(  # flags that change what is sent
    dtype=("fp32", "fp64", "bf16"),
    recompute=("none", "none", "full", "elementwise"),
    micro_batch_size=(1, 2),
    global_batch_size=(4, 8),
    optimizer=("adamw", "sgd", "adafactor", "muon"),
    sync=("bucket", "bucket", "naive", "ring", "overlap", "hierarchical", "tree"),
    compress=("none", "none", "none", "bf16", "int8", "topk"),
    zero=(0, 1, 2, 3),
    zero_replicas=(1, 1, 2),
    zero_keep=(False, False, True),
    zero_keep_mb=(0.0, 0.0, 0.06),
    zero_overlap=(False, False, True),
    offload_optimizer=("none", "none", "cpu"),
    tp=(1, 2, 4),
    sp=(True, True, False),
    tp_overlap=(False, True),
    compress_activations=("none", "none", "none", "int8"),
    cp=(1, 2, 4),
    cp_mode=("zigzag", "ring", "allgather", "ulysses", "usp", "balanced"),
    pp=(1, 2, 4),
    schedule=("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zbv", "dualpipe", "dualpipev", "v-min"),
    pp_scatter=(False, True),
    ep=(1, 2, 4),
    ep_mode=("alltoall", "alltoall", "rows", "allgather", "nodes"),
    capacity_factor=(0.0, 0.0, 1.0, 1.5),
    balance=("loss", "bias", "none"),
    shared_experts=(0, 0, 1),
    tied=(False, True),
)
EVEN = dict(experts=4, experts_per_token=4)  # each token visits all experts: the dry run spreads them evenly


def draw(seed: int, most: int = 8) -> tuple[str, int, dict, list]:
    """(step, ranks, options) that the step takes, and what the dry run counts of the first and of the last rank."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(["step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", *["step06_pipeline"] * 2])
        name = rng.choice([name, name, "step07_moe_ep"])
        step = importlib.import_module(name)
        known = {field.name for field in fields(compose(step))} | {"tied"}
        options = SHAPE | {flag: rng.choice(values) for flag, values in VALUES.items() if flag in known}
        options |= EVEN if "ep" in known else {}
        ranks = rng.choice((1, 2, 4)) * options.get("pp", 1) * options.get("cp", 1) * options.get("tp", 1)
        if ranks > most or ranks == 1:
            continue
        try:
            return name, ranks, options, [counted(name, ranks, options, rank) for rank in (0, ranks - 1)]
        except UserError:
            continue


def counts(run: Counted | Seen) -> SimpleNamespace:
    """What is compared of a step."""
    flops = sum(count["flops"] for count in run.meter.count.values())
    return SimpleNamespace(sent=run.taken, flops=flops, peak=sum(run.meter.peak().values()))


def flat(traffic: dict) -> dict[str, int]:
    """By "dimension operation"."""
    return {f"{dim} {operation}": n for dim, each in traffic.items() for operation, n in each.items()}


def counted(name: str, ranks: int, options: dict, rank: int) -> SimpleNamespace:
    """A step of one rank, by the dry run. Raises UserError for flags that cannot work."""
    config = config_of(name, options | dict(dry_run=ranks))
    check(config, 1)
    check(config_of(name, options), ranks)
    return counts(run_rank(importlib.import_module(name).train, config, rank))


def evenly(layer: RoutedMoE, scores: Tensor) -> Tensor:
    """Instead of the best: one expert after the other."""
    return torch.arange(len(scores) * layer.top_k).view(-1, layer.top_k) % scores.shape[1]


def counted_on_rank(name: str, options: dict) -> SimpleNamespace:
    """Runs on every rank: the same of a step with numbers."""
    config, balanced = config_of(name, options | dict(lr=1e-4, steps=2)), mock.patch.object(RoutedMoE, "choose", evenly)
    loops = mock.patch.object(grouped_matmul, "can_group", lambda *_: False)
    whole = mock.patch.object(dist, "get_backend", lambda *_: "")  # its own reduce-scatter, which has no tensor of ours
    with loops, balanced, whole, Meter(GPUS["h100-80"]) as meter, Counted(config, meter) as run:
        importlib.import_module(name).train(config, run)
    return counts(run)


def compare(real: list[SimpleNamespace], dry: list[SimpleNamespace], options: dict):
    """All bytes, calls and FLOPs; the peak to 1%. A real message that is under way beside others may hold a unit's
    tensors longer, as long as it takes: 8% where there are such.
    """
    under_way = options.get("zero") == 3 or options.get("zero_overlap") or options.get("offload_optimizer") == "cpu"
    for ours, theirs in zip((real[0], real[-1]), dry, strict=True):
        assert (ours.sent, ours.flops) == (theirs.sent, theirs.flops), options
        assert ours.peak == pytest.approx(theirs.peak, rel=0.08 if under_way else 0.01), options


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n >= 2)) for n in range(200)])
def test_real_ranks_are_as_the_dry_run_counts(pools, seed):
    """The first and the last rank of a drawn layout."""
    name, ranks, options, dry = pools(1).run(draw, seed, 4 if seed < 8 else 8)[0]
    compare(pools(ranks).run(counted_on_rank, name, options), dry, options | dict(name=name, ranks=ranks))


@pytest.mark.parametrize("mode", ["alltoall", "rows", "allgather", "nodes"])
def test_choices_are_balanced(pools, mode):
    """Two of four experts, both of one group; each takes half of what it is asked."""
    options = dict(experts=4, experts_per_token=2, expert_groups=2, groups_per_token=1, capacity_factor=0.5)
    options |= dict(ep=2, ep_mode=mode, global_batch_size=2, n_layers=1)
    dry = [pools(1).run(counted, "step07_moe_ep", 2, options, rank)[0] for rank in (0, 1)]
    compare(pools(2).run(counted_on_rank, "step07_moe_ep", options), dry, options)


@pytest.mark.parametrize("k, there", [(8, 4.6), (2, 1.6)])
def test_ranks_that_a_token_visits(k, there):
    """Of eight, without its own, in --ep-mode rows: as its docstring says, (ep-1) (1 - (1 - 1/ep)^k)."""
    config = config_of("step07_moe_ep", dict(experts=256, experts_per_token=k, ep=8, ep_mode="rows"))
    ranks, experts = levels_of(config)
    assert experts == k and 7 / 8 * ranks == pytest.approx(there, abs=0.1)
    assert there == round(7 * (1 - (7 / 8) ** k), 1)


def test_matmuls_are_those_that_torch_counts():
    """torch's own counter, around a run with numbers. It knows neither a CPU's attention, nor half of the scores."""
    options, step = SHAPE | dict(n_layers=2, recompute="full"), importlib.import_module("step01_single_gpu")
    count = run_rank(step.train, config_of(step.__name__, options | dict(dry_run=1)), 0).meter.count
    with FlopCounterMode(display=False) as theirs:
        watch(step.__name__, options | dict(steps=1))
    attention = sum(each["flops"] for name, each in count.items() if "attention" in name)
    assert attention and theirs.get_total_flops() == sum(each["flops"] for each in count.values()) - attention


def test_kernels_are_those_of_a_gpu():
    """RMSNorm is one kernel each way; an update reads four numbers of a parameter, and writes three."""
    config = config_of("step01_single_gpu", SHAPE | dict(dtype="bf16", recompute="full", dry_run=1))
    seen = run_rank(importlib.import_module("step01_single_gpu").train, config, 0)
    layers, passes = 2 * SHAPE["n_layers"], SHAPE["global_batch_size"]  # norms in layers are done again
    x, count = 2 * SMALL["seq_len"] * SMALL["dim"], seen.meter.count
    found = [count[name][what] for name in ("rms_norm", "rms_norm_backward") for what in ("calls", "bytes")]
    forward, backward = passes * (2 * layers + 1), passes * (layers + 1)
    assert found == [forward, forward * 2 * x, backward, backward * 3 * x] and "rsqrt" not in count
    assert count["_fused_adamw_"]["bytes"] == pytest.approx(7 * seen.held["masters"], rel=0.01)


@pytest.mark.parametrize("flags", [dict(documents="mask"), dict(sync="torch", zero=0), dict(toy=True)], ids=str)
def test_what_asks_for_numbers_is_refused(flags):
    """In one line, before anything is built."""
    with pytest.raises(UserError, match="--dry-run"):
        check(config_of("step05_cp_ring", flags | dict(dry_run=2)), 1)


def test_an_update_that_waits_for_its_record_is_counted():
    """--skip-spikes: the same as without."""
    seen = []
    for spikes in 0.0, 3.0:
        config = config_of("step02_ddp", SHAPE | dict(n_layers=1, dry_run=2, skip_spikes=spikes))
        seen.append(run_rank(importlib.import_module("step02_ddp").train, config, 0).taken)
    assert seen[0] == seen[1] and seen[0]["traffic"]


def is_counted(step: str, run: dict) -> bool:
    """Whether no file refuses --dry-run beside these flags."""
    plain = defaults(compose(importlib.import_module(step)))
    refused = [one for one in refusals(compose(importlib.import_module(step))) if "dry_run" in one.flags]
    return not any(one.holds((plain | run | dict(dry_run=1)).get, plain) for one in refused)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))])
def test_every_value_is_counted(part):
    """Of every flag of the table but what is refused, in runs of many flags each (tests/pairs.py)."""
    step = STEPS[-1]
    runs = {frozenset([single]): complete(step, dict([single])) for single in singles(step)}
    values = [dict(single) for single, run in runs.items() if is_counted(step, run)]
    for options in map(lighter, covering(step, values)[part::3]):
        mine = 2 * options["micro_batch_size"]  # two micro-batches are enough
        options["global_batch_size"] = mine * (ranks_of(options) // (options["pp"] * options["cp"] * options["tp"]))
        config = config_of(step, options | dict(dry_run=ranks_of(options), save_every=0))
        check(config, 1)
        seen = run_rank(importlib.import_module(step).train, config, 0)
        assert seen.meter.count, options


@pytest.mark.parametrize(
    "name, flags",
    [
        ("step01_single_gpu", dict(dry_run=1)),
        ("step02_ddp", dict(dry_run=2, rank="all")),
        ("step07_moe_ep", dict(model="tiny-moe", dry_run=8, pp=2, tp=2, ep=2, rank="7", gpu="a100-80")),
        pytest.param(
            "step07_moe_ep",
            dict(model="deepseek-v3-like", dry_run=8, pp=2, tp=2, ep=2, experts=8, n_layers=4),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_dry_run_says_what_it_counted(name, flags, capsys):
    """As `main` does it: the run around the step, whose `train` is replaced."""
    step = importlib.import_module(name)
    config = compose(step)(**flags)
    check(config, 1)
    with ServedRun(config) as run:
        instead_of(step.train)(config, run)
    assert "MFU is at most" in capsys.readouterr().out
