"""Accounting questions: a number that follows from numbers drawn from the student's id, judged by theory/."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labs.bench import Wrong


@dataclass(frozen=True)
class Question:
    """`text`: a format string over what `draw` returns; `answer` of the same values; `tolerance`, relative.

    `mistakes`: by what they show, other values that a student may have found.
    """

    name: str
    text: str
    draw: Callable[[random.Random], dict[str, Any]]
    answer: Callable[[dict[str, Any]], float]
    tolerance: float = 0.001
    mistakes: dict[str, Callable[[dict[str, Any]], float]] = field(default_factory=dict)

    def values(self, student: str) -> dict[str, Any]:
        """The numbers of a student's question."""
        return self.draw(random.Random(f"{student} {self.name}"))

    def ask(self, student: str) -> str:
        """The question as the student reads it."""
        return self.text.format(**self.values(student))

    def judge(self, student: str, answers: dict[str, Any]):
        """Raises Wrong, without the right number, unless the answer is within the tolerance."""
        values, found = self.values(student), answers.get(self.name, "")
        if found == "":
            raise Wrong(f"not answered yet: {self.name} in answers.toml")
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise Wrong(f"{self.name} has to be a number, and is {found!r}")
        right = self.answer(values)
        if abs(found - right) <= self.tolerance * abs(right):
            return
        for meaning, mistake in self.mistakes.items():
            other = mistake(values)
            if abs(other - right) > self.tolerance * abs(right) and abs(found - other) <= self.tolerance * abs(other):
                raise Wrong(f"{found:.12g} is not it - {meaning}")
        if right and abs(found / right - round(found / right)) < 0.001 and 1 < found / right < 1000:
            raise Wrong(f"{found:.12g} is {found / right:.0f} times too large")
        if found and abs(right / found - round(right / found)) < 0.001 and 1 < right / found < 1000:
            raise Wrong(f"{found:.12g} is {right / found:.0f} times too small")
        raise Wrong(f"{found:.12g} is too {'large' if found > right else 'small'}")
