"""Faults to inject, by name: what peers got wrong. Each is a context manager that patches modules and undoes it.

A negative control runs the equivalence check with one of these and asserts that the check fails: a test that a broken
collective passes is not a test. Harmless patches (a frozen parameter) live here too, for both sides of a comparison.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from unittest import mock

import torch
import torch.nn.functional as F

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
import step05_cp_ring as step05
import step06_pipeline as step06
import step07_moe_ep as step07
from common import UserError, model, moe, trainer
from common.comm import Group, Mesh, Pending, all_gather, all_reduce
from common.data import Batch, TokenData
from common.layout import Layout, layout_of
from common.model import IGNORE, draw_parameter
from services import checkpoint, checks, documents, fused_gradients, muon, resume, variants
from services.activations import Narrow

HEADS = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


@contextmanager
def nothing() -> Iterator[None]:
    """No fault."""
    yield


@contextmanager
def frozen(*names: str) -> Iterator[None]:
    """Not a fault: one matrix and one norm (or the layers' parameters called `names`) do not train."""
    names = names or ("layers.1.mlp.up_proj.weight", "layers.0.input_layernorm.weight")

    def freezing(materialize):
        def wrapper(model, *args):
            materialize(model, *args)
            for name, param in model.named_parameters():
                if name.endswith(names):
                    param.requires_grad_(False)

        return wrapper

    with (
        mock.patch.object(step01, "materialize", freezing(step01.materialize)),
        mock.patch.object(step02, "materialize", freezing(step02.materialize)),
        mock.patch.object(step03, "materialize", freezing(step03.materialize)),
    ):
        yield


def frozen_layer():
    """Not a fault: a whole layer does not train, so one of ZeRO's units has no gradient."""
    inside = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm")
    inside += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")
    return frozen(*(f"layers.1.{name}.weight" for name in inside))


@contextmanager
def units_updated_together() -> Iterator[None]:
    """Not a fault: ZeRO's update as on a GPU, one call of the rule for all units."""
    right = variants.homes
    with mock.patch.object(variants, "homes", lambda *args: right(*args)._replace(one_by_one=False)):
        yield


def frozen_experts():
    """Not a fault: one matrix of all experts, and a router, do not train."""
    return frozen("layers.1.mlp.experts.up_proj.weight", "layers.0.mlp.router.weight")


@contextmanager
def three_experts() -> Iterator[None]:
    """Not a fault: tokens only go to experts 0, 1 and 2, so that other experts, and whole ranks, have none."""
    right = moe.select

    def select(scores, m):
        return right(scores.masked_fill(torch.arange(m.experts) > 2, -torch.inf), m)

    with mock.patch.object(moe, "select", select):
        yield


@contextmanager
def weights_reduced_instead_of_gradients() -> Iterator[None]:
    """ "naive DP" that all-reduces (here: averages) the weights and leaves the gradients alone."""

    def finish(self):
        for param, group in self.groups.items():
            all_reduce(param.data, group).wait()
            param.data /= group.size

    with mock.patch.object(step02.NaiveSync, "finish", finish):
        yield


@contextmanager
def only_last_micro_batch() -> Iterator[None]:
    """Only the last micro-batch's gradient is summed over the ranks, the earlier ones stay at home."""
    last_micro_batch, finish = step02.NaiveSync.last_micro_batch, step02.NaiveSync.finish

    def remember(self):
        self.before = [None if p.grad is None else p.grad.clone() for p in self.groups]
        last_micro_batch(self)

    def finish_last(self):
        for param, before in zip(self.groups, self.before, strict=True):
            if before is not None:
                param.grad -= before
        finish(self)
        for param, before in zip(self.groups, self.before, strict=True):
            if before is not None:
                param.grad += before

    with (
        mock.patch.object(step02.NaiveSync, "last_micro_batch", remember),
        mock.patch.object(step02.NaiveSync, "finish", finish_last),
    ):
        yield


@contextmanager
def early_buckets() -> Iterator[None]:
    """In buckets: hooks send at the first micro-batch, so later ones are never summed."""

    def begin(self):
        begin_right(self)
        self.armed = True

    begin_right = step02.BucketSync.begin
    with mock.patch.object(step02.BucketSync, "begin", begin):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    """The logged loss is the mean of the ranks' own means, right only if all have equally many targets."""

    def sum_over(group, loss, *flags):
        return [loss.item() * group.size, *(float(flag) for flag in flags)]

    with mock.patch.object(trainer, "sum_over", sum_over):
        yield


@contextmanager
def mean_of_local_targets() -> Iterator[None]:
    """The loss divided by this rank's own number of targets, then averaged: a mean of means in the gradient."""
    batch = TokenData.batch

    def local(self, step, rows):
        tokens, targets, _ = batch(self, step, rows)
        ranks = torch.distributed.get_world_size()
        return Batch(tokens, targets, max(1, int((targets != -100).sum())) * ranks)

    with mock.patch.object(TokenData, "batch", local):
        yield


@contextmanager
def averaged() -> Iterator[None]:
    """The all-reduce divides by the number of ranks although the loss was already divided by the global count."""
    finish = step02.BucketSync.finish

    def finish_and_divide(self):
        finish(self)
        for bucket in self.buckets:
            bucket.flat /= bucket.group.size

    with mock.patch.object(step02.BucketSync, "finish", finish_and_divide):
        yield


@contextmanager
def no_sync() -> Iterator[None]:
    """Gradients are never summed."""

    def not_sent(self, bucket):
        bucket.pending = Pending(bucket.group, [])

    with (
        mock.patch.object(step02.BucketSync, "send", not_sent),
        mock.patch.object(variants, "require_same_parameters", lambda *_: None),
    ):
        yield


@contextmanager
def bucket_forgotten() -> Iterator[None]:
    """The last, partly filled bucket is never sent."""
    send = step02.BucketSync.send

    def skip_last(self, bucket):
        if bucket is not self.buckets[-1]:
            send(self, bucket)
        else:
            bucket.pending = Pending(bucket.group, [])

    with (
        mock.patch.object(step02.BucketSync, "send", skip_last),
        mock.patch.object(variants, "require_same_parameters", lambda *_: None),
    ):
        yield


@contextmanager
def summed_twice() -> Iterator[None]:
    """A gradient that goes through the collective twice, as a tied one does if both its names are synchronised."""
    send = step02.BucketSync.send

    def twice(self, bucket):
        send(self, bucket)
        bucket.pending.wait()
        send(self, bucket)

    with mock.patch.object(step02.BucketSync, "send", twice):
        yield


@contextmanager
def moments_of_another_rank() -> Iterator[None]:
    """Each slice is updated with the moments of the next rank's slice."""
    right = step03.SliceUpdate.step

    def step(self, lr, factor):
        for unit in self.units:
            for key in ("exp_avg", "exp_avg_sq"):
                own = torch.zeros_like(unit.master)
                for name, piece in unit.pieces.items():
                    unit.cut(own, name).copy_(self.rule.state[piece][key])
                everyone = own.new_empty(unit.group.size, unit.length)
                all_gather(everyone.view(-1), own, unit.group).wait()
                for name, piece in unit.pieces.items():
                    others = everyone[(unit.group.rank + 1) % unit.group.size]
                    self.rule.state[piece][key].copy_(unit.cut(others, name))
        right(self, lr, factor)

    with mock.patch.object(step03.SliceUpdate, "step", step):
        yield


@contextmanager
def freed_before_last_use() -> Iterator[None]:
    """Stage 3 frees a unit after its forward pass and never gathers it again for its backward pass."""

    def before_backward(self, i, _gradient):
        if i + 1 < len(self.uses):
            self.drop(i + 1, keep=i)

    with mock.patch.object(step03.ZeroOptimizer, "before_backward", before_backward):
        yield


@contextmanager
def memory_without_weights() -> Iterator[None]:
    """The same, but the memory is there, with other bytes in it, as where an allocator has handed it on."""
    right = step03.ZeroOptimizer.before_backward

    def before_backward(self, i, gradient):
        right(self, i, gradient)
        for unit in self.uses[i] if i > 0 else ():
            unit.flat.zero_()

    with mock.patch.object(step03.ZeroOptimizer, "before_backward", before_backward):
        yield


@contextmanager
def never_freed() -> Iterator[None]:
    """Stage 3 gathers units and keeps them: right numbers, wrong memory."""
    with mock.patch.object(step03.ZeroOptimizer, "drop", lambda self, i, keep: None):
        yield


@contextmanager
def slices_not_accumulated() -> Iterator[None]:
    """Stage 2's slice holds the last micro-batch's gradient instead of the sum."""
    right = step03.ZeroOptimizer.land

    def land(self):
        if self.in_flight is not None:
            self.in_flight[0].grad_slice = None
        right(self)

    with mock.patch.object(step03.ZeroOptimizer, "land", land):
        yield


@contextmanager
def reduced_at_every_micro_batch() -> Iterator[None]:
    """Stage 1 reduces a gradient that is not complete, and then again what it has already summed."""
    begin, reduce = step03.ZeroOptimizer.begin, step03.ZeroOptimizer.reduce

    def begin_last(self):
        begin(self)
        self.last = True

    def reduce_and_keep(self, unit):
        gradient = unit.gradient
        reduce(self, unit)
        unit.gradient = gradient

    with (
        mock.patch.object(step03.ZeroOptimizer, "begin", begin_last),
        mock.patch.object(step03.ZeroOptimizer, "reduce", reduce_and_keep),
    ):
        yield


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    """Each replica goes on with the sum over its own ranks."""
    with mock.patch.object(step03, "all_reduce", lambda tensor, group: Pending(group, [])):
        yield


@contextmanager
def replicas_summed_twice() -> Iterator[None]:
    """Slices are summed over the replicas as they land, and once more at the end."""
    finish = step03.ZeroOptimizer.finish

    def finish_again(self):
        finish(self)
        for unit in self.units:
            all_reduce(unit.grad_slice, self.replicas).wait()

    with mock.patch.object(step03.ZeroOptimizer, "finish", finish_again):
        yield


@contextmanager
def replicas_summed_before_all_has_landed() -> Iterator[None]:
    """A slice that lands in the last micro-batch is taken for complete, though it is of the one before."""
    land = step03.ZeroOptimizer.land

    def land_complete(self):
        if self.in_flight is not None:
            self.in_flight = (*self.in_flight[:-1], self.last)
        land(self)

    with mock.patch.object(step03.ZeroOptimizer, "land", land_complete):
        yield


@contextmanager
def every_replica_in_the_norm() -> Iterator[None]:
    """A slice counts once for each rank that holds it in the gradient norm."""
    right = step03.global_norm

    def global_norm(optimizer, mesh, dims, sliced):
        return right(optimizer, mesh, dims, sliced) * optimizer.replicas.size**0.5

    with mock.patch.object(step03, "global_norm", global_norm):
        yield


@contextmanager
def norm_of_own_slice() -> Iterator[None]:
    """Each rank clips by the norm of its own slice."""
    right = step03.global_norm

    def global_norm(optimizer, mesh, dims, sliced):
        return right(optimizer, mesh, dims, False)

    with mock.patch.object(step03, "global_norm", global_norm):
        yield


@contextmanager
def piece_off_by_one() -> Iterator[None]:
    """A parameter that a slice's end cuts in two loses the element at the cut."""
    right = step03.Unit.cut

    def cut(self, own, name):
        piece = right(self, own, name)
        return piece[:-1] if self.place[name][1] > self.first + self.length else piece

    with mock.patch.object(step03.Unit, "cut", cut):
        yield


@contextmanager
def no_reduce_scatter() -> Iterator[None]:
    """Each rank takes its slice from its own gradient, unsummed."""

    def reduce_scatter(output, tensor, group):
        output.copy_(tensor.view(group.size, -1)[group.rank])
        return Pending(group, [])

    with mock.patch.object(step03, "reduce_scatter", reduce_scatter):
        yield


@contextmanager
def updates_not_gathered() -> Iterator[None]:
    """Stages 1 and 2 go on with their own slice updated, and the others' old ones."""

    def gather(output, tensor, group, purpose=""):
        return all_gather(output, tensor, group, purpose) if purpose else Pending(group, [])

    with mock.patch.object(step03, "all_gather", gather):
        yield


@contextmanager
def initialised(change: Callable[[str, torch.nn.Parameter, torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Step 4 starts from other numbers: `change(name, part, full)` returns a part's value, or None to keep it."""
    right = step03.materialize

    def materialize(model, seed, *rest):
        right(model, seed, *rest)
        for name, part in model.named_parameters():
            full = draw_parameter(name, layout_of(part).full_shape(part.shape), model.config.n_layers, seed)
            value = change(name, part, full)
            if value is not None:
                part.data.copy_(value)

    with mock.patch.object(step03, "materialize", materialize):
        yield


def same_shard_on_every_rank():
    """Every tensor-parallel rank draws its part from the same seed."""
    return initialised(lambda name, part, full: full.flatten()[: part.numel()].view_as(part))


def scaled_by_local_fan_in():
    """What is cut by rows is scaled by the width of the part (here 1/2) instead of that of the whole."""
    rows = ("o_proj.weight", "down_proj.weight")
    return initialised(lambda name, part, full: part.detach() * 2**0.5 if name.endswith(rows) else None)


def heads_of_rank_0():
    """Every rank takes the heads of rank 0."""
    return initialised(lambda name, part, full: full[: len(part)] if name.endswith(HEADS) else None)


@contextmanager
def one_collective_a_matrix() -> Iterator[None]:
    """Q, k and v, gate and up each fetch the input, or sum its gradient, for themselves."""
    right = step04.ColumnParallel.__call__

    def call(self, x, *linears):
        return [right(self, x, linear)[0] for linear in linears]

    with mock.patch.object(step04.ColumnParallel, "__call__", call):
        yield


@contextmanager
def not_summed(dim: str, step: ModuleType = step04) -> Iterator[None]:
    """Partial gradients stay at home along one dimension."""
    right = step.sum_partial_gradients

    def sum_partial_gradients(optimizer, mesh, dims):
        right(optimizer, mesh, [d for d in dims if d != dim])

    with mock.patch.object(step, "sum_partial_gradients", sum_partial_gradients):
        yield


def norm_gradients_not_summed():
    """Under sequence parallelism each rank's norms learn from its own tokens only."""
    return not_summed("tp")


def kv_gradients_not_summed():
    """Copies of a key/value head learn from the query heads of their own rank only."""
    return not_summed("kv")


@contextmanager
def replicas_counted_in_the_norm() -> Iterator[None]:
    """What several ranks hold alike counts once for each of them in the gradient norm."""
    with mock.patch.object(Layout, "copies", lambda *_: 1):
        yield


@contextmanager
def conjugates(name: str, make: Callable) -> Iterator[None]:
    """`enter_block` or `leave_block` without sequence parallelism has the two collectives that `make()` gives."""
    right = getattr(step04, name)

    def wrong(x, group, sp):
        return right(x, group, sp) if sp else step04.Conjugate.apply(x, group, *make())

    with mock.patch.object(step04, name, wrong):
        yield


def g_sums_in_backward_too():
    """The backward of an all-reduce taken to be an all-reduce, as in torch.distributed.nn.functional."""
    return conjugates("leave_block", lambda: (step04.sum_tokens, step04.sum_tokens))


def f_does_not_sum_in_backward():
    """Each rank goes on with its own part of the input's gradient."""
    return conjugates("enter_block", lambda: (step04.keep_tokens, step04.keep_tokens))


@contextmanager
def rows_of(cls: type, change: Callable[[torch.Tensor, range], range]) -> Iterator[None]:
    """A layer that is cut by the vocabulary takes `change(weight, rows)` to be its rows."""
    right = cls.__init__

    def init(self, weight, rows, *rest):
        right(self, weight, change(weight, rows), *rest)

    with mock.patch.object(cls, "__init__", init):
        yield


def embedding_off_by_one():
    """Each rank looks up the row before."""
    return rows_of(step04.VocabParallelEmbedding, lambda weight, rows: range(rows.start + 1, rows.stop + 1))


def target_off_by_one():
    """Each rank takes the logit before to be the target's."""
    return rows_of(step04.VocabParallelHead, lambda weight, rows: range(rows.start + 1, rows.stop + 1))


def padding_in_the_softmax():
    """The logits of padding rows, all 0, count like those of words."""
    return rows_of(step04.VocabParallelHead, lambda weight, rows: range(rows.start, rows.start + len(weight)))


@contextmanager
def not_summed_over_cp() -> Iterator[None]:
    """Gradients are summed where dp > 1 only, though ranks along cp have seen other tokens."""
    alone = property(lambda mesh: Group("data", mesh.device, mesh.ledger))
    with (
        mock.patch.object(Mesh, "data", alone),
        mock.patch.object(variants, "require_same_parameters", lambda *_: None),
    ):
        yield


@contextmanager
def lse_in_bf16() -> Iterator[None]:
    """The log-sum-exp of a block, and the running one, are kept in bf16."""
    block_attention, merge = step05.block_attention, step05.merge

    def narrow(*args):
        out, lse = block_attention(*args)
        return out, lse.bfloat16().to(lse.dtype)

    def merge_narrow(out, lse, *block):
        merge(out, lse, *block)
        lse.copy_(lse.bfloat16())

    with mock.patch.multiple(step05, block_attention=narrow, merge=merge_narrow):
        yield


@contextmanager
def rope_tables_by(change: Callable) -> Iterator[None]:
    """The rotary tables come from `change(rope_tables, positions, config, dtype)`."""
    right = model.rope_tables
    with mock.patch.object(model, "rope_tables", lambda *args: change(right, *args)):
        yield


def positions_ignored():
    """Every rank rotates as if its tokens were the first."""
    return rope_tables_by(lambda right, positions, *rest: right(torch.arange(len(positions)), *rest))


def tables_in_bf16():
    """Rotary tables in bf16, whatever the dtype of the run."""
    return rope_tables_by(lambda right, *args: tuple(t.bfloat16().to(t.dtype) for t in right(*args)))


@contextmanager
def kv_heads_repeated_before_the_ring() -> Iterator[None]:
    """Keys and values are repeated to all query heads, and travel so."""
    right = step05.ContextAttention.__call__

    def call(self, q, k, v):
        return right(self, q, *(step05.repeat_heads(x, q) for x in (k, v)))

    with mock.patch.object(step05.ContextAttention, "__call__", call):
        yield


@contextmanager
def contiguous_chunks() -> Iterator[None]:
    """What is called zigzag is the plain ring, whose last rank does 2n-1 times the work of the first."""
    init, own_positions = step05.ContextAttention.__init__, step05.own_positions
    with (
        mock.patch.object(step05.ContextAttention, "__init__", lambda self, group, _: init(self, group, "ring")),
        mock.patch.object(step05, "own_positions", lambda seq_len, rank, n, _: own_positions(seq_len, rank, n, "ring")),
    ):
        yield


@contextmanager
def wrong_source() -> Iterator[None]:
    """After the first hop, keys and values are taken for those of the next rank."""
    right = step05.visible

    def visible(own, source, *rest):
        return right(own, source if source == own else source + 1, *rest)

    with mock.patch.object(step05, "visible", visible):
        yield


@contextmanager
def ring_backward_with(**names: Callable) -> Iterator[None]:
    """While a ring's backward runs, functions of step 5 are others: `make(right)` is called anew for each backward."""
    right = step05.RingAttention.backward

    def backward(ctx, grad):
        made = {name: make(getattr(step05, name)) for name, make in names.items()}
        with mock.patch.multiple(step05, **made):
            return right(ctx, grad)

    with mock.patch.object(step05.RingAttention, "backward", staticmethod(backward)):
        yield


def kv_of_hop_0_in_backward():
    """Backward computes every hop with the keys and values of the first, if a hop has as many."""

    def make(block_attention_backward):
        held = []

        def wrapper(grad, q, k, v, *rest):
            held.extend((k, v)[len(held) :])
            return block_attention_backward(grad, q, *(held if held[0].shape == k.shape else (k, v)), *rest)

        return wrapper

    return ring_backward_with(block_attention_backward=make)


def no_final_rotation():
    """dk and dv stay one hop away from home."""

    def make(exchange):
        calls = []

        def wrapper(sends, receives, group):
            calls.append(1)
            if len(calls) < 2 * group.size - 1:  # n-1 times keys and values, n times their gradients
                return exchange(sends, receives, group)
            receives[0][0].copy_(sends[0][0])
            return Pending(group, [])

        return wrapper

    return ring_backward_with(exchange=make)


@contextmanager
def labels_shifted_after_the_cut() -> Iterator[None]:
    """Each rank makes targets of its own tokens, so the last of every chunk has none."""
    right = TokenData.batch

    def batch(self, step, rows=slice(None)):
        tokens, targets, n_targets = right(self, step, rows)
        chunk = self.seq_len // torch.distributed.get_world_size()
        targets = targets.clone()
        targets[:, chunk - 1 :: chunk] = IGNORE
        return Batch(tokens, targets, n_targets)

    with mock.patch.object(TokenData, "batch", batch):
        yield


@contextmanager
def loss_summed_over_dp_only() -> Iterator[None]:
    """The logged loss leaves out the tokens of the other ranks along cp."""
    right = trainer.sum_over

    def sum_over(group, loss, *flags):
        found = right(group, loss, *flags)
        return [float(loss), *found[1:]] if flags else found

    with mock.patch.object(trainer, "sum_over", sum_over):
        yield


@contextmanager
def gradients_times_micro_batches() -> Iterator[None]:
    """The loss of each micro-batch is not divided before its backward: gradients are as many times too large."""
    right = torch.autograd.backward

    def backward(tensors, gradients=None):
        right(tensors, (torch.tensor(8.0, dtype=torch.float64),) if gradients is None else gradients)

    with mock.patch.object(step06.torch.autograd, "backward", backward):
        yield


@contextmanager
def drawn_by_stage() -> Iterator[None]:
    """Each stage numbers its layers from 0 when it draws their initial values."""
    right = step03.materialize

    def materialize(model, seed, *rest):
        right(model, seed, *rest)
        first = min(map(int, model.model.layers))
        for number, layer in model.model.layers.items():
            for name, param in layer.named_parameters(f"model.layers.{int(number) - first}"):
                full = draw_parameter(name, layout_of(param).full_shape(param.shape), model.config.n_layers, seed)
                param.data.copy_(layout_of(param).slice(full))

    with mock.patch.object(step03, "materialize", materialize):
        yield


@contextmanager
def copies_not_summed() -> Iterator[None]:
    """Nobody adds the gradients of parameters that two stages hold."""
    right = step06.note_gradient_sum

    def note_gradient_sum(params, dim):
        if dim != "mirror":
            right(params, dim)

    with mock.patch.object(step06, "note_gradient_sum", note_gradient_sum):
        yield


tied_gradient_not_summed = copies_not_summed


@contextmanager
def norm_of_the_own_stage() -> Iterator[None]:
    """Each stage clips by the norm of its own gradient."""
    right = step06.global_norm

    def global_norm(optimizer, mesh, dims, sliced):
        return right(optimizer, mesh, [dim for dim in dims if dim != "pp"], sliced)

    with mock.patch.object(step06, "global_norm", global_norm):
        yield


@contextmanager
def tied_counted_twice() -> Iterator[None]:
    """The norm counts the tied embedding on both ranks that hold it."""
    with mock.patch.object(Layout, "copies", lambda self, sizes: 1):
        yield


@contextmanager
def weight_gradients_lost() -> Iterator[None]:
    """W does nothing."""
    with mock.patch.object(step06.WeightGradStore, "pop", lambda self: self.waiting.clear() or []):
        yield


@contextmanager
def weight_gradients_twice() -> Iterator[None]:
    """W runs what waits twice."""
    right = step06.WeightGradStore.pop
    with mock.patch.object(step06.WeightGradStore, "pop", lambda self: right(self) * 2):
        yield


@contextmanager
def messages_swapped() -> Iterator[None]:
    """Two receives are exchanged, so that two micro-batches get each other's gradients: shapes and counts are right."""
    right = step06.Pipeline.fetch

    def fetch(self, output):
        kind, i, place = output
        if kind == "B" and i < 2:
            both = [(kind, n, place) for n in range(2)]
            if all(key in self.inbox for key in both):
                self.inbox[both[0]], self.inbox[both[1]] = self.inbox[both[1]], self.inbox[both[0]]
        return right(self, output)

    with mock.patch.object(step06.Pipeline, "fetch", fetch):
        yield


@contextmanager
def blocking_messages() -> Iterator[None]:
    """Every message is waited for where it is posted."""
    right = step06.exchange

    def exchange(*args, **options):
        pending = right(*args, **options)
        pending.wait()
        return pending

    with mock.patch.object(step06, "exchange", exchange):
        yield


@contextmanager
def balanced_by_own_tokens() -> Iterator[None]:
    """The balance loss takes each rank's own choices for those of the whole micro-batch."""

    def gather_in_order(group, places, chosen):
        return chosen.repeat(1, group.size, 1)

    with mock.patch.object(step07, "gather_in_order", gather_in_order):
        yield


@contextmanager
def drops_by_own_tokens() -> Iterator[None]:
    """Each rank drops what is over capacity among its own tokens, at a share of the capacity."""
    right = moe.within_capacity

    def within_capacity(chosen, experts, capacity):
        n = torch.distributed.get_world_size()
        return torch.cat([right(part, experts, -(-capacity // n)) for part in chosen.chunk(n, dim=1)], dim=1)

    with mock.patch.object(moe, "within_capacity", within_capacity):
        yield


@contextmanager
def ranks_counted_for_ep_too() -> Iterator[None]:
    """The world has to be dp x cp x tp x ep, though the mesh has ep inside of dp x cp: ep > 1 cannot be had."""
    right = checks.check

    def check(config, world):
        right(config, world)
        cp, tp = max(1, config.cp), max(1, config.tp)
        dp = world // cp // tp
        if dp * cp * tp * config.ep != world:
            raise UserError(f"{dp} x {cp} x {tp} x {config.ep} is not {world}")

    with mock.patch.object(trainer, "check", check):
        yield


@contextmanager
def experts_summed_over_all_data() -> Iterator[None]:
    """Gradients of experts are summed over all of dp x cp, and so with those of other experts."""

    def everyone(param, mesh):
        return mesh.data

    with (
        mock.patch.object(step02, "replica_group", everyone),
        mock.patch.object(step03, "replica_group", everyone),
        mock.patch.object(variants, "require_same_parameters", lambda *_: None),
    ):
        yield


@contextmanager
def experts_averaged() -> Iterator[None]:
    """Gradients of experts are divided by the number of ranks that share them out."""
    right = moe.GroupedLinear.backward

    def backward(ctx, grad):
        grad_x, grad_weight, *nothing = right(ctx, grad)
        return grad_x, grad_weight / 2, *nothing

    with mock.patch.object(moe.GroupedLinear, "backward", staticmethod(backward)):
        yield


@contextmanager
def gates_not_differentiated() -> Iterator[None]:
    """Gates are taken for constants, so the router learns from the balance loss alone."""
    right = moe.Experts.forward
    with mock.patch.object(moe.Experts, "forward", lambda self, x, gates, *n: right(self, x, gates.detach(), *n)):
        yield


@contextmanager
def returned_in_another_order() -> Iterator[None]:
    """Results come home one row off."""
    right = step07.ExpertParallel.over_tp

    def over_tp(self, *args, **flags):
        return right(self, *args, **flags).roll(1, 0)

    with mock.patch.object(step07.ExpertParallel, "over_tp", over_tp):
        yield


@contextmanager
def counted_twice_in_recomputation() -> Iterator[None]:
    """The balance loss enters once more when a layer's forward is done again."""
    right = moe.AddLoss.backward

    def backward(ctx, grad):
        grad, of_loss, *nothing = right(ctx, grad)
        return grad, 2 * of_loss, *nothing

    with mock.patch.object(moe.AddLoss, "backward", staticmethod(backward)):
        yield


@contextmanager
def experts_counted_once_in_the_norm() -> Iterator[None]:
    """The gradient norm takes each rank's experts for everyone's."""
    right = step07.global_norm

    def global_norm(optimizer, mesh, dims, sliced):
        return right(optimizer, mesh, [dim for dim in dims if dim != "ep"], sliced)

    with (
        mock.patch.object(step07, "global_norm", global_norm),
        mock.patch.object(variants, "require_same_parameters", lambda *_: None),
    ):
        yield


def router_not_summed_over_tp():
    """Under sequence parallelism each rank's router learns from its own tokens only."""
    return not_summed("tp", step07)


@contextmanager
def resumed_weights_only() -> Iterator[None]:
    """A resume that restores the weights, and neither moments nor step counts."""
    right = resume.load
    with mock.patch.object(resume, "load", lambda optimizer, found, weights_only: right(optimizer, found, True)):
        yield


@contextmanager
def noting_the_start() -> Iterator[list[int]]:
    """The step at which a resumed run goes on, once it is known."""
    right, start = resume.resume, []

    def noting(*args):
        start.append(right(*args))
        return start[0]

    with mock.patch.object(resume, "resume", noting):
        yield start


@contextmanager
def resumed_at_the_first_batch() -> Iterator[None]:
    """A resume that restores everything but the data position."""
    batch = TokenData.batch
    with noting_the_start() as start:

        def from_the_first(self, step, *rest):
            return batch(self, step - (start[0] if start else 0), *rest)

        with mock.patch.object(TokenData, "batch", from_the_first):
            yield


@contextmanager
def resumed_with_the_first_learning_rate() -> Iterator[None]:
    """A resume that begins the schedule of the learning rate anew."""
    learning_rate = trainer.Trainer.learning_rate
    with noting_the_start() as start:

        def from_the_first(self, step):
            return learning_rate(self, step - (start[0] if start else 0))

        with mock.patch.object(trainer.Trainer, "learning_rate", from_the_first):
            yield


@contextmanager
def read_as_rank_0() -> Iterator[None]:
    """Every rank reads from a checkpoint what rank 0 along tp would: its heads, its rows."""
    right = checkpoint.Checkpoint.fill

    def fill(self, piece):
        cuts = [replace(split, start=0, stop=split.stop - split.start) for split in piece.layout.splits]
        return right(self, replace(piece, layout=replace(piece.layout, splits=tuple(cuts))))

    with mock.patch.object(checkpoint.Checkpoint, "fill", fill):
        yield


@contextmanager
def positions_restart_on_rank_0_alone() -> Iterator[None]:
    """--documents reset: other ranks of cp rotate by the places in the sequence."""
    right = documents.Documents.begin

    def begin(self, tokens):
        right(self, tokens)
        for micro_batch in self.micro_batches if self.rank else ():
            micro_batch.rope = self.run.positions.expand_as(micro_batch.rope)

    with mock.patch.object(documents.Documents, "begin", begin):
        yield


def reaching_document_skipped():
    """Keys of other ranks are looked at by no document, as if each ended at the cut."""
    return mock.patch.object(documents, "rectangle", lambda queries, keys: [])


def borders_ignored():
    """Every token of a sequence is taken for one of its first document."""
    return mock.patch.object(documents, "document_numbers", lambda tokens, end: torch.zeros_like(tokens))


@contextmanager
def documents_of_the_forward_in_backward() -> Iterator[None]:
    """A pipeline notes which micro-batch it computes in forward alone: backward takes the one before for it."""
    right = documents.Documents.act

    def act(self, pipeline, inner, action, peer):
        if action.kind == "F":
            return right(self, pipeline, inner, action, peer)
        return inner(action, peer)

    with mock.patch.object(documents.Documents, "act", act):
        yield


@contextmanager
def gathered_inputs_wait() -> Iterator[None]:
    """Zero bubble keeps the gathered input of column-parallel layers until W, not s/n tokens of it."""
    right = step06.SplitFunction.forward

    def forward(ctx, x, group, gather, reduce, store, *weights):
        full = gather(x, group).wait() if group is not None else x
        return right(ctx, full, group, step04.keep_tokens, reduce, store, *weights)

    with mock.patch.object(step06.SplitFunction, "forward", forward):
        yield


@contextmanager
def activations_not_rounded() -> Iterator[None]:
    """Not a fault: --compress-activations sends every byte of fp64 values, in the same messages, so nothing is lost."""
    with (
        mock.patch.object(Narrow, "pack", lambda self, x: x.contiguous().view(torch.int8)),
        mock.patch.object(Narrow, "unpack", lambda self, message, dim: message.contiguous().view(torch.float64)),
        mock.patch.object(Narrow, "empty", lambda self, x: torch.empty_like(x).view(torch.int8)),
    ):
        yield


class Rounded(torch.autograd.Function):
    """What a message does to x [..., dim] forward, and to its gradient backward."""

    @staticmethod
    def forward(ctx, x, forward=True, backward=True):
        ctx.narrow, ctx.backward = Narrow(None, "int8", x.shape[-1]), backward
        return ctx.narrow.unpack(ctx.narrow.pack(x), x.shape[-1]).to(x.dtype) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (Rounded.apply(grad, True, False) if ctx.backward else grad), None, None


@contextmanager
def rounding(tp: bool, sp: bool, stages: tuple[int, ...] = ()) -> Iterator[None]:
    """Not a fault: one device rounds where tp 2, and stages that begin with these layers, would send int8."""

    def project(x, *linears):
        x = x if sp else Rounded.apply(x, False)
        copies = [Rounded.apply(x, sp) for _ in range(2)]  # the two parts of dx are rounded one by one
        return [
            torch.cat([F.linear(c, w) for c, w in zip(copies, m.weight.chunk(2), strict=True)], -1) for m in linears
        ]

    def add(linear, x):
        parts = zip(x.chunk(2, -1), linear.weight.chunk(2, 1), strict=True)
        total = sum(Rounded.apply(F.linear(part, weight), True, sp) for part, weight in parts)
        return total if sp else Rounded.apply(total, True, False)

    def materialize(model, *args):
        right(model, *args)
        for number, layer in model.model.layers.items():
            if int(number) in stages:
                layer.register_forward_pre_hook(lambda _, inputs: (Rounded.apply(inputs[0]), *inputs[1:]))
            if tp:
                layer.self_attn.project = layer.mlp.project = project
                for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                    linear.forward = partial(add, linear)

    right = step01.materialize
    with mock.patch.object(step01, "materialize", materialize):
        yield


ROUNDING = dict(
    rounding_like_tp=(True, True),
    rounding_like_tp_without_sp=(True, False),
    rounding_like_tp_and_two_stages=(True, True, (2,)),
    rounding_like_tp_and_four_stages=(True, True, (1, 2, 3)),
)


@contextmanager
def scales_of_another_rank() -> Iterator[None]:
    """What is gathered in int8 is read with the scales of the rank before."""
    right = Narrow.unpack

    def unpack(self, message, dim):
        if message.dim() == 3 and len(message) == self.group.size:
            message = torch.cat((message[..., :dim], message[..., dim:].roll(1, 0)), -1)
        return right(self, message, dim)

    with mock.patch.object(Narrow, "unpack", unpack):
        yield


@contextmanager
def weight_gradients_added_twice() -> Iterator[None]:
    """--fuse-gradients adds a product to `.grad` twice."""
    right = fused_gradients.add_product

    def add_product(total, a, b):
        right(right(total, a, b), a, b)

    with mock.patch.object(fused_gradients, "add_product", add_product):
        yield


@contextmanager
def gradients_sent_whole() -> Iterator[None]:
    """Layers round activations, but not gradients."""

    def backward(ctx, grad):
        group, *pair = ctx.arguments
        return step04.Conjugate.apply(grad, replace(group, narrow=None), *pair), None, None, None

    def column_backward(ctx, *grads):
        reduce = ctx.reduce
        ctx.reduce = lambda dx, group: reduce(dx, replace(group, narrow=None))
        return right(ctx, *grads)

    right = step04.ColumnParallelLinear.backward
    with (
        mock.patch.object(step04.Conjugate, "backward", backward),
        mock.patch.object(step04.ColumnParallelLinear, "backward", column_backward),
    ):
        yield


@contextmanager
def gathered_again_whole() -> Iterator[None]:
    """The input that is gathered again for the weight gradients is not rounded as it was in forward."""
    right = step04.ColumnParallelLinear.backward

    def backward(ctx, *grads):
        gather = ctx.gather
        ctx.gather = lambda x, group: gather(x, replace(group, narrow=None))
        return right(ctx, *grads)

    with mock.patch.object(step04.ColumnParallelLinear, "backward", backward):
        yield


@contextmanager
def weight_gradients_replaced() -> Iterator[None]:
    """--fuse-gradients forgets what earlier micro-batches have added up."""
    right = fused_gradients.total
    with mock.patch.object(fused_gradients, "total", lambda weight: right(weight).zero_()):
        yield


@contextmanager
def tokens_counted_once() -> Iterator[None]:
    """--fuse-gradients adds one gradient to an embedding's row, however often the token occurs."""

    def backward(ctx, grad):
        fused_gradients.total(ctx.weight)[ctx.saved_tensors[0].flatten()] += grad.flatten(0, -2)
        return None, None

    with mock.patch.object(fused_gradients.FusedLookUp, "backward", staticmethod(backward)):
        yield


@contextmanager
def experts_added_twice() -> Iterator[None]:
    """--fuse-gradients adds the weight gradients of experts, and gives them to autograd, too."""
    right = fused_gradients.FusedGrouped.backward

    def backward(ctx, grad):
        right(ctx, grad)
        return moe.GroupedLinear.backward(ctx, grad)

    with mock.patch.object(fused_gradients.FusedGrouped, "backward", staticmethod(backward)):
        yield


@contextmanager
def rotated_on() -> Iterator[None]:
    """--fuse-gradients rotates gradients of q and k as these themselves, not back."""
    right = fused_gradients.rotated
    with mock.patch.object(fused_gradients, "rotated", lambda x, cos, sin, _: right(x, cos, sin, 1.0)):
        yield


@contextmanager
def told_another_scale() -> Iterator[None]:
    """--fuse-gradients is told that the loss is going to be twice as large."""
    right = variants.fuse_gradients
    with mock.patch.object(variants, "fuse_gradients", lambda model, factor: right(model, lambda: 2 * factor())):
        yield


@contextmanager
def orthogonal_without(missed: Callable[[str], bool]) -> Iterator[None]:
    """Muon gathers nothing in groups whose name is `missed`: what other ranks hold of a matrix counts as zero."""
    right = muon.all_gather

    def all_gather(output, tensor, group, purpose):
        if not missed(group.name):
            return right(output, tensor, group, purpose)
        output.zero_().view(group.size, -1)[group.rank].copy_(tensor)
        return Pending(group, [])

    with mock.patch.object(muon, "all_gather", all_gather):
        yield


def each_shard_made_orthogonal_alone():
    """Each tensor-parallel rank makes its own part of a matrix orthogonal."""
    return orthogonal_without(lambda name: name == "tp")


def each_slice_made_orthogonal_alone():
    """Under ZeRO, each rank makes its own slice orthogonal."""
    return orthogonal_without(lambda name: name != "tp")


@contextmanager
def experts_made_orthogonal_together() -> Iterator[None]:
    """The matrices of a layer's experts, one below the other, count as one."""
    right = muon.orthogonal
    with mock.patch.object(muon, "orthogonal", lambda x: right(x.flatten(0, 1)[None]).reshape(x.shape)):
        yield


def applied(name: str):
    """The context manager called `name`; "" is none."""
    return rounding(*ROUNDING[name]) if name in ROUNDING else globals()[name or "nothing"]()
