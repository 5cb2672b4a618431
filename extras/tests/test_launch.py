"""Runs from the command line: launch lines, mistakes at the start, a killed rank."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = sorted(path.stem for path in ROOT.glob("step0*.py"))
TINY = "--model debug --dtype fp64 --steps 3 --warmup-steps 1"
TINY += " --global-batch-size 12 --micro-batch-size 2"


def start(ranks: int, words: list[str], log: Path, **env: str) -> subprocess.Popen:
    """Start `python words` or, with ranks > 0, `torchrun words`, in the repository. Output goes to
    `log`.
    """
    launcher = []
    if ranks:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    line = [sys.executable, *launcher, *words]
    with log.open("w") as file:
        return subprocess.Popen(line, cwd=ROOT, env=os.environ | env, stdout=file, stderr=file)


def run(ranks: int, words: list[str], log: Path, **env: str) -> tuple[int, str]:
    """Start a command and wait for it: (exit status, output)."""
    status = start(ranks, words, log, **env).wait(500)
    return status, log.read_text()


def rows(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; none if there is no such file yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, pytestconfig) -> str:
    """Flags of a short run on a small text, which is read faster than the default text."""
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("".join(path.read_text() for path in ROOT.glob("step0*.py")))
    return f"{TINY} --device {pytestconfig.getoption('--device')} --dataset {text}"


SLOW = [pytest.mark.exhaustive]
LINES = [pytest.param(step, marks=[] if step == STEPS[3] else SLOW) for step in STEPS]


@pytest.mark.parametrize("step", LINES)
def test_a_step_trains_by_its_launch_line(tiny, tmp_path, step):
    """The launch line in a step's docstring trains to the end, with flags of a short run added."""
    doc = (ROOT / f"{step}.py").read_text()
    line = rf"^Run it: +(?:torchrun --nproc_per_node=(\d)|python) {step}.py(.*)$"
    ranks, flags = re.search(line, doc, re.MULTILINE).groups()
    if "--pp 4" in flags:
        tiny = tiny.replace("debug", "tiny")  # "debug" has only two layers, for four stages
    words = f"{step}.py {flags} {tiny} --out {tmp_path / 'out'}".split()
    status, text = run(int(ranks or 0), words, tmp_path / "log")
    assert status == 0 and "3/3" in text, text
    assert len(rows(tmp_path / "out")) == 3


def test_a_technique_trains_by_its_launch_line(tiny, tmp_path):
    """`torchrun -m extras STEP FLAGS` runs the step with a technique's entry."""
    words = f"-m extras step02_ddp.py --sync tree {tiny} --out {tmp_path / 'out'}".split()
    status, text = run(2, words, tmp_path / "log")
    assert status == 0 and len(rows(tmp_path / "out")) == 3, text


MISTAKES = [  # command, ranks, a part of the error
    ("step07_moe_ep.py --pp 2 --tp 4", 2, "error: --pp 2 x --cp 1 x --tp 4 must divide "),
    ("-m extras", 0, "error: give a step's file first"),
]


@pytest.mark.parametrize("command, ranks, named", MISTAKES)
def test_what_is_wrong_at_the_start_is_one_line(tiny, tmp_path, command, ranks, named):
    """A run that cannot start prints one line that says what is wrong. Its exit status is not 0."""
    words = f"{command} {tiny} --out {tmp_path}".split()
    status, text = run(ranks, words, tmp_path / "log")
    assert status != 0 and named in text, text
    assert len(re.findall("^error: ", text, re.MULTILINE)) == 1, text


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tiny, tmp_path):
    """torchrun restarts the job, which ends with the losses of an unbroken run, bit for bit."""
    base = (
        f"--max-restarts=1 step03_zero.py --zero 3 {tiny} --steps 20 --save-every 4 --resume auto"
    )
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    own_store = dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert run(2, f"{base} --out {whole}".split(), tmp_path / "log", **own_store)[0] == 0
    job = start(2, f"{base} --out {killed}".split(), tmp_path / "log", **own_store)
    while job.poll() is None and len(rows(killed)) < 6:
        time.sleep(0.02)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    assert job.wait(300) == 0, (tmp_path / "log").read_text()
    found = [(row["step"], row["loss"]) for row in rows(killed)]
    assert found == [(row["step"], row["loss"]) for row in rows(whole)]
