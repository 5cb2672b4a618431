"""What the CUDA and NCCL paths must not do, N1 to N10, one test or more each.

N1 an older driver (extras/tests/test_screen.py)      N2 weights that nobody waits for     N3 waits of experts
N4 plans of cuDNN     N5 the loss's memory     N6 long saves     N7 memory outside the plan     N8 routers that change
their mind     N9 duplicates in one row     N10 queues, cores, one visible GPU

Tests with `seen` train on GPUs that are not there (extras/tests/fake_gpu.py), in a process that loads a shim of C++.
"""

import os
from contextlib import AbstractContextManager
from threading import get_ident
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import step01_single_gpu as step01
from common import UserError, comm
from common.data import Data
from common.model import PRESETS
from common.trainer import DTYPES, choose_device
from extras.services import devices
from extras.services.clocks import Clock
from extras.services.dry_run import run_rank
from extras.services.legal import layout_of_flags
from extras.services.memory import outside_memory
from extras.services.screen import used_memory
from extras.tests import equal
from extras.tests.fake_gpu import Call, can_fake_cuda, see, stuck
from extras.tests.faults import Fault, injected
from extras.tests.pool import Pool, RankError
from extras.theory.gpus import COMMUNICATOR, CONTEXT
from extras.theory.layouts import Layout, communicators
from extras.theory.memory import outside
from extras.theory.shapes import shape_of
from extras.variants import Parts
from extras.variants.step01 import chunked_loss, documents
from extras.variants.step01.prefetch import Ahead
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
    "ring, cudnn": ("step05_cp_ring", dict(cp=2, tp=2, cp_kernel="cudnn"), 8, (9, 0), 0),
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
VISIT, GROUPED, COUNT = (
    "visit_experts",
    "extras.variants.step07.grouped_matmul",
    "F.one_hot(experts_TK.flatten(), p_TE.shape[-1])",
)
# fmt: off
FAULTY = {  # what is undone: the case; in which of the watch's notes it shows, or an error; module, owner, old, new
    "N2": ("offloaded, alone", "early", "extras.variants.step03.offload_params", "gather_beside",
           "*pending.works, arrived", "*pending.works"),
    "N3: counts": ("experts", "waits", "step07_moe_ep", VISIT,
                   "torch.stack((leaving_Ge, arriving_Ge)).cpu()", "leaving_Ge, arriving_Ge"),
    "N3: A100": ("experts, A100", "waits", GROUPED, "can_group", "major not in (9, 10)", "False"),
    "N3: ends": ("experts", "waits", GROUPED, "ends", ", non_blocking=True", ""),
    "N3: bincount": ("experts", "bincount", "step07_moe_ep", "MoE", COUNT, "torch.bincount(experts_TK.view(-1))"),
    "G10": ("nodes", "waits", "extras.variants.step07.expert_rows", "send_rows",
            "torch.stack((leaving, coming)).tolist()",
            "leaving.tolist(), coming.tolist()"),
    "G1": ("in turns", "not compiled with CUDA", EP_OVERLAP, "Turns", 'device.type == "cuda"', "False"),
    "a gradient": ("offloaded", "early", OFFLOAD, "Update", "            wait()", "            0"),
    "a look": ("plain", "waits", "common.model", "summed_cross_entropy", "return F", "logits.sum().item(); return F"),
    "a table": ("plain", "device", "common.model", "apply_rope", "x * cos", "x * cos.cpu()"),
    "a message": ("ring", "tensor on cpu", "common.layout", "global_norm", "(square, mesh", "(square.cpu(), mesh"),
}
# fmt: on
USUAL_FAULTS = [name for name in FAULTY if name.startswith("N")]


def undone(*text: str) -> AbstractContextManager[None]:
    """Inside, this text is in the program: module, owner, old, new; none: it is as it is."""
    return injected(Fault(text[0], "", "", *text[1:], "") if text else "")


def look(name: str, *text: str) -> dict:
    """Runs in a process of its own: what is seen of a case."""
    assert can_fake_cuda()
    step, options, world, capability, _ = CASES[name]
    with undone(*text):
        watch = see(step, options, 0, world, capability)
    return dict(
        waits=sum(watch.waits.values()), where=dict(watch.waits), early=sorted(watch.early), beside=watch.beside
    )


def calls_of(*text: str) -> list[str]:
    """Runs in a process of its own: what the ranks of a layout wait for that never ends."""
    assert can_fake_cuda()
    with undone(*text):
        options = dict(pp=2, tp=2, steps=1, n_layers=2, global_batch_size=2)
        return stuck([see("step06_pipeline", options, rank, 4).calls for rank in range(4)])


@pytest.fixture(scope="module")
def seen():
    """`seen(function, ...)`: what it returns, in a process that has loaded the shim."""
    pool = Pool(1)
    if not pool.run(can_fake_cuda)[0]:
        pytest.skip("fake GPUs want a CPU build of torch, and g++")
    yield lambda *call: pool.run(*call)[0]
    pool.stop()


def usual_first(names, usual):
    """A test for each, of which those that are not usual are exhaustive."""
    return [pytest.param(name, marks=[] if name in usual else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", usual_first(CASES, USUAL))
def test_the_host_runs_ahead_and_nothing_is_read_early(seen, name):
    """In forward and backward it waits for the counts of experts alone; streams and NCCL wait for what they read."""
    found = seen(look, name)
    assert found["waits"] == CASES[name][-1], found["where"]
    assert found["early"] == []
    assert (found["beside"] > 0) == ("offloaded" in name)


@pytest.mark.parametrize("name", usual_first(FAULTY, USUAL_FAULTS))
def test_what_is_undone_shows(seen, name):
    """More waits, something that is read too early, or an error of that kind."""
    case, note, *text = FAULTY[name]
    try:
        found = seen(look, case, *text)
    except RankError as error:
        assert note in str(error), name
    else:
        assert (found["waits"] > CASES[case][-1]) if note == "waits" else found[note], name


def test_g1_and_g3_all_forwards_in_pairs_have_one_thread(monkeypatch):
    """It is told its device once: CUDA's current device, and the plans of cuDNN, belong to a thread."""
    told, device = [], torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda given: told.append((get_ident(), given)))
    turns = Turns(device)
    threads = {turns.both(get_ident, get_ident)[0] for _ in range(3)}
    assert told == [(*threads, device)] and get_ident() not in threads


def test_all_ranks_launch_in_an_order_that_ends(seen):
    """As if each call blocked its rank. When ranks 0 and 3 sum the norm over tp before pp, all four wait."""
    assert seen(calls_of) == []
    other = "for dim in list(mesh.sizes)[:: -1 if mesh.rank in (0, 3) else 1]:"
    assert len(seen(calls_of, "common.layout", "global_norm", "for dim in mesh.sizes:", other)) == 4


def groups_of(step: str, options: dict) -> int:
    """Runs in a process of its own: in how many communicators a rank of eight launches something."""
    assert can_fake_cuda()
    calls = see(step, dict(steps=1, n_layers=4) | options).calls
    return len({call.group for together in calls for call in together})


TALKS = {  # step, flags; the mesh is made of what is left
    "dp": ("step03_zero", dict(zero=1)),
    "cp alone": ("step05_cp_ring", dict(cp=8)),
    "pp, tp": ("step06_pipeline", dict(pp=2, tp=2)),
    "all": ("step06_pipeline", dict(pp=2, cp=2, tp=2, zero=1)),
    "mirrored": ("step06_pipeline", dict(pp=4, schedule="dualpipe")),
    "replicas": ("step03_zero", dict(zero=1, zero_replicas=2)),
    "experts": ("step07_moe_ep", MOE | dict(pp=2, tp=2, ep=4)),
    "experts, dp": ("step07_moe_ep", MOE | dict(experts=8, ep=8)),
}


@pytest.mark.parametrize("name", usual_first(TALKS, ("all", "experts")))
def test_the_plan_counts_the_communicators(seen, name):
    """All in which a rank launches something, and one more, of all ranks, in which services do."""
    step, options = TALKS[name]
    x = layout_of_flags(equal.config_of(step, options | dict(global_batch_size=32)), 8)
    m = shape_of(equal.ModelConfig(**equal.SMALL), SimpleNamespace(experts=options.get("experts", 0)))
    assert communicators(m, x) == seen(groups_of, step, options) + 1


def waits_behind_zero(what: str, step: str, options: dict) -> bool:
    """Runs in a process of its own: whether calls of this kind, or dtype, have a communicator with ZeRO's gathers."""
    assert can_fake_cuda()
    calls = [call for together in see(step, dict(steps=1, zero=3) | options).calls for call in together]
    groups = {call.group for call in calls if what in (call.kind, call.what[-1])}
    gathers = {call.group for call in calls if call.kind.startswith("allgather")}
    assert groups and gathers
    return bool(groups & gathers)


USP, NODES = dict(cp=8, cp_mode="usp", n_heads=8), MOE | dict(experts=8, ep=8, ep_mode="nodes")
QUEUES = {  # all eight ranks are one group, as those over which ZeRO cuts: what is sent there, step, flags
    "ring": ("message", "step05_cp_ring", USP | dict(ulysses=1)),
    "ulysses": ("alltoall_base", "step05_cp_ring", USP | dict(ulysses=8)),
    "sequence": ("torch.int64", "step07_moe_ep", MOE | dict(cp=8, ep=1)),
    "ep inside": ("alltoall_base", "step07_moe_ep", NODES | dict(ep_inside=8)),
    "ep between": ("alltoall_base", "step07_moe_ep", NODES | dict(ep_inside=1)),
}


@pytest.mark.parametrize("name", usual_first(QUEUES, ("ring", "sequence", "ep inside")))
def test_g11_activations_do_not_queue_behind_weights(seen, name):
    """A layer would wait until the weights of the next one are here."""
    assert not seen(waits_behind_zero, *QUEUES[name])


@pytest.mark.parametrize("kind, beside", [("cuda", 3 * 2**30), ("cpu", 0)])
def test_memory_that_the_allocator_does_not_know(monkeypatch, kind, beside):
    """What is used, without what PyTorch has reserved; a step's line has it, and the highest of it is kept."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 57 * 2**30)
    assert outside_memory(torch.device(kind)) == beside
    row = dict(peak_memory_bytes=50 * 2**30) | ({"outside_memory_bytes": beside} if beside else {})
    assert used_memory(row) == 50 * 2**30 + beside
    m = shape_of(PRESETS["llama3-8b"], SimpleNamespace())
    assert outside(m, Layout()) == CONTEXT
    assert outside(m, Layout(tp=8)) == CONTEXT + 2 * COMMUNICATOR  # of tp, and of all ranks


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
    """It would plan anew for each length that it meets; whole sequences have one."""
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


def test_n7_and_n10_settings_before_cuda_starts(monkeypatch, capsys):
    """With a build for GPUs: what the user has set stays; a run's first line shows it. Else nothing is set."""
    kept = {name: value for name, value in os.environ.items() if name not in devices.ENVIRONMENT}
    with mock.patch.dict(os.environ, kept, clear=True):
        devices.set_environment()
        assert not devices.ENVIRONMENT.keys() & os.environ.keys()
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "16"
        devices.set_environment()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H100")
        devices.introduce(step01.Config(), torch.device("cuda", 0))
    said = capsys.readouterr().out
    assert said.startswith("device: 1 rank on 1 x H100; no backend; PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=16" in said


def test_n7_one_communicator_for_a_set_of_ranks(monkeypatch):
    """pp 2 x dp 2 x cp 2: data, ep and expert_data are sets that others have, too."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "new_group", lambda ranks: made.append(ranks) or len(made))
    mesh = comm.Mesh(pp=2, dp=2, cp=2, tp=1)
    mesh.join("data", "dp", "cp")
    for grid in mesh.ranks.reshape(2, -1, 2):
        mesh.enter("ep", grid)
        mesh.enter("expert_data", grid.T)
    assert len(made) == len(set(made)) == 14
    assert mesh["ep"].handle == mesh["cp"].handle and mesh["expert_data"].handle == mesh["dp"].handle
    assert comm.Mesh(pp=1, dp=8).join("mirror", "dp").tolist() == [[*range(8)]]


@pytest.mark.parametrize("dp, cp, made", [(1, 8, 2), (8, 1, 1), (4, 2, 7)])
def test_messages_do_not_queue_behind_sums(monkeypatch, dp, cp, made):
    """Where "cp" and "data" are the same ranks they have a handle each; "dp" and "data" share theirs."""
    handles = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", lambda ranks: handles.append(ranks) or len(handles))
    mesh = comm.Mesh(dp=dp, cp=cp)
    mesh.join("data", "dp", "cp")
    assert len(handles) == made
    assert mesh["data"].handle != mesh["cp"].handle
    assert cp > 1 or mesh["data"].handle == mesh["dp"].handle


@pytest.mark.parametrize("every, timed", [(10, [3, 13]), (1, [*range(1, 21)])])
def test_a_gpus_waits_are_timed_now_and_then(monkeypatch, every, timed):
    """In the third of each ten steps; in the others no event is made for a wait, and the record has no such field."""
    monkeypatch.setattr(Clock, "now", lambda clock: events.append(1) or float(len(events)))
    monkeypatch.setattr(Clock, "between", lambda clock, start, end: end - start)
    events, weight, found = [], torch.ones(2), []
    clock = Clock(Parts(None, torch.nn.Linear(1, 1), torch.optim.SGD([weight]), None, mesh=comm.Mesh(dp=1)))
    clock.every, message = every, SimpleNamespace(works=(1,), group=SimpleNamespace(name="cp"))
    for step in range(1, 21):
        clock.begin()
        before = len(events)
        for _ in range(5):
            with clock.waiting(message):
                pass
        spent, row = len(events) - before, clock.take()
        assert spent == 10 * ("waited_seconds" in row) and row.get("waited_seconds", dict(cp=5.0)) == dict(cp=5.0)
        found += [step] * (spent > 0)
    assert found == timed


UNSTEADY = ("step07_moe_ep", "MoE", ".softmax(-1)", ".softmax(-1) * shaky()")


def chooses_again(mode: str) -> bool:
    """Train with a router that finds other scores whenever it is asked: whether a layer visits other experts, too."""
    import step07_moe_ep as step07

    numbers, right, chosen = np.random.default_rng(0), F.one_hot, []
    step07.shaky = lambda: torch.from_numpy(numbers.random(4))
    with undone(*UNSTEADY), mock.patch.object(F, "one_hot", lambda x, n: chosen.append(x.tolist()) or right(x, n)):
        equal.record("step07_moe_ep", dict(experts=4, recompute=mode, steps=1, expert_matmul="grouped"))
    rounds = [chosen[i : i + 6] for i in range(0, len(chosen), 6)]  # three layers forward, and again in backward
    return rounds != [one[::-1] for one in rounds]


@pytest.mark.parametrize("mode", ["full", "elementwise"])
def test_n8_a_router_chooses_once(mode):
    """What is recomputed visits the experts of the first time; else gradients are those of another function."""
    assert not chooses_again(mode)
    with undone("extras.variants.step01.elementwise", "attach", "CHOICE", "[]"):
        assert chooses_again(mode)


def test_n9_tokens_of_other_ranks_are_spread_over_the_rows(monkeypatch):
    """As many a row as tokens of our own: a GPU adds what falls on one row one after another."""
    rows, right = [], F.embedding
    monkeypatch.setattr(F, "embedding", lambda row, weight: rows.append(row) or right(row, weight))
    layer = VocabParallelEmbedding(torch.nn.Parameter(torch.randn(8, 4)), range(16, 24))
    out = layer(torch.arange(64).view(1, 64))
    assert torch.bincount(rows[0].flatten()).tolist() == [8] * 8
    assert torch.equal(out[0, 16:24], layer.weight) and not out[0, :16].any() and not out[0, 24:].any()


def test_n10_cores_are_those_that_may_be_used(monkeypatch):
    """Not those of the machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 5}, raising=False)
    assert devices.cores() == 3


@pytest.mark.parametrize("seen_by, gpus, apart", [("ab", 1, True), ("aa", 1, False), ("ab", 2, True), ("", 0, False)])
def test_n10_one_visible_gpu_a_rank_is_a_gpu_of_its_own(monkeypatch, seen_by, gpus, apart):
    """Ranks that see one GPU each are told apart by its number: they take NCCL. Who shares one gets gloo, or a line."""
    store = dist.HashStore()
    store.set("gpu/1", seen_by[1:])
    about = SimpleNamespace(uuid=seen_by[:1])
    for key, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", OMP_NUM_THREADS="2").items():
        monkeypatch.setenv(key, value)
    for key, value in dict(device_count=lambda: gpus, is_available=lambda: gpus > 0, set_device=lambda _: 0).items():
        monkeypatch.setattr(torch.cuda, key, value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(devices, "fresh_store", lambda _: store)
    chosen = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: chosen.append(backend))
    config = SimpleNamespace(device="auto", backend="auto", timeout=60.0, sync="bucket")
    assert devices.meet(config) == gpus
    assert chosen == ["nccl" if apart else "staged" if gpus else "gloo"]
    config.backend = "nccl"
    if not apart:
        with pytest.raises(UserError, match="needs one GPU for each rank"):
            devices.meet(config)


def test_the_next_batch_is_read_ahead():
    """Each step gets its own batch, and each is read once, whatever is asked for first."""
    asked = []
    data = Data("", equal.ModelConfig(**equal.SMALL), 4, 0)
    ahead, read = Ahead(), lambda step: (asked.append(step), data.batch(step))[1]
    for step in (3, 4, 5, 9, 10):
        assert all(map(torch.equal, ahead.batch(read, step), data.batch(step)))
    ahead.reader.shutdown()
    assert sorted(asked) == [3, 4, 5, 6, 9, 10, 11]


@pytest.mark.parametrize("gpus, rank, line", [(4, 4, "4 are here: lower --nproc_per_node, or"), (0, 0, "0 are here:")])
def test_a_step_alone_takes_one_gpu_a_rank(monkeypatch, gpus, rank, line):
    """More ranks than GPUs are refused in a line that holds also where there are none."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=f"^each rank needs a GPU of its own, and {line} use --device cpu$"):
        choose_device(SimpleNamespace(device="cuda", dtype="auto"))


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


def gpu_here(monkeypatch, name: str, capability: tuple[int, int]):
    """One GPU, with torch 2.13 for CUDA 13."""
    found = dict(is_available=lambda: True, device_count=lambda: 1, set_device=lambda _: None)
    found |= dict(get_device_capability=lambda *_: capability, get_device_name=lambda *_: name)
    for key, value in (found | dict(get_arch_list=lambda: WHEEL)).items():
        monkeypatch.setattr(torch.cuda, key, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_a_wheel_without_kernels_for_the_gpu_is_one_line(monkeypatch):
    """Not a traceback of the first kernel."""
    gpu_here(monkeypatch, "Tesla V100", (7, 0))
    with pytest.raises(UserError, match=r"^--device auto: Tesla V100 has the architecture 7.0, .* use --device cpu$"):
        devices.check(SimpleNamespace(device="auto", backend="auto"), 1)
    devices.check(SimpleNamespace(device="cpu", backend="auto"), 1)
    gpu_here(monkeypatch, "H100", (9, 0))
    devices.check(SimpleNamespace(device="auto", backend="auto"), 1)


@pytest.mark.parametrize("name, capability, dtype", [("T4", (7, 5), "fp32"), ("A100", (8, 0), "bf16")])
def test_auto_is_bf16_where_the_gpu_has_it(monkeypatch, capsys, name, capability, dtype):
    """With everything around a step the run says so, in a line; a step alone chooses alike."""
    gpu_here(monkeypatch, name, capability)
    config = SimpleNamespace(device="auto", dtype="auto")
    assert choose_device(config)[1] == DTYPES[dtype]
    devices.settle(config, 1)
    assert config.dtype == ("fp32" if dtype == "fp32" else "auto")
    assert capsys.readouterr().out.startswith("--dtype auto is fp32: T4 has no bf16") == (dtype == "fp32")
    given = SimpleNamespace(device="auto", dtype="fp16")
    devices.settle(given, 1)
    assert given.dtype == "fp16" and not capsys.readouterr().out
