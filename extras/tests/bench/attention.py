"""The work of ring attention: each rank's share of the query-key pairs, in order and zigzag (draws a figure)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.trainer import parse
from extras.services.tables import table
from extras.variants.step05.ring import ordered_visible
from step05_cp_ring import zigzag_visible

PICTURE = Path(__file__).parent / "figures/cp_work.png"
LENGTH = 64  # tokens of a rank


@dataclass
class Config:
    """Flags of this measurement."""

    cp: int = 4  # ranks that share the sequence


def work(visible: Callable, n: int) -> list[list[float]]:
    """By rank and hop: the share of all pairs that is computed there. In hop i, rank r has the keys of rank r - i."""

    def pairs(queries: slice, keys: slice, causal: bool) -> float:
        n_q, n_k = (len(range(LENGTH)[tokens]) for tokens in (queries, keys))
        return (n_q + 1) * n_q / 2 if causal else n_q * n_k

    total = pairs(slice(None), slice(None), True) * n + n * (n - 1) / 2 * LENGTH**2
    return [
        [sum(pairs(*part) for part in visible(rank, (rank - hop) % n, LENGTH)) / total for hop in range(n)]
        for rank in range(n)
    ]


def draw(shares: dict[str, list[list[float]]], n: int):
    """Draw a bar for each rank, made of its hops, in the colour of the rank whose keys they use."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (mode, of_rank) in zip(figure.subplots(1, len(shares), sharey=True), shares.items(), strict=True):
        for rank, of_hop in enumerate(of_rank):
            for hop, share in enumerate(of_hop):
                source, below = (rank - hop) % n, 100 * sum(of_hop[:hop])
                bar = axes.bar(rank, 100 * share, bottom=below, color=f"C{source}", edgecolor="white", alpha=0.6)
                axes.bar_label(bar, [f"hop {hop}: k, v of {source}" if share else ""], label_type="center", fontsize=8)
        axes.axhline(100 / n, color="black", linewidth=0.8, linestyle=":", zorder=0)
        axes.set(title=mode, xlabel="rank", ylabel="% of all query-key pairs", xticks=range(n))
    figure.savefig(PICTURE, dpi=120)


def main(_name: str, argv: list[str]):
    """Print the table, and draw the figure."""
    n = parse(Config, argv).cp
    shares = {mode: work(visible, n) for mode, visible in dict(ring=ordered_visible, zigzag=zigzag_visible).items()}
    rows = [["rank", *(f"{mode}: share of all pairs" for mode in shares)]]
    rows += [[str(rank), *(f"{sum(of_rank[rank]):.2%}" for of_rank in shares.values())] for rank in range(n)]
    draw(shares, n)
    print(f"{table(rows)}\n\nsee {PICTURE}")
