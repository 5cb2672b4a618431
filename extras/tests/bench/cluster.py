"""Bytes that the kernel counts on the cable between two nodes, beside what the steps say that they send.

    python -m extras.tests.bench cluster-bytes

Two nodes are network namespaces of this machine (services/cluster.py), with one rank each, so all traffic crosses the
cable; in the rows of four ranks there are two on each node, and a group may lie in a node. The kernel counts bytes and
packets of the interface. `counted` is the payload of a step: the headers of packets (66 bytes each) are taken off.

    law        what `comm.observer` is shown (`sent`), of all ranks, for groups that cross the cable
    messages   gloo precedes each message by 48 bytes, and the two ends tell each other with 48 more each that they are
               ready: 144 bytes a message. An all-reduce of gloo is a ring, each of whose n parts goes in two
               segments: 4 (n-1) messages a rank. all-gather: 2 (n-1); all-to-all: n-1; reduce-scatter is one here

`off`: counted over law and messages together, less 1. Nobody told the kernel what to expect: a message that is sent
behind the observer's back, or a sum that is sent twice, is seen here and nowhere else (extras/tests/test_cluster.py).
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from common import comm
from common.comm import Group
from extras.services.launch import gather_objects
from extras.services.tables import table
from extras.tests.bench.harness import Bare, Entry, command
from extras.tests.bench.nodes import on_nodes, passed
from extras.tests.faults import Fault, injected

MESSAGE = 3 * 48  # bytes: gloo's own for each message
SEGMENT = 2**20  # bytes: the longest of gloo's ring
SMALL = dict(model="debug", n_layers=4, global_batch_size=4, micro_batch_size=1, dtype="fp32", device="cpu")
EXPERTS = dict(experts=4, expert_dim=48)


def rows() -> dict[str, tuple[int, Entry]]:
    """By name: ranks on a node, and what they train."""
    found = {}

    def add(step: str, ranks: int = 1, **flags: Any):
        words = [f"{name.replace('_', '-')} {value}" for name, value in flags.items() if name not in EXPERTS]
        name = " --".join([step[:6], *words]).replace(" True", "").replace("sp False", "no-sp")
        found[name + f" ({2 * ranks} ranks)" * (ranks > 1)] = ranks, Entry(step, SMALL | flags)

    for sync in ("naive", "ring", "bucket", "overlap", "torch"):
        add("step02_ddp", sync=sync)
    for compress in ("bf16", "int8"):
        add("step02_ddp", compress=compress)
    for zero in (1, 2, 3):
        add("step03_zero", zero=zero)
    for flags in (dict(sp=False), {}, dict(tp_overlap=True), dict(compress_activations="int8")):
        add("step04_tp_sp", tp=2, zero=0, **flags)
    for mode in ("zigzag", "ring", "allgather", "ulysses"):
        add("step05_cp_ring", cp=2, zero=0, cp_mode=mode)
    for schedule in ("afab", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe"):
        add("step06_pipeline", pp=2, schedule=schedule)
    for mode in ("alltoall", "rows", "allgather"):
        add("step07_moe_ep", ep=2, zero=0, ep_mode=mode, **EXPERTS)
    add("step04_tp_sp", 2, tp=2, zero=0)
    add("step06_pipeline", 2, pp=2, tp=2)
    add("step07_moe_ep", 2, pp=2, ep=2, **EXPERTS)
    return found


class Count(NamedTuple):
    """Of one step, on average: bytes on the cable as counted; by the law; gloo's own; by dimension the law's."""

    counted: float
    law: float
    own: float
    dims: dict[str, float]


def messages(operation: str, n: int, tensor: Tensor) -> float:
    """Those that a rank sends, on average over the ranks, in an operation among n of them."""
    if operation == "all_reduce":  # each segment goes round twice; those that are empty do not
        segments = min(tensor.numel(), max(2 * n, math.ceil(tensor.nbytes / SEGMENT)))
        return 2 * (n - 1) / n * segments
    return {"all_gather": 2 * (n - 1), "send": 1}.get(operation, n - 1)


def settle():
    """All ranks are here, and what they have sent has arrived."""
    dist.barrier()
    time.sleep(0.2)


class Counted(Bare):
    """A run that reads the interface before its second step and after its last."""

    def steps(self, **parts: Any) -> Iterator[int]:
        """Instead of the bar."""
        self.built(**parts)
        comm.observer, self.crossing, self.own = self.count, Counter(), 0.0
        yield 0
        empty = []
        for _ in range(5):
            settle()
            before = passed()
            settle()
            empty.append(passed() - before)
        settle()
        self.crossing.clear()
        self.own, before = 0.0, passed()
        yield from range(1, self.config.steps)
        settle()
        self.counted = passed() - before - median(empty)

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """Book what leaves the node."""
        super().count(operation, group, tensor, share)
        ranks = dist.get_process_group_ranks(group.handle)
        if len({rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in ranks}) > 1:
            self.crossing[group.name] += share * tensor.nbytes
            self.own += MESSAGE * messages(operation, group.size, tensor)


def count(entries: dict[str, Entry], steps: int, fault: str | Fault = "") -> dict[str, Count]:
    """Runs on every rank: train each, for so many steps that count. `fault`: a mistake that is in the program."""
    found = {}
    for name, entry in entries.items():
        with injected(fault), Counted(entry._replace(flags=entry.flags | dict(steps=steps + 1))) as run:
            run.train(run.config, run)
        everyone = gather_objects((run.counted, run.crossing, run.own))
        dims = Counter()
        for _, crossing, _ in everyone:
            dims.update(crossing)
        own = sum(own for *_, own in everyone)
        dims = {dim: n / steps for dim, n in dims.items()}
        found[name] = Count(everyone[0][0] / steps, sum(dims.values()), own / steps, dims)
    return found


def off(found: Count) -> float:
    """Counted over expected, less 1."""
    return found.counted / (found.law + found.own) - 1


@dataclass
class Config:
    """Flags of this measurement."""

    only: str = ""  # rows whose names have this
    count_steps: int = 3  # steps that are counted, after one
    gbit: float = 10.0  # speed of the cable


def bytes_on_cable(config: Config):
    """Print the table."""
    wanted = {name: row for name, row in rows().items() if config.only in name}
    found: dict[str, Count] = {}
    for ranks in sorted({ranks for ranks, _ in wanted.values()}):
        entries = {name: entry for name, (n, entry) in wanted.items() if n == ranks}
        found |= on_nodes(count, entries, config.count_steps, ranks=ranks, gbit=config.gbit)[0]
    lines = [["a step of", "counted", "law", "messages", "off", "of the law, by dimension"]]
    for name, one in found.items():
        dims = ", ".join(f"{dim} {n:,.0f}" for dim, n in one.dims.items())
        lines.append([name, *(f"{n:,.0f}" for n in one[:3]), f"{off(one):+.2%}", dims])
    print(table(lines))


MEASURES: dict[str, Callable] = {"cluster-bytes": bytes_on_cable}


def main(name: str, argv: list[str]):
    """The command line."""
    command(MEASURES[name], Config, argv)
