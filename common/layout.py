"""Initial values, and one small record per parameter: how it is sharded, and over which ranks its gradient is summed.

Chapter 1 needs `draw` and `materialize`. From chapter 2 on, each dimension of parallelism notes in a parameter's record
what it changes. Initial weights, gradient sums, shards of optimizer state and the global norm follow the record.

    parameter (full shape)          shards                       partial_over     data_dim
    q_proj.weight   [128, 128]      dim 0 over tp: rows 0-63     ()               "dp"
    norm.weight     [128]           none                         ("tp",)          "dp"      (sequence parallelism)

All gradients are summed over `data_dim`. `partial_over`: further dimensions over which this gradient is summed.
"""

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Mesh, all_reduce
from common.model import Decoder


def draw(name: str, shape: list[int], n_layers: int, seed: int) -> Tensor:
    """The initial value of a whole parameter, fp32: a function of its name and the seed, whatever the layout.

    Norms start at one. Matrices are normal with standard deviation 0.02; those that write to the residual stream are
    divided by sqrt(2 n_layers) (Radford et al., GPT-2, section 2.3).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = 0.02 / (2 * n_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def materialize(model: Decoder, seed: int, device: torch.device, dtype: torch.dtype, only: Collection[str] = ()):
    """Allocate and initialise parameters of a meta-device model: those that `only` names, or all if it is empty.

    From chapter 4 on, a rank draws the whole parameter, and keeps the shard that the record describes.
    """
    for name, param in list(model.named_parameters()):
        if only and name not in only:
            continue
        shape = list(param.shape)
        for shard in reversed(layout_of(param).shards):  # a dimension sharded twice: the first shard has its full size
            shape[shard.dim] = shard.full
        value = draw(name, shape, model.config.n_layers, seed)
        for shard in layout_of(param).shards:
            value = shard_of(value, shard)
        filled = nn.Parameter(value.to(device, dtype), param.requires_grad)
        filled.parallel_layout = layout_of(param)
        for module in model.modules():  # a tied parameter is in several modules
            for key, held in list(module.named_parameters(recurse=False)):
                if held is param:
                    setattr(module, key, filled)
    if not only:
        materialize_buffers(model, device)


def materialize_buffers(model: Decoder, device: torch.device):
    """From step 7 on: allocate the buffers of a meta-device model, as zeros."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(key, torch.zeros_like(buffer, device=device), key in module.state_dict())


@dataclass(frozen=True)
class Shard:
    """From chapter 4 on: this rank holds indices start..stop-1 of dimension `dim`. Indices >= `full` are padding."""

    dim: int
    over: str  # a dimension of the mesh
    start: int
    stop: int
    full: int  # the size of the whole dimension


@dataclass(frozen=True)
class ParamLayout:
    """From chapter 2 on: the record of one parameter."""

    shards: tuple[Shard, ...] = ()  # from chapter 4 on: one for each time it was sharded, in order
    partial_over: tuple[str, ...] = ()  # from chapter 4 on: dimensions over which its gradient must still be summed
    data_dim: str = "dp"  # its ranks hold the same weights and see different tokens; chapter 5: "data", dp x cp
    stage_copies: int = 1  # from chapter 6 on: pipeline stages, on different ranks, that hold it


def layout_of(param: Tensor) -> ParamLayout:
    """From chapter 2 on: the record of a parameter; by default it is whole, and its gradient is summed over dp."""
    return getattr(param, "parallel_layout", ParamLayout())


def note_layout(param: Tensor, **changes: Any):
    """From chapter 4 on: change fields of a parameter's record."""
    param.parallel_layout = replace(layout_of(param), **changes)


def shard_of(full: Tensor, shard: Shard) -> Tensor:
    """From chapter 4 on: this rank's shard of a tensor, zero in the padding."""
    local = full.movedim(shard.dim, -1)[..., shard.start : shard.stop]
    padding = shard.stop - shard.start - local.shape[-1]
    return F.pad(local, (0, padding)).movedim(-1, shard.dim).contiguous()


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sharded: bool = False) -> float:
    """From chapter 3 on: the L2 norm of the whole gradient, of which ranks hold shards.

    If c ranks hold an element, each adds 1/c of its square, so each element counts once in total. Ranks have different
    elements along pp, along the mesh dimensions that shard the parameter, and along data_dim if `gradients` are ZeRO's
    shards (`sharded`: --zero > 0). Other ranks hold copies, as do two stages of a tied matrix (`stage_copies`).
    """
    params, by_copies = dict(model.named_parameters()), {}
    for name, gradient in gradients.items():
        record = layout_of(params[name])
        apart = {"pp", *(shard.over for shard in record.shards), *((record.data_dim,) if sharded else ())}
        holders = math.prod(group.size for dim, group in mesh.groups.items() if dim in apart)
        by_copies.setdefault(record.stage_copies * mesh.world / holders, []).append(gradient)
    square = sum(nn.utils.get_total_norm(alike).double().square() / copies for copies, alike in by_copies.items())
    for dim in mesh.sizes:
        all_reduce(square, mesh[dim]).wait()
    return square.sqrt().item()
