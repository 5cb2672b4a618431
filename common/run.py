"""The flags of a run; and `Run`: its directory, progress bar and checkpoints.

    train(config, Run(config))                                  in `main` (launch.py)

    for step in run.steps(model=..., optimizer=..., ...):       in `train`: yields 0, 1, ...
        run.require_finite(step, loss=..., grad_norm=...)       before the update
        run.record(step, tokens, loss=..., ...)                 after it

With step 1, read only this much of the docstring, and what common/__init__.py names.

The run's directory has

    OUT/config.json          the flags, and the number of ranks
        metrics.jsonl        a line for each step: its number, from 1, and what `train` records
                             (loss, grad_norm, lr); tokens, tokens_per_second, seconds; `sent`,
                             rank 0's bytes by group; on a GPU peak_memory and, if its peak
                             FLOP/s is known, mfu (meter.py)
        loss.png             drawn at the end
        checkpoints/         with --save-every, and when a signal ends the run (storage.py)
        trace-RANK.json.gz   with --profile; on a GPU also memory-RANK.pickle (profiling.py)
        nccl-RANK            on several GPUs, if a step hangs (watch.py)

resume.py says how a run is resumed, and watch.py how a signal or a hanging step ends it early.
"""

import dataclasses
import inspect
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common import UserError
from common.checkpoint import Checkpoint, pieces_of
from common.comm import Mesh
from common.data import Data
from common.device import DTYPES
from common.flags import flag
from common.meter import Meter, flops_per_token
from common.model import Decoder
from common.profiling import check_profile, make_profiler
from common.ranks import Ranks
from common.report import (
    append_row,
    create_files,
    draw_loss,
    gather_param_rows,
    introduction,
    progress,
    where_not_finite,
)
from common.resume import check_flags, choose_checkpoint
from common.storage import save_checkpoint
from common.watch import noting_signals, time_limit


@dataclasses.dataclass
class RunConfig:
    """Flags of the run.

    They say where it computes, what it reads and writes, and when it gives up.
    """

    device: str = flag("auto", "where to compute", ("auto", "cuda", "cpu"))
    dtype: str = flag(
        "auto", "of weights and computation; auto: bf16 on a GPU that has it, else fp32", DTYPES
    )
    out: str = flag("", "run directory; default: runs/ and the name of the script")
    save_every: int = flag(
        0, "steps between checkpoints (and one after the last step); 0: only after a signal"
    )
    resume: str = flag(
        "", "run directory or checkpoint to resume; auto: the newest undamaged one in --out, if any"
    )
    timeout: float = flag(600.0, "seconds that a step may take; then the run ends; 0: no limit")
    profile: int = flag(0, "steps to trace, after the first two; 0: none")


class Run:
    """What surrounds the steps of a run: its files, progress bar, checkpoints and signals. Each
    rank writes its part of a checkpoint and the files with RANK in their name; rank 0 writes the
    others.
    """

    def __init__(self, config: Any):
        self.config = config
        # The script that defines this Config. (sys.argv[0] may be another, such as pytest)
        script = Path(inspect.getfile(type(config))).stem
        self.out = Path(config.out or f"runs/{script}")
        # From torchrun, because ranks are not connected yet
        self.rank = int(os.environ.get("RANK", 0))
        self.is_rank_0 = self.rank == 0
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        # For config.json and checkpoints; the number of ranks is no flag
        self.flags = dataclasses.asdict(config) | {"ranks": self.world}
        # A row for each step, also for those before --resume. Rank 0's are in metrics.jsonl
        self.history: list[dict] = []
        # The checkpoint that this run has saved last, or has resumed
        self.last_checkpoint: Path | None = None
        # Declared here, set by `set_up`. (`steps` sets model, optimizer, data, mesh and others; and
        # step_began, the time at which the current step began)
        self.ranks: Ranks
        self.meter: Meter
        self.bar: tqdm
        self.fingerprint: str  # of the data

    # The loop

    def steps(
        self, model: Decoder, optimizer: Any, data: Data, mesh: Mesh | None = None, **others: Any
    ) -> Iterator[int]:
        """Yield the numbers of the steps, 0, 1, ... A generator: at each `yield` the body of the
        caller's loop runs. What else it does, and when:

            before the first step    restores a checkpoint, if --resume asks for it; the first
                                     number is then the number of steps already done. Writes
                                     config.json, and prints the devices, the mesh, the data and the
                                     parameters
            during a step            watches that it does not hang (--timeout)
            after some steps         saves a checkpoint (--save-every), or writes a trace
            after a signal           saves a checkpoint at the end of the step, and ends (of the
                                     next step, if the signal comes while a checkpoint is saved)
            at the end               draws loss.png

        `mesh`: from step 2 on. `others`, such as the sync, are kept for a subclass: `Run` itself
        does not use them. Raises UserError.
        """
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.mesh = mesh or Mesh(dp=1)
        self.others = others
        done = self.set_up()
        profiler = make_profiler(self.config.profile, self.out, self.rank, self.meter.is_gpu)
        tracing = nullcontext() if profiler is None else profiler
        # However the loop ends, `with` closes the bar and the trace, and restores the handlers of
        # signals. (If the caller's body raises, Python closes this generator, and so leaves `with`)
        with self.bar, tracing, noting_signals() as signals:
            stopping = False
            for step in range(done, self.config.steps):
                self.step_began = time.perf_counter()
                with time_limit(self.config.timeout, self.out):
                    yield step
                    # A signal has only been noted: if one rank has received it, all end after this
                    # step. The limit includes this line, because another rank may hang
                    stopping = any(self.ranks.all_gather(bool(signals)))
                self.write_what_is_due(step + 1, stopping, profiler)
                if stopping:
                    break
        if self.is_rank_0 and self.history:
            draw_loss(self.out, self.history)
        if stopping and step + 1 < self.config.steps:
            self.say(
                "a signal has ended the run: to continue it, add --resume auto to the same command"
            )

    def require_finite(self, step: int, **numbers: float):
        """Raise UserError if a number is inf or nan, before the update makes weights nan.

        All ranks must call it with the same numbers, because it gathers the message from all.
        """
        wrong = [name for name, value in numbers.items() if not math.isfinite(value)]
        if wrong:
            name = wrong[0]
            what = name.replace("_", " ")
            where = where_not_finite(self.optimizer.gradients(), self.ranks)
            raise UserError(
                f"step {step + 1}: the {what} is {numbers[name]}: lower --lr. (If a run "
                "on one rank trains well with the same flags, it may be a bug in the sharding. Not "
                f"finite: {where})"
            )

    def record(self, step: int, tokens: int, **numbers: float):
        """Record a step: its `tokens`, of all ranks, and numbers by name, among them `loss`. Rank 0
        writes it.

        A step's seconds run from the `yield` of its number to this call: the time for saving and
        for writing a trace, between two steps, does not count. On a GPU they include the update,
        because the `loss.item()` in this call's arguments waits until the GPU has done all that was
        launched before.
        """
        seconds = time.perf_counter() - self.step_began
        rate = tokens / seconds
        row = dict(step=step + 1, **numbers, tokens=tokens, tokens_per_second=rate, seconds=seconds)
        row |= self.meter.measure(rate)
        row["sent"] = self.take_sent()
        self.history.append(row)
        if self.is_rank_0:
            append_row(self.out, row)
        self.bar.set_postfix_str(progress(row), refresh=False)
        self.bar.update()

    # Before the first step

    def set_up(self) -> int:
        """Compare the ranks' data and dtypes, restore a checkpoint, begin the run's files, and
        print the introduction; return the number of steps done. Raises UserError.
        """
        if self.world > 1 and not torch.distributed.is_initialized():  # step 1 never joins ranks
            raise UserError("--nproc_per_node: this script trains on one device: use step 2")
        self.ranks = Ranks()
        self.fingerprint = self.data.fingerprint()
        self.ranks.require_same(
            self.fingerprint, "--dataset: the fingerprints of its tokens differ"
        )
        dtype = next(self.model.parameters()).dtype
        # --dtype auto may choose differently on different GPUs
        self.ranks.require_same(dtype, "--dtype: the ranks have different ones, so choose one")
        done = self.restore()
        check_profile(self.config.profile, self.config.steps - done)
        # Only now: a launch that fails above must not touch the files of an earlier run
        what = f"--out {self.out}: cannot write"
        self.ranks.attempt(
            what, create_files, self.out, self.flags, self.history, only_on_rank_0=True
        )
        param_rows = gather_param_rows(self.model, self.mesh, self.ranks)
        self.meter = self.make_meter({name: row.whole for name, row in param_rows.items()})
        self.say(
            introduction(
                self.meter.device_name,
                self.data.summary,
                self.mesh,
                param_rows,
                self.model,
                self.optimizer,
            )
        )
        self.take_sent()  # metrics.jsonl does not count what the start has sent
        self.bar = tqdm(
            initial=done, total=self.config.steps, unit="step", disable=not self.is_rank_0
        )
        return done

    def make_meter(self, shapes: dict[str, tuple]) -> Meter:
        """The meter of this run. `shapes`: name -> shape, of all parameters of the model."""
        # Step 7's flag; in other steps a token visits the one MLP
        top_k = getattr(self.config, "experts_per_token", 1)
        flops = flops_per_token(shapes, self.model.config, top_k)
        param = next(self.model.parameters())
        return Meter(param.device, param.dtype, flops, self.world)

    def restore(self) -> int:
        """Restore what --resume selects, if anything; return the number of steps done.

        Raises UserError if --out has checkpoints that --resume does not continue, if no checkpoint
        is sound, or if the flags, the data or the model do not fit it.
        """
        folder = choose_checkpoint(self.config.resume, self.out, self.ranks)
        if folder is None:
            return 0
        self.last_checkpoint = folder
        saved = Checkpoint(folder)
        check_flags(saved, self.flags, self.fingerprint)
        saved.restore(self.model, self.optimizer)
        self.history = saved.about["history"]
        done = saved.about["step"]
        self.say(f"resuming from {folder}: {done} of {self.config.steps} steps are done")
        return done

    # After a step

    def write_what_is_due(self, done: int, stopping: bool, profiler: Any):
        """Write the trace and a checkpoint after `done` steps, if they are due."""
        if profiler is not None:
            profiler.step()  # after the last step of the trace, this writes it
        every = self.config.save_every
        due = every > 0 and (done % every == 0 or done == self.config.steps)
        if stopping or due:
            self.save(done)

    def save(self, done: int):
        """Save a checkpoint. All ranks call this. Raises UserError if one of them cannot write."""
        folder = self.out / f"checkpoints/step-{done:08d}"
        pieces = pieces_of(self.model, self.optimizer)
        save_checkpoint(folder, self.content(done), pieces, self.ranks, self.last_checkpoint)
        self.last_checkpoint = folder

    def content(self, done: int) -> dict[str, Any]:
        """What `save_checkpoint` gets besides the pieces."""
        history = self.history if self.is_rank_0 else []
        return dict(step=done, flags=self.flags, fingerprint=self.fingerprint, history=history)

    # Helpers

    def take_sent(self) -> dict[str, int]:
        """By group, the bytes sent by this rank since the last call, as comm.py counts them."""
        sent: Counter = Counter()
        for (group, _), nbytes in self.mesh.sent.items():  # _: which call sent them
            sent[group] += nbytes
        self.mesh.sent.clear()
        return dict(sent)

    def say(self, text: str):
        """Print on rank 0."""
        if self.is_rank_0:
            print(text, flush=True)
