"""Draws README's animation of pipeline schedules: `python -m extras.pages.moving FILE.gif`."""

import sys

from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.figure import Figure

import step06_pipeline as step06
from common.schedules import SCHEDULES, simulate
from extras.services.plots import draw_timeline
from extras.services.screen import idle_fraction
from extras.services.seam import compose, plugins

SHOWN = {"afab": "all forward, all backward", "1f1b": "one forward, one backward", "zbv": "zero bubble (zbv)"}
RANKS, MICRO_BATCHES = 4, 8


def spans_of(name: str, p: int, m: int) -> list[tuple]:
    """Simulate a schedule of p ranks and m micro-batches; returns (end, rank, start, action) of each action, sorted.

    An action takes its kind's cost twice, or once if a rank's layers are split into two stages. Raises UserError.
    """
    config = compose(step06)(model="llama3-8b", schedule=name, pp=p)
    places, lists = step06.plan(config, m)
    each = len({place.layers for place in places}) // p
    costs = {kind: cost * 2 // each for kind, cost in SCHEDULES[name](config).costs.items()}
    return simulate(lists, places, costs)


def main():
    """Draw all frames, and write the animation."""
    if len(sys.argv) != 2 or not sys.argv[1].endswith((".gif", ".png")):
        sys.exit("error: name the file: python -m extras.pages.moving FILE.gif (or .png)")
    plugins()
    spans = {name: spans_of(name, RANKS, MICRO_BATCHES) for name in SHOWN}
    end = max(of[-1][0] for of in spans.values())
    figure = Figure(figsize=(8.5, 4.6), layout="constrained")
    rows = figure.subplots(len(SHOWN))

    def draw(now: int):
        for axes, (name, of) in zip(rows, spans.items(), strict=True):
            axes.clear()
            seen = [[*action[:3], start, min(stop, now), rank] for stop, rank, start, action in of if start < now]
            ranks = [[box[:5] for box in seen if box[5] == rank] for rank in range(RANKS)]
            draw_timeline(axes, ranks, 8.5)
            idle = idle_fraction([(rank, start, stop) for stop, rank, start, _ in of], RANKS)
            axes.set_title(SHOWN[name] + f", idle {idle:.0%}" * (now >= of[-1][0]), loc="left", fontsize=10)
            axes.set(xlim=(0, end), xticks=[], ylabel="rank")
            axes.axvline(now, color="#b45309", linewidth=1)

    moments = [*range(2, end, 2), *[end] * 20]  # the last frame stays for a while
    FuncAnimation(figure, draw, moments, init_func=lambda: None).save(sys.argv[1], PillowWriter(fps=5))


if __name__ == "__main__":
    main()
