"""Compares the bytes that the kernel counts on the cable between two nodes with what the steps say that they send.

    python -m extras.tests.bench cluster-bytes

The nodes are network namespaces of this machine (services/cluster.py) with one rank each, so all traffic crosses the
cable.

    counted    the payload that node 0's interface has sent and received in a step, without the packets' headers
    law        what `comm.observer` reports, on both ranks
    messages   gloo precedes each message by 48 bytes, and both ends announce with 48 more each that they are ready:
               144 bytes a message. gloo's all-reduce is a ring that cuts each of its n parts into two segments: 4 (n-1)
               messages a rank. all-gather: 2 (n-1); all-to-all: n-1; reduce-scatter is an all-to-all here
    off        counted / (law + messages) - 1

A sum that is sent twice, unseen by the observer, changes no number of a run, but it is counted here.
"""

import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import UserError, comm
from common.comm import Group
from common.trainer import parse
from extras.services.ranks import gather_objects
from extras.services.tables import table
from extras.tests.bench.harness import Bare, Entry
from extras.variants.record import spelled

HEADERS = 14 + 20 + 32  # bytes of a packet before its payload: Ethernet, IP, TCP with timestamps
MESSAGE = 3 * 48  # bytes: gloo's own for each message
SEGMENT = 2**20  # bytes: the longest of gloo's ring
STEPS = 3  # number of steps that are counted
SMALL = dict(model="debug", n_layers=4, global_batch_size=4, micro_batch_size=1, dtype="fp32", device="cpu")
EXPERTS = dict(experts=4, expert_dim=48)
TP, CP = dict(tp=2, zero=0), dict(cp=2, zero=0)
SCHEDULES = ("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")
ROWS = [  # step, flags that all share, and variants to compare
    ("step02_ddp", {}, [dict(bucket_mb=0.0), *(dict(sync=way) for way in ("naive", "ring", "bucket", "torch"))]),
    ("step02_ddp", {}, [dict(compress=way) for way in ("bf16", "int8")]),
    ("step03_zero", {}, [dict(zero=stage) for stage in (1, 2, 3)]),
    ("step04_tp_sp", TP, [dict(sp=False), {}, dict(tp_overlap=True), dict(compress_activations="int8")]),
    ("step05_cp_ring", CP, [dict(cp_mode=mode) for mode in ("zigzag", "ring", "allgather", "ulysses")]),
    ("step06_pipeline", dict(pp=2), [dict(schedule=name) for name in SCHEDULES]),
    ("step07_moe_ep", EXPERTS | dict(ep=2, zero=0), [dict(ep_mode=mode) for mode in ("alltoall", "rows", "allgather")]),
]


def rows() -> dict[str, Entry]:
    """Name of a row -> what two ranks train."""
    found = {}
    for step, shared, choices in ROWS:
        for flags in (shared | choice for choice in choices):
            shown = {name: value for name, value in flags.items() if name not in EXPERTS}
            name = " ".join([step[:6], *(spelled(*flag) for flag in shown.items())])
            found[name] = Entry(step, SMALL | flags | dict(steps=1 + STEPS))
    return found


def passed() -> int:
    """Bytes of payload that this node's interface has sent and received, once all that was sent has arrived."""
    dist.barrier()
    time.sleep(0.2)
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    numbers = [int(word) for word in line.partition(":")[2].split()]  # received: bytes, packets, ...; then sent
    return numbers[0] + numbers[8] - HEADERS * (numbers[1] + numbers[9])


class Counted(Bare):
    """A run that reads the interface before its second step and after its last."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Count the bytes that pass, without those of two barriers."""
        self.built(**parts)
        comm.observer, self.law = self.count, Counter()
        yield 0
        before = [passed() for _ in range(6)]
        self.law.clear()
        yield from range(1, self.config.steps)
        self.counted = passed() - before[-1] - median(b - a for a, b in pairwise(before))

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Add up what leaves this rank, by dimension, and gloo's own bytes under "messages"."""
        super().count(operation, group, tensor, share)
        n = group.size
        messages = {"all_gather": 2 * (n - 1), "send": 1}.get(operation, n - 1)  # of a rank, on average
        if operation == "all_reduce":  # each segment goes round twice; those that are empty do not
            messages = 2 * (n - 1) / n * min(tensor.numel(), max(2 * n, math.ceil(tensor.nbytes / SEGMENT)))
        self.law[group.name] += share * tensor.nbytes
        self.law["messages"] += MESSAGE * messages


def counted_rows(only: str) -> list[list[str]]:
    """Runs on both ranks: the lines of the table for all rows whose names contain `only`."""
    lines = [["a step of", "counted", "law", "messages", "off", "of the law, by dimension"]]
    for name, entry in rows().items():
        if only not in name:
            continue
        with Counted(entry) as run:
            run.train(run.config, run)
        law = sum(gather_objects(run.law), Counter())
        counted, own, expected = run.counted / STEPS, law.pop("messages", 0) / STEPS, law.total() / STEPS
        dims = ", ".join(f"{dim} {n / STEPS:,.0f}" for dim, n in law.items())
        numbers = (f"{n:,.0f}" for n in (counted, expected, own))
        lines.append([name, *numbers, f"{counted / (expected + own) - 1:+.2%}", dims])
    return lines


def serve(config: "Config"):
    """One rank: time the cable, count, and let rank 0 print."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.zeros(500_000))
    took = time.monotonic() - start
    lines = counted_rows(config.only)
    if dist.get_rank() == 0:
        print(f"2 MB each way at {config.gbit} Gbit/s: {took:.2f} s\n{table(lines)}", flush=True)
    dist.barrier()
    os._exit(0)


@dataclass
class Config:
    """Flags of this measurement."""

    only: str = ""  # rows whose names contain this
    gbit: float = 10.0  # speed of the cable in Gbit/s, each way


def main(name: str, argv: list[str]):
    """The command line: start two nodes, each of which calls this again. Raises UserError."""
    config = parse(Config, argv)
    if "RANK" in os.environ:
        serve(config)
    line = ["extras.services.cluster", "--gbit", str(config.gbit), "--", "-m", "extras.tests.bench", name, *argv]
    if subprocess.run([sys.executable, "-m", *line], stdin=subprocess.DEVNULL).returncode:
        raise UserError("the cluster has failed: see above")
