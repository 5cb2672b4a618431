"""Runs of many flags at once: the values of all flags, which of them go together, and few runs that have all pairs.

A technique's values, and what it refuses, stand in its own file (extras/variants/record.py). Here are the values of the
flags of steps and services, and what decides whether four ranks can show a combination.
"""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import chain, combinations
from typing import Any, NamedTuple, get_args

from extras.services.seam import compose, defaults, offered, refusals

STEPS = ["step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline"]
STEPS += ["step07_moe_ep"]
Options = dict[str, Any]

# Values of the flags of steps and services, the first as without the flag; of a menu or a switch all others are added.
# COMPUTED changes what is computed, so one process has it, too; HOW does not; LOOKS only looks on.
COMPUTED = dict(steps=(2, 3), global_batch_size=(4, 8), micro_batch_size=(1, 2), seed=(0, 1), optimizer=("adamw",))
COMPUTED |= dict(lr=(0.05, 0.02), warmup_steps=(2, 0), weight_decay=(0.1, 0.0), grad_clip=(0.5, 0.0))
COMPUTED |= dict(dataset=("", "uneven"))  # many targets do not count: tests/equal.py
COMPUTED |= dict(dim=(32, 48), n_layers=(4, 5), n_heads=(4, 8), n_kv_heads=(2, 4, 1), ffn_dim=(48, 40))
COMPUTED |= dict(vocab_size=(259, 261), seq_len=(16, 24), rope_theta=(1e4, 1e2), rope_scaling=(1.0, 8.0))
COMPUTED |= dict(norm_eps=(1e-5, 0.1), tied=(False, True), experts=(4, 8), experts_per_token=(2, 1))
COMPUTED |= dict(expert_dim=(0, 24), moe_every=(1, 2), dense_layers=(0, 1), balance=("loss",))
COMPUTED |= dict(aux_loss_coeff=(0.01, 0.1))
HOW = dict(dtype=("fp64",), zero=(0,), bucket_mb=(1.0, 0.01), tp=(1, 2), cp=(1, 2), pp=(1, 2), ep=(1, 2))
HOW |= dict(chunks=(2, 1), pp_split=("", "cost"))
LOOKS = dict(eval_every=(0, 1), eval_sequences=(64, 5), save_every=(0, 1), save_async=(False, True))
LOOKS |= dict(profile_memory=(0, 1))
BESIDE = dict(micro_batch_size=dict(global_batch_size=8), balance=dict(bias_speed=0.1))  # where their effect shows
BESIDE |= dict(eval_every=dict(eval_sequences=5), eval_sequences=dict(eval_every=1), save_async=dict(save_every=1))
# Flags that end a run early, need what a test's machine lacks, or stand for others; and the file that tests them.
APART = dict(model="experts", device="gpu", backend="gpu", timeout="checkpoint", text_column="readers", rank="dry_run")
APART |= dict(resume="checkpoint", stop_after="checkpoint", generate="evaluation", pipedream="variants")
APART |= dict(profile="profile", dry_run="dry_run", gpu="dry_run", toy="variants", out="layouts", peak_tflops="screen")
# Gradients of experts that no token visits are rounding alone, and Adafactor divides them by themselves.
ROUNDING = dict(optimizer=("adafactor",), balance=("none", "bias"))
TWO_STAGES = ("interleaved", "rounds", "ahead", "zbv", "dualpipev", "v-half", "v-min")  # schedules that want 4 layers


class Flag(NamedTuple):
    """One flag of a step."""

    values: tuple  # the first: without it
    beside: Options  # other flags with which its effect shows
    computed: bool  # it changes what is computed, not how


Rule = dict[str, frozenset]  # flags that are refused together: of each, the values that are refused beside the others


@lru_cache
def table(step: str) -> tuple[dict[str, Flag], list[Rule]]:
    """The flags of a step that are not APART, without values that it always refuses; and which values it refuses."""
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
    """All flags of a step, as without them."""
    return {name: flag.values[0] for name, flag in table(step)[0].items()}


def broken(step: str, run: Options) -> Rule | None:
    """A rule that a run breaks."""
    for rule in table(step)[1]:
        for name, values in rule.items():  # asked a million times: `all` takes three times as long
            if run[name] not in values:
                break
        else:
            return rule
    return None


def complete(step: str, given: Options) -> Options:
    """All flags of a step: the given ones, with those that show their effect, and those that they need.

    As long as the run breaks a rule, one flag of it that is not given takes its next value that the rule allows.
    """
    flags, run, seen = table(step)[0], plain(step), set()
    new = {name: value for name, value in given.items() if name in flags}
    while new:
        beside = [flags[name].beside.items() for name, value in new.items() if value != flags[name].values[0]]
        run |= {name: value for name, value in chain(*beside) if name in flags and name not in given} | new
        new = {}
        for name, refused in reversed((broken(step, run) or {}).items()):  # what a flag needs comes after it
            others = [v for v in flags[name].values if v not in refused and name not in given and (name, v) not in seen]
            if others:
                seen.add((name, others[0]))
                new = {name: others[0]}
                break
    return run


def ranks_of(run: Options) -> int:
    """How many ranks show what the flags do: two that share no layout, and as many more as shards need for replicas."""
    if "sync" not in run:
        return 1
    taken = run.get("pp", 1) * run.get("cp", 1) * run.get("tp", 1)
    return taken * (max(2, 4 // taken) if run.get("zero_replicas", 1) > 1 else 2 - (taken >= 4))


def comparable(run: Options) -> bool:
    """Whether four ranks can show it, each with whole micro-batches, and one process says what is right."""
    if run.get("sync") == "diloco":  # between meetings ranks have weights of their own
        return False
    ranks, pp, cp, start = ranks_of(run), run.get("pp", 1), run.get("cp", 1), run["batch_ramp"].split(",")[0]
    data, batches = ranks // pp // run.get("tp", 1), [run["global_batch_size"], *([int(start)] if start else [])]
    divides = ranks // pp % run.get("ep", 1) == 0 and data % run.get("zero_replicas", 1) == 0
    whole = all(batch % (data // cp * run["micro_batch_size"] * pp) == 0 for batch in batches)
    judged = any(run.get(name) not in values for name, values in ROUNDING.items())
    return ranks <= 4 and divides and whole and judged and (not start or int(start) < run["global_batch_size"])


def trains(step: str, run: Options) -> bool:
    """Whether a run is accepted, and can be compared."""
    return not broken(step, run) and comparable(run)


def join(step: str, chosen: Options, more: Options, most: int | None = None) -> Options | None:
    """Chosen flags with more of them and what these need; None if they contradict, are refused, or set too many."""
    if any(chosen.get(name, value) != value for name, value in more.items()):
        return None
    run, without = complete(step, chosen | more), plain(step)
    if not trains(step, run) or (most and sum(run[name] != without[name] for name in run) > most):
        return None
    return {name: value for name, value in run.items() if name in chosen or name in more or value != without[name]}


def covering(step: str, wanted: Iterable[Options], most: int | None = None) -> list[Options]:
    """Few runs that have all of the wanted flags, which go together: a run takes all that still fit, one after another.

    A run sets at most so many flags, unless the first ones that it takes need more.
    """
    runs, left = [], list(wanted)
    while left:
        chosen = join(step, {}, left[0])
        for more in left:
            if most and len(chosen) >= most:
                break
            if not more.items() <= chosen.items():
                chosen = join(step, chosen, more, most) or chosen
        runs.append(complete(step, chosen))
        left = [more for more in left if not more.items() <= runs[-1].items()]
    return runs


def lighter(run: Options) -> Options:
    """Two layers fewer, half of the time, unless a rank has two stages, or some layers have no experts."""
    deep = run.get("schedule") in TWO_STAGES or run.get("dense_layers")
    return run if deep or "moe_every" not in run else run | dict(n_layers=run["n_layers"] - 2)


def singles(step: str) -> list[tuple[str, Any]]:
    """All (flag, value) of a step."""
    return [(name, value) for name, flag in table(step)[0].items() for value in flag.values]


def pairs_of(step: str) -> Iterator[Options]:
    """All pairs of values of two flags."""
    for (a, x), (b, y) in combinations(singles(step), 2):
        if a != b:
            yield {a: x, b: y}
