"""Zero bubble: `--schedule zb-h1`, `zb-h2` (Qi et al. 2023, "Zero Bubble") and `zbv` (2024, "Controllable Memory").

Only B is urgent; W, the gradients of the weights (split_backward.py), fills gaps. 4 ranks, 6 micro-batches: F is a
number, B a letter, W a dash, each one unit of time.

    zb-h1    0123...a-4b-5c-d-e-f-      bubble (p-1) / (3 m + p-1), where 1f1b's is (p-1) / (m + p-1); its memory
             .012..a3b-4c-5d-e-f--
             ..01.a2b3c-4d-5e-f---      zb-h2: twice the warm-up; once started, no rank waits
             ...0a1b2c3d-4e-5f----      zbv: the stages lie in a V, the loss is on rank 0; no gaps, and 1f1b's memory

These would be more functions in common/schedules.py.
"""

from collections import defaultdict
from functools import partial
from itertools import chain

import step06_pipeline as step06
from common.schedules import SCHEDULES, Action, Place, Schedule, round_robin
from extras.variants.step06.split_backward import UNIT

SINCE = step06.Config


def write_out(stages: tuple[int, ...], *phases: tuple[int, str]) -> list[Action]:
    """The actions of phases (how often, pattern), for example (3, "F0 B0 W"); 0 and 1 are the rank's own `stages`.

    F0, B1: its next micro-batch of that kind. W: the weight gradients that wait longest, if any.
    """
    actions, count, waiting = [], defaultdict(int), []
    for word in chain.from_iterable(pattern.split() * times for times, pattern in phases):
        if word == "W":
            actions += [waiting.pop(0)] if waiting else []
            continue
        actions.append(Action(word[0], count[word], stages[int(word[1])]))
        count[word] += 1
        if word[0] == "B":
            waiting.append(actions[-1]._replace(kind="W"))
    return actions + waiting


def zb_h1(p: int, m: int, v: int, rank: int, depth: int = 1) -> list[Action]:
    """ZB-H1 (2023, figure 2): bubble (p-1)(f+b-w) s if w <= f, b, instead of 1F1B's (p-1)(f+b+w). `depth` 2: ZB-H2."""
    warm_up = min(m, depth * (p - 1 - rank))
    lag = min(m - warm_up, depth * rank)  # W comes so many micro-batches after B. The last W fill the cool-down's gaps
    phases = (warm_up, "F0"), (lag, "F0 B0"), (m - warm_up - lag, "F0 B0 W"), (warm_up, "B0 W"), (lag, "W")
    return write_out((rank,), *phases)


def zbv(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-V (2024): two stages a rank. If f = b = w, no rank idles once it has begun."""
    if v == 1:
        return zb_h1(p, m, v, rank)
    n, far = max(m, 2 * p - 1), p - rank  # if m is less: the list of 2p-1 micro-batches, without those from m on
    phases = (2 * far - 1, "F0"), (rank, "F1 F0"), (far, "F1 B1 W"), (n - p - far + 1, "F0 B0 W F1 B1 W")
    phases += (far - 1, "B0 W F1 B1 W"), (rank, "B0 B1"), (far, "B0 W")
    return [action for action in write_out((rank, 2 * p - 1 - rank), *phases) if action.micro_batch < m]


def vee(n_layers: int, p: int, v: int) -> list[Place]:
    """Down through all ranks and up again."""
    return [
        place._replace(rank=min(s, v * p - 1 - s) if v > 1 else s)
        for s, place in enumerate(round_robin(n_layers, p, v))
    ]


SCHEDULES["zb-h1"] = lambda config: Schedule(zb_h1, costs=UNIT)
SCHEDULES["zb-h2"] = lambda config: Schedule(partial(zb_h1, depth=2), costs=UNIT)
SCHEDULES["zbv"] = lambda config: Schedule(zbv, vee, v=2, costs=UNIT)
