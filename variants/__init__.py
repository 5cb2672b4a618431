"""Second helpings: one file is one technique, which changes a step from outside.

A file may hold
    entries of menus      added when it is imported, so a flag of a step has one more value: SYNCS["torch"] = TorchSync.
                          An entry of a step may be wrapped: it is called, unless a flag asks for something else
    class Flags           a dataclass: its own flags, with a comment each, which become fields of the run's config
    SINCE                 the Config of the step from which on these flags exist; without it, they do in all steps
    settle(config)        sets flags that are left open, before any check
    check(config, world)  raises UserError for flags that cannot work, before anything is built; it sets none
    attach(config, parts) called once before the first step, with all that the step has built (`Parts`): if its flags
                          are set, it changes data and, by `parts.instead` and `parts.around` alone, calls. What it
                          returns is `parts.kept` by its name; in checkpoints, too, if it has `state()`, which is the
                          same on all ranks and fits in JSON, and `restore(state)`

Whoever comes first, calls nest alike: inside is the step's own, or the one `instead` of it; then come those that stand
`around` it, in ORDER; outside are services and tests, which look on. With default flags there is no variant in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from common import UserError
from common.comm import Mesh
from common.trainer import Run

# Who stands around calls, from the inside to the outside: sums of gradients come before what becomes of them; a chunk's
# loss is not scaled; a skipped update moves biases, and all of it waits for the record; what is read ahead, or comes as
# a message, is looked at by documents.
ORDER = ["compress", "zero_replicas", "grad_dtype", "chunked_loss", "fp16", "balance_bias", "skip_spikes", "prefetch"]
ORDER += ["compress_activations", "cp_flash", "documents"]


class Change(NamedTuple):
    """What one file does to one method of one object."""

    owner: Any
    method: str
    by: str  # the file: its __name__
    how: str
    call: Callable
    plain: Callable  # the step's own

    def __str__(self) -> str:
        return f"{self.by.split('.')[-1]} {self.how} {type(self.owner).__name__}.{self.method}"

    def place(self) -> int:
        """How far outside it stands."""
        room, _, name = self.by.rpartition(".")
        return -1 if self.how == "instead of" else ORDER.index(name) if room == "variants" else len(ORDER)


@dataclass
class Parts:
    """What a step has built (None, or a mesh of one rank: it does not know this), and what has been attached to it."""

    run: Run
    model: Any
    optimizer: Any
    data: Any
    sync: Any = None
    mesh: Mesh = field(default_factory=lambda: Mesh(dp=1))
    positions: Tensor | None = None
    pipeline: Any = None
    attached: list[Change] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)  # by file: what its `attach` has returned

    @property
    def units(self) -> list:
        """ZeRO's, if there are any."""
        return getattr(self.optimizer, "units", [])

    @property
    def kinds(self) -> set[str]:
        """Of actions, if a pipeline follows a list of them."""
        return {line.action.kind for line in getattr(self.pipeline, "program", ())}

    def instead(self, owner: Any, method: str, call: Callable, by: str):
        """`owner.method(...)` becomes `call(...)`. Raises UserError if another file has done the same."""
        self.change(owner, method, by, "instead of", call)

    def around(self, owner: Any, method: str, call: Callable, by: str):
        """`owner.method(...)` becomes `call(inner, ...)`, where `inner` is what this stands around."""
        assert by.partition("variants.")[2] in ["", *ORDER], f"say in ORDER of variants/__init__.py where {by} stands"
        self.change(owner, method, by, "around", call)

    def change(self, owner: Any, method: str, by: str, how: str, call: Callable):
        """Note it, and nest all changes of this method anew."""
        alike = [change for change in self.attached if change.owner is owner and change.method == method]
        new = Change(owner, method, by, how, call, alike[0].plain if alike else getattr(owner, method))
        if how == "instead of" and (other := next((old for old in alike if old.how == how), None)):
            raise UserError(f"{other} and {new}: two flags that do not go together")
        self.attached.append(new)
        inner = new.plain
        for change in sorted([*alike, new], key=Change.place):
            inner = change.call if change.how == "instead of" else partial(change.call, inner)
        setattr(owner, method, inner)
