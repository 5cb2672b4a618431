"""Saves checkpoints of a run, resumes a run from one, and ends a run early after a signal.

A checkpoint holds what the next step depends on: masters, the update rule's state, buffers, and the number of the step,
from which batch and learning rate follow. A technique with more state attaches an object with two methods:
`state()` returns the state, equal on all ranks and made of JSON's types, and `restore(state)` restores it.

If the disk is full, a run ends with an error of one line, and earlier checkpoints are untouched. A run keeps two
checkpoints, so the disk needs room for three.

After Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 (from a batch system), or the death of torchrun, a run finishes its step,
saves and ends. Under torchrun --max-restarts N a job is started again when a rank dies; with --resume auto it continues
from its last checkpoint, also with fewer ranks. Rank 0 locks the run directory, which other runs with extras respect.
"""

import ctypes
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from common import UserError
from common.trainer import Run
from extras.services.checkpoint import OWN, Checkpoint, Saver, find, on_ranks
from extras.services.pieces import pieces, take
from extras.services.plots import read_metrics
from extras.services.ranks import agree
from extras.variants import Parts

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@dataclass
class Flags:
    """Checkpoints. --resume auto: the newest in --out, if there is one; required: fail if there is none."""

    save_async: bool = False  # write checkpoints in the background, while training goes on
    stop_after: int = 0  # end after this step, as a pre-empted job would; the learning rate follows --steps


def hold(out: Path) -> IO:
    """Make a run directory, and lock it until the returned file is closed. Raises UserError if another run holds it."""
    out.mkdir(parents=True, exist_ok=True)
    file = (out / ".lock").open("a+")
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock

        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"--out {out} is in use by {file.read() or 'another run'}: choose another --out") from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks: no run is refused
    file.truncate(0)
    print(f"process {os.getpid()} on host {socket.gethostname()}", end="", file=file, flush=True)
    return file


class Keeper:
    """Restores a run, saves it, and decides when it ends."""

    def __init__(self, run: Run):
        self.run, self.config = run, run.config
        self.signalled, self.done, self.saver = 0.0, 0, Saver(run.out)
        self.end = min(self.config.steps, self.config.stop_after or self.config.steps)
        heard = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self.stop) for number in heard}
        self.lock: Any = ExitStack()  # the open lock file of the run directory
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: Linux sends it when torchrun has died

    def stop(self, number: int, _frame: Any):
        """Signal handler: the run ends after this step. A second Ctrl-C, more than 2 s later, ends it at once."""
        if number == signal.SIGINT and 0 < self.signalled < time.monotonic() - 2:  # launchers repeat the first at once
            raise KeyboardInterrupt
        self.signalled = self.signalled or time.monotonic()

    def close(self):
        """Unlock the run directory, and restore the signal handlers that were set before."""
        self.lock.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def start(self, parts: Parts) -> int:
        """Lock the run directory, and restore what --resume names; returns the number of steps done.

        --generate restores only weights, and locks nothing. A collective. Raises UserError if another run has locked
        the directory, or if the checkpoint does not fit.
        """
        self.parts, where, weights_only = parts, self.config.resume, bool(self.config.generate)
        if not weights_only:
            on_ranks(self.run.out, self.own)  # from here on no other run changes the directory
        if weights_only and where == "auto":
            where = "required"  # without weights there is nothing to generate
        saved = find(where, self.run.out) if where else None
        said = "nothing to resume: starting at step 1"
        if saved is not None:
            said = f"resuming from {saved.path}" + compare(saved, parts, self.config, weights_only)
            take(parts, saved, moments=not weights_only)
            for name, state in saved.index["state"].items():
                if state is not None and hasattr(parts.kept.get(name), "restore"):
                    parts.kept[name].restore(state)
            self.done = saved.index["step"]
        if self.run.first and where:
            print(said, flush=True)
        return self.done

    def own(self):
        """Rank 0: lock the run directory. First release this run's earlier lock, of a directory that was renamed."""
        self.lock.close()
        self.lock = hold(self.run.out)

    def make_way(self, begin: Callable):
        """Rank 0: rename an earlier run's directory or, if this run resumes it, keep its metrics; then call `begin`."""
        out, where = self.run.out, self.config.resume
        if where in OWN or (where and Path(where).resolve().is_relative_to(out.resolve())):
            self.run.history.extend(row for row in read_metrics(out) if row["step"] <= self.done)
        elif (out / "metrics.jsonl").exists():
            aside = next(p for n in range(1, 10**6) if not (p := Path(f"{out}.{n}")).exists())
            out.rename(aside)
            self.own()
            print(f"the earlier run in {out} is now {aside}")
        begin()

    def leave(self, step: int) -> bool:
        """After a step: save if it is time; returns whether the run ends here, the same on all ranks."""
        stopping, writing = agree(bool(self.signalled), self.saver.writing())
        stopping &= not any(kept.between for kept in self.parts.keeps("between"))  # diloco: stop only at a meeting
        last, every = stopping or step + 1 >= self.end, self.config.save_every
        saving = stopping or (every and (last or (step + 1) % every == 0))
        if saving or not writing:
            self.saver.settle()
        if saving:
            self.save(step + 1, self.config.save_async and not last)
        if stopping and self.run.first:
            print(f"interrupted after step {step + 1}; continue with --resume {self.run.out}", flush=True)
        return last

    def save(self, step: int, background: bool):
        """Write a checkpoint after `step` steps. A collective. Raises UserError if a rank cannot write."""
        config, parts = self.config, self.parts
        state = {name: kept.state() for name, kept in parts.kept.items() if hasattr(kept, "state")}
        about = dict(config=dataclasses.asdict(config), model=dataclasses.asdict(parts.model.config), state=state)
        about["dtype"] = str(next(parts.model.parameters()).dtype)
        self.saver.save(step, pieces(parts), about, background)


def compare(saved: Checkpoint, parts: Parts, config: Any, weights_only: bool) -> str:
    """A line that names the flags whose values differ from the checkpoint's, except flags of services; "" if none do.

    Raises UserError for another model and, unless only weights are restored, for another precision or update rule.
    """
    index, model, changed = saved.index, dataclasses.asdict(parts.model.config), []
    weights_only = weights_only or "optimizer" not in index["config"]  # the model was imported
    unsaid = {"out", "save_every", "resume", "device", "model"}
    for base in type(config).__mro__:
        unsaid |= base.__annotations__.keys() if base.__module__.startswith("extras.services.") else set()
    ours = {name: value for name, value in dataclasses.asdict(config).items() if name not in unsaid}
    ours |= model | dict(dtype=str(next(parts.model.parameters()).dtype))
    theirs = index["config"] | index["model"] | dict(dtype=index["dtype"])
    for name, value in ours.items():
        before = theirs.get(name, value)
        if before in (value, "auto"):
            continue
        if name in model and name != "seq_len":
            advice = f"use --model {index['config']['model']} and the overrides it was trained with"
            raise UserError(f"--resume {saved.path}: its {name} is {before}, not {value}; {advice}")
        if name in ("optimizer", "dtype") and not weights_only:
            raise UserError(f"--resume {saved.path} was written with {name} {before}, not {value}: set --{name}")
        changed.append(f"--{name.replace('_', '-')} was {before!r}, is {value!r}")
    return "\n--resume: " * bool(changed) + "; ".join(changed)
