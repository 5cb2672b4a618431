"""Four weights on two ranks, in every stage of ZeRO (`--toy`): the example in step 3's docstring, which it runs.

W = [1,2,3,4]; two ranks have x = 1 and 2 and the loss (sum(W) x)^2 / 2. The gradients are 10 and 40, their mean is 25.
SGD with learning rate 0.1 takes 2.5 off every weight:

    stage 0, rank 0: weights 1 2 3 4, gradient 25 25 25 25 -> own -1.5 -0.5 0.5 1.5, all -1.5 -0.5 0.5 1.5
    stage 1, rank 0: weights 1 2 3 4, gradient 25 25 5 5 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 2, rank 0: weights 1 2 3 4, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 3, rank 0: weights 1 2, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5

(In stage 1 the first half of the gradient is the sum over the ranks; the other half is this rank's part of it, 10 / 2.)
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.comm import Mesh, all_gather, all_reduce
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from step01_single_gpu import OPTIMIZERS
from step03_zero import Config, Zero1, Zero2, Zero3

SINCE = Config
WEIGHTS, NAME, LR = [1.0, 2.0, 3.0, 4.0], "model.layers.0.W", 0.1


class ToyLayer(nn.Module):
    """Four weights and the loss (sum(W) x)^2 / 2."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float64))

    def forward(self, x: float) -> Tensor:
        """A scalar."""
        return (self.W.sum() * x) ** 2 / 2


class Toy(nn.Module):
    """The layer where a decoder has its layers, with nothing before and behind it."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head, self.config = nn.Module(), nn.Module(), SimpleNamespace(n_layers=1)
        self.model.embed_tokens, self.model.norm = nn.Module(), nn.Module()
        self.model.layers = nn.ModuleDict({"0": ToyLayer()})

    def forward(self, x: float) -> Tensor:
        """A scalar."""
        return self.model.layers["0"](x)


def shown(tensor: Tensor) -> str:
    """Values without the last digits' rounding."""
    return " ".join(f"{x:g}" for x in tensor.tolist())


def toy(stage: int, mesh: Mesh, device: torch.device) -> str:
    """One step of the example; returns what this rank held and did. x is the rank's number plus one."""
    group, model = mesh["dp"], Toy().to(device)
    x = group.rank + 1.0
    if stage == 0:
        weights = model.get_parameter(NAME)
        held = shown(weights)
        (model(x) / group.size).backward()  # scale once, then only sum
        all_reduce(weights.grad, group).wait()
        gradient, ours = shown(weights.grad), shown(weights - LR * weights.grad)
        return f"stage 0, rank {group.rank}: weights {held}, gradient {gradient} -> own {ours}, all {ours}"
    OPTIMIZERS["toy"] = lambda masters, _config: torch.optim.SGD(masters.values())
    numbers = SimpleNamespace(optimizer="toy", seed=0)
    zero = (Zero1, Zero2, Zero3)[stage - 1](model, numbers, mesh, device, torch.float64)
    unit = zero.units[0]
    unit.flat.untyped_storage().resize_(len(unit.flat) * 8)
    unit.flat[: len(WEIGHTS)] = torch.tensor(WEIGHTS)
    unit.shard.copy_(unit.flat[unit.first :][: unit.length])  # the master too: in fp64 it is the shard
    held = shown(unit.shard if stage == 3 else unit.flat)
    zero.begin(1)
    (model(x) / group.size).backward()
    zero.finish()
    if stage == 1:  # beside the sum this rank still has its own gradient of the rest
        unit.gradient[unit.first :][: unit.length].copy_(unit.grad_shard)
    gradient = shown(unit.gradient if stage == 1 else unit.grad_shard)
    zero.step(LR)
    ours, everyone = shown(unit.shard), torch.empty_like(unit.shard.repeat(group.size))
    all_gather(everyone, unit.shard.clone(), group).wait()
    return f"stage {stage}, rank {group.rank}: weights {held}, gradient {gradient} -> own {ours}, all {shown(everyone)}"


@dataclass
class Flags:
    """ZeRO's example."""

    toy: bool = False  # print the four-weight example in every stage, and exit


REFUSES = [Refusal(dict(toy=SET, dry_run=SET), "it prints numbers, and a dry run has none; leave one out")]


def settle(config: Any, world: int):
    """No steps are left to be trained."""
    if config.toy:
        config.steps = 0


def attach(config: Any, parts: Parts):
    """Print all stages on all ranks."""
    if not config.toy:
        return
    lines = [toy(stage, parts.mesh, next(parts.model.parameters()).device) for stage in range(4)]
    everyones = [lines]
    if dist.is_initialized():
        everyones = [None] * parts.mesh.world
        dist.all_gather_object(everyones, lines)
    if parts.mesh.rank == 0:
        print("\n".join(line for stage in zip(*everyones, strict=True) for line in stage))
