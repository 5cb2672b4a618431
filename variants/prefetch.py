"""The next step's batch is read while a GPU computes this one's: always, where there is a GPU.

A batch is a pure function of the step, so it does not matter who reads it, or when. In step 1 the loop would ask for
the batch of `step + 1` before it waits for the loss. (On a CPU the cores have other work.)
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from torch import Tensor


class Ahead:
    """Replaces `Data.batch`."""

    def __init__(self, read: Callable[[int], tuple[Tensor, Tensor]]):
        self.read, self.reader = read, ThreadPoolExecutor(1)
        self.coming: dict[int, Future] = {}  # by step

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step: the one that is coming, or another one."""
        here = self.coming.get(step)
        self.coming = {step + 1: self.reader.submit(self.read, step + 1)}
        return self.read(step) if here is None else here.result()


def attach(config: Any, parts: SimpleNamespace):
    """Read ahead."""
    if next(parts.model.parameters()).is_cuda:
        parts.data.batch = Ahead(parts.data.batch)
