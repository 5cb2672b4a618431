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
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import step01_single_gpu as step01
from common.comm import (
    Group,
    Mesh,
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    exchange,
    gather_objects,
    open_mesh,
    require_same_flags,
    world_size,
)
from common.data import TokenData
from common.layout import materialize, reduction_table, replica_group, sum_gradients_over
from common.model import Decoder
from common.run import Run, UserError, choose_device, choose_dtype, main, peak_flops, table
from step01_single_gpu import (
    Optimizer,
    Trained,
    all_logits,
    apply_recompute,
    evaluate,
    flops_per_token,
    generate,
    health,
    learning_rate,
    memory_rows,
    require_finite,
    resume,
    save,
)

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # integers by size in bytes
BLOCK = 256  # values that share one scale in int8 compression


@dataclass
class Config(step01.Config):
    """Step 1's flags and those of data parallelism."""

    sync: Literal["naive", "overlap", "bucket", "torch"] = "bucket"  # how gradients are summed over dp
    bucket_mb: float = 25.0  # size of a gradient bucket, in MiB
    compress: Literal["none", "bf16", "int8", "topk"] = "none"  # lossy gradients, with error feedback
    topk_fraction: float = 0.01  # share of the values that --compress topk sends
    check_replicas: int = 0  # steps between checks that ranks that hold the same numbers hold the same bits; 0: never


def check(config: Config, dp: int):
    """Refuse what cannot work, on every rank alike, before the first collective. Raises UserError naming the flag."""
    step01.check(config)
    if config.global_batch_size % (config.micro_batch_size * dp):
        raise UserError(
            f"--global-batch-size {config.global_batch_size} cannot be dealt to {dp} ranks in micro-batches of "
            f"{config.micro_batch_size}: use a multiple of {config.micro_batch_size * dp}, or set --micro-batch-size"
        )
    if config.compress != "none" and config.sync != "bucket":
        raise UserError(f"--compress {config.compress} works on buckets: use it with --sync bucket")
    if config.compress != "none" and config.dtype == "fp16":
        raise UserError("--compress would carry an fp16 overflow on for ever: use --dtype bf16 or fp32")
    if config.sync == "torch" and choose_dtype(config.dtype, choose_device(config.device)).itemsize == 2:
        raise UserError("--sync torch adds gradients up in 16 bits: use --dtype fp32, or another --sync")
    if config.check_replicas < 0:
        raise UserError(f"--check-replicas is {config.check_replicas}: it must be at least 0")
    if config.bucket_mb <= 0 or not 0 < config.topk_fraction <= 1:
        raise UserError("--bucket-mb must be positive, and --topk-fraction between 0 and 1")


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


def quantise(values: Tensor) -> Tensor:
    """[..., 256] floats -> int8 [..., 260]: the values in units of scale = max/127, then the scale's four bytes."""
    scale = (values.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat(((values / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(blocks: Tensor) -> Tensor:
    """The inverse of `quantise`: int8 [..., 260] -> fp32 [..., 256]."""
    return blocks[..., :BLOCK] * blocks[..., BLOCK:].contiguous().view(torch.float32)


def narrow_sum(values: Tensor, group: Group, config: Config) -> tuple[Tensor, Tensor]:
    """Sum in 16 or 8 bits. Takes this rank's values [elements]; returns (sum over the group, what of ours was lost).

    Adding in so few bits would round at every rank, or overflow. So rank r receives slice r of everyone (all-to-all),
    adds up in fp32, and makes the sum narrow again for all to gather; what that loses, rank r keeps.
    """
    narrow, widen = (quantise, dequantise) if config.compress == "int8" else (Tensor.bfloat16, Tensor.float)
    own = values.view(group.size, -1, BLOCK)
    sent = narrow(own)
    lost = own - widen(sent)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group).wait()
    total = widen(received).sum(0)
    summed = narrow(total)
    lost[group.rank] += total - widen(summed)
    all_gather(received.view(-1), summed.view(-1), group).wait()
    return widen(received).view(-1).to(values.dtype), lost.view(-1)


def topk_sum(values: Tensor, group: Group, config: Config) -> tuple[Tensor, Tensor]:
    """Sum only the largest values of each rank; takes and returns the same as `narrow_sum`.

    Every rank gathers everyone's k values (fp32) with their indices in the buffer (int32), and adds them up.
    """
    k = max(1, int(config.topk_fraction * len(values)))
    places = values.abs().topk(k).indices
    message = torch.stack((values[places].float().view(torch.int32), places.int()))
    everyone = message.new_empty(group.size, 2, k)
    all_gather(everyone.view(-1), message.view(-1), group).wait()
    lost, total = values.clone(), torch.zeros_like(values)
    lost[places] -= values[places].float()
    for numbers, at in everyone:
        total[at.long()] += numbers.view(torch.float32)
    return total, lost


COMPRESSED_SUMS = {"bf16": narrow_sum, "int8": narrow_sum, "topk": topk_sum}


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


class TorchSync(NaiveSync):
    """PyTorch's DistributedDataParallel, told to add instead of average, and to leave the initial weights alone."""

    def __init__(self, model: Decoder, group: Group, config: Config):
        super().__init__(model, group, config)
        self.forward = DistributedDataParallel(
            model,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            process_group=group.handle,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.forward.register_comm_hook(group, self.add)

    @staticmethod
    def add(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook: the sum of one of DDP's buckets, entered in the ledger."""
        group.ledger.book(group, "all_reduce", 2 * (group.size - 1) / group.size * bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), group=group.handle, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def begin(self):
        """DDP's `no_sync`, until the last micro-batch."""
        self.forward.require_backward_grad_sync = False

    def last_micro_batch(self):
        """DDP decides at the forward pass whether the backward pass will communicate."""
        self.forward.require_backward_grad_sync = True

    def finish(self):
        """DDP has waited at the end of backward."""


def gradient_sync(model: Decoder, group: Group, config: Config, mesh: Mesh | None = None) -> NaiveSync:
    """The object behind `--sync`."""
    if config.sync == "torch" and group.size > 1:
        return TorchSync(model, group, config)
    return (NaiveSync if config.sync in ("naive", "torch") else BucketSync)(model, group, config, mesh)


def predicted_traffic(model: Decoder, sync: NaiveSync, config: Config, group: Group) -> dict[tuple[str, str], float]:
    """Bytes each rank of the group sends for its gradients in one step, by (mesh dimension, operation)."""
    found: dict[tuple[str, str], float] = {}
    for dim, own in {own.name: own for own in (group, *sync.groups.values())}.items():
        n, buckets = own.size, [bucket for bucket in getattr(sync, "buckets", []) if bucket.group is own]
        if config.compress in ("bf16", "int8"):
            block = 2 * BLOCK if config.compress == "bf16" else BLOCK + 4
            half = (n - 1) / n * sum(len(bucket.flat) // BLOCK * block for bucket in buckets)
            found |= {(dim, "all_to_all"): half, (dim, "all_gather"): half}
        elif config.compress == "topk":
            chosen = sum(max(1, int(config.topk_fraction * len(bucket.flat))) for bucket in buckets)
            found[dim, "all_gather"] = (n - 1) * chosen * 8
        else:
            gradients = sum(p.numel() * p.grad_dtype.itemsize for p in sync.params if sync.groups[p] is own)
            found[dim, "all_reduce"] = 2 * (n - 1) / n * gradients
    return found


def bit_sum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's numbers, their bits taken for integers: int64, a scalar."""
    return tensor.contiguous().view(-1).view(BITS[tensor.dtype.itemsize]).sum(dtype=torch.int64)


def require_same_parameters(model: Decoder, group: Group, mesh: Mesh | None = None):
    """Prove that all replicas hold the same weights, rather than copy rank 0's and hide why they differ.

    Compares a sum over each parameter's bits. Raises RuntimeError on every rank, naming the first that differs.
    """
    alike: dict[str, list[str]] = {}  # name of a group -> parameters of which its ranks hold the same
    for name, param in model.named_parameters():
        alike.setdefault(replica_group(param, group, mesh).name, []).append(name)
    for dim, names in alike.items():
        own = group if dim == group.name else mesh[dim]
        if own.size == 1:
            continue
        sums = torch.stack([bit_sum(model.get_parameter(name).detach()) for name in names])
        everyone = sums.new_empty(own.size, len(sums))
        all_gather(everyone.view(-1), sums, own, "(check)").wait()
        for name, column in zip(names, everyone.T, strict=True):
            if (column != column[0]).any():
                raise RuntimeError(f"{name} is not the same on all ranks of {dim}: bit sums {column.tolist()}")


def require_same_replicas(optimizer: Optimizer, mesh: Mesh):
    """Prove that whatever several ranks hold, along any dimension, is the same: weights, masters, moments, slices.

    Each rank tells of the boxes of full tensors that it holds (as for a checkpoint), with a sum over each one's bits.
    Raises RuntimeError on every rank, naming the first that differs. Cheap: the numbers stay where they are.
    """
    held = [(piece, *found) for piece in optimizer.pieces() for found in piece.boxes()]
    sums = [bit_sum(view).to(mesh.device) for *_, view in held]
    sums = torch.stack(sums).tolist() if sums else []  # one wait for a GPU
    own = {(piece.kind, piece.name, box): s for (piece, box, _), s in zip(held, sums, strict=True)}
    seen: dict[tuple, tuple[int, int]] = {}
    for rank, theirs in enumerate(gather_objects(own, mesh)):
        for (kind, name, box), bits in theirs.items():
            first, expected = seen.setdefault((kind, name, box), (rank, bits))
            if bits != expected:
                raise RuntimeError(
                    f"{kind} of {name} is not the same on ranks {first} and {rank}: bit sums {expected}, {bits} of the "
                    f"part that begins at {list(box.start)}"
                )


def sum_over(group: Group, *values: float | Tensor) -> list[float]:
    """Sums over the group of a few numbers (loss, flags), the same on every rank."""
    numbers = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=group.device) for v in values])
    all_reduce(numbers, group, "(metrics)").wait()
    return numbers.tolist()


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    dp = world_size()
    check(config, dp)
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
