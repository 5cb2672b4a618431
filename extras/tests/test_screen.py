"""What a run shows: tables, records, traffic beside theory and dry run, who hangs, what is refused."""

import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import step06_pipeline
from common import UserError, comm, data
from common.comm import Mesh
from common.data import Data
from common.model import ModelConfig
from common.schedules import SCHEDULES
from extras.services import devices, failures, launch
from extras.services.clocks import Clock
from extras.services.dry_run import run_rank
from extras.services.run import ServedRun
from extras.services.seam import plugins
from extras.services.tables import human
from extras.tests.equal import BOUND, SMALL, config_of, difference, load_record, read_named
from extras.tests.rows import ROWS
from extras.tests.test_checkpoint import STEPS, train_on_rank
from extras.tests.test_dry_run import flat, misjudged
from extras.theory.gpus import COMMUNICATOR, CONTEXT
from extras.variants import Parts

ROOT = Path(__file__).parents[2]
WHOLE, PARTIAL = "Replicate", "Partial"
STATE = "parameters", "gradients", "masters", "moments"


def serve_on_rank(name: str, options: dict, out: str) -> SimpleNamespace:
    """Runs on every rank: train with everything around; what is printed, and the records."""
    from extras.services import predictions

    step, screen = importlib.import_module(name), io.StringIO()
    config = config_of(name, options | dict(out=out, steps=2))
    with contextlib.redirect_stdout(screen), ServedRun(config) as run:
        run.parts.around(data.READERS, "hub", read_named, by=__name__)
        step.train(config, run)
    return SimpleNamespace(
        text=screen.getvalue(),
        rows=run.history,
        theory={" ".join(key): n for key, n in predictions.sent_bytes(config, run.screen.parts).items()},
        held=(run.screen.predicted, run.screen.held.most),
    )


def count_on_rank(name: str, options: dict, world: int) -> list[dict]:
    """Runs in one process: the traffic of a dry run of every rank."""
    step = importlib.import_module(name)
    config = config_of(name, options | dict(dry_run=world))
    return [run_rank(step.train, config, rank).taken for rank in range(world)]


def cells(screen: str) -> dict[str, list[str]]:
    """The reduction table: by parameter its row, without the full shape; the header under "parameter"."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in screen.splitlines()]
    rows = [row for row in rows if len(row) > 2 and (row[1].startswith("[") or row[:2] == ["parameter", "full shape"])]
    return {row[0].removeprefix("model.").removesuffix(".weight"): row[2:] for row in rows}


RUNS = {  # ranks, step, flags, and by dimension what a few parameters are along it
    "2": (2, "step02_ddp", {}, ["dp"], dict(norm=[PARTIAL], lm_head=[PARTIAL])),
    "4": (
        4,
        "step04_tp_sp",
        dict(tp=2, sp=False, zero=3, tied=True),
        ["dp", "tp"],
        {"norm": [PARTIAL, WHOLE], "layers.*.self_attn.o_proj": [PARTIAL, "Shard(1)"]},
    ),
    "6": (
        4,
        "step06_pipeline",
        dict(pp=2, zero=3, schedule="interleaved", tied=True, n_layers=4),
        ["pp", "dp", "cp", "tp"],
        dict(norm=["on 1 of 2", PARTIAL, PARTIAL, WHOLE], embed_tokens=["on 2 of 2", PARTIAL, PARTIAL, WHOLE]),
    ),
    "two ways": (
        2,
        "step06_pipeline",
        dict(pp=2, schedule="dualpipe", micro_batch_size=1),
        ["pp", "dp", "cp", "tp", "mirror"],
        dict(norm=["on 2 of 2", PARTIAL, PARTIAL, WHOLE, PARTIAL]),
    ),
    "7": (
        4,
        "step07_moe_ep",
        dict(tp=2, ep=2, experts=4),
        ["pp", "dp", "cp", "tp", "ep", "expert_data"],
        {
            "layers.*.mlp.router": ["on 1 of 1", PARTIAL, PARTIAL, PARTIAL, WHOLE, WHOLE],
            "layers.*.mlp.experts.gate_proj": ["on 1 of 1", WHOLE, WHOLE, WHOLE, "Shard(0)", PARTIAL],
        },
    ),
}


SCALARS = 16  # bytes: the loss, and how many targets there are
OFF = {"6": 0.04, "7": 0.12}  # of activations: what two stages' tied ends keep is bounded; rows go where routers say


def require_memory(said: dict, measured: dict, off: float = 0.0):
    """To the byte, but for scalars, and activations where theory does not know all."""
    assert all(measured[kind] == said[kind] for kind in STATE)
    more = measured["activations"] - said["activations"]
    assert abs(more) <= off * said["activations"] if off else 0 <= more <= SCALARS, more


MEMORIES = [{}, dict(dtype="bf16", tied=True), dict(optimizer="sgd", dtype="fp32")]
MEMORIES = [(flags, recompute) for flags in MEMORIES for recompute in ("none", "full", "elementwise")]
MEMORIES += [(dict(optimizer=name), "none") for name in ("adafactor", "muon")]


@pytest.mark.parametrize("flags, recompute", MEMORIES, ids=str)
def test_memory_of_one_device(pools, tmp_path, flags, recompute):
    """What each layer saves for backward in a micro-batch, and all else that a device holds."""
    options = flags | dict(recompute=recompute, global_batch_size=4)
    require_memory(*pools(1).run(serve_on_rank, "step01_single_gpu", options, str(tmp_path / "run"))[0].held)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in ("2", "4"))) for n in RUNS])
def test_a_served_run(pools, tmp_path, name):
    """The cuts are shown as they are; bytes sent are those that theory says, and those that the dry run counts."""
    world, step, options, dims, rows = RUNS[name]
    options = options | dict(global_batch_size=4)
    out = tmp_path / "run"
    found = pools(world).run(serve_on_rank, step, options, str(out))
    text = found[0].text
    shown = cells(text)
    assert text.startswith(f"device: {world} ranks on cpu; backend gloo\n")
    assert shown["parameter"] == dims and {key: shown[key] for key in rows} == rows
    assert all(one.text == "" for one in found[1:])
    counted = pools(1).run(count_on_rank, step, options, world)[0]
    for one, dry in zip(found, counted, strict=True):
        last = one.rows[-1]
        sent = flat(last["traffic"])
        if "experts" not in options:  # the dry run and theory know the mean of what goes to experts
            assert dry["traffic"] == last["traffic"] and dry["calls"] == last["calls"]
            assert sent == pytest.approx(one.theory, abs=sum(flat(last["calls"]).values()))  # a call rounds to a byte
        assert sent.keys() == one.theory.keys() and sent
        said, measured = one.held
        require_memory(said, measured, OFF.get(name, 0.0))
        fields = {"mfu", "hfu", "peak_memory_bytes", "forward_seconds", "backward_seconds", "optimizer_seconds"}
        assert fields <= last.keys()
    held = [sum(numbers) for numbers in zip(*([n["activations"] for n in one.held] for one in found), strict=True)]
    assert abs(held[1] - held[0]) <= 0.04 * held[0]  # wherever rows go, all ranks together have them once
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines == found[0].rows
    there = {path.name for path in out.glob("*.png")}
    experts = "experts" in options
    more = ["expert_load.png"] * experts + ["timeline.png"] * (step == "step06_pipeline")
    assert there == {"loss.png", "traffic.png", *more}
    if experts:
        assert all(sum(shares) == pytest.approx(1.0) for shares in lines[-1]["expert_load"].values())


@pytest.mark.parametrize("zero, whole, sharded", [(0, 18, 0), (1, 6, 16), (2, 2, 16), (3, 0, 18)])
def test_bytes_a_parameter(pools, tmp_path, zero, whole, sharded):
    """Step 3's table, on two ranks in bf16: what a rank holds of each parameter between backward and update."""
    found = pools(2).run(serve_on_rank, "step03_zero", dict(zero=zero, dtype="bf16"), str(tmp_path / "run"))[0]
    p = int(re.search(r"([\d,]+) parameters", found.text)[1].replace(",", ""))
    assert sum(found.held[1][kind] for kind in STATE) == pytest.approx((whole + sharded / 2) * p, rel=1e-3)


def beside_on_rank(out: str) -> SimpleNamespace:
    """Runs on every rank: a run on what says that 3 GiB are in use beside its tensors."""
    with mock.patch("extras.services.screen.outside_memory", lambda _: 3 * 2**30):
        return serve_on_rank("step04_tp_sp", dict(tp=2, global_batch_size=2), out)


def test_a_gpus_memory_outside_of_tensors(pools, tmp_path):
    """It is in the record, in the table beside what theory says of two communicators, and in the peak that is shown."""
    found, *_ = pools(2).run(beside_on_rank, str(tmp_path / "run"))
    last = found.rows[-1]
    assert last["outside_memory_bytes"] == 3 * 2**30
    said, measured = (kinds["outside of tensors"] for kinds in found.held)
    assert (said, measured) == (CONTEXT + 2 * COMMUNICATOR, 3 * 2**30)
    assert re.search(r"^outside of tensors +2.43 GiB +3.00 GiB$", found.text, re.MULTILINE)
    assert f"peak memory {human(last['peak_memory_bytes'] + 3 * 2**30)}; see" in found.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", [row for row in ROWS if "patch" not in row.base], ids=str)
def test_every_row_is_served(pools, reference, tmp_path, row):
    """With everything around it, a run of any row sees the first loss of one process."""
    found = pools(row.ranks).run(serve_on_rank, row.step, row.base | row.layout, str(tmp_path / "run"))[0]
    first = load_record(reference(row)).losses[0]
    dtype = (row.base | row.layout).get("dtype", "fp64")
    assert difference(found.rows[0]["loss"], first) <= (row.bound or BOUND[dtype])


@pytest.mark.parametrize(
    "mode", ["alltoall", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("rows", "allgather"))]
)
def test_what_routers_decide(pools, tmp_path, mode):
    """Some layers have no experts; fresh routers are undecided; experts with half the room lose half the choices."""
    options = dict(experts=4, ep=2, ep_mode=mode, dense_layers=1, lr=1e-9, capacity_factor=0.5)
    last = pools(2).run(serve_on_rank, "step07_moe_ep", options, str(tmp_path / "run"))[0].rows[-1]
    assert "0" not in last["expert_load"] and last["expert_load"]
    assert 0.99 * math.log(4) < last["router_entropy"] <= math.log(4)
    assert 0.5 <= last["drop_rate"] < 0.6


plugins()
WAYS = ({}, dict(tp=2, recompute="full"), dict(tp=2, sp=False, pp_scatter=True))
ORDERS = list(product(SCHEDULES, range(4), WAYS))


@pytest.mark.parametrize(
    "schedule, zero, flags",
    [pytest.param(*row, marks=[pytest.mark.exhaustive] * (row != ("zbv", 3, WAYS[1]))) for row in ORDERS],
)
def test_traffic_of_pipelines(schedule, zero, flags):
    """In every order of work and stage of ZeRO theory says what the dry run counts, on the first and last rank."""
    options = dict(pp=2, schedule=schedule, zero=zero, tied=zero % 2 == 0, n_layers=4, global_batch_size=4)
    config = config_of("step06_pipeline", options | flags | dict(dry_run=4))
    for rank in (0, 3):
        assert not misjudged(run_rank(step06_pipeline.train, config, rank)), rank


KNOWN = ("1f1b", "afab", "interleaved", "zb-h1", "zb-h2")  # in others less is on its way where the most is there
WAITING = list(product((*KNOWN, "ahead", "zbv", "dualpipe", "v-half", "v-min"), ("none", "full", "elementwise")))


@pytest.mark.parametrize(
    "schedule, recompute",
    [pytest.param(*row, marks=[pytest.mark.exhaustive] * (row != ("zb-h1", "elementwise"))) for row in WAITING],
)
def test_activations_of_pipelines(schedule, recompute):
    """What waits for backward when a forward ends, and leaves: on the first and the last rank what is predicted."""
    options = dict(pp=4, schedule=schedule, recompute=recompute, n_layers=8, global_batch_size=8, dim=256, seq_len=64)
    config = config_of("step06_pipeline", options | dict(dry_run=4, dtype="fp32"))
    more = 0.01 if schedule in KNOWN else 0.15
    for rank in (0, 3):
        seen = run_rank(step06_pipeline.train, config, rank)
        assert 0.99 <= seen.predicted["activations"] / seen.held["activations"] <= 1 + more, rank


def sends(ranks: int, step: str, quick: bool = False, *, ways: tuple = ({},), **flags: Any) -> list:
    """Rows: messages of these flags, in each of several ways; the first in every run of the tests if it is quick."""
    slow = [[], *[[pytest.mark.exhaustive]] * len(ways)][not quick :]
    return [pytest.param(ranks, step, flags | way, marks=mark) for way, mark in zip(ways, slow, strict=False)]


CP, PP, EP, NO_SP = "step05_cp_ring", "step06_pipeline", "step07_moe_ep", dict(sp=False, pp_scatter=True)
RECOMPUTED = tuple(dict(recompute=name) for name in ("full", "none"))
VISITS = dict(experts=4, experts_per_token=4)  # each token goes everywhere, so nothing is rounded
SP, NARROW = (dict(sp=True), dict(sp=False)), dict(grad_dtype="same", dtype="bf16")
SENDS = [
    *sends(4, "step02_ddp", True, ways=tuple(dict(sync=s) for s in ("tree", "server", "ring", "overlap", "naive"))),
    *sends(4, "step02_ddp", sync="hierarchical", ranks_per_node=2),
    *sends(2, "step02_ddp", ways=tuple(dict(compress=kind) for kind in ("bf16", "int8", "topk"))),
    *sends(4, "step03_zero", True, zero=3, zero_keep=True),
    *sends(4, PP, pp=2, zero=3, zero_keep=True, zero_keep_mb=0.06, ways=({}, dict(schedule="zbv", n_layers=4))),
    *sends(4, "step03_zero", zero_replicas=2, ways=(dict(zero=1), dict(zero=1, **NARROW), dict(zero=2, **NARROW))),
    *sends(2, "step03_zero", compress="int8", ways=(dict(zero=2), dict(zero=3, **NARROW))),
    *sends(2, "step03_zero", optimizer="muon", ways=(dict(zero=0), dict(zero=2))),
    *sends(2, "step04_tp_sp", tp=2, tp_overlap=True, ways=tuple(a | b for a in SP for b in RECOMPUTED)),
    *sends(2, "step04_tp_sp", True, tp=2, attention="scores", recompute="selective"),
    *sends(4, "step04_tp_sp", tp=4, n_kv_heads=1, loss_chunk=5),
    *(row for mode in ("allgather", "balanced", "ring") for row in sends(4, CP, cp=4, cp_mode=mode, ways=RECOMPUTED)),
    *(row for mode in ("usp", "ulysses") for row in sends(4, CP, mode == "usp", cp=4, cp_mode=mode, ways=RECOMPUTED)),
    *sends(4, CP, cp=2, tp=2, cp_mode="usp", n_kv_heads=1),
    *sends(4, CP, True, cp=4, cp_mode="ring", window=7, seq_len=16, ways=RECOMPUTED),
    *sends(4, PP, pp=2, tp=2, compress_activations="int8", ways=(NO_SP, dict(tp_overlap=True))),
    *sends(2, EP, True, ep=2, tp=2, optimizer="muon", shared_experts=1, capacity_factor=0.5, ways=RECOMPUTED),
    *sends(2, EP, tp=2, sp=False, compress_activations="int8", moe_every=2, **VISITS, ways=RECOMPUTED),
    *sends(2, EP, ep=2, ep_mode="rows", **VISITS, ways=RECOMPUTED),
    *sends(2, EP, ep=2, ep_mode="allgather", **VISITS, ways=RECOMPUTED),
    *sends(4, EP, True, ep=4, tp=2, ep_mode="nodes", balance="bias", **VISITS, ways=(dict(sp=False), RECOMPUTED[0])),
]


@pytest.mark.parametrize("world, step, flags", SENDS)
def test_variants_say_what_they_send(world, step, flags):
    """What a file says of its messages is what the dry run counts, on the first and last rank, of two micro-batches.

    (A pipeline of two ranks has four.)
    """
    batch = 2 * world // (flags.get("cp", 1) * flags.get("tp", 1))
    config = config_of(step, dict(global_batch_size=batch, n_layers=2) | flags | dict(dry_run=world))
    for rank in (0, world - 1):
        assert not misjudged(run_rank(importlib.import_module(step).train, config, rank)), rank


def test_memory_over_time(pools, tmp_path):
    """--profile-memory draws what the first steps hold; one process has no traffic."""
    out = tmp_path / "run"
    found = pools(1).run(serve_on_rank, "step01_single_gpu", dict(profile_memory=2), str(out))[0]
    data = json.loads((out / "memory.json").read_text())
    assert (out / "memory.png").exists() and max(data["bytes"]["activations"]) >= found.held[1]["activations"]
    assert found.rows[-1]["traffic"] == {} and "traffic of a step" not in found.text


def test_a_hang_ends_the_job(tmp_path):
    """Every rank says where it stands: one sleeps, the other waits for it in a collective."""
    code = "import common.comm, os, time\nsum_up, calls = common.comm.all_reduce, []\n"
    code += "def late(*args):\n    calls.append(1) or (os.environ['RANK'] == '1' and calls[3:] and time.sleep(99))\n"
    code += "    return sum_up(*args)\ncommon.comm.all_reduce = late\n"
    (tmp_path / "hang.py").write_text(f"{code}from extras.__main__ import start\nimport sys\nstart(sys.argv[1:])\n")
    words = f"{tmp_path / 'hang.py'} step02_ddp.py --sync naive --model debug --device cpu --global-batch-size 4 "
    words += f"--micro-batch-size 2 --timeout 10 --peak-tflops 1 --eval-every 0 --out {tmp_path / 'out'}"
    env = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    job = launch.start(ROOT, 2, words.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env)
    began = time.monotonic()
    try:
        _, text = job.communicate(timeout=120)
    finally:
        launch.stop(job)
    assert job.returncode and time.monotonic() - began < 90
    for rank, place in enumerate((r"comm.py:\d+ wait", "step02_ddp.py")):
        assert re.search(rf"error: rank {rank}: step \d+ has not (?:(?!error:).)*{place}", text, re.S), text


def staged_on_rank() -> float:
    """Runs on every rank: all operations of comm.py through copies on the host; the largest difference to gloo's."""
    if "staged" not in dist.Backend.backend_list:
        dist.Backend.register_backend("staged", devices.Staged, devices=["cpu", "cuda"])
    rank, n = dist.get_rank(), dist.get_world_size()
    found = []
    for backend in ("gloo", "staged"):
        group = comm.Group("x", rank, n, dist.new_group(list(range(n)), backend=backend))
        x = torch.arange(4.0 * n) + rank
        outs = [x.clone(), torch.empty(4 * n * n), torch.empty(4), torch.empty(4 * n), torch.empty(4 * n)]
        comm.all_reduce(outs[0], group).wait()
        comm.all_gather(outs[1], x, group).wait()
        comm.reduce_scatter(outs[2], x, group).wait()
        comm.all_to_all(outs[3], x, group).wait()
        comm.exchange([(x, (rank + 1) % n)], [(outs[4], (rank - 1) % n)], group).wait()
        found.append(torch.cat(outs))
    return (found[0] - found[1]).abs().max().item()


def test_messages_through_the_host(pools):
    """Several ranks on one GPU: the group in Python does what gloo does."""
    assert pools(2).run(staged_on_rank) == [0.0, 0.0]


def waits_on_rank() -> list[str]:
    """Runs on two ranks: one only sends over b, the other only receives, both sum over a; the groups of the waits."""
    mesh, sent, got, total = Mesh(a=2), torch.ones(2), torch.zeros(2), torch.ones(2)
    mesh.enter("b", mesh.ranks[None])
    clock = Clock(Parts(None, torch.nn.Linear(1, 1), torch.optim.SGD([sent]), None, mesh=mesh))
    with mock.patch.object(comm, "waiting", clock.waiting):
        message = comm.exchange(*([(sent, 1)], []) if mesh.rank == 0 else ([], [(got, 0)]), mesh["b"])
        summing = comm.all_reduce(total, mesh["a"])
        message.wait(), summing.wait(), summing.wait(), comm.Pending().wait()
    return [dim for dim, *_ in clock.waits]


def test_a_wait_is_of_the_group_whose_message_it_is(pools):
    """Also where a rank only receives, and another group's operation has been started since; a second wait is none."""
    assert pools(2).run(waits_on_rank) == [["b", "a"], ["b", "a"]]


@pytest.mark.parametrize("driver, mend", [("535.104.05", "update the driver to 580"), ("580.65.06", "nvidia-smi")])
def test_a_gpu_that_this_torch_cannot_use_is_not_passed_over(monkeypatch, driver, mend):
    """A line with driver, wheel and mend instead of days on the CPU; --device cpu, or hiding the GPU, is on purpose."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "driver_version", lambda: driver)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = SimpleNamespace(device="auto", backend="auto")
    with pytest.raises(UserError, match=mend) as raised:
        devices.check(asked, 1)
    assert "\n" not in str(raised.value) and driver in str(raised.value)
    devices.check(SimpleNamespace(device="cpu", backend="auto"), 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices.check(asked, 1)


def test_one_line_for_a_mistake():
    """Flags that differ, and a full memory."""
    with pytest.raises(UserError, match="rank 1 was started with --lr 2, rank 0 with 1"):
        devices.require_same_flags([dict(lr=1), dict(lr=2)])
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    assert "asked for 2.50 GiB more" in failures.describe(full) and "\n" not in failures.describe(full)
    with pytest.raises(UserError, match="--dry-run"):
        failures.report(full)


def slow_on_rank(*args) -> list[dict]:
    """Runs on every rank: rank 1 takes its time for each batch."""
    right = Data.batch

    def slow(data: Data, step: int):
        time.sleep(0.3 * int(os.environ["RANK"]))
        return right(data, step)

    with mock.patch.object(Data, "batch", slow):
        return train_on_rank(*args)


def test_each_rank_is_in_the_metrics(pools, tmp_path):
    """The mean of the ranks' losses, each of as many tokens, is the loss; replicas have one gradient norm.

    Others wait for a slow rank. The part of the pairs of tokens that attention looks at is that of a mask.
    """
    options = dict(log_ranks=True, save_every=0, eval_every=2, out=str(tmp_path / "run"), zero=0)
    rows = pools(2).run(slow_on_rank, "step03_zero", options | dict(documents="mask", end_token=32))[0]
    waited = [sum(row["ranks"][rank]["waited_seconds"] for row in rows) for rank in range(2)]
    assert waited[0] > 0.25 * len(rows) and waited[0] > waited[1]
    data = Data("", ModelConfig(**SMALL), STEPS["global_batch_size"], 0)
    for row in rows:
        assert row["waited_seconds"].keys() == {"dp"}
        assert row["waited_seconds"]["dp"] == row["ranks"][0]["waited_seconds"]
        ends = (data.batch(row["step"] - 1)[0][:3] == 32).long()
        numbers = ends.cumsum(1) - ends
        seen = (numbers[:, :, None] == numbers[:, None]).tril().sum().item()
        assert row["attention_pairs"] == pytest.approx(seen / (3 * 136))
        ranks = row["ranks"]
        assert difference(sum(rank["loss"] for rank in ranks) / 2, row["loss"]) < 1e-10
        assert ranks[0]["grad_norm"] == ranks[1]["grad_norm"]
        assert difference(ranks[0]["grad_norm"], row["grad_norm"]) < 1e-10
        assert all(rank["seconds"] > 0 and rank["peak_memory_bytes"] > 2**20 for rank in ranks)
