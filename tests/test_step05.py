"""Step 5, context parallelism: step05_cp_ring.py.

Expected outputs and gradients are those of torch's attention to a whole sequence, in fp64."""

import time
import weakref
from collections.abc import Callable, Iterator
from itertools import accumulate, groupby
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import step05_cp_ring as step
from common import UserError
from common.comm import Group, Mesh
from common.model import attend
from tests.equal import alive, close, decoder, draw, equals_step1
from tests.tape import Tape

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = cases(
    "kind, wide, bound", [("fp64", FP64, 1e-10), ("large", FP64, 1e-10), ("bf16", FP32, 1e-6)]
)


def inputs(
    heads: int, kv_heads: int, queries: int, keys: int, kind: str = "fp64", seed: int = 0
) -> list[Tensor]:
    """Random q, k, v and do [2, heads, length, 16]. "large": scores near 900; e^900 is inf."""
    q = draw("q", seed, 2, heads, queries, 16)
    k = draw("k", seed, 2, kv_heads, keys, 16)
    v = draw("v", seed, 2, kv_heads, keys, 16)
    do = draw("do", seed, 2, heads, queries, 16)
    if kind == "large":
        q[..., 0] = 60.0
        k[..., 0] = 60.0
    dtype = BF16 if kind == "bf16" else FP64
    return [x.to(dtype) for x in (q, k, v, do)]


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """The definition, in fp64: o and lse. If `causal`, the queries are the last tokens."""
    n = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.repeat_interleave(n, 1).mT / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones_like(scores).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(later.bool(), -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(n, 1), scores.logsumexp(-1)


def whole_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """o, dq, dk and dv of causal attention in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o, _ = attention(q, k, v, True)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())]


def close_each(names: str, found: Any, expected: Any, n: int = 1, bound: float = 1e-10):
    """Compare several values with what is expected. `names` has a word for each."""
    for name, x, y in zip(names.split(), found, expected, strict=True):
        close(x, y, name, n, bound)


# --- Parts of a softmax ---------------------------------------------------------------------------


@task("parts", 4)
@KINDS
@cases("keys, causal", [(5, True), (7, False)])
def test_part_attention(kind, wide, bound, keys, causal):
    """Output and log-sum-exp of five queries over these keys, in fp32 or wider."""
    q, k, v, _ = inputs(6, 3, 5, keys, kind)
    found = step.part_attention(q, k, v, causal)
    close_each("o lse", found, attention(q, k, v, causal), 2, bound)
    close({x.dtype for x in found}, {wide}, "dtypes of o and lse")


@task("parts", 4)
@cases("dtype, offset", [(FP64, 0.0), (FP64, 900.0), (BF16, 0.0)])
def test_merge(dtype, offset):
    """Three parts, from an empty start: the average of their values by weight, in place."""
    values = draw("values", 0, 3, 2, 4, 5, 8).to(dtype)
    weights = draw("weights", 0, 3, 2, 4, 5).exp()
    part_lse = weights.log() + offset
    o = torch.zeros_like(values[0], dtype=FP64)
    lse = torch.full_like(part_lse[0], -torch.inf)
    for i in range(3):
        step.merge(o, lse, values[i], part_lse[i])
    shares = weights / weights.sum(0)
    close(o, (shares[..., None] * values).sum(0), "o")
    close(lse, weights.sum(0).log() + offset, "lse")


@task("gradients of a part", 5)
@KINDS
def test_part_gradients(kind, wide, bound):
    """The parts' dq add up, and each part has its own dk and dv; all in fp32 or wider."""
    q, k, v, do = inputs(6, 3, 5, 12, kind)
    o, lse = (x.to(wide) for x in attention(q, k, v, True))
    k0, k1 = k.split([7, 5], 2)
    v0, v1 = v.split([7, 5], 2)
    dq0, dk0, dv0 = step.part_gradients(do, q, k0, v0, o, lse, False)
    dq1, dk1, dv1 = step.part_gradients(do, q, k1, v1, o, lse, True)
    found = [dq0 + dq1, torch.cat((dk0, dk1), 2), torch.cat((dv0, dv1), 2)]
    _, *expected = whole_attention(q, k, v, do)
    close_each("dq dk dv", found, expected, 2, bound)
    close({x.dtype for x in found}, {wide}, "dtypes of dq, dk and dv")


# --- Who has which tokens, and attends to which ---------------------------------------------------

POSITIONS = [
    # positions of twelve tokens as hexadecimal digits, by rank; a length that does not divide
    (step.ordered_positions, ["0123", "4567", "89ab"], 13),
    (step.zigzag_positions, ["0123456789ab"], 13),
    (step.zigzag_positions, ["0129ab", "345678"], 14),
    (step.zigzag_positions, ["01ab", "2389", "4567"], 15),
]


@task("zigzag", 2)
@cases("positions, expected, refused", POSITIONS)
def test_positions(positions, expected, refused):
    """In order, rank r has shard r of n; in zigzag, chunks r and 2n-1-r of 2n, in this order."""
    n = len(expected)
    for rank, digits in enumerate(expected):
        found = positions(12, rank, n).tolist()
        close(found, [int(digit, 16) for digit in digits], f"rank {rank} of {n}")
    with pytest.raises(UserError):
        positions(refused, 0, n)


def in_order(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens, if ranks have consecutive ones."""
    return torch.arange(n * length).view(n, length)[rank]


def zigzag(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens in zigzag."""
    return torch.arange(n * length).view(2 * n, -1)[[rank, -1 - rank]].flatten()


def count_pairs(visible: Callable, place: Callable, n: int) -> list[float]:
    """How many pairs of a query and a key each of n ranks computes.

    Require that each query attends once to its own key and each earlier one, and to no later key.
    """
    pairs = torch.zeros(6 * n, 6 * n)
    work = [0.0] * n
    for rank, source in np.ndindex(n, n):
        for queries, keys, causal in visible(rank, source, 6):
            rows = place(n, rank, 6)[queries]
            columns = place(n, source, 6)[keys]
            block = torch.ones(len(rows), len(columns))
            if causal:
                block = block.tril()
            pairs[rows[:, None], columns] += block
            work[rank] += block.sum().item()
    close(pairs, torch.ones_like(pairs).tril(), "how often each query (row) attends to each key")
    return work


@task("zigzag", 2)
@cases("n", [1, 2, 3])
def test_ordered_visible(n):
    """Each query attends once to its own key and each earlier one, and to no later key."""
    count_pairs(step.ordered_visible, in_order, n)


@task("zigzag", 4)
@cases("n", [1, 2, 3, 5])
def test_zigzag_visible(n):
    """As in order, and all ranks compute equally many pairs of a query and a key."""
    work = count_pairs(step.zigzag_visible, zigzag, n)
    close(work, [sum(work) / n] * n, "pairs that each rank computes")


# --- The ring -------------------------------------------------------------------------------------


ALL_RANKS = [[0, 1, 2, 3]]
RINGS = cases(
    # groups need not have neighbours, nor begin with rank 0, and may have one rank
    "groups, heads, kv_heads, visible, place",
    [
        (ALL_RANKS, 4, 2, step.zigzag_visible, zigzag),
        ([[0, 2], [1, 3]], 6, 3, step.zigzag_visible, zigzag),
        ([[0], [1, 2, 3]], 4, 1, step.ordered_visible, in_order),
    ],
    ids=["zigzag on all ranks", "zigzag on 0 2 and 1 3", "in order on 0 and 1 2 3"],
)


def shard_inputs(
    groups: list,
    heads: int,
    kv_heads: int,
    place: Callable = zigzag,
    length: int = 8,
    kind: str = "fp64",
) -> tuple[Group, list[Tensor], list[Tensor]]:
    """This rank's group; its shards of q, k, v and do, and of the right o, dq, dk and dv."""
    mesh = Mesh(dp=4)
    for members in groups:
        mesh.add_groups("cp", np.array([members]), queue="gradients")
        if mesh.rank in members:
            seed = members[0]
    group = mesh["cp"]
    total = group.size * length
    whole = inputs(heads, kv_heads, total, total, kind, seed)
    positions = place(group.size, group.rank, length)
    own = [x[:, :, positions].requires_grad_() for x in whole]
    expected = [x[:, :, positions] for x in whole_attention(*whole)]
    return group, own, expected


def forward(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
    """`ring_attention`, in which q, k, v and o are [batch, heads, length, size]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return step.ring_attention(q, k, v, *more).transpose(1, 2)


def run_ring(own: list[Tensor], *more: Any) -> tuple[list[Tensor], Tape, Tape]:
    """Forward and backward -> [o, dq, dk, dv], and a tape of each."""
    *qkv, do = own
    with Tape() as in_forward:
        o = forward(*qkv, *more)
    with Tape() as in_backward:
        grads = torch.autograd.grad(o, qkv, do)
    return [o, *grads], in_forward, in_backward


@RINGS
@ranks(4)
@task("ring", 4)
def test_ring_forward(groups, heads, kv_heads, visible, place):
    """Each rank gets causal attention of its own queries to the keys of all ranks of its group."""
    group, own, expected = shard_inputs(groups, heads, kv_heads, place)
    with Tape() as tape:
        o = forward(*own[:3], group, visible)
    close(o, expected[0], "o", group.size)
    close(tape.left, [], "messages that were never waited for")
    close(tape.sent, (group.size - 1) * 2 * own[1].nbytes, "bytes: k and v, n-1 times")


@RINGS
@ranks(4)
@task("ring", 5)
def test_ring_backward(groups, heads, kv_heads, visible, place):
    """Each rank gets dq, dk and dv of its own tokens; other ranks' queries add to dk and dv."""
    group, own, expected = shard_inputs(groups, heads, kv_heads, place)
    found, _, tape = run_ring(own, group, visible)
    close_each("o dq dk dv", found, expected, group.size)
    close(tape.left, [], "messages that were never waited for")


@ranks(4)
@task("ring", 3)
def test_ring_of_bf16():
    """Sums are in fp32: errors are less than 1.3 times those of rounding once to bf16."""
    group, own, expected = shard_inputs(ALL_RANKS, 4, 2, length=32, kind="bf16")
    found, _, _ = run_ring(own, group)
    close({x.dtype for x in found}, {BF16}, "dtypes of o, dq, dk and dv")
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        errors = torch.stack((x - y, y.bfloat16() - y)).square().flatten(1).sum(1)
        dist.all_reduce(errors)  # over the tokens of all ranks
        ratio = (errors[0] / errors[1]).sqrt()
        assert ratio < 1.3, f"{name}: {ratio:.2g} roundings off; is a sum in 16 bits (1.5 to 2)?"


@ranks(4)
@task("ring", 2)
def test_messages_hide_behind_matmuls():
    """They start before a hop's matmuls, are waited for after them; dk and dv travel in fp32."""
    group, own, _ = shard_inputs(ALL_RANKS, 4, 2, kind="bf16")
    _, in_forward, in_backward = run_ring(own, group)
    letters = [letter for letter, _ in groupby(event[0] for event in in_forward.events)]
    close("".join(letters), "smwsmwsmwm", "starts, matmuls and waits of four hops")
    sent = [nbytes for name, nbytes in in_backward.started if name == "send"]
    kv = 2 * own[1].nbytes
    close(sent, [kv, 2 * kv] * 3 + [2 * kv], "bytes of messages in backward")
    events = in_backward.events
    in_flight = accumulate(x.startswith("start") - x.startswith("wait") for x in events)
    idle = [x for x, n in zip(events, in_flight, strict=True) if x == "matmul" and n == 0]
    close(idle, [], "matmuls in backward while no message is in flight")


@ranks(4)
@task("ring", 1)
def test_law_of_work():
    """All ranks compute one product of all pairs in hop 0, and of half of them in later hops."""
    group, own, _ = shard_inputs(ALL_RANKS, 4, 2)
    with FlopCounterMode(display=False) as counter:
        run_ring(own, group)
    # 2 FLOPs for each of 2 sequences x 4 heads x size 16, and of 8 x 8 pairs x (1 + 3/2)
    product = 2 * 128 * 160
    close(counter.get_total_flops(), 7 * product, "FLOPs: 2 products forward, 5 backward")


def alive_soon(refs: list, most: int) -> int:
    """How many are alive. If more than `most`, wait: gloo's thread frees what it has sent a little
    later.
    """
    for _ in range(50):
        if alive(refs) > most:
            time.sleep(0.1)
    return alive(refs)


@ranks(4)
def test_k_and_v_of_earlier_hops_are_freed():
    """In a hop a rank holds its own k and v, and those of the hop; after backward, none."""
    group, (q, k, v, do), _ = shard_inputs(ALL_RANKS, 4, 4)
    travel = step.travel
    travelled = []
    counts = []

    def note(kv: Tensor, group: Group) -> Iterator[tuple]:
        travelled.clear()
        for source, source_kv in travel(kv, group):
            travelled.append(weakref.ref(source_kv.untyped_storage()))
            yield source, source_kv

    def visible(*hop: int) -> list[step.Part]:  # is called at the start of each hop
        counts.append(alive_soon(travelled, most=2))
        return step.zigzag_visible(*hop)

    with mock.patch.object(step, "travel", note):
        torch.autograd.grad(forward(q, k, v, group, visible), (q, k, v), do)
    close(counts, [1, 2, 2, 2] * 2, "pairs of k and v that are alive in the hops")
    close(alive_soon(travelled, most=0), 0, "after backward")


# --- The model and the loop -----------------------------------------------------------------------


@ranks(1)
@task("loop", 2)
def test_without_cp_a_layer_keeps_its_attention():
    """Every position is this rank's, and no layer pays for the ring."""
    model = decoder()
    positions = step.shard_context(model, Mesh(dp=1, cp=1, tp=1), step.Config())
    close(positions, torch.arange(6), "positions")
    close(model.model.layers["1"].self_attn.attend, attend, "what a layer calls")


@ranks(4)
@task("loop", 1)
def test_sp_must_divide_what_cp_leaves():
    """Two ranks of tp cannot share the three tokens that cp 2 leaves of six."""
    mesh = Mesh(dp=1, cp=2, tp=2)
    with pytest.raises(UserError, match="--tp 2 must divide the 3 tokens"):
        step.shard_context(decoder(), mesh, step.Config(cp=2, tp=2, cp_mode="ordered"))


@task("loop", 3)
def test_own_tokens():
    """Sequences 2 and 3, at the positions 0, 1, 6, 7 of 8. Targets go with their tokens."""
    tokens = torch.arange(48).view(6, 8)
    found = step.own_tokens(tokens, tokens + 1, slice(2, 4), torch.tensor([0, 1, 6, 7]))
    expected = torch.tensor([[16, 17, 22, 23], [24, 25, 30, 31]])
    close_each("tokens targets", found, (expected, expected + 1))


# Micro-batches of 2, 2 and 1 sequences on each of two ranks of dp; or of 4, 4 and 2. All rows have
# 4 query heads and 2 kv heads.
TIED = dict(global_batch_size=10, micro_batch_size=2, tied=True)
LARGER = dict(global_batch_size=10, micro_batch_size=4)
LAYOUTS = [
    (LARGER, dict(cp=2, tp=2, sp=False)),
    (LARGER, dict(cp=4, cp_mode="ordered", zero="1")),
    (TIED, dict(cp=2, zero="3")),  # dp is 2
    (LARGER | dict(tied=True), dict(cp=2, tp=2, zero="2", recompute="full")),
]


@task("loop", 5)
@cases("base, layout", LAYOUTS)
def test_cp_trains_to_step_1s_numbers(pools, base, layout):
    """Over dp, tp with and without SP, ZeRO over dp x cp, and with recomputation."""
    equals_step1(pools, 4, step.__name__, base, **layout)
