"""fp16 with dynamic loss scaling (`--dtype fp16`; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

fp16 has few exponent bits: a gradient below 3e-8 becomes zero. So the loss is multiplied by a scale before backward,
and the finished gradients are divided by it. A gradient above 65504 overflows: then the update is skipped and the scale
is halved; after 1000 good steps it is doubled. All ranks have the same global norm, so they skip together.

In step 1 the loss would be `micro_loss * scale`, a line after the last backward would divide the gradients, and
`optimizer.step` would be called only if the norm is finite.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from common.trainer import DTYPES
from extras.variants import Parts

GROWTH = 1000  # good steps after which the scale is doubled
DTYPES["fp16"] = torch.float16


class LossScaling:
    """Scales the loss and unscales the gradients. A resumed run needs `scale` and `good_steps`."""

    def __init__(self, parts: Parts):
        self.parts, self.scale, self.scaled, self.skipping = parts, 1.0, True, False
        self.restore(dict(scale=2.0**16, good_steps=0))

    def state(self) -> dict:
        """For a checkpoint: the scale, and the number of good steps in a row."""
        return dict(scale=self.scale, good_steps=self.good_steps)

    def restore(self, state: dict):
        """Set the scale and the number of good steps. Coefficients of MoE layers' extra losses get the same scale."""
        for module, name in product(self.parts.model.modules(), ("coeff", "z_coeff")):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) * state["scale"] / self.scale)
        self.scale, self.good_steps = state["scale"], state["good_steps"]

    def loss(self, plain: Callable, *inputs: Tensor) -> Tensor:
        """Wraps the model's loss, a scalar in fp32 or wider: keep its value, and scale its gradient."""
        loss = plain(*inputs)
        return loss + (self.scale - 1) * (loss - loss.detach())

    def gradients(self, plain: Callable) -> dict[str, Tensor]:
        """Wraps `optimizer.gradients`: the first call in each step divides the gradients by the scale, in place."""
        gradients = plain()
        if self.scaled:
            for gradient in gradients.values():
                gradient.mul_(1 / self.scale)
        self.scaled = False
        return gradients

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Wraps `run.require_finite`: a norm that is not finite skips the update; the check of the loss stays."""
        self.skipping = not math.isfinite(grad_norm)
        plain(step, loss=loss)

    def update(self, plain: Callable):
        """Wraps the update rule's `step`: skip the update after an overflow."""
        if not self.skipping:
            plain()

    def step(self, plain: Callable, lr: float):
        """Wraps `optimizer.step`: afterwards, choose the scale of the next step."""
        plain(lr)
        good_steps = 0 if self.skipping else self.good_steps + 1
        factor = 0.5 if self.skipping else 2.0 if good_steps % GROWTH == 0 else 1.0
        self.restore(dict(scale=self.scale * factor, good_steps=good_steps))
        self.scaled = True


def attach(config: Any, parts: Parts) -> LossScaling | None:
    """Scale the model's loss before backward, and unscale the gradients before the optimizer uses them."""
    if config.dtype != "fp16":
        return None
    scaling = LossScaling(parts)
    parts.around(parts.model, "loss", scaling.loss, by=__name__)
    parts.around(parts.optimizer, "gradients", scaling.gradients, by=__name__)
    parts.around(parts.run, "require_finite", scaling.require_finite, by=__name__)
    parts.around(parts.optimizer, "step", scaling.step, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", scaling.update, by=__name__)
    return scaling
