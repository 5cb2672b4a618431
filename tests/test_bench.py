"""The measurements' tables of rows: every flag is one of the step's, every value one that its menu has."""

import contextlib
import dataclasses
import importlib
from collections import Counter

import pytest

from common import UserError
from common.trainer import parse
from services.seam import check, compose, spelled
from tests.bench import __main__ as bench
from tests.bench.cables import ACROSS, FULL, PAIRS, Race, band
from tests.bench.cluster import rows
from tests.bench.cluster_plan import PROBE, drawn, entry_of, gpu_of, planned
from tests.bench.contests import CONTESTS
from tests.bench.harness import Entry, Result, report, spread
from tests.bench.versions import ALL, CASES, SERVED

ROWS = [(c.step, c.shared | row) for c in CONTESTS.values() for row in c.rows.values()]


@pytest.mark.parametrize("step, flags", ROWS, ids=[f"{step[:6]}-{flags}" for step, flags in ROWS])
def test_a_row_is_a_legal_command_line(step, flags):
    """And says the same as the row."""
    given = {name: value for name, value in flags.items() if name != "peer"}
    config = parse(compose(importlib.import_module(step)), " ".join(spelled(*flag) for flag in given.items()).split())
    assert {name: getattr(config, name) for name in given} == given


@pytest.mark.parametrize("name", CASES)
def test_versions_cases_are_command_lines(name):
    """Of this checkout."""
    script, flags = CASES[name]
    step = importlib.import_module(script.removesuffix(".py"))
    assert dataclasses.is_dataclass(parse(compose(step), f"{flags} {ALL} {SERVED}".split()))


def test_every_measurement_is_listed(capsys):
    """With a line that says what it is; another name is refused."""
    assert bench.main([]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, about in listed if about] == list(bench.MODULES)
    assert bench.main(["nothing"]) == 2


def test_a_ratio_compares_neighbours_of_a_round():
    """A slow round hits both alike: twice as long is twice as long."""
    ours, theirs = [1.0, 10.0, 2.0], [2.0, 20.0, 4.0]
    row = dict(sent={})
    found = dict(ours=Result(ours, ours, row, 0), theirs=Result(theirs, theirs, row, 0))
    assert spread([3.0, 1.0, 2.0]) == "2.000 (1.000 .. 3.000)"
    assert report(found, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 2


ENTRIES = [(p.nodes * p.ranks, Entry(p.step, flags)) for p in PAIRS.values() for flags in (p.plain, p.better)]
ON_CABLES = [*ACROSS.values(), *(entry for ranks, entry in ENTRIES if ranks == 2)]


@pytest.mark.parametrize("entry", [entry for _, entry in (*ENTRIES, *rows().values())] + [*ACROSS.values()], ids=str)
def test_an_entry_is_legal_on_two_ranks(entry):
    """Or on four."""
    config = compose(importlib.import_module(entry.step))(**entry.flags)
    with contextlib.suppress(UserError):
        check(config, 2)
        return
    check(config, 4)


@pytest.mark.parametrize("entry", ON_CABLES, ids=str)
def test_theory_of_a_cable(entry):
    """Without bytes a step takes its time at full speed; a slow cable takes its own time as well."""
    small = (entry.step == "step06_pipeline" and 2**10) or 2**20
    nothing, much = (Race({FULL: [1.0, 3.0, 2.0]}, Counter(all_reduce=size)) for size in (0, small))
    if entry.step != "step06_pipeline":  # its messages are known
        assert band(entry, nothing, 0.01) == (2.0, 2.0)
    fast, slow = band(entry, much, 1e6), band(entry, much, 1e-4)
    assert fast == pytest.approx((2.0, 2.0), rel=1e-3) and slow[0] > 8 * small / 1e5


def test_the_planner_on_the_cluster():
    """Layouts are legal, half of them are kept out; a bubble is filled by those who share a core, by nobody else."""
    layouts = drawn(32, 0)
    assert len(layouts) == 32 and sum(layouts.values()) == 16 and drawn(32, 0) == layouts != drawn(32, 1)
    gpu = gpu_of(dict(zip(PROBE, (1e10, 5e9, 2e-5, 2e8, 2e7, 1e-3, 1e-4, 1e-3), strict=True)))
    for x in layouts:
        step, flags = entry_of(x)[:2]
        check(compose(importlib.import_module(step))(**flags), 8)
        (plan, same), (_, shared) = planned(x, gpu, 1), planned(x, gpu, 4)
        assert same == plan and (shared < plan if x.pp > 2 else shared == plan), x
    with pytest.raises(UserError, match="--layouts 1"):
        drawn(1, 0)
