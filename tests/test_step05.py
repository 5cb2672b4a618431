"""Step 5, context parallelism: step05_cp_ring.py.

Expected outputs and gradients are those of torch's attention to a whole sequence, in fp64."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import step05_cp_ring as step
from common import UserError
from common.comm import Group, Mesh
from common.data import Data
from common.layout import layout_of
from common.model import Decoder, ModelConfig, attend
from tests.equal import SHAPE, close, decoder, draw, equals_step1, run_of
from tests.tape import Live, Tape

ranks = pytest.mark.ranks
task = pytest.mark.task
cases = pytest.mark.parametrize
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
HEADS = cases("heads, kv_heads", [(4, 4), (6, 3), (4, 1)])  # multi-head attention, GQA, MQA
# Bf16 is computed in fp32
KINDS = cases("kind, bound", [("fp64", 1e-10), ("large", 1e-10), ("bf16", 1e-6)])


def inputs(
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    kind: str = "fp64",
    seed: int = 0,
    size: int = 4,
) -> list[Tensor]:
    """Random q, k, v and do [2, heads, length, size]. "large": scores near 882; e^882 is inf."""
    q = draw("q", seed, 2, heads, queries, size)
    k = draw("k", seed, 2, kv_heads, keys, size)
    v = draw("v", seed, 2, kv_heads, keys, size)
    do = draw("do", seed, 2, heads, queries, size)
    if kind == "large":
        q[..., 0] = 42.0
        k[..., 0] = 42.0
    dtype = BF16 if kind == "bf16" else FP64
    return [x.to(dtype) for x in (q, k, v, do)]


def causal_mask(queries: int, keys: int) -> Tensor:
    """Which of the keys each query sees, bool [queries, keys]; the queries are the last tokens."""
    return torch.ones(queries, keys).tril(keys - queries).bool()


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Torch's attention in fp64, and lse: the log of the sum of exp(score) over the keys seen."""
    q, k, v = (x.double() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    return o, scores.masked_fill(~seen, -torch.inf).logsumexp(-1)


def gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dv of torch's causal attention, in fp64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o, _ = attention(q, k, v, causal_mask(q.shape[2], k.shape[2]))
    return torch.autograd.grad(o, (q, k, v), do.double())


def close_each(names: str, found: Any, expected: Any, n: int = 1, bound: float = 1e-10):
    """Compare several values with what is expected. `names` has a word for each."""
    for name, x, y in zip(names.split(), found, expected, strict=True):
        close(x, y, name, n, bound)


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """Require that the block leaves these tensors as they are."""
    before = [x.clone() for x in tensors]
    yield
    for number, (x, y) in enumerate(zip(tensors, before, strict=True)):
        close(x, y, f"argument {number} after the call")


# --- Parts of a softmax ---------------------------------------------------------------------------


@task("parts", 1)
def test_scaled_scores():
    """Scores are q k^T / sqrt(d); causal scores of later keys are -inf."""
    q, k, _, _ = inputs(3, 3, 7, 7)
    expected = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2
    close(step.scaled_scores(q[:, :, :3], k, False), expected[:, :, :3], "scores of all keys")
    close(step.scaled_scores(q, k, True).exp(), expected.exp().tril(), "exp of the causal scores")


@task("parts", 3)
@HEADS
@KINDS
@cases("keys, causal", [(5, True), (7, False)])
def test_part_attention(heads, kv_heads, kind, bound, keys, causal):
    """Output and log-sum-exp of five queries over these keys, in fp32 or wider."""
    q, k, v, _ = inputs(heads, kv_heads, 5, keys, kind)
    with unchanged(q, k, v):
        found = step.part_attention(q, k, v, causal)
    seen = torch.ones(5, keys).bool()
    if causal:
        seen = seen.tril()
    close_each("o lse", found, attention(q, k, v, seen), heads // kv_heads, bound)
    close({x.dtype for x in found}, {torch.promote_types(q.dtype, FP32)}, "dtypes of o and lse")


@task("parts", 1)
@cases("part_dtype", [FP64, BF16])
def test_merge(part_dtype):
    """Values 10 and 2 with weights 3 and 1 average to 8; part_o may have 16 bits."""
    one = torch.ones(1, 1, 1, 1, dtype=FP64)
    o = 10 * one
    lse = (3 * one[0]).log()
    step.merge(o, lse, (2 * one).to(part_dtype), one[0].log())
    close(o, 8 * one, "o", the_average_of_both=6 * one)
    close(lse, (4 * one[0]).log(), "lse")


PARTS = [
    # five queries see the first two parts of twelve keys, and queries 3 and 4 also the third
    (slice(0, 5), slice(0, 4)),
    (slice(0, 5), slice(4, 8)),
    (slice(3, 5), slice(8, 12)),
]


@task("parts", 3)
@cases("kind", ["fp64", "large"])
@cases("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merge_of_three_parts(kind, order):
    """Three parts are merged in place, in any order, from an empty start."""
    q, k, v, _ = inputs(3, 3, 5, 12, kind)
    seen = torch.ones(5, 12).bool()
    seen[:3, 8:] = False
    o = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for queries, keys in [PARTS[i] for i in order]:
        part = attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen[queries, keys])
        with unchanged(*part):
            step.merge(o[:, :, queries], lse[:, :, queries], *part)
    close_each("o lse", (o, lse), attention(q, k, v, seen))


@task("gradients of a part", 5)
@HEADS
@KINDS
def test_part_gradients(heads, kv_heads, kind, bound):
    """The parts' dq add up, and each part has its own dk and dv; all in fp32 or wider."""
    q, k, v, do = inputs(heads, kv_heads, 5, 12, kind)
    wide = torch.promote_types(q.dtype, FP32)
    o, lse = (x.to(wide) for x in attention(q, k, v, causal_mask(5, 12)))
    parts = []
    with unchanged(do, q, k, v, o, lse):
        for keys, causal in ((slice(0, 7), False), (slice(7, 12), True)):
            part_k = k[:, :, keys]
            part_v = v[:, :, keys]
            parts.append(step.part_gradients(do, q, part_k, part_v, o, lse, causal))
    dq, dk, dv = zip(*parts, strict=True)
    found = [sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)]
    close_each("dq dk dv", found, gradients(q, k, v, do), heads // kv_heads, bound)
    close({x.dtype for x in found}, {wide}, "dtypes of dq, dk and dv")


# --- Who has which tokens, and attends to which ---------------------------------------------------

POSITIONS = [
    # the positions of twelve tokens as hexadecimal digits, by rank
    (step.ordered_positions, ["0123456789ab"]),
    (step.ordered_positions, ["0123", "4567", "89ab"]),
    (step.zigzag_positions, ["0123456789ab"]),
    (step.zigzag_positions, ["0129ab", "345678"]),
    (step.zigzag_positions, ["01ab", "2389", "4567"]),
]


@task("zigzag", 1)
@cases("positions, expected", POSITIONS)
def test_positions(positions, expected):
    """In order, rank r has shard r of n; in zigzag, chunks r and 2n-1-r of 2n, in this order."""
    n = len(expected)
    for rank, digits in enumerate(expected):
        found = positions(12, rank, n).tolist()
        close(found, [int(digit, 16) for digit in digits], f"rank {rank} of {n}")


REFUSED = [
    (step.ordered_positions, 13, 2),
    (step.zigzag_positions, 13, 1),
    (step.zigzag_positions, 14, 2),
    (step.zigzag_positions, 15, 3),
]


@task("zigzag", 1)
@cases("positions, length, n", REFUSED)
def test_lengths_that_do_not_divide_are_refused(positions, length, n):
    """In order, n must divide the length; in zigzag 2n must."""
    with pytest.raises(UserError):
        positions(length, 0, n)


def in_order(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens, if ranks have consecutive ones."""
    return torch.arange(n * length).view(n, length)[rank]


def zigzag(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens in zigzag."""
    return torch.arange(n * length).view(2 * n, -1)[[rank, -1 - rank]].flatten()


def count_pairs(visible: Callable, place: Callable, n: int) -> tuple[Tensor, list[float]]:
    """How often n ranks compute each pair of a query (row) and a key, and each rank's pairs."""
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
    return pairs, work


@task("zigzag", 2)
@cases("n", [1, 2, 3])
def test_ordered_visible(n):
    """Each query attends once to its own key and each earlier one, and to no later key."""
    pairs, _ = count_pairs(step.ordered_visible, in_order, n)
    close(pairs, torch.ones_like(pairs).tril(), "how often each pair is computed")


@task("zigzag", 4)
@cases("n", [1, 2, 3, 5])
def test_zigzag_visible(n):
    """As in order, and all ranks compute equally many pairs of a query and a key."""
    pairs, work = count_pairs(step.zigzag_visible, zigzag, n)
    close(pairs, torch.ones_like(pairs).tril(), "how often each pair is computed")
    close(work, [sum(work) / n] * n, "pairs that each rank computes")


# --- The ring -------------------------------------------------------------------------------------


def one_query_a_part(rank: int, source: int, length: int) -> list[tuple]:
    """As `ordered_visible`, but each query is a part of its own."""
    parts = []
    if source <= rank:
        for i in range(length):
            n_keys = i + 1 if source == rank else length
            parts.append((slice(i, i + 1), slice(0, n_keys), False))
    return parts


RULES = dict(zigzag=(step.zigzag_visible, zigzag), one_query=(one_query_a_part, in_order))
ALL_RANKS = [[0, 1, 2, 3]]
# Groups need not have neighbours, nor begin with rank 0, and may have one rank
RINGS = cases(
    "groups, heads, kv_heads, rule, kind",
    [
        (ALL_RANKS, 4, 2, "zigzag", "large"),
        ([[0, 2], [1, 3]], 6, 3, "zigzag", "fp64"),
        ([[0], [1, 2, 3]], 4, 1, "one_query", "fp64"),
    ],
)


def shard_inputs(
    groups: list, heads: int, kv_heads: int, rule: str, kind: str, length: int = 6, size: int = 4
) -> tuple[Group, list[Tensor], Tensor, list[Tensor]]:
    """This rank's group; q, k, v and do of the whole sequence; own positions; own q, k, v, do."""
    mesh = Mesh(dp=4)
    for members in groups:
        mesh.add_groups("cp", np.array([members]), urgent=False)
        if mesh.rank in members:
            seed = members[0]
    group = mesh["cp"]
    total = group.size * length
    whole = inputs(heads, kv_heads, total, total, kind, seed, size)
    _, place = RULES[rule]
    positions = place(group.size, group.rank, length)
    return group, whole, positions, [x[:, :, positions] for x in whole]


def forward(q: Tensor, k: Tensor, v: Tensor, group: Group, *more: Any) -> Tensor:
    """`ring_attention`, in which q, k, v and o are [batch, heads, length, size]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return step.ring_attention(q, k, v, group, *more).transpose(1, 2)


def run_ring(own: list[Tensor], *more: Any, mode: Callable = Tape) -> tuple[list[Tensor], Any, Any]:
    """Run forward and backward, each in a `mode()` -> [o, dq, dk, dv], and both modes."""
    *qkv, do = own
    for x in qkv:
        x.requires_grad_()
    with mode() as in_forward:
        o = forward(*qkv, *more)
    with mode() as in_backward:
        grads = torch.autograd.grad(o, qkv, do)
    return [o.detach(), *grads], in_forward, in_backward


@RINGS
@ranks(4)
@task("ring", 4)
def test_ring_forward(groups, heads, kv_heads, rule, kind):
    """Each rank gets the attention of its own queries to all ranks' keys."""
    group, whole, positions, own = shard_inputs(groups, heads, kv_heads, rule, kind)
    q, k, v, _ = own
    visible, _ = RULES[rule]
    with unchanged(q, k, v), Tape() as tape:
        o = forward(q, k, v, group, visible)
    length = whole[0].shape[2]
    expected, _ = attention(*whole[:3], causal_mask(length, length))
    own_keys, _ = attention(q, k, v, causal_mask(6, 6))
    close(o, expected[:, :, positions], "o", group.size, attention_to_its_own_keys=own_keys)
    close(tape.left, [], "messages that were never waited for")
    close(tape.sent, (group.size - 1) * 2 * k.nbytes, "bytes: k and v, n-1 times")


@RINGS
@ranks(4)
@task("ring", 5)
def test_ring_backward(groups, heads, kv_heads, rule, kind):
    """Each rank gets dq, dk and dv of its own tokens; other ranks' queries add to dk and dv."""
    group, whole, positions, own = shard_inputs(groups, heads, kv_heads, rule, kind)
    visible, _ = RULES[rule]
    with unchanged(*own):
        found, _, tape = run_ring(own, group, visible)
    expected = [x[:, :, positions] for x in gradients(*whole)]
    close_each("dq dk dv", found[1:], expected, group.size)
    close(tape.left, [], "messages that were never waited for")
    messages = 0 if group.size == 1 else 2 * group.size - 1
    close(tape.sent, messages * 2 * own[1].nbytes, "bytes: k and v n-1 times, dk and dv n times")


@ranks(4)
@task("ring", 3)
def test_ring_of_bf16():
    """Sums are in fp32: errors are less than 1.3 times those of rounding once to bf16."""
    group, whole, positions, own = shard_inputs(ALL_RANKS, 4, 2, "zigzag", "bf16", 32, 16)
    found, _, _ = run_ring(own, group)
    close({x.dtype for x in found}, {BF16}, "dtypes of o, dq, dk and dv")
    o, _ = attention(*whole[:3], causal_mask(128, 128))
    for name, x, y in zip(("o", "dq", "dk", "dv"), found, (o, *gradients(*whole)), strict=True):
        y = y[:, :, positions]
        errors = torch.stack([x - y, y.bfloat16() - y]).square().flatten(1).sum(1)
        dist.all_reduce(errors)  # over the tokens of all ranks
        ratio = (errors[0] / errors[1]).sqrt()
        assert ratio < 1.3, f"{name}: {ratio:.2g} roundings off; is a sum in 16 bits (1.5 to 2)?"


@ranks(4)
@task("ring", 2)
def test_messages_hide_behind_matmuls():
    """They start before a hop's matmuls, are waited for after them; dk and dv travel in fp32."""
    group, _, _, own = shard_inputs(ALL_RANKS, 4, 2, "zigzag", "bf16")
    _, in_forward, in_backward = run_ring(own, group)
    letters = [letter for letter, _ in groupby(event[0] for event in in_forward.events)]
    close("".join(letters), "smwsmwsmwm", "starts, matmuls and waits of four hops")
    sent = [nbytes for name, nbytes in in_backward.started if name == "send"]
    kv = 2 * own[1].nbytes
    close(sent, [kv, 2 * kv] * 3 + [2 * kv], "bytes of each message in backward")
    matmuls = in_backward.events.count("matmul")
    close(in_backward.hidden(), matmuls, "matmuls while a message is in flight: all in backward")


@ranks(4)
@task("ring", 1)
def test_law_of_work():
    """All ranks compute one product of all pairs in hop 0, and of half of them in later hops."""
    group, _, _, own = shard_inputs(ALL_RANKS, 4, 2, "zigzag", "fp64")
    quiet = lambda: FlopCounterMode(display=False)  # noqa: E731
    _, *counters = run_ring(own, group, mode=quiet)
    # 2 FLOPs for each of 2 sequences x 4 heads x size 4, and of 6 x 6 pairs x (1 + 3/2)
    product = 2 * 32 * 90
    found = [counter.get_total_flops() for counter in counters]
    close(found, [2 * product, 5 * product], "FLOPs: 2 products forward, 5 backward")


@ranks(4)
def test_law_of_live_memory():
    """At most three pairs of k and v are alive, and in backward also three of dk and dv."""
    group, _, _, (q, k, v, do) = shard_inputs(ALL_RANKS, 4, 4, "zigzag", "fp64", length=8)
    alive = []

    def attention(*part: Any) -> tuple:
        alive.append(live.bytes)
        return step.part_attention(*part)

    def gradients(*part: Any) -> tuple:
        alive.append(live.bytes)
        return step.part_gradients(*part)

    for x in (q, k, v):
        x.requires_grad_()
    gc.collect()
    gc.disable()
    with Live() as live:
        o = forward(q, k, v, group, step.zigzag_visible, step.Kernel(attention, gradients))
        kept = live.bytes
        torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        del o
        after = live.bytes
    gc.enable()
    kv = 4096  # bytes of k and v, of which o has half, and lse an eighth
    close(kept, kv + 2560, "bytes kept for backward: own k and v, o, lse")
    close(after, 0, "bytes after the output is deleted (no reference cycle)")
    most = max(alive[:4])
    assert most <= 3 * kv + 2 * 2560, f"{most} bytes in forward"
    most = max(alive[4:])
    assert most <= 8 * kv + 2560, f"{most} bytes in backward"


# --- The model and the loop -----------------------------------------------------------------------

STRIDED = step.ContextMode(
    lambda s, rank, n: torch.arange(s)[rank::n], lambda q, k, v, group: (q, k, v, group.name)
)
MESHES = cases("dp, cp, tp", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])


@ranks(4)
@task("loop", 1)
@MESHES
def test_shard_context(dp, cp, tp):
    """If cp > 1, the model uses a mode's positions and attention."""
    mesh = Mesh(dp=dp, cp=cp, tp=tp)
    model = decoder()
    positions = step.shard_context(model, mesh, STRIDED, False)
    close(positions, torch.arange(6)[mesh["cp"].rank :: cp], "positions")
    for layer in model.model.layers.values():
        if cp == 1:
            close(layer.self_attn.attend, attend, "what a layer calls")
        else:
            close(layer.self_attn.attend(1, 2, 3), (1, 2, 3, "cp"), "what a layer calls")


@ranks(4)
@task("loop", 1)
@MESHES
@cases("tied", [False, True])
def test_gradients_are_summed_over_dp_and_cp(dp, cp, tp, tied):
    """All records say so: their data_dim is "data", a group that spans dp and cp."""
    mesh = Mesh(dp=dp, cp=cp, tp=tp)
    model = decoder(tied=tied)
    step.shard_context(model, mesh, STRIDED, False)
    close({layout_of(param).data_dim for param in model.parameters()}, {"data"}, "data_dim")
    members = [rank for rank in range(4) if rank % tp == mesh.rank % tp]
    close(dist.get_process_group_ranks(mesh["data"].handle), members, "ranks of the group")


@ranks(4)
@task("loop", 1)
def test_sp_must_divide_what_cp_leaves():
    """Two ranks of tp cannot share the three tokens that cp 2 leaves of six."""
    with pytest.raises(UserError):
        step.shard_context(decoder(), Mesh(dp=1, cp=2, tp=2), STRIDED, True)


@ranks(4)
@task("loop", 3)
@cases("recompute, forwards", [("none", 1), ("full", 2)])
def test_what_is_given_to_the_model_and_sent(recompute, forwards):
    """Targets are shifted before sharding: a chunk's last one is the next chunk's first token."""
    flags = UNEVEN | dict(steps=1, dataset="plain", cp=2, recompute=recompute)
    plain = Decoder.forward
    with mock.patch.object(Decoder, "forward", autospec=True, side_effect=plain) as model:
        run = run_of(step.__name__, flags)
    tokens, targets, positions = zip(*(call.args[1:] for call in model.mock_calls), strict=True)
    close([len(x) for x in tokens], [2, 2, 1], "sequences of micro-batches")
    dp_rank, cp_rank = divmod(dist.get_rank(), 2)
    own = zigzag(2, cp_rank, 8)
    batch = Data("plain", ModelConfig(**SHAPE), 10, 0).batch(0)
    expected = [x.chunk(2)[dp_rank][:, own] for x in batch]
    close_each("tokens targets", [torch.cat(tokens), torch.cat(targets)], expected)
    close_each("positions_1 positions_2 positions_3", positions, [own] * 3)
    kv = 2 * 8 * 2 * 8 * 8  # k and v: 8 tokens, 2 heads of size 8, 8 bytes
    sent = 3 * 5 * (forwards + 1 + 2) * kv  # 3 layers, 5 sequences
    close(run.history[0]["sent"]["cp"], sent, "bytes over cp")


# With dp 2: micro-batches of 2, 2 and 1 sequences. All rows have 4 query heads and 2 kv heads.
UNEVEN = dict(global_batch_size=10, micro_batch_size=2)
TIED = UNEVEN | dict(tied=True)
LAYOUTS = [
    (UNEVEN, dict(cp=2)),  # dp is 2
    (UNEVEN, dict(cp=2, tp=2, sp=False)),
    (UNEVEN, dict(cp=4, cp_mode="ring", zero="1")),
    (TIED, dict(cp=2, zero="3")),
    (TIED, dict(cp=2, tp=2, zero="2", recompute="full")),
]


@task("loop", 5)
@cases("base, layout", LAYOUTS)
def test_cp_trains_to_step_1s_numbers(pools, base, layout):
    """Over dp, tp with and without SP, ZeRO over dp x cp, and with recomputation."""
    equals_step1(pools, 4, step.__name__, base, **layout)
