"""Pictures of measurements, into tests/bench/figures."""

from pathlib import Path
from statistics import median
from typing import Any

from services.plots import ACTIONS, draw_timeline

FIGURES = Path(__file__).parent / "figures"


def panels(rows: int, columns: int, width: float, height: float, **ratios: Any) -> tuple[Any, Any]:
    """A picture of so many inches, and its axes. Matplotlib takes a second to import: whoever draws does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **ratios)


def save(figure: Any, name: str) -> Path:
    """Write it; returns where."""
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=120)
    return FIGURES / f"{name}.png"


def ring_work(modes: dict[str, list[list[tuple[int, int, int]]]], total: int, name: str) -> Path:
    """Which rank computes how much at which hop: {mode: by rank [(hop, whose keys, pairs)]}; `total` of all pairs."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    n = len(next(iter(modes.values())))
    most = max(pairs for ranks in modes.values() for done in ranks for *_, pairs in done)
    figure, (*each, last) = panels(1, len(modes) + 1, 2.2 + n * (len(modes) + 1), 1.6 + 0.8 * n)
    for i, (mode, ranks) in enumerate(modes.items()):
        axes, sums = each[i], [100 * sum(pairs for *_, pairs in done) / total for done in ranks]
        for rank, done in enumerate(ranks):
            for hop in range(n):
                axes.add_patch(Rectangle((rank - 0.46, hop - 0.4), 0.92, 0.8, fill=False, edgecolor="#bbbbbb"))
            for hop, source, pairs in done:
                colour = colormaps["tab20"](2 * source % 20 + 1)
                axes.add_patch(Rectangle((rank - 0.46, hop - 0.4), 0.92 * pairs / most, 0.8, color=colour))
                text = f"k, v of {source}\n{pairs / total:.1%}"
                axes.text(rank, hop, text, ha="center", va="center", fontsize=8)
        axes.set(xlim=(-0.55, n - 0.45), ylim=(n - 0.5, -0.5), xticks=range(n), yticks=range(n), title=mode)
        axes.set(xlabel="rank", ylabel="hop")
        places = [rank + (i - (len(modes) - 1) / 2) * 0.8 / len(modes) for rank in range(n)]
        last.bar(places, sums, 0.8 / len(modes), label=mode)
    last.axhline(100 / n, color="black", linewidth=0.8, linestyle=":", label="equal shares")
    last.set(xlabel="rank", ylabel="% of all query-key pairs", title="work of each rank", xticks=range(n))
    last.legend()
    return save(figure, name)


def timelines(schedules: list[dict], title: str, name: str) -> Path:
    """A panel for each schedule, as `draw_timeline` wants it."""
    from matplotlib.patches import Rectangle

    heights = [0.55 + 0.25 * len(one["ranks"]) for one in schedules]
    figure, rows = panels(len(schedules), 1, 12, sum(heights) + 0.6, height_ratios=heights)
    for axes, one in zip(rows, schedules, strict=True):
        draw_timeline(axes, one, 12)
    names = {"F": "forward", "B": "backward (with W: of the input)", "W": "weight gradient"}
    areas = [Rectangle((0, 0), 1, 1, color=ACTIONS[kind]) for kind in names]
    figure.legend(areas, list(names.values()), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(title)
    return save(figure, name)


def speeds(crossing: dict[str, list[tuple[float, list[float], tuple[float, float]]]], name: str) -> Path:
    """Step time against a cable's speed: by what crosses it, (Mbit/s, seconds of each round, theory's least, most)."""
    figure, axes = panels(1, 1, 8, 5)
    for i, (what, points) in enumerate(crossing.items()):
        mbit, colour = [point[0] for point in points], f"C{i}"
        middle = [median(seconds) for _, seconds, _ in points]
        least, most = ([abs(median(s) - edge(s)) for _, s, _ in points] for edge in (min, max))
        axes.errorbar(mbit, middle, (least, most), fmt="o", color=colour, capsize=3, label=f"{what} between the nodes")
        lines = zip(*(theory for *_, theory in points), strict=True)
        axes.fill_between(mbit, *lines, color=colour, alpha=0.3)
        axes.plot(mbit, [theory[0] for *_, theory in points], color=colour)
    axes.set(xscale="log", yscale="log", xlabel="speed of the cable, Mbit/s", ylabel="seconds of a step")
    axes.invert_xaxis()
    axes.grid(which="both", color="#dddddd")
    axes.legend(title="measured (median, range); lines: theory (a range)")
    return save(figure, name)
