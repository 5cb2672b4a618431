"""What ranks tell one another beside their training."""

from typing import Any

import torch.distributed as dist


def gather_objects(thing: Any) -> list[Any]:
    """Small Python objects from all ranks, in their order (set-up and reports; no step's own traffic)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [thing]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def agree(*questions: bool) -> list[bool]:
    """For each question, whether it is true on any rank: all ranks get the same answers. A collective."""
    return [any(answers) for answers in zip(*gather_objects(questions), strict=True)]
