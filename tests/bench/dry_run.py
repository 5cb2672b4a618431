"""Seconds and memory of the dry run of one rank of llama3-405b on 16,384 ranks, for some stages of the pipeline.

    python -m tests.bench dry_run
    python -m tests.bench dry_run --ranks 0,8192

Each rank is a process of its own: the command of RESULTS.md with --rank. The aim is 10 seconds on two cores, and 2 GiB.
CPU seconds stand beside: they do not depend on who else uses the machine.
"""

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from services.flags import main as run_main
from services.tables import table

COMMAND = "step06_pipeline.py --dry-run 16384 --model llama3-405b --tp 8 --pp 16 --cp 1 --zero 1 --dtype bf16"
COMMAND += " --micro-batch-size 1 --global-batch-size 2048"


@dataclass
class Config:
    """Flags of this benchmark."""

    ranks: str = "0,8192,16383"  # one after another: of the first, a middle and the last stage


def bench(config: Config):
    """Print the table."""
    rows = [["rank", "seconds", "CPU seconds", "most memory so far (MiB)"]]
    for rank in config.ranks.split(","):
        with tempfile.TemporaryDirectory() as out:
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, *COMMAND.split(), "--rank", rank, "--out", out]
            subprocess.run(command, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.DEVNULL)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        rows.append([rank, f"{seconds:.1f}", f"{spent:.1f}", f"{after.ru_maxrss / 1024:.0f}"])
    print(COMMAND + "\n\n" + table(rows))


def main(argv: list[str]):
    """The command line."""
    run_main(bench, Config, argv)
