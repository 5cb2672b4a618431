"""What it costs to keep masters and moments elsewhere (variants/offload_optimizer.py): bytes over a link, once a step.

P: weights that a rank updates. Its gradients go to the host, 4 bytes each, and weights come back, 2 bytes. On a disk 12
bytes of state for each are read, and written. Each way of a link works alone, so a step is longer by

    host    max(4 P, 2 P) / PCIe       disk    the same, and 12 P / drive + 12 P / drive

if nothing hides it. What the host computes comes on top. Both are bounds from below: links as the standard has them,
PCIe x16 between a GPU and its host, and for each GPU one NVMe drive on four lanes of PCIe 4.
"""

from typing import NamedTuple

from theory.gpus import Gpu
from theory.memory import Held


class Offloaded(NamedTuple):
    """A plan whose optimizer state is elsewhere."""

    held: Held  # on the GPU
    elsewhere: float  # bytes, of one rank
    host: float  # seconds of a step for the host's link
    disk: float  # and for a drive, if it lies there


def offloaded(memory: Held, gpu: Gpu) -> Offloaded:
    """What a rank comes to if its optimizer state, 12 P bytes of `memory`, leaves the GPU."""
    state = memory.optimizer
    return Offloaded(memory._replace(optimizer=0.0), state, state / 3 / gpu.host, 2 * state / gpu.drive)
