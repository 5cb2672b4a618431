"""The next step's batch is read while this one is computed (`--prefetch`): useful where a GPU computes.

A batch is a pure function of the step, so it does not matter when it is read. On a CPU, though, the cores are busy. In
step 1 the loop would ask for the batch of `step + 1` before it waits for the loss.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from extras.variants import Parts


class Ahead:
    """Reads the next batch in a thread."""

    def __init__(self):
        self.reader = ThreadPoolExecutor(1)
        self.coming: dict[int, Future] = {}  # by step

    def batch(self, read: Callable, step: int) -> tuple[Tensor, Tensor]:
        """Around `Data.batch`: the batch of a step, read ahead if it is the next one."""
        here = self.coming.get(step)
        self.coming = {step + 1: self.reader.submit(read, step + 1)}
        return read(step) if here is None else here.result()


@dataclass
class Flags:
    """Reading ahead."""

    prefetch: bool = False  # read the next step's batch while this one's is computed


def attach(config: Any, parts: Parts):
    """Start to read ahead."""
    if config.prefetch:
        parts.around(parts.data, "batch", Ahead().batch, by=__name__)
