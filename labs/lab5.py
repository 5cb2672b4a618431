"""Lab 5: context parallelism. Parts of a softmax, who sees what, the ring and its way back, the whole model."""

import math
from random import Random
from typing import Any

import torch
from torch import Tensor

from common.comm import Mesh, all_reduce
from common.layout import layout_of
from common.model import Decoder, ModelConfig, attend
from labs.course import Case, Criterion, Lab, Most, Question, Task, demands
from labs.tape import Tape
from labs.training import trains
from services.memory import MemoryTimeline

# Every size is another number: a transposed dimension cannot go unnoticed.
BLOCK = dict(b=2, heads=6, kv_heads=3, d=4, s=5, past=7)
RING = dict(b=2, heads=6, kv_heads=3, d=5, length=14)  # a rank's tokens; halves of 7
LARGE = dict(scale=900)  # of scores
RANKS = (dict(sizes_of=((2, 3), (3, 4), (5, 2))),)  # (ranks, tokens of a chunk)
ZIGZAG, IN_ORDER = (dict(mesh=dict(cp=4), rule=rule) | RING for rule in ("zigzag", "tokens in order"))
MESHES = tuple(
    dict(mesh=dict(dp=dp, cp=cp, tp=tp), seq_len=24, tied=dp != tp)
    for dp, cp, tp in ((1, 4, 1), (2, 2, 1), (1, 2, 2), (4, 1, 1))
)
NAMES = ("output", "gradient of q", "gradient of k", "gradient of v")


def refused(function: Any, *args: Any) -> str:
    """The kind of error that a call ends with."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def changed(before: list[Tensor], after: list[Tensor]) -> list[int]:
    """Which of these tensors are not what they were."""
    return [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if not torch.equal(x, y)]


def softmax_of(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention in which query i looks at key j where seen[i, j]; all [b, heads, s, d], heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def triangle(s: int) -> Tensor:
    """Which key (column) a query (row) may look at."""
    return torch.ones(s, s, dtype=torch.bool).tril()


# --- task 1: a part of the keys, and merging -------------------------------------------------------------------------


def block_inputs(case: Case) -> list[Tensor]:
    """q, own k and v, those of an earlier part; the last two are slices of something larger."""
    c = case
    q, k, v = (
        case.draw(name, c.b, n, c.s, c.d) for name, n in zip("qkv", (c.heads, c.kv_heads, c.kv_heads), strict=True)
    )
    past = [case.draw(f"past {name}", c.b, c.kv_heads, c.past + 1, c.d)[:, :, 1:] for name in "kv"]
    return [q * getattr(case, "scale", 1), k, v, *past]


def one_part(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """part_attention, written out."""
    return softmax_of(q, k, v, triangle(q.shape[2]) if causal else torch.ones(q.shape[2], k.shape[2]).bool())


def parts(attention: Any, case: Case) -> dict[str, Any]:
    """A part on the diagonal, and an earlier one, with more keys than queries; with 16 bits the lse alone."""
    q, k, v, past_k, past_v = given = block_inputs(case)
    before = [x.clone() for x in given]
    own, past = attention(q, k, v, True), attention(q, past_k, past_v, False)
    found = {"causal: o": own[0], "causal: lse": own[1], "not causal: o": past[0], "not causal: lse": past[1]}
    return found | {"inputs that were changed": changed(before, given)}


def narrow_on_rank(step: Any, case: Case, _: Mesh) -> dict[str, Any]:
    """16 bits."""
    lse = step.part_attention(*(x.bfloat16() for x in block_inputs(case)[:3]), True)[1]
    return {"lse has 32 bits or more": lse.dtype.itemsize >= 4, "lse": lse}


def narrow_expected(_: int, case: Case) -> dict[str, Any]:
    """Of the rounded inputs."""
    rounded = (x.bfloat16().double() for x in block_inputs(case)[:3])
    return {"lse has 32 bits or more": True, "lse": one_part(*rounded, True)[1]}


ORDERS = ((0, 1, 2), (2, 0, 1))


def three_parts(case: Case) -> list[list[Tensor]]:
    """(q, k, v) of three parts of 7, 6 and 5 keys, for the same queries."""
    q, heads = block_inputs(case)[0], case.kv_heads
    return [[q, *(case.draw(f"{x} {i}", case.b, heads, case.past - i, case.d) for x in "kv")] for i in range(3)]


def merge_on_rank(step: Any, case: Case, _: Mesh) -> dict[str, Any]:
    """Three parts, begun with none; the last one in an order reaches the last two queries only."""
    parts, found = [one_part(*part, False) for part in three_parts(case)], {}
    for order in ORDERS:
        o, lse = torch.zeros_like(parts[0][0]), torch.full_like(parts[0][1], -torch.inf)
        for i in order:
            rows = slice(case.s - 2 if i == order[-1] else 0, None)
            step.merge(o[:, :, rows], lse[:, :, rows], *(x[:, :, rows].clone() for x in parts[i]))
        found |= {f"parts {order}: o": o, f"parts {order}: lse": lse}
    return found


def merge_expected(_: int, case: Case) -> dict[str, Any]:
    """One softmax over all keys that a query sees."""
    parts, found = three_parts(case), {}
    for order in ORDERS:
        k, v = (torch.cat([parts[i][x] for i in order], 2) for x in (1, 2))
        seen = torch.ones(case.s, k.shape[2]).bool()
        seen[: case.s - 2, -parts[order[-1]][1].shape[2] :] = False
        o, lse = softmax_of(parts[0][0], k, v, seen)
        found |= {f"parts {order}: o": o, f"parts {order}: lse": lse}
    return found


PART = (lambda step, case, _: parts(step.part_attention, case)), (lambda _, case: parts(one_part, case))
PARTS = Task(
    "a part of the keys, and merging two", 25, ("part_attention", "merge"),
    "the first picture of the step; same_heads and scaled_scores in the file; Dao et al. 2022 (FlashAttention), 3.1",
    ("lse is the log of the sum of exp(score) over the keys of this part. logsumexp(-1) subtracts the largest "
     "score by itself, so nothing overflows. With it, the softmax is exp(scores - lse).",
     "merge: o is an average of two outputs. The share of the new one is e^part_lse / (e^lse + e^part_lse). "
     "Divide both by e^part_lse: it is a sigmoid. It is found before lse changes.",
     "Both tensors of merge are changed in place (lerp_, copy_), because the caller gives it views. logaddexp "
     "adds two sums of exponentials; if one is empty, its lse is minus infinity, and that is right too.",),
    (Criterion("o and lse of one part, causal or not, with fewer key/value heads", 2, *PART, (BLOCK,)),
     Criterion("also if exp() of a score overflows", 1, *PART, (BLOCK | LARGE,)),
     Criterion("lse of 16-bit inputs has 32 bits", 1, narrow_on_rank, narrow_expected, (BLOCK,), bound=4e-4),
     Criterion("three parts merged in any order are one softmax", 2, merge_on_rank, merge_expected, (BLOCK,)),
     Criterion("also if exp() of an lse overflows", 1, merge_on_rank, merge_expected, (BLOCK | LARGE,)),),
    ("lse_in_bf16",),
)  # fmt: skip


# --- task 2: who holds and sees what ---------------------------------------------------------------------------------


def zigzag(s: int, rank: int, n: int) -> Tensor:
    """The positions of a rank's tokens."""
    chunks = torch.arange(s).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


def in_order(s: int, rank: int, n: int) -> Tensor:
    """Those of the plain ring."""
    return torch.arange(s).chunk(n)[rank]


def zigzag_seen(rank: int, source: int, length: int) -> list[tuple]:
    """The rule of zigzag, as `visible` of the ring."""
    every, first, second = ((slice(None), slice(None), s) for s in halves(length))
    if source == rank:
        return [(every, every, True)]
    return [(every, first, False) if source < rank else (second, every, False)]


def in_order_seen(rank: int, source: int, length: int) -> list[tuple]:
    """The plain ring, in smaller parts: up to three, and none of later ranks."""
    every, first, second = ((slice(None), slice(None), s) for s in halves(length))
    if source == rank:
        return [(first, first, True), (second, first, False), (second, second, True)]
    return [(every, first, False), (every, second, False)] if source < rank else []


def halves(length: int) -> tuple[slice, slice, slice]:
    """All, the first half, the second half."""
    return slice(0, length), slice(0, length // 2), slice(length // 2, length)


RULES = {"zigzag": (zigzag, zigzag_seen), "tokens in order": (in_order, in_order_seen)}


def positions(rule: Any, case: Case) -> dict[str, Any]:
    """Of all ranks of three numbers of ranks."""
    return {f"{n} ranks: rank {r}": rule(2 * n * chunk, r, n) for n, chunk in case.sizes_of for r in range(n)}


def positions_on_rank(step: Any, case: Case, _: Mesh) -> dict[str, Any]:
    """Also what cannot be cut: 3 chunks for 2 ranks."""
    return positions(step.zigzag_positions, case) | {"the error": refused(step.zigzag_positions, 6, 0, 2)}


def pairs_on_rank(step: Any, case: Case, _: Mesh) -> dict[str, Any]:
    """How often each pair of a query and a key is computed, and by which rank how many."""
    found: dict[str, Any] = {}
    for n, chunk in case.sizes_of:
        s, length = 2 * n * chunk, 2 * chunk
        pairs, by_rank = torch.zeros(s, s, dtype=torch.int64), [0] * n
        for rank in range(n):
            for source in range(n):
                queries, keys = (zigzag(s, r, n).view(1, 1, -1, 1) for r in (rank, source))
                for rows, columns, causal in step.zigzag_visible(rank, source, length):
                    some, others = queries[rows].flatten(), keys[columns].flatten()
                    seen = torch.ones(len(some), len(others), dtype=torch.int64)
                    seen = seen.tril() if causal else seen
                    pairs[some[:, None], others] += seen
                    by_rank[rank] += int(seen.sum())
        found[f"{n} ranks: how often a query (row) meets a key (column)"] = pairs
        found[f"{n} ranks: pairs of each rank"] = by_rank
    return found


def pairs_expected(_: int, case: Case) -> dict[str, Any]:
    """Each pair of the causal half once, as many on each rank."""
    found: dict[str, Any] = {}
    for n, chunk in case.sizes_of:
        found[f"{n} ranks: how often a query (row) meets a key (column)"] = triangle(2 * n * chunk).long()
        found[f"{n} ranks: pairs of each rank"] = [chunk * (2 * n * chunk + 1)] * n
    return found


TOKENS = Task(
    "who holds which tokens, and sees what", 20, ("zigzag_positions", "zigzag_visible"),
    "ZIGZAG in the docstring of the step, with its picture",
    ("chunk() cuts a tensor into equal parts. How many parts are there for n ranks, and which two are rank r's?",
     "zigzag_visible speaks of rows of our tokens and of theirs, not of positions. Draw ranks 0 and 1 of 2: "
     "chunks 0 3 and 1 2. Which of rank 0's are before chunk 1, and which before chunk 2?",
     "Our own part is one causal square. A smaller rank's first half is before all of our tokens. All of a larger "
     "rank's tokens are before our second half. np.s_[:, :, a:b] is an index of [batch, heads, length, d].",),
    (Criterion("rank r has chunks r and 2n-1-r; a UserError if that cannot be", 2, positions_on_rank,
               lambda _, case: positions(zigzag, case) | {"the error": "UserError"}, RANKS),
     *demands(
         pairs_on_rank, pairs_expected, RANKS,
         ("all parts together look at each pair of the causal half once, and at no other", 3, "how often"),
         ("all ranks look at as many pairs", 1, "pairs of each rank"),
     ),),
    ("not_causal_at_home", "cut_in_order"),
)  # fmt: skip


# --- task 3: the backward of a part ----------------------------------------------------------------------------------


def whole_softmax(case: Case) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Leaves q, k, v, past k, past v; o and lse of attention to all keys; do."""
    leaves = [x.requires_grad_() for x in block_inputs(case)]
    q, k, v, past_k, past_v = leaves
    seen = torch.cat((torch.ones(case.s, case.past).bool(), triangle(case.s)), 1)
    o, lse = softmax_of(q, torch.cat((past_k, k), 2), torch.cat((past_v, v), 2), seen)
    return leaves, o, lse, case.draw("do", *o.shape)


def back_on_rank(step: Any, case: Case, _: Mesh) -> dict[str, Any]:
    """Each part's share of dq, dk, dv. lse has gaps between the heads."""
    leaves, o, lse, do = whole_softmax(case)
    wider = torch.zeros(*lse.shape[:2], case.s + 2, dtype=lse.dtype)
    wider[..., 1:-1] = lse.detach()
    q, k, v, past_k, past_v, o, lse = given = [*(x.detach() for x in (*leaves, o)), wider[..., 1:-1]]
    before = [x.clone() for x in given]
    own = step.part_gradients(do, q, k, v, o, lse, True)
    past = step.part_gradients(do, q, past_k, past_v, o, lse, False)
    found = dict(zip(SHARED, (own[0] + past[0], *own[1:], *past[1:]), strict=True))
    return found | {"inputs that were changed": changed(before, given)}


def back_expected(_: int, case: Case) -> dict[str, Any]:
    """Autograd through the whole softmax."""
    leaves, o, _lse, do = whole_softmax(case)
    found = dict(zip(SHARED, torch.autograd.grad(o, leaves, do), strict=True))
    return found | {"inputs that were changed": []}


SHARED = ("both parts' dq, added", "causal: dk", "causal: dv", "not causal: dk", "not causal: dv")
SHARES = Task(
    "the backward of one part", 25, ("part_gradients",),
    "the four formulas in the docstring of part_gradients; Dao et al. 2022, appendix B.2",
    ("P = exp(scores - lse) with the lse that is given. It is no softmax of this part: its rows add up to less "
     "than 1. rowsum(do * o) is one number for each query and head, of attention to all keys, too.",
     "1/sqrt(d) belongs to dq and to dk. dk and dv come out for each query head: those that share a key/value "
     "head are added up.",
     "same_heads repeats a key/value head for its query heads, beside one another. unflatten(1, (kv_heads, "
     "-1)).sum(2) is the reverse. Compute in the dtype that same_heads returns.",),
    (Criterion("both parts' gradients are those of one softmax", 4, back_on_rank, back_expected, (BLOCK,)),
     Criterion("also if exp() of a score overflows", 1, back_on_rank, back_expected, (BLOCK | LARGE,)),),
)  # fmt: skip


# --- task 4: the ring ------------------------------------------------------------------------------------------------


def whole(case: Case) -> list[Tensor]:
    """q, k, v and do of whole sequences, [b, heads, s, d]."""
    c, s = case, case.ranks * case.length
    return [case.draw(name, c.b, n, s, c.d) for name, n in zip(("q", "k", "v", "do"), (6, 3, 3, 6), strict=True)]


def one_device(case: Case) -> dict[str, Tensor]:
    """Causal attention to whole sequences: o, and gradients of q, k and v."""
    *qkv, do = whole(case)
    leaves = [x.requires_grad_() for x in qkv]
    o, _ = softmax_of(*leaves, triangle(case.ranks * case.length))
    return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


def own_parts(case: Case, mesh: Mesh, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Any]:
    """This rank's q, k, v as leaves, its do, and the rule of who sees whom."""
    positions, visible = RULES[getattr(case, "rule", "zigzag")]
    here = positions(case.ranks * case.length, mesh["cp"].rank, case.ranks)
    *qkv, do = (x[:, :, here].to(dtype) for x in whole(case))
    return [x.requires_grad_() for x in qkv], do, visible


def own_rows(case: Case, rank: int, x: Tensor) -> Tensor:
    """A rank's tokens of [b, heads, s, d]."""
    return x[:, :, RULES[case.rule][0](case.ranks * case.length, rank, case.ranks)]


def part_bytes(case: Case, width: int = 8) -> float:
    """k and v of a rank's tokens."""
    return 2.0 * case.b * case.kv_heads * case.length * case.d * width


def idle_parts(tape: Tape, n: int) -> float:
    """In how many of n hops nothing travelled while the rank computed."""
    total = sum(kind == "compute" for kind, *_ in tape.events)
    return n * (total - tape.hidden()) / total if total else math.inf


def forward_on_rank(step: Any, case: Case, mesh: Mesh) -> dict[str, Any]:
    """Output; what was sent, and when; bytes that are alive between forward and backward."""
    qkv, _, visible = own_parts(case, mesh)
    before, timeline = [x.detach().clone() for x in qkv], MemoryTimeline()
    timeline.phase("forward")
    with Tape(mesh) as tape, timeline:
        o = step.RingAttention.apply(*qkv, mesh["cp"], visible)
    found = {"output": o, "inputs that were changed": changed(before, qkv), "bytes sent": tape.sent()}
    found["hops that compute while nothing travels"] = idle_parts(tape, case.ranks)
    return found | {
        "kept for backward, in parts of k and v": (timeline.total["activations"] - o.nbytes) / part_bytes(case)
    }


def forward_expected(rank: int, case: Case) -> dict[str, Any]:
    """One device's rows. Only the last hop has nothing that follows. Own k and v, a copy of q and the lse may stay."""
    found = {"output": own_rows(case, rank, one_device(case)["output"]), "inputs that were changed": []}
    found |= {"bytes sent": {"cp": (case.ranks - 1) * part_bytes(case)}}
    return found | {
        "hops that compute while nothing travels": Most(1.0),
        "kept for backward, in parts of k and v": Most(2.5),
    }


def backward_on_rank(step: Any, case: Case, mesh: Mesh) -> dict[str, Any]:
    """Gradients; what was sent, and when; with 16 bits the bytes alone."""
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float64):
        qkv, do, visible = own_parts(case, mesh, dtype)
        o = step.RingAttention.apply(*qkv, mesh["cp"], visible)
        with Tape(mesh) as tape:
            grads = torch.autograd.grad(o, qkv, do)
        found |= {f"{dtype}: bytes sent": tape.sent(), f"{dtype}: dtypes": [str(grad.dtype) for grad in grads]}
    found |= dict(zip(NAMES[1:], grads, strict=True))
    return found | {"hops that compute while nothing travels": idle_parts(tape, case.ranks)}


def backward_expected(rank: int, case: Case) -> dict[str, Any]:
    """One device's. A part or a sum travels in every hop; k and v n - 1 times, sums n times, in fp32 at least."""
    found = {name: own_rows(case, rank, one_device(case)[name]) for name in NAMES[1:]}
    for dtype in (torch.bfloat16, torch.float64):
        sent = sum(part_bytes(case, width) for width in [dtype.itemsize] * 3 + [max(4, dtype.itemsize)] * 4)
        found |= {f"{dtype}: bytes sent": {"cp": sent}, f"{dtype}: dtypes": [str(dtype)] * 3}
    return found | {"hops that compute while nothing travels": Most(0.0)}


ROUND = Task(
    "the ring, there and back", 50, ("RingAttention.forward", "RingAttention.backward"),
    "the docstring of the step from ZIGZAG on; exchange and Pending in common/comm.py; Liu et al. 2023, section 3",
    ("Begin with forward: it earns points alone. In hop h the part of rank r - h is here. Send it on, receive "
     "the next one into other memory, compute meanwhile, then wait. The last hop sends nothing.",
     "`visible` says what to compute with: a list, which may be empty. o[rows] is a view, so merge changes o. "
     "Backward needs q, our own k and v, o and lse: no part of another rank, as these come again.",
     "Backward: what you hold is a sum for the part that is here. Take what has come from the left, add your "
     "share, send it to the right. In hop h it travels while you compute the share of hop h+1. The n-th message "
     "brings home the sum for your own part. Sums are in wide(dtype) until the end.",),
    (*demands(
         forward_on_rank, forward_expected, (ZIGZAG,),
         ("forward: the output is one device's", 3, "output", "inputs"),
         ("forward sends n - 1 parts, and not more heads than there are", 1, "bytes sent"),
         ("forward computes while the next part travels", 2, "hops"),
         ("no part of another rank is kept for backward", 1, "kept for"),
     ),
     *demands(forward_on_rank, forward_expected, (IN_ORDER,), ("forward follows `visible`, too", 1, "output")),
     *demands(
         backward_on_rank, backward_expected, (ZIGZAG,),
         ("backward: the gradients are one device's", 3, "gradient of"),
         ("backward sends n - 1 parts and n sums; sums have 32 bits or more", 1, "bytes sent", "dtypes"),
         ("backward computes while parts and sums travel", 2, "hops"),
     ),
     *demands(backward_on_rank, backward_expected, (IN_ORDER,), ("backward follows `visible`", 1, "gradient of")),),
    ("wrong_source", "no_final_rotation", "keys_of_hop_0_in_backward", "own_share_only"),
)  # fmt: skip


# --- task 5: the whole model -----------------------------------------------------------------------------------------


def attend_on_rank(step: Any, case: Case, mesh: Mesh) -> dict[str, Any]:
    """As the model calls it: [batch, seq/n, heads, head_dim]."""
    qkv, do, visible = own_parts(case, mesh)
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in qkv]
    more = dict(visible=visible) if case.rule != "zigzag" else {}
    with Tape(mesh) as tape:
        o = step.ring_attention(*leaves, mesh["cp"], **more)
        grads = torch.autograd.grad(o, leaves, do.transpose(1, 2))
    return dict(zip(NAMES, (o, *grads), strict=True)) | {"bytes sent": tape.sent()}


def attend_expected(rank: int, case: Case) -> dict[str, Any]:
    """One device's; the docstring's bytes."""
    found = {name: own_rows(case, rank, x).transpose(1, 2) for name, x in one_device(case).items()}
    return found | {"bytes sent": {"cp": (3 * case.ranks - 2) * part_bytes(case)}}


def every_other(s: int, rank: int, n: int) -> Tensor:
    """Another way to deal tokens: every n-th."""
    return torch.arange(s)[rank::n]


def shard_on_rank(step: Any, case: Case, mesh: Mesh) -> dict[str, Any]:
    """What `shard_context` does to a model and a mesh, with a mode of our own."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(16, 3, 4, 2, 24, vocab_size=31, seq_len=case.seq_len, tied=case.tied))
    mode = step.ContextMode(every_other, lambda q, k, v, group: f"{q}{k}{v} {group.name} {group.rank}")
    found: dict[str, Any] = {"tokens": step.shard_context(model, mesh, mode)}
    cores = [layer.self_attn.attend for layer in model.model.layers.values()]
    found["attention of each layer"] = [core is attend or core("q", "k", "v") for core in cores]
    found["data_group of the parameters"] = sorted({layout_of(param).data_group for param in model.parameters()})
    here = torch.zeros(mesh.world).index_fill_(0, torch.tensor([mesh.rank]), 1.0)
    all_reduce(here, mesh["data"]).wait()
    return found | {'ranks of mesh["data"]': here.nonzero().flatten()}


def shard_expected(rank: int, case: Case) -> dict[str, Any]:
    """Every layer, every record, the positions, and who sums gradients."""
    dp, cp, tp = case.mesh.values()
    position = rank // tp % cp
    found: dict[str, Any] = {"tokens": every_other(case.seq_len, position, cp)}
    found["data_group of the parameters"] = ["data"]
    found["attention of each layer"] = [f"qkv cp {position}" if cp > 1 else True] * 3
    return found | {'ranks of mesh["data"]': torch.arange(dp * cp) * tp + rank % tp}


def refusal_on_rank(step: Any, case: Case, mesh: Mesh) -> dict[str, Any]:
    """Three tokens on each of two ranks of tp."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(16, 3, 4, 2, 24, vocab_size=31, seq_len=6))
    return {"the error": refused(step.shard_context, model, mesh, step.ContextMode(every_other, attend))}


WHOLE = Task(
    "the whole model", 25, ("ring_attention", "shard_context"),
    "`attend` and `Attention` of common/model.py; Layout and note_layout of common/layout.py; `train` of the step",
    ("The model has [batch, seq, heads, head_dim], the ring [batch, heads, s/n, d]. A key/value head is never "
     "repeated before it travels.",
     'Ranks of dp and of cp see other tokens: mesh.join("data", "dp", "cp") makes the group that sums '
     "gradients, also if cp is 1. Whose records have to say so?",
     "If cp is 1, return torch.arange(seq_len) and leave the model alone. Otherwise each layer's "
     "self_attn.attend becomes partial(mode.attention, group=...), and the positions come from mode.positions.",),
    (Criterion("attention as the model calls it, both ways, with as few bytes as can be", 2, attend_on_rank,
               attend_expected, (ZIGZAG, IN_ORDER)),
     Criterion("every layer, every record, the positions and the ranks that sum gradients", 2, shard_on_rank,
               shard_expected, MESHES),
     Criterion("tokens that tp cannot divide are a UserError", 1, refusal_on_rank,
               lambda *_: {"the error": "UserError"}, (dict(mesh=dict(dp=1, cp=2, tp=2)),)),
     trains(4, (4, dict(cp=2, zero=1)), (4, dict(cp=2, tp=2))),),
    ("not_summed_over_cp",),
)  # fmt: skip


def draw_ring(draw: Random) -> dict[str, int]:
    """A model and a layout."""
    return dict(cp=draw.choice((4, 8, 16)), b=draw.choice((1, 2)), k=draw.choice((3, 5, 7)), 
                s=8192 * draw.randint(2, 8), L=draw.choice((16, 24, 32)), kv=draw.choice((2, 4, 8)))  # fmt: skip


def ring_bytes(v: dict[str, int], forward: int = 1, back: int = 1, wide: int = 4, kv: int = 0, k: int = 0) -> float:
    """What a rank sends over cp in a step, bf16, heads of size 128."""
    n, part = v["cp"], v["b"] * v["s"] // v["cp"] * 2 * (kv or v["kv"]) * 128
    return (k or v["k"]) * v["L"] * part * ((n - 1) * 2 * forward + back * ((n - 1) * 2 + n * wide))


QUESTION = Question(
    "--cp {cp}, bf16, {L} layers, {kv} key/value heads of size 128, {k} micro-batches of {b} sequences of {s} tokens,\n"
    "nothing recomputed. How many bytes does a rank send over cp in one step?",
    draw_ring,
    ring_bytes,
    mistakes=(
        ("this is one micro-batch", lambda v: ring_bytes(v, k=1)),
        ("this is forward alone", lambda v: ring_bytes(v, back=0)),
        ("gradients of k and v are sums, and travel in fp32", lambda v: ring_bytes(v, wide=2)),
        ("this is all ranks together", lambda v: ring_bytes(v) * v["cp"]),
    ),
)

LAB = Lab(5, "Context parallelism", ("step05_cp_ring",), (PARTS, TOKENS, SHARES, ROUND, WHOLE), QUESTION)
