"""Grows the batch (`--batch-ramp START,STEPS`) from START sequences to --global-batch-size during STEPS steps.

Early in training the gradients of all sequences point in similar directions, so a small batch is enough; later they are
mostly noise, which a large batch averages out (McCandlish et al. 2018). DeepSeek-V3 grows from 3072 to 15360 sequences
(section 4.2). With k = batch / START, step t < STEPS (from 0) takes the next

    START (1 + floor(t (k - 1) / STEPS))    sequences of the data; from STEPS on, all k START

Each size is a multiple of START, which the ranks of dp share in whole micro-batches. Tensors keep the shapes of a full
batch: only the first sequences of a rank's share are real, and the others are not computed. In step 2, `mine` would be
computed anew in each step, from the number of sequences that `data.batch` returns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.data import shuffled
from common.model import IGNORE
from extras.variants import Parts
from extras.variants.record import SET, Refusal


def sizes(config: Any) -> list[int]:
    """Returns the number of sequences of each step of the ramp, then that of all later steps. Raises UserError."""
    words = config.batch_ramp.split(",")
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"--batch-ramp {config.batch_ramp}: write sequences and steps, like 8,100")
    start, steps = map(int, words)
    if config.global_batch_size % start or start == config.global_batch_size:
        raise UserError(f"--batch-ramp {config.batch_ramp}: {start} must be less than, and divide, --global-batch-size")
    k = config.global_batch_size // start
    return [start * (1 + t * (k - 1) // steps) for t in range(steps)] + [config.global_batch_size]


class Ramp:
    """Provides the batch of each step, in which only the first `real` micro-batches of a rank have sequences."""

    def __init__(self, config: Any, parts: Parts):
        self.config, self.parts, self.sizes = config, parts, sizes(config)
        self.dp, self.scale, self.progress = parts.mesh["dp"].size, 1.0, parts.progress
        self.program = getattr(parts.pipeline, "program", ())

    def size(self, step: int) -> int:
        """Returns the number of sequences of a step."""
        return self.sizes[min(step, len(self.sizes) - 1)]

    def read(self, step: int) -> tuple[Tensor, Tensor]:
        """Replaces `Data.batch`: int64 [global batch, seq], where each rank's share begins with the real sequences."""
        data, size, first = self.parts.data, self.size(step), sum(map(self.size, range(step)))
        places = [divmod(place, data.n_train) for place in range(first, first + size)]
        rows = data.read([shuffled(data.n_train, data.seed, epoch)[place] for epoch, place in places])
        tokens, targets = (x.unflatten(0, (self.dp, -1)) for x in rows)
        empty = tokens[:, :1].expand(-1, (self.config.global_batch_size - size) // self.dp, -1)
        both = (tokens, empty), (targets, torch.full_like(empty, IGNORE))
        return tuple(torch.cat(parts, 1).flatten(0, 1) for parts in both)

    def begin(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Wraps `read` and --prefetch: count the real micro-batches of the step that begins."""
        self.real = self.size(step) // self.dp // self.config.micro_batch_size
        before, self.scale = self.scale, self.config.global_batch_size / self.size(step)
        self.parts.scale_added_losses(self.scale / before)  # a step adds the mean of its micro-batches' losses
        return read(step)

    def forward(self, model: Callable, *inputs: Tensor) -> Tensor:
        """Wraps the model's forward: in training, a micro-batch without sequences is not computed."""
        if torch.is_grad_enabled() and self.progress.now >= self.real:
            return torch.zeros((), device=inputs[0].device, requires_grad=True)
        return model(*inputs)

    def step(self, run: Callable, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        """Wraps a pipeline's step: run only the real micro-batches, also in the list of actions."""
        if self.program:
            self.parts.pipeline.program = [line for line in self.program if line.action.micro_batch < self.real]
        return run(xs[: self.real], ys[: self.real], n_targets)

    def sums(self, begin: Callable, _n: int):
        """Wraps `sync.begin`: expect only the real micro-batches."""
        begin(self.real)

    def record(self, plain: Callable, step: int, _tokens: int, **numbers: float):
        """Wraps `run.record`: count only the tokens of real sequences."""
        plain(step, self.size(step) * self.parts.model.config.seq_len, **numbers)


@dataclass
class Flags:
    """Batches that grow."""

    batch_ramp: str = ""  # START,STEPS: sequences of the first step, and steps until --global-batch-size; default: none


TRIED = dict(batch_ramp="4,2")
COMPUTED = True
BESIDE = dict(global_batch_size=8, steps=3)
REFUSES = [Refusal(dict(batch_ramp=SET, dry_run=SET), "a dry run counts one step of the full batch; leave one out")]


def check(config: Any, world: int):
    """Every batch must be a multiple of dp x --micro-batch-size. Raises UserError."""
    if not config.batch_ramp:
        return
    dp = world // math.prod(getattr(config, dim, 1) for dim in ("pp", "cp", "tp"))
    if sizes(config)[0] % (dp * config.micro_batch_size):
        ranks = f"{dp} ranks of dp x --micro-batch-size {config.micro_batch_size}"
        raise UserError(f"--batch-ramp {config.batch_ramp}: its first number must be a multiple of the {ranks}")


def attach(config: Any, parts: Parts) -> Ramp | None:
    """Let the ramp decide the size of each batch."""
    if not config.batch_ramp:
        return None
    ramp = Ramp(config, parts)
    parts.instead(parts.data, "batch", ramp.read, by=__name__)
    parts.around(parts.data, "batch", ramp.begin, by=__name__)
    parts.around(parts.run, "record", ramp.record, by=__name__)
    if parts.sync is not None:
        parts.around(parts.sync, "begin", ramp.sums, by=__name__)
    if parts.pipeline is not None:
        parts.around(parts.pipeline, "step", ramp.step, by=__name__)
    else:
        parts.around(parts.model, "forward", ramp.forward, by=__name__)
    return ramp
