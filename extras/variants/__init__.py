"""Further techniques, one file each. A file changes a step of the course from outside, if its flag is set. The rules:

 1  A file has a docstring (idea, law, source, and where its lines would be in the course), the technique, declarations
    about its flags (record.py), and functions that attach it.
 2  A technique applies from the step of its folder on, or from the step whose Config is SINCE (`object`: all).
 3  A menu is a dict, mostly from a flag's values. Importing a file adds entries: SYNCS["tree"] allows `--sync tree`.
 4  `settle(config, world)` may set flags. No other function may. `world` is the number of ranks.
 5  NEEDS and REFUSES declare which flags cannot be combined; `check(config, world)` raises UserError for sizes that do
    not fit. A run applies the declarations and calls `check` before it builds anything.
 6  `prepare(config, parts)` runs before the step builds its objects. It may change menus; `give_back` restores them.
 7  `attach(config, parts)` runs before the first training step. It may change the objects that the step has built.
 8  Methods and menu entries are changed only by `parts.instead`, which replaces one (no second file may replace it), or
    by `parts.around`, which wraps one. The nesting does not depend on which file attaches first. Innermost is the
    step's own method or its replacement, then wrappers of techniques (in ORDER), then others, in order of attaching.
 9  By default no course code is replaced. A run prints each changed method; its traffic table lists each new group.
10  `parts.kept` maps a file's name to what its `attach` returned. This object may have `state()` (JSON, the same on all
    ranks), `restore(state)` and `owed` (tensors by bucket or unit), for checkpoints; `look(tokens)`, which validation
    calls; and `between`: while it is true, ranks of dp have different weights, and no signal ends the run.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common import UserError
from common.comm import Mesh
from common.trainer import Run

# Wrapper order, innermost first. For example, documents see the batch that prefetch has read.
ORDER = ["elementwise", "compress", "zero_overlap", "zero_replicas", "chunked_loss", "fp16"]
ORDER += ["diloco", "routing", "prefetch", "compress_activations", "flash", "documents", "dropout"]
ORDER += ["attention_scores"]


def name_of(module: str) -> str:
    """A file's own name, without its folder: "extras.variants.step01.fp16" is "fp16"."""
    return module.rpartition(".")[2]


class Change(NamedTuple):
    """A change that one file makes to a method of an object, or to an entry of a menu (a dict, such as SYNCS)."""

    owner: Any
    name: Any  # the method's name, or the entry's key
    by: str  # the file's __name__
    how: str  # "instead of", "around"
    call: Callable
    plain: Callable  # the step's own method, or the menu's own entry
    text: str  # describes the change, for the screen

    @property
    def place(self) -> int:
        """Position in the nesting, from innermost: replacement (-1), techniques' wrappers in ORDER, other wrappers."""
        if self.how == "instead of":
            return -1
        return ORDER.index(name_of(self.by)) if self.by.startswith(f"{__name__}.") else len(ORDER)

    def put(self, call: Callable):
        """Install `call` as the method or, if the owner is a dict (a menu), as its entry."""
        if isinstance(self.owner, dict):
            self.owner[self.name] = call
        else:
            setattr(self.owner, self.name, call)


class Progress:
    """Tracks a rank's training `step` and its micro-batch `now` (from 0), whose forward or backward is running."""

    def __init__(self, parts: "Parts"):
        self.step, self.now = -1, -1
        self.starts: Callable[[], None] = lambda: None  # called before each forward and, with a pipeline, backward
        parts.around(parts.data, "batch", self.begin, by=__name__)
        parts.model.register_forward_pre_hook(self.enter)
        for act in ("forward", "backward") if parts.pipeline is not None else ():  # a pipeline does not call the model
            parts.around(parts.pipeline, act, self.act, by=__name__)

    def begin(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Wraps `Data.batch`: store the number of the step that begins, and reset `now`."""
        self.step, self.now = step, -1
        return read(step)

    def enter(self, _model: Any, _inputs: tuple):
        """Called before the model's forward: add 1 to `now`, unless this is validation."""
        self.now += torch.is_grad_enabled()
        self.starts()

    def act(self, right: Callable, i: int, *rest: Any) -> Any:
        """Wraps the forward and backward of micro-batch i in a pipeline: set `now` to i, also for recomputation."""
        self.now = i
        self.starts()
        return right(i, *rest)


@dataclass
class Parts:
    """The objects that a step of the course has built (None: none, or not yet), and all changes made by files."""

    run: Run
    model: Any = None
    optimizer: Any = None
    data: Any = None
    sync: Any = None
    mesh: Mesh | None = None
    positions: Tensor | None = None
    pipeline: Any = None
    attached: list[Change] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)  # file's name -> what its `attach` returned

    @cached_property
    def progress(self) -> Progress:
        """Tracks this rank's training step and micro-batch. Tracking begins with the first access."""
        return Progress(self)

    @property
    def units(self) -> list:
        """The units of step 3's ZeRO; without ZeRO, an empty list."""
        return getattr(self.optimizer, "units", [])

    @property
    def way(self) -> list[int]:
        """The numbers of all stages in the order in which a micro-batch passes them; without a pipeline, [0]."""
        stages = [0]
        while self.pipeline is not None and (after := self.pipeline.places[stages[-1]].after) is not None:
            stages.append(after)
        return stages

    @property
    def kinds(self) -> set[str]:
        """The kinds of actions in this rank's program (step 6); empty if its pipeline has no program."""
        return {line.action.kind for line in getattr(self.pipeline, "program", ())}

    def keeps(self, what: str) -> list[Any]:
        """All objects in `kept` that have an attribute or method of this name."""
        return [kept for kept in self.kept.values() if hasattr(kept, what)]

    def instead(self, owner: Any, name: Any, call: Callable, by: str):
        """Replace `owner.name` (in a dict, `owner[name]`) by `call`. Raises UserError if another file has done so."""
        self.change(owner, name, by, "instead of", call)

    def around(self, owner: Any, name: Any, call: Callable, by: str):
        """Wrap a method or menu entry: callers get `call(inner, ...)`. `inner` has all wrappers of a lower `place`."""
        placed = not by.startswith(f"{__name__}.") or name_of(by) in ORDER
        assert placed, f"{by} wraps a method: insert it in ORDER of variants/__init__.py"
        self.change(owner, name, by, "around", call)

    def change(self, owner: Any, name: Any, by: str, how: str, call: Callable):
        """Record a change, then rebuild the nesting of all changes of this method or entry."""
        alike = [change for change in self.attached if change.owner is owner and change.name == name]
        plain = alike[0].plain if alike else owner[name] if isinstance(owner, dict) else getattr(owner, name)
        new = Change(owner, name, by, how, call, plain, f"{name_of(by)} {how} {self.named(owner, name)}")
        if how == "instead of" and (other := next((old for old in alike if old.how == how), None)):
            raise UserError(f"{other.text} and {new.text}: these two flags cannot be combined")
        self.attached.append(new)
        for change in sorted([*alike, new], key=lambda change: change.place):
            plain = change.call if change.how == "instead of" else partial(change.call, plain)
        new.put(plain)

    def named(self, owner: Any, name: Any) -> str:
        """The name of a method, such as `Decoder.loss`, or the flag of a menu entry, such as `--zero 2`."""
        if not isinstance(owner, dict):
            return f"{type(owner).__name__}.{name}"
        flags = [flag.name for flag in fields(self.run.config) if flag.metadata.get("menu") is owner]
        return " ".join([*(f"--{flag.replace('_', '-')}" for flag in flags), str(name)])

    def give_back(self):
        """Undo the changes of all menus, after the objects of the run have been built, or could not be built."""
        for change in self.attached:
            if isinstance(change.owner, dict):
                change.put(change.plain)

    def said(self) -> list[str]:
        """Returns a line for each change that a flag requested, with the number of objects that it changed."""
        asked = [one for one in self.attached if one.place < len(ORDER) or isinstance(one.owner, dict)]
        lines = Counter(f"attached: {one.text}" for one in asked)
        return [line + f" (x{n})" * (n > 1) for line, n in lines.items()]
