"""Interleaved schedules with rounds of any size (`--schedule rounds`; Llama 3: Dubey et al. 2024, 3.3.2).

With `--schedule interleaved`, a round of p micro-batches passes a rank's first stage, then its second one, so p must
divide m. Here the m micro-batches form max(1, m // N) rounds of almost equal size, where N is `--round-size`, or p if
that is larger. An example with two ranks, v = 2 stages on each, and m = 8:

    rank 0's forwards    N = 2    F0.0 F1.0  F0.2 F1.2  F2.0 F3.0  F2.2 F3.2  F4.0 ...    depth first: interleaved
                         N = 4    F0.0 F1.0 F2.0 F3.0  F0.2 F1.2 F2.2 F3.2  F4.0 ...
                         N = 8    F0.0 ... F7.0  F0.2 ... F7.2                            breadth first

For any m >= p the bubble is that of interleaved, (p-1) / (v m + p-1). (If m < p there is one round, and a step takes
v p + m - 1 times a stage's forward and backward.) A larger N costs memory, but leaves more time for messages. With N',
the size of the largest round:

    memory    at most (v-1) N' + 2 (p-1 - rank) + 1 pairs (micro-batch, stage) in flight on a rank, and at most v m
    messages  a micro-batch may take as long as N' - p forwards to return from the last rank to the first

In common/schedules.py, `one_f_one_b_order` would have the size of a round as one more argument.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from common.schedules import SCHEDULES, Action, Schedule


def rounds(size: int, p: int, m: int, v: int, rank: int) -> list[Action]:
    """Like `one_f_one_b_order`, but in rounds of max(size, p) or more micro-batches, or in one round if m is less."""
    n = max(1, m // max(size, p))
    parts = [range(*pair) for pair in pairwise(m * i // n for i in range(n + 1))]
    stages = range(rank, p * v, p)
    forwards = [Action("F", i, stage) for part in parts for stage in stages for i in part]
    backwards = [Action("B", i, stage) for part in parts for stage in reversed(stages) for i in part]
    warm_up = (v - 1) * max(map(len, parts)) + min(v, 2) * (p - 1 - rank)
    in_turn = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + in_turn + backwards[len(in_turn) // 2 :]


# The planner's layouts have no flag `round_size`.
SCHEDULES["rounds"] = lambda config: Schedule(partial(rounds, getattr(config, "round_size", 0)), v=config.chunks)


@dataclass
class Flags:
    """Rounds of micro-batches."""

    round_size: int = 0  # smallest number of micro-batches that a rank takes through one stage in a row; at least --pp


TRIED = dict(round_size=3)
NEEDS = [("round_size", "schedule", "rounds")]
