"""Step 5, context parallelism: step05_cp_ring.py.

Expected outputs and gradients come from `attention`, the definition written out, of a whole
sequence, in fp64, and from autograd."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

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
from tests.equal import close, decoder, draw, equals_step1
from tests.tape import Live, Tape

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
KINDS = cases("kind, wide, bound", [("large", FP64, 1e-10), ("bf16", FP32, 1e-6)])


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
        scores += torch.full_like(scores, -torch.inf).triu(1 + k.shape[2] - q.shape[2])
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
@cases("offset", [0.0, 900.0])  # e^900 is inf
def test_merge(offset):
    """Three parts, from an empty start: the average of their values by weight, in place."""
    values = draw("values", 0, 3, 2, 4, 5, 8)
    weights = draw("weights", 0, 3, 2, 4, 5).exp()
    part_lse = weights.log() + offset
    o = torch.zeros_like(values[0])
    lse = torch.full_like(part_lse[0], -torch.inf)
    for i in range(3):
        step.merge(o, lse, values[i], part_lse[i])
    shares = weights / weights.sum(0)
    close(o, (shares[..., None] * values).sum(0), "o")
    close(lse, weights.sum(0).log() + offset, "lse")


@task("gradients of a part", 5)
@KINDS
def test_part_gradients(kind, wide, bound):
    """The parts' dq add up, and each part has its own dk and dv; all in fp32 or wider.

    Part 0 is the 7 keys before all queries, part 1 the 5 keys of the queries' own tokens, causal.
    """
    q, k, v, do = inputs(heads=6, kv_heads=3, queries=5, keys=12, kind=kind)
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
    (step.zigzag_positions, ["0129ab", "345678"], 14),  # a multiple of 2, but not of 4
    (step.zigzag_positions, ["01ab", "2389", "4567"], 15),
]


@task("zigzag", 2)
@cases("positions, expected, refused", POSITIONS)
def test_positions(positions, expected, refused):
    """In order, rank r has shard r of n; in zigzag, chunks r and 2n-1-r of 2n, in this order. A
    length that n, or in zigzag 2n, does not divide is refused.
    """
    n = len(expected)
    for rank, digits in enumerate(expected):
        found = positions(12, rank, n).tolist()
        close(found, [int(digit, 16) for digit in digits], f"rank {rank} of {n}")
    with pytest.raises(UserError):
        positions(refused, 0, n)


def require_causal(visible: Callable, positions: Callable, n: int) -> list[list[float]]:
    """Require that each query attends once to its own key and each earlier one, and to no later
    key. Returns how many pairs of a query and a key are computed, in each hop, by each of n ranks.
    """
    pairs = torch.zeros(6 * n, 6 * n)
    work = [[0.0] * n for _ in range(n)]
    for rank, source in np.ndindex(n, n):
        part = visible(rank, source, 6)
        if part is None:
            continue
        rows = positions(6 * n, rank, n)[part.queries]
        columns = positions(6 * n, source, n)[part.keys]
        block = torch.ones(len(rows), len(columns))
        if part.causal:
            block = block.tril()
        pairs[rows[:, None], columns] += block
        work[(rank - source) % n][rank] = block.sum().item()
    close(pairs, torch.ones_like(pairs).tril(), "how often each query (row) attends to each key")
    return work


@task("zigzag", 2)
@cases("n", [1, 2, 3])
def test_ordered_visible(n):
    """Each query attends once to its own key and each earlier one, and to no later key."""
    require_causal(step.ordered_visible, step.ordered_positions, n)


@task("zigzag", 4)
@cases("n", [1, 2, 3, 5])
def test_zigzag_visible(n):
    """The same, and in each hop all ranks compute equally many pairs: with 6 tokens each, 21 of
    their own keys (1 + 2 + ... + 6), then 18 (6 x 3).
    """
    work = require_causal(step.zigzag_visible, step.zigzag_positions, n)
    close(work, [[21.0] * n] + [[18.0] * n] * (n - 1), "pairs in each hop, of each rank")


# --- The ring -------------------------------------------------------------------------------------


ALL_RANKS = dict(dp=1, cp=4, tp=1)
RINGS = cases(
    # groups need not have neighbours, nor begin with rank 0, and may have one rank
    "sizes, heads, kv_heads, visible, positions",
    [
        (ALL_RANKS, 4, 2, step.zigzag_visible, step.zigzag_positions),
        (dict(dp=1, cp=2, tp=2), 6, 3, step.zigzag_visible, step.zigzag_positions),
        (ALL_RANKS, 4, 1, step.ordered_visible, step.ordered_positions),
        (dict(dp=4, cp=1, tp=1), 4, 2, step.zigzag_visible, step.zigzag_positions),
    ],
)


def own_inputs_and_expected(
    sizes: dict = ALL_RANKS,
    heads: int = 4,
    kv_heads: int = 2,
    positions: Callable = step.zigzag_positions,
    length: int = 8,
    kind: str = "fp64",
) -> tuple[Group, list[Tensor], list[Tensor]]:
    """This rank's group; its shards of q, k, v and do, and of the right o, dq, dk and dv."""
    mesh = Mesh(**sizes)
    group = mesh["cp"]
    total = group.size * length
    seed = mesh["dp"].rank + mesh["tp"].rank  # each group has other inputs
    whole = inputs(heads, kv_heads, total, total, kind, seed)
    tokens = positions(total, group.rank, group.size)
    own = [x[:, :, tokens].requires_grad_() for x in whole]
    expected = [x[:, :, tokens] for x in whole_attention(*whole)]
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
def test_ring_forward(sizes, heads, kv_heads, visible, positions):
    """Each rank gets causal attention of its own queries to the keys of all ranks of its group."""
    group, own, expected = own_inputs_and_expected(sizes, heads, kv_heads, positions)
    with Tape() as tape:
        o = forward(*own[:3], group, visible)
    close(o, expected[0], "o", group.size)
    close(tape.left, [], "messages that were never waited for")
    close(tape.sent, (group.size - 1) * 2 * own[1].nbytes, "bytes: k and v, n-1 times")


@RINGS
@ranks(4)
@task("ring", 5)
def test_ring_backward(sizes, heads, kv_heads, visible, positions):
    """Each rank gets dq, dk and dv of its own tokens; other ranks' queries add to dk and dv."""
    group, own, expected = own_inputs_and_expected(sizes, heads, kv_heads, positions)
    found, _, tape = run_ring(own, group, visible)
    close_each("o dq dk dv", found, expected, group.size)
    close(tape.left, [], "messages that were never waited for")


@ranks(4)
@task("ring", 3)
def test_ring_of_bf16():
    """Sums are in fp32: errors are less than 1.3 times those of rounding once to bf16."""
    group, own, expected = own_inputs_and_expected(length=32, kind="bf16")
    found, _, _ = run_ring(own, group, step.zigzag_visible)
    close({x.dtype for x in found}, {BF16}, "dtypes of o, dq, dk and dv")
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        errors = torch.stack((x - y, y.bfloat16() - y)).square().flatten(1).sum(1)
        dist.all_reduce(errors)  # over the tokens of all ranks
        ratio = (errors[0] / errors[1]).sqrt()
        assert ratio < 1.3, f"{name}: {ratio:.2g} roundings off; is a sum in 16 bits (1.5 to 2)?"


@ranks(4)
@task("ring", 2)
def test_messages_hide_behind_matmuls():
    """They start before a hop's matmuls, and are waited for after them."""
    group, own, _ = own_inputs_and_expected()
    _, in_forward, in_backward = run_ring(own, group, step.zigzag_visible)
    letters = [letter for letter, _ in groupby(event[0] for event in in_forward.events)]
    close("".join(letters), "smwsmwsmwm", "starts, matmuls and waits of four hops")
    in_flight = 0
    for event in in_backward.events:
        in_flight += event.startswith("start") - event.startswith("wait")
        assert in_flight or event != "matmul", "a matmul in backward while no message is in flight"


@ranks(4)
@task("ring", 1)
def test_law_of_work():
    """All ranks compute one product of all pairs in hop 0, and of half of them in later hops."""
    group, own, _ = own_inputs_and_expected()
    with FlopCounterMode(display=False) as counter:
        run_ring(own, group, step.zigzag_visible)
    # 2 FLOPs for each of 2 sequences x 4 heads x size 16, and of 8 x 8 pairs x (1 + 3/2)
    product = 2 * 128 * 160
    close(counter.get_total_flops(), 7 * product, "FLOPs: 2 products forward, 5 backward")


@ranks(4)
def test_k_and_v_of_earlier_hops_are_freed():
    """Forward and backward hold no more in hop 3 than in hop 1; after backward, nothing."""
    group, (q, k, v, do), _ = own_inputs_and_expected()
    found = []

    def visible(*hop: int) -> step.Visible:  # is called at the start of each hop
        found.append(live.bytes)
        return step.zigzag_visible(*hop)

    with Live() as live:
        torch.autograd.grad(forward(q, k, v, group, visible), (q, k, v), do)
        close(live.bytes, 0, "bytes after backward")
    for hops in found[:4], found[4:]:
        assert hops[3] <= hops[1], f"bytes at the start of each hop: {hops}"


# --- The model and the loop -----------------------------------------------------------------------


@ranks(1)
@task("loop", 2)
def test_without_cp_a_layer_keeps_its_attention():
    """No layer pays for the ring."""
    model = decoder()
    step.shard_context(model, Mesh(dp=1, cp=1, tp=1), step.Config())
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


# Of 10 sequences; on two ranks of dp a rank has 5, in micro-batches of 4 and 1, or of 2, 2 and 1
BASE = dict(global_batch_size=10, micro_batch_size=4)
TIED = dict(global_batch_size=10, micro_batch_size=2, tied=True)
LAYOUTS = [
    (BASE, dict(cp=2, tp=2, sp=False)),
    (BASE, dict(cp=4, cp_mode="ordered", zero="1")),
    (TIED, dict(cp=2, zero="3")),  # dp is 2
    (BASE | dict(tied=True), dict(cp=2, tp=2, zero="2", recompute="full")),
]


@task("loop", 5)
@cases("base, layout", LAYOUTS)
def test_cp_trains_to_step_1s_numbers(pools, base, layout):
    """Over dp, tp with and without SP, ZeRO over dp x cp, and with recomputation."""
    equals_step1(pools, 4, step.__name__, base, **layout)
