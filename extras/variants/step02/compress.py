"""Sums gradients over ranks in fewer bits (`--compress`), with error feedback: rounding errors are sent later.

A rank keeps the error of each message, and adds it to the next gradient (Seide et al. 2014, "1-Bit Stochastic Gradient
Descent"; Karimireddy et al. 2019). So the error arrives late, but is not lost.

    bf16   16 bits                                                      1/2 of the bytes of fp32
    int8   8 bits, and an fp32 scale for 256 values                     (1 + 4/256) / 4
    topk   the largest --topk-fraction of the values, with their places 2 x fraction (1: no loss, twice the bytes)

If ranks added in so few bits, each addition would be rounded, or overflow. So rank r receives shard r of every rank's
gradient (all-to-all), and adds these in full precision: a reduce-scatter, which is all that ZeRO needs. For an
all-reduce, rank r then compresses its shard of the sum, keeps the error, and all ranks gather the shards. The gather
starts when the next bucket is sent, or at the end, so that the all-to-all overlaps with backward.

In step 2 `Compression.send` would be `BucketSync.send`; in step 3 `Compression.reduce` would be `Zero1.reduce`. On each
rank the errors (`owed`) take as much memory as a whole gradient, also in ZeRO 2 and 3. Checkpoints contain them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Pending, all_gather, all_to_all
from common.model import wide
from extras.variants import Parts
from extras.variants.record import SET, But, Refusal
from step02_ddp import Bucket, BucketSync
from step03_zero import Unit

BLOCK = 256  # numbers that share one scale


def in_blocks(values: Tensor) -> Tensor:
    """Splits [..., length] into [..., blocks, 256], padded with zeros."""
    return F.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def quantise(values: Tensor) -> Tensor:
    """Rounds floats [..., length] to int8 [..., length + 4 x blocks]: value / block's scale, then the fp32 scales."""
    blocks = in_blocks(values)
    scales = (blocks.abs().amax(-1, keepdim=True).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    whole = (blocks / scales).round().to(torch.int8).flatten(-2)[..., : values.shape[-1]]
    return torch.cat((whole, scales.flatten(-2).contiguous().view(torch.int8)), dim=-1)


def dequantise(message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`."""
    scales = message[..., length:].clone(memory_format=torch.contiguous_format)  # a copy is aligned, as fp32 needs
    values = in_blocks(message[..., :length]) * scales.view(torch.float32)[..., None]
    return values.flatten(-2)[..., :length].to(dtype)


def pick(values: Tensor, fraction: float) -> Tensor:
    """Picks the values of largest magnitude: [n, length] floats -> int32 [n, words]: their bits, then their places."""
    places = values.abs().topk(max(1, int(fraction * values.shape[-1]))).indices
    return torch.cat((values.gather(-1, places).view(torch.int32), places.int()), dim=-1)


def put_back(message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pick`: numbers that were not sent become zero."""
    words = dtype.itemsize // 4
    bits, places = message.tensor_split([message.shape[-1] * words // (words + 1)], dim=-1)
    values = torch.zeros(len(message), length, dtype=dtype, device=message.device)
    return values.scatter_(-1, places.long(), bits.flatten().view(dtype).view_as(places))


class Compression:
    """Sums gradients in fewer bits. `owed` maps a bucket or unit to errors [n, length] that are sent later."""

    def __init__(self, config: Any, sync: Any):
        self.sync, self.last = sync, Pending()  # the all-to-all of the newest bucket
        self.narrow, self.widen = {
            "bf16": (Tensor.bfloat16, lambda message, length, dtype: message.to(dtype)),
            "int8": (quantise, dequantise),
            "topk": (partial(pick, fraction=config.topk_fraction), put_back),
        }[config.compress]
        self.owed: dict[Bucket | Unit, Tensor] = {}

    def scatter(self, key: Bucket | Unit, values: Tensor, then: Callable[[Tensor], None]) -> Pending:
        """Send row r of values [n, length] to rank r. The Pending's `wait` calls `then` with our row of the sum."""
        values = values.to(wide(values.dtype)) + self.owed.get(key, 0.0)
        length, dtype = values.shape[-1], values.dtype
        message = self.narrow(values)
        self.owed[key] = values - self.widen(message, length, dtype)
        received = torch.empty_like(message)
        pending = all_to_all(received, message, key.group)
        pending.then = lambda: then(self.widen(received, length, dtype).sum(0))
        return pending

    def gather(self, bucket: Bucket, total: Tensor):
        """Start to fill a bucket with all ranks' shards of the sum. `total` [length] is this rank's shard."""
        flat, group, length, dtype = bucket.flat, bucket.group, len(total), total.dtype
        message = self.narrow(total[None])
        self.owed[bucket][group.rank] += total - self.widen(message, length, dtype)[0]
        everyone = message.new_empty(group.size, *message.shape[1:])
        pending = all_gather(everyone.view(-1), message.view(-1), group)
        pending.then = lambda: flat.copy_(self.widen(everyone, length, dtype).flatten()[: len(flat)])
        self.sync.pending.append(pending)

    def send(self, plain: Callable, bucket: Bucket):
        """Wraps `BucketSync.send`: wait for the previous all-to-all, which backward has hidden; start this bucket's."""
        n = bucket.group.size
        if n == 1:
            return plain(bucket)
        self.last.wait()
        rows = F.pad(bucket.flat, (0, -len(bucket.flat) % n)).view(n, -1)
        self.last = self.scatter(bucket, rows, partial(self.gather, bucket))
        self.sync.pending.append(self.last)

    def reduce(self, plain: Callable, unit: Unit) -> Pending:
        """Wraps `Zero1.reduce`: send the gradient in fewer bits."""
        n = unit.group.size
        if n == 1:
            return plain(unit)
        return self.scatter(unit, unit.gradient.view(n, -1), partial(setattr, unit, "reduced_shard"))


@dataclass
class Flags:
    """Compression of gradients."""

    compress: Literal["none", "bf16", "int8", "topk"] = "none"  # sum gradients in fewer bits; lossy
    topk_fraction: float = 0.01  # share of the values that --compress topk sends


TRIED = dict(topk_fraction=0.5)
NEEDS = [("topk_fraction", "compress", "topk")]
REFUSES = [
    Refusal(dict(compress=SET, sync=But(("bucket",)), zero=(0,)), "it compresses buckets; use --sync bucket"),
    Refusal(dict(topk_fraction=lambda x: not 0 < x <= 1), "it is a share: choose it above 0, and at most 1", None),
    Refusal(dict(compress=SET, dtype=("fp16",)), "an overflow is never corrected; use --dtype bf16 or fp32", None),
]


def attach(config: Any, parts: Parts) -> Compression | None:
    """Compress the sums of buckets, or of ZeRO's units."""
    if config.compress == "none":
        return None
    made = Compression(config, parts.sync)
    if isinstance(parts.sync, BucketSync):
        parts.around(parts.sync, "send", made.send, by=__name__)
    else:
        parts.around(parts.sync, "reduce", made.reduce, by=__name__)
    return made
