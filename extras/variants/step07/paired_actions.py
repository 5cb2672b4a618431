"""A library for ep_overlap.py: programs whose instructions may compute a forward and a backward at once."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from common.comm import Pending, exchange
from common.schedules import Action, Place, consumer
from step06_pipeline import ACTS, Pipeline


class Line(NamedTuple):
    """A line of a rank's program: compute these actions at once, or send or receive the input of the only one."""

    verb: str
    actions: tuple[Action, ...]
    peer: int | None = None


def paired(row: list[Action]) -> list[tuple[Action, ...]]:
    """Group a list's actions: each F with the B that follows it, if that is of another micro-batch; others alone."""
    groups: list[tuple[Action, ...]] = []
    for action in row:
        before = groups[-1] if groups else ()
        fits = len(before) == 1 and before[0].kind == "F" and action.kind == "B"
        if fits and before[0].micro_batch != action.micro_batch:
            groups[-1] = (*before, action)
        else:
            groups.append((action,))
    return groups


def program_of(lists: list[list[Action]], places: list[Place]) -> list[list[Line]]:
    """The program of each rank. As in step 6's `add_messages`, the order is one in which all actions can be computed.

    A pair starts when both of its inputs have arrived, and ends with both outputs. Where all ranks would wait for one
    another, the first pair at the front of a list is taken apart, because the lists without pairs never block.
    """
    programs: list[list[Line]] = [[] for _ in lists]
    left, arrived = [deque(paired(row)) for row in lists], set()
    awaited = {consumer(action, places) for row in lists for action in row}
    while any(left):
        ready = [rank for rank, row in enumerate(left) if row and not {*row[0]} & awaited - arrived]
        if not ready:
            row = next(row for row in left if row and len(row[0]) == 2)
            first, second = row.popleft()
            row.extendleft([(second,), (first,)])
        for rank in ready:
            actions = left[rank].popleft()
            programs[rank].append(Line("compute", actions))
            for needs_it in (consumer(action, places) for action in actions):
                arrived.add(needs_it)
                if needs_it is not None and (peer := places[needs_it.stage].rank) != rank:
                    programs[rank].append(Line("send", (needs_it,), peer))
                    programs[peer].append(Line("receive", (needs_it,), rank))
    return programs


def execute(pipeline: Pipeline, program: list[Line], both: Callable[..., list]):
    """Replaces ListPipeline's `execute`, for such programs. `both` computes two actions at once."""
    box: dict[Action, tuple[Tensor, Pending]] = {}  # by the action that needs it: its input
    sent: dict[int, Pending] = defaultdict(Pending)  # by rank: the last send to it
    for verb, actions, peer in program:
        if verb == "compute":
            acts = []
            for action in actions:
                received, pending = box.pop(action, (None, Pending()))
                pending.wait()
                act = getattr(pipeline, ACTS[action.kind])
                acts.append(partial(act, action.micro_batch, action.stage, received))
            for action, output in zip(actions, both(*acts) if len(acts) == 2 else [acts[0]()], strict=True):
                if (needs_it := consumer(action, pipeline.places)) is not None:
                    box[needs_it] = output, Pending()
        elif verb == "send":
            sent[peer].wait()
            sent[peer] = exchange([(box.pop(actions[0])[0], peer)], [], pipeline.group)
        else:
            buffer = pipeline.buffer(actions[0].micro_batch)
            box[actions[0]] = buffer, exchange([], [(buffer, peer)], pipeline.group)
    for pending in sent.values():
        pending.wait()
