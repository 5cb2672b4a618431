"""Sends activations in fewer bits, which is lossy (`--compress-activations bf16` or `int8`).

The messages of blocks and of pipeline stages are rounded, in forward and in backward:

    steps 4-7   over tp: f and g of attention and MLP, with their gradients
    steps 6-7   over pp: x forward, dx backward (also between two stages of the same rank)

    bf16   16 bits (where --dtype has more)                                  2 bytes a value
    int8   8 bits, and an fp32 scale for every 256 values of a token         1 + 4/256 bytes a value

    all-gather      each rank rounds its tokens; all ranks, even the sender, use the rounded ones
    reduce-scatter  numbers with different scales cannot be added. So an all-to-all brings each rank all ranks' terms of
                    its tokens, and it adds them in fp32 or wider (Wang et al. 2023, "ZeRO++": qgZ)
    all-reduce      with --no-sp: a reduce-scatter, then an all-gather (Li et al. 2024, "Flash Communication")

In backward, rounding counts as the identity ("straight through"). Messages of embedding, head, loss and experts, and
keys and values over cp, stay exact. In step 4, methods of `Bits` would replace functions such as `gather_tokens`; in
step 6, `send_receive` would pack and unpack messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group, all_gather, all_to_all
from common.model import wide
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from extras.variants.step02.compress import BLOCK, dequantise, quantise
from step04_tp_sp import Conjugate, unchanged

KINDS = dict(bf16=torch.bfloat16, int8=torch.int8)


class Bits:
    """Packs values [..., dim] into messages, unpacks messages, and has three collectives that send such messages."""

    def __init__(self, mode: str, dtype: torch.dtype, dim: int):
        """`dtype` and `dim` are those of the values."""
        self.kind, self.dtype, self.dim = KINDS[mode], dtype, dim
        self.width = dim + 4 * -(-dim // BLOCK) if self.kind == torch.int8 else dim

    def pack(self, x: Tensor) -> Tensor:
        """Round values [..., dim] -> bf16 [..., dim], or int8 [..., width]: the values, then the bytes of scales."""
        return quantise(x) if self.kind == torch.int8 else x.to(self.kind)

    def unpack(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the values of a message, [..., dim], in this dtype."""
        return dequantise(message, self.dim, dtype) if self.kind == torch.int8 else message.to(dtype)

    def gather(self, x: Tensor, group: Group) -> Tensor:
        """All-gather rounded tokens: [batch, seq/n, dim] -> [batch, seq, dim]."""
        ours = self.pack(x).contiguous()
        parts = ours.new_empty(group.size, *ours.shape)
        all_gather(parts.view(-1), ours.view(-1), group).wait()
        return self.unpack(parts, x.dtype).movedim(0, 1).flatten(1, 2)

    def scatter(self, x: Tensor, group: Group) -> Tensor:
        """Reduce-scatter by an all-to-all: [batch, seq, dim] -> this rank's tokens of the sum, [batch, seq/n, dim]."""
        ours = self.pack(x.unflatten(1, (group.size, -1)).movedim(1, 0)).contiguous()
        received = torch.empty_like(ours)
        all_to_all(received, ours, group).wait()
        return self.unpack(received, wide(x.dtype)).sum(0).to(x.dtype)

    def total(self, x: Tensor, group: Group) -> Tensor:
        """All-reduce [..., dim]: reduce-scatter and all-gather the tokens, padded to a multiple of the group's size."""
        tokens = x.reshape(1, -1, self.dim)
        filled = F.pad(tokens, (0, 0, 0, -tokens.shape[1] % group.size))
        return self.gather(self.scatter(filled, group), group)[:, : tokens.shape[1]].reshape(x.shape)


def narrow_blocks(parts: Parts, config: Any, bits: Bits):
    """Replace f and g of every attention and MLP by collectives that send packed messages."""
    group = parts.mesh["tp"]
    enter, leave = (bits.gather, bits.scatter) if config.sp else (unchanged, bits.total)  # each is the other's backward
    for layer in parts.model.model.layers.values():
        for block in (layer.self_attn, layer.mlp):
            if hasattr(block, "enter"):  # experts have no f and no g
                parts.instead(block, "enter", lambda x: Conjugate.apply(x, group, enter, leave), by=__name__)
                parts.instead(block, "leave", lambda x: Conjugate.apply(x, group, leave, enter), by=__name__)


def narrow_stages(parts: Parts, bits: Bits):
    """Let pipeline stages exchange packed messages instead of values."""

    def act(run: Callable, i: int, stage: int, message: Tensor | None) -> Tensor | None:
        """Wraps forward or backward of a stage: unpack its input, and pack its output unless that is a scalar loss."""
        output = run(i, stage, None if message is None else bits.unpack(message, bits.dtype))
        return bits.pack(output) if output is not None and output.dim() else output

    def buffer(values: Callable, i: int) -> Tensor:
        """Wraps `Pipeline.buffer`: an empty tensor to receive a packed message."""
        return values(i).new_empty(*values(i).shape[:-1], bits.width, dtype=bits.kind)

    parts.around(parts.pipeline, "buffer", buffer, by=__name__)
    for method in ("forward", "backward"):
        parts.around(parts.pipeline, method, act, by=__name__)


@dataclass
class Flags:
    """Compression of activations."""

    compress_activations: Literal["none", "bf16", "int8"] = "none"  # round messages of blocks (tp), stages (pp); lossy


WHERE = "--tp above 1, or from step 6 on --pp above 1"
REFUSES = [
    Refusal(dict(compress_activations=SET, tp=(1,), pp=(1,)), "", needs=WHERE),
    Refusal(dict(compress_activations=SET, tp_overlap=SET), "both replace f, the entry of a block; choose one"),
]


def attach(config: Any, parts: Parts):
    """Compress the messages of blocks and of the pipeline."""
    if config.compress_activations != "none":
        bits = Bits(config.compress_activations, next(parts.model.parameters()).dtype, parts.model.config.dim)
        if config.tp > 1:
            narrow_blocks(parts, config, bits)
        if getattr(config, "pp", 1) > 1:
            narrow_stages(parts, bits)
