"""Pictures that move, as data: the program's own functions are asked, and the page only draws what they say.

A picture is dict(title, at=the section that it stands in, choices=[(name, values, value shown first)],
frames={"value/value": frame}). A frame has a `text` and is one of three:

    table    columns, cells, states=[(what it says, {row: number of a cell for each column, or of one for all})], and
             curve={kind: a number for each state} or {}. A cell is a list of chips and texts. A chip is [label, colour,
             style]; style: "" here, "gone" not here, "way" under way. In code: `table`
    boxes    boxes, rows=names, width=columns, moments=what it says at each, linked=a word before what is linked to a
             box. A box is (row, column, width, colour, label, note, [(number of a box linked to it, tag), ...], the
             moment from which on it is there)
    lists    of a schedule, by rank: [kind, micro-batch, stage, (rank, number in its list) of what it waits for, or
             None], and costs={kind: units of time}: the page adds the times, with the costs that its reader chooses
"""

import inspect
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate, product
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import step03_zero as step03
import step05_cp_ring as step05
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError, comm
from common.comm import Mesh
from common.layout import layout_of
from common.model import PRESETS, Decoder
from common.schedules import SCHEDULES, consumer
from common.trainer import Run
from services import predictions
from services.pages.record import RANKS, recorded, ring_modes
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
    return dict(title=title, at=at, choices=shown, frames=frames)


def table(text: str, columns: list[str], states: list[tuple[str, dict]], curve: dict | None = None) -> dict:
    """A table that changes from state to state. Equal cells are kept once."""
    cells: dict[str, int] = {}

    def number(cell: list) -> int:
        return cells.setdefault(json.dumps(cell), len(cells))

    rows = [(says, {name: [number(cell) for cell in row] for name, row in of.items()}) for says, of in states]
    return dict(text=text, columns=columns, states=rows, cells=[json.loads(cell) for cell in cells], curve=curve or {})


def chips(labels: Iterable, colours: Iterable[int], style: str = "") -> list:
    """A chip for each label."""
    return [[str(label), colour, style] for label, colour in zip(labels, colours, strict=False)]


def whole(number: float) -> str:
    """As an integer."""
    return f"{number:,.0f}"


def ranks_of(seen: list[dict], name: str) -> list:
    """What each rank has recorded under a name."""
    return [rank[name] for rank in seen]


def accumulation(seen: list[dict], dtype: str, recompute: str) -> dict:
    """Chapter 1: the micro-batches of a step, and what memory holds."""
    made, states, happened = seen[0]["accumulation"][dtype, recompute], [], []
    modules, n_micro_batches = ("E", "0", "1", "H"), len(made["terms"])
    for now in made["moments"]:
        at = now["n"], now["direction"], now["what"]
        happened.append(at)

        def run(n: int, direction: str, at: tuple = at) -> list:
            there = [m for m in modules if (n, direction, m) in happened]
            styles = ["way" if (n, direction, m) == at else "" if m in there else "gone" for m in modules]
            return [[m, "fb".index(direction[0]), style] for m, style in zip(modules, styles, strict=True)]

        numbers = range(1, n_micro_batches + 1)
        terms = [[f"{made['terms'][n - 1]:.4f}"] if (n, "backward", "H") in happened else [] for n in numbers]
        rows = {direction: [run(n, direction) for n in numbers] for direction in ("forward", "backward")}
        rows |= {"its loss / n_targets": terms}
        says = f"Micro-batch {now['n']}: {now['what']} computes {now['direction']}."
        if now["direction"] == "done":
            says = {"all": f"Micro-batch {now['n']} is done.", "AdamW": "AdamW has updated the masters."}.get(
                now["what"], "The gradients are dropped."
            )
        states.append((f"{says} Norm of the gradients that are here: {now['norm']:.4f}.", rows))
    text = (
        f"The loss of the step is the sum of the terms: {made['loss']:.4f}. E embedding, 0 and 1 layers, H norm, head."
    )
    curve = {kind: [now["held"][kind] for now in made["moments"]] for kind in made["moments"][0]["held"]}
    return table(text, [f"micro-batch {n}" for n in numbers], states, curve)


def collective(seen: list[dict], name: str) -> dict:
    """Chapter 2: a collective, four ranks' numbers in and out."""
    found = [of[name] for of in ranks_of(seen, "collectives")]
    single, states = len(found[0][0]) == 1, []
    origin = {whole(number): rank for rank, (numbers, *_) in enumerate(found) for number in numbers}
    before = [chips(map(whole, numbers), [rank] * RANKS) for rank, (numbers, *_) in enumerate(found)]
    after = [[[whole(x), origin.get(whole(x), -1), ""] for x in numbers] for _, numbers, _ in found]
    states = [("Before.", {"in": before, "out": [[] for _ in found]}), ("After.", {"in": before, "out": after})]
    doc = inspect.getdoc(getattr(comm, name)).split("\n")[0].replace("`", "")
    sent = f"Each rank sends {whole(found[0][2])} bytes: {'its number' if single else 'its four numbers'} are fp32."
    return table(f"{doc} {sent}".replace("number are", "number is"), [f"rank {rank}" for rank in range(RANKS)], states)


def ring_reduce(seen: list[dict]) -> dict:
    """Chapter 2: an all-reduce, message by message."""
    rounds, states = ranks_of(seen, "ring_reduce"), []
    for s, now in enumerate(zip(*rounds, strict=True)):
        has = [chips(map(whole, rank["has"]), range(RANKS)) for rank in now]
        sends = [
            []
            if it["to"] is None
            else [*chips([whole(it["has"][it["sends"]])], [it["sends"]], "way"), f"to rank {it['to']}"]
            for it in now
        ]
        part = "reduce-scatter" if s < RANKS - 1 else "all-gather"
        says = f"Round {s}, {part}: each rank sends a shard to its right neighbour."
        states.append((says if sends[0] else "Every rank has all sums.", {"has": has, "sends": sends}))
    text = "Rank r begins with 1 2 3 4 times 10^r: the digits of a number show which ranks are in the sum."
    return table(text, [f"rank {rank}" for rank in range(RANKS)], states)


def buckets(seen: list[dict]) -> dict:
    """Chapter 2: buckets fill and leave while backward goes on."""
    found, states = ranks_of(seen, "buckets"), []
    first = found[0]
    for k, now in enumerate(first["moments"]):
        rows = {}
        for i, (names, n_bytes) in enumerate(zip(first["buckets"], first["bytes"], strict=True)):
            style = "way" if now["has"][i] == "under way" else ""
            row = [[name, i, style if name in now["ready"] else "gone"] for name in names]
            has = [rank["moments"][k]["has"][i] for rank in found]
            begun = any(name in now["ready"] for name in names)
            numbers = [[x if x == "under way" else f"{x:.4f}"] if begun else [] for x in has]
            rows[f"bucket {i}, {whole(n_bytes)} bytes"] = [row, *numbers]
        states.append((f"{now['says']} Sums that have started: {now['sent']}.", rows))
    text = "Left: rank 0's gradients, in the order of backward. Right: the sum of all numbers of a bucket's buffer."
    return table(text, ["gradients", *(f"rank {rank}" for rank in range(RANKS))], states)


def zero(seen: list[dict], stage: int) -> dict:
    """Chapter 3: who holds which shard of what."""
    found, states = [of[stage] for of in ranks_of(seen, "zero")], []
    styles = {"o": "", "w": "way", "-": "gone"}
    for now in zip(*found, strict=True):
        rows = {}
        for unit in now[0]["held"]:
            for k, kind in enumerate(("weights", "gradient", "summed gradient", "optimizer")):
                of = [rank["held"][unit][k] for rank in now]
                rows[f"{unit} {kind}"] = [[[str(n), n, styles[x]] for n, x in enumerate(letters)] for letters in of]
        rows["bytes in all"] = [[whole(sum(rank["bytes"].values()))] for rank in now]
        states.append((now[0]["says"], rows))
    text = "A box is a shard, with the number of the rank that updates it. Empty: not here. Dashed: under way."
    text += (
        " The gradient is that of the rank's own tokens. Weights are bf16; the optimizer has masters and two moments."
    )
    curve = {kind: [moment["bytes"][kind] for moment in found[0]] for kind in found[0][0]["bytes"]}
    return table(text, [f"rank {rank}" for rank in range(RANKS)], states, curve)


def kind_of(parts: list, full: list) -> str:
    """How two ranks' tensors make up that of one device. Raises RuntimeError if they do not."""
    one, *ranks = (torch.tensor(x, dtype=torch.float64) for x in (full, *parts))
    if all(x.shape == one.shape and torch.allclose(x, one) for x in ranks):
        return "whole"
    if ranks[0].shape == one.shape and torch.allclose(sum(ranks), one):
        return "partial"
    for dim, name in enumerate(("tokens", "columns")):
        if ranks[0].shape[1 - dim] == one.shape[1 - dim] and torch.allclose(torch.cat(ranks, dim), one):
            return f"shard: {name}"
    raise RuntimeError("the tensors of the ranks do not make up that of one device")


def block(seen: list[dict], of: str, sp: str) -> dict:
    """Chapter 4: a block's tensors, forward and backward."""
    with_sp, states, one = sp == "yes", [], seen[0]["block"][None]
    ranks = [seen[rank]["block"][with_sp] for rank in (0, 1)]
    names = [name for name in ranks[0] if name.removeprefix("d ").startswith(of[0].lower())]
    kinds = {name: kind_of([rank[name] for rank in ranks], one[name]) for name in names}

    def matrix(numbers: list, colour: int, style: str) -> list:
        return [chip for row in numbers for chip in (*chips((f"{x:.2f}" for x in row), [colour] * 4, style), "\n")]

    def title(name: str) -> str:
        return re.sub(r"^(d )?[am] ", r"\1", name)

    for k, name in enumerate(names):
        colours = (-1, -1) if kinds[name] == "whole" else (0, 1)
        style = "way" if kinds[name] == "partial" else ""
        now = [matrix(rank[name], c, style) for rank, c in zip(ranks, colours, strict=True)]
        rows = {"numbers": [*now, matrix(one[name], -1, "")]}
        for way in ("forward", "backward"):
            of = [(n, other) for n, other in enumerate(names) if other.startswith("d ") == (way == "backward")]
            colour = {"whole": -1, "shard": 2, "parti": 4}
            line = [[f"{title(x)}: {kinds[x]}", colour[kinds[x][:5]], "" if n <= k else "gone"] for n, x in of]
            rows[way] = [line]
        states.append((f"{title(name)}: {kinds[name]} on the two ranks. {WHY.get(title(name), {}).get(sp, '')}", rows))
    text = "One sequence of 4 tokens (rows), 4 channels. Whole: all ranks have the same. Shard: parts of a tensor."
    text += " Partial: terms of a sum. Each is found by comparing the numbers with those of one device."
    return table(text, ["rank 0", "rank 1", "one device"], states)


WHY = {  # what f and g do in forward and in backward
    "f(norm(x))": dict(yes="f has gathered the tokens.", no="f does nothing in forward."),
    "g": dict(yes="g has summed the terms, and sharded the tokens.", no="g has summed the terms."),
    "d norm(x)": dict(
        yes="f's backward has summed the terms, and sharded the tokens.", no="f's backward has summed the terms."
    ),
    "d o_proj": dict(yes="g's backward has gathered the tokens.", no="g's backward does nothing."),
    "d down_proj": dict(yes="g's backward has gathered the tokens.", no="g's backward does nothing."),
}


def ring_work(seen: list[dict], mode: str) -> dict:
    """Chapter 5: whose keys are where in which hop, and each rank's work."""
    found, states = [of[mode] for of in ranks_of(seen, "ring_work")], []
    for hop, now in enumerate(zip(*found, strict=True)):
        rows = {"queries": [chips(it["queries"], [rank] * 9) for rank, it in enumerate(now)]}
        rows["keys here"] = [
            [[str(key), it["source"], "" if key in it["keys"] else "gone"] for key in it["here"]] for it in now
        ]
        rows["pairs in this hop"] = [[["\u2009" * it["pairs"] + str(it["pairs"]), -1, ""]] for it in now]
        rows["pairs so far"] = [[str(sum(it["pairs"] for it in rank[: hop + 1]))] for rank in found]
        most = max(it["pairs"] for it in now)
        says = f"Hop {hop}: the slowest rank computes {most} pairs, and all wait for it."
        states.append((says, rows))
    steps = sum(max(it["pairs"] for it in now) for now in zip(*found, strict=True))
    total = sum(it["pairs"] for rank in found for it in rank)
    text = "16 tokens; a box is a token's position, its colour its rank. Empty: keys that no query here may see."
    text += (
        f" All hops together take as long as {steps} pairs; shared evenly, {total} pairs would take {total / RANKS:g}."
    )
    return table(text, [f"rank {rank}" for rank in range(RANKS)], states)


def routing(seen: list[dict], ep: int) -> dict:
    """Chapter 7: tokens go to experts and come home."""
    found, e = [of[ep] for of in ranks_of(seen, "routing")], 4 // ep
    rows: dict[str, list] = {name: [] for name in ("routed", "sorted", "received", "by expert", "home")}

    def line(tokens: list[int], experts: list[int], ends: list[int]) -> list:
        """Chips; a bar where the counts in `ends` end."""
        made, cuts = [], set(accumulate(ends[:-1]))
        for n, (token, expert) in enumerate(zip(tokens, experts, strict=True)):
            made += ["|"] * (n in cuts) + [[f"e{expert}:t{token}", token // 2, ""]]
        return made

    for rank, it in enumerate(found):
        made = []
        for token, (experts, scores) in enumerate(zip(it["routed"], it["scores"], strict=True)):
            of = [f"e{expert} {score:.2f}" for expert, score in zip(experts, scores, strict=True)]
            made += [[f"t{2 * rank + token}: {', '.join(of)}", rank, ""], "\n"]
        rows["routed"].append(made)
        own = [expert for expert, count in enumerate(it["per expert"]) for _ in range(count)]
        leaving = [sum(it["per expert"][k * e : k * e + e]) for k in range(ep)]
        first = rank % ep * e
        arrived = [first + k for row in it["arriving"] for k, count in enumerate(row) for _ in range(count)]
        sorted_here = [first + k for k, count in enumerate(it["counts"]) for _ in range(count)]
        rows["sorted"].append(line(it["sorted"], own, leaving))
        rows["received"].append(line(it["received"], arrived, [sum(row) for row in it["arriving"]]))
        rows["by expert"].append(line(it["by expert"], sorted_here, it["counts"]))
        rows["home"].append(line(it["home"], own, leaving))
    says = (
        "Routed: each token's two experts, with the weights of their outputs.",
        "Sorted by expert; a bar between what is for one rank and for the next.",
        "Received: what the all-to-all has brought; a bar between senders.",
        "By expert: `transpose_blocks` has put together what one expert computes; a bar between experts.",
        "Home: the outputs are back, in the order in which the rows left.",
    )
    states = [
        (said, {name: row if n <= k else [[] for _ in row] for n, (name, row) in enumerate(rows.items())})
        for k, said in enumerate(says)
    ]
    text = f"4 experts, {e} on a rank; groups of {ep} ranks. The colour is that of the rank whose token it is."
    here = [", ".join(f"e{rank % ep * e + k}" for k in range(e)) for rank in range(RANKS)]
    return table(text, [f"rank {rank}, expert{'s' * (e > 1)} {of}" for rank, of in enumerate(here)], states)


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
    seen, ranks, sizes, both = recorded(), [2, 3, 4, 8], [1, 2, 4], ["yes", "no"]
    modes, stages = ring_modes(), list(step03.STAGES)
    operations, dtypes = list(seen[0]["collectives"]), ["fp32", "bf16"]
    schedules = dict(schedule=[*SCHEDULES], ranks=ranks, micro_batches=[1, 2, 4, 8])
    return dict(
        step01_single_gpu=[
            picture(
                partial(accumulation, seen),
                "A step, and what memory holds",
                "fp32/none",
                dtype=dtypes,
                recompute=["none", "full"],
            ),
        ],
        step02_ddp=[
            picture(partial(collective, seen), "Collectives: four ranks' numbers", "all_reduce", operation=operations),
            picture(partial(ring_reduce, seen), "The ring, message by message", "", "RingSync"),
            picture(partial(buckets, seen), "Buckets fill and leave while backward goes on", "", "BucketSync"),
        ],
        step03_zero=[picture(partial(zero, seen), "Who holds which shard of what", "3", zero=stages)],
        step04_tp_sp=[
            picture(partial(block, seen), "A block on two ranks", "MLP/yes", block=["attention", "MLP"], sp=both),
        ],
        step05_cp_ring=[
            picture(ring, "Who meets which keys when", "zigzag/4", mode=modes, ranks=ranks),
            picture(partial(ring_work, seen), "Each rank's work", "zigzag", "RingAttention", mode=modes),
        ],
        step06_pipeline=[picture(schedule, "A schedule, with your own costs", "1f1b/4/8", **schedules)],
        step07_moe_ep=[
            picture(partial(routing, seen), "Tokens go to experts and come home", "2", ep=[2, 4]),
            picture(
                mesh, "The mesh: choose a rank", "2/1/2/2/2", "train", pp=sizes, dp=sizes, cp=sizes, tp=sizes, ep=sizes
            ),
        ],
    )
