"""Faults to inject, by name: what peers got wrong. Each is a context manager that patches modules and undoes it.

A negative control runs the equivalence check with one of these and asserts that the check fails: a test that a broken
collective passes is not a test. Harmless patches (a frozen parameter) live here too, for both sides of a comparison.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

import step01_single_gpu as step01
import step02_ddp as step02
import step03_zero as step03
import step04_tp_sp as step04
import step05_cp_ring as step05
from common.comm import Pending, all_gather, all_reduce
from common.data import Batch


@contextmanager
def nothing() -> Iterator[None]:
    """No fault."""
    yield


@contextmanager
def frozen() -> Iterator[None]:
    """Not a fault: one matrix and one norm do not train."""

    def freezing(materialize):
        def wrapper(model, *args):
            materialize(model, *args)
            model.model.layers["1"].mlp.up_proj.weight.requires_grad_(False)
            model.model.layers["0"].input_layernorm.weight.requires_grad_(False)

        return wrapper

    with (
        mock.patch.object(step01, "materialize", freezing(step01.materialize)),
        mock.patch.object(step02, "materialize", freezing(step02.materialize)),
        mock.patch.object(step03, "materialize", freezing(step03.materialize)),
        mock.patch.object(step04, "materialize", freezing(step04.materialize)),
        mock.patch.object(step05, "materialize", freezing(step05.materialize)),
    ):
        yield


@contextmanager
def weights_reduced_instead_of_gradients() -> Iterator[None]:
    """PEERS fault 4: "naive DP" that all-reduces (here: averages) the weights and leaves the gradients alone."""

    def finish(self):
        for param in self.params:
            all_reduce(param.data, self.group).wait()
            param.data /= self.group.size

    with mock.patch.object(step02.NaiveSync, "finish", finish):
        yield


@contextmanager
def only_last_micro_batch() -> Iterator[None]:
    """Fault 5: only the last micro-batch's gradient is summed over the ranks, the earlier ones stay at home."""
    last_micro_batch, finish = step02.NaiveSync.last_micro_batch, step02.NaiveSync.finish

    def remember(self):
        self.before = [None if p.grad is None else p.grad.clone() for p in self.params]
        last_micro_batch(self)

    def finish_last(self):
        for param, before in zip(self.params, self.before, strict=True):
            if before is not None:
                param.grad -= before
        finish(self)
        for param, before in zip(self.params, self.before, strict=True):
            if before is not None:
                param.grad += before

    with (
        mock.patch.object(step02.NaiveSync, "last_micro_batch", remember),
        mock.patch.object(step02.NaiveSync, "finish", finish_last),
    ):
        yield


@contextmanager
def early_buckets() -> Iterator[None]:
    """Fault 5 in buckets: hooks send at the first micro-batch, so later ones are never summed."""

    def begin(self):
        begin_right(self)
        self.armed = True

    begin_right = step02.BucketSync.begin
    with mock.patch.object(step02.BucketSync, "begin", begin):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Fault 18: the logged loss is the mean of the ranks' own means, right only if all have equally many targets."""

    def sum_over(group, loss, *flags):
        return [loss.item() * group.size, *(float(flag) for flag in flags)]

    with mock.patch.object(step02, "sum_over", sum_over):
        yield


@contextmanager
def mean_of_local_targets() -> Iterator[None]:
    """The loss divided by this rank's own number of targets, then averaged: a mean of means in the gradient."""
    batch = step02.TokenData.batch

    def local(self, step, rows):
        tokens, targets, _ = batch(self, step, rows)
        ranks = torch.distributed.get_world_size()
        return Batch(tokens, targets, max(1, int((targets != -100).sum())) * ranks)

    with mock.patch.object(step02.TokenData, "batch", local):
        yield


@contextmanager
def averaged() -> Iterator[None]:
    """The all-reduce divides by the number of ranks although the loss was already divided by the global count."""
    finish = step02.BucketSync.finish

    def finish_and_divide(self):
        finish(self)
        for bucket in self.buckets:
            bucket.flat /= self.group.size

    with mock.patch.object(step02.BucketSync, "finish", finish_and_divide):
        yield


@contextmanager
def no_sync() -> Iterator[None]:
    """Gradients are never summed."""
    with (
        mock.patch.object(step02.BucketSync, "send", lambda self, bucket: None),
        mock.patch.object(step02, "require_same_parameters", lambda *_: None),
    ):
        yield


@contextmanager
def bucket_forgotten() -> Iterator[None]:
    """The last, partly filled bucket is never sent."""
    send = step02.BucketSync.send

    def skip_last(self, bucket):
        if bucket is not self.buckets[-1]:
            send(self, bucket)

    with (
        mock.patch.object(step02.BucketSync, "send", skip_last),
        mock.patch.object(step02, "require_same_parameters", lambda *_: None),
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
    right = step03.Unit.update

    def update(self, lr, factor):
        for key in self.moments if self.inner.state else ():
            own = torch.zeros_like(self.master)
            for name, piece in self.pieces.items():
                self.cut(own, name).copy_(self.inner.state[piece][key])
            everyone = own.new_empty(self.group.size, self.length)
            all_gather(everyone.view(-1), own, self.group).wait()
            for name, piece in self.pieces.items():
                others = everyone[(self.group.rank + 1) % self.group.size]
                self.inner.state[piece][key].copy_(self.cut(others, name))
        right(self, lr, factor)

    with mock.patch.object(step03.Unit, "update", update):
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
        for u in self.uses[i].units if self.uses[i].again else ():
            self.units[u].flat.zero_()

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
            self.in_flight[0].grad_slice.zero_()
        right(self)

    with mock.patch.object(step03.ZeroOptimizer, "land", land):
        yield


@contextmanager
def reduced_at_every_micro_batch() -> Iterator[None]:
    """Stage 1 reduces a gradient that is not complete, and then again what it has already summed."""
    right = step03.ZeroOptimizer.begin

    def begin(self):
        right(self)
        self.armed = True

    with mock.patch.object(step03.ZeroOptimizer, "begin", begin):
        yield


@contextmanager
def norm_of_own_slice() -> Iterator[None]:
    """Each rank clips by the norm of its own slice."""

    def grad_norm(self):
        slices = [unit.grad_slice for unit in self.units if unit.grad_slice is not None]
        return torch.nn.utils.get_total_norm(slices).item()

    with mock.patch.object(step03.ZeroOptimizer, "grad_norm", grad_norm):
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


def applied(name: str):
    """The context manager called `name`; "" is none."""
    return globals()[name or "nothing"]()
