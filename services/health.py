"""Is a run still healthy: finite numbers, and what each rank sees before all are summed."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.comm import gather_objects
from services import checkpoint as checkpoints
from services.devices import peak_memory
from services.run import Run


def health(run: Run, loss: Tensor | float, optimizer: Any) -> dict[str, list[dict]]:
    """With --log-ranks, for the record: {"ranks": what each rank sees before all numbers are summed}. A collective.

    A straggler has the most `seconds` less `waited_seconds`; what replicas hold alike has one `grad_norm`.
    """
    if not run.config.log_ranks:
        return {}
    parts = [part for part in optimizer.gradient_parts().values() if part.numel()]
    norm = torch.nn.utils.get_total_norm(parts).item() / optimizer.loss_scale if parts else 0.0
    own = dict(rank=run.rank, loss=float(loss), grad_norm=norm, seconds=time.perf_counter() - run.started)
    own["waited_seconds"] = sum(run.mesh.ledger.wait_seconds.values()) if run.mesh is not None else 0.0
    own["peak_memory_bytes"] = peak_memory(run.device)
    return dict(ranks=gather_objects(own, run.mesh))


def require_finite(value: Tensor | float, step: int, run: Run, what: str = "loss"):
    """Stop before a NaN or an infinity reaches the weights. Raises UserError."""
    if not math.isfinite(value):
        raise UserError(
            f"step {step + 1}: the {what} is {float(value)}; lower --lr, or resume from the last good checkpoint, "
            f"{checkpoints.newest(run.out) or 'of which there is none'}"
        )
