"""A variant for step 2: gradients summed in fewer bits (--compress).

It replaces the all-reduce of a bucket and is lossy. What was not sent is kept and added to the next
step's gradient, "error feedback" (Seide et al. 2014; Karimireddy et al. 2019), so that it is late, not lost.
Checkpoints hold it, too.

    bf16   16 bits                                                      1/2 of the bytes of fp32
    int8   8 bits, and an fp32 scale per 256 values                     (1 + 4/256) / 4
    topk   the largest --topk-fraction of values, with their places     n x fraction: gathered, so it grows with n

A sum is a generator: it yields each message that it has sent, and goes on when that has arrived. So backward computes
while messages travel: a bucket's first message is waited for when the next bucket is sent, or at the end.
"""

from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, Pending, all_gather, all_reduce, all_to_all
from theory.traffic import BLOCK

Sum = Generator[Pending, None, tuple[Tensor, Tensor]]


def quantise(values: Tensor) -> Tensor:
    """[..., 256] floats -> int8 [..., 260]: values in units of max |value| / 127, then this scale's four bytes."""
    scale = (values.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat(((values / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(blocks: Tensor) -> Tensor:
    """The inverse of `quantise`: int8 [..., 260] -> fp32 [..., 256]."""
    return blocks[..., :BLOCK] * blocks[..., BLOCK:].contiguous().view(torch.float32)


def narrow_sum(values: Tensor, group: Group, config: Any) -> Sum:
    """Sum in 16 or 8 bits. Takes this rank's values [elements]; returns (sum over the group, what of ours was lost).

    Adding in so few bits would round at every rank, or overflow. So rank r receives slice r of everyone (all-to-all),
    adds up in fp32, and makes the sum narrow again for all to gather; what that loses, rank r keeps. Before it is sent,
    the buffer is padded with zeros to n slices of whole blocks of 256. Both results are as long as the values.
    """
    narrow, widen = (quantise, dequantise) if config.compress == "int8" else (Tensor.bfloat16, Tensor.float)
    length, dtype = len(values), values.dtype
    ours = F.pad(values, (0, -length % (group.size * BLOCK))).view(group.size, -1, BLOCK)
    sent = narrow(ours)
    lost = ours - widen(sent)
    received = torch.empty_like(sent)
    del values, ours  # a bucket waits for its messages: what they do not need is freed before
    yield all_to_all(received, sent, group)
    del sent
    total = widen(received).sum(0)
    narrowed = narrow(total)
    lost[group.rank] += total - widen(narrowed)
    yield all_gather(received.view(-1), narrowed.view(-1), group)
    return widen(received).view(-1)[:length].to(dtype), lost.view(-1)[:length]


def topk_sum(values: Tensor, group: Group, config: Any) -> Sum:
    """Sum only the largest values of each rank; takes and returns the same as `narrow_sum`.

    Every rank gathers everyone's top values (fp32) with their indices in the buffer (int32), and adds them up.
    """
    count = max(1, int(config.topk_fraction * len(values)))
    places = values.abs().topk(count).indices
    message = torch.stack((values[places].float().view(torch.int32), places.int()))
    everyone = message.new_empty(group.size, 2, count)
    yield all_gather(everyone.view(-1), message.view(-1), group)
    lost, total = values.clone(), torch.zeros_like(values)
    lost[places] -= values[places].float()
    for numbers, at in everyone:
        total[at.long()] += numbers.view(torch.float32)
    return total, lost


COMPRESSED_SUMS = {"bf16": narrow_sum, "int8": narrow_sum, "topk": topk_sum}


def summed(messages: Sum) -> tuple[Tensor, Tensor]:
    """Wait for each message of a sum in turn; its two results."""
    while True:
        try:
            next(messages).wait()
        except StopIteration as end:
            return end.value


class Messages:
    """A generator of messages under way. `wait` ends it; `go_on` takes it to the next message."""

    def __init__(self, messages: Iterator[Pending]):
        self.messages, self.pending = messages, next(messages)

    def go_on(self):
        """Wait for the message under way, and send the next."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = next(self.messages, None)

    def wait(self):
        """Wait for all that is left."""
        while self.pending is not None:
            self.go_on()


class CompressedSum:
    """An all-reduce that sends fewer bytes; `lost`: what each buffer still owes, by the address of its memory."""

    def __init__(self, config: Any):
        self.config, self.sum = config, COMPRESSED_SUMS[config.compress]
        self.lost: dict[int, Tensor] = {}
        self.last: Messages | None = None

    def __call__(self, buffer: Tensor, group: Group) -> Any:
        """Start to replace `buffer` [elements], the same in every step, by its sum over the group.

        Returns what is to be waited for.
        """
        if group.size == 1:
            return all_reduce(buffer, group)
        if self.last is not None:  # its first message has had the time in which this buffer was filled
            self.last.go_on()
        self.last = Messages(self.messages(buffer, group))
        return self.last

    def messages(self, buffer: Tensor, group: Group) -> Iterator[Pending]:
        """Replace `buffer` by its sum over the group; yields each message that has been sent."""
        owed = self.lost.get(buffer.data_ptr(), 0.0)
        total, self.lost[buffer.data_ptr()] = yield from self.sum(buffer + owed, group, self.config)
        buffer.copy_(total)
