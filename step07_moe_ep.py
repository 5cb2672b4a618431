"""Step 7: mixture of experts. A layer has many MLPs; each rank holds some of them.

THE BLOCK. An MoE block replaces a layer's MLP by E MLPs, the *experts*, and a router W [E, dim]
that chooses K of them for each token. Parameters grow with E, but the experts' FLOPs only with K
(Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformer").

    p = softmax(W x)    chosen: the K largest p
    score_e = p_e / (sum of the chosen p), or p_e if K is 1
    out = sum of score_e MLP_e(x) over the chosen e

An expert computes all tokens that chose it. (Switch Transformer drops those above a limit.)

WHAT IS EXCHANGED. With expert parallelism, ep ranks form a group that has all experts. A rank of it
holds E/ep experts of each of its layers, and gets the group's tokens that chose them. In the figure
two ranks share a micro-batch of four tokens (by cp or tp), and K is 2. Each choice of a token is a
row: e0:t1 is token t1's x for expert e0, e0(t1) is the output of e0, and s0 is this token's score
for e0. In "routed", the expert with the larger p comes first.

                                    rank 0 has experts e0 e1         rank 1 has experts e2 e3
    routed                          t0 -> e3 e0    t1 -> e0 e2       t2 -> e2 e1    t3 -> e1 e2
    sorted: for rank 0 | 1          e0:t0 e0:t1 | e2:t1 e3:t0        e1:t2 e1:t3 | e2:t2 e2:t3
    received: from rank 0 | 1       e0:t0 e0:t1 | e1:t2 e1:t3        e2:t1 e3:t0 | e2:t2 e2:t3
    by expert: 1st | 2nd expert     e0:t0 e0:t1 | e1:t2 e1:t3        e2:t1 e2:t2 e2:t3 | e3:t0
    outputs: 1st | 2nd expert       e0(t0) e0(t1) | e1(t2) e1(t3)    e2(t1) e2(t2) e2(t3) | e3(t0)
    returned: from rank 0 | 1       e0(t0) e0(t1) | e2(t1) e3(t0)    e1(t2) e1(t3) | e2(t2) e2(t3)
    out                             t0: s3 e3(t0) + s0 e0(t0)        t2: s2 e2(t2) + s1 e1(t2)
                                    t1: s0 e0(t1) + s2 e2(t1)        t3: s1 e1(t3) + s2 e2(t3)

These functions make the lines of the figure:

    routed                  MoE.choose
    sorted                  MoE.outputs_of_choices
    received, by expert     dispatch: an all-to-all sends each row to its expert's rank, which sorts
                            what it receives by expert
    outputs                 Experts
    returned                combine: it sorts the outputs by rank, then sends them back, so that
                            they have the order of "sorted"
    out                     MoE.forward

In backward gradients go the same ways: those of outputs to the experts' ranks, those of rows back.
How many rows a rank gets depends on the tokens, so ranks first tell one another how many will come.

WHY do tokens travel, and not weights? A rank then needs no memory for another rank's experts, not
even for one layer, and often sends less. Let T be the tokens that a rank routes. If choices are
spread evenly, in one forward of a layer it sends

    rows       (ep-1)/ep x 2 T K dim          there and back
    weights    (ep-1)/ep x 3 dim ffn_dim E    if an all-gather brought all experts' matrices

So in forward rows are cheaper if T < 3 ffn_dim E / (2 K). For tiny with 8 experts and K = 2 this is
T < 2,112. An example: ep 2, cp 2, tp 2. A micro-batch has 4 x 256 tokens, and cp and tp (by
sequence parallelism) divide them by 4, so T = 256. Rows are 65,536 numbers; of weights the rank
would send the half that it holds, 540,672. (With backward the bound is 9 ffn_dim E / (4 K), 3,168:
weights would be gathered again, and their gradients reduce-scattered.)

BALANCE. A router may send all tokens to the same experts: the others learn nothing, and their ranks
wait. So each layer has Switch Transformer's load-balancing auxiliary loss (--balance loss), here
for K choices of a token. Let f_e be the fraction of a micro-batch's choices that fell on expert e,
and P_e the mean of p_e over all its tokens. Let M be the number of micro-batches in a training
step, of all ranks of dp: global_batch_size / micro_batch_size. Training follows the gradient of

    loss + (aux_loss_coeff / M) x the sum, over micro-batches and layers, of  E x sum_e f_e P_e

The loss that you see excludes the second term.

In the figure f = 2/8 2/8 3/8 1/8. Suppose that P = 0.25 0.25 0.4 0.1. Then E sum f P is 4 x (0.0625
+ 0.0625 + 0.15 + 0.0125) = 1.15. In balance, if all f and all P are 1/E, it is 1. `aux_loss` says
which logits the loss pushes down.

With --balance loss two layouts train alike only if their --micro-batch-size is the same, because
f_e and P_e are those of a micro-batch. The second part of this file balances without a loss.

GROUPS. cp, tp and pp are those of steps 4 to 6; ep adds no ranks. The dp x cp x tp ranks that hold
the same layers, the ranks of a *stage*, all have different tokens: ranks of dp have other
sequences; ranks of cp and, by sequence parallelism, of tp other tokens of the same sequence. So any
of them can share the experts ("MoE parallel folding", Liu et al. 2025). Here the first ep ranks of
a stage share them, then the next ep, and so on: neighbours have the fastest links. ep must divide
dp x cp x tp, and E. tp does not cut an expert, so step 4's operators f and g around an MLP are
gone. On 16 ranks, with pp 1, dp 4, cp 2, tp 2, ep 8:

    group        made of         rank 0's            its ranks                    used for
    dp           dp              0 4 8 12            divide the global batch      `own` in `train`
    data         dp x cp         0 2 4 6 8 10 12 14  hold the same weights,       sums of gradients
                                                     except experts               and of the loss
    cp           cp              0 2                 divide each sequence         step 5's ring
    tp           tp              0 1                 divide attention, embedding  step 4's f and g;
                                                     and head                     sums of norms' and
                                                                                  routers' gradients
    micro_batch  cp x tp         0 1 2 3             divide each micro-batch      counts for f_e
    ep           8 consecutive   0 1 2 3 4 5 6 7     divide the experts           exchanges of rows
    expert_data  every 8th rank  0 8                 hold the same experts        sums of gradients
                 of a stage

THE LAW. Unless ZeRO 3 shards them, a rank holds 3 dim ffn_dim E/ep weights of experts in each of
its layers: tiny, ep 2, 540,672. (--expert-dim replaces ffn_dim.)

A rank's T = micro_batch_size x seq / (cp tp) tokens of a micro-batch are T K rows, which go to the
experts and back, in forward and in backward. If choices are spread evenly, the rank sends these
bytes in each layer and micro-batch, but over expert_data in each layer and training step. The last
column has the factor with --recompute full, which repeats the two ways of forward: 6/4.

    over         what                              bytes                          tiny   recompute
    ep           rows                              (n-1)/n x 4 T K dim w       524,288   x 6/4
    ep           how many rows for each expert     (n-1)/n x 8 E                    32   x 2
    micro_batch  choices for f_e (--balance loss)  2 (n-1)/n x 8 E                  96   x 2
    tp           attention's operators f and g     (n-1)/n x 4 S               524,288   x 6/4
    expert_data  experts' gradients (--zero 0)     2 (n-1)/n x their bytes   2,162,688   the same

    n       the size of the group in the first column
    w       bytes of an element
    S       bytes of [micro_batch_size, seq / cp, dim]
    tiny    in fp32, as launched below. For example, the first row is 1/2 x 4 x 256 (T) x 2 (K) x
            128 (dim) x 4, the last one 2 x 1/2 x 4 (experts) x 135,168 (weights) x 4

Recomputation repeats dispatch, because the gradients of the experts' matrices need their inputs;
combine, because the gradient of a score needs the expert's output; and attention's g, because
router and experts come after it.

For all other messages the laws of steps 2 to 6 hold, without the MLPs' terms, but with the
gradients of routers: they are summed over data, and then over tp, as those of norms. With --zero 1,
2 or 3 experts follow step 3's law, with the n of expert_data. --balance bias has a law of its own,
in its class.

With 2 layers on a rank and 8 micro-batches, `sent` in metrics.jsonl (rank 0's bytes by group) has
16 x 96 = 1,536 over `micro_batch` and 2 x 2,162,688 = 4,325,376 over expert_data. Over ep it is
only near 16 x 524,320 = 8,389,120, because choices are not spread evenly.

Run it:    torchrun --nproc_per_node=8 step07_moe_ep.py --pp 2 --cp 2 --tp 2 --ep 2 --steps 20
You should see the losses of one process (on GPUs, with --dtype fp32 for both):
    python step07_moe_ep.py --out runs/one --steps 20
    python -m common.compare runs/one runs/step07_moe_ep
After some steps they may differ by some 0.001: by rounding, a token may get another expert. With
--dtype fp64 for both, the difference is below 1e-10.

PyTorch's own way: parallelize_module(experts, device_mesh["ep"], ExpertParallel()), with
torchtitan's ExpertParallel. PyTorch itself has the pieces: F.grouped_mm, and
all_to_all_single_autograd in torch.distributed._functional_collectives.

Try this: in `combine`, send `outputs_RD` as it is, without `transpose_blocks`. Rank 1 of the figure
then returns e2(t1) e2(t2) to rank 0, which expects e2(t1) e3(t0).
tests/test_step07.py::test_dispatch_and_combine fails.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import step06_pipeline as step06
from common import UserError
from common.comm import Group, Mesh, all_reduce, all_to_all
from common.data import Data
from common.device import choose_device
from common.flags import flag
from common.launch import main
from common.layout import global_norm, note_record
from common.model import IGNORE, Decoder, wide
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import clip, learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import make_weights_and_optimizer
from step04_tp_sp import shard_param, shard_tensors, sum_partial_gradients
from step05_cp_ring import own_tokens, shard_context
from step06_pipeline import SCHEDULES

# Shapes in names: x_TD is [T, D].
#     T   this rank's tokens of a micro-batch    E   experts
#     K   experts of a token (top_k)             G   ranks of the group ep
#     N   T x K choices, a row for each          L   E / G, the experts that a rank holds
#     D   dim                                    R   rows that this rank's experts get
# On a rank of the figure: T 2, K 2, N 4, E 4, G 2, L 2, R 4.


def count_choices(ids_TK: Tensor, n_experts: int) -> Tensor:
    """How many choices each expert got, int64 [E]. With bincount the CPU would wait for the GPU."""
    ids_N = ids_TK.flatten()
    counts_E = ids_N.new_zeros(n_experts)
    return counts_E.scatter_add_(0, ids_N, torch.ones_like(ids_N))


class MoE(nn.Module):
    """The block: router and experts, in place of an MLP. Nothing evens out the experts' load
    (--balance none).
    """

    def __init__(self, dim: int, expert_dim: int, config: "Config", mesh: Mesh):
        super().__init__()
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.experts = Experts(config.experts, dim, expert_dim)  # `shard_moe` keeps this rank's
        self.top_k = config.experts_per_token
        self.ep_group = mesh["ep"]

    def probabilities(self, x_TD: Tensor) -> Tensor:
        """x [T, D] -> p [T, E], in wide(x.dtype): in bf16 many p would be equal."""
        precise = wide(x_TD.dtype)
        return F.linear(x_TD.to(precise), self.router.weight.to(precise)).softmax(-1)

    def choose(self, p_TE: Tensor) -> Tensor:
        """The ids of each token's experts, int64 [T, K]."""
        return p_TE.topk(self.top_k).indices

    def score(self, p_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """The weights of the chosen experts' outputs, [T, K]."""
        scores_TK = p_TE.gather(1, ids_TK)
        if self.top_k > 1:  # with K = 1, p / p is 1: the model's loss would not reach the router
            scores_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
        return scores_TK

    def outputs_of_choices(self, x_TD: Tensor, ids_TK: Tensor, counts_E: Tensor) -> Tensor:
        """Sort the rows of all tokens by expert, run the experts, and undo the sorting: x [T, D] ->
        outputs [T, K, D].
        """
        # In the flat list, choice i belongs to token i // K. On rank 0 of the figure ids are
        # [[3, 0], [0, 2]], flat 3 0 0 2, so order is 1 2 3 0, and token 0 1 1 0
        order_N = ids_TK.flatten().argsort(stable=True)  # choices, sorted by expert
        token_N = order_N // self.top_k  # the token of each choice
        sorted_ND = x_TD.index_select(0, token_N)
        returned_ND = self.run_experts(sorted_ND, counts_E)
        place_N = order_N.argsort()  # the place of each choice among the sorted ones: 3 0 1 2
        return returned_ND.index_select(0, place_N).unflatten(0, ids_TK.shape)

    def run_experts(self, sorted_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Rows [N, D], sorted by expert -> their experts' outputs [N, D], wherever the experts
        are.
        """
        if self.ep_group.size == 1:  # this rank holds all
            return self.experts(sorted_ND, counts_E)
        leaving_GL, arriving_GL, counts_L = exchange_counts(counts_E, self.ep_group)
        by_expert_RD = dispatch(sorted_ND, self.ep_group, leaving_GL, arriving_GL)
        outputs_RD = self.experts(by_expert_RD, counts_L)
        return combine(outputs_RD, self.ep_group, leaving_GL, arriving_GL)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, dim], this rank's tokens -> the weighted sum of their experts' outputs,
        like x.
        """
        x_TD = x.flatten(0, 1)
        p_TE = self.probabilities(x_TD)
        ids_TK = self.choose(p_TE.detach())  # choosing has no gradient
        scores_TK = self.score(p_TE, ids_TK)
        counts_E = count_choices(ids_TK, p_TE.shape[-1])
        out_TKD = self.outputs_of_choices(x_TD, ids_TK, counts_E)
        weighted_TKD = out_TKD * scores_TK[..., None]
        out_TD = weighted_TKD.sum(1).to(x.dtype)
        return self.balance(out_TD.view_as(x), p_TE, counts_E)

    def balance(self, out: Tensor, p_TE: Tensor, counts_E: Tensor) -> Tensor:
        """Return the block's output `out` [batch, seq, dim]. LossBalancedMoE attaches its loss
        here, whose gradient backward adds; BiasBalancedMoE counts the choices.

        p_TE: all probabilities. counts_E: how many of this rank's choices each expert got.
        """
        return out

    def end_step(self):
        """Called after each update of the weights."""


def exchange_counts(counts_E: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange the numbers of rows, so that each rank can allocate memory for the rows that will
    come. Returns three tensors, int64; on rank 0 of the figure they are

        leaving_GL     how many of our rows go to rank r's expert i       [[2, 0], [1, 1]]
        arriving_GL    how many rows come from rank r for our expert i    [[2, 0], [0, 2]]
        counts_L       how many rows our expert i gets                    [2, 2]

    r and i count from 0: line r of a table is rank r's. So e0 gets 2 of rank 0's rows, e1 none, e2
    and e3 one each. The tables are on the CPU, to split rows, and counts_L is on the device.
    """
    leaving_GL = counts_E.view(group.size, -1)  # rank r holds experts r L to (r+1) L - 1
    arriving_GL = torch.empty_like(leaving_GL)
    all_to_all(arriving_GL, leaving_GL, group).wait()
    counts_L = arriving_GL.sum(0)
    # Python needs the numbers to split rows: here the CPU waits for the GPU, once for both tables
    on_cpu = torch.stack((leaving_GL, arriving_GL)).cpu()
    return on_cpu[0], on_cpu[1], counts_L


def send_rows(rows: Tensor, group: Group, sent_GL: Tensor, received_GL: Tensor) -> Tensor:
    """An all-to-all of rows [n, D], sorted by destination rank -> the rows received, sorted by
    source rank. Line r of the table `sent_GL` says how many go to rank r, by expert; line r of
    `received_GL`, how many come from it.
    """
    sent_G = sent_GL.sum(1).tolist()
    received_G = received_GL.sum(1).tolist()
    received = rows.new_empty(sum(received_G), rows.shape[1])
    all_to_all(received, rows.contiguous(), group, sent_G, received_G).wait()
    return received


class SendRows(torch.autograd.Function):
    """`send_rows` for autograd."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: Group, sent_GL: Tensor, received_GL: Tensor) -> Tensor:
        """The rows received."""
        ctx.route = (group, sent_GL, received_GL)
        return send_rows(rows, group, sent_GL, received_GL)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradients of the rows received -> those of the rows sent."""
        group, sent_GL, received_GL = ctx.route
        return send_rows(grad, group, received_GL, sent_GL), None, None, None


def transpose_blocks(rows: Tensor, sizes: Tensor) -> Tensor:
    """Blocks of sizes[i, j] rows, sorted by i and then by j -> the same blocks, sorted by j and
    then by i.

    On rank 1 of the figure sizes are [[1, 1], [2, 0]]: the blocks e2:t1 | e3:t0 | e2:t2 e2:t3 |
    (none) become e2:t1 | e2:t2 e2:t3 | e3:t0 | (none).
    """
    blocks = rows.split(sizes.flatten().tolist())
    n_i, n_j = sizes.shape
    transposed = []
    for j in range(n_j):
        for i in range(n_i):
            transposed.append(blocks[i * n_j + j])
    return torch.cat(transposed)


def dispatch(sorted_ND: Tensor, group: Group, leaving_GL: Tensor, arriving_GL: Tensor) -> Tensor:
    """Send rows [N, D], sorted by expert, to their experts' ranks -> the rows received, [R, D],
    sorted by expert.
    """
    received_RD = SendRows.apply(sorted_ND, group, leaving_GL, arriving_GL)
    # By rank, then by expert -> by expert, then by rank
    return transpose_blocks(received_RD, arriving_GL)


def combine(outputs_RD: Tensor, group: Group, leaving_GL: Tensor, arriving_GL: Tensor) -> Tensor:
    """The reverse of `dispatch`: outputs [R, D] go back to their tokens' ranks -> the outputs of
    our rows, [N, D], in the order of `sorted_ND`.
    """
    # By expert, then by rank -> by rank, then by expert. So the table is transposed, too (.T)
    by_rank_RD = transpose_blocks(outputs_RD, arriving_GL.T)
    # What arrived goes back: the two tables are swapped
    return SendRows.apply(by_rank_RD, group, arriving_GL, leaving_GL)


def expert_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix.

    rows [n, in], weight [n_experts, out, in] -> [n, out].

    The first counts[0] rows are for expert 0, and so on; counts int64 [n_experts].
    """
    # In bf16 one call serves all experts. It needs `in` and `out` in multiples of 8 (16 bytes)
    sizes_fit = rows.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0
    if rows.dtype == torch.bfloat16 and sizes_fit:
        ends = counts.cumsum(0).to(torch.int32)  # where each expert's rows end
        return F.grouped_mm(rows, weight.mT, offs=ends)
    parts = rows.split(counts.tolist())  # here the CPU waits for the GPU
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])


class ExpertLinear(nn.Module):
    """One linear layer for each expert, all in one parameter: `weight` [n_experts, out, in]. Being
    one, it has a gradient in every micro-batch, as steps 2 and 3 expect; that of an expert without
    rows is 0.
    """

    def __init__(self, n_experts: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_out, n_in))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, in], sorted by expert, and their numbers, int64 [n_experts] -> [n, out]."""
        return expert_product(rows, self.weight, counts)


class Experts(nn.Module):
    """Several SwiGLU MLPs, each of which gets its own rows of the input."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = ExpertLinear(n_experts, dim, ffn_dim)
        self.up_proj = ExpertLinear(n_experts, dim, ffn_dim)
        self.down_proj = ExpertLinear(n_experts, ffn_dim, dim)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [n, dim], sorted by expert, and their numbers, int64 [n_experts] -> [n, dim]."""
        gate = self.gate_proj(rows, counts)
        up = self.up_proj(rows, counts)
        return self.down_proj(F.silu(gate) * up, counts)


def keep_choices() -> tuple:
    """With --recompute full, save the result of `topk`. Otherwise backward would choose again, on a
    GPU perhaps other experts, because its p need not have the same bits; then the shapes of their
    rows would not match. torch.utils.checkpoint takes this function as `context_fn`; the list has
    the operators whose results are saved.
    """
    return create_selective_checkpoint_contexts([torch.ops.aten.topk.default])


class AddGradientOfLoss(torch.autograd.Function):
    """Return x, and in backward give `loss` the gradient 1, as if it were a part of the step's
    loss.

    A block cannot add to the step's loss, which is computed after the last layer, with pp on
    another rank. It need not: what trains the weights is the gradient, and a term of a sum has the
    gradient 1. This function starts it when backward comes to the block.
    """

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        """Return x."""
        ctx.dtype = loss.dtype
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradients of x and of the loss."""
        return grad, grad.new_ones((), dtype=ctx.dtype)


class LossBalancedMoE(MoE):
    """--balance loss: Switch Transformer's load-balancing auxiliary loss (Fedus et al. 2021)."""

    def __init__(self, dim: int, expert_dim: int, config: "Config", mesh: Mesh):
        super().__init__(dim, expert_dim, config, mesh)
        self.micro_batch_group = mesh["micro_batch"]  # the ranks that share a micro-batch (cp x tp)
        # M, of all ranks of dp. Gradients are only summed, so the coefficient is divided by it
        n_micro_batches = config.global_batch_size // config.micro_batch_size
        self.coeff = config.aux_loss_coeff / n_micro_batches

    def aux_loss(self, p_TE: Tensor, counts_E: Tensor) -> Tensor:
        """This rank's term of E sum_e f_e P_e (see BALANCE): the terms of all ranks that share the
        micro-batch add up to it.

        An all-reduce of counts gives f_e of the whole micro-batch. A rank's term of P_e is the sum
        of p_e over its own tokens, divided by the tokens of the whole micro-batch.

        f comes from counts, so only P has a gradient. Each of the n_tokens tokens adds
        (E / n_tokens) sum_j f_j p_j to E sum f P. The derivative of p_j by the logit of e is
        p_j ([j = e] - p_e). So the gradient of the token's logit of e is

            (E / n_tokens) p_e (f_e - sum_j p_j f_j)

        The sum is the mean of f, weighted by this token's p. The loss pushes the logit down if f_e
        is above the mean, and up if it is below. For example, if a token of the figure has p = P,
        the mean is 1.15 / 4 = 0.2875. So e2 (f = 0.375) is pushed down, and the others up.
        """
        total_E = counts_E.clone()  # of the whole micro-batch
        all_reduce(total_E, self.micro_batch_group).wait()
        n_choices = total_E.sum()  # tokens x K
        f_E = total_E.to(p_TE.dtype) / n_choices
        n_tokens = n_choices / self.top_k
        term_of_P_E = p_TE.sum(0) / n_tokens
        n_experts = len(f_E)
        return n_experts * (f_E * term_of_P_E).sum()

    def balance(self, out: Tensor, p_TE: Tensor, counts_E: Tensor) -> Tensor:
        """Return `out`; its backward adds the gradient of the auxiliary loss."""
        own_term = self.aux_loss(p_TE, counts_E)
        return AddGradientOfLoss.apply(out, self.coeff * own_term)


# --balance -> the block. The second part adds "bias"
BALANCE: dict[str, type[MoE]] = {"loss": LossBalancedMoE, "none": MoE}


@dataclass
class Config(step06.Config):
    """Mixture of experts and expert parallelism."""

    experts: int = flag(8, "MLPs in each layer", least=1)
    experts_per_token: int = flag(2, "how many of them a token visits", least=1)
    expert_dim: int = flag(0, "width of an expert; 0: the model's ffn_dim")
    balance: str = flag("loss", "what evens out the experts' load", BALANCE)
    aux_loss_coeff: float = flag(
        0.01, "coefficient of the auxiliary loss", needs={"balance": ["loss"]}
    )
    bias_rate: float = flag(0.001, "change of a bias in a step", needs={"balance": ["bias"]})
    ep: int = flag(1, "ranks, of dp x cp x tp, that divide the experts", least=1)


def check_experts(config: Config, mesh: Mesh):
    """Raise UserError unless the flags of experts fit one another and the layout."""
    ranks = mesh.world // config.pp  # of a stage
    if config.experts % config.ep:
        raise UserError(f"--ep {config.ep} must divide --experts {config.experts}")
    if ranks % config.ep:
        raise UserError(f"--ep {config.ep} must divide dp x cp x tp, which is {ranks}")
    if config.experts_per_token > config.experts:
        raise UserError(
            f"--experts-per-token {config.experts_per_token} exceeds --experts {config.experts}"
        )
    if config.tp > 1 and not config.sp:
        raise UserError(
            "--no-sp: with experts, ranks of tp must route different tokens: leave it out"
        )
    sequences = config.global_batch_size // mesh["dp"].size  # of a rank
    has_loss = issubclass(BALANCE[config.balance], LossBalancedMoE)
    if has_loss and sequences % config.micro_batch_size:
        raise UserError(
            f"--micro-batch-size must divide the {sequences} sequences of a rank: the auxiliary "
            "loss is a mean over equal micro-batches"
        )


def make_groups(mesh: Mesh, config: Config):
    """Create the groups ep, expert_data and micro_batch of the table GROUPS, on every rank.

    The ranks of a group ep exchange rows in every layer, so they must run equally many
    micro-batches in the same order. They do: all ranks of dp have equally many sequences (else the
    batch size is refused), and all ranks of a stage run the same schedule.
    """
    # A table of ranks for each stage; with pp 2, dp 2, tp 2, ep 2: [[0 1] [2 3]] and [[4 5] [6 7]].
    # The ranks of a row together hold all experts (a group ep), those of a column the same
    # (expert_data)
    for table in mesh.grid.reshape(config.pp, -1, config.ep):
        mesh.add_groups("ep", table, queue="activations")
        mesh.add_groups("expert_data", table.T, queue="gradients")
    mesh.add_groups_along("micro_batch", "cp", "tp", queue="activations")


def shard_moe(moe: MoE, mesh: Mesh):
    """Keep this rank's experts, and note in the records over which ranks gradients are summed.

    An expert's gradient already has the tokens of all ranks of its ep group, because their rows
    came to it. The sum over expert_data adds the tokens of the other ep groups. ZeRO, too, shards
    experts over expert_data. A router is on all ranks of a stage, which see different tokens: its
    gradient is summed over data, and then over tp, as those of norms in step 4.
    """
    note_record(moe.router.weight, data_group="data", partial_over="tp")
    for linear in moe.experts.children():
        if mesh["ep"].size > 1:  # else the weight stays whole
            linear.weight = shard_param(linear.weight, 0, mesh["ep"])  # dim 0: the experts
        note_record(linear.weight, data_group="expert_data")


def shard_experts(model: Decoder, mesh: Mesh, config: Config):
    """Check the flags, create the groups of experts, and replace each MLP by a block with the
    router and this rank's experts. Raises UserError.
    """
    check_experts(config, mesh)
    make_groups(mesh, config)
    expert_dim = config.expert_dim
    if expert_dim == 0:
        expert_dim = model.config.ffn_dim
    for layer in model.model.layers.values():
        with torch.device("meta"):
            moe = BALANCE[config.balance](model.config.dim, expert_dim, config, mesh)
        shard_moe(moe, mesh)
        layer.mlp = moe  # with the MLP, its hooks go: step 4's f and g


def train(config: Config, run: Run):
    """The whole run: all kinds of parallelism, applied to the plain model one after another."""
    device, dtype = choose_device(config)
    dp = join_ranks(device) // (config.pp * config.cp * config.tp)
    # ep is no dimension: see `make_groups`
    mesh = Mesh(pp=config.pp, dp=dp, cp=config.cp, tp=config.tp)
    # Step 2: a rank has these sequences
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    # Step 4: a rank has these rows or columns of each matrix. (Also of MLPs, which are replaced
    # below: tp does not cut experts)
    shard_tensors(model, mesh, config.sp)
    # Step 5: it has these tokens of each sequence
    positions = shard_context(model, mesh, config).to(device)
    # new: replace each MLP by an MoE block that has this rank's experts. This comes after
    # `shard_context`, which would overwrite their data_group
    shard_experts(model, mesh, config)
    # Step 6: it has these layers. This comes after step 4, which needs embedding and head
    # everywhere
    pipeline = SCHEDULES[config.schedule](config, model, mesh, positions)
    moes = [module for module in model.modules() if isinstance(module, MoE)]  # new
    set_up_layers(model, config, context_fn=keep_choices)  # new: recomputation keeps the choices
    # Steps 1 to 3: draw the weights; with --zero 1, 2 or 3 the optimizer and the sync are ZeRO's
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        own_xs, own_ys = own_tokens(tokens, targets, own, positions)
        xs = own_xs.split(config.micro_batch_size)
        ys = own_ys.split(config.micro_batch_size)
        sync.begin(len(xs))
        # This runs forward and backward of all micro-batches
        loss = pipeline.step(xs, ys, n_targets)
        sync.finish()  # now gradients of experts are summed over expert_data, others over data
        # Over tp this sums the gradients of norms (SP) and of routers, over "ends" a tied matrix's
        sum_partial_gradients(model, optimizer.gradients(), mesh)
        all_reduce(loss, mesh["data"]).wait()
        all_reduce(loss, mesh["pp"]).wait()

        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        for moe in moes:  # new
            moe.end_step()  # new: with --balance bias it moves its biases
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


# --- The second part, for a second evening: --balance bias. It evens out the experts' load without
# a loss.


class BiasBalancedMoE(MoE):
    """--balance bias, without an auxiliary loss: busy experts become a little less likely to be
    chosen.

    Experts are chosen by p + bias, with one bias for each expert; scores use p alone. After each
    step the bias rises by --bias-rate for experts with less than the mean load, and falls for those
    with more (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing"; DeepSeek-V3). It has no
    gradient, so it is not a parameter but a buffer, which is saved with the parameters.

    THE LAW. Once in a training step each layer all-reduces 8 E bytes of counts over data (dp x cp),
    then over tp, because all ranks of a stage route different tokens of the step. Over a group of n
    ranks a rank sends 2 (n-1)/n x 8 E bytes: with 8 experts and n = 2, 64.
    """

    def __init__(self, dim: int, expert_dim: int, config: "Config", mesh: Mesh):
        super().__init__(dim, expert_dim, config, mesh)
        self.data_group = mesh["data"]
        self.tp_group = mesh["tp"]
        self.rate = config.bias_rate
        self.register_buffer("bias", torch.zeros(config.experts))
        # How many of this rank's choices each expert got in this training step
        load_E = torch.zeros(config.experts, dtype=torch.int64)  # 0 between steps: not saved
        self.register_buffer("load_E", load_E, persistent=False)

    def choose(self, p_TE: Tensor) -> Tensor:
        """The K experts with the largest p + bias."""
        return super().choose(p_TE + self.bias)

    def balance(self, out: Tensor, p_TE: Tensor, counts_E: Tensor) -> Tensor:
        """Count the choices."""
        # With --recompute full, backward repeats a layer only as far as it needs, and that ends
        # before this line. With --compile it repeats this line, too: then every load doubles, which
        # changes nothing, because `end_step` uses only the sign of mean load - load
        self.load_E += counts_E
        return out

    def end_step(self):
        """Move each bias by the rate."""
        all_reduce(self.load_E, self.data_group).wait()
        all_reduce(self.load_E, self.tp_group).wait()
        mean_load = self.load_E.double().mean()
        direction = torch.sign(mean_load - self.load_E)
        self.bias += self.rate * direction.to(self.bias.dtype)
        self.load_E.zero_()


BALANCE["bias"] = BiasBalancedMoE


if __name__ == "__main__":
    main(train, Config)
