"""Chapter 5, context parallelism: parts of a softmax, zigzag, the ring and its way back, the law, the layouts."""

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
from common.comm import Mesh
from common.data import Data
from common.layout import layout_of
from common.model import PRESETS, Decoder, attend
from tests.equal import BASE, Watch, close, decoder, distance, draw, equals_step1, train
from tests.tape import Live, Tape

ranks, task, cases = pytest.mark.ranks, pytest.mark.task, pytest.mark.parametrize
S5 = "step05_cp_ring"
HEADS = cases("heads, kv_heads", [(4, 4), (6, 3), (4, 1)])  # as many keys as queries, GQA, MQA
KINDS = cases("kind, bound", [("", 1e-10), ("large", 1e-10), ("bf16", 1e-6)])  # of 16 bits: computed in 32


def heads_of(name: str, n: int, length: int, kind: str = "", seed: int = 0, size: int = 4) -> Tensor:
    """[2, n, length, size]. Large: scores of these q and k are 882 larger; e^882 is infinite, the softmax the same."""
    x = draw(name, seed, 2, n, length, size)
    if kind == "large" and name in "qk":
        x[..., 0] = 42.0
    return x.bfloat16() if kind == "bf16" else x


def softmax_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, do: Tensor | None = None) -> list[Tensor]:
    """Torch's own attention in fp64; query i looks at key j if seen[i, j]. -> o, lse; given do, dq, dk and dv, too."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return [o.detach(), lse.detach(), *(torch.autograd.grad(o, (q, k, v), do.double()) if do is not None else ())]


def causal_of(queries: int, keys: int) -> Tensor:
    """Which key (column) a query (row) sees, if the last query is at the last key."""
    return torch.ones(queries, keys).tril(keys - queries).bool()


def each(names: str, found: list, expected: list, n: int = 1, bound: float = 1e-10, when: str = ""):
    """All are close."""
    for name, x, right in zip(names.split(), found, expected, strict=True):
        close(x, right, f"{name} {when}", n, bound)


# --- Parts of a softmax ---------------------------------------------------------------------------------------------


@task("parts", 1)
def test_scaled_scores():
    """q k^T / sqrt(d) of three queries and seven keys; of as many, minus infinity for keys after the query."""
    q, k, seen = heads_of("q", 3, 7), heads_of("k", 3, 7), causal_of(7, 7)
    expected, found = torch.einsum("bhqd,bhkd->bhqk", q, k) / 2.0, step.scaled_scores(q, k, True)
    close(step.scaled_scores(q[:, :, :3], k, False), expected[:, :, :3], "all scores")
    close(found.masked_fill(~seen, 0.0), expected * seen, "scores of keys that may be seen")
    assert (found[:, :, ~seen] == -torch.inf).all(), "a later key has a score"


@task("parts", 3)
@HEADS
@KINDS
@cases("keys, causal", [(5, True), (7, False)])
def test_part_attention(heads, kv_heads, kind, bound, keys, causal):
    """Output and log-sum-exp of five queries, as if these were all keys; in fp32 or more."""
    given = heads_of("q", heads, 5, kind), heads_of("k", kv_heads, keys, kind), heads_of("v", kv_heads, keys, kind)
    found = step.part_attention(*(after := [x.clone() for x in given]), causal)
    seen = causal_of(5, keys) if causal else torch.ones(5, keys).bool()
    each("o lse", found, softmax_of(*(x.double() for x in given), seen), heads // kv_heads, bound)
    each("q k v", after, given, when="after the call")
    close({x.dtype for x in found}, {torch.promote_types(given[0].dtype, torch.float32)}, "dtypes of o and lse")


@task("parts", 1)
@cases("dtype", [torch.float64, torch.bfloat16])
def test_merge_of_the_docstrings_example(dtype):
    """Two keys weigh 3 and 1, and have values 10 and 2: together they give 8. A kernel's part may have 16 bits."""
    one = torch.ones(1, 1, 1, 1).double()
    o, lse = 10 * one, (3 * one[0]).log()
    step.merge(o, lse, (2 * one).to(dtype), one[0].log())
    close(o, 8 * one, "o", the_average_of_both=6 * one)
    close(lse, (4 * one[0]).log(), "lse")


@task("parts", 3)
@cases("kind", ["", "large"])
@cases("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_merge_of_three_parts(kind, order):
    """In any order, begun with none, in place. Only the last two of five queries see the third part."""
    q, k, v = heads_of("q", 3, 5, kind), heads_of("k", 3, 12, kind), heads_of("v", 3, 12)
    seen = torch.ones(5, 12).bool()
    seen[:3, 8:] = False
    o, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for i in order:
        rows, columns = slice(3 * (i == 2), 5), slice(4 * i, 4 * i + 4)
        part = softmax_of(q[:, :, rows], k[:, :, columns], v[:, :, columns], seen[rows, columns])
        step.merge(o[:, :, rows], lse[:, :, rows], *(given := [x.clone() for x in part]))
        each("part_o part_lse", given, part, when="after the call")
    each("o lse", [o, lse], softmax_of(q, k, v, seen))


@task("gradients of a part", 5)
@HEADS
@KINDS
def test_part_gradients(heads, kv_heads, kind, bound):
    """Five queries, seven keys before them and five beside them: both parts' dq add up, each has its dk and dv."""
    q, k, v = heads_of("q", heads, 5, kind), heads_of("k", kv_heads, 12, kind), heads_of("v", kv_heads, 12, kind)
    do, wide = heads_of("do", heads, 5, kind), torch.promote_types(q.dtype, torch.float32)
    o, lse, *expected = softmax_of(q, k, v, causal_of(5, 12), do)
    lse = F.pad(lse.to(wide), (1, 1))[..., 1:-1]  # with gaps between its rows in memory
    given = do, q, k, v, o.to(wide), lse
    before, parts = [x.clone() for x in given], []
    for keys, causal in ((slice(0, 7), False), (slice(7, 12), True)):
        parts.append(step.part_gradients(do, q, k[:, :, keys], v[:, :, keys], *given[4:], causal))
    dq, *dkv = zip(*parts, strict=True)
    each("dq dk dv", [sum(dq), *(torch.cat(both, 2) for both in dkv)], expected, heads // kv_heads, bound)
    close({x.dtype for x in (*dq, *dkv[0], *dkv[1])}, {wide}, "dtypes of dq, dk and dv")
    each("do q k v o lse", given, before, when="after the call")


# --- Zigzag ---------------------------------------------------------------------------------------------------------


@task("zigzag", 2)
@cases("n, expected", [(1, ["0123456789ab"]), (2, ["0129ab", "345678"]), (3, ["01ab", "2389", "4567"])])
def test_zigzag_positions(n, expected):
    """Of 12 tokens rank r has chunks r and 2n-1-r of 2n, in order."""
    for r, digits in enumerate(expected):
        close(step.zigzag_positions(12, r, n).tolist(), [int(digit, 16) for digit in digits], f"rank {r} of {n}")
    for length in (n, 13, 12 + n):
        with pytest.raises(UserError):
            step.zigzag_positions(length, 0, n)


def zigzag(n: int, rank: int, length: int) -> Tensor:
    """Positions of a rank's tokens."""
    chunks = torch.arange(n * length).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


@task("zigzag", 4)
@cases("n", [1, 2, 3, 5])
def test_zigzag_visible(n):
    """Every pair of a query and a key at or before it is computed once, no other; all ranks compute as many."""
    pairs, work = torch.zeros(6 * n, 6 * n), [0.0] * n
    for rank, source in np.ndindex(n, n):
        for queries, keys, causal in step.zigzag_visible(rank, source, 6):
            these, those = zigzag(n, rank, 6)[queries], zigzag(n, source, 6)[keys]
            seen = torch.ones(len(these), len(those))
            seen = seen.tril() if causal else seen
            pairs[these[:, None], those] += seen
            work[rank] += seen.sum().item()
    close(pairs, torch.ones_like(pairs).tril(), "how often a query (row) meets a key (column)")
    close(work, [sum(work) / n] * n, "pairs that each rank computes")


# --- The ring -------------------------------------------------------------------------------------------------------


def in_order_rule(rank: int, source: int, length: int) -> list[tuple]:
    """Another rule, for tokens in order: three parts, or two, or none where all keys are later."""
    first, second = slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return [(first, first, True), (second, first, False), (second, second, True)]
    return [(slice(0, length), keys, False) for keys in (first, second)] if source < rank else []


RULES = dict(zigzag=(zigzag, step.zigzag_visible))
RULES["in order"] = lambda n, r, length: torch.arange(r * length, (r + 1) * length), in_order_rule
RINGS = cases(
    "n, rows, heads, kv_heads, rule, kind",
    [  # rows: the groups. Ranks of a group need not be neighbours, nor be numbered as in the world, nor be several
        pytest.param(2, [[0, 1]], 6, 3, "zigzag", "", marks=ranks(2)),
        pytest.param(3, [[0, 1, 2]], 4, 1, "zigzag", "", marks=ranks(3)),
        pytest.param(4, [[0, 1, 2, 3]], 4, 2, "zigzag", "large", marks=ranks(4)),
        pytest.param(4, [[0, 2], [1, 3]], 4, 4, "zigzag", "", marks=ranks(4)),
        pytest.param(4, [[0], [1, 2, 3]], 4, 2, "in order", "", marks=ranks(4)),
    ],
)


def own(n: int, rows: list, heads: int, kv_heads: int, rule: str, kind: str, length: int = 6) -> tuple:
    """This rank's group, whole q, k, v and do (those of other groups differ), its places in them, its own of each."""
    mesh = Mesh(dp=n)
    for row in rows:
        mesh.enter("cp", np.array([row]))
    seed, group = next(row[0] for row in rows if mesh.rank in row), mesh["cp"]
    sizes = dict(q=heads, k=kv_heads, v=kv_heads, do=heads)
    whole = [heads_of(name, size, length * group.size, kind, seed) for name, size in sizes.items()]
    here = RULES[rule][0](group.size, group.rank, length)
    return group, whole, here, [x[:, :, here] for x in whole]


@RINGS
@task("ring", 3)
def test_ring_forward(n, rows, heads, kv_heads, rule, kind):
    """Each rank has its queries' attention to the keys of all."""
    group, whole, here, mine = own(n, rows, heads, kv_heads, rule, kind)
    given, size = [x.clone() for x in mine[:3]], group.size
    with Tape() as tape:
        o = step.RingAttention.apply(*given, group, RULES[rule][1])
    expected = softmax_of(*whole[:3], causal_of(6 * size, 6 * size))[0][:, :, here]
    close(o, expected, "o", size, attention_to_its_own_keys=softmax_of(*mine[:3], causal_of(6, 6))[0])
    each("q k v", given, mine[:3], when="after the call")
    close(tape.left, [], "messages that nobody has waited for")
    close(tape.sent, (size - 1) * 2 * given[1].nbytes, "bytes: k and v, n-1 times")


@RINGS
@task("ring", 4)
def test_ring_backward(n, rows, heads, kv_heads, rule, kind):
    """Gradients of this rank's tokens, to which all ranks have added; a second backward finds the same."""
    group, whole, here, mine = own(n, rows, heads, kv_heads, rule, kind)
    *given, do = [x.clone() for x in mine]
    if (size := group.size) == 1:
        return  # no ring: `shard_context` leaves the model's own attention in place
    o = step.RingAttention.apply(*(x.requires_grad_() for x in given), group, RULES[rule][1])
    expected = [x[:, :, here] for x in softmax_of(*whole[:3], causal_of(6 * size, 6 * size), whole[3])[2:]]
    for turn in "of the first backward", "of the second backward":
        with Tape() as tape:
            found = torch.autograd.grad(o, given, do, retain_graph=True)
        each("dq dk dv", found, expected, size, when=turn)
        each("q k v do", [*given, do], mine, when="after the call")
        close(tape.left, [], "messages that nobody has waited for")
        close(tape.sent, (2 * size - 1) * 2 * given[1].nbytes, "bytes: k and v n-1 times, their gradients n times")


def narrow() -> list[Tensor]:
    """q, k, v and do of bf16: 128 tokens, heads of 16."""
    return [heads_of(x, n, 128, "bf16", size=16) for x, n in dict(q=4, k=2, v=2, do=4).items()]


def ring_of_bf16() -> tuple:
    """On each of four ranks: its o, dq, dk and dv, their dtypes, and the bytes that backward sends."""
    *given, do = [x[:, :, zigzag(4, (group := Mesh(cp=4)["cp"]).rank, 32)] for x in narrow()]
    o = step.RingAttention.apply(*(x.requires_grad_() for x in given), group, step.zigzag_visible)
    with Tape() as tape:
        found = o, *torch.autograd.grad(o, given, do)
    return [x.detach().double().numpy() for x in found], {x.dtype for x in found}, tape.sent


@task("ring", 3)
def test_ring_of_bf16(pools):
    """o, dq, and dk and dv on their way are rounded to 16 bits once, when complete.

    Sums in 16 bits would be 1.5 to 2 roundings off. (dq is 1.1 off: its formula has o, which is rounded.)
    """
    given, by_rank = narrow(), pools(4).run(ring_of_bf16)
    o, _, *grads = softmax_of(*given[:3], causal_of(128, 128), given[3])
    for i, (name, right) in enumerate(dict(o=o, dq=grads[0], dk=grads[1], dv=grads[2]).items()):
        x = torch.cat([torch.from_numpy(found[i]) for found, _, _ in by_rank], 2)
        right = right[:, :, torch.cat([zigzag(4, r, 32) for r in range(4)])]
        roundings = distance(x, right) / distance(right.bfloat16().double(), right)
        assert roundings < 1.3, f"{name}: {roundings:.2g} roundings from fp64's; is something added up in 16 bits?"
    kv = 2 * given[1].nbytes // 4
    close([found[1:] for found in by_rank], [({torch.bfloat16}, 3 * kv + 4 * 2 * kv)] * 4, "dtypes, bytes of backward")


# --- The law --------------------------------------------------------------------------------------------------------


def there_and_back(mode: type) -> tuple:
    """What a mode has seen forward and backward on each of three ranks: 8 tokens of bf16; and the bytes of k and v."""
    group, _, _, (*given, do) = own(3, [[0, 1, 2]], 4, 2, "zigzag", "bf16", 8)
    with mode() as there:
        o = step.RingAttention.apply(*(x.requires_grad_() for x in given), group, step.zigzag_visible)
    with mode() as back:
        torch.autograd.grad(o, given, do)
    return there, back, 2 * given[1].nbytes


@ranks(3)
@task("ring", 3)
def test_ring_computes_while_messages_travel():
    """In forward only the last of three hops has no message to wait for; in backward none."""
    there, back, _ = there_and_back(Tape)
    totals = [tape.events.count("matmul") for tape in (there, back)]
    close([there.hidden(), back.hidden()], [totals[0] * 2 // 3, totals[1]], "matmuls while something travels")


@ranks(3)
def test_law_of_messages():
    """k and v are sent before a hop's matmuls, and awaited after them.

    Backward waits for a sum when its own term is there, and sends it on at once, under the next hop's matmuls.
    """
    there, back, b = there_and_back(Tape)
    sent = [[size for name, size in tape.started if name == "send"] for tape in (there, back)]
    close(sent, [[b, b], [b, 2 * b, b, 2 * b, 2 * b]], "bytes of each message: of k and v, of their gradients in fp32")
    letters = ["".join(event[0] for event in tape.events) for tape in (there, back)]
    runs = ["".join(a for a, b in zip(x, x[1:] + ".", strict=True) if a != b) for x in letters]
    close(runs, ["smwsmwm", "smswsmwswmwsw"], "starts, matmuls and waits, by hop")


@ranks(3)
def test_law_of_work():
    """On each rank two products forward, five backward: all pairs at home, half of them in each other hop."""
    there, back, _ = there_and_back(lambda: FlopCounterMode(display=False))
    product = 2 * (2 * 4 * 4) * 8 * 8 * (1 + 2 / 2)  # batch, heads and their size; pairs
    close([x.get_total_flops() for x in (there, back)], [2 * product, 5 * product], "FLOPs forward and backward")


@ranks(4)
def test_law_of_live_memory():
    """k and v: forward holds this rank's own, those that are here, and the next ones; backward three sums beside them.

    Nothing of other ranks is kept for backward. In each hop o, lse, dq, dk and dv of the part before may be there.
    """
    group, _, _, mine = own(4, [[0, 1, 2, 3]], 4, 4, "zigzag", "", 8)
    *given, do = [x.clone() for x in mine]
    kv, o_lse, seen = 2 * do.nbytes, 5 * do.nbytes // 4, []
    gc.collect(), gc.disable()
    with Live(*given, do) as live:
        kernel = [lambda *part, f=f: seen.append(live.bytes) or f(*part) for f in step.FORMULAS]
        o = step.RingAttention.apply(*(x.requires_grad_() for x in given), group, step.zigzag_visible, kernel)
        kept = live.bytes
        grads = torch.autograd.grad(o, given, do, retain_graph=True)
        both = live.bytes
        del grads, o
        after = live.bytes
    gc.enable()
    close(kept, kv + o_lse, "bytes kept for backward: own k and v, o, lse")
    close([both, after], [kept + kv * 3 // 2, 0], "bytes after backward, and when nobody has the output any more")
    most = max(seen[:4]) <= 3 * kv + 2 * o_lse, max(seen[4:]) <= 8 * kv + o_lse
    close(most, (True, True), f"{max(seen[:4]) / kv} and {max(seen[4:]) / kv} times k and v: whether that is the least")


# --- The model and the loop -----------------------------------------------------------------------------------------


@ranks(4)
@task("loop", 2)
@cases("sizes", [dict(dp=1, cp=4, tp=1), dict(dp=2, cp=2, tp=1), dict(dp=1, cp=2, tp=2), dict(dp=2, cp=1, tp=2)])
def test_shard_context(sizes):
    """Positions, each layer's attention, each record, and the group that sums gradients; any mode."""
    mesh, model = Mesh(**sizes), decoder(seq_len=6, tied=sizes["tp"] == 1)
    mode = step.ContextMode(
        lambda s, rank, n: torch.arange(s)[rank::n], lambda q, k, v, group: f"{q}{k}{v}{group.name}"
    )
    close(step.shard_context(model, mesh, mode, False), torch.arange(6)[mesh["cp"].rank :: sizes["cp"]], "positions")
    for i, layer in model.model.layers.items():
        found = layer.self_attn.attend is attend or layer.self_attn.attend(1, 2, 3)
        close(found, sizes["cp"] == 1 or "123cp", f"what layer {i} calls, True: the model's own attention")
    close({layout_of(param).data_dim for param in model.parameters()}, {"data"}, "data_dim of the records")
    members = [r for r in range(4) if r % sizes["tp"] == mesh.rank % sizes["tp"]]
    close(dist.get_process_group_ranks(mesh["data"].handle), members, "ranks that sum gradients")
    if sizes["cp"] == sizes["tp"]:  # three tokens of a rank, for two of tp
        with pytest.raises(UserError):
            step.shard_context(model, mesh, mode, True)


@ranks(4)
@task("loop", 2)
def test_targets_are_shifted_before_the_sequence_is_sharded():
    """Two of dp, five sequences each; two of cp: the target of a chunk's last token is on another rank."""
    seen, plain, rank = [], Decoder.forward, dist.get_rank()
    with mock.patch.object(Decoder, "forward", lambda model, *given: seen.append(given) or plain(model, *given)):
        train(S5, dict(steps=1, global_batch_size=10, micro_batch_size=2, cp=2, dataset="plain"))
    mine, here = slice(rank // 2 * 5, rank // 2 * 5 + 5), zigzag(2, rank % 2, 8)
    *found, positions = zip(*seen, strict=True)
    close([len(x) for x in found[0]], [2, 2, 1], "sequences of micro-batches")
    whole = [x[mine][:, here] for x in Data("plain", PRESETS["test"], 10, 0).batch(0)]
    each("tokens targets", [torch.cat(some) for some in found], whole)
    each("1 2 3", positions, [here] * 3, when=": positions of a micro-batch")


@ranks(2)
@cases("recompute, again", [("none", 0), ("full", 1)])
def test_law_of_bytes(recompute, again):
    """`sent` over cp: the docstring's formula x 3 layers x 12 micro-batches, and 8 bytes of the norm."""
    train(S5, dict(steps=1))  # makes the preset
    with Watch(step.Config(**BASE | dict(model="test", steps=1, cp=2, recompute=recompute))) as run:
        step.train(run.config, run)
    kv = 2 * 8 * 2 * 8 * 8  # 8 tokens, 2 heads of 8 numbers of fp64
    close(run.history[0]["sent"]["cp"], 3 * 12 * (1 + again + 1 + 2) * kv + 8, "bytes")


ALL = dict(steps=5, global_batch_size=10, micro_batch_size=2)  # beside BASE: micro-batches of 2, 2 and 1


@task("loop", 4)
@cases("n, base, layout", [(4, ALL, dict(cp=2)), (4, {}, dict(cp=4)), (3, dict(seq_len=12), dict(cp=3, sync="ring"))])
def test_cp_trains_to_step_1s_numbers(pools, n, base, layout):
    """With dp, a schedule, and clipping; more ranks than key/value heads; an odd number."""
    equals_step1(pools, n, S5, base, **layout)


@task("loop", 2)
@cases(
    "n, base, layout",
    [
        (4, ALL, dict(cp=2, zero=3)),
        (4, dict(tied=True, recompute="full"), dict(cp=2, tp=2, zero=2)),
        (4, ALL, dict(cp=2, tp=2, sp=False)),
        (2, dict(n_kv_heads=1, tied=True), dict(cp=2, zero=2)),
    ],
)
def test_cp_with_other_flags(pools, n, base, layout):
    """ZeRO over dp x cp, tp with and without sp, recomputation, a tied matrix, one key/value head."""
    equals_step1(pools, n, S5, base, **layout)
