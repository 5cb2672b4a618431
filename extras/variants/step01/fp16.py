"""fp16 with dynamic loss scaling (`--dtype fp16`; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

fp16 has few exponent bits: a gradient below 6e-8 becomes zero. So the loss is multiplied by a scale before backward,
and the finished gradients are divided by it. A gradient above 65504 overflows: then the update is skipped and the scale
is halved; after 1000 good steps it is doubled. The norm is that of the whole gradient, so all ranks skip, or none.

In step 1 the loss would be `micro_loss * scale`, a line after the last backward would divide the gradients, and
`optimizer.step` would be called only if the norm is finite.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.trainer import DTYPES
from extras.variants import Parts
from step07_moe_ep import MoE

GROWTH = 1000  # good steps after which the scale is doubled
DTYPES["fp16"] = torch.float16


class ScaleGradient(torch.autograd.Function):
    """The identity; in backward, times the scale."""

    @staticmethod
    def forward(ctx, loss: Tensor, scaling: "LossScaling") -> Tensor:
        """A scalar, in fp32 or wider."""
        ctx.scaling = scaling
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient, still in fp32 or wider."""
        return grad * ctx.scaling.scale, None


class LossScaling:
    """Stands around an optimizer. `scale`, `good_steps`: what a resumed run must know."""

    def __init__(self, parts: Parts):
        layers = [module for module in parts.model.modules() if isinstance(module, MoE)]  # with losses of their own
        names = [(moe, name) for moe in layers for name in ("coeff", "z_coeff") if hasattr(moe, name)]
        self.coeffs = {(moe, name): getattr(moe, name) for moe, name in names}
        self.good_steps, self.scaled, self.skipping = 0, True, False
        self.set_scale(2.0**16)

    def set_scale(self, scale: float):
        """From the next forward on."""
        self.scale = scale
        for (moe, name), coeff in self.coeffs.items():
            setattr(moe, name, coeff * scale)

    def loss(self, plain: Callable, *inputs: Tensor) -> Tensor:
        """Around the model's loss."""
        return ScaleGradient.apply(plain(*inputs), self)

    def gradients(self, plain: Callable) -> dict[str, Tensor]:
        """Around `optimizer.gradients`: at the first call of a step, they are divided by the scale, in place."""
        gradients = plain()
        if self.scaled:
            for gradient in gradients.values():
                gradient.mul_(1 / self.scale)
        self.scaled = False
        return gradients

    def require_finite(self, plain: Callable, step: int, loss: float, grad_norm: float):
        """Around `run.require_finite`: a norm that is not finite ends no run, it skips the update."""
        self.skipping = not math.isfinite(grad_norm)
        plain(step, loss=loss)

    def step(self, plain: Callable, lr: float):
        """Around `optimizer.step`."""
        plain(lr)
        self.good_steps = 0 if self.skipping else self.good_steps + 1
        if self.skipping:
            self.set_scale(self.scale / 2)
        elif self.good_steps % GROWTH == 0:
            self.set_scale(self.scale * 2)
        self.scaled = True

    def update(self, plain: Callable):
        """Around the rule's own step, which may be left out; gradients are freed all the same."""
        if not self.skipping:
            plain()

    def state(self) -> dict:
        """What a checkpoint keeps: the scale, and how long it has been good."""
        return dict(scale=self.scale, good_steps=self.good_steps)

    def restore(self, state: dict):
        """Restore it from a checkpoint."""
        self.good_steps = state["good_steps"]
        self.set_scale(state["scale"])


def attach(config: Any, parts: Parts) -> LossScaling | None:
    """The model's loss enters backward scaled; the optimizer sees gradients without the scale."""
    if config.dtype != "fp16":
        return None
    scaling = LossScaling(parts)
    parts.around(parts.model, "loss", scaling.loss, by=__name__)
    parts.around(parts.optimizer, "gradients", scaling.gradients, by=__name__)
    parts.around(parts.run, "require_finite", scaling.require_finite, by=__name__)
    parts.around(parts.optimizer, "step", scaling.step, by=__name__)
    parts.around(parts.optimizer.torch_optimizer, "step", scaling.update, by=__name__)
    return scaling
