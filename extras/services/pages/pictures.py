"""Makes the data of the interactive pictures, with the program's own functions; the page only draws them.

A picture is dict(title, at=its section of the page, choices=[(name, values, value shown first)],
frames={"value/value": frame}). A frame has a `text` and is one of three:

    table    columns, cells, states=[(text, {row: numbers of cells, one for each column or one for all})], and
             curve: see record.py. In code: `table`
    boxes    boxes, rows=names, width=columns, moments=the text of each, linked=a word before the links of a box. A box
             is (row, column, width, colour, label, note, [(number of a box linked to it, tag), ...], the moment from
             which on it is shown)
    lists    of a schedule, by rank: [kind, micro-batch, stage, (rank, number in its list) of the action that it waits
             for, or None], and costs={kind: units of time}: the page adds times, from costs that its reader chooses
"""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any
from unittest import mock

import numpy as np

import step05_cp_ring as step05
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.model import PRESETS
from common.schedules import SCHEDULES, consumer
from extras.services.dry_run import run_rank
from extras.services.pages.record import RANKS, recorded
from extras.services.seam import check, compose, plugins
from extras.services.tables import human


def picture(frames: dict[str, dict], title: str, at: str = "", **first: Any) -> dict:
    """Make a picture of `frames`, by "value/value" of the choices. `first`: choice -> the value that is shown first.

    `at`: the function or class whose section of the page has the picture; "": it is before the code.
    """
    values = zip(*(key.split("/") for key in frames), strict=True)
    choices = [(name, [*dict.fromkeys(of)], str(first[name])) for name, of in zip(first, values, strict=False)]
    name = "picture-" + re.sub(r"\W+", "-", title.lower())
    return dict(title=title, id=name, at=at, choices=choices, frames=frames)


def small(of: dict) -> dict:
    """The same picture without choices: it has only the frame that is shown first."""
    first = "/".join(value for *_, value in of["choices"])
    return of | dict(choices=[], frames={"": of["frames"][first]})


def tried(make: Callable[..., dict], *choices: Iterable) -> dict[str, dict]:
    """Make a frame for each combination of choices; if the program refuses one, the frame shows its message."""
    frames = {}
    for values in product(*choices):
        try:
            frame = make(*values)
        except UserError as error:
            frame = dict(text=str(error), boxes=[], rows=[], width=1, moments=[""])
        frames["/".join(map(str, values))] = frame
    return frames


def table(ranks: list[dict], columns: list[str]) -> dict:
    """Make a table that changes from state to state, of the ranks' recordings. Equal cells are stored once."""
    cells: dict[str, int] = {}
    states, curve = [], {kind: [] for kind in ranks[0].get("curve", ())}
    for n, now in enumerate(zip(*(rank["states"] for rank in ranks), strict=True)):
        joined = {}
        for name in now[0][1]:
            row = [json.dumps(cell) for _, rows in now for cell in rows[name]]
            joined[name] = [cells.setdefault(cell, len(cells)) for cell in row]
        if not states or joined != states[-1][1]:  # on some rank something has changed
            states.append((now[0][0], joined))
            for kind, sizes in curve.items():
                sizes.append(ranks[0]["curve"][kind][n])
    return dict(text=ranks[0]["text"], columns=columns, states=states, cells=[*map(json.loads, cells)], curve=curve)


def schedule(name: str, p: int, m: int) -> dict:
    """Make the frame of a schedule: its lists for p ranks and m micro-batches. Raises UserError."""
    config = compose(step06)(model="llama3-8b", schedule=name, pp=p)
    places, lists = step06.plan(config, m)
    at = {consumer(a, places): (rank, n) for rank, row in enumerate(lists) for n, a in enumerate(row)}
    rows = [[[*action, at.get(action)] for action in row] for row in lists]
    return dict(text="", lists=rows, costs=SCHEDULES[name](config).costs, linked="waits for")


def ring(mode: str) -> dict:
    """Show in which hop each pair of query and key is computed, by the mode's rule for the pairs of each rank."""
    positions, attention = step05.CONTEXT[mode]
    visible = inspect.signature(attention).parameters["visible"].default
    own = [positions(4 * RANKS, rank, RANKS).tolist() for rank in range(RANKS)]
    boxes, moments, slowest = [], [], 0
    for hop in range(RANKS):
        says, work = [], []
        for rank in range(RANKS):
            source = (rank - hop) % RANKS  # whose keys are here
            pairs = [
                (query, key)
                for queries, keys, causal in visible(rank, source, len(own[rank]))
                for (i, query), (j, key) in product(enumerate(own[rank][queries]), enumerate(own[source][keys]))
                if i >= j or not causal
            ]
            work.append(len(pairs))
            says.append(f"rank {rank}: {len(pairs)} pairs with the keys of rank {source}")
            note = f"Hop {hop}, rank {rank}: query {{}}, key {{}}"
            boxes += [(query, key, 1, rank, hop, note.format(query, key), [], hop) for query, key in pairs]
        slowest += max(work)
        moments.append(f"Hop {hop}. {'; '.join(says).capitalize()}. All wait for the slowest: {max(work)}.")
    text = "16 tokens. Rows: queries. Columns: keys. In a box: the hop that computes the pair. While a rank computes, "
    text += f"it sends the keys that it has to the next. {len(boxes)} pairs in all, {len(boxes) / RANKS:g} a rank if "
    text += f"shared evenly; they take the time of {slowest}, the slowest of each hop."
    rows = [f"{query}, rank {rank}" for query, rank in sorted((q, rank) for rank in range(RANKS) for q in own[rank])]
    return dict(text=text, boxes=boxes, rows=rows, width=len(rows), moments=moments)


def mesh(pp: int, dp: int, cp: int, tp: int, ep: int) -> dict:
    """Show all ranks of a mesh with their groups, in a row for each place in pp, dp and cp. Raises UserError."""
    world, places = pp * dp * cp * tp, [*product(range(pp), range(dp), range(cp), range(tp))]
    if world > 8:
        raise UserError(f"{world} ranks: choose sizes for at most 8.")
    sizes = dict(n_layers=pp, micro_batch_size=2, global_batch_size=2 * dp)
    config = compose(step07)(model="tiny", dry_run=world, device="cpu", pp=pp, cp=cp, tp=tp, ep=ep, **sizes)
    check(config, 1)
    groups, enter = defaultdict(list), Mesh.enter  # by dimension: the ranks of each group

    def seen(mesh: Mesh, name: str, rows: np.ndarray, urgent: bool = False):
        groups[name] += rows.tolist()
        enter(mesh, name, rows, urgent)

    with mock.patch.object(Mesh, "enter", seen):
        sent = [run_rank(step07.train, config, stage * world // pp).taken["traffic"] for stage in range(pp)]
    boxes = []
    for rank, place in enumerate(places):
        here = step05.CONTEXT[config.cp_mode].positions(PRESETS[config.model].seq_len, place[2], cp)
        tokens = " and ".join(f"{part[0]}-{part[-1]}" for part in here.chunk(2))
        lines = [f"rank {rank}: sequences {2 * place[1]}-{2 * place[1] + 1}, of each the tokens {tokens}"]
        tags: dict[int, list[str]] = defaultdict(list)  # rank -> the groups that it shares with this one
        for name, rows in groups.items():
            own = next(row for row in rows if rank in row)
            travels = [f"{op.replace('_', '-')} {human(n)}" for op, n in sorted(sent[place[0]].get(name, {}).items())]
            lines += [f"{name} {own}: {', '.join(travels) or 'nothing travels'}"] * (len(own) > 1)
            for other in own:
                tags[other].append(name)
        links = [(other, " ".join(names)) for other, names in sorted(tags.items()) if other != rank]
        boxes.append((rank // tp, rank % tp, 1, 0, rank, "\n".join(lines), links, 0))
    rows = ["pp {} dp {} cp {}".format(*place) for place in places[::tp]]
    text = f"{world} ranks; those of a row differ in tp. Choose one: the others say in which of its groups they are."
    text += " Below: what it sends in each group for two sequences of the tiny model, a layer a stage, by --dry-run."
    return dict(text=text, boxes=boxes, rows=rows, width=tp, moments=[""], linked="")


def all_pictures() -> dict[str, list[dict]]:
    """Make all pictures, by the module on whose page they are."""
    plugins()  # variants add their entries to the menus
    seen, four = recorded(), [f"rank {rank}" for rank in range(RANKS)]
    batches, two = [f"micro-batch {n}" for n in (1, 2, 3)], ["rank 0", "rank 1", "one device"]

    def of(name: str, columns: list[str], *rest: str, **first: Any) -> dict:
        """Make a picture of the ranks' recordings of this name; of as many ranks as there are columns."""
        who = [rank[name] for rank in seen if rank[name]][: 2 if columns is two else RANKS]
        return picture({key: table([rank[key] for rank in who], columns) for key in who[0]}, *rest, **first)

    schedules = tried(schedule, SCHEDULES, [2, 3, 4, 8], [1, 2, 4, 8])
    meshes = tried(mesh, *[[1, 2]] * 3, *[[1, 2, 4]] * 2)
    filling, timing = "Buckets fill and are sent during backward", dict(schedule="1f1b", ranks=4, micro_batches=8)
    return dict(
        step01_single_gpu=[of("step", batches, "A step, and what memory holds", dtype="fp32", recompute="none")],
        step02_ddp=[
            of("collective", four, "Collectives: four ranks' numbers", operation="all_reduce"),
            of("buckets", ["gradients", *four], filling, "BucketSync"),
        ],
        step03_zero=[of("zero", four, "Who holds which shard of what", zero=3)],
        step04_tp_sp=[of("block", two, "A block on two ranks", block="MLP", sp="yes")],
        step05_cp_ring=[picture(tried(ring, ["zigzag", "ring"]), "Queries and keys, hop by hop", mode="zigzag")],
        step06_pipeline=[picture(schedules, "A schedule, with your own costs", **timing)],
        step07_moe_ep=[
            of("routing", four, "Tokens travel to experts and back", ep=2),
            picture(meshes, "The mesh: choose a rank", "train", pp=2, dp=1, cp=2, tp=2, ep=2),
        ],
    )
