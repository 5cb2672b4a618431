"""Context parallelism: attention in every --cp-mode against one SDPA call on the whole sequence; waiting and memory.

    python -m tests.bench step05                                      two ranks on a CPU
    python -m tests.bench step05 --cp 4 --device cuda                 a GPU for each, or all on the one there is
    python -m tests.bench step05 --share --cp 8 --device cuda         one process does the share of one of eight ranks

Forward and backward of causal attention with grouped queries. The modes take turns, forwards in one round and backwards
in the next, so that what else the machine does meets all alike; medians count. FLOPs are those of the pairs that
causal attention needs: 4 x head_dim x heads a pair forward, 10 backward (flash attention computes the scores again).

Without --share, rank 0 alone makes the SDPA call while the others wait, and a mode's FLOP/s are those of one rank, if
all did equal work, in the seconds of the slowest. With --share nothing is sent: messages are copies in memory,
and the FLOPs are the pairs that this rank has computed.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import step05_cp_ring as step05
from common import UserError
from common.comm import Group, Pending
from common.model import attend
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.launch import gather_objects, open_mesh
from services.ledger import Ledger
from services.memory import MemoryTimeline
from services.tables import human, table
from tests.bench.cp_work import watched

MODES = ("zigzag", "ring", "allgather", "ulysses")
WHOLE, FLASH = "one SDPA call", "one SDPA call, flash"


@dataclass
class Config:
    """Flags of this benchmark."""

    cp: int = 2  # ranks that share the sequence
    seq_len: int = 0  # tokens of the whole sequence; 0: 32768 on a GPU, 2048 on a CPU
    n_heads: int = 0  # query heads; 0: 32 on a GPU, 8 on a CPU
    n_kv_heads: int = 0  # key/value heads; 0: a quarter of the query heads
    head_dim: int = 0  # size of a head; 0: 128 on a GPU, 64 on a CPU
    batch: int = 1  # sequences
    rounds: int = 7  # rounds to measure, after one to warm up
    share: bool = False  # one process: the blocks of one rank, all hops, without communication
    rank: int = -1  # with --share: whose blocks; -1: the last rank's, who has most to do in a ring
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of q, k, v; auto: bf16 on a GPU, else fp32
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if every rank has a GPU of its own


class Case:
    """The tensors of a whole sequence, and how to run attention on some tokens of them."""

    def __init__(self, config: Config, device: torch.device):
        on_gpu = device.type == "cuda"
        self.batch, self.device, self.dtype = config.batch, device, choose_dtype(config.dtype, device)
        self.seq = config.seq_len or (32768 if on_gpu else 2048)
        self.heads = config.n_heads or (32 if on_gpu else 8)
        self.kv_heads = config.n_kv_heads or max(1, self.heads // 4)
        self.d = config.head_dim or (128 if on_gpu else 64)
        if self.seq % (2 * config.cp) or self.heads % self.kv_heads:
            raise UserError(
                f"--seq-len {self.seq} must be a multiple of {2 * config.cp} (2 x --cp), and --n-heads {self.heads} "
                f"one of --n-kv-heads {self.kv_heads}"
            )
        self.modes = [mode for mode in MODES if mode != "ulysses" or self.splits_heads(config.cp)]

    def splits_heads(self, n: int) -> bool:
        """Whether Ulysses can give n ranks whole heads."""
        return self.heads % n == 0 and (self.kv_heads % n == 0 or n % self.kv_heads == 0)

    def tensors(self, positions: Tensor) -> list[Tensor]:
        """q, k, v and a gradient of the output, for these tokens."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, len(positions))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        made = [torch.randn(*shape, h, self.d, generator=generator).to(self.device, self.dtype) for h in heads]
        return [x.requires_grad_(i < 3) for i, x in enumerate(made)]

    def step(self, core: Callable[[Tensor, Tensor, Tensor], Tensor], positions: Tensor) -> Callable[[], None]:
        """A function that runs `core` forward and backward."""
        q, k, v, grad = self.tensors(positions)
        return lambda: torch.autograd.grad(core(q, k, v), (q, k, v), grad)

    def flops(self, pairs: float) -> float:
        """Of forward and backward on so many query-key pairs of each head and sequence."""
        return 14 * self.d * self.heads * self.batch * pairs

    def __str__(self) -> str:
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU, one thread a process"
        return (
            f"{self.batch} x {self.seq} tokens, {self.heads} query and {self.kv_heads} key/value heads of {self.d}, "
            f"{self.dtype}, {where}"
        )


def seconds(step: Callable[[], None], device: torch.device) -> float:
    """Time of one call."""
    finished = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finished()
    start = time.perf_counter()
    step()
    finished()
    return time.perf_counter() - start


def peak_bytes(step: Callable[[], None], device: torch.device) -> int:
    """The most bytes that one call holds beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    timeline = MemoryTimeline()
    with timeline.phase("forward"):
        step()
    return max(timeline.curves()[1]["activations"])


def speed(flops: float, time: float) -> str:
    """FLOP/s for a person to read."""
    rate = flops / time
    return f"{rate / 1e12:.1f} TFLOP/s" if rate > 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def with_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA with the kernel that the blocks use, where PyTorch would prefer another."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attend(q, k, v)


def contestants(case: Case, group: Group) -> dict[str, Callable[[], None]]:
    """A step for every mode on this rank's tokens and, on rank 0 (or alone), for SDPA on all tokens."""
    steps = {WHOLE: case.step(attend, torch.arange(case.seq))}
    if case.device.type == "cuda":
        steps[FLASH] = case.step(with_flash, torch.arange(case.seq))
    for mode in case.modes:
        own = step05.own_positions(case.seq, group.rank, group.size, mode)
        steps[mode] = case.step(step05.ContextAttention(group, mode), own)
    return steps


def together(case: Case, group: Group, config: Config, mesh) -> list[list[str]]:
    """The table of `cp` ranks."""
    steps = contestants(case, group)
    alone = [name for name in steps if name not in MODES]
    timed: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(config.rounds + 1):
        for name in list(steps) if turn % 2 else list(steps)[::-1]:
            gather_objects(None, mesh)  # all start at once
            group.ledger.take()
            took = seconds(steps[name], case.device) if group.rank == 0 or name not in alone else 0.0
            waited = group.ledger.take()["wait_seconds"].get("cp", 0.0)
            everyone = gather_objects((took, waited), mesh)
            timed[name].append((max(t for t, _ in everyone), sum(w for _, w in everyone) / group.size))
    held = {}
    for name, step in steps.items():
        took_part = group.rank == 0 or name not in alone
        held[name] = max(gather_objects(peak_bytes(step, case.device) if took_part else 0, mesh))
    total = case.flops(case.seq * (case.seq + 1) / 2)
    rows = [["attention", "ranks", "seconds", "a rank's speed", "of SDPA", "exposed (waiting)", "extra memory a rank"]]
    base = median(took for took, _ in timed[WHOLE][1:])
    for name, rounds in timed.items():
        ranks = 1 if name in alone else group.size
        took, waited = (median(values) for values in zip(*rounds[1:], strict=True))  # the first round warmed up
        exposed = "-" if name in alone else f"{waited:.4f} s"
        ratio = f"{base / ranks / took:.1%}"
        rows.append([name, str(ranks), f"{took:.4f}", speed(total / ranks, took), ratio, exposed, human(held[name])])
    return rows


def copied(output: Tensor, tensor: Tensor) -> Pending:
    """A message or collective that brings something of the right size from next door."""
    output.view(-1, tensor.numel()).copy_(tensor.reshape(1, -1))
    return Pending(Group("cp", output.device, Ledger()), [])


def alone(case: Case, config: Config) -> list[list[str]]:
    """The table of one process that computes the share of one of `cp` ranks."""
    rank = config.rank % config.cp
    group = Group("cp", case.device, Ledger(), rank, config.cp)
    whole = case.seq * (case.seq + 1) // 2
    fakes = {
        "exchange": lambda sends, receives, _: copied(receives[0][0], sends[0][0]),
        "all_gather": lambda output, tensor, _: copied(output, tensor),
        "reduce_scatter": lambda output, tensor, _: copied(output, tensor.view(config.cp, -1)[rank]),
        "all_to_all": lambda output, tensor, _: copied(output, tensor),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(step05, name, fake))
        steps = contestants(case, group)
        pairs = dict.fromkeys(steps, whole)
        for mode in case.modes:
            with watched() as blocks:
                steps[mode]()
            pairs[mode] = sum(work.pairs for work in blocks) // case.heads
        timed: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(config.rounds + 1):
            for name in list(steps) if turn % 2 else list(steps)[::-1]:
                timed[name].append(seconds(steps[name], case.device))
    base = case.flops(whole) / median(timed[WHOLE][1:])
    rows = [["attention", "share of the work", "seconds", "speed", "of SDPA"]]
    for name, rounds in timed.items():
        took = median(rounds[1:])
        ratio = case.flops(pairs[name]) / took / base
        rows.append(
            [name, f"{pairs[name] / whole:.2%}", f"{took:.4f}", speed(case.flops(pairs[name]), took), f"{ratio:.1%}"]
        )
    return rows


def work(rank: int, config: Config, folder: str):
    """One rank's part; rank 0 prints."""
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.cp))
    torch.set_num_threads(1)
    device = choose_device(config.device)
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= config.cp
    backend = config.backend if config.backend != "auto" else "nccl" if own_gpu else "gloo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, meeting, timedelta(minutes=5), world_size=config.cp, rank=rank)
    case = Case(config, device)
    with open_mesh({"cp": config.cp}, device, backend) as mesh:
        rows = together(case, mesh["cp"], config, mesh)
    if rank == 0:
        print(f"{config.cp} ranks ({backend}), {case}\n\n{table(rows)}", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still holds a tensor would abort an interpreter that shuts down


def bench(config: Config):
    """Check the flags; then one process, or `cp` of them."""
    for name, least in dict(cp=2, seq_len=0, n_heads=0, n_kv_heads=0, head_dim=0, batch=1, rounds=1).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    device = choose_device(config.device) if config.share else torch.device("cpu")
    if config.share:
        torch.set_num_threads(1)
        case = Case(config, device)
        rows = alone(case, config)
        print(f"the blocks of rank {config.rank % config.cp} of {config.cp}, {case}\n\n{table(rows)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (config, folder), nprocs=config.cp)
        except torch.multiprocessing.ProcessRaisedException as error:
            sys.exit(str(error))  # the rank's traceback


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
