"""Any two flags together train as one process does, or are refused in one line that names both (tests/pairs.py)."""

import math
import random
import re
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import UserError
from extras.services.seam import check, compose
from extras.tests import equal
from extras.tests.pairs import (
    APART,
    COMPUTED,
    FLAGS,
    LOOKS,
    NOWHERE,
    STEPS,
    Options,
    broken,
    comparable,
    complete,
    covering,
    flags_of,
    in_company,
    lighter,
    pairs_of,
    ranks_of,
    singles,
)
from extras.tests.pool import RankError
from extras.tests.rows import ROWS, Row

ROUNDS = (
    "not_rounded all_sent graphs_without_code second_is_a_spike"  # extras/tests/faults.py: flags do what they do ...
)
EXACT = f"wide {ROUNDS}"  # ... and round nothing; what is called 16 bits has 64
SEED = 55  # of seventy, the one whose runs have the least to compute
NEAR = 0.1  # relative, of 16 bits as they are: what lacks a scale or a sum is off by a factor


def text_of_refusal(step: str, options: Options) -> str:
    """What a run says before anything is built; "" if it would train."""
    try:
        check(equal.config_of(step, options), ranks_of(options))
    except UserError as error:
        return str(error)
    return ""


def named(text: str) -> set[str]:
    """The flags of the table that a text names."""
    words = {word.replace("-", "_") for word in re.findall(r"--([\w-]+)", text)}
    return {name for name in FLAGS if name in words or f"no_{name}" in words}


@pytest.mark.parametrize("step", STEPS)
def test_every_flag_is_in_the_table(step):
    """Once. What needs others begins with its default, and every entry of a menu is among the values."""
    assert not FLAGS.keys() & APART.keys()
    for field in fields(compose(import_module(step))):
        assert field.name in FLAGS.keys() | APART.keys(), f"--{field.name}: give it a line in extras/tests/pairs.py"
        flag = flags_of(step).get(field.name)
        if flag is not None and flag.needs:
            assert flag.values[0] == field.default, field.name
        if flag is not None and "menu" in field.metadata:
            assert {*field.metadata["menu"]} == {*FLAGS[field.name].values}, field.name
    assert FLAGS.keys() <= {field.name for field in fields(compose(import_module(STEPS[-1])))}


@pytest.mark.parametrize("step", STEPS)
def test_pairs_are_refused_as_the_table_says(step):
    """All pairs of values, in one line that names both flags; and no others."""
    for pair in pairs_of(step):
        options = complete(step, pair)
        wrong, text = broken(options), text_of_refusal(step, options)
        assert bool(text) == bool(wrong) and "\n" not in text, f"{pair}: {text or 'not refused'}"
        flags = named(text)
        assert not wrong or any(a & flags and b & flags for a, b in wrong), f"{pair}: {text!r} does not name both"


@pytest.mark.parametrize("name, value, step", [(*key, step) for key, steps in NOWHERE.items() for step in steps])
def test_some_values_are_refused_in_some_steps(name, value, step):
    """Whatever is beside them."""
    assert f"--{name} {value}" in text_of_refusal(step, complete(step, {}) | {name: value})


def on_rank(step: str, options: Options, kind: type, theirs: SimpleNamespace):
    """Runs on every rank: train, and compare; in 16 bits, the first loss, and norm unless it overflows."""
    ours = equal.record(step, options, kind)
    if "wide" in options["patch"]:
        return equal.compare(ours, theirs, 1e-10)
    overflow = options["dtype"] == "fp16" and math.isinf(ours.norms[0])  # then the update is skipped
    for what in ("losses",) if overflow else ("losses", "norms"):
        found = equal.difference(getattr(ours, what)[:1], getattr(theirs, what)[:1])
        assert found <= NEAR, f"step 1: {what} differ by {found:.3g} (relative), more than {NEAR:g}"


def goes_wrong(pools, reference, step: str, options: Options, folder: Path, patches: str = EXACT) -> str:
    """What differs from one process, or fails, in a run under these flags; "" if nothing."""
    base = {name: value for name, value in options.items() if name in COMPUTED} | dict(patch=EXACT)
    row = Row(ranks_of(options), step if step == STEPS[-1] else STEPS[0], {}, base)  # who is one process
    looked_at = any(options.get(name, flag.values[0]) != flag.values[0] for name, flag in LOOKS.items())
    run = options | dict(out=str(folder / str(len(list(folder.iterdir())))), patch=patches)
    kind = equal.Served if looked_at else equal.Watch
    try:
        pools(row.ranks).run(on_rank, step, run, kind, reference(row), seconds=100)
    except RankError as error:
        return str(error)
    return ""


def smallest(step: str, options: Options, wrong, text: str) -> tuple[Options, str]:
    """The flags without which a run that goes wrong would not, and what it says with these alone."""
    plain = {name: flag.values[0] for name, flag in flags_of(step).items()}
    for name in options:
        fewer = options | {name: plain[name]}
        if fewer != options and not text_of_refusal(step, fewer) and (found := wrong(fewer)):
            options, text = fewer, found
    return {name: value for name, value in options.items() if value != plain[name]}, text


def require_right(pools, reference, folder: Path, step: str, runs: list[Options], patches: str = EXACT):
    """All of them; else, of each that goes wrong, the smallest that does."""
    wrong = lambda options: goes_wrong(pools, reference, step, options, folder, patches)  # noqa: E731
    found = [smallest(step, options, wrong, text) for options in runs if (text := wrong(options))]
    assert not found, "\n\n".join(f"{step} {options}: {text}" for options, text in found)


def trainable(step: str) -> set[frozenset]:
    """The pairs that train."""
    options = {frozenset(pair.items()): complete(step, pair) for pair in pairs_of(step)}
    return {pair for pair, run in options.items() if not broken(run) and comparable(run)}


def of_any_two_flags(step: str, pairs: set[frozenset]) -> set[frozenset]:
    """Of each two flags one of these pairs, drawn from those in which both are set."""
    plain, found = complete(step, {}), {}
    for pair in pairs_of(step):
        if frozenset(pair.items()) in pairs and all(value != plain[name] for name, value in pair.items()):
            found.setdefault(frozenset(pair), []).append(frozenset(pair.items()))
    return set(map(random.Random(SEED).choice, found.values()))


@lru_cache
def chosen_runs(step: str, sweep: bool = False) -> list[Options]:
    """The covering set of the default run: any two flags, and each value. Of the sweep: any two values.

    The pairs of --compile are in no run here, as each of its runs takes seconds; nor are those of values of --schedule
    with --sync and with --cp-mode, as each of these nearly two hundred needs a run of its own: `runs_of_few` has them.
    Pairs of flags that only look on need a run with everything around it, so they have runs of their own.
    """
    left = ({"schedule", "sync"}, {"schedule", "cp_mode"})
    new = {pair for pair in trainable(step) if ("compile", True) not in pair}
    if sweep:
        new = {pair for pair in new if {name for name, _ in pair} not in left}
    else:
        torch = {pair for pair in new if ("sync", "torch") in pair}  # which step 7 refuses
        new = of_any_two_flags(step, new) | {frozenset([value]) for pair in new for value in pair} | torch
    seen = {pair for pair in new if any(name in LOOKS and value != LOOKS[name].values[0] for name, value in pair)}
    rows = filter(None, map(in_company, ROWS)) if step == STEPS[-1] else ()
    return [lighter(options) for options in covering(step, new - seen, SEED, whole=rows) + covering(step, seen, SEED)]


def test_rows_have_company():
    """What extras/tests/test_layouts.py leaves to the sweep is part of a run that is made here."""
    runs, rows = chosen_runs(STEPS[-1]), [flags for flags in map(in_company, ROWS) if flags]
    assert rows and all(any(flags.items() <= run.items() for run in runs) for flags in rows)


# Step 7 has all flags but those that it refuses: the other steps are left to the sweep.
PARTS = [(STEPS[-1], False, part, 4) for part in range(4)]
SWEEP = [(step, False, 0, 1) for step in STEPS[:-1]] + [(STEPS[-1], True, part, 8) for part in range(8)]
PARTS += [pytest.param(*row, marks=pytest.mark.exhaustive) for row in SWEEP]


@pytest.mark.parametrize("step, sweep, part, parts", PARTS)
def test_pairs_train_right(pools, reference, tmp_path, step, sweep, part, parts):
    """In runs of many flags each, to 1e-10: of any two flags some values; in the sweep any two values."""
    require_right(pools, reference, tmp_path, step, chosen_runs(step, sweep)[part::parts])


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_pairs_in_16_bits(pools, reference, tmp_path, part):
    """Runs of the sweep as they are, near one process in fp64."""
    runs = [options for options in chosen_runs(STEPS[-1], sweep=True) if options["dtype"] in ("bf16", "fp16")]
    require_right(pools, reference, tmp_path, STEPS[-1], runs[part::4], ROUNDS)


SET = {step: [(name, value) for name, value in singles(step) if value != FLAGS[name].values[0]] for step in STEPS}


@lru_cache
def runs_of_few() -> list[Options]:
    """Runs that set six flags of step 7 at most, and together hold all pairs of values that are not the first ones.

    Each pair alone would be five times as many. So a pair is tried in other company than in `chosen_runs`, and in less.
    """
    pairs = {frozenset(pair) for pair in combinations(SET[STEPS[-1]], 2) if pair[0][0] != pair[1][0]}
    return covering(STEPS[-1], pairs & trainable(STEPS[-1]), most=6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(16))
def test_pairs_in_small_company_train_right(pools, reference, tmp_path, part):
    """Where little else is set that could hide what two flags do to one another."""
    require_right(pools, reference, tmp_path, STEPS[-1], runs_of_few()[part::16])


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(30))
def test_triples_train_right(pools, reference, tmp_path, seed):
    """Ten drawn ones that train, of three flags; others are refused as the table says."""
    rng, runs = random.Random(seed), []
    while len(runs) < 10:
        step = rng.choice([*STEPS[2:], *STEPS[-1:] * 5])
        given = dict(rng.sample(SET[step], 3))
        options = complete(step, given)
        assert bool(broken(options)) == bool(text_of_refusal(step, options)), given
        if len(given) == 3 and not broken(options) and comparable(options, most=8):
            runs.append((step, options))
    for step in STEPS:
        require_right(pools, reference, tmp_path, step, [options for name, options in runs if name == step])
