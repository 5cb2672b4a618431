"""Steps that stand out are left out (`--skip-spikes K`): loss or gradient norm exceeds K times its running median.

A batch now and then has a gradient that throws the weights far off (Chowdhery et al. 2022, "PaLM", section 5.1, went
back and left such batches out). Spikes enter the medians too: what lasts becomes normal, and training goes on.

In step 1, `optimizer.step` would stand under `if not spikes.is_spike(loss, norm):`. From outside, the update waits for
`run.record`, which comes right behind it and knows both numbers.
"""

import math
import statistics
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from common import UserError
from variants.fp16 import skip_update

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
        self.factor, self.recent = factor, []

    def is_spike(self, *values: float) -> bool:
        """Whether one of the values exceeds `factor` times its median over the last steps."""
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= ENOUGH
        self.recent = [*self.recent, values][-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))


def attach(config: Any, parts: SimpleNamespace):
    """Put the update off until its numbers are known; they are the same on all ranks, and so is what follows."""
    if not config.skip_spikes:
        return
    parts.spikes, optimizer, run, put_off = Spikes(config.skip_spikes), parts.optimizer, parts.run, []
    update, plain = optimizer.step, run.record

    def record(step: int, tokens: int, **numbers: float):
        lr, factor = put_off.pop()
        finite = math.isfinite(numbers["grad_norm"])  # else it is --dtype fp16 that skips the update
        if finite and parts.spikes.is_spike(numbers["loss"], numbers["grad_norm"]):
            skip_update(optimizer, update, lr)
            numbers["skipped"] = 1
        else:
            update(lr, factor)
        plain(step, tokens, **numbers)

    optimizer.step = lambda lr, factor: put_off.append((lr, factor))
    run.record = record


def state(_config: Any, parts: SimpleNamespace) -> list | None:
    """What a checkpoint keeps: the numbers of the last steps."""
    return parts.spikes.recent if hasattr(parts, "spikes") else None


def restore(_config: Any, parts: SimpleNamespace, found: list | None):
    """Take them again."""
    if found is not None and hasattr(parts, "spikes"):
        parts.spikes.recent = found
