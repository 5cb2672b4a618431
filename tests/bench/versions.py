"""Step times of this checkout beside those of another one, in turns; for example before and after a change.

    git worktree add ../before COMMIT
    python -m tests.bench versions --before ../before
    python -m tests.bench versions --before ../before --only 6 --more "--schedule zb-h1"

Both jobs train at the same time, but only one of them is awake. After each slice of time it is stopped (SIGSTOP) and
the other goes on, so whatever else the machine does hits both alike. A slice's time is the median of its whole steps,
the result the median of the ratios of neighbouring slices.
"""

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from common import UserError
from services import launch
from services.plots import read_metrics as metrics
from services.tables import table
from tests.bench.harness import command

ROOT = Path(__file__).parents[2]
CASES = {  # name -> (script, flags that both checkouts understand)
    "1": ("step01_single_gpu.py", ""),
    "2": ("step02_ddp.py", "--bucket-mb 1"),
    "3 zero 1": ("step03_zero.py", "--zero 1"),
    "3 zero 2": ("step03_zero.py", "--zero 2"),
    "3 zero 3": ("step03_zero.py", "--zero 3"),
    "4": ("step04_tp_sp.py", "--tp 2 --zero 0"),
    "5": ("step05_cp_ring.py", "--cp 2 --tp 1 --zero 1"),
    "6": ("step06_pipeline.py", "--pp 2 --cp 1 --tp 1 --zero 1 --schedule 1f1b"),
    "7": ("step07_moe_ep.py", "--model tiny-moe --pp 1 --cp 1 --tp 1 --ep 2 --zero 1"),
}
ALL = "--global-batch-size 16 --dtype fp32 --steps 1000000"
SERVED = "--peak-tflops 1 --eval-every 0 --save-every 0"


@dataclass
class Config:
    """Flags of this measurement."""

    before: str = ""  # folder of the other checkout
    only: str = ""  # cases, by commas: 1, 2, 3 zero 1, ..., 7; default: all
    ranks: int = 2  # processes of each job; step 1 has one
    slices: int = 8  # of each job
    seconds: float = 4.0  # of a slice
    more: str = ""  # further flags of both
    now_more: str = ""  # further flags of this checkout, where a flag chooses what the other one chose by itself
    alone: bool = False  # this checkout's steps and common by themselves, in a folder of their own


class Job:
    """One checkout's training run."""

    def __init__(self, root: Path, words: list[str], ranks: int, out: Path):
        self.out, self.read = out, 0
        silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = launch.start(root, ranks if ranks > 1 else 0, [*words, "--out", str(out)], **silent)

    def rows(self) -> list[float]:
        """Seconds of the steps logged since the last call."""
        rows = metrics(self.out)
        new, self.read = rows[self.read :], len(rows)
        return [row["seconds"] for row in new]

    def send(self, number: int):
        """A signal to all of its processes."""
        launch.tell(self.process, number)


def measure(config: Config, name: str, roots: dict[str, Path], folder: Path) -> list[str]:
    """A row of the table."""
    script, flags = CASES[name]
    ranks, jobs, times, order = 1 if name == "1" else config.ranks, {}, {"before": [], "now": []}, []
    try:
        for job, root in roots.items():
            served = "" if job == "now" and config.alone else SERVED
            more = f"{config.more} {config.now_more if job == 'now' else ''}"
            jobs[job] = Job(root, [script, *f"{flags} {ALL} {served} {more}".split()], ranks, folder / name / job)
            deadline = time.monotonic() + 240
            while len(jobs[job].rows()) < 1:
                if jobs[job].process.poll() is not None or time.monotonic() > deadline:
                    raise UserError(f"{job}: {script} {flags} did not start; try it by hand in {root}")
                time.sleep(0.5)
            jobs[job].send(signal.SIGSTOP)
        for job in ["before", "now"] * config.slices:
            jobs[job].rows()
            jobs[job].send(signal.SIGCONT)
            time.sleep(config.seconds)
            jobs[job].send(signal.SIGSTOP)
            if len(whole := jobs[job].rows()[1:]) >= 3:  # the first of a slice was interrupted
                times[job].append(median(whole))
                order.append((job, times[job][-1]))
    finally:
        for job in jobs.values():
            launch.stop(job.process)
    ratios = [dict(pair)["now"] / dict(pair)["before"] for pair in pairwise(order) if len(dict(pair)) == 2]
    if len(ratios) < 4:
        raise UserError(f"step {name}: too few whole steps in a slice: use a longer --seconds")
    low, _, high = quantiles(ratios, n=4)
    shown = [f"{1e3 * median(times[job]):.1f}" for job in times]
    return [f"step {name}", *shown, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]


def bench(config: Config):
    """Run both in turns, print the table."""
    names = [name.strip() for name in config.only.split(",")] if config.only else list(CASES)
    if not config.before or not Path(config.before, "step01_single_gpu.py").is_file():
        raise UserError(f"--before {config.before or '(not given)'}: no folder with the seven steps")
    if unknown := set(names) - set(CASES):
        raise UserError(f"--only {', '.join(unknown)}: choose among {', '.join(CASES)}")
    rows = [["milliseconds a step", "before", "now", "now / before", "middle half"]]
    with tempfile.TemporaryDirectory() as folder:
        now = ROOT
        if config.alone:
            now = Path(folder, "alone")
            now.mkdir()
            for source in [*ROOT.glob("step0*.py"), ROOT / "common"]:
                (now / source.name).symlink_to(source)
        for name in names:
            rows.append(measure(config, name, dict(before=Path(config.before), now=now), Path(folder)))
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    print(table(rows))


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
