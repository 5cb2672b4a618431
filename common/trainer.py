"""Flags, and what a run shows and saves: a progress bar, metrics.jsonl, loss.png and checkpoints.

    with Run(config) as run:                      at the end, draws loss.png
        for step in run.steps(model=..., ...):    restores and saves these parts; opens the run directory; yields 0, ...
            run.require_finite(step, loss=..., ...)   before the update
            run.record(step, tokens, loss=..., ...)   one line of metrics.jsonl

OUT/checkpoints/step-00000050/rank-00003.pt has the step, the flags and, by name, the masters that rank 3 updates, with
their moments. Batches depend on no earlier step, so a resumed run computes the same bits as an uninterrupted one. Other
code can subclass `Run` to monitor the parts, the numbers and the end of a run.
"""

import dataclasses
import inspect
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import UserError, checkpoint, comm
from common.flags import parse

COMPUTE = [
    *("model", "dataset", "steps", "global_batch_size", "optimizer", "lr", "warmup_steps", "weight_decay"),
    *("grad_clip", "seed", "experts", "experts_per_token", "expert_dim", "moe_every", "dense_layers", "balance"),
    "aux_loss_coeff",
]
DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def choose_device(config: Any) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of a run. auto: this process's GPU if there is one; bf16 if that GPU supports it, else fp32."""
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda" and device.index >= (gpus := torch.cuda.device_count()):
        fewer = "lower --nproc_per_node, or " if gpus else ""
        raise UserError(f"each rank needs a GPU of its own, and {gpus} are here: {fewer}use --device cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    fast = kind == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)  # older GPUs emulate bf16
    return device, DTYPES[config.dtype if config.dtype != "auto" else "bf16" if fast else "fp32"]


class Run(AbstractContextManager):
    """The files and progress bar of a training run. Each rank saves its shards; rank 0 writes everything else."""

    def __init__(self, config: Any):
        self.config, self.history, self.began = config, [], 0.0
        self.out = Path(config.out or f"runs/{Path(inspect.getfile(type(config))).stem}")
        self.rank = int(os.environ.get("RANK", 0))
        self.first = self.rank == 0
        self.flags = dataclasses.asdict(config) | dict(nproc_per_node=int(os.environ.get("WORLD_SIZE", 1)))

    def __exit__(self, error: type | None, *_):
        """Draw loss.png, unless an error ended the run."""
        if self.first and error is None and self.history:
            draw_loss(self.history, self.out / "loss.png")

    def save(self, step: int, model: Any, optimizer: Any, **_: Any):
        """Save a checkpoint if one is due. All ranks call this; the folder gets its final name when all have saved."""
        if not self.config.save_every or (step % self.config.save_every and step < self.config.steps):
            return
        folder = self.out / f"checkpoints/step-{step:08d}"
        hidden = folder.with_name(f".{folder.name}")
        hidden.mkdir(parents=True, exist_ok=True)
        checkpoint.save(hidden / f"rank-{self.rank:05d}.pt", step, self.flags, model, optimizer)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        if self.rank == 0:
            hidden.rename(folder)

    def restore(self, model: Any, optimizer: Any, **_: Any) -> int:
        """Restore a checkpoint of --resume, saved in any layout; returns the number of steps done. Raises UserError."""
        where = Path(self.config.resume).resolve()
        path = max(where.glob("checkpoints/step-*"), default=where) if self.config.resume else None
        if path and not (path / "rank-00000.pt").exists():
            raise UserError(f"--resume {path}: no checkpoint is there")
        if max(self.out.resolve().glob("checkpoints/step-*"), default=path) != path:
            raise UserError(f"--out {self.out} has checkpoints: set --resume {self.out} to continue, or another --out")
        if path is None:
            return 0
        theirs = torch.load(path / "rank-00000.pt", mmap=True)["flags"]
        for name in COMPUTE:
            if theirs.get(name) != self.flags.get(name):
                raise UserError(f"--resume {path}: --{name.replace('_', '-')} was {theirs[name]}: keep it")
        done = checkpoint.load(path, model, optimizer)
        if self.first:
            lines = (path.parents[1] / "metrics.jsonl").read_text().splitlines()
            self.history = [json.loads(line) for line in lines[:done]]
        return done

    def begin(self):
        """Create the run directory. After --resume, metrics.jsonl begins with the rows of the steps already done."""
        if self.first:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "config.json").write_text(json.dumps(self.flags, indent=1))
            (self.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self.history))

    def steps(self, **parts: Any) -> Iterator[int]:
        """Yield the numbers of the steps. `parts`: the objects that make up this run (model, optimizer, mesh, ...)."""
        done = self.restore(**parts)
        self.begin()  # only now: a launch that fails earlier does not touch an earlier run's files
        if self.first:
            self.introduce(**parts)
        self.mesh = parts.get("mesh")
        self.take_sent()  # what was sent before the first step
        with tqdm(initial=done, total=self.config.steps, unit="step", disable=not self.first) as self.bar:
            for step in range(done, self.config.steps):
                self.began = time.perf_counter()
                yield step
                self.save(step + 1, **parts)

    def introduce(self, model: torch.nn.Module, mesh: comm.Mesh | None = None, **_: Any):
        """Print the devices, the mesh, and rank 0's number of parameters."""
        ranks, some = (mesh.world if mesh else 1), next(model.parameters())
        backend = f", {torch.distributed.get_backend()}" if ranks > 1 else ""
        print(f"device: {ranks} x {some.device.type}{backend}; {some.dtype}")
        print("mesh: " + (" x ".join(f"{dim} {size}" for dim, size in mesh.sizes.items()) if mesh else "none"))
        print(f"parameters: {sum(param.numel() for param in model.parameters()):,} on rank 0", flush=True)

    def take_sent(self) -> dict[str, int]:
        """The bytes that this rank has sent since the last call, by group."""
        sent: Counter = Counter()
        if self.mesh is not None:
            for (group, _), nbytes in self.mesh.sent.items():
                sent[group] += nbytes
            self.mesh.sent.clear()
        return dict(sent)

    def require_finite(self, step: int, **numbers: float):
        """Raise UserError if one of `numbers` is inf or nan, before the update makes weights nan."""
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise UserError(f"step {step + 1}: the {name.replace('_', ' ')} is {value}: lower --lr")

    def record(self, step: int, tokens: int, **numbers: float):
        """Record a step: its number of `tokens`, over all ranks, and other numbers by name. Rank 0 writes them."""
        seconds = time.perf_counter() - self.began
        row = dict(step=step + 1, **numbers, tokens=tokens, tokens_per_second=tokens / seconds, seconds=seconds)
        self.history.append(row | dict(sent=self.take_sent()))
        if self.first:
            self.bar.set_postfix_str(f"loss {row['loss']:.4f}  {row['tokens_per_second']:,.0f} tok/s", refresh=False)
            self.bar.update()
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(self.history[-1]) + "\n")


def draw_loss(history: list[dict], target: Path):
    """Draw the loss over the steps into the file `target`."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots(subplot_kw=dict(xlabel="step", ylabel="loss (nats per token)"))
    axes.plot([row["step"] for row in history], [row["loss"] for row in history])
    figure.savefig(target, dpi=120)


def main(train: Callable[[Any, Run], None], cls: type, run_type: type = Run):
    """Parse the flags and train. On an error that the user can fix, print one line and exit with status 2."""
    several, status, run = int(os.environ.get("WORLD_SIZE", 1)) > 1, 0, None
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    try:
        if left and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise UserError(f"no launcher has set {', '.join(left)}: use torchrun, or first unset {' '.join(left)}")
        config = parse(cls)
        with run_type(config) as run:
            train(config, run)
        if torch.distributed.is_initialized():  # not after an error: the other ranks may be gone
            torch.distributed.destroy_process_group()
    except (UserError, OSError, torch.distributed.DistError) as error:
        if getattr(run, "began", 0) and not isinstance(error, UserError):
            raise  # an error of files or network is the user's to fix only before training begins
        if several and int(os.environ.get("RANK", 0)):
            time.sleep(10)  # rank 0 most likely reports the same error; torchrun then ends this process
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    sys.stdout.flush(), sys.stderr.flush()
    if several:  # a normal shutdown of Python can abort while gloo's threads run
        os._exit(status)
    sys.exit(status)
