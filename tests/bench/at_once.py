"""--ep-overlap on paper: a step whose forwards and backwards are done at once where a schedule's lists have pairs.

Simulated, in times of a stage's forward: f = b = w = 1, and messages take no time. A pair starts when both inputs are
there, and both outputs leave when it is done. `saves`: what it is shorter than its two actions, as messages hide.
"""

from collections import deque
from dataclasses import dataclass, replace

from common.schedules import Action, Place, consumer, simulate
from services.seam import plugins
from services.tables import table
from tests.bench.harness import command
from theory.layouts import Layout, schedules
from theory.pipelines import lists_of, paired, places_of
from theory.shapes import GPTS
from variants.paired_actions import program_of


@dataclass
class Config:
    """Flags of this table."""

    pp: int = 4  # ranks of the pipeline
    micro_batches: int = 16  # of a step
    chunks: int = 2  # stages on each rank, of schedules that leave it open
    saves: float = 0.5  # of a stage's forward, in a pair


def step_in_pairs(lists: list[list[Action]], places: list[Place], costs: dict[str, float], saves: float) -> float:
    """When the last action ends."""
    awaited = {consumer(action, places) for row in lists for action in row}
    left = [deque(line.actions for line in row if line.verb == "compute") for row in program_of(lists, places)]
    arrival, free = {}, [0.0] * len(lists)
    while any(left):
        ready = [r for r, row in enumerate(left) if row and all(a in arrival or a not in awaited for a in row[0])]
        for rank in ready:
            actions = left[rank].popleft()
            start = max(free[rank], *(arrival.get(action, 0.0) for action in actions))
            free[rank] = start + sum(costs[action.kind] for action in actions) - saves * (len(actions) == 2)
            arrival |= {consumer(action, places): free[rank] for action in actions}
    return max(free)


def main(name: str, argv: list[str]):
    """The command line."""
    command(show, Config, argv)


def show(config: Config):
    """Print the table, of those that take these sizes."""
    plugins()  # more schedules
    p, m, v = config.pp, config.micro_batches, config.chunks
    rows = [["schedule", "in pairs, of the forwards", "one by one", "in pairs", f"if a pair saves {config.saves:g}"]]
    shape = replace(GPTS["gpt3-22b"], n_layers=p * v)  # any
    for name in (name for name, chunks in schedules(shape, Layout(p, global_batch_size=m)) if chunks in (1, v)):
        lists, places = lists_of(name, p, v, m), places_of(name, p, v)
        split = any(action.kind == "W" for action in lists[0])
        costs, each = dict(F=1.0, B=1.0 if split else 2.0, W=1.0), sum(a.kind == "F" for a in lists[0]) / m
        times = [simulate(lists, places, costs)[-1][0]]
        times += [step_in_pairs(lists, places, costs, saves) for saves in (0.0, config.saves)]
        rows.append([name, f"{paired(name, p, v, m):.0%}", *(f"{time / each:.1f}" for time in times)])
    print(table(rows))
