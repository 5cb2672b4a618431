"""FLOPs of training on one token, and how layers are dealt to stages by their cost."""

from collections.abc import Iterable
from itertools import accumulate
from math import inf
from typing import Any

from common.model import ModelConfig
from common.moe import MoEConfig


def matmul_weights(m: ModelConfig) -> tuple[int, int]:
    """Numbers of weights that tokens are multiplied with: in one layer, in the head."""
    kv_dim = m.n_kv_heads * m.head_dim
    return m.dim * (2 * m.dim + 2 * kv_dim + 3 * m.ffn_dim), m.vocab_size * m.dim


def flops_per_token(m: ModelConfig, recompute: str) -> tuple[float, float]:
    """FLOPs of training on one token: (model, executed); see FLOPs in step 1's docstring."""
    layer, head = matmul_weights(m)
    attention = 4 * m.n_layers * m.seq_len * m.dim
    model = 6 * (m.n_layers * layer + head) + 3 * attention
    again = 2 * m.n_layers * (layer - m.ffn_dim * m.dim) + attention if recompute == "full" else 0
    return model, model + attention / 2 + again


def scores_seen(mode: str, seq_len: int, cp: int, rank: int) -> float:
    """Scores of one head and sequence that a rank's kernels compute, of seq_len^2: causal attention skips half.

    In the plain ring, rank r of cp sees its own keys, and all of r other ranks'. In the other modes all see as many.
    """
    return (seq_len / cp) ** 2 * (0.5 + rank if mode == "ring" else 0.5 * cp)


def rank_flops(
    config: Any,
    m: ModelConfig,
    passed: Iterable[tuple[Iterable[int], bool, int]],
    tp: int,
    cp: int,
    cp_rank: int,
    split: bool,
) -> dict[str, float]:
    """FLOPs of one rank in a step, executed, with what is done again: of matmuls, and of fused attention.

    `passed`: for each of its stages the numbers of its layers, whether it has the head, and its micro-batches. With
    full recomputation a layer is done again up to its last matmul; that is done, too, where backward is written by hand
    (`split`: with W apart from B, and with --fuse-gradients).
    """
    tokens, again = config.micro_batch_size * m.seq_len // cp, config.recompute == "full"
    kv_dim, own = max(1, m.n_kv_heads // tp) * m.head_dim, tokens // tp if getattr(config, "sp", False) else tokens
    attention = m.dim * (2 * m.dim // tp + 2 * kv_dim)
    seen = scores_seen(getattr(config, "cp_mode", ""), m.seq_len, cp, cp_rank)
    core = 4 * config.micro_batch_size * seen * m.dim / tp
    found = dict(matmul=0.0, attention=0.0)
    for layers, head, times in passed:
        for number in layers:
            if getattr(m, "experts", 0) and m.has_experts(number):
                width = m.expert_width * (m.experts_per_token + m.shared_experts)
                products = 2.0 * tokens * (attention + 3 * m.dim * width // tp) + 2 * own * m.experts * m.dim
                redone = products
            else:
                products = 2.0 * tokens * (attention + 3 * m.dim * m.ffn_dim // tp)
                redone = products - (not split) * 2 * tokens * m.dim * m.ffn_dim // tp
            found["matmul"] += times * (3 * products + again * redone)
            found["attention"] += times * (3.5 + again) * core
        found["matmul"] += times * head * 6 * tokens * -(-m.vocab_size // tp) * m.dim
    return found


def newton_schulz_flops(rows: int, columns: int, iterations: int = 5) -> float:
    """FLOPs of making one matrix orthogonal (services/muon.py): in an iteration x x^T, its square, and that times x."""
    short, long = sorted((rows, columns))
    return iterations * 2.0 * (2 * short**2 * long + short**3)


def layer_costs(m: ModelConfig) -> list[float]:
    """Multiply-adds of a token in each layer: its matmuls (of the experts, those that it visits) and attention."""
    dense = matmul_weights(m)[0] + 2.0 * m.seq_len * m.dim
    if not hasattr(m, "experts"):
        return [dense] * m.n_layers
    return [dense + more_weights(m) * m.has_experts(number) for number in range(m.n_layers)]


def balanced_layers(m: ModelConfig, stages: int) -> list[int]:
    """Layers of each stage, balanced by multiply-adds of a token; head and embedding (a row) count, too."""
    costs = layer_costs(m)
    costs[0] += m.dim
    costs[-1] += matmul_weights(m)[1]
    return balance(costs, stages)


def times_of_parts(m: ModelConfig, recompute: str) -> tuple[float, float, float]:
    """Multiply-adds of a token in a layer, on average: forward, gradient of the input, gradient of the weights.

    Backward of flash attention computes the scores again. With full recomputation, B does the whole forward again.
    """
    attention, forward = 2.0 * m.seq_len * m.dim, sum(layer_costs(m)) / m.n_layers
    weights = forward - attention
    return forward, weights + 2.5 * attention + forward * (recompute == "full"), weights


def more_weights(m: MoEConfig) -> int:
    """Weights that a token visits in a layer with experts, less those of the dense MLP whose place they take."""
    visited = 3 * m.dim * m.expert_width * (m.experts_per_token + m.shared_experts) + m.dim * m.experts
    return visited - 3 * m.dim * m.ffn_dim


def moe_layers(m: MoEConfig) -> int:
    """Number of layers with experts."""
    return sum(m.has_experts(layer) for layer in range(m.n_layers))


def moe_flops_per_token(m: MoEConfig, recompute: str) -> tuple[float, float]:
    """Step 1's (model, executed) FLOPs of training on one token; of the experts, only those it visits count.

    With full recomputation a layer with experts is done again to its end, as backward needs the experts' outputs.
    """
    model, executed = flops_per_token(m, recompute)
    more = more_weights(m)
    model += 6 * moe_layers(m) * more
    executed += 6 * moe_layers(m) * more
    if recompute == "full":
        executed += 2 * moe_layers(m) * (more + m.ffn_dim * m.dim)
    return model, executed


def balance(costs: list[float], n: int) -> list[int]:
    """Cut a row of costs into `n` parts that are not empty, the dearest as cheap as can be; returns their lengths.

    Among equals, the one whose costs are most alike (least sum of squares).
    """
    until = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}  # end of the last part -> (dearest, squares)
    for part in range(1, n + 1):
        following: dict[int, tuple[float, float, list[int]]] = {}
        for end in range(part, len(costs) - n + part + 1):
            least = (inf, inf, [])
            for start in range(end - 1, part - 2, -1):
                cost = until[end] - until[start]
                if cost > least[0]:  # and parts that begin earlier cost more
                    break
                if start not in best:
                    continue
                dearest, squares, lengths = best[start]
                if (found := (max(dearest, cost), squares + cost**2)) <= least[:2]:
                    least = min(least, (*found, [*lengths, end - start]))
            following[end] = least
        best = following
    return best[len(costs)][2]
