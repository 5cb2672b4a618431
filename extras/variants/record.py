"""Defines how a technique's file declares its flags as data: values to test, and flags that are needed or excluded.

    Flags      a dataclass of the flags and their defaults
    TRIED      values that tests combine with all other flags, besides the defaults. Switches, Literals and menus need
               none, because tests try all their values
    BESIDE     values that tests give to other flags, so that the flags of the file have an effect
    COMPUTED   True if the flags change the result: then a test also sets them in its reference run of one process
    NEEDS      (flag, other, values...): the flag may be set only if the other flag has one of these values or, if no
               values are given, only if the other flag is set
    REFUSES    Refusal(flags, why): flags that cannot be combined, or a value that a flag cannot have

A run applies these declarations (extras/services/seam.py), and tests combine flags accordingly (extras/tests/pairs.py).
A file's function `check` tests other conditions, such as that one size divides another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

SET = "the flag does not have its default"
HAS = "the step has the flag"
OFF = dict(zero=0, pp=1, cp=1, tp=1, ep=1)  # a step without one of these flags behaves as with this value


class But(tuple):
    """The condition that a flag has none of these values."""


def spelled(name: str, value: Any) -> str:
    """A flag with its value, as on the command line: "--sync ring", "--no-sp"."""
    flag = name.replace("_", "-")
    return f"--{flag} {value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}"


class Refusal(NamedTuple):
    """Flags that cannot be combined, and why; or one flag with values that it cannot have."""

    flags: dict[str, Any]  # a condition on each: SET, HAS, a tuple of values, `But` or a function; refused if all hold
    why: str  # what would go wrong; after a semicolon, what to do
    shows: dict[str, Any] | None = {}  # noqa: RUF012  # other flags with which a test shows the error; None: no test
    needs: str = ""  # instead of `why`: the flags without which the first flag has no effect

    def holds(self, value: Callable[[str], Any], plain: dict[str, Any]) -> bool:
        """Whether a run is refused. `value(name)` is a flag's value; `plain` maps the run's flags to their defaults."""
        return all(self.meets(name, value(name) if name in plain else None, plain) for name in self.flags)

    def meets(self, name: str, value: Any, plain: dict[str, Any]) -> bool:
        """Whether a flag meets its condition: for a missing flag, whether that is a tuple (no `But`) with OFF[name]."""
        condition = self.flags[name]
        if name not in plain:
            return type(condition) is tuple and name in OFF and OFF[name] in condition
        if callable(condition):
            return condition(value)
        if condition in (SET, HAS):
            return condition == HAS or value != plain[name]
        return (value in condition) != isinstance(condition, But)

    def text(self, value: Callable[[str], Any], plain: dict[str, Any]) -> str:
        """Returns the error in one line: the flags with their values, and why they are refused."""
        words = [spelled(name, value(name)) for name in self.flags if name in plain and self.flags[name] != HAS]
        if self.needs:
            given = f", not with {words[1]}" if isinstance([*self.flags.values()][1], But) else ""
            return f"{words[0]} matters only with {self.needs}{given}"
        return f"{words[0]} with {' and '.join(words[1:])}: {self.why}" if words[1:] else f"{words[0]}: {self.why}"


def need(plain: dict[str, Any], flag: str, other: str, *values: Any) -> Refusal:
    """Turns an entry of NEEDS, which is (flag, other, values...), into a refusal."""
    if values:
        return Refusal({flag: SET, other: But(values)}, "", needs=" or ".join(spelled(other, v) for v in values))
    least = plain[other]
    name = spelled(other, True)
    wanted = name if isinstance(least, bool) else f"{name} set" if least == "" else f"{name} above {least}"
    return Refusal({flag: SET, other: (least,)}, "", needs=wanted)
