"""A dry run: runs a step's own `train` as one of N ranks, on tensors without data, and counts its work and memory.

    python -m extras step06_pipeline.py --dry-run 1024 --model llama3-405b --tp 8 --pp 16 --dtype bf16 --gpu h100-80

Under `FakeTensorMode` a tensor has a shape, a dtype and a device, but no data, and `item()` returns 1.0. With the
process group "fake", one process can act as any rank of any number of ranks; it sends nothing. Tokens are assumed to
visit all experts equally often; `levels_of` estimates how many rows are sent to nodes, to ranks and to experts.

It trains two steps, and counts the FLOPs and bytes of each operator in the second. By the roofline model an operator
takes max(FLOPs / peak, bytes / bandwidth), a lower bound. The peak is that of 16-bit matmuls; messages take no time. Of
causal attention only half of the scores count, as its kernels skip the others. Operators are counted as on a CPU. Only
RMSNorm is counted as on a GPU (unless --device is cpu), where it saves less for backward: see `Norm`.
"""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

from common import UserError, comm, layout
from common.data import Data
from common.trainer import Run, among
from extras.services.clocks import Clock
from extras.services.memory import MemoryTimeline, MemoryWatch, memory_table
from extras.services.seam import OpenRun
from extras.services.tables import Ledger, human, table, traffic_table
from extras.plan.gpus import GPUS, Gpu
from extras.plan.shapes import flops_per_token, shape_of
from extras.variants.step07.routing import RoutedMoE
from step07_moe_ep import MoE

MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0}  # index of the first factor
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "detach"}
WRITES = {"copy_", "zero_", "fill_"}  # these do not read the tensor that they change
FILLS = {"zeros_like", "full_like", "new_zeros", "new_full", "nll_loss_backward"}  # these read next to nothing
TAKES = {"embedding", "index_select", "index", "gather", "nll_loss_forward"}  # these read as much as they return


@dataclass
class Flags:
    """The dry run."""

    dry_run: int = 0  # count a step of one rank of N, on tensors without data, instead of training; 0: train
    rank: str = ""  # with --dry-run: count this rank; default: one rank of each pipeline stage
    gpu: str = among(GPUS, "h100-80")  # with --dry-run: compute times from this GPU's peak and bandwidth


NEEDS = [("rank", "dry_run"), ("gpu", "dry_run")]


def check(config: Any, world: int):
    """Raises UserError if a dry run is started with several ranks, or if --rank is not one of the ranks 0 to N-1."""
    if config.dry_run and world > 1:
        raise UserError("--dry-run is one process that plays any rank: start it with python, not with torchrun")
    if config.rank not in ("", *map(str, range(config.dry_run))):
        raise UserError(f"--rank {config.rank} is not a rank of this --dry-run: use 0 to {config.dry_run - 1}")


def flops_of(name: str, args: tuple, kwargs: dict) -> float:
    """FLOPs of a matmul or of attention; 0 for other operators, whose time depends on their bytes alone."""
    if name in MATMULS:
        a, b = args[MATMULS[name] :][:2]
        return 2.0 * a.numel() * b.shape[-1]
    if not name.startswith("_scaled_dot_product_"):
        return 0.0
    backward = "backward" in name
    q, k, v = args[backward:][:3]  # [batch, heads, seq, dim]
    causal = kwargs.get("is_causal", any(arg is True for arg in args))
    scores = q.numel() // q.shape[-1] * k.shape[-2] * (0.5 if causal else 1.0)
    matmuls = (3 * q.shape[-1] + 2 * v.shape[-1]) if backward else q.shape[-1] + v.shape[-1]
    return 2.0 * scores * matmuls  # backward computes the scores again


def bytes_of(func: Any, args: tuple, kwargs: dict, out: Any) -> int:
    """Bytes that a kernel reads and writes; repeated elements of an expanded tensor count once."""

    def total(values: Any) -> int:
        return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in tree_iter(values) if isinstance(t, Tensor))

    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    marked = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    changed = {key: given.pop(key) for key in marked & given.keys() - {"grads"}}  # written only with a GradScaler
    written = total(changed or out)
    read = 0 if name in FILLS else total(given) + total(changed) * (name not in WRITES and "out" not in kwargs)
    return written + (min(read, written) if name in TAKES else read)


class Meter(MemoryTimeline):
    """Counts the calls, FLOPs, bytes and seconds of each operator, and the bytes that are allocated on the device."""

    def __init__(self, gpu: Gpu):
        super().__init__(lambda: self.seconds)
        self.gpu, self.seconds, self.counting, self.start = gpu, 0.0, False, 0
        self.found: list[int] = []  # rows that the current dispatch has still to send: to nodes, to ranks, to experts
        self.rows = 0  # rows that visit experts
        self.count: dict[str, Counter] = defaultdict(Counter)  # by operator: calls, flops, bytes, seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator, and count it."""
        out, name = super().__torch_dispatch__(func, types, args, kwargs), func.overloadpacket.__name__
        if self.counting and func.namespace == "aten" and not func.is_view and name not in NO_KERNEL:
            self.book(name, bytes_of(func, args, kwargs or {}, out), flops_of(name, args, kwargs or {}))
        return out

    def book(self, name: str, n_bytes: int, flops: float = 0.0):
        """Count one kernel: its bytes, its FLOPs, and the seconds that it takes by the roofline model."""
        if self.counting:
            seconds = max(flops / self.gpu.flops, n_bytes / self.gpu.hbm)
            self.count[name] += Counter(calls=1, flops=flops, bytes=n_bytes, seconds=seconds)
            self.seconds += seconds

    def begin(self):
        """Start counting. First collect the garbage of everything that ran before, as it would count as memory."""
        gc.collect()
        self.counting, self.start = True, len(self.events)

    def peak(self) -> dict[str, int]:
        """Bytes by kind, at the moment of the step when their sum is largest."""
        _, curves = self.curves()
        sums = [sum(column) for column in zip(*curves.values(), strict=True)]
        at = max(range(self.start, len(sums)), key=sums.__getitem__)
        return {name: curve[at] for name, curve in curves.items()}


class Norm(torch.autograd.Function):
    """RMSNorm as on a GPU: one kernel in each direction. It saves its input, its weight and a number for each token."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, meter: Meter) -> Tensor:
        """Count the kernel: x [..., dim], weight [dim] -> an output without data, [..., dim]."""
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.meter = meter
        meter.book("rms_norm", 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Count the kernel: dy [..., dim] -> the gradients of x and weight, without data."""
        x, weight, _ = ctx.saved_tensors
        ctx.meter.book("rms_norm_backward", 3 * x.nbytes)
        return torch.empty_like(x), torch.empty_like(weight), None


def levels_of(config: Any) -> list[float]:
    """How many nodes, ranks and experts a token visits on average, over 4,096 tokens with random scores.

    --ep-mode decides which of the three are returned. Scores are drawn, so call this outside `FakeTensorMode`.
    """
    if not getattr(config, "experts", 0):
        return []
    layer, draw = SimpleNamespace(config=config, top_k=config.experts_per_token), torch.Generator().manual_seed(0)
    chosen = RoutedMoE.choose(layer, torch.rand(4096, config.experts, generator=draw))
    there = F.one_hot(chosen, config.experts).sum(1)
    parts = dict(rows=[config.ep], nodes=[config.ep // config.ep_inside, config.ep]).get(config.ep_mode, [])
    room = min(1.0, config.capacity_factor or 1.0)  # the fraction of choices that experts have room for
    return [room * there.unflatten(1, (n, -1)).any(-1).sum().item() / len(there) for n in (*parts, config.experts)]


def route(meter: Any, model: nn.Module, levels: list[float]):
    """Let each MoE layer tell `meter` how many rows go to nodes, ranks and experts, by the averages in `levels`."""

    def told(_layer: MoE, given: tuple):
        meter.found = [round(given[0].shape[:-1].numel() * there) for there in levels]
        meter.rows = meter.found[-1]

    for module in model.modules():
        if isinstance(module, MoE):
            module.register_forward_pre_hook(told)


class Counted(OpenRun):
    """A run of two steps, which writes no files and keeps the counts of the second step.

    `taken`: how many calls sent how many bytes. `tokens`: the tokens of all ranks. `held`: most bytes held, by kind.
    """

    def __init__(self, config: Any, meter: Meter):
        super().__init__(config)
        self.first, self.meter, self.ledger, self.levels = False, meter, Ledger(), levels_of(config)

    def steps(self, **parts: Any) -> Iterator[int]:
        """Attach the counters, then yield two steps, of which only the second is counted."""
        parts = self.open(**parts)
        self.held = MemoryWatch(parts, self.meter, Clock(parts, host=True)).most
        route(self.meter, parts.model, self.levels)
        comm.observer = self.ledger.book
        yield 0  # the first update creates the moments
        self.ledger.take()
        self.meter.begin()
        yield 1

    def record(self, step: int, tokens: int, **numbers: float):
        """Stop counting, and keep the step's traffic and tokens."""
        self.meter.counting, self.taken, self.tokens = False, self.ledger.take(), tokens


@contextmanager
def without_numbers(meter: Any, rank: int, world: int, gpu: bool = False) -> Iterator[None]:
    """In this context, the process is `rank` of `world` ranks, on tensors without data. If `gpu`, RMSNorm is `Norm`."""
    make_group = dist.new_group

    def evenly(tensor: Tensor) -> list:
        n, both = tensor.shape[-1], tensor.dim() == 2  # 2-D: rows [sent, received]; 1-D: rows of each expert
        rows = meter.found.pop(0) if both else meter.rows
        counts = [rows * (i + 1) // n - rows * i // n for i in range(n)]
        return [counts, counts] if both else counts

    def tokens(data: Data, step: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(data.batch_size, data.shape.seq_len, dtype=torch.int64) for _ in range(2))

    def empty_data(data: Data, _source: str, shape: Any, batch_size: int, _seed: int):
        data.shape, data.batch_size = shape, batch_size

    replaced = [
        (Tensor, "item", lambda tensor: 1.0),
        (FakeTensor, "tolist", evenly),
        (layout, "draw", lambda name, shape, *_: torch.empty(shape)),
        (dist, "new_group", lambda row: make_group(row) if rank in row else None),
        (Data, "__init__", empty_data),
        (Data, "batch", tokens),
    ]
    if gpu:
        replaced.append((F, "rms_norm", lambda x, shape, weight, eps: Norm.apply(x, weight, meter)))
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        if world > 1:
            stack.enter_context(mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world)))
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        yield


def run_rank(train: Callable, config: Any, rank: int) -> Counted:
    """Train two steps as `rank` of `config.dry_run`; returns the run with its counts. Raises what `train` raises."""
    run = Counted(replace(config, steps=2), Meter(GPUS[config.gpu]))
    with without_numbers(run.meter, rank, config.dry_run, config.device != "cpu"), run:
        train(run.config, run)
    return run


def report(seen: dict[int, Counted], config: Any) -> str:
    """Make tables: a row for each counted rank; then memory, traffic and operators of the rank with most memory."""
    rows = [["rank", "peak", "held", "sent", "TFLOPs", "seconds"]]
    for rank, one in seen.items():
        sent = sum(n for each in one.taken["traffic"].values() for n in each.values())
        sizes = sum(one.meter.peak().values()), sum(one.held.values()), sent
        flops = sum(count["flops"] for count in one.meter.count.values())
        rows.append([f"{rank:,}", *map(human, sizes), f"{flops / 1e12:,.3f}", f"{one.meter.seconds:.3f}"])
    rank, one = max(seen.items(), key=lambda entry: sum(entry[1].meter.peak().values()))
    total = one.meter.seconds
    texts = [f"dry run of {config.model} on {config.dry_run:,} ranks, at the speed of {config.gpu}", table(rows)]
    texts += [f"rank {rank:,}{', the fullest of these' * (len(seen) > 1)}:", memory_table(one.held)]
    texts += [traffic_table(one.taken)] * bool(one.taken["traffic"])
    rows = [["operator", "calls", "FLOPs", "bytes", "ms", "of the time"]]
    for name, c in sorted(one.meter.count.items(), key=lambda entry: -entry[1]["seconds"])[:12]:
        rows.append([name.removeprefix("_scaled_dot_product_"), f"{c['calls']:,}", f"{c['flops']:.3g}"])
        rows[-1] += [human(c["bytes"]), f"{1e3 * c['seconds']:,.2f}", f"{c['seconds'] / total:.1%}"]
    flops = flops_per_token(shape_of(one.parts.model.config, config))[0] * one.tokens / config.dry_run  # the model's
    mfu = flops / one.meter.gpu.flops / total
    texts += [table(rows), f"MFU is at most {mfu:.1%}: these operators take {total:.3f} s, before bubbles and messages"]
    return "\n\n".join(texts)


def instead_of(train: Callable) -> Callable:
    """Wrap `train`: with --dry-run, only print the counts of --rank, or by default of one rank of each stage."""

    def train_or_count(config: Any, run: Run):
        if not config.dry_run:
            return train(config, run)
        pp = getattr(config, "pp", 1)
        ranks = [int(config.rank)] if config.rank else [stage * config.dry_run // pp for stage in range(pp)]
        print(report({rank: run_rank(train, config, rank) for rank in ranks}, config))

    return train_or_count
