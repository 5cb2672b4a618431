"""The paths for CUDA and NCCL must not make the host wait, read data too early, or launch collectives that deadlock.

Tests with `seen` train on simulated GPUs (extras/tests/fake_gpu.py), in a process that loads a shim in C++.
faults.py has mistakes that each of them must notice.
"""

from threading import get_ident
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import step01_single_gpu as step01
import step07_moe_ep as step07
from common import UserError
from extras.services import devices
from extras.services.dry_run import run_rank
from extras.services.legal import layout_of_flags
from extras.tests import equal
from extras.tests.fake_gpu import see, stuck
from extras.tests.faults import Fault, injected
from extras.theory.layouts import communicators
from extras.theory.shapes import shape_of
from extras.variants.step01 import chunked_loss, documents
from extras.variants.step07.ep_overlap import Turns
from step04_tp_sp import VocabParallelEmbedding

MOE = dict(experts=4, ep=2, ffn_dim=48, expert_matmul="grouped")
TURNS = MOE | dict(pp=2, schedule="ahead", chunks=1, ep_overlap=True, n_layers=4, global_batch_size=16)
OFFLOADED = dict(zero=3, offload_params="cpu", offload_optimizer="cpu")
CASES = {  # step, flags, ranks, capability of the GPUs, and how often the host waits in forward and backward
    "plain": ("step01_single_gpu", {}, 1, (9, 0), 0),
    "buckets": ("step02_ddp", {}, 8, (9, 0), 0),
    "zero 3": ("step03_zero", dict(zero=3, recompute="full"), 8, (9, 0), 0),
    "offloaded": ("step03_zero", OFFLOADED, 8, (9, 0), 0),
    "offloaded, alone": ("step03_zero", OFFLOADED, 1, (9, 0), 0),
    "ring": ("step05_cp_ring", dict(cp=2, tp=2), 8, (9, 0), 0),
    "ring, flash": ("step05_cp_ring", dict(cp=2, tp=2, cp_kernel="flash"), 8, (9, 0), 0),
    "fused sums": ("step03_zero", dict(zero=3, recompute="full", fused_gradients=True), 8, (9, 0), 0),
    "activations": ("step06_pipeline", dict(pp=2, tp=2, recompute="offload", zero=3), 8, (9, 0), 0),
    "lists": ("step06_pipeline", dict(pp=2, tp=2, schedule="zb-h1", zero=1), 8, (9, 0), 0),
    "experts": ("step07_moe_ep", MOE, 8, (9, 0), 12),  # once for 3 layers, 2 micro-batches, 2 steps
    "experts, A100": ("step07_moe_ep", MOE, 8, (8, 0), 12),
    "rows": ("step07_moe_ep", MOE | dict(ep_mode="rows"), 8, (9, 0), 24),  # to ranks, then to experts
    "nodes": ("step07_moe_ep", MOE | dict(ep=4, ep_mode="nodes"), 8, (9, 0), 36),
    "in turns": ("step07_moe_ep", TURNS, 8, (9, 0), 16),  # once for 2 layers, 4 micro-batches, 2 steps
    "experts, again": ("step07_moe_ep", MOE | dict(recompute="full", ep=1), 8, (9, 0), 24),
}


def seen(pools, step: str, options: dict, *how: Any) -> SimpleNamespace:
    """Call `see`, which trains as one rank with these flags, in a process of its own that has loaded the shim."""
    (found,) = pools(1, "fake GPUs").run(see, step, options, *how)
    return found or pytest.skip("fake GPUs want a CPU build of torch, and g++")


@pytest.mark.parametrize("name", CASES)
def test_the_host_runs_ahead_and_nothing_is_read_early(pools, name):
    """In forward and backward the host waits only for the experts' counts; streams and NCCL wait for what they read."""
    step, options, world, capability, waits = CASES[name]
    found = seen(pools, step, options, 0, world, capability)
    assert found.waits.total() == waits, found.waits
    assert not found.early


def test_all_ranks_launch_in_an_order_that_ends(pools):
    """No rank would hang even if each call blocked its rank."""
    options = dict(pp=2, tp=2, steps=1, n_layers=2, global_batch_size=2)
    assert not stuck([seen(pools, "step06_pipeline", options, rank, 4).calls for rank in range(4)])


USP, NODES = dict(cp=8, cp_mode="usp", n_heads=8), MOE | dict(experts=8, ep=8, ep_mode="nodes")
GROUPS = {  # step, flags, and the operation that sends activations, or their dtype ("": not tested)
    "dp": ("step03_zero", dict(zero=1), ""),
    "all": ("step06_pipeline", dict(pp=2, cp=2, tp=2, zero=1), ""),
    "mirrored": ("step06_pipeline", dict(pp=4, schedule="dualpipe"), ""),
    "replicas": ("step03_zero", dict(zero=1, zero_replicas=2), ""),
    "experts": ("step07_moe_ep", MOE | dict(pp=2, tp=2, ep=4), ""),
    "cp": ("step05_cp_ring", dict(cp=8, zero=3), "message"),
    "sequence": ("step07_moe_ep", MOE | dict(cp=8, ep=1, zero=3), "torch.int64"),
    "ring": ("step05_cp_ring", USP | dict(ulysses=1, zero=3), "message"),
    "ulysses": ("step05_cp_ring", USP | dict(ulysses=8, zero=3), "alltoall_base"),
    "ep inside": ("step07_moe_ep", NODES | dict(ep_inside=8, zero=3), "alltoall_base"),
    "ep between": ("step07_moe_ep", NODES | dict(ep_inside=1, zero=3), "alltoall_base"),
}


@pytest.mark.parametrize("name", GROUPS)
def test_communicators(pools, name):
    """There are as many as the planner counts: those in which a rank launches something, and one of all ranks.

    Activations do not share a communicator with ZeRO's all-gathers: a layer would wait until the weights of the next
    layer have arrived.
    """
    step, options, sent_by = GROUPS[name]
    x = layout_of_flags(equal.config_of(step, options | dict(global_batch_size=32)), 8)
    m = shape_of(equal.ModelConfig(**equal.SMALL), SimpleNamespace(experts=options.get("experts", 0)))
    calls = [call for launch in seen(pools, step, dict(steps=1, n_layers=4) | options).calls for call in launch]
    groups = {call.group for call in calls}
    assert communicators(m, x) == len(groups) + 1
    if sent_by:
        urgent = {call.group for call in calls if sent_by in (call.kind, call.what[-1])}
        gathers = {call.group for call in calls if call.kind.startswith("allgather")}
        assert urgent and gathers and not urgent & gathers


def test_all_forwards_in_pairs_have_one_thread(monkeypatch):
    """The thread sets its device once: CUDA's current device and cuDNN's plans belong to a thread."""
    told, device = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda given: told.append((get_ident(), given)))
    turns = Turns(device)
    threads = {turns.both(get_ident, get_ident)[0] for _ in range(3)}
    assert told == [(*threads, device)] and get_ident() not in threads


@pytest.mark.parametrize("mode", ["off", "mask"])
def test_documents_leave_cudnn_alone(monkeypatch, mode):
    """With documents, cuDNN is off: it would plan anew for each length. Whole sequences have one length."""
    monkeypatch.setattr(documents, "Documents", lambda config, parts: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    documents.attach(SimpleNamespace(documents=mode), SimpleNamespace())
    assert torch.backends.cuda.cudnn_sdp_enabled() == (mode == "off")
    assert torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("most, chunk", [(2**29, 2**29), (2**30, 2**30), (2**40, 2**31)])
def test_the_loss_takes_the_bytes_that_are_promised(most, chunk):
    """At most three chunks in fp32 and two in bf16. In fp32, 4,096 tokens of 131,072 words have 2 GiB."""
    options = dict(vocab_size=2**17, seq_len=4096, n_layers=1, dtype="bf16", loss_chunk=4096, dry_run=1)
    config = equal.config_of("step01_single_gpu", options | dict(micro_batch_size=2, global_batch_size=2))
    with mock.patch.object(chunked_loss, "MOST", most):
        peak = sum(run_rank(step01.train, config, 0).meter.peak().values())
    assert 3 * chunk < peak < 4.1 * chunk


@pytest.mark.parametrize("mode", ["full", "elementwise"])
def test_a_router_chooses_once(mode):
    """Recomputation visits the same experts, although this router computes other scores at each call.

    Otherwise the gradients would be those of another function.
    """
    numbers, right, chosen = np.random.default_rng(0), F.one_hot, []
    step07.shaky = lambda: torch.from_numpy(numbers.random(4))
    shaky = Fault("step07_moe_ep", "MoE", ".softmax(-1)", ".softmax(-1) * shaky()", "")
    with injected(shaky), mock.patch.object(F, "one_hot", lambda x, n: chosen.append(x.tolist()) or right(x, n)):
        equal.record("step07_moe_ep", dict(experts=4, recompute=mode, steps=1, expert_matmul="grouped"))
    for i in range(0, len(chosen), 6):  # three layers forward, and again in backward
        assert chosen[i : i + 6] == chosen[i : i + 6][::-1]


def test_tokens_of_other_ranks_are_spread_over_the_rows(monkeypatch):
    """All rows get equally many: a GPU adds the gradients of tokens that share a row one after another."""
    rows, right = [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda row, weight: rows.append(row) or right(row, weight))
    layer = VocabParallelEmbedding(torch.nn.Parameter(torch.randn(8, 4)), range(16, 24))
    out = layer(torch.arange(64).view(1, 64))
    assert torch.bincount(rows[0].flatten()).tolist() == [8] * 8
    assert torch.equal(out[0, 16:24], layer.weight) and not out[0, :16].any() and not out[0, 24:].any()


@pytest.mark.parametrize("others, ours, gpus, backend", [("a", "b", 1, "nccl"), ("a", "a", 1, ""), ("", "", 0, "gloo")])
def test_one_visible_gpu_a_rank_is_a_gpu_of_its_own(monkeypatch, others, ours, gpus, backend):
    """Ranks that see one GPU each compare its id, and use NCCL. Two ranks with the same GPU are refused."""
    store, chosen = dist.HashStore(), []
    store.set("the GPU of rank 1", others)
    there = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="", MASTER_PORT="0")
    for key, value in (there | dict(OMP_NUM_THREADS="2")).items():
        monkeypatch.setenv(key, value)
    for key, value in dict(device_count=gpus, is_available=gpus > 0, set_device=None).items():
        monkeypatch.setattr(torch.cuda, key, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=ours))
    monkeypatch.setattr(devices, "fresh_store", lambda _: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    config = SimpleNamespace(device="auto", timeout=60.0, sync="bucket")
    if backend:
        devices.meet(config)
        assert chosen == [backend]
    else:
        with pytest.raises(UserError, match="two of the 2 ranks have the same GPU"):
            devices.meet(config)
