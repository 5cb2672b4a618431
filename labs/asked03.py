"""Lab 3: what a rank holds and sends under ZeRO."""

import random
from typing import Any

from labs.questions import Question

GIB = 2**30


def held(v: dict[str, Any], stage: int, n: int) -> float:
    """Bytes of weights, gradients, masters and moments on a rank: bf16, fp32 sums; the docstring's second table."""
    weight, gradient, states = 2, 4, 12
    per_parameter = (
        weight / (n if stage == 3 else 1) + gradient / (n if stage >= 2 else 1) + states / (n if stage >= 1 else 1)
    )
    return v["P"] * 1e6 * per_parameter


def draw_held(draw: random.Random) -> dict[str, Any]:
    """A model, a stage and a number of ranks."""
    return dict(P=100 * draw.randint(3, 90), n=draw.choice((4, 8, 16, 32, 64)), stage=draw.choice((1, 2)))


def draw_fit(draw: random.Random) -> dict[str, Any]:
    """A model that does not fit on one GPU, and the room that it has."""
    return dict(P=1000 * draw.randint(9, 40), gib=draw.choice((24, 40, 60)))


def ranks_that_suffice(v: dict[str, Any], bytes_per_parameter: int = 18) -> int:
    """The smallest n with 18 P / n in the room."""
    return -int(-v["P"] * 1e6 * bytes_per_parameter // (v["gib"] * GIB))


def draw_sent(draw: random.Random) -> dict[str, Any]:
    """A model, its parts, ranks and micro-batches."""
    layers = draw.randint(12, 40)
    return dict(L=layers, layer=draw.randint(5, 90), E=draw.randint(20, 200), n=draw.choice((4, 8, 16)),
                k=draw.randint(2, 8))  # fmt: skip


def parameters(v: dict[str, Any]) -> float:
    """Of all layers, embedding and head."""
    return (v["L"] * v["layer"] + 2 * v["E"]) * 1e6


def stage_2(v: dict[str, Any], times: int) -> float:
    """Bytes of gradients so many times, and of weights once."""
    return (v["n"] - 1) / v["n"] * parameters(v) * (4 * times + 2)


def stage_3(v: dict[str, Any], twice: float, gradient: int = 4) -> float:
    """Bytes of gradients and weights in each micro-batch; `twice`: parameters that are gathered twice."""
    return (v["n"] - 1) / v["n"] * v["k"] * (gradient * parameters(v) + 2 * (parameters(v) + twice))


QUESTIONS = [
    Question(
        "bytes_held",
        "{P} million parameters, AdamW, --dtype bf16 --grad-dtype fp32, --zero {stage} on {n} ranks.\n"
        "How many bytes of weights, gradients, masters and moments does a rank hold? (Leave padding aside.)",
        draw_held,
        lambda v: held(v, v["stage"], v["n"]),
        mistakes={
            "this is the stage after it, where more is cut": lambda v: held(v, v["stage"] + 1, v["n"]),
            "this is the stage before it, where less is cut": lambda v: held(v, v["stage"] - 1, v["n"]),
            "this is --grad-dtype same": lambda v: (
                held(v, v["stage"], v["n"]) - 2e6 * v["P"] / (v["n"] if v["stage"] == 2 else 1)
            ),
        },
    ),
    Question(
        "ranks_that_suffice",
        "{P} million parameters, AdamW, --dtype bf16 --grad-dtype fp32, --zero 3. Each GPU has {gib} GiB (2^30 bytes)\n"
        "for weights, gradients, masters and moments. What is the smallest number of ranks on which they fit?",
        draw_fit,
        ranks_that_suffice,
        tolerance=0.0,
        mistakes={
            "fp32 sums of gradients have 4 bytes, so 18 in all": lambda v: ranks_that_suffice(v, 16),
        },
    ),
    Question(
        "bytes_sent_in_stage_2",
        "{L} layers of {layer} million parameters, embedding and head of {E} million each (not tied). --zero 2,\n"
        "--dtype bf16 --grad-dtype fp32, {n} ranks, {k} micro-batches. How many bytes does a rank send in a step?",
        draw_sent,
        lambda v: stage_2(v, v["k"]),
        mistakes={
            "stage 2 has no room for whole gradients: it reduces with every micro-batch": lambda v: stage_2(v, 1),
            "updated weights are gathered, too": lambda v: stage_2(v, v["k"]) * 4 * v["k"] / (4 * v["k"] + 2),
            "one of the n parts stays": lambda v: stage_2(v, v["k"]) * v["n"] / (v["n"] - 1),
        },
    ),
    Question(
        "bytes_sent_in_stage_3",
        "The same for --zero 3 with other numbers: {L} layers of {layer} million parameters, embedding and head of\n"
        "{E} million each (not tied), {n} ranks, {k} micro-batches. How many bytes does a rank send in a step?",
        draw_sent,
        lambda v: stage_3(v, v["L"] * v["layer"] * 1e6),
        mistakes={
            "embedding and head are gathered once in a micro-batch": lambda v: stage_3(v, parameters(v)),
            "layers are gathered twice in a micro-batch": lambda v: stage_3(v, 0.0),
            "gradients have 4 bytes": lambda v: stage_3(v, v["L"] * v["layer"] * 1e6, 2),
        },
    ),
]
