"""Lab 3: ZeRO (step03_zero.py)."""

from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh
from common.layout import materialize, note_layout
from common.model import Decoder, ModelConfig
from labs.course import Case, Lab, Most, Question, Task, demands
from labs.tape import Tape
from labs.training import trains

CPU = torch.device("cpu")

# --- task 1: slices --------------------------------------------------------------------------------------------------

SLICES = (dict(shapes=((2, 3), (4, 5), (1, 1), (3, 2)), n=4), dict(shapes=((5, 1), (2, 2), (1, 3)), n=5))
DEEP = (dict(layers=12, special=10),)


def slices_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """`view` and `part` on each of n ranks, one after another."""
    found = {}
    for rank in range(case.n):
        named = {f"p{i}": nn.Parameter(torch.zeros(shape).double()) for i, shape in enumerate(case.shapes)}
        unit = step.Unit(named, Group("dp", rank, case.n, None))
        own = torch.arange(unit.first, unit.first + unit.length)
        for name in named:
            piece = unit.part(own, name)
            found[f"rank {rank}: its elements of {name}"] = piece.clone()
            piece += 1000
            found[f"rank {rank}: the part of {name} is a view"] = bool((own >= 1000).sum() == piece.numel())
            own.remainder_(1000)
    return found


def places_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """`view` of the whole buffer; Unit.__init__ uses it, too."""
    named = {f"p{i}": nn.Parameter(torch.zeros(shape).double()) for i, shape in enumerate(case.shapes)}
    unit = step.Unit(named, Group("dp", 0, case.n, None))
    return {f"the places of {name} in the buffer": unit.view(torch.arange(len(unit.flat)), name) for name in named}


def slices_expected(rank: int, case: Case) -> dict[str, Any]:
    """By counting."""
    found, total = {}, sum(a * b for a, b in case.shapes)
    length, at = -(-total // case.n), 0
    for i, (a, b) in enumerate(case.shapes):
        places = torch.arange(at, at + a * b)
        found[f"the places of p{i} in the buffer"] = places.view(a, b)
        for r in range(case.n):
            inside = (places >= r * length) & (places < (r + 1) * length)
            found |= {f"rank {r}: its elements of p{i}": places[inside], f"rank {r}: the part of p{i} is a view": True}
        at += a * b
    return found


def units_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """The units of a decoder of twelve layers, in one of which the MLP is held by other ranks, sorted."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(8, case.layers, 2, 1, 12, vocab_size=11, seq_len=4))
    for param in model.model.layers[str(case.special)].mlp.parameters():
        note_layout(param, data_group="expert_data")
    return {"the units": sorted(sorted(names) for names in step.unit_names(model))}


def units_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    block = [f"self_attn.{x}_proj" for x in "qkvo"]
    mlp, units = [f"mlp.{x}_proj" for x in ("gate", "up", "down")], [["model.embed_tokens.weight"]]
    for i in range(case.layers):
        apart = i == case.special
        rest = ["input_layernorm", "post_attention_layernorm", *block, *([] if apart else mlp)]
        units += [[f"model.layers.{i}.{x}.weight" for x in part] for part in ([rest, mlp] if apart else [rest])]
    units.append(["model.norm.weight", "lm_head.weight"])
    return {"the units": sorted(map(sorted, units))}


CUT = Task(
    "units and slices", 15, ("Unit.view", "Unit.part", "unit_names"),
    "the docstring of the step from \"Parameters are laid out in units\"; Unit.__init__",
    ("self.span has where a parameter begins and ends in the whole buffer. This rank's slice begins at self.first "
     "and has self.length elements. Draw a parameter before it, one behind it, and one across its border.",
     "Subtract self.first from both ends, and keep the result within 0 to self.length.",
     "unit_names: a dictionary whose key is (the module: a layer's name, the embedding's, or the rest; the "
     "data_group in the record). A layer's number can have two digits."),
    (*demands(slices_on_rank, slices_expected, SLICES,
              ("every element of every parameter, on one rank, as a view", 3, "elements", "is a view")),
     *demands(places_on_rank, slices_expected, SLICES,
              ("a parameter's place in the whole buffer, in its shape", 1, "places")),
     *demands(units_on_rank, units_expected, DEEP, ("a unit for each layer, embedding, norm with head", 2)),),
    faults=("piece_off_by_one",),
)  # fmt: skip

# --- what tasks 2 to 4 and 6 run -------------------------------------------------------------------------------------

SHAPE = ModelConfig(8, 3, 2, 1, 12, vocab_size=11, seq_len=4)


def optimizer_of(step: Any, case: Case, mesh: Mesh, stage: int, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A decoder, and the optimizer of a stage."""
    with torch.device("meta"):
        model = Decoder(SHAPE)
    config = SimpleNamespace(seed=case.seed % 1000, optimizer="adamw", weight_decay=0.1)
    return model, step.STAGES[stage](model, config, mesh, CPU, dtype)


def loss_of(model: Decoder, case: Case, rank: int, turn: int, micro: int) -> Tensor:
    """The loss of drawn tokens."""
    tokens = case.ids(f"tokens {rank} {turn} {micro}", SHAPE.vocab_size, 2, SHAPE.seq_len)
    return model(tokens, tokens.flip(1))


def whole(case: Case, dtype: torch.dtype = torch.float64) -> Decoder:
    """The same decoder on one device."""
    with torch.device("meta"):
        model = Decoder(SHAPE)
    materialize(model, case.seed % 1000, CPU, dtype)
    return model


def places() -> list[dict[str, tuple[int, int]]]:
    """By unit: names, and where they are in its buffer."""
    named, units = {name: p.numel() for name, p in whole(Case(0)).named_parameters()}, []
    heads = ["model.embed_tokens.", *(f"model.layers.{i}." for i in range(SHAPE.n_layers))]
    groups = [[n for n in named if n.startswith(head)] for head in heads]
    for names in [*groups, [n for n in named if not n.startswith(tuple(heads))]]:
        ends = [sum(named[n] for n in names[:i]) for i in range(len(names) + 1)]
        units.append(dict(zip(names, pairwise(ends), strict=True)))
    return units


def lengths(n: int) -> list[int]:
    """Elements of a slice, by unit."""
    return [-(-max(stop for _, stop in unit.values()) // n) for unit in places()]


def own(tensors: dict[str, Tensor], n: int, rank: int) -> dict[str, Tensor]:
    """What of whole tensors lies in a rank's slices."""
    found = {}
    for length, unit in zip(lengths(n), places(), strict=True):
        for name, (start, stop) in unit.items():
            inside = slice(max(rank * length - start, 0), max(min((rank + 1) * length, stop) - start, 0))
            found[name] = tensors[name].flatten()[inside]
    return found


def gradients_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Two steps of micro-batches, without an update: slices of gradients, what is sent, and what is left between."""
    model, zero = optimizer_of(step, case, mesh, case.stage)
    found: dict[str, Any] = {}
    for turn in (1, 2):
        zero.begin(case.micro)
        sums, left, hidden = [], 0, 0
        for i in range(case.micro):
            loss = loss_of(model, case, mesh["dp"].rank, turn, i)
            with Tape(mesh) as tape:
                loss.backward()
            sums += [round(e[2]) for e in tape.events if e[0] == "start" and "gather" not in e[1]]
            left = max(left, sum(unit.gradient is not None for unit in zero.units))
            hidden += tape.hidden()
            left += sum(param.grad is not None for param in model.parameters()) if case.stage > 1 else 0
        found[f"step {turn}: units with a whole gradient after a backward"] = left
        found[f"step {turn}: matmuls run while a sum is under way"] = hidden > 0
        with Tape(mesh) as tape:
            zero.finish()
        sums += [round(event[2]) for event in tape.events if event[0] == "start"]
        found[f"step {turn}: bytes of the sums"] = sorted(sums)
        found |= {f"step {turn}: our part of the gradient of {n}": g.clone() for n, g in zero.gradients().items()}
        for unit in zero.units:
            unit.gradient = unit.total = None
    return found


def gradients_expected(rank: int, case: Case) -> dict[str, Any]:
    """All ranks and micro-batches on one device."""
    found, n = {}, case.ranks
    for turn in (1, 2):
        model = whole(case)
        sum(loss_of(model, case, r, turn, i) for r in range(n) for i in range(case.micro)).backward()
        gradients = {name: param.grad for name, param in model.named_parameters()}
        parts = own(gradients, n, rank)
        found |= {f"step {turn}: our part of the gradient of {name}": part for name, part in parts.items()}
        found[f"step {turn}: bytes of the sums"] = sorted(
            8 * (n - 1) * length for length in lengths(n) for _ in range(case.micro if case.stage > 1 else 1)
        )
        found[f"step {turn}: units with a whole gradient after a backward"] = Most(1)
        found[f"step {turn}: matmuls run while a sum is under way"] = True
    return found


def stages(*numbers: int) -> tuple[dict[str, Any], ...]:
    """Cases of `gradients_on_rank`."""
    return tuple(dict(mesh=dict(dp=n), stage=stage, micro=2) for stage in numbers for n in (3,))


STAGE_1 = Task(
    "stage 1: slices of the sum", 20, ("Zero1.begin", "Zero1.reduce", "Zero1.finish", "Zero1.gradients"),
    "the docstring of the step, the table of stages; Unit; reduce_scatter in common/comm.py; begin in step02_ddp.py",
    ("As with buckets, gradients are views of a flat buffer: autograd adds up in place, over all micro-batches.",
     "A reduce-scatter gives rank k the k-th slice of the sum: a new tensor of unit.length, in the dtype of the "
     "gradients. Start those of all units before you wait for the first.",
     "begin: unit.make_room(), then param.grad = unit.view(unit.gradient, name) for those that are trained. finish: "
     "grad_slice is total. gradients: unit.part(unit.grad_slice, name)."),
    (*demands(gradients_on_rank, gradients_expected, stages(1),
              ("our slices of the sum over ranks and micro-batches", 3, "gradient of"),
              ("one reduce-scatter a unit and step", 2, "bytes")),),
)  # fmt: skip

# --- task 3: the update ----------------------------------------------------------------------------------------------


def update_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Two updates from drawn gradients; what is held after them, and what is sent."""
    dtype, found = getattr(torch, case.dtype), {}
    model, zero = optimizer_of(step, case, mesh, 1, dtype)
    for turn in (1, 2):
        for unit in zero.units:
            flat = torch.zeros(len(unit.flat), dtype=unit.master.dtype)
            for name in unit.named:
                unit.view(flat, name).copy_(case.draw(f"{name} {turn}", *unit.named[name].shape))
            unit.grad_slice = flat[unit.first : unit.first + unit.length].clone()
        with Tape(mesh) as tape:
            zero.step(0.1 / turn, 0.5**turn)  # AdamW hides a common factor
        found[f"bytes of update {turn}"] = tape.sent()
        left = [x for unit in zero.units for x in (unit.gradient, unit.total, unit.grad_slice)]
        left += [param.grad for param in model.parameters()] + [piece.grad for piece in zero.pieces.values()]
        found[f"gradients left after update {turn}"] = sum(x is not None for x in left)
    return found | {f"{name} after two updates": p.detach().double() for name, p in model.named_parameters()}


def update_expected(rank: int, case: Case) -> dict[str, Any]:
    """torch's AdamW on whole masters."""
    dtype = getattr(torch, case.dtype)
    model, found = whole(case, dtype), {}
    masters = {name: p.detach().to(torch.promote_types(dtype, torch.float32)) for name, p in model.named_parameters()}
    groups = [dict(params=[p], weight_decay=0.1 * (p.dim() > 1)) for p in masters.values()]
    rule = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for turn in (1, 2):
        for name, master in masters.items():
            master.grad = case.draw(f"{name} {turn}", *master.shape).to(master.dtype) * 0.5**turn
        for group in rule.param_groups:
            group["lr"] = 0.1 / turn
        rule.step()
        sent = sum(lengths(case.ranks)) * (case.ranks - 1) * dtype.itemsize
        found |= {f"bytes of update {turn}": dict(dp=sent), f"gradients left after update {turn}": 0}
    return found | {f"{name} after two updates": m.to(dtype).double() for name, m in masters.items()}


FP64, BF16 = (dict(mesh=dict(dp=3), dtype="float64"),), (dict(mesh=dict(dp=3), dtype="bfloat16"),)
UPDATE = Task(
    "the update of slices", 20, ("Zero1.step", "Zero1.publish"),
    "Zero1.__init__; Optimizer.step in step01_single_gpu.py",
    ("self.pieces are the parts of masters that this rank updates; self.rule was made with them. Where does each "
     "find its gradient, and with which factor?",
     "After the rule, unit.slice is filled from unit.master (with 16 bits these are different tensors), and "
     "gradients are freed: of the units, of the parameters and of the pieces.",
     "publish: start an all_gather of every unit's slices into unit.flat, then wait for all."),
    (*demands(update_on_rank, update_expected, FP64,
              ("two updates on every rank: all weights, each with its learning rate and factor", 3, "after two"),
              ("all gradients are freed", 1, "left"),
              ("one all-gather a unit", 1, "bytes")),
     *demands(update_on_rank, update_expected, BF16, ("bf16 weights are rounded masters", 2, "after two", "bytes"),
              bound=2**-7),
     trains(2, (3, dict(zero=1)), (2, dict(zero=1)), flags=dict(micro_batch_size=3)),),
    faults=("updates_not_gathered", "slices_not_clipped"),
)  # fmt: skip

# --- task 4: stage 2 -------------------------------------------------------------------------------------------------

STAGE_2 = Task(
    "stage 2: no whole gradients", 30, ("Zero2.begin", "Zero2.added", "Zero2.send", "Zero2.land", "Zero2.finish"),
    "Zero2.__init__; the row of stage 2 in the table of the step's docstring",
    ("unit.missing counts the gradients that this micro-batch's backward has yet to make. When it is 0, the unit "
     "goes out, and its whole gradient can go when it has landed.",
     "added: land what is in flight if it is this very unit; move param.grad into the unit's buffer (make_room, if "
     "there is none) and set it to None. send: land the unit before, then start this one's sum.",
     "land: wait, add unit.total to unit.grad_slice, and forget gradient and total; the unit is missing all of its "
     "gradients again. begin makes grad_slice zeros like unit.master."),
    (*demands(gradients_on_rank, gradients_expected, stages(2),
              ("our slices of the sum over ranks and micro-batches, in two steps", 3, "gradient of"),
              ("one reduce-scatter a unit and micro-batch", 2, "bytes"),
              ("after a backward at most the last unit's whole gradient is left", 2, "whole gradient"),
              ("a sum is under way while the next layer computes", 2, "matmuls")),
     trains(2, (2, dict(zero=2)), (3, dict(zero=2))),),
    faults=("slices_not_accumulated", "last_unit_not_landed", "slices_not_emptied"),
)  # fmt: skip

# --- task 5: gather and free -----------------------------------------------------------------------------------------

GATHER = (dict(mesh=dict(dp=3), shapes=((3, 2), (5, 1), (2, 2))),)


def gather_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """A unit that is gathered and freed twice, with other slices the second time."""
    named = {f"p{i}": nn.Parameter(case.draw(f"p{i}", *shape)) for i, shape in enumerate(case.shapes)}
    unit, found = step.SlicedUnit(named, mesh["dp"]), {}
    found["bytes of the buffer at first"] = unit.flat.untyped_storage().nbytes()
    for turn in (1, 2):
        with Tape(mesh) as tape:
            unit.gather()
            unit.gather()
        found[f"turn {turn}: waits in gather()"] = sum(event[0] == "wait" for event in tape.events)
        found[f"turn {turn}: bytes sent by gather() and another gather()"] = tape.sent()
        unit.gathering.wait()
        found |= {f"turn {turn}: {name}": param.detach().clone() for name, param in named.items()}
        unit.free()
        unit.free()
        found[f"turn {turn}: bytes of the buffer after free()"] = unit.flat.untyped_storage().nbytes()
        unit.slice.mul_(3)
    unit.gather()
    unit.free()
    found["freed while it arrives: bytes of the buffer"] = unit.flat.untyped_storage().nbytes()
    return found


def gather_expected(rank: int, case: Case) -> dict[str, Any]:
    """By hand."""
    found = {"bytes of the buffer at first": 0, "freed while it arrives: bytes of the buffer": 0}
    length = -(-sum(a * b for a, b in case.shapes) // case.ranks)
    for turn in (1, 2):
        found[f"turn {turn}: waits in gather()"] = 0
        found[f"turn {turn}: bytes sent by gather() and another gather()"] = dict(dp=8 * length * (case.ranks - 1))
        found[f"turn {turn}: bytes of the buffer after free()"] = 0
        found |= {f"turn {turn}: p{i}": case.draw(f"p{i}", *s) * 3 ** (turn - 1) for i, s in enumerate(case.shapes)}
    return found


FREE = Task(
    "weights come and go", 15, ("SlicedUnit.gather", "SlicedUnit.free"),
    "SlicedUnit.__init__; untyped_storage().resize_ in PyTorch's documentation; Pending in common/comm.py",
    ("Parameters, and what autograd saves of them, are views of self.flat. The tensor stays; its memory goes.",
     "self.gathered says whether the weights are there or arriving, self.gathering what is to be waited for. Both "
     "functions may be called when there is nothing to do.",
     "self.flat.untyped_storage().resize_(0), and back to self.nbytes. Memory into which something arrives must "
     "not be given back: wait first."),
    demands(
        gather_on_rank, gather_expected, GATHER,
        ("the parameters are what all slices are now", 2, ": p"),
        ("one gathering, started and not waited for; none of what is there", 2, "waits", "sent"),
        ("after free() the buffer has no memory, even if it was arriving", 2, "bytes of the buffer"),
    ),
    faults=("gathered_from_itself",),
)  # fmt: skip

# --- task 6: stage 3 -------------------------------------------------------------------------------------------------

STAGE_3_RUN = (dict(mesh=dict(dp=2), stage=3, micro=2),)
THERE = "units whose weights are there, layer by layer"


def there_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """Micro-batches in stage 3: which units (0: the embedding) are there while each layer computes; bytes; losses."""
    model, zero = optimizer_of(step, case, mesh, 3)
    there: list[list[int]] = []
    found: dict[str, Any] = {}
    order = sorted(range(len(zero.units)), key=lambda i: unit_number(zero.units[i]))

    def note(*_: Any):
        there.append([k for k, i in enumerate(order) if zero.units[i].flat.untyped_storage().nbytes()])

    for layer in model.model.layers.values():
        layer.mlp.register_forward_pre_hook(note)
        layer.mlp.register_forward_hook(lambda _m, _i, output: (output.register_hook(note), None)[1])
    zero.begin(case.micro)
    for i in range(case.micro):
        there.clear()
        with Tape(mesh) as tape:
            loss = loss_of(model, case, mesh["dp"].rank, 1, i)
            found[f"micro-batch {i}, forward: {THERE}"] = [*there]
            there.clear()
            loss.backward()
        found[f"micro-batch {i}, backward: {THERE}"] = [*there]
        found[f"micro-batch {i}: the loss"] = loss
        found[f"micro-batch {i}: bytes gathered"] = sum(e[2] for e in tape.events if "gather" in e[1])
        found[f"micro-batch {i}: matmuls run while something is under way"] = tape.hidden() > 0
    zero.finish()
    zero.publish()
    return found | {"bytes of weights between steps": sum(u.flat.untyped_storage().nbytes() for u in zero.units)}


def unit_number(unit: Any) -> int:
    """Its place in the order of forward."""
    name = next(iter(unit.named))
    return 0 if "embed" in name else 1 + int(name.split(".")[2]) if "layers" in name else 99


def there_expected(rank: int, case: Case) -> dict[str, Any]:
    """A module and its neighbour."""
    model, found, size, L = whole(case), {}, [8 * (case.ranks - 1) * x for x in lengths(case.ranks)], SHAPE.n_layers
    for i in range(case.micro):
        found[f"micro-batch {i}, forward: {THERE}"] = [[k, k + 1] for k in range(1, L + 1)]
        found[f"micro-batch {i}, backward: {THERE}"] = [[k - 1, k] for k in range(L, 1, -1)] + [[1]]
        found[f"micro-batch {i}: the loss"] = loss_of(model, case, rank, 1, i).detach()
        found[f"micro-batch {i}: bytes gathered"] = size[0] + 2 * sum(size[1:-1]) + size[-1]
        found[f"micro-batch {i}: matmuls run while something is under way"] = True
    return found | {"bytes of weights between steps": 0}


STAGE_3 = Task(
    "stage 3: weights, just in time", 30, ("Zero3.fetch", "Zero3.after_forward", "Zero3.send", "Zero3.publish"),
    "Zero3.__init__ and the docstrings of its methods; register_hook of a tensor in PyTorch's documentation",
    ("self.uses are the units of each module in the order of forward. While module i computes, the next one's are "
     "arriving; in backward, the previous one's. So at any time two units are there.",
     "Backward of module i begins when the gradient of its output is known: a hook on the output. The embedding's "
     "backward needs no weights (self.lowest). The last module's are still there.",
     "fetch: gather both, wait for those of i alone. after_forward: free the units of i, unless the next module "
     "uses them too, or i is the last. send: as in stage 2, then free. publish: the next forward gathers."),
    (*demands(gradients_on_rank, gradients_expected, stages(3), ("our slices of the gradients", 2, "gradient of")),
     *demands(there_on_rank, there_expected, STAGE_3_RUN,
              ("the losses", 1, "the loss"),
              ("while a layer computes, its weights and its neighbour's are there, no others", 3, "layer by layer"),
              ("a layer is gathered twice in a micro-batch, embedding and head once", 2, "gathered"),
              ("a neighbour arrives while a layer computes", 1, "matmuls"),
              ("between steps no weights are there", 1, "between")),
     trains(3, (2, dict(zero=3)), (3, dict(zero=3))),
     trains(1, (2, dict(zero=3)), shape=dict(tied=True), says="so it does with a tied matrix"),),
    faults=("memory_without_weights",),
)  # fmt: skip

# --- the question ----------------------------------------------------------------------------------------------------


def draw_sent(draw: Random) -> dict[str, Any]:
    """A model, its parts, ranks and micro-batches."""
    return dict(L=draw.randint(12, 40), layer=draw.randint(5, 90), E=draw.randint(20, 200), n=draw.choice((4, 8, 16)),
                k=draw.randint(2, 8))  # fmt: skip


def stage_3_bytes(v: dict[str, Any], ends: int = 1, gradient: int = 4) -> float:
    """Bytes of gradients and weights in each micro-batch; `ends`: how often embedding and head are gathered."""
    layers, both = v["L"] * v["layer"], 2 * v["E"]
    return (v["n"] - 1) / v["n"] * v["k"] * 1e6 * (gradient * (layers + both) + 2 * (2 * layers + ends * both))


QUESTION = Question(
    "{L} layers of {layer} million parameters, embedding and head of {E} million each (not tied). --zero 3, bf16,\n"
    "{n} ranks, {k} micro-batches. How many bytes does a rank send in a step?",
    draw_sent,
    stage_3_bytes,
    mistakes=(
        ("embedding and head are gathered once in a micro-batch", lambda v: stage_3_bytes(v, ends=2)),
        ("gradients have 4 bytes", lambda v: stage_3_bytes(v, gradient=2)),
        ("one of the n parts stays", lambda v: stage_3_bytes(v) * v["n"] / (v["n"] - 1)),
    ),
)

LAB = Lab(3, "ZeRO", ("step03_zero",), (CUT, STAGE_1, UPDATE, STAGE_2, FREE, STAGE_3), QUESTION, flags="--zero 3")
