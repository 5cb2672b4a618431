"""Gradients summed in fewer bits (`--sync bf16`, `int8`, `topk`), with error feedback. It is lossy.

A rank keeps the error of each message, and adds it to the next step's gradient. So what a message
does not say arrives late, but is not lost:

    two steps, topk sends one of two numbers    gradient    + owed        sent       owed then
                                                [4 3]       [0 0]         [4 0]      [0 3]
                                                [4 3]       [4 6]         [0 6]      [4 0]

If ranks added up numbers of so few bits, each addition would round again, or overflow. So a sum is
a reduce-scatter of our own, which adds in full precision, then an all-gather:

    1   rank r receives shard r of every rank's bucket (an all-to-all of compressed shards)
    2   it widens and adds them, compresses the sum, and keeps the error of this, too
    3   all ranks gather the compressed sums

The all-to-all overlaps with backward. Its sum is computed, and the all-gather started, when the
next bucket is sent or backward ends.

THE LAW. An all-reduce of a bucket of S bytes in fp32 sends 2 (n-1)/n S. Here a rank sends, and owes
as many bytes as a gradient has, in fp32:

    bf16   16 bits a number                                        1/2 of this
    int8   8 bits a number, and an fp32 scale for 256 numbers      (1 + 4/256) / 4
    topk   --topk-fraction of the numbers, each with its place     2 x fraction (1: nothing is lost)

For tiny on 4 ranks, S = 3,216,896 and 2 (n-1)/n S = 4,825,344 bytes; with bf16 2,412,672.

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD". In PyTorch, the communication hooks of DistributedDataParallel.

Run it:    torchrun --nproc_per_node=4 -m extras step02_ddp.py --sync int8
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import step02_ddp as step02
from common import UserError
from common.comm import Mesh, Pending, all_gather, all_to_all
from common.flags import flag
from common.model import Decoder
from step02_ddp import SYNCS, Bucket, BucketSync

BLOCK = 256  # numbers that share one scale


class CompressedSync(BucketSync):
    """BucketSync with messages in bf16. Subclasses replace `compress` and `widen`."""

    def __init__(self, model: Decoder, config: "Flags", mesh: Mesh):
        super().__init__(model, config, mesh)
        self.fraction = config.topk_fraction
        self.scattering = Pending()  # the newest all-to-all
        self.owed: dict[Bucket, Tensor] = {}  # the errors of a bucket's shards [n, length]
        for bucket in self.buckets:
            n = bucket.group.size
            self.owed[bucket] = bucket.flat.new_zeros(n, math.ceil(len(bucket.flat) / n))

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> a message for each shard [shards, any]."""
        return values.bfloat16()

    def widen(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Messages [shards, any] -> floats [shards, length]."""
        return message.to(dtype)

    def send(self, bucket: Bucket):
        """Start to sum a bucket; before that, finish the all-to-all of the bucket before."""
        if bucket.group.size == 1:
            return
        self.scattering.wait()
        owed = self.owed[bucket]
        values = owed + F.pad(bucket.flat, (0, owed.numel() - len(bucket.flat))).view_as(owed)
        message = self.compress(values)
        owed.copy_(values - self.widen(message, owed.shape[1], owed.dtype))
        received = torch.empty_like(message)
        self.scattering = all_to_all(received, message, bucket.group)
        self.scattering.then = partial(self.gather, bucket, received)
        self.pending.append(self.scattering)

    def gather(self, bucket: Bucket, received: Tensor):
        """Add up the shards that have arrived, and start to gather all ranks' sums."""
        owed = self.owed[bucket]
        length = owed.shape[1]
        total = self.widen(received, length, owed.dtype).sum(0, keepdim=True)
        message = self.compress(total)
        owed[bucket.group.rank] += (total - self.widen(message, length, owed.dtype))[0]
        sums = message.new_empty(bucket.group.size, message.shape[1])
        gathering = all_gather(sums.view(-1), message.view(-1), bucket.group)
        gathering.then = partial(self.fill, bucket, sums, length)
        self.pending.append(gathering)  # `finish` waits for it: it is still going through the list

    def fill(self, bucket: Bucket, sums: Tensor, length: int):
        """Write the sums that have arrived into the bucket."""
        values = self.widen(sums, length, bucket.flat.dtype)
        bucket.flat.copy_(values.flatten()[: len(bucket.flat)])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides parameters: this rank's errors."""
        return {f"owed.{i}": owed for i, owed in enumerate(self.owed.values())}

    def load_state(self, state: dict[str, Tensor]):
        """Restore the errors."""
        for i, owed in enumerate(self.owed.values()):
            owed.copy_(state[f"owed.{i}"])


def in_blocks(values: Tensor) -> Tensor:
    """[..., length] -> [..., blocks, 256], padded with zeros."""
    padding = -values.shape[-1] % BLOCK
    return F.pad(values, (0, padding)).unflatten(-1, (-1, BLOCK))


class Int8Sync(CompressedSync):
    """Messages of 8 bits a number: multiples of the block's largest magnitude / 127."""

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> int8 [shards, length + 4 x blocks]: multiples, then scales."""
        blocks = in_blocks(values)
        scales = blocks.abs().amax(-1, keepdim=True).float() / 127
        scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # not 0
        multiples = (blocks / scales).round().to(torch.int8).flatten(-2)[:, : values.shape[-1]]
        scale_bytes = scales.flatten(-2).contiguous().view(torch.int8)
        return torch.cat((multiples, scale_bytes), dim=-1)

    def widen(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Messages int8 [shards, length + 4 x blocks] -> floats [shards, length]."""
        scale_bytes = message[:, length:].clone(memory_format=torch.contiguous_format)  # aligned
        scales = scale_bytes.view(torch.float32)[..., None]
        blocks = in_blocks(message[:, :length]) * scales
        return blocks.flatten(-2)[:, :length].to(dtype)


class TopkSync(CompressedSync):
    """Messages of the numbers of largest magnitude, with their places. The others become zero."""

    def __init__(self, model: Decoder, config: "Flags", mesh: Mesh):
        """Raises UserError."""
        super().__init__(model, config, mesh)
        if not 0 < self.fraction <= 1:
            raise UserError(f"--topk-fraction {self.fraction} must be above 0, and at most 1")

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> int32 [shards, words]: k numbers' bits, then their places."""
        k = max(1, int(self.fraction * values.shape[-1]))
        places = values.abs().topk(k).indices
        bits = values.gather(-1, places).view(torch.int32)
        return torch.cat((bits, places.int()), dim=-1)

    def widen(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Messages int32 [shards, words] -> floats [shards, length]."""
        words = dtype.itemsize // 4  # of a number
        k = message.shape[-1] // (words + 1)
        bits, places = message.split([words * k, k], dim=-1)
        numbers = bits.flatten().view(dtype).view_as(places)
        values = numbers.new_zeros(len(message), length)
        return values.scatter_(-1, places.long(), numbers)


@dataclass
class Flags(step02.Config):
    """Compression of gradients."""

    topk_fraction: float = flag(
        0.01, "share of the numbers that are sent, at most 1", needs={"sync": ["topk"]}
    )
    bucket_mb: float = flag(  # step 2's flag, which has an effect here, too
        1.0,
        "largest gradient bucket, in MiB; a larger parameter is a bucket of its own",
        needs={"zero": ["0"], "sync": ["bucket", "bf16", "int8", "topk"]},
    )


SYNCS["bf16"] = CompressedSync
SYNCS["int8"] = Int8Sync
SYNCS["topk"] = TopkSync
