"""`--schedule v-half` and `v-min`: a half, and a third, of 1f1b's memory (Qi et al. 2024, "Controllable Memory").

Stages lie in a V, as with zbv (zero_bubble.py): rank r has stage r of p on the way down, and stage 2p-1-r on the way
up. All micro-batches follow the same times, 6 units apart: F and B of either stage, and W in the two units left. A rank
holds as many as 1/6 of the time from its F's to their W's. So four numbers define the list: how many units later than
its neighbour a rank does F down, F up, B down (back through the later stages) and B up.

    v-min    1 1 1 1    about p/3 micro-batches in flight, p/2 for v-half with 1 2 1 2, p for zbv and 1f1b

The fewer there are, the longer ranks wait once F, B and W take different times, for which zb-auto searches and this
does not. These would be more functions in common/schedules.py.
"""

from functools import lru_cache, partial
from itertools import count, product

import step06_pipeline as step06
from common.schedules import SCHEDULES, Action, Schedule
from extras.variants.step06.split_backward import UNIT
from extras.variants.step06.zero_bubble import vee, zb_h1

SINCE = step06.Config
PERIOD = 6  # units of time from one micro-batch to the next: F, B and W, at two stages


@lru_cache
def block(p: int, delays: tuple[int, int, int, int]) -> list[list[int]]:
    """For each rank: when micro-batch 0 does F down, F up, B down, B up, W down, W up, if each takes a unit.

    The three turns of the way wait as little as they can, so that a rank never has two of all micro-batches at once.
    """
    down, up, back, home = delays
    for total in count():
        for waits in product(range(total + 1), repeat=3):
            if sum(waits) != total:
                continue
            f1 = (p - 1) * down + 1 + waits[0]  # on the last rank, where the way up begins
            b1 = f1 + (p - 1) * up + 1 + waits[1]  # on rank 0, which has the loss
            b0 = b1 + (p - 1) * back + 1 + waits[2]  # on the last rank again
            rows = [[r * down, f1 + (p - 1 - r) * up, b1 + r * back, b0 + (p - 1 - r) * home] for r in range(p)]
            if all(len({start % PERIOD for start in row}) == 4 for row in rows):
                return [with_weights(row) for row in rows]


def with_weights(row: list[int]) -> list[int]:
    """Append the first units after the two B's that are free in every period."""
    free = {*range(PERIOD)} - {start % PERIOD for start in row}
    w1 = next(t for t in count(row[2] + 1) if t % PERIOD in free)
    w0 = next(t for t in count(row[3] + 1) if t % PERIOD in free - {w1 % PERIOD})
    return [*row, w1, w0]


def repeated(p: int, m: int, v: int, rank: int, delays: tuple[int, int, int, int]) -> list[Action]:
    """The actions of all micro-batches, in the order of their times."""
    if v == 1:
        return zb_h1(p, m, v, rank)
    near, far = rank, 2 * p - 1 - rank
    kinds = ("F", near), ("F", far), ("B", far), ("B", near), ("W", far), ("W", near)
    starts = zip(block(p, delays)[rank], kinds, strict=True)
    timed = sorted((start + PERIOD * i, Action(kind, i, stage)) for start, (kind, stage) in starts for i in range(m))
    return [action for _, action in timed]


SCHEDULES["v-half"] = lambda config: Schedule(partial(repeated, delays=(1, 2, 1, 2)), vee, v=2, costs=UNIT)
SCHEDULES["v-min"] = lambda config: Schedule(partial(repeated, delays=(1, 1, 1, 1)), vee, v=2, costs=UNIT)
