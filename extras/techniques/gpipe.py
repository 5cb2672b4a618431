"""GPipe (--schedule gpipe): all forward, all backward; ranks recompute while they would be idle.

F, the forward of a micro-batch, keeps only the stage's input. R runs the same forward again, and
keeps the graph for B, the backward (Huang et al. 2019, "GPipe", section 2.3). R needs nothing from
the next stage, so a rank runs it before dy arrives. With 4 ranks and 4 micro-batches (F is a digit,
R a dash, B a pair of letters, and a dot is idle time):

    rank 0   0123-.........dd-cc-bb-aa
    rank 1   .0123-......dd-cc-bb-aa..
    rank 2   ..0123-...dd-cc-bb-aa....
    rank 3   ...0123-dd-cc-bb-aa......

LAW. If F, R and B take f, r and b, a rank is idle for (p-1) (f + b) in a step. With --schedule afab
--recompute full, R waits for dy, too, so a rank is idle for (p-1) (f + r + b). Above, 9 of 25 units
are idle; then, 12 of 28 would be.

MEMORY. A rank holds the inputs of its stage for m micro-batches, and the graph of one. (--recompute
full holds the inputs of all *layers* for m micro-batches, and the graph of one layer. With both,
each layer runs forward three times, and only one micro-batch has its layers' inputs in memory.)

Run it:    torchrun --nproc_per_node=4 -m extras step06_pipeline.py --pp 4 --schedule gpipe
You should see step 1's losses.
"""

import torch
from torch import Tensor
from torch.profiler import record_function

from common.schedules import Action
from extras.techniques._orders import ORDERS, Order, OrderedPipeline
from step06_pipeline import SCHEDULES, Stage


def gpipe(p: int, m: int, v: int, rank: int) -> list[Action]:
    """All forwards; then R and B of each micro-batch, the last one first."""
    actions = [Action("F", i, rank) for i in range(m)]
    for i in reversed(range(m)):
        actions += [Action("R", i, rank), Action("B", i, rank)]
    return actions


class ForwardTwice(Stage):
    """A stage whose first forward keeps no graph."""

    def begin(self, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor):
        """A new step."""
        super().begin(xs, ys, n_targets)
        self.inputs: dict[int, Tensor | None] = {}  # micro-batch -> the input (None: its tokens)

    def forward_only(self, i: int, x: Tensor | None) -> Tensor:
        """F: keep the input, and no graph."""
        self.inputs[i] = x
        with torch.no_grad(), record_function(f"F{i}.{self.number}"):
            return self.compute_output(self.xs[i] if self.is_first else x, self.ys[i])

    def repeat(self, i: int):
        """R: the usual forward, which keeps the graph and adds to the loss."""
        self.forward(i, self.inputs.pop(i))


class GPipe(OrderedPipeline):
    """Runs F, R and B."""

    stage_type = ForwardTwice

    def compute(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Run an action."""
        stage = self.stages[action.stage]
        if action.kind == "F":
            return stage.forward_only(action.micro_batch, received)
        if action.kind == "R":
            return stage.repeat(action.micro_batch)
        return super().compute(action, received)


SCHEDULES["gpipe"] = GPipe
ORDERS["gpipe"] = Order(gpipe, {"F": 1, "R": 1, "B": 2})
