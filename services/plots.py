"""Every figure, drawn from the files that a run wrote into its directory."""

import json
from pathlib import Path
from typing import Any

from services.memory import CATEGORIES, MemoryTimeline

COLOURS = dict(zip(CATEGORIES, ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#999999"), strict=True))


def pyplot() -> Any:
    """matplotlib.pyplot, which draws into files. It takes a second to import, and most ranks draw nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def read_metrics(run_directory: Path) -> list[dict]:
    """The records of metrics.jsonl, without a last line that a crash cut short."""
    lines = (Path(run_directory) / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def loss_curves(runs: dict[str, Path], target: Path, title: str = ""):
    """Training loss of several runs, by label, into one figure; validation losses as dots."""
    plt = pyplot()
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
    plt = pyplot()
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
    plt = pyplot()
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
    plt = pyplot()
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


def expert_load(runs: dict[str, Path], target: Path, layer: str = ""):
    """Share of each expert in one layer's choices over training, stacked, of several runs by label.

    `layer`: its number; default: the one whose busiest expert is busiest at the end of any run.
    """
    rows = {label: [row for row in read_metrics(folder) if "expert_load" in row] for label, folder in runs.items()}
    last = [run[-1]["expert_load"] for run in rows.values()]
    layer = layer or max(last[0], key=lambda number: max(max(load[number]) for load in last))
    plt = pyplot()
    figure, panels = plt.subplots(
        1, len(runs), figsize=(1 + 4 * len(runs), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (label, run) in zip(panels[0], rows.items(), strict=True):
        loads = [row["expert_load"][layer] for row in run]
        n = len(loads[0])
        colours = [plt.colormaps["viridis"](i / max(1, n - 1)) for i in range(n)]
        axes.stackplot([row["step"] for row in run], *zip(*loads, strict=True), colors=colours, step="post")
        for i in range(1, n):
            axes.axhline(i / n, color="white", linewidth=0.6, linestyle=":")
        busiest = max(loads[-1]) * n
        title = f"{label + ': ' if label else ''}layer {layer}, busiest expert at the end {busiest:.1f} x its share"
        axes.set_title(title, fontsize=9)
        axes.set(xlabel="step", ylim=(0, 1), xlim=(run[0]["step"], max(run[-1]["step"], run[0]["step"] + 1)))
    panels[0, 0].set_ylabel("share of all choices, by expert")
    figure.savefig(target, dpi=120)
    plt.close(figure)


def expert_similarity(curves: dict[str, dict[str, list[tuple[int, float]]]], target: Path):
    """By run and layer: (step, mean linear CKA of the pairs of experts) over training."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for (label, layers), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        for number, (layer, points) in enumerate(layers.items()):
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=f"{label}: layer {layer}")
    axes.set(xlabel="step", ylabel="similarity of experts (linear CKA)", ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def context_work(trace: Path, target: Path):
    """Which rank computes which blocks at which hop, and how much in all, from the json of `tests.bench cp_work`."""
    data = json.loads(Path(trace).read_text())
    total = data["tokens"] * (data["tokens"] + 1) // 2
    modes, n = data["modes"], len(next(iter(data["modes"].values())))
    most = max(work["pairs"] for ranks in modes.values() for rank in ranks for work in rank)
    plt = pyplot()
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


ACTIONS = {"F": "#4c72b0", "B": "#55a868", "W": "#dd8452", "BW": "#8172b3"}  # as in step 6


def pipeline_timelines(source: Path | dict, target: Path, title: str = ""):
    """Who computes what when in a pipeline, simulated or measured: a row of boxes per rank, a panel per schedule.

    `source`: JSON file or its content, {"panels": {title: {"ranks": [[[kind, micro_batch, chunk, start, end], ...]],
    "idle": fraction, "simulated_idle": fraction or null}}}. The micro-batch stands in a box that is wide enough; later
    chunks are paler. Times count from a panel's first start, in any unit.
    """
    panels = (source if isinstance(source, dict) else json.loads(Path(source).read_text()))["panels"]
    width, heights = 12, [0.55 + 0.25 * len(panel["ranks"]) for panel in panels.values()]
    plt = pyplot()
    figure, rows = plt.subplots(
        len(panels), 1, figsize=(width, sum(heights) + 0.6), height_ratios=heights, squeeze=False, layout="constrained"
    )
    kinds = set()
    for axes, (name, panel) in zip(rows[:, 0], panels.items(), strict=True):
        boxes = [(rank, *box) for rank, row in enumerate(panel["ranks"]) for box in row]
        first, last = min(box[4] for box in boxes), max(box[5] for box in boxes)
        n_chunks = 1 + max(box[3] for box in boxes)
        for rank, kind, micro_batch, chunk, start, end in boxes:
            pale = 0.65 * chunk / max(2, n_chunks)
            colour = [c + (1 - c) * pale for c in plt.matplotlib.colors.to_rgb(ACTIONS[kind])]
            corner = (start - first, rank - 0.42)
            axes.add_patch(plt.Rectangle(corner, end - start, 0.84, facecolor=colour, edgecolor="white", linewidth=0.4))
            if (end - start) / (last - first) * width > 0.08 * len(str(micro_batch)):
                middle = (start + end) / 2 - first
                axes.text(middle, rank, micro_batch, ha="center", va="center_baseline", fontsize=7, color="white")
            kinds.add(kind)
        idle = f"{name}: idle {panel['idle']:.1%}"
        if panel.get("simulated_idle") is not None:
            idle += f", simulated {panel['simulated_idle']:.1%}"
        axes.set_title(idle, fontsize=9, loc="left")
        axes.set(xlim=(0, last - first), ylim=(len(panel["ranks"]) - 0.5, -0.5), yticks=range(len(panel["ranks"])))
        axes.set_ylabel("rank")
        axes.tick_params(labelsize=7)
        axes.spines[:].set_visible(False)
    names = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}
    areas = [plt.Rectangle((0, 0), 1, 1, color=ACTIONS[kind]) for kind in names if kind in kinds]
    labels = [name for kind, name in names.items() if kind in kinds]
    figure.legend(areas, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def traffic(run_directory: Path):
    """traffic.png: what rank 0 sent in the last step, by mesh dimension and operation, from metrics.jsonl."""
    last = read_metrics(run_directory)[-1]["traffic"]
    entries = [(f"{dim}: {operation}", sent) for dim, by_op in last.items() for operation, sent in by_op.items()]
    entries = sorted((entry for entry in entries if entry[1]), key=lambda entry: entry[1])
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1 + 0.26 * len(entries)), layout="constrained")
    dims = sorted({label.split(":")[0] for label, _ in entries})
    colours = [plt.colormaps["tab10"](dims.index(label.split(":")[0]) % 10) for label, _ in entries]
    axes.barh([label for label, _ in entries], [sent / 2**20 for _, sent in entries], color=colours)
    axes.set(
        xscale="log", xlabel="MiB sent by rank 0 in the last step", title="traffic by mesh dimension and operation"
    )
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(Path(run_directory) / "traffic.png", dpi=120)
    plt.close(figure)


def bandwidth(rows: list[tuple[int, float]], target: Path, title: str):
    """(bytes, seconds) of messages -> bytes a second by message size, both axes logarithmic."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot([n for n, _ in rows], [n / seconds / 1e9 for n, seconds in rows], marker="o")
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="message, bytes", ylabel="GB/s that a rank sends", title=f"all-reduce, {title}")
    axes.grid(alpha=0.3)
    figure.savefig(target, dpi=120)
    plt.close(figure)
