"""In training, dropout (`--dropout P`) zeroes activations with probability P, and divides the others by 1 - P.

It is applied after the embedding, attention and the MLP (Srivastava et al. 2014; Vaswani et al. 2017, 5.4). Every
layout must drop the same numbers, or it would not train as one process does. So a mask is drawn as weights are
(common/layout.py): in full, from a seed that depends only on --seed, the step, the sequence's number in the global
batch, the layer and the place in it. A rank keeps the rows of its own tokens. Recomputation draws the same mask again.
Validation drops nothing. (Counter-based generators, such as Philox, could draw the rows of some tokens alone.)

Law: with L layers, a rank keeps 2 L + 1 masks [batch, tokens, dim] for backward, one byte per number. Without SP each
tp rank keeps whole masks, with SP only 1/tp of each: one reason for SP (Korthikanti et al. 2022, section 4).
In step 1, `DecoderLayer.forward` would call `drop` around each block.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from extras.variants import Parts
from extras.variants.record import Refusal


def mask(p: float, seed: tuple[int, ...], positions: Tensor, shape: tuple[int, int]) -> Tensor:
    """Draw a bool mask of a whole sequence, [seq, dim] = `shape`; returns its rows at `positions`. True: kept."""
    generator = torch.Generator(positions.device).manual_seed(hash(seed))
    return (torch.rand(shape, generator=generator, device=positions.device) >= p)[positions]


class Dropout:
    """Drops numbers in the outputs of the embedding and of all blocks."""

    def __init__(self, config: Any, parts: Parts):
        self.config, self.mesh, self.progress, trunk = config, parts.mesh, parts.progress, parts.model.model
        self.seq, device = parts.model.config.seq_len, next(parts.model.parameters()).device
        self.here = (torch.arange(self.seq) if parts.positions is None else parts.positions).to(device)
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
        shards = self.here.split(tokens)
        positions = shards[self.mesh.rank % len(shards)]  # tp is the mesh's last dimension
        first = self.first + self.progress.now * config.micro_batch_size
        seeds = [(config.seed, self.progress.step, sequence, place) for sequence in range(first, first + batch)]
        return torch.stack([mask(config.dropout, seed, positions, (self.seq, dim)) for seed in seeds])


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
