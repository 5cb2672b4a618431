"""The bubble and the memory of a pipeline schedule, from its simulated lists."""

from itertools import accumulate
from typing import Literal

from common.schedules import Action, Costs, Span

UNIT_COSTS = Costs(f=1, b=1, w=1, comm=0)  # the papers' figures


def makespan(spans: list[list[Span]]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for row in spans for span in row) - min(span.start for row in spans for span in row)


def idle_fraction(spans: list[list[Span]]) -> float:
    """The bubble: the part of p ranks x makespan in which nothing is computed."""
    return 1 - sum(span.end - span.start for row in spans for span in row) / (len(spans) * makespan(spans))


def in_flight(lists: list[list[Action]], until: Literal["B", "W"] = "B") -> list[int]:
    """By rank: the most (micro-batch, chunk)s held at once, from F to the end of their B, or of their W."""
    change = {"F": 1, until: -1, "BW": -1}
    return [max(accumulate(change.get(action.kind, 0) for action in actions), default=0) for actions in lists]
