"""Schedules as data: what is needed to draw a schedule, to check it, and to run it by step 6's
`ListPipeline`.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from common.comm import Mesh
from common.model import Decoder
from common.schedules import (
    COSTS,
    add_messages,
    afab,
    interleaved,
    one_f_one_b,
    round_robin,
)
from step06_pipeline import Config, ListPipeline, Stage, count_micro_batches


class Order(NamedTuple):
    """A schedule for any number of ranks p and of micro-batches m."""

    actions: Callable  # (p, m, v, rank) -> the rank's list
    costs: dict[str, float]  # units of time that an action of each kind takes
    v: int = 1  # stages on each rank
    ranks_of_stages: Callable = round_robin  # (p, v) -> the rank of each stage

    def lists(self, p: int, m: int) -> tuple[list, list]:
        """Each rank's list, and the rank of each stage. (A single rank has a single stage.)"""
        v = self.v if p > 1 else 1
        lists = [self.actions(p, m, v, rank) for rank in range(p)]
        return lists, self.ranks_of_stages(p, v)


ORDERS = {  # by --schedule; a technique adds its own
    "1f1b": Order(one_f_one_b, COSTS),
    "afab": Order(afab, COSTS),
    "interleaved": Order(interleaved, COSTS, 2),
}


class OrderedPipeline(ListPipeline):
    """Runs the lists of this --schedule. A subclass says what a stage is, and computes its own
    kinds of actions.
    """

    stage_type = Stage

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, positions: Tensor):
        """As `Pipeline`."""
        order = ORDERS[config.schedule]
        lists, ranks = order.lists(config.pp, count_micro_batches(config, mesh["dp"]))
        programs = add_messages(lists, ranks, order.costs)
        super().__init__(config, model, mesh, positions, programs, ranks)
        for number, stage in self.stages.items():
            self.stages[number] = self.stage_type(model, stage.layers, positions, number)
