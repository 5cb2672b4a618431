"""Reads the next step's batch in a thread during the current step (`--prefetch`), which helps if a GPU computes.

A batch is a pure function of the step, so it does not matter when it is read. Without a GPU the cores are busy anyway.
In step 1 the loop would ask for the batch of `step + 1` before it waits for the loss.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from extras.variants import Parts


def batch(reader: Executor, coming: dict[int, Future], read: Callable, step: int) -> tuple[Tensor, Tensor]:
    """Wraps `Data.batch`: return a step's batch, from `coming` if it was read ahead, and start to read the next one."""
    here = coming.pop(step, None)
    coming[step + 1] = reader.submit(read, step + 1)
    return read(step) if here is None else here.result()


@dataclass
class Flags:
    """Reading ahead."""

    prefetch: bool = False  # read the next step's batch while this one's is computed


def attach(config: Any, parts: Parts):
    """Let a thread read the batches ahead."""
    if config.prefetch:
        parts.around(parts.data, "batch", partial(batch, ThreadPoolExecutor(1), {}), by=__name__)
