"""Mistakes that the tests must notice: a name, where the text stands, what it becomes, and what that would mean.

A fault is put into the source of a function or class, which is compiled anew. One whose text is gone raises KeyError.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str


FAULTS: dict[str, Fault] = {
    # services
    "resume-without-moments": Fault(
        "services.boxes",
        "take",
        "optimizer.rule.state[master.tensor][kind] = room.tensor",
        "pass",
        "a resumed AdamW begins anew",
    ),
    "resume-from-rank-0s-slice": Fault(
        "services.boxes",
        "masters",
        "first = max(0, units[name].first - units[name].place[name][0]) if units else 0",
        "first = 0",
        "a slice is read from the beginning of its parameter",
    ),
    "resume-from-rank-0s-rows": Fault(
        "services.boxes",
        "Piece",
        "start[split.dim] += split.start",
        "start[split.dim] += 0",
        "all ranks of tp read the rows of the first",
    ),
    "resume-at-the-first-batch": Fault(
        "services.resume",
        "Keeper",
        'self.done = found.index["step"]',
        "self.done = 0",
        "data and learning rate begin anew",
    ),
    "validation-of-one-rank": Fault(
        "services.evaluation",
        "validate",
        'for dim in ("dp", "cp", "pp"):',
        "for dim in ():",
        "the validation loss is that of one rank's tokens",
    ),
}


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Inside, the named mistake is in the program."""
    fault = FAULTS[name]
    module = importlib.import_module(fault.module)
    right = getattr(module, fault.owner)
    source = textwrap.dedent(inspect.getsource(right))
    if fault.old not in source:
        raise KeyError(f"{name}: {fault.old!r} is not in {fault.module}.{fault.owner}")
    made: dict = {}
    exec(compile(source.replace(fault.old, fault.new), f"<fault {name}>", "exec"), vars(module), made)
    wrong = made[fault.owner]
    if inspect.isclass(right):  # menus and importers hold the class itself: its methods are exchanged
        kept = {key: value for key, value in vars(right).items() if key in vars(wrong) and callable(value)}
        kept |= {key: value for key, value in vars(right).items() if isinstance(value, staticmethod)}
        for key in kept:
            setattr(right, key, vars(wrong)[key])
        try:
            yield
        finally:
            for key, value in kept.items():
                setattr(right, key, value)
    else:
        code = right.__code__
        right.__code__ = wrong.__code__
        try:
            yield
        finally:
            right.__code__ = code
