"""Compare two runs, here step 1 and step 4 with --tp 2, both on CPUs:

    python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

      step      loss 1      loss 2  loss diff.  norm diff.  (relative)
         1    5.626841    5.626841     0.0e+00     1.3e-07
       ...
        20    3.079604    3.079609     1.7e-06     4.6e-05
    20 steps; largest difference: 4.6e-05; none above 0.001

Two runs that differ only in their layout have the same losses and gradient norms, up to rounding,
whose effects grow from step to step. So only the first steps are judged (--first 20). First make
sure that both runs were asked to compute the same. If a line "the flags differ" is printed, its two
values must mean the same, such as two paths to the same data set. And before the first step, both
runs must have printed the same dtype and the same number of tokens.

If a step then differs by more than --bound (0.001, relative), this means:

    dtype of both runs    meaning
    fp32                  Almost certainly a bug. But it may be rounding if the loss suddenly rises
                          (an unstable run), or in step 7, where rounding may choose another expert:
                          then compare runs with --dtype fp64
    fp64                  A bug (in step 7, almost certainly)
    bf16                  Nothing: compare runs with --dtype fp32

A smaller difference may still be a bug. In fp64 rounding is far smaller: in 20 steps, the losses
and norms of steps 1 and 4 differed by at most 8e-15. So two runs with --dtype fp64, compared with
--bound 1e-9, are a sharper test.

Exit status: 0 if no step exceeds the bound, 1 if one does, 2 if the runs cannot be compared. Flags
that differ do not change it.
"""

import argparse
import json
import sys
from pathlib import Path

from common.flags import spelled
from common.resume import may_differ


def other_flags(run_1: str, run_2: str) -> list[str]:
    """Flags that can change what is computed, and differ between two runs: "--seed: 0 and 1"; or
    "--experts: None and 8", if the first run's script has no such flag.
    """
    flags_1 = json.loads((Path(run_1) / "config.json").read_text())
    flags_2 = json.loads((Path(run_2) / "config.json").read_text())
    # Flags that a resumed run may change, such as --tp, are not printed. But another dtype rounds
    # differently, and two data sets may have different tokens
    ignored = (may_differ(flags_1) & may_differ(flags_2)) - {"dtype", "dataset"}
    differing = []
    for name in sorted((flags_1.keys() | flags_2.keys()) - ignored):
        value_1 = flags_1.get(name)
        value_2 = flags_2.get(name)
        if value_1 != value_2:
            differing.append(f"{spelled(name)}: {value_1} and {value_2}")
    return differing


def read_metrics(run: str) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def relative(a: float, b: float) -> float:
    """|a - b| / the larger of |a| and |b|."""
    if a == b:  # both may be 0
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


def compare(rows_1: list[dict], rows_2: list[dict], n_steps: int, bound: float) -> bool:
    """Print a table of the first `n_steps` steps; return whether they are within `bound`.

    A run may have fewer steps only if the other has equally many: then all are judged. Raises
    ValueError.
    """
    rows_1 = rows_1[:n_steps]
    rows_2 = rows_2[:n_steps]
    if len(rows_1) != len(rows_2) or not rows_1 or n_steps < 1:
        raise ValueError(f"cannot compare {len(rows_1)} steps with {len(rows_2)}: change --first")
    largest = 0.0
    above = []
    print("  step      loss 1      loss 2  loss diff.  norm diff.  (relative)")
    for row_1, row_2 in zip(rows_1, rows_2, strict=True):
        loss_difference = relative(row_1["loss"], row_2["loss"])
        norm_difference = relative(row_1["grad_norm"], row_2["grad_norm"])
        print(
            f"{row_1['step']:6}{row_1['loss']:12.6f}{row_2['loss']:12.6f}"
            f"{loss_difference:12.1e}{norm_difference:12.1e}"
        )
        largest = max(largest, loss_difference, norm_difference)
        # `not <=`: nan is above every bound
        if not (loss_difference <= bound and norm_difference <= bound):
            above.append(row_1["step"])
    verdict = f"first above {bound} in step {above[0]}" if above else f"none above {bound}"
    print(f"{len(rows_1)} steps; largest difference: {largest:.1e}; {verdict}")
    return not above


def main():
    """Compare the runs on the command line."""
    parser = argparse.ArgumentParser(prog="python -m common.compare")
    parser.add_argument("run_1", help="a run's directory")
    parser.add_argument("run_2", help="another one's")
    parser.add_argument("--first", type=int, default=20, help="steps to judge (%(default)s)")
    parser.add_argument(
        "--bound", type=float, default=1e-3, help="largest relative difference (%(default)s)"
    )
    given = parser.parse_args()
    try:
        for difference in other_flags(given.run_1, given.run_2):
            print(f"the flags differ: {difference}")
        rows_1 = read_metrics(given.run_1)
        rows_2 = read_metrics(given.run_2)
        within = compare(rows_1, rows_2, given.first, given.bound)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
