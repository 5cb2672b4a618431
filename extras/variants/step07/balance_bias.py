"""`--balance bias`: experts are kept busy without a loss (Wang et al. 2024, "auxiliary-loss-free"; DeepSeek-V3).

The choice of a token's experts uses p + b, their weights use p. After each step, b_e of each expert moves by
--bias-speed: up if it had less than its share of all ranks' choices, else down. b has no gradient, but belongs to the
model: a buffer `bias` [experts], fp32, of each layer. In step 7, `top_k` in `MoE.forward` would see p + b, and the last
three lines of `update` would follow the optimizer's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import step07_moe_ep as step07
from common.comm import Mesh, all_reduce
from extras.variants import Parts
from extras.variants.step07.routing import RoutedMoE
from step07_moe_ep import BALANCE

SINCE = step07.Config
BALANCE["bias"] = RoutedMoE
DIMS = ("data", "tp", "mirror")  # over which choices are summed; the last is dualpipe's other copy


def update(layers: list[RoutedMoE], mesh: Mesh, speed: float, step: Callable, lr: float):
    """Around the optimizer's step: then the biases move."""
    step(lr)
    for moe in layers:
        for dim in DIMS:
            if dim in mesh.groups:
                all_reduce(moe.load, mesh[dim]).wait()
        moe.bias += speed * (moe.load.mean() - moe.load).sign()
        moe.load.zero_()


@dataclass
class Flags:
    """Balance by bias."""

    bias_speed: float = 0.001  # change of an expert's bias in a step, with --balance bias


TRIED = dict(bias_speed=0.1)
COMPUTED = True
NEEDS = [("bias_speed", "balance", "bias")]


def attach(config: Any, parts: Parts):
    """Give each layer its biases, and move them after each update."""
    if config.balance != "bias":
        return
    layers = [module for module in parts.model.modules() if isinstance(module, RoutedMoE)]
    for moe in layers:
        del moe.bias  # None until now
        moe.register_buffer("bias", torch.zeros(config.experts, device=parts.positions.device))
        moe.load = torch.zeros_like(moe.bias)  # choices of this step
    parts.around(parts.optimizer, "step", partial(update, layers, parts.mesh, config.bias_speed), by=__name__)
