"""Attention with explicit scores (`--attention scores`), and selective recomputation (`--recompute selective`).

Before FlashAttention, softmax(q k^T / sqrt(d)) v was computed with a stored score for each pair of tokens. In long
sequences, scores are most of what a layer keeps for backward. Selective activation recomputation (Korthikanti et al.
2022, section 5) keeps q, k and v, and recomputes scores and softmax, which needs no weights and no messages. (A fused
kernel already does this by itself, tile by tile.) With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads,
s = tokens and e = bytes of an element, a layer keeps for each token these bytes:

    fused                          e (6 h + 2 k + 4 f) + 4 a + 8
    scores                         e (8 h + 4 f + a s) + 8            q, k, v with a heads each, and the probabilities
    scores, --recompute selective  e (6 h + 2 k + 4 f) + 8

The paper's layer, with LayerNorm, GELU and dropout in 16 bits, keeps h (34 + 5 a s / h), and 34 h with recomputation.
In step 1, the function below would replace the model's `attend`, and RECOMPUTE would have one more entry.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from extras.variants import Parts
from extras.variants.record import SET, But, Refusal
from step01_single_gpu import RECOMPUTE
from step05_cp_ring import scaled_scores

RECOMPUTE["selective"] = RECOMPUTE["none"]  # `attach` does the rest


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention: q [batch, seq, heads, head_dim]; k, v [batch, seq, kv_heads, head_dim] -> like q."""
    q, k, v = (x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], dim=1) for x in (q, k, v))
    return (scaled_scores(q, k, causal=True).softmax(-1) @ v).transpose(1, 2)


@dataclass
class Flags:
    """The core of attention."""

    attention: Literal["fused", "scores"] = "fused"  # PyTorch's fused kernel, or explicit scores


NO_SCORES = "no scores exist to recompute; add --attention scores, or use --recompute full"
REFUSES = [
    Refusal(dict(recompute=("selective",), attention=But(("scores",))), NO_SCORES, None),
    Refusal(dict(attention=("scores",), cp=SET), "the ring computes scores already; leave it out"),
    Refusal(dict(attention=("scores",), documents=SET), "documents have attention of their own; leave one out", None),
    Refusal(dict(attention=("scores",), window=SET), "scores have no window; leave one out"),
]


def attach(config: Any, parts: Parts):
    """Replace the attention of every layer, or let backward recompute it, or both."""
    for layer in parts.model.model.layers.values():
        if config.attention == "scores":
            parts.instead(layer.self_attn, "attend", attend, by=__name__)
        if config.recompute == "selective":
            again = partial(checkpoint, use_reentrant=False)  # keeps q, k and v; backward computes attention again
            parts.around(layer.self_attn, "attend", again, by=__name__)
