"""A layer with a mixture of experts (MoE), in plain PyTorch on one device. Step 7 deals the experts to ranks.

The layer has E MLPs, the experts. Each token visits only top_k of them (`experts_per_token`), so parameters grow with
E, and FLOPs with top_k (Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformer").

    router     p = softmax(router logits), router logits = W x       [tokens, E], fp32
    top-k      chosen = the top_k experts with the largest p         [tokens, top_k]
    gates      gate_e = p_e / (sum of the chosen p), p_e if top_k = 1    [tokens, E], zero where a token does not go
    dispatch   a row of x for each choice, sorted by expert          [choices, dim]
    combine    out = sum over the chosen e of gate_e MLP_e(x)        [tokens, dim]

The router may send all tokens to one expert. Two ways keep the experts balanced. Here f_e is the fraction of a
micro-batch's choices that fell on expert e, and P_e is the mean of p_e over its tokens.

    loss   adds weight x E x sum_e f_e P_e (load-balancing loss): lowers P_e most where f_e is high. f has no gradient.
    bias   chooses by p + b, but weighs by p. After each step b_e moves by a fixed amount, against the load of e. b has
           no gradient, but checkpoints must keep it (Wang et al. 2024, "auxiliary-loss-free"; DeepSeek-V3).

The z-loss, weight x mean (log sum exp)^2 of the router logits, keeps them small (Zoph et al. 2022, "ST-MoE"). With a
capacity factor c, an expert takes in training the first c top_k T / E of a micro-batch's T tokens: c times the mean.
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
    """The shape of a decoder with experts."""

    experts: int = 0  # 0: every layer is dense
    experts_per_token: int = 2
    expert_dim: int = 0  # width of an expert; 0: that of a dense MLP
    shared_experts: int = 0  # experts that every token visits, as one MLP
    moe_every: int = 1  # every so many layers have experts
    dense_layers: int = 0  # layers before the first with experts
    expert_groups: int = 1
    groups_per_token: int = 0  # most groups that a token's experts may come from; 0: all

    @property
    def expert_width(self) -> int:
        """Hidden channels of one expert."""
        return self.expert_dim or self.ffn_dim

    def has_experts(self, layer: int) -> bool:
        """Whether the layer of this number has experts instead of one MLP."""
        return self.experts > 0 and layer >= self.dense_layers and (layer - self.dense_layers + 1) % self.moe_every == 0


DEEPSEEK = dict(experts=256, experts_per_token=8, expert_dim=2048, shared_experts=1, dense_layers=3)
DEEPSEEK |= dict(expert_groups=8, groups_per_token=4)  # plain, not latent attention: 672e9 weights, 38e9 a token
MOE_PRESETS = {name: MoEConfig(**vars(m)) for name, m in PRESETS.items()} | {
    "tiny-moe": MoEConfig(128, 4, 8, 4, 352, vocab_size=257, seq_len=256, experts=8, expert_dim=176),
    "mixtral-8x7b": MoEConfig(4096, 32, 32, 8, 14336, vocab_size=32000, seq_len=32768, rope_theta=1e6, experts=8),
    "deepseek-v3-like": MoEConfig(7168, 61, 128, 128, 18432, vocab_size=129280, seq_len=4096, **DEEPSEEK),
}


def can_group(*tensors: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes these: up to 32 bits, rows of a multiple of 16 bytes, at least one."""
    return all(t.dtype.itemsize <= 4 and t.shape[-1] * t.dtype.itemsize % 16 == 0 and t.numel() for t in tensors)


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """rows [n, in], the first counts[0] of them times weights[0] [in, out], and so on -> [n, out]; counts int64."""
    if can_group(rows, weights, weights.mT):
        return torch._grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    return torch.cat([part @ w for part, w in zip(rows.split(counts.tolist()), weights, strict=True)])


def grouped_outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """a [n, out], b [n, in] -> [experts, out, in], a^T b over the rows of each expert, zero if it has none."""
    if can_group(a, b):
        outer = torch._grouped_mm(a.T, b, offs=counts.cumsum(0, dtype=torch.int32))
        return outer.masked_fill_((counts == 0)[:, None, None], 0)  # which the kernel may have left unwritten
    return torch.stack([x.T @ y for x, y in zip(*(t.split(counts.tolist()) for t in (a, b)), strict=True)])


class GroupedLinear(torch.autograd.Function):
    """x [n, in] sorted by expert e, weight [experts, out, in], counts int64 [experts] -> x W_e^T [n, out]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """One matmul for all experts."""
        ctx.save_for_backward(x, weight, counts)
        return grouped_matmul(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dx [n, in], and dW, which is zero, not None, for experts without a token: all ranks sum it."""
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_matmul(grad, weight, counts) if ctx.needs_input_grad[0] else None
        return grad_x, grouped_outer(grad, x, counts) if ctx.needs_input_grad[1] else None, None


def add_rows(rows: Tensor, place: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Sums [n, dim] in `dtype` of rows [any number, dim], each added at its `place` (int64), in fp32 or wider.

    The order of these additions is fixed. Else ranks that compute the same could differ in a last bit, so choose other
    experts, and wait for rows that never come. On a GPU only `index_put_` sorts by place, on a CPU `scatter_add_` does.
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    sums, rows = rows.new_zeros(n, rows.shape[1], dtype=wide), rows.to(wide)
    if rows.is_cuda:
        return sums.index_put_((place,), rows, accumulate=True).to(dtype)
    return sums.scatter_add_(0, place[:, None].expand_as(rows), rows).to(dtype)


class TakeRows(torch.autograd.Function):
    """x [n, dim] -> rows x[place], place int64 [any number]; backward is `add_rows`."""

    @staticmethod
    def forward(ctx, x: Tensor, place: Tensor) -> Tensor:
        """A row may be taken several times, or never."""
        ctx.save_for_backward(place)
        ctx.n = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dx [n, dim]."""
        return add_rows(grad, ctx.saved_tensors[0], ctx.n, grad.dtype), None


class ExpertLinear(nn.Module):
    """The same linear layer of all experts: x [n, in] sorted by expert, `weight` [experts, out, in] -> [n, out]."""

    def __init__(self, experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """counts int64 [experts]: how many rows each expert has."""
        return GroupedLinear.apply(x, self.weight, counts)


class Experts(nn.Module):
    """SwiGLU MLPs side by side. They get the tokens dispatched to them, and their outputs are combined."""

    def __init__(self, m: MoEConfig):
        super().__init__()
        self.gate_proj = ExpertLinear(m.experts, m.dim, m.expert_width)
        self.up_proj = ExpertLinear(m.experts, m.dim, m.expert_width)
        self.down_proj = ExpertLinear(m.experts, m.expert_width, m.dim)

    def forward(self, x: Tensor, gates: Tensor, n_choices: int | None = None) -> Tensor:
        """x [tokens, dim], gates [tokens, experts], `n_choices` of them not 0 -> weighted sums [tokens, dim]."""
        visits = (gates != 0).T  # so choices come sorted by expert. For `nonzero` the host waits for a GPU
        expert, token = (visits.nonzero() if n_choices is None else visits.nonzero_static(size=n_choices)).unbind(1)
        counts, rows = visits.sum(1), TakeRows.apply(x, token)  # dispatch
        hidden = F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)
        weighted = self.down_proj(hidden, counts) * gates[token, expert][:, None]  # in the gates' wider dtype
        return add_rows(weighted, token, len(x), x.dtype)  # combine


def select(scores: Tensor, m: MoEConfig) -> Tensor:
    """scores [tokens, experts] -> the best experts of each token, [tokens, top_k], from `groups_per_token` groups."""
    if 0 < m.groups_per_token < m.expert_groups:
        by_group = scores.unflatten(1, (m.expert_groups, -1))
        each = max(1, m.experts_per_token // m.groups_per_token)  # a group is worth its best few (DeepSeek-V3, 2.1.2)
        best = by_group.topk(each).values.sum(-1).topk(m.groups_per_token).indices
        barred = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, False)
        scores = by_group.masked_fill(barred[..., None], -torch.inf).flatten(1)
    return scores.topk(m.experts_per_token).indices


def count(chosen: Tensor, experts: int) -> Tensor:
    """int64 [experts]: how often each occurs in `chosen`. For `bincount` the host would wait for a GPU."""
    chosen = chosen.flatten().long()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def within_capacity(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Choices int64 [batch, seq, top_k] -> bool: whether each is among its expert's first `capacity`, in this order."""
    asked = F.one_hot(chosen.flatten().long(), experts).cumsum(0)
    return (asked.gather(1, chosen.flatten().long()[:, None]) <= capacity).view(chosen.shape)


class AddLoss(torch.autograd.Function):
    """Give a scalar loss its gradient `scale` wherever x has one: any layer, on any pipeline stage, can add a loss."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, scale: float, counted: Tensor, row: Tensor) -> Tensor:
        """x of any shape, unchanged; backward adds `row` to `counted`, in place."""
        ctx.scale, ctx.counted, ctx.row = scale, counted, row
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Gradients of x and the loss. Counts here: forward may run twice (recomputation) or in vain (validation)."""
        ctx.counted.add_(ctx.row)
        return grad, grad.new_full((), ctx.scale, dtype=torch.float64), None, None, None  # bf16 would round it


@dataclass(eq=False)
class Balance:
    """What the layers with experts of one run share: how experts are kept busy, and what was counted in this step."""

    m: MoEConfig
    micro_batches: int  # of the global batch
    device: torch.device
    kind: str = "none"  # loss, bias or none
    weight: float = 0.0  # of the auxiliary load-balancing loss
    bias_speed: float = 0.0  # how far a bias moves after a step
    z_loss: float = 0.0  # weight of the z-loss
    capacity_factor: float = 0.0  # 0: no limit
    scale: float = 1.0  # to be set in each step: the loss scale over the number of micro-batches

    def __post_init__(self):
        # Sums since `take`, by layer: each expert's choices; choices dropped, entropies (nats), balance loss.
        self.counted = torch.zeros(self.m.n_layers, self.m.experts + 3, dtype=torch.float64, device=self.device)

    def take(self) -> Tensor:
        """`counted`; then start anew."""
        taken, self.counted = self.counted, torch.zeros_like(self.counted)
        return taken

    def adjust(self, model: Decoder, counted: Tensor):
        """After a step, if the kind is bias: each expert's bias goes up if it had less than its share, else down."""
        for layer in model.modules():
            if self.kind == "bias" and isinstance(layer, MoE):
                load = counted[layer.number, :-3]
                layer.router.bias += self.bias_speed * (load.mean() - load).sign()


class Router(nn.Module):
    """`weight` [experts, dim]; `bias` [experts], fp32, which `Balance.adjust` moves."""

    def __init__(self, m: MoEConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(m.experts, m.dim))
        self.register_buffer("bias", torch.empty(m.experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, dim] -> router logits [tokens, experts], fp32 (fp64 for fp64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(wide), self.weight.to(wide))


class MoE(nn.Module):
    """Router, experts, shared experts: replaces the MLP of layer `number`.

    Expert parallelism replaces `run_experts`, which returns a function for the result: tokens may travel meanwhile.
    Ranks that share sequences set `local_tokens`, their positions, and `gather_choices` -> all [batch, seq, top_k].
    """

    def __init__(self, m: MoEConfig, number: int, balance: Balance):
        super().__init__()
        self.m, self.number, self.balance = m, number, balance
        self.router, self.experts = Router(m), Experts(m)
        self.shared_experts = MLP(replace(m, ffn_dim=m.shared_experts * m.expert_width)) if m.shared_experts else None
        self.run_experts: Callable[[Experts, Tensor, Tensor], Callable[[], Tensor]] = partial  # `finish` calls experts
        self.gather_choices: Callable[[Tensor], Tensor] = lambda chosen: chosen
        self.local_tokens: slice | Tensor = slice(None)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim], or seq/n tokens where ranks share sequences."""
        m, balance, tokens = self.m, self.balance, x.flatten(0, -2)
        logits = self.router(tokens)
        p = logits.softmax(-1)
        chosen = select(p.detach() + self.router.bias, m)
        gates = p.gather(1, chosen)
        if m.experts_per_token > 1:  # a single p / p would be 1, and the router would learn nothing
            gates = gates / gates.sum(-1, keepdim=True)
        kept, balance_loss = torch.ones_like(chosen, dtype=torch.bool), p.new_zeros(())
        n_tokens = x.shape[0] * m.seq_len  # of the whole micro-batch: each rank adds its tokens' part of a mean
        if torch.is_grad_enabled() and (balance.kind == "loss" or balance.capacity_factor):
            all_chosen = self.gather_choices(chosen.view(*x.shape[:-1], -1))
            if balance.capacity_factor:
                capacity = ceil(balance.capacity_factor * all_chosen.numel() / m.experts)
                kept = within_capacity(all_chosen, m.experts, capacity)[:, self.local_tokens].reshape(chosen.shape)
                gates = gates * kept
            if balance.kind == "loss":
                fraction = count(all_chosen, m.experts).to(p.dtype) / all_chosen.numel()
                balance_loss = m.experts * (fraction * p.sum(0)).sum() / n_tokens
        z_loss = balance.z_loss * logits.logsumexp(-1).square().sum() / n_tokens if balance.z_loss else 0.0
        finish = self.run_experts(self.experts, tokens, torch.zeros_like(p).scatter(1, chosen, gates))
        shared = self.shared_experts(x) if self.shared_experts is not None else 0.0  # while tokens travel
        out = finish().view_as(x) + shared
        numbers = (~kept).sum(), torch.special.entr(p.detach()).sum(), balance_loss.detach() / balance.micro_batches
        row = torch.cat((count(chosen, m.experts), torch.stack(numbers)))
        loss = balance.weight * balance_loss + z_loss
        return AddLoss.apply(out, loss, balance.scale, balance.counted[self.number], row)


def add_experts(model: Decoder, balance: Balance):
    """Give the model, on the meta device, experts in the layers that its config says, in place."""
    for number, layer in model.model.layers.items():
        if model.config.has_experts(int(number)):
            layer.mlp = MoE(model.config, int(number), balance)
