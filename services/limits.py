"""How a measurement is judged: by one function, from numbers and limits alone. Nothing here measures.

A measurement is {place: {name: number}}: a place is a rank, a pair of GPUs, a run. Every place counts alike, so what
one rank alone finds wrong is a failure, which names this rank. What the verdicts mean is said in services/certify.py.

Limits are floors wherever something may be slow. They are rules of thumb, far enough from what is published for healthy
machines, and from what is wrong; none was fitted to a GPU of ours.
"""

from math import inf, nan
from statistics import median
from typing import NamedTuple

PASS, FAIL, NOTE, OPEN = "pass", "FAIL", "note", "  - "
NAMED = 4  # places that a line names

Found = dict[str, dict[str, float]]


class NotCertified(Exception):
    """Raised instead of a measurement by what cannot be measured here; its text says why."""


class Limit(NamedTuple):
    """What the numbers of one name must be, in which unit, and what it means if they are not. Both ends are allowed."""

    reason: str = ""
    unit: str = ""  # behind a number, with its blank
    least: float | None = None
    most: float | None = None
    part: float = 0.0  # of the median over all places: none may have less

    def bounds(self, numbers: list[float]) -> tuple[float, float, str]:
        """(least, most, how that is said) for the numbers of all places; "" if nothing is known."""
        least, most = -inf if self.least is None else self.least, inf if self.most is None else self.most
        if self.part and len(numbers) > 1:
            least = max(least, self.part * median(number for number in numbers if number == number))
        said = [f"at least {shown(least)}"] * (least > -inf) + [f"at most {shown(most)}"] * (most < inf)
        return least, most, shown(most) + " is right" if least == most else ", ".join(said)


def shown(number: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def judge(found: Found, limits: dict[str, Limit]) -> tuple[str, str]:
    """(verdict, what is said). Names without a limit are left out, and so are limits of what nobody has measured.

    A number that some places have and others lack is beyond its limit there; so is one that is not a number. Of a
    failure only what is beyond its limits is said.
    """
    texts: dict[str, list[str]] = {FAIL: [], NOTE: [], PASS: []}  # the first that has some is the verdict
    for name, limit in limits.items():
        at = {place: numbers[name] for place, numbers in found.items() if name in numbers}
        if not at:
            continue
        least, most, said = limit.bounds([*at.values()])
        wrong = [place for place in found if said and not least <= at.get(place, nan) <= most]
        if wrong:
            places = [f"{place}: {name} {shown(at.get(place, nan))}{limit.unit}" for place in wrong[:NAMED]]
            places += [f"{len(wrong) - NAMED} more"] * (len(wrong) > NAMED)
            why = f"{said}: {limit.reason}" if limit.reason else said
            texts[FAIL].append(f"{', '.join(places)} ({why})".removeprefix(": "))
        else:
            low, high, why = shown(min(at.values())), shown(max(at.values())), said or limit.reason
            span = low if low == high else f"{low} - {high}"
            texts[PASS if said else NOTE].append(f"{name} {span}{limit.unit}" + f" ({why})" * bool(why))
    if texts[FAIL]:
        return FAIL, "; ".join(texts[FAIL])
    verdict = next((verdict for verdict, some in texts.items() if some), OPEN)
    return verdict, "; ".join([*texts[NOTE], *texts[PASS]]) or "nothing was measured"
