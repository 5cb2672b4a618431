"""Rows of the table by their launch lines: what services/certify.py starts on a machine, and holds beside one process.

    python -m tests.launches 8          for a machine of eight GPUs: a line of JSON for each row

A row that does `launches` is certified in fp64, by losses and gradient norms; one that `stays_near` in bf16, by losses.
So are, with GPUs, a run with --compile and README's first command. Without a GPU rows of two ranks run. Up to three
GPUs are shared by as many ranks as a row has. On more, there are as many ranks as GPUs, 4 or 8: what is more than in
the row is data parallel.
"""

import json
import math
import re
import sys
from typing import Any

from services.certify import Trial
from services.expected import launch_lines
from services.seam import spelled
from tests import bounds, equal
from tests.rows import NEAR, ROWS, Row

PARTS = {  # behaviour -> the certificate's part, flags, and how far which numbers of a step may be apart, relatively
    "launches": ("equality", dict(steps=4), ["loss", "grad_norm"], bounds.RUN["fp64"]),
    "stays_near": ("precision", NEAR, ["loss"], bounds.DRIFT / math.log(equal.SMALL["vocab_size"])),
}

COMPILED = Row(2, "step03_zero", dict(zero=1, compile=True))  # its code is Triton's; the tests look at its graphs


def line(step: str, options: dict[str, Any]) -> str:
    """The script with its flags: what `equal.config_of` makes of the same options, on whatever device is here."""
    flags = dict(model="debug", eval_every=0, save_every=0) | equal.BASE | equal.SMALL | options
    return " ".join([f"{step}.py", *(spelled(name, value) for name, value in flags.items() if name != "device")])


def trial(row: Row, does: str) -> Trial:
    """A row beside one process."""
    part, flags, numbers, bound = PARTS[does]
    said = [flag for flag in (row.layout | row.base).items() if flag[0] not in ("global_batch_size", *flags)]
    what = [f"{row.ranks} x {row.step}", *(spelled(*flag) for flag in said)]
    ours, one = line(row.step, row.base | row.layout | flags), line(equal.one_process(row), row.base | flags)
    return Trial(part, " ".join(what), row.ranks, ours, one, numbers, bound)


def first_command() -> Trial:
    """README's, in bf16 as it would be on a GPU, beside one process.

    All its steps run; ten are compared. Later a token's choice of an expert flips by rounding, and losses part.
    """
    first, more = launch_lines()[0], "--dtype bf16 --eval-every 0 --save-every 0"
    said = " ".join(re.findall(r"--(?:steps|global-batch-size) \d+", first.flags))
    ours, one = (f"{first.step}.py {flags} {more}" for flags in (first.flags, said))
    return Trial("precision", "README's first command", first.ranks, ours, one, *PARTS["stays_near"][2:], 10)


def trials(gpus: int) -> list[Trial]:
    """All that such a machine is to start, with four sequences for each rank."""
    found = []
    for does in PARTS:
        for row in (
            *(row for row in ROWS if does in row.does + row.swept),
            *([COMPILED] * (gpus > 0 and does == "stays_near")),
        ):
            n = 8 if gpus >= 8 else 4 if gpus >= 4 else row.ranks if gpus else 2
            if n % row.ranks == 0:
                base = row.base | dict(global_batch_size=4 * n)
                found.append(trial(row._replace(ranks=n, base=base), does))
    return [*found, *([first_command()] * (gpus > 0))]


if __name__ == "__main__":
    for one in trials(int(sys.argv[1])):
        print(json.dumps(one._asdict()))
