"""ZeRO against PyTorch's own: stage 3 and fully_shard (FSDP2), stage 1 and ZeroRedundancyOptimizer: time, peak memory.

    python -m tests.bench step03                                                                     a CPU
    python -m tests.bench step03 --ranks 8 --model smollm-1.7b --dtype bf16 --recompute full         eight GPUs
    python -m tests.bench step03 --ranks 1 --fit                                                     one GPU

Both contestants of a pair train the same model on the same tokens in one process group and take turns, so that what
else the machine does meets both alike; the losses must agree. Each one's memory is measured alone, before: every
allocation and release of a second training step, by the profiler on a CPU, by the caching allocator on a GPU.
With --fit: the largest preset that one training step of stage 3 fits for, without and with offload.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function

import step03_zero as step03
from common import UserError
from common.comm import Group, Mesh, sum_over
from common.layout import global_norm, materialize
from common.model import PRESETS, Decoder
from services.checks import check_zero
from services.devices import choose_device, choose_dtype
from services.flags import parse
from services.launch import open_mesh
from services.offload import homes
from services.tables import human, table
from services.torch_ddp import TorchSync
from step01_single_gpu import update_rule, wrap_layers

TrainStep = Callable[[], float]


@dataclass
class Config(step03.Config):
    """Step 3's flags, of which those of model, micro-batch and device count, and those of this benchmark."""

    ranks: int = 2  # processes to start
    steps: int = 5  # steps of each contestant in a round
    rounds: int = 10  # rounds to measure, after one to warm up
    micro_batches: int = 2  # micro-batches of a rank in a step
    dtype: Literal["fp32", "bf16"] = "fp32"  # bf16: compute in bf16, update in fp32 (only the pair of stage 3)
    fit: bool = False  # on a GPU: find the largest preset that fits, instead


class WithLoss(nn.Module):
    """The decoder and its loss as one module, which wrappers want."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """The summed loss of a micro-batch."""
        return self.model.lm_head.loss(self.model(tokens, positions), targets)


def batch(config: Config, group: Group) -> tuple[Tensor, Tensor, Tensor, int]:
    """This rank's tokens and targets [micro_batches, micro_batch_size, seq], positions, and all ranks' targets."""
    m = config.model_config()
    shape = (config.micro_batches, config.micro_batch_size, m.seq_len + 1)
    drawn = torch.randint(m.vocab_size, shape, generator=torch.Generator().manual_seed(group.rank)).to(group.device)
    tokens, targets = drawn[..., :-1], drawn[..., 1:].contiguous()
    return tokens, targets, torch.arange(m.seq_len, device=group.device), targets.numel() * group.size


def plain_model(config: Config) -> Decoder:
    """The model on the meta device, its layers recomputing as the flags say."""
    with torch.device("meta"):
        model = Decoder(config.model_config())
    wrap_layers(model, config)
    return model


def ours(config: Config, mesh: Mesh) -> TrainStep:
    """One step of `step03.train`, without data, logging and checks."""
    model, group = plain_model(config), mesh["dp"]
    home = homes(config, ExitStack(), mesh.device)  # pinned until the process ends
    optimizer = step03.ZeroOptimizer(model, config, mesh, choose_dtype(config.dtype, mesh.device), home)
    tokens, targets, positions, n_targets = batch(config, group)

    def step() -> float:
        total = torch.zeros((), device=group.device)
        optimizer.begin()
        for i in range(len(tokens)):
            if i + 1 == len(tokens):
                optimizer.last_micro_batch()
            loss = model.lm_head.loss(model(tokens[i], positions), targets[i]) / n_targets
            loss.backward()
            total += loss.detach()
        optimizer.finish()
        optimizer.step(config.lr, global_norm(optimizer, mesh, [], sliced=True))
        optimizer.zero_grad()
        return sum_over(group, total)[0]

    return step


def accumulate(config: Config, group: Group, model: nn.Module, last: Callable, inner) -> TrainStep:
    """One step of a module wrapped by PyTorch; `last(bool)` tells it whether the next micro-batch is the last."""
    tokens, targets, positions, n_targets = batch(config, group)

    def step() -> float:
        total = torch.zeros((), device=group.device)
        for i in range(len(tokens)):
            last(i + 1 == len(tokens))
            loss = model(tokens[i], targets[i], positions) / n_targets
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        inner.step()
        model.zero_grad()
        return sum_over(group, total)[0]

    return step


def fsdp(config: Config, mesh: Mesh) -> TrainStep:
    """FSDP2: each layer and the rest a unit, parameters freed after use; gradients summed, not averaged."""
    model, group = plain_model(config), mesh["dp"]
    materialize(model, config.seed, group.device, torch.float32)
    wrapped = WithLoss(model)
    options = dict(mesh=dist.init_device_mesh(group.device.type, (group.size,)), reshard_after_forward=True)
    if config.dtype == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.model.layers.values(), wrapped):
        shard = fully_shard(module, **options)
        shard.set_gradient_divide_factor(1.0)
        shard.set_force_sum_reduction_for_comms(True)
    inner = rule(wrapped, config)
    return accumulate(config, group, wrapped, lambda _: None, inner)


def rule(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """The optimizer of the steps on a module's parameters as they are."""
    params = list(model.parameters())
    inner = update_rule(params, config, [p.dim() > 1 for p in params])
    for params_of_one_decay in inner.param_groups:
        params_of_one_decay["lr"] = config.lr
    return inner


def zero_redundancy(config: Config, mesh: Mesh) -> TrainStep:
    """DDP, summing, with a ZeroRedundancyOptimizer around the optimizer of the steps."""
    model, group = plain_model(config), mesh["dp"]
    materialize(model, config.seed, group.device, torch.float32)
    ids = [group.device] if group.device.type == "cuda" else None
    wrapped = DistributedDataParallel(WithLoss(model), ids, gradient_as_bucket_view=True, init_sync=False)
    wrapped.register_comm_hook(group, TorchSync.add)
    groups = [
        dict(
            params=[p for p in model.parameters() if (p.dim() > 1) == decays],
            weight_decay=config.weight_decay * decays,
        )
        for decays in (True, False)
    ]
    inner = ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, parameters_as_bucket_view=True, lr=config.lr, betas=(0.9, 0.95), fused=True
    )

    def last(is_last: bool):
        wrapped.require_backward_grad_sync = is_last

    return accumulate(config, group, wrapped, last, inner)


class Pair(NamedTuple):
    """Two contestants."""

    names: tuple[str, str]
    makers: tuple[Callable[..., TrainStep], Callable[..., TrainStep]]
    zero: int


PAIRS = [
    Pair(("step03, stage 3", "fully_shard"), (ours, fsdp), 3),
    Pair(("step03, stage 1", "ZeroRedundancyOptimizer"), (ours, zero_redundancy), 1),
]


def peak_bytes(make: Callable[[], TrainStep], device: torch.device) -> int:
    """The most bytes that a contestant holds at any time of its second training step."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        step = make()
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        step = make()
        step()
        with record_function("second step"):
            step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "second step")
    held = most = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held) if event.start_ns() >= start else held
    return most


def seconds(step: TrainStep, group: Group, n_steps: int) -> tuple[float, float]:
    """Seconds of a step, the mean over `n_steps` and all ranks, and the last loss."""
    finished = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    finished()
    start = time.perf_counter()
    for _ in range(n_steps):
        loss = step()
    finished()
    (total,) = sum_over(group, (time.perf_counter() - start) / n_steps)  # also lets the ranks meet
    return total / group.size, loss


def contest(pair: Pair, config: Config, mesh: Mesh) -> list[list[str]]:
    """Two rows of the table: each contestant's median time and peak memory, and the ratios."""
    config, group = replace(config, zero=pair.zero), mesh["dp"]
    makers = [lambda make=make: make(config, mesh) for make in pair.makers]
    peaks = [sum_over(group, peak_bytes(make, group.device))[0] / group.size for make in makers]
    steps = [make() for make in makers]
    times: list[list[float]] = []
    for turn in range(config.rounds + 1):
        order = (0, 1) if turn % 2 else (1, 0)
        measured = {i: seconds(steps[i], group, config.steps) for i in order}
        times.append([measured[i][0] for i in (0, 1)])
        losses = [measured[i][1] for i in (0, 1)]
        if abs(losses[0] - losses[1]) > (0.05 if config.dtype == "bf16" else 1e-3):
            raise RuntimeError(f"{pair.names[0]} comes to a loss of {losses[0]}, {pair.names[1]} to {losses[1]}")
    ratio = median(theirs / mine for mine, theirs in times[1:])  # the first round warmed up
    rows = [[pair.names[i], f"{1e3 * median(t[i] for t in times[1:]):.1f} ms", "", human(peaks[i]), ""] for i in (0, 1)]
    rows[0][2], rows[0][4] = f"{ratio:.3f}", f"{peaks[0] / peaks[1]:.3f}"
    return rows


def join(rank: int, config: Config, folder: str) -> tuple[torch.device, str]:
    """Enter the process group; returns the device and the backend."""
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.ranks))
    torch.set_num_threads(1)
    device = choose_device(config.device)
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= config.ranks
    backend = config.backend if config.backend != "auto" else "nccl" if own_gpu else "gloo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, meeting, timedelta(minutes=10), world_size=config.ranks, rank=rank)
    return device, backend


def compare(rank: int, config: Config, folder: str):
    """One rank's part of the comparison; rank 0 prints."""
    device, backend = join(rank, config, folder)
    rows = [["", "step time", "theirs / ours", "peak memory", "ours / theirs"]]
    with open_mesh({"dp": config.ranks}, device, backend) as mesh:
        for pair in PAIRS if config.dtype == "fp32" else PAIRS[:1]:
            rows += contest(pair, config, mesh)
            gc.collect()
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread each"
        print(
            f"{config.ranks} ranks ({backend}) on {where}; {config.model}, {config.dtype}, {config.micro_batches} "
            f"micro-batches of {config.micro_batch_size} a rank, recomputation: {config.recompute}\n"
        )
        print(f"{table(rows)}\nmedians of {config.rounds} rounds; the aim: time at least 0.9, memory at most 1.05")
    dist.destroy_process_group()


def attempt(rank: int, config: Config, folder: str):
    """One rank's part of trying a preset: two training steps; rank 0 leaves (seconds, peak bytes) in a file."""
    device, backend = join(rank, config, folder)
    with open_mesh({"dp": config.ranks}, device, backend) as mesh:
        step = ours(config, mesh)
        step()
        taken, _ = seconds(step, mesh["dp"], 1)
    if rank == 0:
        torch.save((taken, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0), f"{folder}/result")
    dist.destroy_process_group()


def try_preset(config: Config) -> tuple[float, int] | str:
    """(Seconds of a step, peak bytes on the GPU of rank 0), or why the preset does not fit."""
    with torch.device("meta"):
        n_params = sum(p.numel() for p in Decoder(config.model_config()).parameters())
    host = 18 * n_params if config.offload_optimizer == "cpu" else 0
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if host > available:
        return f"needs {human(host)} of the host's memory, of which {human(available)} are free"
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(attempt, (config, folder), nprocs=config.ranks)
        except torch.multiprocessing.ProcessRaisedException as error:
            if "OutOfMemoryError" not in str(error):
                raise
            return "out of GPU memory"
        return torch.load(f"{folder}/result")


def find_fit(config: Config):
    """Print the largest preset that fits, without and with offload."""
    rows = [["offload", "largest preset that fits", "step time", "peak on the GPU", "the next one"]]
    for offload in (dict(), dict(offload_optimizer="cpu", offload_params="cpu")):
        best, reason = ["none", "-", "-"], "-"
        for name in [preset for preset in PRESETS if preset not in ("debug", "tiny")]:
            result = try_preset(replace(config, model=name, zero=3, **offload))
            if isinstance(result, str):
                reason = f"{name}: {result}"
                break
            best = [name, f"{result[0]:.2f} s", human(result[1])]
        rows.append(["optimizer and parameters" if offload else "none", *best, reason])
    print(f"{config.ranks} ranks, {config.dtype}, one micro-batch of {config.micro_batch_size}, full recomputation\n")
    print(table(rows))


def main(argv: list[str]):
    """Check the flags, start the ranks, wait for them."""
    config = parse(Config, argv)
    for name, least in dict(
        ranks=1 if config.fit else 2, steps=1, rounds=1, micro_batches=1, micro_batch_size=1
    ).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    config.global_batch_size = config.ranks * config.micro_batches * config.micro_batch_size
    check_zero(config, config.ranks)
    if config.fit:
        if choose_device(config.device).type != "cuda":
            raise UserError("--fit fills a GPU's memory to find its limit: it needs a GPU")
        find_fit(replace(config, dtype="bf16", recompute="full", micro_batches=1, micro_batch_size=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(compare, (config, folder), nprocs=config.ranks)
