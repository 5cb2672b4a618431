"""Each mistake of faults.py is noticed: a number differs from that of one process, or a test fails."""

import importlib
import inspect
from functools import partial
from types import SimpleNamespace

import pytest

from extras.tests.faults import FAULTS, Fault, injected, with_fault
from extras.tests.pool import RankError
from extras.tests.rows import Row, sized
from extras.tests.test_checkpoint import ALONE
from extras.tests.test_checkpoint import continues as continues  # a fixture
from extras.tests.test_layouts import BEHAVIOURS

NAMES = [f"{fault.module.rpartition('.')[2]}: {fault.new[:40]}" for _, fault in FAULTS]


@pytest.fixture
def ask(pools, reference, continues, tmp_path):
    """`ask(judge, fault)` raises AssertionError if the judge notices the fault."""

    def wrong(judge: Row | tuple, fault: Fault):
        mistaken = lambda *which: SimpleNamespace(run=partial(pools(*which).run, with_fault, fault))  # noqa: E731
        if isinstance(judge, Row):
            BEHAVIOURS[judge.does[0]](mistaken, reference, sized(judge), tmp_path)
        elif judge[0] == "resumed":
            continues({}, ALONE, judge[1:], fault)
        else:
            file, name, *given = judge
            test = getattr(importlib.import_module(f"extras.tests.{file}"), name)
            with injected(fault):
                test(*[mistaken] * ("pools" in inspect.signature(test).parameters), *given)

    return wrong


@pytest.mark.parametrize("judge, fault", FAULTS, ids=NAMES)
def test_a_fault_is_noticed(ask, judge, fault: Fault):
    """The judge of the fault must raise AssertionError. Another error, or a hang, does not count."""
    with pytest.raises(AssertionError) as noticed:
        ask(judge, fault)
    assert noticed.type is not RankError or "AssertionError" in str(noticed.value), f"{fault.meaning}: {noticed.value}"
