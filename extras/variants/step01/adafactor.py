"""Adafactor (`--optimizer adafactor`; Shazeer and Stern 2018): second moments in n + m numbers instead of n m.

Of a matrix's squared gradients it keeps the means of rows and of columns, and takes their product for the whole; there
is no first moment. So it must see whole rows and columns: shards of ZeRO and parts of tp or ep have none. In step 1,
`adamw` would have this last line.
"""

from typing import Any

import torch
from torch import Tensor

from common import UserError
from step01_single_gpu import OPTIMIZERS, decay_groups


def check(config: Any, world: int):
    """Raises UserError."""
    if config.optimizer != "adafactor":
        return
    if getattr(config, "zero", 0):
        raise UserError("--optimizer adafactor looks at whole rows and columns, shards have none: use it with --zero 0")
    if getattr(config, "tp", 1) > 1:
        raise UserError("--optimizer adafactor looks at whole rows and columns: use it with --tp 1")
    if getattr(config, "ep", 1) > 1:
        raise UserError("--optimizer adafactor looks at all experts at once: use it with --ep 1")


def adafactor(masters: dict[str, Tensor], config: Any) -> torch.optim.Optimizer:
    """The update rule."""
    return torch.optim.Adafactor(decay_groups(masters, config))


OPTIMIZERS["adafactor"] = adafactor
