"""Step 6, pipelines: the order of work (common/schedules.py), stages and messages
(step06_pipeline.py).
"""

import re
import runpy
import sys
import weakref
from collections import Counter, deque
from functools import partial
from itertools import accumulate, groupby, product
from unittest import mock

import pytest
import torch
from torch import Tensor

import step06_pipeline as step
from common import UserError, schedules
from common.comm import Mesh
from common.initial import materialize
from common.layout import record_of
from common.model import IGNORE, Decoder
from common.schedules import COSTS, Action, add_messages, round_robin, simulate
from step04_tp_sp import sum_partial_gradients
from tests.equal import alive, close, close_gradients, decoder, draw, equals_step1
from tests.tape import Tape

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize

TIED = "model.embed_tokens.weight"
ORDERS = {  # by --schedule
    "afab": schedules.afab,
    "1f1b": schedules.one_f_one_b,
    "interleaved": schedules.interleaved,
}


def acts(text: str) -> list[Action]:
    """Parse actions: "F1.2" is the forward of micro-batch 1 through stage 2."""
    return [Action(word[0], int(word[1]), int(word[3])) for word in text.split()]


def sizes_of(name: str) -> list[tuple[int, int, int]]:
    """(p, m, v) on which a schedule is tried: interleaved takes v > 1, and full rounds of p."""
    chunks = (2, 3) if name == "interleaved" else (1,)
    sizes = product((1, 2, 3, 4), (1, 2, 5, 8, 12), chunks)
    return [(p, m, v) for p, m, v in sizes if v == 1 or m % p == 0]


def lists_of(name: str, p: int, m: int, v: int = 1) -> list[list[Action]]:
    """The actions of each rank."""
    return [ORDERS[name](p, m, v, rank) for rank in range(p)]


def in_flight(actions: list[Action]) -> int:
    """The most forwards of a list whose backward has not come yet."""
    return max(accumulate(1 if action.kind == "F" else -1 for action in actions))


# --- Orders of work -------------------------------------------------------------------------------


@task("orders", 2)
def test_the_command_draws_the_docstrings_picture(capsys):
    """`python -m common.schedules 4 6 1` draws AFAB and 1F1B as step 6's docstring shows them."""
    shown = re.findall(r"^    rank \d   ([0-9a-f.]+)   ([0-9a-f.]+)", step.__doc__, re.MULTILINE)
    afab = [left for left, _ in shown]
    one_f_one_b = [right for _, right in shown]
    with mock.patch.object(sys, "argv", ["-m", "4", "6", "1"]):
        runpy.run_path(schedules.__file__, run_name="__main__")
    expected = ["afab", *afab, "1f1b", *one_f_one_b]
    close(capsys.readouterr().out.split(), expected, "the command draws")


@task("orders", 3)
def test_interleaved_order_of_two_ranks():
    """For p = 2, m = 4, v = 2 the lists are these; v > 1 needs full rounds of p micro-batches."""
    first = "F0.0 F1.0 F0.2 F1.2  F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0  B2.2 B3.2 B2.0 B3.0"
    second = "F0.1 F1.1  F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3  B2.1 B3.1"
    close(lists_of("interleaved", 2, 4, 2), [acts(first), acts(second)], "the lists")
    with pytest.raises(UserError, match="--pp 4 must divide the 6 micro-batches"):
        schedules.interleaved(4, 6, 2, 0)


def most_in_flight(name: str, p: int, rank: int, m: int, v: int) -> int:
    """The law: how many forwards a rank has done, at most, whose backward is still to come."""
    if name == "afab":
        return m
    if v == 1:
        return min(m, p - rank)
    return min(v * m, (v - 1) * p + 2 * (p - rank) - 1)


@task("orders", 3)
@cases("name", ORDERS)
def test_law_of_memory(name):
    """The most forwards in flight on rank r are m in AFAB, min(m, p - r) in 1F1B; interleaved,
    min(v m, (v-1) p + 2 (p-r) - 1).
    """
    for p, m, v in sizes_of(name):
        for rank, actions in enumerate(lists_of(name, p, m, v)):
            most = most_in_flight(name, p, rank, m, v)
            close(in_flight(actions), most, f"p={p} m={m} v={v}, rank {rank}: in flight")


@task("orders", 1)
@cases("name", ORDERS)
def test_each_action_comes_once(name):
    """A list has F and B of each micro-batch, through the rank's stages r, r + p, r + 2p, ..."""
    for p, m, v in sizes_of(name):
        for rank, actions in enumerate(lists_of(name, p, m, v)):
            expected = product("FB", range(m), range(rank, p * v, p))
            close(sorted(actions), sorted(expected), f"p={p} m={m} v={v}, rank {rank}: actions")


@task("orders", 2)
@cases("name", ORDERS)
def test_law_of_the_bubble(name):
    """A training step takes v m + p - 1 forwards and backwards, of which v m are work."""
    for p, m, v in sizes_of(name):
        spans = simulate(lists_of(name, p, m, v), round_robin(p, v), COSTS)
        close(spans[-1].end, 3 * (v * m + p - 1), f"p={p} m={m} v={v}: time")


def test_simulate_gives_times_worked_out_by_hand():
    """1F1B of two micro-batches on two ranks, with F = 2, B = 3 and messages of 1. F0.1 is the
    forward of micro-batch 0 through stage 1. Digits are forwards, letters backwards:

        rank 0    0011.....aaa..bbb
        rank 1    ...00aaa11bbb....
    """
    spans = simulate(lists_of("1f1b", 2, 2), round_robin(2, 1), dict(F=2, B=3), message=1)
    in_order_of_ends = acts("F0.0 F1.0 F0.1 B0.1 F1.1 B0.0 B1.1 B1.0")
    starts = [0, 2, 3, 5, 8, 9, 10, 14]
    found = [(span.action, span.start) for span in spans]
    close(found, list(zip(in_order_of_ends, starts, strict=True)), "(action, start)")


@cases(
    "rank_0, rank_1", [("F0.0 B0.0 F1.0 B1.0", "F1.1 B1.1 F0.1 B0.1"), ("F0.0 B0.0", "B0.1 F0.1")]
)
def test_simulate_refuses_a_deadlock(rank_0, rank_1):
    """The example of `simulate` (F1.0: micro-batch 1, stage 0), and a B before its own F."""
    with pytest.raises(ValueError, match="wait for ever"):
        simulate([acts(rank_0), acts(rank_1)], round_robin(2, 1), COSTS)


# --- What each rank keeps -------------------------------------------------------------------------

HEAD = ["model.norm.weight", "lm_head.weight"]
KEPT = [
    # A rank's layers, of 5; which other parameters it has; and if embedding and head are tied, on
    # how many ranks that matrix is
    ("02", [TIED], 2),
    ("13", [], None),
    ("34", HEAD, 2),
    ("04", [TIED, *HEAD], 1),
]


@task("keep", 4)
@cases("tied", [False, True])
@cases("layers, others, copies", KEPT)
def test_keep_layers(tied, layers, others, copies):
    """A rank keeps its layers, with layer 0 the embedding, and with the last one the head."""
    kept = {int(layer) for layer in layers}
    mesh = mock.MagicMock()  # of three ranks, without processes
    mesh["pp"].size = 3
    model = decoder(partial(step.keep_layers, kept=kept, mesh=mesh), tied=tied, n_layers=5)
    close("".join(model.model.layers), layers, "layers")
    found = {name for name, _ in model.named_parameters() if "layers" not in name}
    if tied:
        others = [TIED if name == "lm_head.weight" else name for name in others]
    close(found, set(others), "other parameters")
    close(model.lm_head is None, "4" not in layers, "the rank has no head")
    if tied and copies:
        record = record_of(model.get_parameter(TIED))
        close(record.partial_over, "ends" if copies == 2 else None, "the gradient is partial over")


@ranks(3)
@task("keep", 3)
@cases("rows, sent", [(5, 160), (0, 0)])  # 160: 5 x 4 numbers of fp64
def test_a_tied_matrix_is_summed_over_the_ends(rows, sent):
    """The first rank and the last add up a tied matrix's gradients; a shard may be empty."""
    mesh = Mesh(pp=3)
    kept = [{0, 1}, {2}, {3, 4}][mesh.rank]
    model = decoder(partial(step.keep_layers, kept=kept, mesh=mesh), tied=True, n_layers=5)
    terms = [draw("embedding", rank, rows, 4) for rank in range(3)]
    # Rank 1, the middle stage, does not hold the matrix
    gradients = {} if mesh.rank == 1 else {TIED: terms[mesh.rank].clone()}
    with Tape() as tape:
        sum_partial_gradients(model, gradients, mesh)
    for gradient in gradients.values():
        close(gradient, terms[0] + terms[2], "the gradient", 2)
    close(tape.sent, sent if gradients else 0, "bytes sent")
    close(tape.left, [], "messages that were never waited for")


def test_too_many_stages_are_refused():
    """Fewer layers than stages: one line that names --pp."""
    model = decoder(n_layers=4)
    mesh = dict(pp=mock.Mock(size=5, rank=0))
    with pytest.raises(UserError, match="--pp: 4 layers for 5 stages"):
        step.Pipeline(step.Config(), model, mesh, torch.arange(6))


# --- Stages ---------------------------------------------------------------------------------------


def batch(m: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Tokens, targets and number of targets of m micro-batches of 2 sequences; the last has 1."""
    tokens = torch.arange((2 * m - 1) * 6).view(-1, 6) * 7 % 13
    targets = tokens.flip(1).where(tokens % 3 > 0, IGNORE)
    return list(tokens.split(2)), list(targets.split(2)), (targets != IGNORE).sum()


POSITIONS = torch.tensor([10, 8, 6, 4, 2, 0])


def on_one_device(m: int, n_layers: int) -> tuple[Tensor, Decoder]:
    """The loss of the whole model, which has the gradients of m micro-batches."""
    xs, ys, n_targets = batch(m)
    model = decoder(n_layers=n_layers)
    loss = sum(model(x, y, POSITIONS) for x, y in zip(xs, ys, strict=True)) / n_targets
    loss.backward()
    return loss, model


@task("stage", 2)
def test_stages_in_turn_are_the_model():
    """Three stages compute the model's loss bit for bit, at positions that bf16 cannot hold."""
    model = decoder(n_layers=4).to(torch.bfloat16)
    xs, ys, _ = batch(2)
    positions = POSITIONS * 301 + 999
    x = xs[0]
    for number, layers in enumerate([range(0, 1), range(1, 3), range(3, 4)]):
        x = step.Stage(model, layers, positions, number).compute_output(x, ys[0])
    close(x, model(xs[0], ys[0], positions), "the sum of the losses", bound=0.0)


@task("stage", 3)
def test_a_stage_passes_gradients_on_and_frees_its_output():
    """A stage's backward returns dx, and adds to the weights' gradients. y's memory is free as soon
    as y is sent, before backward.
    """
    model = decoder(n_layers=2)
    first = step.Stage(model, range(0, 1), POSITIONS, 0)
    last = step.Stage(model, range(1, 2), POSITIONS, 1)
    for stage in (first, last):
        stage.begin(*batch(2))
    memory = []
    for i in range(2):
        y = first.forward(i, None)
        memory.append(weakref.ref(y.untyped_storage()))
        close(y.requires_grad, False, "the output is detached")
        last.forward(i, y.clone())
        del y
    close(alive(memory), 0, "outputs in memory, once they are sent")
    for i in range(2):
        dx = last.backward(i, None)
        close(first.backward(i, dx), None, "the first stage returns no dx")
    _, whole = on_one_device(2, n_layers=2)
    close_gradients(model, whole)
    close((len(first.graphs), len(last.graphs)), (0, 0), "graphs that stay")


# --- Messages -------------------------------------------------------------------------------------


def require_no_deadlock(messages: list[list[Action]]):
    """Play all ranks, each of which waits for one message after another. A message passes when both
    its ends have begun: sends block until they are received.
    """
    queues = [deque(own) for own in messages]
    while any(queues):
        begun = Counter(queue[0] for queue in queues if queue)
        passed = {message for message, ends in begun.items() if ends == 2}
        assert passed, f"deadlock: the ranks wait for {list(begun)}"
        for queue in queues:
            if queue and queue[0] in passed:
                queue.popleft()


@task("programs", 2)
def test_add_messages_of_its_docstrings_example():
    """The whole program of rank 1 of 2, interleaved with 2 micro-batches. (The docstring shows how
    it begins.)
    """
    text = """
        receive F0.1, receive F1.1, compute F0.1, send F0.2, receive F0.3, compute F1.1, send F1.2,
        receive F1.3, compute F0.3, compute B0.3, send B0.2, compute F1.3, receive B0.1,
        compute B1.3, send B1.2, receive B1.1, compute B0.1, send B0.0, compute B1.1, send B1.0"""
    expected = []
    for line in text.split(","):
        verb, action = line.split()
        expected.append((verb, *acts(action), None if verb == "compute" else 0))
    programs = add_messages(lists_of("interleaved", 2, 2, 2), round_robin(2, 2), COSTS)
    close(programs[1], expected, "the program")


@task("programs", 3)
@cases("name", ORDERS)
def test_programs_run_their_lists_without_deadlock(name):
    """For all sizes, even if sends block."""
    for p, m, v in sizes_of(name):
        lists = lists_of(name, p, m, v)
        programs = add_messages(lists, round_robin(p, v), COSTS)
        messages = []
        for program, actions in zip(programs, lists, strict=True):
            computed = [line.action for line in program if line.verb == "compute"]
            close(computed, actions, f"p={p} m={m} v={v}: order of work")
            messages.append([line.action for line in program if line.verb != "compute"])
        require_no_deadlock(messages)


# --- A whole step on all ranks --------------------------------------------------------------------

RUNS = [  # ranks; --schedule; ranks of pp; micro-batches; stages on a rank; layers
    (3, "afab", 3, 4, 1, 5),
    (3, "1f1b", 3, 5, 1, 5),
    (4, "interleaved", 2, 4, 2, 7),
    (3, "1f1b", 3, 1, 1, 5),
    (4, "1f1b", 2, 2, 1, 5),
    (1, "interleaved", 1, 3, 3, 7),
]
CASES = [pytest.param(*row, marks=ranks(row[0])) for row in RUNS]
A_CASE_OF_EACH = CASES[:3]  # of the three schedules


def pipeline_of(
    n: int, schedule: str, p: int, m: int, v: int, layers: int
) -> tuple[step.Pipeline, Decoder]:
    """This rank's pipeline, and its part of a model of `layers` layers, in fp64."""
    mesh = Mesh(pp=p, dp=n // p)
    sequences = 2 * m * n // p
    config = step.Config(
        pp=p, schedule=schedule, chunks=v, global_batch_size=sequences, micro_batch_size=2
    )
    model = decoder(dtype=None, n_layers=layers)
    pipeline = step.SCHEDULES[schedule](config, model, mesh, POSITIONS)
    materialize(model, 0, torch.device("cpu"), torch.float64)
    return pipeline, model


@task("messages", 5)
@cases("n, schedule, p, m, v, layers", CASES)
def test_a_step_equals_one_device(n, schedule, p, m, v, layers):
    """The last rank's loss, and each rank's gradients, are those of the whole model."""
    pipeline, model = pipeline_of(n, schedule, p, m, v, layers)
    found = pipeline.step(*batch(m))
    loss, whole = on_one_device(m, layers)
    if pipeline.group.rank < p - 1:
        loss = 0 * loss
    close(found, loss, "the loss, 0 except on the last rank", m)
    close_gradients(model, whole, m)


NEIGHBOURS = {  # of each rank's stages, on other ranks
    "afab": [1, 2, 1],
    "1f1b": [1, 2, 1],
    "interleaved": [1 + 2, 2 + 1],  # rank 0: stage 0 has one neighbour, stage 2 has two
}


@task("messages", 2)
@cases("n, schedule, p, m, v, layers", A_CASE_OF_EACH)
def test_each_x_and_dx_is_one_message(n, schedule, p, m, v, layers):
    """A rank sends [2, 6, 16] numbers of fp64, [1, 6, 16] for the last micro-batch, to each
    neighbour stage. Before the first message all ranks all-reduce (`first_contact`, for NCCL).
    """
    with Tape() as tape:
        pipeline, _ = pipeline_of(n, schedule, p, m, v, layers)
        pipeline.step(*batch(m))
    messages = [nbytes for name, nbytes in tape.started if name == "send"]
    to_a_neighbour = [2 * 6 * 16 * 8] * (m - 1) + [1 * 6 * 16 * 8]
    expected = to_a_neighbour * NEIGHBOURS[schedule][pipeline.group.rank]
    close(sorted(messages), sorted(expected), "bytes of all messages")
    close(tape.started[0][0], "allreduce", "the first call")
    close(tape.left, [], "calls that were never waited for")


@ranks(4)
@task("messages", 2)
def test_steady_1f1b_waits_once_for_a_send_and_a_receive():
    """The docstring's table: each of two ranks waits five times for four micro-batches."""
    pipeline, _ = pipeline_of(4, "1f1b", p=2, m=4, v=1, layers=2)
    with Tape() as tape:
        pipeline.step(*batch(4))
    words = [event.split()[0] for event in tape.events if event != "matmul"]
    found = [word for word, _ in groupby(words)]
    close(found, ["start", "wait"] * 5, "messages start together, and are waited for")


@task("messages", 4)
@cases("n, schedule, p, m, v, layers", A_CASE_OF_EACH)
def test_ranks_follow_their_lists(n, schedule, p, m, v, layers):
    """Ranks work in the order of their lists. (test_law_of_memory counts what is then in flight.)
    When a forward begins, at most one earlier output is alive.
    """
    pipeline, _ = pipeline_of(n, schedule, p, m, v, layers)
    forward = step.Stage.forward
    backward = step.Stage.backward
    done = []
    outputs = []
    waiting = []

    def note_forward(stage: step.Stage, i: int, x: Tensor | None) -> Tensor:
        done.append(Action("F", i, stage.number))
        waiting.append(alive(outputs))
        y = forward(stage, i, x)
        outputs.append(weakref.ref(y.untyped_storage()))
        return y

    def note_backward(stage: step.Stage, i: int, dy: Tensor | None) -> Tensor | None:
        done.append(Action("B", i, stage.number))
        return backward(stage, i, dy)

    with mock.patch.multiple(step.Stage, forward=note_forward, backward=note_backward):
        pipeline.step(*batch(m))
    close(done, lists_of(schedule, p, m, v)[pipeline.group.rank], "order of work")
    assert max(waiting) <= 1, f"{max(waiting)} outputs wait for a peer"
    close(alive(outputs), 0, "outputs that stay after the step")


UNEVEN = dict(tied=True, micro_batch_size=2)
LAYOUTS = [
    (4, UNEVEN | dict(global_batch_size=10), dict(pp=2)),  # micro-batches of 2, 2 and 1 sequences
    (
        4,
        UNEVEN | dict(n_layers=5, global_batch_size=14),
        dict(pp=2, zero="3", schedule="interleaved"),
    ),
    (4, dict(tied=True, micro_batch_size=5), dict(pp=2, tp=2, zero="0", sync="naive")),
    (4, dict(micro_batch_size=2), dict(pp=2, cp=2, zero="2")),
    (3, dict(recompute="full", micro_batch_size=5), dict(pp=3, zero="3", schedule="afab")),
]


@task("loop", 5)
@cases("n, base, layout", LAYOUTS)
def test_pp_trains_to_step_1s_numbers(pools, n, base, layout):
    """pp with dp, tp, cp, ZeRO, all schedules, tied weights, and recomputation."""
    equals_step1(pools, n, "step06_pipeline", base, **layout)
