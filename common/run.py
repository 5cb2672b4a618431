"""Everything around a training loop: command line, run directory, progress bar, metrics, clocks, shutdown.

config = parse(Config)             flags from the dataclass' fields, help texts from their comments
with Run(config, ...) as run:      OUT/metrics.jsonl, a progress bar, Ctrl-C and SIGTERM turned into `run.stopping`
    for step in run.steps(0):
        with run.phase("forward"): ...      seconds and memory, by phase
        run.log(loss=..., grad_norm=...)
main(train, Config)                one readable line instead of a traceback, once per job
"""

import argparse
import dataclasses
import inspect
import json
import math
import os
import re
import resource
import signal
import sys
import textwrap
import time
import traceback
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from common import plots
from common.memory import MemoryTimeline
from common.watchdog import Place, Watchdog, shared_store


class UserError(Exception):
    """Something the user can put right: shown as one line that names the flag and the fix, exit status 2."""


# How gloo and NCCL tell a rank that another one is gone.
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|timed out", re.IGNORECASE)

# Dense peak in TFLOP/s without sparsity, from the vendors' data sheets: (16-bit matrix units, fp32 without TF32).
GPU_PEAKS = {
    "B200": (2250.0, 75.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.4, 66.9),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}


def field_help(cls: type) -> dict[str, str]:
    """The trailing comment of each field of a dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        found |= dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(base), re.MULTILINE))
    return found


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError, so that a bad flag is reported like any other mistake."""

    def error(self, message: str):
        """Raise instead of printing the usage."""
        raise UserError(message)


def parse(cls: type, argv: list[str] | None = None) -> Any:
    """Command line -> an instance of dataclass `cls`: field `n_layers: int | None` becomes `--n-layers`.

    Literal types give the choices, booleans `--x` and `--no-x`. Raises UserError for an unknown flag or value.
    """
    description = (inspect.getmodule(cls).__doc__ or "").split("\n\n")[0]
    parser = Parser(description=description, allow_abbrev=False)
    helps, types = field_help(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = types[field.name]
        if type(None) in typing.get_args(kind):  # int | None
            kind = typing.get_args(kind)[0]
        options: dict[str, Any] = dict(default=field.default, help=helps.get(field.name, "").replace("%", "%%"))
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is typing.Literal:
            options |= dict(type=type(field.default), choices=typing.get_args(kind))
        else:
            options |= dict(type=kind, metavar=field.name.upper())
        parser.add_argument("--" + field.name.replace("_", "-"), **options)
    return cls(**vars(parser.parse_args(argv)))


def choose_device(name: str) -> torch.device:
    """`--device` -> the device of this process: one GPU a local rank, shared in turn where there are fewer GPUs."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`--dtype` -> torch dtype; auto is bf16 on a GPU that has it, else fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[name]


def peak_flops(device: torch.device, dtype: torch.dtype, override_tflops: float) -> float:
    """FLOP/s that this rank could do at best: the flag, the table above or, for any other device, a timed matmul.

    Ranks that share a GPU share its peak.
    """
    share = 1.0
    if device.type == "cuda":
        share = min(1.0, torch.cuda.device_count() / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if override_tflops:
        return override_tflops * 1e12 * share
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, (half, single) in GPU_PEAKS.items():
            if key in name:
                return 1e12 * share * {2: half, 4: single, 8: single / 2}[dtype.itemsize]
    n, times, until = 512 if device.type == "cpu" else 8192, [], time.perf_counter() + 0.3
    a = torch.randn(n, n, dtype=dtype, device=device)
    while len(times) < 5 or time.perf_counter() < until:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for a GPU
        times.append(time.perf_counter() - start)
    return 2 * n**3 / min(times)


def run_directory(config: Any) -> Path:
    """`--out`, or its default, runs/STEP."""
    return Path(config.out or f"runs/{Path(inspect.getfile(type(config))).stem}")


class Run:
    """One training run as seen from outside; only rank 0 writes files and draws the bar."""

    def __init__(self, config: Any, device: torch.device, flops: tuple[float, float], peak: float, mesh: Any = None):
        """`flops` of one token, (model, executed); `peak` FLOP/s of all ranks together; `mesh` of common/comm.py."""
        self.config, self.device, self.mesh = config, device, mesh
        self.rank = 0 if mesh is None else mesh.rank
        self.flops_per_token, self.peak = flops, peak
        self.out = run_directory(config)
        self.saver: Any = None  # of common/checkpoint.py, once something has been saved
        self.doing = "start"
        self.history: list[dict] = []
        self.signalled = False
        self.decided: bool | None = None
        self.memory = MemoryTimeline()
        self.step = self.first = self.end = self.profiled_until = 0
        self.watch = 1  # forward passes of which the memory is still to be watched
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
        world = 1 if self.mesh is None else self.mesh.world
        store = torch.distributed.PrefixStore(f"watchdog/{self.out}", shared_store())
        self.watchdog = Watchdog(self.place, self.config.timeout, self.rank, world, store)
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
            self.watchdog.stop()
            if error is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
                for number, handler in self.handlers.items():
                    signal.signal(number, handler)

    def place(self) -> Place:
        """Where this rank is, for the watchdog."""
        if self.mesh is None:
            return Place(self.step, self.doing, "", 0)
        return Place(self.step, self.doing, self.mesh.ledger.last, self.mesh.ledger.entered)

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
                self.step, self.started, self.decided = step, time.perf_counter(), None
                yield step
                if self.stopping:
                    self.say(f"interrupted after step {self.step + 1}; go on with --resume {self.out}")
                    return

    def due(self, every: int, step: int) -> bool:
        """Whether something done every so many steps, and at the end, is to be done after this one."""
        return (step + 1) % every == 0 or step + 1 == self.end

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the enclosed seconds (and, in profiled steps, bytes) under data, forward, backward, optimizer, ..."""
        self.doing = name
        if name == "validation":
            self.traffic = self.mesh.ledger.take() if self.mesh is not None else {}
        with ExitStack() as stack:
            before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
            if self.profiling:
                stack.enter_context(self.memory.phase(name))
            if self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                yield
                last.record()
                self.events.append((name, first, last))
            else:
                start = time.perf_counter()
                yield
                self.clock[name] += time.perf_counter() - start
        if name == "forward" and self.device.type == "cuda":  # not the first alone, where cuBLAS takes its workspace
            self.measured["activations"] = torch.cuda.memory_allocated(self.device) - before
        elif name == "forward" and self.profiling and self.watch:
            self.measured["activations"] = max(self.measured.get("activations", 0), self.memory.live("activations"))
            self.watch -= 1

    @property
    def profiling(self) -> bool:
        """Whether every tensor is watched: in the first steps on demand, else (on CPU) in the first forward pass."""
        if self.config.profile_memory:
            return self.step < self.profiled_until
        return self.device.type == "cpu" and self.watch > 0 and not self.config.compile

    def measure(self, held: dict[str, list[Tensor]]):
        """Note the bytes held by tensors, by kind, for the memory table (the most seen in the first two steps)."""
        if self.profiling or self.step < self.first + 2:
            for kind, tensors in held.items():
                self.measured[kind] = max(self.measured.get(kind, 0), bytes_of(tensors))
                if self.profiling:
                    self.memory.label({"masters": "optimizer", "moments": "optimizer"}.get(kind, kind), tensors)

    def memory_table(self, predicted: dict[str, int | None]) -> str:
        """Predicted bytes by kind and, as far as they are known, the measured ones beside them."""
        rows = [[kind, human(n), human(self.measured.get(kind))] for kind, n in predicted.items()]
        total = sum(self.measured.values()) if self.measured.keys() >= predicted.keys() else None
        rows.append(["sum", human(sum(n or 0 for n in predicted.values())), human(total)])
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
        if self.mesh is not None:
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


def peak_memory(device: torch.device) -> int:
    """Bytes at the highest point so far: the allocator's on a GPU, the resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def bytes_of(tensors: typing.Iterable[Tensor]) -> int:
    """Bytes held by the distinct storages behind these tensors."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the first a header, as an aligned text table."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def human(n_bytes: float | None) -> str:
    """Bytes for a person to read."""
    if n_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n_bytes) < 1024 or unit == "GiB":
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1024


def report(message: str):
    """Print `message` to stderr, once per job: the rank that comes first to the launcher's store speaks for all."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = torch.distributed.TCPStore(address, port, is_master=False)
        if store.add(f"reported/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", 1) > 1:
            return
    print(message, file=sys.stderr, flush=True)


def main(train: Callable[[Any], Any], cls: type, argv: list[str] | None = None):
    """Parse, train, and turn whatever goes wrong into one message and a non-zero exit status, on every rank."""
    status = 0
    try:
        train(parse(cls, argv))
    except UserError as error:
        report(f"error: {error}")
        status = 2
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # whoever read our output has gone
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        status = 1
    except Exception as error:
        text = textwrap.shorten(str(error), 600)
        if LOST_PEER.search(text):
            text = f"another rank died, was killed or hangs ({text})"
        root = str(Path(__file__).parents[1])
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if f.filename.startswith(root) and "site-packages" not in f.filename
        ]
        where = "".join(f"\n  {Path(f.filename).name}:{f.lineno} {f.name}: {f.line}" for f in frames)
        report(f"error: rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {text}{where}")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's shutdown can block on peers that are gone, or abort under gloo's own threads.
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        os._exit(status)
    sys.exit(status)
