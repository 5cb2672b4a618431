"""Tests of the benchmarks: their rows are legal command lines, and their ratios divide times of the same round."""

import importlib

import pytest

from common.trainer import parse
from extras.services.seam import check, compose
from extras.bench.cluster import ROWS
from extras.bench.contests import CONTESTS, Result, report
from extras.variants.record import spelled

LINES = [(c.step, c.ranks, c.shared | row) for c in CONTESTS.values() for row in c.rows.values()]
LINES += [(step, 2, flags) for step, flags in ROWS]


@pytest.mark.parametrize("step, ranks, flags", LINES, ids=[f"{step[:6]}-{flags}" for step, _, flags in LINES])
def test_a_row_is_a_legal_command_line(step, ranks, flags):
    """The flags of a row can be written as a command line, and suit its number of ranks."""
    given = {name: value for name, value in flags.items() if name != "peer"}
    config = parse(compose(importlib.import_module(step)), " ".join(spelled(*flag) for flag in given.items()).split())
    assert {name: getattr(config, name) for name in given} == given
    check(config, ranks)


def test_a_ratio_divides_times_of_the_same_round():
    """If both contestants are ten times slower in one round, the ratio stays the same."""
    found = dict(ours=Result([1.0, 10.0, 2.0], 0), theirs=Result([2.0, 20.0, 4.0], 0))
    assert report(found, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 1
