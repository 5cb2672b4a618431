"""Batches that grow (`--batch-ramp START,STEPS`): from START sequences a step to --global-batch-size, in equal steps.

Early gradients of all sequences point alike, so a small batch learns as much from each token in less time; later ones
are mostly noise, which a large batch averages (McCandlish et al. 2018). DeepSeek-V3 grows from 3072 to 15360 sequences
(section 4.2), Llama 3 from 4M to 16M tokens. With k = batch / START, step t < STEPS (from 0) has the data's next

    START (1 + floor(t (k - 1) / STEPS))    sequences; from STEPS on, all k START

Each size is a multiple of START, which the ranks of dp share in whole micro-batches. The shares of a full batch stay:
the first sequences of a rank's share are real, and the other places are not computed.

In step 2, `mine` would be computed anew in each step, from the sequences that `data.batch` returns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import step06_pipeline as step06
from common import UserError
from common.data import shuffled
from common.model import IGNORE
from common.schedules import SCHEDULES
from extras.variants import Parts
from extras.variants.record import HAS, SET, Refusal
from step06_pipeline import ListPipeline, add_messages
from step07_moe_ep import MoE


def sizes(config: Any) -> list[int]:
    """Sequences of each step until the batch is full, and of all steps from then on. Raises UserError."""
    words = config.batch_ramp.split(",")
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"--batch-ramp {config.batch_ramp}: write sequences and steps, like 8,100")
    start, steps = map(int, words)
    if config.global_batch_size % start or start == config.global_batch_size:
        raise UserError(f"--batch-ramp {config.batch_ramp}: {start} must be less than, and divide, --global-batch-size")
    k = config.global_batch_size // start
    return [start * (1 + t * (k - 1) // steps) for t in range(steps)] + [config.global_batch_size]


class Ramp:
    """The batch of each step. `now`: how many of a rank's micro-batches are real in this one; `next`: the next one."""

    def __init__(self, config: Any, parts: Parts):
        self.config, self.parts, self.sizes = config, parts, sizes(config)
        self.dp, layers = parts.mesh["dp"].size, [one for one in parts.model.modules() if isinstance(one, MoE)]
        names = [(moe, name) for moe in layers for name in ("coeff", "z_coeff") if hasattr(moe, name)]
        self.coeffs = [(moe, name, getattr(moe, name)) for moe, name in names]

    def size(self, step: int) -> int:
        """Sequences of a step."""
        return self.sizes[min(step, len(self.sizes) - 1)]

    def read(self, step: int) -> tuple[Tensor, Tensor]:
        """Replaces `Data.batch`: int64 [global batch, seq], where each rank's share begins with the real sequences."""
        data, size, full = self.parts.data, self.size(step), self.config.global_batch_size
        first = sum(map(self.size, range(min(step, len(self.sizes))))) + max(0, step - len(self.sizes)) * full
        places = [divmod(place, data.n_train) for place in range(first, first + size)]
        rows = data.read([shuffled(data.n_train, data.seed, epoch)[place] for epoch, place in places])
        tokens, targets = (x.unflatten(0, (self.dp, -1)) for x in rows)
        empty = tokens[:, :1].expand(-1, (full - size) // self.dp, -1)
        both = (tokens, empty), (targets, torch.full_like(empty, IGNORE))
        return tuple(torch.cat(parts, 1).flatten(0, 1) for parts in both)

    def begin(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Around it, and around who reads ahead: a step begins."""
        self.now, self.next = self.size(step) // self.dp // self.config.micro_batch_size, 0
        scale = self.config.global_batch_size / self.size(step)  # each micro-batch adds its loss: of these, the mean
        for moe, name, coeff in self.coeffs:
            setattr(moe, name, coeff * scale)
        return read(step)

    def forward(self, model: Callable, *inputs: Tensor) -> Tensor:
        """Around the model's: in training, what is not real has no loss."""
        if torch.is_grad_enabled():
            self.next += 1
            if self.next > self.now:
                return torch.zeros((), device=inputs[0].device, requires_grad=True)
        return model(*inputs)

    def step(self, run: Callable, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        """Around a pipeline's: real micro-batches alone, in an order of work that is for so many."""
        pipeline = self.parts.pipeline
        if isinstance(pipeline, ListPipeline):
            lists, costs = step06.plan(self.config, self.now)[1], SCHEDULES[self.config.schedule](self.config).costs
            pipeline.program = add_messages(lists, pipeline.places, costs)[pipeline.group.rank]
        return run(xs[: self.now], ys[: self.now], n_targets)

    def sums(self, begin: Callable, _n: int):
        """Around `sync.begin`."""
        begin(self.now)

    def record(self, plain: Callable, step: int, _tokens: int, **numbers: float):
        """Around `run.record`: the tokens that are real."""
        plain(step, self.size(step) * self.parts.model.config.seq_len, **numbers)


@dataclass
class Flags:
    """Batches that grow."""

    batch_ramp: str = ""  # START,STEPS: sequences of the first step, and steps until --global-batch-size; default: none


TRIED = dict(batch_ramp="4,2")
COMPUTED = True
BESIDE = dict(global_batch_size=8, steps=3)
REFUSES = [
    Refusal(dict(batch_ramp=SET, dry_run=SET), "a dry run counts one step of the full batch; leave one out"),
    Refusal(
        dict(batch_ramp=SET, dtype=("fp16",), experts=HAS),
        "both scale the coefficients of the router's losses; use --dtype bf16 or fp32",
    ),
]


def check(config: Any, world: int):
    """Every size must be shared out, and be enough for the schedule. Raises UserError."""
    if not config.batch_ramp:
        return
    dp = world // math.prod(getattr(config, dim, 1) for dim in ("pp", "cp", "tp"))
    for size in sorted({*sizes(config)}):
        if size % (dp * config.micro_batch_size):
            ranks = f"{dp} ranks of dp x --micro-batch-size {config.micro_batch_size}"
            raise UserError(f"--batch-ramp {config.batch_ramp}: its first number must be a multiple of the {ranks}")
        if getattr(config, "pp", 1) > 1:
            step06.plan(config, size // dp // config.micro_batch_size)


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
    if parts.pipeline is None:
        parts.around(parts.model, "forward", ramp.forward, by=__name__)
    else:
        parts.around(parts.pipeline, "step", ramp.step, by=__name__)
    return ramp
