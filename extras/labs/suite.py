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
from extras.labs.course import FOUND, Case, Criterion, Row, at_most_times
from extras.labs.tape import Graphs, Tape
from extras.services.seam import spelled

KEPT = Path(__file__).with_name("suite.pt")  # of a handout: rows by name; what each rank should find in which case
TESTS = Path(__file__).parents[2] / "extras/tests/rows.py"  # a handout has none
NEAR = 0.05  # a bound for 16 bits, in which two right files differ by some roundings of 2^-8

ORDERS = "afab", "1f1b", "interleaved"
CALLS = {  # tests of extras/tests/test_schedules.py that take no pool, by name: function, arguments
    **{f"{name}, v=1": ("test_bubble_without_w", (name, 1)) for name in ORDERS},
    **{f"interleaved, v={v}": ("test_bubble_without_w", ("interleaved", v)) for v in (2, 3)},
    **{f"schedules of {name}": ("test_every_size_is_complete_and_ends", (name,)) for name in ORDERS},
    "in flight": ("test_activations_in_flight", ()),
}


@lru_cache
def kept() -> dict[str, Any]:
    """Of a handout: rows, and finds."""
    return torch.load(KEPT, weights_only=True) if KEPT.exists() else dict(rows={}, finds={})


def there(name: str) -> bool:
    """Whether this copy of the project can carry out a row: a handout has some of one lab, and not all variants."""
    if TESTS.exists() or name not in kept()["rows"]:
        return TESTS.exists()
    _, step, flags = row_of(name)
    config = importlib.import_module("extras.services.seam").compose(importlib.import_module(step))
    menus = {field.name: field.metadata["menu"] for field in fields(config) if "menu" in field.metadata}
    given = (flag for some in (flags, *flags.get("then", ())) for flag in some.items())
    return all(value in menus.get(name, [value]) for name, value in given)


def row_of(name: str) -> tuple[int, str, dict[str, Any]]:
    """(ranks, step, flags) of a row by its name."""
    if not TESTS.exists():
        return tuple(kept()["rows"][name])
    rows = importlib.import_module("extras.tests.rows")
    row = rows.sized(rows.OF_LABS.get(name) or importlib.import_module("extras.tests.faults").SMALL_ROWS[name])
    return row.ranks, row.step, row.base | row.layout


def digest(x: Any) -> Tensor:
    """Five numbers that differ where a tensor does: its norm, and what it is along four directions."""
    x = torch.as_tensor(x, dtype=torch.float64).flatten()
    along = torch.randn(4, len(x), generator=torch.Generator().manual_seed(len(x)), dtype=torch.float64)
    return torch.cat((x.norm()[None], along @ x))


def watched() -> tuple[Any, type]:
    """extras/tests/equal.py, and its watch with instruments. Both are imported here, after the student's step."""
    equal = importlib.import_module("extras.tests.equal")
    look = importlib.import_module("extras.services.evaluation").look
    MemoryTimeline = importlib.import_module("extras.services.memory").MemoryTimeline

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
    """A row of OF_LABS or SMALL_ROWS, or one of CALLS, by its name."""

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
        importlib.import_module("extras.services.seam").plugins()
        importlib.import_module("extras.tests.warm")

    def run(self, step: Any, mesh: Mesh) -> Iterator[Row]:
        if self.name in CALLS:
            test, arguments = CALLS[self.name]
            try:
                getattr(importlib.import_module("extras.tests.test_schedules"), test)(*arguments)
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
    known |= {*importlib.import_module("extras.tests.equal").SHAPE}
    cases = [Suite(0, **case) for task in lab.tasks for c in task.criteria if c.kind is Suite for case in c.cases]
    plain = [case.name for case in cases if case.step and {*case.flags}.union(*case.layouts) <= known]
    return {name: row_of(name) for name in plain}
