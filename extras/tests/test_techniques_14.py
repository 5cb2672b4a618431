"""The techniques of steps 1 to 4."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from extras.__main__ import techniques, with_flags
from tests import equal


@contextmanager
def extended(step: str) -> Iterator[None]:
    module = importlib.import_module(step)
    with mock.patch.object(module, "Config", with_flags(module.Config, techniques())):
        yield


def train(step: str, options: dict[str, Any]) -> tuple:
    with extended(step):
        return equal.train(step, options)


def train_whole(step: str, options: dict[str, Any]) -> tuple:
    with extended(step):
        return equal.train_whole(step, options)


class Row(NamedTuple):
    name: str
    ranks: int
    step: str
    layout: dict[str, Any]
    base: dict[str, Any] = {}
    beside: str = equal.STEP1


MUON = dict(optimizer="muon")
SGD = dict(optimizer="sgd", lr=0.5)
TIED = dict(tied=True)
EXPERTS = dict(experts=4, experts_per_token=2)
STEP7 = "step07_moe_ep"
ROWS = [
    Row("tree", 3, "step02_ddp", dict(sync="tree"), SGD),
    Row("server", 3, "step02_ddp", dict(sync="server"), SGD),
    Row("topk of all", 3, "step02_ddp", dict(sync="topk", topk_fraction=1.0, bucket_mb=0.001), SGD),
    Row("adafactor", 2, "step02_ddp", {}, dict(optimizer="adafactor")),
    Row("muon", 3, "step02_ddp", {}, MUON),
    Row("muon, zero 0", 3, "step03_zero", dict(zero="0"), MUON),
    Row("muon, zero 2", 3, "step03_zero", dict(zero="2"), MUON),
    Row("muon, zero 3", 2, "step03_zero", dict(zero="3"), MUON|TIED),
    Row("muon, tp 4", 4, "step04_tp_sp", dict(tp=4, zero="0"), MUON|dict(ffn_dim=50)),
    Row("muon, all", 4, "step04_tp_sp", dict(tp=2, zero="2+offload", recompute="full,logits"), MUON),
    Row("muon, experts", 4, STEP7, dict(ep=2, zero="1"), MUON|EXPERTS, STEP7),
    Row("muon, experts, ep 4", 4, STEP7, dict(ep=4, zero="1", tp=2), MUON|EXPERTS, STEP7),
    Row("muon, pp", 4, "step06_pipeline", dict(pp=2, tp=2, zero="1"), MUON),
    Row("muon, cp", 4, "step05_cp_ring", dict(cp=2, tp=2, zero="3+replicas", recompute="logits"), MUON),
    Row("replicas 1", 4, "step03_zero", dict(zero="1+replicas"), SGD),
    Row("replicas 2", 4, "step03_zero", dict(zero="2+replicas"), SGD),
    Row("replicas 3", 4, "step03_zero", dict(zero="3+replicas"), TIED),
    Row("offload 1", 3, "step03_zero", dict(zero="1+offload"), SGD),
    Row("offload 2", 3, "step03_zero", dict(zero="2+offload"), {}),
    Row("offload 3", 3, "step03_zero", dict(zero="3+offload"), {}),
    Row("offload 3 all", 3, "step03_zero", dict(zero="3+offload-all"), TIED),
    Row("kv", 4, "step04_tp_sp", dict(tp=4, zero="1"), SGD),
    Row("kv 1", 4, "step04_tp_sp", dict(tp=2, zero="2"), SGD|dict(n_kv_heads=1)),
    Row("selective", 1, "step01_single_gpu", dict(recompute="selective"), SGD),
    Row("all-but", 2, "step04_tp_sp", dict(tp=2, recompute="all-but-attention"), SGD),
    Row("host", 2, "step03_zero", dict(zero="3", recompute="offload"), TIED),
    Row("full,host", 2, "step03_zero", dict(zero="3", recompute="full,offload"), TIED),
    Row("offload,full", 2, "step03_zero", dict(zero="3", recompute="offload,full"), TIED),
    Row("logits", 4, "step06_pipeline", dict(pp=2, tp=2, recompute="logits"), TIED),
    Row("selective experts", 2, STEP7, dict(ep=2, zero="3", recompute="selective,logits"), EXPERTS|TIED, STEP7),
    Row("fp16", 4, "extras.loops.fp16", dict(pp=2, tp=2), SGD),
    Row("fp16 cp", 4, "extras.loops.fp16", dict(cp=2, tp=1, zero="3"), {}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_equal(pools, row):
    with mock.patch.multiple(equal, train=train, train_whole=train_whole):
        equal.equals_step1(pools, row.ranks, row.step, row.base, beside=row.beside, **row.layout)
