"""Interleaved schedules with rounds of any size (`--schedule rounds --round-size N`; Llama 3: Dubey et al. 2024,
3.3.2), or with one more forward before the first backward (`--schedule ahead`).

With `--schedule interleaved`, p micro-batches pass a rank's first stage, then its second one, so p must divide m. Here
at least N >= p do so, in max(1, m // N) rounds of almost equal size. Two ranks, v = 2 stages on each, m = 8:

    rank 0's forwards    N = 2    F0.0 F1.0  F0.2 F1.2  F2.0 F3.0  F2.2 F3.2  F4.0 ...    depth first: interleaved
                         N = 4    F0.0 F1.0 F2.0 F3.0  F0.2 F1.2 F2.2 F3.2  F4.0 ...
                         N = 8    F0.0 ... F7.0  F0.2 ... F7.2                            breadth first

For all m >= p the bubble is that of interleaved, (p-1) / (v m + p-1). (If m < p, all are one round, and the step takes
(v p + m - 1) (f + b) of a stage.) A larger N costs memory, and gives messages time. If N' is the largest round:

    memory    (v-1) N' + 2 (p-1 - rank) + 1 stages in flight on a rank, at most v m
    messages  a micro-batch has N' - p forwards of time to return from the last rank to the first

`ahead` has rounds of p, and enough forwards before the first backward that each F and the B behind it belong to
different micro-batches, so that they can be computed together (step07/ep_overlap.py): one more than interleaved, and
with --chunks 1, 2 (p-1 - rank) + 1 instead of 1F1B's p-1 - rank. A step takes the same time, with so many more stages
in flight. Rank 1 of 2, v = 1:

    1f1b     F0 B0  F1 B1  F2 B2  F3 B3          a backward follows the forward of its own micro-batch
    ahead    F0  F1 B0  F2 B1  F3 B2  B3         of another one: F1 and B0 together, F2 and B1 ...

In common/schedules.py the function `one_f_one_b_order` would have one more argument.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from common.schedules import SCHEDULES, Action, Schedule


def rounds(size: int, p: int, m: int, v: int, rank: int, ahead: bool = False) -> list[Action]:
    """Like `one_f_one_b_order`, in rounds of at least max(size, p) micro-batches. `ahead` lengthens the warm-up."""
    n = max(1, m // max(size, p))
    parts = [range(*pair) for pair in pairwise(m * i // n for i in range(n + 1))]
    stages = range(rank, p * v, p)
    forwards = [Action("F", i, stage) for part in parts for stage in stages for i in part]
    backwards = [Action("B", i, stage) for part in parts for stage in reversed(stages) for i in part]
    warm_up = (v - 1) * max(map(len, parts)) + (2 if ahead else min(v, 2)) * (p - 1 - rank) + ahead
    in_turn = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + in_turn + backwards[len(in_turn) // 2 :]


# The planner's layouts have no flag `round_size`.
SCHEDULES["rounds"] = lambda config: Schedule(partial(rounds, getattr(config, "round_size", 0)), v=config.chunks)
SCHEDULES["ahead"] = lambda config: Schedule(partial(rounds, 0, ahead=True), v=config.chunks)


@dataclass
class Flags:
    """Rounds of micro-batches."""

    round_size: int = 0  # smallest number of micro-batches in a row that a rank takes through one stage; at least --pp


TRIED = dict(round_size=3)
NEEDS = [("round_size", "schedule", "rounds")]
