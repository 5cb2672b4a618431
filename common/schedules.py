"""Pipeline schedules as data: lists of actions that can be printed, drawn, timed, proved free of deadlock, and run."""

from collections import defaultdict, deque
from itertools import chain, pairwise
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """What a rank does in one go."""

    kind: str  # F forward, B gradient of the input, W gradient of the weights, BW both gradients
    micro_batch: int
    chunk: int  # which of the rank's stages


class Place(NamedTuple):
    """Where a stage is."""

    rank: int
    chunk: int


Placement = list[Place]  # of all stages, the first one first
Output = tuple[str, int, Place]  # (F or B, micro-batch, place): activations from F, the input's gradient from B or BW


class Plan(NamedTuple):
    """Who has which layers, and does what in which order."""

    placements: list[Placement]  # dualpipe has two
    lengths: list[int]  # layers of each stage
    lists: list[list[Action]]  # of each rank


def chunks_per_rank(schedule: str) -> int:
    """How many stages each rank has; 0 for interleaved, where the user chooses."""
    return {"interleaved": 0, "zbv": 2, "dualpipe": 2}.get(schedule, 1)


def place_stages(schedule: str, p: int, v: int) -> list[Placement]:
    """The stage placement; dualpipe has two, for the first and the second half of the micro-batches."""
    loop = [Place(rank, chunk) for chunk in range(v) for rank in range(p)]  # v times through all ranks
    down, up = [Place(rank, 0) for rank in range(p)], [Place(rank, 1) for rank in reversed(range(p))]
    return {"zbv": [down + up], "dualpipe": [down, up]}.get(schedule, [loop])  # zbv: rank 0 has first and last stage


def neighbours(placements: list[Placement]) -> tuple[dict[Place, Place], dict[Place, Place]]:
    """(before, after): by place, the place of the stage before it and of the stage after it, where there is one."""
    steps = [step for placement in placements for step in pairwise(placement)]
    return {after: before for before, after in steps}, dict(steps)


def needs(action: Action, rank: int, before: dict[Place, Place], after: dict[Place, Place]) -> list[Output]:
    """The outputs that an action on `rank` waits for. `before` and `after` come from `neighbours`."""
    kind, i, here = action.kind, action.micro_batch, Place(rank, action.chunk)
    if kind == "F":  # the F of the stage before
        return [("F", i, before[here])] if here in before else []
    if kind == "W":  # its own stage's B
        return [("B", i, here)]
    return [("F", i, here)] + ([("B", i, after[here])] if here in after else [])  # its own F, the B of the stage after


def write_out(*phases: tuple[int, str]) -> list[Action]:
    """The actions of phases (how often, pattern), for example (3, "F0 B0 W").

    F0, B1, BW0: on chunk 0 or 1, its next micro-batch of that kind. W: the weight gradient that waits longest, if any.
    """
    actions, count, waiting = [], defaultdict(int), []
    for word in chain.from_iterable(pattern.split() * times for times, pattern in phases):
        if word == "W":
            actions += [waiting.pop(0)] if waiting else []
            continue
        kind, chunk = word.rstrip("0123456789"), int(word.lstrip("FBW"))
        actions.append(Action(kind, count[kind[0], chunk], chunk))
        count[kind[0], chunk] += 1
        if kind == "B":
            waiting.append(actions[-1]._replace(kind="W"))
    return actions + waiting


# A schedule is a function: p ranks, m micro-batches, v chunks on a rank -> the list of one rank.
def afab(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forward, all backward (GPipe, Huang et al. 2019). Bubble (p-1)/(m+p-1), m micro-batches in flight."""
    return write_out((m, "F0"), (m, "BW0"))


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B (PipeDream-flush, Narayanan et al. 2021). The same bubble, but only p - rank micro-batches in flight."""
    warm_up = min(m, p - 1 - rank)
    return write_out((warm_up, "F0"), (m - warm_up, "F0 BW0"), (warm_up, "BW0"))


def interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B over v chunks (Megatron, Narayanan et al. 2021, figure 4). Bubble (p-1)/(vm+p-1), but v times the messages.

    Micro-batches go in rounds: all of a round do chunk 0, then all do chunk 1, and so on. In a round of p, the first is
    back at rank 0 when the last has left it, so no rank waits. If p does not divide m, the first rounds are larger.
    """
    n_rounds = max(1, m // p)
    rounds = [m // n_rounds + (i < m % n_rounds) for i in range(n_rounds)]
    forwards = [f"F{chunk}" for size in rounds for chunk in range(v) for _ in range(size)]
    backwards = [f"BW{chunk}" for size in rounds for chunk in reversed(range(v)) for _ in range(size)]
    warm_up = min(m * v, (v - 1) * rounds[0] + 2 * (p - 1 - rank))
    steady = [f"{forward} {backward}" for forward, backward in zip(forwards[warm_up:], backwards, strict=False)]
    return write_out((1, " ".join(forwards[:warm_up] + steady + backwards[len(steady) :])))


def zb_h1(p: int, m: int, v: int, rank: int, depth: int = 1) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, figure 2): 1F1B's memory; bubble (p-1)(f+b-w) s if w <= f, b, instead of (p-1)(f+b+w)."""
    warm_up = min(m, depth * (p - 1 - rank))
    lag = min(m - warm_up, depth * rank)  # W comes so many micro-batches after B. The last W fill the cool-down's gaps
    return write_out((warm_up, "F0"), (lag, "F0 B0"), (m - warm_up - lag, "F0 B0 W"), (warm_up, "B0 W"), (lag, "W"))


def zb_h2(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-H2 (Qi et al. 2023, figure 3): ZB-H1 with twice the warm-up. If f = b = w, no rank idles once it has begun."""
    return zb_h1(p, m, v, rank, depth=2)


def zbv(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-V (Qi et al. 2023, section 6; 2024): 1F1B's memory. If f = b = w, no rank idles once it has begun."""
    n, far = max(m, 2 * p - 1), p - rank  # if m is less: the list of 2p-1 micro-batches, without those from m on
    steps = (2 * far - 1, "F0"), (rank, "F1 F0"), (far, "F1 B1 W"), (n - p - far + 1, "F0 B0 W F1 B1 W")
    steps += (far - 1, "B0 W F1 B1 W"), (rank, "B0 B1"), (far, "B0 W")
    return [action for action in write_out(*steps) if action.micro_batch < m]


def dualpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """DualPipe (DeepSeek-V3, section 3.2, its eight steps): half of the micro-batches enter at either end.

    The price is two copies of every stage. Where DeepSeek overlaps a forward with a backward, here one follows the
    other. Backwards are whole (BW) but in steps 3 and 7 and the second half of step 6. Fewer than 2p: cut from 2p.
    """
    size = (m + 1) // 2, m // 2  # of the two halves of the micro-batches, on chunk 0 and on chunk 1
    near = min(rank + 1, p - rank)  # stages from the nearer end to this one. Chunk 0 begins there in these lines
    far, n = p // 2 - near, max(size[0], p)
    steps = (2 * far, "F0"), (near, "F0 F1"), (far, "B1 W F1"), (n - p + near, "F0 BW1 F1 BW0"), (far, "BW1 F1 BW0")
    steps += (near // 2, "BW1 BW0"), (near % 2, "BW1 B0"), (near // 2, "B1 B0"), (far, "W B0")  # the last W: step 8
    actions = [(kind, i, c ^ (rank >= p // 2)) for kind, i, c in write_out(*steps)]
    return [Action(kind, i + chunk * size[0], chunk) for kind, i, chunk in actions if i < size[chunk]]


SCHEDULES = {"afab": afab, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1, "zb-h2": zb_h2}
SCHEDULES |= {"zbv": zbv, "dualpipe": dualpipe}


class Costs(NamedTuple):
    """Seconds of a chunk's forward, input gradient and weight gradient, and of a message between two ranks."""

    f: float
    b: float
    w: float
    comm: float


ORDER_COSTS = Costs(f=1, b=1, w=1, comm=0.05)  # a little latency tells apart what would end at the same time


class Span(NamedTuple):
    """An action, and the seconds at which it starts and ends."""

    action: Action
    start: float
    end: float


def simulate(lists: list[list[Action]], placements: list[Placement], costs: Costs) -> list[list[Span]]:
    """By rank: when each action starts and ends, if it starts as soon as it can. Raises ValueError if one never can."""
    before, after = neighbours(placements)
    seconds = {"F": costs.f, "B": costs.b, "W": costs.w, "BW": costs.b + costs.w}
    ends: dict[Output, float] = {}
    spans: list[list[Span]] = [[] for _ in lists]
    left = [deque(actions) for actions in lists]
    while any(left):
        ready = [rank for rank, row in enumerate(left) if row and ends.keys() >= {*needs(row[0], rank, before, after)}]
        if not ready:
            raise ValueError(f"each rank waits for ever for the input of {[row[0] for row in left if row]}")
        for rank in ready:
            kind, micro_batch, chunk = action = left[rank].popleft()
            inputs = [ends[out] + costs.comm * (out[2].rank != rank) for out in needs(action, rank, before, after)]
            start = max([spans[rank][-1].end if spans[rank] else 0.0, *inputs])
            spans[rank].append(Span(action, start, start + seconds[kind]))
            ends[kind[0], micro_batch, Place(rank, chunk)] = spans[rank][-1].end
    return spans


class Step(NamedTuple):
    """One line of a rank's program."""

    kind: Literal["run", "send", "recv"]  # run an action, or post a message and go on
    what: Action | Output
    peer: int | None = None  # the rank that a message goes to or comes from


def communicate(lists: list[list[Action]], placements: list[Placement], costs: Costs = ORDER_COSTS) -> list[list[Step]]:
    """By rank: its program, which is its list of actions with the sends and receives that they need.

    All actions of all ranks are sorted by their end in a simulation. One by one they are appended to the programs of
    their ranks. If another rank needs an output, its message follows at once: a send here, a receive there.

    There is no deadlock, though NCCL passes messages in the order of posting: the first unfinished action or message of
    our order can always finish. The inputs of an action end before it does, so they are there. All that stands before a
    message on its two ranks is earlier, so it is next on both. So a rank may wait for all it has posted.
    """
    before, after = neighbours(placements)
    spans = [(rank, span) for rank, row in enumerate(simulate(lists, placements, costs)) for span in row]
    programs: list[list[Step]] = [[] for _ in lists]
    for rank, (action, _, _) in sorted(spans, key=lambda entry: entry[1].end):  # inputs come first if f, b > 0
        output = kind, _, here = action.kind[0], action.micro_batch, Place(rank, action.chunk)
        there = {"F": after, "B": before, "W": {}}[kind].get(here)
        programs[rank].append(Step("run", action))
        if there and there.rank != rank:
            programs[rank].append(Step("send", output, there.rank))
            programs[there.rank].append(Step("recv", output, rank))
    return programs
