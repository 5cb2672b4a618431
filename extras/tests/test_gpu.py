"""The code for CUDA and NCCL must not make the host wait, read data too early, or launch collectives that deadlock.

Both tests train on simulated GPUs (fake_gpu.py). faults.py has mistakes that these tests must notice.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from extras.tests.fake_gpu import see, stuck

MOE = dict(experts=4, ep=2, ffn_dim=48, expert_matmul="grouped")
CASES = {  # step, flags, ranks, and how often the host waits in forward and backward
    "plain": ("step01_single_gpu", {}, 1, 0),
    "buckets": ("step02_ddp", {}, 8, 0),
    "zero 3": ("step03_zero", dict(zero=3, recompute="full"), 8, 0),
    "fused sums": ("step03_zero", dict(zero=3, recompute="full", fused_gradients=True), 8, 0),
    "offloaded": ("step03_zero", dict(zero=3, offload_params="cpu", offload_optimizer="cpu"), 8, 0),
    "ring": ("step05_cp_ring", dict(cp=2, tp=2, zero=3), 8, 0),
    "ring, flash": ("step05_cp_ring", dict(cp=2, tp=2, cp_kernel="flash"), 8, 0),
    "lists": ("step06_pipeline", dict(pp=2, tp=2, schedule="zb-h1", zero=1), 8, 0),
    "activations": ("step06_pipeline", dict(pp=2, tp=2, recompute="offload", zero=3), 8, 0),
    "experts": ("step07_moe_ep", MOE | dict(zero=3), 8, 12),  # one for each of 3 layers x 2 micro-batches x 2 steps
    "capacity": ("step07_moe_ep", MOE | dict(capacity_factor=1.0), 8, 24),  # a second wait in each, to drop choices
    "rows": ("step07_moe_ep", MOE | dict(ep_mode="rows"), 8, 24),  # two waits: for counts by rank, and by expert
    "nodes": ("step07_moe_ep", MOE | dict(ep=4, ep_mode="nodes"), 8, 36),
    "chunks": ("step07_moe_ep", MOE | dict(ep_overlap=2), 8, 12),
}


def seen(pools, step: str, options: dict, *how: Any) -> SimpleNamespace:
    """Call `see` in a process of its own. If GPUs cannot be simulated, skip the test."""
    (found,) = pools(1, "fake GPUs").run(see, step, options, *how)
    return found or pytest.skip("fake GPUs want a CPU build of torch, and g++")


@pytest.mark.parametrize("name", CASES)
def test_the_host_runs_ahead_and_nothing_is_read_early(pools, name):
    """In forward and backward the host waits only in layers with experts, and nothing is read too early.

    Activations and ZeRO's weights have different communicators, so no activation waits for the next layer's weights.
    """
    step, options, world, waits = CASES[name]
    found = seen(pools, step, options, 0, world)
    assert found.waits.total() == waits, found.waits
    assert not found.early
    calls = [call for launch in found.calls for call in launch]
    urgent = {call.group for call in calls if call.kind in ("message", "alltoall_base")}
    assert not urgent & {call.group for call in calls if call.kind == "allgather_base"}


def test_all_ranks_launch_in_an_order_that_ends(pools):
    """Even if each launch made its rank wait until the other ranks had launched the same calls, no rank would hang."""
    options = dict(pp=2, tp=2, steps=1, n_layers=2, global_batch_size=2)
    assert not stuck([seen(pools, "step06_pipeline", options, rank, 4).calls for rank in range(4)])
