"""Compares the bytes that two nodes exchange, as the kernel counts them, with the bytes that the steps report.

    python -m extras.bench cluster-bytes

The nodes are network namespaces of this machine (services/cluster.py) with one rank each, so all traffic crosses the
cable. `counted` is the payload that node 0 sends and receives in a step, without the packets' headers; `law` is the sum
of the bytes that both ranks report to `comm.observer`. extras/bench/README.md has a table, and explains it.
"""

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

from common import UserError, comm
from common.trainer import parse
from extras.services.ranks import gather_objects
from extras.services.tables import table
from extras.bench.contests import Bare
from extras.variants.record import spelled

HEADERS = 14 + 20 + 32  # bytes of a packet before its payload: Ethernet, IP, TCP with timestamps
STEPS = 3  # number of steps whose bytes are counted, after a first step that is not counted
SMALL = dict(model="debug", n_layers=4, global_batch_size=4, micro_batch_size=1, dtype="fp32", device="cpu")
ROWS = [  # the runs of two ranks: step and flags
    ("step02_ddp", dict(sync="bucket")),
    ("step02_ddp", dict(compress="int8")),
    ("step03_zero", dict(zero=3)),
    ("step04_tp_sp", dict(tp=2, zero=0)),
    ("step05_cp_ring", dict(cp=2, zero=0, cp_mode="zigzag")),
    ("step06_pipeline", dict(pp=2, schedule="dualpipe")),
    ("step07_moe_ep", dict(ep=2, zero=0, experts=4, expert_dim=48)),
]


def passed() -> int:
    """Wait until all messages have arrived; returns the payload bytes that this node has sent and received so far."""
    dist.barrier()
    time.sleep(0.2)
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("eth0:")]
    numbers = [int(word) for word in line.partition(":")[2].split()]  # received: bytes, packets, ...; then sent
    return numbers[0] + numbers[8] - HEADERS * (numbers[1] + numbers[9])


class Counted(Bare):
    """A run that reads the network interface's counters before its second step and after its last."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Yield the steps, and count the bytes of all but the first."""
        self.built(**parts)
        comm.observer = self.count
        yield 0
        before = passed()
        yield from range(1, self.config.steps)
        self.counted = passed() - before


def measure(config: "Config"):
    """Run one rank: time a message over the cable, train all of ROWS, and print the table on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    start = time.monotonic()
    dist.all_reduce(torch.zeros(500_000))
    took = time.monotonic() - start
    lines = [["a step of", "counted", "law", "off", "of the law, by dimension"]]
    for step, flags in ROWS:
        name = " ".join([step[:6], *(spelled(*flag) for flag in flags.items())])
        with Counted(step, SMALL | flags | dict(steps=1 + STEPS)) as run:
            run.train(run.config, run)
        steps = [row["sent"] for row in run.history[1:]]
        sent = sum((Counter(of_step) for of_rank in gather_objects(steps) for of_step in of_rank), Counter())
        dims = ", ".join(f"{dim} {n / STEPS:,.0f}" for dim, n in sent.items())
        numbers = (f"{n / STEPS:,.0f}" for n in (run.counted, sent.total()))
        lines.append([name, *numbers, f"{run.counted / sent.total() - 1:+.2%}", dims])
    if dist.get_rank() == 0:
        print(f"2 MB each way at {config.gbit} Gbit/s: {took:.2f} s\n{table(lines)}", flush=True)
    dist.barrier()
    os._exit(0)


@dataclass
class Config:
    """Flags of this measurement."""

    gbit: float = 10.0  # speed of the cable in Gbit/s, each way


def main(name: str, argv: list[str]):
    """Start two nodes, in each of which this command runs again and measures. Raises UserError if one fails."""
    config = parse(Config, argv)
    if "RANK" in os.environ:
        measure(config)
    line = ["extras.tools.cluster", "--gbit", str(config.gbit), "--", "-m", "extras.bench", name, *argv]
    if subprocess.run([sys.executable, "-m", *line]).returncode:
        raise UserError("the cluster has failed: see above")
