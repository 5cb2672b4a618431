"""Charts of a run, from the files in its directory: those of services/plots.py as SVG, in the page's ink and fonts."""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from extras.services import plots
from extras.services.memory import CATEGORIES

INK = "#010203"  # becomes the colour of the page's text, light or dark
STYLE = {f"{part}.{what}": INK for part in ("xtick", "ytick") for what in ("color", "labelcolor")}
STYLE |= {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK, "font.size": 11}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "legend.frameon": False}
DARK = dict(F="#2b5c8a", B="#9a4a1f", W="#2f6b4f")  # of boxes with white numbers, as on the page


def svg(name: str, draw: Callable[[Any], Any], height: float = 3.2, **labels: Any) -> tuple[str, str]:
    """(name, SVG) of what `draw(axes)` draws. On a phone a chart is as wide as the screen: so it has few letters."""
    file = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(6.5, height), layout="constrained")
        draw(axes := figure.subplots())
        axes.set(**labels)
        if handles := axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(3, len(handles)), fontsize=10)
        figure.savefig(file, format="svg", transparent=True, metadata=dict(Date=None))
    text = file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "currentColor")
    text = re.sub("'DejaVu Sans'.*?sans-serif", "var(--sans)", text)
    return name, text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def thinned(rows: list, weight: Callable[[Any], float] = lambda _: 0, most: int = 200) -> list:
    """At most so many: of each window the first of the heaviest, so no peak is lost; and the last row."""
    size = -(-len(rows) // most)
    return [max(rows[n : n + size], key=weight) for n in range(0, len(rows) - 1, size)] + rows[-1:]


def of_run(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, SVG) of each chart for which the run has left numbers."""
    rows = thinned(plots.read_metrics(folder))
    steps, last = [row["step"] for row in rows], rows[-1]
    losses = [row["loss"] for row in rows]
    yield svg("loss", lambda axes: axes.plot(steps, losses), xlabel="step", ylabel="nats per token")
    if "peak_memory_bytes" in last:
        peaks = [row["peak_memory_bytes"] / 2**20 for row in rows]
        yield svg("peak of memory", lambda axes: axes.plot(steps, peaks), xlabel="step", ylabel="MiB", ylim=(0, None))
    if (folder / "memory.json").exists():
        data = json.loads((folder / "memory.json").read_text())
        moments = [*zip(data["seconds"], *(data["bytes"][kind] for kind in CATEGORIES), strict=True)]
        seconds, *held = zip(*thinned(moments, lambda row: sum(row[1:])), strict=True)
        thin = dict(seconds=seconds, bytes=dict(zip(CATEGORIES, held, strict=True)))
        yield svg("memory", lambda axes: plots.draw_memory(axes, thin))
    if (folder / "timeline.json").exists():
        done = json.loads((folder / "timeline.json").read_text())
        size = dict(height=1.4 + 0.35 * len(done["ranks"]), xlabel="seconds")
        yield svg("timeline of the last step", lambda axes: plots.draw_timeline(axes, done, 6.5, DARK), **size)
    if sent := plots.sent_in(last):
        yield svg("traffic of the last step", lambda axes: plots.draw_traffic(axes, sent), 1 + 0.3 * len(sent))
    for layer in last.get("expert_load", {}):
        yield svg(f"expert load, layer {layer}", lambda axes, layer=layer: plots.draw_load(axes, rows, layer))
