"""Tests of the dry run: it counts what real ranks send, compute and keep in memory, and RMSNorm as a GPU's kernel."""

import importlib
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import step07_moe_ep as step07
from extras.tools.dry_run import Counted, Meter, instead_of, run_rank
from extras.services.run import ServedRun
from extras.services.seam import check, compose
from extras.tests.equal import SMALL, config_of, watch
from extras.plan.gpus import GPUS
from extras.variants.step07 import grouped_matmul
from extras.variants.step07.routing import RoutedMoE

EVEN = dict(experts=4, experts_per_token=4)  # all experts are visited equally often, as a dry run assumes
GROUPS = dict(experts=4, experts_per_token=2, expert_groups=2, groups_per_token=1, capacity_factor=0.5, n_layers=1)
SHAPE = dict(n_layers=4, n_heads=4, n_kv_heads=2, global_batch_size=4)
LAYOUTS = [  # ranks, step, flags. In GROUPS a token chooses both experts of a group; capacity drops half of all choices
    (1, "step01_single_gpu", dict(dtype="bf16", recompute="full", optimizer="adafactor")),
    (3, "step02_ddp", dict(sync="ring", optimizer="muon", global_batch_size=6)),
    (4, "step03_zero", dict(zero=3, zero_replicas=2, zero_keep=True, recompute="full")),
    (4, "step05_cp_ring", dict(cp=2, tp=2, tp_overlap=True, zero=2)),
    (4, "step05_cp_ring", dict(cp=4, cp_mode="usp", tied=True, zero=1, offload_optimizer="cpu")),
    (4, "step06_pipeline", dict(pp=2, tp=2, sp=False, schedule="zb-h1", tied=True)),
    (4, "step06_pipeline", dict(pp=2, tp=2, compress_activations="int8")),
    (4, "step07_moe_ep", EVEN | dict(pp=2, ep=2, zero=1, schedule="dualpipe", shared_experts=1, micro_batch_size=1)),
    *((2, "step07_moe_ep", GROUPS | dict(ep=2, ep_mode=mode)) for mode in ("alltoall", "rows", "allgather", "nodes")),
]


def counts(run: Counted) -> SimpleNamespace:
    """The numbers of a step that are compared: traffic, held bytes of each kind of tensor, FLOPs and peak memory."""
    flops = sum(count["flops"] for count in run.meter.count.values())
    return SimpleNamespace(sent=run.taken, held=run.held, flops=flops, peak=sum(run.meter.peak().values()))


def dry(step: str, options: dict, ranks: int, rank: int = 0) -> Counted:
    """Dry-run `step` as one rank of `ranks`. Raises UserError for flags that cannot work."""
    config = config_of(step, options | dict(dry_run=ranks))
    check(config, 1)
    return run_rank(importlib.import_module(step).train, config, rank)


def dry_ends(step: str, options: dict, ranks: int) -> list[SimpleNamespace]:
    """Runs in one process: the `counts` of a dry run of the first and of the last rank."""
    return [counts(dry(step, options, ranks, rank)) for rank in (0, ranks - 1)]


def evenly(layer: RoutedMoE, scores: Tensor) -> Tensor:
    """Replaces `RoutedMoE.choose`: gives each token the next experts in turn, not those with the highest scores."""
    return torch.arange(len(scores) * layer.top_k).view(-1, layer.top_k) % scores.shape[1]


def counted_on_rank(name: str, options: dict) -> SimpleNamespace:
    """Runs on every rank: the `counts` of a step of real training."""
    config, balanced = config_of(name, options | dict(lr=1e-4, steps=2)), mock.patch.object(RoutedMoE, "choose", evenly)
    loops = mock.patch.object(grouped_matmul, "can_group", lambda *_: False)
    whole = mock.patch.object(dist, "get_backend", lambda *_: "")  # because comm.py allocates more with gloo
    # gloo's thread frees tensors a moment after their wait: sleep before the bytes of a forward are read
    late = mock.patch.object(Meter, "phase", lambda *given, right=Meter.phase: time.sleep(0.05) or right(*given))
    with loops, balanced, whole, late, Meter(GPUS["h100-80"]) as meter, Counted(config, meter) as run:
        importlib.import_module(name).train(config, run)
    return counts(run)


@pytest.mark.parametrize("ranks, step, flags", LAYOUTS, ids=str)
def test_real_ranks_are_as_the_dry_run_counts(pools, ranks, step, flags):
    """Real ranks send and compute exactly what a dry run counts; held bytes and the peak differ by 1 % at most.

    Where messages overlap computation, the peak may differ by 8 %: gloo may hold a tensor for a moment after the wait.
    """
    options = SHAPE | flags
    overlaps = {"zero": 3, "tp_overlap": True, "offload_optimizer": "cpu"}
    under_way = any(options.get(name) == value for name, value in overlaps.items())
    real = pools(ranks).run(counted_on_rank, step, options)
    ends = pools(1).run(dry_ends, step, options, ranks)[0]
    for ours, theirs in zip((real[0], real[-1]), ends, strict=True):
        assert (ours.sent, ours.flops) == (theirs.sent, theirs.flops)
        assert ours.held == pytest.approx(theirs.held, rel=0.01)
        assert ours.peak == pytest.approx(theirs.peak, rel=0.08 if under_way else 0.01)


def test_matmuls_are_those_that_torch_counts():
    """Matmuls have the FLOPs that torch counts. For attention on CPU, torch counts all scores or, before 2.15, none."""
    options = SHAPE | dict(n_layers=2, recompute="full")
    count = dry("step01_single_gpu", options, 1).meter.count
    with FlopCounterMode(display=False) as theirs:
        watch("step01_single_gpu", options | dict(steps=1))
    attention = sum(each["flops"] for name, each in count.items() if "attention" in name)  # half of the scores: causal
    matmuls = sum(each["flops"] for each in count.values()) - attention
    assert attention and theirs.get_total_flops() - matmuls in (0, 2 * attention)


def test_kernels_are_those_of_a_gpu():
    """RMSNorm is one kernel in each direction. AdamW reads four numbers for each parameter, and writes three."""
    seen = dry("step01_single_gpu", SHAPE | dict(dtype="bf16", recompute="full", device="auto"), 1)
    layers, passes = 2 * SHAPE["n_layers"], SHAPE["global_batch_size"]  # norms in layers are recomputed
    x, count = 2 * SMALL["seq_len"] * SMALL["dim"], seen.meter.count
    found = [count[name][what] for name in ("rms_norm", "rms_norm_backward") for what in ("calls", "bytes")]
    forward, backward = passes * (2 * layers + 1), passes * (layers + 1)
    assert found == [forward, forward * 2 * x, backward, backward * 3 * x]
    assert count["_fused_adamw_"]["bytes"] == pytest.approx(7 * seen.held["masters"], rel=0.01)


def test_a_dry_run_says_what_it_counted(capsys):
    """The report names the GPU, the rank, and an upper bound of MFU. The run is started as in extras/__main__.py."""
    config = compose(step07)(model="tiny-moe", dry_run=8, pp=2, tp=2, ep=2, rank="7", gpu="a100-80")
    with ServedRun(config) as run:
        instead_of(step07.train)(config, run)
    said = capsys.readouterr().out
    assert all(words in said for words in ("MFU is at most", "at the speed of a100-80", "\nrank 7:"))
