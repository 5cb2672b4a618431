"""Skips updates whose loss or gradient norm exceeds K times its running median (`--skip-spikes K`).

Occasionally the gradient of one batch damages the weights (Chowdhery et al. 2022, "PaLM", section 5.1, restarted from
an earlier checkpoint and skipped such batches). All ranks know the same loss and norm, so they decide alike. Spikes
count in the medians, too, so training continues if they last.

In step 1, `optimizer.step` would follow `if not spikes.is_spike(loss, norm):`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from extras.variants import Parts
from extras.variants.record import Refusal

WINDOW, ENOUGH = 32, 8  # the largest and the smallest number of steps for a median


class Spikes:
    """Decides which updates are skipped. `recent` has loss and gradient norm of the last steps, the newest last."""

    def __init__(self, factor: float):
        self.factor, self.recent, self.skipping = factor, [], False

    def is_spike(self, *values: float) -> bool:
        """Whether one of the values exceeds `factor` times its median over the last steps."""
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= ENOUGH
        self.recent = [*self.recent, values][-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Wraps `run.require_finite`: decide about this step's update."""
        plain(step, loss=loss, grad_norm=grad_norm)
        finite = math.isfinite(grad_norm)  # else --dtype fp16 skips the update
        self.skipping = finite and self.is_spike(loss, grad_norm)

    def update(self, plain: Callable):
        """Wraps the update rule's step: leave it out at a spike."""
        if not self.skipping:
            plain()

    def record(self, plain: Callable, step: int, tokens: int, **numbers: float):
        """Wraps `run.record`: note a skipped step."""
        plain(step, tokens, **numbers, **(dict(skipped=1) if self.skipping else {}))

    def state(self) -> list:
        """For a checkpoint: the numbers of the last steps."""
        return self.recent

    def restore(self, state: list):
        """Restore them from a checkpoint."""
        self.recent = state


@dataclass
class Flags:
    """Spikes."""

    skip_spikes: float = 0.0  # skip a step whose loss or gradient norm exceeds K x its running median; 0: never


TRIED = dict(skip_spikes=1.5)
COMPUTED = True
BESIDE = dict(steps=3)
REFUSES = [Refusal(dict(skip_spikes=lambda k: 0 < k <= 1), "half of all steps exceed the median; use 3, or 0", None)]


def attach(config: Any, parts: Parts) -> Spikes | None:
    """Decide before each update whether it is skipped."""
    if not config.skip_spikes:
        return None
    spikes = Spikes(config.skip_spikes)
    parts.around(parts.run, "require_finite", spikes.require_finite, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", spikes.update, by=__name__)
    parts.around(parts.run, "record", spikes.record, by=__name__)
    return spikes
