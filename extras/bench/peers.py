"""Trains with PyTorch's own parallelism. The model, its weights, the batches and the update rule
are the course's.

Each function `build_...` returns what differs: a module, and a function `backward(xs, ys,
n_targets)` that accumulates gradients and returns the loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.parallel import DistributedDataParallel

from common.comm import Mesh, all_reduce
from common.data import Data
from common.layout import materialize
from common.model import IGNORE, Decoder, wide
from common.shapes import model_shape
from common.trainer import Run, choose_device
from extras.bench.contests import TORCH_SCHEDULES
from step01_single_gpu import learning_rate, set_up_layers
from step02_ddp import join_ranks
from step06_pipeline import SCHEDULES, ListPipeline, Stage, keep_stages, layers_of_stage


def train(
    build: Callable[[Any, Mesh, Decoder], tuple[nn.Module, Callable]],
    cut: str,
    config: Any,
    run: Run,
):
    """The training loop of the course. `build` adds the parallelism along the dimension `cut` of
    the mesh.
    """
    device, n = choose_device(config)[0], getattr(config, cut, 1)
    mesh = Mesh(dp=join_ranks(device) // n, **{} if cut == "dp" else {cut: n})
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    set_up_layers(model, config)
    module, backward = build(config, mesh, model)
    groups = [
        dict(params=p, weight_decay=config.weight_decay * (p[0].dim() > 1)) for p in kinds(module)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    for step in run.steps(model=model, optimizer=optimizer, data=data, mesh=mesh):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)
        loss = backward(
            *(x[mine].split(config.micro_batch_size) for x in (tokens, targets)), n_targets
        )
        for dim in mesh.sizes if cut != "tp" else ("dp",):
            all_reduce(loss, mesh[dim]).wait()
        norm = clip(module, config.grad_clip, mesh if cut == "pp" else None)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm)


def kinds(module: nn.Module) -> list[list[nn.Parameter]]:
    """Group parameters by (matrix or norm, DTensor or not). Fused kernels cannot mix DTensors and
    other tensors.
    """
    sets: dict[tuple, list[nn.Parameter]] = {}
    for param in module.parameters():
        sets.setdefault((param.dim() > 1, isinstance(param, DTensor)), []).append(param)
    return list(sets.values())


def clip(module: nn.Module, most: float, mesh: Mesh | None) -> float:
    """Clip gradients with PyTorch's functions; returns their norm, over all pipeline stages if
    `mesh` is given.
    """
    square = 0.0
    for params in kinds(module):
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        square = (
            square + (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
        )
    if mesh is not None:
        all_reduce(square, mesh["pp"]).wait()
    norm = square.sqrt()
    for params in kinds(module):
        nn.utils.clip_grads_with_norm_(params, most, norm.float())
    return norm.item()


def in_micro_batches(
    module: nn.Module, xs: list[Tensor], ys: list[Tensor], n_targets: Tensor
) -> Tensor:
    """Run forward and backward of one micro-batch after another; returns the sum of the losses."""
    total = 0.0
    for x, y in zip(xs, ys, strict=True):
        loss = module(x, y) / n_targets
        loss.backward()
        total = total + loss.detach()
    return total


def build_ddp(config: Any, mesh: Mesh, model: Decoder) -> tuple[nn.Module, Callable]:
    """DistributedDataParallel with --bucket-mb. A communication hook sums gradients; by default DDP
    averages them.
    """
    materialize(model, config.seed, *choose_device(config))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True
    )

    def add(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def backward(xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        with ddp.no_sync():  # only the last micro-batch communicates
            total = in_micro_batches(ddp, xs[:-1], ys[:-1], n_targets)
        return total + in_micro_batches(ddp, xs[-1:], ys[-1:], n_targets)

    ddp.register_comm_hook(None, add)
    return model, backward


def build_fsdp(config: Any, mesh: Mesh, model: Decoder) -> tuple[nn.Module, Callable]:
    """Use FSDP2. Each layer is a unit, and all other parameters form one more. Gradients are
    summed, not averaged.
    """
    device, dtype = choose_device(config)
    materialize(model, config.seed, device, wide(dtype))
    options = dict(
        mesh=dist.init_device_mesh(device.type, (mesh["dp"].size,)), reshard_after_forward=True
    )
    if dtype.itemsize == 2:
        options["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32)
    for module in (*model.model.layers.values(), model):
        shard = fully_shard(module, **options)
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    return model, partial(in_micro_batches, model)


def build_dtensor(config: Any, mesh: Mesh, model: Decoder) -> tuple[nn.Module, Callable]:
    """Use PyTorch's tensor parallelism and, with --sp, PyTorch's SequenceParallel for the norms.

    The input of a block becomes a DTensor only once. To convert it for each of the block's matrices
    would take longer.
    """
    device, dtype = choose_device(config)
    materialize(model, config.seed, device, dtype)
    device_mesh = dist.init_device_mesh(device.type, (mesh["tp"].size,))
    between = Shard(1) if config.sp else Replicate()
    layout = {f"self_attn.{name}_proj": parallel.ColwiseParallel() for name in "qkv"}
    layout |= {f"mlp.{name}_proj": parallel.ColwiseParallel() for name in ("gate", "up")}
    rowwise = parallel.RowwiseParallel(output_layouts=between)
    layout |= {name: rowwise for name in ("self_attn.o_proj", "mlp.down_proj")}
    given, wanted = (between, None, None), (Replicate(), None, None)
    prepare = parallel.PrepareModuleInput
    layout["self_attn"] = prepare(input_layouts=given, desired_input_layouts=wanted)
    layout["mlp"] = prepare(input_layouts=given[:1], desired_input_layouts=wanted[:1])
    if config.sp:
        layout |= {
            name: parallel.SequenceParallel()
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    for layer in model.model.layers.values():
        parallel.parallelize_module(layer, device_mesh, layout)
    head = parallel.ColwiseParallel(
        input_layouts=between, output_layouts=Shard(-1), use_local_output=False
    )
    embedding = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    ends = {"model.embed_tokens": embedding, "lm_head": head}
    ends |= {"model.norm": parallel.SequenceParallel()} if config.sp else {}
    parallel.parallelize_module(model, device_mesh, ends)

    def loss(logits: DTensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).to(wide(dtype))
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, reduction="sum")

    def backward(*batch: Any) -> Tensor:
        with parallel.loss_parallel():
            total = in_micro_batches(model, *batch)
        return total.to_local() if isinstance(total, DTensor) else total

    model.loss = loss
    return model, backward


class TorchStage(nn.Module):
    """A stage of step 6, as a module with only the stage's parameters. The last stage returns
    logits.
    """

    def __init__(self, stage: Stage):
        super().__init__()
        trunk = stage.model.model
        self.own = nn.ModuleList(trunk.layers[str(number)] for number in stage.layers)
        if stage.is_first:
            self.own.append(trunk.embed_tokens)
        if stage.is_last:
            self.own += [trunk.norm, stage.model.lm_head]
        self.stage = [stage]  # in a list: not a submodule

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> hidden states. The first stage takes tokens, the last one returns
        logits.
        """
        return self.stage[0].compute_output(x, x)  # model.loss returns the logits: see below


def build_pipelining(config: Any, mesh: Mesh, model: Decoder) -> tuple[nn.Module, Callable]:
    """Use `torch.distributed.pipelining` with PyTorch's counterpart of `--schedule`."""
    device, dtype = choose_device(config)
    group = mesh["pp"]
    m = config.global_batch_size // config.micro_batch_size
    ranks = list(range(group.size))  # of the stages: one on each rank
    ours = SCHEDULES[config.schedule]
    if issubclass(ours, ListPipeline):
        ranks = ours.ranks_of_stages(group.size, 2)
    n_stages = len(ranks)
    positions = torch.arange(model.config.seq_len, device=device)
    own = []
    for number, rank in enumerate(ranks):
        if rank == group.rank:
            layers = layers_of_stage(number, n_stages, model.config.n_layers)
            own.append(Stage(model, layers, positions, number))
    keep_stages(model, [stage.layers for stage in own])
    materialize(model, config.seed, device, dtype)
    loss = model.loss
    model.loss = logits_alone
    stages = []
    for stage in own:
        stages.append(
            PipelineStage(TorchStage(stage), stage.number, n_stages, device, group=group.handle)
        )
    kind = getattr(schedules, f"Schedule{TORCH_SCHEDULES[config.schedule]}")
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    scale = [torch.ones(())]
    schedule = kind(
        stages[0] if single else stages,
        m,
        loss_fn=lambda logits, targets: loss(logits, targets) / scale[0],
        scale_grads=False,
    )

    def backward(xs: Any, ys: Any, n_targets: Tensor) -> Tensor:
        scale[0] = n_targets
        losses: list[Tensor] = []
        inputs = [torch.cat(xs)] if own[0].is_first else []
        target = torch.cat(ys) if own[-1].is_last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), device=device)
        for micro_loss in losses:
            total = total + micro_loss.detach()
        return total

    return model, backward


def logits_alone(logits: Tensor, targets: Tensor) -> Tensor:
    """Takes the place of the model's loss, which PyTorch's schedule computes itself."""
    return logits


ddp = partial(train, build_ddp, "dp")
fsdp = partial(train, build_fsdp, "dp")
dtensor = partial(train, build_dtensor, "tp")
pipelining = partial(train, build_pipelining, "pp")
