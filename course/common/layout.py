"""One small record per parameter: how it is cut, and over which ranks its gradient is still to be summed.

Every dimension of parallelism notes in this record what it did to a parameter. Three functions below read it: the one
that fills in initial weights, the one that sums partial gradients, and the one that takes the global norm.

    parameter (full shape)          splits                       partial_over     data
    q_proj.weight   [128, 128]      dim 0 over tp: rows 0-63     ()               "dp"
    norm.weight     [128]           none                         ("tp",)          "dp"      (sequence parallelism)
"""

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh, all_reduce
from common.model import Decoder, wide

BLOCK = 2**20  # numbers that one generator draws; so whoever needs a part of a large matrix may draw only its blocks


@dataclass(frozen=True)
class Split:
    """One cut: this rank holds indices start..stop-1 of dimension `dim`, of which there are `full`.

    Where a size does not divide, `stop` may pass `full`: the rows beyond are padding and stay zero.
    """

    dim: int
    over: str  # a dimension of the mesh
    start: int
    stop: int
    full: int


@dataclass(frozen=True)
class Layout:
    """The record of one parameter."""

    splits: tuple[Split, ...] = ()  # its cuts, in the order in which they were made
    partial_over: tuple[str, ...] = ()  # mesh dimensions whose ranks each have a part of the sum that is its gradient
    data: str = "dp"  # the mesh dimension whose ranks hold the same and see other tokens: step 2 sums, ZeRO cuts there


def layout_of(param: Tensor) -> Layout:
    """The record of a parameter; one that no dimension has touched is whole and its gradient is complete."""
    return getattr(param, "parallel_layout", Layout())


def note_layout(param: Tensor, **changes: Any):
    """Change fields of a parameter's record."""
    param.parallel_layout = replace(layout_of(param), **changes)


def cut(weight: nn.Parameter, dim: int, group: Group) -> nn.Parameter:
    """This rank's part of a parameter on the meta device, with its record; the parameter itself in a group of one."""
    if group.size == 1:
        return weight
    full, shape = weight.shape[dim], list(weight.shape)
    shape[dim] = length = -(-full // group.size)
    part = nn.Parameter(torch.empty(shape, device="meta"), weight.requires_grad)
    split = Split(dim, group.name, group.rank * length, (group.rank + 1) * length, full)
    part.parallel_layout = replace(layout_of(weight), splits=(*layout_of(weight).splits, split))
    return part


def draw(name: str, shape: list[int], n_layers: int, seed: int) -> Tensor:
    """The initial value of a whole parameter, fp32: a function of its name and the seed, whatever the layout.

    Norms start at one. Matrices are normal with standard deviation 0.02; those that write to the residual stream are
    divided by sqrt(2 L) (Radford et al., GPT-2, section 2.3).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = 0.02 / (2 * n_layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
    full = torch.empty(shape)
    for i, block in enumerate(full.view(-1).split(BLOCK)):
        digest = hashlib.sha256(f"{seed}:{name}{f':{i * BLOCK}' if i else ''}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        block.normal_(0.0, std, generator=generator)
    return full


def take(full: Tensor, split: Split) -> Tensor:
    """The part of a tensor that a cut leaves, zero in the padding."""
    indices = range(split.full)[split.start : split.stop]
    shape = list(full.shape)
    shape[split.dim] = split.stop - split.start
    part = full.new_zeros(shape)
    part.narrow(split.dim, 0, len(indices)).copy_(full.narrow(split.dim, min(split.start, split.full), len(indices)))
    return part


def materialize(
    model: Decoder, seed: int, device: torch.device, dtype: torch.dtype, only: Collection[str] | None = None
):
    """Give parameters on the meta device (all, or `only` these names) their initial value: draw whole, keep our part.

    Tied parameters stay tied, and records are kept.
    """
    for name, param in list(model.named_parameters()):
        if only is not None and name not in only:
            continue
        shape = list(param.shape)
        for split in reversed(layout_of(param).splits):
            shape[split.dim] = split.full
        value = draw(name, shape, model.config.n_layers, seed)
        for split in layout_of(param).splits:
            value = take(value, split)
        filled = nn.Parameter(value.to(device, dtype), param.requires_grad)
        filled.parallel_layout = layout_of(param)
        for module in model.modules():
            for key, held in module._parameters.items():
                if held is param:
                    module._parameters[key] = filled


def sum_partial_gradients(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh):
    """Sum gradients, in place, over the groups that their records name in `partial_over`: one all-reduce a group.

    It comes after the sum over dp. Under ZeRO a rank sums its slices, which the ranks of the group cut alike.
    """
    params = dict(model.named_parameters())
    for group in mesh.groups.values():
        parts = [grad for name, grad in gradients.items() if group.name in layout_of(params[name]).partial_over]
        if parts and group.size > 1:
            flat = torch.cat([part.flatten() for part in parts])
            all_reduce(flat, group).wait()
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view_as(part))


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sliced: bool = False) -> float:
    """The L2 norm of the whole gradient. Every element must count once, although some are held by several ranks.

    Each rank adds up its squares, and an element that c ranks hold counts 1/c on each. Ranks of different pipeline
    stages, of different parts of a cut, and of different slices (`sliced`: ZeRO) hold different elements; all others
    hold the same. Then the squares are summed over all ranks.
    """
    params = dict(model.named_parameters())
    square = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for name, grad in gradients.items():
        record = layout_of(params[name])
        apart = {"pp", *(split.over for split in record.splits), *((record.data,) if sliced else ())}
        copies = mesh.world / math.prod(group.size for dim, group in mesh.groups.items() if dim in apart)
        square = square + grad.norm(dtype=wide(grad.dtype)).double().square() / copies
    for dim in mesh.sizes:
        all_reduce(square, mesh[dim]).wait()
    return square.sqrt().item()
