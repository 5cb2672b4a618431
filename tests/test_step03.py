"""Step 3, ZeRO: step03_zero.py, and the gradient norm of common/layout.py.

A *unit* is E (the embedding), 0, 1, ... (a layer) or H (the last norm and the head)."""

import math
import re
from itertools import groupby, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import step03_zero as step
from common.comm import Group, Mesh
from common.layout import Shard, global_norm, note_record
from common.model import PRESETS, Decoder
from step01_single_gpu import set_up_layers
from tests.equal import BASE, Watch, close, decoder, draw, equals_step1
from tests.tape import Live, Tape, memory_of, tensors_in, traced_graphs

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
CPU = torch.device("cpu")
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def held(x: Tensor) -> int:
    """Bytes of a tensor's memory; 0 if it has none."""
    return 0 if x.is_meta else x.untyped_storage().nbytes()


# --- Units ----------------------------------------------------------------------------------------

UNITS = [
    # rank of three; its parts of the 2 x 2 matrix "a", 1 to 4, "b", 5 to 7, and "c", 8; its shard
    (0, [[1.0, 2.0, 3.0], [], []], [1.0, 2.0, 3.0]),  # a shard may end within a row
    (1, [[4.0], [5.0, 6.0], []], [4.0, 5.0, 6.0]),
    (2, [[], [7.0], [8.0]], [7.0, 8.0, 0.0]),  # and in padding
]


@task("units", 3)
@cases("rank, parts, shard", UNITS)
def test_a_rank_has_a_shard_of_a_unit(rank, parts, shard):
    """A unit is cut into equal shards; `own_part` is a parameter's part of a shard, a view."""
    named = {
        "a": nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        "b": nn.Parameter(torch.tensor([5.0, 6.0, 7.0])),
        "c": nn.Parameter(torch.tensor([8.0])),
    }
    unit = step.Unit(named, Group("dp", rank, 3, None))
    close(unit.shard, torch.tensor(shard), "the shard")
    for name, part in zip("abc", parts, strict=True):
        found = unit.own_part(unit.shard, name)
        close(found, torch.tensor(part), f"the part of {name}")
        found.zero_()
    close(unit.shard, torch.zeros(3), "the shard after its parts were zeroed")


@task("units", 2)
def test_unit_names():
    """The units are E, each layer, and H; parameters of another group are a unit of their own."""
    model = decoder(n_layers=11)  # layer 1 is not layer 10
    mlp = model.model.layers["10"].mlp
    for param in mlp.parameters():
        note_record(param, data_group="experts")
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
    """A second `gather` starts nothing; `free` waits for the first, and a second `free` does
    nothing.
    """
    param = nn.Parameter(torch.full((3, 2), 7.0, dtype=FP64))
    unit = step.ShardedUnit(dict(p=param), Mesh(dp=3)["dp"])
    unit.shard *= 10
    with Tape() as tape:
        unit.gather()
        unit.gather()
        close((tape.sent, len(tape.left)), (2 * 2 * 8, 1), "bytes sent, and messages in flight")
        unit.free()
        unit.free()
    close((tape.left, held(param)), ([], 0), "messages in flight, and bytes of memory, after free")
    unit.gather()
    unit.gathering.wait()
    close(param, torch.full((3, 2), 70.0), "the parameter, from the current shards")


# --- Gradients ------------------------------------------------------------------------------------


def zero_of(
    stage: int,
    n: int,
    dtype: torch.dtype = FP64,
    shape: dict = {},  # noqa: B006
    **flags: Any,
) -> tuple[Decoder, Any, Mesh]:
    """A model of that shape, its optimizer, which is also its sync, and the mesh of n ranks."""
    model = decoder(dtype=None, **shape)
    mesh = Mesh(dp=n)
    config = step.Config(zero=str(stage), **flags)
    set_up_layers(model, config)
    zero, _ = step.make_weights_and_optimizer(model, config, mesh, CPU, dtype)
    return model, zero, mesh


def loss_of(model: Decoder, rank: int, micro: int = 0, number: int = 0) -> Tensor:
    """The loss of two sequences of a rank, in micro-batch `micro` of step `number`."""
    tokens = (draw(f"tokens {micro} {number}", rank, 2, 6).abs() * 5).long() % 13
    return model(tokens, tokens.flip(1))


def summed_gradients(n: int, number: int) -> dict[str, Tensor]:
    """A whole model's bf16 gradients, added up in fp32 over two micro-batches of each rank."""
    model = decoder(dtype=BF16)
    sums = {name: torch.zeros_like(param, dtype=FP32) for name, param in model.named_parameters()}
    for rank, micro in product(range(n), range(2)):
        model.zero_grad()
        loss_of(model, rank, micro, number).backward()
        for name, param in model.named_parameters():
            sums[name] += param.grad
    return sums


STAGES = [  # each runs on n ranks
    pytest.param(stage, n, marks=[task(f"stage {stage}", 4), ranks(n)])
    for stage, n in product((1, 2, 3), (1, 3))
]


@cases("stage, n", STAGES)
def test_a_rank_gets_its_parts_of_summed_gradients(stage, n):
    """After `finish`, a rank's `gradients()` are its shard of each unit: the bf16 gradients of two
    micro-batches of each of n ranks, added up in fp32. A second step starts from zero.
    """
    model, zero, mesh = zero_of(stage, n, BF16)
    for number in range(2):
        with Tape() as tape:
            zero.begin(2)
            for micro in range(2):
                loss_of(model, mesh.rank, micro, number).backward()
            zero.finish()
        close(tape.left, [], "messages that were never waited for")
        found = zero.gradients()
        sums = summed_gradients(n, number)
        for names in step.unit_names(model):
            whole = torch.cat([sums[name].flatten() for name in names])
            length = math.ceil(len(whole) / n)
            own = whole[mesh.rank * length :][:length]
            part = torch.cat([found[name] for name in names])
            close(part, own, f"step {number}: unit of {names[0]}", n, bound=1e-6)
        zero.zero_grad()


@cases("stage", [1, 3])
def test_compile_makes_two_graphs_of_bf16_weights(monkeypatch, stage):
    """One of all layers, one of the loss, although weights are made after layers are set up."""
    graphs = traced_graphs(monkeypatch)
    model, zero, _ = zero_of(stage, 1, BF16, compile=True)
    zero.begin(2)
    for micro in range(2):
        loss_of(model, 0, micro).backward()
    zero.finish()
    close(len(graphs), 2, "graphs")


@task("stage 2", 2)
@cases("stage", [1, 2])
@cases("announced, made", [(1, 2), (2, 1)])
def test_another_number_of_micro_batches_is_refused(stage, announced, made):
    """At the first gradient too many, or in `finish`: a sum would lack gradients."""
    model, zero, _ = zero_of(stage, 1)
    zero.begin(announced)
    with pytest.raises(RuntimeError):
        for _ in range(made):
            loss_of(model, 0).backward()
        zero.finish()


@task("stage 2", 2)
@cases("stage", [1, 2])
def test_gradients_may_come_in_any_order(stage):
    """A parameter's two gradients come before the next one's first: all are summed."""
    model, zero, _ = zero_of(stage, 1)
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
    """Weights 1 2 3 4; gradients 1 2 3 4 and 10 20 30 40; rate 0.1: -0.1 -0.2 -0.3 -0.4."""
    shape = dict(vocab_size=2, dim=2, n_heads=1, n_kv_heads=1, n_layers=1)
    model, zero, mesh = zero_of(stage, 2, BF16, shape, optimizer="sgd", weight_decay=0.0)
    name = "model.embed_tokens.weight"
    own_weights = [[1.0, 2.0], [3.0, 4.0]][mesh.rank]
    zero.masters[name].copy_(torch.tensor(own_weights))
    zero.publish()
    zero.begin(1)
    tokens = torch.tensor([[0, 1]])
    rows = model.model.embed_tokens(tokens)
    others = model(tokens, tokens)  # times 0: each parameter needs a gradient
    gradient = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * [1.0, 10.0][mesh.rank]
    ((rows * gradient).sum() + 0 * others).backward()
    zero.finish()
    own_sum = torch.tensor([[11.0, 22.0], [33.0, 44.0]][mesh.rank])
    close(zero.gradients()[name], own_sum, "the shard of the sum", 2)
    zero.step(0.1)
    updated = torch.tensor([[[-0.1, -0.2], [-0.3, -0.4]]]).to(BF16)
    with torch.no_grad():
        close(model.model.embed_tokens(tokens), updated, "weights, updated")


@ranks(2)
@task("update", 2)
@cases("stage", [1, 3])
def test_masters_keep_updates_that_bf16_would_lose(stage):
    """Ten updates by 1e-5 move each master of the last norm, and of the head, by 1e-4."""
    _, zero, _ = zero_of(stage, 2, BF16, optimizer="sgd", weight_decay=0.0)
    start = zero.units[-1].master.clone()
    for _ in range(10):
        for unit in zero.units:
            unit.summed_grad = -torch.ones(unit.shard_length)
        zero.step(1e-5)
    close(zero.units[-1].master, start + 1e-4, "the masters", bound=1e-6)


NORMS = [
    # Whether ZeRO is on; and what each of four ranks holds of two gradients: of 1 2 2, sharded over
    # tp, and of 4. So the norm is 5
    (False, [[1, 2], [2], [1, 2], [2]], [[4], [4], [4], [4]]),
    (True, [[1], [2], [2], []], [[4], [4], [], []]),
]


@ranks(4)
@cases("zero, sharded_by_tp, whole", NORMS)
def test_global_norm(zero, sharded_by_tp, whole):
    """Each element counts once, however many ranks hold it. A rank may hold no elements."""
    mesh = Mesh(dp=2, tp=2)
    model = nn.ParameterDict(dict(first=torch.zeros(1), second=torch.zeros(1)))
    note_record(model.first, shard=Shard(0, "tp", 0, 1, 2))
    first = torch.tensor(sharded_by_tp[mesh.rank], dtype=FP64)
    second = torch.tensor(whole[mesh.rank], dtype=FP64)
    norm = global_norm(model, dict(first=first, second=second), mesh, zero=zero)
    close(norm, 5.0, "the norm", 2)


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
@task("loop", 2)
@cases("stage, dtype, nbytes", MEMORY)
def test_law_of_memory(stage, dtype, nbytes):
    """What each of four ranks holds of tiny after a backward: the docstring's table."""
    with Live() as live:
        model, zero, mesh = zero_of(stage, 4, dtype, vars(PRESETS["tiny"]))
        for _ in range(2):  # the optimizer has moments from its first update on
            zero.begin(1)
            loss_of(model, mesh.rank).backward()
            zero.finish()
            found = live.bytes
            zero.step(0.1)
            zero.zero_grad()
    close(found, nbytes, "bytes")


MESSAGES = [
    # flags, dtype, and 3/4 x (bytes of gathers and sums + 8) for two micro-batches
    (dict(zero="1"), "fp32", 4_825_350),  # 2 P numbers
    (dict(zero="2"), "fp32", 7_238_022),  # 3 P
    (dict(zero="3"), "fp32", 14_080_518),  # 2 (3 P - 65,920), which is 3,520,128 x 4/3
    (dict(zero="3"), "bf16", 9_452_934),  # 2 (2 P - 65,920) of 2 bytes, 2 P of 4
    (dict(zero="3", model="tiny,tied=True,seq_len=8"), "fp32", 13_883_142),  # 2 (3 x 771,328 - 128)
    (dict(zero="3", keep=True), "fp32", 7_238_022),  # 3 P
]


@ranks(4)
@cases("flags, dtype, nbytes", MESSAGES)
def test_law_of_messages(flags, dtype, nbytes):
    """What each of four ranks sends in a training step of tiny: the docstring's second table."""
    # Short sequences: what is sent does not depend on their length
    short = dict(model="tiny,seq_len=8", steps=1, global_batch_size=8)
    flags = BASE | short | dict(dtype=dtype) | flags
    run = Watch(step.Config(**flags))
    with Tape() as tape:
        step.train(run.config, run)
    close(run.history[0]["sent"], dict(dp=nbytes, all=12), "bytes that the run counts")
    sent = sum(size for name, size in tape.started if name != "allgather")
    close(sent, nbytes + 12, "bytes that torch sends, without the few by which ranks agree")


# --- When units are gathered, freed and summed ----------------------------------------------------


class UnitTape(Tape):
    """Of unit 0, `events` has "start 0" and "wait 0" (its gather), "use 0" (in a matmul or
    embedding), "free 0", and "start d0" and "wait d0" (the sum of its gradients).
    """

    def __init__(self, zero: step.Zero1):
        super().__init__()
        self.units = dict(zip("E01H", zero.units, strict=True))
        self.whole: list[str] = []  # units that have memory

    def look(self):
        """Record which units have been freed since the last look."""
        before = self.whole
        self.whole = [name for name, unit in self.units.items() if held(unit.flat)]
        self.events += [f"free {name}" for name in before if name not in self.whole]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator; record it if it uses a unit."""
        self.look()
        if function.name() in ("aten::mm", "aten::embedding"):
            self.events.append("use " + self.label(args))
        return super().__torch_dispatch__(function, types, args, kwargs)

    def label(self, args: tuple) -> str:
        """The unit whose weights or gradients are among the arguments of an operator, or ""."""
        memories = {memory_of(x) for x in tensors_in(args)}
        for name, unit in self.units.items():
            if memory_of(unit.flat) in memories:
                return name
            if unit.local_grad is not None and memory_of(unit.local_grad) in memories:
                return "d" + name
        return ""

    def waited(self, work: Any):
        """Record what was freed before the wait, and the wait."""
        self.look()
        super().waited(work)


STAGE_1 = """
    use E, use 0, use 1, use H, start dH, use 1, start d1, use 0, start d0, start dE
    wait dH, wait d1, wait d0, wait dE
"""
STAGE_2 = """
    use E, use 0, use 1, use H
    start dH, use 1, wait dH, start d1, use 0, wait d1, start d0, wait d0, start dE
    use E, use 0, use 1, use H
    wait dE, start dH, use 1, wait dH, start d1, use 0, wait d1, start d0, wait d0, start dE
    wait dE
    start E, start 0, start 1, start H, wait E, wait 0, wait 1, wait H
"""
STAGE_3 = """
    start E, start 0, wait E, use E, free E
    start 1, wait 0, use 0, free 0
    start H, wait 1, use 1, free 1
    wait H, use H, start 1, use H, start dH, free H
    start 0, wait 1, use 1, wait dH, start d1, free 1
    wait 0, use 0, wait d1, start d0, free 0
    wait d0, start dE
    wait dE
"""
TIED = """
    start E, start 0, wait E, use E, free E
    start 1, wait 0, use 0, free 0
    start E, start H, wait 1, use 1, free 1
    wait E, wait H, use E, start 1, use E, start dH, free H
    start 0, wait 1, use 1, wait dH, start d1, free 1
    wait 0, use 0, wait d1, start d0, free 0
    wait d0, start dE, free E
    wait dE
"""
KEEP = """
    start E, start 0, wait E, use E, start 1, wait 0, use 0, start H, wait 1, use 1
    wait H, use H, start dH, use 1, wait dH, start d1, use 0, wait d1, start d0
    wait d0, start dE
    wait dE
    free E, free 0, free 1, free H
"""
ORDERS = [
    # stage, flags, whether E and H are tied, micro-batches, events
    pytest.param(1, {}, False, 1, STAGE_1, marks=task("stage 1", 2)),
    pytest.param(2, {}, False, 2, STAGE_2, marks=task("stage 2", 2)),
    pytest.param(3, {}, False, 1, STAGE_3, marks=task("stage 3", 4)),
    pytest.param(3, dict(recompute="full"), False, 1, STAGE_3, marks=task("stage 3", 4)),
    pytest.param(3, {}, True, 1, TIED, marks=task("stage 3", 4)),
    pytest.param(3, dict(keep=True), False, 1, KEEP, marks=task("stage 3", 4)),
]


@ranks(2)
@cases("stage, flags, tied, m, expected", ORDERS)
def test_order_of_messages(stage, flags, tied, m, expected):
    """Each unit (E embedding, 0 and 1 layers, H norm and head; d: its gradients) is gathered, used,
    freed and summed in the expected order. Repeats of an event count once.
    """
    model, zero, mesh = zero_of(stage, 2, shape=dict(n_layers=2, tied=tied), **flags)
    zero.begin(m)
    with UnitTape(zero) as tape:
        for micro in range(m):
            loss_of(model, mesh.rank, micro).backward()
        zero.finish()
        if stage > 1:
            zero.step(0.1)
            tape.look()
            counted = sorted(operation for _, operation in mesh.sent)
            close(counted, ["all_gather", "reduce_scatter"], "operations whose bytes are counted")
    named = [event for event in tape.events if event[-1] in "E01H"]
    found = [event for event, _ in groupby(named)]
    close(found, re.findall(r"\w+ \w+", expected), "events")


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
    model, zero, mesh = zero_of(3, 2)
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
