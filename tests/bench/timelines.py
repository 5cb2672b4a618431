"""Pipeline parallelism: measured timelines of all schedules beside simulated ones; timelines.png and .json.

    python -m tests.bench timelines
    python -m tests.bench timelines --pp 8 --micro-batches 16 --out /tmp

Step 6's executor runs every schedule in real processes that send each other real messages; only the layers are
stand-ins that *sleep* for a fixed time in forward, in the gradient of the input, and in the gradient of the weights,
which waits in the queue. Sleeping needs no core: real layers would take turns on a machine with fewer cores than ranks,
and the figure would show the machine. What is measured is therefore order, messages and the executor's own time, not
compute.

All schedules do the same work: a micro-batch takes pp times --ms for each of F, B and W, however many stages there are.
The schedules take turns; of the runs of each, the one with the median idle fraction is shown. One clock serves all
processes (CLOCK_MONOTONIC).
"""

import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import step06_pipeline as step06
from common import UserError
from common.model import Decoder
from common.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Span,
    chunks_per_rank,
    place_stages,
    simulate,
)
from common.trainer import start
from services import plots
from services.checks import refuse
from services.flags import main as run_main
from services.launch import gather_objects
from services.tables import table
from tests.pool import Hang, Pool, RankError
from theory.bubble import idle_fraction

BOUNDARY = (64, 64)  # tokens, width of what is sent


@dataclass
class Config:
    """Flags of this benchmark."""

    pp: int = 4  # processes to start, one for each pipeline rank
    micro_batches: int = 8  # of a step
    chunks: int = 2  # stages on each rank of the interleaved schedule
    ms: float = 400.0  # milliseconds of F, of B and of W of 1/pp of the layers
    repeats: int = 3  # runs of each schedule, after one to warm up
    out: str = "tests/bench/figures"  # folder for timelines.json and timelines.png


class Sleep(torch.autograd.Function):
    """A layer of which only the time is there."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float, store: step06.WeightGradStore) -> Tensor:
        """[batch, tokens, width] -> the same."""
        ctx.weight, ctx.seconds, ctx.store = weight, seconds, store
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The input gradient now, the weight gradient when its turn comes."""

        def gradient() -> list[Tensor]:
            time.sleep(ctx.seconds)
            return [torch.zeros_like(ctx.weight)]

        ctx.store.put([ctx.weight], gradient)
        time.sleep(ctx.seconds)
        return grad.clone(), None, None, None


class StandIn:
    """In place of a `step06.Chunk`."""

    def __init__(self, seconds: float, store: step06.WeightGradStore, first: bool, last: bool):
        self.weight, self.seconds, self.store = nn.Parameter(torch.zeros(1)), seconds, store
        self.first, self.last = first, last

    def __call__(self, x: Tensor, positions: Tensor, end) -> Tensor:
        """As a chunk's."""
        x = Sleep.apply(x, self.weight, self.seconds, self.store)
        return end(x) if self.last else x


class Recorder:
    """Instead of `run.phase`: `rows` of [kind, micro-batch, chunk, start, end], in seconds."""

    def __init__(self):
        self.rows: list[list] = []

    @contextmanager
    def __call__(self, name: str, action: Action | None = None):
        """Note an action's start and end."""
        start = time.perf_counter()
        yield
        if action is not None:
            self.rows.append([*action, start, time.perf_counter()])


def measure(schedule: str, p: int, m: int, v: int, seconds: float) -> list[list]:
    """Runs on every rank: [kind, micro-batch, chunk, start, end] of its actions; `seconds` of F, B or W of a stage."""
    tokens, width = BOUNDARY
    model = dict(model="debug", n_layers=p * v, dim=width, seq_len=tokens, dtype="fp32", device="cpu", zero=0)
    layout = dict(pp=p, cp=1, tp=1, schedule=schedule, chunks=v, global_batch_size=m, micro_batch_size=1)
    config = step06.Config(**model | layout)
    with start(config) as run:
        plan, store, here = run.plan_pipeline(), step06.WeightGradStore(), {}
        with torch.device("meta"):
            unused = Decoder(run.shape)  # whose width and optimizer the executor knows; its layers are never called
        step06.keep_stage(unused, run.mesh, plan)
        for placement in plan.placements:
            for stage, (rank, chunk) in enumerate(placement):
                if rank == run.mesh.rank:
                    here[chunk] = StandIn(seconds, store, first=stage == 0, last=stage == len(placement) - 1)
        chunks = [here[chunk] for chunk in sorted(here)]
        pipeline = step06.Pipeline(unused, chunks, plan, torch.arange(tokens), store, config, run)
        inputs, recorder = [torch.zeros(1, *BOUNDARY) for _ in range(m)], Recorder()
        gather_objects(None, run.mesh)  # all begin here
        pipeline.run(inputs, lambda i, hidden: hidden.sum(), pipeline.program, recorder)
        return recorder.rows


def idle(ranks: list[list[list]]) -> float:
    """The idle fraction of a measured timeline."""
    return idle_fraction([[Span(None, start, end) for *_, start, end in row] for row in ranks])


def bench(config: Config):
    """Run all schedules, draw them, print the table."""
    p, m, seconds = config.pp, config.micro_batches, config.ms / 1e3
    for name, least in dict(pp=2, micro_batches=1, chunks=1, ms=0.1, repeats=1).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    cases = {schedule: chunks_per_rank(schedule) or config.chunks for schedule in SCHEDULES}
    if reason := next(filter(None, (refuse(schedule, p, m, v) for schedule, v in cases.items())), ""):
        raise UserError(reason)
    load, pool, panels = os.getloadavg()[0], Pool(p), {}
    runs: dict[str, list[list[list]]] = {schedule: [] for schedule in cases}
    try:
        for turn in range(config.repeats + 1):
            for schedule, v in cases.items():
                cost = seconds * p / len(place_stages(schedule, p, v)[0])
                took = cost if turn else 0.001  # the first turn opens connections
                found = pool.run(measure, schedule, p, m, v, took)
                runs[schedule] += [found] if turn else []
    except (RankError, Hang) as error:
        sys.exit(str(error))  # the rank's traceback, or where each one stood
    pool.stop()
    rows = [["schedule", "idle, measured", "simulated", "ratio", "all runs", "step time", "simulated"]]
    for schedule, v in cases.items():
        placements = place_stages(schedule, p, v)
        cost = seconds * p / len(placements[0])
        simulated = simulate(
            [SCHEDULES[schedule](p, m, v, rank) for rank in range(p)], placements, Costs(cost, cost, cost, 0)
        )
        in_order = sorted(runs[schedule], key=idle)
        fractions = [idle(ranks) for ranks in in_order]
        ranks, expected = in_order[len(in_order) // 2], idle_fraction(simulated)
        shown = idle(ranks)
        start = min(row[0][3] for row in ranks)
        ranks = [[[*action, round(a - start, 6), round(b - start, 6)] for *action, a, b in row] for row in ranks]
        panels[schedule] = dict(ranks=ranks, idle=shown, simulated_idle=expected)
        took, least = max(row[-1][4] for row in ranks), max(row[-1].end for row in simulated)
        between = f"{fractions[0]:.1%} to {fractions[-1]:.1%}"
        numbers = [f"{shown:.1%}", f"{expected:.1%}", f"{shown / expected:.3f}", between]
        rows.append([schedule, *numbers, f"{took:.3f} s", f"{least:.3f} s"])
    Path(config.out).mkdir(parents=True, exist_ok=True)
    file, figure = Path(config.out, "timelines.json"), Path(config.out, "timelines.png")
    file.write_text(json.dumps(dict(panels=panels)) + "\n")
    plots.pipeline_timelines(
        file,
        figure,
        f"measured: {p} processes, {m} micro-batches, layers that sleep for {config.ms:g} ms in each of F, B and W "
        "(with two stages a rank half as long)",
    )
    print(
        f"{p} ranks, {m} micro-batches, {config.ms:g} ms; {config.repeats} runs each; load average {load:.1f} before\n"
    )
    print(f"{table(rows)}\n\nsee {figure}")


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
