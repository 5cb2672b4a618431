"""Charts of a run, from the files in its directory: matplotlib draws them as SVG, in the page's own ink and fonts."""

import io
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from services import plots
from services.memory import CATEGORIES

INK = "#010203"  # becomes the colour of the page's text, light or dark
COLOURS = ("#4a86c5", "#d07a3f", "#4a9c74", "#b06aa0", "#a8923a", "#4a97a3", "#c8616f", "#8a8a95")  # readable on both
STYLE = {f"{part}.{what}": INK for part in ("xtick", "ytick") for what in ("color", "labelcolor")}
STYLE |= {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "axes.titlecolor": INK, "font.size": 11}
DARK = dict(F="#2b5c8a", B="#9a4a1f", W="#2f6b4f")  # of boxes with white numbers, as on the page
STYLE |= {"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "legend.frameon": False}


def svg(draw: Any, name: str, height: float = 3.2, **labels: Any) -> tuple[str, str]:
    """(name, SVG) of what `draw(axes)` draws. On a phone a chart is as wide as the screen: so it has few letters."""
    plt, file = plots.pyplot(), io.StringIO()
    with plt.rc_context(STYLE | {"svg.hashsalt": name, "axes.prop_cycle": plt.cycler(color=COLOURS)}):
        figure, axes = plt.subplots(figsize=(6.5, height), layout="constrained")
        draw(axes)
        axes.set(**labels)
        figure.savefig(file, format="svg", transparent=True, metadata=dict(Date=None))
        plt.close(figure)
    text = file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "currentColor")
    text = re.sub("'DejaVu Sans'.*?sans-serif", "var(--sans)", text)
    return name, text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)


def thinned(rows: list, weight: Callable[[Any], float] = lambda _: 0, most: int = 200) -> list:
    """At most so many: of each window the first of the heaviest, so no peak is lost; and the last row."""
    size = -(-len(rows) // most)
    return [max(rows[n : n + size], key=weight) for n in range(0, len(rows) - 1, size)] + rows[-1:]


def stacked(axes: Any, x: list, rows: dict[str, list]):
    """Rows on one another, with their names above."""
    axes.stackplot(x, *rows.values(), labels=list(rows), colors=COLOURS, step="post")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=10)
    axes.margins(x=0)


def of_run(folder: Path) -> Iterator[tuple[str, str]]:
    """(name, SVG) of each chart for which the run has left numbers."""
    rows = thinned([*plots.read_metrics(folder)])
    steps, last, mib = [row["step"] for row in rows], rows[-1], 2**20

    def line(key: str, unit: float = 1.0) -> Any:
        return lambda axes: axes.plot(steps, [row[key] / unit for row in rows])

    yield svg(line("loss"), "loss", xlabel="step", ylabel="nats per token")
    if "peak_memory_bytes" in last:
        yield svg(line("peak_memory_bytes", mib), "peak of memory", xlabel="step", ylabel="MiB", ylim=(0, None))
    if (folder / "memory.json").exists():
        data = json.loads((folder / "memory.json").read_text())
        moments = thinned(
            [*zip(*(data["bytes"][kind] for kind in CATEGORIES), data["seconds"], strict=True)],
            lambda row: sum(row[:-1]),
        )
        *held, seconds = zip(*moments, strict=True)
        kinds = {kind: [n / mib for n in row] for kind, row in zip(CATEGORIES, held, strict=True)}
        yield svg(lambda axes: stacked(axes, seconds, kinds), "memory", xlabel="seconds", ylabel="MiB")
    if (folder / "timeline.json").exists():
        data = json.loads((folder / "timeline.json").read_text())
        height = 1.4 + 0.35 * len(data["ranks"])
        drawn = partial(plots.draw_timeline, data=data, width=6.5, colours=DARK)
        yield svg(drawn, "timeline of the last step", height, xlabel="seconds")
    sent = {f"{d}: {op}": n / mib for d, of in last.get("traffic", {}).items() for op, n in of.items() if n}
    if sent:
        of = dict(sorted(sent.items(), key=lambda entry: entry[1]))
        yield svg(
            lambda axes: axes.barh(list(of), list(of.values())),
            "traffic of the last step", 1 + 0.3 * len(of), xscale="log", xlabel="MiB that rank 0 sent",
        )  # fmt: skip
    for layer in last.get("expert_load", {}):
        load = zip(*(row["expert_load"][layer] for row in rows), strict=True)
        named = {f"expert {e}": of for e, of in enumerate(load)}
        labels = dict(xlabel="step", ylabel="share of the choices", ylim=(0, 1))
        yield svg(lambda axes, named=named: stacked(axes, steps, named), f"expert load, layer {layer}", 3.8, **labels)
