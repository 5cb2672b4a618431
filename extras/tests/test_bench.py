"""Tests of the benchmarks: rows are legal command lines, and ratios divide times of the same round."""

import importlib

import pytest

from common.flags import parse, spelled
from extras.__main__ import techniques, with_flags
from extras.bench.cluster import ROWS
from extras.bench.contests import CONTESTS, Result, report

LINES = [(step, flags) for step, flags in ROWS]
for contest in CONTESTS.values():
    LINES += [(contest.step, contest.shared | row) for row in contest.rows.values()]


def words_of(flags: dict) -> list[str]:
    """A command line with these flags."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(spelled(name))
        elif value is False:
            words.append(spelled(f"no_{name}"))
        else:
            words += [spelled(name), str(value)]
    return words


@pytest.mark.parametrize("step, flags", LINES, ids=[f"{step[:6]}-{flags}" for step, flags in LINES])
def test_a_row_is_a_legal_command_line(step, flags):
    """The flags of a row can be given to the step, and none is refused."""
    given = {name: value for name, value in flags.items() if name != "peer"}
    config_class = with_flags(importlib.import_module(step).Config, techniques())
    config = parse(config_class, words_of(given))
    assert {name: getattr(config, name) for name in given} == given


def test_a_ratio_divides_times_of_the_same_round():
    """If both contestants are ten times slower in one round, the ratio stays 2."""
    found = dict(ours=Result([1.0, 10.0, 2.0], 0), theirs=Result([2.0, 20.0, 4.0], 0))
    assert report(found, dict(ours="ours", theirs="ours")).count("2.000 (2.000 .. 2.000)") == 1
