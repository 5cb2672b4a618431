"""Compares the speed and memory of a step's variants with one another and with PyTorch's own parallelism.

A contest times whole training steps as `train` does them: batch, forward, backward, sums, norm, clipping, update. The
losses of all contestants must agree. `peak memory` is that of all tensors of rank 0 at the highest moment of the second
step, without what kernels allocate inside. A row is a step with its flags, or a function of peers.py (`peer`).
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common import UserError
from common.trainer import parse
from extras.tests.bench.harness import Entry, contest, report
from extras.tests.pool import Pool


class Contest(NamedTuple):
    """Contestants by name, with their flags; `shared`: flags of all. Losses may differ by `bound`."""

    about: str
    ranks: int
    step: str
    rows: dict[str, dict[str, Any]]
    shared: dict[str, Any] = {}  # noqa: RUF012
    bound: float = 1e-3


SCHEDULED = ("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")
CONTESTS = {
    "step1": Contest("eager and compiled", 1, "step01_single_gpu", dict(eager={}, compiled=dict(compile=True))),
    "recompute": Contest(
        "what recomputation costs",
        1, "step01_single_gpu",
        {way: dict(recompute=way) for way in ("none", "elementwise", "full")}
        | {f"scores {way}": dict(recompute=way, attention="scores") for way in ("none", "selective")},
    ),
    "step2": Contest(
        "every --sync; torch is DistributedDataParallel",
        2, "step02_ddp",
        {sync: dict(sync=sync) for sync in ("bucket", "torch", "naive", "ring")} | {"bucket-mb 0": dict(bucket_mb=0.0)},
    ),
    "step3": Contest(
        "stages of ZeRO beside FSDP2 and ZeroRedundancyOptimizer",
        2, "step03_zero",
        {"--zero 3": dict(zero=3), "fully_shard": dict(peer="fsdp"), "--zero 1": dict(zero=1),
         "ZeroRedundancyOptimizer": dict(peer="zero_redundancy"), "--zero 2": dict(zero=2), "--zero 0": dict(zero=0)},
    ),
    "step4": Contest(
        "tensor parallelism beside DTensor (`parallelize_module`)",
        2, "step04_tp_sp",
        {"--no-sp": dict(sp=False), "DTensor prepared": dict(peer="dtensor_prepared"),
         "DTensor plain": dict(peer="dtensor_plain"),
         "--sp": {}, "DTensor SequenceParallel": dict(peer="dtensor_sequence"),
         "--sp --tp-overlap": dict(tp_overlap=True)},
        dict(tp=2, zero=0),
    ),
    "step5": Contest(
        "context modes in training, all with --zero 1",
        2, "step05_cp_ring",
        {"zigzag by formula": {}, "ulysses": dict(cp_mode="ulysses")}
        | {mode: dict(cp_mode=mode, cp_kernel="flash") for mode in ("zigzag", "ring", "allgather")},
        dict(cp=2, zero=1),
    ),
    "step6": Contest(
        "schedules beside those of torch.distributed.pipelining",
        4, "step06_pipeline",
        {name: row for s in SCHEDULED for name, row in
         {s: dict(schedule=s), f"torch {s}": dict(schedule=s, peer="pipelining")}.items()},
        dict(pp=4, zero=0, n_layers=8, micro_batch_size=2),
    ),
    "step7": Contest(
        "layouts of 8 ranks",
        8, "step07_moe_ep",
        {"2D: dp 4 x tp 2": dict(tp=2), "2D: pp 2 x dp 4": dict(pp=2), "3D: pp 2 x dp 2 x tp 2": dict(pp=2, tp=2),
         "5D: pp 2 x cp 2 x tp 2 with ep 2": dict(pp=2, cp=2, tp=2, ep=2), "dp 8 with ep 8": dict(ep=8)},
        dict(model="tiny-moe", zero=1, micro_batch_size=2), bound=0.02,  # the balance loss depends on the micro-batches
    ),
}  # fmt: skip


@dataclass
class Config:
    """Flags of all contestants."""

    model: str = ""  # preset; default: tiny, in step 7 tiny-moe
    seq_len: int = 0  # override the sequence length; 0: as the preset
    only: str = ""  # contestants, separated by commas; all are compared with the first
    rounds: int = 8  # turns of each contestant, after one to warm up


def main(name: str, argv: list[str]):
    """One contest: train all of its rows, and print the table."""
    config, (about, ranks, step, rows, shared, bound) = parse(Config, argv), CONTESTS[name]
    flags = dict(model="tiny", micro_batch_size=4, global_batch_size=16) | shared
    flags |= {key: value for key in ("model", "seq_len") if (value := getattr(config, key))}
    chosen = config.only.split(",") if config.only else list(rows)
    if unknown := set(chosen) - set(rows):
        raise UserError(f"--only {', '.join(unknown)}: contestants are {', '.join(rows)}")
    entries, beside, ours = {}, {}, chosen[0]
    for row in chosen:
        peer = rows[row].get("peer", "")
        entries[row] = Entry(step, flags | {key: value for key, value in rows[row].items() if key != "peer"}, peer)
        ours = ours if peer else row
        beside[row] = ours if peer else chosen[0]  # a peer is compared with our row before it
    bound = max(bound, 0.05 if torch.cuda.is_available() else 0.0)  # where they train in bf16
    pool = Pool(ranks, "cuda" if torch.cuda.device_count() >= ranks else "cpu")  # with a GPU each, or on CPUs
    try:
        found, *_ = pool.run(contest, entries, config.rounds, bound, seconds=86400.0)
    finally:
        pool.stop()
    load = f"{os.cpu_count()} CPU cores, one thread a rank, load {os.getloadavg()[0]:.1f}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else load
    print(f"{name}: {about}; {flags['model']}; ranks: {ranks}, on {device}\n\n{report(found, beside)}")
    print(f"medians (and range) of {config.rounds} rounds in turns; ratios are of neighbours in a round")
