"""Step 3, ZeRO: step03_zero.py, and the gradient norm of common/layout.py.

A *unit* is E (the embedding), 0, 1, ... (a layer) or H (the last norm and the head)."""

import math
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import step03_zero as step
from common.comm import Group, Mesh, all_gather, all_reduce, reduce_scatter
from common.layout import Shard, global_norm, layout_of, note_layout
from common.model import PRESETS, Decoder
from step01_single_gpu import set_up_layers
from tests.equal import BASE, Watch, close, decoder, draw, equals_step1
from tests.tape import Live, Tape, memory_of, tensors_in, traced_graphs

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
CPU = torch.device("cpu")
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
STAGES = [pytest.param(stage, marks=task(f"stage {stage}", 4)) for stage in (1, 2, 3)]


def held(x: Tensor) -> int:
    """Bytes of a tensor's memory; 0 if it has none."""
    return 0 if x.is_meta else x.untyped_storage().nbytes()


# --- Units ----------------------------------------------------------------------------------------

UNITS = [
    # rank of three, and its part of matrix "a", 1 to 6, of "b", 7, and of "c", 8
    (0, [1.0, 2.0, 3.0], [], [], [1.0, 2.0, 3.0]),
    (1, [4.0, 5.0, 6.0], [], [], [4.0, 5.0, 6.0]),
    (2, [], [7.0], [8.0], [7.0, 8.0, 0.0]),  # a shard ends in padding
]


def unit_of(rank: int) -> step.Unit:
    """A unit of eight elements on three ranks."""
    named = {
        "a": nn.Parameter(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])),
        "b": nn.Parameter(torch.tensor([7.0])),
        "c": nn.Parameter(torch.tensor([8.0])),
    }
    return step.Unit(named, Group("dp", rank, 3, None))


@task("units", 3)
@cases("rank, a, b, c, shard", UNITS)
def test_a_rank_has_a_shard_of_a_unit(rank, a, b, c, shard):
    """A unit is cut into equal shards; `own_part` is a parameter's part of a shard, a view."""
    unit = unit_of(rank)
    close(unit.shard, torch.tensor(shard), "the shard")
    parts = {name: unit.own_part(unit.shard, name) for name in "abc"}
    for name, part in dict(a=a, b=b, c=c).items():
        close(parts[name], torch.tensor(part), f"the part of {name}")
        parts[name].zero_()
    close(unit.shard, torch.zeros(3), "the shard after its parts were zeroed")


@task("units", 2)
def test_unit_names():
    """The units are E, each layer, and H; parameters of another group are a unit of their own."""
    model = decoder(n_layers=11)
    mlp = model.model.layers["10"].mlp
    for param in mlp.parameters():
        note_layout(param, data_group="experts")
    sizes = [(names[0], len(names)) for names in step.unit_names(model)]
    expected = [("model.embed_tokens.weight", 1)]
    for layer in range(10):
        expected.append((f"model.layers.{layer}.input_layernorm.weight", 9))
    expected.append(("model.layers.10.input_layernorm.weight", 6))
    expected.append(("model.layers.10.mlp.gate_proj.weight", 3))
    expected.append(("model.norm.weight", 2))
    close(sizes, expected, "first name of each unit, and its number of parameters")


@ranks(3)
@task("gather", 6)
def test_gather_and_free():
    """`gather` starts one all-gather, unless the unit is whole; `free` waits for it, if need be."""
    param = nn.Parameter(torch.full((3, 2), 7.0, dtype=FP64))
    unit = step.ShardedUnit(dict(p=param), Mesh(dp=3)["dp"])
    unit.shard *= 10
    close(held(param), 0, "bytes at first")
    with Tape() as tape:
        unit.gather()
        unit.gather()
    close((tape.sent, len(tape.left)), (2 * 2 * 8, 1), "bytes sent, and messages in flight")
    unit.gathering.wait()
    close(param, torch.full((3, 2), 70.0), "the parameter, from the current shards")
    unit.free()
    unit.free()
    close(held(param), 0, "bytes after free")
    with Tape() as tape:
        unit.gather()
        unit.free()
    close((tape.left, held(param)), ([], 0), "messages in flight, and bytes")


# --- Gradients ------------------------------------------------------------------------------------


def nothing(model: Decoder):
    """Leave a model as it is."""


def use_experts(model: Decoder):
    """Sum the gradients of layer 1's MLP over the group "experts"."""
    for param in model.model.layers["1"].mlp.parameters():
        note_layout(param, data_group="experts")


def zero_of(
    stage: int, n: int, change: Callable = nothing, dtype: torch.dtype = FP64, **flags: Any
) -> tuple[Decoder, Any, Any, Mesh]:
    """A model, its optimizer and sync, and the mesh. The groups "experts" are [0] and [1, ...].

    `flags` may have sizes of the model."""
    sizes = {name: flags.pop(name) for name in vars(PRESETS["tiny"]) if name in flags}
    model = decoder(change, None, **sizes)
    mesh = Mesh(dp=n)
    if n > 1:
        for row in ([0], list(range(1, n))):
            mesh.add_groups("experts", np.array([row]), queue="gradients")
    config = step.Config(zero=str(stage), **flags)
    set_up_layers(model, config)
    return model, *step.make_optimizer(model, config, mesh, CPU, dtype), mesh


def loss_of(model: Decoder, rank: int, micro: int = 0, number: int = 0) -> Tensor:
    """The loss of two sequences of a rank, in micro-batch `micro` of step `number`."""
    tokens = (draw(f"tokens {micro} {number}", rank, 2, 6).abs() * 5).long() % 13
    return model(tokens, tokens.flip(1))


def own_parts(whole: dict[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    """Lay tensors out one after another, cut into n equally long shards: a rank's part of each."""
    length = math.ceil(sum(x.numel() for x in whole.values()) / n)
    parts = {}
    start = 0
    for name, x in whole.items():
        owner = torch.arange(start, start + x.numel()) // length
        parts[name] = x.flatten()[owner == rank]
        start += x.numel()
    return parts


def summed_gradients(members: list[int], number: int) -> dict[str, Tensor]:
    """A whole model's bf16 gradients, added up in fp32 over two micro-batches of each rank."""
    model = decoder(use_experts, BF16)
    sums = {name: torch.zeros_like(param, dtype=FP32) for name, param in model.named_parameters()}
    for rank in members:
        for micro in range(2):
            model.zero_grad()
            loss_of(model, rank, micro, number).backward()
            for name, param in model.named_parameters():
                sums[name] += param.grad
    return sums


def expected_parts(model: Decoder, rank: int, number: int) -> dict[str, Tensor]:
    """A rank's part of each gradient, summed over the group of its unit."""
    members = dict(dp=[0, 1, 2], experts=[1, 2] if rank > 0 else [0])
    sums = {group: summed_gradients(members[group], number) for group in members}
    parts = {}
    for names in step.unit_names(model):
        group = layout_of(model.get_parameter(names[0])).data_group
        whole = {name: sums[group][name] for name in names}
        parts |= own_parts(whole, members[group].index(rank), len(members[group]))
    return parts


@ranks(3)
@cases("stage", STAGES)
def test_a_rank_gets_its_parts_of_summed_gradients(stage):
    """Over two micro-batches and the ranks of its data_group, in each of two steps; in fp32.

    Weights are bf16. Experts' groups are [0] and [1, 2]."""
    model, zero, _, mesh = zero_of(stage, 3, use_experts, BF16)
    for number in range(2):
        with Tape() as tape:
            zero.begin(2)
            for micro in range(2):
                loss_of(model, mesh.rank, micro, number).backward()
            zero.finish()
        close(tape.left, [], "messages that were never waited for")
        found = zero.gradients()
        expected = expected_parts(model, mesh.rank, number)
        close(sorted(found), sorted(expected), "names of the gradients")
        for name, part in expected.items():
            close(found[name], part, f"step {number}: {name}", 3, 1e-6)
        zero.zero_grad()


@cases("stage", [1, 3])
def test_compile_makes_two_graphs_of_bf16_weights(monkeypatch, stage):
    """One of all layers, one of the loss, although weights are made after layers are set up."""
    graphs = traced_graphs(monkeypatch)
    model, _, sync, _ = zero_of(stage, 1, nothing, BF16, compile=True)
    sync.begin(2)
    for micro in range(2):
        loss_of(model, 0, micro).backward()
    sync.finish()
    close(len(graphs), 2, "graphs")


WRONG = [
    # stage, micro-batches announced, micro-batches made
    pytest.param(1, 1, 2, marks=task("stage 1", 1)),
    pytest.param(1, 2, 1, marks=task("stage 1", 1)),
    pytest.param(2, 1, 2, marks=task("stage 2", 1)),
]


@cases("stage, announced, made", WRONG)
def test_another_number_of_micro_batches_is_refused(stage, announced, made):
    """At the first gradient too many, or in `finish`: a sum would lack gradients."""
    model, zero, _, _ = zero_of(stage, 1)
    zero.begin(announced)
    with pytest.raises(RuntimeError):
        for _ in range(made):
            loss_of(model, 0).backward()
        zero.finish()


IN_ANY_ORDER = [
    pytest.param(1, marks=task("stage 1", 1)),
    pytest.param(2, marks=task("stage 2", 1)),
]


@cases("stage", IN_ANY_ORDER)
def test_gradients_may_come_in_any_order(stage):
    """A parameter's two gradients come before the next one's first: all are summed."""
    model, zero, _, _ = zero_of(stage, 1)
    zero.begin(2)
    for param in model.parameters():
        for factor in (3, 5):
            (factor * param.sum()).backward()
    zero.finish()
    for name, gradient in zero.gradients().items():
        close(gradient, torch.full_like(gradient, 8.0), name)


# --- Updates and the norm -------------------------------------------------------------------------


UPDATES = [
    pytest.param(1, marks=task("update", 4)),
    pytest.param(2, marks=task("update", 4)),
    pytest.param(3, marks=task("stage 3", 1)),
]


@ranks(2)
@cases("stage", UPDATES)
def test_the_example_of_the_docstring(stage):
    """Weights 1 2 3 4; gradients 5 and 20, whose sum is 25; rate 0.1: -1.5 -0.5 0.5 1.5."""
    sizes = dict(vocab_size=2, dim=2, n_heads=1, n_kv_heads=1, n_layers=1)
    flags = dict(optimizer="sgd", weight_decay=0.0, **sizes)
    model, zero, _, mesh = zero_of(stage, 2, dtype=BF16, **flags)
    name = "model.embed_tokens.weight"
    own_weights = [[1.0, 2.0], [3.0, 4.0]][mesh.rank]
    zero.masters[name].copy_(torch.tensor(own_weights))
    zero.publish()
    zero.begin(1)
    tokens = torch.tensor([0, 1])
    rows = model.model.embed_tokens(tokens)
    others = model(tokens[None], tokens[None])  # times 0: each parameter needs a gradient
    (rows.sum() * [5.0, 20.0][mesh.rank] + 0 * others).backward()
    zero.finish()
    close(zero.gradients()[name], torch.tensor([25.0, 25.0]), "the shard of the sum", 2)
    zero.step(0.1)
    updated = torch.tensor([[-1.5, -0.5], [0.5, 1.5]])
    with torch.no_grad():
        close(model.model.embed_tokens(tokens), updated, "weights, updated")


@ranks(2)
@task("update", 2)
@cases("stage", [1, 3])
def test_masters_keep_updates_that_bf16_would_lose(stage):
    """Ten updates by 1e-5 move each master of the last norm, and of the head, by 1e-4."""
    _, zero, _, _ = zero_of(stage, 2, dtype=BF16, optimizer="sgd", weight_decay=0.0)
    start = zero.units[-1].master.clone()
    for _ in range(10):
        for unit in zero.units:
            unit.summed_grad = -torch.ones(unit.length)
        zero.step(1e-5)
    close(zero.units[-1].master, start + 1e-4, "the masters", bound=1e-6)


TP = dict(shards=(Shard(0, "tp", 0, 1, 2),))
EP = dict(shards=(Shard(0, "ep", 0, 1, 2),), data_group="expert_data")
NORMS = [
    # sizes of the mesh; whether ZeRO is on; and of two parameters the record, and what each of four
    # ranks holds: together 1, 2, 2 of the first and 4 of the second, so the norm is 5
    (dict(dp=2, tp=2), False, TP, [[1, 2], [2], [1, 2], [2]], {}, [[4], [4], [4], [4]]),
    (dict(dp=2, tp=2), True, TP, [[1], [2], [2], []], {}, [[4], [4], [], []]),
    (
        dict(dp=2, cp=2),
        True,
        {},
        [[1, 2], [1, 2], [2], [2]],
        dict(data_group="data"),
        [[4], [], [], []],
    ),
    (
        dict(dp=2, pp=2, cp=1),
        False,
        {},
        [[1, 2], [2], [1, 2], [2]],
        dict(stage_copies=2),
        [[4]] * 4,
    ),
    (dict(dp=4, cp=1), True, EP, [[1], [2], [2], []], dict(data_group="data"), [[4], [], [], []]),
]


@ranks(4)
@cases("sizes, sharded, first, first_values, second, second_values", NORMS)
def test_global_norm(sizes, sharded, first, first_values, second, second_values):
    """Each element counts once, however many ranks hold it. A rank may hold no elements."""
    mesh = Mesh(**sizes)
    if "cp" in sizes:
        mesh.join("data", "dp", "cp", queue="gradients")
    mesh.add_groups("ep", np.array([[0, 1], [2, 3]]), queue="gradients")
    mesh.add_groups("expert_data", np.array([[0, 2], [1, 3]]), queue="gradients")
    model = nn.ParameterDict(dict(first=torch.zeros(1), second=torch.zeros(1)))
    note_layout(model.first, **first)
    note_layout(model.second, **second)
    values = dict(first=first_values[mesh.rank], second=second_values[mesh.rank])
    gradients = {name: torch.tensor(x, dtype=FP64) for name, x in values.items()}
    close(global_norm(model, gradients, mesh, sharded), 5.0, "the norm", 2)


# --- What is held, and what is sent ---------------------------------------------------------------

P = 804_224  # parameters of tiny
MEMORY = [
    (1, BF16, 10 * P),  # 6 + 16/4
    (2, BF16, 6 * P),  # 2 + 16/4
    (3, BF16, 3_619_008),  # 18/4
    (1, FP32, 11 * P),  # 8 + 12/4
    (2, FP32, 7 * P),  # 4 + 12/4
    (3, FP32, 4 * P),  # 16/4
]


@ranks(4)
@cases("stage, dtype, nbytes", MEMORY)
def test_law_of_memory(stage, dtype, nbytes):
    """What each of four ranks holds of tiny after a backward: the docstring's table."""
    with Live() as live:
        model, optimizer, sync, mesh = zero_of(stage, 4, dtype=dtype, **vars(PRESETS["tiny"]))
        for _ in range(2):  # the optimizer has moments from its first update on
            sync.begin(1)
            loss_of(model, mesh.rank).backward()
            sync.finish()
            found = live.bytes
            optimizer.step(0.1)
            optimizer.zero_grad()
    close(found, nbytes, "bytes")


MESSAGES = [
    # flags, dtype, and 3/4 x (bytes of gathers and sums + 24) for two micro-batches
    (dict(zero="1"), "fp32", 4_825_362),  # 2 P numbers
    (dict(zero="2"), "fp32", 7_238_034),  # 3 P
    (dict(zero="3"), "fp32", 14_080_530),  # 2 (3 P - 65,920), which is 3,520,128 x 4/3
    (dict(zero="3"), "bf16", 9_452_946),  # 2 (2 P - 65,920) of 2 bytes, 2 P of 4
    (dict(zero="3", model="tiny,tied=True,seq_len=8"), "fp32", 13_883_154),  # 2 (3 x 771,328 - 128)
    (dict(zero="3", keep=True), "fp32", 7_238_034),  # 3 P
]


@ranks(4)
@cases("flags, dtype, nbytes", MESSAGES)
def test_law_of_messages(flags, dtype, nbytes):
    """What each of four ranks sends in a training step of tiny: the docstring's second table."""
    # Short sequences: what is sent does not depend on their length
    short = dict(model="tiny,seq_len=8", steps=1, global_batch_size=8)
    flags = BASE | short | dict(dtype=dtype) | flags
    with Watch(step.Config(**flags)) as run, Tape() as tape:
        step.train(run.config, run)
    close(run.history[0]["sent"], dict(dp=nbytes), "bytes that the run counts")
    sent = sum(size for name, size in tape.started if name != "allgather")
    close(sent, nbytes, "bytes that torch sends, without the few by which ranks agree")


@ranks(4)
def test_law_of_collectives():
    """8 MB on four ranks: an all-reduce sends 12 MB, a gather or a reduce-scatter 6 MB."""
    mesh = Mesh(dp=4)
    whole = torch.empty(2_000_000)
    shard = torch.empty(500_000)
    all_reduce(whole, mesh["dp"]).wait()
    all_gather(whole, shard, mesh["dp"]).wait()
    reduce_scatter(shard, whole, mesh["dp"]).wait()
    sent = {operation: nbytes for (_, operation), nbytes in mesh.sent.items()}
    expected = dict(all_reduce=12_000_000, all_gather=6_000_000, reduce_scatter=6_000_000)
    close(sent, expected, "bytes")


# --- When units are gathered, freed and summed ----------------------------------------------------


class UnitTape(Tape):
    """A tape of units: `events` has "gather 0", "gathered 0", "use 0" (in a matmul or embedding),
    "free 0", "sum 0", "summed 0" and so on.
    """

    def __init__(self, zero: step.Zero1):
        super().__init__()
        self.zero = zero
        self.units = dict(zip("E01H", zero.units, strict=True))
        self.whole: list[str] = []  # units that have memory
        self.endings: list[str] = []  # for each message
        self.most_gradients = 0

    def look(self):
        """Record which units have been freed since the last look."""
        before = self.whole
        self.whole = [name for name, unit in self.units.items() if held(unit.flat)]
        self.events += [f"free {name}" for name in before if name not in self.whole]
        gradients = [unit.local_grad for unit in self.zero.units if unit.local_grad is not None]
        for _, _, pending in self.zero.in_flight:
            gradients += pending.tensors
        n_gradients = len({memory_of(gradient) for gradient in gradients})
        self.most_gradients = max(self.most_gradients, n_gradients)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator; record it if it uses a unit."""
        self.look()
        memories = {memory_of(x) for x in tensors_in(args)}
        is_use = function.name() in ("aten::mm", "aten::embedding")
        for name, unit in self.units.items():
            if is_use and memory_of(unit.flat) in memories:
                self.events.append(f"use {name}")
        n_messages = len(self.works)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if len(self.works) > n_messages:
            self.name_message(memories)
        return result

    def name_message(self, memories: set[int]):
        """Give the message that has just started the name of the unit that it sends."""
        for name, unit in self.units.items():
            if memory_of(unit.flat) in memories:
                self.events[-1] = f"gather {name}"
                self.endings.append(f"gathered {name}")
            elif unit.local_grad is not None and memory_of(unit.local_grad) in memories:
                self.events[-1] = f"sum {name}"
                self.endings.append(f"summed {name}")

    def waited(self, work: Any):
        """Record the end of a message by its name."""
        self.look()
        super().waited(work)
        last = self.events[-1]
        if last.startswith("wait"):
            self.events[-1] = self.endings[int(last.split()[1])]


STAGE_1 = """
    use E, use 0, use 1, use H, sum H, use 1, sum 1, use 0, sum 0, sum E
    summed H, summed 1, summed 0, summed E
"""
STAGE_2 = """
    use E, use 0, use 1, use H, sum H, use 1, summed H, sum 1, use 0, summed 1, sum 0
    summed 0, sum E
    use E, use 0, use 1, use H, summed E, sum H, use 1, summed H, sum 1, use 0, summed 1, sum 0
    summed 0, sum E
    summed E
"""
STAGE_3 = """
    gather E, gather 0, gathered E, use E, free E
    gather 1, gathered 0, use 0, free 0
    gather H, gathered 1, use 1, free 1
    gathered H, use H, gather 1, use H, sum H, free H
    gather 0, gathered 1, use 1, summed H, sum 1, free 1
    gathered 0, use 0, summed 1, sum 0, free 0
    summed 0, sum E
    summed E
"""
TIED = """
    gather E, gather 0, gathered E, use E, free E
    gather 1, gathered 0, use 0, free 0
    gather E, gather H, gathered 1, use 1, free 1
    gathered E, gathered H, use E, gather 1, use E, sum H, free H
    gather 0, gathered 1, use 1, summed H, sum 1, free 1
    gathered 0, use 0, summed 1, sum 0, free 0
    summed 0, sum E, free E
    summed E
"""
KEEP = """
    gather E, gather 0, gathered E, use E, gather 1, gathered 0, use 0, gather H, gathered 1, use 1
    gathered H, use H, sum H, use 1, summed H, sum 1, use 0, summed 1, sum 0
    summed 0, sum E
    summed E
    free E, free 0, free 1, free H
"""
ORDERS = [
    # stage, flags, micro-batches, events, and how many whole gradients there are at most
    pytest.param(1, {}, 1, STAGE_1, 4, marks=task("stage 1", 2)),
    pytest.param(2, {}, 2, STAGE_2, 2, marks=task("stage 2", 2)),
    pytest.param(3, {}, 1, STAGE_3, 2, marks=task("stage 3", 4)),
    pytest.param(3, dict(recompute="full"), 1, STAGE_3, 2, marks=task("stage 3", 4)),
    pytest.param(3, dict(tied=True), 1, TIED, 2, marks=task("stage 3", 4)),
    pytest.param(3, dict(keep=True), 1, KEEP, 2, marks=task("stage 3", 4)),
]


@ranks(2)
@cases("stage, flags, m, expected, most_gradients", ORDERS)
def test_order_of_messages(stage, flags, m, expected, most_gradients):
    """m micro-batches, `finish`, and an update: gathers and sums start early and end late."""
    model, zero, _, mesh = zero_of(stage, 2, n_layers=2, **flags)
    zero.begin(m)
    with UnitTape(zero) as tape:
        for micro in range(m):
            loss_of(model, mesh.rank, micro).backward()
        zero.finish()
        if stage == 3:
            zero.step(0.1)
            tape.look()
    events = [event for event, _ in groupby(tape.events) if event != "matmul"]
    found = [event for event, _ in groupby(events)]
    close(found, re.findall(r"\w+ \w", expected), "events")
    close(tape.most_gradients, most_gradients, "whole gradients at a time")


@ranks(2)
@task("stage 3", 1)
def test_stage_3_never_holds_the_whole_model():
    """While it is initialised, each unit is freed before the next."""
    whole = []
    plain = step.materialize

    def note(model: Decoder, *args: Any):
        whole.append(sum(held(param) for param in model.parameters()))
        plain(model, *args)

    with mock.patch.object(step, "materialize", note):
        zero_of(3, 2)
    close(whole, [0, 0, 0, 0, 0], "bytes of weights before each of five units is initialised")


@ranks(2)
@task("stage 3", 1)
def test_stage_3_without_gradients():
    """A forward under no_grad has the right loss, and leaves only H whole, until `publish`."""
    model, zero, _, mesh = zero_of(3, 2)
    with torch.no_grad():
        close(loss_of(model, mesh.rank), loss_of(decoder(), mesh.rank), "the loss")
    close([bool(held(unit.flat)) for unit in zero.units], [False] * 4 + [True], "whole units")
    zero.publish()
    close([held(unit.flat) for unit in zero.units], [0] * 5, "bytes of weights")


# --- The loop -------------------------------------------------------------------------------------

LAYOUTS = [
    (dict(zero="0"), {}),
    (dict(zero="1"), dict(optimizer="sgd")),
    (dict(zero="2"), dict(tied=True, recompute="full")),
    (dict(zero="3"), dict(tied=True, recompute="full")),
    (dict(zero="3", keep=True), dict(tied=True, optimizer="sgd")),
]


@task("loop", 4)
@cases("flags, base", LAYOUTS)
def test_zero_trains_to_step_1s_numbers(pools, flags, base):
    """Each stage has step 1's numbers; a rank has micro-batches of 2, 2 and 1 sequences."""
    uneven = dict(global_batch_size=15, micro_batch_size=2)
    equals_step1(pools, 3, "step03_zero", uneven | base, **flags)
