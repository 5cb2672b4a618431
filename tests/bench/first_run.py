"""The README's first command, run as a new user would; its loss.png and timeline.png become the README's figures."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import FIGURES
from tests.bench.harness import command

ROOT = Path(__file__).parents[2]
COMMAND = "--nproc_per_node=8 step07_moe_ep.py --model tiny-moe --pp 2 --cp 2 --tp 2 --ep 2"
SHORT = "--steps 40 --warmup-steps 10 --global-batch-size 16"


@dataclass
class Config:
    """Flags of this measurement."""

    words: str = f"{COMMAND} {SHORT}"  # what follows torchrun


def bench(config: Config):
    """Run it, keep the figures, print the end."""
    with tempfile.TemporaryDirectory() as out:
        start = time.monotonic()
        words = [sys.executable, "-m", "torch.distributed.run", *config.words.split(), "--out", out]
        subprocess.run(words, cwd=ROOT, stdout=sys.stderr, check=True, env=os.environ | dict(OMP_NUM_THREADS="1"))
        took = time.monotonic() - start
        rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        FIGURES.mkdir(exist_ok=True)
        for name in ("loss", "timeline"):
            shutil.copy(Path(out, f"{name}.png"), FIGURES / f"first_run_{name}.png")
    speed = sorted(row["tokens_per_second"] for row in rows)[len(rows) // 2]
    print(f"{took:.0f} s; loss {rows[0]['loss']:.2f} to {rows[-1]['loss']:.2f}, "
          f"validation {rows[-1]['validation_loss']:.2f}; {speed:,.0f} tokens/s; see {FIGURES}")  # fmt: skip


def main(_name: str, argv: list[str]):
    """The command line."""
    command(bench, Config, argv)
