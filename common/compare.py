"""Compare two runs: python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

Two layouts of one training have the same losses and gradient norms, up to rounding, which grows
slowly from step to step. A relative difference of 1e-3 in the first steps is a bug. Exit status: 0
if no difference is above --bound, else 1.
"""

import argparse
import json
import sys
from pathlib import Path


def read_metrics(run: str) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def compare(one: list[dict], other: list[dict], bound: float) -> bool:
    """Print a table of the steps that both runs have; return whether they differ within `bound`."""
    rows = {row["step"]: row for row in one}
    pairs = [(rows[row["step"]], row) for row in other if row["step"] in rows]
    every = 1 + len(pairs) // 16
    largest = 0.0
    beyond = []
    print("  step        loss       other  difference     of norm")
    for i, (a, b) in enumerate(pairs):
        loss = abs(a["loss"] / b["loss"] - 1)
        norm = abs(a.get("grad_norm", 1) / b.get("grad_norm", 1) - 1)
        largest = max(largest, loss, norm)
        if max(loss, norm) > bound:
            beyond.append(a["step"])
        if i % every == 0 or beyond == [a["step"]]:
            print(f"{a['step']:6}{a['loss']:12.6f}{b['loss']:12.6f}{loss:12.1e}{norm:12.1e}")
    first = beyond[0] if beyond else "none"
    print(f"{len(pairs)} steps; largest difference: {largest:.1e}; first above {bound}: {first}")
    return bool(pairs) and not beyond


def main():
    """Compare the runs on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.compare")
    parser.add_argument("runs", nargs=2, metavar="RUN")
    parser.add_argument("--bound", type=float, default=1e-5)
    given = parser.parse_args()
    try:
        equal = compare(*map(read_metrics, given.runs), given.bound)
    except (OSError, ValueError) as error:
        parser.error(f"RUN is a run directory: {error}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
