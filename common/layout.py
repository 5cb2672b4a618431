"""A small record for each parameter, `ParamRecord`. It says over which ranks the gradient is summed
and, from step 4 on, which shard of the parameter this rank has. (Shards are here those of tp and of
step 7's ep, never ZeRO's.)

Read each part of this file when you come to its step. Steps 1 to 3 change nothing in the record.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.comm import Group, Mesh, all_reduce
from common.model import Decoder

# --- Step 2: the record ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ParamRecord:
    """The record of one parameter. Step 2 needs only the first field; `note_record` has a table of
    what the steps note.
    """

    # The group over which `sync` sums its gradient; with ZeRO also the group whose ranks share out
    # its update
    data_group: str = "dp"
    # Step 4: which shard this rank has (the class is below); None if the parameter is not cut
    shard: "Shard | None" = None
    # Step 4: a second group, over which `sum_partial_gradients` sums the gradient after `sync`.
    # None for most parameters
    partial_over: str | None = None


def record_of(param: Tensor) -> ParamRecord:
    """A parameter's record; without one, the default."""
    return getattr(param, "parallel_record", ParamRecord())


def data_group_of(param: Tensor, mesh: Mesh) -> Group:
    """The ranks over which `sync` sums a parameter's gradient, in steps 2 to 4 `mesh["dp"]`."""
    return mesh[record_of(param).data_group]


# --- Step 3: the global norm ----------------------------------------------------------------------


def global_norm(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh, zero: bool) -> float:
    """The L2 norm of the whole gradient, of which a rank may hold only a part. Call it after all
    sums over ranks. `zero`: whether each rank of its data_group has only its own part of a gradient
    (ZeRO 1, 2, 3).

    The gradient [3 4] has the norm 5, whose square is 25. If two ranks hold it, the sum of all
    squares over both is 50. So each rank first divides its squares by `copies_of`, the number of
    ranks that hold the same elements. With ZeRO one rank has 3, the other 4, and `copies_of` is 1.
    """
    params = dict(model.named_parameters())
    device = next(iter(params.values())).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, gradient in gradients.items():
        copies = copies_of(record_of(params[name]), mesh, zero)
        square = torch.linalg.vector_norm(gradient).double().square()
        total += square / copies
    all_reduce(total, mesh["all"]).wait()
    return total.sqrt().item()


def copies_of(record: ParamRecord, mesh: Mesh, zero: bool) -> int:
    """How many ranks hold the same elements of a gradient: the number of all ranks, divided by the
    size of each group whose ranks hold different elements.

    In step 3, on 8 ranks of dp: 8 without ZeRO, because all hold the whole gradient; 8 / 8 = 1 with
    ZeRO. In step 4, with tp 2 and dp 4, q_proj.weight is sharded over tp, and a norm's weight is
    not:

                             q_proj.weight    a norm's weight
        without ZeRO         8 / 2 = 4        8
        with ZeRO over dp    8 / 4 / 2 = 1    8 / 4 = 2

    Step 5: without ZeRO, ranks of cp hold the same gradient after the sums, as those of dp do. Step
    6: a tied matrix (embedding and head) is on two stages, so twice as many ranks hold it. Step 7:
    with 16 ranks, pp 1 and ep 8, an expert without ZeRO is on 16 / 8 = 2.
    """
    copies = mesh.world
    if zero:  # each rank of this group has a different part
        copies //= mesh[record.data_group].size
    if record.shard is not None:  # step 4: each rank of this group has a different shard
        copies //= mesh[record.shard.over].size
    if "pp" in mesh.groups:  # step 6: only one stage has it
        copies //= mesh["pp"].size
        if record.partial_over == "ends":  # two stages have it
            copies *= 2
    return copies


# --- Step 4: shards -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """Where this rank's shard lies (not its numbers): the indices `start` to `stop` - 1 of
    dimension `dim` of a tensor.

    Shards are equally long, so the last ones may be padded, or all padding. Of 257 rows on two
    ranks, the second has start 129, stop 258, full 257: its last row is padding. Of 5 rows on four
    ranks, the last has start 6, stop 8: all padding.
    """

    dim: int
    over: str  # the name of the group whose ranks have the shards
    start: int
    stop: int  # may exceed `full`
    full: int  # the size of the dimension before it was sharded


def note_record(param: Tensor, **changes: Any):
    """Change fields of a parameter's record. Steps 4 to 7 note in it what they change; initial
    weights, sums of gradients, ZeRO, the global norm and checkpoints follow it.

    On the first rank of tp 2 (in the last rows of ep 2), with sequence parallelism:

        step  parameter, its full shape     data_group     shard                partial_over
        4     q_proj.weight [128, 128]      "dp"           dim 0 over tp: 0-63  None
        4     a norm's weight [128]         "dp"           None                 "tp"
        5     each                          "data"         as before            as before
        6     a tied matrix on two stages   "data"         dim 0 over tp        "ends"
        7     eight experts' [8, 352, 128]  "expert_data"  dim 0 over ep: 0-3   None
        7     a router's weight [8, 128]    "data"         None                 "tp"

    The gradients of norms and routers must also be summed over tp, because the ranks of tp have
    different tokens of a sequence.
    """
    param.parallel_record = replace(record_of(param), **changes)


def shard_of(whole: Tensor, shard: Shard) -> Tensor:
    """This rank's shard of a tensor, zero in the padding."""
    shape = list(whole.shape)
    shape[shard.dim] = shard.stop - shard.start
    local = whole.new_zeros(shape)
    start = min(shard.start, shard.full)  # a shard that is all padding gets length 0
    length = min(shard.stop, shard.full) - start
    local.narrow(shard.dim, 0, length).copy_(whole.narrow(shard.dim, start, length))
    return local


def full_shape(param: Tensor) -> list[int]:
    """The shape of the whole parameter, of which this rank may hold a shard."""
    shape = list(param.shape)
    shard = record_of(param).shard
    if shard is not None:
        shape[shard.dim] = shard.full
    return shape
