"""Lab 6: what is demanded of pipeline schedules, their messages, and a backward in two parts.

Schedules are scored on paper, by simulated bubble and memory, never by seconds.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import step06_pipeline as step06
from common import schedules
from common.comm import Mesh
from common.schedules import Action, Place, Step, place_stages, simulate
from labs import training
from labs.bench import Bench, Wrong, numbers
from services.ledger import Ledger
from step04_tp_sp import gather_tokens, scatter_tokens
from tests.schedules import ScheduleError, check_lists, check_programs
from theory.bubble import UNIT_COSTS, idle_fraction, in_flight

CPU = torch.device("cpu")
RUN = dict(optimizer="sgd", n_layers=2, global_batch_size=8, micro_batch_size=2, steps=2)
WHOLE = (2, dict(pp=2, cp=1, tp=1, schedule="zb-h1"))
FUNCTIONS = {"1f1b": "one_f_one_b", "interleaved": "interleaved", "zb-h1": "zb_h1"}
CHUNKS = {"interleaved": 3, "zbv": 2, "dualpipe": 2}


# --- tasks 1 to 3: lists ---------------------------------------------------------------------------------------------


def lists_on_rank(name: str, p: int, m: int, v: int) -> list:
    """All ranks' lists of a schedule, as plain lists."""
    schedule = getattr(schedules, FUNCTIONS[name])
    return [[list(action) for action in schedule(p, m, v, rank)] for rank in range(p)]


def cases(bench: Bench) -> dict[str, tuple[int, int]]:
    """(ranks, micro-batches): many, few, and a number that the ranks do not divide."""
    draw = bench.draws()
    p = draw.randint(3, 5)
    return {"many": (p, p * draw.randint(2, 4)), "few": (p + 1, draw.randint(1, p)), "odd": (p, 2 * p + 1)}


def lists_of(bench: Bench, name: str, p: int, m: int) -> list[list[Action]]:
    """The student's lists. Raises Wrong unless each is a list of (kind, micro-batch, chunk)."""
    found = bench.ranks(1, lists_on_rank, name, p, m, CHUNKS.get(name, 1)).answers[0]
    try:
        return [[Action(str(kind), int(i), int(chunk)) for kind, i, chunk in row] for row in found]
    except (TypeError, ValueError) as error:
        raise Wrong(f"p={p} m={m}: not a list of actions (kind, micro-batch, chunk) for each rank") from error


def spans_of(name: str, lists: list[list[Action]], p: int, m: int) -> list:
    """Simulated with F = B = W = 1. Raises Wrong if an action can never start."""
    try:
        return simulate(lists, place_stages(name, p, CHUNKS.get(name, 1)), UNIT_COSTS)
    except ValueError as error:
        raise Wrong(f"p={p} m={m}: deadlock: {error}") from error


def complete(bench: Bench, name: str):
    """Each micro-batch once, in order, for every number of ranks and micro-batches; and no rank waits for ever."""
    for p, m in cases(bench).values():
        lists = lists_of(bench, name, p, m)
        try:
            check_lists(lists, place_stages(name, p, CHUNKS.get(name, 1)), m)
        except ScheduleError as error:
            raise Wrong(f"p={p} m={m}: {error}") from error
        spans_of(name, lists, p, m)


def bubble(bench: Bench, name: str, rounds: int):
    """The idle fraction is (p-1) / (rounds m + p-1), or less."""
    p, m = cases(bench)["many"]
    found, law = idle_fraction(spans_of(name, lists_of(bench, name, p, m), p, m)), (p - 1) / (rounds * m + p - 1)
    if found > law + 1e-9:
        raise Wrong(f"p={p} m={m}: idle for {found:.4f} of the time, more than {law:.4f}")


def memory(bench: Bench, name: str, most: Any, until: str = "B"):
    """Micro-batches in flight on each rank: at most `most(p, rank)`."""
    p, m = cases(bench)["many"]
    for rank, held in enumerate(in_flight(lists_of(bench, name, p, m), until)):
        if held > most(p, rank):
            kind = " - all forwards come first, as in afab" if held == m * CHUNKS.get(name, 1) else ""
            raise Wrong(f"p={p} m={m}: rank {rank} holds {held} at once, more than {most(p, rank)}{kind}")


def one_f_one_b_complete(bench: Bench):
    """1F1B: legal."""
    complete(bench, "1f1b")


def one_f_one_b_bubble(bench: Bench):
    """1F1B: its bubble."""
    bubble(bench, "1f1b", 1)


def one_f_one_b_memory(bench: Bench):
    """1F1B: its memory."""
    memory(bench, "1f1b", lambda p, rank: p - rank)


def interleaved_complete(bench: Bench):
    """Interleaved: legal."""
    complete(bench, "interleaved")


def interleaved_bubble(bench: Bench):
    """Interleaved: its bubble, 1/v of 1F1B's."""
    bubble(bench, "interleaved", CHUNKS["interleaved"])


def interleaved_memory(bench: Bench):
    """Interleaved: its memory."""
    memory(bench, "interleaved", lambda p, rank: (CHUNKS["interleaved"] - 1) * p + 2 * (p - rank) - 1)


def zb_h1_complete(bench: Bench):
    """ZB-H1: legal."""
    complete(bench, "zb-h1")


def zb_h1_bubble(bench: Bench):
    """ZB-H1: its bubble, a third of 1F1B's."""
    bubble(bench, "zb-h1", 3)


def zb_h1_memory(bench: Bench):
    """ZB-H1: no more than 1F1B until B, and until W no more than rank 0 of 1F1B."""
    memory(bench, "zb-h1", lambda p, rank: p - rank)
    memory(bench, "zb-h1", lambda p, rank: p, "W")


# --- task 4: messages ------------------------------------------------------------------------------------------------


def programs_on_rank(name: str, p: int, m: int) -> list:
    """`communicate` of a schedule of the project's, as plain lists."""
    v = CHUNKS.get(name, 1)
    lists = [schedules.SCHEDULES[name](p, m, v, rank) for rank in range(p)]
    programs = schedules.communicate(lists, place_stages(name, p, v))
    return [[[kind, list(what), peer] for kind, what, peer in program] for program in programs]


def program_cases(bench: Bench) -> list[tuple[str, int, int]]:
    """(schedule, ranks, micro-batches): chains, loops, V and both directions."""
    draw = bench.draws()
    return [
        (name, draw.choice((2, 4)), draw.randint(3, 9)) for name in ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")
    ]


def programs_of(bench: Bench, name: str, p: int, m: int) -> list[list[Step]]:
    """The student's programs. Raises Wrong if they are not lists of steps."""
    try:
        return [
            [
                Step(kind, Action(*what) if kind == "run" else (what[0], what[1], Place(*what[2])), peer)
                for kind, what, peer in program
            ]
            for program in bench.ranks(1, programs_on_rank, name, p, m).answers[0]
        ]
    except (TypeError, ValueError, IndexError) as error:
        raise Wrong(f"{name}, p={p}: a program is a list of Step(kind, what, peer)") from error


def programs_run(bench: Bench):
    """Each rank runs its own list in its order."""
    for name, p, m in program_cases(bench):
        for rank, program in enumerate(programs_of(bench, name, p, m)):
            right = schedules.SCHEDULES[name](p, m, CHUNKS.get(name, 1), rank)
            found = [step.what for step in program if step.kind == "run"]
            if found != right:
                raise Wrong(f"{name}, p={p} m={m}: rank {rank} runs {len(found)} actions, not its list of {len(right)}")


def programs_match(bench: Bench):
    """Messages pass in the order of posting, as with NCCL: no deadlock, none left, no input missing."""
    for name, p, m in program_cases(bench):
        for blocking in (False, True):
            try:
                check_programs(programs_of(bench, name, p, m), place_stages(name, p, CHUNKS.get(name, 1)), blocking)
            except ScheduleError as error:
                how = ", each message waited for where it is posted" if blocking else ""
                raise Wrong(f"{name}, p={p} m={m}{how}: {error}") from error


def programs_train(bench: Bench):
    """Two stages of two chunks train as one device."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), n_layers=4)
    layout = dict(pp=2, cp=1, tp=1, schedule="interleaved", chunks=2)
    training.equal_to_one_device(bench, "step06_pipeline", 2, base, layout)


# --- task 5: backward in two parts -----------------------------------------------------------------------------------


def parts_on_rank(seed: int, n: int, s: int, h: int, wide: int) -> dict:
    """Two backwards through split layers: what is there before W, and after; with tokens gathered over n ranks."""
    group = Mesh({"dp": 1, "tp": dist.get_world_size()}, CPU, Ledger())["tp"]
    store, found = step06.WeightGradStore(), {}
    linear = nn.Linear(h, wide, bias=False)
    linear.weight = nn.Parameter(numbers(seed, "w", wide, h))
    frozen = nn.Parameter(numbers(seed, "frozen", wide, h), requires_grad=False)
    trained = nn.Parameter(numbers(seed, "trained", wide, h))
    popped = []
    for i in range(2):
        x = numbers(seed, f"x{i}", 1, s, h).requires_grad_()
        step06.split_linear(linear, store, x).backward(numbers(seed, f"dy{i}", 1, s, wide))
        part = numbers(seed, f"part{i}", n, 1, s, h)[group.rank].clone().requires_grad_()
        ys = step06.SplitFunction.apply(part, group, gather_tokens, scatter_tokens, store, trained, frozen)
        found[f"output {i} of the gathered layers"] = list(ys)
        torch.autograd.backward(ys, [numbers(seed, f"dz{i}{j}", 1, n * s, wide) for j in range(2)])
        found |= {f"dx {i}": x.grad, f"dx {i} of the gathered layers": part.grad}
        popped.append(store.pop())
    found["closures that wait, by micro-batch"] = [len(one) for one in popped]
    found["weight gradients before W"] = [linear.weight.grad is not None, trained.grad is not None]
    for i, closures in enumerate(popped):
        for closure in closures:
            closure()
        found[f"weight gradient after W of {i}"] = linear.weight.grad.clone()
        found[f"weight gradient of the gathered layer after W of {i}"] = trained.grad.clone()
    found["what waits after all"] = len(store.pop())
    return found | {"a gradient of the frozen weight": frozen.grad is not None}


def parts_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, tokens, dim, width) of task 5."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((2, 3)), draw.randint(2, 5), draw.randint(2, 6), draw.randint(2, 6)


def parts_expected(seed: int, n: int, s: int, h: int, wide: int) -> Any:
    """By rank: outputs and input gradients; weight gradients; what waits."""
    w, frozen, trained = (numbers(seed, name, wide, h) for name in ("w", "frozen", "trained"))
    outputs, weights, total, gathered = {}, {}, 0, 0
    for i in range(2):
        x, dy = numbers(seed, f"x{i}", 1, s, h), numbers(seed, f"dy{i}", 1, s, wide)
        full = torch.cat(list(numbers(seed, f"part{i}", n, 1, s, h)), 1)
        dz = [numbers(seed, f"dz{i}{j}", 1, n * s, wide) for j in range(2)]
        outputs[f"output {i} of the gathered layers"] = [F.linear(full, trained), F.linear(full, frozen)]
        outputs[f"dx {i}"], outputs[f"dx {i} of the gathered layers"] = dy @ w, n * (dz[0] @ trained + dz[1] @ frozen)
        total, gathered = total + dy[0].T @ x[0], gathered + dz[0][0].T @ full[0]
        weights[f"weight gradient after W of {i}"] = total
        weights[f"weight gradient of the gathered layer after W of {i}"] = gathered

    def local(rank: int) -> dict:
        own = slice(rank * s, (rank + 1) * s)
        return {key: value[:, own] if "dx" in key and "gathered" in key else value for key, value in outputs.items()}

    return local, weights


def parts_inputs(bench: Bench):
    """Outputs and dx, at once."""
    case = parts_case(bench)
    bench.same(bench.ranks(case[1], parts_on_rank, *case), parts_expected(*case)[0])


def parts_weights(bench: Bench):
    """dW, once W has run, micro-batch by micro-batch."""
    case = parts_case(bench)
    bench.same(bench.ranks(case[1], parts_on_rank, *case), lambda r: parts_expected(*case)[1])


def parts_wait(bench: Bench):
    """Nothing before W, nothing twice, nothing for what is frozen."""
    case = parts_case(bench)
    expected: dict[str, Any] = {"closures that wait, by micro-batch": [2, 2], "what waits after all": 0}
    expected |= {"weight gradients before W": [False, False], "a gradient of the frozen weight": False}
    bench.same(bench.ranks(case[1], parts_on_rank, *case), lambda r: expected)


def parts_train(bench: Bench):
    """ZB-H1 over two stages of two tensor-parallel ranks trains as one device."""
    base = RUN | dict(seed=bench.draws().randrange(1000))
    layout = dict(pp=2, cp=1, tp=2, schedule="zb-h1")
    training.equal_to_one_device(bench, "step06_pipeline", 4, base, layout)


# --- the file as it stands -------------------------------------------------------------------------------------------


def picture_run() -> dict:
    """Runs on every rank: losses, bytes sent in the last step, and the lists of ZB-H1 for the timeline."""
    return training.pictured("step06_pipeline", json.dumps(RUN | WHOLE[1])) | dict(
        lists=[lists_on_rank(name, 4, 8, CHUNKS.get(name, 1)) for name in FUNCTIONS]
    )


def timelines(runs: list[dict]) -> Any:
    """A figure: the student's three schedules, simulated with F = B = W."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(10, 6), sharex=True, layout="constrained")
    colours = {"F": "tab:blue", "B": "tab:orange", "W": "tab:green", "BW": "tab:red"}
    for axis, name, rows in zip(axes, FUNCTIONS, runs[0]["lists"], strict=True):
        lists = [[Action(*action) for action in row] for row in rows]
        spans = simulate(lists, place_stages(name, 4, CHUNKS.get(name, 1)), UNIT_COSTS)
        unit = CHUNKS.get(name, 1)
        for rank, row in enumerate(spans):
            for action, start, end in row:
                axis.barh(rank, (end - start) / unit, left=start / unit, color=colours[action.kind], edgecolor="white")
        axis.set(ylabel="rank", title=f"{name}: idle {idle_fraction(spans):.3f} of the time (4 ranks, 8 micro-batches)")
        axis.invert_yaxis()
    axes[-1].set_xlabel("time, in forwards of a rank's layers; F blue, B orange, W green, B and W in one red")
    return figure


PICTURES = [timelines]
