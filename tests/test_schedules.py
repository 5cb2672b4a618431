"""Schedules as data: complete, in order, free of deadlock; the papers' formulas of idle time and memory; drawn."""

import json
import random
from itertools import product
from types import SimpleNamespace

import pytest

import step06_pipeline as step06
from common.schedules import (
    SCHEDULES,
    Action,
    Costs,
    Place,
    Placement,
    Span,
    chunks_per_rank,
    communicate,
    needs,
    neighbours,
    place_stages,
    simulate,
)
from services.checks import choose_zb_costs, refuse
from services.plots import pipeline_timelines
from tests.schedules import (
    QUEUES,
    TORCH_SCHEDULES,
    ScheduleError,
    check_lists,
    check_programs,
    seconds_of,
    torch_lists,
)
from theory.bubble import UNIT_COSTS, bubble_rate, idle_fraction, in_flight, longest, makespan
from theory.memory import in_flight_bytes, program_bytes
from theory.zb_auto import zb_auto

GRID = [(4, 8), (4, 16), (8, 16), (8, 32)]
COSTS = [Costs(f, b, w, 0) for f, b, w in product((2, 3, 5), repeat=3)]  # whole numbers: the laws hold exactly


def lists_of(schedule: str, p: int, m: int, v: int = 0) -> tuple[list[list[Action]], list[Placement]]:
    """(every rank's actions, the placements) of a schedule; two chunks where the number is free and not given."""
    v = v or chunks_per_rank(schedule) or 2
    return [SCHEDULES[schedule](p, m, v, rank) for rank in range(p)], place_stages(schedule, p, v)


def sizes(schedule: str):
    """Every (p <= 8, m <= 32, v <= 4) that a schedule takes."""
    chunks = [1, 2, 3, 4] if schedule == "interleaved" else [chunks_per_rank(schedule)]
    return [size for size in product(range(1, 9), range(1, 33), chunks) if not refuse(schedule, *size)]


def some(usual: int) -> pytest.MarkDecorator:
    """A test of every `usual`-th size by default, and of each in -m exhaustive."""
    return pytest.mark.parametrize("every", [usual, pytest.param(1, marks=pytest.mark.exhaustive)])


def bubble(spans: list[list[Span]]) -> float:
    """Seconds that a rank idles between the first start and the last end of all ranks, all of them equally busy."""
    return makespan(spans) - sum(span.end - span.start for span in spans[0])


# --- complete, in order, free of deadlock


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_size_is_sound(schedule, all_of_them):
    """Every p, m, v: well formed, and the programs end on strict queues, with few receives posted ahead.

    By default with every fifth m above 12.
    """
    most = 0
    for p, m, v in sizes(schedule):
        if m > 12 and m % 5 and not all_of_them:
            continue
        lists, placements = lists_of(schedule, p, m, v)
        check_lists(lists, placements, m)
        most = max(most, *check_programs(communicate(lists, placements), placements))
    assert most == {"interleaved": 8, "dualpipe": 3, "zb-h2": 3, "zbv": 3}.get(schedule, 2)  # 4 if p divides m


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_are_sound_for_any_costs(schedule):
    """The order of messages may come from any costs."""
    draw = random.Random(0)
    for p, m in [(2, 5), (4, 8), (6, 13), (8, 16)]:
        lists, placements = lists_of(schedule, p, m)
        for _ in range(5):
            costs = Costs(*(draw.uniform(0.1, 3) for _ in range(3)), comm=draw.uniform(0, 2))
            for blocking in (False, True):
                check_programs(communicate(lists, placements, costs), placements, blocking)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_in_queues_take_their_time(schedule):
    """Without queues the programs take what `simulate` says; the longer the queues, the longer they take."""
    lists, placements = lists_of(schedule, 4, 8)
    programs, draw = communicate(lists, placements), random.Random(0)
    unit = lambda rank, action: len(action.kind)  # noqa: E731
    free = seconds_of(programs, placements, unit, 0.05, QUEUES["none"])
    assert free == pytest.approx(
        max(span.end for row in simulate(lists, placements, Costs(1, 1, 1, 0.05)) for span in row)
    )
    times = {(rank, action): draw.uniform(0.5, 1.5) for rank, row in enumerate(lists) for action in row}
    jitter = lambda rank, action: times[rank, action]  # noqa: E731
    found = [seconds_of(programs, placements, jitter, 0.05, queue_of) for queue_of in QUEUES.values()]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    rank, i = next(
        (r, i) for r, program in enumerate(programs) for i, step in enumerate(program) if step.kind == "recv"
    )
    programs[rank].append(programs[rank].pop(i))
    with pytest.raises(ScheduleError, match="deadlock"):
        seconds_of(programs, placements, unit, 0.05, QUEUES["none"])


@some(11)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_may_wait_for_what_it_has_posted(schedule, every):
    """Wherever an executor waits for a message that it has posted, nothing hangs: not even if every post blocks."""
    for p, m, v in sizes(schedule)[::every]:
        lists, placements = lists_of(schedule, p, m, v)
        check_programs(communicate(lists, placements), placements, blocking=True)


@some(11)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_passes_alone_are_sound(schedule, every):
    """Evaluation: each rank does all micro-batches on its first chunk, then all on the next."""
    for p, m, v in sizes(schedule)[::every]:
        placements = place_stages(schedule, p, v)
        chunks = [[place.chunk for place in placements[0] if place.rank == rank] for rank in range(p)]
        lists = [[Action("F", i, chunk) for chunk in row for i in range(m)] for row in chunks]
        check_programs(communicate(lists, placements), placements)


@some(11)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_was_sent_to_a_rank_has_its_receive_before_that_rank_sends_back(schedule, every):
    """When a message is here, its sender has posted the receives of all that was sent to it before this one's receive.

    So when a message arrives, an executor can free what it had sent to that rank: no other action must run for this.
    """
    for p, m, v in sizes(schedule)[::every]:
        programs = communicate(*lists_of(schedule, p, m, v))
        index = [{step: i for i, step in enumerate(program)} for program in programs]
        for rank, program in enumerate(programs):
            sent = {peer: [] for peer in range(p)}
            for kind, output, peer in program:
                if kind == "send":
                    sent[peer].append(output)
                elif kind == "recv":
                    reply = index[peer]["send", output, rank]
                    assert all(index[peer]["recv", earlier, rank] < reply for earlier in sent[peer]), (p, m, v, rank)


def test_the_program_of_a_rank():
    """The second of three ranks under 1f1b, step for step: a send follows its action, a receive precedes it."""
    program = communicate(*lists_of("1f1b", 3, 3))[1]
    lines = [f"{step.kind} {step.what[0]}{step.what[1]}" for step in program]
    assert lines == [
        *("recv F0", "recv F1", "run F0", "send F0", "recv F2", "run F1", "send F1", "recv B0", "run BW0", "send B0"),
        *("recv B1", "run F2", "send F2", "run BW1", "send B1", "recv B2", "run BW2", "send B2"),
    ]


def broken(schedule: str, rank: int, change) -> tuple[list[list[Action]], list[Placement]]:
    """A schedule of 4 ranks and 8 micro-batches after `change(list of one rank)`."""
    lists, placements = lists_of(schedule, 4, 8)
    change(lists[rank])
    return lists, placements


def swap(actions: list, first, second):
    """Exchange two entries of a list."""
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = second, first


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_swapped_pair_of_sends_is_a_deadlock(schedule):
    """Two messages to the same rank, sent in the other order; the first send postponed to the second's place."""
    lists, placements = lists_of(schedule, 4, 8)
    programs = communicate(lists, placements)
    sends = [step for step in programs[0] if step.kind == "send" and step.peer == 1]
    i, j = programs[0].index(sends[0]), programs[0].index(sends[1])
    programs[0][i : j + 1] = [*programs[0][i + 1 : j + 1], programs[0][i]]
    with pytest.raises(ScheduleError, match="deadlock"):
        check_programs(programs, placements)


def test_messages_that_cross_are_a_deadlock():
    """Two neighbours that both send before they receive, which two queues would allow, block one queue each."""
    lists, placements = lists_of("1f1b", 2, 4)
    programs = communicate(lists, placements)
    first = next(step for step in programs[1] if step.kind == "send")
    after = next(s for s in programs[1][programs[1].index(first) :] if s.kind == "recv")
    programs[1].remove(after)
    programs[1].insert(programs[1].index(first), after)
    with pytest.raises(ScheduleError, match="deadlock"):
        check_programs(programs, placements)


def test_a_program_without_a_receive_or_with_an_early_send_is_refused():
    """The checker wants the receive posted before its action, and the action before its send."""
    lists, placements = lists_of("1f1b", 4, 8)
    programs = communicate(lists, placements)
    receive = next(step for step in programs[1] if step.kind == "recv")
    with pytest.raises(ScheduleError, match="before its receive is posted"):
        check_programs([programs[0], [s for s in programs[1] if s != receive], *programs[2:]], placements)
    programs[0].insert(0, programs[0].pop(1))
    with pytest.raises(ScheduleError, match="before it is computed"):
        check_programs(programs, placements)


def test_dropped_doubled_and_misplaced_actions_are_noticed():
    """Each action once, on its own place, forward before input gradient before weight gradient."""
    for schedule, rank, change in [
        ("1f1b", 2, lambda a: a.remove(Action("BW", 3, 0))),
        ("afab", 0, lambda a: a.remove(Action("F", 7, 0))),
        ("zb-h1", 1, lambda a: a.remove(Action("W", 7, 0))),
        ("zb-h1", 1, lambda a: a.append(Action("W", 7, 0))),
        ("zb-h2", 3, lambda a: a.append(Action("BW", 0, 0))),
        ("zbv", 3, lambda a: a.append(Action("F", 8, 1))),
        ("dualpipe", 0, lambda a: a.append(Action("F", 0, 1))),
        ("interleaved", 1, lambda a: a.insert(0, a.pop())),
        ("zb-h1", 0, lambda a: swap(a, Action("B", 2, 0), Action("W", 2, 0))),
        ("1f1b", 3, lambda a: swap(a, Action("F", 2, 0), Action("BW", 2, 0))),
    ]:
        with pytest.raises(ScheduleError):
            check_lists(*broken(schedule, rank, change), 8)


def test_ranks_that_wait_for_each_other_are_noticed():
    """Lists whose ranks are each in order, but not together: rank 0 wants B0 before the forward that leads to it."""
    lists, placements = broken("1f1b", 3, lambda a: a.insert(0, a.pop(a.index(Action("F", 4, 0)))))
    check_lists(lists, placements, 8)
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(lists, placements, UNIT_COSTS)
    turned = broken("zbv", 0, lambda a: swap(a, Action("F", 0, 1), Action("F", 0, 0)))
    with pytest.raises(ValueError, match="waits for ever"):
        communicate(*turned)


# --- stage placements


def test_placements():
    """A loop, a V, and two opposite placements."""
    assert place_stages("interleaved", 2, 3) == [[(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]]
    assert place_stages("zbv", 2, 2) == [[(0, 0), (1, 0), (1, 1), (0, 1)]]
    assert place_stages("dualpipe", 2, 2) == [[(0, 0), (1, 0)], [(1, 1), (0, 1)]]


def test_what_an_action_needs():
    """In a V of 2 ranks, with both ends on rank 0 and the turn on rank 1."""
    before, after = neighbours(place_stages("zbv", 2, 2))
    first, second, third, last = Place(0, 0), Place(1, 0), Place(1, 1), Place(0, 1)
    for place, kind, expected in [
        (first, "F", []),
        (second, "F", [("F", 7, first)]),
        (third, "F", [("F", 7, second)]),
        (last, "F", [("F", 7, third)]),
        (last, "B", [("F", 7, last)]),
        (last, "BW", [("F", 7, last)]),
        (third, "B", [("F", 7, third), ("B", 7, last)]),
        (first, "BW", [("F", 7, first), ("B", 7, second)]),
        (second, "W", [("B", 7, second)]),
    ]:
        assert needs(Action(kind, 7, place.chunk), place.rank, before, after) == expected


def test_neighbours_on_one_rank_send_nothing():
    """zbv turns round on the last rank; one rank alone has no messages at all."""
    lists, placements = lists_of("zbv", 3, 4)
    programs = communicate(lists, placements)
    sends = [(rank, step.peer) for rank, program in enumerate(programs) for step in program if step.kind == "send"]
    assert len(sends) == 2 * 4 * (2 * 3 - 2)
    assert all(abs(rank - peer) == 1 for rank, peer in sends)
    for schedule in set(SCHEDULES) - {"dualpipe"}:
        assert all(step.kind == "run" for step in communicate(*lists_of(schedule, 1, 3))[0])


@pytest.mark.parametrize(
    "size, words",
    [
        (("dualpipe", 3, 8, 2), "even number of ranks: change --pp 3"),
        (("dualpipe", 1, 8, 2), "even number of ranks"),
        (("zbv", 4, 8, 3), "use --chunks 2"),
        (("dualpipe", 4, 8, 1), "use --chunks 2"),
        (("1f1b", 4, 8, 2), "has 1 stage on each rank: use --chunks 1"),
        (("interleaved", 4, 8, 0), "--chunks 0"),
        (("zb-h1", 4, 0, 1), "use at least 1"),
    ],
)
def test_refusals(size, words):
    """What cannot run is refused in words that name the flag; all else runs."""
    assert words in refuse(*size)


# --- laws of time


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
def test_idle_fraction_of_gpipe_and_1f1b(schedule):
    """(p-1)/(m+p-1) whatever the costs; any number of micro-batches."""
    for (p, m, _), costs in product(sizes(schedule)[::5], COSTS[::4]):
        assert idle_fraction(simulate(*lists_of(schedule, p, m), costs)) == pytest.approx((p - 1) / (m + p - 1))


@some(5)
def test_idle_fraction_of_interleaved(every):
    """(p-1)/(vm+p-1) for p micro-batches or more, whether p divides them or not."""
    for p, m, v in sizes("interleaved")[::every]:
        if m >= p:
            idle = idle_fraction(simulate(*lists_of("interleaved", p, m, v), UNIT_COSTS))
            assert idle == pytest.approx((p - 1) / (v * m + p - 1)), (p, m, v)


@some(11)
def test_bubble_of_zb_h1(every):
    """(p-1)(f+b-w) as in the paper if w is at most f and b; the smallest of the three fills the gap in any case."""
    for (p, m, _), costs in product(sizes("zb-h1")[::every], COSTS):
        if m >= p:
            expected = (p - 1) * (costs.f + costs.b - min(costs.f, costs.b, costs.w))
            assert bubble(simulate(*lists_of("zb-h1", p, m), costs)) == expected, (p, m, costs)


@some(11)
def test_bubble_of_zb_h2(every):
    """(p-1)(f+b-2w) per rank, as in the paper, from 2p-1 micro-batches: none for f = b = w.

    Counted from a rank's own first action to its last. Never negative, and at least (p-1)(b-f): forwards come to the
    ranks f apart, backwards leave them b apart. From first start to last end of all ranks, (p-1) f more.
    """
    for (p, m, _), costs in product(sizes("zb-h2")[::every], COSTS):
        if m >= 2 * p - 1:
            spans = simulate(*lists_of("zb-h2", p, m), costs)
            f, b, w, _ = costs
            assert longest(spans) - m * (f + b + w) == (p - 1) * max(0, f + b - 2 * w, b - f), (p, m, costs)
            if f == b == w:
                assert bubble(spans) == (p - 1) * f


@some(3)
def test_bubble_of_zbv(every):
    """None on any rank for f = b = w from 2p-1 micro-batches: the last rank starts p-1 chunks late, and that is all."""
    for p, m, _ in sizes("zbv")[::every]:
        if m >= 2 * p - 1:
            spans = simulate(*lists_of("zbv", p, m), UNIT_COSTS)
            assert bubble(spans) == p - 1, (p, m)
            assert min(row[-1].end - row[0].start for row in spans) == 6 * m


def test_bubble_of_dualpipe():
    """p/2-1 for f = b = w and an even number from 2p micro-batches, with nothing lost after the middle ranks' start.

    The paper's (p/2-1)(F&B + B - 3W), with F&B a forward and a whole backward after one another, is never exceeded as
    long as w is at most b. It is twice ours for f = b = w: `test_the_formula_of_dualpipe` shows why.
    """
    for p, m, _ in sizes("dualpipe"):
        if m >= 2 * p and m % 2 == 0:
            assert bubble(simulate(*lists_of("dualpipe", p, m), UNIT_COSTS)) == p // 2 - 1, (p, m)
    for (p, m), costs in product(GRID, COSTS):
        f, b, w, _ = costs
        if w <= b:
            paper = (p // 2 - 1) * ((f + b + w) + (b + w) - 3 * w)
            assert bubble(simulate(*lists_of("dualpipe", p, m), costs)) <= paper


def makespan_of_blocks(p: int, m: int) -> float:
    """dualpipe's time for f = b = w = 1 if F and BW after one another are one block, as where DeepSeek overlaps them.

    A block starts when the inputs of both are there, and ends 3 seconds later; only then can both outputs leave. The
    first pair of the two ranks in the middle is no block in DeepSeek's code, either.
    """
    lists, placements = lists_of("dualpipe", p, m)
    before, after = neighbours(placements)
    queues, ends, now = [], {}, [0] * p
    for rank, actions in enumerate(lists):
        kinds, blocks, i = "".join(a.kind[0] if a.kind != "BW" else "b" for a in actions), [], 0
        while i < len(actions):
            middle = rank in (p // 2 - 1, p // 2) and "b" not in kinds[:i]
            size = 2 if kinds[i : i + 2] == "Fb" and not middle else 1
            blocks.append(actions[i : i + size])
            i += size
        queues.append(blocks)
    while any(queues):
        for rank, blocks in enumerate(queues):
            inputs = [out for action in (blocks[:1] or [[]])[0] for out in needs(action, rank, before, after)]
            if blocks and ends.keys() >= set(inputs):
                block = blocks.pop(0)
                start = max([now[rank], *(ends[out] for out in inputs)])
                now[rank] = start + sum(len(action.kind) for action in block)
                for action in block:
                    ends[action.kind[0], action.micro_batch, Place(rank, action.chunk)] = now[rank]
    return max(now)


def test_the_formula_of_dualpipe():
    """DeepSeek's (p/2-1)(F&B + B - 3W), 2 (p/2-1) for F&B = 3, B = 2, W = 1, holds if the outputs leave with the block.

    The same order has half of this bubble where F's output leaves after F, as here.
    """
    for p, m in [(2, 4), (4, 8), (4, 16), (6, 12), (8, 16), (8, 32)]:
        assert makespan_of_blocks(p, m) - 3 * m == (p // 2 - 1) * (3 + 2 - 3 * 1)


def test_dualpipe_defers_the_weight_gradients_that_deepseek_does():
    """W apart from B in steps 3, 6 (the second half) and 7 alone: p/2 on each rank and direction, whatever m."""
    for p, m in [(2, 4), (4, 8), (8, 16), (8, 32)]:
        for rank, row in enumerate(lists_of("dualpipe", p, m)[0]):
            near = min(rank + 1, p - rank)
            assert sum(action.kind == "W" for action in row) == 2 * (p // 2 - near) + near
    first = [f"{kind}{chunk}" for kind, _, chunk in lists_of("dualpipe", 4, 8)[0][0]]
    assert first == [
        *("F0", "F0", "F0", "F1"),  # steps 1 and 2
        *("B1", "W1", "F1", "F0", "BW1", "F1", "BW0"),  # steps 3 and 4
        *("BW1", "F1", "BW0", "BW1", "B0", "W0", "B0", "W0"),  # steps 5 to 8
    ]


# --- the automatic scheduler

# Qi et al. 2023, 1.5B parameters on 8 ranks: milliseconds of F, B, W and a message; the part of a micro-batch's
# activations that stays until W, 32 h of 34 h + 5 a s, is theirs, too.
TIMES, WAITING = Costs(18.522, 18.086, 9.337, 0.601), 32 * 2304 / (34 * 2304 + 5 * 24 * 1024)


@pytest.mark.parametrize("depth, paper", [(1, 0.1585), (2, 0.0433)])
def test_zb_auto_is_as_good_as_its_papers(depth, paper):
    """Bubble rates of 24 micro-batches with the activations of 1f1b and with twice those; four digits of the paper."""
    spans = simulate(zb_auto(8, 24, TIMES, 8 * depth, WAITING), place_stages("zb-auto", 8, 1), TIMES)
    assert round(bubble_rate(spans), 4) <= paper
    f, b, w, comm = TIMES  # the first rank cannot end before all are through the last rank, and the last is back
    least = 24 * (f + b) + 7 * (f + b + 2 * comm) + w
    assert longest(spans) >= least and (depth == 1 or longest(spans) < 1.0001 * least)


def test_bubble_rates_of_the_papers_handmade_schedules():
    """The paper's figures for 1f1b, zb-h1 and zb-h2, to four digits."""
    for schedule, paper in [("1f1b", 0.2431), ("zb-h1", 0.1585), ("zb-h2", 0.1083)]:
        assert round(bubble_rate(simulate(*lists_of(schedule, 8, 24), TIMES)), 4) == paper


@pytest.mark.parametrize("trials", [12, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_zb_auto_is_sound_within_its_memory_and_no_worse_than_what_was_made_by_hand(trials):
    """Any p, m, costs and limit: complete, in order, free of deadlock; with p at least zb-h1, with 2p zb-h2."""
    draw = random.Random(0)
    for _ in range(trials):
        p, m, waiting = draw.randint(1, 8), draw.randint(1, 20), draw.choice([0.0, WAITING, 1.0])
        limit = draw.choice([p, 2 * p, draw.uniform(1, 3 * p)])
        costs = Costs(*(draw.choice([1, 2, 5, draw.uniform(0.1, 3)]) for _ in range(3)), draw.choice([0, 0.3, 2]))
        placements = place_stages("zb-auto", p, 1)
        for measure in (longest, makespan):
            lists = zb_auto(p, m, costs, limit, waiting, measure)
            check_lists(lists, placements, m)
            check_programs(communicate(lists, placements), placements, blocking=True)
            assert all(in_flight_bytes(row, [1], [waiting]) <= limit + 1e-6 for row in lists), (p, m, limit, waiting)
            found = measure(simulate(lists, placements, costs))
            for name, least in (("zb-h1", p), ("zb-h2", 2 * p)):
                if limit >= least:
                    assert found <= measure(simulate(*lists_of(name, p, m), costs)), (p, m, costs, name)


def test_zb_auto_uses_the_memory_that_it_gets():
    """The same call gives the same lists; more memory never costs time here, and a limit of one is one at a time."""
    assert zb_auto(4, 8, UNIT_COSTS, 4) == zb_auto(4, 8, UNIT_COSTS, 4)
    times = [
        longest(simulate(zb_auto(4, 16, UNIT_COSTS, n), place_stages("1f1b", 4, 1), UNIT_COSTS)) for n in (1, 2, 4, 7)
    ]
    assert times == sorted(times, reverse=True) and times[-1] == 48
    assert all(max(in_flight([row], until="W")) == 1 for row in zb_auto(4, 8, UNIT_COSTS, 1))


def test_a_broken_list_of_zb_auto_is_noticed():
    """W before its B; a forward twice; two ranks that wait for each other."""
    placements = place_stages("zb-auto", 4, 1)
    for rank, change, error in [
        (1, lambda a: swap(a, Action("B", 2, 0), Action("W", 2, 0)), ScheduleError),
        (3, lambda a: a.append(Action("F", 0, 0)), ScheduleError),
        (0, lambda a: a.insert(0, a.pop(a.index(Action("B", 0, 0)))), ScheduleError),
        (1, lambda a: a.insert(0, a.pop(a.index(Action("F", 4, 0)))), ValueError),
    ]:
        lists = zb_auto(4, 8, UNIT_COSTS, 4)
        change(lists[rank])
        with pytest.raises(error):
            check_lists(lists, placements, 8)
            simulate(lists, placements, UNIT_COSTS)


def test_costs_of_zb_auto():
    """By FLOPs: F is weights and attention, B 2.5 times the attention, W no attention; or as the flag says."""
    config = step06.Config(model="tiny", seq_len=128)
    m = config.model_config()
    f, b, w, comm = choose_zb_costs(config, m)
    assert (f - w, b - w) == pytest.approx((2 * 128 * m.dim, 5 * 128 * m.dim)) and comm == 0.05 * f
    config.recompute = "full"
    assert choose_zb_costs(config, m).b == b + f
    config.zb_costs = "1,2,3,0"
    assert choose_zb_costs(config, m) == (1, 2, 3, 0)


def test_messages_take_time():
    """Latency is paid p-1 times each way by afab, and never between chunks on one rank."""
    costs = Costs(1, 1, 1, comm=0.25)
    assert makespan(simulate(*lists_of("afab", 4, 8), costs)) == 33 + 2 * 3 * 0.25
    assert makespan(simulate(*lists_of("zbv", 1, 8), costs)) == 48


@pytest.mark.parametrize("p, m", GRID)
def test_no_more_idle_than_pytorch(p, m):
    """Every schedule against PyTorch's own list of the same kind, in the same simulator, for equal p, m, v."""
    torch_idle = {name: idle_fraction(simulate(*torch_lists(name, p, m), UNIT_COSTS)) for name in TORCH_SCHEDULES}
    idle = {name: idle_fraction(simulate(*lists_of(name, p, m), UNIT_COSTS)) for name in SCHEDULES}
    for ours, theirs in [
        *(("afab", "GPipe"), ("1f1b", "GPipe"), ("interleaved", "Interleaved1F1B"), ("zb-h1", "GPipe")),
        *(("zb-h2", "GPipe"), ("zbv", "InterleavedZeroBubble"), ("zbv", "ZBV"), ("dualpipe", "DualPipeV")),
    ]:
        assert idle[ours] <= torch_idle[theirs] + 1e-12, (ours, theirs)
    table = {
        (4, 8): (0.2727, 0.1579, 0.0588),
        (4, 16): (0.1579, 0.0857, 0.0303),
        (8, 16): (0.3043, 0.1795, 0.0680),
        (8, 32): (0.1795, 0.0986, 0.0352),
    }
    for name, figure in zip(("GPipe", "Interleaved1F1B", "ZBV"), table[p, m], strict=True):
        assert round(torch_idle[name], 4) == figure


# --- laws of memory


def test_activations_in_flight():
    """Micro-batches held per rank: m, p - rank, and 2(p - rank) - 1; and until their weight gradients, alike on all."""
    for p, m, _ in sizes("1f1b"):
        one, h1, h2 = (lists_of(name, p, m)[0] for name in ("1f1b", "zb-h1", "zb-h2"))
        assert in_flight(lists_of("afab", p, m)[0]) == [m] * p
        assert in_flight(one) == in_flight(h1) == [min(m, p - rank) for rank in range(p)]
        assert in_flight(h2) == [min(m, 2 * (p - rank) - 1) for rank in range(p)]
        assert max(in_flight(h1, until="W")) == min(m, p)
        assert max(in_flight(h2, until="W")) == min(m, 2 * p - 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_nothing_is_left_of_a_micro_batch(schedule):
    """One rank, one stage: after its backward, the next micro-batch finds all bytes free; to the byte."""
    lists, placements = lists_of(schedule, 1, 5)
    stage = SimpleNamespace(first=True, last=True)
    assert program_bytes(communicate(lists, placements)[0], [stage], whole=[10], waiting=[3], message=7) == 10


def test_chunks_in_flight():
    """interleaved as Megatron, in chunks of 1/v of the layers; zbv at most 2p half-size chunks; dualpipe p + 1."""
    for p, m, v in sizes("interleaved"):
        if m % p == 0:
            expected = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
            assert in_flight(lists_of("interleaved", p, m, v)[0]) == expected
    for p, m, _ in sizes("zbv"):
        assert max(in_flight(lists_of("zbv", p, m)[0], until="W")) <= 2 * p
    for p, m, _ in sizes("dualpipe"):
        assert max(in_flight(lists_of("dualpipe", p, m)[0], until="W")) <= p + 1


# --- drawn


@pytest.mark.parametrize("drawn", [("1f1b", "zbv"), pytest.param((*SCHEDULES,), marks=pytest.mark.exhaustive)])
def test_timelines_are_drawn(tmp_path, drawn):
    """One figure of several schedules from a JSON file or from the same data in memory, without the file."""
    panels = {}
    for schedule in drawn:
        spans = simulate(*lists_of(schedule, 4, 8), UNIT_COSTS)
        ranks = [[[*action[:3], start, end] for action, start, end in row] for row in spans]
        panels[schedule] = {"ranks": ranks, "idle": idle_fraction(spans), "simulated_idle": None}
    panels["1f1b"]["simulated_idle"] = 0.25
    (tmp_path / "timelines.json").write_text(json.dumps({"panels": panels}))
    pipeline_timelines(tmp_path / "timelines.json", tmp_path / "file.png")
    pipeline_timelines({"panels": panels}, tmp_path / "data.png")
    assert (tmp_path / "file.png").read_bytes() == (tmp_path / "data.png").read_bytes()
