"""Draws RESULTS' animation of pipeline schedules: `python -m extras.pages.moving FILE.gif`."""

import sys

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from extras.__main__ import techniques
from extras.pages.pictures import spans_of

SHOWN = {
    "afab": "all forward, all backward",
    "1f1b": "one forward, one backward",
    "zbv": "zero bubble (zbv)",
}
COLOURS = {"F": "#4c78a8", "B": "#b07d4f", "W": "#59a14f"}
RANKS = 4
MICRO_BATCHES = 8


def idle_fraction(spans: list[tuple], p: int) -> float:
    """The share of the time of p ranks in which they compute nothing."""
    busy = sum(span.end - span.start for span in spans)
    return 1 - busy / (p * spans[-1].end)


def draw_spans(axes: Axes, spans: list[tuple], now: float):
    """Draw what has begun before `now`: a box for each action, with its micro-batch."""
    for rank, (kind, i, _), start, end in spans:
        if start < now:
            width = min(end, now) - start
            axes.barh(rank, width, left=start, color=COLOURS[kind], edgecolor="white", height=0.9)
            axes.text(
                start + width / 2, rank, i, ha="center", va="center", color="white", fontsize=6
            )


def main():
    """Draw all frames, and write the animation."""
    if len(sys.argv) != 2 or not sys.argv[1].endswith((".gif", ".png")):
        sys.exit("error: name the file: python -m extras.pages.moving FILE.gif (or .png)")
    techniques()
    spans = {name: spans_of(name, RANKS, MICRO_BATCHES) for name in SHOWN}
    end = max(schedule_spans[-1].end for schedule_spans in spans.values())
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    rows = figure.subplots(len(SHOWN))

    def draw(now: int):
        for axes, (name, schedule_spans) in zip(rows, spans.items(), strict=True):
            axes.clear()
            draw_spans(axes, schedule_spans, now)
            title = SHOWN[name]
            if now >= schedule_spans[-1].end:
                title += f", idle {idle_fraction(schedule_spans, RANKS):.0%}"
            axes.set_title(title, loc="left", fontsize=10)
            axes.set(xlim=(0, end), ylim=(RANKS - 0.4, -0.6), xticks=[], ylabel="rank")
            axes.axvline(now, color="#b45309", linewidth=1)

    moments = [*range(2, int(end), 2), *[end] * 20]  # the last frame stays for a while
    FuncAnimation(figure, draw, moments, init_func=lambda: None).save(
        sys.argv[1], PillowWriter(fps=5)
    )


if __name__ == "__main__":
    main()
