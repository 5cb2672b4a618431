"""Tests of the benchmarks: rows are legal command lines, and ratios divide times of one round."""

import importlib
import time

import pytest
from torch._dynamo.utils import counters

from common.flags import parse
from extras.__main__ import techniques, with_flags
from extras.bench import gpus
from extras.bench.contests import CONTESTS, Turn, contest, report, take_turn
from extras.bench.peers import build_ddp


@pytest.mark.parametrize("name", CONTESTS)
def test_rows_are_legal_command_lines(name):
    """The step takes the flags of a row: none is refused. A row of PyTorch's is one of ours."""
    _, step, variants, torchs, shared = CONTESTS[name]
    for flags in variants:
        config = with_flags(importlib.import_module(step).Config, techniques())
        parse(config, f"{shared} {flags}".split())
    assert torchs.keys() <= set(variants)


def test_a_ratio_divides_times_of_the_same_round():
    """If both contestants are ten times slower in one round, the ratio stays 2."""
    turns = {}
    for name, seconds in dict(ours=(9, 1, 10, 2), theirs=(9, 2, 20, 4)).items():
        turns[name] = [[Turn(time, 0, []), Turn(0.5, 0, [])] for time in seconds]
    assert report(turns, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 1


def test_a_contest_beside_pytorch():
    """On two ranks, DistributedDataParallel has the losses of step 2, and both hold memory."""
    flags = "--model debug --micro-batch-size 4 --global-batch-size 16 --device cpu"
    entries = {build: ("step02_ddp", flags, build) for build in (None, build_ddp)}
    turns = contest(2, "cpu", entries, 1)
    for watched, timed in turns.values():
        assert watched[0].peak > 0 and min(turn.seconds for turn in timed) > 0
        assert len(set(watched[0].losses)) == 4
    ours, torchs = [by_round[0][0].losses for by_round in turns.values()]
    assert ours == pytest.approx(torchs, abs=1e-6)


RUNS = [(ranks, row) for ranks in (1, 2, 8) for row in gpus.layouts(ranks)]


@pytest.mark.parametrize("ranks, row", RUNS)
def test_a_run_for_gpus_is_legal_and_planned(ranks, row):
    """The step takes its flags; the planner knows the layout and its memory (but no --compile)."""
    script, *flags = [*row.split(), *gpus.flags_of(gpus.Config(), ranks)]
    step = importlib.import_module(script.removesuffix(".py"))
    parse(with_flags(step.Config, techniques()), flags)
    mfu, memory = gpus.planned(row, ranks, gpus.Config())
    if "--compile" in row:
        assert (mfu, memory) == ("-", "-")
    else:
        assert 5 < float(mfu.rstrip("%")) < 70 and memory.endswith("GiB"), (mfu, memory)


def test_a_command_that_hangs_ends_with_its_children():
    """When its time is over; otherwise a child would keep its GPU."""
    child = "import time; time.sleep(50)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    out, problem = gpus.run_until(began + 2, "-c", parent)
    assert (out, problem) == ("", "no result within 2 s")
    assert time.monotonic() - began < 20  # `communicate` would wait for the child's end of the pipe


def test_the_reason_of_a_failed_command_is_shown():
    """Its line for the user, or else its status."""
    end = time.monotonic() + 60
    words = ["step01_single_gpu.py", "--model", "none"]
    assert gpus.run_until(end, *words)[1].startswith("error: --model none: choose from")
    assert gpus.run_until(end, "-c", "exit(3)")[1] == "status 3"


def test_what_there_is_no_time_for_is_named(capsys):
    """A row needs twenty seconds."""
    assert list(gpus.in_time(["a"], time.monotonic() + 30)) == ["a"]
    assert list(gpus.in_time(["a", "b"], time.monotonic() + 10)) == []
    assert capsys.readouterr().out.count("left out") == 2


@pytest.mark.exhaustive
def test_a_contestant_with_compile_is_compiled():
    """Two graphs, a layer and the loss, in each turn. Its memory is not known."""
    flags = "--model debug --micro-batch-size 4 --global-batch-size 8 --compile --device cpu"
    for turns in (1, 2):
        turn = take_turn("step01_single_gpu", flags, None, True)
        assert counters["stats"]["unique_graphs"] == 2 * turns
        assert turn.peak == 0
