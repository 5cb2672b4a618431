"""One small record per parameter: how it is split, and over which ranks its gradient is summed.

Every dimension of parallelism writes into this record what it did to a parameter; the initialiser, the gradient
sync, the gradient norm, the checkpoint and the tables read it, and so none of them knows any dimension by name.

    parameter (full shape)          splits                       sum_over
    q_proj.weight   [512, 512]      dim 0 over tp: rows 0-255    ("dp",)
    norm.weight     [512]           none                         ("dp",)
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh, all_gather, all_reduce, sum_over
from common.model import Decoder, draw_parameter


@dataclass(frozen=True)
class Split:
    """One cut of a tensor: this rank holds indices start..stop-1 of dimension `dim`, whose full size is `full`.

    `stop` may pass `full` where a size does not divide: the rows beyond are padding and stay zero. `copies` ranks hold
    each part, if there are fewer parts than ranks (key/value heads).
    """

    dim: int
    over: str
    start: int
    stop: int
    full: int
    copies: int = 1


@dataclass(frozen=True)
class Layout:
    """The story of one parameter: its cuts, and the mesh dimensions whose ranks hold parts of its gradient's sum.

    `replicas`: the mesh dimension whose ranks hold the same parameter and see other data, if it is not that of all data
    (experts): there its gradient is summed, and ZeRO cuts it.
    `held`: (mesh dimension, number of its ranks that have this parameter at all), where not all have (pipelines).
    """

    splits: tuple[Split, ...] = ()
    sum_over: tuple[str, ...] = ()
    replicas: str = ""
    held: tuple[tuple[str, int], ...] = ()

    def slice(self, full: Tensor) -> Tensor:
        """This rank's part of the full tensor, zero in the padding."""
        for split in self.splits:
            shape = list(full.shape)
            shape[split.dim] = split.stop - split.start
            count = max(0, min(split.stop, split.full) - split.start)
            local = full.new_zeros(shape)
            local.narrow(split.dim, 0, count).copy_(full.narrow(split.dim, min(split.start, split.full), count))
            full = local
        return full

    def copies(self, mesh_sizes: dict[str, int]) -> int:
        """How many ranks, along the given mesh dimensions, hold the same elements of the parameter."""
        count, held = 1, dict(self.held)
        for name, size in mesh_sizes.items():
            count *= next((split.copies for split in self.splits if split.over == name), held.get(name, size))
        return count

    def full_shape(self, local: torch.Size) -> torch.Size:
        """The shape of the whole parameter, given that of the local part."""
        shape = list(local)
        for split in reversed(self.splits):
            shape[split.dim] = split.full
        return torch.Size(shape)


def layout_of(param: Tensor) -> Layout:
    """The record of a parameter; one that no dimension has touched is whole and its gradient is complete."""
    return getattr(param, "parallel_layout", Layout())


def replica_group(param: Tensor, group: Group, mesh: Mesh | None) -> Group:
    """The ranks that hold the same parameter and see other data: `group`, if its record does not name others."""
    replicas = layout_of(param).replicas
    return mesh[replicas] if replicas else group


def assemble(local: Tensor, layout: Layout, mesh: Mesh | None) -> Tensor:
    """The whole tensor from everyone's parts: the inverse of `Layout.slice`, a collective where there are splits."""
    for split in layout.splits:
        group, length = mesh[split.over], split.stop - split.start
        parts = local.new_empty(group.size, *local.shape)
        all_gather(parts.view(-1), local.contiguous().view(-1), group, "(state)").wait()
        shape = list(local.shape)
        shape[split.dim] = split.full
        local = local.new_empty(shape)
        for part, start in zip(parts[:: split.copies], range(0, split.full, length), strict=False):
            count = min(length, split.full - start)
            local.narrow(split.dim, start, count).copy_(part.narrow(split.dim, 0, count))
    return local


def sum_gradients_over(params: Iterable[nn.Parameter], mesh_dim: str):
    """Note in the records that these gradients are sums over the ranks of `mesh_dim`, each of which finds a part.

    Records that name their `replicas` have said so themselves.
    """
    for param in params:
        layout = layout_of(param)
        if not layout.replicas:
            param.parallel_layout = replace(layout, sum_over=(*layout.sum_over, mesh_dim))


def materialize(
    model: Decoder, seed: int, device: torch.device, dtype: torch.dtype, only: Collection[str] | None = None
):
    """Give parameters on the meta device (all, or `only` these names) their initial value, in place, one at a time.

    The full value is drawn from (seed, global name), then sliced by the record: the same numbers under every layout.
    Tied parameters stay tied, records and `requires_grad` are kept. Buffers, in their own dtype, start at zero.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is None or (only is not None and names[id(param)] not in only):
                continue
            if id(param) not in made:
                layout = layout_of(param)
                full = draw_parameter(names[id(param)], layout.full_shape(param.shape), model.config.n_layers, seed)
                value = layout.slice(full).to(device=device, dtype=dtype)
                made[id(param)] = nn.Parameter(value, requires_grad=param.requires_grad)
                made[id(param)].parallel_layout = layout
            module._parameters[key] = made[id(param)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer


def reduction_table(model: nn.Module, mesh_dims: list[str]) -> list[list[str]]:
    """Rows for the table: kind of parameter x mesh dimension -> "split" (which tensor dim), "summed", "replicated",
    or on how many of the dimension's ranks it is."""
    rows: dict[str, list[str]] = {}
    for name, param in model.named_parameters():
        layout = layout_of(param)
        cells = []
        for dim in mesh_dims:
            cuts = [f"split dim {split.dim}" for split in layout.splits if split.over == dim]
            cuts += [f"on {count}" for name, count in layout.held if name == dim]
            cells.append(", ".join(cuts) or ("gradient summed" if dim in layout.sum_over else "replicated"))
        rows.setdefault(re.sub(r"\.\d+\.", ".*.", name), [str(list(layout.full_shape(param.shape))), *cells])
    return [["parameter", "full shape", *mesh_dims], *([name, *cells] for name, cells in rows.items())]


def sum_partial_gradients(optimizer: Any, mesh: Mesh, dims: list[str]):
    """Sum gradients over the mesh dimensions `dims` wherever a record asks for it, in place, one collective each.

    After the sum over dp; under ZeRO it is this rank's slices that are summed, which ranks along `dims` cut alike.
    """
    params = dict(optimizer.model.named_parameters())
    for dim in dims:
        summed = {name for name, param in params.items() if dim in layout_of(param).sum_over}
        parts = [g for name, g in optimizer.gradient_parts().items() if name in summed and g.numel()]
        if parts and mesh[dim].size > 1:
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, mesh[dim], "(partial)").wait()
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))


def global_norm(optimizer: Any, mesh: Mesh, dims: list[str], sliced: str) -> float:
    """The L2 norm of the whole gradient, each element counted once.

    What `copies` ranks along `dims` hold alike counts 1/copies on each. `sliced`: the dimension along which ZeRO gave
    every rank another slice, or "".
    """
    params, sizes = dict(optimizer.model.named_parameters()), {dim: mesh[dim].size for dim in dims}
    parts = optimizer.gradient_parts()
    squares = square_norms(list(parts.values()))
    copies = torch.tensor([layout_of(params[name]).copies(sizes) for name in parts], device=squares.device)
    square = (squares / copies).sum()
    for dim in dims + ([sliced] if sliced else []):
        (square,) = sum_over(mesh[dim], square)
    return float(square) ** 0.5 / optimizer.loss_scale


def cut(weight: nn.Parameter, dim: int, group: Group, copies: int = 1) -> nn.Parameter:
    """This rank's part of a parameter on the meta device, with its record; `copies` neighbours share a part."""
    parts, full = group.size // copies, weight.shape[dim]
    length, shape = -(-full // parts), list(weight.shape)
    shape[dim] = length
    start = group.rank // copies * length
    part = nn.Parameter(torch.empty(shape, device="meta", dtype=weight.dtype), weight.requires_grad)
    record = layout_of(weight)
    part.parallel_layout = replace(
        record, splits=(*record.splits, Split(dim, group.name, start, start + length, full, copies))
    )
    return part


def square_norms(tensors: list[Tensor]) -> Tensor:
    """The squared L2 norm of each tensor, fp64 [tensors]; the norms are taken in fp32 or wider."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, dtype=wide)).double().square()
