"""Schedules as data: who does what in which order, proved, timed and drawn before anything runs."""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, chain, pairwise
from typing import Literal, NamedTuple

# --- actions, and the way of a micro-batch


class Action(NamedTuple):
    """What a rank does in one go: F forward, B input gradient, W weight gradient, BW both gradients."""

    kind: str
    micro_batch: int
    chunk: int


Place = tuple[int, int]  # (pp rank, chunk on that rank)


def chunks_per_rank(schedule: str) -> int:
    """Stages on each rank where the number is not for the user to choose; 0 for interleaved, where it is."""
    return {"interleaved": 0, "zbv": 2, "dualpipe": 2}.get(schedule, 1)


def refuse(schedule: str, p: int, m: int, v: int) -> str:
    """Why a schedule cannot run m micro-batches on p ranks with v stages each; empty if it can."""
    wanted = chunks_per_rank(schedule)
    if v != wanted and wanted:
        return f"--schedule {schedule} has {wanted} stage{'s' * (wanted > 1)} on each rank: use --chunks {wanted}"
    if v < 1:
        return f"--chunks {v} gives a rank no stage: use at least 1"
    if m < 1:
        return f"--schedule {schedule} has nothing to do with {m} micro-batches: use at least 1"
    if schedule == "dualpipe" and p % 2:
        return f"--schedule dualpipe starts micro-batches at both ends of an even number of ranks: change --pp {p}"
    return ""


def paths(schedule: str, p: int, v: int) -> list[list[Place]]:
    """The ways of micro-batches through the ranks, first stage to last; a place's index in its path is its stage.

    Loop: chunk after chunk, each from rank 0 to p-1. zbv: down chunk 0, up chunk 1, so that rank 0 has the first stage
    and the last. dualpipe: two ways over the same p stages, one for either half of the micro-batches: down on chunk 0,
    up on chunk 1; rank r therefore has stages r and p-1-r.
    """
    down, up = [(rank, 0) for rank in range(p)], [(rank, 1) for rank in reversed(range(p))]
    if schedule == "zbv":
        return [down + up]
    if schedule == "dualpipe":
        return [down, up]
    return [[(rank, chunk) for chunk in range(v) for rank in range(p)]]


def neighbours(ways: list[list[Place]]) -> tuple[dict[Place, Place], dict[Place, Place]]:
    """(the place before, the place after) each place that has one."""
    steps = [step for way in ways for step in pairwise(way)]
    return {after: before for before, after in steps}, dict(steps)


# --- schedules: pure functions (p ranks, m micro-batches, v chunks, rank) -> actions


def write_out(*phases: tuple[int, str]) -> list[Action]:
    """The actions of phases (how often, pattern), for example (3, "F0 B0 W").

    F0, B1, BW0: the next micro-batch of that kind on that chunk. W: the weight gradient that has waited longest, if one
    does.
    """
    actions, count, waiting = [], defaultdict(int), []
    for word in chain.from_iterable(pattern.split() * times for times, pattern in phases):
        if word == "W":
            actions += [waiting.pop(0)] if waiting else []
            continue
        kind, chunk = word[:-1], int(word[-1])
        actions.append(Action(kind, count[kind[0], chunk], chunk))
        count[kind[0], chunk] += 1
        if kind == "B":
            waiting.append(actions[-1]._replace(kind="W"))
    return actions + waiting


def afab(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forward, all backward (GPipe, Huang et al. 2019). Idle (p-1)/(m+p-1); m micro-batches in flight."""
    return write_out((m, "F0"), (m, "BW0"))


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """PipeDream-flush (Narayanan et al. 2021): idle as afab, but only p - rank micro-batches in flight."""
    warm_up = min(m, p - 1 - rank)
    return write_out((warm_up, "F0"), (m - warm_up, "F0 BW0"), (warm_up, "BW0"))


def interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B over v chunks per rank (Megatron, Narayanan et al. 2021, figure 4): idle (p-1)/(vm+p-1), v times the bytes.

    Micro-batches go in rounds: all of a round through chunk 0, then all through chunk 1, ... In a round of p the first
    is back at rank 0 when the last has left it, and no rank waits. If p does not divide m, some rounds are larger, the
    first ones, as the warm-up must suffice for the largest. Fewer than p are one round, in which ranks wait.
    """
    n_rounds = max(1, m // p)
    rounds = [m // n_rounds + (i < m % n_rounds) for i in range(n_rounds)]
    forwards = [f"F{chunk}" for size in rounds for chunk in range(v) for _ in range(size)]
    backwards = [f"BW{chunk}" for size in rounds for chunk in reversed(range(v)) for _ in range(size)]
    warm_up = min(m * v, (v - 1) * rounds[0] + 2 * (p - 1 - rank))
    steady = [f"{forward} {backward}" for forward, backward in zip(forwards[warm_up:], backwards, strict=False)]
    return write_out((1, " ".join(forwards[:warm_up] + steady + backwards[len(steady) :])))


def zero_bubble(m: int, warm_up: int, delay: int) -> list[Action]:
    """1F1B whose weight gradients lag `delay` micro-batches behind, to fill the gaps while the last gradients come."""
    warm_up = min(m, warm_up)
    delay = min(m - warm_up, delay)
    return write_out(
        (warm_up, "F0"), (delay, "F0 B0"), (m - warm_up - delay, "F0 B0 W"), (warm_up, "B0 W"), (delay, "W")
    )


def zb_h1(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-H1 (Qi et al. 2023, figure 2): 1F1B's memory; idle (p-1)(f+b-w) instead of (p-1)(f+b+w) per batch."""
    return zero_bubble(m, p - 1 - rank, rank)


def zb_h2(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-H2 (Qi et al. 2023, figure 3): twice the warm-up; if f = b = w, no rank idles once it has begun."""
    return zero_bubble(m, 2 * (p - 1 - rank), 2 * rank)


def zbv(p: int, m: int, v: int, rank: int) -> list[Action]:
    """ZB-V (Qi et al. 2023, section 6; 2024): if f = b = w, no rank idles once it has begun, in 1F1B's memory.

    The last stage is on rank 0 next to the first: backward starts where forward ends, and early on the rank that holds
    most. With fewer than 2p-1 micro-batches the schedule of 2p-1 is run without those that do not exist.
    """
    n = max(m, 2 * p - 1)
    actions = write_out(
        (2 * (p - rank) - 1, "F0"),
        (rank, "F1 F0"),
        (p - rank, "F1 B1 W"),
        (n - 2 * p + rank + 1, "F0 B0 W F1 B1 W"),
        (p - rank - 1, "B0 W F1 B1 W"),
        (rank, "B0 B1"),
        (p - rank, "B0 W"),
    )
    return [action for action in actions if action.micro_batch < m]


def dualpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """DualPipe (DeepSeek-V3, section 3.2, its eight steps): half of the micro-batches enter at either end.

    Both ends start at once, so that a rank waits for p/2-1 stages at most; the price is two copies of every stage. In
    the phases chunk 0 is the one whose way begins at the nearer end, r the distance to that end. Where DeepSeek
    overlaps a forward with a backward, the two come one after the other. With fewer than 2p micro-batches: as in zbv.
    """
    half, r, n = p // 2, min(rank, p - 1 - rank), max((m + 1) // 2, p)
    actions = write_out(
        (2 * (half - r - 1), "F0"),
        (r + 1, "F0 F1"),
        (half - r - 1, "B1 W F1"),
        (n - 2 * half + r + 1, "F0 B1 W F1 B0 W"),
        (half - r - 1, "B1 W F1 B0 W"),
        (r + 1, "B1 B0"),
        (half - r - 1, "W B0"),
    )
    first = (0, (m + 1) // 2)  # numbers of the first micro-batch on the way of chunk 0, and of chunk 1
    size = ((m + 1) // 2, m // 2)
    own = [action._replace(chunk=action.chunk ^ (rank >= half)) for action in actions]
    return [Action(k, first[chunk] + i, chunk) for k, i, chunk in own if i < size[chunk]]


SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "afab": afab,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zbv": zbv,
    "dualpipe": dualpipe,
}


# --- time and memory


class Costs(NamedTuple):
    """Seconds of one chunk's forward, input gradient and weight gradient, and of a message between two ranks."""

    f: float
    b: float
    w: float
    comm: float


UNIT_COSTS = Costs(f=1, b=1, w=1, comm=0)  # the papers' figures
ORDER_COSTS = Costs(f=1, b=1, w=1, comm=0.05)  # what orders messages: with a little latency few are produced at once


class Span(NamedTuple):
    """An action and the seconds at which it started and ended."""

    action: Action
    start: float
    end: float


def simulate(lists: list[list[Action]], ways: list[list[Place]], costs: Costs) -> list[list[Span]]:
    """By rank: when each action starts and ends, if it starts as soon as its rank is free and its input there.

    Raises ValueError if actions wait for each other, or for one that is in no list.
    """
    before, after = neighbours(ways)
    seconds = {"F": costs.f, "B": costs.b, "W": costs.w, "BW": costs.b + costs.w}
    ends: dict[tuple[str, int, Place], float] = {}
    spans: list[list[Span]] = [[] for _ in lists]

    def ready(action: Action, place: Place) -> float | None:
        """When the inputs of an action are there; None if they are not computed yet."""
        kind, micro_batch, _ = action
        source = before.get(place) if kind == "F" else after.get(place) if kind != "W" else None
        own, far = ends.get(("B" if kind == "W" else "F", micro_batch, place)), 0.0
        if source:
            far = ends.get((kind[0], micro_batch, source))
            far = None if far is None else far + costs.comm * (source[0] != place[0])
        if kind == "F":
            return far
        return None if own is None or far is None else max(own, far)

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            done = spans[rank]
            while len(done) < len(actions):
                action = actions[len(done)]
                place = (rank, action.chunk)
                start = ready(action, place)
                if start is None:
                    break
                start = max(start, done[-1].end if done else 0.0)
                done.append(Span(action, start, start + seconds[action.kind]))
                ends[action.kind[0], action.micro_batch, place] = done[-1].end
                moved = True
    for rank, actions in enumerate(lists):
        if len(spans[rank]) < len(actions):
            raise ValueError(f"rank {rank} waits for ever for the input of {actions[len(spans[rank])]}")
    return spans


def makespan(spans: list[list[Span]]) -> float:
    """Seconds from the first start to the last end."""
    every = [span for row in spans for span in row]
    return max(span.end for span in every) - min(span.start for span in every)


def idle_fraction(spans: list[list[Span]]) -> float:
    """The part of p ranks x makespan in which nothing is computed."""
    busy = sum(span.end - span.start for row in spans for span in row)
    return 1 - busy / (len(spans) * makespan(spans))


def in_flight(lists: list[list[Action]], until: Literal["B", "W"] = "B") -> list[int]:
    """By rank: the most (micro-batch, chunk)s held at once, from F to the end of their B, or of their W."""
    change = {"F": 1, until: -1, "BW": -1}
    return [max(accumulate(change.get(action.kind, 0) for action in actions), default=0) for actions in lists]


# --- communication


class Message(NamedTuple):
    """What F hands to the next stage (activations) or B and BW to the previous one (gradients), on another rank."""

    kind: Literal["F", "B"]
    micro_batch: int
    source: Place
    target: Place


class Step(NamedTuple):
    """One line of a rank's program: run an action, or post a send or a receive, which does not wait."""

    kind: Literal["run", "send", "recv"]
    what: Action | Message


def communicate(lists: list[list[Action]], ways: list[list[Place]], costs: Costs = ORDER_COSTS) -> list[list[Step]]:
    """By rank: its actions with the sends and receives that they need, in program order.

    NCCL matches what is posted in the order of posting, and a send ends only when its receive is there. So all messages
    of all ranks are put into one order, that of the simulated ends of the actions that produce them (of equal ends, the
    one less far on its journey from first stage to last and back comes first), and every rank posts its own in this
    order: a send right after its action, a receive one action before the one that needs it,
    earlier where a send that is later in the order has to come first, later where one that is earlier is not there yet.

    Every action can have its receive posted before it: the action of a send that is earlier in the order ended before
    the message arrived, so it stands in the list before the one that needs the message.

    (The costs only choose the order; those of actions must be above zero, and the order is sound for any such costs.)

    No deadlock: suppose some messages never complete, and take the first of them in the order. On both of its ranks all
    that stands before its post are posts of earlier messages, which complete, and actions, whose receives are posted
    before them and so are earlier too. Both ranks get to the post and it heads both queues: it completes.
    """
    before, after = neighbours(ways)
    index: dict[tuple[str, int, Place], int] = {}
    journey = {("F", place): stage for way in ways for stage, place in enumerate(way)}
    journey |= {("B", place): 2 * len(way) - stage for way in ways for stage, place in enumerate(way)}
    order: list[tuple[float, int, Message]] = []
    for rank, row in enumerate(simulate(lists, ways, costs)):
        for i, ((kind, micro_batch, chunk), _, end) in enumerate(row):
            place = (rank, chunk)
            index[kind[0], micro_batch, place] = i
            target = {"F": after, "B": before, "W": {}}[kind[0]].get(place)
            if target and target[0] != rank:
                order.append((end, journey[kind[0], place], Message(kind[0], micro_batch, place, target)))

    posts: list[list[tuple[int, Step]]] = [[] for _ in lists]  # by rank: before which action a step would best stand
    for *_, message in sorted(order):
        key = message.kind, message.micro_batch
        posts[message.source[0]].append((index[(*key, message.source)] + 1, Step("send", message)))
        posts[message.target[0]].append((max(0, index[(*key, message.target)] - 1), Step("recv", message)))

    programs = []
    for actions, wanted in zip(lists, posts, strict=True):
        steps = [[Step("run", action)] for action in actions] + [[]]
        earliest = accumulate((place if step.kind == "send" else 0 for place, step in wanted), max)
        at = len(actions)
        for (place, step), least in reversed(list(zip(wanted, earliest, strict=True))):
            at = max(least, min(place, at))
            steps[at].insert(0, step)
        programs.append(list(chain.from_iterable(steps)))
    return programs
