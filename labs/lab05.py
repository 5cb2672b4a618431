"""Lab 5: what is demanded of context parallelism. Functions `..._on_rank` run on the ranks."""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import step05_cp_ring as step05
from common.comm import Mesh
from common.layout import layout_of
from common.model import Decoder
from labs import training
from labs.bench import IN_FP32, Bench, Run, Wrong, numbers
from labs.lab04 import settled
from services.ledger import Ledger
from services.memory import MemoryTimeline
from tests.equivalence import SMALL

CPU = torch.device("cpu")
RUN = dict(optimizer="sgd", n_layers=2, global_batch_size=4, micro_batch_size=2, steps=2)
WHOLE = (2, dict(cp=2, tp=1))
MODES = ("ring", "zigzag", "allgather", "ulysses")


def here() -> tuple[Mesh, Any]:
    """(mesh, group) with all ranks along cp."""
    mesh = Mesh({"dp": 1, "cp": dist.get_world_size(), "tp": 1}, CPU, Ledger())
    return mesh, mesh["cp"]


def sent(mesh: Mesh) -> float:
    """Bytes this rank has sent over cp since the last call."""
    return float(sum(mesh.ledger.take()["traffic"].get("cp", {}).values()))


def held(s: int, n: int, rank: int, mode: str) -> Tensor:
    """The positions of a rank's tokens, by the docstring of the step."""
    if mode in ("ring", "ulysses"):
        return torch.arange(rank * s // n, (rank + 1) * s // n)
    c = s // (2 * n)
    return torch.cat((torch.arange(rank * c, (rank + 1) * c), torch.arange((2 * n - 1 - rank) * c, (2 * n - rank) * c)))


def inputs(seed: int, b: int, s: int, heads: int, kv_heads: int, d: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, of whole sequences."""
    shapes = dict(q=heads, k=kv_heads, v=kv_heads, d_out=heads)
    return [numbers(seed, name, b, s, n, d) for name, n in shapes.items()]


def softmax_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, out, lse) of attention in which query i looks at key j where seen[i, j], written out."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def triangle(s: int) -> Tensor:
    """Which key (column) a query (row) of a sequence may look at."""
    return torch.ones(s, s, dtype=torch.bool).tril()


def whole_attention(seed: int, b: int, s: int, heads: int, kv_heads: int, d: int) -> dict[str, Tensor]:
    """Causal attention to whole sequences: the output, and the gradients of q, k and v."""
    *qkv, d_out = inputs(seed, b, s, heads, kv_heads, d)
    leaves = [x.requires_grad_() for x in qkv]
    _, out, _ = softmax_of(*leaves, triangle(s))
    grads = torch.autograd.grad(out, leaves, d_out)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def at_most(bench: Bench, run: Run, key: str, most: Any):
    """Each rank's number under `key` is `most(rank)` or less. Raises Wrong at the first that is more."""
    for rank in range(run.size):
        found, limit = run.answers[rank][key], most(rank)
        if not found <= limit:
            kind = bench.kind(run, rank, key, found, most, 0.0)
            raise Wrong(f"rank {rank} of {run.size}: {key}: {found:g}, more than {limit:g}{kind}")


# --- task 1: a block, and merging ------------------------------------------------------------------------------------


def block_on_rank(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int) -> dict:
    """Scores, output and lse of a block on the diagonal and of one in the past; dtypes with 16 bits."""
    q, k, v, _ = inputs(seed, b, s, heads, kv_heads, d)
    past = [numbers(seed, name, b, more, kv_heads, d) for name in ("past k", "past v")]
    found: dict[str, Any] = {}
    for name, pair, causal in (("causal", (k, v), True), ("of the past", past, False)):
        out, lse = step05.reference_block(q, *pair, causal)
        found |= {f"a block {name}: scores": step05.block_scores(q, pair[0], causal).exp()}  # exp(-inf) is a number
        found |= {f"a block {name}: out": out, f"a block {name}: lse": lse}
    out, lse = step05.reference_block(*(x.bfloat16() for x in (q, k, v)), True)
    found |= {"bf16: dtype of out": str(out.dtype), "bf16: dtype of lse": str(lse.dtype), "bf16: lse": lse}
    return found


def block_case(bench: Bench) -> tuple[int, ...]:
    """(seed, batch, queries, keys of the past, heads, key/value heads, head size) of task 1."""
    draw = bench.draws()
    kv_heads = draw.choice((1, 2))
    seed, b, s = draw.randrange(10**6), draw.randint(1, 2), draw.randint(3, 6)
    return seed, b, s, s + draw.randint(1, 3), kv_heads * draw.choice((2, 3)), kv_heads, 2 * draw.randint(2, 4)


def block_expected(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int) -> dict:
    """The same by a softmax written out."""
    q, k, v, _ = inputs(seed, b, s, heads, kv_heads, d)
    past = [numbers(seed, name, b, more, kv_heads, d) for name in ("past k", "past v")]
    found = {}
    for name, pair, seen in (("causal", (k, v), triangle(s)), ("of the past", past, torch.ones(s, more).bool())):
        scores, out, lse = softmax_of(q, *pair, seen)
        found |= {f"a block {name}: scores": scores.exp()}
        found |= {f"a block {name}: out": out, f"a block {name}: lse": lse}
    rounded = [x.bfloat16().double() for x in (q, k, v)]
    return found | {"bf16: lse": softmax_of(*rounded, triangle(s))[2]}


def block_values(bench: Bench):
    """Scores, output, lse."""
    case = block_case(bench)
    expected = {key: value for key, value in block_expected(*case).items() if "bf16" not in key}
    bench.same(bench.ranks(1, block_on_rank, *case), lambda r: expected)


def block_precision(bench: Bench):
    """With 16 bits, out has 16, and the lse has 32, and is as exact."""
    case = block_case(bench)
    run = bench.ranks(1, block_on_rank, *case)
    dtypes = {"bf16: dtype of out": "torch.bfloat16", "bf16: dtype of lse": "torch.float32"}
    bench.same(run, lambda r: dtypes)
    expected = {"bf16: lse": block_expected(*case)["bf16: lse"]}
    bench.same(run, lambda r: expected, IN_FP32)


def merge_on_rank(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int) -> dict:
    """Three blocks of keys merged in two orders; also with scores of some hundreds, near and far from each other."""
    found = {}
    for scale in (1, 1000):
        blocks = merge_blocks(seed, b, s, more, heads, kv_heads, d, scale)
        parts = [softmax_of(*block, torch.ones(s, block[1].shape[1]).bool())[1:] for block in blocks]
        for first, *others in ((0, 1, 2), (2, 0, 1)):
            out, lse = (x.clone() for x in parts[first])
            for i in others:
                given = [x.clone() for x in parts[i]]
                step05.merge(out, lse, *given)
            key = f"scores of about {scale}: three blocks merged in order {[first, *others]}: "
            found |= {f"{key}out": out, f"{key}lse": lse}
    return found


def merge_blocks(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int, scale: int) -> list:
    """(q, k, v) of three blocks, for the same queries."""
    q = scale * numbers(seed, "q", b, s, heads, d)
    return [[q, *(numbers(seed, f"{x}{i}", b, more - i, kv_heads, d) for x in "kv")] for i in range(3)]


def merged(bench: Bench, scale: int):
    """One softmax over all keys."""
    case = block_case(bench)
    s = case[2]
    blocks = merge_blocks(*case, scale)
    k, v = (torch.cat([block[i] for block in blocks], 1) for i in (1, 2))
    _, out, lse = softmax_of(blocks[0][0], k, v, torch.ones(s, k.shape[1]).bool())
    expected = {}
    for order in ([0, 1, 2], [2, 0, 1]):
        key = f"scores of about {scale}: three blocks merged in order {order}: "
        expected |= {f"{key}out": out, f"{key}lse": lse}
    bench.same(bench.ranks(1, merge_on_rank, *case), lambda r: expected)


def merge_values(bench: Bench):
    """Ordinary scores."""
    merged(bench, 1)


def merge_far(bench: Bench):
    """exp() of these scores overflows."""
    merged(bench, 1000)


# --- task 2: who holds and sees what ---------------------------------------------------------------------------------


def seen_on_rank(length: int) -> dict:
    """For 2 to 5 ranks: the positions of each, and which pairs of the causal square `visible` covers how often."""
    found: dict[str, Any] = {
        "zigzag, 1 rank, an odd number of tokens: positions": step05.own_positions(7, 0, 1, "zigzag")
    }
    for n in (2, 3, 5):
        s = n * length
        for mode in MODES:
            own = [step05.own_positions(s, rank, n, mode) for rank in range(n)]
            found |= {f"{mode}, {n} ranks: positions of rank {r}": positions for r, positions in enumerate(own)}
        for mode in ("ring", "zigzag"):
            pairs, by_rank = torch.zeros(s, s, dtype=torch.int64), []
            for rank in range(n):
                before = int(pairs.sum())
                for source in range(n):
                    block = step05.visible(rank, source, length, mode == "zigzag")
                    if block is not None:
                        rows, keys, causal = block
                        queries, others = held(s, n, rank, mode)[rows], held(s, n, source, mode)[keys]
                        seen = torch.ones(len(queries), len(others), dtype=torch.int64)
                        pairs[queries[:, None], others] += seen.tril() if causal else seen
                by_rank.append(int(pairs.sum()) - before)
            found[f"{mode}, {n} ranks: how often a query (row) looks at a key (column)"] = pairs
            found[f"{mode}, {n} ranks: pairs of a query and a key, by rank"] = by_rank
    return found


def seen_case(bench: Bench) -> tuple[int]:
    """Tokens of a rank in task 2."""
    return (2 * bench.draws().randint(2, 4),)


def positions(bench: Bench):
    """Contiguous parts, or one chunk from each end."""
    (length,) = seen_case(bench)
    expected = {
        f"{mode}, {n} ranks: positions of rank {rank}": held(n * length, n, rank, mode)
        for n in (2, 3, 5)
        for mode in MODES
        for rank in range(n)
    }
    expected["zigzag, 1 rank, an odd number of tokens: positions"] = torch.arange(7)
    bench.same(bench.ranks(1, seen_on_rank, length), lambda r: expected)


def pairs_seen_once(bench: Bench):
    """The blocks of all ranks tile the causal half of the square."""
    (length,) = seen_case(bench)
    expected = {
        f"{mode}, {n} ranks: how often a query (row) looks at a key (column)": triangle(n * length).long()
        for n in (2, 3, 5)
        for mode in ("ring", "zigzag")
    }
    bench.same(bench.ranks(1, seen_on_rank, length), lambda r: expected)


def equal_work(bench: Bench):
    """Zigzag: all ranks have as many pairs; ring: the last has most."""
    (length,) = seen_case(bench)
    expected = {}
    for n in (2, 3, 5):
        whole = n * length * (n * length + 1) // 2
        expected[f"zigzag, {n} ranks: pairs of a query and a key, by rank"] = [whole // n] * n
        by_rank = [r * length**2 + length * (length + 1) // 2 for r in range(n)]
        expected[f"ring, {n} ranks: pairs of a query and a key, by rank"] = by_rank
    bench.same(bench.ranks(1, seen_on_rank, length), lambda r: expected)


# --- task 3: round the ring ------------------------------------------------------------------------------------------


def parts_on_rank(seed: int, tokens: int) -> dict:
    """What comes round: from whom, in which memory, and how many messages were posted when it was handed out."""
    mesh, group = here()
    own = numbers(seed, "kv", group.size, tokens, 3)[group.rank].clone()
    sources, parts, posted, kept = [], [], [], []
    for source, kv in step05.around_the_ring(own, group):
        sources.append(int(source))
        parts.append(kv.clone())
        posted.append(mesh.ledger.calls["cp", "send"])
        kept.append(kv)
    memory = {kv.data_ptr() for kv in kept}
    found = {"the sources, hop by hop": sources, "messages posted when each part is handed out": posted}
    found |= {f"the part of hop {hop}": part for hop, part in enumerate(parts)}
    found |= {"buffers that parts come into": len(memory - {own.data_ptr()}), "bytes sent": sent(mesh)}
    return found | {"the own part, afterwards": own}


def parts_case(bench: Bench) -> tuple[int, int]:
    """(seed, tokens) of task 3, on four ranks: with fewer, buffers do not take turns."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.randint(2, 7)


def parts_come(bench: Bench):
    """Every part once, the own first."""
    seed, tokens = parts_case(bench)
    kv = numbers(seed, "kv", 4, tokens, 3)

    def expected(rank: int) -> dict:
        order = [(rank - hop) % 4 for hop in range(4)]
        found = {"the sources, hop by hop": order, "the own part, afterwards": kv[rank]}
        return found | {f"the part of hop {hop}": kv[source] for hop, source in enumerate(order)}

    bench.same(bench.ranks(4, parts_on_rank, seed, tokens), expected)


def parts_travel_meanwhile(bench: Bench):
    """The next message is under way while the caller computes, and none goes too many."""
    case = parts_case(bench)
    expected = {"messages posted when each part is handed out": [1, 2, 3, 3], "bytes sent": 3.0 * case[1] * 3 * 8}
    bench.same(bench.ranks(4, parts_on_rank, *case), lambda r: expected)


def two_buffers(bench: Bench):
    """They take turns."""
    run = bench.ranks(4, parts_on_rank, *parts_case(bench))
    bench.same(run, lambda r: {"buffers that parts come into": 2})


# --- task 4: the backward of a block ---------------------------------------------------------------------------------


def back_on_rank(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int) -> dict:
    """Two blocks of keys for the same queries, one causal: each one's part of the gradients; and parts added up."""
    q, kv, d_out, out, lse = back_inputs(seed, b, s, more, heads, kv_heads, d)
    found: dict[str, Any] = {}
    for name, (k, v), causal in (("past", kv[0], False), ("causal", kv[1], True)):
        grads = step05.reference_block_backward(d_out, q, k, v, out, lse, causal)
        found |= {f"the {name} block: {key}": grad for key, grad in zip(("d_q", "d_k", "d_v"), grads, strict=True)}
    narrow = [x.bfloat16() for x in (d_out, q, *kv[1], out)]
    grads = step05.reference_block_backward(*narrow, lse.float(), True)
    found["bf16: dtypes of the gradients"] = sorted({str(grad.dtype) for grad in grads})
    part = torch.stack(kv[1])
    d_q, d_kv = numbers(seed, "d_q before", *q.shape), numbers(seed, "d_kv before", *part.shape)
    step05.add_part_gradients(d_out, q, part, out, lse, None, d_q, d_kv)
    found |= {"d_q after a part that is not seen": d_q.clone(), "d_kv after a part that is not seen": d_kv.clone()}
    half = slice(0, s // 2), slice(s // 2, s)
    step05.add_part_gradients(d_out, q, part, out, lse, (half[1], half[0], False), d_q, d_kv)
    found |= {"d_q after half a part": d_q.clone(), "d_kv after half a part": d_kv.clone()}
    return found


def back_inputs(seed: int, b: int, s: int, more: int, heads: int, kv_heads: int, d: int) -> tuple:
    """q, (past k and v, own k and v), d_out; out and lse of attention to both."""
    q, k, v, d_out = inputs(seed, b, s, heads, kv_heads, d)
    past = [numbers(seed, name, b, more, kv_heads, d) for name in ("past k", "past v")]
    seen = torch.cat((torch.ones(s, more).bool(), triangle(s)), 1)
    _, out, lse = softmax_of(q, *(torch.cat(pair, 1) for pair in zip(past, (k, v), strict=True)), seen)
    return q, (past, [k, v]), d_out, out, lse


def back_case(bench: Bench) -> tuple[int, ...]:
    """(seed, batch, queries, keys of the past, heads, key/value heads, head size) of task 4."""
    draw = bench.draws()
    kv_heads = draw.choice((1, 2))
    seed, b, s = draw.randrange(10**6), draw.randint(1, 2), 2 * draw.randint(2, 3)
    return seed, b, s, s + draw.randint(1, 3), kv_heads * draw.choice((2, 3)), kv_heads, 8 * draw.randint(1, 2)


def part_of(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor) -> list[Tensor]:
    """What some keys contribute to d_q, d_k and d_v: autograd through exp(scores - lse), and D by hand."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in leaves[1:]]
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide[0]) / q.shape[-1] ** 0.5
    p = (scores - lse[..., None]).exp() * seen
    delta = (d_out * out).sum(-1).transpose(1, 2)[..., None]
    d_p = torch.einsum("bqhd,bkhd->bhqk", d_out, wide[1])
    d_scores = (p * (d_p - delta)).detach()
    d_v = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", p.detach(), wide[1]), leaves[2], d_out)[0]
    return [*torch.autograd.grad(scores, leaves[:2], d_scores), d_v]


def block_gradients(bench: Bench):
    """By block, given the lse of all keys."""
    case = back_case(bench)
    q, (past, own), d_out, out, lse = back_inputs(*case)
    s, more = case[2:4]
    expected: dict[str, Any] = {"bf16: dtypes of the gradients": ["torch.bfloat16"]}
    for name, (k, v), seen in (("past", past, torch.ones(s, more)), ("causal", own, triangle(s))):
        parts = part_of(d_out, q, k, v, out, lse, seen)
        expected |= {f"the {name} block: {key}": part for key, part in zip(("d_q", "d_k", "d_v"), parts, strict=True)}
    bench.same(bench.ranks(1, back_on_rank, *case), lambda r: expected)


def parts_added(bench: Bench):
    """To the rows and keys of the block, and nothing where there is none."""
    case = back_case(bench)
    seed, _, s, *_ = case
    q, (_, own), d_out, out, lse = back_inputs(*case)
    d_q, d_kv = numbers(seed, "d_q before", *q.shape), numbers(seed, "d_kv before", *torch.stack(own).shape)
    expected = {"d_q after a part that is not seen": d_q.clone(), "d_kv after a part that is not seen": d_kv.clone()}
    k, v = (x[:, : s // 2] for x in own)
    given = [x[:, s // 2 :] for x in (d_out, q)], [out[:, s // 2 :], lse[:, :, s // 2 :]]
    parts = part_of(*given[0], k, v, *given[1], torch.ones(s - s // 2, s // 2))
    d_q[:, s // 2 :] += parts[0]
    d_kv[:, :, : s // 2] += torch.stack(parts[1:])
    expected |= {"d_q after half a part": d_q, "d_kv after half a part": d_kv}
    bench.same(bench.ranks(1, back_on_rank, *case), lambda r: expected)


# --- task 5: ring attention ------------------------------------------------------------------------------------------


def forward_on_rank(modes: str, seed: int, b: int, s: int, heads: int, kv_heads: int, d: int) -> dict:
    """Outputs, bytes sent and bytes kept, by mode."""
    mesh, group = here()
    found = {}
    for mode in modes.split():
        own = held(s, group.size, group.rank, mode)
        q, k, v = (x[:, own].clone().requires_grad_() for x in inputs(seed, b, s, heads, kv_heads, d)[:3])
        before = [x.detach().clone() for x in (q, k, v)]
        timeline = MemoryTimeline()
        with timeline.phase("forward"):
            out = step05.RingAttention.apply(q, k, v, group, mode)
        found[f"{mode}: bytes kept for backward"] = settled(timeline) - out.nbytes
        found |= {f"{mode}: out": out, f"{mode}: bytes sent forward": sent(mesh)}
        if not all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)):
            raise AssertionError("RingAttention.forward changes its input")
    return found


def backward_on_rank(modes: str, seed: int, b: int, s: int, heads: int, kv_heads: int, d: int) -> dict:
    """Gradients and bytes sent in backward, by mode; with bf16 the bytes alone."""
    mesh, group = here()
    found = {}
    for mode in modes.split():
        own = held(s, group.size, group.rank, mode)
        for dtype in (torch.float64, torch.bfloat16):
            q, k, v, d_out = (x[:, own].to(dtype) for x in inputs(seed, b, s, heads, kv_heads, d))
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = step05.RingAttention.apply(*leaves, group, mode)
            sent(mesh)
            grads = torch.autograd.grad(out, leaves, d_out)
            if dtype == torch.float64:
                found |= {f"{mode}: {name}": grad for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}
            found[f"{mode}, {dtype}: bytes sent backward".replace("torch.", "")] = sent(mesh)
    return found


def ring_case(bench: Bench) -> tuple[int, tuple[int, ...]]:
    """(ranks, (seed, batch, tokens, heads, key/value heads, head size)) of task 5."""
    draw = bench.draws()
    n, kv_heads = draw.choice((3, 4)), draw.choice((1, 2))
    seed, b, s = draw.randrange(10**6), draw.randint(1, 2), 2 * n * draw.randint(1, 3)
    return n, (seed, b, s, kv_heads * draw.choice((2, 3)), kv_heads, 4 * draw.randint(1, 3))


def attention(bench: Bench, function: Any, modes: str, names: tuple[str, ...]):
    """What these modes find is one device's."""
    n, case = ring_case(bench)
    one, s = whole_attention(*case), case[2]
    run = bench.ranks(n, function, modes, *case)
    for mode in modes.split():
        own = [held(s, n, rank, mode) for rank in range(n)]
        bench.same(run, lambda r, mode=mode, own=own: {f"{mode}: {name}": one[name][:, own[r]] for name in names})


def ring_outputs(bench: Bench):
    """Forward of both rings."""
    attention(bench, forward_on_rank, "ring zigzag", ("out",))


def gathered_outputs(bench: Bench):
    """Forward with the all-gather."""
    attention(bench, forward_on_rank, "allgather", ("out",))


def ring_memory(bench: Bench):
    """A ring keeps its own part, out and lse; the all-gather keeps all parts."""
    n, case = ring_case(bench)
    _, b, s, heads, kv_heads, d = case
    for modes, parts in (("ring zigzag", 1), ("allgather", n)):
        run = bench.ranks(n, forward_on_rank, modes, *case)
        for mode in modes.split():
            kept = b * s // n * (parts * 2 * kv_heads * d + heads) * 8
            at_most(bench, run, f"{mode}: bytes kept for backward", lambda r, kept=kept: kept)


def ring_gradients(bench: Bench):
    """Backward of both rings."""
    attention(bench, backward_on_rank, "ring zigzag", ("dq", "dk", "dv"))


def gathered_gradients(bench: Bench):
    """Backward with the all-gather."""
    attention(bench, backward_on_rank, "allgather", ("dq", "dk", "dv"))


def ring_bytes(bench: Bench):
    """The table of the step's docstring, forward and backward, with 64 and with 16 bits."""
    n, case = ring_case(bench)
    _, b, s, _, kv_heads, d = case
    numbers_of_a_part = b * s // n * 2 * kv_heads * d
    for modes in ("ring zigzag", "allgather"):
        forward, backward = (bench.ranks(n, f, modes, *case) for f in (forward_on_rank, backward_on_rank))
        for mode in modes.split():
            there = (n - 1) * numbers_of_a_part * 8.0
            bench.same(forward, lambda r, key=f"{mode}: bytes sent forward", value=there: {key: value})
            for dtype, e, wide in (("float64", 8, 8), ("bfloat16", 2, 4)):
                back = (n - 1) * e + n * wide if modes != "allgather" else (n - 1) * wide
                key = f"{mode}, {dtype}: bytes sent backward"
                bench.same(backward, lambda r, key=key, value=float(back * numbers_of_a_part): {key: value})


# --- task 6: Ulysses, and the model ----------------------------------------------------------------------------------


def swap_on_rank(seed: int, b: int, s: int, heads: int, d: int) -> dict:
    """SwapTokensAndHeads in both directions: values, gradients, bytes."""
    mesh, group = here()
    x, dy = (numbers(seed, name, b, s, heads, d) for name in ("x", "dy"))
    found, n, r = {}, group.size, group.rank
    for name, to_heads, there, back in (("to heads", True, 1, 2), ("to tokens", False, 2, 1)):
        leaf = x.chunk(n, there)[r].clone().requires_grad_()
        sent(mesh)
        y = step05.SwapTokensAndHeads.apply(leaf, group, to_heads)
        found[f"{name}: bytes sent forward"] = sent(mesh)
        y.backward(dy.chunk(n, back)[r].clone())
        found |= {f"{name}: the result": y, f"{name}: the gradient": leaf.grad}
        found[f"{name}: bytes sent backward"] = sent(mesh)
    return found


def model_case(bench: Bench) -> tuple[int, tuple[int, ...]]:
    """(ranks, (seed, batch, tokens, heads, key/value heads, head size)) of task 6: fewer kv heads than ranks."""
    draw = bench.draws()
    n = draw.choice((2, 4))
    seed, b, s = draw.randrange(10**6), draw.randint(1, 2), 2 * n * draw.randint(1, 3)
    return n, (seed, b, s, n * draw.choice((1, 2)), n // 2, 2 * draw.randint(2, 4))


def swaps(bench: Bench):
    """There and back, and the gradients."""
    n, (seed, b, s, heads, _, d) = model_case(bench)
    x, dy = (numbers(seed, name, b, s, heads, d) for name in ("x", "dy"))
    once = (n - 1) / n * x.numel() / n * 8

    def expected(rank: int) -> dict:
        found = {}
        for name, there, back in (("to heads", 1, 2), ("to tokens", 2, 1)):
            found[f"{name}: the result"] = x.chunk(n, back)[rank]
            found[f"{name}: the gradient"] = dy.chunk(n, there)[rank]
            found |= {f"{name}: bytes sent {way}": once for way in ("forward", "backward")}
        return found

    bench.same(bench.ranks(n, swap_on_rank, seed, b, s, heads, d), expected)


def modes_on_rank(modes: str, seed: int, b: int, s: int, heads: int, kv_heads: int, d: int) -> dict:
    """ContextAttention: output, gradients, and bytes sent, by mode."""
    mesh, group = here()
    found = {}
    for mode in modes.split():
        own = held(s, group.size, group.rank, mode)
        q, k, v, d_out = (x[:, own] for x in inputs(seed, b, s, heads, kv_heads, d))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        sent(mesh)
        out = step05.ContextAttention(group, mode)(*leaves)
        found[f"{mode}: bytes sent forward"] = sent(mesh)
        grads = torch.autograd.grad(out, leaves, d_out)
        found |= {f"{mode}: {key}": x for key, x in zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)}
        found[f"{mode}: bytes sent backward"] = sent(mesh)
    return found


def ulysses_and_rings(bench: Bench):
    """All modes, output and gradients."""
    n, case = model_case(bench)
    one, s, names = whole_attention(*case), case[2], ("out", "dq", "dk", "dv")
    run = bench.ranks(n, modes_on_rank, "ulysses zigzag ring allgather", *case)
    for mode in ("ulysses", "zigzag", "ring", "allgather"):
        own = [held(s, n, rank, mode) for rank in range(n)]
        bench.same(run, lambda r, mode=mode, own=own: {f"{mode}: {name}": one[name][:, own[r]] for name in names})


def context_bytes(bench: Bench):
    """The table of the step's docstring: heads are not repeated before a ring, and as little as can be for Ulysses."""
    n, case = model_case(bench)
    _, b, s, heads, kv_heads, d = case
    token = b * s // n * d * 8
    k, q, repeated = 2 * kv_heads * token, heads * token, 2 * max(kv_heads, n) * token
    there = {mode: (n - 1) * k for mode in ("zigzag", "ring", "allgather")} | {
        "ulysses": (n - 1) / n * (2 * q + repeated)
    }
    back = {mode: (n - 1) * k + n * k for mode in ("zigzag", "ring")} | {"allgather": (n - 1) * k}
    back["ulysses"] = there["ulysses"]
    run = bench.ranks(n, modes_on_rank, "ulysses zigzag ring allgather", *case)
    for mode in ("zigzag", "ring", "allgather", "ulysses"):
        expected = {
            f"{mode}: bytes sent forward": float(there[mode]),
            f"{mode}: bytes sent backward": float(back[mode]),
        }
        bench.same(run, lambda r, values=expected: values)


SHARDED = ((1, 4, 1), (2, 2, 1), (1, 2, 2))  # dp, cp, tp


def sharded_on_rank(mode: str, seq_len: int) -> dict:
    """What `shard_context` does to a model and to a mesh, in three layouts of four ranks."""
    found: dict[str, Any] = {}
    for sizes in SHARDED:
        mesh = Mesh(dict(zip(("dp", "cp", "tp"), sizes, strict=True)), CPU, Ledger())
        with torch.device("meta"):
            model = Decoder(step05.Config(**SMALL | dict(n_layers=2, seq_len=seq_len)).model_config())
        own, name = step05.shard_context(model, mesh, mode), "dp {} x cp {} x tp {}: ".format(*sizes)
        cores = [layer.self_attn.attend for layer in model.model.layers.values()]
        here = torch.zeros(4, dtype=torch.int64).scatter_(0, torch.tensor([mesh.rank]), 1)
        found[f"{name}how many ranks sum their gradients (mesh.data)"] = mesh.data.size
        found[f"{name}the ranks of mesh.data, as 0 or 1"] = here
        if mesh.data.size > 1:
            dist.all_reduce(here, group=mesh.data.handle)
        found[f"{name}the positions"] = own
        found[f"{name}the attention of each layer"] = [f"{type(c).__name__} {getattr(c, 'mode', '')}" for c in cores]
        sums = {"+".join(layout_of(param).partial_over) for param in model.parameters()}
        found[f"{name}dimensions over which gradients are noted to be summed"] = sorted(sums)
    return found


def sharded(bench: Bench):
    """Every layer's attention, every record, the positions, and the ranks that sum gradients."""
    draw = bench.draws()
    mode, seq_len = draw.choice(("zigzag", "allgather")), 8 * draw.randint(2, 5)

    def expected(rank: int) -> dict:
        found: dict[str, Any] = {}
        for dp, cp, tp in SHARDED:
            name, grid = f"dp {dp} x cp {cp} x tp {tp}: ", torch.arange(4).view(dp * cp, tp)
            data = torch.zeros(4, dtype=torch.int64).scatter_(0, grid[:, rank % tp], 1)
            found[f"{name}how many ranks sum their gradients (mesh.data)"] = dp * cp
            found[f"{name}the ranks of mesh.data, as 0 or 1"] = data
            found[f"{name}the positions"] = held(seq_len, cp, rank // tp % cp, mode)
            found[f"{name}the attention of each layer"] = [f"ContextAttention {mode}"] * 2
            found[f"{name}dimensions over which gradients are noted to be summed"] = ["cp"]
        return found

    bench.same(bench.ranks(4, sharded_on_rank, mode, seq_len), expected)


def trains(bench: Bench):
    """Two steps on dp 2 x cp 2 are one device's."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), n_kv_heads=draw.choice((1, 2)))
    layout = dict(cp=2, tp=1, cp_mode=draw.choice(("ulysses", "zigzag")))
    training.equal_to_one_device(bench, "step05_cp_ring", 4, base, layout)


# --- the file as it stands -------------------------------------------------------------------------------------------


def picture_run() -> dict:
    """Runs on every rank: losses, bytes sent, and by mode: who computes which pairs, and bytes alive over time."""
    found: dict[str, Any] = training.pictured("step05_cp_ring", json.dumps(RUN | WHOLE[1]))
    _, group = here()
    n, length = 4, 16
    for mode in ("ring", "zigzag"):
        owner = torch.full((n * length, n * length), -1)
        for rank in range(n):
            mine = step05.own_positions(n * length, rank, n, mode)
            for source in range(n):
                block = step05.visible(rank, source, length, mode == "zigzag")
                if block is not None:
                    rows, keys, causal = block
                    queries, others = mine[rows], step05.own_positions(n * length, source, n, mode)[keys]
                    seen = torch.ones(len(queries), len(others), dtype=torch.bool)
                    area = owner[queries[:, None], others]
                    owner[queries[:, None], others] = area.masked_fill(seen.tril() if causal else seen, rank)
        found[f"{mode}: owner"] = owner
    for mode in MODES:
        q, k, v = (torch.ones(1, 64, heads, 16, requires_grad=True) for heads in (8, 4, 4))
        timeline = MemoryTimeline()
        with timeline.phase("forward"):
            step05.ContextAttention(group, mode)(q, k, v).sum().backward()
        found[f"{mode}: bytes"] = timeline.curves()[1]["activations"]
    return found


def squares_and_memory(runs: list[dict]) -> Any:
    """A figure: who computes what, with ring and with zigzag; and bytes alive in attention, forward and backward."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    for axis, mode in zip(axes, ("ring", "zigzag"), strict=False):
        owner = runs[0][f"{mode}: owner"]
        axis.imshow(owner.double().masked_fill(owner < 0, torch.nan), cmap="viridis")
        shares = [f"{(owner == rank).double().sum() / (owner >= 0).sum():.0%}" for rank in range(4)]
        axis.set(title=f"{mode}: ranks 0 to 3\ncompute {', '.join(shares)}", xlabel="keys", ylabel="queries")
    for mode in MODES:
        curve = runs[0][f"{mode}: bytes"]
        axes[2].plot([i / len(curve) for i in range(len(curve))], [n / 1024 for n in curve], label=mode)
    axes[2].set(
        title="attention on rank 0 of 2:\nbytes alive", xlabel="from forward to the end of backward", ylabel="KiB"
    )
    axes[2].legend(loc="lower center")
    return figure


PICTURES = [squares_and_memory]
