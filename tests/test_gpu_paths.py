"""What GPUs would run, without one: every step on fake CUDA tensors, as several ranks of 8 (tests/fake_cuda.py).

Seen are devices and dtypes that do not go together, waits of the host for the GPU, the order in which the ranks launch
their collectives, and how many graphs --compile makes. The runs are made by two processes, which load a shim of C++.
"""

import dataclasses
import importlib
import json
import random
import typing
from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from typing import Literal

import pytest
import torch

from common import UserError
from services.checks import check
from services.fake_device import build_shim
from tests import fake_cuda
from tests.fake_cuda import STEPS, WORLD, Call, stuck
from tests.jobs import Forked, as_flags

WAITS = {step: 0 for step in range(1, 7)} | {7: 1}  # of the host for the GPU in a micro-batch: per layer with experts

# Every flag that changes what happens to a tensor, and the values to try, the default first.
VALUES = dict(
    dtype=("bf16", "fp16", "fp32"),
    grad_dtype=("fp32", "same"),
    recompute=("none", "selective", "full"),
    optimizer=("adamw", "sgd", "adafactor", "muon"),
    tied=(False, True),
    n_kv_heads=(2, 4, 1),
    grad_clip=(1.0, 0.0),
    log_ranks=(False, True),
    fuse_gradients=(False, True),
    sync=("bucket", "naive", "overlap"),
    bucket_mb=(25.0, 0.01),
    compress=("none", "bf16", "int8", "topk"),
    check_replicas=(0, 1),
    zero=(1, 0, 2, 3),
    zero_replicas=(1, 2),
    offload_optimizer=("none", "cpu", "disk"),
    offload_params=("none", "cpu"),
    tp=(2, 1, 4),
    sp=(True, False),
    tp_overlap=(True, False),
    compress_activations=("none", "int8"),
    documents=("off",),
    cp=(2, 1, 4),
    cp_mode=("zigzag", "ring", "allgather", "ulysses"),
    pp=(2, 1, 4),
    schedule=("1f1b", "afab", "interleaved", "zb-h1", "zb-h2", "zb-auto", "zbv", "dualpipe"),
    experts_per_token=(2, 1),
    shared_experts=(0, 1),
    moe_every=(1, 2),
    dense_layers=(0, 1),
    expert_groups=(1, 4),
    groups_per_token=(0, 2),
    ep=(2, 1, 4),
    ep_mode=("alltoall", "allgather"),
    capacity_factor=(0.0, 1.0),
    balance=("loss", "bias", "none"),
    z_loss=(0.0, 0.1),
)
NEEDS = dict(
    sp="tp", tp_overlap="tp", compress_activations="tp", cp_mode="cp", schedule="pp", ep_mode="ep"
)  # a flag, and what must be above 1
# Values that are left out: chosen by the machine, or not for a GPU; not NCCL; C++ that wants the numbers themselves; of
# the frame around a run; --compile, whose graphs are counted below.
LEFT_OUT = dict(dtype=("auto", "fp64"), device=("auto", "cpu"), backend=("auto", "gloo"), sync=("torch",))
LEFT_OUT |= dict(toy=(False, True), save_async=(False, True), compile=(False, True))
LEFT_OUT |= dict(documents=("mask", "reset"), compress_activations=("bf16",))  # no fake token is END; for fp32 alone


def config_of(step: int) -> type:
    """A step's Config."""
    return importlib.import_module(STEPS[step - 1]).Config


def flags_of(step: int) -> dict[str, tuple]:
    """The flags of a step that change what happens to a tensor, with the values to try."""
    fields = {field.name for field in dataclasses.fields(config_of(step))}
    return {flag: values for flag, values in VALUES.items() if flag in fields}


def complete(step: int, options: dict) -> dict:
    """Options with those that make a run small: two micro-batches a rank, and a validation at the end."""
    world = 1 if step == 1 else WORLD
    dp = max(1, world // prod(options.get(dim, 1) for dim in ("pp", "cp", "tp")))
    small = dict(model="tiny-moe", dim=64, ffn_dim=192, expert_dim=96) if step == 7 else dict(model="debug")
    small |= dict(
        n_layers=2 * options.get("pp", 1), n_heads=8, seq_len=64, micro_batch_size=1, global_batch_size=2 * dp
    )
    small |= dict(device="cuda", eval_every=2, eval_sequences=dp, save_every=0)
    return small | (dict(backend="nccl") if world > 1 else {}) | options


def legal(step: int, options: dict) -> bool:
    """Whether the step takes these flags on 8 ranks."""
    if prod(options.get(dim, 1) for dim in ("pp", "cp", "tp")) > WORLD:
        return False  # `check` would say so, too, after a while
    try:
        check(config_of(step)(**complete(step, options)), 1 if step == 1 else WORLD)
    except UserError:
        return False
    return True


def draw(step: int, rng: random.Random, fixed: dict, usual: float = 0.4) -> dict:
    """A drawn choice of flags, `fixed` among them, that the step takes; `usual`: how often a flag is at its default."""
    flags = flags_of(step)
    for _ in range(20000):
        options = {f: values[0] if rng.random() < usual else rng.choice(values) for f, values in flags.items()} | fixed
        if legal(step, options):
            return options
    raise AssertionError(f"step {step} takes {fixed} under no choice of the other flags")


def taken(options: dict) -> set[tuple]:
    """The (flag, value) that matter: not the --cp-mode of --cp 1."""
    return {(flag, value) for flag, value in options.items() if options.get(NEEDS.get(flag)) != 1}


def cover(step: int, flags: set[str], tries: int) -> list[dict]:
    """Drawn choices of flags in which each value of some flags of a step occurs and matters: few, after many tries."""
    rng, chosen = random.Random(step), []
    missing = {(flag, value) for flag, values in flags_of(step).items() if flag in flags for value in values}
    while missing:
        flag, value = min(missing, key=str)
        fixed = {flag: value} | ({NEEDS[flag]: 2} if flag in NEEDS else {})
        found = [draw(step, rng, fixed, 0.2) for _ in range(tries)]
        chosen.append(max(found, key=lambda options: len(missing & taken(options))))
        missing -= taken(chosen[-1])
    return chosen


def path(step: int, number: int, options: dict) -> dict:
    """The case of one rank; every other one takes a second step, too."""
    options = complete(step, options) | dict(steps=2 - number % 2)
    return dict(kind="path", step=step, options=options, rank=number * 3 % WORLD if step > 1 else 0)


def paths(name: str, step: int, flags: set[str], tries: int = 3) -> dict[str, dict]:
    """The cases that cover some flags of a step."""
    return {f"step{step}-{name}{n}": path(step, n, options) for n, options in enumerate(cover(step, flags, tries))}


# By default step 7 tries every flag, and the others one draw of the flags that they bring, among all of theirs.
PATHS, MORE_PATHS = paths("", 1, {*flags_of(1)}) | paths("", 7, {*flags_of(7)}, tries=10), {}
for number in range(2, 7):
    own = list(paths("", number, flags_of(number).keys() - flags_of(number - 1).keys()).items())
    PATHS |= dict(own[:1])
    MORE_PATHS |= dict(own[1:]) | paths("all-", number, {*flags_of(number)})
for name, case in PATHS.items():  # by default, a second step is taken by the first cases of steps 1 and 7 alone
    case["options"]["steps"] = 2 if name in ("step1-0", "step7-0") else 1


def order(step: int, number: int, **fixed) -> dict:
    """The case of all ranks of a drawn layout: one step, which trains, and a validation."""
    options = complete(step, draw(step, random.Random(f"{step}:{number}"), fixed)) | dict(steps=1, eval_every=1)
    return dict(kind="order", step=step, options=options)


# All dimensions of a step that has them are more than 1; what else there is, is drawn.
CUT = {
    4: dict(tp=2),
    5: dict(tp=2, cp=2),
    6: dict(tp=2, cp=2, pp=2),
    7: dict(tp=2, cp=2, pp=2, ep=2, ep_mode="alltoall"),
}
ORDERS = {"order7-0": order(7, 0, **CUT[7], n_layers=2)}
MORE_ORDERS = {f"order{step}-{n}": order(step, n, **CUT[step]) for step in CUT for n in range(4)}
MORE_ORDERS |= {f"order6-{name}": order(6, 2, pp=4, cp=1, tp=2, schedule=name) for name in VALUES["schedule"]}
MORE_ORDERS |= {"order6-zbv": order(6, 1, pp=4, cp=1, tp=2, schedule="zbv", zero=3)}
MORE_ORDERS = {name: case for name, case in MORE_ORDERS.items() if name not in ORDERS}

BROKEN = {
    "reversed_on_ranks_0_and_5": dict(
        kind="order", step=6, options=complete(6, dict(pp=2, cp=1, tp=2, steps=1, n_layers=2))
    ),
    "item_in_a_micro_batch": path(3, 2, {}),
    "table_on_the_host": path(4, 1, dict(tp=2)),
    "message_on_the_host": path(4, 1, dict(tp=2)),
}

OFFLOADS = dict(optimizer=dict(zero=1, offload_optimizer="cpu"), both=dict(zero=3, offload_optimizer="cpu"))
OFFLOADS["both"] |= dict(offload_params="cpu")
OFFLOADS["alone"] = OFFLOADS["both"] | dict(zero_replicas=WORLD)  # slices of a group of one: no collective gathers them
OFFLOADED = {f"offloaded-{name}": path(3, 0, options) for name, options in OFFLOADS.items()}
EARLY = dict(
    host_does_not_wait="step03_zero.py", copies_do_not_wait="in offload.py", weights_not_waited_for="mm in model"
)
BROKEN |= {name: path(3, 0, OFFLOADS["both"]) for name in EARLY}

DENSE = dict(model="debug", n_layers=10, seq_len=64, experts=0, tp=1, cp=1, ep=1)
LAYERS = dict(
    whole=DENSE,
    tp=DENSE | dict(tp=2),
    no_sp=DENSE | dict(tp=2, sp=False),
    cp=DENSE | dict(cp=2),
    moe=DENSE | dict(model="tiny-moe", experts=8),
    all=DENSE | dict(model="tiny-moe", experts=8, tp=2, cp=2),
)
GRAPHS = {
    f"{name}-{mode}": dict(kind="graphs", options=options | dict(recompute=mode))
    for name, options in LAYERS.items()
    for mode in VALUES["recompute"]
}
HEADS = {f"heads-{dtype}": path(1, 1, dict(dtype=dtype, n_kv_heads=2)) for dtype in ("bf16", "fp32")}
IN_FLIGHT = {
    f"in-flight-{schedule}": path(
        6, 0, dict(pp=4, cp=1, tp=2, n_layers=8, schedule=schedule, global_batch_size=6, zero=0)
    )
    | dict(memory=True)
    for schedule in ("afab", "1f1b")
}
CASES = (
    HEADS
    | IN_FLIGHT
    | OFFLOADED
    | PATHS
    | MORE_PATHS
    | ORDERS
    | MORE_ORDERS
    | {name: case | dict(fault=name) for name, case in BROKEN.items()}
    | GRAPHS
)


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, dict]:
    """What all selected cases came to, by name."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs and has hooks of its own: fake CUDA tensors want a CPU build")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = list(dict.fromkeys(name for item in here for name in item.callspec.params.get("cases", ())))
    names.sort(key=lambda name: CASES[name]["kind"])  # those of eight ranks in turn, for equal halves
    folder = tmp_path_factory.mktemp("fake-cuda")
    if build_shim() is None:
        pytest.skip("no g++ to build services/fake_cuda.cpp with")
    found, jobs = {}, []
    with ExitStack() as stack:
        for half in (names[::2], names[1::2]):
            cases, lines = (folder / f"{name}-{len(jobs)}" for name in ("cases", "results"))
            cases.write_text(json.dumps({name: CASES[name] for name in half}))
            job = Forked(fake_cuda.main, str(cases), str(lines))
            stack.callback(job.process.kill)
            jobs.append((job, half, lines))
        for job, half, lines in jobs:
            text, _ = job.communicate()
            rows = map(json.loads, lines.read_text().splitlines() if lines.exists() else ())
            found |= {name: dict(error=f"its process ended with {job.wait(60)}:\n{text[-3000:]}") for name in half}
            found |= {row["name"]: row for row in rows}
    return found


def succeeded(results: dict, name: str) -> dict:
    """What a case came to. Fails with its flags and its traceback, if it raised."""
    words = as_flags({k: v for k, v in CASES[name]["options"].items() if v is not None})
    assert "error" not in results[name], " ".join(words) + "\n" + results[name]["error"]
    return results[name]


def require_few_waits(found: dict, step: int):
    """The host waits as often as WAITS says, for each time that a layer with experts runs."""
    assert sum(found["waits"].values()) <= WAITS[step] * found["moe_forwards"], found["waits"]


def each(names: Iterable[str], more: Iterable[str] = ()) -> pytest.MarkDecorator:
    """A test for each of these cases, and exhaustive ones for `more`."""
    cases = [pytest.param([name], id=name) for name in names]
    cases += [pytest.param([name], id=name, marks=pytest.mark.exhaustive) for name in more]
    return pytest.mark.parametrize("cases", cases)


@each(PATHS, MORE_PATHS)
def test_a_rank_trains_and_validates_without_a_mismatch(results, cases):
    """No operator and no collective meets devices, dtypes or sizes that do not go together."""
    found = succeeded(results, *cases)
    assert found["calls"][0] > 0 or CASES[cases[0]]["step"] == 1


@each(PATHS, MORE_PATHS)
def test_the_host_does_not_wait_in_micro_batches(results, cases):
    """From the first forward to the sums of gradients, the host runs ahead of the GPU; once a layer it needs counts."""
    require_few_waits(succeeded(results, *cases), CASES[cases[0]]["step"])


@each(PATHS, MORE_PATHS)
def test_rows_are_added_in_a_fixed_order(results, cases):
    """Atomics add rows in any order, and tensor-parallel ranks that compute the same could drift apart."""
    assert succeeded(results, *cases)["unordered"] == []


@each(PATHS, MORE_PATHS)
def test_nothing_is_read_before_it_arrives(results, cases):
    """Streams, NCCL and the host wait for what another one of them writes."""
    assert succeeded(results, *cases)["early"] == []


@each(OFFLOADED)
def test_offloaded_units_travel_beside(results, cases):
    """Gradients to the host and, with --offload-params, weights to the GPU are copied on streams of their own.

    Also where each rank holds all slices: then no collective, whose end is waited for, follows the copy.
    """
    found = succeeded(results, *cases)
    assert found["early"] == [] and found["beside"][0] > 0


@each(EARLY)
def test_a_stream_that_does_not_wait_is_found(results, cases):
    """The host reads a gradient, or a copy takes one, or NCCL gathers weights, before it is there."""
    early = succeeded(results, *cases)["early"]
    assert any(EARLY[cases[0]] in where for where in early), early


@pytest.mark.parametrize("cases", [[*HEADS]])
def test_fused_attention_gets_heads_that_it_takes(results, cases):
    """In 16 bits CUDA's kernels group query heads; in fp32 they do not, and PyTorch would keep all scores in memory."""
    found = {name: succeeded(results, name)["heads"] for name in cases}
    assert found == {"heads-bf16": [[8, 2]], "heads-fp32": [[8, 8]]}


@pytest.mark.parametrize("cases", [[*IN_FLIGHT]])
def test_activations_of_all_micro_batches_in_flight_are_measured(results, cases):
    """On a GPU, too: rank 0 of 4 stages holds six micro-batches with afab and four with 1f1b, not its last one alone.

    (The bytes themselves are not CUDA's: a fake attention keeps other tensors than a fused kernel.)
    """
    measured = {name: succeeded(results, name)["measured"]["activations"] for name in cases}
    assert measured["in-flight-afab"] / measured["in-flight-1f1b"] == pytest.approx(6 / 4, rel=0.02)


@each(ORDERS)
def test_all_ranks_launch_in_an_order_that_ends(results, cases):
    """Carried out as if each call blocked its rank until all others make it, in training and in validation."""
    assert succeeded(results, *cases)["stuck"] == []


@pytest.mark.exhaustive
@each(MORE_ORDERS)
def test_more_layouts_launch_in_an_order_that_ends(results, cases):
    """The same for more drawn layouts."""
    assert succeeded(results, *cases)["stuck"] == []


@each(["reversed_on_ranks_0_and_5"])
def test_a_swapped_pair_of_collectives_is_found(results, cases):
    """Two ranks sum over pp before tp, the others over tp before pp: each of 0, 1, 4, 5 waits for the next of them."""
    found = {line.split(",")[0]: line for line in succeeded(results, *cases)["stuck"]}
    for rank, group in ((0, "pp [0, 4]"), (4, "tp [4, 5]"), (5, "pp [1, 5]"), (1, "tp [0, 1]")):
        assert f"allreduce of (1, 'torch.float64') over {group}" in found[f"rank {rank}"]


@each(["item_in_a_micro_batch"])
def test_an_item_in_a_micro_batch_is_found(results, cases):
    """Once for each of the two micro-batches of both steps, with its place; not in validation."""
    ((where, count),) = succeeded(results, *cases)["waits"].items()
    assert where.startswith("item in step03_zero.py") and "lm_head.loss" in where and count == 4


@each(["table_on_the_host"])
def test_a_tensor_on_the_host_is_found(results, cases):
    """An operator of two devices raises where it stands."""
    error = results[cases[0]]["error"]
    assert "in apply_rope" in error and "same device" in error


@each(["message_on_the_host"])
def test_a_message_on_the_host_is_found(results, cases):
    """NCCL would refuse it."""
    assert "allreduce_ gets a tensor on cpu" in results[cases[0]]["error"]


def modes(name: str) -> list[str]:
    """The cases of one kind of layer."""
    return [f"{name}-{mode}" for mode in VALUES["recompute"]]


@pytest.mark.picked(5)
@pytest.mark.parametrize("cases", [pytest.param(modes(name), id=name) for name in LAYERS])
def test_compile_makes_graphs_whatever_is_recomputed(results, cases):
    """As many with recomputation as without, and as many for ten layers as for one (no recompilation is given up)."""
    none, *others = (succeeded(results, name) for name in cases)
    assert none["graphs"] == 1 if cases == modes("whole") else none["graphs"] > 1
    for found in (none, *others):
        assert found["graphs"] == none["graphs"] <= 8 and not found["given_up"]


def test_every_flag_that_has_choices_is_tried():
    """A new choice of a flag has to be tried, or left out with a reason."""
    for flag, kind in typing.get_type_hints(config_of(7)).items():
        choices = (False, True) if kind is bool else typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        tried = {case["options"].get(flag) for case in PATHS.values()}
        assert {*choices} <= tried | {*LEFT_OUT.get(flag, ())}, flag


def test_stuck_names_what_never_ends():
    """Two ranks, two communicators: the same order ends, the other order does not, nor does a lone or a longer call."""
    a, b = (Call("allreduce", name, name, (0, 1), (4, "torch.float32")) for name in "ab")
    assert stuck([[a, b], [a, b]]) == []
    assert stuck([[a, b], [b, a]]) == [f"rank 0, call 0: {a}", f"rank 1, call 0: {b}"]
    assert len(stuck([[a, b], [a]])) == 1 and len(stuck([[a], [a._replace(what=(5, "torch.float32"))]])) == 2
    to, back = (
        [Call("messages", "pp", "pp", (0, 1), ((kind, peer, 4, "f"),))] for kind, peer in (("send", 1), ("recv", 0))
    )
    assert stuck([to, back]) == [] and len(stuck([to, [back[0]._replace(what=(("send", 0, 4, "f"),))]])) == 2
    both = [[Call("messages", "cp", "cp", (0, 1), (("send", p, 4, "f"), ("recv", p, 4, "f")))] for p in (1, 0)]
    assert stuck(both) == []  # a ring: one batch
    assert len(stuck([[c._replace(what=(m,)) for c in calls for m in c.what] for calls in both])) == 2  # one by one
