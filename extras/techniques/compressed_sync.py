"""Gradients summed in fewer bits (`--sync bf16`, `int8`, `topk`), with error feedback. It is lossy.

A rank keeps the error of each message, and adds it to the next step's gradient. So what a message
does not say arrives late, but is not lost:

    two steps, topk sends one of two numbers    gradient    + owed        sent       owed then
                                                [4 3]       [0 0]         [4 0]      [0 3]
                                                [4 3]       [4 6]         [0 6]      [4 0]

If ranks added up numbers of so few bits, each addition would round again, or overflow. So a sum is
a reduce-scatter of our own, which adds in full precision, then an all-gather:

    1   rank r receives shard r of every rank's gradient (an all-to-all of compressed shards)
    2   it widens and adds them, compresses the sum, and keeps the error of this, too
    3   all ranks gather the compressed sums

As with --sync naive, gradients are summed one by one after the last backward.

THE LAW. An all-reduce of S bytes in fp32 sends 2 (n-1)/n S. Here a rank sends, and owes as many
bytes as a gradient has, in fp32:

    bf16   16 bits a number                                        1/2 of this
    int8   8 bits a number, and an fp32 scale for 256 numbers      (1 + 4/256) / 4
    topk   --topk-fraction of the numbers, each with its place     2 x fraction (1: nothing is lost)

For tiny on 4 ranks, S = 3,216,896 and 2 (n-1)/n S = 4,825,344 bytes; with bf16 2,412,672. (In int8,
shards are padded to whole blocks of 256 numbers.)

Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD". In PyTorch, the communication hooks of DistributedDataParallel.

Run it:    torchrun --nproc_per_node=4 -m extras step02_ddp.py --sync int8
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import step02_ddp as step02
from common import UserError
from common.comm import Group, Mesh, all_gather, all_to_all
from common.flags import flag
from common.layout import data_group_of
from common.model import Decoder
from step02_ddp import SYNCS, NaiveSync


class CompressedSync(NaiveSync):
    """Sums in bf16. Subclasses replace `compress` and `widen`."""

    block = 1  # a shard has a multiple of so many numbers

    def __init__(self, model: Decoder, config: "Flags", mesh: Mesh):
        """Raises UserError."""
        super().__init__(model, config, mesh)
        self.fraction = config.topk_fraction  # TopkSync's
        if not 0 < self.fraction <= 1:
            raise UserError(f"--topk-fraction {self.fraction} must be above 0, and at most 1")
        self.owed: list[Tensor] = []  # for each parameter, the errors of its shards [n, length]
        for param in self.params:
            n = data_group_of(param, mesh).size
            length = self.block * math.ceil(param.numel() / (n * self.block))
            self.owed.append(torch.zeros(n, length, dtype=param.grad_dtype, device=param.device))

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> a message for each shard [shards, any]."""
        return values.bfloat16()

    def widen(self, message: Tensor, like: Tensor) -> Tensor:
        """Messages [shards, any] -> floats [shards, length]. `like`: has their length and dtype."""
        return message.to(like.dtype)

    def finish(self):
        """Sum each `.grad` over the ranks."""
        for param, owed in zip(self.params, self.owed, strict=True):
            group = data_group_of(param, self.mesh)
            if group.size > 1:
                self.sum_shards(param.grad, owed, group)

    def sum_shards(self, gradient: Tensor, owed: Tensor, group: Group):
        """Sum a gradient, and what is owed of it, in place."""
        size = gradient.numel()
        padded = F.pad(gradient.flatten(), (0, owed.numel() - size))
        values = owed + padded.view_as(owed)
        message = self.compress(values)
        owed.copy_(values - self.widen(message, owed))
        received = torch.empty_like(message)
        all_to_all(received, message, group).wait()

        total = self.widen(received, owed).sum(0, keepdim=True)  # of this rank's shard
        message = self.compress(total)
        owed[group.rank] += (total - self.widen(message, owed))[0]
        sums = torch.empty_like(received)
        all_gather(sums, message, group).wait()
        gradient.copy_(self.widen(sums, owed).flatten()[:size].view_as(gradient))

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides parameters: this rank's errors."""
        return {f"owed.{i}": owed for i, owed in enumerate(self.owed)}

    def load_state(self, state: dict[str, Tensor]):
        """Restore the errors."""
        for name, owed in self.state().items():
            owed.copy_(state[name])


def to_int8(x: Tensor) -> Tensor:
    """[..., length] -> int8 [..., length + 4]: multiples of a scale, and the bytes of the scale."""
    scale = x.abs().amax(-1, keepdim=True).float() / 127
    multiples = (x / scale.clamp(min=1e-30)).round().to(torch.int8)  # x may be all zeros
    return torch.cat((multiples, scale.view(torch.int8)), -1)


def from_int8(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The reverse of `to_int8`."""
    scale = message[..., -4:].contiguous().view(torch.float32)
    return message[..., :-4].to(dtype) * scale.to(dtype)


class Int8Sync(CompressedSync):
    """Messages of 8 bits a number, in blocks that each have a scale."""

    block = 256

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> int8 [shards, length + 4 x blocks]."""
        return to_int8(values.unflatten(1, (-1, self.block))).flatten(1)

    def widen(self, message: Tensor, like: Tensor) -> Tensor:
        """Messages int8 [shards, length + 4 x blocks] -> floats [shards, length]."""
        return from_int8(message.unflatten(1, (-1, self.block + 4)), like.dtype).flatten(1)


class TopkSync(CompressedSync):
    """Messages of the numbers of largest magnitude, with their places. The others become zero."""

    def compress(self, values: Tensor) -> Tensor:
        """Floats [shards, length] -> integers [shards, 2 k]: k numbers' bits, then their places."""
        k = max(1, int(self.fraction * values.shape[1]))
        places = values.abs().topk(k).indices
        integers = torch.int64 if values.dtype == torch.float64 else torch.int32
        bits = values.gather(1, places).view(integers)
        return torch.cat((bits, places.to(integers)), 1)

    def widen(self, message: Tensor, like: Tensor) -> Tensor:
        """Messages [shards, 2 k] -> floats [shards, length]."""
        bits, places = message.chunk(2, 1)
        values = like.new_zeros(len(message), like.shape[1])
        return values.scatter_(1, places.long(), bits.view(like.dtype))


@dataclass
class Flags(step02.Config):
    """Compression of gradients."""

    topk_fraction: float = flag(
        0.01, "share of the numbers that are sent, at most 1", needs={"sync": ["topk"]}
    )


SYNCS["bf16"] = CompressedSync
SYNCS["int8"] = Int8Sync
SYNCS["topk"] = TopkSync
