"""Exchanges small Python objects and yes-or-no answers between ranks, apart from training."""

from typing import Any

import torch
import torch.distributed as dist


def gather_objects(thing: Any) -> list[Any]:
    """Gather small Python objects from all ranks, in the order of ranks, for set-up and reports."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [thing]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def agree(*questions: bool) -> list[bool]:
    """For each question, whether it is true on any rank: all ranks get the same answers. A small collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(questions)
    answers = torch.tensor(questions, dtype=torch.int32, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(answers, op=dist.ReduceOp.MAX)  # once a step: gathering objects would take longer
    return answers.bool().tolist()
