"""Lab 7: how many bytes expert parallelism sends, and how many weights a token visits."""

import random
from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any

from common.moe import MoEConfig
from labs.questions import Question
from theory.shapes import of_preset, total_weights, visited_weights
from theory.traffic import Gradients, ep_bytes, gradient_traffic, mean_rows


def draw_experts(draw: random.Random) -> dict[str, Any]:
    """A layout for the questions about bytes."""
    ep = draw.choice((4, 8))
    return dict(ep=ep, E=ep * draw.choice((2, 4, 8)), top=draw.choice((2, 4)), h=512 * draw.randint(2, 8),
                L=draw.choice((12, 24, 32)), b=draw.choice((1, 2)), s=1024 * draw.randint(2, 8),
                k=draw.choice((3, 5, 7)))  # fmt: skip


def shape(v: dict[str, Any]) -> MoEConfig:
    """The shape that a question speaks of."""
    width, vocab = v.get("f", 1024), v.get("V", 32000)
    m = MoEConfig(v["h"], v["L"], 16, 4, 4 * v["h"], vocab_size=vocab, seq_len=v.get("s", 1024))
    return replace(m, experts=v["E"], experts_per_token=v["top"], expert_dim=width, shared_experts=v.get("shared", 0))


def bytes_over_ep(v: dict[str, Any], mode: str, rows: float | None = None) -> float:
    """What a rank sends over ep in a step in bf16, if all experts are equally likely; `rows` sent in a layer."""
    m, tokens, config = shape(v), v["b"] * v["s"], SimpleNamespace(ep_mode=mode)
    rows = mean_rows(m, tokens, v["ep"]) if rows is None else rows
    return v["k"] * v["L"] * sum(ep_bytes(config, m, tokens, v["ep"], 2, rows, rows).values())


def draw_gradients(draw: random.Random) -> dict[str, Any]:
    """A layout for `bytes_of_expert_gradients`."""
    ep = draw.choice((2, 4, 8))
    return dict(ep=ep, dp=ep * draw.choice((2, 4)), cp=draw.choice((2, 4)), E=ep * draw.choice((2, 4)), top=2,
                h=512 * draw.randint(2, 8), f=256 * draw.randint(3, 9), L=draw.choice((12, 24, 32)))  # fmt: skip


def expert_gradients(v: dict[str, Any], ranks: int, experts: float) -> float:
    """Bytes a rank sends for fp32 gradients of so many experts a layer, all-reduced over `ranks`."""
    length = round(v["L"] * experts * 3 * v["h"] * v["f"])
    config = SimpleNamespace(compress="none")
    return sum(gradient_traffic(config, [Gradients("expert_data", ranks, 4 * length, [length])]).values())


def draw_weights(draw: random.Random) -> dict[str, Any]:
    """A model for `share_of_weights`."""
    return dict(E=draw.choice((16, 32, 64)), top=draw.choice((2, 4, 6)), shared=draw.choice((1, 2)),
                h=256 * draw.randint(4, 12), f=256 * draw.randint(2, 6), L=draw.choice((12, 24)))  # fmt: skip


def share_of_weights(v: dict[str, Any], shared: bool = True, attention: bool = True) -> float:
    """The part of the layers' matrices that a token is multiplied with."""
    m = shape(v if shared else v | dict(shared=0))
    if not attention:
        return (m.experts_per_token + m.shared_experts) / (m.experts + m.shared_experts)
    norms = 2 * m.dim * m.n_layers + m.dim
    layers = total_weights(of_preset(m)) - norms - 2 * m.vocab_size * m.dim
    return sum(visited_weights(of_preset(m), n) for n in range(m.n_layers)) / layers


def draw_capacity(draw: random.Random) -> dict[str, Any]:
    """A micro-batch for `tokens_of_an_expert`."""
    return dict(E=draw.choice((8, 16, 64)), top=draw.choice((2, 4)), C=draw.choice((1.0, 1.25, 1.5, 2.0)),
                b=draw.randint(1, 4), s=512 * draw.randint(1, 8), cp=8)  # fmt: skip


def capacity(v: dict[str, Any], factor: float = 1.0) -> int:
    """The most choices that an expert takes in."""
    return ceil(v["C"] * v["b"] * v["s"] * v["top"] * factor / v["E"])


LAYOUT = "bf16, {L} layers of {E} experts each, --experts-per-token {top}, no shared experts, dim {h}"
QUESTIONS = [
    Question(
        "bytes_of_dispatch",
        "--ep {ep} --ep-mode alltoall, --cp 1, --tp 1, " + LAYOUT + ",\n"
        "{k} micro-batches of {b} sequences of {s} tokens on each rank, nothing recomputed. All sets of {top} experts\n"
        "are equally likely. How many bytes does a rank send over ep in one step, on average, counts included?",
        draw_experts,
        lambda v: bytes_over_ep(v, "alltoall"),
        tolerance=0.0005,
        mistakes={
            "a token goes once to each rank, not once to each expert": lambda v: bytes_over_ep(
                v, "alltoall", v["b"] * v["s"] * v["top"] * (v["ep"] - 1) / v["ep"]
            ),
            "this is forward alone": lambda v: bytes_over_ep(v, "alltoall") / 2,
            "this is one micro-batch": lambda v: bytes_over_ep(v | dict(k=1), "alltoall"),
            "this is --ep-mode allgather": lambda v: bytes_over_ep(v, "allgather"),
        },
    ),
    Question(
        "bytes_of_gathering",
        "--ep {ep} --ep-mode allgather, --cp 1, --tp 1, " + LAYOUT + ",\n"
        "{k} micro-batches of {b} sequences of {s} tokens on each rank, nothing recomputed.\n"
        "How many bytes does a rank send over ep in one step?",
        draw_experts,
        lambda v: bytes_over_ep(v, "allgather"),
        tolerance=0.0005,
        mistakes={
            "this is forward alone": lambda v: bytes_over_ep(v, "allgather") / 2,
            "T is the tokens of one rank: the gathered tensor is ep times as large": lambda v: (
                bytes_over_ep(v, "allgather") / v["ep"]
            ),
            "this is --ep-mode alltoall": lambda v: bytes_over_ep(v, "alltoall"),
        },
    ),
    Question(
        "bytes_of_expert_gradients",
        "dp {dp} x cp {cp}, --ep {ep}, --tp 1, --zero 0, {L} layers of {E} experts of width {f}, dim {h}, gradients\n"
        "in fp32. How many bytes does a rank send in one step for the gradients of its experts (a ring all-reduce)?",
        draw_gradients,
        lambda v: expert_gradients(v, v["dp"] * v["cp"] // v["ep"], v["E"] / v["ep"]),
        mistakes={
            "only the ranks that hold the same experts sum their gradients": lambda v: expert_gradients(
                v, v["dp"] * v["cp"], v["E"] / v["ep"]
            ),
            "this is for all experts, of which a rank holds E/ep": lambda v: expert_gradients(
                v, v["dp"] * v["cp"] // v["ep"], v["E"]
            ),
            "SwiGLU has three matrices": lambda v: (
                expert_gradients(v, v["dp"] * v["cp"] // v["ep"], v["E"] / v["ep"]) * 2 / 3
            ),
        },
    ),
    Question(
        "share_of_weights",
        "{L} layers, dim {h}, 16 heads, 4 key/value heads; each layer has {E} experts of width {f}, of which a token\n"
        "visits {top}, and {shared} more of this width that every token visits. Which part of the weights of all the\n"
        "layers' matrices (attention, router, experts) is a token multiplied with (0 to 1)?",
        draw_weights,
        share_of_weights,
        mistakes={
            "this is of the experts alone": lambda v: share_of_weights(v, attention=False),
            "this is without the shared experts": lambda v: share_of_weights(v, shared=False),
        },
    ),
    Question(
        "tokens_of_an_expert",
        "--capacity-factor {C}, {E} experts, --experts-per-token {top}, --cp {cp}, micro-batches of {b} sequences\n"
        "of {s} tokens. How many choices of a micro-batch does an expert take in at most?",
        draw_capacity,
        capacity,
        tolerance=0.0,
        mistakes={
            "each token has --experts-per-token choices": lambda v: capacity(v, 1 / v["top"]),
            "the ranks of cp share a micro-batch; capacity is for all of it": lambda v: capacity(v, 1 / v["cp"]),
        },
    ),
]
