"""The planner on a machine that we own: a probe gives its entry, and layouts of 8 ranks on 2 nodes are measured.

    python -m tests.bench cluster-plan --json FILE     goes on where it was interrupted; when all is there, prints

A rank is a device, a node four of them (services/cluster.py), and a cable of --gbit joins the nodes. A node has its own
part of this machine's cores, which its ranks share. The probe runs on all ranks at the same time, and makes the entry
that the planner takes for a GPU (theory/gpus.py): FLOP/s and bytes/s of a rank while all others are busy, seconds of an
operator that has nothing to do, and what collectives reach inside a node and between nodes. No step is in the probe.

Layouts are drawn by a seed, from each mesh in turn. Some take turns in the same processes, a step each in each round.
Half of them, drawn too, are kept out: nothing may be mended by them, and both halves are reported.

    CPU        the CPU seconds of all ranks, over the cores: no step is shorter. Unlike seconds it hardly depends on
               what else the machine does
    plan       `step_seconds` of theory with the probe's entry, nothing else
    shared     a bubble is filled by the ranks of the same node that have work: where ranks share cores, those of a
               pipeline that lie in a node are like one rank. GPUs do not; so it is here, and not in theory
    regret     the time of the layout that the plan takes first over that of the best one, less 1; beside it what the
               middle one of all takes
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from common import UserError
from common.comm import Group, Mesh, all_gather, reduce_scatter
from common.model import PRESETS
from services.launch import gather_objects
from services.seam import plugins
from services.tables import table
from tests.bench.harness import Contestant, Entry, command, spread, take_turns
from tests.bench.nodes import on_nodes
from tests.bench.plan import choice, summary
from theory.gpus import Gpu
from theory.layouts import Layout, meshes, network, variants
from theory.recipes import COURSE
from theory.seconds import layer_layout, pipeline_ratio, rank_work, stages_of, step_seconds
from theory.shapes import Shape

NODES, RANKS, BATCH = 2, 4, 8  # nodes, ranks on each, sequences of a step
SIZES = dict(dim=256, n_layers=8, n_heads=8, n_kv_heads=4, ffn_dim=704, seq_len=256)
MODEL = Shape(**vars(replace(PRESETS["tiny"], **SIZES)))
PROBE = ("flops", "hbm", "launch", "within", "between", "start", "hop", "hop_between")
UNITS = {"flops": (1e9, "GFLOP/s"), "hbm": (1e9, "GB/s"), "launch": (1e-6, "us"), "within": (1e6, "MB/s")}
UNITS |= {"between": (1e6, "MB/s")} | dict.fromkeys(("start", "hop", "hop_between"), (1e-6, "us"))


@dataclass
class Config:
    """Flags of this measurement."""

    json: str = "runs/cluster_plan.json"  # results come here one by one; what is there is not measured again
    gbit: float = 0.5  # speed of a node's cable
    layouts: int = 32  # how many
    rounds: int = 5  # steps of each layout, after one
    together: int = 4  # layouts that take turns in the same processes
    seed: int = 0  # draws the layouts, and the half that is kept out


def settle_down():
    """Every thread of this rank stays on its node's part of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    node = dist.get_rank() // RANKS
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), set(cores[node::NODES]) or set(cores))


def sharing() -> int:
    """Ranks that share a core."""
    return max(1, RANKS // max(1, len(os.sched_getaffinity(0)) // NODES))


def seconds_of(work: Callable[[], Any], least: float = 0.7) -> float:
    """Seconds of a call, on average over so long a time, in which all ranks make it again and again."""
    work()
    dist.barrier()
    began, calls = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + least:
        work()
        calls += 1
    return (now - began) / calls


def gather_and_scatter(group: Group, n_bytes: int, repeats: int) -> float:
    """Seconds in which a group gathers a whole of so many bytes, or reduces and scatters it: the mean of both."""
    whole, found = torch.ones(n_bytes // 4), []
    part = torch.ones(n_bytes // 4 // group.size)
    for _ in range(repeats + 1):
        dist.barrier()
        began = time.perf_counter()
        all_gather(whole, part, group).wait()
        reduce_scatter(part, whole, group).wait()
        found.append((time.perf_counter() - began) / 2)
    return median(found[1:])


def probe() -> dict[str, float]:
    """Runs on every rank: what a rank reaches while all others do the same, by name of theory's entry."""
    a, b, big, small = torch.ones(1024, 1024), torch.ones(1024, 1024), torch.ones(2**22), torch.ones(1)
    target = torch.empty_like(big)
    mesh = Mesh(node=NODES, half=2, pair=RANKS // 2)
    mesh.join("whole node", "half", "pair")  # "node": a rank of each, four groups side by side
    found = dict(flops=2 * 1024**3 / seconds_of(lambda: torch.mm(a, b)))
    found["hbm"] = 2 * big.nbytes / seconds_of(lambda: torch.mul(big, 2.0, out=target))
    found["launch"] = seconds_of(lambda: [small.mul(2.0) for _ in range(100)]) / 100
    size = 2**21
    empty = {name: gather_and_scatter(mesh[name], 64, 15) for name in ("pair", "whole node", "node")}
    for rate, name in (("within", "whole node"), ("between", "node")):
        group, full = mesh[name], gather_and_scatter(mesh[name], size, 15)
        found[rate] = (group.size - 1) / group.size * size / max(full - empty[name], full / 2)
    found["hop"] = max(0.0, (empty["whole node"] - empty["pair"]) / (RANKS - 2))  # of three hops, and of one
    found["start"] = max(0.0, empty["pair"] - found["hop"])
    found["hop_between"] = max(0.0, empty["node"] - found["start"])
    everyone = gather_objects(found)
    return {name: sum(one[name] for one in everyone) / len(everyone) for name in found}


def measure(entries: dict[str, Entry], rounds: int) -> tuple[dict[str, float], dict[str, list[tuple]]]:
    """Runs on every rank: the probe; then by name, for each round, seconds of a step on the slowest rank, and CPU
    seconds of all ranks.
    """
    settle_down()
    found = probe()
    made = {name: Contestant(entry) for name, entry in entries.items()}
    return found, take_turns({name: one.step for name, one in made.items()}, rounds)


def drawn(n: int, seed: int) -> dict[Layout, bool]:
    """So many legal layouts, from each mesh in turn: whether each is kept out. Raises UserError if there are fewer."""
    plugins()  # their schedules
    draw, kinds = random.Random(seed), {}
    for mesh in meshes(MODEL, NODES * RANKS, BATCH):
        if mesh.micro_batch_size <= 4:
            kinds.setdefault((mesh.pp, mesh.dp, mesh.cp, mesh.tp), []).extend(variants(MODEL, mesh))
    if not 2 <= n <= sum(map(len, kinds.values())):
        raise UserError(f"--layouts {n}: from 2 to {sum(map(len, kinds.values()))} are legal")
    for layouts in kinds.values():
        draw.shuffle(layouts)
    order = sorted(kinds)
    draw.shuffle(order)
    found: list[Layout] = []
    while len(found) < n:
        found += [kinds[key].pop() for key in order if kinds[key]]
    kept_out = set(draw.sample(range(n), n // 2))
    return {x: number in kept_out for number, x in enumerate(found[:n])}


def entry_of(x: Layout) -> Entry:
    """What is trained: step 6 with the flags of a layout."""
    flags = dict(model="tiny", dtype="fp32", device="cpu", **SIZES, global_batch_size=BATCH)
    names = ("pp", "cp", "tp", "zero", "micro_batch_size", "recompute", "sp", "cp_mode")
    flags |= {name: getattr(x, name) for name in names}
    flags |= dict(schedule=x.schedule, pp_split="cost") if x.pp > 1 else {}
    flags |= dict(chunks=x.chunks) if x.schedule == "interleaved" else {}
    return Entry("step06_pipeline", flags | (dict(cp_kernel="flash") if x.cp > 1 else {}))


def gpu_of(found: dict[str, float]) -> Gpu:
    """The planner's entry. Memory is not asked: all layouts fit."""
    rates = dict(flops=found["flops"], single=found["flops"], matmul=1.0, hbm=found["hbm"])
    rates |= {name: found[name] for name in PROBE[2:]}
    return Gpu(memory=float("inf"), node=RANKS, number=4, **rates)


def planned(x: Layout, gpu: Gpu, shared: int) -> tuple[float, float]:
    """Seconds of a step: by the plan; and if so many ranks share a core."""
    found, bubble = step_seconds(MODEL, x, gpu, COURSE), 0.0
    together = min(shared, network(x, "pp", gpu.node).in_node)
    if together == 1:
        return found.step, found.step
    if x.pp > together:  # a pipeline of fewer ranks, each with the work and the cores of those that it stands for
        f, b, w = rank_work(MODEL, layer_layout(x), gpu, COURSE, x.schedule, x.pp, x.chunks).costs
        ratio = pipeline_ratio(x.schedule, x.pp // together, x.chunks, x.micro_batches, b / f, w / f, 0.0)
        bubble = f * ratio - x.micro_batches * stages_of(x) * (f + b + w)
    return found.step, found.step - found.bubble + min(found.bubble, max(0.0, bubble))


def kept(config: Config) -> dict[str, Any]:
    """What the file has: settings, probes, and seconds by layout. Raises UserError if they are of other settings."""
    path = Path(config.json)
    asked = dict(gbit=config.gbit, sizes=SIZES, batch=BATCH, nodes=NODES, ranks=RANKS, shared=sharing())
    if not path.exists():
        return dict(settings=asked, probes=[], seconds={})
    found = json.loads(path.read_text())
    if found["settings"] != asked:
        raise UserError(f"--json {path}: it was measured with {found['settings']}; name another file")
    return found


def show(found: dict[str, Any], layouts: dict[Layout, bool]) -> str:
    """The tables: the probe's entry, each layout beside its plan, and the errors of both halves."""
    middle = {name: median(one[name] for one in found["probes"]) for name in PROBE}
    entry, shared = gpu_of(middle), found["settings"]["shared"]
    lines = [["a rank, while all others are busy", "median", "range", ""]]
    for name in PROBE:
        unit, text = UNITS[name]
        values = sorted(one[name] / unit for one in found["probes"])
        lines.append([name, f"{middle[name] / unit:,.1f}", f"{values[0]:,.1f} .. {values[-1]:,.1f}", text])
    rows, sides = [["", "layout", "seconds (range)", "CPU", "plan", "error", "shared", "error"]], {}
    for x, out in layouts.items():
        seconds, cpu = zip(*found["seconds"][x.flags()], strict=True)
        plan = planned(x, entry, shared)
        for side in ("kept out" if out else "open", "all"):
            sides.setdefault(side, []).append((median(seconds), *plan))
        errors = [f"{one / median(seconds) - 1:+.1%}" for one in plan]
        row = [f"{plan[0]:.3f}", errors[0], f"{plan[1]:.3f}", errors[1]]
        rows.append(
            [
                "kept out" if out else "open",
                x.flags(),
                spread(seconds),
                f"{median(cpu) * shared / NODES / RANKS:.3f}",
                *row,
            ]
        )
    sums = [["", "errors of", "layouts", "mean", "worst", "bias", "Spearman", "regret", "the middle one"]]
    for side in sorted(sides, reverse=True):
        measured, *plans = map(list, zip(*sides[side], strict=True))
        for name, plan in zip(("plan", "shared"), plans, strict=True):
            line = summary(name, [a / b - 1 for a, b in zip(plan, measured, strict=True)])
            correlation, regret = choice(measured, plan)
            chance = median(measured) / min(measured) - 1
            sums.append([side, *line, f"{correlation:.3f}", f"{regret:.1%}", f"{chance:.1%}"])
    return "\n\n".join(map(table, (lines, rows, sums)))


def bench(config: Config):
    """Measure what the file lacks, and print."""
    layouts, found = drawn(config.layouts, config.seed), kept(config)
    missing = [x for x in layouts if x.flags() not in found["seconds"]]
    for first in range(0, len(missing), config.together):
        entries = {x.flags(): entry_of(x) for x in missing[first : first + config.together]}
        print(f"{len(layouts) - len(missing) + first} of {len(layouts)} layouts are measured", file=sys.stderr)
        one, seconds = on_nodes(measure, entries, config.rounds, nodes=NODES, ranks=RANKS, gbit=config.gbit)[0]
        found["probes"].append(one)
        found["seconds"] |= seconds
        Path(config.json).parent.mkdir(parents=True, exist_ok=True)
        Path(config.json).write_text(json.dumps(found, indent=1) + "\n")
    print(show(found, layouts))


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
