"""Tests the schedules of extras: they are complete and free of deadlock, and obey their papers' laws."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, pairwise, product
from types import SimpleNamespace

import pytest

from common import UserError
from common.schedules import SCHEDULES, Action, Place, simulate
from extras.services.seam import plugins
from step06_pipeline import add_messages
from tests.test_step06 import carry_out

plugins()
TECHNIQUES = [name for name in SCHEDULES if name not in ("afab", "1f1b", "interleaved")]  # all but the course's
UNIT = dict(F=1, R=1, B=1, W=1)
PLAIN = dict(F=1, B=2)  # in a schedule without W, B computes both gradients
COSTS = [dict(F=f, B=b, W=w) for f, b, w in product((2, 3, 5), repeat=3)]  # whole numbers: the laws hold exactly
SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 5, 7, 8, 12, 16, 19, 24)]
FLAGS = dict(chunks=2, round_size=0)
Lists = list[list[Action]]


def made(name: str, p: int, m: int, **flags) -> tuple[Lists, list[Place]]:
    """Make a schedule's lists and places for p ranks and m micro-batches. Raises UserError if it refuses p or m."""
    actions, places, stages, _ = SCHEDULES[name](SimpleNamespace(pp=p, **FLAGS | flags))
    v = stages if p > 1 else 1
    return [actions(p, m, v, rank) for rank in range(p)], places(p * v, p, v)


def sizes(name: str) -> Iterator[tuple[int, int, Lists, list[Place]]]:
    """Yield (p, m, lists, places) for each of SIZES that a schedule accepts."""
    for p, m in SIZES:
        try:
            yield p, m, *made(name, p, m)
        except UserError:
            assert (name == "interleaved" and m % p) or (name == "dualpipe" and (p % 2 or m < 2))


def check_lists(lists: Lists, places: list[Place], m: int, costs: dict = UNIT | PLAIN):
    """Assert that each micro-batch has all its actions in order at each of its stages, and that no rank waits forever.

    Actions: F (forward), R (recompute, if any), B (backward), W (weight gradients, if any). `costs` order the messages.
    """
    kinds = [kind for kind in "FRBW" if any(action.kind == kind for row in lists for action in row)]
    starts = [s for s, place in enumerate(places) if place.before is None]
    expected = Counter()
    for i in range(m):
        stage = starts[0 if 2 * i < m or len(starts) == 1 else 1]
        while stage is not None:
            expected.update((places[stage].rank, kind, i, stage) for kind in kinds)
            stage = places[stage].after
    assert Counter((rank, *action) for rank, row in enumerate(lists) for action in row) == expected
    simulate(lists, places, costs)  # raises ValueError for a backward before its forward
    for row in lists:
        at = {action: n for n, action in enumerate(row)}
        assert all(at[a._replace(kind=one)] < at[a._replace(kind=two)] for a in row for one, two in pairwise(kinds))
    programs = add_messages(lists, places, costs)  # R and W need no message
    carry_out([[[tuple(line)] for line in program if line.action.kind in "FB"] for program in programs], places)


def makespan(lists: Lists, places: list[Place], costs: dict) -> int:
    """The time when the last action ends, if the first one starts at 0."""
    return simulate(lists, places, costs)[-1][0]


def in_flight(row: list[Action], until: str = "B") -> int:
    """The most (micro-batch, stage) pairs that a rank holds at once. It holds a pair from F to the end of `until`."""
    return max(accumulate({"F": 1, until: -1}.get(action.kind, 0) for action in row))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_size_is_complete_and_ends(name):
    """For all sizes, the lists pass `check_lists` with two sets of costs, which decide the order of messages."""
    for _, m, lists, places in sizes(name):
        check_lists(lists, places, m)
        check_lists(lists, places, m, dict(F=5, R=4, B=2, W=3))


def zb_h1_law(p: int, m: int, lists: Lists, places: list[Place]):
    """If F, B and W take f, b and w, and m >= p, a rank is idle for (p-1) (f + b - min(f, b, w))."""
    assert [in_flight(row) for row in lists] == [min(m, p - rank) for rank in range(p)]
    assert max(in_flight(row, "W") for row in lists) == min(m, p)
    for costs in COSTS if m >= p else ():
        f, b, w = costs.values()
        assert makespan(lists, places, costs) == m * (f + b + w) + (p - 1) * (f + b - min(f, b, w))


def zb_h2_law(p: int, m: int, lists: Lists, places: list[Place]):
    """F, B, W take f, b, w. If m >= 2p-1, a rank that has begun idles at most (p-1) max(0, f + b - 2w, b - f)."""
    assert max(in_flight(row, "W") for row in lists) == min(m, 2 * (p - 1) + 1)
    for costs in COSTS if m >= 2 * p - 1 else ():
        f, b, w = costs.values()
        spans = simulate(lists, places, costs)
        rows = [[span for span in spans if span[1] == rank] for rank in range(p)]
        longest = max(row[-1][0] - row[0][2] for row in rows)
        assert longest == m * (f + b + w) + (p - 1) * max(0, f + b - 2 * w, b - f)


def rounds_law(p: int, m: int, *_):
    """The laws of rounds.py: if m >= p, the bubble is that of interleaved; if not, a step takes (v p + m - 1) (f + b).

    f, b: times of F and B. If v > 1, larger rounds hold more activations, but give messages more time.
    """
    for v, more in product((1, 2, 3), (0, 7)):
        lists, places = made("rounds", p, m, chunks=v, round_size=p + more)
        stages, longest = v if p > 1 else 1, -(-m // max(1, m // (p + more)))
        check_lists(lists, places, m)
        assert makespan(lists, places, PLAIN) == 3 * (stages * max(m, p) + min(m, p) - 1)
        flying = [(stages - 1) * longest + min(stages, 2) * (p - 1 - rank) + 1 for rank in range(p)]
        assert m < p or [in_flight(row) for row in lists] == [min(stages * m, n) for n in flying]
        assert more or m % p or lists == made("interleaved", p, m, chunks=v)[0]  # rounds of p, which divides m
        if stages > 1 and m >= p:
            ends = {action: (start, end) for end, _, start, action in simulate(lists, places, PLAIN)}
            first = m // max(1, m // (p + more))  # size of the first round, whose second stage is also warm-up
            assert ends[Action("F", 0, p)][0] - ends[Action("F", 0, p - 1)][1] == first - p


# For schedules with two stages on each rank: the time of a step if F, B and W take 1 (or a range that contains it), the
# least m for which it is so, and the most (micro-batch, stage) pairs that a rank holds. Dualpipe's stages are larger.
HALVES = {
    "zbv": (lambda p, m: 6 * m + p - 1, lambda p: 2 * p - 1, lambda p: 2 * p),
    "dualpipev": (lambda p, m: 6 * m + p - 1, lambda p: 2 * p, lambda p: 2 * p + 1),
    "v-half": (lambda p, m: range(6 * m, 6 * m + 3 * p + 1), lambda p: 2 * p, lambda p: p + 3),
    "v-min": (lambda p, m: range(6 * m, 6 * m + 4 * p + 1), lambda p: 2 * p, lambda p: 2 * p / 3 + 3),
    "dualpipe": (lambda p, m: 3 * m + p // 2 - 1, lambda p: 2 * p, lambda p: p + 1),
}


def halves_law(name: str, p: int, m: int, lists: Lists, places: list[Place]):
    """HALVES gives the time of a step, and the most (micro-batch, stage) pairs that a rank may hold."""
    units, least, most = HALVES[name]
    assert all(in_flight(row, "W") <= most(p) for row in lists)
    if m >= least(p) and p > 1 and not (name == "dualpipe" and m % 2):
        expected = units(p, m)
        assert makespan(lists, places, UNIT) in (expected if isinstance(expected, range) else [expected])


def gpipe_law(p: int, m: int, lists: Lists, places: list[Place]):
    """If F, R (recompute) and B take f, r and b, a rank is idle for (p-1) (f + b): it runs R while it waits."""
    for f, r, b in product((2, 3, 5), repeat=3):
        assert makespan(lists, places, dict(F=f, R=r, B=b)) == m * (f + r + b) + (p - 1) * (f + b)


LAWS = {"zb-h1": zb_h1_law, "zb-h2": zb_h2_law, "rounds": rounds_law, "gpipe": gpipe_law}
LAWS |= {name: partial(halves_law, name) for name in HALVES}


@pytest.mark.parametrize("name", LAWS)
def test_law(name):
    """Check idle time and activations in flight for all sizes that the schedule accepts."""
    for case in sizes(name):
        LAWS[name](*case)
