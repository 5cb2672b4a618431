"""Flags whose sizes do not fit give the same line on every rank, before anything is sent. (Pairs: test_pairs.py.)"""

import pytest

from common import UserError
from extras.tests import equal
from extras.tests.pool import error_of
from extras.tests.rows import EXPERTS, GROUPS

STEP6 = "step06_pipeline"
WRONG = {  # how the line begins -> ranks, step, and flags whose sizes do not fit
    "--global-batch-size 5": (2, "step02_ddp", dict(global_batch_size=5)),
    "--topk-fraction 2": (2, "step02_ddp", dict(compress="topk", topk_fraction=2.0)),
    "--pipedream: all 4 ranks must be stages": (4, STEP6, dict(pp=2, pipedream=4)),
    "--pipedream: --model test has one matrix": (4, STEP6, dict(pp=4, pipedream=4, tied=True)),
    "--skip-spikes 0.5": (2, "step02_ddp", dict(skip_spikes=0.5)),
    "--zero-replicas 3": (2, "step03_zero", dict(zero=1, zero_replicas=3)),
    "--sync ring matters only with --zero 0, not with --zero 1": (2, "step03_zero", dict(sync="ring")),
    "--no-sp matters only with --tp above 1": (2, "step04_tp_sp", dict(sp=False)),
    "--gpu h200 matters only with --dry-run above 0": (2, "step02_ddp", dict(gpu="h200")),
    "--ep 2: no layer has experts; lower --dense-layers": (2, "step07_moe_ep", EXPERTS | dict(ep=2, dense_layers=3)),
    "--groups-per-token 2 bars": (2, "step07_moe_ep", EXPERTS | dict(expert_groups=2, groups_per_token=2)),
    "--end-token 259": (1, "step01_single_gpu", dict(documents="mask", end_token=259)),
    "--tp 3": (2, "step04_tp_sp", dict(tp=3)),
    "--tp 3 must divide the number of ranks, which is 4 (--dry-run)": (1, "step04_tp_sp", dict(tp=3, dry_run=4)),
    "--tp 2 must divide the 15 tokens": (2, "step04_tp_sp", dict(tp=2, seq_len=15)),
    "--tp 3 must divide the 4 heads, and": (3, "step04_tp_sp", dict(tp=3, sp=False)),
    "--cp 2": (2, "step05_cp_ring", dict(cp=2, seq_len=18)),
    "--cp 3": (3, "step05_cp_ring", dict(cp=3, cp_mode="ring")),
    "--tp 2 must divide the 7 tokens": (4, "step05_cp_ring", dict(cp=2, tp=2, cp_mode="ring", seq_len=14)),
    "--cp-mode ulysses": (3, "step05_cp_ring", dict(cp=3, cp_mode="ulysses", seq_len=18)),
    "--ulysses 2 must divide --cp 3": (3, "step05_cp_ring", dict(cp=3, cp_mode="usp", seq_len=18)),
    "--ulysses 4 does not divide 2 heads": (4, "step05_cp_ring", dict(cp=4, cp_mode="usp", ulysses=4, n_heads=2)),
    "--window 6 reaches over two ranks: use 5": (4, "step05_cp_ring", dict(cp=4, cp_mode="ring", window=6)),
    "--window 1: a token sees itself": (1, "step01_single_gpu", dict(window=1)),
    "--pp 2": (2, STEP6, dict(pp=2, schedule="interleaved", chunks=2)),
    "--pp-split 1,1": (2, STEP6, dict(pp=2, pp_split="1,1")),
    "--schedule dualpipe: use at least 2": (2, STEP6, dict(pp=2, schedule="dualpipe", global_batch_size=1)),
    "--schedule dualpipe": (3, STEP6, dict(pp=3, schedule="dualpipe")),
    "--schedule interleaved": (2, STEP6, dict(pp=2, schedule="interleaved", n_layers=4, micro_batch_size=4)),
    "--ep 2": (2, "step07_moe_ep", dict(ep=2, experts=3)),
    "--ep 4": (2, "step07_moe_ep", EXPERTS | dict(ep=4)),
    "--no-sp: --tp 2 must divide the 15 tokens": (2, "step07_moe_ep", EXPERTS | dict(tp=2, sp=False, seq_len=15)),
    "--experts-per-token 9": (2, "step07_moe_ep", dict(experts_per_token=9)),
    "--micro-batch-size": (2, "step07_moe_ep", EXPERTS | dict(micro_batch_size=5)),
    "--ep-inside 4 must divide --ep 2": (2, "step07_moe_ep", EXPERTS | dict(ep=2, ep_mode="nodes", ep_inside=4)),
    "--groups-per-token 1": (1, "step07_moe_ep", GROUPS | dict(groups_per_token=1, experts_per_token=3)),
    "--expert-groups 3": (2, "step07_moe_ep", EXPERTS | dict(expert_groups=3)),
}


@pytest.mark.parametrize("flag", sorted(WRONG, key=lambda flag: WRONG[flag][0]))
def test_every_rank_refuses_in_one_line(pools, flag):
    """All ranks raise the same line, which begins with the flag."""
    ranks, *call = WRONG[flag]
    first, *others = pools(ranks).run(error_of, UserError, equal.record, *call, seconds=60)
    assert first.startswith(flag) and "\n" not in first, first
    assert all(text == first for text in others)
