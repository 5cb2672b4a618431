"""The rows of the measurements are legal command lines, and every measurement is listed."""

import importlib

import pytest

from common.trainer import parse
from extras.services.seam import check, compose
from extras.tests.bench import __main__ as bench
from extras.tests.bench.cluster import rows
from extras.tests.bench.contests import CONTESTS
from extras.tests.bench.harness import Result, report, spread
from extras.variants.record import spelled

ROWS = [(c.step, c.ranks, c.shared | row) for c in CONTESTS.values() for row in c.rows.values()]
ROWS += [(entry.step, 2, entry.flags) for entry in rows().values()]


@pytest.mark.parametrize("step, ranks, flags", ROWS, ids=[f"{step[:6]}-{flags}" for step, _, flags in ROWS])
def test_a_row_is_a_legal_command_line(step, ranks, flags):
    """Parsed as a command line, a row gives the same flags, and they suit its number of ranks."""
    given = {name: value for name, value in flags.items() if name != "peer"}
    config = parse(compose(importlib.import_module(step)), " ".join(spelled(*flag) for flag in given.items()).split())
    assert {name: getattr(config, name) for name in given} == given
    check(config, ranks)


def test_every_measurement_is_listed(capsys):
    """Each has a line that describes it; an unknown name is refused; --only can name each contestant."""
    assert not any("," in name for contest in CONTESTS.values() for name in contest.rows)
    assert bench.main([]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, about in listed if about] == list(bench.MODULES)
    assert bench.main(["nothing"]) == 2


def test_a_ratio_compares_neighbours_of_a_round():
    """If both contestants are ten times slower in one round, the ratio stays the same."""
    ours, theirs = [1.0, 10.0, 2.0], [2.0, 20.0, 4.0]
    found = dict(ours=Result(ours, ours, 0), theirs=Result(theirs, theirs, 0))
    assert spread([3.0, 1.0, 2.0]) == "2.000 (1.000 .. 3.000)"
    assert report(found, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 2
