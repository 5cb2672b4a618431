"""Lab 6: pipelines (common/schedules.py, step06_pipeline.py)."""

import gc
import importlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm import Group, Mesh
from common.layout import layout_of
from common.model import IGNORE
from common.schedules import COSTS, Action, Place, consumer, round_robin, simulate
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import SHAPE, decoder, gradients, refused
from extras.labs.suite import CALLS, suite
from extras.labs.tape import Event, Graphs, Tape

Lists, Places = list[list[Action]], list[Place]  # the actions of each rank; of all stages
Program = list[tuple[str, Action, int | None]]  # verb, action, peer
V = [place._replace(rank=rank) for place, rank in zip(round_robin(4, 4, 1), (0, 1, 1, 0), strict=True)]
WAYS = [V[0], V[1]._replace(after=None), V[2]._replace(before=None), V[3]]  # two opposite ways


def loop(p: int, v: int = 1) -> Places:
    """p v stages of a layer each, v times through all ranks."""
    return round_robin(p * v, p, v)


def all_forward_first(m: int, *stages: tuple[int, ...]) -> Lists:
    """By rank: its stages in their order, forward; then in reverse, backward."""
    forward = [[Action("F", i, s) for s in some for i in range(m)] for some in stages]
    backward = [[Action("B", i, s) for s in some[::-1] for i in range(m)] for some in stages]
    return [first + then for first, then in zip(forward, backward, strict=True)]


def one_f_one_b(p: int, m: int) -> Lists:
    """The lists of 1F1B."""
    found = []
    for rank in range(p):
        first = min(m, p - 1 - rank)
        order = [("F", i) for i in range(first)]
        order += [(kind, i + first * (kind == "F")) for i in range(m - first) for kind in "FB"]
        found.append([Action(*pair, rank) for pair in order + [("B", i) for i in range(m - first, m)]])
    return found


def wrong(lists: Lists, places: Places, m: int) -> str:
    """The first thing that is wrong with all ranks' lists, or ""."""
    for rank, row in enumerate(lists):
        stages = [stage for stage, place in enumerate(places) if place.rank == rank]
        wanted = Counter(Action(kind, i, stage) for kind in "FB" for i in range(m) for stage in stages)
        for text, actions in (("never does", wanted - Counter(row)), ("has no business with", Counter(row) - wanted)):
            if actions:
                return f"rank {rank} {text} {tuple(next(iter(actions)))}"
        for at, action in enumerate(row):
            if action.kind == "B" and action._replace(kind="F") not in row[:at]:
                return f"rank {rank} does {tuple(action)} before its forward"
    try:
        simulate(lists, places, COSTS)
    except ValueError:
        return "ranks wait for one another for ever"
    return ""


class Orders(Case):
    """Task 1: a schedule's lists for some sizes: mistakes, time, and how many stages are held between F and B."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        """The laws of the papers are upper limits."""
        actions = getattr(importlib.import_module("common.schedules"), self.name)
        for p, m, v in self.grid:
            lists = [[Action(str(a[0]), int(a[1]), int(a[2])) for a in actions(p, m, v, rank)] for rank in range(p)]
            sizes, mistakes = f"p={p} m={m} v={v}: ", wrong(lists, loop(p, v), m)
            yield f"{sizes}mistakes", mistakes, ""
            time = math.inf if mistakes else simulate(lists, loop(p, v), COSTS)[-1][0]
            yield f"{sizes}time", time, at_most(3 * (v * m + p - 1))
            for rank, row in enumerate(lists):
                held = [0, *accumulate(1 if action.kind == "F" else -1 for action in row)]
                most = p - rank if self.name == "one_f_one_b" else (v - 1) * p + 2 * (p - rank) - 1
                found = max(held) if len(row) == 2 * m * v else math.inf
                yield f"{sizes}in flight on rank {rank}", found, at_most(min(m * v, most))
        yield "the error for p=4 m=6 v=2", refused(actions, 4, 6, 2, 0), "UserError"


ONE = ((4, 12, 1), (5, 3, 1), (3, 7, 1), (1, 4, 1))  # ranks; micro-batches: many, few, odd; stages
SEVERAL = ((4, 12, 3), (2, 4, 5), (3, 9, 2), (4, 6, 1), (4, 4, 2), (2, 2, 3))
ORDERS = Task(
    tuple(f"common.schedules:{name}" for name in ("one_f_one_b_order", "afab", "one_f_one_b", "interleaved")),
    (*demands(Orders, (dict(name="afab", grid=ONE),),
              ("afab: each action once, no rank waits for ever", 1, "mistakes")),
     *demands(
         Orders, (dict(name="one_f_one_b", grid=ONE),),
         ("1F1B: the same, also with few micro-batches", 2, "mistakes"),
         ("1F1B: idle (p-1) / (m+p-1) of the time", 1, "time"),
         ("1F1B: at most p - rank micro-batches in flight", 2, "in flight"),
     ),
     *demands(
         Orders, (dict(name="interleaved", grid=SEVERAL),),
         ("interleaved: each action once, no rank waits for ever", 2, "mistakes"),
         ("interleaved: idle (p-1) / (v m+p-1) of the time", 2, "time"),
         ("interleaved: at most (v-1) p + 2 (p - rank) - 1 in flight", 1, "in flight"),
         ("interleaved: rounds that are not full are refused", 1, "error"),
     ),
     suite(1, *CALLS, says="the project's own tests of schedules, for many sizes and costs")),
)  # fmt: skip

THREE = [Place(0, range(0, 1), None, 1), Place(0, range(1, 3), 0, 2), Place(0, range(3, 4), 1, None)]


class Piped(Case):
    """Task 2: m micro-batches of two sequences, the last one of one, in a pipeline; what one device finds."""

    def batch(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """Tokens and targets by micro-batch; target tokens; positions."""
        shape = 2 * self.m - 1, SHAPE["seq_len"]
        tokens, targets = (self.ids(name, SHAPE["vocab_size"], *shape) for name in ("tokens", "targets"))
        targets[self.draw("which count", *shape) < -0.5] = IGNORE
        targets[1] = IGNORE
        return [*tokens.split(2)], [*targets.split(2)], (targets != IGNORE).sum(), torch.arange(shape[1]).flip(0) * 2


class Parts(Piped):
    """forward_stage, three times."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, (xs, ys, _, positions) = self.drawn(decoder(0, n_layers=4)), self.batch()
        for dtype in (torch.float64, torch.bfloat16):
            x, model = xs[0], model.to(dtype)
            for place in THREE:
                x = step.forward_stage(model, place, x, ys[0], positions)
            yield f"a micro-batch's sum, {dtype}", x.item(), FOUND


FORWARD, BACKWARD = (
    [(kind, i, s) for i in range(3) for s in order] for kind, order in (("F", (0, 1, 2)), ("B", (2, 1, 0)))
)
MIXED = [("B", 0, 2), ("B", 1, 2), ("B", 1, 1), ("B", 0, 1), ("B", 0, 0), *FORWARD[6:], ("B", 1, 0)]
ORDER = [*FORWARD[:6], *MIXED, *BACKWARD[6:]]  # of two micro-batches that are in flight, either may be the first


class Stages(Piped):
    """Three micro-batches through three stages of one rank, two in flight; messages are copies."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model, (xs, ys, n, positions) = self.drawn(decoder(0, n_layers=4)), self.batch()
        gone, asked, held, graphs = [], [], [], Graphs(model)

        class Pipeline(step.Pipeline):
            def execute(self):
                messages: dict = {}
                for kind, i, stage in ORDER:
                    held.append(gone.count(False))
                    act = self.forward if kind == "F" else self.backward
                    output = act(i, stage, messages.pop((kind, i), None))
                    if output is not None and (kind, stage) != ("F", 2):
                        messages[kind, i] = output.clone()
                    if kind == "F" and stage < 2:
                        asked.append(bool(output.requires_grad))
                        gone.append(False)
                        weakref.finalize(output.untyped_storage(), gone.__setitem__, len(gone) - 1, True)
                    del output

        pipeline = Pipeline(model, THREE, Group("pp", 0, 1, None), positions, 1)
        gc.collect(), gc.disable()
        loss = pipeline.step(xs, ys, n)
        yield "graphs that are left after the last backward", len(graphs.alive), 0
        gc.enable()
        yield from as_ours({"the loss": loss.item()} | gradients(model))
        yield "sent: outputs that want gradients", any(asked), False
        yield "sent: outputs whose memory stays", max(held), 0


STAGE = Task(
    ("forward_stage", "Pipeline.forward", "Pipeline.backward"),
    (*demands(Parts, (dict(m=3),), ("forward_stage: together the model", 2)),
     *demands(Stages, (dict(m=3),),
              ("the loss is one device's", 1, "the loss"),
              ("so are all gradients", 3, "gradient of"),
              ("an output may go once it is sent, and a graph with its backward", 1, "sent", "left"))),
)  # fmt: skip

Log = list[tuple[str, Any]]  # ("send" or "recv", (peer, tag)), ("wait", number of the message), others


def stuck(logs: list[Log]) -> str:
    """Which ranks would wait for ever if no send ended before its receive has begun; or ""."""
    at, posted, moving = [0] * len(logs), [[] for _ in logs], True
    while moving:
        moving = False
        for rank, log in enumerate(logs):
            while at[rank] < len(log):
                what, value = log[at[rank]]
                if what == "wait":
                    mine, peer, tag = posted[rank][value]
                    wanted = "recv" if mine == "send" else "send", rank, tag
                    if posted[peer].count(wanted) <= posted[rank][:value].count((mine, peer, tag)):
                        break
                elif what in ("send", "recv"):
                    posted[rank].append((what, *value))
                at[rank], moving = at[rank] + 1, True
    late = [rank for rank, log in enumerate(logs) if at[rank] < len(log)]
    return f"ranks {late} wait for one another, if a send waits for its receiver" if late else ""


class Message(NamedTuple):
    """A message of a log: "send" or "recv", the peer, where it starts, and where it is awaited (or the log ends)."""

    kind: str
    peer: int
    start: int
    stop: int


def messages_of(log: Log, kind: str) -> list[Message]:
    """Those of one kind."""
    starts = [at for at, (what, _) in enumerate(log) if what in ("send", "recv")]
    ends = {number: log.index(("wait", number)) for number in range(len(starts)) if ("wait", number) in log}
    found = [Message(log[at][0], log[at][1][0], at, ends.get(number, len(log))) for number, at in enumerate(starts)]
    return [message for message in found if message.kind == kind]


class Run(Piped):
    """Task 3: a step of a pipeline: AFAB, 1F1B, or in task 4 any lists, with programs of our own."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        (xs, ys, n, positions), rank, tape = self.batch(), mesh["pp"].rank, Tape(mesh)
        cls = getattr(step, self.kind)
        model, pipeline = self.drawn(decoder(0, n_layers=len(self.places))), cls.__new__(cls)
        step.Pipeline.__init__(pipeline, model, self.places, mesh["pp"], positions, 1)

        def mark(kind: str, act: Callable, i: int, stage: int, x: Any) -> Any:
            tape.events.append(Event("mark", (kind, i, stage)))
            return act(i, stage, x)

        pipeline.forward = partial(mark, "F", pipeline.forward)
        pipeline.backward = partial(mark, "B", pipeline.backward)
        program = programs(self.lists, self.places)[rank] if self.kind == "ListPipeline" else []
        pipeline.program = [step.Instruction(*line) for line in program]
        with tape:
            loss = pipeline.step(xs, ys, n)
        log = [(e.what, (e.peer, "")) if e.kind == "start" else e[:2] for e in tape.events if e.kind != "compute"]
        logs: list[Any] = [None] * mesh["pp"].size
        dist.all_gather_object(logs, log, group=mesh["pp"].handle)
        yield from as_ours({"the loss": loss.item()} | gradients(model) | {"messages: bytes": tape.sent()})
        yield "messages: deadlock", stuck(logs), ""
        yield "messages: nobody has waited for", tape.left(), []
        order = self.lists[rank]
        yield "the order of work", [str(act) for what, act in log if what == "mark"], [str(tuple(a)) for a in order]
        if self.kind == "OneForwardOneBackward" and self.m >= mesh["pp"].size - rank:  # else forward ends first
            yield "messages: two exchanges where y and dy, or dx and x, pass at once", apart(log), 0
        if self.kind == "ListPipeline":
            yield from waits(log, program)


def apart(log: Log) -> int:
    """How often a rank sends, waits, and only then receives from the same rank, with no work in between."""
    pairs = product(messages_of(log, "send"), messages_of(log, "recv"))
    between = (log[s.stop : r.start] for s, r in pairs if s.peer == r.peer and s.stop < r.start)
    return sum(all(what == "wait" for what, _ in events) for events in between)


def waits(log: Log, program: Program) -> Iterator[Row]:
    """Whether work goes on while messages of a program are under way."""
    sent, received = messages_of(log, "send"), messages_of(log, "recv")
    work = [0, *accumulate(what == "mark" for what, _ in log)]  # actions that have begun before an event
    yield "awaited at once: sends", sum(work[s.stop] == work[s.start] for s in sent[:-2]), at_most(0)
    most = max((sum(o.peer == s.peer and o.start <= s.start < o.stop for o in sent) for s in sent), default=0)
    yield "awaited too late: sends to a rank, under way at a time", most, at_most(1)
    idle = spare(program) - sum(work[r.stop] - work[r.start] for r in received)
    yield "awaited too early: actions that could have run", idle, at_most(0)


def runs(kind: str, order: Callable[[int, int], Lists], *sizes: tuple[int, int, int]) -> tuple[dict, ...]:
    """A class of the step, and the order of its loops, for (pipelines beside one another, ranks, micro-batches)."""
    return tuple(dict(mesh=dict(dp=dp, pp=p), m=m, places=loop(p), lists=order(p, m), kind=kind) for dp, p, m in sizes)


MESSAGES = Task(
    ("Pipeline.send_receive", "Pipeline.execute", "OneForwardOneBackward.execute"),
    (*demands(Run, runs("Pipeline", lambda p, m: all_forward_first(m, *((r,) for r in range(p))), (1, 3, 4)),
              ("AFAB: the loss and all gradients are one device's", 1, "the loss", "gradient of"),
              ("AFAB: all forward, then all backward; one message for each x and dx", 1, "order", "messages")),
     *demands(Run, runs("OneForwardOneBackward", one_f_one_b, (1, 3, 5), (2, 2, 3), (1, 4, 2)),
              ("1F1B: the loss and all gradients are one device's", 2, "the loss", "gradient of"),
              ("each rank works in the order of 1F1B", 2, "order"),
              ("one message for each x and dx, all awaited; no deadlock if sends wait", 2, "messages"))),
)  # fmt: skip


def programs(lists: Lists, places: Places) -> list[Program]:
    """By rank: all actions by their end, each followed by its message."""
    found: list[Program] = [[] for _ in lists]
    for _, rank, _, action in simulate(lists, places, COSTS):
        found[rank].append(("compute", action, None))
        there = consumer(action, places)
        if there is not None and (peer := places[there.stage].rank) != rank:
            found[rank].append(("send", there, peer))
            found[peer].append(("receive", there, rank))
    return found


def spare(program: Program) -> int:
    """How many actions a program has between its receives and the actions that need them, all together."""
    at = {line[:2]: n for n, line in enumerate(program)}
    pairs = [(n, at["compute", action]) for (verb, action), n in at.items() if verb == "receive"]
    return sum(line[0] == "compute" for start, stop in pairs for line in program[start:stop])


def clash(found: list[Program], lists: Lists, places: Places) -> str:
    """What is wrong with programs if a rank does nothing until the message that it posted has passed; or ""."""
    logs: list[Log] = []
    for rank, program in enumerate(found):
        here, log = set(), []
        for verb, action, peer in program:
            place = places[action.stage]
            needs = verb == "send" or (place.before if action.kind == "F" else place.after) is not None
            if verb != "receive" and needs and action not in here:
                return f"rank {rank}: {verb} {tuple(action)} before its input is there"
            here.add(consumer(action, places) if verb == "compute" else action)
            if verb != "compute":
                if peer not in range(len(found)):
                    return f"rank {rank}: {verb} {tuple(action)} names no peer"
                log += [("recv" if verb == "receive" else verb, (peer, action)), ("wait", len(log) // 2)]
        logs.append(log)
        if [action for verb, action, _ in program if verb == "compute"] != lists[rank]:
            return f"rank {rank} does not run its list in order"
    return stuck(logs)


DEEP = all_forward_first(3, (0, 5), (1, 4), (2, 3))  # a V of three ranks
LOOPED, FOLDED = all_forward_first(4, (0, 2), (1, 3)), all_forward_first(3, (0, 3), (1, 2))
PLANS = {
    "1F1B": (one_f_one_b(4, 7), loop(4)),
    "a loop": (LOOPED, loop(2, 2)),
    "a V": (FOLDED, V),
    "two ways": (all_forward_first(4, (0, 3), (2, 1)), WAYS),
}


class Programs(Case):
    """Task 4: add_messages."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for name, (lists, places) in PLANS.items():
            lines = step.add_messages([[step.Action(*action) for action in row] for row in lists], places)
            plain = [[(str(verb), Action(*action), peer) for verb, action, peer in row] for row in lines]
            yield name, clash(plain, lists, places), ""


V3 = [place._replace(rank=rank) for place, rank in zip(round_robin(6, 6, 1), (0, 1, 2, 2, 1, 0), strict=True)]
LISTED = tuple(
    dict(mesh=dict(pp=p), m=m, places=places, lists=lists, kind="ListPipeline")
    for p, m, places, lists in ((2, 4, loop(2, 2), LOOPED), (2, 3, V, FOLDED), (3, 3, V3, DEEP))
)
PROGRAMS = Task(
    ("add_messages", "ListPipeline.execute"),
    (*demands(Programs, ({},), ("add_messages: no deadlock for chains, loops, a V and two ways", 3)),
     *demands(Run, LISTED,
              ("execute: the loss and all gradients are one device's", 3, "the loss", "gradient of"),
              ("execute: each rank follows its list", 1, "order"),
              ("execute: one message for each x and dx", 1, "messages"),
              ("execute: work goes on while messages are under way", 2, "awaited"))),
)  # fmt: skip

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
CHAIN = round_robin(5, 3, 1)


class Keep(Case):
    """Task 5: which parameters each rank keeps, and how many stages the embedding's record counts."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for name, places in (("a chain", CHAIN), ("a V", V)):
            p = max(place.rank for place in places) + 1
            for rank in range(p):
                model = decoder(n_layers=sum(len(place.layers) for place in places), tied=self.tied)
                step.keep_stage(model, Group("pp", rank, p, None), places)
                named, trunk = dict(model.named_parameters()), model.model
                ends = dict(embed_tokens=trunk.embed_tokens, norm=trunk.norm, lm_head=model.lm_head)
                yield f"{name}: rank {rank} keeps", sorted(named), FOUND
                yield f"{name}: what is None on rank {rank}", [key for key, end in ends.items() if end is None], FOUND
                stages = layout_of(named[EMBED]).stage_copies if EMBED in named else 0
                yield f"{name}: stages of rank {rank}'s embedding", stages, FOUND


class Tied(Case):
    """sum_tied over a chain of three, over one whose ends are on one rank, and without a tie."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for name, places, tied in (("tied", loop(3), True), ("ends together", V, True), ("not tied", loop(3), False)):
            held = {NORM: self.draw("norm", 16)}
            held |= {EMBED: self.draw(f"rank {mesh.rank}", 13, 16)} if mesh.rank != 1 else {}
            given = dict(held)
            step.sum_tied(decoder(n_layers=4, tied=tied), held, mesh["pp"], places)
            yield from as_ours({f"{name}: {key}": value for key, value in given.items()})


KEEPING = Task(
    ("keep_stage", "sum_tied"),
    (*demands(Keep, (dict(tied=False), dict(tied=True)),
              ("keep_stage: parameters and records, of a chain and a V", 3)),
     *demands(Tied, (dict(mesh=dict(pp=3)),), ("sum_tied: both ends have the sum, in place; nothing else changes", 2)),
     suite(4, "pp", "pp, tied", "lists", "step 6", "step 6, afab", "step 6, V", "step 6, bf16", "step 6, saved",
           says="--pp trains as one device: all schedules, a tied matrix, tp, ZeRO, a variant")),
)  # fmt: skip

QUESTION = Question(
    dict(p=(4, 6, 8), m=range(9, 45), MB=range(3, 61)),
    lambda p, m, MB, held=lambda p, m: p - 1: held(p, m) * MB,
    {"this is afab's": dict(held=lambda p, m: m), "this is rank 0's": dict(held=lambda p, m: p)},
)

LAB = Lab(
    6, ("common.schedules", "step06_pipeline"), (ORDERS, STAGE, MESSAGES, PROGRAMS, KEEPING), QUESTION, flags="--pp 2"
)
