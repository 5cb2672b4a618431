"""Pipeline schedules on paper: bubble rates beside those of Qi et al. 2023, and DeepSeek's formulas.

    python -m tests.bench schedules
    python -m tests.bench schedules --rows 3

Nothing is measured: all of it is simulated. The times of F, B, W and a message were profiled by the paper's authors.
They stand with the paper's rates in sail-sg/zero-bubble-pipeline-parallelism, megatron/core/pipeline_parallel/
efficiency.py, and so does the memory: a micro-batch's 34 h + 5 a s bytes a token and layer, of which 32 h wait for W.

The paper's bubble rate (section 5) is (cost - m (f + b + w)) / cost. The cost is the time of the slowest rank, from
its own first start to its own last end. The last column counts the whole iteration instead, from the first start on any
rank to the last end on any rank: then the last rank's wait for its first input counts, too.

The last table asks what it costs that the messages of a rank pass one by one, in the order of posting: NCCL carries all
batches of a group in one stream. There F = B = W = 1 and a message 0.05; jitter: each action takes up to so much longer
or shorter, the mean of ten draws.
"""

import random
from dataclasses import dataclass

from common import UserError
from common.schedules import (
    ORDER_COSTS,
    SCHEDULES,
    Action,
    Costs,
    chunks_per_rank,
    communicate,
    place_stages,
    simulate,
)
from services.flags import main as run_main
from services.tables import table
from tests.schedules import QUEUES, seconds_of
from theory.bubble import UNIT_COSTS, bubble_rate, idle_fraction, makespan
from theory.zb_auto import zb_auto

# Parameters, ranks, micro-batches; milliseconds of F, B, W and a message; width h, heads a; the paper's rates of 1f1b,
# zb-h1, zb-h2, and of its automatic schedules with 1f1b's activations and with twice those.
PAPER = [
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), (2304, 24), (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), (2304, 24), (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), (2304, 24), (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), (4096, 32), (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    ("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), (4096, 32), (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)),
    ("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), (4096, 32), (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), (5120, 40), (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), (5120, 40), (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), (5120, 40), (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), (6144, 48), (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
    ("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), (6144, 48), (0.2168, 0.1106, 0.0490, 0.1106, 0.0029)),
    ("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), (6144, 48), (0.1352, 0.0594, 0.0257, 0.0594, 0.0018)),
]
SEQ_LEN = 1024


@dataclass
class Config:
    """Flags of this benchmark."""

    rows: int = len(PAPER)  # of the first table; the last three take minutes


def lists_of(schedule: str, p: int, m: int) -> list[list[Action]]:
    """A schedule's lists, with as many stages a rank as it wants."""
    return [SCHEDULES[schedule](p, m, chunks_per_rank(schedule), rank) for rank in range(p)]


def rates(p: int, m: int, costs: Costs, waiting: float) -> tuple[list[float], float, list[float]]:
    """(ours beside the paper's five, zbv's and dualpipe's), and the idle fraction of the last automatic schedule."""
    placements = place_stages("1f1b", p, 1)
    lists = [lists_of(name, p, m) for name in ("1f1b", "zb-h1", "zb-h2")]
    lists += [zb_auto(p, m, costs, depth * p, waiting) for depth in (1, 2)]
    spans = [simulate(each, placements, costs) for each in lists]
    half = Costs(costs.f / 2, costs.b / 2, costs.w / 2, costs.comm)  # a stage has half of the layers
    others = [("zbv", half), ("dualpipe", costs)]
    more = [simulate(lists_of(name, p, m), place_stages(name, p, 2), each) for name, each in others]
    return [bubble_rate(each) for each in spans], idle_fraction(spans[-1]), [bubble_rate(each) for each in more]


def queue_costs(schedule: str, p: int, m: int, jitter: float) -> list[float]:
    """By kind of queue: seconds of a step over those without queues, minus 1; `jitter` as a fraction of an action."""
    v = chunks_per_rank(schedule) or 2
    placements, lists = place_stages(schedule, p, v), [SCHEDULES[schedule](p, m, v, rank) for rank in range(p)]
    programs, totals = communicate(lists, placements), dict.fromkeys(QUEUES, 0.0)
    for seed in range(10 if jitter else 1):
        draw = random.Random(seed)
        times = {
            (rank, action): len(action.kind) * draw.uniform(1 - jitter, 1 + jitter)
            for rank, row in enumerate(lists)
            for action in row
        }
        for name, queue_of in QUEUES.items():
            duration = lambda rank, action, times=times: times[rank, action]  # noqa: E731
            totals[name] += seconds_of(programs, placements, duration, ORDER_COSTS.comm, queue_of)
    return [total / totals["none"] - 1 for name, total in totals.items() if name != "none"]


def bench(config: Config):
    """Print the three tables."""
    if not 1 <= config.rows <= len(PAPER):
        raise UserError(f"--rows {config.rows}: use 1 to {len(PAPER)}")
    rows = [
        ["model", "p", "m", *("1f1b", "zb-h1", "zb-h2", "zb-auto 1p", "zb-auto 2p", "zbv", "dualpipe", "2p, whole")]
    ]
    for model, p, m, times, (h, a), paper in PAPER[: config.rows]:
        found, whole, more = rates(p, m, Costs(*times), 32 * h / (34 * h + 5 * a * SEQ_LEN))
        both = [f"{theirs:.4f} {ours:.4f}" for theirs, ours in zip(paper, found, strict=True)]
        rows.append([model, str(p), str(m), *both, *(f"{rate:.4f}" for rate in [*more, whole])])
    print("bubble rates: the paper's, ours (zbv, dualpipe and the whole iteration: ours alone)\n")
    print(table(rows))
    rows = [["p", "m", *("1f1b: (p-1)(F+B)", "zb-h1: (p-1)(F+B-2W)", "dualpipe: (p/2-1)(F&B+B-3W)")]]
    for p in (4, 8, 16):
        formulas = {"1f1b": (p - 1) * (1 + 2), "zb-h1": (p - 1) * (1 + 2 - 2), "dualpipe": (p // 2 - 1) * (3 + 2 - 3)}
        found = []
        for name, formula in formulas.items():
            spans = simulate(lists_of(name, p, 2 * p), place_stages(name, p, chunks_per_rank(name)), UNIT_COSTS)
            found.append(f"{formula} {makespan(spans) - 3 * 2 * p:g}")
        rows.append([str(p), str(2 * p), *found])
    print("\nbubbles: DeepSeek's formula, ours; F = W = 1, B = 2 is a whole backward, F&B = 3 (nothing overlaps)\n")
    print(table(rows))
    rows = [["p", "m", "schedule", "jitter", *(name for name in QUEUES if name != "none")]]
    for p, m in ((4, 8), (8, 16), (8, 64)):
        for name in SCHEDULES:
            for jitter in (0.0, 0.2):
                found = [f"{cost:.2%}" for cost in queue_costs(name, p, m, jitter)]
                rows.append([str(p), str(m), name, f"{jitter:.0%}", *found])
    print("\nwhat queues of messages add to a step\n")
    print(table(rows))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
