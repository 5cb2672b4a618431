"""Pictures that move, as data: the program's own functions are asked, and the page only draws what they say.

A picture is dict(choices=[(name, values, value shown first)], frames={"value/value": frame}). A frame is dict(text,
boxes, rows=names, width=columns, moments=what it says at each, linked=a word before what is linked to a box). A box is
(row, column, width, colour, label, note, numbers of the boxes linked to it, the moment from which on it is there).
"""

import inspect
import json
import re
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

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
from common.schedules import SCHEDULES, consumer, simulate
from services.plots import read_metrics
from services.screen import idle_fraction
from services.seam import compose, plugins

COLOURS = ("blue", "brown", "teal", "red", "green", "magenta", "dark green", "purple")  # what style.css makes of 0 to 7


def picture(make: Callable[..., dict], first: str, **choices: list) -> dict:
    """All frames: `make` makes one of a value of each choice, or raises UserError. `first` is shown first."""
    frames = {}
    for values in product(*choices.values()):
        try:
            frame = make(*values)
        except UserError as error:
            frame = dict(text=str(error), boxes=[], rows=[], width=1, moments=[""])
        frames["/".join(map(str, values))] = frame
    return dict(choices=[*zip(choices, choices.values(), first.split("/"), strict=True)], frames=frames)


def schedule(name: str, p: int, m: int) -> dict:
    """The timeline of a schedule for p ranks and m micro-batches. Raises UserError."""
    places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=p), m)
    costs = step06.costs_of(lists)
    spans = simulate(lists, places, costs)
    awaited = {consumer(action, places): [n] for n, (*_, action) in enumerate(spans)}
    boxes, held = [], [[0] * p for _ in range(spans[-1][0] + 1)]  # from F to the end of the last that needs its input
    for end, rank, start, action in spans:
        note = f"{action.kind} {action.micro_batch}, stage {action.stage}: time {start} to {end}"
        colour, linked = "FBW".index(action.kind), awaited.get(action, [])
        boxes.append((rank, start, end - start, colour, action.micro_batch, note, linked, start + 1))
        for t, row in enumerate(held):
            row[rank] += (action.kind == "F" and start < t) - (action.kind == "BW"["W" in costs] and end <= t)
    units = ", ".join(f"{kind} ({colour}) takes {costs[kind]}" for kind, colour in zip(costs, COLOURS, strict=False))
    idle = idle_fraction([(rank, start, end) for end, rank, start, _ in spans], p)
    text = f"Bubble {idle:.1%} of {end} units of time. {units}."
    text += f" Most activations in flight, by rank: {[max(column) for column in zip(*held, strict=True)]}."
    moments = [f"Time {t}. Activations in flight, by rank: {row}." for t, row in enumerate(held)]
    names = [f"rank {rank}" for rank in range(p)]
    return dict(text=text, boxes=boxes, rows=names, width=end, moments=moments, linked="waits for ")


def ring(mode: str, n: int) -> dict:
    """Who meets which keys in which hop, for 2 n chunks of a token each."""
    positions, attention = step05.CONTEXT[mode]
    visible = inspect.signature(attention).parameters["visible"].default
    tokens = [positions(2 * n, rank, n).tolist() for rank in range(n)]
    boxes, rows, moments = [], [""] * 2 * n, [f"Hop {hop}: " for hop in range(n)]
    for hop, rank in product(range(n), range(n)):
        source = (rank - hop) % n
        moments[hop] += f"{', ' * (rank > 0)}rank {rank} has the keys {tokens[source]}"
        for queries, keys, causal in visible(rank, source, 2):
            for q, k in product(tokens[rank][queries], tokens[source][keys]):
                note = f"Hop {hop}, rank {rank}: queries of chunk {q}, keys of chunk {k}{', causal' * (q == k)}"
                boxes += [(q, k, 1, rank, hop, note, [], hop)] if k <= q or not causal else []
                rows[q] = f"{q}, rank {rank}"
    text = "Rows: chunks of queries. Columns: chunks of keys. In a box: the hop in which the pair is computed."
    text += " While a rank computes, it sends the keys that it has on to the next."
    return dict(text=text, boxes=boxes, rows=rows, width=2 * n, moments=moments)


def rank_of_mesh(config: step07.Config, rank: int, world: int) -> tuple[str, list[int]]:
    """What step 7 gives a rank: its groups, tokens and parts of parameters. And the ranks that it has groups with."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = Mesh(pp=config.pp, dp=world // (config.pp * config.cp * config.tp), cp=config.cp, tp=config.tp)
        mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
        with torch.device("meta"):
            model = Decoder(PRESETS[config.model])
        step07.shard_tensors(model, mesh, config.sp)
        here = step05.shard_context(model, mesh, step05.CONTEXT[config.cp_mode], config.sp)
        step07.shard_experts(model, mesh, config)
        step07.keep_stage(model, mesh["pp"], step06.plan(config, 1)[0])
        groups = {g.name: dist.get_process_group_ranks(g.handle) if g.handle else [rank] for g in mesh.groups.values()}
    finally:
        dist.destroy_process_group()
    tokens = " and ".join(f"{part[0]}-{part[-1]}" for part in here.chunk(2))
    lines = [f"rank {rank}: sequences {mine.start}-{mine.stop - 1}, of each the tokens {tokens}"]
    lines += [", ".join(f"{name} {ranks}" for name, ranks in groups.items())]
    for name, param in model.named_parameters():
        shards, kind = layout_of(param).shards, re.sub(r"\.\d+\.", ".*.", name)
        cuts = [f"{s.start}-{min(s.stop, s.full) - 1} of {s.full} in dim {s.dim} ({s.over})" for s in shards]
        lines.append(f"{kind} {list(param.shape)}: {', '.join(cuts) or 'whole'}")
    return "\n".join(dict.fromkeys(lines)), sorted({other for ranks in groups.values() for other in ranks} - {rank})


def mesh(pp: int, dp: int, cp: int, tp: int, ep: int) -> dict:
    """All ranks of a mesh, a row for each place in pp, dp and cp. Raises UserError."""
    world = pp * dp * cp * tp
    config = compose(step07)(model="tiny", pp=pp, cp=cp, tp=tp, ep=ep)
    if world > 8:
        raise UserError(f"{world} ranks: choose sizes for at most 8.")
    boxes = [(n // tp, n % tp, 1, 0, n, *rank_of_mesh(config, n, world), 0) for n in range(world)]
    rows = ["pp {} dp {} cp {}".format(*place) for place in product(range(pp), range(dp), range(cp))]
    text = f"{world} ranks; those of a row differ in tp."
    return dict(text=text, boxes=boxes, rows=rows, width=tp, moments=[""], linked="with ")


def chart(moments: list[str], series: dict[str, list[float]]) -> dict:
    """Numbers over moments, each series in a colour, in 20 rows and at most 150 columns."""
    most, every, boxes = max(map(max, series.values())), -(-len(moments) // 150), {}
    for colour, (name, numbers) in enumerate(series.items()):
        for n, number in enumerate(numbers):
            y, x, note = 20 - round(20 * number / most), n // every, f"{moments[n]}: {name} {number:.5g}"
            boxes.setdefault((y, x), (y, x, 1, colour % len(COLOURS), "", note, [], x))
    rows = [f"{most * (20 - y) / 20:.3g}" for y in range(21)]
    text = ", ".join(f"{name} ({colour})" for name, colour in zip(series, cycle(COLOURS), strict=False)) + "."
    return dict(text=text, boxes=[*boxes.values()], rows=rows, width=x + 1, moments=moments[::every])


def run(folder: Path) -> dict:
    """Loss, memory and the load of experts of a run, from the files in its directory."""
    rows = read_metrics(folder)
    steps = [f"Step {row['step']}" for row in rows]
    charts = {"loss": (steps, {"loss": [row["loss"] for row in rows]})}
    if "peak_memory_bytes" in rows[0]:
        charts["peak of memory, MiB"] = steps, {"peak": [row["peak_memory_bytes"] / 2**20 for row in rows]}
    for layer in rows[0].get("expert_load", ()):
        loads = zip(*(row["expert_load"][layer] for row in rows), strict=True)
        charts[f"expert load, layer {layer}"] = steps, {f"expert {e}": load for e, load in enumerate(loads)}
    if (folder / "memory.json").exists():
        memory = json.loads((folder / "memory.json").read_text())
        tops = torch.tensor([*memory["bytes"].values()]).cumsum(0) / 2**20
        series = dict(zip(memory["bytes"], tops.tolist(), strict=True))
        charts["memory, MiB, each on those before"] = [f"{seconds:.3f} s" for seconds in memory["seconds"]], series
    return picture(lambda name: chart(*charts[name]), "loss", chart=[*charts])


def all_pictures() -> dict[str, dict]:
    """By the module on whose page it is."""
    plugins()  # variants add their entries to the menus
    modes = [mode for mode, made in step05.CONTEXT.items() if "visible" in inspect.signature(made.attention).parameters]
    ranks, sizes = [2, 3, 4, 8], [1, 2, 4]
    return dict(
        step05_cp_ring=picture(ring, "zigzag/4", mode=modes, ranks=ranks),
        step06_pipeline=picture(schedule, "1f1b/4/8", schedule=[*SCHEDULES], ranks=ranks, micro_batches=[2, 4, 8]),
        step07_moe_ep=picture(mesh, "2/1/2/2/2", pp=sizes, dp=sizes, cp=sizes, tp=sizes, ep=sizes),
    )
