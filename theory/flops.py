"""FLOPs of training on one token."""

from typing import NamedTuple

from common.model import ModelConfig


class Experts(NamedTuple):
    """What a layer has in place of one MLP: how many, how many a token visits, and their width."""

    number: int
    visited: int
    width: int


def flops_per_token(m: ModelConfig, recompute: bool = False, experts: Experts | None = None) -> tuple[float, float]:
    """FLOPs of training on one token: (model, executed).

    A token is multiplied with each weight that it meets once, 2 FLOPs, and backward does twice as much: 6. Attention to
    seq_len keys is 4 seq_len dim forward, and three times that in all; that keys come later is not subtracted, by
    convention (Chowdhery et al. 2022, appendix B). Executed are also the scores, once more in flash attention's
    backward, and a layer's forward, if it is recomputed: up to its last matrix, whose output nobody keeps; with
    experts, to its end.
    """
    kv_dim = m.n_kv_heads * m.head_dim
    mlp = 3 * m.ffn_dim if experts is None else 3 * experts.visited * experts.width + experts.number
    layer, head = m.dim * (2 * m.dim + 2 * kv_dim + mlp), m.vocab_size * m.dim
    attention = 4 * m.n_layers * m.seq_len * m.dim
    model = 6 * (m.n_layers * layer + head) + 3 * attention
    last = m.ffn_dim * m.dim if experts is None else 0
    again = 2 * m.n_layers * (layer - last) + attention if recompute else 0
    return model, model + attention / 2 + again
