"""Will it fit, how fast will it be, which layout do I take?

    python -m extras.theory.plan --model llama3-70b --gpus 128 --gpu h100-80 --seq-len 8192 --global-batch-size 1024
    python -m extras.theory.plan --model llama3-70b --gpus 128 --layout "--tp 8 --pp 4 --micro-batch-size 1"

It prints the ten best layouts of the course's own trainer, or the given one: memory, time, why the obvious others lose,
the questions of a plan with their laws and answers, and a line that launches it. GPUs are in nodes of 8; tp is
innermost, then cp, dp, pp. Memory is a bound (extras/theory/memory.py); what it bounds, a step's --dry-run counts.
Seconds: theory/seconds.py; how it searches: theory/search.py; what it is held against: `python -m extras.tests.bench
plan`.
"""

import importlib
import importlib.util
import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from common import UserError
from common.model import PRESETS
from common.trainer import among, parse
from extras.theory.gpus import GIB, GPUS, ROOM
from extras.theory.layouts import Layout, illegal
from extras.theory.report import report
from extras.theory.search import Found, evaluate, fits, search, smallest
from extras.theory.shapes import GPTS, Shape, shape_of

MOST_GPUS = 2**17


@dataclass
class Flags:
    """What is asked."""

    model: str = "llama3-8b"  # a preset of the course, or one of gpt3-22b, gpt3-175b, gpt3-530b, gpt3-1t
    gpus: int = 8  # how many; nodes have 8
    gpu: str = among(GPUS, "h100-80")  # of which kind
    seq_len: int = 0  # tokens of a sequence; 0: the model's
    global_batch_size: int = 0  # sequences of a step; 0: about 4M tokens
    layout: str = ""  # report on this layout instead of the best ones: "--tp 8 --pp 4 ..."
    json: str = ""  # write the layouts, their memory and their seconds to this file


def models() -> dict[str, Shape]:
    """All by name. Variants, a folder beside the course, add models with experts, and schedules."""
    experts = {}
    if importlib.util.find_spec("extras.variants") is not None:
        importlib.import_module("extras.services.seam").plugins()
        experts = importlib.import_module("extras.variants.step07.expert_presets").EXPERTS
    return {name: shape_of(m, SimpleNamespace(**experts.get(name, {}))) for name, m in PRESETS.items()} | GPTS


def asked(flags: Flags, known: dict[str, Shape]) -> tuple[Shape, int]:
    """Model and batch. Raises UserError."""
    if flags.model not in known:
        raise UserError(f"--model {flags.model}: no such model; choose one of {', '.join(known)}")
    if flags.gpus > MOST_GPUS:
        raise UserError(f"--gpus {flags.gpus}: the planner counts up to {MOST_GPUS}")
    if flags.json and not Path(flags.json).parent.is_dir():
        raise UserError(f"--json {flags.json}: there is no folder {Path(flags.json).parent}; make it, or name another")
    m = known[flags.model]
    m = replace(m, seq_len=flags.seq_len or m.seq_len)
    about_4m = 2 ** max(0, (2**22 // m.seq_len).bit_length() - 1)
    return m, flags.global_batch_size or max(flags.gpus, about_4m)


def layout_of(flags: Flags, batch: int, m: Shape) -> Layout:
    """The layout of --layout. Raises UserError."""
    text, gpus = flags.layout, flags.gpus
    try:
        x = parse(Layout, shlex.split(text))
    except ValueError as error:
        raise UserError(f"--layout {text!r}: {error}") from None
    inner = x.pp * x.cp * x.tp
    if gpus % inner:
        raise UserError(f"--pp {x.pp} x --cp {x.cp} x --tp {x.tp} = {inner} does not divide --gpus {gpus}: change one")
    if x.dp not in (1, gpus // inner):
        raise UserError(f"--layout {text!r}: --dp is what is left of --gpus {gpus}, {gpus // inner}; leave it out")
    own = x.global_batch_size if "--global-batch-size" in text else batch
    x = replace(x, dp=gpus // inner, global_batch_size=own)
    if reason := illegal(m, x):
        raise UserError(f"--layout {text!r}: {reason}")
    return x


def no_fit(m: Shape, flags: Flags, batch: int) -> UserError:
    """What would be needed, if nothing fits."""
    gpu, least, gpus = GPUS[flags.gpu], smallest(m, flags.gpus, batch), flags.gpus
    if least is None:
        return UserError(
            f"no layout of {gpus} GPUs is legal for {flags.model}, --seq-len {m.seq_len} and "
            f"--global-batch-size {batch}: use a number of GPUs and a batch with more common divisors"
        )
    more = "no number of GPUs is enough"
    while gpus < MOST_GPUS:
        gpus *= 2
        enough = smallest(m, gpus, max(batch, gpus))
        if enough and fits(enough[1], gpu):
            more = f"with --gpus {gpus} it does"
            break
    x, need = least[0], least[1].total / GIB
    return UserError(
        f"{flags.model} with --seq-len {m.seq_len} does not fit on {flags.gpus} {flags.gpu}: the smallest layout needs "
        f"{need:.1f} GiB a GPU, {need - ROOM * gpu.memory / GIB:.1f} GiB too much ({x.flags()}); {more}"
    )


def found(flags: Flags, m: Shape, batch: int) -> list[Found]:
    """The layout that is asked about, or the best ones of all. Raises UserError."""
    gpu = GPUS[flags.gpu]
    if flags.layout:
        return [evaluate(m, layout_of(flags, batch, m), gpu)]
    best, timed = search(m, flags.gpus, batch, gpu, bar=lambda tries: tqdm(tries, disable=None, leave=False))
    if not best:
        raise no_fit(m, flags, batch)
    print(f"{flags.model}, {flags.gpus} {flags.gpu}, --seq-len {m.seq_len}, --global-batch-size {batch}")
    print(f"{timed} layouts timed, as bounds exclude all other legal ones; here is the best of each of ten meshes:\n")
    return best


def main(argv: list[str] | None = None) -> int:
    """The command; a mistake is one line and exit status 2."""
    try:
        flags, known = parse(Flags, argv), models()
        m, batch = asked(flags, known)
        best = found(flags, m, batch)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(flags.model, known, m, best, GPUS[flags.gpu]))
    if flags.json:
        plans = [dict(layout=asdict(x), bytes=h._asdict(), seconds=s._asdict()) for x, h, s in best]
        Path(flags.json).write_text(json.dumps(plans, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
