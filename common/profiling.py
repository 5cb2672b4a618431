"""--profile N: a trace of N steps, after the first two.

    OUT/trace-RANK.json.gz     opens in https://ui.perfetto.dev: operators, messages, named ranges
    OUT/memory-RANK.pickle     on a GPU, opens in https://pytorch.org/memory_viz: allocations and
                               frees from just before the first step to the end of the trace (the
                               last 200,000 events)

Look for these named ranges:

    Optimizer.step#AdamW.step     AdamW on the masters. (After it the masters are rounded into the
                                  weights, which ZeRO 1 and 2 gather)
    wait GROUP                    the rank waits for messages of this group: for gradients `wait
                                  dp`, from step 5 on `wait data`, for step 7's experts `wait
                                  expert_data`
    F0.1, B0.1                    steps 6 and 7: forward and backward of micro-batch 0 through stage
                                  1 (both count from 0)

On a CPU a wait's range is as long as the wait. On a GPU it is short, because Python goes on, and
the GPU waits instead: look for a gap between its kernels.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, schedule

from common import UserError

# Before the trace: one step in which memory is allocated and layers are compiled, and one in which
# the profiler warms up
SKIPPED = 2


def check_profile(n: int, left: int):
    """Raise UserError if too few steps are left to trace n. `left` is 0 if a resumed run is already
    done.
    """
    if n and 0 < left < n + SKIPPED:
        raise UserError(f"--profile {n}: it needs {n + SKIPPED} steps, and {left} are left")


def make_profiler(n: int, out: Path, rank: int, gpu: bool) -> torch.profiler.profile | None:
    """A profiler that traces n steps, after SKIPPED ones, and writes the files above; None if n is
    0. Enter it by `with`, and call its `step` after each step.
    """
    if n == 0:
        return None

    def write(profiler: torch.profiler.profile):
        profiler.export_chrome_trace(str(out / f"trace-{rank}.json.gz"))
        if gpu:
            torch.cuda.memory._dump_snapshot(str(out / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)  # stop: it would slow the rest

    activities = [ProfilerActivity.CPU]
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        # No public function records memory
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    when = schedule(wait=1, warmup=1, active=n, repeat=1)  # repeat: a single trace
    return torch.profiler.profile(activities=activities, schedule=when, on_trace_ready=write)
