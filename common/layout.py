"""Initial values, and one small record per parameter: how it is sharded, and over which ranks its
gradient is summed.

Step 1 needs `draw` and `materialize`, step 2 `data_group` and `layout_of`, step 3 `global_norm`.
From step 4 on, each dimension of parallelism notes in a parameter's record what it changes. Initial
weights, gradient sums, shards of optimizer state, checkpoints and the global norm follow the
record.

    parameter (full shape)                shards                      partial_over   data_group
    steps 1 to 3: every parameter         none                        ()             "dp"
    step 4: q_proj.weight [128, 128]      dim 0 over tp: rows 0-63    ()             "dp"
            norm.weight [128]             none                        ("tp",)        "dp"      (SP)
    step 5: the same                      the same                    the same       "data"
    step 7: up_proj.weight [8, 352, 128]  dim 0 over ep: rows 0-3     ()             "expert_data"
            router.weight [8, 128]        none                        ("tp",)        "data"

All gradients are summed over `data_group`, a group of ranks. `partial_over` names further groups
over which this gradient is summed (step 4, `sum_partial_gradients`). Rows are those of the first of
two ranks. ZeRO's shards are not in the record, because its units (step 3) cut across parameters.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh, all_reduce
from common.model import Decoder


def draw(name: str, shape: list[int], n_layers: int, seed: int) -> Tensor:
    """The initial value of a whole parameter, fp32: a function of seed, name, shape and number of
    layers, whatever the layout.

    Norms start at one. Matrices are normal with standard deviation 0.02; those that write to the
    residual stream are divided by sqrt(2 n_layers) (Radford et al., GPT-2, section 2.3).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std = 0.02 / (2 * n_layers) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # PyTorch's generator for CPUs uses 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class Shard:
    """From step 4 on: this rank holds indices start..stop-1 of dimension `dim`. Indices >= `full`
    are padding.
    """

    dim: int
    over: str  # a group of the mesh
    start: int
    stop: int
    full: int  # the size of the whole dimension


@dataclass(frozen=True)
class ParamLayout:
    """From step 2 on: the record of one parameter."""

    shards: tuple[Shard, ...] = ()  # from step 4 on: one for each time it was sharded, in order
    # From step 4 on: groups over which its gradient must still be summed
    partial_over: tuple[str, ...] = ()
    # The group whose ranks hold the same weights and see different tokens. Step 5: "data", dp x cp
    data_group: str = "dp"
    # From step 6 on, of a tied matrix: pipeline stages, on different ranks, that hold it; and
    # backward passes of a micro-batch that add to its gradient (2: on two stages of one rank)
    stage_copies: int = 1
    backwards: int = 1


def layout_of(param: Tensor) -> ParamLayout:
    """The record of a parameter; by default it is whole, and its gradient is summed over dp."""
    return getattr(param, "parallel_layout", ParamLayout())


def note_layout(param: Tensor, **changes: Any):
    """Change fields of a parameter's record."""
    param.parallel_layout = replace(layout_of(param), **changes)


def shard_of(full: Tensor, shard: Shard) -> Tensor:
    """This rank's shard of a tensor, zero in the padding."""
    shape = list(full.shape)
    shape[shard.dim] = shard.stop - shard.start
    local = full.new_zeros(shape)
    start = min(shard.start, full.shape[shard.dim])
    length = min(shard.stop, full.shape[shard.dim]) - start
    local.narrow(shard.dim, 0, length).copy_(full.narrow(shard.dim, start, length))
    return local


def full_shape(param: Tensor) -> list[int]:
    """The shape of the whole parameter, of which this rank has a shard."""
    shape = list(param.shape)
    # If a dimension was sharded twice (over ep, then tp), its first shard has the full size
    for shard in reversed(layout_of(param).shards):
        shape[shard.dim] = shard.full
    return shape


def replace_param(model: nn.Module, old: nn.Parameter, new: nn.Parameter):
    """Put `new` in the place of `old` in all modules that have it: a tied matrix is in two."""
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            if param is old:
                setattr(module, key, new)


def materialize(
    model: Decoder,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    only: Collection[str] | None = None,
):
    """Allocate and initialise parameters of a meta-device model: those that `only` names, or all.

    From step 4 on, a rank draws the whole parameter, and keeps the shard that the record describes.
    """
    for name, param in list(model.named_parameters()):
        if only is not None and name not in only:
            continue
        value = draw(name, full_shape(param), model.config.n_layers, seed)
        for shard in layout_of(param).shards:
            value = shard_of(value, shard)
        filled = nn.Parameter(value.to(device, dtype), param.requires_grad)
        filled.parallel_layout = layout_of(param)
        replace_param(model, param, filled)
    for module in model.modules():  # buffers: from step 7 on
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                persistent = key in module.state_dict()  # whether checkpoints save it
                module.register_buffer(key, torch.zeros_like(buffer, device=device), persistent)


def ranks_that_differ(record: ParamLayout, sharded: bool) -> set[str]:
    """Groups along which ranks hold different elements of a gradient. `sharded`: the gradients are
    ZeRO's shards.
    """
    names = {"pp"}
    for shard in record.shards:
        names.add(shard.over)
    if sharded:
        names.add(record.data_group)
    return names


def global_norm(
    model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sharded: bool = False
) -> float:
    """From step 3 on: the L2 norm of the whole gradient, of which ranks hold shards.

    If c ranks hold an element, each adds 1/c of its square, so each element counts once in total.
    An example: 8 ranks, tp 2 and dp 4. Without ZeRO a matrix's elements are on 4 ranks, those of a
    norm's weight on 8; with ZeRO over dp (`sharded`), on 1 and on 2.

    Ranks have different elements along pp, along the groups that shard the parameter, and along
    data_group if `gradients` are ZeRO's shards. Other ranks hold copies, as do two stages of a tied
    matrix (`stage_copies`).
    """
    params = dict(model.named_parameters())
    by_copies: dict[float, list[Tensor]] = {}
    for name, gradient in gradients.items():
        record = layout_of(params[name])
        distinct = 1
        for group in ranks_that_differ(record, sharded):
            if group in mesh.groups:
                distinct *= mesh[group].size
        copies = record.stage_copies * mesh.world / distinct
        by_copies.setdefault(copies, []).append(gradient)
    square = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
    for copies, held in by_copies.items():
        square = square + nn.utils.get_total_norm(held).double().square() / copies
    for group in norm_groups(mesh):
        all_reduce(square, mesh[group]).wait()
    return square.sqrt().item()


def norm_groups(mesh: Mesh) -> list[str]:
    """Groups along which to sum, one after the other, so that each rank counts once. From step 5
    on, "data" takes the place of dp and cp.
    """
    if "data" not in mesh.groups:
        return list(mesh.sizes)
    return ["data"] + [name for name in mesh.sizes if name not in ("dp", "cp")]


def data_group(param: Tensor, mesh: Mesh) -> Group:
    """The ranks that hold the same shard of a parameter and see different tokens: its gradient is
    summed over them.

    In steps 2 to 4 these are `mesh["dp"]`. From step 5 on the parameter's record names another
    group.
    """
    return mesh[layout_of(param).data_group]
