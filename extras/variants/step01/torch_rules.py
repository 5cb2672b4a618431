"""Two update rules of torch.optim: gradient descent (`--optimizer sgd`) and Adafactor (`--optimizer adafactor`).

SGD without momentum has no state. It reveals a wrongly scaled gradient, which Adam hides. Adafactor (Shazeer and Stern
2018) stores the n m second moments of a matrix in n + m numbers: it keeps the mean of each row and of each column of
the squared gradients, and estimates second moments by their products. It keeps no first moments. A rank must hold whole
rows and columns. In step 1 both rules would be entries of OPTIMIZERS.
"""

from typing import Any

import torch
from torch import Tensor

from extras.variants.record import SET, Refusal
from step01_single_gpu import OPTIMIZERS, decay_groups


def sgd(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """Returns gradient descent for these masters."""
    return torch.optim.SGD(decay_groups(masters, config), fused=True)


def adafactor(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """Returns Adafactor for these masters."""
    return torch.optim.Adafactor(decay_groups(masters, config))


OPTIMIZERS["sgd"] = sgd
OPTIMIZERS["adafactor"] = adafactor
WHOLE = "it needs whole rows and columns of a matrix"
REFUSES = [
    Refusal(dict(optimizer=("adafactor",), zero=(1, 2, 3)), f"{WHOLE}, and ZeRO shards have none; use --zero 0"),
    Refusal(dict(optimizer=("adafactor",), tp=SET), f"{WHOLE}, which tp shards; use --tp 1"),
    Refusal(dict(optimizer=("adafactor",), ep=SET), "it factors the gradients of all experts together; use --ep 1"),
]
