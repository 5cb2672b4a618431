"""Lab 1: bytes and FLOPs of one device."""

import random
from dataclasses import replace
from typing import Any

import torch

from common.model import PRESETS, ModelConfig
from labs.questions import Question
from theory.flops import flops_per_token, matmul_weights
from theory.memory import activation_bytes


def draw_model(draw: random.Random) -> dict[str, Any]:
    """A shape, spelled out."""
    heads = draw.choice((8, 16, 24))
    return dict(L=draw.randint(10, 40), h=128 * heads, a=heads, g=draw.choice((2, 4, 8)), f=256 * draw.randint(10, 40),
                V=1000 * draw.randint(32, 128))  # fmt: skip


def shape(v: dict[str, Any]) -> ModelConfig:
    """The model of a question."""
    return ModelConfig(v["h"], v["L"], v["a"], v["g"], v["f"], v["V"], seq_len=2048)


def parameters(v: dict[str, Any]) -> int:
    """All of them: matrices of layers, embedding and head, norms."""
    layer, head = matmul_weights(shape(v))
    return v["L"] * (layer + 2 * v["h"]) + 2 * head + v["h"]


def draw_speed(draw: random.Random) -> dict[str, Any]:
    """A measured speed of llama3-8b's shape."""
    peak = draw.choice((312, 989))
    return dict(s=1024 * draw.randint(2, 8), T=peak * draw.randint(500, 900) // 100, peak=peak)


def long(v: dict[str, Any], preset: str = "llama3-8b") -> ModelConfig:
    """A preset with the question's sequence length."""
    return replace(PRESETS[preset], seq_len=v["s"])


def utilization(v: dict[str, Any], per_token: float) -> float:
    """FLOPs a second of the peak's."""
    return per_token * v["T"] / (v["peak"] * 1e12)


def without_attention(v: dict[str, Any]) -> float:
    """6 N."""
    layer, head = matmul_weights(long(v))
    return 6 * (32 * layer + head)


def draw_days(draw: random.Random) -> dict[str, Any]:
    """A training run of smollm-1.7b's shape."""
    return dict(
        s=1024 * draw.randint(1, 4), T=draw.randint(20, 400), peak=draw.choice((312, 989)), u=draw.randint(35, 50)
    )


def days(v: dict[str, Any], recompute: str = "full") -> float:
    """Days of T billion tokens, if what is executed runs at u % of the peak."""
    return (
        flops_per_token(long(v, "smollm-1.7b"), recompute)[1] * v["T"] * 1e9 / (v["u"] / 100 * v["peak"] * 1e12) / 86400
    )


def draw_fit(draw: random.Random) -> dict[str, Any]:
    """Memory for activations."""
    return dict(s=1024 * draw.randint(2, 6), gib=draw.choice((24, 32, 40)))


def that_fits(v: dict[str, Any], recompute: str) -> int:
    """The largest micro-batch of llama3.2-1b's shape whose activations fit."""

    def fits(batch: int) -> bool:
        return activation_bytes(long(v, "llama3.2-1b"), batch, torch.bfloat16, recompute, False) <= v["gib"] * 2**30

    return max((b for b in range(1, 2000) if fits(b)), default=0)


QUESTIONS = [
    Question(
        "bytes_of_training",
        "{L} layers, dim {h}, {a} heads, {g} key/value heads, ffn_dim {f}, vocabulary {V}, head not tied, AdamW,\n"
        "--dtype bf16 --grad-dtype fp32. How many bytes are weights, gradients, masters and moments together?",
        draw_model,
        lambda v: 18 * parameters(v),
        tolerance=1e-5,
        mistakes={
            "this is --grad-dtype same": lambda v: 16 * parameters(v),
            "the embedding is one matrix and the head another": lambda v: 18 * (parameters(v) - v["V"] * v["h"]),
            "norms have weights, too": lambda v: 18 * (parameters(v) - (2 * v["L"] + 1) * v["h"]),
        },
    ),
    Question(
        "utilization",
        "llama3-8b's shape (dim 4096, 32 layers, 8 key/value heads of 128, ffn_dim 14336, vocabulary 128256),\n"
        "sequences of {s} tokens, --recompute full: {T} tokens per second on a GPU whose peak is {peak} TFLOP/s.\n"
        "What is the MFU (0 to 1)?",
        draw_speed,
        lambda v: utilization(v, flops_per_token(long(v), "full")[0]),
        mistakes={
            "this is the HFU, which counts what is computed again": lambda v: utilization(
                v, flops_per_token(long(v), "full")[1]
            ),
            "attention's matmuls count, too": lambda v: utilization(v, without_attention(v)),
        },
    ),
    Question(
        "days_of_training",
        "smollm-1.7b's shape (dim 2048, 24 layers, 32 key/value heads of 64, ffn_dim 8192, vocabulary 49152),\n"
        "{s} tokens a sequence, --recompute full. The GPU executes {u} % of its {peak} TFLOP/s (this is the HFU).\n"
        "How many days do {T} billion tokens take?",
        draw_days,
        days,
        mistakes={"full recomputation executes more": lambda v: days(v, "none")},
    ),
    Question(
        "largest_micro_batch",
        "llama3.2-1b's shape (dim 2048, 16 layers, 32 heads, 8 key/value heads, ffn_dim 8192, vocabulary 128256),\n"
        "bf16, a GPU, sequences of {s} tokens, --recompute selective. {gib} GiB are for activations.\n"
        "Which is the largest micro-batch, in sequences?",
        draw_fit,
        lambda v: that_fits(v, "selective"),
        tolerance=0.0,
        mistakes={
            "this is without recomputation": lambda v: that_fits(v, "none"),
            "this is with full recomputation": lambda v: that_fits(v, "full"),
        },
    ),
]
