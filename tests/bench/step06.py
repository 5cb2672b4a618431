"""Pipeline parallelism: step time of our schedules against those of `torch.distributed.pipelining`.

    python -m tests.bench step06                                              four ranks on a CPU
    python -m tests.bench step06 --device cuda --model smollm-135m            a GPU for each

Both sides run forward and backward of one batch through the same stages: step 6's chunks of the same decoder, with
embedding, head and loss, the same weights, the same micro-batches. Losses and all gradients are compared first. Step 6
runs its lists with its executor; PyTorch its schedule with its own (`PipelineStage`, gradients not scaled). A step ends
when every rank knows the loss, as it does in training. The two take turns, first one then the other in front; a ratio
compares neighbours of the same round. Core time is that ratio for the CPU seconds of all ranks together, which hardly
depend on what else the machine does.

Where PyTorch has no schedule like ours, or the other way round, the closest are compared:

    InterleavedZeroBubble   has two stages on each rank; zb-h1 and zb-h2 have one, with twice the layers
    DualPipeV               has two stages on each rank, in a V; dualpipe has two whole copies of the weights, whose
                            gradients are summed over pairs of ranks, which is part of its step here

With fewer cores than ranks, ranks take turns to compute and most idle time is filled by others: then the ratio shows
what the executors cost, and hardly what the order of the work does.
"""

import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import step06_pipeline as step06
from common import UserError
from common.comm import Mesh, sum_over
from common.layout import materialize, sum_partial_gradients
from common.model import Decoder, ModelConfig
from common.schedules import chunks_per_rank
from common.trainer import Trainer, start
from services.checks import check_pp
from services.devices import choose_device
from services.flags import main as run_main
from services.launch import gather_objects
from services.tables import table
from tests.equivalence import difference

PAIRS = [  # PyTorch's schedule, the schedule that cuts the model in the same way, ours
    ("GPipe", "afab", "afab"),
    ("1F1B", "1f1b", "1f1b"),
    ("Interleaved1F1B", "interleaved", "interleaved"),
    ("InterleavedZeroBubble", "interleaved", "zb-h1"),
    ("InterleavedZeroBubble", "interleaved", "zb-h2"),
    ("ZBVZeroBubble", "zbv", "zbv"),
    ("DualPipeV", "zbv", "dualpipe"),
]


@dataclass
class Config:
    """Flags of this benchmark."""

    pp: int = 4  # processes to start, one for each pipeline rank
    model: str = "tiny"  # preset of common/model.py
    n_layers: int = 0  # layers; 0: two for each rank
    seq_len: int | None = None  # override the sequence length
    dim: int | None = None  # override the width of the residual stream
    chunks: int = 2  # stages on each rank of the interleaved schedules
    micro_batches: int = 8  # of a step
    micro_batch_size: int = 2  # sequences of a micro-batch
    rounds: int = 12  # rounds to measure, after one to warm up
    steps: int = 1  # steps of each contestant in a round
    only: str = ""  # compare only schedules of ours with this in their name
    dtype: Literal["fp32", "fp64"] = "fp32"  # of weights and compute
    device: Literal["auto", "cuda", "cpu"] = "cpu"  # where to compute


def step06_config(config: Config, schedule: str) -> step06.Config:
    """Step 6's flags for one schedule."""
    own = dict(seq_len=config.seq_len, dim=config.dim)
    return step06.Config(
        model=config.model,
        n_layers=config.n_layers or 2 * config.pp,
        tied=False,
        pp=config.pp,
        cp=1,
        tp=1,
        zero=0,
        sync="naive",
        schedule=schedule,
        chunks=chunks_per_rank(schedule) or config.chunks,
        dtype=config.dtype,
        device=config.device,
        micro_batch_size=config.micro_batch_size,
        global_batch_size=config.micro_batch_size * config.micro_batches,
        **{name: value for name, value in own.items() if value is not None},
    )


def draw_batch(config: Config, m: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets int64 [sequences, seq], the same on all ranks."""
    shape = (config.micro_batches * config.micro_batch_size, m.seq_len + 1)
    drawn = torch.randint(m.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Ours:
    """Step 6's executor; `step()` is forward and backward of a batch and returns the loss, 0 where there is none."""

    def __init__(self, schedule: str, config: Config, run: Trainer):
        own, self.mesh = step06_config(config, schedule), run.mesh
        plan = run.plan_pipeline()
        with torch.device("meta"):
            self.model = Decoder(run.shape)
        chunks = step06.keep_stage(self.model, run.mesh, plan)
        store = step06.split_backward(self.model, plan)
        positions = torch.arange(run.shape.seq_len, device=run.device)
        self.pipeline = step06.Pipeline(self.model, chunks, plan, positions, store, own, run)
        tokens, targets = draw_batch(config, run.shape, run.device)
        self.tokens, self.targets = (x.split(config.micro_batch_size) for x in (tokens, targets))
        self.scale = 1 / tokens_of(own)

    def step(self) -> Tensor:
        """The loss of the batch on the rank that has it."""
        total = self.pipeline.step(self.tokens, self.targets, self.scale, None)
        sum_partial_gradients(self.pipeline.optimizer, self.mesh, ["mirror"])
        return total


class Stage(nn.Module):
    """A chunk of step 6 as a module, as `PipelineStage` wants it; the loss is computed outside."""

    def __init__(self, chunk: step06.Chunk, positions: Tensor):
        super().__init__()
        trunk = chunk.model.model
        ends = [trunk.embed_tokens] * chunk.first + [trunk.norm, chunk.model.lm_head] * chunk.last
        self.chunk, self.positions, self.parts = chunk, positions, nn.ModuleList([*chunk.layers.values(), *ends])

    def forward(self, x: Tensor) -> Tensor:
        """As the chunk's; the last one returns the normed hidden states."""
        return self.chunk(x, self.positions, lambda hidden: hidden)


class Theirs:
    """PyTorch's schedule and runtime on the same stages."""

    def __init__(self, name: str, cut: str, config: Config, run: Trainer):
        own, shape, mesh, self.device = step06_config(config, cut), run.shape, run.mesh, run.device
        plan = run.plan_pipeline()
        with torch.device("meta"):
            self.model = Decoder(shape)
        chunks, (stages_in_order,) = step06.keep_stage(self.model, mesh, plan), plan.placements
        materialize(self.model, own.seed, run.device, run.dtype)
        positions, scale = torch.arange(shape.seq_len, device=run.device), 1 / tokens_of(own)
        numbers = sorted((chunk, stage) for stage, (rank, chunk) in enumerate(stages_in_order) if rank == mesh.rank)
        stages = [
            PipelineStage(
                Stage(chunks[chunk], positions), stage, len(stages_in_order), run.device, group=mesh["pp"].handle
            )
            for chunk, stage in numbers
        ]
        kind = getattr(schedules, f"Schedule{name}")
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(
            stages[0] if single else stages,
            config.micro_batches,
            loss_fn=lambda hidden, targets: self.model.lm_head.loss(hidden, targets) * scale,
            scale_grads=False,
        )
        tokens, targets = draw_batch(config, shape, run.device)
        self.inputs = [tokens] if chunks[0].first else []
        self.target = targets if any(chunk.last for chunk in chunks) else None

    def step(self) -> Tensor:
        """The loss of the batch on the rank that has it."""
        losses: list[Tensor] = []
        self.schedule.step(*self.inputs, target=self.target, losses=losses, return_outputs=False)
        return sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))


def tokens_of(own: step06.Config) -> int:
    """The targets of a batch."""
    return own.global_batch_size * own.model_config().seq_len


def measure(contestant: Ours | Theirs, mesh: Mesh, n_steps: int) -> tuple[float, float, float]:
    """Seconds of one step until all ranks are done, and of all ranks' cores, means of `n_steps`; and the loss."""
    for param in contestant.model.parameters():
        param.grad = None
    sum_over(mesh["pp"], 0.0)  # all start at once
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        (loss,) = sum_over(mesh["pp"], contestant.step())  # which waits for the GPU, too
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    (busy,) = sum_over(mesh["pp"], busy)
    return seconds / n_steps, busy / n_steps, loss


def require_same_results(ours: Ours, theirs: Theirs, mesh: Mesh, bound: float):
    """Raise RuntimeError if a loss or a gradient of the two differs, after one step of each."""
    losses = [measure(contestant, mesh, 1)[2] for contestant in (ours, theirs)]
    if not abs(losses[0] - losses[1]) <= bound * abs(losses[0]):
        raise RuntimeError(f"the losses differ: {losses}")
    found: list[dict[str, Tensor]] = [{}, {}]
    for contestant, gradients in zip((ours, theirs), found, strict=True):
        own = {name: param.grad.cpu() for name, param in contestant.model.named_parameters()}
        for part in gather_objects(own, mesh):
            gradients.update(part)
    if found[0].keys() != found[1].keys():
        raise RuntimeError(f"only one of the two has {sorted(found[0].keys() ^ found[1].keys())}")
    for name, gradient in found[0].items():
        if not difference(gradient, found[1][name]) < bound:
            raise RuntimeError(f"the gradients of {name} differ by {difference(gradient, found[1][name]):.3g}")


def work(rank: int, config: Config, folder: str):
    """One rank's part; rank 0 prints."""
    os.environ |= dict(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(config.pp))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # of PyTorch's pipelining
    device = choose_device(config.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    meeting = f"file://{folder}/rendezvous"
    dist.init_process_group(backend, meeting, timedelta(minutes=5), world_size=config.pp, rank=rank)
    load = os.getloadavg()[0]
    rows = [["PyTorch", "step 6", "PyTorch's step", "step 6's", "theirs / ours", "rounds from .. to", "core time"]]
    for name, cut, schedule in PAIRS:
        if config.only not in schedule:
            continue
        with start(step06_config(config, schedule)) as run, start(step06_config(config, cut)) as other:
            mesh = run.mesh
            contestants = {"ours": Ours(schedule, config, run), "theirs": Theirs(name, cut, config, other)}
            require_same_results(*contestants.values(), mesh, {"fp32": 1e-4, "fp64": 1e-10}[config.dtype])
            rounds = []
            for turn in range(config.rounds + 1):
                order = list(contestants) if turn % 2 else list(contestants)[::-1]
                rounds.append({who: measure(contestants[who], mesh, config.steps) for who in order})
            del rounds[0]  # warmed up
            ratios, cores = (sorted(r["theirs"][i] / r["ours"][i] for r in rounds) for i in (0, 1))
            times = [f"{1e3 * median(r[who][0] for r in rounds):.1f} ms" for who in ("theirs", "ours")]
            between = f"{ratios[0]:.3f} .. {ratios[-1]:.3f}"
            rows.append([name, schedule, *times, f"{median(ratios):.3f}", between, f"{median(cores):.3f}"])
            if rank == 0:
                print(*rows[-1], f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    if rank == 0:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
        m = step06_config(config, "1f1b").model_config()
        print(
            f"{config.model} ({m.n_layers} layers), forward and backward of {config.micro_batches} micro-batches of "
            f"{config.micro_batch_size} x {m.seq_len} tokens, {config.dtype}; pp {config.pp} ({backend}) on {where}\n"
        )
        print(
            f"{table(rows)}\nmedians of {config.rounds} rounds (the aim: at least 1.0); load average before {load:.1f}"
        )
        sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # a gloo thread that still holds a tensor would abort an interpreter that shuts down


def bench(config: Config):
    """Check the flags, start the ranks, wait for them."""
    for name, least in dict(pp=2, chunks=2, micro_batches=1, micro_batch_size=1, rounds=1, steps=1).items():
        if getattr(config, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}: it must be at least {least}")
    if config.micro_batches % config.pp or config.micro_batches < 2 * config.pp:
        raise UserError(
            f"--micro-batches {config.micro_batches}: PyTorch's schedules want a multiple of --pp {config.pp}, "
            "DualPipeV at least twice that"
        )
    for _, cut, schedule in PAIRS:
        for own in (cut, schedule):
            check_pp(step06_config(config, own), config.pp)
    if choose_device(config.device).type == "cuda" and torch.cuda.device_count() < config.pp:
        raise UserError(
            f"--device cuda needs a GPU for each of --pp {config.pp} ranks: PyTorch's stages send from GPUs"
        )
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(work, (config, folder), nprocs=config.pp)
        except torch.multiprocessing.ProcessRaisedException as error:
            sys.exit(str(error))  # the rank's traceback


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
