"""Every figure, drawn from the files that a run wrote into its directory."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from common.memory import CATEGORIES, MemoryTimeline

COLOURS = dict(zip(CATEGORIES, ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#999999"), strict=True))


def read_metrics(run_directory: Path) -> list[dict]:
    """The records of metrics.jsonl, without a last line that a crash cut short."""
    lines = (Path(run_directory) / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def loss_curves(runs: dict[str, Path], target: Path, title: str = ""):
    """Training loss of several runs, by label, into one figure; validation losses as dots."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for label, directory in runs.items():
        rows = read_metrics(directory)
        (line,) = axes.plot([r["step"] for r in rows], [r["loss"] for r in rows], label=label, linewidth=1.2)
        dots = [(r["step"], r["validation_loss"]) for r in rows if "validation_loss" in r]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=line.get_color(), label=f"{label}, validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def loss_curve(run_directory: Path):
    """loss.png of one run."""
    loss_curves({"training": run_directory}, Path(run_directory) / "loss.png")


def save_timeline(memory: MemoryTimeline, run_directory: Path):
    """memory.json: seconds and bytes by category after every allocation and release."""
    seconds, curves = memory.curves()
    (Path(run_directory) / "memory.json").write_text(json.dumps(dict(seconds=seconds, bytes=curves)))


def memory_over_time(run_directory: Path):
    """memory.png: bytes over time, stacked by category, from memory.json."""
    data = json.loads((Path(run_directory) / "memory.json").read_text())
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    stacked = [[n / 2**20 for n in data["bytes"][name]] for name in CATEGORIES]
    axes.stackplot(data["seconds"], stacked, labels=CATEGORIES, colors=[COLOURS[n] for n in CATEGORIES], step="post")
    axes.set(xlabel="seconds", ylabel="MiB")
    axes.legend(loc="upper left", ncols=len(CATEGORIES), fontsize=8)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
    figure.savefig(Path(run_directory) / "memory.png", dpi=120)
    plt.close(figure)
