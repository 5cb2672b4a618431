"""A variant for step 3: four weights on two ranks, printed in every stage (`--toy`).

W = [1,2,3,4], two ranks with x = 1 and 2, loss (sum(W) x)^2 / 2. The gradients are 10 and 40, their mean is 25. SGD
with learning rate 0.1 takes 2.5 off every weight. Printed is what each rank holds in every stage:

    stage 0, rank 0: weights 1 2 3 4, gradient 25 25 25 25 -> own -1.5 -0.5 0.5 1.5, all -1.5 -0.5 0.5 1.5
    stage 1, rank 0: weights 1 2 3 4, gradient 25 25 5 5 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 2, rank 0: weights 1 2 3 4, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5
    stage 3, rank 0: weights 1 2, gradient 25 25 -> own -1.5 -0.5, all -1.5 -0.5 0.5 1.5

(In stage 1 the first half of the gradient is the sum of the ranks; the other half is this rank's part of it, 10 / 2.)
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Mesh, all_reduce
from services.launch import gather_objects
from services.offload import Homes
from services.state import full_state, settle


class ToyLayer(nn.Module):
    """Four weights and the loss (sum(W) x)^2 / 2."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))

    def forward(self, x: float) -> Tensor:
        """A scalar."""
        return (self.W.sum() * x) ** 2 / 2


class Toy(nn.Module):
    """The layer where a decoder has its layers, with nothing before and behind it."""

    def __init__(self):
        super().__init__()
        self.model, self.lm_head = nn.Module(), nn.Module()
        self.model.embed_tokens, self.model.norm = nn.Module(), nn.Module()
        self.model.layers = nn.ModuleDict({"0": ToyLayer()})

    def forward(self, x: float) -> Tensor:
        """A scalar."""
        return self.model.layers["0"](x)


def shown(tensor: Tensor) -> str:
    """Values without the last digits' rounding."""
    return " ".join(f"{x:g}" for x in tensor.tolist())


def toy(stage: int, mesh: Mesh, zero_optimizer: type) -> str:
    """One step of the example; returns what this rank held and did. x is the rank's number plus one."""
    group, model = mesh["dp"], Toy().to(mesh.device)
    weights, name = model.model.layers["0"].W, "model.layers.0.W"
    x, lr = group.rank + 1.0, 0.1
    if stage == 0:
        held = shown(weights)
        (model(x) / group.size).backward()  # scaled once: then only sums
        all_reduce(weights.grad, group).wait()
        gradient, ours = shown(weights.grad), shown(weights - lr * weights.grad)
        everyone = ours
    else:
        numbers = dict(zero=stage, zero_replicas=1, optimizer="sgd", weight_decay=0, grad_clip=0, grad_dtype="fp32")
        optimizer = zero_optimizer(model, SimpleNamespace(**numbers), mesh, torch.float64, Homes())
        unit = optimizer.units[0]
        held = shown(unit.slice if stage == 3 else weights)
        optimizer.begin()
        optimizer.last_micro_batch()
        (model(x) / group.size).backward()
        optimizer.finish()
        gradient = shown(weights.grad if stage == 1 else unit.grad_slice)
        optimizer.step(lr, norm=0.0)
        settle(optimizer)
        ours, everyone = shown(unit.slice), shown(full_state(optimizer, mesh)["model"][name])
    return f"stage {stage}, rank {group.rank}: weights {held}, gradient {gradient} -> own {ours}, all {everyone}"


def print_toy(mesh: Mesh, zero_optimizer: Any):
    """All stages, all ranks."""
    lines = [line for stage in range(4) for line in gather_objects(toy(stage, mesh, zero_optimizer), mesh)]
    if mesh.rank == 0:
        print("\n".join(lines))
