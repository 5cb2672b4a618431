"""What a run prints and records: tables, memory and traffic as the dry run counts them, hangs, and refusals."""

import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common import UserError, comm, data
from common.data import Data
from extras.services import devices, failures
from extras.services.run import ServedRun
from extras.services.screen import ExpertLoad
from extras.services.tables import human
from extras.tests.equal import config_of, read_named
from extras.tests.pool import ROOT, start
from extras.tests.test_checkpoint import train_on_rank
from extras.tests.test_dry_run import dry, flat

WHOLE, PARTIAL = "Replicate", "Partial"


def serve_on_rank(name: str, options: dict, out: str) -> SimpleNamespace:
    """Runs on every rank: train with all services; returns the text, the records and the memory."""
    step, screen = importlib.import_module(name), io.StringIO()
    config = config_of(name, dict(steps=2) | options | dict(out=out))
    with contextlib.redirect_stdout(screen), ServedRun(config) as run:
        run.parts.around(data.READERS, "hub", read_named, by=__name__)
        step.train(config, run)
    return SimpleNamespace(text=screen.getvalue(), rows=run.history, held=run.screen.held.most)


def count_on_rank(name: str, options: dict, world: int) -> list[tuple[dict, dict]]:
    """Runs in one process: dry-run every rank; returns their traffic and memory."""
    return [(seen.taken, seen.held) for seen in (dry(name, options, world, rank) for rank in range(world))]


def cells(screen: str) -> dict[str, list[str]]:
    """Parse the reduction table: parameter -> its row without the full shape. The header's key is "parameter"."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in screen.splitlines()]
    rows = [row for row in rows if len(row) > 2 and (row[1].startswith("[") or row[:2] == ["parameter", "full shape"])]
    return {row[0].removeprefix("model.").removesuffix(".weight"): row[2:] for row in rows}


DIMS = ["pp", "dp", "cp", "tp"]
RUNS = {  # ranks, step, flags; CUTS has the expected placements of a few parameters
    "6": (4, "step06_pipeline", dict(pp=2, zero=3, schedule="interleaved", tied=True, n_layers=4)),
    "two ways": (2, "step06_pipeline", dict(pp=2, schedule="dualpipe", micro_batch_size=1)),
    "7": (4, "step07_moe_ep", dict(tp=2, ep=2, experts=4)),
}
CUTS = {
    "6": dict(parameter=DIMS, norm=["on 1 of 2", PARTIAL, PARTIAL, WHOLE]),
    "two ways": dict(parameter=[*DIMS, "mirror"], norm=["on 2 of 2", PARTIAL, PARTIAL, WHOLE, PARTIAL]),
    "7": {
        "parameter": [*DIMS, "ep", "expert_data"],
        "layers.*.self_attn.o_proj": ["on 1 of 1", PARTIAL, PARTIAL, "Shard(1)", WHOLE, WHOLE],
        "layers.*.mlp.router": ["on 1 of 1", PARTIAL, PARTIAL, PARTIAL, WHOLE, WHOLE],
        "layers.*.mlp.experts.gate_proj": ["on 1 of 1", WHOLE, WHOLE, WHOLE, "Shard(0)", PARTIAL],
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_a_served_run(pools, tmp_path, name):
    """The table shows the placements as they are. Bytes sent and held are those that the dry run counts."""
    (world, step, options), rows = RUNS[name], CUTS[name]
    options, experts, out = options | dict(global_batch_size=4), "experts" in options, tmp_path / "run"
    found = pools(world).run(serve_on_rank, step, options, str(out))
    text, shown = found[0].text, cells(found[0].text)
    assert text.startswith(f"device: {world} ranks on cpu; backend gloo\n")
    assert {key: shown[key] for key in rows} == rows and all(one.text == "" for one in found[1:])
    if name == "6":
        assert "stage 0: embedding, layer 0;  stage 2: layer 2\n" in text
    counted = pools(1).run(count_on_rank, step, options, world)[0]
    for one, (sent, held) in zip(found, counted, strict=True):
        last = one.rows[-1]
        if not experts:  # the dry run knows only the mean of what goes to experts
            assert sent["traffic"] == last["traffic"] != {} and sent["calls"] == last["calls"]
        assert flat(sent["traffic"]).keys() == flat(last["traffic"]).keys()
        state = one.held.keys() - {"activations"}
        assert {kind: one.held[kind] for kind in state} == {kind: held[kind] for kind in state}
        assert one.held["activations"] == pytest.approx(held["activations"], rel=0.12 if experts else 0.02)
        assert {"mfu", "hfu", "peak_memory_bytes", "forward_seconds", "optimizer_seconds"} <= last.keys()
        assert last["waited_seconds"].keys() <= {*last["traffic"], *one.rows[0]["traffic"]}
    ours, theirs = (one.held["activations"] for one in found), (held["activations"] for _, held in counted)
    assert sum(ours) == pytest.approx(sum(theirs), rel=0.04)  # all ranks together hold each row once
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == found[0].rows
    pictures = {"loss.png"} | ({"timeline.png"} if step == "step06_pipeline" else set())
    assert {path.name for path in out.glob("*.png")} == pictures


@pytest.mark.parametrize(
    "mode", ["alltoall", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("rows", "allgather"))]
)
def test_what_routers_decide(pools, tmp_path, mode):
    """Dense layers have no load. A fresh router is undecided. Experts of half the capacity drop half the choices."""
    options = dict(experts=4, ep=2, ep_mode=mode, dense_layers=1, lr=1e-9, capacity_factor=0.5)
    last = pools(2).run(serve_on_rank, "step07_moe_ep", options, str(tmp_path / "run"))[0].rows[-1]
    assert 1 <= last["expert_load_p50"] <= last["expert_load_p90"] <= 4 and last["unused_experts"] == 0
    assert 0.99 * math.log(4) < last["router_entropy"] <= math.log(4)
    assert 0.5 <= last["drop_rate"] < 0.6


def test_the_load_of_experts():
    """One expert of four has all tokens, two have half each, all have the same; and a layer without experts."""
    sums = [[4, 0, 0, 0, 4, 4, 2], [2, 2, 0, 0, 2, 4, 2], [1, 1, 1, 1, 3, 4, 2], [0] * 7]
    mesh = {dim: comm.Group(dim, 0, 1, None) for dim in ("data", "tp", "pp")}
    load = SimpleNamespace(mesh=mesh, sums=torch.tensor(sums, dtype=torch.float64))
    right = dict(expert_load_p50=2, expert_load_p90=2 + 0.8 * 2, unused_experts=5, drop_rate=0.25, router_entropy=0.5)
    assert ExpertLoad.take(load) == pytest.approx(right) and not load.sums.any()


def test_memory(pools, tmp_path):
    """--profile-memory draws what the first steps hold. One process has no traffic."""
    out = tmp_path / "run"
    found = pools(1).run(serve_on_rank, "step01_single_gpu", dict(profile_memory=2), str(out))[0]
    last, held = found.rows[-1], json.loads((out / "memory.json").read_text())["bytes"]
    assert (out / "memory.png").exists() and max(held["activations"]) >= found.held["activations"] > 0
    assert last["traffic"] == {} and "traffic of a step" not in found.text
    assert f"peak memory {human(last['peak_memory_bytes'])}; see" in found.text


def test_a_hang_ends_the_job(tmp_path):
    """Every rank prints where it is: one sleeps, the other waits for it in a collective."""
    code = "import common.comm, os, time\nsum_up, calls = common.comm.all_reduce, []\n"
    code += "def late(*args):\n    calls.append(1) or (os.environ['RANK'] == '1' and calls[3:] and time.sleep(99))\n"
    code += "    return sum_up(*args)\ncommon.comm.all_reduce = late\n"
    (tmp_path / "hang.py").write_text(f"{code}from extras.__main__ import start\nimport sys\nstart(sys.argv[1:])\n")
    words = f"{tmp_path / 'hang.py'} step02_ddp.py --sync naive --model debug --device cpu --global-batch-size 4 "
    words += f"--micro-batch-size 2 --timeout 10 --peak-tflops 1 --eval-every 0 --out {tmp_path / 'out'}"
    options = dict(stderr=subprocess.PIPE, text=True, env=dict(PYTHONPATH=str(ROOT)))
    job = start(2, words.split(), stdout=subprocess.DEVNULL, **options)
    began = time.monotonic()
    try:
        _, text = job.communicate(timeout=120)
    finally:
        job.terminate()
    assert job.returncode and time.monotonic() - began < 90
    for rank, place in enumerate((r"comm.py\", line \d+, in wait", "step02_ddp.py")):
        assert re.search(rf"error: rank {rank}: step \d+ has not (?:(?!error:).)*{place}", text, re.S), text


def staged_on_rank() -> float:
    """Runs on every rank: all operations of comm.py by the backend `staged`; the largest difference to gloo's."""
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
    dist.distributed_c10d._world.pg_map.pop(group.handle)  # it has no name, by which the pool would destroy it
    return (found[0] - found[1]).abs().max().item()


def test_messages_through_the_host(pools):
    """The backend for several ranks on one GPU copies through the host. It computes the same as gloo."""
    assert pools(2).run(staged_on_rank) == [0.0, 0.0]


def test_one_line_for_a_mistake(monkeypatch):
    """It names flags that differ, a full memory, or a GPU that this torch cannot use and the user has not hidden."""
    with pytest.raises(UserError, match="rank 1 was started with --lr 2, rank 0 with 1"):
        devices.require_same_flags([dict(lr=1), dict(lr=2)])
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    assert "asked for 2.50 GiB more" in failures.describe(full) and "\n" not in failures.describe(full)
    with pytest.raises(UserError, match="--dry-run"):
        failures.report(full)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0")])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = SimpleNamespace(device="auto", backend="auto")
    with pytest.raises(UserError, match=r"^/dev/nvidia0 is a GPU, but torch .* built for CUDA 13.0.* --device cpu"):
        devices.check(asked, 1)
    devices.check(SimpleNamespace(device="cpu", backend="auto"), 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices.check(asked, 1)


def slow_on_rank(*args) -> list[dict]:
    """Runs on every rank: train, where rank 1 is slow to load each batch."""
    right = Data.batch

    def slow(data: Data, step: int):
        time.sleep(0.3 * int(os.environ["RANK"]))
        return right(data, step)

    with mock.patch.object(Data, "batch", slow):
        return train_on_rank(*args)


def test_others_wait_for_a_slow_rank(pools, tmp_path):
    """The metrics have the seconds waited."""
    options = dict(save_every=0, eval_every=2, out=str(tmp_path / "run"), zero=0)
    rows = pools(2).run(slow_on_rank, "step03_zero", options)[0]
    assert sum(row["waited_seconds"]["dp"] for row in rows) > 0.15 * len(rows)  # half of what rank 1 sleeps
