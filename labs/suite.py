"""The suite as a judge: a step's rows (tests/rows.py, tests/faults.py) and schedules' tests, with a student's step.

A row is a whole run of a layout: losses, gradients, norms and weights of each step, gathered from all ranks, and the
loss of a look at the model without a graph; beside them bytes, waits, graphs and memory. With `then`, a row is several
runs, each of one step: it goes on in another layout from what the one before has saved. The variants, the services
and the later steps are imported anew after the student's file, so they build on it. What all this should be is what
the project's file finds, in processes of its own. A copy for students, which has no tests, keeps it in `KEPT`.
"""

import gc
import importlib
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from common.comm import Mesh
from labs.course import FOUND, Case, Criterion, Row, at_most_times
from labs.tape import Graphs, Tape
from services.seam import spelled

KEPT = Path(__file__).with_name("suite.pt")  # of a handout: rows by name; what each rank should find in which case
TESTS = Path(__file__).parents[1] / "tests/rows.py"  # a handout has none
SGD = dict(optimizer="sgd", lr=0.5)
ALL = dict(steps=3, grad_clip=0.0, recompute="full")  # AdamW, a changing rate, nothing clipped, layers run again
FROZEN = dict(patch="frozen")  # of tests/faults.py: a matrix and a norm do not train
BF16 = dict(dtype="bf16", optimizer="sgd", lr=0.5)
NEAR = 0.05  # a bound for 16 bits, in which two right files differ by some roundings of 2^-8

# Beside the rows that tests/faults.py names: (ranks, step, flags). The last of each step attaches a variant to it.
ROWS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "step 1": (1, "step01_single_gpu", ALL),
    "step 1, frozen": (1, "step01_single_gpu", FROZEN | SGD),
    "step 1, uneven": (1, "step01_single_gpu", dict(dataset="uneven-targets")),
    "step 1, small norm": (1, "step01_single_gpu", dict(grad_clip=1e4)),
    "step 1, smaller": (1, "step01_single_gpu", dict(micro_batch_size=5, global_batch_size=12)),
    "step 1, muon": (1, "step01_single_gpu", dict(optimizer="muon", micro_batch_size=5, global_batch_size=12)),
    "step 1, bf16": (1, "step01_single_gpu", dict(dtype="bf16", recompute="full")),
    "step 1, saved": (1, "step01_single_gpu", dict(then=({}, dict(recompute="full"), {}))),
    "step 2": (2, "step02_ddp", ALL | dict(bucket_mb=0.01)),
    "step 2, frozen": (2, "step02_ddp", FROZEN | SGD | dict(bucket_mb=0.01)),
    "step 2, overlap": (2, "step02_ddp", dict(sync="overlap", micro_batch_size=4, global_batch_size=12, **SGD)),
    "step 2, bf16": (2, "step02_ddp", BF16 | dict(bucket_mb=0.01)),
    "step 2, saved": (2, "step02_ddp", dict(then=(dict(sync="naive"), dict(sync="ring"), {}))),
    "step 3": (2, "step03_zero", ALL | dict(zero=3)),
    "step 3, tied": (3, "step03_zero", dict(zero=3, tied=True, **SGD)),
    **{f"step 3, frozen {n}": (2, "step03_zero", FROZEN | SGD | dict(zero=n)) for n in (1, 2, 3)},
    "step 3, offload": (2, "step03_zero", dict(zero=1, offload_optimizer="cpu", **SGD)),
    "step 3, bf16": (2, "step03_zero", BF16 | dict(zero=3)),
    "step 3, saved": (3, "step03_zero", dict(then=(dict(zero=1), dict(zero=3), dict(zero=2)))),
    "step 4": (4, "step04_tp_sp", ALL | dict(tp=2, zero=1, tied=True)),
    "step 4, no sp": (2, "step04_tp_sp", dict(tp=2, sp=False, tied=True, micro_batch_size=3)),
    "step 4, overlap": (2, "step04_tp_sp", dict(tp=2, tp_overlap=True, **SGD)),
    "step 4, bf16": (2, "step04_tp_sp", BF16 | dict(tp=2, zero=1)),
    "step 4, saved": (2, "step04_tp_sp", dict(tied=True, then=(dict(tp=2), dict(zero=3), dict(tp=2, sp=False)))),
    "step 5": (4, "step05_cp_ring", ALL | dict(cp=2, tp=2, tied=True)),
    "step 5, zero": (4, "step05_cp_ring", dict(cp=2, zero=2, **SGD)),
    "step 5, flash": (2, "step05_cp_ring", dict(cp=2, cp_kernel="flash", **SGD)),
    "step 5, bf16": (2, "step05_cp_ring", BF16 | dict(cp=2)),
    "step 5, saved": (2, "step05_cp_ring", dict(then=(dict(cp=2), dict(tp=2), dict(cp=2, zero=3)))),
    "step 6": (4, "step06_pipeline", ALL | dict(pp=2, tp=2, zero=1, tied=True)),
    "step 6, afab": (2, "step06_pipeline", dict(pp=2, schedule="afab", zero=3, **SGD)),
    "step 6, V": (3, "step06_pipeline", dict(pp=3, schedule="zbv", n_layers=6, tied=True, **SGD)),
    "step 6, bf16": (2, "step06_pipeline", BF16 | dict(pp=2)),
    "step 6, saved": (2, "step06_pipeline", dict(then=(dict(pp=2), dict(tp=2), dict(pp=2, schedule="afab")))),
    "step 7": (4, "step07_moe_ep", ALL | dict(cp=2, tp=2, ep=2, experts=4)),
    "step 7, pp": (4, "step07_moe_ep", dict(pp=2, ep=2, experts=6, experts_per_token=1, zero=2)),
    "step 7, rows": (2, "step07_moe_ep", dict(ep=2, ep_mode="rows", experts=4, **SGD)),
    "step 7, bf16": (2, "step07_moe_ep", BF16 | dict(ep=2, experts=4)),
    "step 7, saved": (2, "step07_moe_ep", dict(experts=4, then=(dict(ep=2), dict(tp=2), dict(ep=2, zero=3)))),
}
CALLS = {  # tests that take no pool, by name: module, function, arguments
    f"{name}, v={v}": ("tests.test_schedules", test, (name, *more))
    for name, v in (("afab", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3))
    for test, *more in (("test_bubble_without_w", v),)
}
CALLS |= {f"schedules of {name}": ("tests.test_schedules", "test_every_size_is_complete_and_ends", (name,))
          for name in ("afab", "1f1b", "interleaved")}  # fmt: skip
CALLS["in flight"] = ("tests.test_schedules", "test_activations_in_flight", ())


@lru_cache
def kept() -> dict[str, Any]:
    """Of a handout: rows, and finds."""
    return torch.load(KEPT, weights_only=True) if KEPT.exists() else dict(rows={}, finds={})


def there(name: str) -> bool:
    """Whether this copy of the project can carry out a row: a handout has some of one lab, and not all variants."""
    if TESTS.exists() or name not in kept()["rows"]:
        return TESTS.exists()
    _, step, flags = row_of(name)
    config = importlib.import_module("services.seam").compose(importlib.import_module(step))
    menus = {field.name: field.metadata["menu"] for field in fields(config) if "menu" in field.metadata}
    given = (flag for some in (flags, *flags.get("then", ())) for flag in some.items())
    return all(value in menus.get(name, [value]) for name, value in given)


def row_of(name: str) -> tuple[int, str, dict[str, Any]]:
    """(ranks, step, flags) of a row by its name."""
    if not TESTS.exists():
        return tuple(kept()["rows"][name])
    rows = importlib.import_module("tests.rows")
    if name in ROWS:
        ranks, step, flags = ROWS[name]
        row = rows.Row(ranks, step, flags, flags)
    else:
        row = importlib.import_module("tests.faults").SMALL_ROWS[name]
    row = rows.sized(row)
    return row.ranks, row.step, row.base | row.layout


def digest(x: Any) -> Tensor:
    """Five numbers that differ where a tensor does: its norm, and what it is along four directions."""
    x = torch.as_tensor(x, dtype=torch.float64).flatten()
    along = torch.randn(4, len(x), generator=torch.Generator().manual_seed(len(x)), dtype=torch.float64)
    return torch.cat((x.norm()[None], along @ x))


def watched() -> tuple[Any, type]:
    """tests/equal.py, and its watch with instruments. Both are imported here, after the student's step."""
    equal = importlib.import_module("tests.equal")
    look = importlib.import_module("services.evaluation").look
    MemoryTimeline = importlib.import_module("services.memory").MemoryTimeline

    class Seen(equal.Watch):
        """Looks into the run."""

        def steps(self, **parts: Any) -> Iterator[int]:
            """With instruments; in the end, a look at the model without a graph."""
            self.tape, self.memory = Tape(parts.get("mesh") or Mesh(dp=1)), MemoryTimeline()
            self.graphs, self.rows, self.since = Graphs(parts["model"]), [], (0, 0)
            with self.memory, self.tape:
                yield from super().steps(**parts)
            found = look(self.parts, *(x[:2] for x in parts["data"].batch(0)))
            self.rows.append(("after training: the loss of a look without a graph", found, FOUND))

        def require_finite(self, step: int, **numbers: float):
            """Which numbers 16 bits can hold: gradients and masters have more digits."""
            held, self.short = self.parts.optimizer, {}
            with _disable_current_modes():
                for kind, some in (("gradients", held.gradients()), ("masters", held.masters)):
                    short = (n for n, x in some.items() if x.numel() and torch.equal(x, x.bfloat16().to(x.dtype)))
                    self.short[kind] = sorted(short)
            super().require_finite(step, **numbers)

        def gather(self, local: dict[str, Tensor]) -> dict[str, Tensor]:
            """Unseen."""
            with _disable_current_modes():
                return super().gather(local)

        def record(self, step: int, tokens: int, **numbers: float):
            """At the end of a step."""
            says, sent = f"step {step + 1}: ", self.tape.sent(self.since[0])
            graphs, bytes_alive = self.graphs, [*accumulate(event.bytes for event in self.memory.events)]
            found = {
                "lr": (numbers["lr"], FOUND),
                "tokens": (tokens, FOUND),
                "how often each layer has run": (dict(graphs.runs), FOUND),
                "what has no more digits than 16 bits hold:": (self.short, FOUND),
                "messages and sums that nobody has waited for": (sorted(self.tape.left()), []),
                "graphs of layers that are alive at a time": (graphs.most, at_most_times(1)),
                "graphs of layers that are alive at the end": (len(graphs.alive), at_most_times(1)),
                "bytes alive at a time": (max(bytes_alive[self.since[1] :]), at_most_times(1.25)),
                "bytes alive at the end": (bytes_alive[-1], at_most_times(1.25)),
            }
            dims = set(self.tape.mesh.groups) - {"sequence", "expert_data"}
            found |= {f"bytes sent over {dim}": (sent.get(dim, 0.0), at_most_times(1.05)) for dim in sorted(dims)}
            self.rows += [(says + name, *values) for name, values in found.items()]
            self.since, graphs.most = (len(self.tape.events), len(bytes_alive)), len(graphs.alive)
            graphs.runs.clear()
            super().record(step, tokens, **numbers)

    return equal, Seen


class Suite(Case):
    """A row of ROWS or SMALL_ROWS, or one of CALLS, by its name."""

    def setup(self):
        self.prepare()  # what these import of others' is there then in every process that is forked
        call = self.name in CALLS
        self.ranks, self.step, flags = (1, "", {}) if call else row_of(self.name)
        self.flags, self.layouts = {k: v for k, v in flags.items() if k != "then"}, flags.get("then", ())
        self.mesh, self.seed = dict(dp=self.ranks), 0  # the same for every id
        self.bound = NEAR if self.flags.get("dtype") == "bf16" else None

    def __str__(self) -> str:
        runs = [(self.flags | layout).items() for layout in self.layouts or [{}]]
        words = [" ".join(spelled(*flag) for flag in flags) or "no flags" for flags in runs]
        return f"{self.ranks} ranks, {'; saved, and gone on with '.join(words)}" if self.step else self.name

    @classmethod
    def prepare(cls):
        watched()
        importlib.import_module("services.seam").plugins()
        importlib.import_module("tests.warm")

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        if self.name in CALLS:
            module, test, arguments = CALLS[self.name]
            try:
                getattr(importlib.import_module(module), test)(*arguments)
                yield self.name, "", ""
            except AssertionError as error:
                yield self.name, f"another order, time or memory than the papers' {error}".strip(), ""
            return
        equal, kind = watched()
        gc.collect(), gc.disable()
        if not self.layouts:
            run = equal.watch(self.step, self.flags, kind)
            yield from self.numbers(equal, run)
            yield from run.rows
        for i, layout in enumerate(self.layouts):
            once = dict(steps=len(self.layouts), stop_after=i + 1, save_every=1, eval_every=0)
            once |= dict(out=f"{self.name} {i}", resume=f"{self.name} {i - 1}" if i else "")
            run = equal.watch(self.step, self.flags | layout | once, equal.Served)
            yield from ((f"gone on after {i} steps, {name}", *row) for name, *row in self.numbers(equal, run))
        gc.enable()

    def numbers(self, equal: Any, run: Any) -> Iterator[Row]:
        """Of a run."""
        yield "how often require_finite was called", len(run.gradients), FOUND
        if len(run.gradients) == len(run.history):
            losses, norms = ([row[key] for row in run.history] for key in ("loss", "grad_norm"))
            seen = SimpleNamespace(losses=losses, norms=norms, gradients=run.gradients, parameters=run.parameters)
            yield from ((name, digest(value), FOUND) for name, value in equal.by_name(seen).items())


def suite(points: int, *names: str, says: str = "") -> Criterion:
    """A criterion: the file as it stands, in these rows of the suite."""
    says = says or f"the file in the project's own tests: {'; '.join(names)}"
    return Criterion(says, points, Suite, tuple(dict(name=name) for name in names), whole=True)


def plain_rows(lab: Any) -> dict[str, tuple[int, str, dict[str, Any]]]:
    """The lab's rows that a copy without tests can carry out: no variants, no patches."""
    known = {field.name for field in fields(importlib.import_module(lab.modules[-1]).Config)}
    known |= {*importlib.import_module("tests.equal").SHAPE}
    cases = [Suite(0, **case) for task in lab.tasks for c in task.criteria if c.kind is Suite for case in c.cases]
    plain = [case.name for case in cases if case.step and {*case.flags}.union(*case.layouts) <= known]
    return {name: row_of(name) for name in plain}
