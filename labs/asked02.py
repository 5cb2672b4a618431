"""Lab 2: how many bytes data parallelism sends."""

import random
from types import SimpleNamespace
from typing import Any

from labs.questions import Question
from theory.traffic import Gradients, gradient_traffic


def draw_sum(draw: random.Random) -> dict[str, Any]:
    """A model and a number of ranks."""
    return dict(n=draw.choice((3, 6, 12, 24, 48)), P=draw.randint(50, 900), k=draw.randint(2, 9))


def law(v: dict[str, Any], compress: str) -> float:
    """Bytes a rank sends in a step for fp32 gradients in one buffer."""
    config = SimpleNamespace(compress=compress, topk_fraction=0.01)
    length = v["P"] * 10**6
    return sum(gradient_traffic(config, [Gradients("dp", v["n"], 4 * length, [length])]).values())


def draw_top(draw: random.Random) -> dict[str, Any]:
    """A share of the values."""
    return dict(share=draw.choice((0.5, 0.8, 1.25, 2.0, 2.5)))


def draw_ring(draw: random.Random) -> dict[str, Any]:
    """Ranks, latency and bandwidth."""
    return dict(
        n=draw.choice((8, 16, 32, 64)), us=draw.randint(3, 20), MB=draw.randint(20, 200), gb=draw.choice((10, 25, 50))
    )


def one_way(v: dict[str, Any]) -> float:
    """Seconds of half a ring all-reduce: n-1 messages of one piece, one after another."""
    return (v["n"] - 1) * (v["us"] * 1e-6 + v["MB"] * 1e6 / v["n"] / (v["gb"] * 1e9))


QUESTIONS = [
    Question(
        "bytes_per_step",
        "{P} million parameters, fp32 gradients, {n} ranks, {k} micro-batches a step, --sync bucket.\n"
        "How many bytes does a rank send in a step?",
        draw_sum,
        lambda v: law(v, "none"),
        mistakes={
            "gradients travel once a step, not with every micro-batch": lambda v: v["k"] * law(v, "none"),
            "this is a reduce-scatter alone; an all-reduce is that and an all-gather": lambda v: law(v, "none") / 2,
            "this is 2 S: one of the n pieces stays": lambda v: 8e6 * v["P"],
        },
    ),
    Question(
        "bytes_in_int8",
        "The same with other numbers: {P} million parameters in one bucket, {n} ranks, --compress int8.\n"
        "How many bytes does a rank send in a step?",
        draw_sum,
        lambda v: law(v, "int8"),
        tolerance=0.0002,
        mistakes={"every 256 values bring a scale of four bytes": lambda v: law(v, "none") / 4},
    ),
    Question(
        "ranks_where_topk_loses",
        "--compress topk sends the largest {share} % of the fp32 values, each with its place (int32), and everyone\n"
        "gathers everything. What is the smallest number of ranks with which this sends at least as much as none?",
        draw_top,
        lambda v: 100 / v["share"],
        tolerance=0.0,
        mistakes={"a value travels with its place: 8 bytes": lambda v: 200 / v["share"]},
    ),
    Question(
        "seconds_of_a_ring",
        "A ring all-reduce of {MB} MB (10^6 bytes) on {n} ranks. A message takes {us} microseconds and its bytes at\n"
        "{gb} GB/s (10^9 bytes), each way at once. How many seconds does it take?",
        draw_ring,
        lambda v: 2 * one_way(v),
        mistakes={
            "this is one half of it": one_way,
            "a message carries one piece, S/n": lambda v: (
                2 * (v["n"] - 1) * (v["us"] * 1e-6 + v["MB"] * 1e6 / (v["gb"] * 1e9))
            ),
            "each of the 2 (n-1) messages has its latency": lambda v: (
                2 * (v["n"] - 1) * v["MB"] * 1e6 / v["n"] / (v["gb"] * 1e9)
            ),
        },
    ),
]
