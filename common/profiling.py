"""--profile: a trace of some steps, for https://ui.perfetto.dev. You can follow every step without
this file.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, schedule

from common import UserError

SKIPPED = 2  # steps before the trace: see `make_profiler`


def check_profile(n: int, steps: int):
    """Raise UserError if `steps` steps are too few to trace n. (0 steps are allowed: a resumed run
    may already be done.)
    """
    if n and 0 < steps < n + SKIPPED:
        raise UserError(f"--profile {n}: it needs {n + SKIPPED} steps, and {steps} are left")


def make_profiler(n: int, out: Path, rank: int, gpu: bool) -> torch.profiler.profile | None:
    """A profiler that traces n steps, after two that are skipped: in the first of these, memory is
    allocated and layers are compiled; in the second the profiler warms up. None if n is 0.

    OUT/trace-RANK.json.gz opens in https://ui.perfetto.dev. It has operators, messages, and named
    ranges: the optimizer's step; `wait tp`, where a rank waits for a message over tp; and in steps
    6 and 7 `F0.1` and `B0.1`, the forward and the backward of micro-batch 0 through stage 1 (both
    count from 0). On a CPU `wait tp` is as long as the wait. On a GPU only the stream of the
    computation waits: look for gaps in it. On a GPU, OUT/memory-RANK.pickle has the last 200,000
    allocations and frees before the trace ended, for https://pytorch.org/memory_viz. If a signal
    ends the run, the trace is shorter, or missing.
    """
    if n == 0:
        return None

    def write(profiler: torch.profiler.profile):
        profiler.export_chrome_trace(str(out / f"trace-{rank}.json.gz"))
        if gpu:
            torch.cuda.memory._dump_snapshot(str(out / f"memory-{rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)  # it would slow the other steps

    activities = [ProfilerActivity.CPU]
    if gpu:
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=200_000)  # no public function has it
    when = schedule(wait=SKIPPED - 1, warmup=1, active=n, repeat=1)
    return torch.profiler.profile(activities=activities, schedule=when, on_trace_ready=write)
