"""Searches for a zero-bubble schedule for given times and memory (`--schedule zb-auto`; Qi et al. 2023, section 3).

The search simulates time, and chooses the next action of each free rank: B first, because the rank before waits for it;
then F, if memory (--zb-memory) has room for another micro-batch; W fills gaps. It varies how many F a rank does before
its first B, and whether W may begin in a gap that is shorter than W. Of these lists, and those of zb-h1 and zb-h2 if
they fit, it takes the one that ends first. It would be one more function in common/schedules.py.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import inf
from typing import Any, NamedTuple

from common import UserError
from common.model import PRESETS
from common.schedules import SCHEDULES, Action, Schedule, round_robin, simulate
from extras.variants.step06.split_backward import UNIT
from extras.variants.step06.zero_bubble import zb_h1


class Costs(NamedTuple):
    """Times of F, B and W of a stage, and of a message, in any unit."""

    F: float
    B: float
    W: float
    message: float


def choose_costs(config: Any) -> Costs:
    """`--zb-costs`; by default FLOPs per token of a layer, and for a message 5% of F's. Raises UserError.

    Attention has no weights: scores and sums over s/2 keys cost 2 s dim in F, and 2.5 times that in B.
    """
    if config.zb_costs:
        try:
            costs = Costs(*map(float, config.zb_costs.split(",")))
        except (TypeError, ValueError):
            costs = Costs(0, 0, 0, 0)
        if not (min(costs[:3]) > 0 <= costs.message and sum(costs) < inf):
            wanted = "give the times of F, B and W, above 0, and of a message, like 18.5,18.1,9.3,0.6"
            raise UserError(f"--zb-costs {config.zb_costs}: {wanted}")
        return costs
    m = PRESETS[config.model]
    width = getattr(config, "experts_per_token", 1) * (getattr(config, "expert_dim", 0) or m.ffn_dim)
    w = 2 * m.dim * (2 * m.dim + 2 * m.n_kv_heads * m.head_dim + 3 * width)
    attention = 2 * m.seq_len * m.dim
    f = w + attention
    return Costs(f, w + 2.5 * attention + (f if config.recompute == "full" else 0), w, 0.05 * f)


def time_of(lists: list[list[Action]], costs: Costs) -> float:
    """The time at which the last rank ends, with one stage on each."""
    p = len(lists)
    return simulate(lists, round_robin(p, p, 1), costs._asdict(), costs.message)[-1][0]


@lru_cache
def search(p: int, m: int, costs: Costs, limit: float) -> list[list[Action]]:
    """The lists of the best schedule found. A rank holds at most `limit` >= 1 micro-batches from F to W."""
    limit, change = min(limit, m), dict(F=1, B=0, W=-1)
    depths = sorted({1.0, 2.0, (limit - 1) / max(1, p - 1)})
    tries = [greedy(p, m, costs, limit, *variant) for variant in product(depths, (0.0, 0.25, 0.75))]
    for depth in (1, 2):
        lists = [zb_h1(p, m, 1, rank, depth) for rank in range(p)]
        if max(max(accumulate(change[kind] for kind, _, _ in row)) for row in lists) <= limit:
            tries.append(lists)
    return min(tries, key=lambda lists: time_of(lists, costs))


def greedy(p: int, m: int, costs: Costs, limit: float, depth: float, least: float) -> list[list[Action]]:
    """Builds the list of each rank, in which F is at most `depth` (p-1 - rank) + 1 micro-batches ahead of B.

    W may begin in a gap that is longer than `least` times W.
    """
    end: dict[tuple[str, int, int], float] = {}  # kind, micro-batch, rank -> when it is done
    lists: list[list[Action]] = [[] for _ in range(p)]
    done = [Counter(F=0, B=0, W=0) for _ in range(p)]
    free, now = [0.0] * p, 0.0

    def arrival(kind: str, rank: int) -> float:
        """Returns the time at which the next action of this kind has its inputs; inf if not known yet."""
        i, peer = done[rank][kind], rank - 1 if kind == "F" else rank + 1
        if i == m or (kind == "B" and done[rank]["F"] <= i):
            return inf
        return end.get((kind, i, peer), inf) + costs.message if 0 <= peer < p else 0.0

    while any(count["W"] < m for count in done):
        moments = []  # times at which an action may begin or end next
        for rank, count in enumerate(done):
            if free[rank] > now:
                moments.append(free[rank])
                continue
            room = count["F"] - count["W"] + 1 <= limit and count["F"] - count["B"] < depth * (p - 1 - rank) + 1
            b, f = arrival("B", rank), arrival("F", rank) if room else inf
            gap = min(b, f) - now
            if gap <= 0:
                kind = "B" if b <= now else "F"
            elif count["W"] < count["B"] and gap > least * costs.W:
                kind = "W"
            else:
                moments.append(min(b, f))
                continue
            free[rank] = end[kind, count[kind], rank] = now + getattr(costs, kind)
            lists[rank].append(Action(kind, count[kind], rank))
            count[kind] += 1
            moments.append(free[rank])
        now = min(moments)
    return lists


def zb_auto(config: Any) -> Schedule:
    """Returns the schedule that the flags ask for. Raises UserError."""
    if not hasattr(config, "zb_costs"):  # a layout of the planner
        raise UserError("--schedule zb-auto: the planner has no times for a search; use --dry-run")
    costs = choose_costs(config)
    if config.zb_memory * config.pp < 1:
        raise UserError(f"--zb-memory {config.zb_memory}: a rank must hold at least one micro-batch, 1 / --pp")
    return Schedule(lambda p, m, v, rank: search(p, m, costs, config.zb_memory * p)[rank], costs=UNIT)


SCHEDULES["zb-auto"] = zb_auto


@dataclass
class Flags:
    """The searched schedule."""

    zb_memory: float = 1.0  # zb-auto: most activations of a rank, as a multiple of 1f1b's (--pp micro-batches)
    zb_costs: str = ""  # zb-auto: times of F, B, W and a message, like 18.5,18.1,9.3,0.6; default: by FLOPs


TRIED = dict(zb_memory=2.0, zb_costs="1,1,1,0.05")
NEEDS = [("zb_memory", "schedule", "zb-auto"), ("zb_costs", "schedule", "zb-auto")]
