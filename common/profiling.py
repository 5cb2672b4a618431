"""--profile N: a trace of N steps, after the first two. You can follow every step without this
file.

    OUT/trace-RANK.json.gz     opens in https://ui.perfetto.dev: operators, messages, named ranges
    OUT/memory-RANK.pickle     on a GPU, opens in https://pytorch.org/memory_viz: the last 200,000
                               allocations and frees before the trace ended

Look for these named ranges: `Optimizer.step#AdamW.step`, the update; `wait GROUP`, for example
`wait dp` (for gradients from step 5 on `wait data`), where a rank waits for messages of that group;
and in steps 6 and 7 `F0.1` and `B0.1`,
the forward and the backward of micro-batch 0 through stage 1 (both count from 0). On a CPU `wait
dp` is as long as the wait. On a GPU it is short, because Python does not wait; the stream of the
computation does: look for a gap there.

If a signal ends the run, the trace is shorter, or missing.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, schedule

from common import UserError

# Steps before the trace. In the first, memory is allocated and layers are compiled. In the second,
# the profiler warms up
SKIPPED = 2


def check_profile(n: int, steps: int):
    """Raise UserError if `steps` steps are too few to trace n. (0 steps are allowed: a resumed run
    may already be done.)
    """
    if n and 0 < steps < n + SKIPPED:
        raise UserError(f"--profile {n}: it needs {n + SKIPPED} steps, and {steps} are left")


def make_profiler(n: int, out: Path, rank: int, gpu: bool) -> torch.profiler.profile | None:
    """A profiler that traces n steps, after those that are skipped, and writes the files above.
    None if n is 0. Enter it by `with`, and call its `step` after each step.
    """
    if n == 0:
        return None

    def write(profiler: torch.profiler.profile):
        profiler.export_chrome_trace(str(out / f"trace-{rank}.json.gz"))
        if gpu:
            # No public functions record memory
            torch.cuda.memory._dump_snapshot(str(out / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)  # it would slow the other steps

    activities = [ProfilerActivity.CPU]
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    when = schedule(wait=SKIPPED - 1, warmup=1, active=n, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=when, on_trace_ready=write)
