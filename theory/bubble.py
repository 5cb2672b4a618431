"""The bubble and the memory of a pipeline schedule, from its simulated lists."""

from itertools import accumulate
from typing import Literal

from common.schedules import Action, Costs, Span

UNIT_COSTS = Costs(f=1, b=1, w=1, comm=0)  # the papers' figures


def makespan(spans: list[list[Span]]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for row in spans for span in row) - min(span.start for row in spans for span in row)


def longest(spans: list[list[Span]]) -> float:
    """Seconds of the rank that takes longest, from its own first start to its own last end.

    This is the cost of Qi et al. 2023, where ranks need not meet at the end of a step.
    """
    return max(row[-1].end - row[0].start for row in spans)


def bubble_rate(spans: list[list[Span]]) -> float:
    """Qi et al. 2023, section 5: (cost - m (f + b + w)) / cost. The cost is `longest`; all ranks are equally busy."""
    return 1 - sum(span.end - span.start for span in spans[0]) / longest(spans)


def idle_fraction(spans: list[list[Span]]) -> float:
    """The bubble: the part of p ranks x makespan in which nothing is computed."""
    return 1 - sum(span.end - span.start for row in spans for span in row) / (len(spans) * makespan(spans))


def in_flight(lists: list[list[Action]], until: Literal["B", "W"] = "B") -> list[int]:
    """By rank: the most (micro-batch, chunk)s held at once, from F to the end of their B, or of their W."""
    change = {"F": 1, until: -1, "BW": -1}
    return [max(accumulate(change.get(action.kind, 0) for action in actions), default=0) for actions in lists]
