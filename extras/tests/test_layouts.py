"""Tests that each layout in rows.py does what one process does. Each behaviour in `Row.does` is a function here."""

from pathlib import Path
from unittest import mock

import pytest

from extras.services import evaluation
from extras.services.resume import SIGNALS
from extras.tests import equal
from extras.tests.equal import difference
from extras.tests.rows import NEAR, ROWS, SGD, Row, sized
from extras.tests.test_checkpoint import STEPS, require_same, stored, train_on_rank

FP32 = SGD | dict(dtype="fp32", lr=0.01)
LOOKS = dict(steps=2, eval_every=2, eval_sequences=5, global_batch_size=4, micro_batch_size=2, save_every=2)


def equals(pools, reference, row: Row, folder: Path):
    """On every rank, losses, norms, gathered gradients and final parameters equal those of one process."""
    pools(row.ranks).run(equal.on_rank, row.step, row.base | row.layout, reference(row), row.bound)


def drifts(pools, reference, row: Row, folder: Path):
    """As `equals`, but in fp32: the numbers are equal up to rounding."""
    equals(pools, reference, row._replace(base=row.base | FP32, bound=equal.BOUND["fp32"]), folder)


def stays_near(pools, reference, row: Row, folder: Path):
    """In bf16, losses differ from those of one process in bf16 by less than DRIFT, and are the same on all ranks."""
    options = row.base | NEAR
    (expected,) = pools(1).run(equal.record, row.step, options)
    first, *others = pools(row.ranks).run(equal.record, row.step, options | row.layout)
    assert all(other.losses == first.losses for other in others)
    assert max(abs(a - b) for a, b in zip(first.losses, expected.losses, strict=True)) < equal.DRIFT


def look_on_rank(step: str, options: dict) -> tuple[float, str]:
    """Runs on every rank: train; returns the validation loss, and a text generated from the checkpoint."""
    (loss,) = (row["validation_loss"] for row in train_on_rank(step, options | LOOKS) if "validation_loss" in row)
    texts: list[str] = []
    where = dict(resume=options["out"], out=options["out"] + "-none", generate="def f(")
    answer = lambda config, parts: texts.append(evaluation.generate(parts, config.generate, 4))  # noqa: E731
    with mock.patch.object(evaluation, "answer", answer):
        train_on_rank(step, options | LOOKS | where)
    assert not Path(where["out"]).exists()
    return loss, texts[0]


def evaluates(pools, reference, row: Row, folder: Path):
    """On every rank, the validation loss equals that of one process to 1e-10, and the generated text is the same."""
    one = pools(1).run(look_on_rank, row.step, row.base | dict(out=str(folder / "one")))[0]
    assert one[1].startswith("def f(") and len(one[1]) > len("def f(")
    options = row.base | row.layout | dict(out=str(folder / "several"))
    for loss, text in pools(row.ranks).run(look_on_rank, row.step, options):
        assert difference(loss, one[0]) < 1e-10
        assert text == one[1]


def goes_on(pools, reference, row: Row, folder: Path):
    """A signal to one rank stops all ranks after the same step. The resumed run ends as if it had not stopped."""
    options = row.base | row.layout | dict(save_async=True)
    whole, cut = (options | dict(out=str(folder / name)) for name in ("whole", "cut"))
    pools(row.ranks).run(train_on_rank, row.step, whole)
    number = SIGNALS[int(row.step[4:6]) % len(SIGNALS)]  # so that each signal is tested by some row
    for rows in pools(row.ranks).run(train_on_rank, row.step, cut | dict(save_every=0), 3, number):
        assert len(rows) == 3, "every rank leaves after the same step"
    rows = pools(row.ranks).run(train_on_rank, row.step, cut | dict(resume="auto"))[0]
    assert [found["step"] for found in rows] == [*range(1, STEPS["steps"] + 1)]
    require_same(stored(folder / "cut"), stored(folder / "whole"))


def meets(pools, reference, row: Row, folder: Path):
    """Losses and final parameters equal those of one process. Gradients are not compared: each dp rank has its own."""
    right = reference(row)
    for seen in pools(row.ranks).run(equal.record, row.step, row.base | row.layout, equal.Apart):
        assert difference(seen.losses, right.losses) < 1e-10 and seen.parameters.keys() == right.parameters.keys()
        assert max(difference(seen.parameters[name], value) for name, value in right.parameters.items()) < 1e-10


BEHAVIOURS = {does.__name__: does for does in (equals, drifts, stays_near, evaluates, goes_on, meets)}


def label(row: Row) -> str:
    """The name of a row in the ids of its tests."""
    flags = "-".join(f"{key}={Path(str(value)).name}" for key, value in (row.layout | row.base).items())
    return f"{row.step[:6]}-{row.ranks}-{flags}"


def cases() -> list:
    """A test for each row and each of its behaviours."""
    found = []
    for row in map(sized, sorted(ROWS, key=lambda row: row.ranks)):
        for name in row.does:
            marks = [pytest.mark.numerics] * (name in ("drifts", "stays_near"))
            found.append(pytest.param(name, row, marks=marks, id=f"{name}-{label(row)}"))
    return found


@pytest.mark.parametrize("behaviour, row", cases())
def test_does_what_one_process_does(pools, reference, tmp_path, pytestconfig, behaviour, row):
    """Each row passes each behaviour that its `does` names."""
    if "cp_kernel" in row.layout and behaviour == "equals" and pytestconfig.getoption("--device") == "cuda":
        pytest.skip("a GPU has this kernel in 16 bits only")
    BEHAVIOURS[behaviour](pools, reference, row, tmp_path)
