"""Muon (`--optimizer muon`; Jordan et al. 2024) updates each matrix by its orthogonalised momentum.

AdamW treats each number by itself, so a rank can update any shard. Muon must gather whole matrices. With gradient G and
momentum M of a matrix W [out, in], learning rate lr and weight decay d:

    M = 0.95 M + 0.05 G          U = 0.95 M + 0.05 G           number by number, on each shard (Nesterov)
    O = orthogonal(U)            U = A S B^T -> about A B^T    needs all of U: five Newton-Schulz iterations
    W = (1 - lr d) W - lr 0.2 sqrt(max(out, in)) O             number by number, on each shard

The factor 0.2 sqrt(max) makes an update as large as AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training"), so
--lr and --weight-decay mean the same for both. Muon updates the hidden matrices, `*_proj.weight`; AdamW updates norms,
embedding, head and router. In step 1 it would be one more entry of OPTIMIZERS. With shards, an update has four parts:

    1  each rank computes U of its shard                           nothing is sent
    2  U of a unit is all-gathered over the n ranks that shard it  (n-1)/n S            ZeRO's dp (experts: expert_data)
    3  the shards of a matrix are all-gathered over tp             (tp-1)/tp S          where tensor parallelism shards
    4  each rank computes O of the matrices of which it has a shard, and keeps its own part

S: the bytes of the gathered tensor, 2 a number. U is rounded to bf16 before it is sent, because the iterations would
round it anyway. So in fp32 the results of two layouts may differ by such a rounding. In fp64 nothing is rounded.
"""

from typing import Any

import torch
from torch import Tensor

from common.comm import all_gather
from common.layout import layout_of
from extras.variants import Parts
from step01_single_gpu import OPTIMIZERS, adamw
from step03_zero import Unit

MOMENTUM = 0.95
A, B, C = 3.4445, -4.7750, 2.0315  # x -> A x + B x^3 + C x^5 drives singular values to 0.7 .. 1.2 (Jordan)


def is_hidden(name: str) -> bool:
    """Whether the parameter of this name is a hidden matrix, which Muon updates."""
    return name.endswith("_proj.weight")


def rounded(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which updates are gathered and orthogonalised: fp64 if `dtype` is fp64, else bf16."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Set the singular values of matrices [n, rows, columns] to about 1; odd polynomials keep the singular vectors."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


class Muon:
    """An optimizer like those of torch.optim: it updates the hidden matrices by Muon, and the rest by AdamW."""

    def __init__(self, masters: dict[str, Tensor], config: Any):
        """Takes `masters`, which this rank updates: those of local parameters or, with ZeRO, of flat parts of them."""
        self.hidden = {name: tensor for name, tensor in masters.items() if is_hidden(name)}
        self.adamw = adamw({name: tensor for name, tensor in masters.items() if not is_hidden(name)}, config)
        self.group = dict(params=list(self.hidden.values()), weight_decay=config.weight_decay)
        self.state, self.param_groups = self.adamw.state, [*self.adamw.param_groups, self.group]

    def see(self, parts: Parts):
        """Store what updates need, before the first step. `firsts`: where in a parameter this rank's shard begins."""
        self.params, self.mesh, self.units = dict(parts.model.named_parameters()), parts.mesh, parts.units
        self.firsts = {name: max(0, u.first - u.span[name][0]) for u in self.units for name in u.trained}

    def gather(self, unit: Unit, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """All-gathers a unit's updates (not yet orthogonal), by name: those of shards -> of local parameters, flat."""
        dtype = rounded(unit.flat.dtype)
        own, whole = torch.zeros_like(unit.shard, dtype=dtype), torch.empty_like(unit.flat, dtype=dtype)
        ours = {name: update for name, update in updates.items() if name in unit.trained}
        for name, update in ours.items():
            unit.view_shard(own, name).copy_(update)
        all_gather(whole, own, unit.group).wait()
        return {name: unit.view(whole, name).flatten() for name in ours}

    def orthogonal_part(self, name: str, update: Tensor) -> Tensor:
        """Orthogonalise a parameter's flat `update`; returns this rank's shard of it, times 0.2 sqrt(max(out, in))."""
        param, local, first = self.params[name], self.hidden[name], self.firsts.get(name, 0)
        each, shards = param.shape[-2:].numel(), [s for s in layout_of(param).shards if s.dim - param.dim() >= -2]
        low, high = first // each, -(-(first + local.numel()) // each)  # the matrices of which the shard has elements
        x = update[low * each : high * each].view(-1, *param.shape[-2:])
        x, sides = x.to(rounded(x.dtype)), list(param.shape[-2:])
        for shard in shards:
            parts = x.new_empty(self.mesh[shard.over].size, *x.shape)
            all_gather(parts.view(-1), x.reshape(-1), self.mesh[shard.over]).wait()
            x = torch.cat(tuple(parts), shard.dim - param.dim())
            sides.append(shard.full)
        x = orthogonal(x)
        for shard in shards:
            x = x.narrow(shard.dim - param.dim(), shard.start, shard.stop - shard.start)
        part = x.flatten()[first - low * each :][: local.numel()].view_as(local)
        return part.to(local.dtype) * (0.2 * max(sides) ** 0.5)

    def zero_grad(self):
        """Drop the gradients."""
        self.adamw.zero_grad()
        for shard in self.hidden.values():
            shard.grad = None

    @torch.no_grad()
    def step(self):
        """Update the shards that have gradients. All ranks that share a unit or a matrix must call this."""
        updates = {}
        for name, shard in self.hidden.items():
            if shard.grad is None:
                continue
            momentum = self.state[shard].setdefault("momentum_buffer", torch.zeros_like(shard))
            momentum.lerp_(shard.grad, 1 - MOMENTUM)
            updates[name] = shard.grad.lerp(momentum, MOMENTUM)
        for unit in self.units:  # also if no shard is ours; with offloading, one unit at a time has gradients
            if unit.grad_shard is not None and any(map(is_hidden, unit.trained)):
                updates |= self.gather(unit, updates)
        rate, decay = self.group["lr"], self.group["weight_decay"]
        for name, update in updates.items():
            part = self.orthogonal_part(name, update.flatten())
            self.hidden[name].mul_(1 - rate * decay).sub_(part, alpha=rate)
        self.adamw.step()


OPTIMIZERS["muon"] = Muon


def attach(config: Any, parts: Parts):
    """Give Muon the parameters, the mesh and ZeRO's units."""
    if config.optimizer == "muon":
        parts.optimizer.torch_optimizer.see(parts)
