"""Who computes what in a ring: the pairs of a query and a key on each rank, tokens in order and zigzag (figure)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import step05_cp_ring as step05
from common.trainer import parse
from extras.services.seam import plugins
from extras.services.tables import table

PICTURE = Path(__file__).parent / "figures/cp_work.png"
LENGTH = 64  # tokens of a rank


@dataclass
class Config:
    """Flags of this measurement."""

    cp: int = 4  # ranks that share the sequence


def work(mode: str, n: int) -> list[list[float]]:
    """By rank and hop: the share of all pairs that a ring of n ranks computes. In hop i, rank r has r - i's keys."""
    function, total = step05.CONTEXT[mode].attention, n * LENGTH * (n * LENGTH + 1) / 2
    visible = function.keywords["visible"] if isinstance(function, partial) else step05.zigzag_visible
    shares, tokens = [[0.0] * n for _ in range(n)], torch.arange(LENGTH)
    for rank in range(n):
        for hop in range(n):
            for queries, keys, causal in visible(rank, (rank - hop) % n, LENGTH):
                n_q, n_k = len(tokens[queries]), len(tokens[keys])
                shares[rank][hop] += (n_q * (n_q + 1) / 2 if causal else n_q * n_k) / total
    return shares


def draw(shares: dict[str, list[list[float]]], n: int):
    """A bar for each rank, made of its hops; a colour for each rank whose keys they are."""
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
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def bench(config: Config):
    """Print the table, and draw the figure."""
    plugins()  # adds the plain ring
    shares = {mode: work(mode, config.cp) for mode in ("ring", "zigzag")}
    rows = [["rank", *(f"{mode}: share of all pairs" for mode in shares)]]
    rows += [[str(rank), *(f"{sum(shares[mode][rank]):.2%}" for mode in shares)] for rank in range(config.cp)]
    draw(shares, config.cp)
    print(f"{table(rows)}\n\nsee {PICTURE}")


def main(_name: str, argv: list[str]):
    """The command line."""
    bench(parse(Config, argv))
