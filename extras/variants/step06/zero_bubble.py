"""Zero-bubble schedules: `--schedule zb-h1`, `zb-h2` (Qi et al. 2023, "Zero Bubble"), `zbv`, `v-half` and `v-min`
(2024, "Controllable Memory").

Only B, the gradient of a stage's input, is urgent. W, the gradients of the weights (split_backward.py), fills gaps. On
4 ranks, with 6 micro-batches (F is a number, B a letter, W a dash, each one unit of time):

    zb-h1    0123...a-4b-5c-d-e-f-      zb-h1: bubble (p-1) / (3 m + p-1), with the memory of 1f1b, whose bubble is
             .012..a3b-4c-5d-e-f--      (p-1) / (m + p-1). The next two, from m = 2p-1 on (7 on 4 ranks):
             ..01.a2b3c-4d-5e-f---      zb-h2: twice the warm-up; a rank never waits once it has begun
             ...0a1b2c3d-4e-5f----      zbv: no waiting, like zb-h2, with the memory of 1f1b

In zbv, v-half and v-min the stages form a V: rank r has stage r of p on the way down, and stage 2p-1-r on the way up,
so the loss is on rank 0. In v-half and v-min each micro-batch starts 6 units after the one before it, with the same
timetable: a rank's F, B and W of both stages fill these 6. A micro-batch takes memory from F to W, so memory depends
on four delays from one rank to the next: F down, F up, B down (from rank 0, which has the loss, to rank p-1) and B up.

    v-min    1 1 1 1    about p/3 micro-batches in flight; v-half, with 1 2 1 2: p/2; zbv and 1f1b: p

The fewer are in flight, the longer ranks wait if F, B and W take different times. All of these would be more functions
in common/schedules.py.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import chain, count, product
from typing import Any

from common.schedules import SCHEDULES, Action, Place, Schedule, round_robin
from extras.variants.step06.split_backward import UNIT

PERIOD = 6  # of v-half and v-min: units of time from one micro-batch to the next, for F, B and W of two stages


def write_out(stages: tuple[int, ...], *phases: tuple[int, str]) -> list[Action]:
    """Returns the actions of all phases (times, pattern); (3, "F0 B0 W") repeats the pattern three times.

    F0: the forward of the next micro-batch through stages[0]; B1: backward through stages[1]. W: the oldest W, if any.
    """
    actions, done, waiting = [], defaultdict(int), []
    for word in chain.from_iterable(pattern.split() * times for times, pattern in phases):
        if word == "W":
            actions += [waiting.pop(0)] if waiting else []
            continue
        actions.append(Action(word[0], done[word], stages[int(word[1])]))
        done[word] += 1
        if word[0] == "B":
            waiting.append(actions[-1]._replace(kind="W"))
    return actions + waiting


def zb_h1(p: int, m: int, v: int, rank: int, depth: int = 1) -> list[Action]:
    """ZB-H1: F, B, W take f, b, w. If m >= p and w <= min(f, b), a rank idles (p-1)(f+b-w); in 1F1B, (p-1)(f+b+w)."""
    warm_up = min(m, depth * (p - 1 - rank))  # `depth` 1: ZB-H1; 2: ZB-H2
    lag = min(m - warm_up, depth * rank)  # micro-batches by which W lags behind B: the last W fill the cool-down
    phases = (warm_up, "F0"), (lag, "F0 B0"), (m - warm_up - lag, "F0 B0 W"), (warm_up, "B0 W"), (lag, "W")
    return write_out((rank,), *phases)


def zbv(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-V: two stages on a rank. If F, B and W take the same time, no rank idles once it has begun."""
    n, far = max(m, 2 * p - 1), p - rank  # if m is less: the list of 2p-1 micro-batches, without those from m on
    phases = (2 * far - 1, "F0"), (rank, "F1 F0"), (far, "F1 B1 W"), (n - p - far + 1, "F0 B0 W F1 B1 W")
    phases += (far - 1, "B0 W F1 B1 W"), (rank, "B0 B1"), (far, "B0 W")
    return [action for action in write_out((rank, 2 * p - 1 - rank), *phases) if action.micro_batch < m]


def vee(n_layers: int, p: int, v: int) -> list[Place]:
    """The places of v p stages: down through all ranks and, with v = 2, up again."""
    return [place._replace(rank=min(s, v * p - 1 - s)) for s, place in enumerate(round_robin(n_layers, p, v))]


def in_vee(actions: Callable[[int, int, int, int], list[Action]]) -> Callable[[Any], Schedule]:
    """Makes an entry of SCHEDULES: each rank has two stages, in a V. A single rank has one stage, and runs zb_h1."""
    return lambda config: Schedule(
        lambda p, m, v, rank: (actions if v > 1 else zb_h1)(p, m, v, rank), vee, v=2, costs=UNIT
    )


@lru_cache
def block(p: int, delays: tuple[int, int, int, int]) -> list[list[int]]:
    """Returns each rank's six start times of micro-batch 0: F down, F up, B down, B up, W of B down, W of B up.

    An action takes 1 unit. When the micro-batch turns back, it waits just enough to keep a rank's actions apart.
    """
    down, up, back, home = delays
    for waits in sorted(product(range(PERIOD), repeat=3), key=sum):
        f1 = (p - 1) * down + 1 + waits[0]  # on the last rank, where the way up begins
        b1 = f1 + (p - 1) * up + 1 + waits[1]  # on rank 0, which has the loss
        b0 = b1 + (p - 1) * back + 1 + waits[2]  # on the last rank again
        rows = [[r * down, f1 + (p - 1 - r) * up, b1 + r * back, b0 + (p - 1 - r) * home] for r in range(p)]
        if all(len({start % PERIOD for start in row}) == 4 for row in rows):
            break
    return [with_weights(row) for row in rows]


def with_weights(row: list[int]) -> list[int]:
    """Append each W's start time: the earliest time after its B at which the rank has no action of any micro-batch."""
    free = {*range(PERIOD)} - {start % PERIOD for start in row}
    w1 = next(t for t in count(row[2] + 1) if t % PERIOD in free)
    w0 = next(t for t in count(row[3] + 1) if t % PERIOD in free - {w1 % PERIOD})
    return [*row, w1, w0]


def repeated(p: int, m: int, v: int, rank: int, delays: tuple[int, int, int, int]) -> list[Action]:
    """V-Min and V-Half: each micro-batch has the times of `block`, PERIOD later than the micro-batch before it."""
    near, far = rank, 2 * p - 1 - rank
    kinds = ("F", near), ("F", far), ("B", far), ("B", near), ("W", far), ("W", near)
    starts = zip(block(p, delays)[rank], kinds, strict=True)
    timed = sorted((start + PERIOD * i, Action(kind, i, stage)) for start, (kind, stage) in starts for i in range(m))
    return [action for _, action in timed]


SCHEDULES["zb-h1"] = lambda config: Schedule(zb_h1, costs=UNIT)
SCHEDULES["zb-h2"] = lambda config: Schedule(partial(zb_h1, depth=2), costs=UNIT)
SCHEDULES["zbv"] = in_vee(zbv)
SCHEDULES["v-half"] = in_vee(partial(repeated, delays=(1, 2, 1, 2)))
SCHEDULES["v-min"] = in_vee(partial(repeated, delays=(1, 1, 1, 1)))
