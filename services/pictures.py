"""What a pipeline looks like: who has which layers, and who did what when."""

import json
from itertools import accumulate
from typing import Any

from common.comm import Mesh, gather_objects
from common.schedules import UNIT_COSTS, Action, Costs, Place, Span, idle_fraction, simulate
from services import plots
from services.run import Run


def describe(schedule: str, ways: list[list[Place]], lists: list[list[Action]], lengths: list[int]) -> str:
    """Which rank has which layers, and the idle fraction if forward, input and weight gradient cost the same."""
    bounds, lines = [0, *accumulate(lengths)], []
    for rank in range(len(lists)):
        places = [(chunk, stage) for way in ways for stage, (holder, chunk) in enumerate(way) if holder == rank]
        parts = []
        for chunk, stage in sorted(places):
            ends = ["embedding"] * (stage == 0), ["norm and head"] * (stage == len(lengths) - 1)
            layers = f"layers {bounds[stage]}-{bounds[stage + 1] - 1}"
            parts.append(f"chunk {chunk}: " + ", ".join([*ends[0], layers, *ends[1]]))
        lines.append(f"  pp {rank}  " + ";  ".join(parts))
    idle = idle_fraction(simulate(lists, ways, UNIT_COSTS))
    return f"stages of {schedule}, which is idle for {idle:.1%} of the time:\n" + "\n".join(lines)


def draw_timeline(run: Run, schedule: str, pipeline: Any, lists: list[list[Action]], mesh: Mesh):
    """timeline.json and timeline.png: what each stage did when in the last step, of one pipeline. A collective."""
    rows = gather_objects(pipeline.timeline(), mesh)[:: mesh.world // len(lists)]
    if run.rank == 0 and len(rows) > 1 and rows[0]:
        mean: dict[str, float] = {}
        for kind in ("F", "B", "W", "BW"):
            seconds = [end - start for row in rows for k, _, _, start, end in row if k == kind]
            mean[kind] = sum(seconds) / max(1, len(seconds))
        costs = Costs(mean["F"], mean["B"] or mean["BW"], mean["W"], 0)
        idle = idle_fraction([[Span(None, *span[3:]) for span in row] for row in rows])
        panel = dict(ranks=rows, idle=idle, simulated_idle=idle_fraction(simulate(lists, pipeline.ways, costs)))
        (run.out / "timeline.json").write_text(json.dumps(dict(panels={schedule: panel})))
        plots.pipeline_timelines(run.out / "timeline.json", run.out / "timeline.png")
