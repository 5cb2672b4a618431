"""Lab 3: ZeRO (step03_zero.py)."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from common.comm import Group, Mesh
from common.layout import note_layout
from common.model import Decoder
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import CPU, Small, decoder
from extras.labs.suite import suite
from extras.labs.tape import Tape


class Slices(Case):
    """Task 1: `part` on each of n ranks, one after another."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for rank in range(self.n):
            unit = self.unit(step, rank)
            own = torch.arange(unit.first, unit.first + unit.length)
            for name in unit.named:
                piece = unit.view_shard(own, name)
                yield f"rank {rank}: its elements of {name}", piece.clone(), FOUND
                piece += 1000
                written = int((own >= 1000).sum())
                yield f"rank {rank}: the part of {name} is a view", written == piece.numel(), True
                own.remainder_(1000)

    def unit(self, step: Any, rank: int) -> Any:
        """That of a rank."""
        named = {f"p{i}": nn.Parameter(torch.zeros(shape).double()) for i, shape in enumerate(self.shapes)}
        return step.Unit(named, Group("dp", rank, self.n, None))


class Places(Slices):
    """`view` of the whole buffer; Unit.__init__ uses it, too."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        unit = self.unit(step, 0)
        whole = torch.arange(len(unit.flat))
        yield from as_ours({f"the places of {name} in the buffer": unit.view(whole, name) for name in unit.named})


class Units(Case):
    """The units of a decoder of twelve layers, in one of which the MLP is held by other ranks, sorted."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model = decoder(n_layers=12)
        for param in model.model.layers["10"].mlp.parameters():
            note_layout(param, data_dim="expert_data")
        yield "the units", sorted(map(sorted, step.unit_names(model))), FOUND


SLICES = (dict(shapes=((2, 3), (4, 5), (1, 1), (3, 2)), n=4), dict(shapes=((5, 1), (2, 2), (1, 3)), n=5))
CUT = Task(
    ("Unit.view", "Unit.view_shard", "unit_names"),
    (*demands(Slices, SLICES, ("every element of every parameter, on one rank, as a view", 3, "elements", "is a view")),
     *demands(Places, SLICES, ("a parameter's place in the whole buffer, in its shape", 1, "places")),
     *demands(Units, ({},), ("a unit for each layer, embedding, norm with head", 2))),
)  # fmt: skip


class Zero(Small):
    """Tasks 2 to 4 and 6: a decoder on some ranks, and the optimizer of a stage."""

    dtype = "float64"

    def optimizer(self, step: Any, mesh: Mesh) -> tuple[Decoder, Any]:
        """Both."""
        model, config = decoder(), SimpleNamespace(seed=self.seed % 1000, optimizer="adamw", weight_decay=0.1)
        return model, step.STAGES[self.stage](model, config, mesh, CPU, getattr(torch, self.dtype))


class Sums(Zero):
    """Two steps of micro-batches, without an update: slices of gradients, what is sent, and what is left between."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, zero = self.optimizer(step, mesh)
        for turn in (1, 2):
            sums, left, hidden = [], 0, 0
            for tape in self.backwards(model, zero, mesh, turn):
                sums += [round(event.sent) for event in tape.starts() if "gather" not in event.what]
                left, hidden = max(left, sum(u.gradient is not None for u in zero.units)), hidden + tape.hidden()
                left += sum(param.grad is not None for param in model.parameters()) if self.stage > 1 else 0
            with Tape(mesh) as tape:
                zero.finish()
            sums += [round(event.sent) for event in tape.starts()]
            yield f"step {turn}: units with a whole gradient after a backward", left, at_most(1)
            yield f"step {turn}: matmuls run while a sum is under way", hidden > 0, True
            yield f"step {turn}: bytes of the sums", sorted(sums), FOUND
            says = f"step {turn}: our part of the gradient of"
            yield from as_ours({f"{says} {name}": part.clone() for name, part in zero.gradients().items()})
            for unit in zero.units:
                unit.gradient = unit.reduced_shard = None


STAGES = [(dict(mesh=dict(dp=3), stage=stage, micro=2),) for stage in range(4)]
STAGE_1 = Task(
    ("Zero1.begin", "Zero1.reduce", "Zero1.finish", "Zero1.gradients"),
    demands(Sums, STAGES[1],
            ("our slices of the sum over ranks and micro-batches", 3, "gradient of"),
            ("one reduce-scatter a unit and step", 2, "bytes")),
)  # fmt: skip


class Update(Zero):
    """Task 3: two updates from drawn gradients; what is held after them, and what is sent."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, zero = self.optimizer(step, mesh)
        for turn in (1, 2):
            for unit in zero.units:
                flat = torch.zeros(len(unit.flat), dtype=unit.master.dtype)
                for name, param in unit.named.items():
                    unit.view(flat, name).copy_(self.draw(f"{name} {turn}", *param.shape))
                unit.grad_shard = flat[unit.first : unit.first + unit.length].clone()
                for param in unit.named.values():
                    param.grad = torch.zeros_like(param, dtype=unit.master.dtype)
            with Tape(mesh) as tape:
                zero.step(0.1 / turn)
            after = tape.left()
            zero.zero_grad()
            left = [x for unit in zero.units for x in (unit.gradient, unit.reduced_shard, unit.grad_shard)]
            left += [param.grad for param in model.parameters()] + [piece.grad for piece in zero.masters.values()]
            yield f"gradients left after update {turn}", sum(x is not None for x in left), 0
            yield f"bytes of update {turn}", tape.sent(), FOUND
            yield f"all-gathers of update {turn} that nobody has waited for", after, []
        for name, param in model.named_parameters():
            yield f"{name} after two updates", param, FOUND


FP64, BF16 = ((dict(mesh=dict(dp=3), stage=1, dtype=dtype),) for dtype in ("float64", "bfloat16"))
UPDATE = Task(
    ("Zero1.step", "Zero1.publish", "Zero1.zero_grad"),
    (*demands(Update, FP64,
              ("two updates on every rank: all weights, each with its learning rate", 3, "after two"),
              ("all gradients are freed", 1, "left"),
              ("one all-gather a unit, complete when step() returns", 1, "bytes", "all-gathers")),
     *demands(Update, BF16, ("bf16 weights are rounded masters", 2, "after two", "bytes"), bound=2**-7),
     suite(2, "zero 1", "zero 1, adamw", "zero 1 of 3", "step 3, frozen 1", "step 3, offload",
           says="--zero 1 trains as one device; what does not train stays; a variant attaches")),
)  # fmt: skip

STAGE_2 = Task(
    ("Zero2.begin", "Zero2.mark_ready", "Zero2.send", "Zero2.land", "Zero2.finish"),
    (*demands(Sums, STAGES[2],
              ("our slices of the sum over ranks and micro-batches, in two steps", 3, "gradient of"),
              ("one reduce-scatter a unit and micro-batch", 2, "bytes"),
              ("after a backward at most the last unit's whole gradient is left", 2, "whole gradient"),
              ("a sum is under way while the next layer computes", 2, "matmuls")),
     suite(2, "zero 2", "step 3, frozen 2", says="--zero 2 trains as one device; what does not train stays")),
)  # fmt: skip


class Gather(Case):
    """Task 5: a unit gathered and freed twice, with other slices the second time; then freed while it arrives."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        named = {f"p{i}": nn.Parameter(self.draw(f"p{i}", *shape)) for i, shape in enumerate(self.shapes)}
        unit = step.ShardedUnit(named, mesh["dp"])
        yield "at first: bytes of the buffer", unit.flat.untyped_storage().nbytes(), 0
        for turn in (1, 2):
            with Tape(mesh) as tape:
                unit.gather()
                unit.gather()
            yield f"turn {turn}: waits in gather()", tape.waits(), 0
            yield f"turn {turn}: bytes sent by gather() and another gather()", tape.sent(), FOUND
            unit.gathering.wait()
            yield from as_ours({f"turn {turn}: {name}": param.detach().clone() for name, param in named.items()})
            unit.free()
            unit.free()
            yield f"turn {turn}, after free(): bytes of the buffer", unit.flat.untyped_storage().nbytes(), 0
            unit.shard.mul_(3)
        with Tape(mesh) as tape:
            unit.gather()
            unit.free()
        yield "freed while it arrives: bytes of the buffer that nobody has waited for", tape.left(), []
        yield "freed while it arrives: bytes of the buffer", unit.flat.untyped_storage().nbytes(), 0


FREE = Task(
    ("ShardedUnit.gather", "ShardedUnit.free"),
    demands(Gather, (dict(mesh=dict(dp=3), shapes=((3, 2), (5, 1), (2, 2))),),
            ("the parameters are what all slices are now", 2, ": p"),
            ("one gathering, started and not waited for; none of what is there", 2, "waits", "sent"),
            ("after free() the buffer has no memory, even if it was arriving", 2, "bytes of the buffer")),
)  # fmt: skip

THERE = "units whose weights are there, layer by layer"


class There(Zero):
    """Task 6: micro-batches in stage 3: which units are there while each layer computes; bytes; losses."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, zero = self.optimizer(step, mesh)
        there: list[list[int]] = []
        order = [name for name in decoder().state_dict() if re.search("embed|input_layernorm|model.norm", name)]
        units = [next(unit for unit in zero.units if name in unit.named) for name in order]  # as in forward

        def note(*_: Any):
            there.append([i for i, unit in enumerate(units) if unit.flat.untyped_storage().nbytes()])

        for layer in model.model.layers.values():
            layer.mlp.register_forward_pre_hook(note)
            layer.mlp.register_forward_hook(lambda _m, _i, output: (output.register_hook(note), None)[1])
        zero.begin(self.micro)
        for i in range(self.micro):
            with Tape(mesh) as tape:
                with Tape(mesh) as forward:
                    loss = self.loss(model, mesh.rank, 1, i)
                with Tape(mesh) as backward:
                    loss.backward()
            yield f"micro-batch {i}: {THERE}", [*there], FOUND
            there.clear()
            yield f"micro-batch {i}: the loss", loss, FOUND
            gathered = sum(event.sent for event in tape.starts() if "gather" in event.what)
            yield f"micro-batch {i}: bytes gathered", gathered, FOUND
            for way, part in (("forward", forward), ("backward", backward)):
                yield f"micro-batch {i}: matmuls of {way} run while weights arrive", part.hidden("gather") > 0, True
        zero.finish()
        zero.publish()
        yield "bytes of weights between steps", sum(u.flat.untyped_storage().nbytes() for u in zero.units), 0


STAGE_3 = Task(
    ("Zero3.fetch", "Zero3.after_forward", "Zero3.send", "Zero3.publish"),
    (*demands(Sums, STAGES[3], ("our slices of the gradients", 2, "gradient of")),
     *demands(There, (dict(mesh=dict(dp=2), stage=3, micro=2),),
              ("the losses", 1, "the loss"),
              ("while a layer computes, its weights and its neighbour's are there, no others", 3, "layer by layer"),
              ("a layer is gathered twice in a micro-batch, embedding and head once", 2, "gathered"),
              ("a neighbour arrives while a layer computes", 1, "matmuls"),
              ("between steps no weights are there", 1, "between")),
     suite(3, "zero 3", "step 3", "step 3, frozen 3", "afab, zero 3", "step 3, bf16", "step 3, saved",
           says="--zero 3 trains as one device: layers run again, some do not train, no graph, a pipeline"),
     suite(1, "step 3, tied", says="so it does with a tied matrix")),
)  # fmt: skip


def stage_3_bytes(
    L: int, layer: int, E: int, n: int, k: int, ends: int = 1, gradient: int = 4, stays: int = 1
) -> float:
    """Bytes of gradients and weights in a step; `ends`: how often embedding and head are gathered in a micro-batch."""
    layers, both = L * layer, 2 * E
    return (n - stays) / n * k * 1e6 * (gradient * (layers + both) + 2 * (2 * layers + ends * both))


QUESTION = Question(
    dict(L=range(12, 41), layer=range(5, 91), E=range(20, 201), n=(4, 8, 16), k=range(2, 9)),
    stage_3_bytes,
    {"embedding and head are gathered once in a micro-batch": dict(ends=2),
     "gradients have 4 bytes": dict(gradient=2),
     "one of the n parts stays": dict(stays=0)},
)  # fmt: skip

LAB = Lab(3, ("step03_zero",), (CUT, STAGE_1, UPDATE, STAGE_2, FREE, STAGE_3), QUESTION, flags="--zero 3")
