"""How tests and benchmarks start ranks, and what ranks tell one another beside their training."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# What a torchrun around us has set for its own ranks begins so; OMP_: it also lets each rank have one thread.
OUTER = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_", "OMP_")


def start(folder: Path, ranks: int, words: list[str], **options: Any) -> subprocess.Popen:
    """Start `python words` in a folder; with ranks, by torchrun. `options` are Popen's.

    Words before the script are torchrun's own (--max-restarts=1). A process has one thread, unless it has a GPU.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    ours = {key: value for key, value in os.environ.items() if not key.startswith(OUTER)}
    options = dict(env=ours | dict(OMP_NUM_THREADS="1"), start_new_session=True) | options
    return subprocess.Popen([sys.executable, *torchrun, *words], cwd=folder, **options)


def children(pid: int) -> list[int]:
    """Processes that a process has started and that live, in their order; none of one that has ended. Linux only."""
    pids = []
    with contextlib.suppress(OSError):  # it ends, or a thread of it, while we look
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def gather_objects(thing: Any) -> list[Any]:
    """Small Python objects from all ranks, in their order (set-up and reports; no step's own traffic)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [thing]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def agree(*questions: bool) -> list[bool]:
    """For each question, whether it is true on any rank: all ranks get the same answers. A collective, of few bytes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(questions)
    answers = torch.tensor(questions, dtype=torch.int32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(answers, op=dist.ReduceOp.MAX)
    return answers.bool().tolist()
