"""Pictures that move, as data: the program's own functions are asked, and the page only draws what they say.

A picture is dict(choices={name: [values]}, first="value/value", frames={"value/value": frame}). A frame has a `text`,
the names of its `rows`, its `width` in columns, its `boxes`, `moments`: what it says at each moment, and `linked`: a
word before the notes of boxes that are linked to another.
"""

import inspect
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import step05_cp_ring as step05
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.layout import layout_of
from common.model import PRESETS, Decoder
from common.schedules import COSTS, SCHEDULES, goes_to, simulate
from services.plots import read_metrics
from services.run import compose, plugins
from services.screen import simulated_idle

MOST_MOMENTS = 150  # of a run


class Box(NamedTuple):
    """In a row from column x on; it is there from a moment on. To touch it shows its note and boxes linked to it."""

    row: int
    x: int
    width: int
    colour: int
    label: Any
    note: str
    linked: tuple[int, ...] = ()  # numbers of boxes
    since: int = 0
    height: float = 1  # of the row's


def frame(text: str, boxes=(), rows=(), width: int = 1, moments=("",), linked: str = "") -> dict:
    """What a picture shows for one choice."""
    return dict(text=text, boxes=boxes, rows=rows, width=width, moments=moments, linked=linked)


def picture(make: Callable[..., dict], first: str = "", **choices: list) -> dict:
    """All frames: `make` makes one of a value of each choice, or raises UserError. `first` is shown first."""
    frames = {}
    for values in product(*choices.values()):
        try:
            made = make(*values)
        except UserError as error:
            made = frame(str(error))
        frames["/".join(map(str, values))] = made
    return dict(choices=choices, frames=frames, first=first or next(iter(frames)))


def schedule(name: str, p: int, m: int) -> dict:
    """The timeline of a schedule for p ranks and m micro-batches."""
    places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=p), m)
    split = any(action.kind == "W" for row in lists for action in row)
    costs = COSTS | dict(B=1) if split else {kind: COSTS[kind] for kind in "FB"}
    spans = simulate(lists, places, costs)
    awaited = {goes_to(action, places): n for n, (*_, action) in enumerate(spans)}
    boxes, last = [], spans[-1][0]
    held = [[0] * p for _ in range(last + 1)]  # from the start of F to the end of the last that needs what it keeps
    for end, rank, start, action in spans:
        kind, needs = action.kind, [awaited[action]] if action in awaited else []
        note = f"{kind} {action.micro_batch}, stage {action.stage}: time {start} to {end}"
        boxes.append(Box(rank, start, end - start, "FBW".index(kind), action.micro_batch, note, needs, start + 1))
        change, since = {"F": (1, start + 1), "BW"[split]: (-1, end)}.get(kind, (0, last + 1))
        for row in held[since:]:
            row[rank] += change
    most = ", ".join(str(max(column)) for column in zip(*held, strict=True))
    bubble, units = simulated_idle(lists, places, costs), ", ".join(f"{kind} {n}" for kind, n in costs.items())
    text = f"Bubble {bubble:.1%} of {last} units of time ({units}). Most activations in flight, by rank: {most}."
    moments = [f"Time {t}. Activations in flight, by rank: {', '.join(map(str, row))}." for t, row in enumerate(held)]
    return frame(text, boxes, [f"rank {rank}" for rank in range(p)], last, moments, "waits for ")


def ring(mode: str, n: int) -> dict:
    """Who meets which keys in which hop, for 2 n chunks of a token each."""
    positions, attention = step05.CONTEXT[mode]
    visible = inspect.signature(attention).parameters["visible"].default
    tokens = [positions(2 * n, rank, n).tolist() for rank in range(n)]
    boxes, moments = [], []
    for hop in range(n):
        sources = [(rank - hop) % n for rank in range(n)]
        moments.append(f"Hop {hop}: " + ", ".join(f"rank {r} has the keys {tokens[s]}" for r, s in enumerate(sources)))
        for rank, source in enumerate(sources):
            for rows, keys, causal in visible(rank, source, 2):
                for q, k in product(tokens[rank][rows[2]], tokens[source][keys[2]]):
                    if k <= q or not causal:
                        note = f"Hop {hop}, rank {rank}: queries of chunk {q}, keys of chunk {k}{', causal' * (q == k)}"
                        boxes.append(Box(q, k, 1, rank, hop, note, since=hop))
    owner = {token: rank for rank in range(n) for token in tokens[rank]}
    text = "Rows: chunks of queries. Columns: chunks of keys. In a box: the hop in which the pair is computed."
    text += " While a rank computes, it sends the keys that it has on to the next."
    return frame(text, boxes, [f"{q}, rank {owner[q]}" for q in range(2 * n)], 2 * n, moments)


def rank_of_mesh(config: Any, rank: int, world: int) -> tuple[str, list[int]]:
    """What step 7 gives a rank: its groups, tokens and parts of parameters. One process plays the rank."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = Mesh(pp=config.pp, dp=world // (config.pp * config.cp * config.tp), cp=config.cp, tp=config.tp)
        mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
        with torch.device("meta"):
            model = Decoder(PRESETS[config.model])
        here = step05.shard_context(model, mesh, step05.CONTEXT[config.cp_mode])
        step07.shard_experts(model, mesh, config)
        step07.shard_tensors(model, mesh, config.sp)
        step07.keep_stage(model, mesh["pp"], step06.plan(config, 1)[0])
        groups = {g.name: dist.get_process_group_ranks(g.handle) if g.handle else [rank] for g in mesh.groups.values()}
    finally:
        dist.destroy_process_group()
    runs = [f"{part[0]}-{part[-1]}" for part in here.tensor_split((here.diff() != 1).nonzero().flatten() + 1)]
    lines = [f"rank {rank}: sequences {mine.start}-{mine.stop - 1}, of each the tokens {', '.join(runs)}"]
    lines += [", ".join(f"{name} {ranks}" for name, ranks in groups.items())]
    for name, param in model.named_parameters():
        record = layout_of(param)
        cuts = [f"{s.start}-{min(s.stop, s.full) - 1} of {s.full} in dim {s.dim} ({s.over})" for s in record.splits]
        sums = " and ".join((record.data_group, *record.partial_over))
        kind = re.sub(r"\.\d+\.", ".*.", name)
        lines.append(f"{kind} {list(param.shape)}: {', '.join(cuts) or 'whole'}; gradient summed over {sums}")
    return "\n".join(dict.fromkeys(lines)), sorted({other for ranks in groups.values() for other in ranks} - {rank})


def mesh(pp: int, dp: int, cp: int, tp: int, ep: int) -> dict:
    """All ranks of a mesh, a row for each place in pp, dp and cp. Raises UserError."""
    world = pp * dp * cp * tp
    if world > 8:
        raise UserError(f"{world} ranks: choose sizes for at most 8.")
    config = compose(step07)(model="tiny", pp=pp, cp=cp, tp=tp, ep=ep)
    boxes = [Box(n // tp, n % tp, 1, 0, n, *rank_of_mesh(config, n, world)) for n in range(world)]
    rows = ["pp {} dp {} cp {}".format(*place) for place in product(range(pp), range(dp), range(cp))]
    return frame(f"{world} ranks; those of a row differ in tp. Touch one.", boxes, rows, tp, linked="with ")


def curves(moments: list[str], series: dict[str, list[float]]) -> dict:
    """A row for each series; in it a bar for each moment, or for the highest of several that follow one another."""
    points = list(zip(moments, zip(*series.values(), strict=True), strict=True))
    every = -(-len(points) // MOST_MOMENTS)
    points = [max(points[n : n + every], key=lambda point: sum(point[1])) for n in range(0, len(points), every)]
    most = max(value for _, values in points for value in values)
    boxes, says = [], []
    for x, (moment, values) in enumerate(points):
        notes = [f"{name} {value:.4g}" for name, value in zip(series, values, strict=True)]
        says.append(f"{moment}: {', '.join(notes)}")
        for row, (note, value) in enumerate(zip(notes, values, strict=True)):
            boxes.append(Box(row, x, 1, row, "", f"{moment}: {note}", since=x, height=value / most))
    return frame(f"Top of each row: {most:.4g}.", boxes, list(series), len(points), says)


def run(folder: Path) -> dict:
    """Loss, memory and the load of experts of a run, from the files in its directory."""
    rows, shown = read_metrics(folder), {}
    steps = [f"Step {row['step']}" for row in rows]
    if (folder / "memory.json").exists():
        memory = json.loads((folder / "memory.json").read_text())
        series = {name: [n / 2**20 for n in sizes] for name, sizes in memory["bytes"].items()}
        shown["memory, MiB"] = [f"{seconds:.3f} s" for seconds in memory["seconds"]], series
    shown["loss"] = steps, dict(loss=[row["loss"] for row in rows])
    if "peak_memory_bytes" in rows[0]:
        shown["peak of memory, MiB"] = steps, dict(peak=[row["peak_memory_bytes"] / 2**20 for row in rows])
    for layer in rows[0].get("expert_load", ()):
        loads = zip(*(row["expert_load"][layer] for row in rows), strict=True)
        shown[f"expert load, layer {layer}"] = steps, {f"expert {e}": load for e, load in enumerate(loads)}
    return picture(lambda name: curves(*shown[name]), curve=list(shown))


def all_pictures() -> dict[str, dict]:
    """Every picture by name, but that of a run."""
    plugins()  # variants add their entries to the menus
    modes = [mode for mode, made in step05.CONTEXT.items() if "visible" in inspect.signature(made.attention).parameters]
    ranks, micro_batches, sizes = [2, 3, 4, 8], [2, 4, 8, 16], [1, 2, 4]
    return dict(
        schedules=picture(schedule, "1f1b/4/8", schedule=list(SCHEDULES), ranks=ranks, micro_batches=micro_batches),
        ring=picture(ring, "zigzag/4", mode=modes, ranks=ranks),
        mesh=picture(mesh, "2/1/2/2/2", pp=sizes, dp=sizes, cp=sizes, tp=sizes, ep=sizes),
    )
