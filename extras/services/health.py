"""Each rank's own loss, gradient norm, memory and seconds, before any sum over ranks (`--log-ranks`).

metrics.jsonl gets `ranks`, a list with, for each rank, its `loss` (mean over its own target tokens; 0 without the last
stage of a pipeline), the `grad_norm` of the gradients that it updates with, its seconds by phase (clocks.py), the
`waited_seconds` of the whole step (a straggler has the least), and `peak_memory_bytes` (of a GPU; else of the process).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.model import IGNORE
from extras.services.ranks import gather_objects
from extras.variants import Parts
from step02_ddp import Config as SINCE  # noqa: F401  # one process is its own metrics


@dataclass
class Flags:
    """Numbers of each rank."""

    log_ranks: bool = False  # each rank's loss, gradient norm, memory and seconds in metrics.jsonl


class Health:
    """This rank's own loss and gradient norm."""

    def __init__(self, parts: Parts):
        self.optimizer, self.total, self.count = parts.optimizer, 0.0, 0
        parts.around(parts.model, "loss", self.losing, by=__name__)
        parts.around(parts.run, "require_finite", self.summed, by=__name__)

    def losing(self, plain: Callable, logits: Tensor, targets: Tensor) -> Tensor:
        """Around the model's loss."""
        loss = plain(logits, targets)
        if torch.is_grad_enabled():  # not a validation's
            self.total, self.count = self.total + loss.detach(), self.count + (targets != IGNORE).sum()
        return loss

    def summed(self, require_finite: Callable, step: int, **numbers: float):
        """Around `require_finite`, which is called when gradients are summed over ranks and not yet clipped."""
        parts = [part for part in self.optimizer.gradients().values() if part.numel()]
        self.norm = torch.nn.utils.get_total_norm(parts).item() if parts else 0.0
        require_finite(step, **numbers)

    def of_step(self, numbers: dict[str, Any]) -> dict[str, list[dict]]:
        """The list `ranks` for metrics.jsonl. `numbers`: this rank's part of the record. A collective."""
        ours = dict(loss=float(self.total) / max(1, int(self.count)), grad_norm=self.norm)
        ours |= {key: value for key, value in numbers.items() if key.endswith(("_seconds", "peak_memory_bytes"))}
        ours["waited_seconds"] = sum(numbers["waited_seconds"].values())
        self.total, self.count = 0.0, 0
        return dict(ranks=gather_objects(ours))


def attach(config: Any, parts: Parts) -> Health | None:
    """Observe the run if --log-ranks is set."""
    return Health(parts) if config.log_ranks else None
