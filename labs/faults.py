"""Misconceptions that only a student's file can have, to recognise them by their numbers: as tests/faults.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import step02_ddp as step02
import step04_tp_sp as step04
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import moe
from common.comm import exchange
from services import compression


@contextmanager
def conjugate_is_itself() -> Iterator[None]:
    """Backward applies the forward's collective again instead of its conjugate."""
    right = step04.Conjugate.forward

    def forward(ctx, x, group, collective, conjugate):
        return right(ctx, x, group, collective, collective)

    with mock.patch.object(step04.Conjugate, "forward", staticmethod(forward)):
        yield


@contextmanager
def dx_not_summed() -> Iterator[None]:
    """dx is this rank's part alone: the backward of f sums nothing."""
    right = step04.ColumnParallel.__init__

    def init(self, group, sp, overlap):
        right(self, group, sp, overlap)
        if not sp:
            self.reduce = step04.keep_tokens

    with mock.patch.object(step04.ColumnParallel, "__init__", init):
        yield


@contextmanager
def gathered_input_kept() -> Iterator[None]:
    """The input that was gathered in forward is kept for backward, so that memory is not divided by n."""
    right = step04.ColumnParallelLinear.forward

    def forward(ctx, x, group, gather, reduce, *weights):
        ctx.kept = []

        def keeping(x, group):
            ctx.kept.append(gather(x, group))
            return ctx.kept[-1]

        ys = right(ctx, x, group, keeping, reduce, *weights)
        ctx.gather = gather
        return ys

    with mock.patch.object(step04.ColumnParallelLinear, "forward", staticmethod(forward)):
        yield


@contextmanager
def row_parts_not_summed() -> Iterator[None]:
    """The row-parallel layer gives its own part of the sum."""
    right = step04.RowParallelLinear.add

    def add(self, part):
        return part if not self.sp else right(self, part)

    with mock.patch.object(step04.RowParallelLinear, "add", add):
        yield


@contextmanager
def parts_beside_one_another() -> Iterator[None]:
    """What the ranks send is put together along the wrong dimension: tokens of different ranks alternate."""

    def gather_tokens(x, group):
        right = gather(x, group)
        return right.returning(lambda f=right.result: mixed(f(), group.size))

    def mixed(full, n):
        return full.unflatten(-2, (n, -1)).transpose(-2, -3).flatten(-3, -2)

    gather = step04.gather_tokens
    with mock.patch.object(step04, "gather_tokens", gather_tokens):
        yield


@contextmanager
def tokens_of_the_next_rank() -> Iterator[None]:
    """Each rank keeps the tokens of its right neighbour."""
    scatter = step04.scatter_tokens

    def scatter_tokens(x, group):
        parts = x.unflatten(-2, (group.size, -1)).roll(-1, -3).flatten(-3, -2)
        return scatter(parts, group)

    with mock.patch.object(step04, "scatter_tokens", scatter_tokens):
        yield


@contextmanager
def second_half_left_out() -> Iterator[None]:
    """The finished pieces are not passed on: each rank has the sum of one piece only."""

    def ring(tensor, group):
        n, r = group.size, group.rank
        pieces = tensor.tensor_split(n)
        for s in range(n - 1):
            received = torch.empty_like(pieces[(r - s - 1) % n])
            exchange([(pieces[(r - s) % n], (r + 1) % n)], [(received, (r - 1) % n)], group).wait()
            pieces[(r - s - 1) % n].add_(received)

    with mock.patch.object(step02, "ring_all_reduce", ring):
        yield


@contextmanager
def replaced_instead_of_added() -> Iterator[None]:
    """What arrives in the first half replaces the own piece instead of being added to it."""

    def ring(tensor, group):
        n, r = group.size, group.rank
        pieces = tensor.tensor_split(n)
        for s in range(2 * (n - 1)):
            received = torch.empty_like(pieces[(r - s - 1) % n])
            exchange([(pieces[(r - s) % n], (r + 1) % n)], [(received, (r - 1) % n)], group).wait()
            pieces[(r - s - 1) % n].copy_(received)

    with mock.patch.object(step02, "ring_all_reduce", ring):
        yield


@contextmanager
def no_error_feedback() -> Iterator[None]:
    """What a step has lost is never sent."""
    right = compression.CompressedSum.__call__

    def call(self, buffer, group):
        self.lost.clear()
        return right(self, buffer, group)

    with mock.patch.object(compression.CompressedSum, "__call__", call):
        yield


@contextmanager
def blocks_averaged() -> Iterator[None]:
    """Two blocks of keys have equal weights: the log-sum-exps are not used."""
    right = step05.merge

    def merge(out, lse, block_out, block_lse):
        mean = (out + block_out) / 2
        right(out, lse, block_out, block_lse)
        out.copy_(mean)

    with mock.patch.object(step05, "merge", merge):
        yield


@contextmanager
def a_buffer_for_each_hop() -> Iterator[None]:
    """Each part comes into new memory, though two buffers can take turns."""
    right = step05.around_the_ring

    def around_the_ring(kv, group):
        for hop, (source, part) in enumerate(right(kv, group)):
            yield source, part.clone() if hop else part

    with mock.patch.object(step05, "around_the_ring", around_the_ring):
        yield


@contextmanager
def softmax_of_the_block() -> Iterator[None]:
    """Backward takes the softmax over this block's keys alone, not over all."""
    right = step05.reference_block_backward

    def backward(d_out, q, k, v, out, lse, causal):
        return right(d_out, q, k, v, out, step05.block_scores(q, k, causal).logsumexp(-1), causal)

    with mock.patch.object(step05, "reference_block_backward", backward):
        yield


@contextmanager
def d_left_out() -> Iterator[None]:
    """dS is taken to be P (do v^T), without D."""
    right = step05.reference_block_backward

    def backward(d_out, q, k, v, out, lse, causal):
        return right(d_out, q, k, v, torch.zeros_like(out), lse, causal)

    with mock.patch.object(step05, "reference_block_backward", backward):
        yield


@contextmanager
def gradients_overwritten() -> Iterator[None]:
    """A block's part of the gradients takes the place of what is there, instead of being added to it."""
    right = step05.add_part_gradients

    def add_part_gradients(d_out, q, kv, out, lse, block, d_q, d_kv):
        if block is not None:
            rows, keys, _ = block
            d_q[:, rows], d_kv[:, :, keys] = 0, 0
        right(d_out, q, kv, out, lse, block, d_q, d_kv)

    with mock.patch.object(step05, "add_part_gradients", add_part_gradients):
        yield


@contextmanager
def parts_kept() -> Iterator[None]:
    """What comes round the ring is kept for backward, so that memory does not shrink with more ranks."""
    right, ring = step05.RingAttention.forward, step05.around_the_ring

    def forward(ctx, q, k, v, group, mode):
        ctx.parts = []

        def keeping(kv, group):
            for source, part in ring(kv, group):
                ctx.parts.append(part.clone())
                yield source, part

        with mock.patch.object(step05, "around_the_ring", keeping):
            return right(ctx, q, k, v, group, mode)

    with mock.patch.object(step05.RingAttention, "forward", staticmethod(forward)):
        yield


@contextmanager
def groups_by_their_best() -> Iterator[None]:
    """A group of experts is worth its best score alone, however many of its experts a token may visit."""
    right = moe.select

    def select(scores, m):
        if not 0 < m.groups_per_token < m.expert_groups:
            return right(scores, m)
        by_group = scores.unflatten(1, (m.expert_groups, -1))
        best = by_group.amax(-1).topk(m.groups_per_token).indices
        barred = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        return by_group.masked_fill(barred[..., None], -torch.inf).flatten(1).topk(m.experts_per_token).indices

    with mock.patch.object(moe, "select", select):
        yield


@contextmanager
def gates_rounded() -> Iterator[None]:
    """Gates travel in the dtype of the rows, and lose bits."""
    right = step07.Message.leave

    def leave(self, rows, gates, back=False):
        return right(self, rows, gates.to(rows.dtype).to(gates.dtype), back)

    with mock.patch.object(step07.Message, "leave", leave):
        yield


@contextmanager
def part_of_the_sum_over_tp() -> Iterator[None]:
    """Each tp rank gives out what its part of the experts' width adds; nobody adds up the parts."""
    right = step07.leave_block

    def leave_block(x, group, sp):
        return x if group.name == "tp" and not sp else right(x, group, sp)

    with mock.patch.object(step07, "leave_block", leave_block):
        yield
