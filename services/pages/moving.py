"""README's moving picture: `python -m services.pages.moving FILE.gif` draws schedules, as they run."""

import sys
from typing import Any

from PIL import Image

import step06_pipeline as step06
from common.schedules import simulate
from services.pages.charts import DARK
from services.plots import pyplot
from services.screen import idle_fraction
from services.seam import compose, plugins

SHOWN = {"afab": "all forward, all backward", "1f1b": "one forward, one backward", "zbv": "zero bubble (zbv)"}
RANKS, MICRO_BATCHES = 4, 8


def spans_of(name: str) -> list[tuple]:
    """(end, rank, start, action) of all actions. A rank's two short stages take half the time each."""
    config = compose(step06)(model="llama3-8b", schedule=name, pp=RANKS)
    places, lists = step06.plan(config, MICRO_BATCHES)
    each = len(places) // RANKS
    costs = {kind: cost * 2 // each for kind, cost in step06.costs_of(lists).items()}
    return simulate(lists, places, costs)


def picture(axes: Any, name: str, spans: list[tuple], now: float, end: float):
    """What has been computed until `now`."""
    axes.set(xlim=(0, end), ylim=(RANKS - 0.4, -0.6), xticks=[], yticks=range(RANKS))
    axes.set_yticklabels([f"rank {rank}" for rank in range(RANKS)])
    idle = idle_fraction([(rank, start, stop) for stop, rank, start, _ in spans], RANKS)
    said = f", idle {idle:.0%}" if now >= spans[-1][0] else ""
    axes.set_title(SHOWN[name] + said, loc="left", fontsize=10)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.axvline(now, color="#b45309", linewidth=1)
    for stop, rank, start, action in (span for span in spans if span[2] < now):
        until = min(stop, now)
        axes.barh(rank, until - start, left=start, height=0.9, color=DARK[action.kind], edgecolor="white")
        if stop <= now:
            axes.text((start + stop) / 2, rank, action.micro_batch, ha="center", va="center", color="white", fontsize=7)


def main():
    """Draw all frames, and write them."""
    if len(sys.argv) != 2 or not sys.argv[1].endswith((".gif", ".png")):
        sys.exit("error: name the file: python -m services.pages.moving FILE.gif (or .png)")
    plugins()
    spans, frames, plt = {name: spans_of(name) for name in SHOWN}, [], pyplot()
    end = max(of[-1][0] for of in spans.values())
    for now in range(2, end + 1, 2):
        figure, rows = plt.subplots(len(SHOWN), figsize=(8.5, 4.6), dpi=100, layout="constrained")
        for axes, (name, of) in zip(rows, spans.items(), strict=True):
            picture(axes, name, of, now, end)
        figure.canvas.draw()
        frames.append(
            Image.frombuffer("RGBA", figure.canvas.get_width_height(), figure.canvas.buffer_rgba())
            .convert("RGB")
            .quantize(48)
        )
        plt.close(figure)
    wait = [200] * (len(frames) - 1) + [4000]
    frames[0].save(sys.argv[1], save_all=True, append_images=frames[1:], duration=wait, loop=0, optimize=True)


if __name__ == "__main__":
    main()
