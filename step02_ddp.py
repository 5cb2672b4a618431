"""Step 2: data parallelism. Every rank holds the whole model and works on its share of the batch; gradients are summed.

    rank 0: sequences 0..7    -> forward, backward -> gradient g0 -+
    rank 1: sequences 8..15   -> forward, backward -> gradient g1 -+-> all-reduce: g0 + g1 + g2 + g3 on every rank
    rank 2: sequences 16..23  -> forward, backward -> gradient g2 -+   -> the same update everywhere
    rank 3: sequences 24..31  -> forward, backward -> gradient g3 -+

torchrun starts this script n times. Each process is a *rank* and joins the others with `init_process_group`.
A *collective* is a call that all ranks make. After `dist.all_reduce(tensor)`, each rank's tensor is the sum of all.

WHY A SUM IS ENOUGH. The loss is sum_i l_i / T over all T target tokens of the global batch, and the gradient of a
sum is the sum of gradients. Each rank's loss is already divided by the global T (step 1: scale once).

    --sync naive     after the last backward, one blocking all-reduce per parameter
    --sync ring      the same, with the all-reduce written out below
    --sync bucket    gradients are views of flat buffers (--bucket-mb); during the last backward, a buffer's all-reduce
                     starts when that buffer and all before it are complete (Li et al. 2020, "PyTorch Distributed")

Run it:    torchrun --nproc_per_node=4 step02_ddp.py
You should see step 1's losses, equal up to rounding. runs/step02_ddp/metrics.jsonl has `sent`, the bytes that rank 0
sends in a step over each mesh dimension. Over dp 2 (n-1)/n (S + 4), below 2 (S + 4): S for gradients, 4 for the loss.
--sync ring counts each of its messages. The others use the formula, because PyTorch does not report its messages.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
from common import UserError
from common.comm import Group, Mesh, all_reduce, exchange, note
from common.data import Data
from common.flags import flag
from common.layout import layout_of, materialize
from common.model import IGNORE, Decoder, model_shape
from common.trainer import Run, choose_device, main
from step01_single_gpu import Optimizer, apply_recompute, learning_rate, scale


def join_ranks(device: torch.device, **options) -> int:
    """Return the number of ranks. If RANK is set, initialise the process group, unless it exists. Raises UserError."""
    if "RANK" in os.environ and not dist.is_initialized():
        try:
            dist.init_process_group(**dict(backend="nccl" if device.type == "cuda" else "gloo") | options)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"the ranks cannot meet: see MASTER_ADDR, *_SOCKET_IFNAME ({error})") from error
    return dist.get_world_size() if dist.is_initialized() else 1


class NaiveSync:
    """Sum the gradients one by one when backward is done. Every sync class has `begin` and `finish`."""

    def __init__(self, model: Decoder, config: "Config", mesh: Mesh):
        self.params, self.mesh = [param for param in model.parameters() if param.requires_grad], mesh

    def begin(self, n_micro_batches: int):
        """Called before the first micro-batch. Nothing to do here: each backward adds to the gradients."""

    def finish(self):
        """Called after the last micro-batch: sum each `.grad` over the group that its record's `data_dim` names."""
        for param in self.params:
            group = self.mesh[layout_of(param).data_dim]  # dp: the ranks with the same weights and different tokens
            if group.size > 1:
                self.sum_up(param.grad, group)

    def sum_up(self, gradient: Tensor, group: Group):
        """All-reduce a gradient in place. `note` adds 2 (n-1)/n times its bytes to `sent`."""
        note("all_reduce", group, gradient, 2 * (group.size - 1) / group.size)
        dist.all_reduce(gradient, group=group.handle)


class RingSync(NaiveSync):
    """Sum each gradient by a ring all-reduce of our own: 2 (n-1) messages to the right (Patarasuk and Yuan 2009).

    n = 4: each gradient has shards a b c d. A row shows the shards that changed; a01 is a, summed over ranks 0, 1:

                           rank 0         rank 1         rank 2         rank 3
        at first           a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
        after round 0      d30            a01            b12            c23         rank r sent shard r
        after round 1      c230           d301           a012           b123        r sent its newest sum
        after round 2      b1230          c2301          d3012          a0123       each has one sum: reduce-scatter
        rounds 3, 4, 5     a d c          b a d          c b a          d c b       each gets all sums: all-gather

    In round s rank r sends shard r-s and receives shard r-s-1 (mod n).
    """

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place. Its n shards need not be equally long, and may be empty."""
        n, r = group.size, group.rank
        shards = gradient.view(-1).tensor_split(n)
        for s in range(2 * (n - 1)):
            outgoing, target = shards[(r - s) % n], shards[(r - s - 1) % n]
            incoming = torch.empty_like(target)
            # Send to the right, receive from the left: (tensor, the neighbour's rank in the group).
            exchange([(outgoing, (r + 1) % n)], [(incoming, (r - 1) % n)], group).wait()
            if s < n - 1:
                target += incoming
            else:  # sums are complete
                target.copy_(incoming)


class Bucket:
    """One buffer, `flat` [elements], for the gradients of all `params`. views[i] is params[i]'s part, in its shape."""

    def __init__(self, params: list[nn.Parameter], group: Group):
        """Allocate `flat` as zeros, in the params' grad_dtype."""
        self.params, self.group, sizes = params, group, [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].grad_dtype, device=params[0].device)
        self.views = [view.view_as(p) for view, p in zip(self.flat.split(sizes), params, strict=True)]


def fill_buckets(params: list[nn.Parameter], mesh: Mesh, limit: float) -> list[Bucket]:
    """Split params, in order, into buckets of at most `limit` bytes, each for one group. A larger param is alone."""
    lists, room, last_group = [], 0.0, None
    for param in params:
        size, group = param.numel() * param.grad_dtype.itemsize, mesh[layout_of(param).data_dim]
        if size > room or group is not last_group:  # a bucket has one group: in this chapter dp, of all ranks
            lists.append([])
            room, last_group = limit, group
        lists[-1].append(param)
        room -= size
    return [Bucket(some, mesh[layout_of(some[0]).data_dim]) for some in lists]


class BucketSync:
    """All-reduces of buckets, started during the last backward.

    Autograd adds into an existing `.grad` in place, so a gradient that starts as a view of a buffer remains one.
    Backward completes gradients roughly from the last parameter to the first; buckets list them in this order. All
    ranks must start their collectives in the same order: a bucket is sent when it *and all before it* are complete.
    """

    def __init__(self, model: Decoder, config: "Config", mesh: Mesh):
        """Fill buckets, and add hooks. The optimizer must exist already: it sets the dtype of the gradients."""
        backwards = [param for param in reversed(list(model.parameters())) if param.requires_grad]
        self.buckets = fill_buckets(backwards, mesh, config.bucket_mb * 2**20)
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self.mark_ready, bucket))

    def begin(self, n_micro_batches: int):
        """Zero the buffers; make each `.grad` a view of its buffer. Each micro-batch will add to each `.grad` once."""
        self.unsent, self.pending = list(self.buckets), []
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = n_micro_batches * len(bucket.params)  # additions that are still to come in this step
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def mark_ready(self, bucket: Bucket, _param: nn.Parameter):
        """Hook: autograd has added to a gradient of `bucket`. Send the buckets that are complete, in order."""
        bucket.missing -= 1
        while self.unsent and self.unsent[0].missing == 0:
            self.send(self.unsent.pop(0))

    def send(self, bucket: Bucket):
        """Start a bucket's asynchronous all-reduce. (`all_reduce` calls `note`, unless the group has only one rank.)"""
        self.pending.append(all_reduce(bucket.flat, bucket.group))

    def finish(self):
        """Wait for every sum. (The embedding's gradient comes last: no backward is left to overlap with its sum.)"""
        while self.unsent:  # a parameter had no gradient in some micro-batch: its bucket is never complete
            self.send(self.unsent.pop(0))
        for pending in self.pending:
            pending.wait()


SYNCS: dict[str, Callable[..., NaiveSync | BucketSync]] = {"bucket": BucketSync, "naive": NaiveSync, "ring": RingSync}


@dataclass
class Config(step01.Config):
    """Data parallelism."""

    sync: str = flag("bucket", "how gradients are summed over dp", SYNCS, needs={"zero": ["0"]})
    bucket_mb: float = flag(
        1.0,
        "largest gradient bucket, in MiB; a larger parameter is a bucket of its own",
        needs={"zero": ["0"], "sync": ["bucket"]},
    )


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    mesh = Mesh(dp=join_ranks(device))  # one group of all ranks. mesh["dp"]: rank, size, handle (PyTorch's group)
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # these sequences are mine
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    materialize(model, config.seed, device, dtype)  # the same weights on every rank
    apply_recompute(model, config.recompute)
    optimizer = Optimizer(model, config, mesh)
    sync = SYNCS[config.sync](model, config, mesh)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine].split(config.micro_batch_size) for x in (tokens, targets))
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum,
            loss = loss + micro_loss.detach()
        sync.finish()  # also over ranks
        all_reduce(loss, mesh["dp"]).wait()  # the loss, too

        norm = torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)  # rank 0 alone writes


if __name__ == "__main__":
    main(train, Config)
