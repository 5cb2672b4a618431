"""Initial values of the parameters, and for each a small record, `ParamLayout`: over which ranks
its gradient is summed, and which part of it a rank has.

The parts of this file follow the steps; read a part when you come to its step. The record is empty
in steps 1 to 3: where their parts of this file say `layout_of`, it changes nothing yet. (It says
then that the parameter is whole, and that its gradient is summed over dp.) From step 4 on, each
step notes in it what it changes.
"""

import hashlib
import math
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Group, Mesh, all_reduce
from common.model import Decoder

# --- Step 1: initial values -----------------------------------------------------------------------


def draw(value: Tensor, name: str, n_layers: int, seed: int) -> Tensor:
    """Fill `value`, a whole parameter in fp32, with its initial numbers; return it. They are a
    function of seed, name and shape, whatever the layout.

    Norms start at one. Matrices are normal with standard deviation 0.02, divided by sqrt(2
    n_layers) for o_proj and down_proj, whose output is added to the residual stream (Radford et
    al., GPT-2, section 2.3).
    """
    if value.dim() == 1:  # a norm; there are no biases
        return value.fill_(1.0)
    std = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std = 0.02 / (2 * n_layers) ** 0.5
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # PyTorch's generator for CPUs uses only the low 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return value.normal_(0.0, std, generator=generator)


def draw_all(named: list[tuple[str, Tensor]], n_layers: int, seed: int) -> Iterator[Tensor]:
    """Yield the initial values of whole parameters, in fp32, in order: `draw` for each.

    Only for speed, up to 8 threads draw a parameter each. (One draws tens of millions of numbers a
    second, and llama3-8b has 8 billion.)
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
    threads = max(1, min(8, (os.cpu_count() or 1) // ranks))
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(named), threads):  # not all at once, which would fill memory
            drawing = []
            for name, param in named[start : start + threads]:
                value = torch.empty(full_shape(param))
                drawing.append(pool.submit(draw, value, name, n_layers, seed))
            for future in drawing:
                yield future.result()


def materialize(
    model: Decoder,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    only: Collection[str] | None = None,
):
    """Allocate and initialise parameters of a meta-device model: those that `only` names, or all.
    A meta tensor cannot be filled, so each nn.Parameter is replaced by a new one: add hooks on
    parameters after this call. (Hooks on modules may come before.)

    A rank draws each whole parameter, and keeps what the record describes: in steps 1 to 3 all of
    it. (Step 3's ZeRO calls this once for each unit, with `only` its names. Stage 3 frees a unit
    before it draws the next, so that the whole model is never in memory.)
    """
    chosen = []
    for name, param in model.named_parameters():
        if only is None or name in only:
            chosen.append((name, param))
    drawn = draw_all(chosen, model.config.n_layers, seed)
    for (_, param), value in zip(chosen, drawn, strict=True):
        for shard in layout_of(param).shards:  # from step 4 on
            value = shard_of(value, shard)
        filled = nn.Parameter(value.to(device, dtype))
        filled.parallel_layout = layout_of(param)
        replace_param(model, param, filled)
    materialize_buffers(model, device)  # only step 7 has any


def replace_param(model: nn.Module, old: nn.Parameter, new: nn.Parameter):
    """Put `new` in the place of `old` in all modules that have it: a tied matrix is in two."""
    for module in model.modules():
        for key, param in list(module.named_parameters(recurse=False)):
            if param is old:
                setattr(module, key, new)


# --- Step 2: the record ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamLayout:
    """The record of one parameter. In steps 1 to 3 all have the default one: the parameter is
    whole, and its gradient is summed over dp. (`Shard`, below, shows the records of later steps.)
    """

    # The group over which the sync of step 2, or the optimizer of step 3, sums its gradient. From
    # step 5 on "data", which is dp x cp, and in step 7, for experts, "expert_data"
    data_group: str = "dp"
    # Step 4: one for each time it was sharded, in order
    shards: tuple["Shard", ...] = ()
    # Step 4: groups over which its gradient must still be summed (`sum_partial_gradients`)
    partial_over: tuple[str, ...] = ()
    # Step 6, a tied matrix: 2 if the first pipeline stage and the last, on two ranks, both hold it,
    # and sum its gradient (`sum_tied`)
    stage_copies: int = 1


def layout_of(param: Tensor) -> ParamLayout:
    """The record of a parameter; by default it is whole, and its gradient is summed over dp."""
    return getattr(param, "parallel_layout", ParamLayout())


def data_group_of(param: Tensor, mesh: Mesh) -> Group:
    """The ranks over which the sync of step 2, or the optimizer of step 3, sums a parameter's
    gradient: in steps 2 to 4 `mesh["dp"]`. They train the same weights on other sequences (from
    step 5 on: other tokens).
    """
    return mesh[layout_of(param).data_group]


# --- Step 3: the global norm ----------------------------------------------------------------------


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sharded: bool) -> float:
    """The L2 norm of the whole gradient, of which a rank may hold only a part. Call it after all
    sums over ranks. `sharded`: whether ZeRO shards gradients (`optimizer.sharded`).

    If two ranks hold the same gradient [3 4], the sum of all squares over both would be 50, not 25.
    So each rank divides its squares by `copies`, the number of ranks that hold the same elements.
    In step 3, on 8 ranks of dp, copies is 8 without ZeRO, because all hold the whole gradient, and
    1 with ZeRO, because it is cut into 8 parts. In general it is the number of ranks /
    `distinct_parts`. From step 4 on, for example with tp 2 and dp 4:

        copies                   a matrix, sharded over tp    the weight of a norm
        without ZeRO             8 / 2 = 4                    8 / 1 = 8
        with ZeRO over dp        8 / (2 x 4) = 1              8 / 4 = 2

    (Of a tied matrix on two stages there are twice as many: step 6.)
    """
    params = dict(model.named_parameters())
    norms = []
    copies = []
    for name, gradient in gradients.items():
        record = layout_of(params[name])
        norms.append(torch.linalg.vector_norm(gradient))
        copies.append(record.stage_copies * mesh.world / distinct_parts(record, mesh, sharded))
    squares = torch.stack(norms).double().square()
    total = (squares / squares.new_tensor(copies)).sum()
    for name in norm_groups(mesh):
        all_reduce(total, mesh[name]).wait()
    return total.sqrt().item()


def distinct_parts(record: ParamLayout, mesh: Mesh, sharded: bool) -> int:
    """Into how many parts the ranks cut a gradient: 1 if all hold the same elements, 4 if tp 2 and
    ZeRO over dp 2 shard it.
    """
    groups = {shard.over for shard in record.shards}
    if "pp" in mesh.groups:
        groups.add("pp")  # a stage's parameters are on 1/pp of the ranks, as if pp sharded them
    if sharded:
        groups.add(record.data_group)
    return math.prod(mesh[name].size for name in groups)


def norm_groups(mesh: Mesh) -> list[str]:
    """The groups over which to sum, one after another, to get the sum over all ranks: if ranks are
    a grid, first each row is summed, then each column, and all ranks have the sum of all.

    In step 3 that is dp alone. From step 5 on, "data", which is dp x cp, saves a message.
    """
    if "data" not in mesh.groups:
        return list(mesh.sizes)
    return ["data"] + [name for name in mesh.sizes if name not in ("dp", "cp")]


# --- Step 4: shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """This rank holds the indices `start` to `stop` - 1 of dimension `dim` of a tensor.

    From step 4 on, each dimension of parallelism notes in a parameter's record what it changes.
    Initial weights, gradient sums, the ranks among which ZeRO shards, checkpoints and the global
    norm follow the record. On the first of two ranks of tp (with SP), or of ep:

        parameter (full shape)                shards                   partial_over   data_group
        step 4: q_proj.weight [128, 128]      dim 0 over tp: 0-63      ()             "dp"
                norm.weight [128]             none                     ("tp",)        "dp"
        step 5: the same                      the same                 the same       "data"
        step 7: up_proj.weight [8, 352, 128]  dim 0 over ep: 0-3       ()             "expert_data"
                router.weight [8, 128]        none                     ("tp",)        "data"

    (q_proj.weight is stored [out, in]: its dim 0 has the columns of W in y = x W. Dim 0 of step 7's
    up_proj.weight has the experts.) A gradient is always summed over its `data_group`. Some must
    also be summed over tp, because with SP the ranks of tp have different tokens: their record says
    so in `partial_over`. Where ZeRO cuts is not in the record, because the shards of its units
    (step 3) cut across parameters.

    Shards are equally long, so the last ones may go beyond the tensor, with padding: of 257 rows on
    two ranks, the second has 129 to 257, and row 257 is padding. (If an optional technique shards a
    dimension twice, the second shard counts from the start of the first.)
    """

    dim: int
    over: str  # a group of the mesh
    start: int
    stop: int
    full: int  # the size of the dimension before it was sharded: 257


def note_layout(param: Tensor, **changes: Any):
    """Change fields of a parameter's record."""
    param.parallel_layout = replace(layout_of(param), **changes)


def shard_of(full: Tensor, shard: Shard) -> Tensor:
    """This rank's shard of a tensor, zero in the padding. It may be all padding."""
    shape = list(full.shape)
    shape[shard.dim] = shard.stop - shard.start
    local = full.new_zeros(shape)
    start = min(shard.start, full.shape[shard.dim])
    length = min(shard.stop, full.shape[shard.dim]) - start
    local.narrow(shard.dim, 0, length).copy_(full.narrow(shard.dim, start, length))
    return local


def full_shape(param: Tensor) -> list[int]:
    """The shape of the whole parameter, of which this rank may hold a shard."""
    shape = list(param.shape)
    # In reverse order: if a dimension was sharded twice, the first Shard has its whole size
    for shard in reversed(layout_of(param).shards):
        shape[shard.dim] = shard.full
    return shape


# --- Step 7: buffers ------------------------------------------------------------------------------


def materialize_buffers(model: nn.Module, device: torch.device):
    """Allocate the buffers of a meta-device model, and fill them with zeros."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, torch.zeros_like(buffer, device=device))
