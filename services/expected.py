"""What the screen should show on GPUs, for each launch line: `python -m services.expected [--gpu h100-80]`.

Nothing here is measured: it is what paper says. For a run that shows something else, one of the two is wrong.

    seconds      the dry run's roofline, over the part of it that kernels reach (SPEED), or, if that is longer, its
                 operators times what the host needs to launch one (CALL); over the part that the pipeline is not idle;
                 and messages that nothing hides (theory/seconds.py), half as long to twice as long
    tokens/s, MFU, exposed      follow from these: the tokens of a step, the model's FLOPs, the messages' share
    memory       bytes of the dry run when they are most; with holes between them, up to a tenth more; and what no
                 tensor has (theory/footprint.py)

All of a step's ranks are as slow as the one with most to do. Lines are those of README.md for up to eight ranks, as
they are there (a small model keeps a GPU waiting for its host), and then models for which such a node is made.
"""

import importlib
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common import UserError
from common.model import PRESETS
from common.trainer import among, parse
from services import legal
from services.dry_run import run_rank
from services.seam import check, compose
from services.tables import human, table
from theory.footprint import outside
from theory.gpus import GPUS
from theory.recipes import COURSE
from theory.seconds import step_seconds
from theory.shapes import shape_of

SPEED = 1.0, 0.45  # of the roofline: the best that can be, and what is slow. Estimates
CALL = 4e-6, 20e-6  # seconds of the host for an operator, with Python's part. Estimates
EXPOSED = 0.5, 2.0  # of what theory says
HOLES = 1.1  # the allocator's peak over the bytes that live at a time
README = Path(__file__).parents[1] / "README.md"
BIG = "--dtype bf16 --loss-chunk 2048 --micro-batch-size 1 --recompute full --global-batch-size 8"
EIGHT = [  # what a node of eight is for
    "step02_ddp.py --model smollm-1.7b --dtype bf16 --loss-chunk 2048 --global-batch-size 64",
    f"step03_zero.py --model llama3-8b {BIG} --zero 3",
    f"step04_tp_sp.py --model llama3-8b {BIG} --tp 8",
    f"step05_cp_ring.py --model llama3-8b {BIG} --cp 8 --cp-kernel flash --zero 3",
    f"step06_pipeline.py --model llama3-8b {BIG} --pp 8 --pp-split cost",
]


@dataclass
class Flags:
    """What is asked."""

    gpu: str = among(GPUS, "h100-80")  # of which kind
    line: str = ""  # of one line alone, such as "8 x step03_zero --zero 3", as JSON: each range's best and worst


class Launch(NamedTuple):
    """A launch line."""

    ranks: int
    step: str
    flags: str

    def __str__(self) -> str:
        return f"{self.ranks} x {self.step} {self.flags}".strip()


def read(text: str) -> Launch:
    """The line that is shown so. Raises UserError."""
    match = re.fullmatch(r"(\d+) x (step0\w+) ?(.*)", text)
    if not match:
        raise UserError(f"--line {text}: write it as '8 x step03_zero --zero 3'")
    return Launch(int(match[1]), *match.groups()[1:])


class Range(NamedTuple):
    """The best, and the worst that is still as expected."""

    best: float
    worst: float

    def shown(self, unit: str) -> str:
        """From the lower to the higher, each in a unit such as ".1%" or ",.0f"."""
        low, high = sorted(self)
        return f"{low:{unit}} - {high:{unit}}"


class Expected(NamedTuple):
    """What one line should show."""

    seconds: Range  # of a step
    tokens: Range  # tokens/s of all ranks
    mfu: Range
    exposed: Range  # the part of a step in which messages are waited for
    memory: Range  # bytes at the fullest rank's peak
    by_host: bool  # whether launching operators takes longer than they do


def launch_lines() -> list[Launch]:
    """Those of README.md that train on up to eight ranks of one machine, its first command first; and EIGHT."""
    lines = {}
    form = r"^(?:.*&& .venv/bin/)?(?:torchrun --nproc_per_node=(\d+)|python) "
    form += r"(?:--max-restarts=\d+ )?(step0\w+)\.py([^#\n]*)"
    for ranks, step, flags in re.findall(form, README.read_text(), re.MULTILINE):
        if not re.search(r"--(help|dry-run|generate|resume)", flags):
            lines[Launch(int(ranks or 1), step, flags.strip())] = None
    return [*lines, *(Launch(8, *line.split(".py ")) for line in EIGHT)]


def expected(line: Launch, gpu: str = "h100-80") -> Expected:
    """What a line should show on these GPUs. Raises UserError for one that does not run there.

    The graphs of `--compile` are not counted: it should do better. Without --dtype it is bf16, as it would be there.
    """
    step, words = importlib.import_module(line.step), shlex.split(line.flags.replace("--compile", ""))
    words += [] if "--dtype" in words else ["--dtype", "bf16"]
    config = parse(compose(step), [*words, "--dry-run", str(line.ranks), "--gpu", gpu])
    check(config, 1)
    stages = getattr(config, "pp", 1)
    ends = sorted({0, stages // 2, stages - 1})  # those between are like one another
    seen = [run_rank(step.train, config, stage * line.ranks // stages) for stage in ends]
    roof = max(one.meter.seconds for one in seen)
    calls = max(sum(count["calls"] for count in one.meter.count.values()) for one in seen)
    layout = legal.layout_of_flags(config, line.ranks)
    m = shape_of(PRESETS[config.model], config)
    paper = step_seconds(m, layout, GPUS[gpu], COURSE)
    busy, waited = 1 - paper.bubble / paper.step, sum(paper.exposed.values())
    n_tokens, flops = config.global_batch_size * m.seq_len, seen[0].flops * line.ranks
    seconds, exposed = [], []
    for speed, call, share in zip(SPEED, CALL, EXPOSED, strict=True):
        seconds.append(max(roof / speed, calls * call) / busy + share * waited)
        exposed.append(share * waited / seconds[-1])
    peak, beside = max(sum(one.meter.peak().values()) for one in seen), outside(m, layout)
    return Expected(
        Range(*seconds),
        Range(*(n_tokens / s for s in seconds)),
        Range(*(flops / s / line.ranks / GPUS[gpu].flops for s in seconds)),
        Range(*exposed),
        Range(peak + beside, HOLES * peak + beside),
        calls * CALL[0] > roof,
    )


def report(lines: list[Launch], gpu: str) -> str:
    """The table."""
    rows = [["ranks, line", "step, ms", "tokens/s", "MFU", "exposed", "peak memory", "held up by"]]
    for line in lines:
        name = str(line)
        try:
            numbers = expected(line, gpu)
        except UserError as error:
            rows.append([name, *"-----", str(error)])
            continue
        ms = Range(*(1e3 * s for s in numbers.seconds))
        rows.append([name, ms.shown(",.0f"), numbers.tokens.shown(",.0f"), numbers.mfu.shown(".1%")])
        memory = f"{human(numbers.memory.best)} - {human(numbers.memory.worst)}"
        rows[-1] += [numbers.exposed.shown(".1%"), memory, "host" if numbers.by_host else "GPU"]
    return f"expected on {gpu}, from paper; not measured on a GPU\n\n{table(rows)}"


def main(argv: list[str] | None = None) -> int:
    """The command; a mistake is one line and exit status 2."""
    try:
        flags = parse(Flags, argv)
        one = expected(read(flags.line), flags.gpu) if flags.line else None
        print(json.dumps(one._asdict()) if one else report(launch_lines(), flags.gpu))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
