"""What each rank sees before all numbers are summed (`--log-ranks`).

metrics.jsonl gets `ranks`, a list with, for each rank, its `loss` (mean over its own target tokens; 0 without the last
stage of a pipeline), the `grad_norm` of the gradients that it updates with, the `seconds` from the last step's end
until it waits for the sums over ranks, the `waited_seconds` of the whole step (a straggler has
the least), and `peak_memory_bytes` (of a GPU; else of the whole process).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.model import IGNORE
from extras.services.launch import gather_objects
from extras.services.memory import peak_memory
from extras.variants import Parts
from step02_ddp import Config as SINCE  # noqa: F401  # one process is its own metrics


@dataclass
class Flags:
    """Health."""

    log_ranks: bool = False  # each rank's loss, gradient norm, memory and seconds in metrics.jsonl


class Health:
    """Listens to the parts of a run; `of_rank` is what it has heard in this step."""

    def __init__(self, parts: Parts):
        self.parts, self.began = parts, time.perf_counter()
        parts.around(parts.model, "loss", self.losing, by=__name__)
        parts.around(parts.run, "require_finite", self.summed, by=__name__)
        parts.around(parts.sync, "finish", self.finishing, by=__name__)
        self.total, self.count = 0.0, 0

    def losing(self, plain: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        """Around the model's loss."""
        loss = plain(logits, targets)
        if torch.is_grad_enabled():  # not a validation's
            self.total, self.count = self.total + loss.detach(), self.count + (targets != IGNORE).sum()
        return loss

    def finishing(self, finish: Callable):
        """Around the sums over ranks."""
        self.seconds = time.perf_counter() - self.began
        finish()

    def summed(self, require_finite: Callable, step: int, **numbers: float):
        """Around the look at the norm: gradients are summed, and not yet clipped."""
        parts = [part for part in self.parts.optimizer.gradients().values() if part.numel()]
        self.norm = torch.nn.utils.get_total_norm(parts).item() if parts else 0.0
        require_finite(step, **numbers)

    def of_step(self, waited: dict[str, float]) -> dict[str, list[dict]]:
        """For the record: what each rank has seen. A collective."""
        ours = dict(loss=float(self.total) / max(1, int(self.count)), grad_norm=self.norm, seconds=self.seconds)
        peak = peak_memory(next(self.parts.model.parameters()).device)
        self.total, self.count, self.began = 0.0, 0, time.perf_counter()
        return dict(ranks=gather_objects(ours | dict(waited_seconds=sum(waited.values()), peak_memory_bytes=peak)))


def attach(config: Any, parts: Parts) -> Health | None:
    """Listen, if asked to."""
    return Health(parts) if config.log_ranks else None
