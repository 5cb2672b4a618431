"""Lab 4: how many bytes tensor parallelism sends and keeps."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from common.model import ModelConfig
from labs.questions import Question
from theory.memory import tp_activation_bytes
from theory.traffic import tp_traffic


def draw_traffic(draw: random.Random) -> dict[str, Any]:
    """A layout for `bytes_per_step`."""
    return dict(tp=draw.choice((2, 4, 8)), b=draw.choice((1, 2, 4)), k=draw.choice((3, 5, 6)),
                s=2048 * draw.randint(1, 3), L=draw.choice((12, 18, 24)), h=512 * draw.randint(2, 6))  # fmt: skip


def traffic_of(v: dict[str, Any], sp: bool) -> float:
    """All bytes that a rank sends over tp in a step."""
    m = ModelConfig(v["h"], v["L"], 16, 8, 4 * v["h"], 50000, v["s"])
    config = SimpleNamespace(micro_batch_size=v["b"], sp=sp, tp_overlap=True, recompute="none")
    return sum(tp_traffic(config, m, v["tp"], torch.bfloat16, v["k"]).values())


def draw_fit(draw: random.Random) -> dict[str, Any]:
    """A model and a layout for `largest_micro_batch`."""
    return dict(tp=draw.choice((4, 8)), s=1024 * draw.randint(3, 9), gib=draw.choice((24, 32, 40)))


def micro_batch_that_fits(v: dict[str, Any], sp: bool = True) -> int:
    """The largest micro-batch of llama3-8b's layers whose activations fit."""
    m = ModelConfig(4096, 32, 32, 8, 14336, 128256, v["s"])
    config = SimpleNamespace(micro_batch_size=1, sp=sp, tp_overlap=True, recompute="none")

    def fits(b: int) -> bool:
        config.micro_batch_size = b
        return tp_activation_bytes(config, m, v["tp"], torch.bfloat16, False) <= v["gib"] * 2**30

    return max((b for b in range(1, 200) if fits(b)), default=0)


def draw_loss(draw: random.Random) -> dict[str, Any]:
    """A layout for `bytes_for_the_loss`."""
    return dict(
        tp=draw.choice((2, 4, 8)), b=draw.choice((1, 2, 4)), s=1024 * draw.randint(2, 8), V=1000 * draw.randint(32, 150)
    )


QUESTIONS = [
    Question(
        "bytes_per_step",
        "--tp {tp} --no-sp, bf16, {L} layers, dim {h}, sequences of {s} tokens, {k} micro-batches of {b} sequences,\n"
        "nothing recomputed, a plain loss in fp32. How many bytes does a rank send over tp in one step?",
        draw_traffic,
        lambda v: traffic_of(v, False),
        mistakes={
            "this is with --sp, where overlap gathers again": lambda v: traffic_of(v, True),
            "this is one micro-batch": lambda v: traffic_of(v, False) / v["k"],
            "this is the layers alone": lambda v: (
                v["k"] * 8 * v["L"] * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["h"] * 2
            ),
        },
    ),
    Question(
        "bytes_of_overlap",
        "--tp {tp} --sp, bf16, {L} layers, dim {h}, {k} micro-batches of {b} sequences\n"
        "of {s} tokens. How many bytes more does --tp-overlap send in a step than --no-tp-overlap, a rank?",
        draw_traffic,
        lambda v: v["k"] * 2 * v["L"] * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["h"] * 2,
        mistakes={
            "two blocks of a layer gather again, attention and MLP": lambda v: (
                v["k"] * v["L"] * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["h"] * 2
            )
        },
    ),
    Question(
        "bytes_for_the_loss",
        "--tp {tp}: for the loss over a vocabulary of {V} words the ranks combine what they found (fp32). How many\n"
        "bytes does a rank send for this, for a micro-batch of {b} sequences of {s} tokens? Without hidden states.",
        draw_loss,
        lambda v: 2 * (v["tp"] - 1) * v["b"] * v["s"] * 4,
        mistakes={
            "this is what gathering the logits would send": lambda v: (
                (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * v["V"] * 4
            ),
            "each rank sends its numbers to all others: (n-1), not (n-1)/n": lambda v: (
                2 * (v["tp"] - 1) / v["tp"] * v["b"] * v["s"] * 4
            ),
        },
    ),
    Question(
        "largest_micro_batch",
        "llama3-8b (dim 4096, 32 layers, 32 heads, 8 key/value heads, ffn_dim 14336, vocabulary 128256), bf16, GPUs,\n"
        "--tp {tp} --sp with overlap, nothing recomputed, sequences of {s} tokens. {gib} GiB are for activations.\n"
        "Which is the largest micro-batch, in sequences? (theory/memory.py, tp_activation_bytes, says what is kept.)",
        draw_fit,
        micro_batch_that_fits,
        tolerance=0.0,
        mistakes={"this is without sequence parallelism": lambda v: micro_batch_that_fits(v, sp=False)},
    ),
]
