"""What a technique's file says about its flags, as data: values to try, what they need, what they do not go with.

    Flags      a dataclass of the flags and their defaults
    TRIED      values that tests combine with all other flags, beside the defaults. Of a switch, a Literal and a menu
               they try all values
    BESIDE     values of other flags, with which the effect of the file's flags shows
    COMPUTED   True if the flags change what is computed, not how: the one process that a test compares with has them
    NEEDS      (flag, other, values...): if set, the flag matters only if the other flag has one of these values;
               without values, if the other flag is set
    REFUSES    Refusal(flags, why): flags that do not go together

Declared once, in the file of the technique, this is what a run refuses (extras/services/seam.py), what tests combine
(extras/tests/pairs.py), and what the table of techniques says (`python -m extras.variants`). What is not a question of
flags alone, such as whether a size divides another, is a file's function `check`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

SET = "the flag does not have its default"
HAS = "the step has the flag"
OFF = dict(zero=0, pp=1, cp=1, tp=1, ep=1)  # what a step that lacks one of these flags does


class But(tuple):
    """A condition: the flag has none of these values."""


def but(*values: Any) -> But:
    """The condition that a flag has none of these values."""
    return But(values)


def spelled(name: str, value: Any) -> str:
    """A flag with its value, as on the command line: "--sync ring", "--no-sp"."""
    flag = name.replace("_", "-")
    return f"--{flag} {value}" if not isinstance(value, bool) else f"--{flag}" if value else f"--no-{flag}"


class Refusal(NamedTuple):
    """Flags that do not go together, and why."""

    flags: dict[str, Any]  # each has SET, HAS, a tuple of values, `but` or a function: refused where all of these hold
    why: str  # what would go wrong; after a semicolon, what to do
    shows: dict[str, Any] | None = {}  # noqa: RUF012  # where a run without it goes wrong on CPUs; None: nowhere
    needs: str = ""  # instead of `why`: what the first flag needs, to matter at all

    def holds(self, value: Callable[[str], Any], plain: dict[str, Any]) -> bool:
        """Whether a run is refused. `value`: of a flag of the run; `plain`: the defaults of all flags of its step."""
        return all(self.meets(name, value(name) if name in plain else None, plain) for name in self.flags)

    def meets(self, name: str, value: Any, plain: dict[str, Any]) -> bool:
        """Whether a flag with this value is one of those that do not go together."""
        condition = self.flags[name]
        if name not in plain:
            return type(condition) is tuple and name in OFF and OFF[name] in condition
        if callable(condition):
            return condition(value)
        if condition in (SET, HAS):
            return condition == HAS or value != plain[name]
        return (value in condition) != isinstance(condition, But)

    def text(self, value: Callable[[str], Any], plain: dict[str, Any]) -> str:
        """One line, which names all flags and says what to do."""
        words = [spelled(name, value(name)) for name in self.flags if name in plain and self.flags[name] != HAS]
        if self.needs:
            given = f", not with {words[1]}" if isinstance([*self.flags.values()][1], But) else ""
            return f"{words[0]} matters only with {self.needs}{given}"
        return f"{words[0]} with {' and '.join(words[1:])}: {self.why}" if words[1:] else f"{words[0]}: {self.why}"


def need(plain: dict[str, Any], flag: str, other: str, *values: Any) -> Refusal:
    """A line of NEEDS as a refusal."""
    if values:
        return Refusal({flag: SET, other: but(*values)}, "", needs=" or ".join(spelled(other, v) for v in values))
    least = plain[other]
    name = spelled(other, True)
    wanted = name if isinstance(least, bool) else f"{name} set" if least == "" else f"{name} above {least}"
    return Refusal({flag: SET, other: (least,)}, "", needs=wanted)
