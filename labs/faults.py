"""Misconceptions that only a student's file can have, to recognise them by their numbers: as tests/faults.py."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
import step05_cp_ring as step05
import step07_moe_ep as step07
from common import layout, model, moe
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
    right = compression.CompressedSum.messages

    def messages(self, buffer, group):
        self.lost.clear()
        return right(self, buffer, group)

    with mock.patch.object(compression.CompressedSum, "messages", messages):
        yield


# --- labs 1 and 3: the project's own source with one place changed ---------------------------------------------------


@contextmanager
def rewritten(module: ModuleType, name: str, old: str, new: str) -> Iterator[None]:
    """The function `name` ("Class.method" too) of a module has `new` where its source has `old`, once."""
    place, _, last = name.rpartition(".")
    owner = getattr(module, place) if place else module
    source = textwrap.dedent(inspect.getsource(getattr(owner, last)))
    if source.count(old) != 1:
        raise ValueError(f"{name} has {source.count(old)} times {old!r}")
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"<{name} with a fault>", "exec"), vars(module), made)
    with mock.patch.object(owner, last, made[last]):
        yield


def turned_backwards():
    """Pairs turn the other way: the sign of the sine belongs to the other half."""
    return rewritten(model, "apply_rope", "(-second, first)", "(second, -first)")


@contextmanager
def neighbours_rotated() -> Iterator[None]:
    """Pairs are taken to be (2i, 2i+1), as in the paper; here, as in Hugging Face's Llama, they are (i, i + d/2)."""

    def apply_rope(x, cos, sin):
        half = x.shape[-1] // 2
        a, b, c, s = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
        return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2).to(x.dtype)

    with mock.patch.object(model, "apply_rope", apply_rope):
        yield


def not_causal():
    """Tokens see those that come after them."""
    return rewritten(model, "attend", "is_causal=True", "is_causal=False")


@contextmanager
def key_heads_in_turn() -> Iterator[None]:
    """Query head i uses key head i mod kv_heads; neighbours share one: i // (heads / kv_heads)."""
    right = model.attend

    def attend(q, k, v):
        return right(q, *(x.repeat(1, 1, q.shape[2] // k.shape[2], 1) for x in (k, v)))

    with mock.patch.object(model, "attend", attend):
        yield


def values_rotated_too():
    """RoPE turns v as well: only the scores, q times k, are to depend on positions."""
    return rewritten(model, "Attention.forward", "cos, sin), v)", "cos, sin), apply_rope(v, cos, sin))")


def gate_and_up_swapped():
    """SiLU is applied to up instead of gate."""
    return rewritten(model, "MLP.forward", "F.silu(gate) * up", "gate * F.silu(up)")


def norm_after_the_block():
    """The norm is taken of what attention returns, not of what it reads (post-norm instead of pre-norm)."""
    wrong = "self.input_layernorm(self.self_attn(x, cos, sin))"
    return rewritten(model, "DecoderLayer.forward", "self.self_attn(self.input_layernorm(x), cos, sin)", wrong)


def last_norm_left_out():
    """The residual stream is returned without the last norm."""
    return rewritten(model, "Decoder.forward", "return self.model.norm(x)", "return x")


def ignored_targets_counted():
    """Targets that are IGNORE count like words."""
    return rewritten(model, "cross_entropy_and_gradients", "target != IGNORE", "target == target")


def mean_instead_of_sum():
    """The loss is a mean over its tokens: means of parts cannot be added."""
    return rewritten(model, "ChunkedCrossEntropy.forward", "return loss", "return loss / (targets != IGNORE).sum()")


def chunks_added_in_16_bits():
    """The weight gradient's sum over chunks has 8 bits, in which small addends vanish."""
    return rewritten(model, "cross_entropy_and_gradients", "zeros_like(weight, dtype=wide)", "zeros_like(weight)")


def updated_in_16_bits():
    """What rounding to 16 bits takes off is lost to the masters, too: small steps never add up."""
    right, wrong = (
        "param.detach().copy_(self.masters[name])",
        "self.masters[name].copy_(param.detach().copy_(self.masters[name]))",
    )
    return rewritten(step01, "Optimizer.update", right, wrong)


def scale_left_in_the_norm():
    """The norm is that of the scaled gradients."""
    return rewritten(step01, "Optimizer.grad_norm", " / self.loss_scale", "")


def scale_left_in_the_update():
    """The weights move by the scaled gradients."""
    return rewritten(step01, "Optimizer.step", " / self.loss_scale)", ")")


def scaled_up_to_the_clip():
    """Small gradients are made as large as grad_clip; clipping only makes large ones small."""
    return rewritten(step01, "Optimizer.step", "clip and norm > clip", "clip")


def mean_of_micro_batches():
    """The mean of the micro-batches' means: not the mean, where they have different numbers of targets."""
    each = "(targets != -100).sum().clamp(min=1)"
    count = "-(-config.global_batch_size // config.micro_batch_size)"
    return rewritten(step01, "train", "/ batch.n_targets", f"/ {each} / {count}")


def targets_of_the_micro_batch():
    """Each micro-batch's loss is its own mean: the sum of means is too large, once for each micro-batch."""
    return rewritten(step01, "train", "/ batch.n_targets", "/ (targets != -100).sum().clamp(min=1)")


def gradients_not_freed():
    """Gradients of the step before are still there when the next begins."""
    return rewritten(step01, "train", "optimizer.zero_grad()", "pass")


def loss_not_scaled():
    """In fp16 the loss goes backward unscaled, and the update divides by the scale all the same."""
    return rewritten(step01, "train", "(micro_loss * optimizer.loss_scale).backward()", "micro_loss.backward()")


def layers_numbered_by_a_digit():
    """Layers 1, 10 and 11 are one unit: their number is read as one digit."""
    return rewritten(step03, "group_into_units", r"layers\.\d+", r"layers\.\d")


def slices_of_their_own_length():
    """A part is looked up where it lies in the whole unit, not in this rank's slice."""
    return rewritten(step03, "Unit.cut", "at - self.first", "at")


def gathered_again():
    """What is there is gathered once more."""
    return rewritten(step03, "Unit.gather", "if not self.gathered:", "if True:")


def factor_left_out():
    """The gradient is neither clipped nor freed from the loss scale."""
    return rewritten(step03, "SliceUpdate.step", "if factor != 1:", "if False:")


def first_learning_rate():
    """The update goes on with the learning rate that it was made with."""
    return rewritten(step03, "SliceUpdate.step", 'group["lr"] = lr', "pass")


def unused_gradients_forgotten():
    """A unit that no hook has completed is not summed."""
    return rewritten(step03, "ZeroOptimizer.finish", "self.reduce(unit)", "pass")


def not_prefetched():
    """A unit is sent for when it is needed, and not while the module before computes."""
    return rewritten(step03, "ZeroOptimizer.provide", "(self.uses[i], *self.uses[then : then + 1])", "(self.uses[i],)")


def gathered_where_not_needed():
    """The embedding's weights are gathered for its backward, too, which needs none."""
    return rewritten(step03, "ZeroOptimizer.before_backward", "if i > 0:", "if True:")


def slices_not_summed_in_the_norm():
    """Each rank takes the norm of its own slice."""
    return rewritten(layout, "global_norm", "([mesh.data] if sliced else [])", "[]")


def scale_left_in_the_global_norm():
    """The norm is that of gradients times the loss scale."""
    return rewritten(layout, "global_norm", " / optimizer.loss_scale", "")


def norms_added():
    """Norms are added; it is their squares that add up."""
    right = "(square,) = sum_over(group, square)"
    return rewritten(layout, "global_norm", right, "square = torch.tensor(sum_over(group, square**0.5)[0] ** 2)")


# --- labs 5 and 7 --------------------------------------------------------------------------------------------------


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

    def forward(ctx, q, k, v, group, mode, *cut):
        ctx.parts = []

        def keeping(kv, group):
            for source, part in ring(kv, group):
                ctx.parts.append(part.clone())
                yield source, part

        with mock.patch.object(step05, "around_the_ring", keeping):
            return right(ctx, q, k, v, group, mode, *cut)

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
