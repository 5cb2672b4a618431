"""What the paths for CUDA and NCCL must not do: make the host wait, read early, launch in an order that never ends.

Tests with `seen` train on GPUs that are not there (extras/tests/fake_gpu.py), in a process that loads a shim of C++.
The names of some cases, such as N2, are those of faults that were found by reading.
"""

from functools import partial
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
from common import UserError, comm
from extras.services import devices
from extras.services.clocks import Clock
from extras.services.dry_run import run_rank
from extras.services.legal import layout_of_flags
from extras.tests import equal
from extras.tests.fake_gpu import Call, can_fake_cuda, see, stuck
from extras.tests.faults import Fault, injected
from extras.tests.pool import Pool, RankError
from extras.theory.layouts import communicators
from extras.theory.shapes import shape_of
from extras.variants import Parts
from extras.variants.step01 import chunked_loss, documents
from extras.variants.step07.ep_overlap import Turns
from step04_tp_sp import VocabParallelEmbedding

MOE = dict(experts=4, ep=2, ffn_dim=48, expert_matmul="grouped")
TURNS = MOE | dict(pp=2, schedule="ahead", chunks=1, ep_overlap=True, n_layers=4, global_batch_size=16)
EP_OVERLAP, OFFLOAD = "extras.variants.step07.ep_overlap", "extras.variants.step03.offload_optimizer"
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
    "lists": ("step06_pipeline", dict(pp=2, tp=2, schedule="zb-h1", zero=1), 8, (9, 0), 0),
    "experts": ("step07_moe_ep", MOE, 8, (9, 0), 12),  # once for 3 layers, 2 micro-batches, 2 steps
    "experts, A100": ("step07_moe_ep", MOE, 8, (8, 0), 12),
    "rows": ("step07_moe_ep", MOE | dict(ep_mode="rows"), 8, (9, 0), 24),  # to ranks, then to experts
    "nodes": ("step07_moe_ep", MOE | dict(ep=4, ep_mode="nodes"), 8, (9, 0), 36),
    "in turns": ("step07_moe_ep", TURNS, 8, (9, 0), 16),  # once for 2 layers, 4 micro-batches, 2 steps
    "experts, again": ("step07_moe_ep", MOE | dict(recompute="full", ep=1), 8, (9, 0), 24),
}
USUAL = ("offloaded, alone", "experts", "experts, A100", "nodes", "in turns")
GROUPED = "extras.variants.step07.grouped_matmul"
# fmt: off
FAULTY = {  # what is undone: the case; in which of the watch's notes it shows, or an error; module, owner, old, new
    "N2": ("offloaded, alone", "early", "extras.variants.step03.offload_params", "gather_beside",
           "*pending.works, arrived", "*pending.works"),
    "N3: counts": ("experts", "waits", "step07_moe_ep", "visit_experts",
                   "torch.stack((leaving_Ge, arriving_Ge)).cpu()", "leaving_Ge, arriving_Ge"),
    "N3: A100": ("experts, A100", "waits", GROUPED, "can_group", "major not in (9, 10)", "False"),
    "N3: ends": ("experts", "waits", GROUPED, "ends", ", non_blocking=True", ""),
    "N3: bincount": ("experts", "bincount", "step07_moe_ep", "MoE",
                     "F.one_hot(ids_TK.flatten(), p_TE.shape[-1])", "torch.bincount(ids_TK.view(-1))"),
    "G10": ("nodes", "waits", "extras.variants.step07.expert_rows", "send_rows",
            "torch.stack((leaving, coming)).tolist()", "leaving.tolist(), coming.tolist()"),
    "G1": ("in turns", "not compiled with CUDA", EP_OVERLAP, "Turns", 'device.type == "cuda"', "False"),
    "a gradient": ("offloaded", "early", OFFLOAD, "Update", "            wait()", "            0"),
    "a look": ("plain", "waits", "common.model", "summed_cross_entropy", "return F", "logits.sum().item(); return F"),
    "a table": ("plain", "device", "common.model", "apply_rope", "x * cos", "x * cos.cpu()"),
    "a message": ("ring", "tensor on cpu", "common.layout", "global_norm", "(square, mesh", "(square.cpu(), mesh"),
}
# fmt: on
USUAL_FAULTS = [name for name in FAULTY if name.startswith("N")]


def look(step: str, options: dict, *text: str, rank: int = 0, world: int = 8, capability: Any = (9, 0)) -> dict:
    """Runs in a process of its own: what `Watch` has seen of a rank. `text`: what is undone, as in FAULTY."""
    assert can_fake_cuda()
    with injected(Fault(*text, "") if text else ""):
        watch = see(step, options, rank, world, capability)
    return dict(waits=watch.waits, early=watch.early, calls=watch.calls)


@pytest.fixture(scope="module")
def seen():
    """As `look`, in a process that has loaded the shim."""
    pool = Pool(1)
    if not pool.run(can_fake_cuda)[0]:
        pytest.skip("fake GPUs want a CPU build of torch, and g++")
    yield lambda *given, **how: pool.run(partial(look, *given, **how))[0]
    pool.stop()


def usual_first(names, usual):
    """A test for each, of which those that are not usual are exhaustive."""
    return [pytest.param(name, marks=[] if name in usual else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", usual_first(CASES, USUAL))
def test_the_host_runs_ahead_and_nothing_is_read_early(seen, name):
    """In forward and backward it waits for the counts of experts alone; streams and NCCL wait for what they read."""
    step, options, world, capability, waits = CASES[name]
    found = seen(step, options, world=world, capability=capability)
    assert found["waits"].total() == waits, found["waits"]
    assert not found["early"]


@pytest.mark.parametrize("name", usual_first(FAULTY, USUAL_FAULTS))
def test_what_is_undone_shows(seen, name):
    """More waits, something that is read too early, or an error of that kind."""
    case, note, *text = FAULTY[name]
    step, options, world, capability, waits = CASES[case]
    try:
        found = seen(step, options, *text, world=world, capability=capability)
    except RankError as error:
        assert note in str(error), name
    else:
        assert found[note].total() > waits if note == "waits" else found[note], name


def test_g1_and_g3_all_forwards_in_pairs_have_one_thread(monkeypatch):
    """It sets its device once: CUDA's current device and cuDNN's plans belong to a thread."""
    told, device = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda given: told.append((get_ident(), given)))
    turns = Turns(device)
    threads = {turns.both(get_ident, get_ident)[0] for _ in range(3)}
    assert told == [(*threads, device)] and get_ident() not in threads


def test_all_ranks_launch_in_an_order_that_ends(seen):
    """As if each call blocked its rank. When ranks 0 and 3 sum the norm over tp before pp, all four wait."""
    step, options = "step06_pipeline", dict(pp=2, tp=2, steps=1, n_layers=2, global_batch_size=2)
    other = "for dim in list(mesh.sizes)[:: -1 if mesh.rank in (0, 3) else 1]:"
    for text, waiting in ([], 0), (["common.layout", "global_norm", "for dim in mesh.sizes:", other], 4):
        calls = [seen(step, options, *text, rank=rank, world=4)["calls"] for rank in range(4)]
        assert len(stuck(calls)) == waiting


TALKS = {  # step, flags; the mesh is made of what is left
    "dp": ("step03_zero", dict(zero=1)),
    "cp alone": ("step05_cp_ring", dict(cp=8)),
    "all": ("step06_pipeline", dict(pp=2, cp=2, tp=2, zero=1)),
    "mirrored": ("step06_pipeline", dict(pp=4, schedule="dualpipe")),
    "replicas": ("step03_zero", dict(zero=1, zero_replicas=2)),
    "experts": ("step07_moe_ep", MOE | dict(pp=2, tp=2, ep=4)),
}


@pytest.mark.parametrize("name", usual_first(TALKS, ("all", "experts")))
def test_the_plan_counts_the_communicators(seen, name):
    """All in which a rank launches something, and one more, of all ranks, in which services do."""
    step, options = TALKS[name]
    x = layout_of_flags(equal.config_of(step, options | dict(global_batch_size=32)), 8)
    m = shape_of(equal.ModelConfig(**equal.SMALL), SimpleNamespace(experts=options.get("experts", 0)))
    calls = seen(step, dict(steps=1, n_layers=4) | options)["calls"]
    assert communicators(m, x) == len({call.group for together in calls for call in together}) + 1


USP, NODES = dict(cp=8, cp_mode="usp", n_heads=8), MOE | dict(experts=8, ep=8, ep_mode="nodes")
QUEUES = {  # all eight ranks are one group, over which ZeRO shards: the kind or dtype of what is sent, step, flags
    "ring": ("message", "step05_cp_ring", USP | dict(ulysses=1)),
    "ulysses": ("alltoall_base", "step05_cp_ring", USP | dict(ulysses=8)),
    "sequence": ("torch.int64", "step07_moe_ep", MOE | dict(cp=8, ep=1)),
    "ep inside": ("alltoall_base", "step07_moe_ep", NODES | dict(ep_inside=8)),
    "ep between": ("alltoall_base", "step07_moe_ep", NODES | dict(ep_inside=1)),
}


@pytest.mark.parametrize("name", usual_first(QUEUES, ("ring", "sequence", "ep inside")))
def test_g11_activations_do_not_queue_behind_weights(seen, name):
    """In a communicator of ZeRO's gathers, a layer would wait until the weights of the next one are here."""
    what, step, options = QUEUES[name]
    calls = [call for together in seen(step, dict(steps=1, zero=3) | options)["calls"] for call in together]
    groups = {call.group for call in calls if what in (call.kind, call.what[-1])}
    gathers = {call.group for call in calls if call.kind.startswith("allgather")}
    assert groups and gathers and not groups & gathers


def test_stuck_names_what_never_ends():
    """Two ranks, two communicators: the same order ends, the other order does not, nor does a lone or a longer call."""
    a, b = ([Call("allreduce", name, (0, 1), (4, "torch.float32"))] for name in "ab")
    assert stuck([[a, b], [a, b]]) == []
    assert [text[:6] for text in stuck([[a, b], [b, a]])] == ["rank 0", "rank 1"]
    assert len(stuck([[a, b], [a]])) == 1 and len(stuck([[a], [[a[0]._replace(what=(5, "torch.float32"))]]])) == 2
    there, back = (Call("message", "cp", ends, (4, "f")) for ends in ((0, 1), (1, 0)))
    assert stuck([[[there, back]], [[back, there]]]) == []
    assert len(stuck([[[there], [back]], [[back], [there]]])) == 2


@pytest.mark.parametrize("mode", ["off", "mask"])
def test_n4_documents_leave_cudnn_alone(monkeypatch, mode):
    """cuDNN would plan anew for each length of a document; whole sequences have one length."""
    monkeypatch.setattr(documents, "Documents", lambda config, parts: None)
    torch.backends.cuda.enable_cudnn_sdp(True)
    documents.attach(SimpleNamespace(documents=mode), SimpleNamespace())
    assert torch.backends.cuda.cudnn_sdp_enabled() == (mode == "off")
    assert torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)


def peak(most: int) -> int:
    """The dry run's highest bytes of a model of 131,072 words, with chunks of so many bytes."""
    options = dict(vocab_size=2**17, seq_len=4096, n_layers=1, dtype="bf16", loss_chunk=4096, dry_run=1)
    config = equal.config_of("step01_single_gpu", options | dict(micro_batch_size=2, global_batch_size=2))
    with mock.patch.object(chunked_loss, "MOST", most):
        return sum(run_rank(step01.train, config, 0).meter.peak().values())


def test_n5_the_loss_takes_the_bytes_that_are_promised():
    """Three chunks in fp32 and two in bf16; the dry run sees them. Without a bound, 4,096 tokens take 2 GiB each."""
    for most in (2**29, 2**30):
        assert 3 * most < peak(most) < 4.1 * most
    assert 3 * 2**31 < peak(2**40) < 4.1 * 2**31


@pytest.mark.parametrize("timed", [False, True])
def test_a_gpus_waits_are_timed_on_request(monkeypatch, timed):
    """Else a wait makes no event, and the record has no such field."""
    events = []
    monkeypatch.setattr(Clock, "now", lambda clock: events.append(1) or float(len(events)))
    monkeypatch.setattr(Clock, "between", lambda clock, start, end: end - start)
    rule, message = torch.optim.SGD([torch.ones(2)]), SimpleNamespace(works=(1,), group=SimpleNamespace(name="cp"))
    clock = Clock(Parts(None, torch.nn.Linear(1, 1), rule, None, mesh=comm.Mesh(dp=1)))
    clock.timing = timed
    clock.begin()
    before = len(events)
    with clock.waiting(message):
        pass
    assert len(events) - before == 2 * timed and clock.take().get("waited_seconds") == (dict(cp=1.0) if timed else None)


def chooses_again(mode: str) -> bool:
    """Whether a layer visits other experts when it runs again, with a router that always finds other scores."""
    numbers, right, chosen = np.random.default_rng(0), F.one_hot, []
    step07.shaky = lambda: torch.from_numpy(numbers.random(4))
    shaky = Fault("step07_moe_ep", "MoE", ".softmax(-1)", ".softmax(-1) * shaky()", "")
    with injected(shaky), mock.patch.object(F, "one_hot", lambda x, n: chosen.append(x.tolist()) or right(x, n)):
        equal.record("step07_moe_ep", dict(experts=4, recompute=mode, steps=1, expert_matmul="grouped"))
    rounds = [chosen[i : i + 6] for i in range(0, len(chosen), 6)]  # three layers forward, and again in backward
    return rounds != [one[::-1] for one in rounds]


@pytest.mark.parametrize("mode", ["full", "elementwise"])
def test_n8_a_router_chooses_once(mode):
    """Recomputation visits the same experts; otherwise the gradients would be those of another function."""
    assert not chooses_again(mode)
    with injected(Fault("extras.variants.step01.elementwise", "attach", "CHOICE", "[]", "")):
        assert chooses_again(mode)


def test_n9_tokens_of_other_ranks_are_spread_over_the_rows(monkeypatch):
    """Each row gets as many: a GPU adds the gradients of tokens that share a row one after another."""
    rows, right = [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda row, weight: rows.append(row) or right(row, weight))
    layer = VocabParallelEmbedding(torch.nn.Parameter(torch.randn(8, 4)), range(16, 24))
    out = layer(torch.arange(64).view(1, 64))
    assert torch.bincount(rows[0].flatten()).tolist() == [8] * 8
    assert torch.equal(out[0, 16:24], layer.weight) and not out[0, :16].any() and not out[0, 24:].any()


@pytest.mark.parametrize(
    "others, ours, gpus, backend",
    [("a", "b", 1, "nccl"), ("a", "a", 1, "staged"), ("a", "b", 2, "nccl"), ("", "", 0, "gloo")],
)
def test_n10_one_visible_gpu_a_rank_is_a_gpu_of_its_own(monkeypatch, others, ours, gpus, backend):
    """Ranks that see one GPU each compare the GPUs' numbers, and use NCCL. Ranks that share one get gloo, or a line."""
    store, chosen = dist.HashStore(), []
    store.set("gpu/1", others)
    for key, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="2").items():
        monkeypatch.setenv(key, value)
    for key, value in dict(device_count=gpus, is_available=gpus > 0, set_device=None).items():
        monkeypatch.setattr(torch.cuda, key, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=ours))
    monkeypatch.setattr(devices, "fresh_store", lambda _: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    config = SimpleNamespace(device="auto", backend="auto", timeout=60.0, sync="bucket")
    assert devices.meet(config) == gpus and chosen == [backend]
    config.backend = "nccl"
    if backend != "nccl":
        with pytest.raises(UserError, match="needs one GPU for each rank"):
            devices.meet(config)


WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]  # torch 2.13 for CUDA 13


@pytest.mark.parametrize(
    "capability, built, runs",
    [
        *(((7, 0), WHEEL, False), ((7, 5), WHEEL, True), ((8, 9), WHEEL, True), ((9, 0), WHEEL, True)),
        *(((10, 3), WHEEL, True), ((11, 0), WHEEL, False), ((12, 1), WHEEL, True), ((13, 0), WHEEL, True)),
        *(((9, 0), ["sm_90a"], True), ((9, 1), ["sm_90a"], False), ((7, 0), ["compute_61"], True), ((6, 0), [], False)),
    ],
)
def test_a_gpu_runs_what_was_built_for_it(capability, built, runs):
    """Its own generation and older minor versions, and PTX of any older one."""
    assert devices.has_kernels(built, capability) == runs


@pytest.mark.parametrize(
    "name, capability, dtype, says",
    [
        ("T4", (7, 5), "fp32", "--dtype auto is fp32: T4 has no bf16"),
        ("A100", (8, 0), "auto", ""),
        ("Tesla V100", (7, 0), "", "--device auto: Tesla V100 has the architecture 7.0, .* use --device cpu$"),
    ],
)
def test_an_older_gpu_is_one_line(monkeypatch, capsys, name, capability, dtype, says):
    """One without bf16 trains in fp32; one for which torch has no kernels is refused."""
    found = dict(is_available=True, device_count=1, get_device_capability=capability, get_device_name=name)
    for key, value in (found | dict(get_arch_list=WHEEL)).items():
        monkeypatch.setattr(torch.cuda, key, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = SimpleNamespace(device="auto", dtype="auto", backend="auto")
    if not dtype:
        with pytest.raises(UserError, match=says):
            devices.check(config, 1)
        return
    devices.check(config, 1)
    devices.settle(config, 1)
    said = capsys.readouterr().out
    assert config.dtype == dtype and said.startswith(says) and bool(said) == bool(says)
