"""Flags. A Config is a dataclass with a field for each flag; `parse(Config)` makes an instance of
it from the command line.

    @dataclass
    class Config(RunConfig):
        "Flags of the trainer."

        steps: int = flag(200, "training steps of the whole schedule", least=1)
        lr: float = flag(3e-3, "peak learning rate")
        optimizer: str = flag("adamw", "the update rule", OPTIMIZERS)
        compile: bool = flag(False, "torch.compile each layer, and the loss")

gives the script --steps, --lr, --optimizer, and both --compile and --no-compile, besides the flags
of RunConfig (run.py). `config.steps` is then an int. The values of --optimizer are the keys of the
dict OPTIMIZERS. In --help, the first line of the class's docstring is the title of its flags.

From step 2 on: NEEDS. Some flags have an effect only with certain values of other flags. In step 2,
for example, this one (here without its second need, of step 3) needs --sync bucket:

    bucket_mb: float = flag(1.0, "largest gradient bucket", needs={"sync": ["bucket"]})

If it is given with another --sync, the run ends:

    $ python step02_ddp.py --sync naive --bucket-mb 1
    error: --bucket-mb has no effect without --sync bucket: leave it out

A need for a flag that this step lacks is ignored: --sync needs --zero 0, but step 2 has no --zero.
"""

import argparse
import dataclasses
import inspect
import math
from collections.abc import Collection
from typing import Any, NoReturn, get_type_hints

from common import UserError

# For `needs`, which asks whether a value is `in` this: 2, 3, 4, ...
AT_LEAST_2 = range(2, 2**31)


def flag(
    default: Any,
    help: str,
    choices: Collection[str] = (),
    least: float = 0,
    needs: dict[str, Collection] | None = None,
) -> Any:
    """A field of a Config.

    help     what --help says of the flag
    choices  the allowed values of a str; or a dict: value -> what it selects
    least    the smallest value of a number; 0 by default, so that no flag is negative
    needs    see NEEDS above: another flag -> the values that it must have, because with others
             this flag does nothing: {"tp": AT_LEAST_2}, {"sp": [True]}, {"zero": ["0"]}
    """
    metadata = dict(help=help, choices=choices, least=least, needs=needs or {})
    return dataclasses.field(default=default, metadata=metadata)


def spelled(name: str) -> str:
    """The flag of a field: bucket_mb -> --bucket-mb."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are UserErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{message} (--help lists all flags)")


def add_flags(parser: Parser, cls: type):
    """Add the flags of `cls`, grouped by the class that declares them: `cls` first, then its bases.
    A flag that two classes declare is listed once, with the subclass.
    """
    remaining = {field.name: field for field in dataclasses.fields(cls)}
    types = get_type_hints(cls)
    # All classes but `object`. A group's title is the first line of the class's docstring
    for base in cls.__mro__[:-1]:
        group = parser.add_argument_group(base.__doc__.partition("\n")[0].rstrip("."))
        for name in inspect.get_annotations(base):
            field = remaining.pop(name, None)
            if field is None:  # a subclass has listed this flag
                continue
            help_text = field.metadata["help"]
            if field.default != "":
                help_text += f" (default: {field.default})"
            help_text = help_text.replace("%", "%%")  # argparse formats it with %
            # SUPPRESS: the result has only those flags that were given
            options: dict[str, Any] = dict(help=help_text, default=argparse.SUPPRESS)
            if types[name] is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif field.metadata["choices"]:
                # Not argparse's `choices`: `check_value` has a message of our own
                options["metavar"] = "{" + ",".join(field.metadata["choices"]) + "}"
            else:
                options["type"] = types[name]
                options["metavar"] = name.upper()
            group.add_argument(spelled(name), **options)


def check_value(field: dataclasses.Field, value: Any):
    """Raise UserError unless the flag may have this value."""
    written = spelled(field.name)
    choices = field.metadata["choices"]
    least = field.metadata["least"]
    if choices:
        if value not in choices:
            raise UserError(f"{written} {value}: choose from {', '.join(choices)}")
        return
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{written} is {value}: it must be finite")
    # Not isinstance, because True is an int, too
    if type(value) in (int, float) and value < least:
        raise UserError(f"{written} is {value}: it must be at least {least}")


def in_words(name: str, values: Collection) -> str:
    """What `needs` asks of a flag, in words: {"tp": AT_LEAST_2} -> "--tp 2 or more", {"sp": [True]}
    -> "--sp", {"zero": ["1", "2"]} -> "--zero 1 or 2".
    """
    if values is AT_LEAST_2:
        return f"{spelled(name)} 2 or more"
    if values == [True]:
        return spelled(name)
    return f"{spelled(name)} {' or '.join(values)}"


def check_needs(field: dataclasses.Field, config: Any):
    """Raise UserError if this flag, which was given, does nothing with the values of the others."""
    written = spelled(field.name)
    if getattr(config, field.name) is False:  # for example --no-sp was given
        written = spelled(f"no_{field.name}")
    for other, values in field.metadata["needs"].items():
        value = getattr(config, other, None)
        if value is not None and value not in values:  # None: this step has no such flag
            need = in_words(other, values)
            raise UserError(f"{written} has no effect without {need}: leave it out")


def parse(cls: type, argv: list[str] | None = None) -> Any:
    """Command line -> an instance of dataclass `cls`. Raises UserError, which names the flag.

    `argv`: the words after the script's name; None: those of this process.
    """
    # --help shows the first paragraph of the script's docstring
    about = inspect.getmodule(cls).__doc__.partition("\n\n")[0]
    parser = Parser(description=about, allow_abbrev=False)
    add_flags(parser, cls)
    given = vars(parser.parse_args(argv))
    config = cls(**given)
    given_fields = [field for field in dataclasses.fields(cls) if field.name in given]
    for field in given_fields:
        check_value(field, given[field.name])
    for field in given_fields:
        check_needs(field, config)
    return config
