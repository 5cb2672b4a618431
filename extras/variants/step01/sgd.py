"""Plain gradient descent (`--optimizer sgd`), without moments. It reveals a wrongly scaled gradient, which Adam hides.

In step 1 it would be one more entry of OPTIMIZERS.
"""

from typing import Any

import torch
from torch import Tensor

from step01_single_gpu import OPTIMIZERS, decay_groups


def sgd(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """Returns the update rule for these masters."""
    return torch.optim.SGD(decay_groups(masters, config), fused=True)


OPTIMIZERS["sgd"] = sgd
