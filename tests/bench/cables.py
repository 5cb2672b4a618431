"""A step's time against the speed of the cable between two nodes, beside theory: what may cross it, and what hides.

    python -m tests.bench cluster-speeds     tp, cp, ep, dp and pp between the nodes (figure)
    python -m tests.bench cluster-hides      what is to travel behind computing, beside what does not

Two nodes with one rank each (services/cluster.py). All contestants live in the same processes, and each does one step
at each speed in each round, so what else the machine does hits all alike. Theory is the step at full speed, where the
cable takes nearly nothing, and the time in which the cable passes what a rank sends: `sent`, with the headers of full
packets, over the speed. What a step hides behind computing is taken off.

A cable passes as much one way as the other at the same time. Not all operations of gloo use both: a message leaves when
its receiver has said that it is ready, on the same connection. In all-to-all a rank first sends, and then says so. A
rank that comes later finds the other one ready, sends all of its own, and is heard only behind that: one way after the
other, twice the time (`ONE_WAY`). The first table measures each operation alone, on the rank that comes later. In a
step it depends on who comes later; so theory is a range. `comm.exchange` says first that it is ready.
"""

import time
from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import step06_pipeline as step06
from common.comm import Group, Mesh, all_gather, all_reduce, all_to_all, exchange, reduce_scatter
from common.model import PRESETS
from common.schedules import simulate
from services.launch import gather_objects
from services.seam import compose
from services.tables import table
from tests.bench import figures
from tests.bench.cluster import SMALL
from tests.bench.harness import Contestant, Entry, command, spread
from tests.bench.nodes import on_nodes, rate

FULL = 10.0  # Gbit/s: two cores send less
SPEEDS = (FULL, 1.0, 0.3, 0.1, 0.03, 0.01)
ONE_WAY = dict(all_to_all=2.0, reduce_scatter=2.0, all_gather=1.5)  # at most; a gathered part goes in two messages
WIRE = 1514 / 1448  # bytes of a full packet over those of its payload
BATCH = SMALL | dict(global_batch_size=8)
BUCKETS = BATCH | dict(bucket_mb=0.1)  # MiB: nine of them
HALVES = dict(experts=4, experts_per_token=2, expert_dim=88)  # a token visits two halves of the dense model's MLP
ACROSS = {  # what is between the nodes
    "tp": Entry("step04_tp_sp", BATCH | dict(tp=2, zero=0)),
    "cp": Entry("step05_cp_ring", BUCKETS | dict(cp=2, zero=0)),
    "ep": Entry("step07_moe_ep", BUCKETS | HALVES | dict(ep=2, zero=0)),
    "dp": Entry("step02_ddp", BUCKETS),
    "pp": Entry("step06_pipeline", BATCH | dict(pp=2, zero=0)),
}
ONCE = BATCH | dict(micro_batch_size=4)  # one micro-batch, whose backward hides all buckets but the last
PIPED = BATCH | dict(pp=2, zero=0)


class Pair(NamedTuple):
    """A step without and with what hides or saves messages, on nodes with so many ranks each."""

    gbit: float  # speed of each node's cable
    step: str
    plain: dict
    better: dict
    nodes: int = 2
    ranks: int = 1


SUMS = BATCH | dict(sync="naive")
WHOLE = PIPED | dict(tp=2, sp=False)
AHEAD = PIPED | HALVES | dict(ep=2, schedule="ahead", chunks=1)  # on four nodes of one rank: pp and ep cross cables
TWO_WAYS = PIPED | HALVES | dict(ep=2, schedule="dualpipe")
LEVELS = BATCH | HALVES | dict(ep=4, zero=0, experts=8, experts_per_token=4, ep_mode="rows")
PAIRS = {
    "--sync bucket": Pair(0.15, "step02_ddp", ONCE | dict(sync="naive"), ONCE | dict(bucket_mb=0.1)),
    "--tp-overlap": Pair(0.1, "step04_tp_sp", ACROSS["tp"].flags, ACROSS["tp"].flags | dict(tp_overlap=True)),
    "--schedule zbv": Pair(0.05, "step06_pipeline", PIPED, PIPED | dict(schedule="zbv")),
    "--compress bf16": Pair(0.03, "step02_ddp", BUCKETS, BUCKETS | dict(compress="bf16")),
    "--compress int8": Pair(0.03, "step02_ddp", BUCKETS, BUCKETS | dict(compress="int8")),
    "--sync hierarchical": Pair(0.03, "step02_ddp", SUMS, SUMS | dict(sync="hierarchical", ranks_per_node=2), ranks=2),
    "--pp-scatter": Pair(0.03, "step06_pipeline", WHOLE, WHOLE | dict(pp_scatter=True), ranks=2),
    "--ep-mode nodes": Pair(0.03, "step07_moe_ep", LEVELS, LEVELS | dict(ep_mode="nodes", ep_inside=2), ranks=2),
    "--ep-overlap, ahead": Pair(0.03, "step07_moe_ep", AHEAD, AHEAD | dict(ep_overlap=True), nodes=4),
    "--ep-overlap, dualpipe": Pair(0.03, "step07_moe_ep", TWO_WAYS, TWO_WAYS | dict(ep_overlap=True), nodes=4),
}


class Race(NamedTuple):
    """Of a contestant: seconds of a step of the slowest rank, by speed and round; most bytes that a rank sends, by
    operation.
    """

    seconds: dict[float, list[float]]
    sent: Counter


class Racer(Contestant):
    """Books also what it sends in a step by operation."""

    def step(self):
        """One step."""
        self.operations = Counter()
        super().step()

    def count(self, operation: str, group: Group, tensor: Tensor, share: float):
        """The observer."""
        super().count(operation, group, tensor, share)
        self.operations[operation] += share * tensor.nbytes


def race(entries: dict[str, Entry], speeds: list[float], rounds: int) -> dict[str, Race]:
    """Runs on every rank: in each round each contestant does a step at each speed, to and fro by turns."""
    made = {name: Racer(entry) for name, entry in entries.items()}
    found = {name: {gbit: [] for gbit in speeds} for name in entries}
    for turn in range(rounds + 1):  # the first does not count
        for gbit in speeds[:: -1 if turn % 2 else 1]:
            rate(gbit)
            for name, one in made.items():
                dist.barrier()
                began = time.perf_counter()
                one.step()
                found[name][gbit] += [time.perf_counter() - began] * (turn > 0)
    rate(FULL)
    everyone = gather_objects((found, {name: one.operations for name, one in made.items()}))
    races = {}
    for name in entries:
        slowest = {
            gbit: [max(some) for some in zip(*(f[name][gbit] for f, _ in everyone), strict=True)] for gbit in speeds
        }
        races[name] = Race(slowest, max((sent[name] for _, sent in everyone), key=Counter.total))
    return races


def alone(gbit: float, kib: int = 64, repeats: int = 9) -> dict[str, list[float]]:
    """Runs on two ranks: seconds that an operation takes the later one of them, over the cable's. Each sends `kib`."""
    rate(gbit)
    group, n = Mesh(dp=2)["dp"], kib * 256
    whole, other, half = torch.ones(2 * n), torch.ones(2 * n), torch.ones(n)
    calls = {
        "all_reduce": lambda: all_reduce(half, group),
        "all_gather": lambda: all_gather(whole, half, group),
        "reduce_scatter": lambda: reduce_scatter(half, whole, group),
        "all_to_all": lambda: all_to_all(other, whole, group),
        "send": lambda: exchange([(whole[:n], 1 - group.rank)], [(other[:n], 1 - group.rank)], group),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(2 * repeats):
        for name, call in calls.items():
            dist.barrier()
            late = (turn + group.rank) % 2 == 1
            time.sleep(0.01 * late)
            began = time.perf_counter()
            call().wait()
            found[name] += [(time.perf_counter() - began) / cable_seconds(4 * n, gbit)] * late
    rate(FULL)
    return found


def cable_seconds(sent: float, gbit: float) -> float:
    """In which a cable passes so many bytes one way, with the headers of full packets."""
    return sent * WIRE * 8 / (gbit * 1e9)


def time_on_cable(sent: Counter, gbit: float, worst: float) -> float:
    """The same of a step's operations. `worst`: 0, all use both ways at a time; 1, as few as possible do."""
    sizes = (n_bytes * (1 + worst * (ONE_WAY.get(name, 1.0) - 1)) for name, n_bytes in sent.items())
    return cable_seconds(sum(sizes), gbit)


def pipeline_seconds(entry: Entry, full: float, gbit: float) -> float:
    """A pipeline's step: its lists, simulated, with messages that take the cable's time, each way one at a time."""
    shape = PRESETS["cable"] = replace(PRESETS[entry.flags["model"]], n_layers=entry.flags["n_layers"])
    config = compose(step06)(**entry.flags | dict(model="cable"))
    places, lists = step06.plan(config, config.global_batch_size // config.micro_batch_size)
    split = any(action.kind == "W" for action in lists[0])
    unit = dict(F=1.0, B=1.0 if split else 2.0, W=1.0)
    scale = full / simulate(lists, places, unit)[-1][0]
    message = cable_seconds(config.micro_batch_size * shape.seq_len * shape.dim * 4, gbit)
    return scale * simulate(lists, places, unit, message / scale)[-1][0]


def predicted(entry: Entry, one: Race, gbit: float, worst: float = 0.0) -> float:
    """A step's seconds: those at full speed, and the cable's (`time_on_cable`), less what hides.

    Buckets travel behind the last micro-batch's backward, two thirds of its time, but for the last one. What a ring
    hides behind a part of attention is little here, and left out.
    """
    flags, full, cable = entry.flags, median(one.seconds[FULL]), time_on_cable(one.sent, gbit, worst)
    if "pp" in flags:
        return max(pipeline_seconds(entry, full, gbit), cable)
    if entry.step != "step02_ddp" or flags.get("sync") == "naive":
        return full + cable
    m = flags["global_batch_size"] // 2 // flags["micro_batch_size"]
    hidden = cable - min(cable, cable_seconds(flags["bucket_mb"] * 2**20, gbit))  # all but the last
    return full + cable - min(hidden, full / m * 2 / 3)


@dataclass
class Config:
    """Flags of these measurements."""

    rounds: int = 5  # steps of each contestant at each speed, after one


def band(entry: Entry, one: Race, gbit: float) -> tuple[float, float]:
    """Theory's least and most seconds of a step."""
    return predicted(entry, one, gbit, 0.0), predicted(entry, one, gbit, 1.0)


def shown(theory: tuple[float, float]) -> str:
    """A range, or one number."""
    return " .. ".join(dict.fromkeys(f"{seconds:.3f}" for seconds in theory))


def miss(seconds: float, theory: tuple[float, float]) -> float:
    """Measured over the nearest that theory has, less 1."""
    return seconds / min(max(seconds, theory[0]), theory[1]) - 1


def speeds(config: Config):
    """Print what was measured beside theory, and draw it."""
    lines = [["64 KiB a rank, 10 Mbit/s", "time of the later rank, over the cable's", "theory, at most"]]
    for name, ratios in on_nodes(alone, 0.01, gbit=FULL)[0].items():
        lines.append([name, spread(ratios), f"{ONE_WAY.get(name, 1.0):g}"])
    print(table(lines), end="\n\n")
    found = on_nodes(race, ACROSS, list(SPEEDS), config.rounds, gbit=FULL)[0]
    lines = [["between the nodes", "sent, KiB", "Mbit/s", "seconds (range)", "theory", "measured beside theory"]]
    panels = {}
    for name, one in found.items():
        panels[name] = [(1e3 * gbit, one.seconds[gbit], band(ACROSS[name], one, gbit)) for gbit in SPEEDS]
        for mbit, seconds, theory in panels[name]:
            row = [f"{mbit:,.0f}", spread(seconds), shown(theory), f"{miss(median(seconds), theory):+.1%}"]
            lines.append([name, f"{one.sent.total() / 1024:,.0f}", *row])
    print(table(lines))
    print(figures.speeds(panels, "cluster_speeds"))


def hides(config: Config):
    """Print what a slow cable costs without and with what hides or saves messages, each pair at its own speed.

    Theory is that of two ranks. Where there are more, RESULTS.md has the law of their bytes.
    """
    speeds = ["Mbit/s", "full speed", "this speed", "theory"]
    lines = [["seconds of a step", "a rank sends, KiB", *speeds, "with / without", "theory"]]
    for name, (gbit, step, plain, better, nodes, ranks) in PAIRS.items():
        entries = {f"without {name}": Entry(step, plain), name: Entry(step, better)}
        found = on_nodes(race, entries, [FULL, gbit], config.rounds, nodes=nodes, ranks=ranks, gbit=FULL)[0]
        ratios, said = [b / a for a, b in zip(*(one.seconds[gbit] for one in found.values()), strict=True)], []
        if nodes * ranks == 2:
            said = [band(entries[key], one, gbit) for key, one in found.items()]
        theory = shown(tuple(b / a for a, b in zip(*said, strict=True))) if said else ""
        texts = [*map(shown, said)] or ["", ""]
        for (key, one), text, more in zip(found.items(), texts, (("", ""), (spread(ratios), theory)), strict=True):
            speed = [f"{1e3 * gbit:g}", spread(one.seconds[FULL]), spread(one.seconds[gbit]), text]
            lines.append([key, f"{one.sent.total() / 1024:,.0f}", *speed, *more])
        print(table(lines), end="\n\n", flush=True)
        lines = lines[:1]


def main(name: str, argv: list[str]):
    """The command line."""
    command({"cluster-speeds": speeds, "cluster-hides": hides}[name], Config, argv)
