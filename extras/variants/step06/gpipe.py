"""GPipe (`--schedule gpipe`; Huang et al. 2019, section 2.3): all forward, all backward; ranks recompute while waiting.

F, the forward of a micro-batch, keeps only the stage's input. R runs forward again, and now keeps the graph for B,
the backward. R needs nothing from the next stage, so a stage runs it before dy arrives (here R is a dash):

    0123-.........dd-cc-bb-aa      rank 0 of 4, with 4 micro-batches. F is a number, B a letter, a dot is idle
    .0123-......dd-cc-bb-aa..
    ..0123-...dd-cc-bb-aa....
    ...0123-dd-cc-bb-aa......

If F, R and B take f, r and b, a rank is idle for (p-1) (f + b) in a step; with `--schedule afab --recompute full`,
where R waits for dy, for (p-1) (f + r + b). If f = r = 1, b = 2, p = 4 and m = 8, that is 22.0 % instead of 27.3 %.

A rank holds the inputs of its stage for all m micro-batches, and the graph of one. (`--recompute full` holds the inputs
of all layers, and the graph of one layer.) In step 6, `forward` would have a flag that says whether to keep the graph.
"""

from functools import partial
from typing import Any

from torch import Tensor

import step06_pipeline as step06
from common.schedules import SCHEDULES, Action, Schedule
from extras.variants import Parts
from extras.variants.record import Refusal


def gpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """Returns all forwards; then a second forward (R) and the backward (B) of each micro-batch, last one first."""
    again = [Action(kind, i, rank) for i in reversed(range(m)) for kind in "RB"]
    return [Action("F", i, rank) for i in range(m)] + again


class ForwardTwice:
    """Computes the actions F, a forward that keeps no graph, and R, a second forward that keeps the graph."""

    def __init__(self, parts: Parts):
        self.pipeline, self.progress = parts.pipeline, parts.progress
        self.inputs: dict[int, Tensor | None] = {}  # by micro-batch: the stage's input (None for tokens)

    def forward(self, i: int, stage: int, x: Tensor | None) -> Tensor:
        """F: run micro-batch i through the stage, and keep only the stage's input. `again` adds up the loss."""
        self.inputs[i], pipeline = x, self.pipeline
        x = pipeline.xs[i] if x is None else x
        y = step06.forward_stage(pipeline.model, pipeline.places[stage], x, pipeline.ys[i], pipeline.positions)
        return y.detach()

    def again(self, i: int, stage: int, _input: None):
        """R: run micro-batch i through the stage a second time, and keep the graph for B."""
        plain = partial(step06.Pipeline.forward, self.pipeline)
        self.progress.act(plain, i, stage, self.inputs.pop(i))


step06.ACTS["R"] = "again"
SCHEDULES["gpipe"] = lambda config: Schedule(gpipe, costs=dict(F=1, R=1, B=2))
REFUSES = [Refusal(dict(schedule=("gpipe",), recompute=("full",)), "both run forward again; leave one out", None)]


def attach(config: Any, parts: Parts):
    """If the schedule runs forward twice, let the first (F) keep no graph, and add a method for the second (R)."""
    if "R" in parts.kinds:
        twice = ForwardTwice(parts)
        parts.instead(parts.pipeline, "forward", twice.forward, by=__name__)
        parts.pipeline.again = twice.again
