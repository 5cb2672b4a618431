"""Tests runs from the command line: launch lines, mistakes at the start, a killed rank, two ranks with one GPU."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from common import UserError
from extras.services import devices
from extras.services.plots import read_metrics as metrics
from extras.tests.pool import ROOT, run, start
from extras.tests.test_checkpoint import require_same, stored

STEPS = sorted(path.stem for path in ROOT.glob("step0*.py"))
TINY = "--model debug --dtype fp64 --steps 3 --warmup-steps 1 --global-batch-size 12 --micro-batch-size 2"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, pytestconfig) -> str:
    """Flags of a short run on a small text, which is read faster than the default text."""
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("".join(path.read_text() for path in ROOT.glob("step0*.py")))
    return f"{TINY} --device {pytestconfig.getoption('--device')} --dataset {text}"


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.exhaustive] * (step != STEPS[3])) for step in STEPS]
)
def test_a_step_trains_by_its_launch_line(tiny, tmp_path, step):
    """The launch line in a step's docstring trains to the end if flags of a short run are added."""
    doc = (ROOT / f"{step}.py").read_text()
    ranks, flags = re.search(rf"^Run it: +(?:torchrun --nproc_per_node=(\d)|python) {step}.py(.*)$", doc, re.M).groups()
    flags += " --model tiny" * ("--pp 4" in flags)  # "debug" has only two layers, for four stages
    words = f"{step}.py {tiny} {flags} --out {tmp_path / 'out'}".split()
    device, backend = ("cuda", ", nccl") if "--device cuda" in tiny else ("cpu", ", gloo")
    if device == "cuda" and torch.cuda.device_count() < int(ranks or 1):
        pytest.skip(f"GPUs needed: {ranks or 1}")
    status, text = run(int(ranks or 0), words, tmp_path / "log")
    assert status == 0 and "3/3" in text and "tok/s" in text, text
    where = rf"^device: \d x {device}{backend * bool(ranks)}; torch.float64\nmesh: .*\nparameters: [\d,]+ on rank 0$"
    assert re.search(where, text, re.M)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"metrics.jsonl", "config.json", "loss.png"}


NO_NET = "error: the ranks cannot meet: ", dict(GLOO_SOCKET_IFNAME="eth9")
LEFT = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
MISTAKES = [  # "-m extras" if the run has services; step, ranks, flags, a part of the error, environment
    ("", "step02_ddp", 2, "", *NO_NET),
    ("", "step04_tp_sp", 0, "--tp 2", "error: --tp 2 ", {}),
    ("-m extras", "step02_ddp", 2, "", *NO_NET),
    ("-m extras", "step01_single_gpu", 2, "", "--nproc_per_node 2: step 1 knows one device", {}),
    ("-m extras", "step02_ddp", 0, "", "has set LOCAL_RANK, WORLD_SIZE: ", dict(WORLD_SIZE="2", LOCAL_RANK="1")),
    ("-m extras", "step02_ddp", 0, "--timeout 1", "waited 2 s for other ranks at 127.0", LEFT),
    ("-m extras", "step07_moe_ep", 4, "--pp 2 --tp 4", "error: --pp 2 x --cp 1 x --tp 4 must divide ", {}),
]


@pytest.mark.parametrize("extras, step, ranks, flags, named, env", MISTAKES)
def test_what_is_wrong_at_the_start_is_one_line(tiny, tmp_path, extras, step, ranks, flags, named, env):
    """A run that cannot start prints one line that says what is wrong. Its exit status is not 0."""
    words = f"{extras} {step}.py {tiny} --out {tmp_path} {flags}".split()
    status, text = run(ranks, words, tmp_path / "log", **env)
    assert status != 0 and named in text and len(re.findall("^error: ", text, re.M)) == 1, text
    if not ranks:  # torchrun itself prints more lines
        assert status == 2 and "Traceback" not in text, text


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tiny, tmp_path):
    """After a rank is killed, torchrun restarts the job, which then ends with the same bits as an unbroken run."""
    words = f"--max-restarts=1 -m extras step03_zero.py --zero 3 {tiny} --steps 20 --save-every 4 --eval-every 0"
    words += " --peak-tflops 1 --resume auto --out"
    whole, killed = (f"{words} {tmp_path / name}".split() for name in ("whole", "killed"))
    assert run(2, whole, tmp_path / "log")[0] == 0
    with (tmp_path / "log").open("w") as log:
        job = start(2, killed, stdout=log, stderr=log)
    while job.poll() is None and len(metrics(tmp_path / "killed")) < 6:
        time.sleep(0.02)
    os.kill(int(Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()[-1]), signal.SIGKILL)
    status, text = job.wait(), (tmp_path / "log").read_text()
    assert status == 0 and "resuming from" in text, text
    rows, expected = metrics(tmp_path / "killed"), metrics(tmp_path / "whole")
    assert [(row["step"], row["loss"]) for row in rows] == [(n + 1, row["loss"]) for n, row in enumerate(expected)]
    require_same(stored(tmp_path / "killed", 20), stored(tmp_path / "whole", 20))


def test_two_ranks_with_the_same_gpu_are_refused(monkeypatch):
    """Ranks compare the UUIDs of their GPUs, because device indices may be equal if each rank sees only its own GPU."""
    store = torch.distributed.HashStore()
    store.set("the GPU of rank 1", "a")
    monkeypatch.setattr(devices, "fresh_store", lambda _: store)
    for key, value in dict(RANK="0", WORLD_SIZE="2").items():
        monkeypatch.setenv(key, value)
    assert devices.find_ranks("b", 1.0) is store
    with pytest.raises(UserError, match="two of the 2 ranks have the same GPU"):
        devices.find_ranks("a", 1.0)
