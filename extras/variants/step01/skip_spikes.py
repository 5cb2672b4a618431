"""Steps that stand out are skipped (`--skip-spikes K`): loss or gradient norm exceeds K times its running median.

Now and then the gradient of a batch throws the weights far off (Chowdhery et al. 2022, "PaLM", section 5.1, went back
and left such batches out). Spikes enter the medians, too: what lasts becomes normal, and training continues.

The cause may lie some steps before the spike. With `--roll-back N` a rank copies what it updates, masters and moments,
every N steps (and when a run begins or resumes). At a spike it restores the copy and continues with the next batch, so
all batches since the copy are left out, as in PaLM. The copy takes their memory once more.

In step 1, `optimizer.step` would stand under `if not spikes.is_spike(loss, norm):`.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common import UserError
from extras.variants import Parts

WINDOW, ENOUGH = 32, 8  # steps that a median looks back on at most, and at least


class Past:
    """A copy of what this rank's update changes: masters, and what the rule keeps of each."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.step = optimizer, -1  # before the update of which step the copy was made
        self.copies: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def kept(self, master: Tensor) -> dict[str, Tensor]:
        """What the rule keeps, by kind; nothing before its first update."""
        state = self.optimizer.torch_optimizer.state.get(master, {})
        return {kind: value for kind, value in state.items() if isinstance(value, Tensor)}

    def copy(self, step: int):
        """Make a copy."""
        self.step = step
        for name, master in self.optimizer.masters.items():
            more = {kind: value.clone() for kind, value in self.kept(master).items()}
            self.copies[name] = master.detach().clone(), more

    def put_back(self):
        """Restore the copy. Moments that did not exist then are zero, as they begin."""
        for name, master in self.optimizer.masters.items():
            values, more = self.copies[name]
            master.detach().copy_(values)
            for kind, value in self.kept(master).items():
                value.copy_(more[kind]) if kind in more else value.zero_()


class Spikes:
    """`recent`: loss and gradient norm of the last steps, which a resumed run must know."""

    def __init__(self, factor: float, every: int = 0, past: Past | None = None):
        self.factor, self.recent, self.skipping = factor, [], False
        self.every, self.past, self.now, self.back = every, past, 0, -1  # the last two: this step, the last one undone

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
        self.skipping, self.now = finite and self.is_spike(loss, grad_norm), step

    def record(self, plain: Callable, step: int, tokens: int, **numbers: float):
        """Around `run.record`."""
        note = dict(skipped=1) if self.skipping else {}
        plain(step, tokens, **numbers, **note, **dict(back_to=self.past.step) if note and self.every else {})

    def update(self, plain: Callable):
        """Around the rule's own step, which may be left out; gradients are freed all the same.

        Offloading calls it once a unit: the copy is made, and put back, at the first call of a step.
        """
        if not self.skipping:
            if self.every and self.past.step < self.now and (self.past.step < 0 or self.now % self.every == 0):
                self.past.copy(self.now)
            plain()
        elif self.every and self.back < self.now and self.past.step >= 0:
            self.back = self.now
            self.past.put_back()

    def state(self) -> list:
        """What a checkpoint keeps: the numbers of the last steps."""
        return self.recent

    def restore(self, state: list):
        """Restore them from a checkpoint."""
        self.recent = state


@dataclass
class Flags:
    """Spikes."""

    skip_spikes: float = 0.0  # skip a step whose loss or gradient norm exceeds K x its running median; 0: never
    roll_back: int = 0  # steps between copies of the state, to the last of which a spike goes back; 0: it stays


TRIED = dict(skip_spikes=1.5, roll_back=1)
COMPUTED = True
BESIDE = dict(steps=3)
NEEDS = [("roll_back", "skip_spikes")]


def check(config: Any, world: int):
    """Raises UserError."""
    if not (config.skip_spikes == 0 or config.skip_spikes > 1):
        raise UserError(f"--skip-spikes {config.skip_spikes:g}: half of all steps exceed the median; use 3, say, or 0")


def attach(config: Any, parts: Parts) -> Spikes | None:
    """Look at loss and norm before the update."""
    if not config.skip_spikes:
        return None
    spikes = Spikes(config.skip_spikes, config.roll_back, Past(parts.optimizer))
    parts.around(parts.run, "require_finite", spikes.require_finite, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", spikes.update, by=__name__)
    parts.around(parts.run, "record", spikes.record, by=__name__)
    return spikes
