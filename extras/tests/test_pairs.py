"""Any two flags together train as one process does, or are refused in one line that names both (pairs.py)."""

import re
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from common import UserError
from extras.services.seam import check, compose, defaults, offered, refusals
from extras.tests import equal, pairs
from extras.tests.pairs import STEPS, Options, complete, plain, ranks_of, table
from extras.tests.pool import RankError
from extras.tests.rows import Row

LAST = STEPS[-1]  # it has all flags; the sweep (exhaustive) also trains those of the other steps
# With these patches of faults.py no flag rounds: tensors that are called 16-bit have 64 bits.
EXACT = "wide not_rounded all_sent graphs_without_code"


def text_of_refusal(step: str, options: Options) -> str:
    """The error that refuses a run before anything is built; "" if the run is accepted."""
    try:
        check(equal.config_of(step, options), ranks_of(options))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_is_combined(step):
    """Each flag has two or more values to combine, or is in APART. The tables of pairs.py name only existing flags."""
    flags = table(step)[0]
    for field in fields(compose(import_module(step))):
        known = field.name in pairs.APART or len(flags[field.name].values) > 1
        assert known, f"--{field.name}: give it a value in TRIED of its file, or in extras/tests/pairs.py"
    own = {name for file in offered(compose(import_module(step)), "TRIED") for name in file.TRIED}
    tables = pairs.COMPUTED | pairs.HOW | pairs.LOOKS | pairs.BESIDE
    assert own <= flags.keys() and (step != LAST or tables.keys() <= flags.keys())


@pytest.mark.parametrize("step", STEPS)
def test_pairs_are_refused_in_a_line_that_names_both(step):
    """Of all pairs of values whose runs are `comparable` (pairs.py), exactly those that break a rule are refused."""
    for pair in pairs.pairs_of(step):
        options = complete(step, pair)
        text, rule = text_of_refusal(step, options), pairs.broken(step, options)
        named = {word.removeprefix("no-").replace("-", "_") for word in re.findall(r"--([\w-]+)", text)}
        assert bool(text) == bool(rule) or not pairs.comparable(options), f"{pair}: {text or 'not refused'}"
        assert not text or ("\n" not in text and len(named & {*options}) > 1), f"{pair}: {text} does not name both"


def goes_wrong(pools, reference, folder: Path, step: str, options: Options, train=equal.on_rank) -> str:
    """Train with these flags, and compare with one process; returns the error, or "" if all numbers are equal."""
    base = {name: value for name, value in options.items() if table(step)[0][name].computed} | dict(patch=EXACT)
    row = Row(ranks_of(options), step if step == LAST else STEPS[0], {}, base)  # the reference, of one process
    looked_at = any(options.get(name, values[0]) != values[0] for name, values in pairs.LOOKS.items())
    run = options | dict(out=str(folder / str(len(list(folder.iterdir())))), patch=EXACT)
    kind = equal.Served if looked_at else equal.Watch
    try:
        limit = 300 if options.get("compile") else 100  # seconds; tracing experts with several techniques takes minutes
        pools(row.ranks).run(train, step, run, reference(row), 1e-10, kind, seconds=limit)
    except RankError as error:
        return str(error)
    return ""


def smallest(step: str, options: Options, wrong, text: str) -> tuple[Options, str]:
    """Remove each flag without which the run still goes wrong. Returns the flags that are left, and their error."""
    for name, value in plain(step).items():
        fewer = options | {name: value}
        if fewer != options and not text_of_refusal(step, fewer) and (found := wrong(fewer)):
            options, text = fewer, found
    return {name: value for name, value in options.items() if value != plain(step)[name]}, text


PARTS = [("any two flags", LAST, part, 4) for part in range(4)]
SWEEP = [("any two flags", step, 0, 1) for step in STEPS[:-1]] + [("any two values", LAST, i, 16) for i in range(16)]
PARTS += [pytest.param(*row, marks=pytest.mark.exhaustive) for row in SWEEP]


@pytest.mark.parametrize("kind, step, part, parts", PARTS)
def test_pairs_train_right(pools, reference, tmp_path, kind, step, part, parts):
    """Each run equals one process to 1e-10; otherwise, the message names the flags that cause the difference."""
    wrong = partial(goes_wrong, pools, reference, tmp_path, step)
    runs = pairs.chosen_runs(kind, step)[part::parts]
    found = [smallest(step, options, wrong, text) for options in runs if (text := wrong(options))]
    assert not found, "\n\n".join(f"{step} {options}: {text}" for options, text in found)


def refused_runs() -> list:
    """For each refusal of flags that would go wrong together, choose a run of the first script that has these flags."""
    found = {}
    for step in STEPS:
        cls, flags = compose(import_module(step)), table(step)[0]
        for one in refusals(cls):
            if one.shows is not None and not one.needs and one.flags.keys() <= flags.keys():
                met = {name: [v for v in flags[name].values if one.meets(name, v, defaults(cls))] for name in one.flags}
                run = complete(step, {name: (values or one.flags[name])[0] for name, values in met.items()} | one.shows)
                found.setdefault(str(one.flags), pytest.param(step, run, id=one.text(run.get, defaults(cls))))
    return list(found.values())


def without_refusals(*args):
    """Runs on every rank: call `equal.on_rank` without a check that the flags go together."""

    def settle(config, world: int):
        for plugin in offered(type(config), "settle"):
            plugin.settle(config, world)

    with mock.patch("extras.tests.equal.check", settle):
        equal.on_rank(*args)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step, options", refused_runs())
def test_what_is_refused_would_go_wrong(pools, reference, tmp_path, step, options):
    """Without its refusal, each refused run would raise an error, hang, or train to other numbers."""
    assert text_of_refusal(step, options)
    assert goes_wrong(pools, reference, tmp_path, step, options, train=without_refusals)
