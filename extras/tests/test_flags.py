"""Flags whose sizes do not fit raise an error. (test_pairs.py tests pairs of flags that cannot be combined.)"""

import pytest

from common import UserError
from extras.tests import equal
from extras.tests.pool import error_of
from extras.tests.rows import EXPERTS

STEP6 = "step06_pipeline"
WRONG = {  # how the line begins -> ranks, step, and flags whose sizes do not fit
    "--global-batch-size 5": (2, "step02_ddp", dict(global_batch_size=5)),
    "--topk-fraction 2": (2, "step02_ddp", dict(compress="topk", topk_fraction=2.0)),
    "--pipedream: all 4 ranks must be stages": (4, STEP6, dict(pp=2, pipedream=4)),
    "--zero-replicas 3": (2, "step03_zero", dict(zero=1, zero_replicas=3)),
    "--documents mask with --dry-run 2: a dry run has": (1, "step05_cp_ring", dict(documents="mask", dry_run=2)),
    "--gpu h200 matters only with --dry-run above 0": (2, "step02_ddp", dict(gpu="h200")),
    "--ep 2: no layer has experts; lower --dense-layers": (2, "step07_moe_ep", EXPERTS | dict(ep=2, dense_layers=3)),
    "--groups-per-token 2 bars": (2, "step07_moe_ep", EXPERTS | dict(expert_groups=2, groups_per_token=2)),
    "--end-token 259": (1, "step01_single_gpu", dict(documents="mask", end_token=259)),
    "--tp 3 must divide the number of ranks, which is 4 (--dry-run)": (1, "step04_tp_sp", dict(tp=3, dry_run=4)),
    "--tp 2 must divide the 15 tokens": (2, "step04_tp_sp", dict(tp=2, seq_len=15)),
    "--tp 3 must divide the 4 heads, and": (3, "step04_tp_sp", dict(tp=3, sp=False)),
    "--ulysses 2 must divide --cp 3": (3, "step05_cp_ring", dict(cp=3, cp_mode="usp", seq_len=18)),
    "--window 6 reaches over two ranks: use 5": (4, "step05_cp_ring", dict(cp=4, cp_mode="ring", window=6)),
    "--schedule dualpipe: use at least 2": (2, STEP6, dict(pp=2, schedule="dualpipe", global_batch_size=1)),
    "--schedule interleaved": (2, STEP6, dict(pp=2, schedule="interleaved", n_layers=4, micro_batch_size=4)),
    "--ep-inside 4 must divide --ep 2": (2, "step07_moe_ep", EXPERTS | dict(ep=2, ep_mode="nodes", ep_inside=4)),
}


@pytest.mark.parametrize("flag", sorted(WRONG, key=lambda flag: WRONG[flag][0]))
def test_every_rank_refuses_in_one_line(pools, flag):
    """All ranks raise the same error of one line, which begins with the flag."""
    ranks, *call = WRONG[flag]
    first, *others = pools(ranks).run(error_of, UserError, equal.record, *call, seconds=60)
    assert first.startswith(flag) and "\n" not in first, first
    assert all(text == first for text in others)
