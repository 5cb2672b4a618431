"""A run as seen from outside: run directory, progress bar, metrics, clocks, memory, shutdown; tables and figures.

with Run(config, ...) as run:      OUT/metrics.jsonl, a progress bar, Ctrl-C and SIGTERM turned into `run.stopping`
    for step in run.steps(0):
        with run.phase("forward"): ...      seconds and memory, by phase
        run.log(loss=..., grad_norm=...)
"""

import dataclasses
import inspect
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common import UserError
from common.comm import Mesh
from services import plots
from services.devices import moment, peak_memory
from services.launch import gather_objects
from services.memory import MemoryTimeline
from services.offload import on_host
from services.tables import bytes_of, human, table
from services.watchdog import SAVES, Place, Signals, Watchdog, shared_store


def run_directory(config: Any) -> Path:
    """`--out`, or its default, runs/STEP."""
    return Path(config.out or f"runs/{Path(inspect.getfile(type(config))).stem}")


class Run:
    """One training run as seen from outside; only rank 0 writes files and draws the bar."""

    def __init__(self, config: Any, device: torch.device, flops: tuple[float, float], peak: float, mesh: Mesh):
        """`flops` of one token, (model, executed); `peak` FLOP/s of all ranks together; `mesh` of common/comm.py."""
        self.config, self.device, self.mesh = config, device, mesh
        self.rank = mesh.rank
        self.flops_per_token, self.peak = flops, peak
        self.out = run_directory(config)
        self.saver: Any = None  # of services/saver.py, once something has been saved
        self.doing = "start"
        self.members = {
            name: f"{name} of ranks {' '.join(map(str, torch.distributed.get_process_group_ranks(group.handle)))}"
            for name, group in mesh.groups.items()
            if group.handle is not None
        }
        self.history: list[dict] = []
        self.signalled = False
        self.decided: bool | None = None
        self.memory = MemoryTimeline()
        self.step = self.first = self.end = self.profiled_until = 0
        self.pipelined = False  # whether the phases' actions are to be drawn at the end
        self.began, self.spans = None, []  # when the last step began; (action, start, end) of its phases
        self.watch = self.forwards = 1  # forward passes of which the memory is still to be watched; those of one step
        self.measured: dict[str, int] = {}
        self.traffic: dict[str, Any] = {}
        self.clock: dict[str, float] = defaultdict(float)
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> "Run":
        """Open the run directory, moving an earlier run's aside unless this run resumes it, and catch the signals."""
        if self.rank == 0:
            where = self.config.resume
            resumes = where == "auto" or (where and Path(where).resolve().is_relative_to(self.out.resolve()))
            try:
                if (self.out / "metrics.jsonl").exists() and not resumes:
                    aside = next(p for n in range(1, 10**6) if not (p := Path(f"{self.out}.{n}")).exists())
                    self.out.rename(aside)
                    print(f"the earlier run in {self.out} is now {aside}")
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / "config.json").write_text(json.dumps(dataclasses.asdict(self.config), indent=1) + "\n")
            except OSError as error:
                raise UserError(f"--out {self.out}: cannot be written ({error.strerror})") from error
        self.handlers = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        self.signals, store = Signals(), shared_store()
        number = store.add(f"runs of {self.rank}", 1)  # the keys of an earlier run in this process are not ours
        store = torch.distributed.PrefixStore(f"watchdog/{number}", store)
        self.watchdog = Watchdog(
            *(self.place, self.config.timeout, self.rank, self.mesh.world, store),
            signalled=self.signals.came,
            written=lambda: self.saver.bytes_written if self.saver is not None else 0,
        )
        return self

    def __exit__(self, error: type | None, *_):
        """Finish a checkpoint under way, unless peers may be gone, and give the signals back.

        But a rank that fails among others must survive the launcher's SIGTERM to report.
        """
        try:
            if self.saver is not None and error is None:
                self.saver.settle()
            elif self.saver is not None and issubclass(error, UserError):  # raised on all ranks alike
                self.saver.join()
        finally:
            self.watchdog.stop(failed=error is not None and not issubclass(error, UserError))
            self.signals.close()
            if error is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
                for number, handler in self.handlers.items():
                    signal.signal(number, handler)

    def place(self) -> Place:
        """Where this rank is, for the watchdog."""
        ledger = self.mesh.ledger
        entered = {self.members.get(name, name): count for name, count in list(ledger.entered.items())}
        if self.saver is not None:
            entered[SAVES] = self.saver.files_written
        return Place(self.step, self.doing, ledger.last, entered)

    def stop(self, *_):
        """Signal handler: finish the step, save, and leave; a second Ctrl-C leaves at once."""
        if self.signalled and time.perf_counter() - self.since > 2:  # launchers repeat the first one at once
            raise KeyboardInterrupt
        self.signalled, self.since = True, time.perf_counter()

    @property
    def stopping(self) -> bool:
        """Whether this step is the last. Decided once a step, so that all ranks, and save and exit, act on the same."""
        return self.signalled if self.decided is None else self.decided

    @stopping.setter
    def stopping(self, value: bool):
        """What the ranks have agreed on."""
        self.decided = value

    def steps(self, start: int) -> Iterator[int]:
        """Yield the 0-based numbers of the steps to run, with a bar on a terminal and a line now and then elsewhere."""
        self.end = min(self.config.steps, self.config.stop_after or self.config.steps)
        if self.rank == 0:
            path = self.out / "metrics.jsonl"
            if path.exists():  # this run is a resumed one
                self.history = [row for row in plots.read_metrics(self.out) if row["step"] <= start]
            path.with_suffix(".partial").write_text("".join(json.dumps(row) + "\n" for row in self.history))
            path.with_suffix(".partial").replace(path)
        self.first, self.profiled_until = start, start + self.config.profile_memory
        quiet = self.rank != 0 or not sys.stderr.isatty()
        with tqdm(total=self.end, initial=start, disable=quiet, unit="step") as self.bar:
            for step in range(start, self.end):
                if self.pipelined and step + 1 == self.end:
                    gather_objects(None, self.mesh)  # the timelines of all ranks begin here
                    self.began = moment(self.device)
                self.step, self.started, self.decided = step, time.perf_counter(), None
                yield step
                if self.stopping:
                    self.say(f"interrupted after step {self.step + 1}; go on with --resume {self.out}")
                    return

    def due(self, every: int, step: int) -> bool:
        """Whether something done every so many steps, and at the end, is to be done after this one."""
        return (step + 1) % every == 0 or step + 1 == self.end

    @contextmanager
    def phase(self, name: str, action: Any = None) -> Iterator[None]:
        """Book the enclosed seconds (and, in profiled steps, bytes) under data, forward, backward, optimizer, ...

        `action` of a pipeline: what it is, for the timeline of the last step.
        """
        self.doing = name
        if name == "validation":
            self.traffic = self.mesh.ledger.take()
        with ExitStack() as stack:
            count = name == "forward" and self.device.type == "cuda" and self.forwards == 1 and self.measuring
            before = torch.cuda.memory_allocated(self.device) if count else 0
            if self.profiling:
                stack.enter_context(self.memory.phase(name))
            if self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                yield
                last.record()
                self.events.append((name, first, last))
            else:
                first = time.perf_counter()
                yield
                last = time.perf_counter()
                self.clock[name] += last - first
        if action is not None and self.began is not None:
            self.spans.append((action, first, last))
        if name == "forward" and self.profiling and self.watch:
            self.measured["activations"] = max(self.measured.get("activations", 0), self.memory.live("activations"))
            self.watch -= 1
        elif count:
            # Of the last forward pass: in the first one, cuBLAS takes its workspace.
            self.measured["activations"] = torch.cuda.memory_allocated(self.device) - before

    @property
    def profiling(self) -> bool:
        """Whether every tensor is watched: in the first steps on demand, else in the first forward passes.

        On a GPU the allocator's count does for one forward pass, but not for pipelines, which hold several at once,
        with gradients among them.
        """
        if self.config.profile_memory:
            return self.step < self.profiled_until
        return (self.device.type == "cpu" or self.forwards > 1) and self.watch > 0 and not self.config.compile

    @property
    def measuring(self) -> bool:
        """Whether the bytes that a rank holds are to be noted: in the first two steps, and in profiled ones."""
        return self.profiling or self.step < self.first + 2

    def measure(self, held: dict[str, list[Tensor]]):
        """Note the bytes held by tensors, by kind, for the memory table (the most seen)."""
        for kind, tensors in held.items():
            self.measured[kind] = max(self.measured.get(kind, 0), bytes_of(tensors))
            if self.profiling:
                self.memory.label({"masters": "optimizer", "moments": "optimizer"}.get(kind, kind), tensors)

    def memory_table(self, predicted: dict[str, int | None]) -> str:
        """Predicted bytes by kind and, as far as they are known, the measured ones beside them.

        What is offloaded to the host has a sum of its own.
        """
        rows, host = [], on_host(self.config)
        for away in (False, True) if host else (False,):
            kinds = [kind for kind in predicted if (kind in host) == away]
            place = (", host" if away else ", device") if host else ""
            rows += [[kind + place, human(predicted[kind]), human(self.measured.get(kind))] for kind in kinds]
            total = sum(map(self.measured.get, kinds)) if self.measured.keys() >= set(kinds) else None
            rows.append([f"sum{place}", human(sum(predicted[kind] or 0 for kind in kinds)), human(total)])
        return table([["memory", "predicted", "measured"], *rows])

    def log(self, loss: float, grad_norm: float, lr: float, tokens: int, **more: Any):
        """Complete the record of the step under way with times, speed and memory; write it, show it.

        `loss` in nats per target token; `tokens` of this step, all ranks together. `save_seconds` is the pause, before
        this step, in which the last checkpoint was written or, with --save-async, copied.
        """
        self.stopping = self.stopping  # a signal that comes from now on is for the next step
        for name, first, last in self.events:
            last.synchronize()
            self.clock[name] += first.elapsed_time(last) / 1e3
        self.events.clear()
        seconds = time.perf_counter() - self.started - self.clock["validation"]
        model_flops, executed_flops = (flops * tokens / seconds / self.peak for flops in self.flops_per_token)
        norm = grad_norm if math.isfinite(grad_norm) else None  # JSON has no inf, which an fp16 overflow brings
        record = dict(step=self.step + 1, loss=loss, grad_norm=norm, lr=lr, tokens=(self.step + 1) * tokens)
        record |= dict(tokens_per_second=tokens / seconds, mfu=model_flops, hfu=executed_flops, seconds=seconds)
        record |= {f"{name}_seconds": self.clock[name] for name in ("data", "forward", "backward", "optimizer")}
        record |= dict(peak_memory_bytes=peak_memory(self.device), traffic={}) | more
        if "save" in self.clock:
            record["save_seconds"] = self.clock["save"]
        if "skipped" in more:
            self.say(f"step {self.step + 1} is skipped: loss {loss:.4g}, gradient norm {grad_norm:.4g} (--skip-spikes)")
        if self.mesh.sizes:
            taken = self.mesh.ledger.take()
            record |= self.traffic or taken  # a validation's own traffic does not count
            self.traffic = {}
        self.clock.clear()
        self.history.append(record)
        if self.rank == 0:
            try:
                with open(self.out / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(record) + "\n")
            except OSError as error:
                raise UserError(f"--out {self.out}: metrics.jsonl cannot be written ({error.strerror})") from error
            shown = (
                f"loss {loss:.4f}  norm {grad_norm:.3f}  {record['tokens_per_second']:,.0f} tok/s  "
                f"MFU {record['mfu']:.1%}  {human(record['peak_memory_bytes'])}"
            )
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update()
            if self.bar.disable and self.due(max(1, self.end // 10), self.step):
                print(f"step {self.step + 1}/{self.end}  {shown}", flush=True)

    def traffic_table(self, predicted: dict[tuple[str, str], float]) -> str:
        """What this rank sent in the last step, by mesh dimension and operation, beside what theory says."""
        last, rows = self.history[-1], []
        for dim, operations in last["traffic"].items():
            for operation, sent in operations.items():
                theory = human(predicted.get((dim, operation)))
                rows.append([f"{dim} {operation}", str(last["calls"][dim][operation]), human(sent), theory])
        waited = sum(last["wait_seconds"].values())
        return table([["traffic of a step", "calls", "sent", "predicted"], *rows]) + f"\nwaited {waited:.4f} s for it"

    def finish(self, predicted: dict[str, int], traffic: dict[tuple[str, str], float] | None = None):
        """Draw the figures and print what the run came to."""
        if self.rank != 0 or not self.history:
            return
        self.say(self.memory_table(predicted))
        if traffic:
            self.say(self.traffic_table(traffic))
        plots.loss_curve(self.out)
        if self.config.profile_memory:
            plots.save_timeline(self.memory, self.out)
            plots.memory_over_time(self.out)
        last, steady = self.history[-1], self.history[1:] or self.history
        validation = [row["validation_loss"] for row in self.history if "validation_loss" in row]
        mean = {key: sum(row[key] for row in steady) / len(steady) for key in ("tokens_per_second", "mfu", "hfu")}
        self.say(
            f"step {last['step']}: loss {last['loss']:.4f}"
            + (f", validation loss {validation[-1]:.4f}" if validation else "")
            + (f"; the last save took a pause of {self.clock['save']:.3f} s" if "save" in self.clock else "")
            + f"; {mean['tokens_per_second']:,.0f} tokens/s, MFU {mean['mfu']:.1%}, HFU {mean['hfu']:.1%} "
            f"of {self.peak / 1e12:.2f} TFLOP/s; peak memory {human(last['peak_memory_bytes'])}; see {self.out}/"
        )

    def say(self, text: str):
        """Print on rank 0, above the bar."""
        if self.rank == 0:
            tqdm.write(text)
