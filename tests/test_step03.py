"""Chapter 3, ZeRO: units and their shards, three stages, the docstring's table, and when units are gathered."""

import re
from itertools import groupby, pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import step03_zero as step
from common.comm import Group, Mesh
from common.layout import Shard, global_norm, layout_of, note_layout
from common.model import Decoder, wide
from tests.equal import SHAPE, close, decoder, draw, equals_step1
from tests.tape import Live, Tape

ranks, task, cases, shared = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize, torch._C._is_alias_of
CPU, FP64, BF16 = torch.device("cpu"), torch.float64, torch.bfloat16
FROZEN = "embed_tokens|0.mlp.up_proj|1.input_layernorm"  # a whole unit, a matrix and a norm


def built(stage: int | None, frozen: str = "-", apart: str = "-", dtype: torch.dtype = FP64, **options: Any) -> Any:
    """Build model, optimizer, sync and mesh; if stage is None, build only the plain model. Parameters whose names match
    `frozen` are frozen. Those that match `apart` have data_dim "apart", whose groups are [0] and [1, 2, ...]."""

    def change(model: Decoder):
        for name, param in model.named_parameters():
            param.requires_grad_(not re.search(frozen, name))
            note_layout(param, data_dim="apart" if re.search(apart, name) else "dp")

    shape = {key: options.pop(key) for key in SHAPE.keys() & options}
    if stage is None:
        return decoder(change, dtype, **shape)
    model = decoder(change, None, **shape)
    mesh = Mesh(dp=torch.distributed.get_world_size())
    for row in [0], [*range(1, mesh.world)]:
        mesh.add_groups("apart", np.array([row]), urgent=False)
    return model, *step.make_optimizer(model, step.Config(zero=str(stage), **options), mesh, CPU, dtype), mesh


def loss_of(model: Decoder, rank: int, micro: int, turn: int = 0) -> Tensor:
    """The loss of two sequences of `rank` in micro-batch `micro` of step `turn`, times 1 + rank + micro."""
    tokens = (draw(f"tokens {micro} {turn}", rank, 2, 6).abs() * 5).long() % 13
    return model(tokens, tokens.flip(1)) * (1 + rank + micro)


def held(x: Tensor) -> int:
    """Bytes of a tensor's memory; 0 if it has none."""
    return 0 if x.is_meta else x.untyped_storage().nbytes()


def own_parts(whole: dict[str, Tensor], rank: int, n: int) -> dict[str, Tensor]:
    """Concatenate tensors, cut them into n equally long shards, and return each tensor's part of a rank's shard."""
    owner = torch.arange(sum(x.numel() for x in whole.values()))
    owners = (owner // -(-len(owner) // n)).split([x.numel() for x in whole.values()])
    return {name: x.flatten()[own == rank] for (name, x), own in zip(whole.items(), owners, strict=True)}


@task("units", 3)
@cases("dtype", [FP64, BF16])
@cases("shapes, n", [([(2, 3), (4, 5), (1, 1), (3, 2)], 4), ([(5, 1), (2, 2), (1, 3)], 5), ([(3, 2)], 1)])
def test_unit(dtype, shapes, n):
    """A unit's buffer has n equal shards, and zeros at its end. Parameters are its views; masters are fp32 or fp64."""
    values = {f"p{i}": draw(f"p{i}", 0, *shape, dtype=dtype) for i, shape in enumerate(shapes)}
    flat = torch.cat([x.flatten() for x in values.values()])
    for rank, own in enumerate(F.pad(flat, (0, -len(flat) % n)).chunk(n)):
        unit = step.Unit({k: nn.Parameter(x.clone(), k == "p0") for k, x in values.items()}, Group("dp", rank, n, None))
        close(torch.stack((unit.shard, unit.master)), torch.stack((own, own)), f"the shard of rank {rank}, its master")
        close(shared(unit.master, unit.shard), dtype is FP64, "master and shard share memory")
        close((unit.master.dtype, unit.named["p0"].grad_dtype), (wide(dtype),) * 2, "dtypes of masters and gradients")
        close((len(unit.flat), list(unit.trained)), (n * len(own), ["p0"]), "elements, and names of trained parameters")
        for name, part in own_parts(values, rank, n).items():
            close(unit.view_shard(own, name), part, f"rank {rank}: its part of {name}")
            close(shared(unit.view_shard(own, name), own), True, "a part is a view")
            close(unit.named[name], values[name], f"{name} in the buffer")
            unit.view(unit.flat, name).zero_()
            close(unit.named[name].any().item(), False, f"{name} after its place in the buffer was zeroed")


@task("units", 2)
def test_unit_names():
    """The units are the embedding, each layer, and norm with head. Parameters of another group form a further unit."""
    units, model = {}, built(None, apart="layers.10.mlp", n_layers=12)
    for name, param in model.named_parameters():
        units.setdefault((re.search(r"embed|\d+|$", name).group(), layout_of(param).data_dim), []).append(name)
    close(sorted(step.unit_names(model)), sorted(units.values()), "units")


@ranks(3)
@task("gather", 6)
def test_gather_and_free():
    """`gather` starts one all-gather without waiting, or none if the unit is whole; a freed unit has no memory."""
    values = [draw("p", 0, 3, 2), draw("p", 0, 5, 1), draw("p", 0, 2, 2)]
    named = {str(i): nn.Parameter(value.clone()) for i, value in enumerate(values)}
    unit = step.ShardedUnit(named, Mesh(dp=3)["dp"])
    unit.shard *= 3
    with Tape() as tape:
        unit.gather()
        unit.gather()
    close((tape.sent, len(tape.left)), (2 * 5 * 8, 1), "bytes that two calls send, and all-gathers in flight")
    unit.gathering.wait()
    for param, value in zip(named.values(), values, strict=True):
        close(param, 3 * value, "a parameter, gathered from the current shards")
    unit.free()
    unit.free()
    close(held(unit.flat), 0, "bytes of the buffer after free")
    with Tape() as tape:
        unit.gather()
        unit.free()
    close((tape.left, held(unit.flat)), ([], 0), "a unit freed while it arrives: collectives in flight, and bytes")


# --- Gradients, updates, the norm -----------------------------------------------------------------------------------

# frozen="model": only the head trains, so its sum is still in flight when the next micro-batch makes its gradient.
SUMS = [(1e-10, dict(tied=True)), (1e-10, dict(frozen=FROZEN)), (1e-10, dict(frozen="model"))]
SUMS += [(1e-6, dict(apart="1.mlp", dtype=BF16))]


@ranks(3)
@cases("stage", [pytest.param(stage, marks=task(f"stage {stage}", 4)) for stage in (1, 2, 3)])
@cases("bound, options", SUMS)
def test_gradients(stage, bound, options):
    """In each of two steps, a rank gets its parts of all summed gradients. If weights are bf16, gradients are fp32."""
    (model, zero, _, mesh), plain = built(stage, **options), built(None, **options)
    groups, dtype = dict(dp=[0, 1, 2], apart=[1, 2] if mesh.rank else [0]), wide(options.get("dtype", FP64))
    for turn in range(2):
        sums = {name: torch.zeros_like(p, dtype=dtype) for name, p in plain.named_parameters()}
        for rank, micro in np.ndindex(3, 2):
            for param in plain.parameters():
                param.grad, param.grad_dtype = None, dtype
            loss_of(plain, rank, micro, turn).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None and rank in groups[layout_of(param).data_dim]:
                    sums[name] += param.grad
        zero.begin(2)
        with Tape() as tape:
            for micro in range(2):
                loss_of(model, mesh.rank, micro, turn).backward()
            close(len(tape.started) > 0, stage > 1, "something is sent before finish")
            zero.finish()
            if stage == 3:
                zero.publish()  # it waits for prefetched units that were not used
        close(tape.left, [], "collectives that were never waited for")
        found = zero.gradients()
        close(set(found), {name for name, param in plain.named_parameters() if param.requires_grad}, "names")
        for unit in zero.units:
            whole, group = {name: sums[name] for name in unit.named}, groups[unit.group.name]
            for name, part in own_parts(whole, group.index(mesh.rank), len(group)).items():
                close(found.get(name, part), part, f"step {turn + 1}: the gradient of {name}", len(group), bound)
                close(found.get(name, part).dtype, dtype, f"dtype of the gradient of {name}")
        zero.zero_grad()
        left = [x for unit in zero.units for x in (unit.gradient, unit.reduced_shard, unit.grad_shard)]
        assert all(x is None for x in [*left, *(param.grad for param in model.parameters())]), "zero_grad keeps some"


@ranks(2)
@task("stage 3", 2)
def test_stage_3_is_never_whole():
    """No rank ever holds the whole model. Under no_grad the loss is right, and then only norm and head stay whole."""
    whole, fill, plain = [], step.materialize, built(None)
    count = lambda model, *rest: whole.append(sum(map(held, model.parameters()))) or fill(model, *rest)  # noqa: E731
    with mock.patch.object(step, "materialize", count):
        model, zero, _, mesh = built(3)
    close(whole, [0] * 5, "bytes of weights before each of five units is initialised")
    with torch.no_grad():
        for turn in range(2):
            close(loss_of(model, mesh.rank, 0, turn), loss_of(plain, mesh.rank, 0, turn), "the loss")
            close([len(u.named) for u in zero.units if held(u.flat)], [2], "parameters in each unit that stays")
    zero.publish()
    close(sum(held(unit.flat) for unit in zero.units), 0, "bytes of weights after publish")


@ranks(3)
@cases("stage", [pytest.param(1, marks=task("update", 6)), 2, pytest.param(3, marks=task("stage 3", 2))])
@cases("dtype, lr, bound", [(FP64, 0.1, 1e-10), (BF16, 1e-5, 1e-6)])  # bf16 weights would lose such a small update
def test_update(stage, dtype, lr, bound):
    """Two updates, at two learning rates, equal step 1's. A rank changes only its own shards, then publishes them."""
    options = dict(frozen=FROZEN, dtype=dtype, weight_decay=0.1)
    (_, zero, _, mesh), (plain, optimizer, *_) = built(stage, **options), built(0, **options)
    publish, zero.publish = zero.publish, mock.Mock()
    for turn in (1, 2):
        for unit in zero.units:
            drawn = {name: draw(f"{name} {turn}", 0, *p.shape, dtype=wide(dtype)) for name, p in unit.named.items()}
            own = torch.cat(list(own_parts(drawn, mesh.rank, 3).values()))
            unit.grad_shard = F.pad(own, (0, unit.length - len(own)))
            for name in unit.trained:
                plain.get_parameter(name).grad = drawn[name] * turn
        for gradient in zero.gradients().values():
            gradient *= turn  # in place, as clipping does
        optimizer.step(lr / turn)
        before = [unit.flat.clone() for unit in zero.units if stage < 3]
        with Tape() as tape:
            zero.step(lr / turn)
            for unit, flat in zip(zero.units, before, strict=stage < 3):
                others = torch.arange(len(flat)) // unit.length != mesh.rank
                close(unit.flat[others], flat[others], "other ranks' shards before publish")
            close(zero.publish.call_count, turn, "calls of publish")
            publish()
        sent = sum(2 * unit.shard.nbytes for unit in zero.units) * (stage < 3)
        close((tape.sent, tape.left), (sent, []), "bytes of an update, and all-gathers never waited for")
        zero.zero_grad()
        close([name for name, x in zero.masters.items() if x.grad is not None], [], "masters that keep a gradient")
    for unit in zero.units:
        if stage == 3:
            unit.gather()
            unit.gathering.wait()
        masters = {name: optimizer.masters.get(name, param) for name, param in plain.named_parameters()}
        for name, part in own_parts({name: masters[name] for name in unit.named}, mesh.rank, 3).items():
            close(name in zero.masters, name in optimizer.masters and len(part) > 0, f"{name} has a master")
            close(zero.masters.get(name, part), part, f"master of {name}", 3, bound)
            close(unit.view(unit.flat, name), plain.get_parameter(name), f"{name} on all ranks", 3, bound)


# Mesh sizes; whether ZeRO is on; for each of two parameters: its record, and dimensions along which elements differ.
RECORDS = [
    (dict(dp=2, cp=2), False, ({}, []), (dict(data_dim="data"), [])),
    (dict(dp=2, cp=2), True, ({}, ["dp"]), (dict(data_dim="data"), ["dp", "cp"])),
    (dict(dp=2, tp=2), False, (dict(shards=(Shard(0, "tp", 0, 1, 2),)), ["tp"]), ({}, [])),
    (dict(dp=2, ep=2), True, (dict(shards=(Shard(0, "ep", 0, 1, 2),)), ["dp", "ep"]), ({}, ["dp"])),
    (dict(dp=2, pp=2), False, ({}, ["pp"]), (dict(stage_copies=2), [])),
]


@ranks(4)
@cases("sizes, sharded, first, second", RECORDS)
def test_global_norm_and_group(sizes, sharded, first, second):
    """Each element counts once in the norm, however many ranks hold it; a rank may hold no elements."""
    mesh, model, gradients, square = Mesh(**sizes), nn.Module(), {}, 0.0
    mesh.join("data", *sizes, urgent=False)
    for name, (record, dims) in dict(a=first, b=second).items():
        model.register_parameter(name, param := nn.Parameter(torch.zeros(1)))
        note_layout(param, **record)
        shape = [sizes[dim] for dim in dims]
        distinct = [draw(name, i, 3 * i + (not dims)) for i in range(int(np.prod(shape)))]  # the first may be empty
        gradients[name] = distinct[np.ravel_multi_index([mesh[dim].rank for dim in dims], shape) if dims else 0]
        square += sum(x.square().sum() for x in distinct)
    close(global_norm(model, gradients, mesh, sharded), square.sqrt().item(), "the norm", 2)


# --- The law: what is held and sent, and when -----------------------------------------------------------------------


@ranks(3)
@cases("stage", [0, 1, 2, 3])
@cases("m, tied", [(1, False), (3, True)])
def test_table(stage, m, tied):
    """What a rank holds after backward, and what it sends in a step, is what the table in step 3's docstring says."""
    with Live() as live, Tape() as tape:
        model, optimizer, sync, mesh = built(stage, dtype=BF16, tied=tied, bucket_mb=64.0, dim=24)
        for _ in range(2):  # the optimizer has moments from the second turn on
            sync.begin(m)
            for micro in range(m):
                loss_of(model, mesh.rank, micro).backward()
            sync.finish()
            found = live.bytes
            optimizer.step(0.1)
            optimizer.zero_grad()
    row, *_ = re.findall(rf"^    {stage} .{{29}}(.{{20}})(.{{8}})(.{{12}})", step.__doc__, re.MULTILINE)
    each, of_8, elements = (re.sub(r"([\w)]) (?=[\w(])", r"\1 * ", field.strip()) for field in row)  # as Python code
    size = [sum(model.get_parameter(name).numel() for name in names) for names in step.unit_names(model)]
    sizes = dict(n=3, m=m, P=sum(size), e=size[-1] + size[0] * (not tied))
    expected = eval(of_8), round(eval(each, sizes) * sizes["P"])
    close((eval(each, dict(n=8)), found), expected, "bytes per parameter if n = 8, and bytes that a rank holds")
    sent = sum(size / (2 if "gather" in name else 4) for name, size in tape.started) / 2
    close(round(sent), round(eval(elements, sizes) * 2 / 3), "elements that a rank sends in a step")


class Story(Tape):
    """A tape of units' events: "gather 0", "gather 0 ends", "use 0" (by an operator), "free 0", "reduce 0", ..."""

    def __init__(self, zero: step.Zero1):
        super().__init__()
        names = [re.search(r"\d|$", next(iter(unit.named))).group() or "EH"[i > 0] for i, unit in enumerate(zero.units)]
        self.units, self.whole, self.most, self.ends = dict(zip(names, zero.units, strict=True)), [], (0, 0), {}

    def note(self):
        """Record units freed since the last event, and the maxima so far of whole units and of whole gradients."""
        whole = [name for name, unit in self.units.items() if held(unit.flat)]
        self.events += [f"free {name}" for name in self.whole if name not in whole]
        gradients = sum(unit.gradient is not None for unit in self.units.values())
        self.whole, self.most = whole, (max(self.most[0], len(whole)), max(self.most[1], gradients))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.note()
        before, kind, given = len(self.works), function.name(), [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        own = {name: (u.flat, u.gradient if "c10d" in kind else None) for name, u in self.units.items()}
        about = [name for name in own for x in own[name] if x is not None and any(shared(x, y) for y in given)]
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if len(self.works) > before:
            self.events[-1] = ("gather " if "gather" in kind else "reduce ") + about[0]
            self.ends[f"wait {before}"] = self.events[-1] + " ends"
            return result
        self.events += [f"use {name}" for name in about + ["E"] * ("embedding_dense_backward" in kind)]
        return result

    def waited(self, work: Any):
        self.note()
        super().waited(work)


def figure(layers: str, tied: bool) -> dict[str, list[str]]:
    """The figure in Zero3's docstring, redrawn for `layers`. If tied, embedding and head are unit E; the norm is H."""
    up, down = [*layers], [*reversed(layers)]
    return {
        "all-gather": ["E", *up, "EH" if tied else "H", "", *down, "", "", ""],
        "compute": ["", "E", *up, "HE"[: 1 + tied], "EH"[1 - tied :], *down, "E", ""],
        "freed after": ["", "E", *up, "", "H", *down, "E" * tied, ""],
        "reduce-scatter": [""] * (len(layers) + 4) + ["H", *down, "E"],
    }


def story(stage: int, layers: str, tied: bool) -> list[str]:
    """Expected events of two micro-batches. A message of one column of `figure` ends in the next; E's sum, later."""
    events, columns = [], [*zip(*figure(layers, tied).values(), strict=True), [""] * 4]
    for before, (gathered, used, _, reduced) in pairwise([columns[-1], *columns]):
        events += [f"reduce {x} ends" for x in before[3]] + [f"reduce {x}" for x in reduced]
        events += [f"free {x}" for x in before[2]] + [f"gather {x}" for x in gathered]
        events += [f"gather {x} ends" for x in before[0]] + [f"use {x}" for x in used]
    at = events.index("reduce H")
    events = [*events[:-1], *events[:at], "reduce E ends", *events[at:]]  # E's sum runs into the next micro-batch
    return [event for event, _ in groupby(x for x in events if stage == 3 or x.split()[0] in ("use", "reduce"))]


@ranks(2)
@cases("recompute", ["none", "full"])
@cases("stage, layers", [(2, "012"), (3, "012"), (3, "0")])
@cases("tied", [False, True])
def test_when(stage, layers, tied, recompute):
    """Zero3's docstring shows the true order of reduce-scatters and, for stage 3, of gathers and frees."""
    for row, units in figure("01", False).items():
        assert f"  {row:<15}{''.join(f'{unit:<4}' for unit in units).rstrip()}\n" in step.Zero3.__doc__, row
    model, _, zero, mesh = built(stage, n_layers=len(layers), tied=tied)
    step.set_up_layers(model, step.Config(recompute=recompute))
    zero.begin(2)
    with Story(zero) as tape:
        for micro in range(2):
            loss_of(model, mesh.rank, micro).backward()
        zero.finish()
    found = groupby(tape.ends.get(event, event) for event in tape.events if event != "matmul")
    close([event for event, _ in found], story(stage, layers, tied), "events")
    close(tape.most, (2 + tied if stage == 3 else 5, 2), "most whole units at a time, and most whole gradients")


@task("loop", 4)
@cases("zero, tied", [(0, False), (1, False), (2, False), (2, True), (3, False), (3, True)])
def test_zero_trains_to_step_1s_numbers(pools, zero, tied):
    """Each stage has step 1's numbers with padded units, and micro-batches of 2, 2 and 1 sequences on a rank."""
    base = dict(tied=tied, recompute="full" if tied else "none", steps=5, global_batch_size=15, micro_batch_size=2)
    equals_step1(pools, 3, "step03_zero", base, zero=str(zero))
