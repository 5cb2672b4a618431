"""Each fault is noticed: a layout ends with another number, or the error that it names; or a law has other numbers."""

import importlib
import inspect
from functools import partial

import pytest

from extras.tests import equal, test_laws, test_schedules, test_variants
from extras.tests.faults import FAULTS, SMALL_ROWS, functions_of, injected, with_fault
from extras.tests.pool import RankError, error_of
from extras.tests.rows import EXHAUSTIVE, sized
from extras.tests.test_checkpoint import goes_on_elsewhere as goes_on_elsewhere  # a fixture
from extras.tests.test_rules import RULES

INT8 = dict(tp=2) | test_laws.INT8
LAWS: dict[str, tuple] = {  # ranks, and a function with its arguments that every rank calls: what it returns is the law
    "law: kept": (2, test_laws.measure, "step03_zero", dict(zero=3, zero_keep=True)),
    "law: kept if small": (2, test_laws.measure, "step03_zero", dict(zero=3, zero_keep=True, zero_keep_mb=0.06)),
    "law: early sums": (2, test_laws.sums_in_backward, dict(zero=1, zero_overlap=True)),
    "law: hidden": (4, test_laws.order_of_turns, test_laws.OVERLAP | dict(ep_overlap=True)),
    "law: window": (2, test_laws.measure, "step05_cp_ring", dict(cp=2, cp_mode="ring", window=5)),
    "law: cudnn": (1, test_laws.by_cudnn),
    "law: debts": (3, test_variants.sums_on_rank, "topk", True),
    "law: masks": (1, partial(test_variants.masks, tp=2)),
    "law: rounds": (1, test_schedules.of_rounds, 3, 7, 2, 4),
    "law: ahead": (1, test_schedules.of_ahead, 2, 8, 1),
    "law: stashed": (3, test_variants.late_losses, dict(recompute="full")),
    "law: ramp": (2, test_variants.ramp_on_rank, 12),
    "law: scores": (1, partial(test_variants.kept_in_a_layer, attention="scores", recompute="selective")),
    "law: int8": (2, test_laws.measure, "step04_tp_sp", INT8),
    "law: int8 overlap": (2, test_laws.measure, "step04_tp_sp", INT8 | dict(tp_overlap=True)),
}
RESUMED = {"resume": (1, {}), "resume, zero": (3, dict(zero=1)), "resume, tp": (2, dict(tp=2))}
RULE = "rule: "  # and a name in RULES of extras/tests/test_rules.py, where the right program passes


def ranks_of(judge: str) -> int:
    """How many a judge takes."""
    if judge.startswith(RULE):
        return 0  # in this process
    return SMALL_ROWS[judge].ranks if judge in SMALL_ROWS else (LAWS | RESUMED)[judge][0]


def cases() -> list:
    """Faults, in an order in which pools and references are used again."""
    names = sorted(FAULTS, key=lambda name: (ranks_of(FAULTS[name].judge), FAULTS[name].judge))
    return [pytest.param(n, marks=[pytest.mark.exhaustive] * (FAULTS[n].tier == EXHAUSTIVE)) for n in names]


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


@pytest.fixture(scope="module")
def ask(pools, reference, goes_on_elsewhere):
    """`ask(judge, fault)`: what a judge says of a mistake, or of the right program if there is none; "": all right."""
    lawful: dict[str, list] = {}

    def answer(judge: str, fault: str = "") -> str:
        if judge.startswith(RULE):
            return with_fault(fault, error_of, AssertionError, RULES[judge.removeprefix(RULE)])
        if judge in SMALL_ROWS:
            row = sized(SMALL_ROWS[judge])
            call = with_fault, fault, equal.on_rank, row.step, row.base | row.layout, reference(row), row.bound
            return max(pools(row.ranks).run(error_of, AssertionError, *call, timeout=60))
        if judge in RESUMED:
            return goes_on_elsewhere(fault, *RESUMED[judge])
        ranks, *call = LAWS[judge]
        if judge not in lawful:
            lawful[judge] = pools(ranks).run(*call)
        found = pools(ranks).run(with_fault, fault, *call) if fault else lawful[judge]
        return "" if found == lawful[judge] else f"{found} instead of {lawful[judge]}"

    return answer


def judges() -> list:
    """Rows and resumed runs; by default the first of each number of ranks. (A law is tested by itself.)"""
    found = sorted([*SMALL_ROWS, *RESUMED], key=ranks_of)
    firsts = {ranks_of(judge): judge for judge in reversed(found)}.values()
    return [pytest.param(j, marks=[pytest.mark.exhaustive] * (j not in firsts)) for j in found]


@pytest.mark.parametrize("judge", judges())
def test_the_right_program_passes(ask, judge):
    """What the faults are held against."""
    assert ask(judge) == ""


@pytest.mark.parametrize("name", cases())
def test_a_fault_is_noticed(ask, name):
    """By a wrong number, or by the error that the table names. No other error is expected, nor waiting for ever."""
    fault = FAULTS[name]
    try:
        seen = ask(fault.judge, name)
    except RankError as error:
        seen = str(error).strip().splitlines()[-1]
        assert fault.error and fault.error in str(error), f"{fault.meaning}: {error}"
    else:
        assert seen and not fault.error, f"{fault.meaning}: {seen}"
    print(name, "->", seen[:200])
