"""Step 7: mixture of experts and expert parallelism. Each token visits a few of many MLPs; each rank holds some MLPs.

THE LAYER. E MLPs, the *experts*, replace the MLP, and a router W [E, dim] chooses K of them for each token.
Parameters grow with E, FLOPs with K (Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformer").

    p = softmax(W x)    chosen: the K largest p    score_e = p_e / (sum of the chosen p), or p_e if K is 1
    out = sum of score_e MLP_e(x) over the chosen e. No token is dropped.

A router may send all tokens to one expert. So each layer adds the gradient of a load-balancing auxiliary loss,
aux_loss_coeff * E * sum_e f_e P_e, averaged over the step's micro-batches (the loss you see excludes it). f_e: the
fraction of a micro-batch's choices that are e; P_e: the mean p_e of its tokens. Where f is high, P is pushed down. All
layouts with the same --micro-batch-size train alike, unless rounding decides between two almost equal p.

EXPERT PARALLELISM ("MoE parallel folding", Liu et al. 2025). tp shards no expert. A rank routes the tokens that it has
between blocks, without f and g (--no-sp: a shard, gathered afterwards). So dp x cp x tp ranks route different tokens.

    group        rank 0's, if dp 4 cp 2 tp 2 ep 8       its ranks have                       they
    dp           0 4 8 12                               different sequences                  divide the batch
    data         0 2 4 6 8 10 12 14      (dp x cp)      the same weights but for experts     sum their gradients
    sequence     0 1 2 3                 (cp x tp)      tokens of the same micro-batch       sum counts, for f_e
    ep           0 1 2 3 4 5 6 7         (neighbours)   all experts, each on one rank        exchange rows: all-to-all
    expert_data  0 8                                    the same experts                     sum their gradients

    ep 2 K 2 E 4   rank 0 has experts e0 e1            rank 1 has experts e2 e3
    routed         t0 -> e3 e0    t1 -> e0 e2          t2 -> e2 e1    t3 -> e0 e3           by `route`
    sorted         e0:t0 e0:t1 | e2:t1 e3:t0           e0:t3 e1:t2 | e2:t2 e3:t3            to rank 0 | to rank 1
    received       e0:t0 e0:t1 | e0:t3 e1:t2           e2:t1 e3:t0 | e2:t2 e3:t3            from rank 0 | from rank 1
    outputs        e0(t0) e0(t1) e0(t3) e1(t2)         e2(t1) e2(t2) e3(t0) e3(t3)          sorted by expert, computed
    home           e0(t0) e0(t1) | e2(t1) e3(t0)       e0(t3) e1(t2) | e2(t2) e3(t3)        from rank 0 | from rank 1

A rank has T = batch x seq / (cp tp) tokens of a micro-batch. If experts are equally busy, it sends over ep in a layer's
forward (twice if recomputed) 2 (ep-1)/ep T K dim elements and (ep-1)/ep 8 E bytes of counts; in backward the elements.

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
from step01_single_gpu import RECOMPUTE, learning_rate, scale
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import Conjugate, gather_tokens, shard_param, shard_tensors, sum_partial_gradients
from step05_cp_ring import CONTEXT, shard_context
from step06_pipeline import keep_stage, make_pipeline, plan, sum_tied

# Shapes in names: x_TD is [T, D].
# T  tokens of this rank     N = T K: choices, a row for each        E  experts           G  ranks of ep
# D  dim     K  top_k        R  rows that this rank's experts get    e = E / G: experts of a rank
# leaving_Ge[r, i]: how many of our rows go to rank r's i-th expert. arriving_Ge[r, i]: rows from r for our i-th expert.


class ExpertLinear(nn.Module):
    """One linear layer for each expert: `weight` [experts, out, in]."""

    def __init__(self, experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_out, n_in))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """rows [n, in], the first counts[0] of them for expert 0, and so on -> [n, out]."""
        return torch.cat([x @ w.T for x, w in zip(rows.split(counts), self.weight, strict=True)])


class Experts(nn.Module):
    """Several SwiGLU MLPs, each of which gets its own rows of the input."""

    def __init__(self, experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = ExpertLinear(experts, dim, ffn_dim)
        self.up_proj = ExpertLinear(experts, dim, ffn_dim)
        self.down_proj = ExpertLinear(experts, ffn_dim, dim)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """rows [n, dim], sorted by expert, and the number of rows of each expert, int64 [experts] -> [n, dim]."""
        counts = num_tokens_per_expert.tolist()
        return self.down_proj(F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts), counts)


class AddLoss(torch.autograd.Function):
    """Return x. Backward is as if coeff * `loss` were added to the step's loss: `loss` gets the gradient coeff."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, coeff: float) -> Tensor:
        """Return x. `loss` is never sent, so a layer on any pipeline stage can add its own loss."""
        ctx.coeff = coeff
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradients of x and of the loss."""
        return grad, grad.new_full((), ctx.coeff, dtype=wide(grad.dtype)), None


class MoE(nn.Module):
    """Router and experts, which replace an MLP. `mesh["sequence"]`: the ranks that share a micro-batch (cp x tp)."""

    def __init__(self, dim: int, ffn_dim: int, config: "Config", mesh: Mesh):
        super().__init__()
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.experts = Experts(config.experts, dim, ffn_dim)
        self.top_k, self.group = config.experts_per_token, mesh["sequence"]
        # Gradients of micro-batches are summed. Divide by their number, so that a step has the mean of their losses.
        self.coeff = config.aux_loss_coeff * config.micro_batch_size / config.global_batch_size

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose each token's experts: x [T, D] -> p [T, E] and scores [T, K], both wide(x.dtype); ids int64 [T, K]."""
        precise = wide(x_TD.dtype)
        p_TE = F.linear(x_TD.to(precise), self.router.weight.to(precise)).softmax(-1)
        scores_TK, ids_TK = p_TE.topk(self.top_k)
        if self.top_k > 1:  # with K = 1, p / p would be 1, and the router would learn nothing
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        return p_TE, scores_TK, ids_TK

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, dim], this rank's tokens -> the weighted sum of their experts' outputs, of the same shape."""
        x_TD = x.flatten(0, 1)
        p_TE, scores_TK, ids_TK = self.route(x_TD)
        # Not bincount: it reads the largest id to size its result, so the CPU would wait for the GPU one more time.
        num_tokens_per_expert_E = F.one_hot(ids_TK.flatten(), p_TE.shape[-1]).sum(0)
        order_N = ids_TK.flatten().argsort(stable=True)  # choices, sorted by expert
        token_N = order_N // self.top_k  # the token of each choice
        out_ND = self.experts(x_TD[token_N], num_tokens_per_expert_E)  # the figure, from "sorted" to "home"
        out_TKD = out_ND[order_N.argsort()].unflatten(0, scores_TK.shape)  # by the inverse permutation
        out_TD = (out_TKD * scores_TK[..., None]).sum(1).to(x.dtype)
        return AddLoss.apply(out_TD.view_as(x), self.aux_loss(p_TE, num_tokens_per_expert_E), self.coeff)

    def aux_loss(self, p_TE: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """This rank's term of E sum_e f_e P_e (see the top of this file): P_e has only the terms of our tokens."""
        counts_E = num_tokens_per_expert_E.clone()  # counts have no gradient
        all_reduce(counts_E, self.group).wait()
        n_tokens = counts_E.sum() / self.top_k  # of the micro-batch
        f_E, P_E = counts_E.to(p_TE.dtype) / counts_E.sum(), p_TE.sum(0) / n_tokens
        return len(f_E) * (f_E * P_E).sum()


def transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
    """Blocks of sizes[i, j] rows, sorted by i and then by j -> the same blocks, sorted by j and then by i."""
    blocks, n = rows.split(sizes.flatten().tolist()), sizes.shape[1]
    return torch.cat([block for j in range(n) for block in blocks[j::n]])


def dispatch(sorted_ND: Tensor, group: Group, leaving_Ge: Tensor, arriving_Ge: Tensor) -> Tensor:
    """Send rows [N, D], sorted by expert, to their experts' ranks -> the rows received, [R, D], sorted by expert."""
    in_rows, out_rows = leaving_Ge.sum(1).tolist(), arriving_Ge.sum(1).tolist()
    received_RD = sorted_ND.new_empty(sum(out_rows), sorted_ND.shape[1])
    all_to_all(received_RD, sorted_ND.contiguous(), group, in_rows, out_rows).wait()
    return transpose_blocks(received_RD, arriving_Ge)  # the received rows are sorted by rank, then by expert


def combine(out_RD: Tensor, group: Group, leaving_Ge: Tensor, arriving_Ge: Tensor) -> Tensor:
    """The reverse of `dispatch`: outputs [R, D] go back to their tokens' ranks -> the outputs of our rows, [N, D]."""
    in_rows, out_rows = arriving_Ge.sum(1).tolist(), leaving_Ge.sum(1).tolist()
    home_ND = out_RD.new_empty(sum(out_rows), out_RD.shape[1])
    all_to_all(home_ND, transpose_blocks(out_RD, arriving_Ge.T), group, in_rows, out_rows).wait()
    return home_ND


def visit_experts(experts: Callable, group: Group, sorted_ND: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
    """`Experts.forward` with experts on several ranks. `dispatch` and `combine` are each other's backward."""
    leaving_Ge = num_tokens_per_expert_E.view(group.size, -1)
    arriving_Ge = torch.empty_like(leaving_Ge)
    all_to_all(arriving_Ge, leaving_Ge, group).wait()
    leaving_Ge, arriving_Ge = torch.stack((leaving_Ge, arriving_Ge)).cpu()  # split sizes: the CPU waits for them
    sizes = dict(leaving_Ge=leaving_Ge, arriving_Ge=arriving_Ge)
    there, home = partial(dispatch, **sizes), partial(combine, **sizes)
    rows_RD = Conjugate.apply(sorted_ND, group, there, home)
    out_RD = experts(rows_RD, arriving_Ge.sum(0))
    return Conjugate.apply(out_RD, group, home, there)


DISPATCH: dict[str, Callable] = {"alltoall": visit_experts}
BALANCE: dict[str, Callable[..., MoE]] = {"loss": MoE}


@dataclass
class Config(step06.Config):
    """Mixture of experts and expert parallelism."""

    experts: int = 8  # MLPs in each layer that has experts
    experts_per_token: int = 2  # how many of them a token visits
    expert_dim: int = 0  # width of an expert; 0: the preset's ffn_dim
    moe_every: int = 1  # every moe_every-th layer has experts; the others have an MLP
    dense_layers: int = 0  # layers at the start that have an MLP; --moe-every counts from there
    balance: str = among(BALANCE, "loss")  # what keeps the experts equally busy
    aux_loss_coeff: float = 0.01  # coefficient of the load-balancing auxiliary loss
    ep: int = 1  # ranks, of dp x cp x tp, that share the experts
    ep_mode: str = among(DISPATCH, "alltoall")  # how tokens reach their experts


def own_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's shard of tokens that all ranks of the group have: [batch, seq, dim] -> [batch, seq/n, dim]."""
    return x.chunk(group.size, 1)[group.rank]


def shard_experts(model: Decoder, mesh: Mesh, config: Config):
    """Put this rank's experts, without f and g, in the place of MLPs; create three groups. Raises UserError."""
    ep, tp, ranks, n_tokens = config.ep, mesh["tp"], mesh.world // config.pp, model.config.seq_len // mesh["cp"].size
    if config.experts % ep or ranks % ep:
        raise UserError(f"--ep {ep} must divide --experts {config.experts}, and the {ranks} ranks of dp x cp x tp")
    if config.experts_per_token > config.experts:
        raise UserError(f"--experts-per-token {config.experts_per_token} is more than --experts {config.experts}")
    if config.global_batch_size // mesh["dp"].size % config.micro_batch_size:
        raise UserError("--micro-batch-size must divide the sequences of a rank: the auxiliary loss is their mean")
    if n_tokens % tp.size:
        raise UserError(f"--no-sp: --tp {tp.size} must divide the {n_tokens} tokens of a sequence, to route them")
    for grid in mesh.ranks.reshape(config.pp, -1, ep):  # of a stage; in the table: [[0 ... 7] [8 ... 15]]
        mesh.enter("ep", grid)  # a row holds all experts, on neighbours: along tp first, then cp, then dp
        mesh.enter("expert_data", grid.T)  # a column has the same experts
    mesh.join("sequence", "cp", "tp")
    width = config.expert_dim or model.config.ffn_dim
    first = config.dense_layers + config.moe_every - 1  # with --moe-every 2: layers 1, 3, ...
    for layer in [*model.model.layers.values()][first :: config.moe_every]:
        with torch.device("meta"):
            layer.mlp = moe = BALANCE[config.balance](model.config.dim, width, config, mesh)
        note_layout(moe.router.weight, data_dim="data", partial_over=("tp",))  # tp ranks route different tokens
        for linear in moe.experts.children():
            linear.weight = shard_param(linear.weight, 0, mesh["ep"])
            note_layout(linear.weight, data_dim="expert_data")  # global_norm sees in `shards` that ep ranks differ
        if ep > 1:
            moe.experts.forward = partial(DISPATCH[config.ep_mode], moe.experts.forward, mesh["ep"])
        if tp.size > 1 and not config.sp:  # tp ranks have the same tokens: each routes a shard; outputs are gathered
            moe.register_forward_pre_hook(lambda _, x: Conjugate.apply(x[0], tp, own_tokens, gather_tokens))
            moe.register_forward_hook(lambda _module, _x, out: Conjugate.apply(out, tp, gather_tokens, own_tokens))


def train(config: Config, run: Run):
    """The whole run: five kinds of parallelism, applied to the plain model one after another."""
    device, dtype = choose_device(config)
    taken = config.pp * config.cp * config.tp  # dp is what is left
    mesh = Mesh(pp=config.pp, dp=join_ranks(device) // taken, cp=config.cp, tp=config.tp)  # tp: neighbours
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = PRESETS[config.model]
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    places, lists = plan(config, m=math.ceil((mine.stop - mine.start) / config.micro_batch_size))
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)  # step 4: these rows and columns are mine
    here = shard_context(model, mesh, CONTEXT[config.cp_mode], config.sp).to(device)  # step 5: these tokens are mine
    shard_experts(model, mesh, config)  # these experts are mine
    keep_stage(model, mesh["pp"], places)  # step 6: these layers are mine
    RECOMPUTE[config.recompute](model)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this shard is mine (--zero)
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

        norm = global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0)
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        scale(optimizer.gradients(), clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
