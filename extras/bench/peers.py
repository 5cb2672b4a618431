"""Trains with PyTorch's own parallelism. The model, its weights, the batches and the update rule
are the course's.

Each function `build_...` applies the parallelism to a model, and returns what differs: a function
`backward(xs, ys, n_targets)` that adds to the gradients and returns the loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard, parallel
from torch.nn.parallel import DistributedDataParallel

from common.comm import Group, Mesh, all_reduce
from common.data import Data
from common.device import choose_device
from common.initial import materialize
from common.model import IGNORE, Decoder, wide
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import learning_rate
from step02_ddp import join_ranks
from step06_pipeline import SCHEDULES, Stage

TORCH_SCHEDULES = {  # step 6's schedule -> PyTorch's
    "afab": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def train(build: Callable[[Any, Mesh, Decoder], Callable], config: Any, run: Run):
    """The training loop of the course. `build` adds PyTorch's parallelism."""
    device = choose_device(config)[0]
    mesh = make_mesh(config, join_ranks(device))
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    backward = build(config, mesh, model)
    optimizer = make_optimizer(model, config.weight_decay)
    for step in run.steps():
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)
        xs = tokens[own].split(config.micro_batch_size)
        ys = targets[own].split(config.micro_batch_size)
        loss = backward(xs, ys, n_targets)
        all_reduce(loss, mesh["dp"]).wait()
        all_reduce(loss, mesh["pp"]).wait()
        norm = clip(model, config.grad_clip, mesh)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm)


def make_mesh(config: Any, world: int) -> Mesh:
    """All ranks. As in the course, dp is what the other dimensions leave."""
    pp = getattr(config, "pp", 1)
    tp = getattr(config, "tp", 1)
    return Mesh(pp=pp, dp=world // (pp * tp), tp=tp)


def kinds(model: Decoder) -> list[list[nn.Parameter]]:
    """Group parameters by (matrix or norm, DTensor or not). Fused kernels cannot mix DTensors and
    other tensors.
    """
    sets: dict[tuple, list[nn.Parameter]] = {}
    for param in model.parameters():
        sets.setdefault((param.dim() > 1, isinstance(param, DTensor)), []).append(param)
    return list(sets.values())


def make_optimizer(model: Decoder, weight_decay: float) -> torch.optim.Optimizer:
    """Fused AdamW. As in the course, the weights of norms do not decay."""
    groups = []
    for params in kinds(model):
        decay = weight_decay if params[0].dim() > 1 else 0.0
        groups.append(dict(params=params, weight_decay=decay))
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def clip(model: Decoder, most: float, mesh: Mesh) -> float:
    """Clip gradients with PyTorch's functions; returns their norm, over all pipeline stages."""
    square = 0.0
    for params in kinds(model):
        norm = nn.utils.get_total_norm([param.grad for param in params])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        square = square + norm.double().square()
    all_reduce(square, mesh["pp"]).wait()
    norm = square.sqrt()
    for params in kinds(model):
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


def build_ddp(config: Any, mesh: Mesh, model: Decoder) -> Callable:
    """DistributedDataParallel with --bucket-mb."""
    materialize(model, config.seed, *choose_device(config))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True
    )

    def backward(xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        # DDP averages gradients over its ranks, so each loss counts as many times
        own_targets = n_targets / mesh["dp"].size
        with ddp.no_sync():  # only the last micro-batch communicates
            total = in_micro_batches(ddp, xs[:-1], ys[:-1], own_targets)
        total = total + in_micro_batches(ddp, xs[-1:], ys[-1:], own_targets)
        return total / mesh["dp"].size

    return backward


def build_fsdp(config: Any, mesh: Mesh, model: Decoder) -> Callable:
    """Use FSDP2. Each layer is a unit, and all other parameters form one more. Gradients are
    summed, not averaged.
    """
    device, dtype = choose_device(config)
    materialize(model, config.seed, device, wide(dtype))
    device_mesh = dist.init_device_mesh(device.type, (mesh["dp"].size,))
    policy = MixedPrecisionPolicy(dtype, wide(dtype))
    for module in (*model.model.layers.values(), model):
        shard = fully_shard(module, mesh=device_mesh, reshard_after_forward=True, mp_policy=policy)
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    return partial(in_micro_batches, model)


def build_dtensor(config: Any, mesh: Mesh, model: Decoder) -> Callable:
    """Use PyTorch's tensor parallelism and, with --sp, PyTorch's SequenceParallel for the norms.

    The input of a block becomes a DTensor only once. To convert it for each of the block's matrices
    would take longer.
    """
    device, dtype = choose_device(config)
    materialize(model, config.seed, device, dtype)
    device_mesh = dist.init_device_mesh(device.type, (mesh["tp"].size,))
    between = Shard(1) if config.sp else Replicate()  # between blocks, tokens are sharded, or not
    prepare = parallel.PrepareModuleInput
    column = parallel.ColwiseParallel()
    row = parallel.RowwiseParallel(output_layouts=between)
    layer_plan = {
        "self_attn": prepare(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.[qkv]_proj": column,
        "self_attn.o_proj": row,
        "mlp": prepare(input_layouts=between, desired_input_layouts=Replicate()),
        "mlp.gate_proj": column,
        "mlp.up_proj": column,
        "mlp.down_proj": row,
    }
    ends = {
        "model.embed_tokens": parallel.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=between
        ),
        "lm_head": parallel.ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if config.sp:
        layer_plan["*_layernorm"] = parallel.SequenceParallel()
        ends["model.norm"] = parallel.SequenceParallel()
    for layer in model.model.layers.values():
        parallel.parallelize_module(layer, device_mesh, layer_plan)
    parallel.parallelize_module(model, device_mesh, ends)

    def backward(xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        with parallel.loss_parallel():
            return in_micro_batches(model, xs, ys, n_targets).to_local()

    return backward


class TorchStage(nn.Module):
    """A stage of step 6, as a module with only the stage's parameters."""

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


def torch_stage(stage: Stage, n_stages: int, device: torch.device, group: Group) -> PipelineStage:
    """PyTorch's record of a stage."""
    module = TorchStage(stage)
    return PipelineStage(module, stage.number, n_stages, device, group=group.handle)


def own_stages(config: Any, model: Decoder, mesh: Mesh, device: torch.device) -> list[Stage]:
    """This rank's stages, as step 6's `--schedule` cuts the model."""
    positions = torch.arange(model.config.seq_len, device=device)
    ours = SCHEDULES[config.schedule](config, model, mesh, positions)
    return list(ours.stages.values()) if config.schedule == "interleaved" else [ours.stage]


def build_pipelining(config: Any, mesh: Mesh, model: Decoder) -> Callable:
    """Use `torch.distributed.pipelining` with PyTorch's counterpart of `--schedule`."""
    device, dtype = choose_device(config)
    group = mesh["pp"]
    own = own_stages(config, model, mesh, device)
    materialize(model, config.seed, device, dtype)
    loss_of = model.loss
    model.loss = logits_alone
    stages = [torch_stage(stage, len(own) * group.size, device, group) for stage in own]
    kind = getattr(schedules, TORCH_SCHEDULES[config.schedule])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    scale = torch.ones((), device=device)  # the number of targets of the present step
    schedule = kind(
        stages[0] if single else stages,
        config.global_batch_size // config.micro_batch_size,
        loss_fn=lambda logits, targets: loss_of(logits, targets) / scale,
        scale_grads=False,
    )

    def backward(xs: list[Tensor], ys: list[Tensor], n_targets: Tensor) -> Tensor:
        scale.copy_(n_targets)
        losses: list[Tensor] = []
        inputs = [torch.cat(xs)] if own[0].is_first else []
        target = torch.cat(ys) if own[-1].is_last else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.zeros((), device=device)
        for micro_loss in losses:
            total += micro_loss.detach()
        return total

    return backward


def logits_alone(logits: Tensor, targets: Tensor) -> Tensor:
    """Takes the place of the model's loss, which PyTorch's schedule computes itself."""
    return logits
