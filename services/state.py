"""What an optimizer holds, whatever its kind, told as pieces of full tensors.

Step 1's optimizer has whole parameters, masters and moments. ZeRO's has `units`, flat buffers of which this rank owns a
slice. Checkpoints, comparisons of replicas and the memory table see both as `Piece`s.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from common.comm import Mesh
from common.layout import Layout, layout_of
from services.boxes import Piece, gather


def settle(optimizer: Any):
    """Wait until the weights of the last update are there: ZeRO gathers them under the next forward."""
    for unit in getattr(optimizer, "units", ()):
        unit.ready()


def masters_from_weights(optimizer: Any):
    """Begin with masters that are the weights, when these have been read from a file."""
    for unit in getattr(optimizer, "units", ()):
        if unit.master is not unit.slice:
            unit.master.copy_(unit.slice)
    for name, master in getattr(optimizer, "masters", {}).items():
        if master is not optimizer.params[name]:
            master.copy_(optimizer.params[name].detach())


def pieces(optimizer: Any) -> Iterator[Piece]:
    """What this rank holds of every full tensor: weights, buffers, masters and the update rule's state."""
    for name, buffer in optimizer.model.named_buffers():
        yield Piece("buffer", name, buffer, buffer.shape, layout_of(buffer))
    if not hasattr(optimizer, "units"):
        yield from whole_pieces(optimizer)
        return
    states = {piece: state for update in optimizer.updates for piece, state in update.rule.state.items()}
    for unit in optimizer.units:
        yield from unit_pieces(unit, states)


def whole_pieces(optimizer: Any) -> Iterator[Piece]:
    """The pieces of step 1's optimizer."""
    for name, param in optimizer.model.named_parameters():
        yield Piece("model", name, param.detach(), param.shape, layout_of(param))
    for name, master in optimizer.masters.items():
        layout = layout_of(optimizer.params[name])
        if master is not optimizer.params[name]:
            yield Piece("master", name, master, master.shape, layout)
        for kind, value in optimizer.inner.state[master].items():  # like the weight, or counts of steps
            yield Piece(kind, name, value, value.shape, layout if value.shape == master.shape else Layout())


def unit_pieces(unit: Any, states: dict[Tensor, dict]) -> Iterator[Piece]:
    """The pieces of one of ZeRO's units: whole weights (stages 1 and 2), and what lies in this rank's slice.

    `states`: what the update rule keeps of each part of a slice.
    """
    unit.ready()
    for name, param in unit.named.items():
        about = param.shape, layout_of(param)
        first = max(0, unit.first - unit.place[name][0])
        if unit.stage < 3:
            yield Piece("model", name, param.detach(), *about)
        else:
            yield Piece("model", name, unit.cut(unit.slice, name), *about, first)
        if name in unit.trained and unit.dtype.itemsize == 2:
            yield Piece("master", name, unit.cut(unit.master, name), *about, first)
        for kind, value in states[unit.pieces[name]].items() if name in unit.pieces else ():
            yield Piece(kind, name, value, *((*about, first) if value.dim() else ((),)))


def gradient_pieces(optimizer: Any) -> Iterator[Piece]:
    """What this rank holds of every full gradient, once it is complete."""
    units = {name: unit for unit in getattr(optimizer, "units", ()) for name in unit.named}
    for name, part in optimizer.gradients().items():
        param = optimizer.model.get_parameter(name)
        first = max(0, units[name].first - units[name].place[name][0]) if units else 0
        yield Piece("gradient", name, (part / optimizer.loss_scale).contiguous(), param.shape, layout_of(param), first)


def full_state(optimizer: Any, mesh: Mesh) -> dict[str, dict[str, Tensor]]:
    """All pieces as full tensors by kind and name, on every rank (for comparing layouts of small models)."""
    return gather(pieces(optimizer), mesh)


def full_gradients(optimizer: Any, mesh: Mesh) -> dict[str, Tensor]:
    """Every full gradient by global name, on every rank, before the update. A collective."""
    return gather(gradient_pieces(optimizer), mesh).get("gradient", {})


def held(optimizer: Any, on_disk: bool) -> dict[str, list[Tensor]]:
    """What training holds between two micro-batches, by kind, for the memory table; `on_disk`: masters, moments are."""
    units = getattr(optimizer, "units", None)
    if units is None:
        found = {
            "parameters": list(optimizer.model.parameters()),
            "gradients": [p.grad for p in optimizer.params.values() if p.grad is not None],
            "masters": [m for name, m in optimizer.masters.items() if m is not optimizer.params[name]],
        }
        inner = [optimizer.inner]
    else:
        found = {
            "parameters": [t for unit in units for t in (unit.flat, unit.slice)],
            "gradients": [t for unit in units for t in (unit.gradient, unit.grad_slice) if t is not None],
            "masters": [unit.master for unit in units if unit.master is not unit.slice],
        }
        inner = [update.rule for update in optimizer.updates]
    states = [entry for rule in inner for entry in rule.state.values()]
    found["moments"] = [t for entry in states for t in entry.values() if t.dim()]
    return found | (dict(masters=[], moments=[]) if on_disk else {})
