"""Tests of the benchmarks: rows are legal command lines, and ratios divide times of one round."""

import importlib
import sys
import time
from types import SimpleNamespace

import pytest
from torch._dynamo.utils import counters

from common.flags import parse
from extras.__main__ import techniques, with_flags
from extras.bench import gpus
from extras.bench.contests import CONTESTS, Turn, contest, report, take_turn
from tests.pool import Pool

LINES = []
for each in CONTESTS.values():
    LINES += [(each.step, f"{each.shared} {flags}") for flags, _ in each.rows.values()]
for n in (1, 2, 4, 8):
    LINES += [(row.step, " ".join(gpus.flags_of(row, n, gpus.Config()))) for row in gpus.layouts(n)]


@pytest.mark.parametrize("step, flags", sorted(set(LINES)))
def test_a_row_is_a_legal_command_line(step, flags):
    """The step takes the flags of a row: none is refused."""
    parse(with_flags(importlib.import_module(step).Config, techniques()), flags.split())


def test_a_ratio_divides_times_of_the_same_round():
    """If both contestants are ten times slower in one round, the ratio stays 2."""
    turns = {}
    for name, seconds in dict(ours=(9, 1, 10, 2), theirs=(9, 2, 20, 4)).items():
        turns[name] = [[Turn(time, 0, []), Turn(0.5, 0, [])] for time in seconds]
    assert report(turns, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 1


def test_a_contest_beside_pytorch():
    """On two ranks, DistributedDataParallel has the losses of step 2, and both hold memory."""
    flags = "--model debug --micro-batch-size 4 --global-batch-size 16 --device cpu"
    entries = {peer: ("step02_ddp", flags, peer) for peer in ("", "ddp")}
    pool = Pool(2)
    try:
        turns = contest(pool, entries, 1, 1e-6)
    finally:
        pool.stop()
    for watched, timed in turns.values():
        assert watched[0].peak > 0 and min(turn.seconds for turn in timed) > 0
        assert len(set(watched[0].losses)) == 4


RUNS = [(ranks, row) for ranks in (1, 2, 4, 8) for row in gpus.layouts(ranks)]


@pytest.mark.parametrize("ranks, row", RUNS, ids=[f"{n} {row.step} {row.flags}" for n, row in RUNS])
def test_a_run_for_gpus_is_legal_and_planned(ranks, row):
    """The step takes its flags; the planner knows the layout and its memory (but no --compile)."""
    config_class = with_flags(importlib.import_module(row.step).Config, techniques())
    parse(config_class, gpus.flags_of(row, ranks, gpus.Config()))
    mfu, memory = gpus.planned(row, ranks, gpus.Config())
    if "--compile" in row.flags:
        assert (mfu, memory) == ("-", "-")
    else:
        assert 5 < float(mfu.rstrip("%")) < 70 and memory.endswith("GiB"), (mfu, memory)


def test_a_row_that_cannot_be_planned_says_why():
    """A model of 2 layers on 4 stages: the other rows of the table still get numbers."""
    row = gpus.Row("step06_pipeline", "--pp 4")
    found = gpus.planned(row, 4, gpus.Config(model="debug"))
    assert found[0].startswith("error: --pp 4: 2 layers for 4 stages")


def test_runs_end_in_time(monkeypatch):
    """A dry run has what training has left of the whole time, not the limit of a run again."""
    now = 0.0
    ends = []

    def train(*arguments) -> list[str]:
        nonlocal now
        now += arguments[-1]
        return ["", "", ""]

    def dry_run(*arguments) -> list[str]:
        ends.append(now + arguments[-1])
        return ["", ""]

    monkeypatch.setattr(gpus, "trained", train)
    monkeypatch.setattr(gpus, "dry", dry_run)
    monkeypatch.setattr(gpus, "time", SimpleNamespace(monotonic=lambda: now))
    gpus.show_layouts(1, "cpu", gpus.Config(limit=100.0), 150.0)
    assert ends == [150.0, 150.0]


def test_a_run_that_hangs_ends_with_its_children():
    """After its limit; otherwise a child would keep its GPU."""
    child = "import time; time.sleep(50)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    out, problem = gpus.run_limited([sys.executable, "-c", parent], 2.0)
    assert (out, problem) == ("", "no result within 2 s")
    assert time.monotonic() - began < 20  # `communicate` would wait for the child's end of the pipe


def test_the_reason_of_a_failed_run_is_shown():
    """Its line for the user, or else its status."""
    words = [sys.executable, "step01_single_gpu.py", "--model", "none"]
    assert gpus.run_limited(words, 60.0)[1].startswith("error: --model none: choose from")
    assert gpus.run_limited([sys.executable, "-c", "exit(3)"], 60.0)[1] == "status 3"


@pytest.mark.exhaustive
def test_a_contestant_with_compile_is_compiled():
    """Two graphs, a layer and the loss, in each turn. Its memory is not known."""
    flags = "--model debug --micro-batch-size 4 --global-batch-size 8 --compile --device cpu"
    for turns in (1, 2):
        turn = take_turn("step01_single_gpu", flags, "", True)
        assert counters["stats"]["unique_graphs"] == 2 * turns
        assert turn.peak == 0
