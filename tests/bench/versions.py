"""Step times of this project beside those of another checkout of it, in turns; for example before and after a change.

    git worktree add ../before COMMIT
    python -m tests.bench versions --before ../before --step step02_ddp.py
    python -m tests.bench versions --before ../before --step step06_pipeline.py --flags "--pp 2 --tp 1 --cp 1"

Both train at the same time, but only one of them is awake. After each slice of time one job is stopped (SIGSTOP) and
the other goes on. So whatever else the machine does hits both alike. A slice's time is the median of its whole steps.
The result is the median of the ratios of neighbouring slices.
"""

import json
import os
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
from services.flags import main as run_main
from services.tables import table
from tests.jobs import ROOT, end

MODEL = "--dtype fp32 --peak-tflops 1 --eval-every 0 --save-every 0 --steps 1000000"


@dataclass
class Config:
    """Flags of this benchmark."""

    before: str = ""  # folder of the other checkout
    step: str = "step02_ddp.py"  # the script to run in both
    flags: str = ""  # further flags of both
    ranks: int = 2  # processes of each job
    slices: int = 25  # of each job
    seconds: float = 6.0  # of a slice


class Job:
    """One checkout's training run."""

    def __init__(self, root: Path, config: Config, out: Path):
        self.metrics, self.read = out / "metrics.jsonl", 0
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={config.ranks}"]
        command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", config.step, *MODEL.split()]
        command += [*config.flags.split(), "--out", str(out)]
        silent = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        self.process = subprocess.Popen(command, cwd=root, env=os.environ | dict(OMP_NUM_THREADS="1"), **silent)

    def rows(self) -> list[float]:
        """Seconds of the steps logged since the last call."""
        lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
        new, self.read = lines[self.read :], len(lines)
        return [json.loads(line)["seconds"] for line in new]


def bench(config: Config):
    """Run both in turns, print the table."""
    if not (Path(config.before) / config.step).is_file() or not config.before:
        raise UserError(f"--before {config.before or '(not given)'}: no folder with a {config.step}")
    times: dict[str, list[float]] = {"before": [], "now": []}
    order = []
    with tempfile.TemporaryDirectory() as folder:
        roots = {"before": Path(config.before), "now": ROOT}
        jobs = {name: Job(root, config, Path(folder, name)) for name, root in roots.items()}
        try:
            for name, job in jobs.items():
                deadline = time.monotonic() + 240
                while len(job.rows()) < 1:
                    if job.process.poll() is not None or time.monotonic() > deadline:
                        raise UserError(f"{name}: {config.step} did not start; try its flags by hand")
                    time.sleep(0.5)
                end(job.process, signal.SIGSTOP)
            for name in ["before", "now"] * config.slices:
                jobs[name].rows()
                end(jobs[name].process, signal.SIGCONT)
                time.sleep(config.seconds)
                end(jobs[name].process, signal.SIGSTOP)
                if len(whole := jobs[name].rows()[1:]) >= 3:  # the first of a slice was interrupted
                    times[name].append(median(whole))
                    order.append((name, times[name][-1]))
        finally:
            for job in jobs.values():
                end(job.process)
                job.process.wait()
    pairs = [dict(pair) for pair in pairwise(order) if len(dict(pair)) == 2]
    ratios = [pair["now"] / pair["before"] for pair in pairs]
    if len(ratios) < 4:
        raise UserError("too few whole steps in a slice: use a longer --seconds, or a smaller model")
    low, _, high = quantiles(ratios, n=4)
    rows = [["milliseconds a step", "before", "now", "now / before", "middle half"]]
    shown = [f"{median(times[name]) * 1e3:.1f}" for name in ("before", "now")]
    rows.append([f"{config.step} {config.flags}", *shown, f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}"])
    print(table(rows))


def main(argv: list[str]):
    """`python -m tests.bench versions`."""
    run_main(bench, Config, argv)
