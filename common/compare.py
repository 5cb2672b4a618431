"""Compare two runs: python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

Two layouts of one training have the same losses and gradient norms, up to rounding, which grows
from step to step. Judge by the first 20 steps: in fp32, the default on CPUs, a difference above
1e-3 there is a bug. (tiny on one rank and with --tp 2: the norms differ by 1.5e-5 in step 19, by
1.6e-3 in step 29, and by a tenth in step 79, when nothing is wrong.) In bf16 rounding alone gives
more: compare runs with --dtype fp32. Exit status: 0 if all steps that both runs have are within
--bound, 1 if not, 2 if they cannot be compared.
"""

import argparse
import json
import sys
from pathlib import Path

from common.flags import spelled
from common.resume import FREE, LAYOUT


def other_flags(one: str, other: str) -> list[str]:
    """Flags that decide what is computed, and that differ between two runs: "--seed: 0 and 1"."""
    flags = json.loads((Path(one) / "config.json").read_text())
    others = json.loads((Path(other) / "config.json").read_text())
    found = []
    for name in flags.keys() & others.keys() - FREE - LAYOUT:
        if flags[name] != others[name]:
            found.append(f"{spelled(name)}: {flags[name]} and {others[name]}")
    return sorted(found)


def read_metrics(run: str) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def compare(one: list[dict], other: list[dict], bound: float) -> bool:
    """Print a table of the steps that both runs have; return whether they differ within `bound`."""
    rows = {row["step"]: row for row in one}
    pairs = [(rows[row["step"]], row) for row in other if row["step"] in rows]
    every = 1 + len(pairs) // 16
    largest = 0.0
    first_beyond = None
    print("  step        loss       other  difference     of norm")
    for i, (a, b) in enumerate(pairs):
        loss = abs(a["loss"] / b["loss"] - 1)
        norm = abs(a.get("grad_norm", 1) / b.get("grad_norm", 1) - 1)
        largest = max(largest, loss, norm)
        if max(loss, norm) > bound and first_beyond is None:
            first_beyond = a["step"]
        if i % every == 0 or first_beyond == a["step"]:
            print(f"{a['step']:6}{a['loss']:12.6f}{b['loss']:12.6f}{loss:12.1e}{norm:12.1e}")
    print(f"{len(pairs)} steps; largest difference: {largest:.1e}; above {bound}: {first_beyond}")
    return bool(pairs) and first_beyond is None


def main():
    """Compare the runs on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.compare")
    parser.add_argument("runs", nargs=2, metavar="RUN")
    parser.add_argument("--bound", type=float, default=1e-3)
    given = parser.parse_args()
    one, other = given.runs
    try:
        for difference in other_flags(one, other):
            print(f"the runs have other flags: {difference}")
        equal = compare(read_metrics(one), read_metrics(other), given.bound)
    except (OSError, ValueError, TypeError) as error:  # TypeError: a loss that was not finite
        parser.error(f"RUN is a run directory: {error}")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
