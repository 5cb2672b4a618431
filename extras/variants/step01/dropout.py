"""In training, dropout (`--dropout P`) zeroes activations with probability P, and divides the others by 1 - P.

It is applied after the embedding, attention and the MLP (Srivastava et al. 2014; Vaswani et al. 2017, 5.4). Every
layout must drop the same numbers, or it would not train as one process does. A generator with a state cannot do this,
because its next number depends on earlier draws. So a mask is a pure function of

    key      seed, step
    counter  for 4 channels of a token: channel // 4; position; sequence in the global batch; layer and place

by *Philox 4x32-10* (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"; also cuRAND's): ten rounds of
multiplying and mixing turn each counter into four random words. A rank draws the masks of its own tokens alone, and
recomputation draws the same masks again. Validation drops nothing.

Law: with L layers, a rank keeps 2 L + 1 masks [batch, tokens, dim] for backward, of a byte a number. Without SP each tp
rank draws and keeps whole masks, with SP 1/tp of them, which is one reason for SP (Korthikanti et al. 2022, section 4).
In step 1, `DecoderLayer.forward` would call `drop` around each block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from extras.variants import Parts
from extras.variants.record import Refusal

WORD = 2**32 - 1


def philox(counter: Sequence[Tensor | int], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Turns four 32-bit words, held in int64, into four random ones. A product wraps around, and keeps all 64 bits."""
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32 & WORD) ^ b ^ k0, q & WORD, (p >> 32 & WORD) ^ d ^ k1, p & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return a, b, c, d


def mask(p: float, key: tuple[int, int], sequences: Tensor, positions: Tensor, place: int, dim: int) -> Tensor:
    """Draw a mask: int64 sequences [batch], positions [1 or batch, tokens] -> bool [batch, tokens, dim], True: kept."""
    channels = torch.arange(-(-dim // 4), device=positions.device)
    words = philox((channels, positions[..., None], sequences[:, None, None], place), key)
    return torch.stack([word < round((1 - p) * 2**32) for word in words], -1).flatten(-2)[..., :dim]


class Dropout:
    """Drops numbers in the outputs of the embedding and of all blocks."""

    def __init__(self, config: Any, parts: Parts):
        self.config, self.mesh, self.progress, trunk = config, parts.mesh, parts.progress, parts.model.model
        seq, device = parts.model.config.seq_len, next(parts.model.parameters()).device
        self.here = (torch.arange(seq) if parts.positions is None else parts.positions).to(device)[None]  # [1, tokens]
        self.first = parts.mesh["dp"].share(config.global_batch_size, "batch").start
        blocks = {0: trunk.embed_tokens}
        for n, layer in trunk.layers.items():
            blocks |= {2 * int(n) + 1: layer.self_attn, 2 * int(n) + 2: layer.mlp}
        for place, block in blocks.items():
            if block is not None:  # after g, which shards the tokens with SP; experts have no g
                name = "leave" if hasattr(block, "leave") else "forward"
                parts.around(block, name, partial(self.drop, place), by=__name__)

    def drop(self, place: int, block: Callable, *inputs: Any) -> Tensor:
        """Wraps a block: in training, drop numbers of its output, [batch, this rank's tokens, dim]."""
        y = block(*inputs)
        return (y * self.kept(place, y.shape)).mul_(1 / (1 - self.config.dropout)) if torch.is_grad_enabled() else y

    @torch.compiler.disable  # else each step would be compiled anew
    def kept(self, place: int, shape: torch.Size) -> Tensor:
        """The mask of this rank's tokens, bool [batch, tokens, dim]. With SP, tp ranks have shards of the tokens."""
        (batch, tokens, dim), config = shape, self.config
        shards = self.here.split(tokens, 1)
        positions = shards[self.mesh.rank % len(shards)]  # tp is the mesh's last dimension
        first = self.first + self.progress.now * config.micro_batch_size
        sequences = torch.arange(first, first + batch, device=positions.device)
        return mask(config.dropout, (config.seed & WORD, self.progress.step), sequences, positions, place, dim)


@dataclass
class Flags:
    """Dropout."""

    dropout: float = 0.0  # probability that training zeroes a number after embedding, attention or MLP; 0: never


TRIED = dict(dropout=0.2)
COMPUTED = True
REFUSES = [Refusal(dict(dropout=lambda p: p >= 1), "it would leave nothing; use 0.1, for example, or 0", None)]


def attach(config: Any, parts: Parts):
    """Apply dropout to the outputs of the embedding and of all blocks, in training only."""
    if config.dropout:
        Dropout(config, parts)
