"""Mixture of experts in plain PyTorch, on one device: the layer of step 7, which knows nothing of ranks.

A ROUTER, one small matrix, turns a token into a probability for each of E experts; the token goes to the k likeliest
and gets the sum of their outputs, weighted by gates (Shazeer et al. 2017; Fedus et al. 2021, "Switch"):

    p = softmax(W x) in fp32      gate_e = p_e / (sum of the k chosen p)      out = sum over chosen e of gate_e MLP_e(x)

(k = 1: the gate is p_e itself; divided by itself it would be 1, and the router would learn nothing.) So parameters
grow with E, FLOPs with k. The gates are kept as a matrix [tokens, E] that is zero where a token does not go.

BALANCE. Nothing above keeps a router from sending all tokens to one expert. With f_e the fraction of choices that fell
on e, and p_e averaged over the micro-batch:

    loss   adds weight x E x sum_e f_e p_e to the loss, least if all are equal; only p has a gradient
    bias   chooses by p + b, weighs by p; after each step b_e moves by a fixed amount up or down against e's load
           (Wang et al. 2024, "auxiliary-loss-free"; DeepSeek-V3): no gradient, but a state to save
    none   to see what happens

The z-loss is weight x mean (log sum exp)^2 of the router's logits (Zoph et al. 2022, "ST-MoE"). With a capacity factor
C an expert takes at most C k T / E of a micro-batch's T tokens, those that come first in it; the residual stream
carries the others past. 0, or without gradients: no limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model import MLP, PRESETS, Decoder, ModelConfig


@dataclass(frozen=True)
class MoEConfig(ModelConfig):
    """The shape of a decoder with experts. Raises ValueError, naming the flags to change, if parts do not fit."""

    experts: int = 0  # 0: every layer is dense
    experts_per_token: int = 2
    expert_dim: int = 0  # width of an expert; 0: that of a dense MLP
    shared_experts: int = 0  # experts that every token visits, as one MLP
    moe_every: int = 1
    dense_layers: int = 0  # layers before the first with experts
    expert_groups: int = 1
    groups_per_token: int = 0  # 0: any number

    def __post_init__(self):
        super().__post_init__()
        for name in ("experts", "expert_dim", "shared_experts", "dense_layers", "groups_per_token"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 0")
        for name in ("experts_per_token", "moe_every", "expert_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: it must be at least 1")
        if self.experts == 0:
            return
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"--experts-per-token {self.experts_per_token} is more than --experts {self.experts}: change one"
            )
        if self.experts % self.expert_groups or self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"--expert-groups {self.expert_groups} must divide --experts {self.experts}, and be at least "
                f"--groups-per-token {self.groups_per_token}"
            )
        reachable = self.experts // self.expert_groups * self.groups_per_token or self.experts
        if self.experts_per_token > reachable:
            raise ValueError(
                f"--groups-per-token {self.groups_per_token} leaves a token {reachable} experts, fewer than "
                f"--experts-per-token {self.experts_per_token}: raise the one or lower the other"
            )

    @property
    def expert_width(self) -> int:
        """Hidden channels of one expert."""
        return self.expert_dim or self.ffn_dim

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this number has experts instead of one MLP."""
        n = layer - self.dense_layers + 1
        return self.experts > 0 and n > 0 and n % self.moe_every == 0

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layers))


# With plain attention instead of its latent one: 672e9 parameters, of which a token uses 38e9.
DEEPSEEK = dict(experts=256, experts_per_token=8, expert_dim=2048, shared_experts=1, dense_layers=3)
DEEPSEEK |= dict(expert_groups=8, groups_per_token=4)
MOE_PRESETS = {name: MoEConfig(**vars(m)) for name, m in PRESETS.items()} | {
    "tiny-moe": MoEConfig(128, 4, 8, 4, 352, vocab_size=257, seq_len=256, experts=8, expert_dim=176),
    "mixtral-8x7b": MoEConfig(4096, 32, 32, 8, 14336, vocab_size=32000, seq_len=32768, rope_theta=1e6, experts=8),
    "deepseek-v3-like": MoEConfig(7168, 61, 128, 128, 18432, vocab_size=129280, seq_len=4096, **DEEPSEEK),
}

# --- one matmul for all experts: rows sorted by expert, each with its own matrix


def can_group(*tensors: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes these: up to 32 bits, rows of a multiple of 16 bytes, at least one."""
    return all(t.dtype.itemsize <= 4 and t.shape[-1] * t.dtype.itemsize % 16 == 0 and t.numel() for t in tensors)


def looped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [n, in], the first counts[0] of them times weights[0] [in, out], and so on -> [n, out]."""
    return torch.cat([part @ w for part, w in zip(rows.split(counts.tolist()), weights, strict=True)])


def looped_outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """a [n, out], b [n, in] -> [experts, out, in], a^T b over the rows of each expert, zero if it has none."""
    sizes = counts.tolist()
    return torch.stack([x.T @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`looped_matmul` in one kernel where there is one; counts int64 [experts]."""
    if not can_group(rows, weights, weights.mT):
        return looped_matmul(rows, weights, counts)
    return torch._grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


def grouped_outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """`looped_outer` in one kernel where there is one."""
    if not can_group(a, b):
        return looped_outer(a, b, counts)
    outer = torch._grouped_mm(a.T, b, offs=counts.cumsum(0, dtype=torch.int32))
    return outer.masked_fill_((counts == 0)[:, None, None], 0)  # which a kernel may have left as it found it


class GroupedLinear(torch.autograd.Function):
    """x W_e^T for the expert e of each row."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, later: Callable | None) -> Tensor:
        """x [n, in] sorted by expert, weight [experts, out, in], counts int64 [experts] -> [n, out]."""
        ctx.save_for_backward(x, weight, counts)
        ctx.later = later
        return grouped_matmul(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dx [n, in], and dW, which is there, and zero, also for experts without a token: all ranks sum it."""
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_matmul(grad, weight, counts) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1] and ctx.later is not None:
            ctx.later(lambda: [grouped_outer(grad, x, counts)])
        elif ctx.needs_input_grad[1]:
            grad_weight = grouped_outer(grad, x, counts)
        return grad_x, grad_weight, None, None


class AddRows(torch.autograd.Function):
    """Add rows up where they belong, in fp32 or wider. (PyTorch's `index_add` would keep them for its backward.)"""

    @staticmethod
    def forward(ctx, rows: Tensor, place: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """rows [any number, dim], place int64 of each -> sums [n, dim] in `dtype`, zero where no row belongs."""
        ctx.save_for_backward(place)
        ctx.dtype, wide = rows.dtype, torch.promote_types(rows.dtype, torch.float32)
        return rows.new_zeros(n, rows.shape[1], dtype=wide).index_add_(0, place, rows.to(wide)).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Each row has the gradient of its sum."""
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).to(ctx.dtype), None, None, None


# --- the layer


class ExpertLinear(nn.Module):
    """The same linear layer of all experts: `weight` [experts, out, in]. `later`: a queue for weight gradients."""

    def __init__(self, experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))
        self.later: Callable | None = None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [n, in] sorted by expert, counts int64 [experts] -> [n, out]."""
        later = partial(self.later, [self.weight]) if self.later is not None else None
        return GroupedLinear.apply(x, self.weight, counts, later)


class Experts(nn.Module):
    """SwiGLU MLPs side by side."""

    def __init__(self, m: MoEConfig):
        super().__init__()
        self.gate_proj = ExpertLinear(m.experts, m.dim, m.expert_width)
        self.up_proj = ExpertLinear(m.experts, m.dim, m.expert_width)
        self.down_proj = ExpertLinear(m.experts, m.expert_width, m.dim)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """x [tokens, dim], gates [tokens, experts], zero where a token does not go -> weighted sums [tokens, dim]."""
        goes = gates != 0
        expert, token = goes.T.nonzero(as_tuple=True)  # sorted by expert
        counts, own = goes.sum(0), x.index_select(0, token)
        hidden = F.silu(self.gate_proj(own, counts)) * self.up_proj(own, counts)
        weighted = self.down_proj(hidden, counts) * gates[token, expert][:, None]  # in the gates' wider dtype
        return AddRows.apply(weighted, token, len(x), x.dtype)


def select(scores: Tensor, m: MoEConfig) -> Tensor:
    """scores [tokens, experts] -> the k best experts of each token, int64 [tokens, k], from M of G groups.

    A group is as good as its best k/M experts together (DeepSeek-V3, section 2.1.2).
    """
    if 0 < m.groups_per_token < m.expert_groups:
        by_group = scores.unflatten(1, (m.expert_groups, -1))
        each = max(1, m.experts_per_token // m.groups_per_token)
        best = by_group.topk(each).values.sum(-1).topk(m.groups_per_token).indices
        barred = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        scores = by_group.masked_fill(barred[..., None], -torch.inf).flatten(1)
    return scores.topk(m.experts_per_token).indices


def within_capacity(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Choices int64 [batch, seq, k] -> bool, the same shape: whether they are among the first `capacity` of an expert.

    Counted in the order of the sequences and of their tokens, which is the same under every layout.
    """
    asked = F.one_hot(chosen.flatten().long(), experts).cumsum(0)
    return (asked.gather(1, chosen.flatten().long()[:, None]) <= capacity).view(chosen.shape)


class AddLoss(torch.autograd.Function):
    """Give a scalar loss its gradient `scale` wherever x has one: so any layer, on any pipeline stage, can add a loss.

    Counts in backward, which runs once, where forward may run twice (recomputation) or for nothing (validation).
    """

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, scale: float, total: Tensor, counts: Tensor) -> Tensor:
        """x of any shape, unchanged; backward adds `counts` to `total`, in place."""
        ctx.scale, ctx.total, ctx.counts = scale, total, counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of x, unchanged, and that of the loss."""
        ctx.total.add_(ctx.counts)
        return grad, torch.tensor(ctx.scale, dtype=torch.float64, device=grad.device), None, None, None


class Balance:
    """What the layers with experts of one run share: how they are kept busy, and what was counted in this step.

    `kind`: loss, bias or none, with the weight of the loss and the step of the bias. `micro_batches` of the global
    batch. `scale`, to be set in each step: the loss scale over the number of micro-batches. `counted` fp64 [layers,
    experts + 3]: choices that fell on each expert, choices dropped, entropy of the routers in nats summed over tokens,
    balance loss (averaged over micro-batches); since the last `take`.
    """

    def __init__(
        self,
        m: MoEConfig,
        micro_batches: int,
        device: torch.device,
        kind: str = "none",
        weight: float = 0.0,
        bias_speed: float = 0.0,
        z_loss: float = 0.0,
        capacity_factor: float = 0.0,
    ):
        self.m, self.micro_batches, self.scale = m, micro_batches, 1.0
        self.kind, self.weight, self.bias_speed = kind, weight, bias_speed
        self.z_loss, self.capacity_factor = z_loss, capacity_factor
        self.counted = torch.zeros(m.n_layers, m.experts + 3, dtype=torch.float64, device=device)

    @property
    def looks_around(self) -> bool:
        """Whether a layer has to know the choices of the whole micro-batch's tokens."""
        return torch.is_grad_enabled() and (self.kind == "loss" or self.capacity_factor > 0)

    def take(self) -> Tensor:
        """`counted`; then start anew."""
        taken = self.counted.clone()
        self.counted.zero_()
        return taken

    def metrics(self, counted: Tensor) -> dict:
        """For metrics.jsonl: load of each expert by layer (1/E is even), the share of choices dropped, and so on."""
        layers = [n for n in range(self.m.n_layers) if self.m.has_experts(n)]
        if not layers:
            return {}
        choices = counted[layers, :-3].sum(-1)
        load = (counted[layers, :-3] / choices[:, None]).tolist()
        drops, entropy, loss = counted[layers, -3:].unbind(-1)
        return dict(
            expert_load={str(n): row for n, row in zip(layers, load, strict=True)},
            drop_rate=(drops / choices).mean().item(),
            router_entropy=(entropy / choices).mean().item() * self.m.experts_per_token,
            balance_loss=loss.sum().item(),
        )

    def adjust(self, model: Decoder, counted: Tensor):
        """After a step, if the kind is bias: each expert's bias goes up if it had less than its share, else down."""
        for number, layer in model.model.layers.items():
            if self.kind == "bias" and isinstance(layer.mlp, MoE):
                load = counted[int(number), :-3]
                layer.mlp.router.bias += self.bias_speed * (load.mean() - load).sign()


class Router(nn.Module):
    """`weight` [experts, dim]; `bias` [experts], fp32, which `Balance.adjust` moves."""

    def __init__(self, m: MoEConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(m.experts, m.dim))
        self.register_buffer("bias", torch.empty(m.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, dim] -> logits [tokens, experts], fp32 (fp64 for fp64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


class MoE(nn.Module):
    """Router, experts, shared experts: replaces the MLP of layer `number`.

    Expert parallelism replaces `run`, which brings tokens to experts, and `everyones`: (own choices [batch, s/n, k]) ->
    those of the whole sequences in their order [batch, seq, k]; `own` says which of the sequence's tokens are here.
    """

    def __init__(self, m: MoEConfig, number: int, balance: Balance):
        super().__init__()
        self.m, self.number, self.balance = m, number, balance
        self.router, self.experts = Router(m), Experts(m)
        width = m.shared_experts * m.expert_width
        self.shared_experts = MLP(replace(m, ffn_dim=width)) if width else None
        self.run: Callable[[Experts, Tensor, Tensor], Tensor] = lambda experts, x, gates: experts(x, gates)
        self.everyones: Callable[[Tensor], Tensor] = lambda chosen: chosen
        self.own: slice | Tensor = slice(None)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]; s/n tokens where the sequence is cut."""
        m, balance, tokens = self.m, self.balance, x.flatten(0, -2)
        logits = self.router(tokens)
        p = logits.softmax(-1)
        chosen = select(p.detach() + self.router.bias, m)
        gates = p.gather(1, chosen)
        if m.experts_per_token > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        kept, loss = torch.ones_like(chosen, dtype=torch.bool), p.new_zeros(())
        whole = x.shape[0] * m.seq_len  # tokens of the micro-batch
        if balance.looks_around:
            everyones = self.everyones(chosen.view(*x.shape[:-1], -1))
            if balance.capacity_factor:
                capacity = ceil(balance.capacity_factor * everyones.numel() / m.experts)
                kept = within_capacity(everyones, m.experts, capacity)[:, self.own].reshape(chosen.shape)
                gates = gates * kept
            if balance.kind == "loss":
                fraction = everyones.flatten().bincount(minlength=m.experts) / everyones.numel()
                loss = m.experts * (fraction.to(p.dtype) * p.sum(0)).sum() / whole
        total = balance.weight * loss
        if balance.z_loss:
            total = total + balance.z_loss * logits.logsumexp(-1).square().sum() / whole
        out = self.run(self.experts, tokens, torch.zeros_like(p).scatter(1, chosen, gates)).view_as(x)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        counts = self.counts(p.detach(), chosen, kept, loss.detach())
        return AddLoss.apply(out, total, balance.scale, balance.counted[self.number], counts)

    def counts(self, p: Tensor, chosen: Tensor, kept: Tensor, loss: Tensor) -> Tensor:
        """p [tokens, experts], chosen and kept [tokens, k], the balance loss -> a row of `Balance.counted`."""
        load = chosen.flatten().bincount(minlength=self.m.experts)
        rest = torch.stack(((~kept).sum(), torch.special.entr(p).sum(), loss / self.balance.micro_batches))
        return torch.cat((load, rest))


def add_experts(model: Decoder, balance: Balance):
    """Give the model, on the meta device, experts in the layers that its config says, in place."""
    for number, layer in model.model.layers.items():
        if model.config.has_experts(int(number)):
            layer.mlp = MoE(model.config, int(number), balance)
