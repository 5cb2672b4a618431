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


def memory_side_by_side(runs: dict[str, Path], target: Path, title: str = ""):
    """Bytes over time of several runs, by label, stacked by category, from their memory.json; one scale for all."""
    figure, panels = plt.subplots(1, len(runs), figsize=(3 * len(runs), 4), layout="constrained", sharey=True)
    for axes, (label, directory) in zip(panels, runs.items(), strict=True):
        data = json.loads((Path(directory) / "memory.json").read_text())
        stacked = [[n / 2**20 for n in data["bytes"][name]] for name in CATEGORIES]
        axes.stackplot(
            data["seconds"], stacked, labels=CATEGORIES, colors=[COLOURS[n] for n in CATEGORIES], step="post"
        )
        highest = max(sum(column) for column in zip(*stacked, strict=True))
        axes.axhline(highest, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="seconds", title=f"{label}: at most {highest:.0f} MiB", xlim=(0, data["seconds"][-1]))
    panels[0].set_ylabel("MiB")
    areas, names = panels[0].get_legend_handles_labels()
    names = ["other: temporaries, gradients not yet summed" if name == "other" else name for name in names]
    figure.legend(areas, names, loc="outside lower center", ncols=len(CATEGORIES))
    figure.suptitle(title)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def predicted_and_measured(file: Path, target: Path):
    """Groups of bars of measured bytes, a black line across each where it was predicted.

    `file`: JSON {"title", "groups": [label], "bars": {label: {"predicted": [bytes by group], "measured": [...]}}}.
    """
    data = json.loads(Path(file).read_text())
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = 0.8 / len(data["bars"])
    for i, (label, heights) in enumerate(data["bars"].items()):
        places = [group + (i - (len(data["bars"]) - 1) / 2) * width for group in range(len(data["groups"]))]
        axes.bar(places, [n / 2**20 for n in heights["measured"]], 0.92 * width, label=label)
        for place, n_bytes in zip(places, heights["predicted"], strict=True):
            axes.hlines(n_bytes / 2**20, place - width / 2, place + width / 2, color="black", linewidth=1.5)
    axes.plot([], [], color="black", linewidth=1.5, label="predicted")
    axes.set_xticks(range(len(data["groups"])), data["groups"])
    axes.set(ylabel="MiB", title=data["title"])
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend()
    figure.savefig(target, dpi=120)
    plt.close(figure)


def context_work(trace: Path, target: Path):
    """Which rank computes which blocks at which hop, and how much in all, from the json of `tests.bench cp_work`."""
    data = json.loads(Path(trace).read_text())
    total = data["tokens"] * (data["tokens"] + 1) // 2
    modes, n = data["modes"], len(next(iter(data["modes"].values())))
    most = max(work["pairs"] for ranks in modes.values() for rank in ranks for work in rank)
    figure, panels = plt.subplots(1, len(modes) + 1, figsize=(2.2 + n * (len(modes) + 1), 1.6 + 0.8 * n), squeeze=False)
    for axes, (mode, ranks) in zip(panels[0], modes.items(), strict=False):
        for rank, done in enumerate(ranks):
            for hop in range(n):
                axes.add_patch(plt.Rectangle((rank - 0.46, hop - 0.4), 0.92, 0.8, fill=False, edgecolor="#bbbbbb"))
            for work in done:
                colour, width = plt.colormaps["tab20"](2 * work["source"] % 20 + 1), 0.92 * work["pairs"] / most
                axes.add_patch(plt.Rectangle((rank - 0.46, work["hop"] - 0.4), width, 0.8, color=colour))
                text = f"k, v of {work['source']}\n{work['pairs'] / total:.1%}"
                axes.text(rank, work["hop"], text, ha="center", va="center", fontsize=8)
            for hop in set(range(n)) - {work["hop"] for work in done}:
                axes.text(rank, hop, "nothing", ha="center", va="center", fontsize=8, color="#999999")
        axes.set(xlim=(-0.55, n - 0.45), ylim=(n - 0.5, -0.5), xticks=range(n), yticks=range(n), title=mode)
        axes.set(xlabel="rank", ylabel="hop")
        axes.spines[:].set_visible(False)
    for i, (mode, ranks) in enumerate(modes.items()):
        sums = [sum(work["pairs"] for work in done) / total for done in ranks]
        places = [rank + (i - (len(modes) - 1) / 2) * 0.8 / len(modes) for rank in range(n)]
        panels[0, -1].bar(places, [100 * share for share in sums], 0.8 / len(modes), label=mode)
    panels[0, -1].axhline(100 / n, color="black", linewidth=0.8, linestyle=":", label="equal shares")
    panels[0, -1].set(xlabel="rank", ylabel="% of all query-key pairs", title="work of each rank", xticks=range(n))
    panels[0, -1].legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)
