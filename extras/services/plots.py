"""Pictures of a run, drawn from the files in its directory. Matplotlib takes a second to import: whoever draws does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from extras.services.memory import CATEGORIES

COLOURS = dict(zip(CATEGORIES, ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#999999"), strict=True))
ACTIONS = {"F": "#4c72b0", "B": "#dd8452", "W": "#55a868"}


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Axes of a picture of so many inches, which then becomes a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots()
    figure.savefig(path, dpi=120)


def read_metrics(folder: Path) -> list[dict]:
    """The records of metrics.jsonl, if there is one, without a line that a crash or a full disk cut short."""
    rows, path = [], Path(folder) / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def draw_memory(axes: Any, data: dict[str, Any]):
    """Bytes over time, stacked by category: {"seconds": [...], "bytes": {category: [...]}}."""
    stacked = [[n / 2**20 for n in data["bytes"][name]] for name in CATEGORIES]
    colours = [COLOURS[name] for name in CATEGORIES]
    axes.stackplot(data["seconds"], stacked, labels=CATEGORIES, colors=colours, step="post")
    axes.set(xlabel="seconds", ylabel="MiB")
    axes.legend(loc="upper left", ncols=len(CATEGORIES), fontsize=8)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)


def memory(folder: Path):
    """memory.png, from memory.json."""
    with picture(folder / "memory.png", 9, 4) as axes:
        draw_memory(axes, json.loads((folder / "memory.json").read_text()))


def draw_load(axes: Any, rows: list[dict], layer: str, label: str = ""):
    """The share of each expert in the choices of one layer, stacked over the steps."""
    from matplotlib import colormaps

    loads = [row["expert_load"][layer] for row in rows]
    n = len(loads[0])
    colours = [colormaps["viridis"](i / max(1, n - 1)) for i in range(n)]
    axes.stackplot([row["step"] for row in rows], *zip(*loads, strict=True), colors=colours, step="post")
    for i in range(1, n):
        axes.axhline(i / n, color="white", linewidth=0.6, linestyle=":")
    axes.set_title(f"{label}layer {layer}, busiest expert at the end {max(loads[-1]) * n:.1f} x its share", fontsize=9)
    axes.set(xlabel="step", ylim=(0, 1), ylabel="share of all choices, by expert")
    axes.set_xlim(rows[0]["step"], max(rows[-1]["step"], rows[0]["step"] + 1))


def expert_load(folder: Path):
    """expert_load.png: the layer whose busiest expert is busiest at last."""
    rows = [row for row in read_metrics(folder) if "expert_load" in row]
    last = rows[-1]["expert_load"]
    with picture(folder / "expert_load.png", 5, 3.6) as axes:
        draw_load(axes, rows, max(last, key=lambda number: max(last[number])))


def draw_traffic(axes: Any, sent: dict[str, float]):
    """Bytes in a step, by "dimension: operation"."""
    dims = sorted({label.split(":")[0] for label in sent})
    colours = [f"C{dims.index(label.split(':')[0])}" for label in sent]
    axes.barh([*sent], [n / 2**20 for n in sent.values()], color=colours)
    axes.set(xscale="log", xlabel="MiB sent by rank 0 in the last step")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def sent_in(row: dict) -> dict[str, float]:
    """What a step's record says of traffic, by "dimension: operation", least first, without what sends nothing."""
    sent = {f"{dim}: {op}": n for dim, each in row.get("traffic", {}).items() for op, n in each.items() if n}
    return dict(sorted(sent.items(), key=lambda entry: entry[1]))


def traffic(folder: Path):
    """traffic.png: what rank 0 sent in the last step, by mesh dimension and operation."""
    sent = sent_in(read_metrics(folder)[-1])
    with picture(folder / "traffic.png", 8, 1 + 0.26 * len(sent)) as axes:
        draw_traffic(axes, sent)
        axes.set(title="traffic by dimension and operation")


def draw_timeline(axes: Any, data: dict, width: float, colours: dict[str, str] = ACTIONS):
    """What each stage did when: {"schedule": name, "ranks": [[[kind, micro_batch, stage, start, end], ...]], "idle":
    fraction, "simulated_idle": fraction}, on axes `width` inches wide.

    The micro-batch stands in a box that is wide enough; later stages of a rank are paler.
    """
    from matplotlib.colors import to_rgb

    ranks = data["ranks"]
    boxes = [(rank, *box) for rank, row in enumerate(ranks) for box in row]
    first, last = min(box[4] for box in boxes), max(box[5] for box in boxes)
    for rank, kind, micro_batch, stage, start, end in boxes:
        own = sorted({box[2] for box in ranks[rank]})
        pale = 0.65 * own.index(stage) / max(2, len(own))
        colour = [c + (1 - c) * pale for c in to_rgb(colours.get(kind, "#999999"))]
        axes.barh(rank, end - start, 0.84, start - first, color=colour, edgecolor="white", linewidth=0.4)
        if (end - start) / (last - first) * width > 0.08 * len(str(micro_batch)):
            middle = (start + end) / 2 - first
            axes.text(middle, rank, micro_batch, ha="center", va="center_baseline", fontsize=7, color="white")
    title = f"{data['schedule']}: idle {data['idle']:.1%}, simulated {data['simulated_idle']:.1%}"
    axes.set_title(title, fontsize=9, loc="left")
    axes.set(xlim=(0, last - first), ylim=(len(ranks) - 0.5, -0.5), yticks=range(len(ranks)), ylabel="rank along pp")
    axes.spines[:].set_visible(False)


def timeline(folder: Path):
    """timeline.png, from timeline.json."""
    data = json.loads((folder / "timeline.json").read_text())
    with picture(folder / "timeline.png", 12, 1.2 + 0.25 * len(data["ranks"])) as axes:
        draw_timeline(axes, data, 12)
        axes.set(xlabel="seconds")
