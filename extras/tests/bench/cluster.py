"""Counts the bytes on the cable between two nodes, as the kernel sees them, beside what the steps say that they send.

    python -m extras.tests.bench cluster-bytes

The nodes are network namespaces of this machine (services/cluster.py) with one rank each, so all traffic crosses the
cable. In the rows of four ranks a node has two, and a group may lie inside a node.

    counted    the payload that node 0's interface has sent and received in a step, without the packets' headers
    law        what `comm.observer` is shown, of all ranks, for groups that cross the cable
    messages   gloo precedes each message by 48 bytes, and both ends announce with 48 more each that they are ready:
               144 bytes a message. gloo's all-reduce is a ring that cuts each of its n parts into two segments: 4 (n-1)
               messages a rank. all-gather: 2 (n-1); all-to-all: n-1; reduce-scatter is an all-to-all here
    off        counted / (law + messages) - 1

A sum that is sent twice, or a message sent behind the observer's back, is seen here and nowhere else.
"""

import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from extras.tests.faults import Fault, injected
from extras.variants.record import spelled

ROOT = Path(__file__).parents[3]
HEADERS = 14 + 20 + 32  # bytes of a packet before its payload: Ethernet, IP, TCP with timestamps
MESSAGE = 3 * 48  # bytes: gloo's own for each message
SEGMENT = 2**20  # bytes: the longest of gloo's ring
SMALL = dict(model="debug", n_layers=4, global_batch_size=4, micro_batch_size=1, dtype="fp32", device="cpu")
EXPERTS = dict(experts=4, expert_dim=48)
TP, CP, PP = dict(tp=2, zero=0), dict(cp=2, zero=0), dict(pp=2)
ROWS = [  # step, ranks on a node, flags of all, and what is compared
    ("step02_ddp", 1, {}, [dict(sync=way) for way in ("naive", "ring", "bucket", "overlap", "torch")]),
    ("step02_ddp", 1, {}, [dict(compress=way) for way in ("bf16", "int8")]),
    ("step03_zero", 1, {}, [dict(zero=stage) for stage in (1, 2, 3)]),
    ("step04_tp_sp", 1, TP, [dict(sp=False), {}, dict(tp_overlap=True), dict(compress_activations="int8")]),
    ("step05_cp_ring", 1, CP, [dict(cp_mode=mode) for mode in ("zigzag", "ring", "allgather", "ulysses")]),
    ("step06_pipeline", 1, PP, [dict(schedule=name) for name in ("afab", "1f1b", "interleaved", "zb-h1", "zbv")]),
    ("step06_pipeline", 1, PP, [dict(schedule="dualpipe")]),
    ("step07_moe_ep", 1, dict(ep=2, zero=0), [dict(ep_mode=mode) for mode in ("alltoall", "rows", "allgather")]),
    ("step04_tp_sp", 2, TP, [{}]),
    ("step06_pipeline", 2, PP | dict(tp=2), [{}]),
    ("step07_moe_ep", 2, PP | dict(ep=2), [{}]),
]


def rows() -> dict[str, tuple[int, Entry]]:
    """By name: ranks on a node, and what they train."""
    found = {}
    for step, ranks, shared, choices in ROWS:
        always = SMALL | (EXPERTS if step == "step07_moe_ep" else {})
        for flags in (shared | choice for choice in choices):
            name = " ".join([step[:6], *(spelled(*flag) for flag in flags.items())])
            found[name + f" ({2 * ranks} ranks)" * (ranks > 1)] = ranks, Entry(step, always | flags)
    return found


def on_nodes(function: Callable, *args: Any, nodes: int = 2, ranks: int = 1, gbit: float = 10.0) -> list[Any]:
    """Call a function on `ranks` ranks of each node; results by rank. Raises UserError with what the cluster says."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        size = ["--nodes", str(nodes), "--ranks-per-node", str(ranks), "--gbit", str(gbit)]
        line = [sys.executable, "-m", "extras.services.cluster", *size, "--", "-m", __name__, folder]
        streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        done = subprocess.run(line, cwd=ROOT, timeout=1800, **streams)
        if done.returncode:
            raise UserError(done.stdout.decode())
        return [torch.load(f"{folder}/{rank}", weights_only=False) for rank in range(nodes * ranks)]


def serve(folder: str):
    """One rank of `on_nodes`: carry out the call that is in the folder, and put its result there."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    found = function(*args)
    torch.save(found, f"{folder}/{dist.get_rank()}")
    dist.barrier()
    os._exit(0)


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
        """Count what passes, without what two barriers cost."""
        self.built(**parts)
        comm.observer, self.crossing = self.count, Counter()
        yield 0
        before = [passed() for _ in range(6)]
        self.crossing.clear()
        yield from range(1, self.config.steps)
        self.counted = passed() - before[-1] - median(b - a for a, b in pairwise(before))

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Add up what leaves the node."""
        super().count(operation, group, tensor, share)
        ranks, n = dist.get_process_group_ranks(group.handle), group.size
        messages = {"all_gather": 2 * (n - 1), "send": 1}.get(operation, n - 1)  # of a rank, on average
        if operation == "all_reduce":  # each segment goes round twice; those that are empty do not
            messages = 2 * (n - 1) / n * min(tensor.numel(), max(2 * n, math.ceil(tensor.nbytes / SEGMENT)))
        if len({rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in ranks}) > 1:
            self.crossing[group.name] += share * tensor.nbytes
            self.crossing["messages"] += MESSAGE * messages


def count(entries: dict[str, Entry], steps: int, fault: str | Fault = "") -> dict[str, tuple[float, Counter]]:
    """Runs on every rank: bytes of a step, as counted, and as expected by dimension and for gloo's own "messages".

    Each entry is trained for `steps` counted steps. `fault`: a mistake to put into the program.
    """
    found = {}
    for name, entry in entries.items():
        with injected(fault), Counted(entry._replace(flags=entry.flags | dict(steps=steps + 1))) as run:
            run.train(run.config, run)
        crossing = Counter()
        for of_rank in gather_objects(run.crossing):
            crossing.update(of_rank)
        found[name] = run.counted / steps, Counter({dim: n / steps for dim, n in crossing.items()})
    return found


@dataclass
class Config:
    """Flags of this measurement."""

    only: str = ""  # rows whose names contain this


def bench(config: Config):
    """Print the table."""
    lines = [["a step of", "counted", "law", "messages", "off", "of the law, by dimension"]]
    for ranks in (1, 2):
        entries = {name: entry for name, (n, entry) in rows().items() if n == ranks and config.only in name}
        found = on_nodes(count, entries, 3, ranks=ranks)[0] if entries else {}
        for name, (counted, expected) in found.items():
            off = f"{counted / expected.total() - 1:+.2%}"
            own = expected.pop("messages", 0)
            dims = ", ".join(f"{dim} {n:,.0f}" for dim, n in expected.items())
            lines.append([name, *(f"{n:,.0f}" for n in (counted, expected.total(), own)), off, dims])
    print(table(lines))


def main(_name: str, argv: list[str]):
    """The command line."""
    bench(parse(Config, argv))


if __name__ == "__main__":
    serve(sys.argv[1])
