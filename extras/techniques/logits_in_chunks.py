"""Logits in chunks: only an eighth of the logits exists at a time (`--recompute logits`).

Logits [tokens, vocab] are often the largest tensor of a model. But the loss is a sum over tokens.
So we compute it for an eighth of the tokens at a time and keep no logits; backward computes those
of each chunk again:

    forward     hidden 0 -> logits 0 -> loss 0    (logits 0 are freed)    hidden 1 -> ...
    backward    hidden 7 -> logits 7 -> their gradient -> gradients of hidden 7 and head    ...

Gradients of the head from different chunks add up in fp32, like those of different micro-batches:
autograd casts each to the weight's `grad_dtype` before it adds them (step 1's Optimizer).

THE LAW. The head takes 8 FLOPs a weight and token in place of 6. Logits, their copy in fp32 and
their gradients take an eighth. For llama3-8b's 8192 tokens, logits in bf16 take 0.26 GB in place of
2.1 GB, and each copy in fp32 0.53 GB in place of 4.2 GB. With --tp, forward's two numbers a token
of the loss are sent once more, in backward.

The loss is the model's own function, so step 4's loss over a sharded vocabulary works as well.
`--recompute full,logits` recomputes the layers, too; so do selective,logits and
all-but-attention,logits.

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", applied to the loss; Luo
et al. 2024, "Mini-Sequence Transformer". torchtune's LinearCrossEntropyLoss does the same.

Run it:    python -m extras step01_single_gpu.py --recompute logits
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.model import Decoder
from extras.techniques.selective import all_but_attention, selective
from step01_single_gpu import RECOMPUTE, recompute_layers, recompute_nothing

CHUNKS = 8


def loss_of_chunk(loss: Callable, head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Some tokens' loss: hidden [batch, some, dim], targets int64 [batch, some] -> the sum."""
    return loss(F.linear(hidden, head.weight), targets)


def loss_in_chunks(loss: Callable, head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """The sum over all chunks: hidden [batch, seq, dim], targets int64 [batch, seq]."""
    total = 0.0
    chunks = zip(hidden.chunk(CHUNKS, dim=1), targets.chunk(CHUNKS, dim=1), strict=True)
    for hidden_chunk, target_chunk in chunks:
        inputs = loss, head, hidden_chunk, target_chunk
        total = total + checkpoint(loss_of_chunk, *inputs, use_reentrant=False)
    return total


def pass_on(hidden: Tensor) -> Tensor:
    """The head's forward. Its hooks still run: with tp, f; in ZeRO 3, what gathers its unit."""
    return hidden.view_as(hidden)


def logits_in_chunks(layers: Callable, model: Decoder, **options: Any):
    """Move the head into the loss. In a pipeline, only the last stage has a head. `layers`: another
    entry of RECOMPUTE.
    """
    layers(model, **options)
    if model.lm_head is not None:
        model.loss = partial(loss_in_chunks, model.loss, model.lm_head)
        model.lm_head.forward = pass_on


RECOMPUTE["logits"] = partial(logits_in_chunks, recompute_nothing)
RECOMPUTE["full,logits"] = partial(logits_in_chunks, recompute_layers)
RECOMPUTE["selective,logits"] = partial(logits_in_chunks, selective)
RECOMPUTE["all-but-attention,logits"] = partial(logits_in_chunks, all_but_attention)
