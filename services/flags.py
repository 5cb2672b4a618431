"""The command line, and the one line that a user sees when something goes wrong.

parse(Config)          flags from the dataclass' fields, help texts from their comments
main(train, Config)    one readable line instead of a traceback, once per job
"""

import argparse
import dataclasses
import inspect
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common import UserError

# How gloo and NCCL tell a rank that another one is gone.
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|timed out", re.IGNORECASE)


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
