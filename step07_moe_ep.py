"""Step 7: mixture of experts and expert parallelism. Many MLPs, of which each token visits a few; each rank owns some.

THE LAYER, for one device, is in common/moe.py: a router sends each token to the top_k likeliest of E experts, so
parameters grow with E and FLOPs with top_k; a balance loss, or a bias, keeps the experts equally busy.

NO LAYOUT MAY CHANGE THE LOSS. The balance loss is E x sum_e f_e P_e: f_e is the fraction of a micro-batch's choices
that fell on expert e, P_e the mean of its tokens' probabilities for e. The cp ranks share the sequences of a
micro-batch, and with SP the tp ranks do, too. So these ranks gather their choices, top_k numbers a token: for f, and to
know who comes first under --capacity-factor. Each rank adds up P over its own tokens. P alone has a gradient, so
backward needs no collective. Unlike the main loss, this one is a mean over micro-batches (`balance.scale`).

EXPERT PARALLELISM. ep ranks hold E/ep experts each. They are not more ranks, but a cut through dp x cp: other tokens.

    dp 2 x cp 2, ep 2                 tokens travel in     gradients are summed in
    rank 0   dp 0 cp 0   [e0 e1]      --.                  --+
    rank 1   dp 0 cp 1   [e2 e3]      --'  an ep group     --|--+
    rank 2   dp 1 cp 0   [e0 e1]      --.                  --'  |  an expert_data group
    rank 3   dp 1 cp 1   [e2 e3]      --'  an ep group     -----'

    --ep-mode alltoall    "there": ranks tell each other how many tokens will come, then send the tokens with their
                          gates, once to each rank, however many of its experts a token visits. While they travel,
                          shared experts compute. The rows that arrive are sorted by expert, go through grouped
                          matmuls, are weighted and added up. "home": the sums go back, and are added by token
    --ep-mode allgather   every rank gets all tokens of the group, and the results are reduce-scattered: no counts, no
                          sorting of messages, but bytes for tokens that no expert here wants

--expert-groups G --groups-per-token M lets a token's experts come from at most M of G groups (DeepSeek-V3). If no such
group lies on two ranks, a token is sent at most M times. Bytes that a rank sends over ep in a layer and micro-batch:
h = dim, e bytes an element, w a gate (4; fp64: 8), T tokens of the rank, R rows sent to other ranks, A rows received

    alltoall    there R (h e + E/ep w), home A h e; backward A (h e + E/ep w) and R h e;  counts 16 (ep-1)
    allgather   (ep-1) T (h e + E w) and (ep-1) T h e;  the same in backward
    R = A = (ep-1) T (1 - C(E - E/ep, top_k) / C(E, top_k))  on average, if each set of top_k is as likely; C: binomial

The gradient of an expert is summed over the ranks that hold this expert, "expert_data", dp x cp / ep of them (with
--zero-replicas: in a block, then over blocks). ZeRO cuts it there. Other ranks' tokens have come to it. With tp,
experts are cut like any MLP. With SP, each tp rank sends its own tokens; those that arrive are gathered over tp, filled
up to equal numbers. Without SP, each sends all. --recompute sends forward once more (allgather: only its first term).

ALL FIVE. `train` below applies the dimensions to the plain model one after another. The order matters in three places.
Stages come first, so that nothing is cut that is not kept. Experts come before the sums over cp and dp are noted, as
their records name ranks of their own (`replicas`). `split_backward` comes after tp: it wraps what tp puts in place.
Weights are drawn last. The mesh is pp x dp x cp x tp: tp sends most and has the nearest neighbours, pp sends least.

Run it:    torchrun --nproc_per_node=8 step07_moe_ep.py          pp 2 x cp 2 x tp 2, experts on ep 2
           torchrun --nproc_per_node=4 step07_moe_ep.py --pp 1 --cp 2 --tp 1 --ep 2      the picture above
You should see the losses of one process, up to rounding; no expert's load is near 0, or several times 1/E.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import step06_pipeline as step06
from common.comm import Group, Mesh, all_reduce, all_to_all
from common.layout import cut, global_norm, layout_of, note_gradient_sum, sum_partial_gradients
from common.model import Decoder, ModelConfig
from common.moe import (
    MOE_PRESETS,
    Balance,
    ExpertLinear,
    Experts,
    MoE,
    TakeRows,
    add_experts,
    add_rows,
    grouped_matmul,
    grouped_outer,
)
from common.trainer import Trained, main, start
from step01_single_gpu import wrap_layers
from step04_tp_sp import enter_block, gather_tokens, leave_block, shard_tensors
from step05_cp_ring import own_positions, shard_context
from step06_pipeline import Pipeline, keep_stage, split_backward


@dataclass
class Config(step06.Config):
    """The flags so far and those of experts."""

    model: str = "tiny-moe"  # preset: tiny-moe, mixtral-8x7b, deepseek-v3-like, or a dense one of step 1
    steps: int = 40  # optimizer steps of the whole schedule
    global_batch_size: int = 16  # sequences per optimizer step, all ranks together
    lr: float = 1e-2  # peak learning rate
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


class Route(NamedTuple):
    """How the tokens of a layer travel: the token and the target rank of each row; how many rows go where."""

    token: Tensor  # int64 [rows]
    rank: Tensor  # int64 [rows], sorted
    sent: list[int]
    received: list[int]
    most: int  # rows that this rank received; with SP, the most on a tp rank: they will gather theirs
    n_choices: int  # choices of these rows; with SP, of all tp ranks' rows


def find_route(gates: Tensor, ep: Group, tp: Group, sp: bool) -> Route:
    """gates [tokens, ep ranks, experts of a rank], zero where a token does not go. The host waits once, for counts."""
    visits, n = gates != 0, ep.size
    wanted = visits.any(-1)
    sent = torch.stack((wanted.sum(0), visits.sum((0, 2))), 1)  # to each rank: rows, and choices of its experts
    received = torch.empty_like(sent)
    all_to_all(received, sent, ep, purpose="(counts)").wait()
    by_tp = received.sum(0, keepdim=True)
    if sp:
        by_tp = gather_tokens(by_tp, tp).wait()
    numbers = torch.cat((sent[:, 0], received[:, 0], by_tp[:, :1].amax(0), by_tp[:, 1:].sum(0))).tolist()
    rank, token = wanted.T.nonzero_static(size=sum(numbers[:n])).unbind(1)  # sorted by rank
    return Route(token, rank, numbers[:n], numbers[n:-2], *numbers[-2:])


class Message:
    """Rows [n, dim] that travel between ranks, with the bits of their gates [n, experts of a rank] behind them."""

    def __init__(self, group: Group, sent: list[int], received: list[int]):
        """`sent`, `received`: how many rows go to and come from each rank."""
        self.group, self.sent, self.received = group, sent, received

    def leave(self, rows: Tensor, gates: Tensor, back: bool = False) -> tuple[Tensor]:
        """Send them, or their gradients `back`; returns an empty tensor, which ties the arrival to this in autograd."""
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        self.dim, self.dtype = rows.shape[1], gates.dtype
        leaving = torch.cat((rows, gates.contiguous().view(rows.dtype)), 1)
        self.arriving = leaving.new_empty(sum(received), leaving.shape[1])
        self.pending = all_to_all(self.arriving, leaving, self.group, received, sent)
        return (rows.new_empty(0),)

    def arrive(self, _tie: Tensor) -> tuple[Tensor, Tensor]:
        """Wait; returns rows and gates."""
        self.pending.wait()
        rows, gates = self.arriving[:, : self.dim].contiguous(), self.arriving[:, self.dim :].contiguous()
        self.arriving = self.pending = None
        return rows, gates.view(self.dtype)


class Travel(torch.autograd.Function):
    """A message leaves, or arrives. Two nodes, so that other work comes between them, in forward and in backward."""

    @staticmethod
    def forward(ctx, message: Message, leaves: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rows and gates -> a tie; or a tie -> rows and gates."""
        ctx.message, ctx.leaves = message, leaves
        return message.leave(*tensors) if leaves else message.arrive(*tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """Its gradients arrive where it left, or leave where it arrived."""
        return None, None, *(ctx.message.arrive(*grads) if ctx.leaves else ctx.message.leave(*grads, back=True))


class ExpertParallel:
    """Replaces `MoE.run_experts`: experts are dealt to the ranks of `ep` and cut over `tp`, each of any size."""

    def __init__(self, ep: Group, tp: Group, sp: bool, mode: str):
        self.ep, self.tp, self.sp, self.mode = ep, tp, sp, mode

    def __call__(self, experts: Experts, x: Tensor, gates: Tensor) -> Callable[[], Tensor]:
        """x [tokens, dim], gates [tokens, all experts] -> a function: the weighted sum of the outputs [tokens, dim]."""
        if self.ep.size == 1:
            return partial(self.over_tp, experts, x, gates)
        if self.mode == "allgather":
            return partial(self.gathered, experts, x, gates)
        gates = gates.unflatten(1, (self.ep.size, -1))
        route = find_route(gates.detach(), self.ep, self.tp, self.sp)
        rows, its_gates = TakeRows.apply(x, route.token), gates[route.token, route.rank]
        there = Message(self.ep, route.sent, route.received)
        tie = Travel.apply(there, True, rows, its_gates)

        def finish() -> Tensor:
            out = self.over_tp(experts, *Travel.apply(there, False, *tie), route.most, route.n_choices)
            home, no_gates = Message(self.ep, route.received, route.sent), its_gates.new_empty(len(out), 0)
            came_home, _ = Travel.apply(home, False, *Travel.apply(home, True, out, no_gates))
            return add_rows(came_home, route.token, len(x), x.dtype)

        return finish

    def gathered(self, experts: Experts, x: Tensor, gates: Tensor) -> Tensor:
        """Every rank gets all tokens, the parts that its experts add are reduce-scattered: step 4's pair, over ep."""
        x, gates = (enter_block(t, self.ep, sp=True) for t in (x, gates))
        part = self.over_tp(experts, x, gates.chunk(self.ep.size, 1)[self.ep.rank])
        return leave_block(part, self.ep, sp=True)

    def over_tp(
        self, experts: Experts, x: Tensor, gates: Tensor, most: int | None = None, n_choices: int | None = None
    ) -> Tensor:
        """x [rows, dim], gates [rows, experts here] -> [rows, dim]. `most`: fill up to so many, if tp ranks differ."""
        if self.tp.size == 1:
            return experts(x, gates, n_choices)
        rows = len(x)
        if self.sp and most is not None:  # a collective wants equal numbers
            x, gates = (F.pad(t, (0, 0, 0, most - rows)) for t in (x, gates))
        x, gates = (enter_block(t, self.tp, self.sp) for t in (x, gates))
        return leave_block(experts(x, gates, n_choices), self.tp, self.sp)[:rows]


def gather_in_order(group: Group, places: Tensor, chosen: Tensor) -> Tensor:
    """Choices int64 [batch, seq/n, top_k] -> all, int32 [batch, seq, top_k]; `places`: where each position arrives."""
    return gather_tokens(chosen.int(), group).wait()[:, places]


def shard_experts(model: Decoder, mesh: Mesh, config: Config, ep: int):
    """Deal the experts of the model, on the meta device, to each `ep` of the data ranks and cut them over tp, in place.

    The mesh is (pp, dp, cp, tp), tp innermost. Adds the groups "ep", `ep` neighbours of the dp x cp ranks (with the
    same tp); "expert_data", the ranks that hold the same experts; "sequence", those that share sequences.
    """
    data, cp, tp, sp = mesh["dp"].size * mesh["cp"].size, mesh["cp"], mesh["tp"], config.sp
    mesh.add("ep", ep, stride=tp.size)
    mesh.add("expert_data", data // ep // config.zero_replicas, stride=ep * tp.size)
    mesh.add("sequence", cp.size * (tp.size if sp else 1), stride=1 if sp else tp.size)
    sequence = mesh["sequence"]
    order = [own_positions(model.config.seq_len, rank, cp.size, config.cp_mode) for rank in range(cp.size)]
    order = torch.cat(order).to(mesh.device)  # positions, as the ranks of `sequence` hold them
    for moe in [layer.mlp for layer in model.model.layers.values() if isinstance(layer.mlp, MoE)]:
        moe.run_experts = ExpertParallel(mesh["ep"], tp, sp, config.ep_mode)
        if sequence.size > 1:
            moe.gather_choices = partial(gather_in_order, sequence, order.argsort())
            moe.local_tokens = order.chunk(sequence.size)[sequence.rank]
        for linear, dim in ((moe.experts.gate_proj, 1), (moe.experts.up_proj, 1), (moe.experts.down_proj, 2)):
            for group, at in ((mesh["ep"], 0), (tp, dim)):
                if group.size > 1:
                    linear.weight = cut(linear.weight, at, group)
            if ep > 1:
                record = layout_of(linear.weight)
                sums = *record.partial_over, "expert_data"  # the first: "mirror", of step 6
                linear.weight.parallel_layout = replace(record, partial_over=sums, replicas="expert_data")
        if tp.size > 1 and sp:
            note_gradient_sum([moe.router.weight], "tp")  # like a norm, it sees only this rank's tokens


class SplitExpertFunction(torch.autograd.Function):
    """GroupedLinear of common/moe.py whose backward computes dx and puts dW off (step 6)."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, store: Any) -> Tensor:
        """x [n, in] sorted by expert, weight [experts, out, in], counts int64 [experts] -> [n, out]."""
        ctx.save_for_backward(x, counts)
        ctx.weight, ctx.store = weight, store  # the weight itself, as in step 6
        return grouped_matmul(x, weight.mT, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dy [n, out] -> dx [n, in]."""
        (x, counts), weight, grad = (t.detach() for t in ctx.saved_tensors), ctx.weight, grad.contiguous()
        if weight.requires_grad:
            ctx.store.put([weight], lambda: [grouped_outer(grad, x, counts)])
        return grouped_matmul(grad, weight, counts) if ctx.needs_input_grad[0] else None, None, None, None


def split_experts(model: Decoder, store: Any):
    """Let the weight gradients of the experts wait in step 6's WeightGradStore, too, if there is one."""
    for module in model.modules():
        if store is not None and isinstance(module, ExpertLinear):
            module.forward = lambda x, counts, module=module: SplitExpertFunction.apply(x, module.weight, counts, store)


def take_counts(balance: Balance, mesh: Mesh, sp: bool) -> Tensor:
    """What all ranks counted in this step, of all tokens and all layers. Without SP, tp ranks count the same tokens."""
    for dim in ("data", "pp", *["tp"] * sp):
        all_reduce(balance.counted, mesh[dim], "(metrics)").wait()
    return balance.take()


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh, plan, balance = run.mesh, run.plan_pipeline(), run.make_balance()
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
                dims = ["tp", "pp"] if config.zero else ["tp", "ep", "pp"]  # ZeRO's sum over dp x cp contains ep
                norm = global_norm(optimizer, mesh, dims, sliced=config.zero > 0)
                if run.accepts(loss, norm) and optimizer.step(run.learning_rate(step), norm):  # clips, and updates
                    balance.adjust(model, counted)
                optimizer.zero_grad()
            run.note_experts(counted)
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
