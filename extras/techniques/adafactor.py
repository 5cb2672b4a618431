"""Adafactor keeps the second moments of a matrix [n, m] in n + m numbers (`--optimizer adafactor`).

Adam divides each gradient by the root of V, a running mean of its square. Adafactor keeps only the
mean of each row and of each column of V, and takes R C / mean(R) for V. If V has rank one, that is
exact. It keeps no first moments.

    V = [1 2]   R = mean of each row = [1.5 3]      R C / mean(R) = [1 2]    exact: the second
        [2 4]   C = mean of each column = [1.5 3]                   [2 4]    row is twice the first

THE LAW. A matrix takes 4 (n + m) bytes in place of Adam's 8 n m, and a norm [n] 4 n in place of 8
n. For tiny, with 804,224 parameters: 45,064 bytes in place of 6,433,792.

The length of an update is relative to that of the weights: --lr 0.01 changes a matrix by about one
percent. So a rank needs whole rows, columns and matrices: neither ZeRO nor tp may shard them.

Source: Shazeer and Stern 2018, "Adafactor"; here torch.optim.Adafactor.

Run it:    torchrun --nproc_per_node=4 -m extras step02_ddp.py --optimizer adafactor
"""

import torch

from common import UserError
from common.layout import record_of
from step01_single_gpu import OPTIMIZERS, Optimizer, decay_groups


def adafactor(optimizer: Optimizer) -> torch.optim.Optimizer:
    """Adafactor on the masters. Raises UserError if this rank holds only shards."""
    sharded = any(record_of(param).shard for param in optimizer.model.parameters())
    if getattr(optimizer.config, "zero", "0") != "0" or sharded:
        raise UserError("--optimizer adafactor needs whole matrices: use --zero 0, --tp 1, --ep 1")
    return torch.optim.Adafactor(decay_groups(optimizer.masters, optimizer.config))


OPTIMIZERS["adafactor"] = adafactor
