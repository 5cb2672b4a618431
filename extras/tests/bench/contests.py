"""Compares the speed and memory of a step's variants with one another and with PyTorch's own parallelism.

A contest times whole training steps as `train` does them: batch, forward, backward, sums, norm, clipping, update. The
losses of all contestants must agree. `peak memory` is that of all tensors of rank 0 at the highest moment of the second
step, without what kernels allocate inside. A row is a step with its flags, or a function of peers.py (`peer`).
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from common.trainer import parse
from extras.tests.bench.harness import Entry, contest, report
from extras.tests.pool import Pool


class Contest(NamedTuple):
    """Contestants by name, with their flags; `shared`: flags of all."""

    ranks: int
    step: str
    rows: dict[str, dict[str, Any]]
    shared: dict[str, Any] = {}  # noqa: RUF012


SCHEDULED = ("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")
CONTESTS = {
    "step1": Contest(
        1, "step01_single_gpu",
        {"eager": {}, "--compile": dict(compile=True)}
        | {f"--recompute {way}": dict(recompute=way) for way in ("elementwise", "full")},
    ),
    "step2": Contest(
        2, "step02_ddp",  # "torch" is DistributedDataParallel
        {f"--sync {way}": dict(sync=way) for way in ("bucket", "torch", "overlap", "naive", "ring")},
    ),
    "step3": Contest(
        2, "step03_zero",
        {"--zero 3": dict(zero=3), "fully_shard": dict(peer="fsdp"), "--zero 1": dict(zero=1),
         "ZeroRedundancyOptimizer": dict(peer="zero_redundancy"), "--zero 2": dict(zero=2), "--zero 0": dict(zero=0)},
    ),
    "step4": Contest(
        2, "step04_tp_sp",
        {"--no-sp": dict(sp=False), "DTensor": dict(sp=False, peer="dtensor"),
         "--sp": {}, "DTensor SequenceParallel": dict(peer="dtensor"), "--sp --tp-overlap": dict(tp_overlap=True)},
        dict(tp=2, zero=0),
    ),
    "step6": Contest(
        4, "step06_pipeline",
        {name: row for s in SCHEDULED for name, row in
         {f"--schedule {s}": dict(schedule=s), f"torch {s}": dict(schedule=s, peer="pipelining")}.items()},
        dict(pp=4, zero=0, n_layers=8, micro_batch_size=2),
    ),
}  # fmt: skip


@dataclass
class Config:
    """Flags of all contestants."""

    model: str = "tiny"  # preset
    rounds: int = 8  # turns of each contestant, after one to warm up


def main(name: str, argv: list[str]):
    """One contest: train all of its rows, and print the table."""
    config, (ranks, step, rows, shared) = parse(Config, argv), CONTESTS[name]
    shared = dict(model=config.model, micro_batch_size=4, global_batch_size=16) | shared
    entries, beside = {}, {}
    first = ours = next(iter(rows))
    for row, flags in rows.items():
        peer = flags.get("peer", "")
        entries[row] = Entry(step, shared | {key: value for key, value in flags.items() if key != "peer"}, peer)
        ours = ours if peer else row
        beside[row] = ours if peer else first  # a peer is compared with our row before it
    cuda = torch.cuda.device_count() >= ranks  # a GPU for each rank; if there are fewer, all train on CPUs
    pool = Pool(ranks, "cuda" if cuda else "cpu")
    try:
        found, *_ = pool.run(contest, entries, config.rounds, 0.05 if cuda else 1e-3, seconds=86400.0)  # bf16, fp32
    finally:
        pool.stop()
    device = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()} CPU cores, one thread a rank"
    print(f"{name}: {config.model}; ranks: {ranks}, on {device}\n\n{report(found, beside)}")
    print(f"medians (and range) of {config.rounds} rounds in turns; ratios are of neighbours in a round")
