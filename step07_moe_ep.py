"""Step 7: mixture of experts and expert parallelism. Many MLPs, of which each token visits a few; each rank owns some.

THE LAYER. In place of an MLP stand E of them, the experts, and a router W [E, dim], which picks top_k for each token.
Parameters grow with E, FLOPs with top_k (Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformer").

    p = softmax(W x)    chosen: the top_k largest p    score_e = p_e / (sum of the chosen p), or p_e if top_k is 1
    out = sum of score_e MLP_e(x) over the chosen e. No token is dropped.

A router may send all tokens to one expert. So a layer adds the gradient of balance_weight * E * sum_e f_e P_e
(the loss that is shown is without it). f_e is the fraction of a micro-batch's choices that fell on e, P_e the mean of
its tokens' p_e. Where f is high, P is pushed down. It is the same in every layout: f counts the whole micro-batch.

EXPERT PARALLELISM. ep ranks hold E/ep experts each, and everything else as before. ep adds no ranks. It
groups the dp x cp ranks, ep to a group; they have different tokens already. (tp cuts an expert like any MLP.)

    rank 0, e0 e1:  t0 -> e0 e3      dispatch   a row of x for each choice, by expert:  e0:t0 e0:t1 | e2:t1 e3:t0
                    t1 -> e2 e0                 all_to_all: rank 1 gets what stands right of the bar
    rank 1, e2 e3:  t2 -> e2 e1      experts    rank 1 has e2:t1 e3:t0, e2:t2; by expert again: e2:t1 e2:t2 e3:t0
                                     combine    all_to_all, the reverse; times the scores, and summed by token

Bytes sent over ep in a layer and micro-batch, T tokens in a rank's MLP, all experts equally busy, b bytes an element:
2 (ep-1)/ep T top_k dim b forward and as many backward. Counts go first, (ep-1)/ep of 8 E bytes.

An expert's gradient has its ep group's tokens in it. It is summed over the ranks with the same experts, expert_data:

    dp x cp = 4, ep = 2:   ranks 0 [e0 e1]  1 [e2 e3]  2 [e0 e1]  3 [e2 e3]    ep {0 1} {2 3}    expert_data {0 2} {1 3}

Run it:    torchrun --nproc_per_node=8 step07_moe_ep.py --pp 2 --cp 2 --tp 2 --ep 2
You should see the losses of one process: python step07_moe_ep.py
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step06_pipeline as step06
from common import UserError
from common.comm import Group, Mesh, all_reduce, all_to_all
from common.data import Data
from common.layout import global_norm, note_layout
from common.model import IGNORE, PRESETS, Decoder, wide
from common.trainer import Run, among, choose_device, main
from step01_single_gpu import RECOMPUTE, learning_rate
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import cut, shard_tensors, sum_partial_gradients
from step05_cp_ring import CONTEXT, shard_context
from step06_pipeline import keep_stage, make_pipeline, plan, sum_tied


class ExpertLinear(nn.Module):
    """One linear layer for each expert: `weight` [experts, out, in]."""

    def __init__(self, experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [n, in], the first counts[0] of them for expert 0, and so on -> [n, out]."""
        return torch.cat([part @ w.T for part, w in zip(rows.split(counts), self.weight, strict=True)])


class Experts(nn.Module):
    """SwiGLU MLPs side by side."""

    def __init__(self, experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = ExpertLinear(experts, dim, ffn_dim)
        self.up_proj = ExpertLinear(experts, dim, ffn_dim)
        self.down_proj = ExpertLinear(experts, ffn_dim, dim)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """rows [n, dim] sorted by expert, int64 [experts] -> [n, dim]."""
        counts = num_tokens_per_expert.tolist()
        return self.down_proj(F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts), counts)


class AddLoss(torch.autograd.Function):
    """x, unchanged. In backward the scalar `loss` gets the gradient `weight`, as if it stood in the model's loss."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, weight: float) -> Tensor:
        """So any layer, wherever it runs, can add a loss."""
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradients of x and of the loss."""
        return grad, grad.new_full((), ctx.weight, dtype=wide(grad.dtype)), None


class MoE(nn.Module):
    """Router and experts, in the place of an MLP. Expert parallelism replaces `experts.forward`."""

    def __init__(self, dim: int, ffn_dim: int, config: "Config", sharers: Group):
        """`sharers`: the ranks that share a sequence (cp)."""
        super().__init__()
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.experts = Experts(config.experts, dim, ffn_dim)
        self.top_k, self.sharers = config.experts_per_token, sharers
        # micro / global: the mean over micro-batches. 1 / tp: all tp ranks add it, and their gradients are summed.
        self.weight = config.balance_weight * config.micro_batch_size / config.global_batch_size / config.tp

    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> [batch, seq, dim]."""
        tokens, precise = x.flatten(0, 1), wide(x.dtype)
        p = F.linear(tokens.to(precise), self.router.weight.to(precise)).softmax(-1)
        top_scores, selected_experts = p.topk(self.top_k)  # [tokens, top_k] each
        if self.top_k > 1:  # a single p / p would be 1, and the router would learn nothing
            top_scores = top_scores / top_scores.sum(-1, keepdim=True)
        num_tokens_per_expert = F.one_hot(selected_experts.flatten(), p.shape[-1]).sum(0)
        order = selected_experts.flatten().argsort(stable=True)  # choices [tokens * top_k], sorted by expert
        token = order // self.top_k  # the token of each choice
        rows = self.experts(tokens[token], num_tokens_per_expert)  # a row for each choice
        by_token = rows[order.argsort()].unflatten(0, selected_experts.shape)  # argsort of an order undoes it
        out = (by_token * top_scores[..., None]).sum(1).to(x.dtype)
        return AddLoss.apply(out.view_as(x), self.balance_loss(p, num_tokens_per_expert), self.weight)

    def balance_loss(self, p: Tensor, counts: Tensor) -> Tensor:
        """E sum_e f_e P_e of the micro-batch: this rank's part, for its tokens' p [tokens, experts].

        f has no gradient, so its counts are summed over the ranks that share the micro-batch's sequences. P has one,
        so each rank adds up its own tokens' P.
        """
        counts = counts.clone()
        all_reduce(counts, self.sharers).wait()
        n_tokens = counts.sum() / self.top_k
        return len(counts) * (counts / counts.sum() * p.sum(0)).sum() / n_tokens


class AllToAll(torch.autograd.Function):
    """Rows travel over a group; in backward, their gradients travel back."""

    @staticmethod
    def forward(ctx, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        """rows [n, dim], sorted by rank, sent[r] of them for rank r -> received[0] rows of rank 0, and so on."""
        ctx.way_back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        all_to_all(arrived, rows.contiguous(), group, sent, received).wait()
        return arrived

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of what arrived -> that of the rows."""
        return AllToAll.apply(grad, *ctx.way_back), None, None, None


def visit_experts(experts: Callable, group: Group, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """Replaces `Experts.forward`: rows [n, dim], sorted by expert, go to the ranks that hold these, and come home."""
    leaving = num_tokens_per_expert.view(group.size, -1)  # [rank, expert of that rank]: how many rows go there
    coming = torch.empty_like(leaving)
    all_to_all(coming, leaving, group).wait()
    outward, inward = torch.stack((leaving, coming)).cpu()  # here the CPU waits for the GPU: it must know all counts
    sent, received = outward.sum(1).tolist(), inward.sum(1).tolist()
    visitors = AllToAll.apply(rows, sent, received, group)  # dispatch; sorted by the rank they are from, then by expert
    mine = torch.arange(coming.shape[1], device=rows.device).repeat(group.size)
    expert = mine.repeat_interleave(coming.flatten(), output_size=len(visitors))  # which of mine each visitor wants
    order = expert.argsort(stable=True)
    out = experts(visitors[order], inward.sum(0))
    return AllToAll.apply(out[order.argsort()], received, sent, group)  # combine


DISPATCH: dict[str, Callable] = {"alltoall": visit_experts}
BALANCE: dict[str, Callable[..., MoE]] = {"loss": MoE}


@dataclass
class Config(step06.Config):
    """Mixture of experts and expert parallelism."""

    experts: int = 8  # MLPs in each layer
    experts_per_token: int = 2  # how many of them a token visits
    expert_dim: int = 0  # width of an expert; 0: the preset's ffn_dim
    moe_every: int = 1  # one layer in so many has experts, the others an MLP
    dense_layers: int = 0  # first layers, which have MLPs: --moe-every counts after them
    balance: str = among(BALANCE, "loss")  # what keeps the experts equally busy
    balance_weight: float = 0.01  # of the balance loss
    ep: int = 1  # ranks, of dp x cp, that share the experts
    ep_mode: str = among(DISPATCH, "alltoall")  # how tokens meet experts


def shard_experts(model: Decoder, mesh: Mesh, config: Config):
    """Put experts in the place of MLPs of a model on the meta device, and deal them to the ranks of `mesh["ep"]`.

    It comes after step 5, which would overwrite "expert_data", and before step 4, which cuts experts again, over tp.
    Raises UserError.
    """
    ranks, ep = mesh.join("data", "dp", "cp"), config.ep  # int [groups, dp x cp]
    if config.experts % ep or ranks.shape[1] % ep:
        raise UserError(f"--ep {ep} must divide --experts {config.experts}, and the {ranks.shape[1]} ranks of dp x cp")
    if config.experts_per_token > config.experts:
        raise UserError(f"--experts-per-token {config.experts_per_token} is more than --experts {config.experts}")
    if config.global_batch_size // mesh["dp"].size % config.micro_batch_size:
        raise UserError("--micro-batch-size must divide the sequences of a rank: the balance loss is a mean over them")
    mesh.enter("ep", ranks.reshape(-1, ep))  # each row is a group: neighbours (figure above)
    mesh.enter("expert_data", ranks.reshape(len(ranks), -1, ep).swapaxes(1, 2).reshape(-1, ranks.shape[1] // ep))
    width = config.expert_dim or model.config.ffn_dim
    first = config.dense_layers + config.moe_every - 1  # with --moe-every 2: layers 1, 3, ...
    for layer in [*model.model.layers.values()][first :: config.moe_every]:
        with torch.device("meta"):
            layer.mlp = moe = BALANCE[config.balance](model.config.dim, width, config, mesh["cp"])
        # tp ranks route the same tokens, but find a part of each expert's output, and so of the router's gradient.
        note_layout(moe.router.weight, data_group="data", partial_over=("tp",))
        for linear in moe.experts.children():
            linear.weight = cut(linear.weight, 0, mesh["ep"])
            note_layout(linear.weight, data_group="expert_data")  # and split over ep: the norm counts it once
        if ep > 1:
            moe.experts.forward = partial(DISPATCH[config.ep_mode], moe.experts.forward, mesh["ep"])


def train(config: Config, run: Run):
    """The whole run: five dimensions, put on the plain model one after another."""
    device, dtype = choose_device(config)
    taken = config.pp * config.cp * config.tp  # dp is what is left
    mesh = Mesh(pp=config.pp, dp=join_ranks(device) // taken, cp=config.cp, tp=config.tp)  # tp sends most: neighbours
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = PRESETS[config.model]
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    places, lists = plan(config, m=math.ceil((mine.stop - mine.start) / config.micro_batch_size))
    with torch.device("meta"):
        model = Decoder(shape)
    here = shard_context(model, mesh, CONTEXT[config.cp_mode], config.sp).to(device)  # step 5: these tokens are mine
    shard_experts(model, mesh, config)  # these experts are mine; now, as step 4 cuts them too
    shard_tensors(model, mesh, config.sp)  # step 4: these rows and columns are mine, f and g stand round each MoE
    keep_stage(model, mesh["pp"], places)  # step 6: these layers are mine
    RECOMPUTE[config.recompute](model)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this slice is mine (--zero)
    pipeline = make_pipeline(config, model, mesh, here, places, lists)

    parts = dict(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh, positions=here, pipeline=pipeline)
    for step in run.steps(**parts):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine][:, here].split(config.micro_batch_size) for x in (tokens, targets))
        sync.begin(len(xs))
        loss = pipeline.step(xs, ys, n_targets)  # forward and backward of all micro-batches
        sync.finish()  # sums over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms (SP) and routers
        sum_tied(model, optimizer.gradients(), mesh["pp"], places)  # and where two stages hold the same matrix
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()

        gradients = optimizer.gradients()
        norm = global_norm(model, gradients, mesh, sliced=config.zero > 0)
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        for gradient in gradients.values():
            gradient.mul_(clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
