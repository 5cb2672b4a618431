"""Measured timelines of all schedules beside simulated ones (figure): real messages, and layers that sleep.

Step 6's executor runs each schedule's list in real processes; in place of forward and backward a stage sleeps for a
fixed time. Sleeping needs no core: layers that compute would take turns on a machine with fewer cores than ranks, and
the figure would show the machine. What is measured is order, messages and the executor's own time.

All schedules do the same work: pp times --ms a micro-batch for each of F, input gradient and weight gradient, however
many stages there are. They take turns; the run with the median idle fraction is shown. One clock serves all processes.
"""

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

import step06_pipeline as step06
from common.comm import Mesh
from common.model import PRESETS
from common.schedules import SCHEDULES, simulate
from services.screen import idle_fraction
from services.seam import compose, plugins
from services.tables import table
from tests.bench import figures
from tests.bench.harness import command, meet, on_ranks, where


@dataclass
class Config:
    """Flags of this measurement."""

    pp: int = 4  # processes, one for each pipeline rank
    micro_batches: int = 8  # of a step
    ms: float = 400.0  # milliseconds of F, of the input's and of the weights' gradient, of 1/pp of the layers
    repeats: int = 3  # runs of each schedule, after a short one


def planned(config: Config, schedule: str) -> tuple[list, list, dict[str, float]]:
    """Places, lists, and the seconds of each kind of action."""
    PRESETS["sleeping"] = replace(PRESETS["debug"], n_layers=2 * config.pp)
    flags = dict(model="sleeping", pp=config.pp, schedule=schedule, micro_batch_size=1)
    own = compose(step06)(**flags, global_batch_size=config.micro_batches)
    places, lists = step06.plan(own, config.micro_batches)
    once = places[: len(places) // 2] if schedule == "dualpipe" else places  # it has two copies of all stages
    unit = config.ms / 1e3 * config.pp / len(once)
    split = any(action.kind == "W" for row in lists for action in row)
    return places, lists, dict(F=unit, B=unit if split else 2 * unit, W=unit)


def run_on_rank(config: Config, turns: int) -> dict[str, list[list[list]]]:
    """Runs on every rank: by schedule and turn, [kind, micro-batch, stage, start, end] of its actions."""
    plugins()  # more schedules
    group, found = Mesh(pp=config.pp)["pp"], {}
    for turn in range(turns):
        for schedule in SCHEDULES:
            places, lists, costs = planned(config, schedule)
            model = nn.Module()
            model.config, model.weight = PRESETS["debug"], nn.Parameter(torch.zeros(1))
            pipeline = step06.ListPipeline(lists, model, places, group, torch.arange(64), 1)
            pipeline.xs, rows = [torch.zeros(1, 64)] * config.micro_batches, []
            for kind, seconds in costs.items():
                setattr(pipeline, step06.ACTS[kind], sleeper(pipeline, rows, kind, seconds if turn else 0.001))
            meet()
            pipeline.execute()
            found.setdefault(schedule, []).append(rows)
    return found


def sleeper(pipeline: step06.ListPipeline, rows: list, kind: str, seconds: float):
    """An act that takes so long, and notes when."""

    def act(i: int, stage: int, _input: torch.Tensor | None) -> torch.Tensor:
        start = time.perf_counter()
        time.sleep(seconds)
        rows.append([kind, i, stage, start, time.perf_counter()])
        return pipeline.buffer(i).zero_()

    return act


def idle(ranks: list[list[list]]) -> float:
    """The idle fraction of a measured timeline."""
    return idle_fraction([(rank, *row[3:]) for rank, rows in enumerate(ranks) for row in rows], len(ranks))


def bench(config: Config):
    """Run all schedules, draw them, print the table."""
    plugins()
    by_rank = on_ranks(config.pp, run_on_rank, config, config.repeats + 1)
    head = ["schedule", "idle, measured", "simulated", "all runs", "step time", "simulated"]
    rows, panels = [head], []
    for schedule in SCHEDULES:
        places, lists, costs = planned(config, schedule)
        spans = simulate(lists, places, costs)
        expected = idle_fraction([(rank, start, end) for end, rank, start, _ in spans], config.pp)
        turns = sorted(([rank[schedule][turn] for rank in by_rank] for turn in range(1, config.repeats + 1)), key=idle)
        ranks = turns[len(turns) // 2]
        took = max(row[-1][4] for row in ranks) - min(row[0][3] for row in ranks)
        panels.append(dict(schedule=schedule, ranks=ranks, idle=idle(ranks), simulated_idle=expected))
        between = f"{idle(turns[0]):.1%} to {idle(turns[-1]):.1%}"
        shown = [f"{median(map(idle, turns)):.1%}", f"{expected:.1%}", between]
        rows.append([schedule, *shown, f"{took:.3f} s", f"{spans[-1][0]:.3f} s"])
    title = f"{config.pp} processes, {config.micro_batches} micro-batches, layers that sleep"
    picture = figures.timelines(panels, f"measured: {title}", "timelines")
    print(f"{title} {config.ms:g} ms; {where(config.pp)}\n\n{table(rows)}\n\nsee {picture}")


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
