"""Step 7: mixture of experts and expert parallelism. Many MLPs, of which each token visits a few; each rank owns some.

THE LAYER, for one device, is in common/moe.py: a router sends each token to the top_k likeliest of E experts, so
parameters grow with E and FLOPs with top_k; a balance loss, or a bias, keeps the experts equally busy.

NO LAYOUT MAY CHANGE THE LOSS. The balance loss is E x sum_e f_e P_e: f_e is the fraction of a micro-batch's choices
that fell on expert e, P_e the mean of its tokens' probabilities for e. The cp ranks share the sequences of a
micro-batch, and with SP the tp ranks do, too. So these ranks gather their choices, top_k numbers a token: for f, and to
know who comes first under --capacity-factor. Each rank adds up P over its own tokens. P alone has a gradient, so
backward needs no collective. Unlike the main loss, this one is a mean over micro-batches (`balance.scale`).

EXPERT PARALLELISM. ep ranks hold E/ep experts each, and everything else as before. ep is no new dimension of the mesh.
It is a cut through the dp x cp ranks, which have different tokens already.

    dp 2 x cp 2, ep 2                 tokens travel in     gradients are summed in
    rank 0   dp 0 cp 0   [e0 e1]      --.                  --+
    rank 1   dp 0 cp 1   [e2 e3]      --'  an ep group     --|--+
    rank 2   dp 1 cp 0   [e0 e1]      --.                  --'  |  an expert_data group
    rank 3   dp 1 cp 1   [e2 e3]      --'  an ep group     -----'

    --ep-mode alltoall    dispatch: ranks tell each other how many tokens will come, then send the tokens with their
                          gates, once to each rank, however many of its experts a token visits. There the tokens are
                          sorted by expert, go through one grouped matmul, are weighted and added up.
                          combine: one row for each token goes home
    --ep-mode allgather   every rank gets all tokens of the group, and the results are reduce-scattered: no counts, no
                          sorting of messages, but bytes for tokens that no expert here wants

--expert-groups G --groups-per-token M lets a token's experts come from at most M of G groups (DeepSeek-V3). If a group
lies on one rank, a token is sent at most M times. Bytes that a rank sends in a layer and micro-batch, with h = dim, e
bytes an element, w bytes in fp32 or wider, T tokens, R rows sent to other ranks and A rows received from them:

    alltoall    there R (h e + E/ep w), home A h e; backward A (h e + E/ep w) and R h e;  counts 8 (ep-1)
    allgather   (ep-1) T (h e + E w) and (ep-1) T h e;  the same in backward
    R = A = (ep-1) T (1 - C(E - E/ep, top_k) / C(E, top_k))  on average, if all experts are equally likely

The gradient of an expert is summed over the ranks that hold this expert, "expert_data", dp x cp / ep of them. ZeRO cuts
it there, too. The tokens of the other ranks have come to the expert already. With tp, experts are cut like any MLP.
With SP, each tp rank sends its own tokens; those that arrive are gathered over tp (filled up to equal numbers).

ALL FIVE. `train` below applies the dimensions to the plain model one after another. The order matters in three places.
Stages come first, so that nothing is cut that is not kept. Experts come before the sums over cp and dp are noted, as
their records name ranks of their own (`replicas`). Recomputation comes last, as it wraps what the layers have become.
Weights are drawn after all that, each in full from (seed, name), then sliced by its record. The mesh is pp x dp x cp x
tp, slowest dimension first: tensor parallelism sends most and has the nearest neighbours, pipelines send least.

Run it:    torchrun --nproc_per_node=8 step07_moe_ep.py          pp 2 x cp 2 x tp 2, experts on ep 2
           torchrun --nproc_per_node=4 step07_moe_ep.py --pp 1 --cp 1 --tp 1 --ep 4
You should see the losses of one process under every layout, and each expert's load near 1/E.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import step06_pipeline as step06
from common.comm import Group, Mesh, all_gather, all_reduce, all_to_all
from common.layout import cut, global_norm, layout_of, note_gradient_sum, sum_partial_gradients
from common.model import Decoder, ModelConfig
from common.moe import (
    MOE_PRESETS,
    Balance,
    ExpertLinear,
    Experts,
    MoE,
    add_experts,
    add_rows,
    grouped_matmul,
    grouped_outer,
)
from common.trainer import Trained, Trainer, main, start
from step01_single_gpu import wrap_layers
from step04_tp_sp import enter_block, gather_tokens, leave_block, shard_tensors
from step05_cp_ring import own_positions, shard_context
from step06_pipeline import Pipeline, keep_stage, split_backward


@dataclass
class Config(step06.Config):
    """The flags so far and those of experts."""

    model: str = "tiny-moe"  # preset: tiny-moe, mixtral-8x7b, deepseek-v3-like, or a dense one of step 1
    steps: int = 100  # optimizer steps of the whole schedule
    experts: int | None = None  # override the number of experts in a layer; 0: dense layers
    experts_per_token: int | None = None  # override how many experts a token visits
    expert_dim: int | None = None  # override the width of an expert; 0: --ffn-dim
    shared_experts: int | None = None  # override the number of experts that every token visits
    moe_every: int | None = None  # override: every so many layers have experts, the others a dense MLP
    dense_layers: int | None = None  # override the number of dense layers before the first with experts
    expert_groups: int | None = None  # override the number of groups of experts
    groups_per_token: int | None = None  # override how many groups a token's experts may come from; 0: all
    ep: int = 0  # ranks, among dp x cp, that share the experts; 0: 2 if dp x cp and --experts are even, else 1
    ep_mode: Literal["alltoall", "allgather"] = "alltoall"  # how tokens meet experts
    capacity_factor: float = 0.0  # most tokens of an expert, as a multiple of the mean; 0: no limit
    balance: Literal["loss", "bias", "none"] = "loss"  # what keeps the experts equally busy
    balance_weight: float = 0.01  # of --balance loss
    bias_speed: float = 0.001  # change of an expert's bias in a step, with --balance bias
    z_loss: float = 0.0  # weight of the router's z-loss

    def presets(self) -> dict[str, ModelConfig]:
        """The shapes that `--model` can name."""
        return MOE_PRESETS


def make_balance(config: Config, run: Trainer) -> Balance:
    """How the flags want the experts to be kept busy."""
    micro_batches = config.global_batch_size // config.micro_batch_size
    numbers = config.balance_weight, config.bias_speed, config.z_loss, config.capacity_factor
    return Balance(run.shape, micro_batches, run.device, config.balance, *numbers)


class SendRows(torch.autograd.Function):
    """Uneven all-to-all of rows; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, rows: Tensor, group: Group, sent: list[int], received: list[int]) -> Tensor:
        """rows [sum(sent), ...], the first sent[0] of them for rank 0, and so on -> [sum(received), ...] by sender."""
        ctx.group, ctx.sent, ctx.received = group, sent, received
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        all_to_all(arrived, rows.contiguous(), group, received, sent).wait()
        return arrived

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The reverse exchange."""
        return SendRows.apply(grad, ctx.group, ctx.received, ctx.sent), None, None, None


class Route(NamedTuple):
    """How the tokens of a layer travel: the token and the target rank of each row; how many rows go where."""

    token: Tensor  # int64 [rows]
    rank: Tensor  # int64 [rows], sorted
    sent: list[int]
    received: list[int]


def find_route(gates: Tensor, ep: Group) -> Route:
    """gates [tokens, ep ranks, experts of a rank], zero where a token does not go. One exchange of counts."""
    wanted = (gates != 0).any(-1)
    rank, token = wanted.T.nonzero(as_tuple=True)  # sorted by rank
    sent = wanted.sum(0)
    received = torch.empty_like(sent)
    all_to_all(received, sent, ep, purpose="(counts)").wait()
    return Route(token, rank, sent.tolist(), received.tolist())


class ExpertParallel:
    """Replaces `MoE.run_experts` where experts are dealt to the ranks of `ep`, or cut over `tp`."""

    def __init__(self, ep: Group, tp: Group, sp: bool, mode: str):
        self.ep, self.tp, self.sp, self.mode = ep, tp, sp, mode

    def __call__(self, experts: Experts, x: Tensor, gates: Tensor) -> Tensor:
        """x [tokens, dim], gates [tokens, all experts] -> the weighted sum of the experts' outputs [tokens, dim]."""
        by_rank = gates.unflatten(1, (self.ep.size, -1))
        if self.ep.size == 1:
            return self.over_tp(experts, x, gates, even=True)
        if self.mode == "allgather":
            x, by_rank = (enter_block(t, self.ep, sp=True) for t in (x, by_rank.flatten(1)))
            part = self.over_tp(experts, x, by_rank.chunk(self.ep.size, 1)[self.ep.rank], even=True)
            return leave_block(part, self.ep, sp=True)
        route = find_route(by_rank, self.ep)
        rows = x.index_select(0, route.token), by_rank[route.token, route.rank]
        arrived = (SendRows.apply(t, self.ep, route.sent, route.received) for t in rows)  # dispatch
        out = self.over_tp(experts, *arrived, even=False)
        back = SendRows.apply(out, self.ep, route.received, route.sent)  # combine
        return add_rows(back, route.token, len(x), x.dtype)

    def over_tp(self, experts: Experts, x: Tensor, gates: Tensor, even: bool) -> Tensor:
        """x [rows, dim], gates [rows, experts here] -> [rows, dim]; `even`: all tp ranks are known to have as many."""
        if self.tp.size == 1:
            return experts(x, gates)
        rows = len(x)
        if self.sp and not even:  # a collective wants equal numbers: fill up to the most on any rank
            counts = torch.tensor([rows], device=x.device).new_empty(self.tp.size)
            all_gather(counts, torch.tensor([rows], device=x.device), self.tp, "(counts)").wait()
            x, gates = (F.pad(t, (0, 0, 0, int(counts.max()) - rows)) for t in (x, gates))
        x, gates = (enter_block(t, self.tp, self.sp) for t in (x, gates))
        return leave_block(experts(x, gates), self.tp, self.sp)[:rows]


class GatherChoices:
    """Replaces `MoE.gather_choices` where `group` shares sequences; `order` int64 [seq]: the tokens of its ranks."""

    def __init__(self, group: Group, order: Tensor):
        self.group, self.places = group, order.argsort()

    def __call__(self, chosen: Tensor) -> Tensor:
        """int64 [batch, seq/n, top_k] -> int32 [batch, seq, top_k]."""
        return gather_tokens(chosen.int(), self.group).wait()[:, self.places]


def shard_experts(model: Decoder, mesh: Mesh, config: Config, ep: int):
    """Deal the experts of the model, on the meta device, to `ep` of the data ranks and cut them over tp, in place.

    The mesh is (pp, dp, cp, tp), tp innermost. Adds the groups "ep", `ep` neighbours of the dp x cp ranks (with the
    same tp); "expert_data", the ranks that hold the same experts; "sequence", those that share sequences.
    """
    data, cp, tp, sp = mesh["dp"].size * mesh["cp"].size, mesh["cp"], mesh["tp"], config.sp
    mesh.add("ep", ep, stride=tp.size)
    mesh.add("expert_data", data // ep, stride=ep * tp.size)
    mesh.add("sequence", cp.size * (tp.size if sp else 1), stride=1 if sp else tp.size)
    sequence = mesh["sequence"]
    order = [own_positions(model.config.seq_len, rank, cp.size, config.cp_mode) for rank in range(cp.size)]
    order = torch.cat(order).to(mesh.device)
    for moe in [layer.mlp for layer in model.model.layers.values() if isinstance(layer.mlp, MoE)]:
        moe.run_experts = ExpertParallel(mesh["ep"], tp, sp, config.ep_mode)
        if sequence.size > 1:
            moe.gather_choices = GatherChoices(sequence, order)
            moe.local_tokens = order.chunk(sequence.size)[sequence.rank]
        for linear, dim in ((moe.experts.gate_proj, 1), (moe.experts.up_proj, 1), (moe.experts.down_proj, 2)):
            for group, at in ((mesh["ep"], 0), (tp, dim)):
                if group.size > 1:
                    linear.weight = cut(linear.weight, at, group)
            if ep > 1:
                record = layout_of(linear.weight)
                sums = *record.partial_over, "expert_data"
                linear.weight.parallel_layout = replace(record, partial_over=sums, replicas="expert_data")
        if tp.size > 1 and sp:
            note_gradient_sum([moe.router.weight], "tp")


class SplitExpertFunction(torch.autograd.Function):
    """GroupedLinear of common/moe.py whose backward computes dx and puts dW off (step 6)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, store: Any) -> Tensor:
        """x [n, in] sorted by expert, weight [experts, out, in], counts int64 [experts] -> [n, out]."""
        ctx.save_for_backward(x, counts)
        ctx.weight, ctx.store = weight, store
        return grouped_matmul(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dy [n, out] -> dx [n, in]."""
        (x, counts), weight, grad = ctx.saved_tensors, ctx.weight, grad.contiguous()
        if weight.requires_grad:
            ctx.store.put([weight], lambda: [grouped_outer(grad, x, counts)])
        return grouped_matmul(grad, weight, counts), None, None, None


def split_expert(linear: ExpertLinear, store: Any, x: Tensor, counts: Tensor) -> Tensor:
    """Instead of ExpertLinear's forward: the weight gradient waits."""
    return SplitExpertFunction.apply(x, linear.weight, counts, store)


def split_experts(model: Decoder, store: Any):
    """Let the weight gradients of the experts wait in step 6's WeightGradStore, too, if there is one."""
    for module in model.modules():
        if store is not None and isinstance(module, ExpertLinear):
            module.forward = partial(split_expert, module, store)


def take_counts(balance: Balance, mesh: Mesh, sp: bool) -> Tensor:
    """What the experts of all ranks counted in this step: of all tokens, and of all stages' layers."""
    for dim in ("data", "pp", "tp") if sp else ("data", "pp"):
        all_reduce(balance.counted, mesh[dim], "(metrics)").wait()
    return balance.take()


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh, plan, balance = run.mesh, run.plan_pipeline(), make_balance(config, run)
        with torch.device("meta"):
            model = Decoder(run.shape)
            add_experts(model, balance)
        chunks = keep_stage(model, mesh, plan)  # step 6: these layers are mine
        shard_experts(model, mesh, config, run.ep)  # these experts are mine
        shard_tensors(model, mesh, config.sp, config.tp_overlap)  # step 4: these rows and columns are mine
        positions = shard_context(model, mesh, config.cp_mode)  # step 5: these tokens are mine
        note_gradient_sum(model.parameters(), "dp")
        store = split_backward(model, plan)
        split_experts(model, store)
        wrap_layers(model, config)
        pipeline = Pipeline(model, chunks, plan, positions, store, config, run)
        optimizer, sync = pipeline.optimizer, pipeline.sync  # step 3: this slice of the update is mine
        share = mesh["dp"].share(config.global_batch_size)  # step 2: these sequences are mine

        for step in run.steps(model, optimizer, sync, positions, pipeline):
            batch = run.batch(step, share)
            tokens, targets = zip(*batch.micro_batches(config.micro_batch_size), strict=True)
            balance.scale = optimizer.loss_scale / balance.micro_batches
            sync.begin()
            loss = pipeline.step(tokens, targets, optimizer.loss_scale / batch.n_targets, run.phase)
            sync.finish()
            sum_partial_gradients(optimizer, mesh, ["tp", "kv", "mirror"])
            counted = take_counts(balance, mesh, config.sp)
            loss = run.global_loss(loss / optimizer.loss_scale)
            with run.phase("optimizer"):
                dims = ["tp", "pp"] if config.zero else ["tp", "ep", "pp"]  # ZeRO's slices are cut over ep already
                norm = global_norm(optimizer, mesh, dims, sliced=config.zero > 0)
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                    balance.adjust(model, counted)
                optimizer.zero_grad()
            run.note_experts(counted)
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
