"""Skips updates whose loss or gradient norm exceeds K times its running median (`--skip-spikes K`).

Occasionally the gradient of one batch damages the weights (Chowdhery et al. 2022, "PaLM", section 5.1, restarted from
an earlier checkpoint and skipped such batches). Spikes count in the medians, too, so training continues if they last.

The cause may lie some steps before the spike. With `--roll-back N`, a rank copies the masters and moments that it
updates, after its first update and then every N steps. At a spike it restores the copy and continues with the next
batch, so all batches since the copy are left out, as in PaLM. The copy takes the memory of masters and moments once
more: with AdamW 12 bytes for each parameter that the rank updates, which the dry run counts.

In step 1, `optimizer.step` would follow `if not spikes.is_spike(loss, norm):`.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from extras.variants import Parts
from extras.variants.record import Refusal

WINDOW, ENOUGH = 32, 8  # the largest and the smallest number of steps for a median


class Past:
    """A copy of the masters and moments that this rank updates, made before the update of `step` (-1: no copy)."""

    def __init__(self, optimizer: Any, every: int):
        self.optimizer, self.every, self.step = optimizer, every, -1
        self.copies: dict[tuple[str, str], Tensor] = {}  # by name and kind

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yields all masters, and the tensors that the update rule keeps for each, which its first update creates."""
        for name, master in self.optimizer.masters.items():
            held = dict(master=master.detach()) | self.optimizer.torch_optimizer.state.get(master, {})
            yield from (((name, kind), value) for kind, value in held.items() if isinstance(value, Tensor))

    def keep(self, step: int):
        """Before `step`, copy the state if it is due, into the memory of the last copy."""
        if self.step < 0 or step % self.every == 0:
            self.step = step
            for key, value in self.tensors():
                self.copies.setdefault(key, torch.empty_like(value)).copy_(value)

    def restore(self):
        """Return to the last copy, if there is one."""
        for key, value in self.tensors() if self.step >= 0 else ():
            value.copy_(self.copies[key]) if key in self.copies else value.zero_()  # moments begin as zeros


class Spikes:
    """Decides which updates are skipped. `recent` has loss and gradient norm of the last steps, the newest last."""

    def __init__(self, factor: float, past: Past | None = None):
        self.factor, self.past, self.recent, self.skipping = factor, past, [], False

    def is_spike(self, *values: float) -> bool:
        """Whether one of the values exceeds `factor` times its median over the last steps."""
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= ENOUGH
        self.recent = [*self.recent, values][-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Wraps `run.require_finite`. The numbers are the same on all ranks, so all ranks decide alike."""
        plain(step, loss=loss, grad_norm=grad_norm)
        finite = math.isfinite(grad_norm)  # else --dtype fp16 skips the update
        self.skipping = finite and self.is_spike(loss, grad_norm)
        if self.past is not None and self.skipping:
            self.past.restore()

    def update(self, plain: Callable):
        """Wraps the update rule's step: leave it out at a spike."""
        if not self.skipping:
            plain()

    def record(self, plain: Callable, step: int, tokens: int, **numbers: float):
        """Wraps `run.record`: note a skipped step, or keep what an update has changed."""
        back = dict(back_to=self.past.step) if self.past is not None and self.past.step >= 0 else {}
        plain(step, tokens, **numbers, **(dict(skipped=1) | back if self.skipping else {}))
        if self.past is not None and not self.skipping:
            self.past.keep(step + 1)

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
    roll_back: int = 0  # copy the state every so many steps (12 bytes a parameter); a spike restores it; 0: no copies


TRIED = dict(skip_spikes=1.5, roll_back=1)
COMPUTED = True
BESIDE = dict(steps=3)
NEEDS = [("roll_back", "skip_spikes")]
HALF = "half of all steps exceed the median; use 3, say, or 0"
REFUSES = [Refusal(dict(skip_spikes=lambda k: 0 < k <= 1), HALF, None)]


def attach(config: Any, parts: Parts) -> Spikes | None:
    """Decide before each update whether it is skipped."""
    if not config.skip_spikes:
        return None
    spikes = Spikes(config.skip_spikes, Past(parts.optimizer, config.roll_back) if config.roll_back else None)
    parts.around(parts.run, "require_finite", spikes.require_finite, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", spikes.update, by=__name__)
    parts.around(parts.run, "record", spikes.record, by=__name__)
    return spikes
