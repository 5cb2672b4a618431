"""One small record per parameter: how it is cut, and over which ranks its gradient is still to be summed.

Every dimension of parallelism notes in this record what it did to a parameter. Whoever fills in initial weights, sums
gradients, cuts optimizer state or takes the global norm reads it.

    parameter (full shape)          splits                       partial_over     data_group
    q_proj.weight   [128, 128]      dim 0 over tp: rows 0-63     ()               "dp"
    norm.weight     [128]           none                         ("tp",)          "dp"      (sequence parallelism)
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

BLOCK = 2**20  # numbers that one generator draws; so whoever needs a part of a large matrix may draw only its blocks


@dataclass(frozen=True)
class Split:
    """One cut: this rank holds indices start..stop-1 of dimension `dim`. Those from `full` on are padding, and zero."""

    dim: int
    over: str  # a dimension of the mesh
    start: int
    stop: int
    full: int  # the size of the dimension


@dataclass(frozen=True)
class Layout:
    """The record of one parameter."""

    splits: tuple[Split, ...] = ()  # its cuts, in the order in which they were made
    partial_over: tuple[str, ...] = ()  # mesh dimensions over which its gradient must still be summed
    data_group: str = "dp"  # its ranks hold the same, see different tokens: step 2 sums, ZeRO cuts
    stages: int = 1  # of a pipeline that hold it, on different ranks


def layout_of(param: Tensor) -> Layout:
    """The record of a parameter; one that no dimension has touched is whole and its gradient is complete."""
    return getattr(param, "parallel_layout", Layout())


def note_layout(param: Tensor, **changes: Any):
    """Change fields of a parameter's record."""
    param.parallel_layout = replace(layout_of(param), **changes)


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
    part = full.movedim(split.dim, -1)[..., split.start : split.stop]
    padding = split.stop - split.start - part.shape[-1]
    return F.pad(part, (0, padding)).movedim(-1, split.dim).contiguous()


def materialize(model: Decoder, seed: int, device: torch.device, dtype: torch.dtype, only: Collection[str] = ()):
    """Give parameters on the meta device (all, or `only` these names) their initial value: draw all, keep our part."""
    for name, param in list(model.named_parameters()):
        if only and name not in only:
            continue
        shape = list(param.shape)
        for split in reversed(layout_of(param).splits):  # the first cut knows the full size
            shape[split.dim] = split.full
        value = draw(name, shape, model.config.n_layers, seed)
        for split in layout_of(param).splits:
            value = take(value, split)
        filled = nn.Parameter(value.to(device, dtype), param.requires_grad)
        filled.parallel_layout = layout_of(param)
        for module in model.modules():  # several, if it is tied
            module._parameters |= {key: filled for key, held in module._parameters.items() if held is param}


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sliced: bool = False) -> float:
    """The L2 norm of the whole gradient. An element that c ranks hold counts 1/c on each, and so once in the sum.

    Pipeline ranks, parts of a cut and slices (`sliced`: ZeRO) hold different elements; all other ranks hold the same.
    What several pipeline stages hold is counted once, too (`stages`).
    """
    params, alike = dict(model.named_parameters()), {}  # gradients by their number of copies
    for name, grad in gradients.items():
        record = layout_of(params[name])
        apart = {"pp", *(split.over for split in record.splits), *((record.data_group,) if sliced else ())}
        parts = math.prod(group.size for dim, group in mesh.groups.items() if dim in apart)
        alike.setdefault(record.stages * mesh.world / parts, []).append(grad)
    square = sum(nn.utils.get_total_norm(some).double().square() / copies for copies, some in alike.items())
    for dim in mesh.sizes:
        all_reduce(square, mesh[dim]).wait()
    return square.sqrt().item()
