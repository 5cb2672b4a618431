"""A small record for each parameter, `ParamLayout`. It says over which ranks the parameter's
gradient is summed, and which part of the parameter this rank has.

The parts of this file follow the steps; read a part when you come to its step. Steps 1 to 3 change
nothing in the record; from step 4 on, each step notes in it what it changes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, Mesh, all_reduce
from common.model import Decoder

# --- Step 2: the record ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamLayout:
    """The record of one parameter. In steps 1 to 3 all have the default one: the parameter is
    whole, and its gradient is summed over dp. (`note_layout`, below, shows the records of later
    steps.)
    """

    # The group over which the sync of step 2, or the optimizer of step 3, sums its gradient
    data_group: str = "dp"
    # From step 4 on: its cuts, in the order in which they were made
    shards: tuple["Shard", ...] = ()
    # From step 4 on: groups over which its gradient must also be summed (`sum_partial_gradients`)
    partial_over: tuple[str, ...] = ()
    # Step 6: 2 for a tied matrix that both the first and the last pipeline stage hold (`sum_tied`)
    stage_copies: int = 1


def layout_of(param: Tensor) -> ParamLayout:
    """The record of a parameter."""
    return getattr(param, "parallel_layout", ParamLayout())


def data_group_of(param: Tensor, mesh: Mesh) -> Group:
    """The ranks over which the sync of step 2, or the optimizer of step 3, sums a parameter's
    gradient: in steps 2 to 4 `mesh["dp"]`. They train the same weights on different tokens.
    """
    return mesh[layout_of(param).data_group]


# --- Step 3: the global norm ----------------------------------------------------------------------


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, sharded: bool) -> float:
    """The L2 norm of the whole gradient, of which a rank may hold only a part. Call it after all
    sums over ranks. `sharded`: whether ZeRO shards gradients.

    If two ranks hold the same gradient [3 4], the sum of all squares over both would be 50, not 25.
    So each rank divides its squares by `copies`, the number of ranks that hold the same elements.
    In step 3, on 8 ranks of dp, copies is 8 without ZeRO, because all hold the whole gradient, and
    1 with ZeRO, because it is cut into 8 parts. In general

        copies = number of ranks / `distinct_parts`

    From step 4 on, for example with tp 2 and dp 4:

        copies                   a matrix, sharded over tp    the weight of a norm
        without ZeRO             8 / 2 = 4                    8 / 1 = 8
        with ZeRO over dp        8 / (2 x 4) = 1              8 / 4 = 2

    (Of a tied matrix on two stages there are twice as many: step 6.)
    """
    params = dict(model.named_parameters())
    total = 0.0
    for name, gradient in gradients.items():
        record = layout_of(params[name])
        copies = record.stage_copies * mesh.world / distinct_parts(record, mesh, sharded)
        squares = torch.linalg.vector_norm(gradient).double().square()
        total = total + squares / copies
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
    """The groups over which to sum, one after another, to get the sum over all ranks. (The ranks
    are a grid: after each row is summed, and then each column, all have the sum of all.)

    In step 3 that is dp alone. From step 5 on, "data", which is dp x cp, saves a message.
    """
    if "data" not in mesh.groups:
        return list(mesh.sizes)
    return ["data"] + [name for name in mesh.sizes if name not in ("dp", "cp")]


# --- Step 4: shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """This rank holds the indices `start` to `stop` - 1 of dimension `dim` of a tensor.

    Shards are equally long, so the last ones may go beyond the tensor, with padding: of 257 rows on
    two ranks, the second has 129 to 257, and row 257 is padding. (If a dimension is cut twice, the
    second shard counts from the start of the first.)
    """

    dim: int
    over: str  # a group of the mesh
    start: int
    stop: int
    full: int  # the size of the dimension before it was sharded: 257


def note_layout(param: Tensor, **changes: Any):
    """Change fields of a parameter's record.

    tp, cp and ep note what they change (pp only for a tied matrix). Initial weights, gradient sums,
    the ranks among which ZeRO shards, checkpoints and the global norm follow the records. On the
    first of two ranks of tp (with SP), or of ep:

        parameter (full shape)                shards                   partial_over   data_group
        step 4: q_proj.weight [128, 128]      dim 0 over tp: 0-63      ()             "dp"
                norm.weight [128]             none                     ("tp",)        "dp"
        step 5: the same                      the same                 the same       "data"
        step 7: up_proj.weight [8, 352, 128]  dim 0 over ep: 0-3       ()             "expert_data"
                router.weight [8, 128]        none                     ("tp",)        "data"

    (q_proj.weight is stored [out, in]: its dim 0 has the columns of W in y = x W. Dim 0 of step 7's
    up_proj.weight has the experts.) A gradient is always summed over its `data_group`: "data" is dp
    x cp, "expert_data" the ranks that hold the same experts. Some must also be summed over tp,
    because with SP the ranks of tp have different tokens. Where ZeRO cuts is not in the record,
    because the shards of its units (step 3) cut across parameters.
    """
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
    # In reverse order: if a dimension was cut twice, the first Shard has its whole size
    for shard in reversed(layout_of(param).shards):
        shape[shard.dim] = shard.full
    return shape
