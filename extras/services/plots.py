"""Draws the pictures of a run: what its memory holds, and when each rank computes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ACTIONS = dict(F="#2b5c8a", B="#9a4a1f", W="#2f6b4f", R="#5b4a8a")  # white numbers are legible on them


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yield the axes of a picture of `width` x `height` inches, then save it as a file."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure.subplots()
    figure.savefig(path, dpi=120)


def read_metrics(folder: Path) -> list[dict]:
    """Read the records of metrics.jsonl, if there is one; lines that a crash or a full disk cut short are skipped."""
    rows, path = [], Path(folder) / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def memory(folder: Path, seconds: list[float], held: dict[str, list[int]]):
    """Write memory.png and memory.json: bytes over time, by kind."""
    (folder / "memory.json").write_text(json.dumps(dict(seconds=seconds, bytes=held)))
    with picture(folder / "memory.png", 9, 4) as axes:
        axes.stackplot(seconds, [[n / 2**20 for n in row] for row in held.values()], labels=held, step="post")
        axes.set(xlabel="seconds", ylabel="MiB")
        axes.legend(loc="upper left", ncols=len(held), fontsize=8)
        axes.set_ylim(top=axes.get_ylim()[1] * 1.12)


def draw_timeline(axes: Any, ranks: list[list], width: float):
    """Draw each rank's actions over time; `ranks`: for each rank [[kind, micro-batch, stage, start, end], ...].

    A box shows its micro-batch's number if there is room on axes of `width` inches. Later stages of a rank are paler.
    """
    from matplotlib.colors import to_rgb

    boxes = [(rank, *box) for rank, row in enumerate(ranks) for box in row]
    first, last = min(box[4] for box in boxes), max(box[5] for box in boxes)
    for rank, kind, micro_batch, stage, start, end in boxes:
        own = sorted({box[2] for box in ranks[rank]})
        pale = 0.65 * own.index(stage) / max(2, len(own))
        colour = [c + (1 - c) * pale for c in to_rgb(ACTIONS[kind])]
        axes.barh(rank, end - start, 0.84, start - first, color=colour, edgecolor="white", linewidth=0.4)
        if (end - start) / (last - first) * width > 0.08 * len(str(micro_batch)):
            middle = (start + end) / 2 - first
            axes.text(middle, rank, micro_batch, ha="center", va="center_baseline", fontsize=7, color="white")
    axes.set(xlim=(0, last - first), ylim=(len(ranks) - 0.5, -0.5), yticks=range(len(ranks)), ylabel="rank along pp")
    axes.spines[:].set_visible(False)


def timeline(folder: Path, schedule: str, ranks: list[list], idle: float):
    """Write timeline.png: a pipeline's actions in the last step. `idle`: the fraction of time in which ranks wait."""
    with picture(folder / "timeline.png", 12, 1.2 + 0.25 * len(ranks)) as axes:
        draw_timeline(axes, ranks, 12)
        axes.set_title(f"{schedule}: idle {idle:.1%}", fontsize=9, loc="left")
        axes.set(xlabel="seconds")


def experts(folder: Path, rows: list[dict]):
    """Write experts.png: by step, the load of a layer's busiest expert, divided by the mean load; `rows`: metrics."""
    with picture(folder / "experts.png", 6, 3) as axes:
        for name in ("expert_load_p50", "expert_load_p90"):  # percentiles over the layers
            axes.plot([row["step"] for row in rows], [row[name] for row in rows], label=name)
        axes.set(xlabel="step", title=f"in the last step {rows[-1]['unused_experts']} experts were not chosen")
        axes.legend()
