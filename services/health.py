"""Is a run still healthy: finite numbers, no spikes, and what each rank sees before all numbers are summed."""

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from common import UserError
from common.moe import MoEConfig
from services import checkpoint as checkpoints
from services.devices import peak_memory
from services.launch import gather_objects
from services.run import Run

WINDOW = 32  # steps that the running medians of --skip-spikes look back on


class Spikes:
    """--skip-spikes: the loss and the gradient norm of the last steps, `recent`, and whether new ones stand out."""

    def __init__(self, factor: float):
        self.factor = factor
        self.recent: tuple[tuple[float, float], ...] = ()

    def is_spike(self, *values: float) -> bool:
        """Whether loss or norm exceeds `factor` times its median over the last steps, of which 8 are needed.

        Spikes enter the medians too: what lasts becomes normal, and training goes on.
        """
        if not self.factor:
            return False
        medians = [statistics.median(before) for before in zip(*self.recent, strict=True)]
        enough = len(self.recent) >= 8
        self.recent = (*self.recent, values)[-WINDOW:]
        return enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))


def health(run: Run, loss: Tensor | float, optimizer: Any) -> dict[str, list[dict]]:
    """With --log-ranks, for the record: {"ranks": what each rank sees before all numbers are summed}. A collective.

    A straggler has the most `seconds` less `waited_seconds`; what replicas hold alike has one `grad_norm`.
    """
    if not run.config.log_ranks:
        return {}
    parts = [part for part in optimizer.gradients().values() if part.numel()]
    norm = torch.nn.utils.get_total_norm(parts).item() / optimizer.loss_scale if parts else 0.0
    ours = dict(rank=run.rank, loss=float(loss), grad_norm=norm, seconds=time.perf_counter() - run.started)
    ours["waited_seconds"] = sum(run.mesh.ledger.wait_seconds.values())
    ours["peak_memory_bytes"] = peak_memory(run.device)
    return dict(ranks=gather_objects(ours, run.mesh))


def expert_metrics(m: MoEConfig, counted: Tensor) -> dict[str, Any]:
    """For metrics.jsonl: load of each expert by layer (1/E is even), the share of choices dropped, and so on."""
    layers = [n for n in range(m.n_layers) if m.has_experts(n)]
    if not layers:
        return {}
    choices, (drops, entropy, loss) = counted[layers, :-3].sum(-1), counted[layers, -3:].unbind(-1)
    load = (counted[layers, :-3] / choices[:, None]).tolist()
    return dict(
        expert_load=dict(zip(map(str, layers), load, strict=True)),
        drop_rate=(drops / choices).mean().item(),
        router_entropy=(entropy / choices).mean().item() * m.experts_per_token,
        balance_loss=loss.sum().item(),
    )


def require_finite(value: Tensor | float, step: int, run: Run, what: str = "loss"):
    """Stop before a NaN or an infinity reaches the weights. Raises UserError."""
    if not math.isfinite(value):
        raise UserError(
            f"step {step + 1}: the {what} is {float(value)}; lower --lr, or resume from the last good checkpoint, "
            f"{checkpoints.newest(run.out) or 'of which there is none'}"
        )
