"""Further techniques by chapter: a file each, which changes a step from outside where a flag asks for it. The rules:

 1  A file: a docstring (idea, law, source, where it would stand in the course), the mechanism, its record (record.py)
    with `Flags`, and functions that attach it. A file that only others import calls itself a *library*.
 2  It serves the steps from SINCE, a Config, on (without SINCE all), and is in the folder of the first one.
 3  An entry of a menu, added when the file is imported, is one more value of a flag: SYNCS["torch"] = TorchSync.
 4  `settle(config, world)` sets flags that are left open. Nothing else sets flags.
 5  NEEDS and REFUSES say which flags do not go together; `check(config, world)` raises UserError for sizes that do not
    fit. Both come before anything is built.
 6  `prepare(config, parts)`, before the step builds, may change entries of menus, until the step has built.
 7  `attach(config, parts)`, before the first step, may change data that the step has built, and calls.
 8  Entries and calls are changed by `parts.instead` (at most one file) and `parts.around` alone. They nest in one
    order, whichever file attaches first: the step's own or its replacement, techniques in ORDER, services and tests.
 9  By default no course code is replaced. A run prints each changed call; its table of traffic has each added group.
10  What `attach` returns is `parts.kept` by the file's name. Services ask for what it has: checkpoints for `state()`,
    the same on all ranks and JSON, `restore(state)`, and `owed`, tensors by bucket or unit; the record of a step for
    `figures()`, the screen for the lines of `notes()`, validation for `look(tokens)`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from common import UserError
from common.comm import Mesh
from common.trainer import Run

# Wrappers of calls, innermost first: gradients are summed before they are changed; a chunk's loss is not scaled, nor
# are late gradients; a skipped update still moves biases; documents and dropout see inputs that were prefetched or
# received; attention is recomputed with all other changes.
ORDER = ["elementwise", "compress", "zero_overlap", "zero_replicas", "grad_dtype", "chunked_loss", "stale", "fp16"]
ORDER += ["routing", "skip_spikes", "prefetch", "batch_ramp", "compress_activations", "pp_scatter", "flash"]
ORDER += ["documents", "dropout", "attention_scores"]


def name_of(module: str) -> str:
    """A file's own name, without its folder: "extras.variants.step01.fp16" is "fp16"."""
    return module.rpartition(".")[2]


class Change(NamedTuple):
    """What one file does to one method of one object, or to one entry of a menu."""

    owner: Any
    name: Any  # of the method, or the entry's key
    by: str  # the file: its __name__
    how: str
    call: Callable
    plain: Callable  # the step's own
    what: str  # the method with its class; or the flag with its value

    def __str__(self) -> str:
        return f"{name_of(self.by)} {self.how} {self.what}"

    @property
    def asked(self) -> bool:
        """Whether a flag has asked for it; else a service or a test observes the call."""
        return self.how == "instead of" or self.by.startswith(f"{__name__}.") or isinstance(self.owner, dict)

    def place(self) -> int:
        """Its place among the wrappers of a call: the larger, the further outside."""
        variant = self.by.startswith(f"{__name__}.")
        return -1 if self.how == "instead of" else ORDER.index(name_of(self.by)) if variant else len(ORDER)

    def put(self, call: Callable):
        """Let the method, or the entry, be this one."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = call
        else:
            setattr(self.owner, self.name, call)


@dataclass
class Parts:
    """What a step has built (None: it has no such part), and what has been attached. One rank has a mesh, too."""

    run: Run
    model: Any = None
    optimizer: Any = None
    data: Any = None
    sync: Any = None
    mesh: Mesh | None = None
    positions: Tensor | None = None
    pipeline: Any = None
    attached: list[Change] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)  # by file: what its `attach` has returned

    @property
    def units(self) -> list:
        """ZeRO's, if there are any."""
        return getattr(self.optimizer, "units", [])

    @property
    def way(self) -> list[int]:
        """The stages from stage 0 to the loss, in the order of a micro-batch; without a pipeline 0 alone."""
        stages = [0]
        while self.pipeline is not None and (after := self.pipeline.places[stages[-1]].after) is not None:
            stages.append(after)
        return stages

    @property
    def kinds(self) -> set[str]:
        """Of actions, if a pipeline follows a list of them."""
        return {line.action.kind for line in getattr(self.pipeline, "program", ())}

    def keeps(self, what: str) -> list[Any]:
        """What files have returned from `attach`, if it has an attribute, or a method, of this name."""
        return [kept for kept in self.kept.values() if hasattr(kept, what)]

    def instead(self, owner: Any, name: Any, call: Callable, by: str):
        """Replace `owner.name(...)`, or `owner[name](...)` of a menu. Raises UserError if another file has done so."""
        self.change(owner, name, by, "instead of", call)

    def around(self, owner: Any, name: Any, call: Callable, by: str):
        """Wrap it: the same becomes `call(inner, ...)`; `inner` is the method with all wrappers inside this one."""
        placed = not by.startswith(f"{__name__}.") or name_of(by) in ORDER
        assert placed, f"say in ORDER of variants/__init__.py where {by} stands"
        self.change(owner, name, by, "around", call)

    def change(self, owner: Any, name: Any, by: str, how: str, call: Callable):
        """Record a change, and nest all changes of this method or entry anew."""
        alike = [change for change in self.attached if change.owner is owner and change.name == name]
        own = owner[name] if isinstance(owner, dict) else getattr(owner, name)
        new = Change(owner, name, by, how, call, alike[0].plain if alike else own, self.named(owner, name))
        if how == "instead of" and (other := next((old for old in alike if old.how == how), None)):
            raise UserError(f"{other} and {new}: two flags that do not go together")
        self.attached.append(new)
        inner = new.plain
        for change in sorted([*alike, new], key=Change.place):
            inner = change.call if change.how == "instead of" else partial(change.call, inner)
        new.put(inner)

    def named(self, owner: Any, name: Any) -> str:
        """A method as `Decoder.loss`; an entry of a menu as its flag, `--zero 2`."""
        if not isinstance(owner, dict):
            return f"{type(owner).__name__}.{name}"
        flags = [flag.name for flag in fields(self.run.config) if flag.metadata.get("menu") is owner]
        return " ".join([*(f"--{flag.replace('_', '-')}" for flag in flags), str(name)])

    def give_back(self):
        """Restore all menus: the step has built, or will not."""
        for change in self.attached:
            if isinstance(change.owner, dict):
                change.put(change.plain)

    def said(self) -> list[str]:
        """A line for each kind of change that a flag has asked for, and of how many objects."""
        lines = Counter(f"attached: {change}" for change in self.attached if change.asked)
        return [line + f" (x{n})" * (n > 1) for line, n in lines.items()]
