"""Gradients that come K updates late (`--stale K`): w(t+1) = w(t) - lr g(w(t-K)).

This is what training without waiting computes. In asynchronous data parallelism a gradient arrives after other ranks
have moved the weights (Dean et al. 2012, "DistBelief"); in a pipeline of p stages that is never flushed, PipeDream with
vertical sync, all gradients are p - 1 updates late (Narayanan et al. 2019, section 3.3). No rank is ever idle. The
price is shown here: a late gradient belongs to weights that have since moved.

The first K steps update nothing. Clipping belongs to the step that computed a gradient, the learning rate to the step
that applies it. A rank holds K more gradients of what it updates; checkpoints do not hold them. In step 1
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
    """Around the update rule's step: exchange each gradient for the one that is `late` steps older, or for none."""
    for name, master in masters.items():
        if master.grad is not None:  # offloading updates some masters at a time
            waiting[name].append(master.grad.clone())  # its buffer is used again
            master.grad = waiting[name].pop(0) if len(waiting[name]) > late else None
    plain()


@dataclass
class Flags:
    """Late gradients."""

    stale: int = 0  # by how many updates each gradient is late; 0: it is not


TRIED = dict(stale=1)
COMPUTED = True
BESIDE = dict(steps=3)
REFUSES = [Refusal(dict(stale=SET, resume=SET), "no checkpoint holds the gradients that are under way; leave one out")]


def attach(config: Any, parts: Parts):
    """Keep each gradient in a queue before the update."""
    if config.stale:
        call = partial(update, config.stale, parts.optimizer.masters, defaultdict(list))
        parts.around(parts.optimizer.torch_optimizer, "step", call, by=__name__)
