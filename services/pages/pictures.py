"""Pictures that move, as data: the program's own functions are asked, and the page only draws what they say.

A picture is dict(choices={name: [values]}, frames={"value/value": frame}). A frame has `rows` (labels), `width` (units
along x), `boxes` [row, x, width, colour, label, note, linked boxes, moment from which it is there], `areas` [colour,
name, points of a polygon in a square of 100 x 100], a `text`, and `texts`, one for each moment; or just a `text`.
"""

import inspect
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

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


def picture(frame: Callable[..., dict], first: str = "", **choices: list) -> dict:
    """All frames: `frame` makes one of a value of each choice, or raises UserError. `first` is shown first."""
    frames = {}
    for values in product(*choices.values()):
        try:
            frames["/".join(map(str, values))] = frame(*values)
        except UserError as error:
            frames["/".join(map(str, values))] = dict(text=str(error))
    return dict(choices=choices, frames=frames, first=first or next(iter(frames)))


def schedule(name: str, p: int, m: int) -> dict:
    """The timeline of a schedule for p ranks and m micro-batches."""
    places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=p), m)
    split = any(action.kind == "W" for row in lists for action in row)
    costs = COSTS | dict(B=1) if split else {kind: COSTS[kind] for kind in "FB"}
    spans = simulate(lists, places, costs)
    number = {action: n for n, (*_, action) in enumerate(spans)}
    made_by = {goes_to(action, places): n for action, n in number.items()}
    boxes, last = [], spans[-1][0]
    held = [[0] * p for _ in range(last + 1)]  # from the start of F to the end of the last that needs what it keeps
    for end, rank, start, action in spans:
        note = f"{action.kind} {action.micro_batch}, stage {action.stage}"
        needs = [made_by[action]] if action in made_by else []
        boxes.append([rank, start, end - start, action.kind, action.micro_batch, note, needs, start + 1])
        change, since = {"F": (1, start + 1), "BW"[split]: (-1, end)}.get(action.kind, (0, last + 1))
        for row in held[since:]:
            row[rank] += change
    most = ", ".join(str(max(column)) for column in zip(*held, strict=True))
    bubble, units = simulated_idle(lists, places, costs), ", ".join(f"{kind} {n}" for kind, n in costs.items())
    text = f"Bubble {bubble:.1%} of {last} units of time ({units}). Most activations in flight, by rank: {most}."
    texts = [f"Time {t}. Activations in flight, by rank: {', '.join(map(str, row))}." for t, row in enumerate(held)]
    return dict(rows=[f"rank {rank}" for rank in range(p)], width=last, boxes=boxes, text=text, texts=texts, timed=1)


def ring(mode: str, n: int) -> dict:
    """Who meets which keys in which hop, for 2 n chunks of a token each."""
    positions, attention = step05.CONTEXT[mode]
    visible = inspect.signature(attention).parameters["visible"].default
    tokens = [positions(2 * n, rank, n).tolist() for rank in range(n)]
    boxes, texts = [], []
    for hop in range(n):
        says = [f"Hop {hop}." + " Meanwhile each rank sends these keys on, to the next rank." * (hop + 1 < n)]
        for rank in range(n):
            source, cells = (rank - hop) % n, []
            for rows, keys, causal in visible(rank, source, 2):
                pairs = product(range(2)[rows[2]], range(2)[keys[2]])
                cells += [(tokens[rank][i], tokens[source][j]) for i, j in pairs if not causal or j <= i]
            for q, k in cells:
                note = f"Hop {hop}, rank {rank}: queries of chunk {q}, keys of chunk {k}" + ", causal" * (q == k)
                boxes.append([q, k, 1, f"r{rank}", hop, note, [], hop])
            done = f"of queries {sorted({q for q, _ in cells})} to keys {sorted({k for _, k in cells})}" * bool(cells)
            says.append(f"rank {rank} holds keys {tokens[source]} and computes {done or 'nothing'}")
        texts.append("\n".join(says))
    owner = {token: rank for rank in range(n) for token in tokens[rank]}
    text = "Rows: chunks of queries. Columns: chunks of keys. In a box: the hop in which the pair is computed."
    return dict(rows=[f"{q}, rank {owner[q]}" for q in range(2 * n)], width=2 * n, boxes=boxes, text=text, texts=texts)


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
    return "\n".join(dict.fromkeys(lines)), sorted({other for ranks in groups.values() for other in ranks})


def mesh(pp: int, dp: int, cp: int, tp: int, ep: int) -> dict:
    """All ranks of a mesh, a row for each place in pp, dp and cp. Raises UserError."""
    world = pp * dp * cp * tp
    if world > 8:
        raise UserError(f"{world} ranks: choose sizes for at most 8.")
    config = compose(step07)(model="tiny", pp=pp, cp=cp, tp=tp, ep=ep)
    ranks = [rank_of_mesh(config, rank, world) for rank in range(world)]
    boxes = [[n // tp, n % tp, 1, "F", n, note, others, 0] for n, (note, others) in enumerate(ranks)]
    places = product(range(pp), range(dp), range(cp))
    rows = ["pp {} dp {} cp {}".format(*place) for place in places]
    return dict(rows=rows, width=tp, boxes=boxes, text=f"{world} ranks; those of a row differ in tp.", texts=[""])


def areas(moments: list[str], series: dict[str, list[float]]) -> dict:
    """Curves, stacked, as polygons; a point of each at every moment."""
    points = list(zip(*series.values(), strict=True))
    most, n = max(map(sum, points)) or 1, max(1, len(points) - 1)
    tops = [[100 - 100 * sum(point[: k + 1]) / most for point in points] for k in range(len(series))]
    shapes = [" ".join(f"{100 * i / n:.4g},{y:.4g}" for i, y in enumerate(top)) + " 100,100 0,100" for top in tops]
    says = lambda value: f"{value:,.0f}" if value > 999 else f"{value:.4g}"  # noqa: E731
    values = [", ".join(f"{name} {says(v)}" for name, v in zip(series, point, strict=True)) for point in points]
    texts = [f"{moment}: {value}" for moment, value in zip(moments, values, strict=True)]
    kinds = [f"r{k % 8}" for k in range(len(series))]
    return dict(areas=list(zip(kinds, shapes, series, strict=True))[::-1], texts=texts, text=f"Top: {says(most)}")


def run(folder: Path) -> dict:
    """Loss, memory and the load of experts of a run, from the files in its directory."""
    rows, curves = read_metrics(folder), {}
    steps = [f"Step {row['step']}" for row in rows]
    for name in (name for name in ("loss", "peak_memory_bytes") if name in rows[0]):
        curves[name] = steps, {name: [row[name] for row in rows]}
    if (folder / "memory.json").exists():
        memory = json.loads((folder / "memory.json").read_text())
        curves["memory over time"] = [f"{seconds:.3f} s, bytes" for seconds in memory["seconds"]], memory["bytes"]
    for layer in rows[0].get("expert_load", ()):
        loads = zip(*(row["expert_load"][layer] for row in rows), strict=True)
        curves[f"expert load, layer {layer}"] = steps, {f"expert {e}": load for e, load in enumerate(loads)}
    return picture(lambda name: areas(*curves[name]), curve=list(curves))


def all_pictures() -> dict[str, dict]:
    """Every picture by name, but that of a run."""
    plugins()  # variants add their entries to the menus
    modes = [
        mode for mode, (_, attention) in step05.CONTEXT.items() if "visible" in inspect.signature(attention).parameters
    ]
    sizes = {name: [1, 2, 4] for name in ("pp", "dp", "cp", "tp", "ep")}
    return dict(
        schedules=picture(
            schedule, "1f1b/4/8", schedule=list(SCHEDULES), ranks=[2, 3, 4, 8], micro_batches=[2, 4, 8, 16]
        ),
        ring=picture(ring, "zigzag/4", mode=modes, ranks=[2, 3, 4, 8]),
        mesh=picture(mesh, "2/1/2/2/2", **sizes),
    )
