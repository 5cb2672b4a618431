"""Applies each gradient K updates late (`--stale K`): w(t+1) = w(t) - lr g(w(t-K)).

This is the update of training in which no rank waits. In asynchronous data parallelism a gradient arrives after other
ranks have updated the weights (Dean et al. 2012, "DistBelief"); in a pipeline of p stages that is never flushed,
PipeDream with vertical sync, all gradients are p - 1 updates late (Narayanan et al. 2019, section 3.3). No rank is ever
idle, but a late gradient was computed for weights that have changed since. This file shows what that costs.

The first K steps update nothing. A gradient is clipped in the step that computes it, and applied with the learning rate
of the step that uses it. A rank keeps K more gradients of what it updates; checkpoints do not contain them. In step 1
`Optimizer.step` would put the gradients into a queue and take the oldest.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from extras.variants import Parts
from extras.variants.record import SET, Refusal


def update(late: int, masters: dict[str, Tensor], waiting: dict[str, list[Tensor]], plain: Callable):
    """Wraps the update rule's step: replace each gradient by the one of `late` steps before, or by none."""
    for name, master in masters.items():
        if master.grad is not None:  # offloading updates only some masters at a time
            waiting[name].append(master.grad.clone())  # its buffer is reused
            master.grad = waiting[name].pop(0) if len(waiting[name]) > late else None
    plain()


@dataclass
class Flags:
    """Late gradients."""

    stale: int = 0  # number of updates by which each gradient is late


TRIED = dict(stale=1)
COMPUTED = True
BESIDE = dict(steps=3)
REFUSES = [Refusal(dict(stale=SET, resume=SET), "checkpoints do not contain the late gradients; leave one out")]


def attach(config: Any, parts: Parts):
    """Put each gradient into a queue before the update."""
    if config.stale:
        call = partial(update, config.stale, parts.optimizer.masters, defaultdict(list))
        parts.around(parts.optimizer.torch_optimizer, "step", call, by=__name__)
