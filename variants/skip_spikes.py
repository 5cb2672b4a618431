"""Steps that stand out are left out (`--skip-spikes K`): loss or gradient norm exceeds K times its running median.

A batch now and then has a gradient that throws the weights far off (Chowdhery et al. 2022, "PaLM", section 5.1, went
back and left such batches out). Spikes enter the medians too: what lasts becomes normal, and training goes on.

In step 1, `optimizer.step` would stand under `if not spikes.is_spike(loss, norm):`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import UserError
from variants import Parts

WINDOW, ENOUGH = 32, 8  # steps that a median looks back on at most, and at least


@dataclass
class Flags:
    """Spikes."""

    skip_spikes: float = 0.0  # skip a step whose loss or gradient norm exceeds K x its running median; 0: never


def check(config: Any, world: int):
    """Raises UserError."""
    if not (config.skip_spikes == 0 or config.skip_spikes > 1):
        raise UserError(f"--skip-spikes {config.skip_spikes:g}: half of all steps exceed the median; use 3, say, or 0")


class Spikes:
    """`recent`: loss and gradient norm of the last steps, which a resumed run must know."""

    def __init__(self, factor: float):
        self.factor, self.recent, self.skipping = factor, [], False

    def is_spike(self, *values: float) -> bool:
        """Whether one of the values exceeds `factor` times its median over the last steps."""
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= ENOUGH
        self.recent = [*self.recent, values][-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Around `run.require_finite`. The numbers are the same on all ranks, and so is what follows."""
        plain(step, loss=loss, grad_norm=grad_norm)
        finite = math.isfinite(grad_norm)  # else it is --dtype fp16 that skips the update
        self.skipping = finite and self.is_spike(loss, grad_norm)

    def record(self, plain: Callable, step: int, tokens: int, **numbers: float):
        """Around `run.record`."""
        plain(step, tokens, **numbers, **dict(skipped=1) if self.skipping else {})

    def update(self, plain: Callable):
        """Around the rule's own step, which may be left out; gradients are freed all the same."""
        if not self.skipping:
            plain()

    def state(self) -> list:
        """What a checkpoint keeps: the numbers of the last steps."""
        return self.recent

    def restore(self, found: list):
        """Take them again."""
        self.recent = found


def attach(config: Any, parts: Parts) -> Spikes | None:
    """Look at loss and norm before the update."""
    if not config.skip_spikes:
        return None
    spikes = Spikes(config.skip_spikes)
    parts.around(parts.run, "require_finite", spikes.require_finite, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", spikes.update, by=__name__)
    parts.around(parts.run, "record", spikes.record, by=__name__)
    return spikes
