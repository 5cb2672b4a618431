"""What a run saves and when, how another one goes on from it, and how a run ends early.

A checkpoint holds what the next step depends on: masters, the update rule's state, buffers, and the number of the step,
from which batch and learning rate follow. What a variant keeps besides has two methods: `state()` returns what JSON can
hold, alike on all ranks, and `restore(state)` takes it again.

A disk that is full costs no run: a checkpoint that cannot be written is left out, with a warning, unless it would be
the last. Two are kept, and a third is there while it is written.

After Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 (from a batch system), or torchrun's death, a run finishes its step, saves and
ends. Under torchrun --max-restarts N a job whose rank dies is started anew; with --resume auto it then goes on from its
last checkpoint, also with fewer ranks. Rank 0 locks the run directory, as two runs would overwrite each other.
"""

import dataclasses
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from common import UserError
from common.trainer import Run
from extras.services.boxes import masters, pieces, take
from extras.services.checkpoint import OWN, Checkpoint, Saver, find
from extras.services.launch import agree, gather_objects
from extras.services.plots import read_metrics
from extras.services.tables import human
from extras.variants import Parts

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]


@dataclass
class Flags:
    """Checkpoints. --resume auto: the newest in --out, if any; required: or fail."""

    save_async: bool = False  # write checkpoints in the background, while training goes on
    stop_after: int = 0  # end after this step of the same schedule, as a pre-empted job would; 0: at the end


def on_rank_0(run: Run, what: Callable):
    """Let rank 0 work in the run directory; what goes wrong is a UserError on all ranks. A collective."""
    wrong = ""
    try:
        if run.first:
            what()
    except (UserError, OSError) as error:
        wrong = f"--out {run.out}: cannot be written ({error.strerror})" if isinstance(error, OSError) else str(error)
    if wrong := gather_objects(wrong)[0]:
        raise UserError(wrong)


def hold(out: Path) -> IO:
    """Make a run directory, and lock it until the file returned is closed. Raises UserError if another run has it."""
    out.mkdir(parents=True, exist_ok=True)
    file = (out / ".lock").open("a+")
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock

        flock(file, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(f"--out {out} is in use by {file.read() or 'another run'}: choose another --out") from None
    except (ImportError, OSError):
        pass  # Windows, or a file system without locks: nobody is refused
    file.truncate(0)
    print(f"process {os.getpid()} on host {socket.gethostname()}", end="", file=file, flush=True)
    return file


class Keeper:
    """Saves a run, from its first step to its last; knows when it is to end."""

    def __init__(self, run: Run):
        self.run, self.config = run, run.config
        self.signalled, self.done, self.saver = 0.0, 0, Saver(run.out)
        self.end = min(self.config.steps, self.config.stop_after or self.config.steps)
        heard = [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self.stop) for number in heard}
        self.lock: Any = ExitStack()  # of the run directory, once it is held
        if "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self.follow, args=(os.getppid(),), daemon=True).start()

    def follow(self, launcher: int):
        """A thread: when torchrun is gone, leave as after SIGTERM; if that takes longer than --timeout, at once."""
        while os.getppid() == launcher:
            time.sleep(1)
        self.signalled = self.signalled or time.monotonic()
        print(f"rank {os.environ['RANK']}: torchrun is gone: leaving after this step", file=sys.stderr, flush=True)
        time.sleep(self.config.timeout)
        os._exit(1)

    def stop(self, number: int, _frame: Any):
        """Signal handler: leave after this step; a second Ctrl-C leaves at once."""
        if number == signal.SIGINT and 0 < self.signalled < time.monotonic() - 2:  # launchers repeat one at once
            raise KeyboardInterrupt
        self.signalled = self.signalled or time.monotonic()

    def close(self):
        """Give back the run directory and the signals."""
        self.lock.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def start(self, parts: Parts, weights_only: bool = False) -> int:
        """Lock the run directory, and take over what --resume names; returns the steps done.

        A collective. Raises UserError if another run has the directory, or the checkpoint does not fit.
        """
        self.parts, where = parts, self.config.resume
        on_rank_0(self.run, self.own)  # from here on nobody else changes the directory
        saved = find("required" if weights_only and where == "auto" else where, self.run.out) if where else None
        if saved is not None:
            imported = "optimizer" not in saved.index["config"]
            require_fit(saved, parts, self.config, weights_only or imported)
            take(parts, saved, moments=not weights_only)
            for name, state in saved.index["state"].items():
                if state is not None and hasattr(parts.kept.get(name), "restore"):
                    parts.kept[name].restore(state)
            self.done = saved.index["step"]
        if self.run.first and where:
            print("\n".join(said(saved, parts, self.config)), flush=True)
        return self.done

    def own(self):
        """Rank 0: lock the run directory, and no longer one that has moved aside."""
        self.lock.close()
        self.lock = hold(self.run.out)

    def make_way(self, begin: Callable):
        """Rank 0, before `begin` opens the run directory: an earlier run moves aside, or this one keeps its metrics."""
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
        """A line, if three checkpoints take more than half of what is free in `--out`; else "".

        Ask after an update, which makes the rule's state. A collective.
        """
        mine = sum(piece.tensor.nbytes for piece in pieces(self.parts))
        each = sum(gather_objects(mine)) if self.config.save_every else 0
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


def said(saved: Checkpoint | None, parts: Parts, config: Any) -> Iterator[str]:
    """What a run resumes, and which flags differ; but not those of services, nor those that `require_fit` compares."""
    if saved is None:
        return (yield "nothing to resume: starting at step 1")
    yield f"going on from {saved.path}"
    services = [base for base in type(config).__mro__ if base.__module__.startswith("extras.services.")]
    unsaid = {"out", "save_every", "resume", "device", "model", "optimizer", "dtype"}.union(
        *(base.__annotations__ for base in services)
    )
    ours = {name: value for name, value in dataclasses.asdict(config).items() if name not in unsaid}
    ours["seq_len"] = parts.model.config.seq_len
    theirs = saved.index["config"] | dict(seq_len=saved.index["model"]["seq_len"])
    changed = [(name, theirs[name], value) for name, value in ours.items() if theirs.get(name, value) != value]
    if changed:
        yield "--resume: " + "; ".join(f"--{name.replace('_', '-')} was {a!r}, is {b!r}" for name, a, b in changed)


def require_fit(saved: Checkpoint, parts: Parts, config: Any, weights_only: bool):
    """Refuse a checkpoint of another model and, unless weights alone count, precision or rule. Raises UserError."""
    index, where = saved.index, f"--resume {saved.path}"
    advice = f"use --model {index['config']['model']} and the overrides it was trained with"
    for key, value in dataclasses.asdict(parts.model.config).items():
        if key != "seq_len" and index["model"].get(key) != value:
            raise UserError(f"{where}: its {key} is {index['model'].get(key)}, not {value}; {advice}")
    stored = saved.shapes("master")
    for master in masters(parts):
        if stored.get(master.name) != master.whole_shape:
            raise UserError(f"{where}: its {master.name} does not fit this model; {advice}")
    ours = dict(optimizer=config.optimizer, dtype=str(next(parts.model.parameters()).dtype))
    theirs = dict(optimizer=index["config"].get("optimizer"), dtype=index["dtype"])
    for flag in ours if not weights_only else ():
        if theirs[flag] not in ("auto", ours[flag]):
            raise UserError(f"{where} was written with {flag} {theirs[flag]}, not {ours[flag]}: set --{flag}")
