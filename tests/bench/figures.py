"""Pictures of measurements, into tests/bench/figures."""

from pathlib import Path
from typing import Any

from services.memory import CATEGORIES
from services.plots import ACTIONS, COLOURS, draw_load, draw_timeline, pyplot

FIGURES = Path(__file__).parent / "figures"
MIB = 2**20


def save(figure: Any, name: str) -> Path:
    """Write it; returns where."""
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=120)
    return FIGURES / f"{name}.png"


def losses(runs: dict[str, list[dict]], title: str, name: str) -> Path:
    """Loss curves of several runs, by label; validation losses as dots."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    for label, rows in runs.items():
        (line,) = axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=label, linewidth=1.2)
        dots = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color())
    axes.set(xlabel="step", ylabel="loss (nats per token); dots: validation", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return save(figure, name)


def bars(groups: dict[str, dict[str, tuple[float, float]]], title: str, name: str) -> Path:
    """Bytes {label: {group: (predicted, measured)}}: a bar for what was measured, a black line where it should end."""
    figure, axes = pyplot().subplots(figsize=(7, 4), layout="constrained")
    names = list(dict.fromkeys(group for found in groups.values() for group in found))
    width = 0.8 / len(groups)
    for i, (label, found) in enumerate(groups.items()):
        places = [names.index(group) + (i - (len(groups) - 1) / 2) * width for group in found]
        axes.bar(places, [measured / MIB for _, measured in found.values()], 0.92 * width, label=label)
        for place, (predicted, _) in zip(places, found.values(), strict=True):
            axes.hlines(predicted / MIB, place - width / 2, place + width / 2, color="black", linewidth=1.5)
    axes.plot([], [], color="black", linewidth=1.5, label="predicted")
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="MiB", title=title)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    return save(figure, name)


def staircase(runs: dict[str, dict], title: str, name: str) -> Path:
    """Bytes over time of several runs, stacked by category: {label: {"seconds": [...], "bytes": {category: [...]}}}."""
    figure, panels = pyplot().subplots(1, len(runs), figsize=(3 * len(runs), 4), layout="constrained", sharey=True)
    for axes, (label, data) in zip(panels, runs.items(), strict=True):
        stacked = [[n / MIB for n in data["bytes"][kind]] for kind in CATEGORIES]
        colours = [COLOURS[kind] for kind in CATEGORIES]
        axes.stackplot(data["seconds"], stacked, labels=CATEGORIES, colors=colours, step="post")
        most = max(map(sum, zip(*stacked, strict=True)))
        axes.axhline(most, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="seconds", title=f"{label}: at most {most:.0f} MiB")
    panels[0].set_ylabel("MiB")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CATEGORIES))
    figure.suptitle(title)
    return save(figure, name)


def loads(runs: dict[str, list[dict]], name: str) -> Path:
    """The share of each expert in the choices of one layer, of several runs by label."""
    last = [rows[-1]["expert_load"] for rows in runs.values()]
    layer = max(last[0], key=lambda number: max(max(load[number]) for load in last))
    size = (1 + 4 * len(runs), 3.6)
    figure, panels = pyplot().subplots(1, len(runs), figsize=size, layout="constrained", sharey=True)
    for axes, (label, rows) in zip(panels, runs.items(), strict=True):
        draw_load(axes, rows, layer, f"{label}: ")
    return save(figure, name)


def ring_work(modes: dict[str, list[list[tuple[int, int, int]]]], total: int, name: str) -> Path:
    """Which rank computes how much at which hop: {mode: by rank [(hop, whose keys, pairs)]}; `total` of all pairs."""
    plt, n = pyplot(), len(next(iter(modes.values())))
    most = max(pairs for ranks in modes.values() for done in ranks for *_, pairs in done)
    size = (2.2 + n * (len(modes) + 1), 1.6 + 0.8 * n)
    figure, panels = plt.subplots(1, len(modes) + 1, figsize=size, layout="constrained")
    for i, (mode, ranks) in enumerate(modes.items()):
        axes, sums = panels[i], [100 * sum(pairs for *_, pairs in done) / total for done in ranks]
        for rank, done in enumerate(ranks):
            for hop in range(n):
                axes.add_patch(plt.Rectangle((rank - 0.46, hop - 0.4), 0.92, 0.8, fill=False, edgecolor="#bbbbbb"))
            for hop, source, pairs in done:
                colour = plt.colormaps["tab20"](2 * source % 20 + 1)
                axes.add_patch(plt.Rectangle((rank - 0.46, hop - 0.4), 0.92 * pairs / most, 0.8, color=colour))
                text = f"k, v of {source}\n{pairs / total:.1%}"
                axes.text(rank, hop, text, ha="center", va="center", fontsize=8)
        axes.set(xlim=(-0.55, n - 0.45), ylim=(n - 0.5, -0.5), xticks=range(n), yticks=range(n), title=mode)
        axes.set(xlabel="rank", ylabel="hop")
        places = [rank + (i - (len(modes) - 1) / 2) * 0.8 / len(modes) for rank in range(n)]
        panels[-1].bar(places, sums, 0.8 / len(modes), label=mode)
    panels[-1].axhline(100 / n, color="black", linewidth=0.8, linestyle=":", label="equal shares")
    panels[-1].set(xlabel="rank", ylabel="% of all query-key pairs", title="work of each rank", xticks=range(n))
    panels[-1].legend()
    return save(figure, name)


def timelines(panels: list[dict], title: str, name: str) -> Path:
    """A panel for each schedule, as `draw_timeline` wants it."""
    plt, heights = pyplot(), [0.55 + 0.25 * len(panel["ranks"]) for panel in panels]
    size = dict(figsize=(12, sum(heights) + 0.6), height_ratios=heights, layout="constrained")
    figure, rows = plt.subplots(len(panels), 1, **size)
    for axes, panel in zip(rows, panels, strict=True):
        draw_timeline(axes, panel, 12)
    names = {"F": "forward", "B": "backward (with W: of the input)", "W": "weight gradient"}
    areas = [plt.Rectangle((0, 0), 1, 1, color=ACTIONS[kind]) for kind in names]
    figure.legend(areas, list(names.values()), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title)
    return save(figure, name)
