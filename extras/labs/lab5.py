"""Lab 5: context parallelism. Parts of a softmax, who sees what, the ring and its way back, the whole model."""

import gc
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from common.comm import Mesh
from common.layout import layout_of
from common.model import attend
from extras.labs.course import FOUND, Case, Lab, Question, Row, Task, as_ours, at_most, demands
from extras.labs.probes import decoder, members, refused, same, there_and_back
from extras.labs.suite import suite
from extras.labs.tape import Tape
from extras.services.memory import MemoryTimeline


def softmax_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention in which query i looks at key j where seen[i, j]; all [b, heads, s, d], heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def triangle(s: int) -> Tensor:
    """Which key (column) a query (row) may look at."""
    return torch.ones(s, s, dtype=torch.bool).tril()


class Block(Case):
    """Task 1: six query heads and three of keys and values, s tokens, of which an earlier part has `past`."""

    b, s, past = 2, 5, 7  # every size is another number

    def heads(self, name: str, n: int, s: int) -> Tensor:
        """[b, n, s, 4]; `large`: all scores are about 880 larger, so the softmax is the same, and exp() is infinite."""
        x = self.draw(name, self.b, n, s, 4)
        if self.sizes.get("large") and "v" not in name:
            x[..., 0] = 42.0
        return x

    def inputs(self) -> list[Tensor]:
        """q, own k and v, those of an earlier part; the last two are slices of something larger."""
        own = [self.heads(name, 3, self.s) for name in "kv"]
        past = [self.heads(f"past {name}", 3, self.past + 1)[:, :, 1:] for name in "kv"]
        return [self.heads("q", 6, self.s), *own, *past]


class Part(Block):
    """A part on the diagonal, and an earlier one, with more keys than queries."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        q, k, v, *past = given = self.inputs()
        before = [x.clone() for x in given]
        for name, keys in (("causal", (k, v)), ("not causal", past)):
            o, lse = step.part_attention(q, *keys, name == "causal")
            yield from as_ours({f"{name}: o": o, f"{name}: lse": lse})
        yield "the inputs stay", same(before, given), True


class Narrow(Block):
    """16 bits."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        lse = step.part_attention(*(x.bfloat16() for x in self.inputs()[:3]), True)[1]
        yield "lse has 32 bits or more", lse.dtype.itemsize >= 4, True
        yield "lse", lse, FOUND


class Merge(Block):
    """Parts of 7, 6 and 5 keys, begun with none; the last one in an order reaches the last two queries only."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        q, lengths = self.inputs()[0], (self.past, self.past - 1, self.past - 2)
        keys = [[self.heads(f"{x} {n}", 3, n) for x in "kv"] for n in lengths]
        parts = [softmax_of(q, *kv, torch.ones(self.s, n).bool()) for kv, n in zip(keys, lengths, strict=True)]
        for order in ((0, 1, 2), (2, 0, 1)):
            o, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
            for i in order:
                some = slice(self.s - 2 if i == order[-1] else 0, None)
                step.merge(o[:, :, some], lse[:, :, some], *(part := [x[:, :, some].clone() for x in parts[i]]))
                yield f"parts {order}: {i} stays", same([x[:, :, some] for x in parts[i]], part), True
            yield from as_ours({f"parts {order}: o": o, f"parts {order}: lse": lse})
        (o, lse), (part, part_lse) = ([x.clone() for x in some] for some in parts[:2])
        step.merge(o, lse, part.bfloat16(), part_lse)
        yield "a part in 16 bits: o", o, FOUND


LARGE = (dict(large=True),)
PARTS = Task(
    ("part_attention", "merge"),
    (*demands(Part, ({},), ("o and lse of one part, causal or not, with fewer key/value heads", 2)),
     *demands(Part, LARGE, ("also if exp() of a score overflows", 1)),
     *demands(Narrow, ({},), ("lse of 16-bit inputs has 32 bits", 1), bound=4e-4),
     *demands(Merge, ({},), ("three parts merged in any order are one softmax", 2)),
     *demands(Merge, LARGE, ("also if exp() of an lse overflows", 1))),
)  # fmt: skip


def halves(length: int) -> tuple[slice, slice, slice]:
    """Of so many tokens: all, the first half, the second half."""
    return slice(0, length), slice(0, length // 2), slice(length // 2, length)


def zigzag(s: int, rank: int, n: int) -> Tensor:
    """The positions of a rank's tokens."""
    chunks = torch.arange(s).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


def zigzag_seen(rank: int, source: int, length: int) -> list[tuple]:
    """The rule of zigzag, as `visible` of the ring."""
    every, first, second = halves(length)
    if source == rank:
        return [(every, every, True)]
    return [(every, first, False) if source < rank else (second, every, False)]


def in_order(s: int, rank: int, n: int) -> Tensor:
    """The positions of the plain ring."""
    return torch.arange(s).chunk(n)[rank]


def in_order_seen(rank: int, source: int, length: int) -> list[tuple]:
    """The plain ring, in smaller parts: up to three, and none of later ranks."""
    every, first, second = halves(length)
    if source == rank:
        return [(first, first, True), (second, first, False), (second, second, True)]
    return [(every, first, False), (every, second, False)] if source < rank else []


RULES = {"zigzag": (zigzag, zigzag_seen), "tokens in order": (in_order, in_order_seen)}
SIZES = ((2, 3), (3, 4), (5, 2))  # ranks, tokens of a chunk


class Positions(Case):
    """Task 2: the tokens of all ranks, for three numbers of ranks; and what cannot be cut: 3 chunks for 2 ranks."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for n, chunk in SIZES:
            for r in range(n):
                yield f"{n} ranks: rank {r}", step.zigzag_positions(2 * n * chunk, r, n), FOUND
        errors = [refused(step.zigzag_positions, s, 0, n) for s, n in ((6, 2), (10, 4), (7, 3), (9, 2))]
        yield "the error", errors, ["UserError"] * 4


class Pairs(Case):
    """How often each pair of a query and a key is computed, and by which rank how many."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for n, chunk in SIZES:
            s, by_rank = 2 * n * chunk, [0] * n
            pairs = torch.zeros(s, s, dtype=torch.int64)
            for rank, source in ((rank, source) for rank in range(n) for source in range(n)):
                queries, keys = (zigzag(s, r, n) for r in (rank, source))
                for some, columns, causal in step.zigzag_visible(rank, source, 2 * chunk):
                    these, those = queries[some], keys[columns]
                    seen = torch.ones(len(these), len(those), dtype=torch.int64)
                    seen = seen.tril() if causal else seen
                    pairs[these[:, None], those] += seen
                    by_rank[rank] += int(seen.sum())
            yield f"{n} ranks: how often a query (row) meets a key (column)", pairs, FOUND
            yield f"{n} ranks: pairs of each rank", by_rank, FOUND


TOKENS = Task(
    ("zigzag_positions", "zigzag_visible"),
    (*demands(Positions, ({},), ("rank r has chunks r and 2n-1-r; a UserError if that cannot be", 2)),
     *demands(Pairs, ({},),
              ("all parts together look at each pair of the causal half once, and at no other", 3, "how often"),
              ("all ranks look at as many pairs", 1, "pairs of each rank"))),
)  # fmt: skip


class Shares(Block):
    """Task 3: each part's share of dq, dk, dv, of attention to all keys. lse has gaps between the heads."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        q, k, v, past_k, past_v = self.inputs()
        seen = torch.cat((torch.ones(self.s, self.past).bool(), triangle(self.s)), 1)
        o, lse = softmax_of(q, torch.cat((past_k, k), 2), torch.cat((past_v, v), 2), seen)
        lse, do = torch.nn.functional.pad(lse, (1, 1))[..., 1:-1], self.draw("do", *o.shape)
        given = (do, q, k, v, o, lse, past_k, past_v)
        before = [x.clone() for x in given]
        own = step.part_gradients(do, q, k, v, o, lse, True)
        past = step.part_gradients(do, q, past_k, past_v, o, lse, False)
        names = ("both parts' dq, added", "causal: dk", "causal: dv", "not causal: dk", "not causal: dv")
        yield from as_ours(dict(zip(names, (own[0] + past[0], *own[1:], *past[1:]), strict=True)))
        yield "the inputs stay", same(before, given), True


class NarrowShares(Block):
    """The same with 16 bits, beside 64: they are found, and returned, with 32."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        q, k, v, *_ = [x.bfloat16() for x in self.inputs()]
        o, lse = softmax_of(*(x.float() for x in (q, k, v)), triangle(self.s))
        do = self.draw("do", *o.shape).bfloat16()
        for name, found in zip("qkv", step.part_gradients(do, q, k, v, o, lse, True), strict=True):
            yield f"the dtype of d{name}", str(found.dtype), FOUND
            yield f"d{name}", found, FOUND


SHARES = Task(
    ("part_gradients",),
    (*demands(Shares, ({},), ("both parts' gradients are those of one softmax", 4)),
     *demands(NarrowShares, ({},), ("16 bits: found and returned in 32", 1), bound=1e-4),
     *demands(Shares, LARGE, ("also if exp() of a score overflows", 1))),
)  # fmt: skip


NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")
PART = 2.0 * 2 * 3 * 14 * 5  # numbers in k and v of a rank's tokens
IDLE, LEFT = "hops that compute while nothing travels", "kept for backward, in parts of k and v"


class Ring(Case):
    """Task 4: whole sequences [2, heads, s, 5] whose tokens are dealt by a rule, 14 to a rank, in halves of 7."""

    def setup(self):
        self.positions, self.visible = RULES[self.rule]
        heads = dict(q=6, k=3, v=3, do=6)
        self.inputs = [self.draw(name, 2, n, self.ranks * 14, 5) for name, n in heads.items()]  # of all ranks

    def own(self, rank: int, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
        """A rank's q, k, v, and its do."""
        *qkv, do = (self.part(rank, x).to(dtype) for x in self.inputs)
        return qkv, do

    def part(self, rank: int, x: Tensor) -> Tensor:
        """A rank's tokens."""
        return x[:, :, self.positions(self.ranks * 14, rank, self.ranks)]

    def idle(self, tape: Tape) -> float:
        """In how many hops nothing was awaited from a neighbour while the rank computed."""
        total = sum(event.kind == "compute" for event in tape.events)
        return self.ranks * (total - tape.hidden("recv")) / total if total else math.inf


class Forward(Ring):
    """Output; what was sent, and when; bytes that are alive between forward and backward."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        (qkv, _), timeline = self.own(mesh.rank), MemoryTimeline()
        before, leaves = [x.clone() for x in qkv], [x.requires_grad_() for x in qkv]
        alive = []

        def visible(*args: Any) -> list:
            alive.append(timeline.total["activations"] / (PART * 8))
            return self.visible(*args)

        timeline.phase("forward")
        with Tape(mesh) as tape, timeline:
            o = step.RingAttention.apply(*leaves, mesh["cp"], visible)
        yield "output", o.clone(), FOUND
        yield "the inputs stay", same(before, qkv), True
        yield "bytes sent", tape.sent(), FOUND
        yield IDLE, self.idle(tape), at_most(1.0)  # only the last hop has nothing that follows
        kept = (timeline.total["activations"] - o.nbytes) / (PART * 8)
        yield LEFT, kept, at_most(2.5)  # own k and v, a copy of q and the lse may stay
        yield f"{LEFT}, and in the last hop", alive[-1], at_most(5.6)  # o, own and another one's k and v, and the lse
        gc.disable()
        output = StorageWeakRef(step.RingAttention.apply(*leaves, mesh["cp"], self.visible).untyped_storage())
        yield f"{LEFT}: the output, when nobody has it", output.expired(), True
        gc.enable()


class Backward(Ring):
    """Gradients; what was sent, and when, in all of which a part or a sum travels; with 16 bits the bytes alone."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        for dtype in (torch.bfloat16, torch.float64):
            qkv, do = self.own(mesh.rank, dtype)
            o = step.RingAttention.apply(*(x.requires_grad_() for x in qkv), mesh["cp"], self.visible)
            with Tape(mesh) as tape:
                grads = torch.autograd.grad(o, qkv, do)
            yield f"{dtype}: bytes sent", tape.sent(), FOUND
            yield f"{dtype}: dtypes", [str(grad.dtype) for grad in grads], FOUND
        yield from as_ours(dict(zip(NAMES[1:], grads, strict=True)))
        yield IDLE, self.idle(tape), at_most(0.0)


ZIGZAG, IN_ORDER = ((dict(mesh=dict(cp=4), rule=rule),) for rule in RULES)
ROUND = Task(
    ("RingAttention.forward", "RingAttention.backward"),
    (*demands(
         Forward, ZIGZAG,
         ("forward: the output is one device's", 3, "output", "inputs"),
         ("forward sends n - 1 parts, and not more heads than there are", 1, "bytes sent"),
         ("forward computes while the next part travels", 2, IDLE),
         ("no part of another rank is kept for backward", 1, LEFT),
     ),
     *demands(Forward, IN_ORDER, ("forward follows `visible`, too", 1, "output")),
     *demands(
         Backward, ZIGZAG,
         ("backward: the gradients are one device's", 3, "gradient of"),
         ("backward sends n - 1 parts and n sums; sums have 32 bits or more", 1, "bytes sent", "dtypes"),
         ("backward computes while parts and sums travel", 2, IDLE),
     ),
     *demands(Backward, IN_ORDER, ("backward follows `visible`", 1, "gradient of"))),
)  # fmt: skip


class Attend(Ring):
    """Task 5: attention as the model calls it: [batch, seq/n, heads, head_dim]."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        *leaves, dy = (self.part(mesh.rank, x).transpose(1, 2) for x in self.inputs)
        more = dict(visible=self.visible) if self.rule != "zigzag" else {}
        attention = lambda *qkv: step.ring_attention(*qkv, mesh["cp"], **more)  # noqa: E731
        yield from as_ours(there_and_back(NAMES, attention, leaves, dy, mesh))


def every_other(s: int, rank: int, n: int) -> Tensor:
    """Another way to deal tokens: every n-th."""
    return torch.arange(s)[rank::n]


class Shard(Case):
    """What `shard_context` does to a model and a mesh, with a mode of our own."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        model = decoder(seq_len=24, tied=self.tied)
        mode = step.ContextMode(every_other, lambda q, k, v, group: f"{q}{k}{v} {group.name} {group.rank}")
        yield "tokens", step.shard_context(model, mesh, mode, True), FOUND
        cores = [layer.self_attn.attend for layer in model.model.layers.values()]
        yield "attention of each layer", [core is attend or core("q", "k", "v") for core in cores], FOUND
        yield "data_dim of the parameters", sorted({layout_of(p).data_dim for p in model.parameters()}), FOUND
        yield 'ranks of mesh["data"]', members(mesh, "data"), FOUND


class Refused(Case):
    """Three tokens on each of two ranks of tp."""

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        mode = step.ContextMode(every_other, attend)
        yield "the error", refused(step.shard_context, decoder(), mesh, mode, True), "UserError"


MESHES = tuple(
    dict(mesh=dict(dp=dp, cp=cp, tp=tp), tied=dp != tp) for dp, cp, tp in ((1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1))
)
WHOLE = Task(
    ("ring_attention", "shard_context"),
    (*demands(Attend, ZIGZAG + IN_ORDER,
              ("attention as the model calls it, both ways, with as few bytes as can be", 2)),
     *demands(Shard, MESHES, ("every layer, every record, the positions and the ranks that sum gradients", 2)),
     *demands(Refused, (dict(mesh=dict(dp=1, cp=2, tp=2)),), ("tokens that tp cannot divide are a UserError", 1)),
     suite(4, "cp", "cp 3", "step 5", "step 5, zero", "step 5, flash", "step 5, bf16", "step 5, saved",
           says="--cp trains as one device: with two and three ranks, tp, ZeRO, three steps, a variant")),
)  # fmt: skip


def ring_bytes(cp: int, b: int, k: int, s: int, L: int, kv: int, back: int = 1, wide: int = 4, own: bool = True) -> int:
    """What a rank (not `own`: all ranks together) sends over cp in a step, bf16, heads of size 128."""
    tokens = b * s // cp if own else b * s
    return k * L * tokens * 2 * kv * 128 * ((cp - 1) * 2 + back * ((cp - 1) * 2 + cp * wide))


QUESTION = Question(
    dict(cp=(4, 8, 16), b=(1, 2), k=(3, 5, 7), s=range(16384, 65537, 8192), L=(16, 24, 32), kv=(2, 4, 8)),
    ring_bytes,
    {"this is one micro-batch": dict(k=1), "this is forward alone": dict(back=0),
     "gradients of k and v are sums, and travel in fp32": dict(wide=2), "this is all ranks together": dict(own=False)},
)  # fmt: skip

LAB = Lab(5, ("step05_cp_ring",), (PARTS, TOKENS, SHARES, ROUND, WHOLE), QUESTION, flags="--cp 2 --tp 2")
