"""Compare two runs: python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

Two layouts of one training have the same losses and gradient norms, up to rounding, which grows
from step to step. So only the first steps are judged (--first 20). In fp32, the default on CPUs, a
relative difference above 1e-3 there (--bound) is a bug. (tiny on one rank and with --tp 2: the
norms differ by 1.5e-5 in step 19, by 1.6e-3 in step 29, and by a tenth in step 79, when nothing is
wrong.) In bf16 rounding alone gives more: compare runs with --dtype fp32.

Exit status: 0 if these steps are within the bound, 1 if one is not, 2 if there is nothing to
compare.
"""

import argparse
import json
import sys
from pathlib import Path

from common.flags import spelled
from common.resume import FREE, LAYOUT

# Flags that may differ: they do not change what is computed, and hardly how precisely
MAY_DIFFER = (FREE | LAYOUT) - {"dataset", "dtype"}


def other_flags(run: str, reference: str) -> list[str]:
    """Flags that decide what is computed, and that differ between two runs: "--seed: 0 and 1"."""
    flags = json.loads((Path(run) / "config.json").read_text())
    reference_flags = json.loads((Path(reference) / "config.json").read_text())
    found = []
    for name in sorted(flags.keys() & reference_flags.keys()):
        if name not in MAY_DIFFER and flags[name] != reference_flags[name]:
            found.append(f"{spelled(name)}: {flags[name]} and {reference_flags[name]}")
    return found


def read_metrics(run: str) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def relative(value: float, reference: float) -> float:
    """The relative difference of two numbers."""
    if value == reference:
        return 0.0
    return abs(value - reference) / max(abs(value), abs(reference))


def compare(rows: list[dict], reference_rows: list[dict], first: int, bound: float) -> bool:
    """Print a table of the steps up to `first` that both runs have; return whether they are within
    `bound`. Raises ValueError if there is none.
    """
    by_step = {row["step"]: row for row in reference_rows if row["step"] <= first}
    pairs = [(row, by_step[row["step"]]) for row in rows if row["step"] in by_step]
    if not pairs:
        raise ValueError(f"the runs have none of the first {first} steps in common")
    every = 1 + len(pairs) // 16  # a table that fits on a screen
    largest = 0.0
    first_beyond = None
    print("  step        loss   reference  difference  of norms      (relative)")
    for i, (row, reference) in enumerate(pairs):
        loss = relative(row["loss"], reference["loss"])
        norm = relative(row["grad_norm"], reference["grad_norm"])
        largest = max(largest, loss, norm)
        if max(loss, norm) > bound and first_beyond is None:
            first_beyond = row["step"]
        if i % every == 0 or first_beyond == row["step"]:
            print(
                f"{row['step']:6}{row['loss']:12.6f}{reference['loss']:12.6f}"
                f"{loss:12.1e}{norm:10.1e}"
            )
    print(f"{len(pairs)} steps; largest difference: {largest:.1e}; above {bound}: {first_beyond}")
    return first_beyond is None


def main():
    """Compare the runs on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.compare")
    parser.add_argument("runs", nargs=2, metavar="RUN", help="a run directory")
    parser.add_argument("--first", type=int, default=20, help="how many steps are judged")
    parser.add_argument("--bound", type=float, default=1e-3, help="largest relative difference")
    given = parser.parse_args()
    run, reference = given.runs
    try:
        for difference in other_flags(run, reference):
            print(f"the runs have other flags: {difference}")
        rows = read_metrics(run)
        reference_rows = read_metrics(reference)
        equal = compare(rows, reference_rows, given.first, given.bound)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except (KeyError, TypeError):
        parser.error("a row of metrics.jsonl has no loss or norm, or one that was not finite")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
