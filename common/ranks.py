"""`Ranks`: small messages among all ranks, so that all make the same decision.

Some decisions depend on what only one rank sees: a signal, a checkpoint that cannot be written, a
damaged file. If only that rank stopped or saved, the next collective would hang. With
`Ranks.all_gather` each rank tells all others what it has seen. common/comm.py does not count the
bytes of these messages.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from common import UserError


class Ranks:
    """All ranks of a run. All ranks must call each method together; on GPUs also the constructor,
    which creates a group.
    """

    def __init__(self):
        """On GPUs, create a second group, over gloo, which sends from CPU to CPU. Over NCCL a small
        message would wait for all kernels that were launched before it.
        """
        self.rank = 0
        self.world = 1
        self.group = None  # the default group
        if dist.is_initialized():
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            if dist.get_backend() != "gloo":
                self.group = dist.new_group(backend="gloo")

    def all_gather(self, value: Any) -> list[Any]:
        """All ranks' values, by rank. `value`: anything that can be pickled. It takes a few
        milliseconds: use it for decisions, not for tensors.
        """
        if self.world == 1:
            return [value]
        values = [None] * self.world
        dist.all_gather_object(values, value, self.group)
        return values

    def require_same(self, value: Any, what: str):
        """Raise UserError on all ranks if a value differs from rank 0's. The error names the first
        rank whose value does.
        """
        values = self.all_gather(value)
        first = values[0]
        for rank, other in enumerate(values):
            if other != first:
                raise UserError(f"{what}: {other} on rank {rank}, but {first} on rank 0")

    def attempt(self, what: str, action: Callable, *args: Any, only_on_rank_0: bool = False):
        """Call action(*args) on all ranks, or with `only_on_rank_0` on rank 0 alone. If it raises
        OSError on any, raise UserError on all: `what`, and the message of the lowest rank that
        failed. Any other error ends this rank; the others wait, until torchrun ends them.

        For example, if rank 1's disk is full, ranks.attempt("--out a: cannot save", write, path)
        raises on all ranks "--out a: cannot save: rank 1: No space left on device".
        """
        problem = ""
        try:
            if not only_on_rank_0 or self.rank == 0:
                action(*args)
        except OSError as error:
            problem = f"rank {self.rank}: {error.strerror or error}"
        for found in self.all_gather(problem):
            if found:
                raise UserError(f"{what}: {found}")
