"""fp16 with dynamic loss scaling (`--dtype fp16`; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

fp16 has few bits for the exponent: a gradient below 6e-8 becomes zero. So the loss is multiplied by a scale before
backward, and the finished gradients are divided by it. A gradient beyond 65504 overflows: that update is skipped, and
the scale is halved; after 1000 good steps it is doubled.

In step 1 the loss would be `micro_loss * scale`; a line after the last backward would divide the gradients; and
`optimizer.step` would be called only if the norm is finite. Here the scale enters where the model's loss does, which is
where a pipeline's last stage has it, too. Whether a gradient overflows is asked of all ranks.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from common.comm import Mesh, all_reduce
from common.trainer import DTYPES
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


def skip_update(optimizer: Any, update: Callable, lr: float):
    """Call `update`, the optimizer's step, but leave masters and moments as they are; gradients are freed."""
    optimizer.rule.step = lambda: None
    update(lr, 0.0)
    del optimizer.rule.step


class LossScaling:
    """Stands around an optimizer. `scale`, `good_steps`: what a resumed run must know."""

    def __init__(self, parts: SimpleNamespace):
        self.optimizer, self.mesh = parts.optimizer, getattr(parts, "mesh", None) or Mesh(dp=1)
        self.gradients, self.update = parts.optimizer.gradients, parts.optimizer.step
        # These add losses of their own.
        self.balanced = {m: m.weight for m in parts.model.modules() if isinstance(m, MoE)}
        self.good_steps, self.scaled = 0, True
        self.set_scale(2.0**16)

    def set_scale(self, scale: float):
        """From the next forward on."""
        self.scale = scale
        for moe, weight in self.balanced.items():
            moe.weight = weight * scale

    def unscaled_gradients(self) -> dict[str, Tensor]:
        """Replaces `optimizer.gradients`: at the first call of a step, they are divided by the scale, in place."""
        gradients = self.gradients()
        if self.scaled:
            for gradient in gradients.values():
                gradient.mul_(1 / self.scale)
        self.scaled = False
        return gradients

    def overflow(self) -> bool:
        """Whether any rank has a gradient that is not finite."""
        bad = sum((~gradient.isfinite()).any() for gradient in self.unscaled_gradients().values()).float()
        for dim in self.mesh.sizes:
            all_reduce(bad, self.mesh[dim]).wait()
        return bad.item() > 0

    def step(self, lr: float, factor: float):
        """Replaces `optimizer.step`."""
        if self.overflow():
            skip_update(self.optimizer, self.update, lr)
            self.good_steps = 0
            self.set_scale(self.scale / 2)
        else:
            self.update(lr, factor)
            self.good_steps += 1
            if self.good_steps % GROWTH == 0:
                self.set_scale(self.scale * 2)
        self.scaled = True


def attach(config: Any, parts: SimpleNamespace):
    """The model's loss enters backward scaled; the optimizer sees gradients without the scale."""
    if config.dtype != "fp16":
        return
    parts.loss_scaling, plain = LossScaling(parts), parts.model.loss
    parts.model.loss = lambda *inputs: ScaleGradient.apply(plain(*inputs), parts.loss_scaling)
    parts.optimizer.gradients = parts.loss_scaling.unscaled_gradients
    parts.optimizer.step = parts.loss_scaling.step


def state(_config: Any, parts: SimpleNamespace) -> dict | None:
    """What a checkpoint keeps: the scale, and how long it has been good."""
    scaling = getattr(parts, "loss_scaling", None)
    return None if scaling is None else dict(scale=scaling.scale, good_steps=scaling.good_steps)


def restore(_config: Any, parts: SimpleNamespace, found: dict | None):
    """Take it again."""
    if found is not None and hasattr(parts, "loss_scaling"):
        parts.loss_scaling.good_steps = found["good_steps"]
        parts.loss_scaling.set_scale(found["scale"])
