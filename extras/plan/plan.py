"""Plans a training run: will it fit, how fast will it be, and which layout is the best?

    python -m extras.plan.plan --model llama3-70b --gpus 128 --gpu h100-80 --seq-len 8192 --global-batch-size 1024
    python -m extras.plan.plan --model llama3-70b --gpus 128 --layout "--tp 8 --pp 4 --micro-batch-size 1"

It prints the memory and the time of the best layouts of ten meshes, or of the layout in --layout. Then it compares
alternatives, answers usual questions and, for a preset, prints the command that launches the best layout. All nodes are
assumed to have 8 GPUs. Memory is estimated by formulas (memory.py); a dry run (--dry-run) counts it. Time is estimated
by formulas, too (seconds.py); `python -m extras.bench plan` compares it with that of published runs.
"""

import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

import step07_moe_ep as step07
from common import UserError
from common.model import PRESETS
from common.trainer import among, parse
from extras.services import seam
from extras.plan.gpus import GIB, GPUS, ROOM
from extras.plan.layouts import Layout, illegal
from extras.plan.report import report
from extras.plan.search import Found, evaluate, search, smallest
from extras.plan.shapes import GPTS, Shape, shape_of, total_weights
from extras.variants.step07.expert_presets import EXPERTS

MOST_GPUS = 2**17


@dataclass
class Flags:
    """The run to plan."""

    model: str = "llama3-8b"  # a preset of the course, or one of gpt3-22b, gpt3-175b, gpt3-530b, gpt3-1t
    gpus: int = 8  # number of GPUs, in nodes of 8
    gpu: str = among(GPUS, "h100-80")  # kind of GPU
    seq_len: int = 0  # tokens of a sequence; 0: the model's own number
    global_batch_size: int = 0  # sequences of a step; 0: about 4M tokens, but at least one for each GPU
    layout: str = ""  # report on this layout instead of the best ones: "--tp 8 --pp 4 ..."
    json: str = ""  # write the layouts, their memory and their seconds to this file


def models() -> dict[str, Shape]:
    """All models: presets of the course, presets with experts (extras/variants/step07), and models like GPT-3."""
    seam.plugins()  # imports the techniques, which adds their presets and their schedules
    return {name: shape_of(m, SimpleNamespace(**EXPERTS.get(name, {}))) for name, m in PRESETS.items()} | GPTS


def asked(flags: Flags, known: dict[str, Shape]) -> tuple[Shape, int]:
    """The model and the global batch size that the flags ask for. UserError if --model, --gpus or --json is wrong."""
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
    """The layout that --layout describes. Raises UserError if step 7 would refuse it, or the planner cannot time it."""
    try:
        x = parse(Layout, shlex.split(flags.layout))
        inner = x.pp * x.cp * x.tp
        if flags.gpus % inner:
            sizes = f"--pp {x.pp} x --cp {x.cp} x --tp {x.tp} = {inner}"
            raise UserError(f"{sizes} does not divide --gpus {flags.gpus}: change one")
        dp = flags.gpus // inner
        if x.dp not in (1, dp):
            raise UserError(f"--dp is what is left of --gpus {flags.gpus}, {dp}; leave it out")
        own = x.global_batch_size if "--global-batch-size" in flags.layout else batch
        x = replace(x, dp=dp, global_batch_size=own)
        seam.refuse(seam.compose(step07)(**{name: value for name, value in vars(x).items() if name != "dp"}))
        if reason := illegal(m, x):
            raise UserError(reason)
        if (x.cp_mode, x.zero_replicas) != ("zigzag", 1):
            raise UserError("the planner has no times for this --cp-mode, or for --zero-replicas: use --dry-run")
    except (ValueError, UserError) as error:
        raise UserError(f"--layout {flags.layout!r}: {error}") from None
    return x


def found(flags: Flags, m: Shape, batch: int) -> list[Found]:
    """Evaluate --layout, or else find the best layouts. Raises UserError if --layout is wrong, or no layout fits."""
    gpu, what = GPUS[flags.gpu], f"{flags.model} with --seq-len {m.seq_len}"
    if flags.layout:
        return [evaluate(m, layout_of(flags, batch, m), gpu)]
    if best := search(m, flags.gpus, batch, gpu, bar=lambda tries: tqdm(tries, disable=None, leave=False)):
        print(f"{flags.model}, {flags.gpus} {flags.gpu}, --seq-len {m.seq_len}, --global-batch-size {batch}")
        print("the best layout of each of the ten best meshes:\n")
        return best
    if (least := smallest(m, flags.gpus, batch)) is None:
        none = f"no layout of {flags.gpus} GPUs is legal for {what} and --global-batch-size {batch}"
        raise UserError(f"{none}: use a number of GPUs and a batch with more common divisors")
    x, need, room = least[0], least[1].total, ROOM * gpu.memory
    raise UserError(
        f"{what} does not fit on {flags.gpus} {flags.gpu}: the smallest layout needs {need / GIB:.1f} GiB a GPU, "
        f"{(need - room) / GIB:.1f} GiB too much ({x.flags()}); use more --gpus: the training state alone needs "
        f"{ceil(18 * total_weights(m) / room)}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status. A user's mistake prints one line, and the status is 2."""
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
