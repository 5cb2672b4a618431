"""The bubble and the memory of a pipeline schedule, from its simulated lists."""

from itertools import accumulate
from typing import Literal

from common.schedules import Action, Costs, Placement, Span, neighbours

UNIT_COSTS = Costs(f=1, b=1, w=1, comm=0)  # the papers' figures


def makespan(spans: list[list[Span]]) -> float:
    """Seconds from the first start to the last end."""
    return max(span.end for row in spans for span in row) - min(span.start for row in spans for span in row)


def quick_makespan(lists: list[list[Action]], placements: list[Placement], costs: Costs) -> float:
    """`makespan` of what `simulate` finds, to the last bit, without the spans: each action is looked at once.

    A rank goes on until an input from another stage is missing. Whoever makes that input wakes it. Inputs that a rank
    makes itself stand before in its list.
    """
    before, after = neighbours(placements)
    seconds = {"F": costs.f, "B": costs.b, "W": costs.w, "BW": costs.b + costs.w}
    ends: dict[tuple, float] = {}  # (F or B, micro-batch, place) -> when it is done
    asleep: dict[tuple, int] = {}  # the missing input -> the rank that waits
    done, now, awake = [0] * len(lists), [0.0] * len(lists), list(range(len(lists)))
    while awake:
        rank = awake.pop()
        end, row = now[rank], lists[rank]
        for at in range(done[rank], len(row)):
            kind, i, chunk = row[at]
            here, first = (rank, chunk), kind[0]
            place = None if kind == "W" else (before if kind == "F" else after).get(here)
            if place:
                wanted = first, i, place
                if wanted not in ends:
                    asleep[wanted], done[rank] = rank, at
                    break
                end = max(end, ends[wanted] + costs.comm * (place[0] != rank))
            end += seconds[kind]
            if kind != "W":
                made = first, i, here
                ends[made] = end
                if made in asleep:
                    awake.append(asleep.pop(made))
        now[rank] = end
    return max(now)


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
