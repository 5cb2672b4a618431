"""Prints the example of step 3's docstring (`--toy`): four weights on two ranks, in every stage of ZeRO.

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
from extras.variants.step01 import sgd  # noqa: F401  # adds --optimizer sgd
from step03_zero import STAGES

WEIGHTS, LR = [1.0, 2.0, 3.0, 4.0], 0.1


def shown(tensor: Tensor) -> str:
    """Formats values with six digits, which hides rounding."""
    return " ".join(f"{x:g}" for x in tensor.flatten().tolist())


def toy(stage: int, mesh: Mesh, device: torch.device) -> str:
    """Runs one step of the example, with x = rank + 1; returns a line about this rank's weights and gradient."""
    group, layer = mesh["dp"], nn.Linear(4, 1, bias=False, device=device, dtype=torch.float64)
    x = torch.full((4,), group.rank + 1.0, device=device, dtype=torch.float64)
    if stage == 0:
        weights = layer.weight
        weights.data.copy_(torch.tensor(WEIGHTS))
        held = shown(weights)
        (layer(x).square().sum() / 2 / group.size).backward()  # scale once, then only sum
        all_reduce(weights.grad, group).wait()
        gradient, ours = shown(weights.grad), shown(weights - LR * weights.grad)
        return f"stage 0, rank {group.rank}: weights {held}, gradient {gradient} -> own {ours}, all {ours}"
    model, trunk = nn.Module(), nn.Module()  # the layer where a decoder has its layers, with nothing around it
    trunk.embed_tokens, trunk.layers, trunk.norm = nn.Module(), nn.ModuleDict({"0": layer}), nn.Module()
    model.model, model.lm_head, model.config = trunk, nn.Module(), SimpleNamespace(n_layers=1)
    numbers = SimpleNamespace(optimizer="sgd", weight_decay=0.0, seed=0)
    zero = STAGES[stage](model, numbers, mesh, device, torch.float64)
    unit = zero.units[0]
    unit.flat.untyped_storage().resize_(len(unit.flat) * 8)
    unit.flat[: len(WEIGHTS)] = torch.tensor(WEIGHTS)
    unit.shard.copy_(unit.flat[unit.first :][: unit.length])  # the master too: in fp64 it is the shard
    held = shown(unit.shard if stage == 3 else unit.flat)
    zero.begin(1)
    (layer(x).square().sum() / 2 / group.size).backward()
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
    """Set --steps to 0, because nothing is trained."""
    if config.toy:
        config.steps = 0


def attach(config: Any, parts: Parts):
    """Run the example in all stages; rank 0 prints the lines of all ranks."""
    if not config.toy:
        return
    everyones = [[toy(stage, parts.mesh, next(parts.model.parameters()).device) for stage in range(4)]]
    if dist.is_initialized():
        lines, everyones = everyones[0], [None] * parts.mesh.world
        dist.all_gather_object(everyones, lines)
    if parts.mesh.rank == 0:
        print("\n".join(line for stage in zip(*everyones, strict=True) for line in stage))
