"""From chapter 6 on: pipeline schedules as data. Each rank has a list of actions, which can be drawn, checked or run.

A schedule is a function of p ranks, m micro-batches and v stages on each rank; it returns one rank's list. The
schedules here differ only in `warm_up`, the number of forwards before forwards and backwards alternate.

    python -m common.schedules 4 8 2          draws them for 4 ranks, 8 micro-batches, 2 stages on a rank
"""

import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from common import UserError

COSTS = {"F": 1, "B": 2}  # units of time


class Action(NamedTuple):
    """One unit of a rank's work. ("F", 3, 1), written F3.1: the forward of micro-batch 3 through stage 1."""

    kind: str  # F forward, B backward
    micro_batch: int
    stage: int


class Place(NamedTuple):
    """One stage: its rank, its layers, and the numbers of the stages `before` and `after` it (None at the ends)."""

    rank: int
    layers: range
    before: int | None
    after: int | None


def round_robin(n_layers: int, p: int, v: int) -> list[Place]:
    """The places of p v stages with almost equally many layers: stage s is on rank s mod p."""
    n = p * v
    bounds = [n_layers * stage // n for stage in range(n + 1)]
    link = [None, *range(n), None]  # link[s] and link[s + 2] are the neighbours of stage s
    return [Place(s % p, range(bounds[s], bounds[s + 1]), link[s], link[s + 2]) for s in range(n)]


def one_f_one_b_order(p: int, m: int, v: int, rank: int, warm_up: int) -> list[Action]:
    """One rank's list: `warm_up` forwards; then forwards and backwards alternate; then the remaining backwards.

    Micro-batches go in rounds of p. A round passes through the rank's first stage, then its second one, and so on (in
    backward: last stage first). On rank 0 of 2, with stages 0 and 2, the forwards of 4 micro-batches are F0.0 F1.0 F0.2
    F1.2, F2.0 F3.0 F2.2 F3.2: while this rank computes F1.0, rank 1 has micro-batch 0 in stage 1.
    """
    rounds = [range(start, min(start + p, m)) for start in range(0, m, p)]
    stages = range(rank, p * v, p)
    forwards = [Action("F", i, stage) for one in rounds for stage in stages for i in one]
    backwards = [Action("B", i, stage) for one in rounds for stage in reversed(stages) for i in one]
    in_turn = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return forwards[:warm_up] + in_turn + backwards[len(in_turn) // 2 :]


def afab(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forward, all backward (GPipe, Huang et al. 2019): up to m micro-batches are in flight."""
    return one_f_one_b_order(p, m, v, rank, warm_up=m * v)


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B (PipeDream-flush, Narayanan et al. 2021) for v = 1: at most p - rank micro-batches in flight on `rank`."""
    return one_f_one_b_order(p, m, v, rank, warm_up=p - 1 - rank)


def interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B, v stages on each rank (Megatron, Narayanan et al. 2021). UserError if v > 1 and m is no multiple of p."""
    if v > 1 and m % p:
        raise UserError(f"--schedule interleaved: --pp {p} must divide the {m} micro-batches of a rank")
    # Twice the distance to the last rank leaves time to hide messages; once would do if they took none. v = 1: 1F1B.
    return one_f_one_b_order(p, m, v, rank, warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))


class Schedule(NamedTuple):
    """How to make a rank's list, where the stages are, how many a rank has, and how long each kind of action takes."""

    actions: Callable[[int, int, int, int], list[Action]]  # (p, m, v, rank)
    places: Callable[[int, int, int], list[Place]] = round_robin  # (n_layers, p, v)
    v: int = 1
    costs: dict[str, int] = COSTS


SCHEDULES: dict[str, Callable[[Any], Schedule]] = {  # name -> schedule, given the other flags
    "1f1b": lambda config: Schedule(one_f_one_b),
    "afab": lambda config: Schedule(afab),
    "interleaved": lambda config: Schedule(interleaved, v=config.chunks),
}


def consumer(action: Action, places: list[Place]) -> Action | None:
    """The action that needs this one's output: on the next stage (backward: the previous one), or None at the end."""
    there = {"F": places[action.stage].after, "B": places[action.stage].before}.get(action.kind)
    return None if there is None else action._replace(stage=there)


def simulate(lists: list[list[Action]], places: list[Place], costs: dict, message: float = 0) -> list[tuple]:
    """Simulate ranks -> sorted (end, rank, start, action). `message`: the cost of a message. ValueError on deadlock."""
    # The last stage's forward is followed by its own backward, which starts from the loss.
    needs_it = {a: consumer(a, places) or a._replace(kind="B" * (a.kind == "F")) for row in lists for a in row}
    awaited = {*needs_it.values()}
    spans, arrival, free, left = [], {}, [0 for _ in lists], [deque(row) for row in lists]
    while any(left):
        ready = [rank for rank, row in enumerate(left) if row and (row[0] in arrival or row[0] not in awaited)]
        if not ready:
            raise ValueError(f"each rank waits for ever: {[row[0] for row in left if row]}")
        for rank in ready:
            action = left[rank].popleft()
            there = needs_it[action]
            start = max(free[rank], arrival.get(action, 0))
            free[rank] = start + costs[action.kind]
            arrival[there] = free[rank] + (message if places[there.stage].rank != rank else 0)
            spans.append((free[rank], rank, start, action))
    return sorted(spans)


def draw(lists: list[list[Action]], places: list[Place], costs: dict = COSTS) -> str:
    """A line per rank, a character per unit of time: F of micro-batch i is digit i mod 10, B a letter; idle is `.`."""
    spans = simulate(lists, places, costs)
    rows = [["."] * spans[-1][0] for _ in lists]
    for end, rank, start, (kind, i, _) in spans:
        rows[rank][start:end] = {"F": str(i % 10), "B": chr(ord("a") + i % 26)}.get(kind, "-") * (end - start)
    return "\n".join("".join(row) for row in rows)


if __name__ == "__main__":
    p, m, chunks = map(int, sys.argv[1:4] or sys.exit("python -m common.schedules RANKS MICRO_BATCHES CHUNKS"))
    chunks == 1 or m % p == 0 or sys.exit(f"error: RANKS {p} must divide MICRO_BATCHES {m}, or CHUNKS be 1")
    for name, make in SCHEDULES.items():
        actions, places, v, _ = make(SimpleNamespace(chunks=chunks))
        print(name, draw([actions(p, m, v, rank) for rank in range(p)], places(p * v, p, v)), sep="\n")
