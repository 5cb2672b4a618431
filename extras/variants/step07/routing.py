"""More ways to route tokens: expert groups, capacity, z-loss, shared experts; no balancing, or balancing by bias.

    --expert-groups        a token's experts come from at most --groups-per-token of the groups (DeepSeek-V3, 2.1.2)
    --capacity-factor c    in training an expert takes the first c top_k T / E choices of a micro-batch's T tokens
                           (Fedus et al. 2021) and ignores the others. To find the first, cp x tp ranks gather choices
    --z-loss               coefficient of mean (log sum exp)^2 of the router's logits (Zoph et al. 2022, "ST-MoE")
    --shared-experts       number of added experts that every token visits, computed as one MLP (DeepSeek)
    --balance none         no auxiliary loss
    --balance bias         no auxiliary loss (Wang et al. 2024, "auxiliary-loss-free"). Each expert e has a bias b_e. It
                           is chosen by p_e + b_e, but weighted by p_e. After each step, b_e moves by --bias-speed: up
                           if all ranks together chose e less often than the mean, down if more often. b has no
                           gradient, but is part of the model: a buffer `bias` [experts], fp32, of each layer

In step 7, most of these would be one to four lines of `MoE.route`, as in `RoutedMoE.route`; the biases would be updated
after `optimizer.step`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common import UserError
from common.comm import Mesh, all_reduce
from common.layout import note_layout
from common.model import MLP, PRESETS, wide
from extras.variants import Parts
from step04_tp_sp import SHARD_DIMS, enter_block, gather_tokens, leave_block, shard_param
from step07_moe_ep import BALANCE, AddLoss, MoE, own_tokens

SUMMED = ("data", "tp", "mirror")  # dimensions whose ranks route different tokens; the last: dualpipe's other copy


class RoutedMoE(MoE):
    """Step 7's MoE layer with more ways to route tokens."""

    def __init__(self, dim: int, ffn_dim: int, config: Any, mesh: Mesh):
        super().__init__(dim, ffn_dim, config, mesh)
        self.config = config
        self.positions: Tensor | None = None  # of this rank's tokens, int64 [seq/n]
        self.z_coeff = config.z_loss * config.micro_batch_size / config.global_batch_size  # scaled as `coeff`
        self.coeff *= config.balance == "loss"
        self.register_buffer("bias", None)  # [experts], with --balance bias
        if config.shared_experts:
            self.shared_experts = MLP(replace(PRESETS[config.model], ffn_dim=config.shared_experts * ffn_dim))
            for name, linear in self.shared_experts.named_children():
                linear.weight = shard_param(linear.weight, SHARD_DIMS[name], mesh["tp"])
                note_layout(linear.weight, data_dim="data")
            if (tp := mesh["tp"]).size > 1:  # step 4's f and g, as with SP: tp ranks have different tokens here
                self.shared_experts.register_forward_pre_hook(lambda _, x: enter_block(x[0], tp, True))
                self.shared_experts.register_forward_hook(lambda _module, _x, y: leave_block(y, tp, True))
            self.register_forward_hook(lambda moe, x, out: out + moe.shared_experts(x[0]))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route x [tokens, dim] -> probabilities [tokens, experts], scores and int64 ids, both [tokens, top_k]."""
        precise = wide(x.dtype)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))
        if self.z_coeff:
            z = logits.logsumexp(-1).square().sum() / (len(x) * self.group.size)
            logits = AddLoss.apply(logits, z, self.z_coeff)
        p = logits.softmax(-1)
        chosen = self.choose(p.detach() if self.bias is None else p.detach() + self.bias)
        scores = p.gather(1, chosen)
        if self.top_k > 1:
            scores = scores / scores.sum(-1, keepdim=True)
        if torch.is_grad_enabled():  # in training
            if self.bias is not None:
                self.load += F.one_hot(chosen.flatten(), p.shape[-1]).sum(0)
            if self.config.capacity_factor:
                scores = scores * self.within_capacity(chosen, p.shape[-1])
        return p, scores, chosen

    def choose(self, scores: Tensor) -> Tensor:
        """Chooses each token's best experts from its best groups: scores [tokens, experts] -> int64 [tokens, top_k]."""
        groups, most = self.config.expert_groups, self.config.groups_per_token
        if 0 < most < groups:
            by_group = scores.unflatten(1, (groups, -1))
            each = min(max(1, self.top_k // most), by_group.shape[-1])  # a group's score: the sum of its best few
            best = by_group.topk(each).values.sum(-1).topk(most).indices
            barred = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
            scores = by_group.masked_fill(barred[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k).indices

    def within_capacity(self, chosen: Tensor, experts: int) -> Tensor:
        """Which choices fit an expert's capacity, first tokens first: int64 [tokens, top_k] -> bool, same shape."""
        if self.group.size > 1:
            order = gather_tokens(self.positions[None, :, None], self.group).flatten().argsort()
            chosen = gather_tokens(chosen.unflatten(0, (-1, len(self.positions))), self.group)[:, order]
        capacity = ceil(self.config.capacity_factor * chosen.numel() / experts)
        asked = F.one_hot(chosen.flatten(), experts).cumsum(0).gather(1, chosen.flatten()[:, None])
        kept = (asked <= capacity).view(chosen.shape)
        return kept[:, self.positions].flatten(0, 1) if self.group.size > 1 else kept


BALANCE["none"] = BALANCE["bias"] = RoutedMoE


def update(layers: list[RoutedMoE], mesh: Mesh, speed: float, step: Callable, lr: float):
    """Wraps the optimizer's step: update the biases afterwards."""
    step(lr)
    for moe in layers:
        for dim in SUMMED:
            if dim in mesh.groups:
                all_reduce(moe.load, mesh[dim]).wait()
        moe.bias += speed * (moe.load.mean() - moe.load).sign()
        moe.load.zero_()


@dataclass
class Flags:
    """Routing."""

    z_loss: float = 0.0  # coefficient of the router's z-loss
    capacity_factor: float = 0.0  # limit on an expert's choices, as a multiple of the mean; 0: no limit
    expert_groups: int = 1  # number of groups of experts
    groups_per_token: int = 0  # how many groups a token's experts may come from; 0: all
    shared_experts: int = 0  # number of experts that every token visits
    bias_speed: float = 0.001  # change of an expert's bias in a step, with --balance bias


TRIED = dict(z_loss=0.1, capacity_factor=0.6, expert_groups=2, groups_per_token=1, shared_experts=1, bias_speed=0.1)
COMPUTED = True
NEEDS = [
    ("expert_groups", "groups_per_token"),
    ("groups_per_token", "expert_groups"),
    ("bias_speed", "balance", "bias"),
]


def check(config: Any, world: int):
    """Raises UserError if groups differ in size, or --groups-per-token > 0 bars no group or leaves too few experts."""
    groups, most = config.expert_groups, config.groups_per_token
    if config.experts % groups:
        raise UserError(f"--expert-groups {groups} must divide --experts {config.experts}")
    if most >= groups > 1:
        raise UserError(f"--groups-per-token {most} bars none of the groups: choose it below --expert-groups {groups}")
    if 0 < most < groups and most * config.experts // groups < config.experts_per_token:
        raise UserError(f"--groups-per-token {most} has less than --experts-per-token {config.experts_per_token}")


def prepare(config: Any, parts: Parts):
    """Let step 7 build `RoutedMoE` instead of `MoE`, if a flag needs it."""
    asked = config.capacity_factor, config.groups_per_token, config.z_loss, config.shared_experts
    if config.balance == "loss" and any(asked):
        parts.instead(BALANCE, "loss", RoutedMoE, by=__name__)


def attach(config: Any, parts: Parts):
    """Give each layer the positions of this rank's tokens and, with --balance bias, a bias that each step updates."""
    layers = [module for module in parts.model.modules() if isinstance(module, RoutedMoE)]
    for moe in layers:
        moe.positions = own_tokens(parts.positions[None], parts.mesh["tp"])[0]
        if config.balance == "bias":
            moe.bias = torch.zeros(config.experts, device=parts.positions.device)
            moe.load = torch.zeros_like(moe.bias)  # how often each expert was chosen in this step
    if config.balance == "bias":
        parts.around(parts.optimizer, "step", partial(update, layers, parts.mesh, config.bias_speed), by=__name__)
