"""Lab 6: bubbles, activations in flight and messages."""

import random
from typing import Any

from common.schedules import SCHEDULES, Action, Costs, communicate, place_stages, simulate
from labs.questions import Question
from theory.bubble import idle_fraction, in_flight


def draw_pipeline(draw: random.Random) -> dict[str, Any]:
    """A pipeline."""
    p = draw.choice((4, 6, 8))
    return dict(p=p, m=p * draw.randint(2, 5) + draw.randint(1, 3), MB=draw.randint(3, 60))


def draw_times(draw: random.Random) -> dict[str, Any]:
    """A pipeline and the times of F, B and W."""
    p = draw.choice((4, 8))
    return dict(p=p, m=p * draw.randint(2, 5), f=draw.randint(8, 12), b=draw.randint(9, 14), w=draw.randint(5, 8))


def lists(name: str, v: dict[str, Any]) -> list[list[Action]]:
    """All ranks' lists."""
    return [SCHEDULES[name](v["p"], v["m"], 1, rank) for rank in range(v["p"])]


def idle(name: str, v: dict[str, Any]) -> float:
    """The simulated bubble."""
    costs = Costs(v["f"], v["b"], v["w"], 0)
    return idle_fraction(simulate(lists(name, v), place_stages(name, v["p"], 1), costs))


def largest_peak(name: str, v: dict[str, Any]) -> float:
    """MB that rank 1 holds between F and the end of B."""
    return in_flight(lists(name, v))[1] * v["MB"]


def messages(v: dict[str, Any]) -> int:
    """Sends of rank 1 in a step."""
    programs = communicate(lists("1f1b", v), place_stages("1f1b", v["p"], 1))
    return sum(step.kind == "send" for step in programs[1])


QUESTIONS = [
    Question(
        "idle_of_1f1b",
        "1f1b on {p} ranks with {m} micro-batches; F takes {f} ms, B {b} ms, W {w} ms, messages nothing.\n"
        "Which part of the ranks' time, from the first start to the last end, is idle (0 to 1)?",
        draw_times,
        lambda v: idle("1f1b", v),
        tolerance=0.002,
        mistakes={"that is (p-1)/m, the bubble relative to the work": lambda v: (v["p"] - 1) / v["m"]},
    ),
    Question(
        "idle_of_zb_h1",
        "The same for zb-h1 on {p} ranks with {m} micro-batches; F takes {f} ms, B {b} ms, W {w} ms.\n"
        "(common/schedules.py can simulate it with these costs.)",
        draw_times,
        lambda v: idle("zb-h1", v),
        tolerance=0.002,
        mistakes={"this is 1f1b's": lambda v: idle("1f1b", v)},
    ),
    Question(
        "megabytes_on_rank_1",
        "1f1b, {p} ranks, {m} micro-batches. What a micro-batch leaves on a rank for its backward has {MB} MB.\n"
        "How many MB of that does rank 1 (of 0 to p-1) hold at most?",
        draw_pipeline,
        lambda v: largest_peak("1f1b", v),
        tolerance=0.0,
        mistakes={
            "this is afab's": lambda v: v["m"] * v["MB"],
            "this is rank 0's": lambda v: v["p"] * v["MB"],
        },
    ),
    Question(
        "messages_of_rank_1",
        "1f1b, {p} ranks, {m} micro-batches, one stage a rank. How many messages does rank 1 send in a step?",
        draw_pipeline,
        messages,
        tolerance=0.0,
        mistakes={"activations go on, and gradients go back": lambda v: v["m"]},
    ),
]
