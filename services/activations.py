"""A variant for steps 4 and 6: activations that travel in fewer bits (--compress-activations). It is lossy.

What layers and stages send one another is rounded before it leaves, in forward and in backward:

    steps 4-7   over tp, in each layer: f and g with their gradients, so all-gathers and sums of [batch, seq, dim]
    steps 6-7   over pp: x forward, dx backward

    bf16   16 bits (where --dtype has more)                                  2 bytes a value
    int8   8 bits, and an fp32 scale for every 256 values of a token         1 + 4/256 bytes a value

A value is off by at most 1/254 of the largest of its 256. That holds for each message, one after another.

    all-gather      each rank sends its tokens rounded; all, and the sender too, go on with the same rounded ones
    reduce-scatter  numbers in units of different scales cannot be added. So each rank receives its tokens of all ranks
                    (all-to-all), and adds them up in fp32 or wider (Wang et al. 2023, "ZeRO++": qgZ)
    all-reduce      with --no-sp: both, one after the other (Li et al. 2024, "Flash Communication"), rounded twice

BACKWARD is the gradient of what is not rounded ("straight through"), itself rounded where it travels: the backward of
a rounded all-gather is a rounded reduce-scatter. What is gathered again for the weight gradients is the same x, rounded
to the same numbers. Nothing of what is lost is kept (as --compress does for gradients): the next tokens are others.

Exact stay: embedding and head (with what the loss and sampling need), gates and rows on their way to experts, keys and
values over cp, and the parts of a stage's input that the tp ranks put together with --no-sp.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, Mesh, Pending, all_gather, all_to_all, exchange
from services.compression import Messages, dequantise, quantise
from theory.traffic import BLOCK, compressing, row_bytes

Post = list[tuple[Tensor, int]]  # tensors, each with the rank that it goes to or comes from


class Chain(Pending):
    """Messages one after another: a generator yields each that it has sent, and goes on when that has arrived."""

    def __init__(self, messages: Iterator[Pending]):
        super().__init__(None, [])
        self.messages = Messages(messages)

    def wait(self) -> Any:
        """Wait for all of them."""
        self.messages.wait()
        return self.result()


class Narrow:
    """Sends activations of `dim` values a token over `group` in fewer bits. `mode`: bf16 or int8.

    common/comm.py asks for it where a group has a `narrow`: with the arguments of its own functions.
    """

    def __init__(self, group: Group, mode: str, dim: int):
        self.group, self.mode, self.dim = group, mode, dim
        self.dtype = {"bf16": torch.bfloat16, "int8": torch.int8}[mode]

    def pack(self, x: Tensor) -> Tensor:
        """Round: [..., dim] -> bf16 [..., dim]; or int8 [..., dim + 4 a block], values, then the bytes of the scales.

        A last block of fewer than 256 values has a scale of its own.
        """
        if self.mode == "bf16":
            return x.to(self.dtype)
        dim = x.shape[-1]
        blocks = quantise(F.pad(x.float(), (0, -dim % BLOCK)).unflatten(-1, (-1, BLOCK)))
        return torch.cat((blocks[..., :BLOCK].flatten(-2)[..., :dim], blocks[..., BLOCK:].flatten(-2)), -1)

    def unpack(self, message: Tensor, dim: int) -> Tensor:
        """What a message says: fp32 [..., dim]."""
        if self.mode == "bf16":
            return message.float()
        values = F.pad(message[..., :dim], (0, -dim % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = message[..., dim:].unflatten(-1, (-1, 4))
        return dequantise(torch.cat((values, scales), -1)).flatten(-2)[..., :dim]

    def empty(self, x: Tensor) -> Tensor:
        """Room for a message that says what goes into `x`."""
        width = row_bytes(self.mode, x.shape[-1], x.element_size()) // self.dtype.itemsize
        return x.new_empty(*x.shape[:-1], width, dtype=self.dtype)

    def start(self, operation: str, output: Tensor, tensor: Tensor) -> Pending:
        """Start the method called `operation`: one of the next three. The tensors hold whole tokens, contiguous."""
        return Chain(getattr(self, operation)(output, tensor))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Iterator[Pending]:
        """`output` [n k] = every rank's `tensor` [k]."""
        ours = self.pack(tensor.view(-1, self.dim))
        everyones = ours.new_empty(self.group.size, *ours.shape)
        yield all_gather(everyones.view(-1), ours.view(-1), self.group)
        output.view(-1, self.dim).copy_(self.unpack(everyones, self.dim).flatten(0, 1))

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Iterator[Pending]:
        """`output` [k] = this rank's part of the sum of `tensor` [n k]."""
        ours = self.pack(tensor.view(-1, self.dim))
        received = torch.empty_like(ours)
        yield all_to_all(received, ours, self.group)
        parts = self.unpack(received, self.dim).unflatten(0, (self.group.size, -1))
        output.view(-1, self.dim).copy_(parts.sum(0, dtype=torch.promote_types(output.dtype, torch.float32)))

    def all_reduce(self, output: Tensor, tensor: Tensor) -> Iterator[Pending]:
        """`output` = the sum of `tensor`, the same on all ranks. Tokens are filled up to a multiple of n."""
        tokens, n = tensor.view(-1, self.dim), self.group.size
        whole = F.pad(tokens, (0, 0, 0, -len(tokens) % n)).view(-1)
        part = whole.new_empty(len(whole) // n)
        yield from self.reduce_scatter(part, whole)
        yield from self.all_gather(whole, part)
        output.copy_(whole[: output.numel()].view_as(output))

    def exchange(self, sends: Post, receives: Post, check: bool) -> Pending:
        """As that of common/comm.py. What is compared, with `check`, are the messages: batch, tokens and width."""
        return Chain(self.messages(sends, receives, check))

    def messages(self, sends: Post, receives: Post, check: bool) -> Iterator[Pending]:
        """Send and receive, then fill the tensors of `receives`, [..., values of a token] each."""
        leaving = [(self.pack(tensor), peer) for tensor, peer in sends]
        arriving = [(self.empty(tensor), peer) for tensor, peer in receives]
        yield exchange(leaving, arriving, self.group, check)
        for (tensor, _), (message, _) in zip(receives, arriving, strict=True):
            tensor.copy_(self.unpack(message, tensor.shape[-1]))


def narrow(mesh: Mesh, config: Any, dim: int):
    """Add the groups "narrow tp" and "narrow pp" to the mesh, if the flag is set: the same ranks, for activations."""
    mode = compressing(config)
    for name in ("tp", "pp"):
        if mode != "none" and name in mesh.groups and mesh[name].size > 1:
            mesh.groups[f"narrow {name}"] = replace(mesh[name], narrow=Narrow(mesh[name], mode, dim))
