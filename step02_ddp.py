"""Step 2: data parallelism. Every rank has the whole model and a share of the batch.

    rank 0: sequences 0..7    -> forward, backward -> gradient g0 -+
    rank 1: sequences 8..15   -> forward, backward -> gradient g1 -+-> all-reduce: g0 + g1 + g2 + g3
    rank 2: sequences 16..23  -> forward, backward -> gradient g2 -+   on every rank
    rank 3: sequences 24..31  -> forward, backward -> gradient g3 -+   -> the same update everywhere

torchrun starts this script n times. Each process is a *rank* and joins the others with
`init_process_group`. A *collective* is a call that all ranks of a group make. After
`dist.all_reduce(tensor)`, each rank's tensor is the sum of all, element by element. Ours, in
common/comm.py, returns a `Pending`: the sum may be used after its `wait`.

WHY A SUM IS ENOUGH. The loss is sum_i l_i / T, where l_i is the loss of target token i, and T
counts those of the global batch. The gradient of a sum is the sum of gradients. Each rank's loss is
already divided by the global T (step 1: scale once), so nothing is divided by the number of ranks.

THE SAME START. Every rank draws the same weights, from the seed and the parameters' names. They
stay equal, because an all-reduce gives all ranks the same bits: in a ring, for example, each sum is
computed in one place, and then copied.

THREE WAYS TO SUM:

    --sync naive     after the last backward, one all-reduce per parameter, each waited for
    --sync ring      the same, with the all-reduce written out below (to read: it is slower)
    --sync bucket    the default: a few large all-reduces, which start during the last backward

BUCKETS. Each all-reduce has a fixed cost, so many small ones are slow. One large one could start
only when all gradients are there. So gradients live in a few flat buffers, the buckets, of at most
1 MiB (--bucket-mb; a larger parameter has its own). Each `.grad` is a view of a part of one. (Large
models have larger buckets. With --bucket-mb 25 all of tiny's gradients, 3.2 MB, would be one.)

Buckets are filled roughly in the order of backward, from the head to the embedding. Each
micro-batch adds once to each gradient, and a bucket counts how many of these additions are still to
come. Tiny's first has the gradients of 11 tensors: the head, the last norm, and layer 3's nine. On
4 ranks each rank has 8 sequences, 2 micro-batches, so the counter starts at 11 x 2 = 22. It reaches
0 in the backward of the last micro-batch: the all-reduce of this bucket starts, while backward goes
on to earlier layers.

All ranks must start their collectives in the same order. So a complete bucket waits for those
before it: then it does not matter in which order autograd completes gradients on a rank (Li et al.
2020, "PyTorch Distributed"). The figure shows the last micro-batch's backward, not to scale. The
second row shows into which bucket the gradients go.

    backward of    | head, layer 3 | layer 2    | layer 1    | layer 0, embedding |
    its bucket     | 0 0 0 0 0 0 0 | 1 1 1 1 1  | 1 2 2 2 2  | 2 2 3 3 3 3 3 3 3  |
    all-reduce                     | bucket 0      | bucket 1     | bucket 2      | bucket 3 |

Buckets may end inside a layer: tiny's bucket 1 also has layer 1's down_proj, and bucket 2 layer 0's
down_proj and up_proj.

THE LAW. In a ring, a rank sends 2 (n-1) messages, each 1/n of the tensor that is summed (`RingSync`
below). So in a training step it sends 2 (n-1)/n times the bytes of all gradients and of the loss.
For tiny on 4 ranks (804,224 fp32 gradients): 2 x 3/4 x (4 x 804,224 + 4) = 4,825,350 bytes.

Run it:    torchrun --nproc_per_node=4 step02_ddp.py
You should see step 1's losses, up to rounding (on a GPU, with --dtype fp32 for both):
    python -m common.compare runs/step01_single_gpu runs/step02_ddp
It judges only the first 20 steps, because the effects of rounding grow.

In runs/step02_ddp/metrics.jsonl, `sent` has the bytes of the gradients and the loss that rank 0
sends in a training step, by group, here only dp. For PyTorch's all-reduces, common/comm.py computes
this by the law; with --sync ring it counts the messages of gradients as they are sent.

PyTorch's own way: model = DistributedDataParallel(model, bucket_cap_mb=25), and `with
model.no_sync():` around forward and backward of all micro-batches but the last. It broadcasts rank
0's weights. It averages gradients over ranks, so mean losses would give a mean of means. To get our
sums, multiply the loss by the number of ranks. For data there is DistributedSampler, whose order
changes only with `set_epoch`.

Try this: in `BucketSync.begin`, set `bucket.missing` one lower. A bucket is then sent before its
last gradient is there, and `count_addition` raises RuntimeError.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import step01_single_gpu as step01
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.initial import materialize
from common.launch import compare_launches, connect_ranks, main
from common.layout import data_group_of
from common.model import IGNORE, Decoder
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import (
    Optimizer,
    clip,
    learning_rate,
    set_up_layers,
)


def join_ranks(device: torch.device) -> int:
    """Initialise the process group, if torchrun has started this script. Returns the number of
    ranks.

    `connect_ranks` calls dist.init_process_group, and raises UserError if that fails.
    """
    if "RANK" in os.environ and not dist.is_initialized():  # it is initialised in tests
        if device.type == "cuda":
            # With device_id, NCCL connects the ranks at once: a bad network shows here, not later
            connect_ranks("nccl", device_id=device)
        else:
            connect_ranks("gloo")
        # If flags or code differed between ranks, the run could hang, or train on nonsense
        compare_launches()
    return dist.get_world_size() if dist.is_initialized() else 1


class NaiveSync:
    """Sum the gradients one by one when backward is done."""

    def __init__(self, model: Decoder, config: "Config", mesh: Mesh):
        self.params = list(model.parameters())
        self.mesh = mesh

    def begin(self, n_micro_batches: int):
        """Called before the first micro-batch. Nothing to do: autograd makes each `.grad`."""

    def finish(self):
        """Called after the last micro-batch: sum each `.grad` over the ranks."""
        for param in self.params:
            group = data_group_of(param, self.mesh)  # mesh["dp"] in steps 2 to 4
            self.sum_up(param.grad, group)

    def sum_up(self, gradient: Tensor, group: Group):
        """All-reduce a gradient in place."""
        all_reduce(gradient, group).wait()


class RingSync(NaiveSync):
    """Sum each gradient by a ring all-reduce of our own: n ranks form a ring, and each sends 2
    (n-1) messages to its right neighbour, rank r+1 (mod n).

    This is the algorithm of Patarasuk and Yuan 2009. Each gradient has n shards, here 4: shard 0 is
    a, shard 1 is b, and so on. In round s rank r sends shard r-s and receives shard r-s-1 (mod n).
    A row shows the shards that have changed; a01 is the sum of a over ranks 0 and 1:

                         rank 0         rank 1         rank 2         rank 3
        at first         a0 b0 c0 d0    a1 b1 c1 d1    a2 b2 c2 d2    a3 b3 c3 d3
        after round 0    d30            a01            b12            c23      rank r sent shard r
        after round 1    c230           d301           a012           b123     each sent its new sum
        after round 2    b1230          c2301          d3012          a0123    each has one sum
        rounds 3, 4, 5   gets a d c     gets b a d     gets c b a     gets d c b    (full sums)

    Rounds 0 to 2 are a reduce-scatter, rounds 3 to 5 an all-gather: rank 0 gets the sum of a, then
    that of d, then that of c.
    """

    def sum_up(self, gradient: Tensor, group: Group):
        """Sum a contiguous tensor over the group, in place. Shards may differ by one element."""
        n = group.size
        r = group.rank
        right = (r + 1) % n
        left = (r - 1) % n
        shards = gradient.view(-1).tensor_split(n)  # views: writing to one changes the gradient
        for s in range(2 * (n - 1)):
            outgoing = shards[(r - s) % n]
            changed = shards[(r - s - 1) % n]
            incoming = torch.empty_like(changed)
            exchange([(outgoing, right)], [(incoming, left)], group).wait()
            if s < n - 1:
                changed.add_(incoming)
            else:  # sums are complete
                changed.copy_(incoming)


class Bucket:
    """One buffer, `flat` [elements], for the gradients of all `params`; views[i] is params[i]'s
    part.
    """

    def __init__(self, params: list[nn.Parameter], group: Group):
        """Allocate `flat` as zeros, in the params' grad_dtype."""
        self.params = params
        self.group = group
        sizes = [param.numel() for param in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].grad_dtype, device=params[0].device)
        self.views: list[Tensor] = []
        for part, param in zip(self.flat.split(sizes), params, strict=True):
            self.views.append(part.view_as(param))
        self.missing = 0  # additions to gradients that are still to come in this training step


def fill_buckets(params: list[nn.Parameter], mesh: Mesh, limit: float) -> list[Bucket]:
    """Split params, in order, into buckets of at most `limit` bytes. A larger parameter is alone.

    All gradients of a bucket are summed over the same group. (Until step 7 there is only one.)
    """
    contents: list[list[nn.Parameter]] = []  # the parameters of each bucket
    group = None  # the group of the bucket that is being filled
    size = 0  # bytes of its gradients
    for param in params:
        nbytes = param.numel() * param.grad_dtype.itemsize
        param_group = data_group_of(param, mesh)
        if param_group is not group or size + nbytes > limit:  # begin a bucket
            contents.append([])
            group = param_group
            size = 0
        contents[-1].append(param)
        size += nbytes
    return [Bucket(members, data_group_of(members[0], mesh)) for members in contents]


class BucketSync:
    """All-reduces of buckets, started during the last backward.

    If a parameter has a `.grad`, backward adds to it in place. So `begin` sets each `.grad` to a
    part of a bucket's buffer: there the gradients of all micro-batches add up, without a copy. A
    bucket is sent when it *and all before it* are complete. The embedding's gradient comes last, so
    no computation overlaps the last sum.
    """

    def __init__(self, model: Decoder, config: "Config", mesh: Mesh):
        """Fill buckets and add hooks. The `Optimizer` comes first: it sets grad_dtype."""
        params_in_backward = list(model.parameters())[::-1]  # roughly the order of backward
        self.buckets = fill_buckets(params_in_backward, mesh, config.bucket_mb * 2**20)
        self.unsent: list[Bucket] = []
        self.pending: list[Pending] = []
        for bucket in self.buckets:
            for param in bucket.params:
                # Called each time that backward has added to the parameter's `.grad`
                param.register_post_accumulate_grad_hook(partial(self.count_addition, bucket))

    def begin(self, n_micro_batches: int):
        """Zero the buffers, and make each `.grad` a view of its buffer. Each micro-batch will add
        once to each gradient.
        """
        self.unsent = list(self.buckets)
        self.pending = []
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = n_micro_batches * len(bucket.params)
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    def count_addition(self, bucket: Bucket, param: nn.Parameter):
        """Hook: autograd has added to a gradient of `bucket`. Send what is complete.

        RuntimeError if the addition comes after the last expected one: the sum may have started.
        """
        bucket.missing -= 1
        if bucket.missing < 0:
            raise RuntimeError(
                f"a gradient {list(param.shape)} was added to a bucket after its last expected one"
            )
        while self.unsent and self.unsent[0].missing == 0:
            complete = self.unsent.pop(0)
            self.pending.append(all_reduce(complete.flat, complete.group))

    def finish(self):
        """Wait for every sum. RuntimeError if an addition to a gradient has not come."""
        if self.unsent:
            missing = self.unsent[0].missing
            raise RuntimeError(f"{missing} additions to the gradients of a bucket have not come")
        for pending in self.pending:
            pending.wait()


# --sync -> a class with `begin` and `finish`, made from (model, config, mesh)
SYNCS: dict[str, Callable] = {"bucket": BucketSync, "naive": NaiveSync, "ring": RingSync}


@dataclass
class Config(step01.Config):
    """Data parallelism."""

    # `needs`: from step 3 on, gradients are summed in this way only with --zero 0
    sync: str = flag("bucket", "how gradients are summed over dp", SYNCS, needs={"zero": ["0"]})
    bucket_mb: float = flag(
        1.0,
        "largest gradient bucket, in MiB; a larger parameter is a bucket of its own",
        needs={"zero": ["0"], "sync": ["bucket"]},
    )


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    n_ranks = join_ranks(device)  # new
    mesh = Mesh(dp=n_ranks)  # new: one group of all ranks, mesh["dp"]
    # new: this rank's sequences of each global batch
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    set_up_layers(model, config)
    materialize(model, config.seed, device, dtype)  # the same weights on every rank
    optimizer = Optimizer(model, config)
    # new: sums gradients over the ranks. After `Optimizer`, which sets grad_dtype
    sync = SYNCS[config.sync](model, config, mesh)

    # new: sync and mesh
    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        # Each rank has read the global batch, so it knows this number without a message
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)
        xs = tokens[own].to(device).split(config.micro_batch_size)  # new: only this rank's
        ys = targets[own].to(device).split(config.micro_batch_size)  # new: only this rank's
        loss = 0.0
        sync.begin(len(xs))  # new: the number of gradients to expect of each parameter
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum: this adds to the rank's gradients
            loss = loss + micro_loss.detach()
        sync.finish()  # new: now each gradient is the sum over the ranks
        all_reduce(loss, mesh["dp"]).wait()  # new: the loss, too

        # All ranks have the same gradients now, and so the same norm
        norm = nn.utils.get_total_norm(optimizer.gradients().values()).item()
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
