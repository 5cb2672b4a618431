"""Pipeline schedules as data, for the second part of step 6. Each rank has a list of actions. Here
lists are made, simulated, drawn, and given their messages.

A schedule is a function of (p, m, v, rank) that returns the list of one rank: p ranks, m
micro-batches, v stages on each rank. There are three. In `interleaved` v may be larger than 1, and
step 6 runs its lists. In `afab` and `one_f_one_b` v is 1. Step 6 has these two as loops, with which
tests compare the lists. All three are made by `order_with_warm_up`: they differ only in the length
of the warm-up, the forwards before forwards and backwards alternate.

    python -m common.schedules 4 8 2      draws them for 4 ranks and 8 micro-batches: AFAB and 1F1B,
                                          then interleaved with 2 stages a rank. A character is then
                                          the forward of half the rank's layers, so a forward of
                                          AFAB or 1F1B takes two
"""

import argparse
from collections import deque
from typing import NamedTuple

from common import UserError

COSTS = {"F": 1, "B": 2}  # units of time of a forward, and of a backward


class Action(NamedTuple):
    """One piece of a rank's work. ("F", 3, 1), written F3.1: the forward of micro-batch 3 through
    stage 1.
    """

    kind: str  # F forward, B backward
    micro_batch: int
    stage: int


def round_robin(p: int, v: int) -> list[int]:
    """The rank of each of the p x v stages: stage s is on rank s mod p."""
    return [stage % p for stage in range(p * v)]


def order_with_warm_up(p: int, m: int, v: int, rank: int, warm_up: int) -> list[Action]:
    """One rank's list: `warm_up` forwards; then forwards and backwards alternate; then the
    remaining backwards.

    Micro-batches go in rounds of p. A round passes through the rank's first stage, then its second
    one, and so on (in backward: last stage first). With 2 ranks and v = 2, rank 0 has stages 0 and
    2; its forwards of 4 micro-batches are

        F0.0 F1.0 F0.2 F1.2      the first round, micro-batches 0 and 1
        F2.0 F3.0 F2.2 F3.2      the second round

    and the backwards B0.2 B1.2 B0.0 B1.0, then B2.2 B3.2 B2.0 B3.0. Rounds have p micro-batches so
    that inputs come in time: while this rank computes F1.0, rank 1 computes F0.1, whose output F0.2
    needs. With one stage on each rank the order is 0, 1, 2, ...
    """
    stages = range(rank, p * v, p)  # rank, rank + p, ...
    forwards = []
    backwards = []
    for start in range(0, m, p):
        micro_batches = range(start, min(start + p, m))  # the last round may be shorter, if v is 1
        for stage in stages:
            forwards += [Action("F", i, stage) for i in micro_batches]
        for stage in reversed(stages):
            backwards += [Action("B", i, stage) for i in micro_batches]
    actions = forwards[:warm_up]
    steady = forwards[warm_up:]
    for forward, backward in zip(steady, backwards, strict=False):  # more backwards follow
        actions += [forward, backward]
    return actions + backwards[len(steady) :]


def afab(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forward, all backward; v must be 1. After the last forward, all m micro-batches are in
    flight. Unlike GPipe (Huang et al. 2019), it has the backwards in the order of the forwards.
    """
    return order_with_warm_up(p, m, v, rank, warm_up=m)  # all forwards


def one_f_one_b(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B; v must be 1. At most p - rank micro-batches are in flight on `rank`. (PipeDream-flush:
    Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training".)
    """
    return order_with_warm_up(p, m, v, rank, warm_up=p - 1 - rank)


def interleaved(p: int, m: int, v: int, rank: int) -> list[Action]:
    """1F1B with v stages on each rank (Narayanan et al. 2021, "Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM", section 2.2).

    Raises UserError if m is no multiple of p.
    """
    if m % p:
        raise UserError(
            f"--schedule interleaved: --pp {p} must divide the {m} micro-batches of a rank"
        )
    # If messages took no time, (v-1) p + (p-1-rank) would be enough for the same bubble: the first
    # round through the v-1 earlier stages, then 1F1B's warm-up. Like Megatron-LM we take (v-1) p +
    # 2 (p-1-rank), so that a rank has work while messages travel. The price is more forwards in
    # flight: rank 0 of 2, with v = 2, has 5 instead of 4
    return order_with_warm_up(p, m, v, rank, warm_up=(v - 1) * p + 2 * (p - 1 - rank))


def consumer(action: Action, n_stages: int) -> Action | None:
    """The action that needs this one's output, or None if no other stage does.

    A forward's output goes to the next stage's forward, a backward's to the previous stage's
    backward.
    """
    if action.kind == "F" and action.stage + 1 < n_stages:
        return action._replace(stage=action.stage + 1)
    if action.kind == "B" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    return None


def producer(action: Action, n_stages: int) -> Action | None:
    """The action whose output this one needs, of the same micro-batch:

        F of the first stage      none: None
        F of another stage        F of the stage before
        B of the last stage       F of this stage, which ends with the loss
        B of another stage        B of the stage after

    B of stage s also needs F of s, which has ended by then: B of s+1 needs F of s+1, which needs F
    of s.
    """
    if action.kind == "F" and action.stage > 0:
        return action._replace(stage=action.stage - 1)
    if action.kind == "B" and action.stage + 1 < n_stages:
        return action._replace(stage=action.stage + 1)
    if action.kind == "B":
        return action._replace(kind="F")
    return None


class Span(NamedTuple):
    """When an action runs, in the unit of `costs`, and on which rank."""

    rank: int
    action: Action
    start: float
    end: float


def simulate(
    lists: list[list[Action]],
    rank_of_stage: list[int],
    costs: dict[str, float],
    message: float = 0,
) -> list[Span]:
    """When each action of a schedule runs: spans, sorted by their ends; of two with the same end,
    the lower rank comes first. Each rank runs its list in order, and starts an action as soon as
    the rank is free and the action's input is there. Raises ValueError if no rank can go on.

    `rank_of_stage`: the rank of each stage. `costs`: kind of action -> its time, above 0.
    `message`: the time of a message between two ranks, which only tests set.

    LISTS CAN DEADLOCK. For example, with one stage on each rank, whose number is left out:

        rank 0    F0 B0 F1 B1
        rank 1    F1 B1 F0 B0

    Rank 0's B0 needs rank 1's B0, which comes after rank 1's F1. This needs rank 0's F1, which
    comes after rank 0's B0: a circle.
    """
    ends: dict[Action, float] = {}  # when an action ended
    free_at = [0.0] * len(lists)  # when each rank is free again
    queues = [deque(actions) for actions in lists]
    spans = []
    while any(queues):  # in each pass every rank runs as far as it can
        n_before = len(spans)
        for rank, queue in enumerate(queues):
            while queue:
                action = queue[0]
                start = free_at[rank]
                needed = producer(action, len(rank_of_stage))
                if needed is not None:
                    if needed not in ends:  # not run yet: go on with the next rank
                        break
                    arrival = ends[needed]
                    if rank_of_stage[needed.stage] != rank:
                        arrival += message
                    start = max(start, arrival)
                queue.popleft()
                ends[action] = start + costs[action.kind]
                free_at[rank] = ends[action]
                spans.append(Span(rank, action, start, ends[action]))
        if len(spans) == n_before:
            raise ValueError(f"these wait for ever: {[queue[0] for queue in queues if queue]}")
    return sorted(spans, key=lambda span: (span.end, span.rank))


class Instruction(NamedTuple):
    """One line of a rank's program. A message has the name of the action that uses it.

        compute a         run action a, when its input is there
        receive a, peer   begin to receive, from `peer`, the input of this rank's action a
        send a, peer      send, to `peer`, what that rank's action a needs

    For example, "send F0.2" and "receive F0.2" are the two ends of one message, the output of F0.1,
    from the rank of stage 1 to that of stage 2.
    """

    verb: str  # "compute", "send" or "receive"
    action: Action
    peer: int | None = None


def add_messages(
    lists: list[list[Action]], rank_of_stage: list[int], costs: dict[str, float]
) -> list[list[Instruction]]:
    """Each rank's program: its list of actions, with the sends and receives that these need.

    MESSAGES CAN DEADLOCK, even if the lists do not. NCCL runs the messages of a group one after
    another: a send or a receive that waits for its partner holds up all messages behind it. Let two
    ranks, with one stage each, follow 1F1B. What rank 0 calls y1, rank 1 calls x1; so also dx0 and
    dy0:

        rank 0    F0, send y0, F1, send y1, receive dy0, B0, ...
        rank 1    receive x0, F0, B0, send dx0, receive x1, F1, ...

    On rank 0 the receive of dy0 stands behind send y1, on rank 1 that of x1 behind send dx0. So
    neither send meets its receive: rank 0 waits for ever before B0, and rank 1 before F1. If rank 1
    begins to receive x1 before it computes F0, send y1 finds its receive:

        rank 1    receive x0, receive x1, F0, B0, send dx0, F1, ...

    The idea: all programs follow one order of all actions and messages. Then no circle of waiting
    ranks can arise (a proof follows the code). The loop goes through all actions in the order in
    which they end in a simulation. It appends each to its rank's program. If another rank needs the
    output, it appends a send to this program, and a receive to that rank's program. `costs` only
    choose the order: with any, all above 0, no rank waits for ever.

    Another example: the program of rank 1, of 2, interleaved, for 2 micro-batches. Its stages are 1
    and 3.

        receive F0.1, receive F1.1, compute F0.1, send F0.2,
        receive F0.3, compute F1.1, send F1.2, receive F1.3, ...

    Rank 0's F1.0 and rank 1's F0.1 end at the same time, 2, and in the simulation's order the lower
    rank comes first. So rank 1 begins to receive F1.1, the output of F1.0, before it computes F0.1.
    """
    programs: list[list[Instruction]] = [[] for _ in lists]
    for span in simulate(lists, rank_of_stage, costs):
        programs[span.rank].append(Instruction("compute", span.action))
        next_action = consumer(span.action, len(rank_of_stage))
        if next_action is None:
            continue
        peer = rank_of_stage[next_action.stage]
        if peer != span.rank:
            programs[span.rank].append(Instruction("send", next_action, peer))
            programs[peer].append(Instruction("receive", next_action, span.rank))
    return programs


# Why there is no deadlock. Number actions and messages in the order in which the loop meets them;
# a send and its receive are one message, with one number.
#
#     (a) In each program the numbers increase.
#     (b) So rank a's sends to rank b, and rank b's receives from rank a, come in the same order.
#         Messages arrive in the order of their sends, so each meets its own receive.
#     (c) What an action or a message needs has a smaller number: the action that made its input
#         ended earlier (all costs are above 0), and its message was numbered right after that. (A
#         send also waits for the previous send to the same peer, which has a smaller number, too.)
#
# Suppose that some ranks wait for ever, and take the smallest number that is not done. Each rank
# that takes part in it has done what comes earlier in its program (a), and what it needs is done,
# too (c). So it can go on: a contradiction.


# --- Drawing --------------------------------------------------------------------------------------


def draw(lists: list[list[Action]], rank_of_stage: list[int], costs: dict[str, int] = COSTS) -> str:
    """A line per rank, a character per unit of time: F of micro-batch i is digit i mod 10, B a
    letter, idle `.`; the stage is not shown. Another kind, which only optional techniques have, is
    `-`.
    """
    spans = simulate(lists, rank_of_stage, costs)
    length = int(spans[-1].end)
    rows = [["."] * length for _ in lists]
    for span in spans:
        i = span.action.micro_batch
        mark = "-"
        if span.action.kind == "F":
            mark = str(i % 10)
        elif span.action.kind == "B":
            mark = chr(ord("a") + i % 26)
        for t in range(int(span.start), int(span.end)):
            rows[span.rank][t] = mark
    return "\n".join("".join(row) for row in rows)


def main():
    """Draw the schedules for the sizes on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.schedules")
    for name in ("ranks", "micro_batches", "stages_on_a_rank"):
        parser.add_argument(name, type=int)
    sizes = parser.parse_args()
    p = sizes.ranks
    m = sizes.micro_batches
    v = sizes.stages_on_a_rank
    if min(p, m, v) < 1:
        parser.error("give numbers from 1 on")
    if v > 1 and m % p:
        parser.error("with several stages on a rank, micro_batches must be a multiple of ranks")
    # (name, schedule, stages on a rank, characters of a forward): a single stage is v times as long
    schedules = [("afab", afab, 1, v), ("1f1b", one_f_one_b, 1, v)]
    if v > 1:
        schedules.append(("interleaved", interleaved, v, 1))
    for name, schedule, stages, characters in schedules:
        lists = [schedule(p, m, stages, rank) for rank in range(p)]
        costs = {kind: cost * characters for kind, cost in COSTS.items()}
        print(name)
        print(draw(lists, round_robin(p, stages), costs))


if __name__ == "__main__":
    main()
