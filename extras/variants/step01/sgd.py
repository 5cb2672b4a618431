"""Plain gradient descent (`--optimizer sgd`), without moments. It shows a wrong scale of a gradient, which Adam hides.

In step 1, `adamw` would have this last line.
"""

from typing import Any

import torch
from torch import Tensor

from step01_single_gpu import OPTIMIZERS, decay_groups


def sgd(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """Return the update rule."""
    return torch.optim.SGD(decay_groups(masters, config), fused=True)


OPTIMIZERS["sgd"] = sgd
