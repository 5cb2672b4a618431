"""Steps that stand out are skipped (`--skip-spikes K`): loss or gradient norm exceeds K times its running median.

Now and then the gradient of a batch throws the weights far off (Chowdhery et al. 2022, "PaLM", section 5.1, went back
and left such batches out). Spikes enter the medians, too: what lasts becomes normal, and training continues.

The cause may lie some steps before the spike. With `--roll-back N` a rank copies what it updates, masters and moments,
every N steps (and when a run begins or resumes). At a spike it restores the copy and continues with the next batch, so
all batches since the copy are left out, as in PaLM. The copy takes the memory of masters and moments once more.

In step 1, `optimizer.step` would stand under `if not spikes.is_spike(loss, norm):`.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common import UserError
from extras.variants import Parts

WINDOW, ENOUGH = 32, 8  # the largest and the smallest number of steps for a median


class Past:
    """A copy of what this rank's update changes, made before the update of `step` (-1: there is none)."""

    def __init__(self, optimizer: Any):
        self.optimizer, self.step = optimizer, -1
        self.copies: dict[tuple[str, str], Tensor] = {}  # by name and kind

    def tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Masters, and the tensors that the update rule keeps for each; none of these before its first update."""
        for name, master in self.optimizer.masters.items():
            held = dict(master=master.detach()) | self.optimizer.torch_optimizer.state.get(master, {})
            yield from (((name, kind), value) for kind, value in held.items() if isinstance(value, Tensor))

    def copy(self, step: int):
        """Make a copy."""
        self.step, self.copies = step, {key: value.clone() for key, value in self.tensors()}

    def put_back(self):
        """Restore the copy. Moments that did not exist then become zeros, which they begin as."""
        for key, value in self.tensors():
            value.copy_(self.copies[key]) if key in self.copies else value.zero_()


class Spikes:
    """Decides which updates are skipped. `recent` has loss and gradient norm of the last steps, the newest last."""

    def __init__(self, factor: float, every: int = 0, past: Past | None = None):
        self.factor, self.recent, self.skipping = factor, [], False
        self.every, self.past, self.now = every, past, 0

    def is_spike(self, *values: float) -> bool:
        """Whether one of the values exceeds `factor` times its median over the last steps."""
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= ENOUGH
        self.recent = [*self.recent, values][-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Around `run.require_finite`. The numbers are the same on all ranks, so all ranks decide alike."""
        plain(step, loss=loss, grad_norm=grad_norm)
        finite = math.isfinite(grad_norm)  # else --dtype fp16 skips the update
        self.skipping, self.now = finite and self.is_spike(loss, grad_norm), step

    def update(self, plain: Callable):
        """Around the update rule's step. Offloading calls it once a unit; the first call in a step makes the copy."""
        if not self.skipping:
            if self.every and self.past.step < self.now and (self.past.step < 0 or self.now % self.every == 0):
                self.past.copy(self.now)
            plain()
        elif self.every and self.past.step >= 0:
            self.past.put_back()

    def record(self, plain: Callable, step: int, tokens: int, **numbers: float):
        """Around `run.record`."""
        back = dict(back_to=self.past.step) if self.every else {}
        plain(step, tokens, **numbers, **(dict(skipped=1) | back if self.skipping else {}))

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
    roll_back: int = 0  # steps between copies of the state, the last of which a spike restores; 0: no copies


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
