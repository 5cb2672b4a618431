"""Chapter 5, context parallelism: parts of a softmax, zigzag, the ring forward and backward, laws,
and layouts.
"""

import gc
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
from common.model import PRESETS, Decoder, ModelConfig, attend
from tests.equal import BASE, SHAPE, Watch, close, decoder, draw, equals_step1
from tests.tape import Live, Tape

ranks, task, cases = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize
HEADS = cases("heads, kv_heads", [(4, 4), (6, 3), (4, 1)])  # multi-head attention, GQA, MQA
# Bf16 is computed in fp32
KINDS = cases("kind, bound", [("", 1e-10), ("large", 1e-10), ("bf16", 1e-6)])


def heads_of(
    name: str, n: int, length: int, kind: str = "", seed: int = 0, size: int = 4
) -> Tensor:
    """A random tensor [2, n, length, size]. "large": all scores (q k / 2 if size is 4) are near
    882; e^882 is inf.
    """
    x = draw(name, seed, 2, n, length, size)
    if kind == "large" and name in "qk":
        x[..., 0] = 42.0
    return x.bfloat16() if kind == "bf16" else x


def softmax_of(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None = None, seen: Tensor | None = None
) -> list[Tensor]:
    """fp64 attention -> o, lse (+ dq, dk, dv if `do`). `seen`: bool [queries, keys]; None: causal,
    queries last.
    """
    seen = (
        torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
        if seen is None
        else seen
    )
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return [
        o.detach(),
        lse.detach(),
        *(torch.autograd.grad(o, (q, k, v), do.double()) if do is not None else ()),
    ]


def each(names: str, found: list, expected: list, n: int = 1, bound: float = 1e-10, when: str = ""):
    """Require that each value of `found` is close to its counterpart in `expected`. `names`: a word
    for each value.
    """
    for name, x, right in zip(names.split(), found, expected, strict=True):
        close(x, right, f"{name} {when}", n, bound)


# --- Parts of a softmax ---------------------------------------------------------------------------------------------


@task("parts", 1)
def test_scaled_scores():
    """Scores are q k^T / sqrt(d), for three queries and seven keys; for seven causal queries, later
    keys get -inf.
    """
    q, k = heads_of("q", 3, 7), heads_of("k", 3, 7)
    expected = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2.0
    close(step.scaled_scores(q[:, :, :3], k, False), expected[:, :, :3], "scores of all keys")
    close(step.scaled_scores(q, k, True).exp(), expected.exp().tril(), "exp of the causal scores")


@task("parts", 3)
@HEADS
@KINDS
@cases("keys, causal", [(5, True), (7, False)])
def test_part_attention(heads, kv_heads, kind, bound, keys, causal):
    """part_attention returns the output and log-sum-exp of five queries over the given keys, in
    fp32 or wider.
    """
    given = (
        heads_of("q", heads, 5, kind),
        heads_of("k", kv_heads, keys, kind),
        heads_of("v", kv_heads, keys, kind),
    )
    found = step.part_attention(*(after := [x.clone() for x in given]), causal)
    expected = softmax_of(*given, seen=None if causal else torch.ones(5, keys).bool())
    each("o lse", found, expected, heads // kv_heads, bound)
    each("q k v", after, given, when="after the call")
    close(
        {x.dtype for x in found},
        {torch.promote_types(given[0].dtype, torch.float32)},
        "dtypes of o and lse",
    )


@task("parts", 1)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_merge_of_the_docstrings_example(dtype):
    """Values 10 and 2 with weights 3 and 1 average to 8. part_o may have 16 bits, as from a fused
    kernel.
    """
    one = torch.ones(1, 1, 1, 1).double()
    o, lse = 10 * one, (3 * one[0]).log()
    step.merge(o, lse, (2 * one).to(dtype), one[0].log())
    close(o, 8 * one, "o", the_average_of_both=6 * one)
    close(lse, (4 * one[0]).log(), "lse")


@task("parts", 3)
@cases("kind", ["", "large"])
@cases("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merge_of_three_parts(kind, order):
    """Three parts are merged in place, in any order, from an empty start. Only queries 3 and 4 see
    the third part.
    """
    q, k, v = heads_of("q", 3, 5, kind), heads_of("k", 3, 12, kind), heads_of("v", 3, 12)
    seen = torch.ones(5, 12).bool()
    seen[:3, 8:] = False
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for i in order:
        rows, columns = slice(3 * (i == 2), 5), slice(4 * i, 4 * i + 4)
        part = softmax_of(
            q[:, :, rows], k[:, :, columns], v[:, :, columns], seen=seen[rows, columns]
        )
        step.merge(o[:, :, rows], lse[:, :, rows], *(given := [x.clone() for x in part]))
        each("part_o part_lse", given, part, when="after the call")
    each("o lse", [o, lse], softmax_of(q, k, v, seen=seen))


@task("gradients of a part", 5)
@HEADS
@KINDS
def test_part_gradients(heads, kv_heads, kind, bound):
    """Five queries see seven earlier keys and their own five. The parts' dq add up; each part has
    its own dk and dv.
    """
    q, k, v = (
        heads_of("q", heads, 5, kind),
        heads_of("k", kv_heads, 12, kind),
        heads_of("v", kv_heads, 12, kind),
    )
    do, wide = heads_of("do", heads, 5, kind), torch.promote_types(q.dtype, torch.float32)
    o, lse, *expected = softmax_of(q, k, v, do)
    given = do, q, k, v, o.to(wide), F.pad(lse.to(wide), (1, 1))[..., 1:-1]  # lse is not contiguous
    before, parts = [x.clone() for x in given], []
    for keys, causal in ((slice(0, 7), False), (slice(7, 12), True)):
        parts.append(step.part_gradients(do, q, k[:, :, keys], v[:, :, keys], *given[4:], causal))
    dq, *dkv = zip(*parts, strict=True)
    each(
        "dq dk dv",
        [sum(dq), *(torch.cat(both, 2) for both in dkv)],
        expected,
        heads // kv_heads,
        bound,
    )
    close({x.dtype for x in (*dq, *dkv[0], *dkv[1])}, {wide}, "dtypes of dq, dk and dv")
    each("do q k v o lse", given, before, when="after the call")


@task("zigzag", 2)
@cases(
    "n, expected", [(1, ["0123456789ab"]), (2, ["0129ab", "345678"]), (3, ["01ab", "2389", "4567"])]
)
def test_zigzag_positions(n, expected):
    """Rank r has chunks r and 2n-1-r of 2n, in this order. Lengths that 2n does not divide raise
    UserError.
    """
    for r, digits in enumerate(expected):
        close(
            step.zigzag_positions(12, r, n).tolist(),
            [int(digit, 16) for digit in digits],
            f"rank {r} of {n}",
        )
    for length in (n, 13, 12 + n):
        with pytest.raises(UserError):
            step.zigzag_positions(length, 0, n)


def zigzag(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens."""
    return torch.arange(n * length).view(2 * n, -1)[[rank, -1 - rank]].flatten()


def in_turn(n: int, rank: int, length: int) -> Tensor:
    """The positions of a rank's `length` tokens, if ranks have consecutive ones."""
    return torch.arange(n * length).view(n, length)[rank]


def pairs_of(visible, positions, n: int) -> tuple[Tensor, list[float]]:
    """How often n ranks compute each pair of a query (row) and a key (column), and how many pairs
    each rank has.
    """
    pairs, work = torch.zeros(6 * n, 6 * n), [0.0] * n
    for rank, source in np.ndindex(n, n):
        for queries, keys, causal in visible(rank, source, 6):
            these, those = positions(n, rank, 6)[queries], positions(n, source, 6)[keys]
            seen = torch.ones(len(these), len(those)).tril(0 if causal else 6)
            pairs[these[:, None], those] += seen
            work[rank] += seen.sum().item()
    return pairs, work


@task("zigzag", 2)
@cases("n", [1, 2, 3])
def test_the_ring_in_order(n):
    """Rank r has shard r of n. Each query attends once to its own key and each earlier one, and to
    no later key.
    """
    for rank in range(n):
        close(
            step.ordered_positions(6 * n, rank, n),
            in_turn(n, rank, 6),
            f"the positions of rank {rank} of {n}",
        )
    pairs, _ = pairs_of(step.ordered_visible, in_turn, n)
    close(pairs, torch.ones_like(pairs).tril(), "how often each pair is computed")
    with pytest.raises(UserError):
        step.ordered_positions(13, 0, n + 1)


@task("zigzag", 4)
@cases("n", [1, 2, 3, 5])
def test_zigzag_visible(n):
    """Each query attends once to its own key and each earlier one, and to no later key. All ranks
    have equal work.
    """
    pairs, work = pairs_of(step.zigzag_visible, zigzag, n)
    close(
        pairs,
        torch.ones_like(pairs).tril(),
        "how often the pair of a query (row) and a key (column) is computed",
    )
    close(work, [sum(work) / n] * n, "pairs that each rank computes")


# --- The ring -------------------------------------------------------------------------------------------------------


def in_order(rank: int, source: int, length: int) -> list[tuple]:
    """zigzag_visible if ranks had consecutive tokens: own keys give three parts, earlier ones two,
    later ones none.
    """
    first, second = slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return [(first, first, True), (second, first, False), (second, second, True)]
    return [(slice(0, length), keys, False) for keys in (first, second)] if source < rank else []


ZIGZAG, ALL_4 = step.zigzag_visible, [[0, 1, 2, 3]]
# Rows: each group's ranks; they need not be neighbours, nor start at 0, and a group may have only
# one
RINGS = cases(
    "n, rows, heads, kv_heads, rule, kind",
    [
        pytest.param(2, [[0, 1]], 6, 3, ZIGZAG, "", marks=ranks(2)),
        pytest.param(3, [[0, 1, 2]], 4, 1, ZIGZAG, "", marks=ranks(3)),
        pytest.param(4, ALL_4, 4, 2, ZIGZAG, "large", marks=ranks(4)),
        pytest.param(4, [[0, 2], [1, 3]], 4, 4, ZIGZAG, "", marks=ranks(4)),
        pytest.param(4, [[0], [1, 2, 3]], 4, 2, in_order, "", marks=ranks(4)),
    ],
)


def own(n, rows, heads, kv_heads, rule=ZIGZAG, kind="", length=6, **size) -> tuple:
    """This rank's group; q, k, v, do of the whole sequence; this rank's positions; its shards of q,
    k, v and do.
    """
    mesh = Mesh(dp=n)
    for row in rows:
        mesh.add_groups("cp", np.array([row]), urgent=False)
    seed, group = next(row[0] for row in rows if mesh.rank in row), mesh["cp"]
    sizes = dict(q=heads, k=kv_heads, v=kv_heads, do=heads)
    whole = [
        heads_of(name, heads, length * group.size, kind, seed, **size)
        for name, heads in sizes.items()
    ]
    here = (in_turn if rule is in_order else zigzag)(group.size, group.rank, length)
    return group, whole, here, [x[:, :, here] for x in whole]


def forward(given: list[Tensor], group: Group, *more) -> Tensor:
    """ring_attention, but q, k, v and o are [batch, heads, length, size], not [batch, length,
    heads, size].
    """
    return step.ring_attention(*(x.transpose(1, 2) for x in given), group, *more).transpose(1, 2)


def ring(mode, group, mine, *rule) -> tuple:
    """Run forward and backward of `mine`, [q, k, v, do], each in a new `mode()` -> [o, dq, dk, dv],
    both modes.
    """
    with mode() as there:
        o = forward([x.requires_grad_() for x in mine[:3]], group, *rule)
    with mode() as back:
        grads = torch.autograd.grad(o, mine[:3], mine[3])
    return [o.detach(), *grads], there, back


@RINGS
@task("ring", 4)
def test_ring_forward(n, rows, heads, kv_heads, rule, kind):
    """Each rank gets the attention of its own queries to the keys of all ranks, with zigzag and
    another rule.
    """
    group, whole, here, mine = own(n, rows, heads, kv_heads, rule, kind)
    given, size = [x.clone() for x in mine[:3]], group.size
    with Tape() as tape:
        o = forward(given, group, rule)
    close(
        o,
        softmax_of(*whole)[0][:, :, here],
        "o",
        size,
        attention_to_its_own_keys=softmax_of(*mine)[0],
    )
    each("q k v", given, mine[:3], when="after the call")
    close(tape.left, [], "messages that were never waited for")
    close(tape.sent, (size - 1) * 2 * given[1].nbytes, "bytes: k and v, n-1 times")


@RINGS
@task("ring", 5)
def test_ring_backward(n, rows, heads, kv_heads, rule, kind):
    """Each rank gets dq, dk and dv of its own tokens; queries on other ranks contribute to dk and
    dv, too.
    """
    group, whole, here, mine = own(n, rows, heads, kv_heads, rule, kind)
    given, size = [x.clone() for x in mine], group.size
    found, _, tape = ring(Tape, group, given, rule)
    each("dq dk dv", found[1:], [x[:, :, here] for x in softmax_of(*whole)[2:]], size)
    each("q k v do", given, mine, when="after the call")
    close(tape.left, [], "messages that were never waited for")
    bytes_ = (2 * size - 1) * 2 * given[1].nbytes * (size > 1)
    close(tape.sent, bytes_, "bytes: k and v n-1 times, their gradients n times")


@ranks(4)
@task("ring", 3)
def test_ring_of_bf16():
    """Sums are in fp32: errors are below 1.3 times those of rounding once to bf16. (With 16-bit
    sums: 1.5 to 2.)
    """
    group, whole, here, mine = own(4, ALL_4, 4, 2, kind="bf16", length=32, size=16)
    found, _, back = ring(Tape, group, mine)
    close({x.dtype for x in found}, {torch.bfloat16}, "dtypes of o, dq, dk and dv")
    o, _, *grads = softmax_of(*whole)
    for name, x, right in zip(("o", "dq", "dk", "dv"), found, (o, *grads), strict=True):
        right = right[:, :, here]
        off = torch.stack([(y.double() - right).square().sum() for y in (x, right.bfloat16())])
        dist.all_reduce(off)  # over the tokens of all ranks
        off = (off[0] / off[1]).sqrt()
        assert off < 1.3, (
            f"{name}: {off:.2g} roundings off from fp64; is something summed in 16 bits?"
        )
    close(back.sent, (3 + 4 * 2) * 2 * mine[1].nbytes, "bytes in backward: gradients have 32 bits")


@ranks(3)
@task("ring", 3)
def test_law_of_messages_and_work():
    """Messages start before a hop's matmuls and are waited for after them; zigzag gives all ranks
    equal work.
    """
    group, _, _, mine = own(3, [[0, 1, 2]], 4, 2, kind="bf16", length=8)
    _, there, back = ring(Tape, group, mine)
    sent, b = (
        [[size for name, size in tape.started if name == "send"] for tape in (there, back)],
        2 * mine[1].nbytes,
    )
    close(
        sent,
        [[b, b], [b, 2 * b, b, 2 * b, 2 * b]],
        "bytes of each message: of k and v, of their gradients in fp32",
    )
    letters = "".join(event[0] for event in there.events)
    runs = "".join(a for a, b in zip(letters, letters[1:] + ".", strict=True) if a != b)
    close(runs, "smwsmwm", "forward: starts, matmuls and waits of three hops")
    close(
        back.hidden(),
        back.events.count("matmul"),
        "backward: matmuls while a message is in flight (all of them)",
    )
    _, *counts = ring(lambda: FlopCounterMode(display=False), group, mine)
    # Batch, heads, size; all pairs in hop 0, half in the others
    product = 2 * (2 * 4 * 4) * 8 * 8 * (1 + 2 / 2)
    close(
        [x.get_total_flops() for x in counts],
        [2 * product, 5 * product],
        "FLOPs: 2 products forward, 5 backward",
    )


@ranks(4)
def test_law_of_live_memory():
    """Besides inputs and results, a rank holds at most three pairs of k and v, and in backward
    three of dk and dv.
    """
    group, _, _, mine = own(4, ALL_4, 4, 4, length=8)
    kv, o_lse, seen = 2 * mine[0].nbytes, 5 * mine[0].nbytes // 4, []
    gc.collect(), gc.disable()

    def attention(*part):
        seen.append(live.bytes)
        return step.part_attention(*part)

    def gradients(*part):
        seen.append(live.bytes)
        return step.part_gradients(*part)

    with Live() as live:
        kernel = step.Kernel(attention, gradients)
        o = forward([x.requires_grad_() for x in mine[:3]], group, ZIGZAG, kernel)
        kept = live.bytes
        torch.autograd.grad(o, mine[:3], mine[3], retain_graph=True)
        del o
        after = live.bytes
    gc.enable()
    close(kept, kv + o_lse, "bytes kept for backward: own k and v, o, lse")
    close(after, 0, "bytes after the output is deleted (no reference cycle)")
    there, back = max(seen[:4]) / kv, max(seen[4:]) / kv
    assert there <= 3 + 2 * o_lse / kv and back <= 8 + o_lse / kv, (
        f"{there} and {back} times k and v are alive"
    )


# --- The model and the loop -----------------------------------------------------------------------------------------


@ranks(4)
@task("loop", 2)
@cases("dp, cp, tp", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
def test_shard_context(dp, cp, tp):
    """If cp > 1, shard_context uses a mode's positions and attention. All records get data_dim
    "data": dp x cp.
    """
    mesh, model = Mesh(dp=dp, cp=cp, tp=tp), decoder(tied=tp == 1)
    mode = step.ContextMode(
        lambda s, r, n: torch.arange(s)[r::n], lambda q, k, v, group: f"{q}{k}{v}{group.name}"
    )
    close(
        step.shard_context(model, mesh, mode, False),
        torch.arange(6)[mesh["cp"].rank :: cp],
        "positions",
    )
    for layer in model.model.layers.values():
        found = layer.self_attn.attend is attend or layer.self_attn.attend(1, 2, 3)
        close(found, cp == 1 or "123cp", "what a layer calls (True: the model's own attention)")
    close(
        {layout_of(param).data_dim for param in model.parameters()},
        {"data"},
        "data_dim of the records",
    )
    members = [r for r in range(4) if r % tp == mesh.rank % tp]
    close(dist.get_process_group_ranks(mesh["data"].handle), members, "ranks that sum gradients")
    if cp == tp:  # two ranks of tp cannot share a rank's three tokens
        with pytest.raises(UserError):
            step.shard_context(model, mesh, mode, True)


@ranks(4)
@task("loop", 3)
@cases("recompute, again", [("none", 0), ("full", 1)])
def test_what_is_given_to_the_model_and_sent(recompute, again):
    """With dp 2 and cp 2, targets are shifted before sharding: a chunk's last target is the next
    one's first token.
    """
    flags = dict(
        steps=1,
        global_batch_size=10,
        micro_batch_size=2,
        cp=2,
        dataset="plain",
        recompute=recompute,
    )
    seen, plain, rank, PRESETS["test"] = (
        [],
        Decoder.forward,
        dist.get_rank(),
        (shape := ModelConfig(**SHAPE)),
    )
    forward = mock.patch.object(
        Decoder, "forward", lambda model, *xs: seen.append(xs) or plain(model, *xs)
    )
    with forward, Watch(step.Config(**BASE | flags, model="test")) as run:
        step.train(run.config, run)
    mine, here = slice(rank // 2 * 5, rank // 2 * 5 + 5), zigzag(2, rank % 2, 8)
    *found, positions = zip(*seen, strict=True)
    close([len(x) for x in found[0]], [2, 2, 1], "sequences of micro-batches")
    whole = [x[mine][:, here] for x in Data("plain", shape, 10, 0).batch(0)]
    each("tokens targets", [torch.cat(some) for some in found], whole)
    each("1 2 3", positions, [here] * 3, when=": positions of a micro-batch")
    kv = 2 * 8 * 2 * 8 * 8  # k and v: 8 tokens, 2 heads of size 8, 8 bytes
    expected = 3 * 5 * (1 + again + 1 + 2) * kv  # 3 layers, 5 sequences
    close(run.history[0]["sent"]["cp"], expected, "bytes over cp")


# With dp 2: micro-batches of 2, 2 and 1 sequences
ALL = dict(steps=5, global_batch_size=10, micro_batch_size=2)
ROWS = [
    (4, ALL, dict(cp=2)),  # dp is 2
    (4, ALL, dict(cp=2, zero="3")),
    (4, ALL, dict(cp=2, tp=2, sp=False)),
    (4, dict(tied=True, recompute="full"), dict(cp=2, tp=2, zero="2")),
    (4, dict(n_kv_heads=1), dict(cp=4)),
    (3, dict(seq_len=12), dict(cp=3, zero="2")),
]


@task("loop", 6)
@cases("n, base, layout", ROWS)
def test_cp_trains_to_step_1s_numbers(pools, n, base, layout):
    """cp trains to step 1's numbers with dp, ZeRO over dp x cp, tp with and without SP,
    recomputation, and MQA.
    """
    equals_step1(pools, n, step.__name__, base, **layout)
