"""Adafactor (`--optimizer adafactor`; Shazeer and Stern 2018): second moments in n + m numbers instead of n m.

Of the squared gradients of a matrix it keeps the mean of each row and of each column, and takes their product as second
moments; there is no first moment. Rows and columns must be whole. In step 1, `adamw` would have this last line.
"""

from typing import Any

import torch
from torch import Tensor

from extras.variants.record import SET, Refusal
from step01_single_gpu import OPTIMIZERS, decay_groups


def adafactor(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """Return the update rule."""
    return torch.optim.Adafactor(decay_groups(masters, config))


OPTIMIZERS["adafactor"] = adafactor
WHOLE = "it needs whole rows and columns of a matrix"
REFUSES = [
    Refusal(dict(optimizer=("adafactor",), zero=(1, 2, 3)), f"{WHOLE}, and ZeRO shards have none; use --zero 0"),
    Refusal(dict(optimizer=("adafactor",), tp=SET), f"{WHOLE}, which tp shards; use --tp 1"),
    Refusal(dict(optimizer=("adafactor",), ep=SET), "it factors the gradients of all experts together; use --ep 1"),
]
