"""Lab 5: how many bytes context parallelism sends and keeps, and who does the work."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from common.model import ModelConfig
from labs.questions import Question
from theory.memory import cp_activation_bytes
from theory.traffic import cp_traffic


def draw_traffic(draw: random.Random) -> dict[str, Any]:
    """A model and a layout for `bytes_of_a_ring` and `bytes_of_ulysses`."""
    cp = draw.choice((4, 8, 16))
    return dict(cp=cp, b=draw.choice((1, 2)), k=draw.choice((3, 5, 7)), s=8192 * draw.randint(2, 8),
                L=draw.choice((16, 24, 32)), H=32, kv=draw.choice((1, 2)) * cp // 4)  # fmt: skip


def traffic_of(v: dict[str, Any], mode: str, **other: Any) -> float:
    """All bytes that a rank sends over cp in a step; `other`: numbers that a student may have taken instead."""
    v = v | other
    m = ModelConfig(128 * v["H"], v["L"], v["H"], v["kv"], 4 * 128 * v["H"], 50000, v["s"])
    config = SimpleNamespace(micro_batch_size=v["b"], cp_mode=mode, recompute="none")
    return sum(cp_traffic(config, m, 1, v["cp"], torch.bfloat16, v["k"]).values())


def ring_in_16_bits(v: dict[str, Any]) -> float:
    """The ring's bytes if the gradients of k and v, too, travelled in bf16."""
    part = v["b"] * v["s"] // v["cp"] * 2 * v["kv"] * 128 * 2
    return v["k"] * v["L"] * (2 * (v["cp"] - 1) + v["cp"]) * part


def draw_modes(draw: random.Random) -> dict[str, Any]:
    """Heads and ranks for `most_heads_of_a_ring`."""
    cp = draw.choice((2, 4, 8))
    return dict(cp=cp, H=cp * draw.choice((6, 8, 12, 16)))


def most_heads(v: dict[str, Any], rounds: str = "both") -> int:
    """The largest number of key/value heads, a divisor of the heads, with which zigzag sends less than Ulysses."""
    n = v["cp"]

    def ring(kv: int) -> float:
        given = dict(s=1024 * n, L=1, b=1, k=1, kv=kv)
        if rounds == "forward":
            return (n - 1) * 1024 * 2 * kv * 128 * 2
        return traffic_of(v | given, "zigzag")

    def ulysses(kv: int) -> float:
        found = traffic_of(v | dict(s=1024 * n, L=1, b=1, k=1, kv=kv), "ulysses")
        return found / 2 if rounds == "forward" else found

    return max((kv for kv in range(1, v["H"] + 1) if v["H"] % kv == 0 and ring(kv) < ulysses(kv)), default=0)


def draw_work(draw: random.Random) -> dict[str, Any]:
    """Ranks and tokens for `share_of_the_last_rank`."""
    n = draw.choice((3, 4, 5, 6, 8))
    return dict(cp=n, s=2 * n * draw.randint(3, 12))


def share(v: dict[str, Any]) -> float:
    """The last rank's part of all pairs of a query and a key that it may look at: position p looks at p + 1."""
    first, s = v["s"] - v["s"] // v["cp"], v["s"]
    return (s * (s + 1) - first * (first + 1)) / (s * (s + 1))


def draw_longest(draw: random.Random) -> dict[str, Any]:
    """Ranks and memory for `longest_sequence`."""
    return dict(cp=draw.choice((4, 8)), gib=draw.randint(20, 60))


def longest(v: dict[str, Any], mode: str) -> int:
    """The longest sequence of llama3-8b's layers whose activations fit, in steps of 1024 tokens a rank."""
    config = SimpleNamespace(micro_batch_size=1, cp_mode=mode, recompute="none", sp=False, tp_overlap=False)

    def fits(s: int) -> bool:
        m = ModelConfig(4096, 32, 32, 8, 14336, 128256, s)
        return cp_activation_bytes(config, m, 1, v["cp"], torch.bfloat16, False) <= v["gib"] * 2**30

    return max((s for s in range(1024 * v["cp"], 10**6, 1024 * v["cp"]) if fits(s)), default=0)


QUESTIONS = [
    Question(
        "bytes_of_a_ring",
        "--cp {cp} --cp-mode zigzag, bf16, {L} layers, {H} heads of size 128, {kv} key/value heads,\n"
        "{k} micro-batches of {b} sequences of {s} tokens, nothing recomputed. How many bytes does a rank\n"
        "send over cp in one step?",
        draw_traffic,
        lambda v: traffic_of(v, "zigzag"),
        mistakes={
            "this is with key/value heads repeated to all query heads": lambda v: traffic_of(v, "zigzag", kv=v["H"]),
            "gradients of k and v are sums, and travel in fp32": ring_in_16_bits,
            "this is one micro-batch": lambda v: traffic_of(v, "zigzag", k=1),
            "this is --cp-mode allgather": lambda v: traffic_of(v, "allgather"),
        },
    ),
    Question(
        "bytes_of_ulysses",
        "--cp {cp} --cp-mode ulysses, bf16, {L} layers, {H} heads of size 128, {kv} key/value heads,\n"
        "{k} micro-batches of {b} sequences of {s} tokens, nothing recomputed. How many bytes does a rank\n"
        "send over cp in one step?",
        draw_traffic,
        lambda v: traffic_of(v, "ulysses"),
        mistakes={
            "this is forward alone": lambda v: traffic_of(v, "ulysses") / 2,
            "a rank keeps its own part of an all-to-all: (n-1)/n": lambda v: (
                traffic_of(v, "ulysses") * v["cp"] / (v["cp"] - 1)
            ),
            "with fewer key/value heads than ranks, each is sent to several": lambda v: (
                v["k"]
                * v["L"]
                * 4
                * (v["cp"] - 1)
                / v["cp"]
                * v["b"]
                * v["s"]
                // v["cp"]
                * 128
                * 2
                * (v["H"] + v["kv"])
            ),
        },
    ),
    Question(
        "most_heads_of_a_ring",
        "bf16, {H} query heads of size 128, --cp {cp}. A ring sends k and v, Ulysses sends all heads. Which is\n"
        "the largest number of key/value heads, a divisor of {H}, with which zigzag sends fewer bytes in a layer than\n"
        "ulysses, forward and backward together?",
        draw_modes,
        most_heads,
        tolerance=0.0,
        mistakes={"this is forward alone": lambda v: most_heads(v, "forward")},
    ),
    Question(
        "share_of_the_last_rank",
        "--cp {cp} --cp-mode ring, sequences of {s} tokens. Which part of all pairs of a query and a key that it may\n"
        "look at (itself included) does the last rank compute (0 to 1)?",
        draw_work,
        share,
        mistakes={"this is zigzag's": lambda v: 1 / v["cp"]},
    ),
    Question(
        "longest_sequence",
        "llama3-8b (dim 4096, 32 layers, 32 heads, 8 key/value heads, ffn_dim 14336, vocabulary 128256), bf16, GPUs,\n"
        "--cp {cp} --tp 1 --cp-mode zigzag, nothing recomputed, one sequence at a time. {gib} GiB are for\n"
        "activations. How long may a sequence be, in tokens, a multiple of 1024 x {cp}?\n"
        "(theory/memory.py, cp_activation_bytes, says what is kept.)",
        draw_longest,
        lambda v: longest(v, "zigzag"),
        tolerance=0.0,
        mistakes={
            "this is with --cp-mode allgather": lambda v: longest(v, "allgather"),
            "this is one rank's part of it": lambda v: longest(v, "zigzag") / v["cp"],
        },
    ),
]
