"""Draws when each rank computed and waited in a step, from the traces of a run with --profile.

    torchrun --nproc_per_node=2 step06_pipeline.py --pp 2 --model debug --steps 3 --profile 1
    python -m extras.tools.timeline runs/step06_pipeline

It draws RUN/timeline.png: forwards are blue, backwards brown, with the number of their micro-batch;
gradients of weights are green, if a schedule splits backwards; the update is violet; waits for
messages are grey. The step is the last one traced. A range inside another is left out, such as a
wait in a forward. On GPUs the times are those of their kernels. Clocks of several machines may
differ.
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from common import UserError
from extras.start import start

# By the first letter of a range: forward, backward, gradients of weights, wait, optimizer.
COLOURS = {"F": "#2b5c8a", "B": "#9a4a1f", "W": "#2f6b4f", "w": "#d5d5d5", "O": "#5b4a8a"}
SHOWN = re.compile(r"[FBW](\d+)\.\d+|wait \w+|Optimizer\.step.*")


class Box(NamedTuple):
    """A range of a trace: its name, and its start and end in ms."""

    name: str
    start: float
    end: float


def read_boxes(path: Path) -> list[Box]:
    """The ranges of a rank's last traced step, in order; times are those of its machine's clock."""
    with gzip.open(path) as file:
        trace = json.load(file)
    ranges = [event for event in trace["traceEvents"] if "user_annotation" in event.get("cat", "")]
    of_gpu = [event for event in ranges if event["cat"] == "gpu_user_annotation"]
    ranges = sorted(of_gpu or ranges, key=lambda event: event["ts"])  # in microseconds
    step = [event["ts"] for event in ranges if event["name"].startswith("ProfilerStep")][-1]
    boxes: list[Box] = []
    for event in ranges:
        start = event["ts"] / 1e3
        is_inside = boxes and start < boxes[-1].end
        if event["ts"] >= step and SHOWN.fullmatch(event["name"]) and not is_inside:
            boxes.append(Box(event["name"].split("#")[0], start, start + event["dur"] / 1e3))
    return boxes


def draw(axes: Any, ranks: list[list[Box]]):
    """Draw the boxes of each rank. F, B and W show their micro-batch, where there is room."""
    end = max(box.end for boxes in ranks for box in boxes)
    busy = 0.0
    for rank, boxes in enumerate(ranks):
        for box in boxes:
            length = box.end - box.start
            bar = axes.barh(rank, length, left=box.start, color=COLOURS[box.name[0]], ec="white")
            number = SHOWN.match(box.name)[1]
            if number and length > end / 100:
                axes.bar_label(bar, [number], label_type="center", color="white", fontsize=7)
            busy += 0 if box.name[0] == "w" else length
    axes.set(xlabel="ms", xlim=(0, end), ylabel="rank", yticks=range(len(ranks)))
    axes.set_title(f"idle {1 - busy / (len(ranks) * end):.1%}", fontsize=9, loc="left")
    axes.invert_yaxis()


def read_ranks(run: Path) -> list[list[Box]]:
    """The boxes of all ranks; times are from the first start. Raises UserError."""
    paths = [run / f"trace-{n}.json.gz" for n in range(len([*run.glob("trace-*.json.gz")]))]
    if not paths:
        raise UserError(f"{run}: it has no traces: train with --profile 1")
    ranks = [read_boxes(path) for path in paths]
    zero = min(box.start for boxes in ranks for box in boxes)
    return [[Box(name, a - zero, b - zero) for name, a, b in boxes] for boxes in ranks]


def main(argv: list[str]):
    """Draw. Raises UserError."""
    from matplotlib.figure import Figure  # takes a second to import

    run = Path(*argv)
    ranks = read_ranks(run)
    figure = Figure(figsize=(12, 1.2 + 0.25 * len(ranks)), layout="constrained")
    draw(figure.subplots(), ranks)
    figure.savefig(run / "timeline.png", dpi=120)
    print(run / "timeline.png")


if __name__ == "__main__":
    start(main)
