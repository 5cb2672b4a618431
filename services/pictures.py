"""What a run shows before its first step and after its last: tables, who has which layers, who did what when."""

import json
from itertools import accumulate, product
from math import prod
from typing import Any

import torch

from common.comm import Mesh
from common.layout import layout_of
from common.schedules import Action, Costs, Placement, Span, simulate
from services import plots
from services.launch import gather_objects, where_ranks_are
from services.tables import reduction_table, table
from theory.bubble import UNIT_COSTS, idle_fraction
from theory.flops import moe_layers


def describe(schedule: str, placements: list[Placement], lists: list[list[Action]], lengths: list[int]) -> str:
    """Which rank has which layers, and the idle fraction if forward, input and weight gradient cost the same."""
    bounds, lines = [0, *accumulate(lengths)], []
    for rank in range(len(lists)):
        places = [
            (chunk, stage)
            for placement in placements
            for stage, (holder, chunk) in enumerate(placement)
            if holder == rank
        ]
        parts = []
        for chunk, stage in sorted(places):
            ends = ["embedding"] * (stage == 0), ["norm and head"] * (stage == len(lengths) - 1)
            layers = f"layers {bounds[stage]}-{bounds[stage + 1] - 1}"
            parts.append(f"chunk {chunk}: " + ", ".join([*ends[0], layers, *ends[1]]))
        lines.append(f"  pp {rank}  " + ";  ".join(parts))
    idle = idle_fraction(simulate(lists, placements, UNIT_COSTS))
    return f"stages of {schedule}, which is idle for {idle:.1%} of the time:\n" + "\n".join(lines)


def timeline(log: Any) -> list[list]:
    """The actions of a run's last step, [kind, micro-batch, chunk, start, end], in seconds. Waits for a GPU."""

    def seconds(moment: Any) -> float:
        if isinstance(moment, float):
            return moment - log.began
        moment.synchronize()
        return log.began.elapsed_time(moment) / 1e3

    return [[*action, seconds(start), seconds(end)] for action, start, end in log.spans]


def draw_timeline(run: Any):
    """timeline.json and timeline.png: what each stage did when in the last step, of one pipeline. A collective."""
    pipeline, lists = run.pipeline, run.pipeline.lists
    rows = gather_objects(timeline(run.log), run.mesh)[:: run.mesh.world // len(lists)]
    if run.mesh.rank == 0 and len(rows) > 1 and rows[0]:
        mean: dict[str, float] = {}
        for kind in ("F", "B", "W", "BW"):
            seconds = [end - start for row in rows for k, _, _, start, end in row if k == kind]
            mean[kind] = sum(seconds) / max(1, len(seconds))
        costs = Costs(mean["F"], mean["B"] or mean["BW"], mean["W"], 0)
        idle = idle_fraction([[Span(None, *span[3:]) for span in row] for row in rows])
        panel = dict(ranks=rows, idle=idle, simulated_idle=idle_fraction(simulate(lists, pipeline.placements, costs)))
        out = run.log.out
        (out / "timeline.json").write_text(json.dumps(dict(panels={run.config.schedule: panel})))
        plots.pipeline_timelines(out / "timeline.json", out / "timeline.png")


def mesh_picture(mesh: Mesh) -> str:
    """Which rank is where: the last dimension from left to right, the others from row to row."""
    *outer, inner = mesh.sizes
    lines = [f"mesh: {' x '.join(f'{name} {size}' for name, size in mesh.sizes.items())} ({inner} along the row)"]
    places = product(*(range(mesh.sizes[name]) for name in outer))
    for place, ranks in zip(places, torch.arange(mesh.world).view(-1, mesh.sizes[inner]).tolist(), strict=True):
        label = "  ".join(f"{name} {index}" for name, index in zip(outer, place, strict=True))
        lines.append(f"  {label}  [" + " ".join(f"{rank:2d}" for rank in ranks) + " ]")
    return "\n".join(lines)


def members(mesh: Mesh, dim: str) -> list[int]:
    """The ranks of this rank's group along a dimension."""
    handle = mesh[dim].handle
    return torch.distributed.get_process_group_ranks(handle) if handle is not None else [mesh.rank]


def watch(run: Any):
    """Let the log watch all forward passes of a pipeline's first step for memory, and all actions of its last."""
    if run.pipeline is not None:
        run.log.pipelined = True
        run.log.watch = run.log.forwards = sum(action.kind == "F" for action in run.pipeline.actions)


def before(run: Any, costs: Any):
    """Print where the run trains, its model, mesh, reduction table, stages, and the memory that theory predicts."""
    watch(run)
    mesh, pipeline, say = run.mesh, run.pipeline, run.log.say
    say(f"device: {where_ranks_are(mesh)}")
    dims = [*mesh.sizes]
    if "ep" in mesh.groups and mesh["ep"].size > 1:
        dims += ["ep", "expert_data"]
    if "kv" in mesh.groups and mesh["kv"].size > 1:
        dims += ["kv"]  # the ranks that hold copies of a key/value head
    shapes = {name: layout_of(p).full_shape(p.shape) for name, p in run.model.named_parameters()}
    rows = reduction_table(run.model, dims)
    if pipeline is not None:
        both = gather_objects((shapes, rows), mesh)  # a rank holds only some layers
        shapes = {name: shape for theirs, _ in both for name, shape in theirs.items()}
        rows = list({row[0]: row for _, theirs in both for row in theirs}.values())
    say(f"{run.config.model}: {sum(map(prod, shapes.values())):,} parameters, {run.dtype}, {run.device}")
    if mesh.sizes:
        say(mesh_picture(mesh))
    if "replicas" in mesh.groups and mesh["replicas"].size > 1:
        block, replicas = members(mesh, "shard"), members(mesh, "replicas")
        say(f"ZeRO: rank {mesh.rank} cuts with its block, {block}, and sums its slices with its replicas, {replicas}")
    say(table(rows))
    if pipeline is not None:
        say(describe(run.config.schedule, pipeline.placements, pipeline.lists, pipeline.lengths))
    say(run.log.memory_table(costs.memory))


def after(run: Any):
    """Draw what belongs to some steps only: timelines of pipelines, traffic, the load of experts."""
    if run.pipeline is not None:
        draw_timeline(run)
    if run.mesh.rank == 0 and run.log.history and hasattr(run.shape, "experts"):
        plots.traffic(run.log.out)
        if moe_layers(run.shape):
            plots.expert_load({"": run.log.out}, run.log.out / "expert_load.png")
