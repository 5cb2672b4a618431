"""Data parallelism: step time and waiting of every --sync; our buckets against PyTorch's DDP.

    python -m tests.bench step02                                        two ranks on a CPU
    python -m tests.bench step02 --device cuda --model smollm-135m      a GPU for each, or all on the one there is

The modes take turns in one process group, `--steps` steps each, forwards in one round and backwards in the next, so
that what else the machine does meets all of them alike. A ratio compares neighbours of the same round.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist

import step02_ddp as step02
from common import UserError
from common.comm import Group, Mesh, all_reduce, sum_over
from common.layout import materialize
from common.model import Decoder
from services.checks import check_dp
from services.devices import choose_device, choose_dtype
from services.flags import main as run_main
from services.launch import open_mesh
from services.tables import human, table
from services.torch_ddp import TorchSync
from step01_single_gpu import Optimizer
from step02_ddp import gradient_sync

MODES = ("naive", "overlap", "bucket", "torch")
COLUMNS = ("calls", "bytes", "waited", "seconds")


@dataclass
class Config:
    """Flags of this benchmark."""

    ranks: int = 2  # processes to start
    model: str = "tiny"  # preset of common/model.py
    steps: int = 10  # steps of each mode in a round
    rounds: int = 10  # rounds to measure, after one to warm up
    micro_batches: int = 2  # micro-batches of a rank in a step
    micro_batch_size: int = 4  # sequences of a micro-batch
    bucket_mb: float = 1.0  # bucket size of both contestants, in MiB: several buckets even for a small model
    dtype: Literal["fp32", "fp64"] = "fp32"  # DDP adds up in the dtype of the weights, so not 16 bits
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if every rank has a GPU of its own


@dataclass
class Ranks:
    """What `gradient_sync` needs to know of a run."""

    mesh: Mesh
    bucket_mb: float
    all_reduce = staticmethod(all_reduce)

    def torch_ddp(self, model: Decoder) -> TorchSync:
        """PyTorch's own data parallelism."""
        return TorchSync(model, self.mesh.data, self.bucket_mb)


def train_step(config: step02.Config, mesh: Mesh) -> Callable[[], None]:
    """A model of its own and one training step on it, as in `step02.train` but without data, logging and checks."""
    m, device, group = config.model_config(), mesh.device, mesh["dp"]
    with torch.device("meta"):
        model = Decoder(m)
    materialize(model, config.seed, device, choose_dtype(config.dtype, device))
    optimizer = Optimizer(model, config)
    sync = gradient_sync(model, config, Ranks(mesh, config.bucket_mb))
    shape = (config.global_batch_size // group.size, m.seq_len + 1)
    drawn = torch.randint(m.vocab_size, shape, generator=torch.Generator().manual_seed(group.rank)).to(device)
    tokens, targets = drawn[:, :-1], drawn[:, 1:].contiguous()
    n_targets = config.global_batch_size * m.seq_len

    def step():
        sync.begin()
        for first in range(0, len(tokens), config.micro_batch_size):
            rows = slice(first, first + config.micro_batch_size)
            if rows.stop == len(tokens):
                sync.last_micro_batch()
            loss = model.lm_head.loss(model(tokens[rows]), targets[rows]) / n_targets
            loss.backward()
        sync.finish()
        optimizer.step(config.lr, optimizer.grad_norm())
        optimizer.zero_grad()

    return step


def measure(step: Callable[[], None], group: Group, n_steps: int) -> dict[str, float]:
    """Calls, bytes, seconds waited and seconds of one step: the mean of `n_steps` and of all ranks."""
    finished = torch.cuda.synchronize if group.device.type == "cuda" else lambda: None
    finished()
    group.ledger.take()
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    finished()
    seconds = time.perf_counter() - start
    taken = group.ledger.take()
    calls, n_bytes = (sum(taken[key]["dp"].values()) for key in ("calls", "traffic"))
    sums = sum_over(group, calls, n_bytes, taken["wait_seconds"].get("dp", 0.0), seconds)  # also lets the ranks meet
    return dict(zip(COLUMNS, (total / n_steps / group.size for total in sums), strict=True))


def summary(rounds: list[dict[str, dict[str, float]]]) -> str:
    """The table and the verdict, from what `measure` returned by [round][mode]."""
    rows = [["--sync", "calls a step", "sent a step", "exposed (waiting)", "step time"]]
    for mode in MODES:
        calls, n_bytes, waited, seconds = (median(measured[mode][key] for measured in rounds) for key in COLUMNS)
        exposed = "-" if mode == "torch" else f"{1e3 * waited:.2f} ms"
        rows.append([mode, f"{calls:g}", human(n_bytes), exposed, f"{1e3 * seconds:.2f} ms"])
    ratios = sorted(measured["torch"]["seconds"] / measured["bucket"]["seconds"] for measured in rounds)
    return (
        f"{table(rows)}\nmedians of {len(rounds)} rounds; DDP waits inside backward, where it cannot be seen\n\n"
        f"DDP time / bucket time: median {median(ratios):.3f}, "
        f"rounds from {ratios[0]:.3f} to {ratios[-1]:.3f} (the aim: at least 0.95)"
    )


def work(rank: int, config: Config, folder: str):
    """One rank's part; rank 0 prints."""
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.ranks))
    torch.set_num_threads(1)
    device = choose_device(config.device)
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= config.ranks
    backend = config.backend if config.backend != "auto" else "nccl" if own_gpu else "gloo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, meeting, timedelta(minutes=5), world_size=config.ranks, rank=rank)
    with open_mesh({"dp": config.ranks}, device, backend) as mesh:
        steps = {mode: train_step(step_config(config, mode), mesh) for mode in MODES}
        rounds = []
        for turn in range(config.rounds + 1):
            order = MODES if turn % 2 else MODES[::-1]
            rounds.append({mode: measure(steps[mode], mesh["dp"], config.steps) for mode in order})
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, one thread each"
        print(
            f"{config.ranks} ranks ({backend}) on {where}; {config.model}, {config.dtype}, {config.micro_batches} "
            f"micro-batches of {config.micro_batch_size} a rank, buckets of {config.bucket_mb:g} MiB\n"
        )
        print(summary(rounds[1:]), flush=True)  # the first round warmed up
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still holds a tensor would abort an interpreter that shuts down


def step_config(config: Config, mode: str) -> step02.Config:
    """Step 2's flags for one mode."""
    return step02.Config(
        model=config.model,
        sync=mode,
        bucket_mb=config.bucket_mb,
        dtype=config.dtype,
        device=config.device,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.ranks * config.micro_batches * config.micro_batch_size,
    )


def bench(config: Config):
    """Check the flags, start the ranks, wait for them."""
    for name, least in dict(ranks=2, steps=1, rounds=1, micro_batches=1, micro_batch_size=1).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    for mode in MODES:
        check_dp(step_config(config, mode), config.ranks)
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (config, folder), nprocs=config.ranks)
        except torch.multiprocessing.ProcessRaisedException as error:
            sys.exit(str(error))  # the rank's traceback


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
