"""Makes the data of the interactive pictures, with the course's own functions; the page only draws
them.

A picture is dict(title, id, choices=[(name, values)], frames). A key of `frames` has a value of
each choice, as in "fp32/none"; the first is shown first. A frame is a dict with a `text` and the
keys of its kind, which is table or boxes:

    table    columns, states=[(text, {row: cells, one for each column or one across all})], and
             curve: see record.py
    boxes    boxes, rows=names, width=number of columns, moments=a text for each. A box is (row,
             column, width, colour, label, note, the first moment at which it is shown)
"""

import re
from itertools import accumulate, product

import step05_cp_ring as step05
from common.schedules import Span, simulate
from extras.__main__ import techniques
from extras.pages.record import RANKS, recorded
from extras.techniques._orders import ORDERS

VISIBLE = {"zigzag": step05.zigzag_visible, "ordered": step05.ordered_visible}
RING = """\
16 tokens. Rows: queries. Columns: keys. In a box: the hop that computes the pair. While a rank \
computes, it sends the keys that it has to the next. {n} pairs in all, {even:g} a rank if shared \
evenly; they take the time of {time}, the slowest of each hop."""


def picture(title: str, frames: dict[str, dict], *names: str) -> dict:
    """Make a picture. `frames`: a value of each choice ("fp32/none") -> frame. `names`: of the
    choices.
    """
    place = "picture-" + re.sub(r"\W+", "-", title.lower())
    choices = []
    for i, name in enumerate(names):
        values = [key.split("/")[i] for key in frames]
        choices.append((name, [*dict.fromkeys(values)]))
    return dict(title=title, id=place, choices=choices, frames=frames)


def table(ranks: list[dict], columns: list[str]) -> dict:
    """Make a table's frame from the ranks' recordings (see record.py). Rank 0 provides texts and
    the memory curve.
    """
    first = ranks[0]
    states = []
    for now in zip(*(rank["states"] for rank in ranks), strict=True):
        text, names = now[0]
        rows = {name: [cell for _, rows in now for cell in rows[name]] for name in names}
        states.append((text, rows))
    return dict(text=first["text"], columns=columns, states=states, curve=first.get("curve", {}))


def spans_of(name: str, p: int, m: int) -> list[Span]:
    """Simulate a schedule of p ranks and m micro-batches.

    An action takes its kind's cost twice, or once if a rank's layers are split into two stages.
    """
    order = ORDERS[name]
    costs = {kind: cost * 2 // order.v for kind, cost in order.costs.items()}
    return simulate(*order.lists(p, m), costs)


def most_held(spans: list[Span], rank: int) -> int:
    """The most forwards of a rank whose last backward action is still to come."""
    kinds = [span.action.kind for span in spans if span.rank == rank]
    last = "W" if "W" in kinds else "B"
    return max(accumulate((kind == "F") - (kind == last) for kind in kinds))


def schedule(name: str, p: int, m: int) -> dict:
    """Make the frame of a schedule with p ranks and m micro-batches, as the simulation times it."""
    spans = spans_of(name, p, m)
    end = spans[-1].end
    boxes = []
    busy = 0
    for rank, (kind, batch, stage), start, stop in spans:
        note = f"{kind} {batch}, stage {stage}: time {start} to {stop}"
        boxes.append((rank, start, stop - start, "FBWR".index(kind), batch, note, start + 1))
        busy += stop - start
    most = " ".join(str(most_held(spans, rank)) for rank in range(p))
    text = "F forward, B backward, W gradients of weights, R forward again. Ranks are idle for "
    text += f"{1 - busy / (p * end):.1%} of {end} units of time. Most forwards whose backward "
    text += f"is still to come, by rank: {most}."
    rows = [f"rank {rank}" for rank in range(p)]
    moments = [f"Time {time}." for time in range(int(end) + 1)]
    return dict(text=text, boxes=boxes, rows=rows, width=end, moments=moments)


def pairs_of(mode: str, own: list[list[int]], rank: int, source: int) -> list[tuple[int, int]]:
    """The pairs (query, key) that a rank computes with the keys of rank `source`.

    `own`: the positions that each rank has.
    """
    pairs = []
    visible = VISIBLE[mode](rank, source, len(own[rank]))
    if visible is not None:
        queries, keys, causal = visible
        for i, query in enumerate(own[rank][queries]):
            for j, key in enumerate(own[source][keys]):
                if i >= j or not causal:
                    pairs.append((query, key))
    return pairs


def ring(mode: str) -> dict:
    """Make a frame that shows in which hop each pair of query and key is computed under --cp-mode
    `mode`.
    """
    positions = step05.CONTEXT[mode].positions
    own = [positions(4 * RANKS, rank, RANKS).tolist() for rank in range(RANKS)]
    boxes = []
    moments = []
    time = 0
    for hop in range(RANKS):
        work = []
        for rank in range(RANKS):
            source = (rank - hop) % RANKS  # whose keys are here
            pairs = pairs_of(mode, own, rank, source)
            work.append(len(pairs))
            for query, key in pairs:
                note = f"Rank {rank} has query {query}, and from rank {source} key {key}."
                boxes.append((query, key, 1, rank, hop, note, hop))
        time += max(work)
        moments.append(f"Hop {hop}. Pairs of rank 0, 1, 2, 3: {work}. All wait for the slowest.")
    text = RING.format(n=len(boxes), even=len(boxes) / RANKS, time=time)
    holders = sorted((query, rank) for rank in range(RANKS) for query in own[rank])
    rows = [f"{query}, rank {rank}" for query, rank in holders]
    return dict(text=text, boxes=boxes, rows=rows, width=len(rows), moments=moments)


def all_pictures() -> dict[str, dict]:
    """Make a picture for each step, and for the index: page -> picture."""
    techniques()  # their entries are added to the menus
    seen = recorded()
    ranks = [f"rank {rank}" for rank in range(RANKS)]

    def tables(name: str, columns: list[str]) -> dict[str, dict]:
        """The frames of what the ranks have recorded under `name`."""
        who = [recording[name] for recording in seen if recording[name]]
        return {key: table([rank[key] for rank in who], columns) for key in who[0]}

    step = tables("step", [f"micro-batch {n}" for n in (1, 2, 3)])
    buckets = tables("buckets", ["gradients", *ranks])
    rings = {mode: ring(mode) for mode in VISIBLE}
    schedules = {}
    for name, p, m in product(ORDERS, (4, 2), (8, 4)):
        schedules[f"{name}/{p}/{m}"] = schedule(name, p, m)
    pipeline = picture(
        "A schedule, action by action", schedules, "schedule", "ranks", "micro-batches"
    )
    return dict(
        index=pipeline,
        step01_single_gpu=picture("A step, and what memory holds", step, "dtype", "recompute"),
        step02_ddp=picture("Buckets fill and are sent during backward", buckets),
        step03_zero=picture("Who holds which shard of what", tables("zero", ranks), "zero"),
        step04_tp_sp=picture("Which rank has what, from f to g", tables("block", ranks), "tokens"),
        step05_cp_ring=picture("Queries and keys, hop by hop", rings, "mode"),
        step06_pipeline=pipeline,
        step07_moe_ep=picture("Tokens travel to experts and back", tables("routing", ranks), "ep"),
    )
