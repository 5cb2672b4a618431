"""Step 2: data parallelism. Every rank holds the whole model and works on its share of the batch; gradients are summed.

    rank 0: sequences 0..7    -> forward, backward -> gradient g0 -+
    rank 1: sequences 8..15   -> forward, backward -> gradient g1 -+-> all-reduce: g0 + g1 + g2 + g3 on every rank
    rank 2: sequences 16..23  -> forward, backward -> gradient g2 -+   -> the same update everywhere
    rank 3: sequences 24..31  -> forward, backward -> gradient g3 -+

WHY IT IS THE BIG BATCH. The loss is sum_i l_i / N over all N target tokens of the global batch, and the gradient of a
sum is the sum of gradients. Each rank's loss is already divided by the global N (step 1: scale once), so a plain *sum*
over ranks is the gradient one device would have found. Averaging per-rank means instead is only right if all ranks
happen to have the same number of target tokens.

ALL-REDUCE = REDUCE-SCATTER + ALL-GATHER. Cut the tensor in n pieces; ranks sit in a ring and only talk to the right.
In n-1 steps every piece visits all ranks, growing into the sum; in n-1 more the finished pieces visit all ranks:

    step 0    r0 --piece 0--> r1 --piece 1--> r2 --piece 2--> r3 --piece 3--> r0       (n = 4)
    step 1    r1 sends on piece 0 with its own added, r2 piece 1, ...  after n-1 steps rank r owns the sum of piece r+1

Each rank sends 2 (n-1)/n S bytes, never more than 2 S, however many ranks (Patarasuk and Yuan 2009): that is the law
the ledger is checked against.

WHEN TO TALK. Gradients appear from the last layer to the first while backward is still busy, so communication can hide
behind it; only the last micro-batch's backward completes them, so only then is anything sent. (The embedding's comes
at the very end, so its bucket always has to be waited for.)

    --sync naive     after backward, one all-reduce per parameter, each waited for
    --sync overlap   one all-reduce per parameter, started as soon as its gradient (and all before it) is complete,
                     while backward goes on; only what is still under way at the end is waited for
    --sync bucket    gradients are views into flat buffers of --bucket-mb; one all-reduce per buffer (Li et al. 2020,
                     "PyTorch Distributed"): fewer, larger messages, still overlapped, and no copy before sending
    --sync torch     PyTorch's DistributedDataParallel, for comparison

COMPRESSION (--compress, with --sync bucket) sends fewer bytes and is lossy. What was not sent is kept and added to the
next step's gradient, "error feedback" (Seide et al. 2014; Karimireddy et al. 2019), so that it is late, not lost.
(Checkpoints do not hold it: a resumed compressed run starts with nothing owed.)

    bf16   16 bits                                                      1/2 of the bytes of fp32
    int8   8 bits, and an fp32 scale per 256 values                     (1 + 4/256) / 4
    topk   the largest --topk-fraction of values, with their places     n x fraction: gathered, so it grows with n

Run it:    torchrun --nproc_per_node=4 step02_ddp.py
You should see step 1's losses, digit by digit up to rounding, and 2 (n-1)/n x 4 bytes per parameter sent by each rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

import step01_single_gpu as step01
from common.comm import Group, Mesh, Pending, all_reduce, exchange, sum_over, world_size
from common.data import TokenData
from common.layout import materialize, reduction_table, replica_group, sum_gradients_over
from common.model import Decoder
from services.checks import check_dp
from services.compression import BLOCK, COMPRESSED_SUMS
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import all_logits, evaluate, generate
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from services.torch_ddp import TorchSync
from step01_single_gpu import Optimizer, Trained, apply_recompute, learning_rate
from theory.flops import flops_per_token
from theory.memory import memory_rows
from theory.traffic import predicted_traffic


@dataclass
class Config(step01.Config):
    """Step 1's flags and those of data parallelism."""

    sync: Literal["naive", "overlap", "bucket", "torch"] = "bucket"  # how gradients are summed over dp
    bucket_mb: float = 25.0  # size of a gradient bucket, in MiB
    compress: Literal["none", "bf16", "int8", "topk"] = "none"  # lossy gradients, with error feedback
    topk_fraction: float = 0.01  # share of the values that --compress topk sends
    check_replicas: int = 0  # steps between checks that ranks that hold the same numbers hold the same bits; 0: never


def ring_all_reduce(tensor: Tensor, group: Group):
    """Sum `tensor` [elements] over the group, in place, by 2 (n-1) messages to the right: what the library does for us.

    In step s of the first half rank r sends piece r - s, the sum of its values on s + 1 ranks, and adds the one it
    receives to its own. Then rank r owns the finished piece r + 1, and the second half passes the pieces on.
    """
    n, r = group.size, group.rank
    pieces = tensor.tensor_split(n)
    for s in range(2 * (n - 1)):
        adding = s < n - 1
        received = torch.empty_like(pieces[(r - s - 1) % n])
        exchange([(pieces[(r - s) % n], (r + 1) % n)], [(received, (r - 1) % n)], group).wait()
        pieces[(r - s - 1) % n].copy_(received + pieces[(r - s - 1) % n] if adding else received)


class NaiveSync:
    """Sum gradients after the last backward, parameter by parameter.

    Every sync has these methods, and `forward`, what to call instead of the model. Build it after the optimizer, which
    decides the dtype that gradients add up in. A record may say that a parameter's replicas are not the ranks of
    `group`, but those of another dimension of `mesh`.
    """

    def __init__(self, model: Decoder, group: Group, config: Config, mesh: Mesh | None = None):
        self.params, self.group = [p for p in model.parameters() if p.requires_grad], group
        self.groups = {param: replica_group(param, group, mesh) for param in self.params}
        self.forward: nn.Module = model

    def begin(self):
        """Before the first micro-batch of a step."""

    def last_micro_batch(self):
        """Before the forward pass of the last micro-batch: gradients completed from now on may be sent."""

    def finish(self):
        """After the last backward: when it returns, every `.grad` is the sum over the group."""
        for param in self.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
            all_reduce(param.grad, self.groups[param]).wait()


class Bucket:
    """A flat buffer [elements] that the gradients of some parameters live in, to be summed over `group`."""

    def __init__(self, params: list[nn.Parameter], pad_to: int, group: Group):
        self.params, self.group, sizes = params, group, [p.numel() for p in params]
        length = -(-sum(sizes) // pad_to) * pad_to
        self.flat = torch.zeros(length, dtype=params[0].grad_dtype, device=params[0].device)
        parts = self.flat[: sum(sizes)].split(sizes)
        self.views = [part.view_as(p) for part, p in zip(parts, params, strict=True)]
        self.missing = 0  # gradients not yet complete in this step
        self.pending: Pending | None = None
        self.lost: Tensor | float = 0.0  # what compression has not sent yet


class BucketSync(NaiveSync):
    """Asynchronous all-reduces of buckets during the last backward; with a bucket per parameter this is "overlap".

    Autograd adds into an existing `.grad` in place, so a gradient that starts as a view of the buffer stays there. All
    ranks must start their collectives in the same order: a bucket is sent when it *and all before it* are complete.
    """

    def __init__(self, model: Decoder, group: Group, config: Config, mesh: Mesh | None = None):
        super().__init__(model, group, config, mesh)
        limit = config.bucket_mb * 2**20 if config.sync == "bucket" else 0
        pad_to = group.size * BLOCK if config.compress in ("bf16", "int8") else 1
        held: list[list[nn.Parameter]] = []
        filling: dict[str, list[nn.Parameter]] = {}  # by name of the group
        for param in reversed(self.params):  # roughly the order in which backward completes them
            bucket = filling.get(self.groups[param].name, [])
            if not bucket or sum(p.numel() * p.grad_dtype.itemsize for p in [*bucket, param]) > limit:
                bucket = filling[self.groups[param].name] = []
                held.append(bucket)
            bucket.append(param)
        self.buckets = [Bucket(params, pad_to, self.groups[params[0]]) for params in held]
        self.config, self.armed = config, False
        for bucket in self.buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self.completed(bucket))

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

    def completed(self, bucket: Bucket):
        """Hook: a gradient of `bucket` was added to."""
        if self.armed:
            bucket.missing -= 1
            while self.unsent and self.unsent[0].missing == 0:
                self.send(self.unsent.pop(0))

    def send(self, bucket: Bucket):
        """Start the sum of one bucket; a compressed one is finished at once, its loss kept for the next step."""
        if self.config.compress == "none" or bucket.group.size == 1:
            bucket.pending = all_reduce(bucket.flat, bucket.group)
        else:
            compressed_sum = COMPRESSED_SUMS[self.config.compress]
            total, bucket.lost = compressed_sum(bucket.flat + bucket.lost, bucket.group, self.config)
            bucket.flat.copy_(total)

    def finish(self):
        """Send what no gradient reached (an unused parameter), then wait for everything."""
        while self.unsent:
            self.send(self.unsent.pop(0))
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
        self.armed = False


def gradient_sync(model: Decoder, group: Group, config: Config, mesh: Mesh | None = None) -> NaiveSync:
    """The object behind `--sync`."""
    if config.sync == "torch" and group.size > 1:
        return TorchSync(model, group, config)
    return (NaiveSync if config.sync in ("naive", "torch") else BucketSync)(model, group, config, mesh)


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    dp = world_size()
    check_dp(config, dp)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    with open_mesh({"dp": dp}, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        group = mesh["dp"]
        share = slice(group.rank * config.global_batch_size // dp, (group.rank + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)

        with torch.device("meta"):
            model = Decoder(m)
        sum_gradients_over(model.parameters(), "dp")
        materialize(model, config.seed, device, dtype)
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        optimizer = Optimizer(model, config, mesh)
        sync = gradient_sync(model, group, config)
        positions = torch.arange(m.seq_len, device=device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        require_same_parameters(model, group)
        if config.generate:
            text = generate(partial(all_logits, model, positions), m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        predicted = memory_rows(config, m, model, dtype, device.type == "cpu")
        traffic = predicted_traffic(model, sync, config, group)
        flops, peak = flops_per_token(m, config.recompute), dp * peak_flops(device, dtype, config.peak_tflops)
        with Run(config, device, flops, peak, mesh) as run:
            run.say(f"{config.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
            run.say(mesh.picture())
            run.say(table(reduction_table(model, ["dp"])))
            run.say(run.memory_table(predicted))
            for step in run.steps(start):
                with run.phase("data"):
                    batch = data.batch(step, share)
                    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
                loss = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))
                sync.begin()
                for first in range(0, len(tokens), config.micro_batch_size):
                    rows = slice(first, first + config.micro_batch_size)
                    if rows.stop == len(tokens):
                        sync.last_micro_batch()
                    with run.phase("forward"):
                        loss_sum = model.lm_head.loss(sync.forward(tokens[rows], positions), targets[rows])
                        micro_loss = loss_sum / batch.n_targets
                    with run.phase("backward"):
                        (micro_loss * optimizer.loss_scale).backward()
                    loss += micro_loss.detach()
                sync.finish()
                more = health(run, loss, optimizer)
                loss, stopping = sum_over(group, loss, run.stopping)
                run.stopping = stopping > 0
                require_finite(loss, step, run)
                if observe is not None:
                    observe(step, optimizer)
                run.measure(optimizer.tensors())
                with run.phase("optimizer"):
                    grad_norm = optimizer.step(learning_rate(step, config), loss=loss)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate(model, data, config, positions, group.rank, dp)
                        loss_sum, n_targets = sum_over(group, *part)
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), tokens.numel() * dp, **more)
                if config.check_replicas and run.due(config.check_replicas, step):
                    require_same_replicas(optimizer, mesh)
                if run.stopping or (config.save_every and run.due(config.save_every, step)):
                    save(run, step + 1, optimizer, config)
            require_same_parameters(model, group)
            run.finish(predicted, traffic)
    return Trained(model, optimizer, run.history)


if __name__ == "__main__":
    main(train, Config)
