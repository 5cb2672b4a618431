"""What a run saves and when, how another one goes on from it, and how a run ends early.

A checkpoint holds what the next step depends on: masters, the update rule's state, buffers, and the number of the step,
from which batch and learning rate follow. What a variant keeps besides has two methods: `state()` returns what JSON can
hold, alike on all ranks, and `restore(state)` takes it again.

A disk that is full costs no run: a checkpoint that cannot be written is left out, with a warning, unless it would be
the last. Two are kept, and a third is there while it is written.

Ctrl-C and SIGTERM: the step is finished, saved, and the run ends. Under torchrun --max-restarts N a job whose rank dies
is started anew; with --resume auto it then goes on from its last checkpoint, also with fewer ranks.
"""

import dataclasses
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import UserError
from common.trainer import Run
from services.boxes import masters, pieces, take
from services.checkpoint import Checkpoint, Saver, find
from services.launch import agree
from services.predictions import moment_bytes, shape
from services.tables import human
from theory.shapes import total_weights
from variants import Parts


@dataclass
class Flags:
    """Checkpoints (services/resume.py)."""

    save_every: int = 100  # steps between checkpoints (and one at the end); 0: only when interrupted
    save_async: bool = False  # write checkpoints in the background, while training goes on
    resume: str = ""  # run directory or checkpoint to go on from; auto: the newest in --out, if there is one
    stop_after: int = 0  # end after this step of the same schedule, as a pre-empted job would; 0: at the end


def goes_on(run: Run) -> bool:
    """Whether a run writes into the directory that it resumes."""
    where = run.config.resume
    return where == "auto" or (bool(where) and Path(where).resolve().is_relative_to(run.out.resolve()))


def move_aside(run: Run) -> str:
    """Rank 0, before the run directory is opened: an earlier run's gets another name, unless this run goes on there.

    Returns the metrics that are to be kept. Raises UserError if the directory cannot be written.
    """
    metrics = run.out / "metrics.jsonl"
    try:
        if metrics.exists() and goes_on(run):
            return metrics.read_text()
        if metrics.exists():
            aside = next(p for n in range(1, 10**6) if not (p := Path(f"{run.out}.{n}")).exists())
            run.out.rename(aside)
            print(f"the earlier run in {run.out} is now {aside}")
        run.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {run.out}: cannot be written ({error.strerror})") from error
    return ""


class Keeper:
    """Saves a run, from its first step to its last; knows when it is to end."""

    def __init__(self, run: Run):
        self.run, self.config = run, run.config
        self.signalled, self.done, self.saver = 0.0, 0, Saver(run.out)
        self.end = min(self.config.steps, self.config.stop_after or self.config.steps)
        self.handlers = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(self, *_):
        """Signal handler: leave after this step; a second Ctrl-C leaves at once."""
        if self.signalled and time.monotonic() - self.signalled > 2:  # launchers repeat the first one at once
            raise KeyboardInterrupt
        self.signalled = self.signalled or time.monotonic()

    def close(self):
        """Give the signals back."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def start(self, parts: Parts, kept: str, weights_only: bool = False) -> int:
        """Take over what --resume names, and the rows of `kept` metrics that led there; returns the steps done.

        A collective. Raises UserError if the checkpoint is of another model, dtype or update rule.
        """
        self.parts = parts
        saved = find(self.config.resume, self.run.out) if self.config.resume else None
        if saved is not None:
            imported = "optimizer" not in saved.index["config"]
            require_fit(saved, parts, self.config, weights_only or imported)
            take(parts, saved, moments=not weights_only)
            for name, state in saved.index["state"].items():
                if state is not None and hasattr(parts.kept.get(name), "restore"):
                    parts.kept[name].restore(state)
            self.done = saved.index["step"]
        if self.run.first and not weights_only:
            rows = [row for row in map(json.loads, kept.splitlines()) if row["step"] <= self.done]
            self.run.history.extend(rows)
            self.run.file.write("".join(json.dumps(row) + "\n" for row in rows))
            self.run.file.flush()
            if saved is not None:
                print(f"going on from {saved.path}", flush=True)
        return self.done

    def leave(self, step: int) -> bool:
        """After a step: save if it is time; whether the run ends here. All ranks decide alike."""
        stopping, writing = agree(bool(self.signalled), self.saver.writing())
        last = stopping or step + 1 >= self.end
        every = self.config.save_every
        saving = stopping or (every and (last or (step + 1) % every == 0))
        if self.saver.busy and (saving or not writing):
            self.attempt(self.saver.settle)
        if saving:
            self.attempt(partial(self.save, step + 1), last)
        if last:
            self.saver.settle()
        if stopping and self.run.first:
            print(f"interrupted after step {step + 1}; go on with --resume {self.run.out}", flush=True)
        return last

    def attempt(self, what: Callable, last: bool = False):
        """Save something. What fails fails on all ranks: it ends the run if that is over, else all go on."""
        try:
            what()
        except UserError as error:
            if last:
                raise
            if self.run.first:
                print(f"warning: {error}. Training goes on", file=sys.stderr, flush=True)

    def room(self) -> str:
        """A line, if three checkpoints take more than half of what is free in `--out`; else ""."""
        masters = list(self.parts.optimizer.masters.values())
        numbers, n_bytes = sum(m.numel() for m in masters), sum(m.nbytes for m in masters)
        if not numbers or not self.config.save_every:
            return ""
        each = (
            (n_bytes + moment_bytes(self.config, self.parts)) / numbers * total_weights(shape(self.config, self.parts))
        )
        free = shutil.disk_usage(self.run.out).free
        if 3 * each < free / 2:
            return ""
        enough = "" if 3 * each < free else ", which is too little: see --save-every and --out"
        return f"checkpoints: about {human(each)} each, three for a moment; {human(free)} are free{enough}"

    def save(self, step: int):
        """Write a checkpoint after so many steps. A collective."""
        config, parts = self.config, self.parts
        state = {name: kept.state() for name, kept in parts.kept.items() if hasattr(kept, "state")}
        about = dict(config=dataclasses.asdict(config), model=dataclasses.asdict(parts.model.config), state=state)
        about["dtype"] = str(next(parts.model.parameters()).dtype)
        self.saver.save(step, pieces(parts), about, config.save_async)


def require_fit(saved: Checkpoint, parts: Parts, config: Any, weights_only: bool):
    """Refuse a checkpoint of another model and, unless weights alone count, precision or rule. Raises UserError."""
    index, where = saved.index, f"--resume {saved.path}"
    advice = f"use --model {index['config']['model']} and the overrides it was trained with"
    for key, value in dataclasses.asdict(parts.model.config).items():
        if key != "seq_len" and index["model"].get(key) != value:
            raise UserError(f"{where}: its {key} is {index['model'].get(key)}, not {value}; {advice}")
    stored = index["tensors"]["master"]
    for master in masters(parts):
        if tuple(stored.get(master.name, {}).get("shape", ())) != master.whole_shape:
            raise UserError(f"{where}: its {master.name} does not fit this model; {advice}")
    ours = dict(optimizer=config.optimizer, dtype=str(next(parts.model.parameters()).dtype))
    theirs = dict(optimizer=index["config"].get("optimizer"), dtype=index["dtype"])
    for flag in ours if not weights_only else ():
        if theirs[flag] != ours[flag]:
            raise UserError(f"{where} was written with {flag} {theirs[flag]}, not {ours[flag]}: set --{flag}")
