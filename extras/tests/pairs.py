"""Pairwise tests of flags: the values of all flags, which values can be combined, and a few runs that cover all pairs.

A technique's file declares its values and its refusals, as extras/variants/record.py describes. This file has values
of the flags of steps and services, and decides whether a run fits on four ranks and can be compared with one process.
"""

import importlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import chain, combinations
from typing import Any, NamedTuple, get_args

from extras.services.seam import compose, defaults, offered, refusals

STEPS = ["step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline"]
STEPS += ["step07_moe_ep"]
Options = dict[str, Any]

# Values of flags of steps and services; the first stands for a run without the flag. `table` adds more for some flags.
# COMPUTED flags change the numbers, so the reference run has them, too. HOW flags do not. LOOKS flags only observe.
COMPUTED = dict(steps=(2, 3), global_batch_size=(4, 8), micro_batch_size=(1, 2), seed=(0, 1), optimizer=("adamw",))
COMPUTED |= dict(lr=(0.05, 0.02), warmup_steps=(2, 0), weight_decay=(0.1, 0.0), grad_clip=(0.5, 0.0))
COMPUTED |= dict(dataset=("", "uneven"))  # `uneven` ignores many targets: tests/equal.py
COMPUTED |= dict(dim=(32, 48), n_layers=(4, 5), n_heads=(4, 8), n_kv_heads=(2, 4, 1), ffn_dim=(48, 40))
COMPUTED |= dict(vocab_size=(259, 261), seq_len=(16, 24), rope_theta=(1e4, 1e2), rope_scaling=(1.0, 8.0))
COMPUTED |= dict(norm_eps=(1e-5, 0.1), tied=(False, True), experts=(4, 8), experts_per_token=(2, 1))
COMPUTED |= dict(expert_dim=(0, 24), moe_every=(1, 2), dense_layers=(0, 1), balance=("loss",))
COMPUTED |= dict(aux_loss_coeff=(0.01, 0.1))
HOW = dict(dtype=("fp64",), zero=(0,), bucket_mb=(1.0, 0.01), tp=(1, 2), cp=(1, 2), pp=(1, 2), ep=(1, 2))
HOW |= dict(chunks=(2, 1), pp_split=("even",))
LOOKS = dict(eval_every=(0, 1), eval_sequences=(64, 5), save_every=(0, 1), save_async=(False, True))
LOOKS |= dict(profile_memory=(0, 1))
BESIDE = dict(micro_batch_size=dict(global_batch_size=8), balance=dict(bias_speed=0.1))  # flag -> what it needs
BESIDE |= dict(eval_every=dict(eval_sequences=5), eval_sequences=dict(eval_every=1), save_async=dict(save_every=1))
# Not combined, because they end a run early, need other hardware, or set other flags: flag -> the file that tests it.
APART = dict(model="experts", device="gpu", timeout="checkpoint", text_column="readers", rank="dry_run")
APART |= dict(resume="checkpoint", stop_after="checkpoint", generate="evaluation", pipedream="variants")
APART |= dict(profile="profile", dry_run="dry_run", gpu="dry_run", out="layouts", peak_tflops="screen")
# Not compared together: the router's gradients can be mere rounding errors, which Adafactor would scale up.
ROUNDING = dict(optimizer=("adafactor",), balance=("none", "bias"))
TWO_STAGES = ("interleaved", "rounds", "zbv", "dualpipev", "v-half", "v-min")  # schedules that need 4 layers


class Flag(NamedTuple):
    """One command-line flag of a script such as step06_pipeline.py."""

    values: tuple  # the first stands for a run without the flag
    beside: Options  # other flags without which it has no effect
    computed: bool  # it changes the numbers that are computed


Rule = dict[str, frozenset]  # flags that are refused together, each with the values that are refused


@lru_cache
def table(step: str) -> tuple[dict[str, Flag], list[Rule]]:
    """The flags of a step that are not in APART, with their values, and the rules that say what the step refuses."""
    cls, flags, found = compose(importlib.import_module(step)), {}, []
    owners = {field.name: file for file in offered(cls, "Flags") for field in fields(file.Flags)}
    for field in [field for field in fields(cls) if field.name not in APART]:
        name, owner = field.name, owners.get(field.name)
        values = (COMPUTED | HOW | LOOKS).get(name, (field.default,))
        if name in getattr(owner, "TRIED", {}):
            values += (owner.TRIED[name],)
        elif len(values) == 1:
            switch = (not field.default,) if isinstance(field.default, bool) else ()
            values = *values, *switch, *field.metadata.get("menu", get_args(field.type))
        beside, computed = getattr(owner, "BESIDE", {}), name in COMPUTED or hasattr(owner, "COMPUTED")
        flags[name] = Flag(tuple(dict.fromkeys(values)), BESIDE.get(name, beside), computed)
    for refusal in refusals(cls):
        values = {name: flags[name].values if name in flags else (defaults(cls).get(name),) for name in refusal.flags}
        met = {name: frozenset(v for v in values[name] if refusal.meets(name, v, defaults(cls))) for name in values}
        if all(met.values()):
            found.append({name: some for name, some in met.items() if len(some) < len(values[name])})
    for (name, never), *others in [[*rule.items()] for rule in found]:
        if not others:
            flags[name] = flags[name]._replace(values=tuple(v for v in flags[name].values if v not in never))
    return flags, found


def plain(step: str) -> Options:
    """All flags of a step with their first values, which stand for a run without flags."""
    return {name: flag.values[0] for name, flag in table(step)[0].items()}


def broken(step: str, run: Options) -> Rule | None:
    """The first rule that a run breaks, or None."""
    for rule in table(step)[1]:
        for name, values in rule.items():  # called a million times; `all` would take three times as long
            if run[name] not in values:
                break
        else:
            return rule
    return None


def complete(step: str, given: Options) -> Options:
    """Add the other flags of a step to `given`, so that the given flags have an effect.

    While the run breaks a rule, one of the rule's flags gets another value, but never a flag in `given`.
    """
    flags, run, seen = table(step)[0], plain(step), set()
    new = {name: value for name, value in given.items() if name in flags}
    while new:
        beside = [flags[name].beside.items() for name, value in new.items() if value != flags[name].values[0]]
        run |= {name: value for name, value in chain(*beside) if name in flags and name not in given} | new
        new = {}
        for name, refused in reversed((broken(step, run) or {}).items()):  # the needed flag comes last
            others = [v for v in flags[name].values if v not in refused and name not in given and (name, v) not in seen]
            if others:
                seen.add((name, others[0]))
                new = {name: others[0]}
                break
    return run


def ranks_of(run: Options) -> int:
    """A run's number of ranks: pp x cp x tp, doubled if below four; with --zero-replicas at least four; step 1: one."""
    if "sync" not in run:
        return 1
    taken = run.get("pp", 1) * run.get("cp", 1) * run.get("tp", 1)
    return taken * (max(2, 4 // taken) if run.get("zero_replicas", 1) > 1 else 2 - (taken >= 4))


def comparable(run: Options) -> bool:
    """Whether a run fits on four ranks, with whole micro-batches, and can be compared with one process."""
    if run.get("sync") == "diloco":  # between its meetings, ranks of dp have different weights
        return False
    ranks, pp, cp = ranks_of(run), run.get("pp", 1), run.get("cp", 1)
    data = ranks // pp // run.get("tp", 1)
    divides = ranks // pp % run.get("ep", 1) == 0 and data % run.get("zero_replicas", 1) == 0
    whole = run["global_batch_size"] % (data // cp * run["micro_batch_size"] * pp) == 0
    judged = any(run.get(name) not in values for name, values in ROUNDING.items())
    return ranks <= 4 and divides and whole and judged


def trains(step: str, run: Options) -> bool:
    """Whether no rule refuses a run, and the run is `comparable`."""
    return not broken(step, run) and comparable(run)


def join(step: str, chosen: Options, more: Options) -> Options | None:
    """Add the flags `more`, and the flags that these need, to `chosen`. Returns None if no run can have them all."""
    if any(chosen.get(name, value) != value for name, value in more.items()):
        return None
    run, without = complete(step, chosen | more), plain(step)
    if not trains(step, run):
        return None
    return {name: value for name, value in run.items() if name in chosen or name in more or value != without[name]}


def covering(step: str, wanted: Iterable[Options]) -> list[Options]:
    """A few runs that together cover all `wanted` combinations of flags. Each run takes as many as it can."""
    runs, left = [], list(wanted)
    while left:
        chosen = join(step, {}, left[0])
        for more in left:
            if not more.items() <= chosen.items():
                chosen = join(step, chosen, more) or chosen
        runs.append(complete(step, chosen))
        left = [more for more in left if not more.items() <= runs[-1].items()]
    return runs


def lighter(run: Options) -> Options:
    """Remove two layers from a run of step 7, to halve its time, unless the run needs all layers."""
    deep = run.get("schedule") in TWO_STAGES or run.get("dense_layers")
    return run if deep or "moe_every" not in run else run | dict(n_layers=run["n_layers"] - 2)


def singles(step: str) -> list[tuple[str, Any]]:
    """All pairs (flag, value) of a step."""
    return [(name, value) for name, flag in table(step)[0].items() for value in flag.values]


def pairs_of(step: str) -> Iterator[Options]:
    """All pairs of values of two flags."""
    for (a, x), (b, y) in combinations(singles(step), 2):
        if a != b:
            yield {a: x, b: y}


@lru_cache
def chosen_runs(kind: str, step: str) -> list[Options]:
    """Runs that cover all pairs of flags (`kind` is "any two flags"), or all pairs of values ("any two values").

    "Any two flags" also covers each value. It leaves out --compile, whose runs take seconds, and pairs of --schedule
    with --sync or --cp-mode, each of which would need its own run. The flags in LOOKS, which only observe a run, are
    tested in separate runs, because they need all services.
    """
    without, pairs = plain(step), [pair for pair in pairs_of(step) if trains(step, complete(step, pair))]
    random.Random(0).shuffle(pairs)
    if kind == "any two flags":
        slow = {"schedule", "sync"}, {"schedule", "cp_mode"}
        both = [pair for pair in pairs if not pair.items() & without.items() and pair.keys() not in slow]
        pairs = list({frozenset(pair): pair for pair in both}.values())
        pairs = [pair for pair in pairs + [dict([one]) for one in singles(step)] if not pair.get("compile")]
        pairs = [pair for pair in pairs if trains(step, complete(step, pair))]
    pairs.sort(key=lambda pair: -sum(value != without[name] for name, value in pair.items()))
    seen = [pair for pair in pairs if any(name in LOOKS and value != LOOKS[name][0] for name, value in pair.items())]
    others = [pair for pair in pairs if pair not in seen]
    return [lighter(run) for run in covering(step, others) + covering(step, seen)]
