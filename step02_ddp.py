"""Step 2: data parallelism. Every rank holds the whole model and works on its share of the batch; gradients are summed.

    rank 0: sequences 0..7    -> forward, backward -> gradient g0 -+
    rank 1: sequences 8..15   -> forward, backward -> gradient g1 -+-> all-reduce: g0 + g1 + g2 + g3 on every rank
    rank 2: sequences 16..23  -> forward, backward -> gradient g2 -+   -> the same update everywhere
    rank 3: sequences 24..31  -> forward, backward -> gradient g3 -+

WHY A SUM IS ENOUGH. The loss is sum_i l_i / T over all T target tokens of the global batch, and the gradient of a
sum is the sum of gradients. Each rank's loss is already divided by the global T (step 1: scale once). So a plain *sum*
over ranks is the gradient that one device would have found. A mean of the ranks' own means is only right if all ranks
happen to have the same number of target tokens.

ALL-REDUCE = REDUCE-SCATTER + ALL-GATHER. The tensor is cut in n pieces. The ranks sit in a ring and send only to the
right. In n-1 rounds every piece visits all ranks and grows into the sum. In n-1 more the finished pieces visit all:

    round 0   r0 --piece 0--> r1 --piece 1--> r2 --piece 2--> r3 --piece 3--> r0       (n = 4)
    round 1   r1 sends on piece 0 with its own added, r2 piece 1, ...  after n-1 rounds rank r owns the sum of piece r+1

Each rank sends 2 (n-1)/n S bytes of a tensor of S bytes, never more than 2 S, however many ranks there are (Patarasuk
and Yuan 2009). The ledger books an all-reduce by this law; the ring below, message by message, is tested against it.

WHEN TO SEND. Backward finds the gradients of the last layer first and those of the first layer last. So communication
can hide behind the rest of backward. Only the last micro-batch's backward completes a gradient, so only then is
anything sent. (The embedding's gradient comes last: its bucket always has to wait. tiny is one bucket: --bucket-mb 1.)

    --sync naive     after backward, one all-reduce per parameter, each waited for
    --sync overlap   one all-reduce per parameter, started during backward, once it and all before it are complete
    --sync bucket    gradients are views into flat buffers of --bucket-mb; one all-reduce per buffer (Li et al. 2020,
                     "PyTorch Distributed"): fewer and larger messages, still overlapped
    --sync torch     PyTorch's DistributedDataParallel, for comparison (refused in 16 bits: --dtype fp32)

Run it:    torchrun --nproc_per_node=4 step02_ddp.py
You should see step 1's losses, digit by digit up to rounding, and 2 (n-1)/n x 4 bytes per parameter sent by each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

import step01_single_gpu as step01
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.layout import materialize, note_gradient_sum, replica_group
from common.model import Decoder
from common.trainer import Trained, Trainer, main, start
from step01_single_gpu import Optimizer, wrap_layers


@dataclass
class Config(step01.Config):
    """Step 1's flags and those of data parallelism."""

    sync: Literal["naive", "overlap", "bucket", "torch"] = "bucket"  # how gradients are summed over dp
    bucket_mb: float = 25.0  # largest gradient bucket, in MiB
    compress: Literal["none", "bf16", "int8", "topk"] = "none"  # lossy sums of buckets (services/compression.py)
    topk_fraction: float = 0.01  # share of the values that --compress topk sends
    check_replicas: int = 0  # steps between bitwise comparisons of what several ranks hold alike; 0: never


def ring_all_reduce(tensor: Tensor, group: Group):
    """Sum `tensor` [elements] over the group, in place, by 2 (n-1) messages to the right: what the library does for us.

    In round s of the first half rank r sends piece r - s, which is the sum of its values on s + 1 ranks, and adds the
    piece that it receives to its own. Then rank r owns the finished piece r + 1. The second half passes the pieces on.
    """
    n, r = group.size, group.rank
    pieces = tensor.tensor_split(n)
    for s in range(2 * (n - 1)):
        adding = s < n - 1
        received = torch.empty_like(pieces[(r - s - 1) % n])
        exchange([(pieces[(r - s) % n], (r + 1) % n)], [(received, (r - 1) % n)], group).wait()
        pieces[(r - s - 1) % n].copy_(received + pieces[(r - s - 1) % n] if adding else received)


def trained_over(model: Decoder, mesh: Mesh) -> dict[nn.Parameter, Group]:
    """The parameters that are trained, each with the data-parallel ranks over which its gradient is summed."""
    return {param: replica_group(param, mesh) for param in model.parameters() if param.requires_grad}


class NaiveSync:
    """Sum gradients after the last backward, parameter by parameter.

    Every sync has these three methods. Build it after the optimizer, which decides the dtype of the gradients.
    """

    def __init__(self, model: Decoder, mesh: Mesh):
        self.groups = trained_over(model, mesh)

    def begin(self):
        """Before the first micro-batch of a step."""

    def last_micro_batch(self):
        """Before the forward pass of the last micro-batch (DDP decides there): what is completed now may be sent."""

    def finish(self):
        """After the last backward: when it returns, every `.grad` is the sum over the group."""
        for param, group in self.groups.items():
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            all_reduce(param.grad, group).wait()


class Bucket:
    """`flat` [elements]: the gradients of `params`, as parts of it (`views`, in their shapes), summed over `group`."""

    def __init__(self, params: list[nn.Parameter], group: Group):
        self.params, self.group, sizes = params, group, [p.numel() for p in params]
        self.flat = torch.zeros(sum(sizes), dtype=params[0].grad_dtype, device=params[0].device)
        self.views = [part.view_as(p) for part, p in zip(self.flat.split(sizes), params, strict=True)]
        self.missing = 0  # gradients not yet complete in this step
        self.pending: Pending | None = None


def fill_buckets(groups: dict[nn.Parameter, Group], limit: float) -> list[Bucket]:
    """Parameters of one group, in buckets of up to `limit` bytes of gradients (or of one parameter, if it has more).

    Backward completes gradients roughly from the last parameter to the first; buckets are in this order.
    """
    filled: list[list[nn.Parameter]] = []
    filling: dict[str, list[nn.Parameter]] = {}  # by name of the group
    for param in reversed(groups):
        bucket = filling.get(groups[param].name, [])
        if not bucket or sum(p.numel() * p.grad_dtype.itemsize for p in [*bucket, param]) > limit:
            bucket = filling[groups[param].name] = []
            filled.append(bucket)
        bucket.append(param)
    return [Bucket(params, groups[params[0]]) for params in filled]


class BucketSync:
    """All-reduces of buckets, started during the last backward; with a bucket per parameter this is "overlap".

    Autograd adds into an existing `.grad` in place, so a gradient that starts as a view of the buffer stays there. All
    ranks must start their collectives in the same order: a bucket is sent when it *and all before it* are complete.
    """

    def __init__(self, model: Decoder, mesh: Mesh, limit: float, sum_up: Callable[[Tensor, Group], Pending]):
        """`limit` of a bucket in bytes."""
        self.sum_up, self.armed = sum_up, False
        self.buckets = fill_buckets(trained_over(model, mesh), limit)
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(partial(self.completed, bucket))

    def begin(self):
        """Empty the buffers and put the gradients back into them."""
        for bucket in self.buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.params)
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view
        self.unsent = list(self.buckets)

    def last_micro_batch(self):
        """From now on a gradient that autograd has added to is complete."""
        self.armed = True

    def completed(self, bucket: Bucket, *_):
        """Hook: autograd has added to a gradient of `bucket`."""
        if self.armed:
            bucket.missing -= 1
            while self.unsent and self.unsent[0].missing == 0:
                self.send(self.unsent.pop(0))

    def send(self, bucket: Bucket):
        """Start the sum of one bucket."""
        bucket.pending = self.sum_up(bucket.flat, bucket.group)

    def finish(self):
        """Send what no gradient reached (an unused parameter), then wait for everything."""
        while self.unsent:
            self.send(self.unsent.pop(0))
        for bucket in self.buckets:
            bucket.pending.wait()
        self.armed = False


def gradient_sync(model: Decoder, config: Config, run: Trainer) -> Any:
    """The object behind `--sync`; `run.all_reduce` may compress what it sends (--compress)."""
    if config.sync == "torch" and run.mesh.world > 1:
        return run.torch_ddp(model)
    if config.sync in ("naive", "torch"):
        return NaiveSync(model, run.mesh)
    return BucketSync(model, run.mesh, config.bucket_mb * 2**20 if config.sync == "bucket" else 0, run.all_reduce)


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh = run.mesh
        with torch.device("meta"):
            model = Decoder(run.shape)
        note_gradient_sum(model.parameters(), "dp")  # a record for tables and checkpoints; what sums is `sync`
        materialize(model, config.seed, run.device, run.dtype)
        wrap_layers(model, config)
        optimizer = Optimizer(model, config)
        sync = gradient_sync(model, config, run)
        share = mesh["dp"].share(config.global_batch_size)  # these sequences are mine

        for step in run.steps(model, optimizer, sync):
            batch, loss = run.batch(step, share), 0.0
            micro_batches = batch.micro_batches(config.micro_batch_size)
            sync.begin()
            for i, (tokens, targets) in enumerate(micro_batches):
                if i + 1 == len(micro_batches):
                    sync.last_micro_batch()
                with run.phase("forward"):
                    micro_loss = model.lm_head.loss(model(tokens), targets) / batch.n_targets
                with run.phase("backward"):
                    (micro_loss * optimizer.loss_scale).backward()
                loss = loss + micro_loss.detach()
            sync.finish()
            loss = run.global_loss(loss)
            with run.phase("optimizer"):
                norm = optimizer.grad_norm()
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                optimizer.zero_grad()
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
