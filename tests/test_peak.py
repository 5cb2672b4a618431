"""The peak of memory on paper: storages live as long as somebody holds them, and autograd's order is PyTorch's."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.comm import Group
from common.model import MLP, Head, ModelConfig
from common.schedules import SCHEDULES, communicate, place_stages
from services.compression import COMPRESSED_SUMS, summed
from services.ledger import Ledger
from services.memory import MemoryTimeline
from services.muon import orthogonal
from theory.peak import Chunk, Rank
from theory.peak_gradients import Bucket, Compressed, Matrices, Sync, Unit, Zero, orthogonal_part
from theory.peak_layers import Layers, Sizes
from theory.tape import Bytes, Memory, Tape

M = ModelConfig(48, 2, 4, 4, 160, vocab_size=8, seq_len=64)


def sizes(m: ModelConfig, batch: int, recompute: str = "none", e: int = 4, split: bool = False) -> Sizes:
    """Of one device."""
    tokens = batch * m.seq_len
    return Sizes(m, batch, tokens, tokens, e, 4, 1, False, False, 1, 0, "", split, recompute)


def test_a_storage_lives_as_long_as_it_is_held():
    """Two names, one storage; the peak stays."""
    memory = Memory()
    a = Bytes(memory, 100)
    b = a
    del a
    assert (memory.live, memory.peak) == (100, 100)
    del b
    Bytes(memory, 60)
    assert (memory.live, memory.peak) == (0, 100)


def measured(known: list[torch.Tensor], work: Callable) -> float:
    """The most bytes that `work` makes beside what is `known`, by an instrument that sees every operator."""
    timeline = MemoryTimeline()
    timeline.label("parameters", known)
    start = sum(timeline.total.values())
    gc.collect()
    with timeline.phase("forward"):
        work()
    return max(map(sum, zip(*timeline.curves()[1].values(), strict=True))) - start


@pytest.mark.parametrize("width, seq", [(160, 64), (160, 8), (16, 64)])
def test_an_mlp_holds_what_pytorch_does(width, seq):
    """Forward and backward of real tensors in fp32, and on paper."""
    m = ModelConfig(48, 2, 4, 4, width, vocab_size=8, seq_len=seq)
    mlp, x = MLP(m), torch.randn(1, seq, m.dim, requires_grad=True)
    for p in mlp.parameters():
        p.grad = torch.zeros_like(p)
    grad = torch.randn(1, seq, m.dim)
    known = [x, grad, *mlp.parameters(), *(p.grad for p in mlp.parameters())]
    real = measured(known, lambda: torch.autograd.backward((mlp(x),), (grad,)))

    memory, grads = Memory(), []
    tape = Tape(memory, 1, lambda name, grad: None)
    out = Layers(sizes(m, 1), tape, []).mlp(tape.leaf(Bytes(memory, 0), grads.append), "mlp", width, last=True)
    kept, edge = out.bytes, out.node
    tape.backward(edge, Bytes(memory, 0))
    assert memory.peak == pytest.approx(real, rel=1e-9), (kept.n, memory.peak, real)


@pytest.mark.parametrize("vocab, tokens", [(2000, 96), (50, 192)])
def test_a_loss_holds_what_pytorch_does(vocab, tokens):
    """In fp32, 64 tokens at a time: their logits and softmax, and the gradients of the hidden states and the matrix."""
    m = replace(M, vocab_size=vocab, seq_len=tokens)
    head, hidden = Head(m.dim, vocab, bias=False), torch.randn(1, tokens, m.dim, requires_grad=True)
    targets, memory = torch.zeros(1, tokens, dtype=torch.int64), Memory()
    real = measured([hidden, targets, head.weight], lambda: head.loss(hidden, targets, chunk_tokens=64))
    tape = Tape(memory, 1, lambda name, grad: None)
    loss = Layers(sizes(m, 1), tape, []).loss(
        tape.leaf(Bytes(memory, 0), lambda grad: None), "lm_head", chunk_tokens=64
    )
    assert memory.peak == pytest.approx(real, rel=0.02), loss.bytes.n


def test_an_embedding_holds_what_pytorch_does():
    """In fp32: the output, and in backward the gradient of the whole matrix."""
    table, tokens, grad = nn.Embedding(500, M.dim), torch.arange(M.seq_len), torch.randn(M.seq_len, M.dim)
    real = measured([table.weight, tokens, grad], lambda: torch.autograd.backward((table(tokens),), (grad,)))
    memory = Memory()
    tape = Tape(memory, 1, lambda name, grad: None)
    x = Layers(sizes(replace(M, vocab_size=500), 1), tape, []).embedding(Bytes(memory, 0))
    tape.backward(x.node, Bytes(memory, 0))
    assert memory.peak == pytest.approx(real, rel=0.02)


def test_ulysses_keeps_as_many_heads_as_ranks():
    """For backward, on 4 ranks: keys and values of 1 or 2 heads are repeated, and then as large as those of 4."""
    kept, grads = [], []
    for kv_heads in (1, 2, 4):
        m, memory = replace(M, n_kv_heads=kv_heads), Memory()
        tape, row = Tape(memory, 1, lambda name, grad: None), 2 * M.seq_len * M.head_dim
        q, k, v = (tape.leaf(Bytes(memory, row * heads), grads.append) for heads in (4, kv_heads, kv_heads))
        out = Layers(sizes(m, 1, e=2)._replace(cp=4, cp_mode="ulysses"), tape, []).attend(q, k, v)
        del q, k, v
        kept.append(memory.live)
        del out
    assert kept == [kept[0]] * 3 and kept[0] > 4 * 4 * row


def test_a_further_micro_batch_costs_its_tokens():
    """1F1B's first rank holds activations of two, however many there are; tokens and targets are there all the time."""
    peaks, placements = [], place_stages("1f1b", 2, 1)
    for count in (4, 8):
        program = communicate([SCHEDULES["1f1b"](2, count, 1, rank) for rank in range(2)], placements)[0]
        rank = Rank(sizes(M, 1), 0, 1, False, Sync(Memory()))
        rank.pipeline(program, [Chunk([0], True, False)], 1, placements, 0, [[]])
        peaks.append(rank.memory.peak)
    assert peaks[1] - peaks[0] == 4 * M.seq_len * 2 * 8


def most_of(function) -> int:
    """The most bytes alive at a time that a function makes: of real tensors, those of 4 bytes and less not counted."""
    timeline = MemoryTimeline()
    with timeline.phase("forward"):
        function()
    return max(sum(column) for column in zip(*timeline.curves()[1].values(), strict=True))


@pytest.mark.parametrize("rows, columns", [(48, 160), (160, 48), (64, 64)])
def test_newton_schulz_holds_what_pytorch_does(rows, columns):
    """Two matrices made orthogonal, and their part of this rank: by real operators, and on paper."""
    x, memory = torch.randn(2, rows, columns), Memory()
    start, real = x.nbytes, most_of(lambda: orthogonal(x).flatten())
    _x = Bytes(memory, start)
    orthogonal_part(partial(Bytes, memory), Matrices(2, rows, columns, 0, []), 4)
    assert memory.peak == pytest.approx(real, abs=64)


@pytest.mark.parametrize("mode, e", [("bf16", 4), ("int8", 4), ("int8", 2), ("topk", 4)])
def test_a_compressed_sum_holds_what_pytorch_does(mode, e):
    """A bucket of 10,000 gradients in a run's second step: by real operators, and on paper."""
    config = SimpleNamespace(compress=mode, topk_fraction=0.01)
    group = Group("dp", torch.device("cpu"), Ledger())
    buffer = torch.randn(10000, dtype={2: torch.bfloat16, 4: torch.float32}[e])
    _, lost = summed(COMPRESSED_SUMS[mode](buffer, group, config))
    real = most_of(lambda: summed(COMPRESSED_SUMS[mode](buffer + lost, group, config)))
    sync = Compressed(Memory(), [Bucket(("w",), 10000, 1)], e, mode, 0.01)
    sync.finish()
    held = buffer.nbytes + lost.untyped_storage().nbytes()  # of which the paper has what is lost, as `real` has both
    assert sync.memory.peak - sync.memory.live == pytest.approx(real - held, rel=0.01)
    assert sync.memory.live == lost.untyped_storage().nbytes()


def test_a_weight_used_twice_waits_for_its_second_gradient():
    """A tied matrix: the head's gradient is there during all of backward, and then a sum."""
    memory, came = Memory(), []
    tape = Tape(memory, 1, lambda name, grad: came.append((name, memory.live)))
    for _ in range(2):
        (y,) = tape.node([], [tape.new(0)], lambda dy: ([], [("w", tape.new(10))]), ["w"])
        y.node.grads[0] = y.bytes
    tape.backward(y.node, y.bytes)
    assert [name for name, _ in came] == ["w"] and memory.peak == 30


def test_recomputation_makes_a_layer_again():
    """With full recomputation less is kept; and in backward, all of one layer is there again."""
    kept, peak = {}, {}
    for kind in ("none", "selective", "full"):
        rank = Rank(sizes(M, 4, kind), 0, 1, False, Sync(Memory()))
        tape, out = rank.forward(rank.new(0), Chunk([0, 1], True, False), None)
        kept[kind], edge = rank.memory.live, out.node
        del out
        tape.backward(edge, rank.new(0))
        peak[kind] = rank.memory.peak
        assert rank.memory.live == 0
    assert kept["full"] < kept["selective"] < kept["none"] and peak["full"] < peak["none"]
    assert peak["full"] - kept["full"] > kept["none"] / 2 - kept["full"]


def test_zero_holds_two_gradients_on_their_way():
    """A unit's whole gradient stays until that of the next unit begins to travel; then a slice is left, in fp32."""
    zero = Zero(Memory(), 2, [Unit((name,), 0, 100, 10, 20) for name in "ab"])
    for name in "ab":
        zero.arrived(name, [])
    assert zero.memory.live == 20 + 110 and zero.memory.peak == 20 + 210
    zero.finish()
    assert zero.memory.live == 40
