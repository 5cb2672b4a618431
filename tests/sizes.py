"""How many lines there are: `python -m tests.sizes` writes the numbers into README.md and RESULTS.md."""

import re
from pathlib import Path

from tests.test_house import FILES, MOST_LINES, ROOMS, STEPS, closure, lines_of, room_of


def places() -> dict[str, int]:
    """By pattern (what stands before, the number, what stands after): how many lines of Python there are."""
    of = {room: lines_of({module for module in FILES if room_of(module) == room}) for room in ("step", *ROOMS)}
    loads, bench = [lines_of(closure(step)) for step in STEPS], lines_of({m for m in FILES if "tests.bench" in m})
    found = {
        r"(all you have to read: )([\d,]+)( lines)": loads[-1],
        r"(for the whole course, )([\d,]+)( for step 1)": loads[0],
        r"(^step01 \.\.\. step07 .* )([\d,]+)( lines)": of["step"],
        r"(^\| steps 1 to 7 \| )([\d,]+)( \|)": of["step"],
        r"(^\| tests \| )([\d,]+)( \|)": of["tests"] - bench,
        r"(^\| tests/bench \| )([\d,]+)( \|)": bench,
        r"(^\| all Python \| )([\d,]+)( \|)": sum(of.values()),
    }
    for room in ROOMS:
        found[rf"(^{room}/ .* )([\d,]+)($)"] = of[room]
        if room != "tests":
            found[rf"(^\| {room} \| )([\d,]+)( \|)"] = of[room]
    for n, (step, lines) in enumerate(zip(STEPS, loads, strict=True), 1):
        found[rf"(^\| \[{n}\]\(.*\| )([\d,]+)( \|$)"] = lines
        found[rf"(^\| {n} \| )([\d,]+)( \| {MOST_LINES[step]:,} \|)"] = lines
    return found


def updated(text: str) -> str:
    """README.md or RESULTS.md with the numbers as they are; columns that end alike still do."""
    for pattern, number in places().items():

        def change(found: re.Match, number: int = number) -> str:
            before = found[1].rstrip()
            width = max(len(found[1]) + len(found[2]) - len(before), len(f" {number:,}"))
            return before + f"{number:,}".rjust(width) + found[3]

        text = re.sub(pattern, change, text, flags=re.M)
    return text


if __name__ == "__main__":
    for path in (Path("README.md"), Path("RESULTS.md")):
        path.write_text(updated(path.read_text()))
