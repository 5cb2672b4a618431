"""Every row of the table equals one process: losses, norms, gathered gradients, final parameters (tests/equal.py)."""

import json
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from tests import equal
from tests.rows import EXHAUSTIVE, ROWS, Row, every_legal_layout


def one_process(row: Row) -> str:
    """What the row is compared with: step 1, but for flags that only step 7 has."""
    known = {field.name for field in fields(import_module("step01_single_gpu").Config)} | set(equal.SHAPE)
    return "step01_single_gpu" if set(row.base) <= known else row.step


def label(row: Row) -> str:
    """A test id."""
    flags = "-".join(f"{key}={value}" for key, value in (row.layout | row.base).items())
    return f"{row.step[:6]}-{row.ranks}-{flags}"


@pytest.fixture(scope="session")
def reference(pools, tmp_path_factory):
    """`reference(row)`: the file with what one process has seen, made once for each base."""
    folder: Path = tmp_path_factory.mktemp("references")
    made: dict[str, str] = {}

    def make(row: Row) -> str:
        step = one_process(row)
        key = json.dumps([step, row.base], sort_keys=True)
        if key not in made:
            made[key] = str(folder / f"{len(made)}.pt")
            pools(1).run(equal.save_record, step, row.base, made[key])
        return made[key]

    return make


def cases() -> list:
    """The table, and every legal layout of 8 ranks for the sweep."""
    rows = sorted([*ROWS, *every_legal_layout()], key=lambda row: row.ranks)
    return [pytest.param(r, id=label(r), marks=[pytest.mark.exhaustive] * (r.tier == EXHAUSTIVE)) for r in rows]


@pytest.mark.parametrize("row", cases())
def test_equals_one_process(pools, reference, row):
    """In fp64 to 1e-10, in fp32 to 1e-5, on every rank."""
    pools(row.ranks).run(equal.on_rank, row.step, row.base | row.layout, reference(row), row.bound)
