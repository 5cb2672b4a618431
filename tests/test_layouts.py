"""Every row of the table equals one process: losses, norms, gathered gradients, final parameters (tests/equal.py)."""

import pytest

from tests import equal
from tests.rows import EXHAUSTIVE, ROWS, Row, every_legal_layout


def label(row: Row) -> str:
    """A test id."""
    flags = "-".join(f"{key}={value}" for key, value in (row.layout | row.base).items())
    return f"{row.step[:6]}-{row.ranks}-{flags}"


def cases() -> list:
    """The table, and every legal layout of 8 ranks for the sweep."""
    rows = sorted([*ROWS, *every_legal_layout()], key=lambda row: row.ranks)
    return [pytest.param(r, id=label(r), marks=[pytest.mark.exhaustive] * (r.tier == EXHAUSTIVE)) for r in rows]


@pytest.mark.parametrize("row", cases())
def test_equals_one_process(pools, reference, row):
    """In fp64 to 1e-10, in fp32 to 1e-5, on every rank."""
    pools(row.ranks).run(equal.on_rank, row.step, row.base | row.layout, reference(row), row.bound)
