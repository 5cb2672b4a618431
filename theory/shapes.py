"""The models that the planner knows: Llama's and MoE presets, GPT, and DeepSeek's latent attention. Pure shapes."""

from dataclasses import dataclass, fields
from functools import cache
from math import prod
from typing import NamedTuple

from common.model import ModelConfig
from common.moe import MOE_PRESETS, MoEConfig
from theory.flops import moe_layers


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): sizes of the compressed queries, keys and heads."""

    q_rank: int = 1536
    kv_rank: int = 512
    plain: int = 128  # of a head's query and key, without position
    rope: int = 64  # of a head's query and key, with RoPE
    value: int = 128  # of a head's value


@dataclass(frozen=True)
class Shape(MoEConfig):
    """A decoder's shape, with what the course's own models do not have. `mlp_matrices`: 3 for SwiGLU, 2 for GPT."""

    mlp_matrices: int = 3
    learned_positions: bool = False  # a matrix [seq, dim]; and no RoPE, LayerNorm, biases and dropout: GPT
    latent: Latent | None = None


class Matmul(NamedTuple):
    """A weight matrix that tokens are multiplied with, uncut, and how tensor parallelism cuts it."""

    name: str
    inner: int
    outer: int
    cut: str  # "columns", "rows" or ""


def of_preset(m: ModelConfig) -> Shape:
    """A shape of common/ as a `Shape`."""
    return Shape(**{field.name: getattr(m, field.name) for field in fields(m)})


def attention_matmuls(m: Shape) -> list[Matmul]:
    """The matrices of one layer's attention."""
    if m.latent is None:
        kv = m.n_kv_heads * m.head_dim
        return [Matmul("qkv", m.dim, m.dim + 2 * kv, "columns"), Matmul("o", m.dim, m.dim, "rows")]
    q_rank, kv_rank, plain, rope, value = m.latent
    return [
        Matmul("q down", m.dim, q_rank, ""),
        Matmul("q up", q_rank, m.n_heads * (plain + rope), "columns"),
        Matmul("kv down", m.dim, kv_rank + rope, ""),
        Matmul("kv up", kv_rank, m.n_heads * (plain + value), "columns"),
        Matmul("o", m.n_heads * value, m.dim, "rows"),
    ]


def mlp_matmuls(m: Shape, width: int, name: str = "mlp") -> list[Matmul]:
    """The matrices of an MLP (or of an expert) of this width."""
    up = (m.mlp_matrices - 1) * width
    return [Matmul(f"{name} up", m.dim, up, "columns"), Matmul(f"{name} down", width, m.dim, "rows")]


def head_widths(m: Shape) -> tuple[int, int]:
    """Channels of all heads together: of queries (as of keys, repeated), of values (as of the output)."""
    if m.latent is None:
        return m.dim, m.dim
    return m.n_heads * (m.latent.plain + m.latent.rope), m.n_heads * m.latent.value


def kv_width(m: Shape) -> int:
    """Channels of keys and values that attention reads, per token."""
    return 2 * m.n_kv_heads * m.head_dim if m.latent is None else sum(head_widths(m))


def weights(matmuls: list[Matmul], tp: int = 1) -> float:
    """Numbers in these matrices on one of tp ranks."""
    return sum(prod(matmul[1:3]) / (tp if matmul.cut else 1) for matmul in matmuls)


def vectors(m: Shape, tp: int = 1) -> int:
    """Numbers in one layer's norms (and, for GPT, its biases)."""
    norms = (4 if m.learned_positions else 2) * m.dim + (sum(m.latent[:2]) if m.latent else 0)
    return norms + m.learned_positions * (2 * m.dim + (3 * m.dim + m.ffn_dim) // tp)


def layer_weights(m: Shape, experts: bool, tp: int = 1, ep: int = 1) -> tuple[float, float]:
    """Numbers of one layer on one rank: (replicated over dp x cp, of the experts)."""
    shared = weights(attention_matmuls(m), tp) + vectors(m, tp)
    if m.latent is None and tp > m.n_kv_heads:  # neighbouring ranks hold the same head
        shared += 2 * m.dim * m.head_dim * (1 - m.n_kv_heads / tp)
    if not experts:
        return shared + weights(mlp_matmuls(m, m.ffn_dim), tp), 0
    one = weights(mlp_matmuls(m, m.expert_width), tp)
    return shared + m.dim * m.experts + m.shared_experts * one, m.experts / ep * one


def end_weights(m: Shape, tp: int = 1) -> tuple[float, float]:
    """Numbers in the embedding (and learned positions), and in the head with the final norm."""
    rows = -(-m.vocab_size // tp) * m.dim
    positions = m.seq_len * m.dim * m.learned_positions
    return rows + positions, rows + m.dim * (1 + m.learned_positions)


def total_weights(m: Shape) -> float:
    """Numbers in the whole model."""
    embedding, head = end_weights(m)
    layers = sum(sum(layer_weights(m, m.has_experts(n))) for n in range(m.n_layers))
    return layers + embedding + (m.dim * (1 + m.learned_positions) if m.tied else head)


def visited_weights(m: Shape, layer: int) -> float:
    """Numbers of one layer that a token is multiplied with."""
    attention = weights(attention_matmuls(m))
    if not m.has_experts(layer):
        return attention + weights(mlp_matmuls(m, m.ffn_dim))
    visits = m.experts_per_token + m.shared_experts
    return attention + m.dim * m.experts + visits * weights(mlp_matmuls(m, m.expert_width))


@cache
def layer_counts(m: Shape) -> dict[bool, int]:
    """How many layers have no experts, and how many have."""
    experts = moe_layers(m)
    return {False: m.n_layers - experts, True: experts}


@cache
def model_flops(m: Shape) -> float:
    """FLOPs of training on one token: 6 for each weight it visits, and attention's, as if every token saw all others.

    For Llama's and the course's MoE shapes this is `model` of theory/flops.py.
    """
    matmuls = sum(visited_weights(m, n) for n in range(m.n_layers)) + m.vocab_size * m.dim
    return 6 * matmuls + 6 * m.n_layers * m.seq_len * sum(head_widths(m))


def gpt(dim: int, n_layers: int, n_heads: int, vocab_size: int = 51200, seq_len: int = 2048, ffn_dim: int = 0) -> Shape:
    """GPT-3's shape (Brown et al. 2020): an MLP of two matrices of width 4 dim, learned positions, a tied head."""
    sizes = (dim, n_layers, n_heads, n_heads, ffn_dim or 4 * dim, vocab_size, seq_len)
    return Shape(*sizes, tied=True, mlp_matrices=2, learned_positions=True)


MODELS = {name: of_preset(m) for name, m in MOE_PRESETS.items()} | {
    "gpt3-22b": gpt(6144, 48, 64),
    "gpt3-175b": gpt(12288, 96, 96),
    "gpt3-530b": gpt(20480, 105, 128),
    "gpt3-1t": gpt(25600, 128, 160),
}
