"""Tests the laws in the docstrings of techniques: bytes, calls, kernels, memory. (tests/ has the laws of the steps.)

A law is a row of LAWS. A dry run counts what a rank sends, computes and holds; extras/tests/test_dry_run.py shows that
real ranks give the same counts. Laws about the order of messages are tests of their own, after `test_law`.
"""

import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from common.comm import Pending
from extras.tools.dry_run import run_rank
from extras.services.tables import Ledger
from extras.tests import equal
from extras.variants.step03 import zero_overlap
from extras.variants.step07 import ep_overlap

D, FFN, VOCAB, SEQ, HEADS, KV = (
    equal.SMALL[name] for name in ("dim", "ffn_dim", "vocab_size", "seq_len", "n_heads", "n_kv_heads")
)
L, M = 2, 2  # layers; micro-batches of all ranks together
B = 8  # bytes of an element in fp64
HIDDEN = 2 * D * D + 2 * D * D * KV // HEADS + 3 * D * FFN  # elements of the matrices of a layer
LAYER = HIDDEN + 2 * D
ENDS = 2 * VOCAB * D + D  # elements of the embedding, the last norm and the head
P, PARAMS = L * LAYER + ENDS, 9 * L + 3  # the model's elements, and its number of tensors
A = SEQ * D * B  # an activation of a micro-batch of one sequence
KEYS = 12 * 2 * KV * (D // HEADS) * B  # bytes of k and v of 12 tokens
INT8, SCORES = dict(compress_activations="int8"), dict(attention="scores")
NORMS = 2 * B * (1 + D)  # bytes: on a CPU, each of two norms keeps a statistic and the normalised input of a token


def reduced(n: int, size: float) -> float:
    """Bytes that a rank sends in an all-reduce of `size` bytes."""
    return 2 * (n - 1) / n * size


class Law(NamedTuple):
    """What a rank sends, computes and holds in a step with `flags`: `has` maps keys to numbers.

    If `than` is given, each number is the difference from a step with `flags | than`. Some keys are "dp" (bytes sent
    over dp), "dp send" and "dp send calls" (bytes and calls of the operation `send` over dp), "held moments" (bytes),
    "peak" (the most bytes held at once), "add kernels" (runs of the operator `add`), "flops" (matmuls, attention).
    """

    step: str
    ranks: int
    flags: dict[str, Any]
    has: dict[str, float]
    than: dict[str, Any] = {}  # noqa: RUF012
    rank: int = 0


def count(step: str, ranks: int, rank: int = 0, **options: Any) -> Counter:
    """Dry-run `step` as one rank of `ranks`; returns all counts, under the keys that `Law.has` uses."""
    config = equal.config_of(step, dict(global_batch_size=M, n_layers=L, dry_run=ranks) | options)
    seen = run_rank(importlib.import_module(step).train, config, rank)
    found = Counter({f"held {kind}": n_bytes for kind, n_bytes in seen.held.items()})
    found["peak"] = sum(seen.meter.peak().values())
    for dim, operations in seen.taken["traffic"].items():
        for operation, n_bytes in operations.items():
            found[dim] += n_bytes
            found[f"{dim} {operation}"] = n_bytes
            found[f"{dim} {operation} calls"] = seen.taken["calls"][dim][operation]
    for name, counted in seen.meter.count.items():
        found[f"{name} kernels"] = counted["calls"]
        found["flops"] += counted["flops"]
    return found


def swapped(n: int, kv_heads: int = KV) -> int:
    """Bytes sent by one of n ranks for 12 tokens in both passes of Ulysses. If n > kv_heads, kv heads are repeated."""
    q, kv = (heads * 12 * (D // HEADS) * B for heads in (HEADS, 2 * kv_heads * max(1, n // kv_heads)))
    return 2 * (n - 1) * (2 * q + kv) // n


def usp_law(n: int, swap: int, kv_heads: int) -> Law:
    """USP adds rings of r = n / swap ranks to Ulysses. If r > 1, k and v take r - 1 hops a pass, gradients take r."""
    size = KEYS * kv_heads * max(1, swap // kv_heads) // KV
    hops = (2 * (n // swap - 1) + n // swap) * (n > swap)
    has = {"ulysses all_to_all": M * L * swapped(swap, kv_heads), "ulysses all_to_all calls": M * L * 2 * 4}
    has |= {"ring send": M * L * hops * size, "ring send calls": M * L * hops}
    flags = dict(cp=n, cp_mode="usp", ulysses=swap, seq_len=12 * n, n_kv_heads=kv_heads)
    return Law("step05_cp_ring", n, flags, has)


def window_law(n: int, rank: int, window: int, seq: int) -> Law:
    """For any `seq`, k and v of `window` - 1 tokens are sent to the next rank, and backward sends gradients back."""
    tokens = (window - 1) * ((rank + 1 < n) + (rank > 0))  # forward; backward
    has = {"cp send": M * L * tokens * KEYS // 12}
    return Law("step05_cp_ring", n, dict(cp=n, cp_mode="ring", window=window, seq_len=seq), has, rank=rank)


def tp_law(flags: dict) -> Law:
    """For each micro-batch, a rank sends (n-1)/n of 8 L + 4 activations; the 4 are for the embedding and the head.

    The loss adds 2 numbers a token. With overlap, backward gathers the input of each block again. With int8, a token
    in the 8 L takes D + 4 bytes: one byte for each number, and 4 bytes for the scale.
    """
    gathers, block = (4 + 2 * ("tp_overlap" in flags)) * L, SEQ * (D + 4) if "compress_activations" in flags else A
    sent = M * ((gathers + 4 * L) * block // 2 + 4 * A // 2 + 2 * SEQ * B)
    has = {"tp": sent + reduced(2, (2 * L + 1) * D * B) + reduced(2, B)}  # norms' gradients, squared norm
    if block == A:
        has |= {"tp all_gather calls": M * (gathers + 3), "tp reduce_scatter calls": M * (4 * L + 2)}
    return Law("step04_tp_sp", 2, dict(tp=2) | flags, has)


def experts_law(mode: str, tp: int) -> Law:
    """Each token visits all 4 experts. The tp ranks split the tokens. Backward sends gradients, no counts of rows."""
    row, gates = SEQ * D * B, SEQ * 4 * B
    once, counts = dict(rows=(2 * row + gates // 2, 8), allgather=(2 * row + gates, 0))[mode]
    flags = dict(tp=tp, ep=2, ep_mode=mode, experts=4, experts_per_token=4)
    return Law("step07_moe_ep", 2 * tp, flags, {"ep": M // 2 * L * (2 * once // tp + counts)})


def nodes_law() -> Law:
    """Each token visits all 8 experts, on two nodes of two ranks. It is sent to the other node once, for both ranks."""
    row, gate = 2 * SEQ * D * B, SEQ * B  # bytes: the rows, there and back; the gates of one expert
    flags = dict(ep=4, ep_mode="nodes", experts=8, experts_per_token=8, global_batch_size=2 * 4)
    has = {"ep between": 2 * L * (2 * (row + 4 * gate) + 8), "ep inside": 2 * L * (2 * 2 * (row + 2 * gate) + 8)}
    return Law("step07_moe_ep", 4, flags, has)


def fused_law() -> Law:
    """Fusing removes kernels from each micro-batch: the cast of each dW, and 3 sums of dx in each layer.

    From the second micro-batch on, it also removes the addition of each dW to a gradient. There is a dW for each of the
    seven matrices of a layer, and for the head. The FLOPs of matmuls do not change.
    """
    matrices, m = 7 * L + 1, 2
    flags = dict(dtype="bf16", global_batch_size=m, fused_gradients=True)
    gone = {"_to_copy kernels": -matrices * m, "add kernels": -3 * L * m, "add_ kernels": -matrices * (m - 1)}
    return Law("step01_single_gpu", 1, flags, gone | {"flops": 0}, dict(fused_gradients=False))


def kept_law(bytes_of_a_token: int, **flags: Any) -> Law:
    """The bytes that one more layer keeps until its backward, for a micro-batch of one sequence."""
    has = {"held activations": SEQ * (bytes_of_a_token + NORMS)}
    return Law("step01_single_gpu", 1, flags | dict(n_layers=2), has, dict(n_layers=1))


def mask_law(share: int, **layout: Any) -> Law:
    """Dropout keeps 2 L + 1 masks for backward, with a byte for each number. With SP, a rank keeps 1/tp of each mask.

    A mask is drawn by four calls of `rand`, one for each sequence.
    """
    flags, masks = dict(global_batch_size=4, micro_batch_size=4, dropout=0.2), (2 * L + 1) * 4
    has = {"held activations": masks * SEQ * D // share, "rand kernels": masks}
    return Law("step04_tp_sp", layout["tp"], layout | flags, has, dict(dropout=0.0))


KVD = D * KV // HEADS  # width of k and of v
SIDES = L * (4 * D + 2 * (D + KVD) + 3 * (D + FFN)) + 2 * (VOCAB + D)  # sum of n + m over all matrices n x m
LAWS: dict[str, Law] = {
    # all gradients have S bytes, in a message for each parameter. Rank 0 sends (n-1) S; each other rank sends S
    **{f"server, rank {rank}": Law("step02_ddp", 3, dict(sync="server", global_batch_size=3), {
        "dp send": times * P * B, "dp send calls": times * PARAMS}, rank=rank) for rank, times in ((0, 2), (1, 1))},
    # in each step a rank sends the loss; if the ranks meet, also P numbers. The first meeting adds P moments
    **{f"meets, H = {h}": Law("step02_ddp", 2, dict(sync="diloco", inner_steps=h), {
        "dp": reduced(2, meets * P * B + B), "dp all_reduce calls": meets + 1, "held moments": (2 + meets) * P * B})
       for h, meets in ((2, 1), (3, 0))},
    # each rank but 0 sends P numbers to its parent, and each rank sends P numbers to each of its children
    **{f"tree of {n}, rank {rank}": Law("step02_ddp", n, dict(sync="tree", global_batch_size=n), {
        "dp send": ((rank > 0) + below) * P * B}, rank=rank)
       for n, all_below in ((3, (2, 0, 0)), (4, (2, 0, 1, 0))) for rank, below in enumerate(all_below)},
    # n ranks, R replicas: over replicas, an all-reduce of P R/n elements; over shard, as step 3 on n/R ranks
    **{f"replicas, zero {zero}": Law("step03_zero", 4, dict(zero=zero, zero_replicas=2, global_batch_size=4), {
        "replicas all_reduce": reduced(2, P * B / 2), "shard all_gather": gathered * B / 2,
        "shard reduce_scatter": P * B / 2}) for zero, gathered in ((1, P), (3, 2 * P - ENDS))},
    # n ranks, m micro-batches: each unit has one all-gather and m reduce-scatters, so (n-1)/n (m+1) P elements are sent
    "kept": Law("step03_zero", 2, dict(zero=3, zero_keep=True, global_batch_size=4), {
        "dp all_gather": P * B / 2, "dp all_gather calls": L + 2,
        "dp reduce_scatter": 2 * P * B / 2, "dp reduce_scatter calls": 2 * (L + 2),
    }),
    "early sums": Law("step03_zero", 2, dict(zero=1, zero_overlap=True), {"dp": 0, "dp reduce_scatter calls": 0},
                      dict(zero_overlap=False)),
    # an all-gather in bf16 (2 bytes a number) sends half of each layer over dp, and half of its matrices over tp
    **{f"muon, {dim}": Law(step, 2, flags | dict(optimizer="muon", dtype="fp32"), {
        f"{dim} all_gather": L * size * 2 / 2}, dict(optimizer="adamw")) for dim, step, flags, size in (
            ("dp", "step03_zero", dict(zero=1), LAYER), ("tp", "step04_tp_sp", dict(tp=2, zero=0), HIDDEN))},
    **{f"moments, {rule}": Law("step01_single_gpu", 1, dict(optimizer=rule), {"held moments": numbers * B})
       for rule, numbers in {"adafactor": SIDES + (2 * L + 1) * D, "muon": 2 * P - L * HIDDEN, "adamw": 2 * P,
                             "sgd": 0}.items()},
    **{name: tp_law(flags) for name, flags in {
        "overlap": dict(tp_overlap=True), "int8": INT8}.items()},
    # D + 4 bytes a token: a byte for each of D numbers, and a scale of 4 bytes
    "int8, pp": Law("step06_pipeline", 2, dict(pp=2, n_layers=2) | INT8, {"pp send": M * SEQ * (D + 4)}),
    # each further micro-batch adds its tokens and targets, twice, and on rank 1 the stage's input, but no graph
    **{f"gpipe, rank {rank}": Law("step06_pipeline", 2, dict(pp=2, schedule="gpipe", global_batch_size=4), {
        "held activations": 0, "peak": 2 * (rank * A + 4 * SEQ * 8)}, dict(global_batch_size=2), rank)
       for rank in (0, 1)},
    # on n ranks, the ring sends k and v n-1 times in each pass and gradients n times; allgather sends each n-1 times
    **{name: Law("step05_cp_ring", 2, flags | dict(cp=2, seq_len=24), {
        "cp send": M * L * 4 * KEYS, "cp send calls": M * L * 4,
    }) for name, flags in {"flash": dict(cp_kernel="flash"), "ring": dict(cp_mode="ring")}.items()},
    "allgather": Law("step05_cp_ring", 4, dict(cp=4, cp_mode="allgather", seq_len=48), {
        f"cp {operation}": M * L * 3 * KEYS for operation in ("all_gather", "reduce_scatter")
    }),
    "ulysses": Law("step05_cp_ring", 4, dict(cp=4, cp_mode="ulysses", seq_len=48), {
        "cp all_to_all": M * L * swapped(4)}),
    **{f"crossed {sizes}": usp_law(*sizes) for sizes in ((4, 2, 2), (4, 2, 1), (4, 4, 2), (6, 2, 4))},
    **{f"window {sizes}": window_law(*sizes) for sizes in ((2, 0, 5, 16), (2, 1, 5, 48), (4, 0, 5, 16), (4, 2, 5, 16))},
    **{f"experts, {mode}, tp={tp}": experts_law(mode, tp) for mode in ("rows", "allgather") for tp in (1, 2)},
    "nodes": nodes_law(),
    # compared with one chunk: the same bytes, 3 times as many messages, and a layer keeps two int64 tensors [8] fewer
    "experts in chunks": Law("step07_moe_ep", 2, dict(ep=2, ep_overlap=3), {
        "ep": 0, "ep all_to_all calls": M // 2 * L * 4 * 2, "held activations": -L * 2 * 8 * 8}, dict(ep_overlap=1)),
    "fused": fused_law(),
    # B is called e in the docstrings of the techniques
    **{f"fused attention, {k} kv heads": kept_law(B * (6 * D + 2 * k * D // HEADS + 4 * FFN + HEADS), n_kv_heads=k)
       for k in (2, 4)},
    **{f"scores, {k} kv heads": kept_law(B * (8 * D + 4 * FFN + HEADS * SEQ), **SCORES, n_kv_heads=k) for k in (2, 4)},
    # the copies on the host: an input has one for each matrix that multiplies it
    "offloaded": kept_law(B * (10 * D + 2 * KVD + 4 * FFN + HEADS) + NORMS, recompute="offload"),
    "selective recomputation": kept_law(B * (6 * D + 2 * KVD + 4 * FFN), **SCORES, recompute="selective"),
    "dropout": mask_law(1, tp=1),
    "dropout, sp": mask_law(2, tp=2),
    "dropout, no sp": mask_law(1, tp=2, sp=False),
}  # fmt: skip


@pytest.mark.parametrize("name", LAWS)
def test_law(name):
    """Each number of the law is exact, to the byte and to the call."""
    law = LAWS[name]
    found = count(law.step, law.ranks, law.rank, **law.flags)
    if law.than:
        found.subtract(count(law.step, law.ranks, law.rank, **law.flags | law.than))
    assert {key: found[key] for key in law.has} == law.has


def test_sums_start_in_backward():
    """With --zero-overlap, the sums of all L + 2 units start before `finish`; without it, `finish` starts them."""
    events, book, finish = [], Ledger.book, zero_overlap.Early.finish
    with (
        mock.patch.object(Ledger, "book", lambda self, *what: events.append(what[0]) or book(self, *what)),
        mock.patch.object(zero_overlap.Early, "finish", lambda self: events.append("finish") or finish(self)),
    ):
        count("step03_zero", 2, zero=1, zero_overlap=True, global_batch_size=4)
    assert events[: events.index("finish")].count("reduce_scatter") == L + 2


# --- experts


def test_messages_of_experts_are_hidden():
    """In both passes, while experts compute a chunk, later chunks arrive and the outputs of earlier ones return."""
    events = []

    def all_to_all(output, rows, *_):  # as if the other rank had the same rows
        events.append("start")
        return Pending(None, SimpleNamespace(wait=lambda: events.append("wait")), then=lambda: output.copy_(rows))

    def experts(rows, _counts):
        events.append("compute")
        rows.register_hook(lambda _: events.append("compute"))
        return 2 * rows

    with mock.patch.object(ep_overlap, "all_to_all", all_to_all):
        rows = torch.arange(11.0).view(11, 1).requires_grad_()
        home = ep_overlap.visit_in_chunks(3, experts, SimpleNamespace(size=2), rows, torch.tensor([4, 1, 0, 6]))
        forward = events[2:]  # without start and wait of the counts' exchange
        events.clear()
        home.backward(torch.ones_like(home))
    assert forward == events == 3 * ["start"] + 3 * ["wait", "compute", "start"] + 3 * ["wait"]
    assert torch.equal(home, 2 * rows) and torch.equal(rows.grad, torch.full_like(rows, 2))
