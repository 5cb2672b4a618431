"""Proof that pipeline schedules are complete, in order and free of deadlock; PyTorch's own ones to compare with."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from common.schedules import Action, Output, Place, Placement, Step, needs, neighbours


class ScheduleError(Exception):
    """What is wrong with a schedule."""


def check_lists(lists: list[list[Action]], placements: list[Placement], m: int):
    """Each micro-batch does F, B and W (BW is both) exactly once at each place of its placement, in this order.

    It is done nowhere else. Of two placements, the first is for the first half of the micro-batches (one more if m is
    odd). Raises ScheduleError.
    """
    expected = Counter(
        (kind, micro_batch, place)
        for micro_batch in range(m)
        for place in placements[0 if 2 * micro_batch < m or len(placements) == 1 else 1]
        for kind in "FBW"
    )
    found, last = Counter(), {}
    for rank, actions in enumerate(lists):
        for action in actions:
            for kind in action.kind:
                key = (action.micro_batch, (rank, action.chunk))
                if last.get(key, "") != {"F": "", "B": "F", "W": "B"}.get(kind):
                    raise ScheduleError(f"rank {rank}: {action} follows {last.get(key) or 'nothing'}")
                last[key] = kind
                found[(kind, *key)] += 1
    for wrong in (expected - found) + (found - expected):
        raise ScheduleError(f"{wrong} stands {found[wrong]} times in the lists, instead of {expected[wrong]}")


def check_programs(programs: list[list[Step]], placements: list[Placement], blocking: bool = False) -> list[int]:
    """Carry programs out under the strictest rule: one queue per rank, matched by rendezvous in the order of posting.

    A message passes only when its send and its receive head the queues of their ranks. An action waits for what it
    needs. Posting never waits, unless `blocking`: then a rank does nothing more until its message has passed. Raises
    ScheduleError on a deadlock, on an action without the receive of its input, on a send before its action, and on
    messages that are left over. Returns the most receives posted at once, by rank.

    What an action needs is written here a second time, not taken from the code under test.
    """
    source = {"F": {}, "B": {}}
    for placement in placements:
        for earlier, later in pairwise(placement):
            source["F"][later], source["B"][earlier] = earlier, later
    queues: list[deque[Step]] = [deque() for _ in programs]
    position, posted, most = [0] * len(programs), [0] * len(programs), [0] * len(programs)
    done: set[Output] = set()
    expected, arrived = set(), set()  # by (rank, output): those whose receive is posted; those received

    def try_step(rank: int, step: Step) -> bool:
        """Carry out a step, unless it has to wait."""
        if step.kind == "send":
            if step.what not in done or step.what[2].rank != rank:
                raise ScheduleError(f"rank {rank} sends {step.what} before it is computed")
            queues[rank].append(step)
        elif step.kind == "recv":
            if step.what[2].rank != step.peer:
                raise ScheduleError(f"rank {rank} receives {step.what} from rank {step.peer}")
            queues[rank].append(step)
            expected.add((rank, step.what))
            posted[rank] += 1
            most[rank] = max(most[rank], posted[rank])
        else:
            kind, micro_batch, chunk = step.what
            place = Place(rank, chunk)
            if kind != "F" and ("B" if kind == "W" else "F", micro_batch, place) not in done:
                raise ScheduleError(f"rank {rank}: {step.what} before what it derives from")
            origin = source.get(kind[0], {}).get(place)
            output = (kind[0], micro_batch, origin)
            if origin and origin.rank == rank and output not in done:
                raise ScheduleError(f"rank {rank}: {step.what} before its input is computed")
            if origin and origin.rank != rank:
                if (rank, output) not in expected:
                    raise ScheduleError(f"rank {rank}: {step.what} before its receive is posted")
                if (rank, output) not in arrived:
                    return False
            done.add((kind[0], micro_batch, place))
        return True

    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            while position[rank] < len(program) and not (blocking and queues[rank]):
                if not try_step(rank, program[position[rank]]):
                    break
                position[rank] += 1
                moving = True
        for rank, queue in enumerate(queues):
            while queue and queue[0].kind == "send":
                _, output, peer = queue[0]
                if not queues[peer] or queues[peer][0] != ("recv", output, rank):
                    break
                arrived.add((peer, output))
                queue.popleft()
                queues[peer].popleft()
                posted[peer] -= 1
                moving = True
    for rank, (program, queue) in enumerate(zip(programs, queues, strict=True)):
        if queue or position[rank] < len(program):
            waiting = queue[0] if queue else program[position[rank]]
            raise ScheduleError(f"deadlock: rank {rank} waits for ever for {waiting}")
    return most


# Which messages of a rank wait for one another. NCCL's batches: all those of a group, as they share one stream.
QUEUES: dict[str, Callable[[int, Step], Any]] = {
    "one queue": lambda rank, step: rank,
    "one for each neighbour": lambda rank, step: (rank, step.peer),
    "one for each neighbour and direction": lambda rank, step: (rank, step.peer, step.kind),
    "none": lambda rank, step: (rank, step.what, step.kind),
}


def seconds_of(
    programs: list[list[Step]],
    placements: list[Placement],
    duration: Callable[[int, Action], float],
    comm: float,
    queue_of: Callable[[int, Step], Any],
) -> float:
    """Seconds until all programs have ended, if messages pass in the order of posting, queue by queue.

    `duration` of a rank's action and `comm` of a message, in seconds. A message starts when it heads its queue on both
    ranks, and both have posted it. Raises ScheduleError on a deadlock.
    """
    before, after = neighbours(placements)
    clock, at = [0.0] * len(programs), [0] * len(programs)
    queues, free, arrived = defaultdict(deque), defaultdict(float), {}
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                step = program[at[rank]]
                if step.kind == "run":
                    inputs = [(rank, o) for o in needs(step.what, rank, before, after) if o[2].rank != rank]
                    if not arrived.keys() >= {*inputs}:
                        break
                    clock[rank] = max([clock[rank], *(arrived[one] for one in inputs)]) + duration(rank, step.what)
                else:
                    queues[queue_of(rank, step)].append((step, rank, clock[rank]))
                at[rank], moving = at[rank] + 1, True
        for here, queue in list(queues.items()):
            while queue and queue[0][0].kind == "send":
                step, rank, posted = queue[0]
                receive = Step("recv", step.what, rank)
                there = queue_of(step.peer, receive)
                if not queues[there] or queues[there][0][:2] != (receive, step.peer):
                    break
                end = max(posted, queues[there].popleft()[2], free[here], free[there]) + comm
                free[here] = free[there] = arrived[step.peer, step.what] = end
                queue.popleft()
                moving = True
    if any(queues.values()) or at != [len(program) for program in programs]:
        raise ScheduleError(f"deadlock: the ranks' programs end at steps {at}")
    return max(clock)


TORCH_SCHEDULES = {
    "GPipe": torch_schedules.ScheduleGPipe,
    "Interleaved1F1B": torch_schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "ZBV": torch_schedules.ScheduleZBVZeroBubble,
    "DualPipeV": torch_schedules.ScheduleDualPipeV,
}


def torch_lists(name: str, p: int, m: int) -> tuple[list[list[Action]], list[Placement]]:
    """(lists, placements) of one of PyTorch's schedules, two chunks per rank if it takes several. No stage is built."""
    schedule = object.__new__(TORCH_SCHEDULES[name])
    v = 1 if name == "GPipe" else 2
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = p, v, m
    schedule._num_stages = schedule.num_stages = schedule.pp_group_size * v
    schedule.number_of_rounds = max(1, m // p)
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    if v == 1:
        order = schedule._get_pipeline_order()
    else:
        order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(p)}
    placement = [Place(rank, chunk) for chunk in range(v) for rank in range(p)]
    if name in ("ZBV", "DualPipeV"):
        placement = [Place(rank, 0) for rank in range(p)] + [Place(rank, 1) for rank in reversed(range(p))]
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    lists = []
    for rank in range(p):
        flat = [one for action in order[rank] if action for one in (action.sub_actions or [action])]
        rows = [(one.computation_type.name, one.microbatch_index, one.stage_index) for one in flat]
        lists.append([Action(kinds[name], i, placement[stage].chunk) for name, i, stage in rows if name in kinds])
    return lists, [placement]
