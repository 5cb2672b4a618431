"""The next step's batch is read while this one is computed (`--prefetch`): useful where a GPU computes.

A batch is a pure function of the step, so it does not matter when it is read. On a CPU, though, the cores are busy. In
step 1 the loop would ask for the batch of `step + 1` before it waits for the loss.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from extras.variants import Parts


def batch(reader: Executor, coming: dict[int, Future], read: Callable, step: int) -> tuple[Tensor, Tensor]:
    """Around `Data.batch`: the batch of a step, from `coming` if it was read ahead. Start to read the next one."""
    here = coming.pop(step, None)
    coming[step + 1] = reader.submit(read, step + 1)
    return read(step) if here is None else here.result()


@dataclass
class Flags:
    """Reading ahead."""

    prefetch: bool = False  # read the next step's batch while this one's is computed


def attach(config: Any, parts: Parts):
    """Start to read ahead."""
    if config.prefetch:
        parts.around(parts.data, "batch", partial(batch, ThreadPoolExecutor(1), {}), by=__name__)
