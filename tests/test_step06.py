"""Chapter 6, pipelines: the order of work (common/schedules.py), stages and their messages (step06_pipeline.py)."""

import re
import runpy
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

import step06_pipeline as step
from common import UserError, schedules
from common.comm import Group, Mesh
from common.layout import layout_of
from common.model import IGNORE
from common.schedules import Action, Place, consumer, round_robin, simulate
from tests.equal import BASE, Watch, alive, close, decoder, draw, equals_step1
from tests.tape import Tape

ranks, task, cases = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize
S6, TIED = "step06_pipeline", "model.embed_tokens.weight"
NAMES = dict(afab="afab", one_f_one_b="1f1b", interleaved="interleaved")  # function: its --schedule
GRID = [(p, m, v) for p in (1, 2, 3, 4, 7) for m in (1, 2, 3, 5, 8, 12, 21) for v in (1, 2, 3)]
SIZES = {name: GRID if name == "afab" else [(p, m, v) for p, m, v in GRID if v == 1] for name in NAMES}
SIZES["interleaved"] += [(p, m, v) for p, m, v in GRID if v > 1 and m % p == 0]  # only full rounds
CHAIN = round_robin(3, 3, 1)
V = [place._replace(rank=rank) for place, rank in zip(round_robin(6, 6, 1), (0, 1, 2, 2, 1, 0), strict=True)]


def acts(text: str) -> list[Action]:
    """Parse actions: "F1.2" is the forward of micro-batch 1 through stage 2."""
    return [Action(word[0], int(word[1]), int(word[3])) for word in text.split()]


def plan(name: str, p: int, m: int, v: int = 1) -> tuple[list[list[Action]], list[Place]]:
    """Each rank's actions, and the places of p v stages with one layer each."""
    return [getattr(schedules, name)(p, m, v, rank) for rank in range(p)], round_robin(p * v, p, v)


# --- Orders of work -------------------------------------------------------------------------------------------------


@task("orders", 2)
def test_the_picture_is_the_schedule(capsys):
    """Step 6's docstring shows AFAB and 1F1B on 4 ranks with 6 micro-batches, as common.schedules draws them."""
    shown = [*zip(*re.findall(r"^    rank \d   ([0-9a-f.]+)   ([0-9a-f.]+)", step.__doc__, re.M), strict=True)]
    with mock.patch.object(sys, "argv", ["-m", "4", "6", "1"]):
        runpy.run_path(schedules.__file__, run_name="__main__")
    expected = ["1f1b", *shown[1], "afab", *shown[0], "interleaved", *shown[1]]
    close(capsys.readouterr().out.split(), expected, "the command draws")
    costs = dict(F=1, B=1, W=1)
    close(schedules.draw([acts("F0.0 B0.0 W0.0")], round_robin(1, 1, 1), costs), "0a-", "weight gradients as W")


@task("orders", 3)
def test_interleaved_order():
    """interleaved returns the lists below for p = 2, m = 4, v = 2. UserError if v > 1 and p does not divide m."""
    first = "F0.0 F1.0 F0.2 F1.2  F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0  B2.2 B3.2 B2.0 B3.0"
    second = "F0.1 F1.1  F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3  B2.1 B3.1"
    close(plan("interleaved", 2, 4, 2)[0], [acts(first), acts(second)], "the lists")
    with pytest.raises(UserError, match="--pp 4 must divide the 6 micro-batches"):
        schedules.interleaved(4, 6, 2, 0)


@task("orders", 6)
@cases("name", NAMES)
def test_laws_of_an_order(name):
    """Each F runs once, then its B; no deadlock. If v = 1 or p divides m, (p-1) / (v m + p-1) of a step is bubble."""
    for p, m, v in SIZES[name]:
        (lists, places), size = plan(name, p, m, v), f"p={p} m={m} v={v}"
        for rank, row in enumerate(lists):
            wanted = Counter(Action(kind, i, s) for kind in "FB" for i in range(m) for s in range(rank, p * v, p))
            close(Counter(row), wanted, f"{size} rank {rank}: its actions")
            early = [a for n, a in enumerate(row) if a.kind == "B" and a._replace(kind="F") not in row[:n]]
            close(early, [], f"{size} rank {rank}: backward before its forward")
            most = p - rank if v == 1 else (v - 1) * p + 2 * (p - rank) - 1
            held = max(accumulate(1 if action.kind == "F" else -1 for action in row))
            close(held, v * m if name == "afab" else min(v * m, most), f"{size} rank {rank}: in flight")
        for f, b in [(1, 2)] if v > 1 else [(1, 2), (3, 2)]:
            end, _, _, _ = simulate(lists, places, dict(F=f, B=b))[-1]
            close(end, (v * m + p - 1) * (f + b) if v == 1 or m % p == 0 else end, f"{size}: time of a step")


def test_places_and_consumers():
    """Stages have almost equally many layers. F's output goes to the next stage, and B's output to the previous one."""
    places, layers = round_robin(7, 2, 2), [range(0, 1), range(1, 3), range(3, 5), range(5, 7)]
    links = [(0, None, 1), (1, 0, 2), (0, 1, 3), (1, 2, None)]
    close(places, [Place(rank, some, *by) for (rank, *by), some in zip(links, layers, strict=True)], "places")
    found = [consumer(action, places) for action in acts("F4.0 F4.3 B4.3 B4.0 W4.1")]
    close(found, [*acts("F4.1"), None, *acts("B4.2"), None, None], "the action that needs the output")


def test_simulate():
    """Times equal those worked out by hand, for two ranks and for one rank. A deadlock raises ValueError."""
    expected = [(2, 0, 0, "F0.0"), (4, 0, 2, "F1.0"), (5, 1, 3, "F0.1"), (8, 1, 5, "B0.1"), (10, 1, 8, "F1.1")]
    expected += [(12, 0, 9, "B0.0"), (13, 1, 10, "B1.1"), (17, 0, 14, "B1.0")]
    spans = simulate(*plan("one_f_one_b", 2, 2), dict(F=2, B=3), message=1)
    close(spans, [(*span[:3], *acts(span[3])) for span in expected], "(end, rank, start, action)")
    spans = simulate([acts("F0.0 F0.1 B0.1 B0.0")], round_robin(2, 1, 2), dict(F=2, B=3), message=1)
    close([end for end, *_ in spans], [2, 4, 7, 10], "end times on one rank")
    for first, second in ("F0.0 B0.0 F1.0 B1.0", "F1.1 B1.1 F0.1 B0.1"), ("F0.0 B0.0", "B0.1 F0.1"):
        with pytest.raises(ValueError, match="waits for ever"):  # step 6's example; a backward before its forward
            simulate([acts(first), acts(second)], round_robin(2, 2, 1), dict(F=1, B=2))


# --- Stages, and what each rank keeps -------------------------------------------------------------------------------


@task("keep", 1)
def test_plan():
    """--schedule, --pp and --chunks decide the plan; a single rank has one stage; too many stages raise UserError."""
    for name, p, v in ("afab", 2, 1), ("one_f_one_b", 2, 1), ("interleaved", 2, 2), ("interleaved", 1, 1):
        config = step.Config(model="tiny", pp=p, schedule=NAMES[name])
        close(step.plan(config, 4), (round_robin(4, p, v), plan(name, p, 4, v)[0]), f"{name}: places and lists")
    with pytest.raises(UserError, match="4 layers for 6 stages"):
        step.plan(step.Config(model="tiny", pp=2, schedule="interleaved", chunks=3), 4)


@task("keep", 3)
@cases("tied", [False, True])
@cases("places", [round_robin(5, 3, 1), round_robin(5, 2, 2), V], ids=["chain", "loop", "V"])
def test_keep_stage(tied, places):
    """Each rank keeps its stages' layers. The first stage also has the embedding, and the last has norm and head."""
    n = max(place.rank for place in places) + 1
    for rank in range(n):
        keep = partial(step.keep_stage, group=Group("pp", rank, n, None), places=places)
        model = decoder(keep, tied=tied, n_layers=places[-1].layers.stop)
        close([*model.model.layers], [str(i) for p in places if p.rank == rank for i in p.layers], "layers")
        first, last = rank == places[0].rank, rank == places[-1].rank
        wanted = {TIED: first or (last and tied), "model.norm.weight": last, "lm_head.weight": last and not tied}
        names = {name for name, _ in model.named_parameters() if "layers" not in name}
        close(names, {name for name, here in wanted.items() if here}, f"rank {rank}: other parameters")
        absent = [module is None for module in (model.model.embed_tokens, model.model.norm, model.lm_head)]
        close(absent, [not wanted[TIED], not last, not last], "whether embedding, norm and head are None")
        copies = layout_of(model.get_parameter(TIED)).stage_copies if TIED in names else 0
        close(copies, wanted[TIED] * (1 + (tied and first != last)), f"rank {rank}: stages that hold its embedding")


@ranks(3)
@task("keep", 3)
@cases("tied, places, rows", [(True, CHAIN, 5), (True, CHAIN, 0), (False, CHAIN, 5), (True, V, 5)])
def test_sum_tied(tied, places, rows):
    """Two ranks that hold the first and the last stage add up a tied matrix's gradients. An empty shard is not sent."""
    group = Mesh(pp=3)["pp"]
    terms = [draw("embedding", r, rows, 4) for r in range(3)]
    held = terms[group.rank].clone()
    gradients = {TIED: held} if group.rank != 1 else {}
    with Tape() as tape:
        step.sum_tied(SimpleNamespace(config=SimpleNamespace(tied=tied)), gradients, group, places)
    does = tied and group.rank != 1 and places == CHAIN
    close(held, terms[0] + terms[2] if does else terms[group.rank], "the gradient", 2)
    sent = [size for name, size in tape.started if name == "send"]
    close((sent, tape.left), ([160] * (does and rows > 0), []), "bytes of messages, and those never waited for")


def batch(m: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Tokens, targets, target count, and positions of m micro-batches. The last has 1 sequence, the others 2."""
    tokens = (draw("tokens", 0, 2 * m - 1, 6).abs() * 5).long() % 13
    targets = tokens.flip(1).where(draw("count", 0, 2 * m - 1, 6) > -0.5, IGNORE)
    return [*tokens.split(2)], [*targets.split(2)], (targets != IGNORE).sum(), torch.arange(6).flip(0) * 2


@task("stage", 2)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_forward_stage(dtype):
    """Three stages in turn compute the model's loss bit for bit, also in bf16 with positions that bf16 cannot hold."""
    model, (xs, ys, _, positions) = decoder(n_layers=4).to(dtype), batch(2)
    x, positions = xs[0], positions * 301 + 999
    for place in round_robin(4, 1, 3):
        x = step.forward_stage(model, place, x, ys[0], positions)
    close(x, model(xs[0], ys[0], positions), "the sum of the losses", 1, 0.0)


# --- Messages -------------------------------------------------------------------------------------------------------


def carry_out(programs: list[list[list]], places: list[Place]):
    """Simulate all programs. Each entry lists instructions that start together; a send blocks until it is received."""
    left, there, moving = [deque([*line] for line in row) for row in programs], set(), True
    while moving:
        moving = False
        for rank, row in enumerate(left):
            for verb, action, peer in [*row[0]] if row else ():
                ready = (rank, action) in there  # its input is there; tokens and the loss always are
                if verb == "compute" and (ready or places[action.stage][2 if action.kind == "F" else 3] is None):
                    there.add((rank, consumer(action, places)))
                elif verb == "send" and ready and left[peer] and ("receive", action, rank) in left[peer][0]:
                    left[peer][0].remove(("receive", action, rank)), there.add((peer, action))
                else:
                    continue
                moving = not row[0].remove((verb, action, peer))
            while row and not row[0]:
                moving = not row.popleft()
    assert not any(left), f"deadlock: the ranks wait at {[row[0] for row in left if row]}"


def posted(cls: type[step.Pipeline], rank: int, p: int, m: int) -> list[list]:
    """Run `execute` on ints, not tensors; returns its program. An entry: one action, or messages awaited together."""
    lines, loop, posts = [], cls.__new__(cls), []
    loop.group, loop.xs, loop.places, loop.buffer = Group("pp", rank, p, None), [0] * m, round_robin(p, p, 1), int
    loop.forward = lambda i, stage, _: lines.append([("compute", Action("F", i, stage), None)]) or i
    loop.backward = lambda i, stage, _: lines.append([("compute", Action("B", i, stage), None)]) or i

    def post(sends: list, receives: list, _group: Group) -> SimpleNamespace:
        if not posts or lines[-1] is not posts[0]:
            lines.append([]), posts.insert(0, lines[-1])
        posts[0].extend(("send", Action("F" if peer > rank else "B", i, peer), peer) for i, peer in sends)
        posts[0].extend(("receive", Action("B" if peer > rank else "F", i, rank), peer) for i, peer in receives)
        return SimpleNamespace(wait=posts.clear)

    with mock.patch.object(step, "exchange", post):
        loop.execute()
    return lines


@task("messages", 3)
@cases("name, cls", [("afab", step.Pipeline), ("one_f_one_b", step.OneForwardOneBackward)])
def test_law_of_loops(name, cls):
    """AFAB's and 1F1B's loops run their schedules without deadlock. Steady 1F1B awaits send and receive together."""
    for p, m, _ in GRID[::3]:
        programs, (lists, places) = [posted(cls, rank, p, m) for rank in range(p)], plan(name, p, m)
        done = [[action for line in row for verb, action, _ in line if verb == "compute"] for row in programs]
        close(done, lists, f"p={p} m={m}: order of work")
        carry_out(programs, places)
        w = [m if name == "afab" else min(m, p - 1 - rank) for rank in range(p)]
        calls = [(r < p - 1) * (m + w[r]) + (r > 0) * (m + min(m, w[r] + 1)) for r in range(p)]
        close([len(row) - 2 * m for row in programs], calls, f"p={p} m={m}: waits by rank")


@task("programs", 2)
def test_add_messages():
    """For the example in its docstring, add_messages returns the whole program of rank 1."""
    lines = "receive F0.1, receive F1.1, compute F0.1, send F0.2, receive F0.3, compute F1.1, send F1.2, receive F1.3, "
    lines += "compute F0.3, compute B0.3, send B0.2, compute F1.3, receive B0.1, compute B1.3, send B1.2, "
    lines += "receive B1.1, compute B0.1, send B0.0, compute B1.1, send B1.0"
    lines = [line.split() for line in lines.split(", ")]
    expected = [(verb, *acts(action), None if verb == "compute" else 0) for verb, action in lines]
    close(step.add_messages(*plan("interleaved", 2, 2, 2))[1], expected, "the program")


@task("programs", 3)
@cases("costs", [dict(F=1, B=2), dict(F=5, B=1)])
def test_law_of_programs(costs):
    """For all sizes, and whether F or B takes longer, programs run the ranks' lists in order and do not deadlock."""
    for lists, places in [plan(name, *size) for name in NAMES for size in SIZES[name]]:
        programs = step.add_messages(lists, places, costs)
        close([[line.action for line in row if line.verb == "compute"] for row in programs], lists, "the lists")
        carry_out([[[tuple(line)] for line in row] for row in programs], places)


def awaited(program: list[step.Instruction]) -> Iterator[str]:
    """Yield expected `Tape` events. An action waits for its input. A send waits for the previous send to its peer."""
    number, under_way = 0, {}
    for verb, action, peer in program:
        key = ("send", peer) if verb == "send" else ("receive", action)
        if key in under_way:
            yield f"wait {under_way.pop(key)}"
        if verb == "compute":
            yield from [f"F{action.micro_batch}.{action.stage}"] * (action.kind == "F")
        else:
            under_way[key] = number = number + 1
            yield f"start {number}"
    yield from [f"wait {number}" for number in under_way.values()]


STEPS = [(3, "afab", dict(pp=3), 4, 1), (3, "one_f_one_b", dict(pp=3), 5, 1), (3, "one_f_one_b", dict(pp=3), 1, 1)]
STEPS += [(4, "one_f_one_b", dict(pp=2, dp=2), 2, 1), (4, "interleaved", dict(dp=2, pp=2), 4, 2)]
STEPS += [(3, "interleaved", dict(pp=3), 3, 2), (1, "interleaved", dict(pp=1), 3, 3), (3, "V", dict(pp=3), 2, 2)]
FOLDED = [f"F0.{a} F1.{a} F0.{b} F1.{b} B0.{b} B1.{b} B0.{a} B1.{a}" for a, b in ((0, 5), (1, 4), (2, 3))]  # V's lists


@task("messages", 5)
@cases("name, sizes, m, v", [pytest.param(*some, marks=ranks(n)) for n, *some in STEPS])
def test_a_step_of_all_ranks(name, sizes, m, v):
    """Loss and gradients are those of one device. Each x and dx is one message. Graphs and outputs are freed."""
    group, (xs, ys, n_targets, positions) = Mesh(**sizes)["pp"], batch(m)
    lists, places = [*map(acts, FOLDED)], V
    if name != "V":
        lists, places = plan(name, group.size, m, v)[0], round_robin(5 if v == 1 else 7, group.size, v)
    layers, leaves = places[-1].layers.stop, lambda n: n is not None and places[n].rank != group.rank
    model = decoder(partial(step.keep_stage, group=group, places=places), n_layers=layers)
    config = SimpleNamespace(schedule=NAMES.get(name, "interleaved"), chunks=v, tp=2, sp=False)
    outputs, most = [], []

    def watched(i: int, stage: int, x: Tensor | None) -> Tensor:
        tape.events.append(f"F{i}.{stage}")
        y = forward(i, stage, x)
        most.append((len(pipeline.graphs), alive(outputs)))
        outputs.extend([weakref.ref(y.untyped_storage())] * leaves(places[stage].after))
        return y

    with Tape() as tape:
        pipeline = step.make_pipeline(config, model, dict(pp=group), positions, places, lists)
        forward, pipeline.forward = pipeline.forward, watched
        found = pipeline.step(xs, ys, n_targets)
    whole = decoder(n_layers=layers)
    loss = sum(whole(x, y, positions) for x, y in zip(xs, ys, strict=True)) / n_targets
    loss.backward()
    close(found, loss if group.rank == places[-1].rank else 0 * loss, "the loss, on the last rank", m)
    for key, param in model.named_parameters():
        close(param.grad, whole.get_parameter(key).grad, f"the gradient of {key}", m)
    flying, kept = (max(numbers) for numbers in zip(*most, strict=True))
    close(flying, max(accumulate(1 if a.kind == "F" else -1 for a in lists[group.rank])), "graphs in flight")
    close((alive(outputs), len(pipeline.graphs)), (0, 0), "outputs and graphs that stay after the step")
    peers = {places[place.after].rank for place in places if place.rank == group.rank and leaves(place.after)}
    assert kept <= len(peers), f"{kept} outputs wait for {len(peers)} peers: more than one for each"
    ways = sum(leaves(way) for place in places if place.rank == group.rank for way in place[2:])
    wanted = sorted([x.numel() * 16 * 8 for x in xs] * ways)
    close(sorted(size for kind, size in tape.started if kind == "send"), wanted, "bytes of all messages")
    close(([kind for kind, _ in tape.started[:1]], tape.left), (["allreduce"] * (group.size > 1), []), "the first call")
    if group.size > 1 and v > 1:
        events = [event for event in tape.events if event != "matmul"]
        close(events, ["start 0", "wait 0", *awaited(pipeline.program)], "the order of forwards, starts and waits")


@ranks(2)
def test_law_of_bytes():
    """With --pp 2, a rank sends over pp one x or dx for each micro-batch, and two all-reduces: of loss and of norm."""
    with Watch(step.Config(**BASE | dict(model="debug", pp=2))) as run:
        step.train(run.config, run)
    close([row["sent"] for row in run.history], [dict(pp=12 * 64 * 64 * 8 + 2 * 8)] * 3, "bytes by dimension and step")


UNEVEN = dict(steps=5, tied=True, micro_batch_size=2)
LAYOUTS = [
    (4, UNEVEN | dict(global_batch_size=10), dict(pp=2)),  # micro-batches of 2, 2 and 1 sequences
    (4, UNEVEN | dict(n_layers=5, global_batch_size=14), dict(pp=2, zero="3", schedule="interleaved")),
    (4, dict(n_layers=4), dict(pp=4, zero="2")),  # a stage in the middle is one unit
    (4, dict(tied=True, micro_batch_size=5), dict(pp=2, tp=2, zero="0", sync="naive")),
    (4, {}, dict(pp=2, cp=2, zero="2")),
    (3, dict(recompute="full", micro_batch_size=5), dict(pp=3, zero="3", schedule="afab")),
]


@task("loop", 5)
@cases("n, base, layout", LAYOUTS)
def test_pp_trains_to_step_1s_numbers(pools, n, base, layout):
    """pp trains to step 1's numbers with dp, tp, cp, ZeRO, all schedules, tied weights, and recomputation."""
    equals_step1(pools, n, S6, base, **layout)
