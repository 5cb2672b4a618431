"""Techniques' schedules as data: complete, in order, free of deadlock; the papers' formulas of idle time and memory."""

import random
from collections import Counter, defaultdict, deque
from itertools import accumulate, permutations, product
from types import SimpleNamespace
from unittest import mock

import pytest

import step06_pipeline as step06
from common import UserError
from common.comm import Group, Pending
from common.schedules import SCHEDULES, Action, Place, consumer, simulate
from extras.services.seam import plugins
from extras.services.stages import given
from extras.tests.faults import Fault, injected
from extras.variants.step06.v_schedules import block
from extras.variants.step06.zb_auto import Costs, search, time_of
from extras.variants.step06.zero_bubble import zb_h1
from extras.variants.step07.paired_actions import paired, program_of
from step06_pipeline import Instruction, ListPipeline, OneForwardOneBackward, Pipeline, add_messages

plugins()
TECHNIQUES = [name for name in SCHEDULES if name not in ("afab", "1f1b", "interleaved")]  # these: tests/test_step06.py
UNIT = dict(F=1, B=1, W=1)
PLAIN = dict(F=1, B=2)  # B of a schedule without W is both gradients
APART = Fault(
    *("step06_pipeline", "", "", "OneForwardOneBackward", "dy = self.send_forward(y, dy_of=i - warm_up)"),
    *("self.send_forward(y); dy = self.recv_backward(i - warm_up)", "two calls where one is needed"),
)
COSTS = [dict(F=f, B=b, W=w) for f, b, w in product((2, 3, 5), repeat=3)]  # whole numbers: the laws hold exactly
SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 8) for m in (1, 2, 3, 5, 7, 8, 12, 16, 19, 24)]
FLAGS = dict(chunks=2, round_size=0, zb_memory=1.0, zb_costs="1,1,1,0.05")
Lists = list[list[Action]]


def made(name: str, p: int, m: int, **flags) -> tuple[Lists, list[Place]]:
    """(every rank's list, the places) of a schedule. Raises UserError for what it refuses."""
    actions, places, stages, _ = SCHEDULES[name](SimpleNamespace(pp=p, **FLAGS | flags))
    v = stages if p > 1 else 1
    return [actions(p, m, v, rank) for rank in range(p)], places(p * v, p, v)


def sizes(name: str, v: int = 2):
    """The sizes of the grid that a schedule takes."""
    for p, m in SIZES:
        try:
            yield p, m, *made(name, p, m, chunks=v)
        except UserError:
            assert (name == "interleaved" and m % p) or (name == "dualpipe" and (p % 2 or m < 2))


def check_lists(lists: Lists, places: list[Place], m: int):
    """Each micro-batch does F, B and, if there is any, W once at each stage of its way, in this order; nowhere else."""
    kinds = "FBW" if any(action.kind == "W" for row in lists for action in row) else "FB"
    starts = [s for s, place in enumerate(places) if place.before is None]
    expected = Counter()
    for i in range(m):
        stage = starts[0 if 2 * i < m or len(starts) == 1 else 1]
        while stage is not None:
            expected.update((places[stage].rank, kind, i, stage) for kind in kinds)
            stage = places[stage].after
    assert Counter((rank, *action) for rank, row in enumerate(lists) for action in row) == expected
    for row in lists:
        at = {action: n for n, action in enumerate(row)}
        for action in row:
            if action.kind != "F":
                assert at[action._replace(kind=kinds[kinds.index(action.kind) - 1])] < at[action]


def check_programs(programs: list[list[Instruction]], places: list[Place]):
    """Carry programs out under the strictest rule: a rank does nothing until the message that it posted has passed.

    A message passes when both its ranks have come to it. Raises AssertionError on a deadlock, or on an action whose
    input is not there.
    """
    left, there = [deque(program) for program in programs], set()
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(left):
            while program:
                verb, action, peer = program[0]
                if verb == "compute":
                    before = places[action.stage].before if action.kind == "F" else places[action.stage].after
                    assert action.kind == "W" or before is None or (rank, action) in there, (rank, action)
                    there.add((rank, consumer(action, places)))
                elif not left[peer] or left[peer][0] != (dict(send="receive", receive="send")[verb], action, rank):
                    break
                else:
                    sender, receiver = (rank, peer) if verb == "send" else (peer, rank)
                    assert (sender, action) in there, "it is sent before it is computed"
                    there.add((receiver, action))
                    left[peer].popleft()
                program.popleft()
                moving = True
    assert not any(left), f"a deadlock: {[program[0] for program in left if program]}"


def makespan(lists: Lists, places: list[Place], costs: dict) -> int:
    """From the first start to the last end of all ranks."""
    return simulate(lists, places, costs)[-1][0]


def in_flight(row: list[Action], until: str = "B") -> int:
    """The most (micro-batch, stage)s that a rank holds at once, from F to the end of B, or of W."""
    return max(accumulate({"F": 1, until: -1}.get(action.kind, 0) for action in row))


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_size_is_complete_and_ends(name):
    """Also with two stages a rank, and messages ordered by any costs."""
    draw = random.Random(0)
    for _, m, lists, places in sizes(name):
        check_lists(lists, places, m)
        for costs in UNIT | PLAIN, {kind: draw.uniform(0.1, 3) for kind in "FBW"}:
            check_programs(add_messages(lists, places, costs), places)


class Recorded:
    """In the place of a pipeline's stage and messages: what is done is noted."""

    def __init__(self, rank: int, p: int, m: int):
        self.group, self.xs, self.done = Group("pp", rank, p, None), [None] * m, []

    def forward(self, i: int, stage: int, x: None) -> int:
        """Note it. What is sent on is not looked at."""
        self.done.append(Action("F", i, stage))
        return i

    def backward(self, i: int, stage: int, dy: None) -> int:
        """Note it."""
        self.done.append(Action("B", i, stage))
        return i

    def send_receive(self, peer: int, send: None = None, receive_of: int | None = None):
        """Nothing moves."""


class Posted(Pending):
    """Messages that are posted together: (sender, receiver) of each. Who waits notes it."""

    def __init__(self, done: list, ends: set[tuple[int, int]]):
        self.done, self.ends = done, ends

    def wait(self):
        """Note it."""
        self.done.append(("wait", self))

    def receives(self, rank: int) -> bool:
        """Whether some message comes to this rank."""
        return any(to == rank for _, to in self.ends)


class Messenger(Recorded):
    """What is posted, and waited for, is noted, too."""

    send_receive = Pipeline.send_receive

    def buffer(self, i: int):
        """Nothing."""


def posts(cls: type, p: int, m: int) -> list[list]:
    """What p ranks do in 1F1B, by loops or by lists, in order: an Action; something Posted; ("wait", it)."""
    (lists, places), found = made("1f1b", p, m), []
    for rank, program in enumerate(add_messages(lists, places)):
        loop = type("Loop", (Messenger, cls), {})(rank, p, m)
        loop.places, loop.program = places, program

        def post(sends: list, receives: list, _group: Group, loop: Messenger = loop) -> Posted:
            ends = {(loop.group.rank, peer) for _, peer in sends} | {(peer, loop.group.rank) for _, peer in receives}
            loop.done.append(Posted(loop.done, ends))
            return loop.done[-1]

        with mock.patch.object(step06, "exchange", post):
            loop.execute()
        found.append(loop.done)
    return found


def end_of(ranks: list[list], costs: dict, message: float) -> float:
    """When the last rank has done what `posts` found, as NCCL orders it.

    A rank's compute stream does actions and waits in order. What it posts enters its queue when compute has come so
    far; what is posted together starts together, when all that the queue had before has passed. A message passes when
    it has started at both ends. Raises ValueError if ranks wait for ever.
    """
    left, free, moving = [deque(row) for row in ranks], [0.0 for _ in ranks], True
    queues: list[deque] = [deque() for _ in ranks]
    passed, idle = {}, [0.0 for _ in ranks]  # by what is posted, when all of it has; by rank, when its queue has
    arrived = defaultdict(float)
    while moving:
        moving = False
        for rank, row in enumerate(left):
            while row and (isinstance(row[0], Posted | Action) or row[0][1] in passed):
                what, moving = row.popleft(), True
                if isinstance(what, Action):
                    free[rank] += costs[what.kind]
                elif isinstance(what, Posted):
                    queues[rank].append((what, free[rank], set(what.ends)))
                else:
                    free[rank] = max(free[rank], passed[what[1]])
        for a, b in permutations(range(len(ranks)), 2):
            if queues[a] and queues[b] and (a, b) in queues[a][0][2] & queues[b][0][2]:
                start = max(queues[a][0][1], queues[b][0][1], idle[a], idle[b])
                for rank in (a, b):
                    what, _, rest = queues[rank][0]
                    rest.remove((a, b))
                    arrived[what] = max(arrived[what], start + message)
                moving = True
        for rank, queue in enumerate(queues):
            if queue and not queue[0][2]:
                what, *_ = queue.popleft()
                passed[what] = idle[rank] = arrived[what]
    if any(left):
        raise ValueError("ranks wait for ever")
    return max(free)


def test_1f1b_loses_nothing_by_waiting_for_its_sends():
    """A receive is behind the send before it in the queue anyway: if nobody waited for sends, a step would end alike.

    With messages in the background, as lists have them, it would end at most one message earlier.
    """
    sizes = [(p, m) for p in (2, 3, 4, 8) for m in (1, 4, 8, 24)]
    for (p, m), message, b in product(sizes, (0.02, 0.1, 0.7), (1, 2)):
        costs, ranks = dict(F=1, B=b), posts(OneForwardOneBackward, p, m)
        needed = [[w for w in row if type(w) is not tuple or w[1].receives(rank)] for rank, row in enumerate(ranks)]
        end = end_of(ranks, costs, message)
        assert sum(map(len, needed)) < sum(map(len, ranks))
        assert end == pytest.approx(end_of(needed, costs, message), abs=1e-9), (p, m, message)
        assert end < end_of(posts(ListPipeline, p, m), costs, message) + message + 1e-9, (p, m, message)
    with injected(APART):
        later = end_of(posts(OneForwardOneBackward, 4, 8), PLAIN, 0.1)
    assert later > end_of(posts(ListPipeline, 4, 8), PLAIN, 0.1) + 0.1


def test_wrong_lists_and_programs_are_noticed():
    """A missing action; W before its B; an action twice; a receive too late; sends in another order."""
    lists, places = made("zb-h1", 4, 8)
    for change in lambda row: row.pop(), lambda row: row.insert(0, row.pop()), lambda row: row.append(row[0]):
        wrong = [list(row) for row in lists]
        change(wrong[1])
        with pytest.raises(AssertionError):
            check_lists(wrong, places, 8)
    for verb in "send", "receive":
        programs = add_messages(lists, places, UNIT)
        first = next(line for line in programs[1] if line.verb == verb)
        programs[1].append(programs[1].pop(programs[1].index(first)))
        with pytest.raises(AssertionError):
            check_programs(programs, places)


def test_what_step_6_shows_hangs():
    """1F1B's lists, if each rank has its messages where it needs them itself."""
    (lists, places), programs = made("1f1b", 2, 2), [[], []]
    for rank, row in enumerate(lists):
        for action in row:
            sends = action.kind == ("F", "B")[rank]  # and what it does not send it needs
            moved = action._replace(stage=1 - rank) if sends else action
            message = Instruction("send" if sends else "receive", moved, 1 - rank)
            computed = Instruction("compute", action)
            programs[rank] += [computed, message] if sends else [message, computed]
    with pytest.raises(AssertionError, match="a deadlock"):
        check_programs(programs, places)


def test_places():
    """A V, two opposite ways; uneven stages."""
    assert [place.rank for place in made("zbv", 2, 2)[1]] == [0, 1, 1, 0]
    ways = made("dualpipe", 2, 2)[1]
    assert [place.rank for place in ways] == [0, 1, 1, 0] and [place.before for place in ways] == [None, 0, None, 2]
    assert [len(place.layers) for place in given(ways, "3,1", 4)] == [3, 1, 3, 1]
    for split in "3,2", "4,0", "1,1,2", "a,4":
        with pytest.raises(UserError, match="--pp-split"):
            given(ways, split, 4)


def of_ahead(p: int, m: int, v: int, costs: dict = PLAIN) -> tuple[int, int]:
    """How long a step takes; the most stages in flight."""
    lists, places = made("ahead", p, m, chunks=v)
    return makespan(lists, places, costs), max(map(in_flight, lists))


@pytest.mark.parametrize("v", [1, 2, 3])
def test_one_more_forward_ahead(v):
    """As long as rounds of p, for any m from p on; one more stage in flight."""
    for (p, m), costs in product(SIZES, COSTS[::5]):
        if p > 1 and m >= p:
            plain, flying = of_ahead(p, m, v, costs)
            assert plain == makespan(*made("rounds", p, m, chunks=v), costs)
            longest = max((v - 1) * -(-m // (m // p)) + 2 * (p - 1 - rank) + 2 for rank in range(p))
            assert flying == min(v * m, longest)


def of_rounds(p: int, m: int, v: int, size: int) -> tuple[int, list[int]]:
    """How long a step takes, and the stages in flight on each rank."""
    lists, places = made("rounds", p, m, chunks=v, round_size=size)
    return makespan(lists, places, PLAIN), [in_flight(row) for row in lists]


@pytest.mark.parametrize("v", [1, 2, 3])
def test_rounds_of_any_size(v):
    """Interleaved's bubble for all m from p on, whether p divides m or not; memory grows with N, time for messages too.

    With fewer micro-batches than ranks: (v p + m - 1) (f + b). With N = p where p divides m, interleaved's own lists.
    """
    for (p, m), more in product(SIZES, (0, 7)):
        lists, places = made("rounds", p, m, chunks=v, round_size=p + more)
        stages = v if p > 1 else 1
        longest = -(-m // max(1, m // (p + more)))
        check_lists(lists, places, m)
        check_programs(add_messages(lists, places, PLAIN), places)
        assert makespan(lists, places, PLAIN) == 3 * (stages * max(m, p) + min(m, p) - 1)
        flying = [(stages - 1) * longest + min(stages, 2) * (p - 1 - rank) + 1 for rank in range(p)]
        assert m < p or [in_flight(row) for row in lists] == [min(stages * m, n) for n in flying]
        assert more or m % p or lists == made("interleaved", p, m, chunks=v)[0]
        if stages > 1 and m >= p:
            ends = {action: (start, end) for end, _, start, action in simulate(lists, places, PLAIN)}
            first = m // max(1, m // (p + more))  # the first round's, whose second stage is still in the warm-up
            assert ends[Action("F", 0, p)][0] - ends[Action("F", 0, p - 1)][1] == first - p


def test_bubble_of_zb_h1_and_zb_h2():
    """(p-1)(f+b-w) if w is at most f and b; the smallest of the three fills the gap in any case. None in ZB-H2 at work.

    From 2p-1 micro-batches a rank of ZB-H2 takes (p-1) max(0, f+b-2w, b-f) longer than its work.
    """
    for costs in COSTS:
        f, b, w = costs.values()
        for p, m, lists, places in sizes("zb-h1"):
            if m >= p:
                assert makespan(lists, places, costs) == m * (f + b + w) + (p - 1) * (f + b - min(f, b, w))
        for p, m, lists, places in sizes("zb-h2"):
            if m >= 2 * p - 1:
                spans = simulate(lists, places, costs)
                rows = [[span for span in spans if span[1] == rank] for rank in range(p)]
                longest = max(row[-1][0] - row[0][2] for row in rows)
                assert longest == m * (f + b + w) + (p - 1) * max(0, f + b - 2 * w, b - f)


def test_bubble_of_zbv_and_dualpipe():
    """If f = b = w: zbv p-1 half stages, from 2p-1 micro-batches; dualpipev as many; dualpipe p/2-1, an even number.

    From 2p micro-batches, for both. v-half 3 p, v-min 4 p at most.
    """
    for name, least in ("zbv", -1), ("dualpipev", 0):
        for p, m, lists, places in sizes(name):
            if m >= 2 * p + least and p > 1:
                assert makespan(lists, places, UNIT) == 6 * m + p - 1
    for name, most in ("v-half", 3), ("v-min", 4):
        for p, m, lists, places in sizes(name):
            assert p == 1 or m < 2 * p or makespan(lists, places, UNIT) <= 6 * m + most * p
    for p, m, lists, places in sizes("dualpipe"):
        if m >= 2 * p and m % 2 == 0:
            assert makespan(lists, places, UNIT) == 3 * m + p // 2 - 1


def test_activations_in_flight():
    """Micro-batches that a rank holds, and until when."""
    for p, m, lists, _ in sizes("zb-h1"):
        assert [in_flight(row) for row in lists] == [min(m, p - rank) for rank in range(p)]
    for name, depth in ("zb-h1", 1), ("zb-h2", 2):
        for p, m, lists, _ in sizes(name):
            assert max(in_flight(row, "W") for row in lists) == min(m, depth * (p - 1) + 1)
    assert all(in_flight(row, "W") <= 2 * p for p, _, lists, _ in sizes("zbv") for row in lists)
    assert all(in_flight(row, "W") <= p + 1 for p, _, lists, _ in sizes("dualpipe") for row in lists)
    assert all(in_flight(row, "W") <= 2 * p + 1 for p, _, lists, _ in sizes("dualpipev") for row in lists)
    assert all(in_flight(row, "W") <= p + 3 for p, _, lists, _ in sizes("v-half") for row in lists)
    assert all(in_flight(row, "W") <= 2 * p / 3 + 3 for p, _, lists, _ in sizes("v-min") for row in lists)


def test_dualpipe_puts_off_what_the_paper_does():
    """W does not follow its B at once in steps 3, 6 (the second half) and 7 alone; rank 0 of 4, letter for letter."""
    lists, _ = made("dualpipe", 4, 8)
    words = [f"{kind}{int(stage >= 4)}" for kind, _, stage in lists[0]]
    expected = "F0 F0 F0 F1  B1 W1 F1  F0 B1 W1 F1 B0 W0  B1 W1 F1 B0 W0  B1 W1 B0  W0 B0 W0"
    assert words == expected.split()


def test_dualpipev_is_dualpipe_folded():
    """Rank r's list is that of rank r of twice as many, with as many micro-batches each way; those up the V are the
    other way's.
    """
    for p, m in (2, 4), (4, 8), (4, 11):
        folded, whole = made("dualpipev", p, m)[0], made("dualpipe", 2 * p, 2 * m)[0]
        for rank in range(p):
            other = [(kind, i % m, min(stage % (2 * p), 4 * p - 1 - stage)) for kind, i, stage in whole[rank]]
            ours = [(kind, i, min(stage, 2 * p - 1 - stage)) for kind, i, stage in folded[rank]]
            assert ours == [(kind, i, rank) for kind, i, _ in other]


def test_v_half_and_v_min_repeat_one_block():
    """Each rank starts one of the six things of a micro-batch at a time, six units after the one before."""
    for delays in (1, 1, 1, 1), (1, 2, 1, 2):
        for p in range(2, 17):
            for row in block(p, delays):
                assert sorted(start % 6 for start in row) == [*range(6)]
                assert row[0] < row[1] < row[2] < row[3] and row[4] > row[2] and row[5] > row[3]


@pytest.mark.parametrize("name", SCHEDULES)
def test_pairs_are_complete_and_end(name):
    """--ep-overlap: every list with F and B at once, where they stand side by side; all do what they did, and end."""
    for p, m, lists, places in sizes(name):
        programs = program_of(lists, places)
        flat = [[Instruction(verb, a, peer) for verb, some, peer in program for a in some] for program in programs]
        check_programs(flat, places)
        assert [[line.action for line in program if line.verb == "compute"] for program in flat] == lists
        if name in ("1f1b", "dualpipe") and p > 1 and m >= 2 * p:
            both = [sum(len(line.actions) == 2 for line in program) for program in programs]
            assert both == [sum(len(actions) == 2 for actions in paired(row)) for row in lists]


def test_zb_auto_is_sound_within_its_memory_and_no_worse_than_by_hand():
    """Any p, m, costs and limit: complete, in order, free of deadlock; more memory never costs time here."""
    draw = random.Random(0)
    for _ in range(8):
        p, m = draw.randint(1, 6), draw.randint(1, 12)
        limit = draw.choice([p, 2 * p, draw.uniform(1, 3 * p)])
        costs = Costs(*(draw.choice([1, 2, 5, draw.uniform(0.1, 3)]) for _ in range(3)), draw.choice([0, 0.3, 2]))
        places, lists = made("1f1b", p, m)[1], search(p, m, costs, limit)
        check_lists(lists, places, m)
        check_programs(add_messages(lists, places, UNIT), places)
        assert all(in_flight(row, "W") <= limit for row in lists)
        for depth in (1, 2):
            if limit >= depth * p:
                assert time_of(lists, costs) <= time_of([zb_h1(p, m, 1, rank, depth) for rank in range(p)], costs)
    times = [time_of(search(4, 16, Costs(1, 1, 1, 0), limit), Costs(1, 1, 1, 0)) for limit in (1, 2, 4, 7)]
    assert times == sorted(times, reverse=True) and times[-1] == 3 * 16 + 3
    for p, m, limit, costs, seconds in (3, 6, 6, Costs(2, 5, 5, 0), 76), (4, 6, 5, Costs(2, 2, 1, 1), 47):
        assert time_of(search(p, m, costs, limit), costs) == seconds  # found at a depth that is neither 1 nor 2
