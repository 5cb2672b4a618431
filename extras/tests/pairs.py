"""The table of all flags, with the values worth trying: any two of them train right together, or are refused.

FLAGS says what each flag needs beside it, REFUSED what else does not go together. That is said a second time, in the
words of the program, by NEEDS and `check` of steps, variants and services: tests/test_pairs.py holds one against the
other, for all pairs. A new flag gets a line in FLAGS, or in APART. A new refusal gets a line in REFUSED.
"""

import importlib
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import combinations, combinations_with_replacement
from typing import Any, NamedTuple

from extras.services.seam import compose
from extras.tests.rows import ALL, EXHAUSTIVE, Row

STEPS = ["step01_single_gpu", "step02_ddp", "step03_zero", "step04_tp_sp", "step05_cp_ring", "step06_pipeline"]
STEPS += ["step07_moe_ep"]
Options = dict[str, Any]


class Flag(NamedTuple):
    """One flag."""

    values: tuple  # the first: without it. If the flag needs others, that is its default
    needs: tuple[Options, ...] = ()  # to be set, it needs one of these: other flags, each with the values that will do
    takes: Options = {}  # noqa: RUF012  # what shows its effect; it is legal without


MORE, ZERO, SLICES, DOCUMENTS = (2,), dict(zero=(0,)), dict(zero=(1, 2, 3)), dict(documents=("mask", "reset"))
PARTS = ("zigzag", "ring", "allgather", "usp", "balanced")  # keys come in parts
V = ("zbv", "dualpipev", "v-half", "v-min")  # schedules with two stages on a rank
PAIRED = ("ahead", "interleaved", "rounds", "zbv", "dualpipe", "dualpipev")  # all ranks have F before B of another
W = ("zb-h1", "zb-h2", "zb-auto", "dualpipe", *V)  # schedules with a split backward

COMPUTED = {  # they change what is computed: one process has them, too
    "steps": Flag((2, 3)),
    "global_batch_size": Flag((4, 8)),
    "micro_batch_size": Flag((1, 2), takes=dict(global_batch_size=8)),
    "optimizer": Flag(("adamw", "sgd", "adafactor", "muon")),
    "lr": Flag((0.05, 0.02)),
    "warmup_steps": Flag((2, 0)),
    "weight_decay": Flag((0.1, 0.0)),
    "grad_clip": Flag((0.5, 0.0)),
    "seed": Flag((0, 1)),
    "dataset": Flag(("", "uneven")),  # many targets do not count: tests/equal.py
    "dim": Flag((32, 48)),
    "n_layers": Flag((4, 5)),
    "n_heads": Flag((4, 8)),
    "n_kv_heads": Flag((2, 4, 1)),
    "ffn_dim": Flag((48, 40)),
    "vocab_size": Flag((259, 261)),
    "seq_len": Flag((16, 24)),
    "rope_theta": Flag((1e4, 1e2)),
    "rope_scaling": Flag((1.0, 8.0)),
    "norm_eps": Flag((1e-5, 0.1)),
    "tied": Flag((False, True)),
    "documents": Flag(("off", "mask", "reset"), takes=dict(end_token=32)),
    "end_token": Flag((256, 32), (DOCUMENTS,)),
    "window": Flag((0, 5)),
    "skip_spikes": Flag((0.0, 1.5), takes=dict(steps=3)),
    "roll_back": Flag((0, 1), (dict(skip_spikes=(1.5,)),)),
    "dropout": Flag((0.0, 0.2)),
    "batch_ramp": Flag(("", "4,2"), takes=dict(global_batch_size=8, steps=3)),
    "stale": Flag((0, 1), takes=dict(steps=3)),
    "experts": Flag((4, 8)),
    "experts_per_token": Flag((2, 1)),
    "expert_dim": Flag((0, 24)),
    "moe_every": Flag((1, 2)),
    "dense_layers": Flag((0, 1)),
    "balance": Flag(("loss", "none", "bias"), takes=dict(bias_speed=0.1)),
    "aux_loss_coeff": Flag((0.01, 0.1), (dict(balance=("loss",)),)),
    "bias_speed": Flag((0.001, 0.1), (dict(balance=("bias",)),)),
    "z_loss": Flag((0.0, 0.1)),
    "capacity_factor": Flag((0.0, 0.6)),
    "expert_groups": Flag((1, 2), (dict(groups_per_token=(1,)),)),
    "groups_per_token": Flag((0, 1), (dict(expert_groups=MORE),)),
    "shared_experts": Flag((0, 1)),
}
HOW = {  # they change how it is computed
    "dtype": Flag(("fp64", "fp32", "bf16", "fp16", "auto")),
    "recompute": Flag(("none", "full", "elementwise", "selective")),
    "attention": Flag(("fused", "scores")),
    "prefetch": Flag((False, True)),
    "compile": Flag((False, True)),
    "loss_chunk": Flag((0, 5)),
    "fused_gradients": Flag((False, True)),
    "grad_dtype": Flag(("fp32", "same"), (dict(dtype=("bf16", "fp16", "auto")),)),
    "sync": Flag(("bucket", "naive", "ring", "overlap", "torch", "hierarchical", "tree", "server"), (ZERO,)),
    "ranks_per_node": Flag((8, 2), (dict(sync=("hierarchical",)),)),
    "bucket_mb": Flag((1.0, 0.01), (ZERO | dict(sync=("bucket", "torch")),)),
    "compress": Flag(("none", "bf16", "int8", "topk")),
    "topk_fraction": Flag((0.01, 0.5), (dict(compress=("topk",)),)),
    "zero": Flag((0, 1, 2, 3)),
    "zero_replicas": Flag((1, 2), (SLICES,)),
    "zero_keep": Flag((False, True), (dict(zero=(3,)),)),
    "zero_keep_mb": Flag((0.0, 0.06), (dict(zero_keep=(True,)),)),
    "zero_overlap": Flag((False, True), (dict(zero=(1,)),)),
    "offload_optimizer": Flag(("none", "cpu", "disk"), (SLICES,)),
    "offload_params": Flag(("none", "cpu"), (dict(zero=(3,)),)),
    "tp": Flag((1, 2)),
    "sp": Flag((True, False), (dict(tp=MORE),)),
    "tp_overlap": Flag((False, True), (dict(tp=MORE),)),
    "compress_activations": Flag(("none", "bf16", "int8"), (dict(tp=MORE), dict(pp=MORE))),
    "cp": Flag((1, 2)),
    "cp_kernel": Flag(("formula", "flash", "cudnn"), (dict(cp=MORE, cp_mode=PARTS), dict(window=(5,)))),
    "cp_mode": Flag((*PARTS, "ulysses"), (dict(cp=MORE),)),
    "ulysses": Flag((2, 1), (dict(cp_mode=("usp",)),)),
    "pp": Flag((1, 2)),
    "schedule": Flag(("1f1b", "afab", "interleaved", "rounds", "ahead", *W), (dict(pp=MORE),)),
    "pp_scatter": Flag((False, True), (dict(pp=MORE, tp=MORE, sp=(False,)),)),
    "chunks": Flag((2, 1), (dict(schedule=("interleaved", "rounds", "ahead")),)),
    "round_size": Flag((0, 3), (dict(schedule=("rounds",)),)),
    "pp_split": Flag(("", "cost"), (dict(pp=MORE),)),
    "zb_memory": Flag((1.0, 2.0), (dict(schedule=("zb-auto",)),)),
    "zb_costs": Flag(("", "1,1,1,0.05"), (dict(schedule=("zb-auto",)),)),
    "ep": Flag((1, 2)),
    "ep_mode": Flag(("alltoall", "rows", "allgather", "nodes"), (dict(ep=MORE),)),
    "ep_overlap": Flag((False, True), (dict(pp=MORE, ep=MORE, ep_mode=("alltoall",), schedule=PAIRED),)),
    "ep_inside": Flag((2, 1), (dict(ep_mode=("nodes",)),)),
    "expert_matmul": Flag(("each", "grouped")),
}
LOOKS = {  # they look on
    "eval_every": Flag((0, 1), takes=dict(eval_sequences=5)),
    "eval_sequences": Flag((64, 5), (dict(eval_every=(1,)),)),
    "save_every": Flag((0, 1)),
    "save_async": Flag((False, True), takes=dict(save_every=1)),
    "log_ranks": Flag((False, True)),
    "profile_memory": Flag((0, 1)),
}
FLAGS = COMPUTED | HOW | LOOKS
DEPENDENT = {name for name, flag in FLAGS.items() if flag.needs}
APART = {  # they end a run early, need what a test's machine lacks, or stand for others: where they are tested
    "model": "a preset is its shape, and sets flags: extras/tests/test_experts.py",
    "device": "extras/tests/test_gpu.py",
    "backend": "extras/tests/test_gpu.py",
    "out": "each run here has its own",
    "timeout": "extras/tests/test_checkpoint.py",
    "text_column": "extras/tests/test_readers.py",
    "peak_tflops": "all runs of tests have it",
    "resume": "extras/tests/test_checkpoint.py, and all rows that go on: extras/tests/test_layouts.py",
    "stop_after": "extras/tests/test_checkpoint.py",
    "generate": "extras/tests/test_evaluation.py",
    "pipedream": "prints losses instead of training: extras/tests/test_variants.py",
    "toy": "prints an example instead of training",
    "dry_run": "extras/tests/test_dry_run.py: test_every_value_is_counted",
    "rank": "extras/tests/test_dry_run.py",
    "gpu": "extras/tests/test_dry_run.py",
}

REFUSED: list[tuple[Options, Options] | tuple[Options, Options, str]] = [  # what else does not go together
    (dict(optimizer=("adafactor",)), SLICES),
    (dict(optimizer=("adafactor",)), dict(tp=MORE)),
    (dict(optimizer=("adafactor",)), dict(ep=MORE)),
    (dict(compress=("bf16", "int8", "topk")), dict(sync=("naive", "ring", "torch", "hierarchical", "tree", "server"))),
    (dict(compress=("bf16", "int8", "topk")), dict(dtype=("fp16",))),
    (dict(sync=("torch",)), dict(dtype=("bf16", "fp16"))),
    (dict(tp_overlap=(True,)), dict(schedule=W)),
    (dict(fused_gradients=(True,)), dict(schedule=W)),
    (dict(fused_gradients=(True,)), dict(tp_overlap=(True,))),
    (dict(fused_gradients=(True,)), dict(sync=("torch",))),
    (dict(compile=(True,)), dict(recompute=("full", "elementwise")), "experts"),  # in steps that have this flag
    (dict(compile=(True,), recompute=("elementwise",)), dict(tp=MORE)),
    (dict(compile=(True,), recompute=("elementwise",)), dict(cp=MORE)),
    (dict(batch_ramp=("4,2",)), dict(dtype=("fp16",))),
    (dict(batch_ramp=("4,2",)), dict(global_batch_size=(4,))),
    (dict(recompute=("selective",)), dict(attention=("fused",))),
    (dict(attention=("scores",)), dict(cp=MORE)),
    (dict(attention=("scores",)), DOCUMENTS),
    (dict(attention=("scores",)), dict(window=(5,))),
    (dict(window=(5,)), DOCUMENTS),
    (dict(cp_kernel=("cudnn",)), DOCUMENTS),
    (dict(cp_kernel=("cudnn",)), dict(window=(5,))),
    (dict(ep_overlap=(True,)), DOCUMENTS),
    (dict(ep_overlap=(True,)), dict(dropout=(0.2,))),
    (dict(ep_overlap=(True,)), dict(batch_ramp=("4,2",))),
    (dict(ep_overlap=(True,)), dict(compile=(True,))),
    (dict(ep_overlap=(True,)), dict(loss_chunk=(5,))),
    (dict(ep_overlap=(True,)), dict(zero=(3,), zero_keep=(False,))),
    (dict(ep_overlap=(True,)), dict(zero_keep_mb=(0.06,))),
    (dict(ep_overlap=(True,)), dict(schedule=("interleaved", "rounds"), chunks=(1,))),  # these are 1F1B
    (dict(window=(5,)), dict(cp=MORE, cp_mode=("zigzag", "allgather", "usp", "balanced"))),
    (dict(capacity_factor=(0.6,)), DOCUMENTS | dict(cp_mode=("balanced",))),
]
ROUNDING = [  # legal, but one process does not say what is right
    # Nothing but rounding is the gradient of experts that no token visits, and Adafactor divides it by itself.
    (dict(optimizer=("adafactor",)), dict(balance=("none", "bias"))),
]
NOWHERE = {("sync", "torch"): STEPS[5:]}  # values that these steps refuse, whatever is beside them
FEW = 6000  # pairs
TUNED = {"lr", "steps", "n_layers"}  # of a row: to show a difference
ALONE = {"dataset", "dtype", "compile"}  # rows with one of these are about more than the flag
BRINGS = {("recompute", "selective"): dict(attention="scores")}  # what single values are refused without
# Values that --dry-run refuses.
UNCOUNTED = {"documents": ("mask", "reset"), "batch_ramp": ("4,2",), "ep_overlap": (True,)}


@lru_cache
def flags_of(step: str) -> dict[str, Flag]:
    """The lines of the table that are flags of a step, with its values."""
    known = {field.name for field in fields(compose(importlib.import_module(step)))}
    found = {name: flag for name, flag in FLAGS.items() if name in known}
    for (name, value), steps in NOWHERE.items():
        if step in steps:
            found[name] = found[name]._replace(values=tuple(v for v in found[name].values if v != value))
    return found


@lru_cache
def plain(step: str) -> Options:
    """All flags of a step, as without them."""
    return {name: flag.values[0] for name, flag in flags_of(step).items()}


def met(options: Options, wanted: Options) -> bool:
    """Whether each flag has one of its wanted values; a step that lacks a flag is as if it were not set."""
    for name, values in wanted.items():  # asked a million times: `all` takes three times as long
        if (options[name] if name in options else FLAGS[name].values[0]) not in values:
            return False
    return True


def complete(step: str, given: Options) -> Options:
    """All flags of a step: the given ones, what these need or take unless that is given, the rest as without them."""
    flags = flags_of(step)
    chosen = {name: given[name] for name in flags if name in given}  # whatever the order in which they are given
    waiting = list(chosen)
    while waiting:
        flag, value = flags[name := waiting.pop()], chosen[name]
        takes = flag.takes | BRINGS.get((name, value), {})
        if value == flag.values[0] or not (flag.needs or takes):
            continue
        possible = (need for need in flag.needs if met(chosen, {name: need[name] for name in need if name in chosen}))
        need = {} if any(met(chosen, need) for need in flag.needs) else next(possible, {})
        more = {name: values[0] for name, values in need.items() if not met(chosen, {name: values})}
        legal = {name: any(met(chosen, need) for need in FLAGS[name].needs or ({},)) for name in takes}
        more |= {name: takes[name] for name in takes if legal[name]}  # --balance none has no --bias-speed
        more = {name: value for name, value in more.items() if name in flags and name not in chosen}
        chosen, waiting = chosen | more, [*waiting, *more]
    return plain(step) | chosen


def broken(options: Options) -> list[tuple[set[str], set[str]]]:
    """The lines of the table that options break: one of the first flags, and one of the second, must be named."""
    found = []
    for name in DEPENDENT & options.keys():
        flag = FLAGS[name]
        if options[name] != flag.values[0] and not any(met(options, need) for need in flag.needs):
            found.append(({name}, {other for need in flag.needs for other in need}))
    refused = [(a, b) for a, b, *only in REFUSED if met(options, a) and met(options, b) and {*only} <= options.keys()]
    return found + [(set(a), set(b)) for a, b in refused]


def ranks_of(options: Options) -> int:
    """How many ranks show what the flags do: two that share no layout, and as many more as slices need for replicas."""
    if "sync" not in options:
        return 1
    taken = options.get("pp", 1) * options.get("cp", 1) * options.get("tp", 1)
    more = options.get("zero_replicas", 1) > 1
    return taken * (max(2, 4 // taken) if more else 2 - (taken >= 4))


def fits_ranks(options: Options, most: int = 4) -> bool:
    """Whether so many ranks are enough, what divides them does, and each has whole micro-batches for a pipeline."""
    ranks, pp, cp = ranks_of(options), options.get("pp", 1), options.get("cp", 1)
    data = ranks // pp // options.get("tp", 1)
    divides = ranks // pp % options.get("ep", 1) == 0 and data % options.get("zero_replicas", 1) == 0
    ramp = options.get("batch_ramp")  # the first batch is smaller
    batches = [options["global_batch_size"], *([int(ramp.split(",")[0])] if ramp else [])]
    whole = all(batch % (data // cp * options["micro_batch_size"] * pp) == 0 for batch in batches)
    return ranks <= most and divides and whole


def comparable(options: Options, most: int = 4) -> bool:
    """Whether one process says what is right, and so many ranks show it."""
    return fits_ranks(options, most) and not any(met(options, a) and met(options, b) for a, b in ROUNDING)


def lighter(options: Options) -> Options:
    """Two layers fewer, half of the time, unless a rank has two stages, or some layers have no experts."""
    deep = options.get("schedule") in ("interleaved", "rounds", "ahead", *V) or options.get("dense_layers")
    return options if deep or "moe_every" not in options else options | dict(n_layers=options["n_layers"] - 2)


def in_company(row: Row) -> Options:
    """The flags of a row of rows.py, if some run of the default run has them all, and more; {}: it trains alone there.

    These are rows that only equal one process, exactly, with more than two flags, all of them values of the table.
    """
    flags = {name: value for name, value in (row.layout | row.base).items() if name not in TUNED}
    table = flags_of(STEPS[-1])
    known = all(name in table and value in table[name].values for name, value in flags.items())
    exact = row.does != ALL and not row.bound and not flags.keys() & ALONE and not row.layout.keys() & row.base.keys()
    if row.tier == EXHAUSTIVE or row.ranks not in (2, 4) or len(flags) < 3 or not (known and exact):
        return {}
    return flags if grow(STEPS[-1], {}, flags) else {}


def singles(step: str) -> list[tuple[str, Any]]:
    """All (flag, value) of a step."""
    return [(name, value) for name, flag in flags_of(step).items() for value in flag.values]


def pairs_of(step: str) -> Iterator[Options]:
    """All pairs of values of two flags."""
    for (a, x), (b, y) in combinations(singles(step), 2):
        if a != b:
            yield {a: x, b: y}


def covering(
    step: str, wanted: set[frozenset], seed: int = 0, most: int | None = None, whole: Iterable[Options] = ()
) -> list[Options]:
    """Few runs that have all wanted pairs, frozensets of two (flag, value), or of one; greedily, one after another.

    A run begins with the pair whose values are in most of what is left. Then it takes for each flag the value that adds
    most new pairs. It sets at most so many flags, unless its first pair needs more. If it may set any number, and few
    pairs are left, it begins with as many of them as fit. All flags of each of `whole` are in one run: the first runs
    begin with as many of these as fit.
    """
    rng, flags, left, runs = random.Random(seed), flags_of(step), set(wanted), []
    begun: list[Options] = []
    for more in sorted(whole, key=lambda options: (-len(options), str(options))):
        fitting = ((at, joined) for at, one in enumerate(begun) if (joined := join(step, one, more)))
        at, joined = next(fitting, (len(begun), join(step, {}, more)))
        begun[at : at + 1] = [joined]
    order = sorted(wanted, key=lambda pair: sorted(map(str, pair)))  # whatever the order of sets is
    rng.shuffle(order)
    while left or begun:
        open_pairs = Counter(value for pair in left for value in pair)
        if begun:
            chosen = begun.pop()
        else:
            first = max(filter(left.__contains__, order), key=lambda pair: sum(open_pairs[value] for value in pair))
            chosen = grow(step, {}, dict(first))
        for pair in order if most is None and len(left) < FEW else ():
            if pair in left:
                chosen = join(step, chosen, dict(pair)) or chosen
        names = [name for name in flags if name not in chosen]
        rng.shuffle(names)
        for name in names:
            if name in chosen:
                continue
            best = (-1, chosen | {name: plain(step)[name]})
            for value in flags[name].values:
                more = grow(step, chosen, {name: value}, most)
                if more is not None:
                    new = more.items() - chosen.items()
                    gain = sum(frozenset((one, other)) in left for one in new for other in more.items())  # or both one
                    best = max(best, (gain, more), key=lambda found: found[0])
            chosen = best[1]
        run = complete(step, chosen)
        left -= {frozenset(pair) for pair in combinations_with_replacement(run.items(), 2)}
        runs.append(run)
    return runs


def grow(step: str, chosen: Options, more: Options, most: int | None = None) -> Options | None:
    """Chosen flags with more of them, and what these need; None if that is refused, or needs too much."""
    run, flags = complete(step, chosen | more), flags_of(step)
    n_set = sum(value != flags[name].values[0] for name, value in run.items())
    if broken(run) or not comparable(run) or (most is not None and n_set > most):
        return None
    return {
        name: value for name, value in run.items() if name in chosen or name in more or value != flags[name].values[0]
    }


def join(step: str, chosen: Options, more: Options) -> Options | None:
    """`grow`, unless one contradicts the other."""
    agree = all(chosen.get(name, value) == value for name, value in more.items())
    return grow(step, chosen, more) if agree else None
