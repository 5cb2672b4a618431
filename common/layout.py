"""One small record per parameter: how it is split, and over which ranks its gradient is summed.

Every dimension of parallelism writes into this record what it did to a parameter. The initialiser, the sums of
gradients, the gradient norm, the checkpoint and the tables read it. Sums over dp and cp are made by step 2's sync or
ZeRO, over `mesh.data` or the ranks that `replicas` names; the others (tp, kv, mirror) by `sum_partial_gradients`.

    parameter (full shape)          splits                       partial_over
    q_proj.weight   [128, 128]      dim 0 over tp: rows 0-63     ("dp",)
    norm.weight     [128]           none                         ("tp", "dp")
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh, all_reduce, sum_over
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
    """The record of one parameter: its cuts, and the mesh dimensions over which its gradient is summed.

    `replicas`: the mesh dimension whose ranks hold the same parameter and see other tokens, if it is not `mesh.data`
    (experts; not step 3's replicas). There its gradient is summed, and ZeRO cuts it.
    `held`: (mesh dimension, how many of its ranks have this parameter at all), where not all have it (pipelines).
    """

    splits: tuple[Split, ...] = ()
    partial_over: tuple[str, ...] = ()
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

    def rows(self, full: int) -> range:
        """Which of the `full` indices of dimension 0 this rank has; its padding is not among them."""
        rows = range(full)
        for split in self.splits:
            rows = rows[split.start : split.stop] if split.dim == 0 else rows
        return rows

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


def replica_group(param: Tensor, mesh: Mesh) -> Group:
    """The ranks that hold the same parameter and see other tokens: all of `mesh.data`, or what its record names."""
    return mesh[layout_of(param).replicas] if layout_of(param).replicas else mesh.data


def cut(weight: nn.Parameter, dim: int, group: Group, copies: int = 1) -> nn.Parameter:
    """This rank's part of a parameter on the meta device, with its record; `copies` neighbours share a part."""
    full, shape = weight.shape[dim], list(weight.shape)
    shape[dim] = length = -(-full // (group.size // copies))
    start = group.rank // copies * length
    part = nn.Parameter(torch.empty(shape, device="meta", dtype=weight.dtype), weight.requires_grad)
    splits = *layout_of(weight).splits, Split(dim, group.name, start, start + length, full, copies)
    part.parallel_layout = replace(layout_of(weight), splits=splits)
    return part


def note_gradient_sum(params: Iterable[nn.Parameter], mesh_dim: str):
    """Note in the records that these gradients are sums over `mesh_dim` (unless a record names its own `replicas`)."""
    for param in params:
        layout = layout_of(param)
        if not layout.replicas:
            param.parallel_layout = replace(layout, partial_over=(*layout.partial_over, mesh_dim))


def materialize(
    model: Decoder, seed: int, device: torch.device, dtype: torch.dtype, only: Collection[str] | None = None
):
    """Give parameters on the meta device (all, or `only` these names) their initial value, in place, one at a time.

    The value is drawn from (seed, global name), then sliced by the record: the same numbers under every layout.
    Tied parameters stay tied, records and `requires_grad` are kept. Buffers, in their own dtype, start at zero.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is None or (only is not None and names[id(param)] not in only):
                continue
            if id(param) not in made:
                layout, name = layout_of(param), names[id(param)]
                shape = layout.full_shape(param.shape)
                full = draw_parameter(name, shape, model.config.n_layers, seed, dtype, layout.rows(shape[0]))
                made[id(param)] = nn.Parameter(layout.slice(full).to(device), requires_grad=param.requires_grad)
                made[id(param)].parallel_layout = layout
            module._parameters[key] = made[id(param)]
        for key, buffer in module._buffers.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer


def sum_partial_gradients(optimizer: Any, mesh: Mesh, dims: list[str]):
    """Sum gradients over the mesh dimensions `dims` wherever a record asks for it, in place, one all-reduce each.

    It comes after the sum over `mesh.data`. Under ZeRO a rank sums its slices, which ranks along `dims` cut alike.
    """
    params = dict(optimizer.model.named_parameters())
    for dim in dims:
        summed = {name for name, param in params.items() if dim in layout_of(param).partial_over}
        parts = [g for name, g in optimizer.gradients().items() if name in summed and g.numel()]
        if parts and mesh[dim].size > 1:
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, mesh[dim], "(partial)").wait()
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))


def global_norm(optimizer: Any, mesh: Mesh, dims: list[str], sliced: bool) -> float:
    """The L2 norm of the whole gradient, each element counted once.

    What several ranks along `dims` hold alike counts 1/copies on each. `sliced`: the ranks of `mesh.data` have
    slices of the gradient (ZeRO), all replicas the same. Norms are taken in fp32 or wider, squares added in fp64.
    """
    params, sizes = dict(optimizer.model.named_parameters()), {dim: mesh[dim].size for dim in dims}
    parts = optimizer.gradients()
    wide = torch.promote_types(next(iter(parts.values())).dtype, torch.float32)
    norms = torch._foreach_norm(list(parts.values()), dtype=wide)  # lists: a few kernels, no wait of the host
    torch._foreach_div_(norms, [layout_of(params[name]).copies(sizes) ** 0.5 for name in parts])
    square = torch.stack(norms).double().square().sum() / (mesh["replicas"].size if sliced else 1)
    for group in [mesh[dim] for dim in dims] + ([mesh.data] if sliced else []):
        (square,) = sum_over(group, square)
    return float(square) ** 0.5 / optimizer.loss_scale
