"""Tests what a run prints and records: tables, metrics, pictures, and what it says about a hang or a mistake."""

import contextlib
import importlib
import io
import json
import re
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from common import UserError, comm, data
from extras.services import devices, failures
from extras.services.clocks import Clock
from extras.services.run import ServedRun
from extras.services.screen import ExpertLoad
from extras.services.tables import human
from extras.tests.equal import config_of, read_named
from extras.tests.pool import ROOT, start
from extras.plan.gpus import GPUS
from extras.variants import Parts


def serve_on_rank(name: str, options: dict, out: str) -> SimpleNamespace:
    """Runs on every rank: train with all services; returns the printed text, the metrics and the bytes held."""
    step, screen = importlib.import_module(name), io.StringIO()
    config = config_of(name, dict(steps=2) | options | dict(out=out))
    with contextlib.redirect_stdout(screen), ServedRun(config) as run:
        run.parts.around(data.READERS, "hub", read_named, by=__name__)
        step.train(config, run)
    return SimpleNamespace(text=screen.getvalue(), rows=run.history, held=run.screen.held.most)


RUNS = {  # name -> ranks, step, flags
    "6": (4, "step06_pipeline", dict(pp=2, zero=3, schedule="interleaved", tied=True, n_layers=4)),
    "7": (4, "step07_moe_ep", dict(tp=2, ep=2, experts=4)),
}
LINES = {  # name -> parts of what is printed, with one space between the cells of a table
    "6": ["norm.weight [32] on 1 of 2 Partial Partial Replicate\n", "stage 0: embedding, layer 0; stage 2: layer 2\n"],
    "7": [
        "parameter full shape pp dp cp tp ep expert_data\n",
        "self_attn.o_proj.weight [32, 32] on 1 of 1 Partial Partial Shard(1) Replicate Replicate\n",
        "mlp.router.weight [4, 32] on 1 of 1 Partial Partial Partial Replicate Replicate\n",
        "experts.gate_proj.weight [4, 48, 32] on 1 of 1 Replicate Replicate Replicate Shard(0) Partial\n",
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_served_run(pools, tmp_path, name):
    """Rank 0 prints how parameters are placed, writes the metrics, and draws pictures. Other ranks print nothing."""
    (world, step, options), out = RUNS[name], tmp_path / "run"
    found = pools(world).run(serve_on_rank, step, options | dict(global_batch_size=4), str(out))
    text = found[0].text
    assert text.startswith(f"device: {world} ranks on cpu; backend gloo\n")
    assert all(line in re.sub(" +", " ", text) for line in LINES[name])
    for one in found:
        last = one.rows[-1]
        assert {"mfu", "hfu", "peak_memory_bytes"} <= last.keys()
        if name == "7":
            assert 1 <= last["expert_load_p50"] <= last["expert_load_p90"] <= 4 and last["unused_experts"] == 0
        assert last["traffic"].keys() == last["calls"].keys() == last["sent"].keys() != set()
    assert all(one.text == "" for one in found[1:])
    assert [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] == found[0].rows
    pictures = {"loss.png", {"6": "timeline.png", "7": "experts.png"}[name]}
    assert {path.name for path in out.glob("*.png")} == pictures


def test_the_load_of_experts():
    """The busiest expert gets all tokens in layer 0, half in layer 1, a quarter in layer 2. Layer 3 has no experts."""
    counts = torch.tensor([[4, 0, 0, 0], [2, 2, 0, 0], [1, 1, 1, 1], [0] * 4], dtype=torch.float64)
    load = SimpleNamespace(mesh={dim: comm.Group(dim, 0, 1, None) for dim in ("data", "tp", "pp")}, counts=counts)
    right = dict(expert_load_p50=2, expert_load_p90=2 + 0.8 * 2, unused_experts=5)
    assert ExpertLoad.take(load) == pytest.approx(right) and not counts.any()


def test_the_peak_of_a_gpu_is_known_or_timed(monkeypatch):
    """The table has the peak of the fastest H100. An H100 PCIe is slower, so its peak is measured with a matmul."""
    monkeypatch.setattr(devices, "repeat", lambda *_, **__: [1.0])
    monkeypatch.setattr(torch, "randn", lambda *_, **__: None)
    for name, peak in {"NVIDIA H100 80GB HBM3": GPUS["h100-80"].flops, "NVIDIA H100 PCIe": 2 * 8192**3}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert devices.peak_flops(torch.device("cuda"), torch.bfloat16, 0.0) == peak


def test_a_clock_reads_a_gpus_events(monkeypatch):
    """On a GPU, the times of an action are those of CUDA events. Here the stream reaches event n after n seconds."""
    events = []
    later = lambda end: 1e3 * events.index(end)  # noqa: E731  # milliseconds from the first event
    event = lambda enable_timing: events.append(mock.Mock(elapsed_time=later)) or events[-1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Event", event)
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(is_cuda=True)]))
    pipeline = SimpleNamespace(forward=lambda *_: None, backward=lambda *_: None)
    clock = Clock(Parts(None, model, SimpleNamespace(step=None), pipeline=pipeline))
    clock.begin(), pipeline.forward(3, 1, None), pipeline.backward(3, 1, None)
    assert clock.timeline() == [["F", 3, 1, 1, 2], ["B", 3, 1, 3, 4]]
    assert all(one.record.called and one.synchronize.called for one in events[1:])


def test_memory(pools, tmp_path):
    """--profile-memory draws the memory that the first steps hold. A run of one process prints no traffic."""
    options, out = dict(profile_memory=2, global_batch_size=6), tmp_path / "run"
    found = pools(1).run(serve_on_rank, "step01_single_gpu", options, str(out))[0]
    last, held = found.rows[-1], json.loads((out / "memory.json").read_text())["bytes"]
    assert (out / "memory.png").exists() and max(held["activations"]) >= found.held["activations"] > 0
    assert last["traffic"] == {} and "traffic of a step" not in found.text
    assert f"peak memory {human(last['peak_memory_bytes'])}; see" in found.text


def test_a_hang_ends_the_job(tmp_path):
    """If a step takes too long, each rank prints where it is. Here one rank sleeps, and the other waits for it."""
    code = "import common.comm, os, time\nsum_up, calls = common.comm.all_reduce, []\n"
    code += "def late(*args):\n    calls.append(1) or (os.environ['RANK'] == '1' and calls[3:] and time.sleep(99))\n"
    code += "    return sum_up(*args)\ncommon.comm.all_reduce = late\n"
    (tmp_path / "hang.py").write_text(f"{code}from extras.__main__ import start\nimport sys\nstart(sys.argv[1:])\n")
    words = f"{tmp_path / 'hang.py'} step02_ddp.py --sync naive --model debug --device cpu --global-batch-size 4 "
    words += f"--micro-batch-size 2 --timeout 10 --peak-tflops 1 --eval-every 0 --out {tmp_path / 'out'}"
    options = dict(stderr=subprocess.PIPE, text=True, env=dict(PYTHONPATH=str(ROOT)))
    job = start(2, words.split(), stdout=subprocess.DEVNULL, **options)
    try:
        _, text = job.communicate(timeout=90)
    finally:
        job.terminate()
    assert job.returncode
    for rank, place in enumerate((r"comm.py\", line \d+, in wait", "step02_ddp.py")):
        assert re.search(rf"error: rank {rank}: step \d+ has not (?:(?!error:).)*{place}", text, re.S), text


def test_one_line_for_a_mistake():
    """An error is one line: it names a flag that differs between ranks, or the size of an allocation that failed."""
    with pytest.raises(UserError, match="rank 1 was started with --lr 2, rank 0 with 1"):
        devices.require_same_flags([dict(lr=1), dict(lr=2)])
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    assert "asked for 2.50 GiB more" in failures.describe(full) and "\n" not in failures.describe(full)
    with pytest.raises(UserError, match="--dry-run"):
        failures.report(full)
