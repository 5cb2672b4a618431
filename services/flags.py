"""The command line, and the one line that a user sees when something goes wrong.

parse(Config)          flags from the dataclass' fields, help texts from their comments
main(train, Config)    one readable line instead of a traceback, once per job
"""

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
import textwrap
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from common import UserError
from common.model import PRESETS, ModelConfig
from services.dry_run import dry_run
from services.launch import world_size
from services.relief import out_of_memory

# How gloo and NCCL tell a rank that another one is gone.
LOST_PEER = re.compile("closed by peer|reset by peer|Broken pipe|remote process exited|timed out", re.IGNORECASE)


def check_shape(m: ModelConfig) -> ModelConfig:
    """The shape, if its parts fit together. Raises UserError, naming the flags to change."""
    for field in dataclasses.fields(m):  # a size is at least 1, or at least 0 where 0 is its default
        value, least = getattr(m, field.name), 0 if field.default == 0 else 1
        if type(value) is int and value < least:
            raise UserError(f"--{field.name.replace('_', '-')} is {value}: it must be at least {least}")
    dim, heads, kv_heads = m.dim, m.n_heads, m.n_kv_heads
    if dim % (2 * heads):  # RoPE rotates pairs of components
        raise UserError(
            f"--dim {dim} does not split into {heads} heads of an even size: "
            f"choose --dim as a multiple of {2 * heads}, or change --n-heads"
        )
    if heads % kv_heads:
        raise UserError(
            f"--n-heads {heads} is not a multiple of --n-kv-heads {kv_heads}: "
            f"choose --n-kv-heads among the divisors of {heads}"
        )
    if getattr(m, "experts", 0):
        E, k, G, M = m.experts, m.experts_per_token, m.expert_groups, m.groups_per_token
        if k > E:
            raise UserError(f"--experts-per-token {k} is more than --experts {E}: change one of them")
        if E % G or M > G:
            raise UserError(f"--expert-groups {G} must divide --experts {E}, and be at least --groups-per-token {M}")
        if k > (n := E // G * M or E):
            raise UserError(
                f"--groups-per-token {M} leaves a token {n} experts, fewer than --experts-per-token {k}: "
                "raise the one or lower the other"
            )
    return m


@dataclass
class RunFlags:
    """Overrides of a preset's shape, and flags of what surrounds a loop; the Config of step 1 extends this."""

    dim: int | None = None  # override the preset's width of the residual stream
    n_layers: int | None = None  # override the number of layers
    n_heads: int | None = None  # override the number of query heads
    n_kv_heads: int | None = None  # override the number of key/value heads
    ffn_dim: int | None = None  # override the width of the MLP
    vocab_size: int | None = None  # override the size of the vocabulary
    seq_len: int | None = None  # override the sequence length, in tokens
    tied: bool | None = None  # override whether embedding and head share one matrix
    device: Literal["auto", "cuda", "cpu"] = "auto"  # where to compute
    backend: Literal["auto", "nccl", "gloo"] = "auto"  # of torch.distributed, from step 2 on
    fuse_gradients: bool = False  # backward in fewer kernels: matmuls add to .grad (not ZeRO 2, 3, split backward)
    out: str = ""  # run directory; default: runs/STEP
    save_every: int = 100  # steps between checkpoints (and one at the end); 0: only when interrupted
    save_async: bool = False  # write checkpoints in the background, while training goes on
    resume: str = ""  # run directory or checkpoint to go on from; auto: the newest in --out, if there is one
    stop_after: int = 0  # end after this step of the same schedule, as a pre-empted job would
    skip_spikes: float = 0.0  # skip a step whose loss or gradient norm exceeds K x its running median; 0: never
    timeout: float = 600.0  # seconds without progress until the rank that hangs is named and the job ends
    log_ranks: bool = False  # each rank's loss, gradient norm, memory and seconds in metrics.jsonl
    documents: Literal["off", "mask", "reset"] = "off"  # attention stops at their borders; reset: positions restart
    end_token: int = 256  # with --documents: the token that ends one; 256 is what each text ends with here
    eval_every: int = 50  # steps between validations; 0: never
    eval_sequences: int = 64  # sequences of the held-out split in a validation
    generate: str = ""  # with --resume: continue this text and exit
    profile_memory: int = 0  # draw memory over time for the first N steps
    peak_tflops: float = 0.0  # the device's dense peak, if the table does not know it
    dry_run: int = 0  # count a step of one rank of so many, on tensors without numbers, instead of training
    rank: int = -1  # with --dry-run: this rank alone; default: one rank of each pipeline stage
    gpu: str = "h100-80"  # with --dry-run: whose peak and bandwidth (theory/gpus.py) the operators' times are for

    def presets(self) -> dict[str, ModelConfig]:
        """The shapes that `--model` can name."""
        return PRESETS

    def model_config(self) -> ModelConfig:
        """The preset with its overrides. Raises UserError."""
        presets = self.presets()
        if self.model not in presets:
            raise UserError(f"--model {self.model}: no such preset; choose one of {', '.join(presets)}")
        fields = {f.name for f in dataclasses.fields(presets[self.model])}
        overrides = {k: v for k, v in vars(self).items() if k in fields and v is not None}
        return check_shape(dataclasses.replace(presets[self.model], **overrides))


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

    def parse_args(self, argv: list[str] | None = None) -> argparse.Namespace:
        """The flags. Raises UserError; of an unknown flag it says which known one is like it."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for action in self._actions for flag in action.option_strings]
            words = [word.split("=")[0] for word in unknown if word.startswith("-")]
            near = [difflib.get_close_matches(word, known, n=1) for word in words]
            asked = " ".join(flag for flags in near for flag in flags)
            raise UserError(
                f"unrecognized arguments: {' '.join(unknown)}; "
                + (f"did you mean {asked}?" if asked else "--help lists the flags of this step")
            )
        return found


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
        config = parse(cls, argv)
        dry = any(getattr(config, flag, unset) != unset for flag, unset in (("dry_run", 0), ("rank", -1)))
        (partial(dry_run, train) if dry else train)(config)
    except UserError as error:
        report(f"error: {error}")
        status = 2
    except torch.OutOfMemoryError as error:
        report(f"error: rank {os.environ.get('RANK', 0)}: {out_of_memory(error, config, world_size())}")
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
