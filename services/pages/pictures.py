"""Pictures that move, as data: the program's own functions are asked, and the page only draws what they say.

A picture is dict(title, at=the section that it stands in, choices=[(name, values, value shown first)],
frames={"value/value": frame}). A frame has a `text` and is one of three:

    table    columns, cells, states=[(what it says, {row: numbers of cells, one for each column or one for all})], and
             curve: see record.py. In code: `table`
    boxes    boxes, rows=names, width=columns, moments=what it says at each, linked=a word before what is linked to a
             box. A box is (row, column, width, colour, label, note, [(number of a box linked to it, tag), ...], the
             moment from which on it is there)
    lists    of a schedule, by rank: [kind, micro-batch, stage, (rank, number in its list) of what it waits for, or
             None], and costs={kind: units of time}: the page adds the times, with the costs that its reader chooses
"""

import inspect
import json
import re
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import step03_zero as step03
import step05_cp_ring as step05
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.layout import layout_of
from common.model import PRESETS, Decoder
from common.schedules import SCHEDULES, consumer
from common.trainer import Run
from services import predictions
from services.pages.record import OPERATIONS, RANKS, recorded, ring_modes
from services.seam import compose, plugins
from services.tables import human
from variants import Parts


def picture(make: Callable[..., dict], title: str, first: str, at: str = "", **choices: list) -> dict:
    """All frames: `make` makes one of a value of each choice, or raises UserError. `first` is shown first.

    `at`: the section of the page that it stands in, by the name of what it defines; "": before the code.
    """
    frames = {}
    for values in product(*choices.values()):
        try:
            frame = make(*values)
        except UserError as error:
            frame = dict(text=str(error), boxes=[], rows=[], width=1, moments=[""])
        frames["/".join(map(str, values))] = frame
    shown = [*zip(choices, choices.values(), first.split("/"), strict=True)] if choices else []
    name = "picture-" + re.sub(r"\W+", "-", title.lower())
    return dict(title=title, id=name, at=at, choices=shown, frames=frames)


def table(ranks: list[dict], columns: list[str]) -> dict:
    """A table that changes from state to state: what the ranks recorded, side by side. Equal cells are kept once."""
    cells: dict[str, int] = {}

    def joined(rows: tuple[dict, ...]) -> dict:
        of = {name: [cell for row in rows for cell in row[name]] for name in rows[0]}
        return {name: [cells.setdefault(json.dumps(cell), len(cells)) for cell in row] for name, row in of.items()}

    states = [(now[0][0], joined([rows for _, rows in now])) for now in zip(*(r["states"] for r in ranks), strict=True)]
    curve = ranks[0].get("curve", {})
    return dict(text=ranks[0]["text"], columns=columns, states=states, cells=[*map(json.loads, cells)], curve=curve)


def schedule(name: str, p: int, m: int) -> dict:
    """The lists of a schedule for p ranks and m micro-batches. Raises UserError."""
    places, lists = step06.plan(compose(step06)(model="llama3-8b", schedule=name, pp=p), m)
    at = {consumer(a, places): (rank, n) for rank, row in enumerate(lists) for n, a in enumerate(row)}
    rows = [[[*action, at.get(action)] for action in row] for row in lists]
    return dict(text="", lists=rows, costs=step06.costs_of(lists), linked="waits for")


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


def rank_of_mesh(config: step07.Config, rank: int, world: int) -> tuple[str, list[tuple[int, str]]]:
    """What step 7 gives a rank: its groups, what it sends in them in a step, tokens, parts of parameters.

    And the ranks that it has groups with, each with the dimensions of these.
    """
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh = Mesh(pp=config.pp, dp=world // (config.pp * config.cp * config.tp), cp=config.cp, tp=config.tp)
        mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
        places, _ = step06.plan(config, -(-(mine.stop - mine.start) // config.micro_batch_size))
        with torch.device("meta"):
            model = Decoder(PRESETS[config.model])
        step07.shard_tensors(model, mesh, config.sp)
        here = step05.shard_context(model, mesh, step05.CONTEXT[config.cp_mode], config.sp)
        step07.shard_experts(model, mesh, config)
        step07.keep_stage(model, mesh["pp"], places)
        pipeline = SimpleNamespace(group=mesh["pp"], places=places, sp_ranks=config.tp if config.sp else 1)
        parts = Parts(Run(config), model=model, sync="bucket", mesh=mesh, positions=here, pipeline=pipeline)
        sent = predictions.sent_bytes(config, parts)
        groups = {g.name: dist.get_process_group_ranks(g.handle) if g.handle else [rank] for g in mesh.groups.values()}
    finally:
        dist.destroy_process_group()
    tokens = " and ".join(f"{part[0]}-{part[-1]}" for part in here.chunk(2))
    lines = [f"rank {rank}: sequences {mine.start}-{mine.stop - 1}, of each the tokens {tokens}"]
    tags: dict[int, list[str]] = {}
    for name, ranks in groups.items():
        travels = [f"{op.replace('_', '-')} {human(n)}" for (dim, op), n in sorted(sent.items()) if dim == name]
        lines += [f"{name} {ranks}: {', '.join(travels) or 'nothing travels'}"] if len(ranks) > 1 else []
        for other in ranks:
            tags.setdefault(other, []).append(name)
    for name, param in model.named_parameters():
        shards, kind = layout_of(param).shards, re.sub(r"\.\d+\.", ".*.", name)
        cuts = [f"{s.start}-{min(s.stop, s.full) - 1} of {s.full} in dim {s.dim} ({s.over})" for s in shards]
        lines.append(f"{kind} {list(param.shape)}: {', '.join(cuts) or 'whole'}")
    return "\n".join(dict.fromkeys(lines)), [(n, " ".join(of)) for n, of in sorted(tags.items()) if n != rank]


def mesh(pp: int, dp: int, cp: int, tp: int, ep: int) -> dict:
    """All ranks of a mesh, a row for each place in pp, dp and cp. Raises UserError."""
    world = pp * dp * cp * tp
    config = compose(step07)(model="tiny", pp=pp, cp=cp, tp=tp, ep=ep)
    if world > 8:
        raise UserError(f"{world} ranks: choose sizes for at most 8.")
    boxes = [(n // tp, n % tp, 1, n // tp % 8, n, *rank_of_mesh(config, n, world), 0) for n in range(world)]
    rows = ["pp {} dp {} cp {}".format(*place) for place in product(range(pp), range(dp), range(cp))]
    text = f"{world} ranks; those of a row differ in tp. Choose one: the others say in which of its groups they are."
    text += " Below: what it sends in each group in a step of the tiny model (what theory/ predicts, and runs measure)."
    return dict(text=text, boxes=boxes, rows=rows, width=tp, moments=[""], linked="")


def all_pictures() -> dict[str, list[dict]]:
    """By the module on whose page they are."""
    plugins()  # variants add their entries to the menus
    seen, ranks, sizes, modes = recorded(), [2, 3, 4, 8], [1, 2, 4], ring_modes()
    schedules = dict(schedule=[*SCHEDULES], ranks=ranks, micro_batches=[1, 2, 4, 8])
    four = [f"rank {rank}" for rank in range(RANKS)]

    def of(name: str, columns: list[str], *rest: str, **choices: list) -> dict:
        """A picture of what the ranks have recorded under this name; as many as it takes for the columns."""
        who = [rank for rank in seen if rank[name]][: 2 if columns[-1] == "one device" else RANKS]
        return picture(
            lambda *key: table([rank[name]["/".join(map(str, key))] for rank in who], columns), *rest, **choices
        )

    memory = dict(dtype=["fp32", "bf16"], recompute=["none", "full"])
    batches, two = [f"micro-batch {n}" for n in (1, 2, 3)], ["rank 0", "rank 1", "one device"]
    blocks = dict(block=["attention", "MLP"], sp=["yes", "no"])
    filling = "Buckets fill and leave while backward goes on"
    return dict(
        step01_single_gpu=[of("accumulation", batches, "A step, and what memory holds", "fp32/none", **memory)],
        step02_ddp=[
            of("collective", four, "Collectives: four ranks' numbers", "all_reduce", operation=[*OPERATIONS]),
            of("ring_reduce", four, "The ring, message by message", "", "RingSync"),
            of("buckets", ["gradients", *four], filling, "", "BucketSync"),
        ],
        step03_zero=[of("zero", four, "Who holds which shard of what", "3", zero=[*step03.STAGES])],
        step04_tp_sp=[of("block", two, "A block on two ranks", "MLP/yes", **blocks)],
        step05_cp_ring=[
            picture(ring, "Who meets which keys when", "zigzag/4", mode=modes, ranks=ranks),
            of("ring_work", four, "Each rank's work", "zigzag", "RingAttention", mode=modes),
        ],
        step06_pipeline=[picture(schedule, "A schedule, with your own costs", "1f1b/4/8", **schedules)],
        step07_moe_ep=[
            of("routing", four, "Tokens go to experts and come home", "2", ep=[2, 4]),
            picture(
                mesh,
                "The mesh: choose a rank",
                "2/1/2/2/2",
                "train",
                **dict.fromkeys(("pp", "dp", "cp", "tp", "ep"), sizes),
            ),
        ],
    )
