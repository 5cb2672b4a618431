"""Computes the loss in chunks of tokens (`--loss-chunk`), so that a micro-batch's logits never exist all at once.

Logits [tokens, vocab] are often the largest tensor of a model: 8192 x 128256 take 2.1 GB in bf16, and their copy in
fp32, softmax and gradient take some 10 GB more. But the loss is a sum over tokens. So for each chunk, forward also
computes the gradients of its hidden states and its part of the head's gradient, and then frees its logits. If all
tokens fit in one chunk, nothing changes.

The head passes the hidden states on, and the loss multiplies them by the head's weight, chunk by chunk. The model's
loss function is called for each chunk; step 4's, over a sharded vocabulary, works as well. In step 1 the last line of
`Decoder.forward` would call `ChunkedLoss`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.model import wide
from extras.variants import Parts

MOST = 2**30  # bytes of a chunk's logits in fp32: three such tensors exist at a time, and one or two in 16 bits


class ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in forward, as if the gradient of the loss were 1; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss: Callable) -> Tensor:
        """Sums the loss: hidden [batch, seq, dim], weight [vocab, dim], targets int64 [batch, seq] -> scalar."""
        weight, total = weight.detach().requires_grad_(), 0.0
        grad_hidden, grad_weight = hidden.new_empty(hidden.shape), torch.zeros_like(weight, dtype=wide(weight.dtype))
        rows, row_targets, row_grads = hidden.flatten(0, 1), targets.flatten(), grad_hidden.view(-1, hidden.shape[-1])
        for part, target, row_grad in zip(*(x.split(chunk) for x in (rows, row_targets, row_grads)), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                value = loss(F.linear(part, weight)[None], target[None])
            row_part, more = torch.autograd.grad(value, (part, weight))
            row_grad.copy_(row_part)
            grad_weight += more
            total = total + value.detach()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of the loss, a scalar in fp32 or wider -> the gradients of hidden and weight."""
        return *(saved.mul_(grad.view(1)) for saved in ctx.saved_tensors), None, None, None  # a scalar would be rounded


@dataclass
class Flags:
    """The loss in chunks."""

    loss_chunk: int = 0  # most tokens whose logits exist at a time (at most 1 GiB in fp32), for example 2048; 0: all


TRIED = dict(loss_chunk=5)


def attach(config: Any, parts: Parts):
    """Wrap the head and the loss, on ranks that have a head: with a pipeline, on the last stage."""
    model, head = parts.model, parts.model.lm_head
    if head is None or not config.loss_chunk:
        return
    chunk = min(config.loss_chunk, max(1, MOST // (len(head.weight) * wide(head.weight.dtype).itemsize)))

    def project(multiply: Callable, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden) if hidden.shape[:-1].numel() > chunk else multiply(hidden)

    def loss(plain: Callable, output: Tensor, targets: Tensor) -> Tensor:
        if targets.numel() <= chunk:
            return plain(output, targets)
        if torch.is_grad_enabled():
            return ChunkedLoss.apply(output, head.weight, targets, chunk, plain)
        parts = zip(output.flatten(0, 1).split(chunk), targets.flatten().split(chunk), strict=True)
        return sum(plain(F.linear(part, head.weight)[None], target[None]) for part, target in parts)

    parts.around(head, "forward", project, by=__name__)
    parts.around(model, "loss", loss, by=__name__)
