"""More ways to choose a token's experts: --balance capacity, groups, shared and deepseek.

    capacity    An expert computes at most C rows of a micro-batch: the first that choose it, in the
                order of sequences, positions and scores. Later choices are dropped: no row is sent,
                and their output is 0 (Fedus et al. 2021, "Switch Transformer")
    groups      The experts form groups, such as those of a node. A token's experts come from its M
                best groups, so it is sent to few nodes (DeepSeek-V3, section 2.1.2: node-limited
                routing). A group's score is the sum of its K/M largest p
    shared      Every token also visits the shared experts, which are computed as one MLP (Dai et
                al. 2024, "DeepSeekMoE")
    deepseek    DeepSeek-V3: groups, shared, and --balance bias, with sigmoid in place of softmax

The first three keep step 7's auxiliary loss, which counts dropped choices, too. To find the first
choices, the ranks that share a micro-batch (cp x tp) gather all choices. So what is dropped depends
on --micro-batch-size, but not on the layout.

AN EXAMPLE of groups: 4 experts in 2 groups, K = 2, M = 1, and a token with

    p = [0.40 0.05 | 0.30 0.25]      The groups' scores are 0.45 and 0.55, so it visits experts 2
                                     and 3, and not the best two of all, 0 and 2.

LAWS
    capacity    C = ceil(c K T / E) for --capacity-factor c and the T tokens of a micro-batch. For
                tiny, 4 sequences, 8 experts, K = 2 and c = 1.25: 1.25 x 2 x 1024 / 8 = 320 rows
    groups      If each rank of ep holds one group, a token's rows go to at most M ranks
    shared      Each rank of tp has all their weights, and applies them to its own tokens. Over tp
                it sends their gradients, 2 (tp-1)/tp of their bytes in a step, and nothing else

Run it:    torchrun --nproc_per_node=2 -m extras step07_moe_ep.py --ep 2 --balance deepseek
You should see the losses of one process: python -m extras step07_moe_ep.py --balance deepseek
"""

from dataclasses import dataclass, replace
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

import step07_moe_ep as step07
from common import UserError
from common.comm import Mesh
from common.flags import flag
from common.layout import note_record
from common.model import MLP, wide
from common.shapes import model_shape
from step04_tp_sp import gather_tokens
from step05_cp_ring import CONTEXT
from step07_moe_ep import BALANCE, BiasBalancedMoE, LossBalancedMoE, MoE


def balance(*names: str) -> dict[str, list[str]]:
    """A flag that needs one of these balances, also with hidden messages (expert_overlap.py)."""
    return {"balance": [*names, *[f"{name}+overlap" for name in names]]}


WITH_LOSS = balance("loss", "capacity", "groups", "shared")
WITH_BIAS = balance("bias", "deepseek")
WITH_CAPACITY = balance("capacity")
WITH_GROUPS = balance("groups", "deepseek")
WITH_SHARED = balance("shared", "deepseek")


@dataclass
class Flags(step07.Config):
    """Routing."""

    aux_loss_coeff: float = flag(0.01, "coefficient of the auxiliary loss", needs=WITH_LOSS)
    bias_rate: float = flag(0.001, "change of a bias in a step", needs=WITH_BIAS)
    capacity_factor: float = flag(1.25, "an expert's limit, in mean loads", needs=WITH_CAPACITY)
    expert_groups: int = flag(4, "groups of experts", least=1, needs=WITH_GROUPS)
    groups_per_token: int = flag(
        2, "groups that a token's experts come from", least=1, needs=WITH_GROUPS
    )
    shared_experts: int = flag(1, "experts that every token visits", least=1, needs=WITH_SHARED)


class CapacityMoE(LossBalancedMoE):
    """--balance capacity: choices over an expert's capacity are dropped."""

    def __init__(self, dim: int, ffn_dim: int, config: Flags, mesh: Mesh):
        super().__init__(dim, ffn_dim, config, mesh)
        self.factor = config.capacity_factor
        seq_len = model_shape(config.model).seq_len
        n = mesh["cp"].size
        with torch.device("cpu"):  # the model is built on the meta device
            self.positions = torch.arange(seq_len)  # of all tokens, rank by rank
            if n > 1:
                mode = CONTEXT[config.cp_mode]
                self.positions = torch.cat([mode.positions(seq_len, r, n) for r in range(n)])

    def within_capacity(self, ids_TK: Tensor, n_experts: int) -> Tensor:
        """Which of this rank's choices are not dropped: int64 [T, K] -> bool [T, K]."""
        n = self.micro_batch_group.size  # cp x tp
        positions = self.positions.to(ids_TK.device)
        ids = ids_TK.unflatten(0, (-1, len(positions) // n))  # [batch, seq/n, K]
        if n > 1:
            ids = gather_tokens(ids, self.micro_batch_group)  # [batch, seq, K]
        in_order = ids[:, positions.argsort()].flatten()
        capacity = ceil(self.factor * len(in_order) / n_experts)
        # The first choice of an expert has number 1, the second 2, and so on.
        numbers = F.one_hot(in_order, n_experts).cumsum(0).gather(1, in_order[:, None])
        kept = (numbers <= capacity).view(ids.shape)[:, positions]  # rank by rank again
        return kept.chunk(n, 1)[self.micro_batch_group.rank].flatten(0, 1)

    def outputs_of_choices(self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Tensor:
        """As `MoE.outputs_of_choices`; the outputs of dropped choices are 0."""
        n_experts = len(counts_E)
        kept_TK = self.within_capacity(ids_TK, n_experts)
        ids_N = ids_TK.where(kept_TK, n_experts).flatten()  # dropped ones are sorted to the end
        order_R = ids_N.argsort(stable=True)[: kept_TK.sum()]
        counts_E = F.one_hot(ids_N, n_experts + 1).sum(0)[:-1]
        out_RD = self.run_experts(x_TD[order_R // self.top_k], counts_E)
        out_ND = out_RD.new_zeros(len(ids_N), out_RD.shape[1])
        return out_ND.index_copy(0, order_R, out_RD).unflatten(0, ids_TK.shape)


class GroupedMoE(MoE):
    """A token's experts come from its best groups. To be combined with a class that balances."""

    def __init__(self, dim: int, ffn_dim: int, config: Flags, mesh: Mesh):
        super().__init__(dim, ffn_dim, config, mesh)
        self.n_groups = config.expert_groups
        self.groups_per_token = config.groups_per_token
        size, rest = divmod(config.experts, self.n_groups)
        enough = size * self.groups_per_token >= self.top_k
        if rest or not enough or self.groups_per_token >= self.n_groups:
            raise UserError(
                f"--expert-groups {self.n_groups} must divide --experts {config.experts}, and "
                f"--groups-per-token {self.groups_per_token} must be fewer groups, with at least "
                f"--experts-per-token {self.top_k} experts"
            )

    def choose(self, p_TE: Tensor) -> Tensor:
        """The best experts of the best groups, int64 [T, K]."""
        p = p_TE.unflatten(1, (self.n_groups, -1))  # [T, groups, experts of a group]
        counted = min(max(1, self.top_k // self.groups_per_token), p.shape[-1])
        scores = p.topk(counted).values.sum(-1)
        best = scores.topk(self.groups_per_token).indices
        excluded = torch.ones_like(scores, dtype=torch.bool).scatter(1, best, False)
        return super().choose(p.masked_fill(excluded[..., None], -torch.inf).flatten(1))


class SharedMoE(MoE):
    """Every token also visits the shared experts. To be combined with a class that balances."""

    def __init__(self, dim: int, ffn_dim: int, config: Flags, mesh: Mesh):
        super().__init__(dim, ffn_dim, config, mesh)
        width = config.shared_experts * ffn_dim
        self.shared_experts = MLP(replace(model_shape(config.model), ffn_dim=width))
        for param in self.shared_experts.parameters():  # ranks of tp route different tokens
            note_record(param, data_group="data", partial_over="tp")

    def forward(self, x: Tensor) -> Tensor:
        """As `MoE.forward`."""
        return super().forward(x) + self.shared_experts(x)


class GroupedLossBalancedMoE(GroupedMoE, LossBalancedMoE):
    """--balance groups."""


class SharedLossBalancedMoE(SharedMoE, LossBalancedMoE):
    """--balance shared."""


class DeepSeekMoE(SharedMoE, BiasBalancedMoE, GroupedMoE):
    """--balance deepseek. The bias is added first: it also decides which groups are best."""

    def probabilities(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> p [T, E], in wide(x.dtype). They do not add up to 1."""
        precise = wide(x_TD.dtype)
        return F.linear(x_TD.to(precise), self.router.weight.to(precise)).sigmoid()


BALANCES = {
    "capacity": CapacityMoE,
    "groups": GroupedLossBalancedMoE,
    "shared": SharedLossBalancedMoE,
    "deepseek": DeepSeekMoE,
}
BALANCE.update(BALANCES)
