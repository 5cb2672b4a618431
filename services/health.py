"""What each rank sees before all numbers are summed (`--log-ranks`).

metrics.jsonl gets `ranks`, a list with, for each rank, its `loss` (mean over its own target tokens; 0 without the last
stage of a pipeline), the `grad_norm` of the gradients that it updates with, the `seconds` from the last step's end
until it waits for the sums over ranks, the `waited_seconds` of the whole step (a straggler has
the least), and `peak_memory_bytes` (of a GPU; else of the whole process).
"""

import resource
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.model import IGNORE
from services.launch import gather_objects
from step02_ddp import Config as SINCE  # noqa: F401  # one process is its own metrics


@dataclass
class Flags:
    """Health (services/health.py)."""

    log_ranks: bool = False  # each rank's loss, gradient norm, memory and seconds in metrics.jsonl


class Health:
    """Listens to the parts of a run; `of_rank` is what it has heard in this step."""

    def __init__(self, parts: SimpleNamespace):
        self.parts, self.began = parts, time.perf_counter()
        self.loss, self.update, self.finish = parts.model.loss, parts.optimizer.step, parts.sync.finish
        parts.model.loss, parts.optimizer.step, parts.sync.finish = self.losing, self.updating, self.finishing
        self.total, self.count = 0.0, 0

    def losing(self, logits: Tensor, targets: Tensor, *more: Any) -> Tensor:
        """Instead of the model's loss."""
        loss = self.loss(logits, targets, *more)
        if torch.is_grad_enabled():  # not a validation's
            self.total, self.count = self.total + loss.detach(), self.count + (targets != IGNORE).sum()
        return loss

    def finishing(self):
        """Instead of the sums over ranks."""
        self.seconds = time.perf_counter() - self.began
        self.finish()

    def updating(self, lr: float, factor: float):
        """Instead of the update."""
        parts = [part for part in self.parts.optimizer.gradients().values() if part.numel()]
        self.norm = torch.nn.utils.get_total_norm(parts).item() if parts else 0.0
        self.update(lr, factor)

    def of_step(self, waited: dict[str, float]) -> dict[str, list[dict]]:
        """For the record: what each rank has seen. A collective."""
        ours = dict(loss=float(self.total) / max(1, int(self.count)), grad_norm=self.norm, seconds=self.seconds)
        gpu = next(self.parts.model.parameters()).is_cuda
        peak = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.total, self.count, self.began = 0.0, 0, time.perf_counter()
        return dict(ranks=gather_objects(ours | dict(waited_seconds=sum(waited.values()), peak_memory_bytes=peak)))


def attach(config: Any, parts: SimpleNamespace):
    """Listen, if asked to."""
    parts.health = Health(parts) if config.log_ranks else None


def metrics(parts: SimpleNamespace, waited: dict[str, float]) -> dict[str, list[dict]]:
    """For metrics.jsonl; `waited` seconds of this rank, by mesh dimension."""
    health = getattr(parts, "health", None)
    return {} if health is None else health.of_step(waited)
