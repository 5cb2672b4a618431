"""Checkpoints: common/checkpoint.py, resume.py and ranks.py. Read them after step 3.

Small exact cases come first, then runs that are resumed in other layouts, damaged, and interrupted.
"""

import errno
import json
import math
import os
import random
import shutil
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import step01_single_gpu as step01
from common import UserError, checkpoint, resume
from common.checkpoint import Checkpoint, Piece, candidates, place_of, whole_parameters
from common.layout import ParamLayout, Shard, shard_of
from common.ranks import Ranks
from tests.equal import BASE, STEP1, Watch, close, draw, together, train
from tests.pool import RankError

cases = pytest.mark.parametrize

# --- Pieces and boxes


def param_of(whole: tuple, *shards: Shard) -> nn.Parameter:
    """This rank's shard of a parameter whose elements are 1, 2, 3, ..."""
    value = torch.arange(1.0, math.prod(whole) + 1).view(whole)
    for shard in shards:
        value = shard_of(value, shard)
    param = nn.Parameter(value)
    param.parallel_layout = ParamLayout(shards)
    return param


RECORDS = {
    "not sharded": ((3, 4), []),
    "rows": ((6, 4), [Shard(0, "tp", 2, 4, 6)]),
    "columns": ((3, 7), [Shard(1, "tp", 4, 8, 7)]),  # 7 columns on 2 ranks: one is padding
    "only padding": ((3, 4), [Shard(0, "tp", 4, 6, 3)]),
    "experts and rows": ((4, 6, 2), [Shard(0, "ep", 2, 4, 4), Shard(1, "tp", 3, 6, 6)]),
    "rows twice": ((10, 2), [Shard(0, "ep", 5, 10, 10), Shard(0, "tp", 3, 6, 5)]),
}


@cases("whole, shards", RECORDS.values(), ids=RECORDS)
def test_box_is_where_shard_of_takes_elements_from(whole, shards):
    """A shard's box in the whole tensor has exactly the elements that `shard_of` keeps of it."""
    param = param_of(whole, *shards)
    found, box, shape = place_of(param)
    close((found, shape), (whole, tuple(param.shape)), "shapes of whole and shard")
    inside = param_of(whole).detach()[tuple(slice(start, stop) for start, stop in box)]
    close(sorted(inside.flatten().tolist()), sorted(param[param > 0].tolist()), "elements")


def saved_pieces(whole: torch.Tensor, tp: int, dim: int, zero: int) -> list[Piece]:
    """What tp x zero ranks save of a tensor: shards along `dim`, each cut into `zero` spans."""
    pieces = []
    length = math.ceil(whole.shape[dim] / tp)
    for rank in range(tp):
        shard = Shard(dim, "tp", rank * length, (rank + 1) * length, whole.shape[dim])
        local = shard_of(whole, shard)
        param = nn.Parameter(local)
        param.parallel_layout = ParamLayout((shard,))
        step = math.ceil(local.numel() / zero)
        for start in range(0, local.numel(), step):
            span = (start, min(start + step, local.numel()))
            tensors = {"master": local.flatten()[slice(*span)].clone()}
            pieces.append(Piece(*place_of(param), span, tensors))
    return pieces


@cases("tp, dim, zero", [(1, 0, 1), (2, 0, 3), (3, 1, 2), (5, 1, 4)])
@cases("to_tp, to_dim", [(1, 0), (2, 1), (4, 0)])
def test_a_shard_is_assembled_from_pieces_of_any_layout(tp, dim, zero, to_tp, to_dim):
    """Each shard of a new layout gets the elements that `shard_of` takes from the whole tensor."""
    whole = draw("whole", 0, 7, 6)
    saved = Checkpoint.__new__(Checkpoint)
    saved.pieces = dict(weight=saved_pieces(whole, tp, dim, zero))
    length = math.ceil(whole.shape[to_dim] / to_tp)
    for rank in range(to_tp):
        shard = Shard(to_dim, "tp", rank * length, (rank + 1) * length, whole.shape[to_dim])
        param = nn.Parameter(shard_of(whole, shard))
        param.parallel_layout = ParamLayout((shard,))
        _, box, shape = place_of(param)
        close(saved.shard("weight", "master", box, shape), param, f"shard of rank {rank}")
    close(saved.whole("weight"), whole, "the whole tensor")


# --- Resumed runs

DENSE = dict(steps=4, save_every=2, n_layers=4)
LAYOUTS = [
    (1, STEP1, {}),
    (2, "step02_ddp", dict(sync="ring")),
    (3, "step03_zero", dict(zero="3", micro_batch_size=2)),
    (4, "step03_zero", dict(zero="2", recompute="full")),
    (4, "step04_tp_sp", dict(tp=2, sp=False, zero="1")),
    (4, "step05_cp_ring", dict(cp=2, tp=2, zero="0")),
    (4, "step06_pipeline", dict(pp=2, zero="0", sync="naive")),
    (8, "step06_pipeline", dict(pp=2, cp=2, tp=2, zero="3", schedule="interleaved")),
]
EXPERTS = DENSE | dict(experts=4, aux_loss_coeff=0.3)
S7 = "step07_moe_ep"
ROWS = [
    (DENSE | dict(tied=True), LAYOUTS[7], LAYOUTS[2]),
    (EXPERTS, (1, S7, {}), (4, S7, dict(cp=2, ep=4, zero="2"))),
    (EXPERTS | dict(balance="bias"), (4, S7, dict(pp=2, tp=2, ep=2, zero="3")), (1, S7, {})),
]
MATRIX = [(DENSE, one, other) for one in LAYOUTS for other in LAYOUTS]


@cases("base, saved, resumed", ROWS + [pytest.param(*row, marks=pytest.mark.exhaustive) for row in MATRIX])
def test_a_run_resumes_in_another_layout(pools, tmp_path, base, saved, resumed):
    """Losses, norms and final weights are those of the uninterrupted run, to 1e-10 in fp64."""
    n, step, flags = saved
    whole = pools(n).run(train, step, base | flags | dict(out=f"{tmp_path}/a"))
    n, step, flags = resumed
    flags = flags | dict(out=f"{tmp_path}/b", resume=f"{tmp_path}/a/checkpoints/step-00000002")
    rest = pools(n).run(train, step, base | flags)
    for i, what in enumerate(("losses", "norms")):
        close(torch.tensor(rest[0][i]), torch.tensor(whole[0][i][2:]), what)
    expected = together([piece for rank in whole for piece in rank[3]])
    found = together([piece for rank in rest for piece in rank[3]])
    close(sorted(found), sorted(expected), "names")
    for name, value in expected.items():
        close(found[name], value, name)
