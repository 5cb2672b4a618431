"""Gradients summed over ranks in fewer bits (`--compress`). It is lossy, and what is lost comes later.

What a rank has not sent it keeps, and adds to the next gradient before that is sent: "error feedback" (Seide et al.
2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019). So it is late, not lost.

    bf16   16 bits                                                      1/2 of the bytes of fp32
    int8   8 bits, and an fp32 scale for 256 values                     (1 + 4/256) / 4
    topk   the largest --topk-fraction of the values, with their places 2 x fraction; 1 loses nothing, and sends more

To add in so few bits would round at every rank, or overflow. So rank r receives shard r of everyone's gradient
(all-to-all) and adds up in full precision: a reduce-scatter, which is all that ZeRO needs. For an all-reduce, rank r
makes its shard of the sum narrow again for all to gather; what that loses, rank r keeps.

A sum is a generator: it yields each message that it has sent, and goes on when that has arrived. So backward goes on
while messages travel: a bucket's first message is waited for when the next bucket is sent, or at the end.

In step 2 `Compression.all_reduce` would stand in BucketSync.send, in step 3 `.reduce_scatter` in Zero1.reduce. What is
owed takes a gradient's memory on each rank, under ZeRO 2 and 3 too. Checkpoints hold it (extras/services/pieces.py).
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

import step02_ddp as step02
from common import UserError
from common.comm import Group, Pending, all_gather, all_to_all
from common.model import wide
from extras.variants import Parts
from extras.variants.step02.narrow import dequantise, pick, put_back, quantise
from step02_ddp import Bucket, BucketSync
from step03_zero import Unit

SINCE = step02.Config


@dataclass
class Flags:
    """Compression of gradients."""

    compress: Literal["none", "bf16", "int8", "topk"] = "none"  # lossy sums of gradients
    topk_fraction: float = 0.01  # share of the values that --compress topk sends


NEEDS = [("topk_fraction", "compress", "topk")]


def check(config: Any, world: int):
    """Raises UserError."""
    if config.compress == "none":
        return
    if not getattr(config, "zero", 0) and config.sync not in ("bucket", "overlap"):
        raise UserError(f"--compress {config.compress} works on buckets: use it with --sync bucket")
    if config.dtype == "fp16":
        raise UserError("--compress would carry an fp16 overflow on for ever: use --dtype bf16 or fp32")
    if not 0 < config.topk_fraction <= 1:
        raise UserError(f"--topk-fraction {config.topk_fraction:g} is a share: choose it above 0, and at most 1")


class Chain:
    """Messages that are sent one after another. `wait` ends them; `go_on` takes them to the next one."""

    def __init__(self, messages: Iterator[Pending]):
        self.messages, self.pending = messages, next(messages, None)

    def go_on(self):
        """Wait for the message under way, and send the next."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = next(self.messages, None)

    def wait(self):
        """Wait for all that is left."""
        while self.pending is not None:
            self.go_on()


class Compression:
    """Sums in fewer bits. `owed`: what is still to be sent, [n shards, length], of each bucket or unit."""

    def __init__(self, config: Any, sync: Any):
        self.sync = sync
        self.narrow, self.widen = {
            "bf16": (Tensor.bfloat16, lambda message, length, dtype: message.to(dtype)),
            "int8": (quantise, dequantise),
            "topk": (partial(pick, fraction=config.topk_fraction), put_back),
        }[config.compress]
        self.owed: dict[Bucket | Unit, Tensor] = {}
        self.last = Chain(iter(()))

    def summed(self, key: Bucket | Unit, values: Tensor, group: Group) -> Generator[Pending, None, Tensor]:
        """values [n, length], row r for rank r -> this rank's row of the sum."""
        values = values.to(wide(values.dtype)) + self.owed.get(key, 0.0)
        length, dtype = values.shape[-1], values.dtype
        message = self.narrow(values)
        self.owed[key] = values - self.widen(message, length, dtype)
        received = torch.empty_like(message)
        yield all_to_all(received, message, group)
        return self.widen(received, length, dtype).sum(0)

    def all_reduce(self, bucket: Bucket) -> Iterator[Pending]:
        """Replace a bucket's gradients by their sum; yields each message that it has sent."""
        flat, group = bucket.flat, bucket.group
        rows = F.pad(flat, (0, -len(flat) % group.size)).view(group.size, -1)
        total = yield from self.summed(bucket, rows, group)
        message = self.narrow(total[None])
        self.owed[bucket][group.rank] += total - self.widen(message, len(total), total.dtype)[0]
        everyone = message.new_empty(group.size, *message.shape[1:])
        yield all_gather(everyone.view(-1), message.view(-1), group)
        flat.copy_(self.widen(everyone, len(total), total.dtype).flatten()[: len(flat)])

    def reduce_scatter(self, unit: Unit) -> Iterator[Pending]:
        """Fill in this rank's shard of the sum of a unit's gradient; yields the message that it has sent."""
        rows = unit.gradient.view(unit.group.size, -1)
        unit.reduced_shard = yield from self.summed(unit, rows, unit.group)

    def send(self, plain: Callable, bucket: Bucket):
        """Around a bucket's sum. The bucket before has had this one's time for its first message."""
        if bucket.group.size == 1:
            return plain(bucket)
        self.last.go_on()
        self.last = Chain(self.all_reduce(bucket))
        self.sync.pending.append(self.last)

    def reduce(self, plain: Callable, unit: Unit) -> Chain | Pending:
        """Around a unit's."""
        return Chain(self.reduce_scatter(unit)) if unit.group.size > 1 else plain(unit)


def attach(config: Any, parts: Parts) -> Compression | None:
    """A sum over one rank stays as it is."""
    if config.compress == "none":
        return None
    made = Compression(config, parts.sync)
    if isinstance(parts.sync, BucketSync):
        parts.around(parts.sync, "send", made.send, by=__name__)
    else:
        parts.around(parts.sync, "reduce", made.reduce, by=__name__)
    return made
