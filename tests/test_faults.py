"""Each fault is noticed: with it a layout ends with another number or an error; without it, it equals one process."""

import importlib
import inspect
import re

import pytest

from tests import equal
from tests.faults import FAULTS, SMALL_ROWS, functions_of, injected
from tests.pool import RankError
from tests.rows import EXHAUSTIVE, ROWS, Row


def small(name: str) -> Row:
    """A layout for faults."""
    ranks, step, layout, base = SMALL_ROWS[name]
    return Row(ranks, step, layout, base | dict(global_batch_size=12))


def by_ranks(names: list[str], row_of: dict[str, str]) -> list[str]:
    """Names in an order in which pools and references are used again."""
    order = list(SMALL_ROWS)
    return sorted(names, key=lambda name: (SMALL_ROWS[row_of[name]][0], order.index(row_of[name])))


USUAL = by_ranks([n for n, fault in FAULTS.items() if fault.row], {n: fault.row for n, fault in FAULTS.items()})
OTHERS = [name for name, fault in FAULTS.items() if not fault.row]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_in_the_program(name):
    """Its text is there, the changed text compiles, and afterwards all is as before."""
    fault = FAULTS[name]
    owner = getattr(importlib.import_module(fault.module), fault.owner)
    right = {key: function.__code__ for key, function in functions_of(owner).items()}
    assert fault.meaning and fault.old in inspect.getsource(owner)
    with injected(name):
        assert any(function.__code__ is not right[key] for key, function in functions_of(owner).items())
    assert all(function.__code__ is right[key] for key, function in functions_of(owner).items())


@pytest.mark.parametrize("name", by_ranks(list(SMALL_ROWS), {name: name for name in SMALL_ROWS}))
def test_the_right_program_passes(pools, reference, name):
    """What the faults are held against."""
    row = small(name)
    pools(row.ranks).run(equal.on_rank, row.step, row.base | row.layout, reference(row))


def notices(pools, reference, row: Row, fault: str) -> str:
    """The last line of the error that the fault leads to; "" if there is none."""
    file = reference(row)
    try:
        pools(row.ranks).run(equal.on_rank, row.step, row.base | row.layout, file, row.bound, fault, timeout=60)
    except RankError as error:
        return str(error).strip().splitlines()[-1]
    return ""


@pytest.mark.parametrize("name", USUAL)
def test_a_fault_is_noticed(pools, reference, name):
    """By a wrong number, or an error."""
    seen = notices(pools, reference, small(FAULTS[name].row), name)
    assert seen, FAULTS[name].meaning
    print(name, "->", seen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_a_fault_of_a_variant_is_noticed(pools, reference, name):
    """By some row of the table, on at most four ranks; those whose flags share most words with the fault come first."""
    words = set(re.findall(r"[a-z0-9]+", f"{FAULTS[name].module} {name}"))
    rows = [row for row in ROWS if row.tier != EXHAUSTIVE and row.ranks <= 4]
    rows.sort(key=lambda row: -len(words & set(re.findall(r"[a-z0-9]+", f"{row.step} {row.layout | row.base}"))))
    assert any(notices(pools, reference, row, name) for row in rows), FAULTS[name].meaning
