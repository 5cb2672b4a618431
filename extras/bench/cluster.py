"""Compares the bytes that two nodes exchange, as the kernel counts them, with those that the steps
report.

    python -m extras.bench cluster-bytes

The nodes are network namespaces of this machine (extras/tools/cluster.py) with one rank each, so
all traffic crosses the cable. `counted` is the payload that node 0 sends and receives in a training
step, without the packets' headers; `law` is the sum of the bytes that both ranks report (`sent`).
extras/bench/README.md has a table, and explains it.
"""

import importlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common import UserError
from common.flags import flag, parse, spelled
from common.trainer import Run
from extras.__main__ import techniques, with_flags

HEADERS = 14 + 20 + 32  # bytes of a packet before its payload: Ethernet, IP, TCP with timestamps
STEPS = 3  # training steps whose bytes are counted, after a first one that is not counted
SMALL = dict(
    model="debug,n_layers=4", global_batch_size=4, micro_batch_size=1, dtype="fp32", device="cpu"
)
ROWS = [  # the runs of two ranks: step and flags
    ("step02_ddp", dict(sync="bucket")),
    ("step02_ddp", dict(sync="int8")),
    ("step03_zero", dict(zero="3")),
    ("step04_tp_sp", dict(tp=2)),
    ("step05_cp_ring", dict(cp=2)),
    ("step06_pipeline", dict(pp=2, schedule="dualpipev")),
    ("step07_moe_ep", dict(ep=2, experts=4, expert_dim=48)),
]


def passed() -> int:
    """Wait until all messages have arrived; the payload bytes that this node has sent and received
    so far.
    """
    dist.barrier()
    time.sleep(0.2)
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            numbers = [int(word) for word in line.partition(":")[2].split()]
    # Received: bytes, packets, ...; then sent.
    return numbers[0] + numbers[8] - HEADERS * (numbers[1] + numbers[9])


class Counted(Run):
    """A run that reads the network interface's counters before its second training step and after
    its last.
    """

    def steps(self, **parts: Any) -> Iterator[int]:
        """Yield the steps, and count the bytes of all but the first."""
        self.mesh = parts["mesh"]
        yield 0
        before = passed()
        yield from range(1, self.config.steps)
        self.counted = passed() - before

    def record(self, step: int, tokens: int, **numbers: float):
        """Keep what this rank has sent."""
        self.history.append(self.take_sent())


def count(step: str, flags: dict[str, Any]) -> list[str]:
    """Train one of ROWS on this rank; the cells of its line in the table."""
    module = importlib.import_module(step)
    config = with_flags(module.Config, techniques())(**SMALL | flags, steps=1 + STEPS, out="unused")
    run = Counted(config)
    run.first = False
    with run:
        module.train(config, run)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, run.history[1:])
    sent: Counter = Counter()
    for rows in both:
        for row in rows:
            sent.update(row)
    words = " ".join(f"{spelled(name)} {value}" for name, value in flags.items())
    dims = ", ".join(f"{dim} {nbytes / STEPS:,.0f}" for dim, nbytes in sent.items())
    law = sent.total()
    counted = f"{run.counted / STEPS:,.0f}"
    return [
        f"{step[:6]} {words}",
        counted,
        f"{law / STEPS:,.0f}",
        f"{run.counted / law - 1:+.2%}",
        dims,
    ]


def measure(config: "Config"):
    """Run one rank: time a message over the cable, train all of ROWS, and print the table on rank
    0.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.zeros(500_000))
    seconds = time.monotonic() - start
    lines = [["a training step of", "counted", "law", "off", "of the law, by dimension"]]
    for step, flags in ROWS:
        lines.append(count(step, flags))
    if dist.get_rank() == 0:
        print(f"2 MB each way at {config.gbit} Gbit/s: {seconds:.2f} s")
        for cells in lines:
            print("{:42}{:>12}{:>12}{:>9}  {}".format(*cells), flush=True)
    dist.barrier()
    os._exit(0)


@dataclass
class Config:
    """Flags of this measurement."""

    gbit: float = flag(10.0, "speed of the cable in Gbit/s, each way")


def main(name: str, argv: list[str]):
    """Start two nodes, in each of which this command runs again and measures. Raises UserError if
    one fails.
    """
    config = parse(Config, argv)
    if "RANK" in os.environ:
        measure(config)
    line = [
        "extras.tools.cluster",
        "--gbit",
        str(config.gbit),
        "--",
        "-m",
        "extras.bench",
        name,
        *argv,
    ]
    if subprocess.run([sys.executable, "-m", *line]).returncode:
        raise UserError("the cluster has failed: see above")
