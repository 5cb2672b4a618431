"""Bytes that the forward pass of a micro-batch leaves for backward, on one rank."""

from common.model import ModelConfig
from theory.flops import Experts


def layer_bytes(
    m: ModelConfig,
    tokens: int,
    e: int,
    wide: int,
    tp: int,
    sp: bool,
    recompute: bool,
    on_cpu: bool,
    experts: Experts | None,
) -> float:
    """What one layer keeps of `tokens` of a rank; all inside the blocks is 1/tp wide, with SP all between is, too.

    Two norms: input, one wide number (on a CPU also what its kernels keep). Attention: input, q, k, v, output and a
    number a head. MLP: input, gate, up, silu(gate), the product. Experts: the same for each that a token visits, and
    their outputs. With recomputation only the layer's input stays.
    """
    own = tokens / tp if sp else tokens
    if recompute:
        return own * m.dim * e
    norm = m.dim * e + wide + on_cpu * m.dim * (2 * wide - e if e < wide else wide)
    kv_heads = m.n_kv_heads if on_cpu or e == 2 else m.n_heads  # a GPU's kernels in fp32 want as many k as q
    attention = m.dim * e + (e * (2 * m.dim + 2 * kv_heads * m.head_dim) + wide * m.n_heads) / tp
    if experts is None:
        mlp = m.dim * e + 4 * m.ffn_dim * e / tp
    else:
        rows = experts.visited * e * (2 * m.dim + 4 * experts.width / tp)
        mlp = rows + (m.dim * wide if wide != e else m.dim * e) + 2 * experts.number * wide
    return own * 2 * norm + tokens * (attention + mlp)


def end_bytes(m: ModelConfig, tokens: int, e: int, wide: int, tp: int, sp: bool, on_cpu: bool) -> float:
    """What norm, head and loss keep: the inputs of norm and head, and the logarithms of all probabilities."""
    own = tokens / tp if sp else tokens
    norm = m.dim * e + wide + on_cpu * m.dim * (2 * wide - e if e < wide else wide)
    return own * norm + tokens * (m.dim * e + wide * -(-m.vocab_size // tp))
