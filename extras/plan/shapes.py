"""Computes the number of weights and of FLOPs of a model from its sizes."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from common.model import ModelConfig


@dataclass(frozen=True)
class Shape(ModelConfig):
    """The sizes of a decoder. It may have the experts of step 7, or be like GPT-3 (Brown et al. 2020)."""

    experts: int = 0  # number of experts in each layer that has them instead of an MLP; 0: no layer has experts
    experts_per_token: int = 2
    expert_dim: int = 0  # width of an expert; 0: ffn_dim
    shared_experts: int = 0
    moe_every: int = 1
    dense_layers: int = 0  # number of layers at the start that have no experts
    gpt: bool = False  # like GPT-3: MLPs of two matrices, and dropout; its learned positions and biases are not counted

    @property
    def expert_width(self) -> int:
        """The width of an expert's MLP."""
        return self.expert_dim or self.ffn_dim

    @property
    def kv_dim(self) -> int:
        """The number of channels of the keys. The values have as many."""
        return self.n_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is made of experts."""
        after = layer - self.dense_layers - self.moe_every + 1
        return self.experts > 0 and after >= 0 and after % self.moe_every == 0


def shape_of(m: ModelConfig, flags: Any) -> Shape:
    """A model's shape. If `flags` are those of step 7, the shape has the experts that these flags ask for."""
    own = {field.name for field in fields(Shape)} - {field.name for field in fields(ModelConfig)}
    return Shape(**vars(m) | {name: value for name, value in vars(flags).items() if name in own})


def gpt(dim: int, n_layers: int, n_heads: int, vocab_size: int = 51200, seq_len: int = 2048, ffn_dim: int = 0) -> Shape:
    """A shape like GPT-3's, with a tied head. The width of the MLP is 4 dim unless `ffn_dim` is given."""
    return Shape(dim, n_layers, n_heads, n_heads, ffn_dim or 4 * dim, vocab_size, seq_len, tied=True, gpt=True)


GPTS = {
    "gpt3-22b": gpt(6144, 48, 64),
    "gpt3-175b": gpt(12288, 96, 96),
    "gpt3-530b": gpt(20480, 105, 128),
    "gpt3-1t": gpt(25600, 128, 160),
}


def mlp_weights(m: Shape, width: int) -> int:
    """The number of weights of an MLP, or of an expert, of this width."""
    return (2 if m.gpt else 3) * m.dim * width


def layer_weights(m: Shape, experts: bool, tp: int = 1, ep: int = 1) -> tuple[float, float]:
    """The number of weights of one layer on one rank: (those replicated over dp x cp, those of its experts)."""
    kv = m.kv_dim * max(1, tp / m.n_kv_heads)  # neighbouring tp ranks may hold the same key/value head
    shared = (2 * m.dim * m.dim + 2 * m.dim * kv) / tp + 2 * m.dim
    if not experts:
        return shared + mlp_weights(m, m.ffn_dim) / tp, 0.0
    one = mlp_weights(m, m.expert_width)
    return shared + m.dim * m.experts + m.shared_experts * one / tp, m.experts / ep * one


def end_weights(m: Shape, tp: int = 1) -> tuple[int, int]:
    """The number of weights on one tp rank: (the embedding's, those of the final norm and an untied head)."""
    rows = -(-m.vocab_size // tp) * m.dim
    return rows, rows + m.dim


def total_weights(m: Shape) -> float:
    """The number of weights of the whole model."""
    embedding, head = end_weights(m)
    ends = embedding + (m.dim if m.tied else head)
    return ends + sum(n * sum(layer_weights(m, flag)) for flag, n in layer_counts(m).items())


@cache
def layer_counts(m: Shape) -> dict[bool, int]:
    """The number of layers without experts (False) and with experts (True)."""
    experts = sum(m.has_experts(layer) for layer in range(m.n_layers))
    return {False: m.n_layers - experts, True: experts}


def visited_weights(m: Shape, experts: bool) -> int:
    """The number of weights by which one layer multiplies a token."""
    attention = 2 * m.dim * (m.dim + m.kv_dim)
    if not experts:
        return attention + mlp_weights(m, m.ffn_dim)
    return attention + m.dim * m.experts + (m.experts_per_token + m.shared_experts) * mlp_weights(m, m.expert_width)


def flops_per_token(m: Shape, recompute: bool = False) -> tuple[float, float]:
    """FLOPs of training on one token: (model, executed).

    A weight takes 2 FLOPs in forward and 4 in backward. The attention of a layer takes 4 seq_len dim in forward, and
    twice that in backward; by convention masked keys count, too (Chowdhery et al. 2022, appendix B). Executed FLOPs
    include the scores that flash attention computes again in backward and, with `recompute`, a second forward of each
    layer. This second forward ends before an MLP's last matrix, whose output is not needed.
    """
    layers = sum(n * visited_weights(m, flag) for flag, n in layer_counts(m).items())
    attention = 4 * m.n_layers * m.seq_len * m.dim
    model = 6 * (layers + m.vocab_size * m.dim) + 3 * attention
    again = 2 * (layers - layer_counts(m)[False] * m.ffn_dim * m.dim) + attention if recompute else 0
    return model, model + attention / 2 + again


def divisors(n: int) -> Iterator[int]:
    """All divisors of n, in order."""
    low = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    yield from low
    yield from (n // d for d in reversed(low) if d * d != n)
