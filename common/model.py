"""The decoder: a Llama-style language model in plain PyTorch. It knows nothing of ranks.

    tokens [batch, seq] -> embed_tokens -> layers 0..L-1 -> norm -> lm_head -> logits -> summed loss

    layer:   x = x + self_attn(input_layernorm(x))
             x = x + mlp(post_attention_layernorm(x))

    self_attn    rotates q and k by position (RoPE); a group of query heads shares one k and v (GQA)
    mlp          is a SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x))
    norms        are RMSNorms: x / sqrt(mean(x^2) + eps) * weight

Names, shapes and the RoPE convention are those of Hugging Face's `LlamaForCausalLM`, which loads
this model's state dict. Attention gets its number of heads from the width of q, k and v (in
`split_heads`), so a rank with only some heads' weights runs the same code.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100  # a target with this value counts neither in the loss nor among the target tokens


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    seq_len: int
    tied: bool = False  # one matrix serves as embedding and as head
    rope_theta: float = 10000.0
    rope_scaling: float = 1.0  # RoPE's low frequencies are divided by this (`rope_tables`)
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads


# SmolLM, not SmolLM2, whose rope_theta is larger
SMOLLM = dict(vocab_size=49152, seq_len=2048, tied=True)
# seq_len is Llama 3's; Llama 3.2 (1b) and 3.1 (405b) allow longer sequences
LLAMA3 = dict(vocab_size=128256, seq_len=8192, rope_theta=500000.0)
PRESETS = {  # dim, n_layers, n_heads, n_kv_heads, ffn_dim
    "debug": ModelConfig(64, 2, 4, 2, 176, vocab_size=257, seq_len=64),
    "tiny": ModelConfig(128, 4, 8, 4, 352, vocab_size=257, seq_len=256),
    "smollm-135m": ModelConfig(576, 30, 9, 3, 1536, **SMOLLM),
    "smollm-360m": ModelConfig(960, 32, 15, 5, 2560, **SMOLLM),
    "smollm-1.7b": ModelConfig(2048, 24, 32, 32, 8192, **SMOLLM),
    "llama3.2-1b": ModelConfig(2048, 16, 32, 8, 8192, **LLAMA3, tied=True, rope_scaling=32.0),
    "llama3-8b": ModelConfig(4096, 32, 32, 8, 14336, **LLAMA3),
    "llama3-70b": ModelConfig(8192, 80, 64, 8, 28672, **LLAMA3),
    "llama3-405b": ModelConfig(16384, 126, 128, 8, 53248, **LLAMA3, rope_scaling=8.0),
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, but at least fp32, for sums, RoPE's angles and the optimizer's copies of weights.
    bf16 and fp32 -> fp32; fp64 -> fp64.
    """
    return torch.promote_types(dtype, torch.float32)


def rope_tables(
    positions: Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of RoPE (Su et al., "RoFormer"). Pair j is the channels j and j +
    head_dim/2 of a head. At position p it is turned by the angle p x theta^(-2 j / head_dim), if
    `rope_scaling` is 1. So a query and a key are turned by angles that differ in proportion to the
    distance of their positions: of the two positions, only this distance enters their product.

    positions int64 [seq] -> two tensors [seq, 1, head_dim], in `dtype`, which is fp32 or wider. The
    axis of size 1 is broadcast over the heads.
    """
    j = torch.arange(config.head_dim // 2, device=positions.device, dtype=dtype)
    frequency = config.rope_theta ** -(2 * j / config.head_dim)
    if config.rope_scaling != 1.0:
        # Llama 3.1 and 3.2 stretch RoPE to more than Llama 3's 8192 tokens. A pair with 4 full
        # turns or more within 8192 tokens keeps its frequency. With 1 turn or fewer it is divided
        # by `rope_scaling`, and between the two it is interpolated
        turns = 8192 * frequency / (2 * torch.pi)
        keep = ((turns - 1) / (4 - 1)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / config.rope_scaling)
    angle = positions[:, None] * frequency  # [seq, head_dim/2]
    # Both channels of a pair have the same angle
    angles = torch.cat((angle, angle), dim=-1)[:, None]  # [seq, 1, head_dim]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: rotate each pair of channels. With a in channel j, and b in channel j + head_dim/2,

        a becomes a cos - b sin
        b becomes b cos + a sin

    x [batch, seq, heads, head_dim] -> like x.
    """
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((-b, a), dim=-1)  # what the sines multiply
    # x * cos + turned * sin, in the tables' dtype; addcmul saves one pass over memory
    return torch.addcmul(x * cos, turned, sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: softmax(q k^T / sqrt(head_dim)) v, where a token attends to itself and to
    the tokens before it.

    q [batch, seq, heads, head_dim]; k, v [batch, seq, kv_heads, head_dim] -> like q.
    """
    # -> [batch, heads, seq, head_dim]
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    # enable_gqa: query head h uses key/value head h // (heads / kv_heads)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query self-attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.n_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.attend = attend  # step 5 replaces it

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, seq, dim] and the tables of `rope_tables` -> [batch, seq, dim]."""
        q = rotate(self.split_heads(self.q_proj(x)), cos, sin)
        k = rotate(self.split_heads(self.k_proj(x)), cos, sin)
        v = self.split_heads(self.v_proj(x))
        o = self.attend(q, k, v)
        return self.o_proj(o.flatten(-2))

    def split_heads(self, x: Tensor) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width / head_dim, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    """SwiGLU (Shazeer, "GLU Variants Improve Transformer")."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP. Each reads a normalised copy of x, and its output is added to x. (x is
    called the residual stream.)
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """The decoder without its head. It only gives modules Hugging Face's names; `Decoder.forward`
    calls them. The keys of `layers` are layer numbers in the whole model, also where step 6 has
    deleted other ranks' layers.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The *sum* of -ln(probability of the target), over all targets except IGNORE.

    logits [batch, seq, vocab], targets int64 [batch, seq] -> a scalar.
    """
    flat = logits.flatten(0, 1).to(wide(logits.dtype))
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Decoder(nn.Module):
    """The whole model. Build it under `torch.device("meta")`, where tensors have a shape but no
    memory, and fill it with `materialize` of common/initial.py.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.loss = summed_cross_entropy  # step 4 replaces it
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the summed loss of tokens and targets, int64 [batch, seq].

        positions: int64 [seq]; by default 0, 1, 2, ...
        """
        x = self.model.embed_tokens(tokens)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_tables(positions, self.config, wide(x.dtype))
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)
        logits = self.lm_head(self.model.norm(x))
        return self.loss(logits, targets)
