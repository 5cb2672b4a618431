"""Lab 6: pipelines (common/schedules.py, step06_pipeline.py)."""

import importlib
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from common.comm import Group
from common.layout import layout_of
from common.model import IGNORE, Decoder, ModelConfig
from labs.course import Case, Criterion, Lab, Most, Question, Task, demands
from labs.tape import Tape
from labs.training import trains

Action = tuple[str, int, int]  # kind, micro-batch, stage
Links = list[tuple[int, int | None, int | None]]  # by stage: rank, stage before, stage after


def loop(p: int, v: int) -> Links:
    """p v stages, v times through all ranks."""
    n = p * v
    return [(s % p, s - 1 if s else None, s + 1 if s < n - 1 else None) for s in range(n)]


V = [(0, None, 1), (1, 0, 2), (1, 1, 3), (0, 2, None)]  # there and back, so a rank gives its output to itself
WAYS = [(0, None, 1), (1, 0, None), (1, None, 3), (0, 2, None)]  # two opposite ways


def all_forward_first(m: int, *stages: tuple[int, ...]) -> list[list[Action]]:
    """By rank: its stages in their order, forward; then in reverse, backward."""
    forward = [[("F", i, s) for s in some for i in range(m)] for some in stages]
    return [
        row + [("B", i, s) for s in some[::-1] for i in range(m)] for row, some in zip(forward, stages, strict=True)
    ]


def ends_of(lists: list[list[Action]], links: Links) -> dict[Action, tuple[int, int]]:
    """(end, rank) of every action that can ever run: F takes 1, B takes 2, each starts when its inputs are there."""
    ends: dict[Action, tuple[int, int]] = {}
    free, left, moving = [0] * len(lists), [list(row) for row in lists], True
    while moving:
        moving = False
        for rank, row in enumerate(left):
            while row:
                kind, i, stage = row[0]
                needs = [("F", i, links[stage][1])] if kind == "F" else [("F", i, stage), ("B", i, links[stage][2])]
                needs = [need for need in needs if need[2] is not None]
                if not all(need in ends for need in needs):
                    break
                free[rank] = max([free[rank], *(ends[need][0] for need in needs)]) + (1 if kind == "F" else 2)
                ends[row.pop(0)], moving = (free[rank], rank), True
    return ends


# --- task 1: orders of work ------------------------------------------------------------------------------------------

ONE = (dict(grid=((4, 12, 1), (5, 3, 1), (3, 7, 1), (1, 4, 1))),)  # ranks; micro-batches: many, few, odd; stages
SEVERAL = (dict(grid=((4, 12, 3), (2, 4, 5), (3, 9, 2), (4, 6, 1))),)


def what_is_wrong(lists: list[list[Action]], p: int, m: int, v: int) -> str:
    """The first thing that is wrong with all ranks' lists, or ""."""
    for rank, row in enumerate(lists):
        wanted = Counter((kind, i, stage) for kind in "FB" for i in range(m) for stage in range(rank, p * v, p))
        for text, actions in (("never does", wanted - Counter(row)), ("has no business with", Counter(row) - wanted)):
            if actions:
                return f"rank {rank} {text} {next(iter(actions))}"
    return "" if len(ends_of(lists, loop(p, v))) == 2 * m * p * v else "ranks wait for one another for ever"


def lists_on_rank(name: str, _step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """A schedule's lists for some sizes: mistakes, how long they take, how many stages are held between F and B."""
    actions, found = getattr(importlib.import_module("common.schedules"), name), {}
    for p, m, v in case.grid:
        lists = [[(str(kind), int(i), int(stage)) for kind, i, stage in actions(p, m, v, rank)] for rank in range(p)]
        sizes, ends = f"p={p} m={m} v={v}: ", ends_of(lists, loop(p, v))
        found[f"{sizes}mistakes"] = what_is_wrong(lists, p, m, v)
        found[f"{sizes}time"] = max(ends.values())[0] if len(ends) == 2 * m * p * v else math.inf
        for rank, row in enumerate(lists):
            held = [0, *accumulate(1 if kind == "F" else -1 for kind, *_ in row)]
            found[f"{sizes}in flight on rank {rank}"] = max(held) if len(row) == 2 * m * v else math.inf
    try:
        found["the error for p=4 m=6 v=2"] = f"none, {len(actions(4, 6, 2, 0))} actions"
    except Exception as error:
        found["the error for p=4 m=6 v=2"] = type(error).__name__
    return found


def lists_expected(name: str, _rank: int, case: Case) -> dict[str, Any]:
    """The laws of the papers, as upper limits."""
    found: dict[str, Any] = {"the error for p=4 m=6 v=2": "UserError"}
    for p, m, v in case.grid:
        sizes = f"p={p} m={m} v={v}: "
        found |= {f"{sizes}mistakes": "", f"{sizes}time": Most(3 * (v * m + p - 1))}
        for rank in range(p):
            most = p - rank if name == "one_f_one_b" else (v - 1) * p + 2 * (p - rank) - 1
            found[f"{sizes}in flight on rank {rank}"] = Most(min(m * v, most))
    return found


def lists(name: str, cases: tuple, *rows: tuple) -> tuple[Criterion, ...]:
    """Criteria of one schedule."""
    return demands(partial(lists_on_rank, name), partial(lists_expected, name), cases, *rows)


ORDERS = Task(
    "orders of work", 40, tuple(f"common.schedules:{name}" for name in ("weave", "afab", "one_f_one_b", "interleaved")),
    "the docstring of the step to THE BUBBLE; `weave` and its callers; Narayanan et al. 2021, section 2.2",
    ("Draw rank 0 and the last rank of 1F1B. How many forwards come before the first backward on each? With it "
     "known, the rest of a list follows: forward and backward in turn, then the backwards that are left.",
     "weave: write all forwards of the rank in order, and all backwards in order. Rounds of p micro-batches: all of "
     "a round do the rank's first stage, then all its second one. Backwards take the stages in reverse.",
     "interleaved: before the first backward a rank does its v-1 earlier stages for a whole round, and two forwards "
     "for each rank behind it. Rounds that are not full are refused with a UserError.",),
    (*lists("afab", ONE, ("afab: each action once, no rank waits for ever", 1, "mistakes")),
     *lists(
         "one_f_one_b", ONE,
         ("1F1B: the same, also with few micro-batches", 2, "mistakes"),
         ("1F1B: idle (p-1) / (m+p-1) of the time", 1, "time"),
         ("1F1B: at most p - rank micro-batches in flight", 2, "in flight"),
     ),
     *lists(
         "interleaved", SEVERAL,
         ("interleaved: each action once, no rank waits for ever", 2, "mistakes"),
         ("interleaved: idle (p-1) / (v m+p-1) of the time", 2, "time"),
         ("interleaved: at most (v-1) p + 2 (p - rank) - 1 in flight", 1, "in flight"),
         ("interleaved: rounds that are not full are refused", 1, "error"),
     ),),
)  # fmt: skip

# --- task 2: a stage -------------------------------------------------------------------------------------------------

SHAPE = dict(dim=12, n_heads=2, n_kv_heads=1, ffn_dim=20, vocab_size=23, seq_len=10)
THREE = ([(0, None, 1), (0, 0, 2), (0, 1, None)], [range(0, 1), range(1, 3), range(3, 4)])  # of 4 layers, on one rank


def filled(case: Case, n_layers: int) -> Decoder:
    """A decoder in fp64 with weights of the case."""
    model = Decoder(ModelConfig(n_layers=n_layers, **SHAPE)).double()
    for name, param in model.named_parameters():
        param.data = case.draw(name, *param.shape) * 0.3
    return model


def batch(case: Case) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Tokens and targets of micro-batches of two sequences, the last one of one; target tokens; positions."""
    shape = 2 * case.m - 1, 10
    tokens, targets = (case.ids(name, 23, *shape) for name in ("tokens", "targets"))
    targets[case.draw("which count", *shape) < -0.5] = IGNORE
    targets[1] = IGNORE
    return [*tokens.split(2)], [*targets.split(2)], (targets != IGNORE).sum(), torch.arange(10).flip(0) * 2


def one_device(case: Case, n_layers: int) -> dict[str, Any]:
    """The loss and all gradients; the loss of the first micro-batch."""
    model, (xs, ys, n, positions) = filled(case, n_layers), batch(case)
    loss = model(torch.cat(xs), torch.cat(ys), positions) / n
    loss.backward()
    first = model(xs[0], ys[0], positions).item()
    return {"the loss": loss.item(), "a micro-batch's sum": first} | gradients(model, [*range(n_layers)], n_layers)


def gradients(model: Decoder, stages: list[int], n: int) -> dict[str, Any]:
    """Those of some of n stages of a layer each, embedding and head with the first and the last."""
    ours = [f"layers.{i}." for i in stages] + ["embed"] * (0 in stages) + ["model.norm", "lm_head"] * (n - 1 in stages)
    named = model.named_parameters()
    return {f"the gradient of {name}": p.grad for name, p in named if any(part in name for part in ours)}


def places_of(step: Any, links: Links, layers: list[range] | None = None) -> list[Any]:
    """As common/schedules.py has them; a layer each unless told."""
    layers = layers or [range(s, s + 1) for s in range(len(links))]
    return [step.Place(rank, some, *link) for (rank, *link), some in zip(links, layers, strict=True)]


def parts_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """forward_stage, three times."""
    model, (xs, ys, _, positions) = filled(case, 4), batch(case)
    x = xs[0]
    for place in places_of(step, *THREE):
        x = step.forward_stage(model, place, x, ys[0], positions)
    return {"a micro-batch's sum": x.item()}


def stages_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """Three micro-batches through three stages of one rank, two in flight; messages are copies."""
    model, (xs, ys, n, positions) = filled(case, 4), batch(case)
    gone, asked, held = [], [], []

    class Pipeline(step.Pipeline):
        def run(self):
            for kind, i in (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)):
                message = None
                held.append(gone.count(False))
                for stage in (0, 1, 2) if kind == "F" else (2, 1, 0):
                    output = (self.forward if kind == "F" else self.backward)(i, stage, message)
                    message = None if output is None or (kind, stage) == ("F", 2) else output.clone()
                    if kind == "F" and stage < 2:
                        asked.append(bool(output.requires_grad))
                        gone.append(False)
                        weakref.finalize(output.untyped_storage(), gone.__setitem__, len(gone) - 1, True)
                    del output

    loss = Pipeline(model, places_of(step, *THREE), Group("pp", 0, 1, None), positions, 1).step(xs, ys, n)
    found = {"sent: outputs that want gradients": any(asked), "sent: outputs whose memory stays": max(held)}
    return found | {"the loss": loss.item()} | gradients(model, [*range(4)], 4)


def stages_expected(_rank: int, case: Case) -> dict[str, Any]:
    """One device's; what is left."""
    return one_device(case, 4) | {"sent: outputs that want gradients": False, "sent: outputs whose memory stays": 0}


STAGE = Task(
    "a stage, forward and backward", 30, ("forward_stage", "Pipeline.forward", "Pipeline.backward"),
    "AUTOGRAD in the docstring of the step; Decoder.forward in common/model.py; Pipeline.step",
    ("forward_stage is Decoder.forward with conditions: embedding if there is nothing before; norm, head and loss "
     "if there is nothing after. RoPE needs the positions on every stage.",
     "What arrives is a leaf: requires_grad_() before the layers. What leaves has no graph: detach(). Keep the leaf "
     "and get_gradient_edge(y) by (i, stage): the edge, unlike y, does not hold the data.",
     "Only the last stage has a loss: divide it by n_targets, add its detached value to self.loss. backward: pop, "
     "torch.autograd.backward((edge,), (dy,)) or None in place of (dy,) for the loss, then the leaf's .grad.",),
    (*demands(parts_on_rank, stages_expected, (dict(m=3),), ("forward_stage: together the model", 2, "sum")),
     *demands(
         stages_on_rank, stages_expected, (dict(m=3),),
         ("the loss is one device's", 1, "the loss"),
         ("so are all gradients", 3, "gradient of"),
         ("an output has no graph, and may go once it is sent", 1, "sent"),
     ),),
    faults=("pipeline_loss_not_divided", "targets_of_another", "stage_starts_late", "lists_forget_loss"),
)  # fmt: skip

# --- task 3: 1F1B and its messages -----------------------------------------------------------------------------------


class Log:
    """What a rank does, in order: ("send" or "recv", (peer, tag)), ("wait", number of the message), ("act", action)."""

    def __init__(self):
        self.events: list[tuple[str, Any]] = []

    @contextmanager
    def watch(self, pipeline: Any) -> Iterator[None]:
        """While a pipeline runs; sees all styles of messages."""
        works, right = [], dist.Work.wait

        def wait(work: Any, *args: Any) -> Any:
            self.events += [("wait", n) for n, other in enumerate(works) if other is work]
            return right(work, *args)

        def watched(name: str, post: Any) -> Any:
            def posted(group: Any, tensors: Any, peer: int, *args: Any) -> Any:
                self.events.append((name, (peer, "")))
                works.append(post(group, tensors, peer, *args))
                return works[-1]

            return mock.patch.object(dist.ProcessGroup, name, posted)

        def acting(kind: str, act: Any) -> Any:
            def run(i: int, stage: int, x: Any) -> Any:
                self.events.append(("act", (kind, i, stage)))
                return act(i, stage, x)

            return run

        pipeline.acts = dict(F=acting("F", pipeline.forward), B=acting("B", pipeline.backward))
        pipeline.forward, pipeline.backward = pipeline.acts["F"], pipeline.acts["B"]
        messages = watched("send", dist.ProcessGroup.send), watched("recv", dist.ProcessGroup.recv)
        with mock.patch.object(dist.Work, "wait", wait), messages[0], messages[1]:
            yield

    def under_way(self, kind: str) -> list[int]:
        """How many actions began between each message's start and the wait for it."""
        starts, counts = [at for at, (what, _) in enumerate(self.events) if what in ("send", "recv")], []
        for number, at in enumerate(starts):
            stop = self.events.index(("wait", number)) if ("wait", number) in self.events else at
            if self.events[at][0] == kind:
                counts.append(sum(event[0] == "act" for event in self.events[at:stop]))
        return counts


def stuck(logs: list[list[tuple[str, Any]]]) -> str:
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
                elif what != "act":
                    posted[rank].append((what, *value))
                at[rank], moving = at[rank] + 1, True
    late = [rank for rank, log in enumerate(logs) if at[rank] < len(log)]
    return f"ranks {late} wait for one another, if a send waits for its receiver" if late else ""


def run_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """A step of a pipeline: 1F1B, or in task 4 any lists, with programs of our own."""
    (xs, ys, n, positions), rank, links = batch(case), mesh["pp"].rank, case.links
    cls = step.ListPipeline if case.lists else step.Pipeline
    model, log, pipeline = filled(case, len(links)), Log(), cls.__new__(cls)
    step.Pipeline.__init__(pipeline, model, places_of(step, links), mesh["pp"], positions, 1)
    if case.lists:
        lines = programs(case.lists, links)[rank]
        pipeline.program = [step.Line(verb, step.Action(*action), peer) for verb, action, peer in lines]
    with Tape(mesh) as tape, log.watch(pipeline):
        loss = pipeline.step(xs, ys, n)
    logs: list[Any] = [None] * mesh.world
    dist.all_gather_object(logs, log.events)
    found = {"the loss": loss.item(), "messages: bytes": tape.sent(), "messages: deadlock": stuck(logs)}
    found["the order of work"] = [str(act) for what, act in log.events if what == "act"]
    found["awaited at once: sends"] = sum(count == 0 for count in log.under_way("send")[:-2])
    if case.lists:
        found["awaited too early: actions that could have run"] = spare(lines) - sum(log.under_way("recv"))
    return found | gradients(model, [s for s, link in enumerate(links) if link[0] == rank], len(links))


def run_expected(rank: int, case: Case) -> dict[str, Any]:
    """One device's numbers; the order; a message for each x and dx."""
    links, n = case.links, len(case.links)
    mine, one = [s for s, link in enumerate(links) if link[0] == rank], one_device(case, n)
    away = sum(other is not None and links[other][0] != rank for s in mine for other in links[s][1:])
    kept = [f"layers.{s}." for s in mine] + ["embed"] * (0 in mine) + ["model.norm", "lm_head"] * (n - 1 in mine)
    found = {key: value for key, value in one.items() if any(part in key for part in kept)}
    found |= {"the loss": one["the loss"] if n - 1 in mine else 0.0, "messages: deadlock": ""}
    found["messages: bytes"] = {"pp": away * (2 * case.m - 1) * 10 * SHAPE["dim"] * 8.0}
    found["the order of work"] = [str(act) for act in (case.lists or one_f_one_b(case.ranks, case.m))[rank]]
    most = {"awaited at once: sends": Most(0), "awaited too early: actions that could have run": Most(0)}
    return found | (most if case.lists else {})


def one_f_one_b(p: int, m: int) -> list[list[Action]]:
    """The lists of 1F1B."""
    found = []
    for rank in range(p):
        first = min(m, p - 1 - rank)
        steady = [(kind, i + first * (kind == "F"), rank) for i in range(m - first) for kind in "FB"]
        found.append([("F", i, rank) for i in range(first)] + steady + [("B", i, rank) for i in range(m - first, m)])
    return found


RUNS = tuple(dict(mesh=dict(pp=p), m=m, links=loop(p, 1), lists=None) for p, m in ((3, 5), (4, 2)))

MESSAGES = Task(
    "1F1B with its messages", 35, ("Pipeline.send_receive", "Pipeline.run"),
    "the picture and DEADLOCK in the docstring of the step; exchange in common/comm.py; Pipeline.buffer",
    ("send_receive: a buffer if something is to come, one exchange for both, wait, return the buffer. Past the "
     "first or last rank there is nobody: return None, and forward and backward know what None means.",
     "Three phases, as in the picture: min(m, p - 1 - rank) forwards alone; forward and backward in turn; backwards "
     "alone. In each, what arrives before the work, and what leaves after it?",
     "In the middle, y goes right while a dy comes from there, and dx goes left while the next x comes from there: "
     "one call each. Before the first of these x comes alone; in the last one no x is left to come.",),
    demands(
        run_on_rank, run_expected, RUNS,
        ("the loss and all gradients are one device's", 3, "the loss", "gradient of"),
        ("each rank works in the order of 1F1B", 2, "order"),
        ("one message for each x and dx; no deadlock if sends wait", 3, "messages"),
    ),
)  # fmt: skip

# --- task 4: any order of work ---------------------------------------------------------------------------------------

Program = list[tuple[str, Action, int | None]]  # verb, action, peer


def programs(lists: list[list[Action]], links: Links) -> list[Program]:
    """By rank: all actions by their end, each followed by its message."""
    found: list[Program] = [[] for _ in lists]
    for (kind, i, stage), (_, rank) in sorted(ends_of(lists, links).items(), key=lambda item: item[1]):
        found[rank].append(("run", (kind, i, stage), None))
        there = links[stage][2 if kind == "F" else 1]
        if there is not None and links[there][0] != rank:
            found[rank].append(("send", (kind, i, there), links[there][0]))
            found[links[there][0]].append(("receive", (kind, i, there), rank))
    return found


def spare(program: Program) -> int:
    """How many actions a program has between its receives and the actions that need them, all together."""
    at = {line[:2]: n for n, line in enumerate(program)}
    pairs = [(n, at["run", action]) for (verb, action), n in at.items() if verb == "receive"]
    return sum(line[0] == "run" for start, stop in pairs for line in program[start:stop])


def clash(found: list[Program], lists: list[list[Action]], links: Links) -> str:
    """What is wrong with programs if a rank does nothing until the message that it posted has passed; or ""."""
    logs: list[list[tuple[str, Any]]] = []
    for rank, program in enumerate(found):
        here, log = set(), []
        for verb, (kind, i, stage), peer in program:
            action, forward = (kind, i, stage), kind == "F"
            if (
                verb != "receive"
                and action not in here
                and (verb == "send" or links[stage][1 if forward else 2] is not None)
            ):
                return f"rank {rank}: {verb} {action} before its input is there"
            here.add((kind, i, links[stage][2 if forward else 1]) if verb == "run" else action)
            if verb != "run":
                if peer not in range(len(found)):
                    return f"rank {rank}: {verb} {action} names no peer"
                log += [("recv" if verb == "receive" else verb, (peer, action)), ("wait", len(log) // 2)]
        logs.append(log)
        if [action for verb, action, _ in program if verb == "run"] != lists[rank]:
            return f"rank {rank} does not run its list in order"
    return stuck(logs)


LOOPED, FOLDED = all_forward_first(4, (0, 2), (1, 3)), all_forward_first(3, (0, 3), (1, 2))
PLANS = {
    "1F1B": (one_f_one_b(4, 7), loop(4, 1)),
    "a loop": (LOOPED, loop(2, 2)),
    "a V": (FOLDED, V),
    "two ways": (all_forward_first(4, (0, 3), (2, 1)), WAYS),
}


def programs_on_rank(step: Any, _case: Case, _mesh: Any) -> dict[str, Any]:
    """add_messages."""
    found = {}
    for name, (lists, links) in PLANS.items():
        given = [[step.Action(*action) for action in row] for row in lists]
        lines = step.add_messages(given, places_of(step, links))
        plain = [[(str(verb), (str(kind), i, s), peer) for verb, (kind, i, s), peer in row] for row in lines]
        found[name] = clash(plain, lists, links)
    return found


LISTED = (
    dict(mesh=dict(pp=2), m=4, links=loop(2, 2), lists=LOOPED),
    dict(mesh=dict(pp=2), m=3, links=V, lists=FOLDED),
)

PROGRAMS = Task(
    "any order of work", 35, ("add_messages", "ListPipeline.run"),
    "the docstrings of add_messages and of ListPipeline; goes_to and simulate in common/schedules.py",
    ("Messages between two ranks pass in the order of posting, so both must post them in one order. Which order of "
     "all actions of all ranks has no output before its input? simulate returns it.",
     "Each action is appended to its rank's program. If its output goes to a stage on another rank, a send is "
     "appended there and a receive on the other, at once.",
     "run: keep by action the tensor and a Pending. A receive posts and goes on. A run waits for its own input "
     "alone. An output for a stage on the same rank needs no message. Wait for the send before to the same peer, "
     "and in the end for all.",),
    (Criterion("add_messages: no deadlock for chains, loops, a V and two ways", 3, programs_on_rank,
               lambda *_: dict.fromkeys(PLANS, ""), ({},)),
     *demands(
         run_on_rank, run_expected, LISTED,
         ("run: the loss and all gradients are one device's", 3, "the loss", "gradient of"),
         ("run: each rank follows its list", 1, "order"),
         ("run: one message for each x and dx", 1, "messages"),
         ("run: work goes on while messages are under way", 2, "awaited"),
     ),),
    faults=("last_output_taken",),
)  # fmt: skip

# --- task 5: who keeps what ------------------------------------------------------------------------------------------

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
CHAIN = loop(3, 1), [range(0, 2), range(2, 3), range(3, 5)]
FOLD = V, [range(s, s + 1) for s in range(4)]


def keep_on_rank(step: Any, case: Case, _mesh: Any) -> dict[str, Any]:
    """Which parameters each rank keeps, and how many stages the embedding's record counts."""
    found: dict[str, Any] = {}
    for name, p, (links, layers) in (("a chain", 3, CHAIN), ("a V", 2, FOLD)):
        for rank in range(p):
            with torch.device("meta"):
                model = Decoder(ModelConfig(n_layers=layers[-1].stop, tied=case.tied, **SHAPE))
            step.keep_stage(model, Group("pp", rank, p, None), places_of(step, links, layers))
            named = dict(model.named_parameters())
            found[f"{name}: rank {rank} keeps"] = sorted({".".join(key.split(".")[:3]) for key in named})
            found[f"{name}: stages of rank {rank}'s embedding"] = (
                layout_of(named[EMBED]).stages if EMBED in named else 0
            )
    return found


def keep_expected(_rank: int, case: Case) -> dict[str, Any]:
    """Layers of its stages, the embedding with the first, norm and head with the last."""
    found: dict[str, Any] = {}
    for name, kept, (first, last) in (("a chain", ([0, 1], [2], [3, 4]), (0, 2)), ("a V", ([0, 3], [1, 2]), (0, 0))):
        for rank, layers in enumerate(kept):
            embeds = rank == first or (case.tied and rank == last)
            parts = [f"model.layers.{i}" for i in layers] + [EMBED] * embeds + [NORM] * (rank == last)
            found[f"{name}: rank {rank} keeps"] = sorted(parts + ["lm_head.weight"] * (rank == last and not case.tied))
            found[f"{name}: stages of rank {rank}'s embedding"] = embeds * (2 if case.tied and first != last else 1)
    return found


def tied_on_rank(step: Any, case: Case, mesh: Any) -> dict[str, Any]:
    """sum_tied over a chain of three, over one whose ends are on one rank, and without a tie."""
    rank, found = mesh["pp"].rank, {}
    for name, links, tied in (("tied", loop(3, 1), True), ("ends together", V, True), ("not tied", loop(3, 1), False)):
        with torch.device("meta"):
            model = Decoder(ModelConfig(n_layers=4, tied=tied, **SHAPE))
        held = {EMBED: case.draw(f"rank {rank}", 23, 12)} if rank != 1 else {}
        held |= {NORM: case.draw("norm", 12)}
        step.sum_tied(model, held, mesh["pp"], places_of(step, links))
        found |= {f"{name}: {key}": value for key, value in held.items()}
    return found


def tied_expected(rank: int, case: Case) -> dict[str, Any]:
    """The ends' sum, where there are two."""
    ends, found = {r: case.draw(f"rank {r}", 23, 12) for r in (0, 2)}, {}
    for name in ("tied", "ends together", "not tied"):
        if rank != 1:
            found[f"{name}: {EMBED}"] = ends[0] + ends[2] if name == "tied" else ends[rank]
        found[f"{name}: {NORM}"] = case.draw("norm", 12)
    return found


KEEPING = Task(
    "who keeps what, and the whole file", 25, ("keep_stage", "sum_tied"),
    "Place in common/schedules.py; `stages` in common/layout.py; `train` of the step",
    ("A rank keeps the layers of all its stages. Delete the others from trunk.layers, set to None what is not here. "
     "A tied head is the embedding's matrix: it goes by the name model.embed_tokens.weight on the last stage, too.",
     "Two ranks hold a tied matrix only if the first and the last stage are on different ones. Then its record says "
     "stages=2, so that the norm counts it once.",
     "sum_tied: the two ranks swap their gradients by one exchange and add. The others do nothing. With ZeRO a "
     "slice may be empty: then nothing is sent.",),
    (Criterion("keep_stage: parameters and records, of a chain and a V", 3, keep_on_rank, keep_expected,
               (dict(tied=False), dict(tied=True))),
     Criterion("sum_tied: both ends have the sum, and nothing else changes", 2, tied_on_rank, tied_expected,
               (dict(mesh=dict(pp=3)),)),
     trains(4, (3, dict(pp=3)), (4, dict(pp=2, tp=2, schedule="interleaved")), shape=dict(tied=True, n_layers=4)),),
    faults=("tied_not_summed", "tie_dropped_by_the_stage"),
)  # fmt: skip


def draw_pipeline(draw: Random) -> dict[str, int]:
    """A pipeline."""
    p = draw.choice((4, 6, 8))
    return dict(p=p, m=p * draw.randint(2, 5) + draw.randint(1, 3), MB=draw.randint(3, 60))


QUESTION = Question(
    "1f1b, {p} ranks, {m} micro-batches. What a micro-batch leaves on a rank for its backward has {MB} MB.\n"
    "How many MB of that does rank 1 (of 0 to p-1) hold at most?",
    draw_pipeline,
    lambda v: (v["p"] - 1) * v["MB"],
    mistakes=(("this is afab's", lambda v: v["m"] * v["MB"]), ("this is rank 0's", lambda v: v["p"] * v["MB"])),
)

LAB = Lab(
    6,
    "Pipelines",
    ("common.schedules", "step06_pipeline"),
    (ORDERS, STAGE, MESSAGES, PROGRAMS, KEEPING),
    QUESTION,
)
