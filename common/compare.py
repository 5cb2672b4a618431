"""Compare two runs, here step 1 and step 4 with --tp 2, both on CPUs:

    python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

      step      loss 1      loss 2  loss diff.  norm diff.  (relative)
         1    5.626841    5.626841     0.0e+00     1.3e-07
       ...
        20    3.079604    3.079609     1.7e-06     4.6e-05
    20 steps; largest difference: 4.6e-05; none above 0.001

Two layouts of one training have the same losses and gradient norms, up to rounding, whose effects
grow from step to step. So only the first steps are judged (--first 20). First make sure that the
two runs compute the same:

    - No line "the flags differ" is printed. (For --dataset it may be: two paths can have the same
      tokens.)
    - The first lines that each run prints show the same dtype (without --dtype, a GPU has bf16 and
      a CPU fp32) and the same number of tokens. (The default data differ between two versions of
      Python.)

Then a relative difference above 0.001 in these steps (--bound) means:

    dtype of both runs    meaning
    fp64                  a bug (in step 7, almost certainly)
    fp32                  almost certainly a bug. But if the loss suddenly rises (an unstable run),
                          or in step 7, where rounding may choose another expert, it may be
                          rounding: compare runs with --dtype fp64
    bf16                  nothing: compare runs with --dtype fp32

Exit status: 0 if these steps are within the bound, 1 if one is not, 2 if they cannot be compared.
Flags that may decide what is computed, such as --seed, are printed if they differ, but a difference
does not change the status.
"""

import argparse
import json
import math
import sys
from pathlib import Path

from common.flags import spelled
from common.resume import may_differ


def other_flags(reference: str, run: str) -> list[str]:
    """Flags that may decide what is computed, and differ between two runs: "--seed: 0 and 1"; or
    "--experts: None and 8", if the reference's script has no such flag.
    """
    reference_flags = json.loads((Path(reference) / "config.json").read_text())
    flags = json.loads((Path(run) / "config.json").read_text())
    # Flags that a resumed run may change (resume.py) are not reported, except dtype (rounding of
    # another size) and dataset (no fingerprint here shows whether two paths have the same tokens)
    not_reported = (may_differ(flags) & may_differ(reference_flags)) - {"dataset", "dtype"}
    differing = []
    for name in sorted((flags.keys() | reference_flags.keys()) - not_reported):
        before = reference_flags.get(name)
        after = flags.get(name)
        if before != after:
            differing.append(f"{spelled(name)}: {before} and {after}")
    return differing


def read_metrics(run: str) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def relative(a: float | None, b: float | None) -> float:
    """|a - b| / the larger of |a| and |b|. Raises ValueError if one is missing or not finite."""
    for number in (a, b):
        if number is None or not math.isfinite(number):
            raise ValueError("one of the runs has no loss or norm, or it is not finite")
    if a == b:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


def pair_up(reference_rows: list[dict], rows: list[dict], first: int) -> list[tuple[dict, dict]]:
    """The rows of the steps up to `first`. If one run is shorter than `first`, the other must be as
    short. Raises ValueError.
    """
    pairs = list(zip(reference_rows[:first], rows[:first], strict=False))
    if first < 1 or not pairs:
        raise ValueError("there are no steps to compare")
    if len(pairs) < first and len(reference_rows) != len(rows):
        raise ValueError(
            f"one run has ended in step {len(pairs)}: --first {len(pairs)} judges what both have"
        )
    return pairs


def compare(reference_rows: list[dict], rows: list[dict], first: int, bound: float) -> bool:
    """Print a table of the steps up to `first`; return whether they are within `bound`.

    Raises ValueError as `pair_up` and `relative` do.
    """
    pairs = pair_up(reference_rows, rows, first)
    largest = 0.0
    above = []  # the steps whose difference is above the bound
    print("  step      loss 1      loss 2  loss diff.  norm diff.  (relative)")
    for reference, row in pairs:
        loss_difference = relative(row.get("loss"), reference.get("loss"))
        norm_difference = relative(row.get("grad_norm"), reference.get("grad_norm"))
        print(
            f"{row['step']:6}{reference['loss']:12.6f}{row['loss']:12.6f}"
            f"{loss_difference:12.1e}{norm_difference:12.1e}"
        )
        larger = max(loss_difference, norm_difference)
        largest = max(largest, larger)
        if larger > bound:
            above.append(row["step"])
    verdict = f"none above {bound}"
    if above:
        verdict = f"first above {bound} in step {above[0]}"
    print(f"{len(pairs)} steps; largest difference: {largest:.1e}; {verdict}")
    return not above


def main():
    """Compare the runs on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.compare")
    parser.add_argument("reference", help="a run directory")
    parser.add_argument("run", help="another one")
    parser.add_argument("--first", type=int, default=20, help="steps to judge (%(default)s)")
    parser.add_argument(
        "--bound", type=float, default=1e-3, help="largest relative difference (%(default)s)"
    )
    given = parser.parse_args()
    try:
        for difference in other_flags(given.reference, given.run):
            print(f"the flags differ: {difference}")
        reference_rows = read_metrics(given.reference)
        rows = read_metrics(given.run)
        within = compare(reference_rows, rows, given.first, given.bound)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
