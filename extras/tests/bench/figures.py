"""Pictures of measurements, into extras/tests/bench/figures."""

from pathlib import Path
from typing import Any

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
