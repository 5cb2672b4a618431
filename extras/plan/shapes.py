"""The sizes of a model, and the numbers of weights and of FLOPs that follow from them."""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from common.flags import AT_LEAST_2, flag
from common.model import PRESETS, ModelConfig
from common.shapes import model_shape

NEEDS = {"experts": AT_LEAST_2}


@dataclass(frozen=True)
class Experts:
    """Flags of step 7 that give layers experts in place of an MLP. (--dense-layers, of published
    models, is the planner's alone.)
    """

    experts: int = flag(0, "experts in each layer that has them; 0: no layer has experts")
    experts_per_token: int = flag(2, "how many of them a token visits", least=1, needs=NEEDS)
    expert_dim: int = flag(0, "width of an expert; 0: that of the model's MLP", needs=NEEDS)
    shared_experts: int = flag(0, "more experts, which every token visits", needs=NEEDS)
    dense_layers: int = flag(0, "layers at the start that have none", needs=NEEDS)


@dataclass(frozen=True)
class Shape(Experts, ModelConfig):
    """The sizes of a decoder, which may have experts, or be like GPT-3 (Brown et al. 2020)."""

    gpt: bool = (
        False  # MLPs of two matrices, and dropout; learned positions and biases do not count
    )

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
        return self.experts > 0 and layer >= self.dense_layers


def shape_of(config: ModelConfig, flags: Any) -> Shape:
    """A model's shape, with the experts that `flags` ask for if they have such flags."""
    names = {field.name for field in fields(Experts)}
    given = {name: value for name, value in vars(flags).items() if name in names}
    return Shape(**vars(config) | given)


def gpt(
    dim: int, n_layers: int, n_heads: int, vocab_size: int = 51200, seq_len: int = 2048
) -> Shape:
    """A shape like GPT-3's: the head is tied, and the MLP is 4 dim wide."""
    sizes = (dim, n_layers, n_heads, n_heads, 4 * dim, vocab_size, seq_len)
    return Shape(*sizes, tied=True, gpt=True)


GPTS = {
    "gpt3-175b": gpt(12288, 96, 96),
    "gpt3-1t": gpt(25600, 128, 160),
}
NAMES = ", ".join([*PRESETS, *GPTS])


def named_shape(name: str, flags: Any) -> Shape:
    """A GPT, or a preset of the course, perhaps with changes and experts. Raises UserError."""
    return shape_of(GPTS[name] if name in GPTS else model_shape(name), flags)


def mlp_weights(m: Shape, width: int) -> int:
    """The number of weights of an MLP, or of an expert, of this width."""
    return (2 if m.gpt else 3) * m.dim * width


def layer_weights(m: Shape, experts: bool, tp: int = 1, ep: int = 1) -> tuple[float, float]:
    """The weights of one layer on one rank: (those replicated over dp x cp, its experts')."""
    kv_dim = m.kv_dim * max(1, tp / m.n_kv_heads)  # neighbours may hold the same key/value head
    shared = (2 * m.dim * m.dim + 2 * m.dim * kv_dim) / tp + 2 * m.dim
    if not experts:
        return shared + mlp_weights(m, m.ffn_dim) / tp, 0.0
    expert = mlp_weights(m, m.expert_width)
    shared += m.dim * m.experts + m.shared_experts * expert / tp
    return shared, m.experts / ep * expert


def visited_weights(m: Shape, experts: bool) -> int:
    """The number of weights by which one layer multiplies a token."""
    attention = 2 * m.dim * (m.dim + m.kv_dim)
    if not experts:
        return attention + mlp_weights(m, m.ffn_dim)
    visited = m.experts_per_token + m.shared_experts
    return attention + m.dim * m.experts + visited * mlp_weights(m, m.expert_width)


def flops_per_token(m: Shape) -> float:
    """FLOPs of training on one token, by step 1's law; recomputation is not counted.

    A weight takes 2 FLOPs in forward and 4 in backward. Causal attention takes 2 seq_len dim a
    layer in forward, and 5 in backward, where FlashAttention computes the scores once more.
    """
    layers = sum(visited_weights(m, m.has_experts(layer)) for layer in range(m.n_layers))
    return 6 * (layers + m.vocab_size * m.dim) + 7 * m.n_layers * m.seq_len * m.dim


@cache
def divisors(n: int) -> list[int]:
    """All divisors of n, in order."""
    return [d for d in range(1, n + 1) if n % d == 0]
