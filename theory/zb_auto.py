"""The automatic zero-bubble scheduler (Qi et al. 2023, section 3): a list per rank for given times and given memory.

It goes through time like `simulate`, and chooses what each free rank does next. B comes first, as the rank before waits
for it; then F, if memory has room. W fills gaps, since nobody waits for it. Two things are worth a try in several ways:
how many F a rank does before its first B, and whether W may begin in a gap that is shorter than W. So several lists are
made, and the best of them is taken.
"""

from collections import Counter
from collections.abc import Callable
from itertools import product
from math import inf

from common.schedules import Action, Costs, Output, Place, Span, needs, neighbours, place_stages, simulate, zb_h1
from theory.bubble import longest, makespan
from theory.memory import in_flight_bytes


def zb_auto(
    p: int,
    m: int,
    costs: Costs,
    limit: float,
    waiting: float = 1.0,
    measure: Callable[[list[list[Span]]], float] = longest,
) -> list[list[Action]]:
    """The best list found for each of p ranks, with m micro-batches and one stage a rank.

    `limit`, at least 1: the activations that a rank may hold, of so many micro-batches. A micro-batch is held from its
    F on; B frees the part 1 - `waiting` of it, W the rest. 1f1b needs a limit of p. `measure`: what is made small, the
    longest time of a rank (the paper's) or the makespan (if all ranks meet at the end of a step). The handmade zb-h1
    and zb-h2 are among the lists tried, if they fit.
    """
    placements, limit = place_stages("zb-auto", p, 1), min(limit, m)
    depths = sorted({1.0, 2.0, (limit - 1) / max(1, p - 1)})
    tries = [greedy(p, m, costs, limit, waiting, *variant) for variant in product(depths, (0.0, 0.25, 0.75), (0, 1))]
    handmade = [[zb_h1(p, m, 1, rank, depth) for rank in range(p)] for depth in (1, 2)]
    tries += [lists for lists in handmade if max(in_flight_bytes(row, [1], [waiting]) for row in lists) <= limit]

    def cost(lists: list[list[Action]]) -> tuple[float, float]:
        spans = simulate(lists, placements, costs)
        return measure(spans), makespan(spans)

    return min(tries, key=cost)


def greedy(
    p: int, m: int, costs: Costs, limit: float, waiting: float, depth: float, least: float, spare: int
) -> list[list[Action]]:
    """One list for each rank. `depth`: how many F a rank is ahead of B, in units of its distance to the last rank.

    `least`: W may begin in a gap of this part of its time, if it does not fit. `spare` 1: but not where a rank that
    waits instead still idles less than the rank that idles most.
    """
    before, after = neighbours(place_stages("zb-auto", p, 1))
    ends: dict[Output, float] = {}
    lists: list[list[Action]] = [[] for _ in range(p)]
    done = [Counter(F=0, B=0, W=0) for _ in range(p)]
    free, idle, now = [0.0] * p, [0.0] * p, 0.0

    def arrival(kind: str, rank: int) -> float:
        """When the next action of this kind has its inputs; inf if this is not known yet."""
        if done[rank][kind] == m:
            return inf
        inputs = needs(Action(kind, done[rank][kind], 0), rank, before, after)
        return max((ends.get(out, inf) + costs.comm * (out[2].rank != rank) for out in inputs), default=0.0)

    while any(count["W"] < m for count in done):
        moments = []  # at which something may happen next
        for rank, count in enumerate(done):
            if free[rank] > now:
                moments.append(free[rank])
                continue
            held = count["F"] - (1 - waiting) * count["B"] - waiting * count["W"]
            room = held + 1 <= limit + 1e-9 and count["F"] - count["B"] < depth * (p - 1 - rank) + 1
            b, f = arrival("B", rank), arrival("F", rank) if room else inf
            gap, spared = min(b, f) - now, spare * (max(idle) - idle[rank])
            if gap <= 0:
                kind = "B" if b <= now else "F"
            elif count["W"] < count["B"] and (gap >= costs.w or gap > max(least * costs.w, spared)):
                kind = "W"
            else:
                moments.append(min(b, f))
                continue
            idle[rank] += now - free[rank] if lists[rank] else 0.0
            free[rank] = now + dict(F=costs.f, B=costs.b, W=costs.w)[kind]
            ends[kind, count[kind], Place(rank, 0)] = free[rank]
            lists[rank].append(Action(kind, count[kind], 0))
            count[kind] += 1
            moments.append(free[rank])
        now = min(moments)
    return lists
