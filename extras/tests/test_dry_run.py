"""The dry run counts what real ranks send, compute and hold, in random layouts; and it counts a GPU's kernels."""

import importlib
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from common import UserError
from extras.services.dry_run import Counted, Meter, instead_of, run_rank
from extras.services.run import ServedRun
from extras.services.seam import check, compose, defaults, refusals
from extras.tests.equal import SMALL, config_of, watch
from extras.tests.pairs import STEPS, comparable, complete, covering, join, lighter, ranks_of, singles, table
from extras.theory.gpus import GPUS
from extras.variants.step07 import grouped_matmul
from extras.variants.step07.routing import RoutedMoE

COUNTED = "dtype recompute micro_batch_size global_batch_size optimizer skip_spikes sync compress zero zero_replicas"
COUNTED += " zero_keep zero_overlap offload_optimizer tp sp tp_overlap compress_activations cp cp_mode pp"
COUNTED += " schedule ep ep_mode balance shared_experts tied"  # flags that change what is sent
APART = ("fp16", "auto", "disk", "torch", "offload")  # need a GPU, a file, torch's own messages, or are refused
EVEN = dict(experts=4, experts_per_token=4)  # each token visits all experts: the dry run spreads them evenly
SHAPE = dict(n_layers=4, n_heads=4, n_kv_heads=2, global_batch_size=4)


def draw(seed: int) -> tuple[str, dict]:
    """Draw a step and legal options: flags in a random order, each with a random value if it fits the others."""
    rng, chosen = random.Random(seed), {}
    step = rng.choice([*STEPS[1:], *STEPS[5:]])
    for name in rng.sample(names := COUNTED.split(), len(names)):
        if name in table(step)[0]:
            values = [value for value in table(step)[0][name].values if value not in APART]
            chosen = join(step, chosen, {name: rng.choice(values)}) or chosen
    return step, complete(step, chosen) | (EVEN if step == STEPS[-1] else {})


def counts(run: Counted) -> SimpleNamespace:
    """The numbers of a step that are compared: traffic, FLOPs and peak memory."""
    flops = sum(count["flops"] for count in run.meter.count.values())
    return SimpleNamespace(sent=run.taken, flops=flops, peak=sum(run.meter.peak().values()))


def flat(traffic: dict) -> dict[str, int]:
    """Traffic with keys "dimension operation"."""
    return {f"{dim} {operation}": n for dim, each in traffic.items() for operation, n in each.items()}


def dry(step: str, options: dict, ranks: int, rank: int = 0) -> Counted:
    """Dry-run a step of one rank. Raises UserError for flags that cannot work."""
    config = config_of(step, options | dict(dry_run=ranks))
    check(config, 1)
    return run_rank(importlib.import_module(step).train, config, rank)


def dry_ends(step: str, options: dict, ranks: int) -> list[SimpleNamespace]:
    """Runs in one process: the `counts` of a dry run of the first and of the last rank."""
    return [counts(dry(step, options, ranks, rank)) for rank in (0, ranks - 1)]


def evenly(layer: RoutedMoE, scores: Tensor) -> Tensor:
    """Replaces the choice of the best experts: takes one expert after another."""
    return torch.arange(len(scores) * layer.top_k).view(-1, layer.top_k) % scores.shape[1]


def counted_on_rank(name: str, options: dict) -> SimpleNamespace:
    """Runs on every rank: the `counts` of a step of real training."""
    config, balanced = config_of(name, options | dict(lr=1e-4, steps=2)), mock.patch.object(RoutedMoE, "choose", evenly)
    loops = mock.patch.object(grouped_matmul, "can_group", lambda *_: False)
    whole = mock.patch.object(dist, "get_backend", lambda *_: "")  # gloo's own reduce-scatter: ours allocates a tensor
    with loops, balanced, whole, Meter(GPUS["h100-80"]) as meter, Counted(config, meter) as run:
        importlib.import_module(name).train(config, run)
    return counts(run)


def compare(pools, step: str, options: dict, ranks: int):
    """Compare real training with the dry run: bytes, calls and FLOPs are equal, the peak to 1%. Where messages overlap,
    the peak may differ by 8%, because a real message may hold a unit's tensors for longer.
    """
    under_way = options.get("zero") == 3 or options.get("zero_overlap") or options.get("offload_optimizer") == "cpu"
    real = pools(ranks).run(counted_on_rank, step, options)
    ends = pools(1).run(dry_ends, step, options, ranks)[0]
    for ours, theirs in zip((real[0], real[-1]), ends, strict=True):
        assert (ours.sent, ours.flops) == (theirs.sent, theirs.flops), options
        assert ours.peak == pytest.approx(theirs.peak, rel=0.08 if under_way else 0.01), options


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n >= 2)) for n in range(200)])
def test_real_ranks_are_as_the_dry_run_counts(pools, seed):
    """Compare the first and the last rank of a random layout."""
    step, options = draw(seed)
    compare(pools, step, options, ranks_of(options))


@pytest.mark.parametrize("mode", ["alltoall", "rows", "allgather", "nodes"])
def test_choices_are_balanced(pools, mode):
    """A token chooses two of four experts, both in one group; an expert takes half of the tokens that choose it."""
    options = dict(experts=4, experts_per_token=2, expert_groups=2, groups_per_token=1, capacity_factor=0.5)
    compare(pools, "step07_moe_ep", options | dict(ep=2, ep_mode=mode, global_batch_size=2, n_layers=1), 2)


def test_matmuls_are_those_that_torch_counts():
    """torch's own counter agrees. Of a CPU's attention it counts all scores, before torch 2.15 none."""
    options = SHAPE | dict(n_layers=2, recompute="full")
    count = dry("step01_single_gpu", options, 1).meter.count
    with FlopCounterMode(display=False) as theirs:
        watch("step01_single_gpu", options | dict(steps=1))
    attention = sum(each["flops"] for name, each in count.items() if "attention" in name)  # half of the scores: causal
    matmuls = sum(each["flops"] for each in count.values()) - attention
    assert attention and theirs.get_total_flops() - matmuls in (0, 2 * attention)


def test_kernels_are_those_of_a_gpu():
    """RMSNorm is one kernel each way. An update reads four numbers a parameter, and writes three."""
    seen = dry("step01_single_gpu", SHAPE | dict(dtype="bf16", recompute="full"), 1)
    layers, passes = 2 * SHAPE["n_layers"], SHAPE["global_batch_size"]  # norms in layers are done again
    x, count = 2 * SMALL["seq_len"] * SMALL["dim"], seen.meter.count
    found = [count[name][what] for name in ("rms_norm", "rms_norm_backward") for what in ("calls", "bytes")]
    forward, backward = passes * (2 * layers + 1), passes * (layers + 1)
    assert found == [forward, forward * 2 * x, backward, backward * 3 * x] and "rsqrt" not in count
    assert count["_fused_adamw_"]["bytes"] == pytest.approx(7 * seen.held["masters"], rel=0.01)


@pytest.mark.parametrize("flags", [dict(documents="mask"), dict(sync="torch", zero=0)], ids=str)
def test_what_asks_for_numbers_is_refused(flags):
    """Flags that need the numbers in tensors are refused in one line."""
    with pytest.raises(UserError, match="--dry-run"):
        dry("step05_cp_ring", flags, 2)


def is_counted(step: str, run: dict) -> bool:
    """Whether no file refuses --dry-run together with these flags."""
    plain = defaults(compose(importlib.import_module(step)))
    refused = [one for one in refusals(compose(importlib.import_module(step))) if "dry_run" in one.flags]
    return not any(one.holds((plain | run | dict(dry_run=1)).get, plain) for one in refused)


@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2))])
def test_every_value_is_counted(part):
    """Each value of each flag, unless it is refused, is in some dry run. A run has many flags (pairs.py)."""
    step = STEPS[-1]
    runs = {frozenset([single]): complete(step, dict([single])) for single in singles(step)}
    values = [dict(single) for single, run in runs.items() if is_counted(step, run) and comparable(run)]
    for options in map(lighter, covering(step, values)[part::3]):
        mine = 2 * options["micro_batch_size"]  # two micro-batches are enough
        options["global_batch_size"] = mine * (ranks_of(options) // (options["pp"] * options["cp"] * options["tp"]))
        assert dry(step, options, ranks_of(options)).meter.count, options


@pytest.mark.parametrize(
    "name, flags",
    [
        ("step02_ddp", dict(dry_run=2, rank="all")),
        ("step07_moe_ep", dict(model="tiny-moe", dry_run=8, pp=2, tp=2, ep=2, rank="7", gpu="a100-80")),
    ],
)
def test_a_dry_run_says_what_it_counted(name, flags, capsys):
    """It is called as in `main`: a ServedRun, with a replacement of the step's `train`."""
    step = importlib.import_module(name)
    config = compose(step)(**flags)
    with ServedRun(config) as run:
        instead_of(step.train)(config, run)
    said = capsys.readouterr().out
    assert "MFU is at most" in said and f"at the speed of {config.gpu}" in said
    assert ("\n1 " in said) == (config.rank == "all") and ("\nrank 7:" in said) == (config.rank == "7")
