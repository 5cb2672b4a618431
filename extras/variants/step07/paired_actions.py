"""A library for ep_overlap.py: pipelines that compute a forward and a backward of their lists in pairs."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from common.schedules import Action, Place, consumer
from step06_pipeline import Instruction, Pipeline


def paired(row: list[Action]) -> list[tuple[Action, ...]]:
    """Group a rank's actions: each F with the B that follows it, if that is of another micro-batch; others alone."""
    fits = [a.kind == "F" and b.kind == "B" and a.micro_batch != b.micro_batch for a, b in pairwise(row)]
    first = {i for i, both in enumerate(fits) if both}
    return [tuple(row[i : i + 1 + (i in first)]) for i in range(len(row)) if i - 1 not in first]


def program_of(lists: list[list[Action]], places: list[Place]) -> tuple[list[list[Instruction]], list[set[Action]]]:
    """Like step 6's `add_messages`, with pairs -> each rank's program, and the forwards that begin its pairs.

    A pair starts when both of its inputs have arrived, and its outputs are sent when both are computed. If all ranks
    would wait for one another, the first pair at the front of a list is split: without pairs, lists never block.
    """
    programs: list[list[Instruction]] = [[] for _ in lists]
    left, arrived, begin = [deque(paired(row)) for row in lists], set(), [set() for _ in lists]
    awaited = {consumer(action, places) for row in lists for action in row}
    while any(left):
        ready = [rank for rank, row in enumerate(left) if row and not {*row[0]} & awaited - arrived]
        if not ready:
            row = next(row for row in left if row and len(row[0]) == 2)
            first, second = row.popleft()
            row.extendleft([(second,), (first,)])
        for rank in ready:
            actions = left[rank].popleft()
            begin[rank].update(actions[:-1])
            programs[rank] += [Instruction("compute", action) for action in actions]
            for needs_it in (consumer(action, places) for action in actions):
                arrived.add(needs_it)
                if needs_it is not None and (peer := places[needs_it.stage].rank) != rank:
                    programs[rank].append(Instruction("send", needs_it, peer))
                    programs[peer].append(Instruction("receive", needs_it, rank))
    return programs, begin


class InPairs:
    """A view of a pipeline for `ListPipeline.execute`: the forward of a pair waits for its backward.

    `both` runs two functions, and returns what they return. All other attributes are those of the pipeline.
    """

    def __init__(self, pipeline: Pipeline, both: Callable, program: list[Instruction], begin: set[Action]):
        self.pipeline, self.both, self.program, self.begin = pipeline, both, program, begin
        self.waiting: Callable | None = None  # the forward that waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def forward(self, i: int, stage: int, x: Tensor | None) -> Tensor:
        """As `Pipeline.forward`, but that of a pair returns a tensor whose values the next `backward` computes."""
        act = partial(self.pipeline.forward, i, stage, x)
        if Action("F", i, stage) not in self.begin:
            return act()
        self.waiting, self.output = act, self.pipeline.buffer(i)
        return self.output

    def backward(self, i: int, stage: int, dy: Tensor | None) -> Tensor | None:
        """As `Pipeline.backward`, together with the forward that waits, if any."""
        act = partial(self.pipeline.backward, i, stage, dy)
        if self.waiting is None:
            return act()
        self.output.data, dx = self.both(self.waiting, act)  # `.data` accepts any shape; a loss is a scalar
        self.waiting = None
        return dx
