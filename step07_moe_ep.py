"""Step 7: mixture of experts and expert parallelism. Many MLPs, of which each token visits a few; each rank owns some.

THE LAYER, for one device, is in common/moe.py: a router sends each token to the k likeliest of E experts, so parameters
grow with E and FLOPs with k; a balance loss, or a bias, keeps the experts equally busy.

NO LAYOUT MAY CHANGE THE LOSS. The balance loss is E x sum_e f_e p_e, with f_e the fraction of a micro-batch's choices
that fell on e. A micro-batch's sequences are shared by the cp ranks, and with SP by the tp ranks: their choices, k
numbers a token, are gathered there, both for f and for who comes too late under --capacity-factor. A rank then adds up
its own tokens' p, and p alone has a gradient: backward needs no collective. Losses of micro-batches are averaged.

EXPERT PARALLELISM. ep ranks hold E/ep experts each, and everything else as before: ep is no new dimension of the mesh,
but a cut through the dp x cp ranks that are there, which have different tokens already.

    dp 2 x cp 2, ep 2                 tokens travel in     gradients are summed in
    rank 0   dp 0 cp 0   [e0 e1]      --.                  --+
    rank 1   dp 0 cp 1   [e2 e3]      --'  an ep group     --|--+
    rank 2   dp 1 cp 0   [e0 e1]      --.                  --'  |  an expert_data group
    rank 3   dp 1 cp 1   [e2 e3]      --'  an ep group     -----'

    --ep-mode alltoall    how many tokens come from where, then the tokens (once to each rank, however many of its
                          experts they want) with their gates; there they are sorted by expert, go through one grouped
                          matmul, are weighted and added up; one row for each goes home
    --ep-mode allgather   every rank gets all tokens of the group, and the results are reduce-scattered: no counts, no
                          sorting of messages, but bytes for tokens that nobody wants

--expert-groups G --groups-per-token M lets a token's experts come from at most M of G groups (DeepSeek-V3): with groups
laid on ranks it is sent at most M times, and k may be larger. Bytes a rank sends in a layer and micro-batch, e bytes an
element, w in fp32 or wider, T tokens, R rows sent to and A received from others:

    alltoall    there R (h e + E/ep w), home A h e; backward A (h e + E/ep w) and R h e;  counts 8 (ep-1)
    allgather   (ep-1) T (h e + E w) and (ep-1) T h e;  the same in backward
    R = A = (ep-1) T (1 - C(E - E/ep, k) / C(E, k))  on average, if all k experts are equally likely

An expert's gradient is summed over the ranks that hold this expert, "expert_data" = dp x cp / ep of them, where ZeRO
cuts it, too: its tokens from the other ranks have come to it already. With tp, experts are cut like any MLP; with SP,
each tp rank sends its own tokens, then those that arrived are gathered over tp (filled up to equal numbers).

ALL FIVE. `train` below applies the dimensions to the plain model one after another. The order matters in three places:
stages first, so that nothing is cut that is not kept; experts before tensors, as their weights are cut twice, by expert
and by channel; and recomputation last, as it wraps what the layers have become. Weights are drawn after all that, each
in full from (seed, name), then sliced by its record. The mesh, slowest dimension first, is pp x dp x cp x tp: tensor
parallelism talks most and has the nearest neighbours, pipelines talk least.

Run it:    torchrun --nproc_per_node=8 step07_moe_ep.py          pp 2 x cp 2 x tp 2, experts on ep 2
           torchrun --nproc_per_node=4 step07_moe_ep.py --pp 1 --cp 1 --tp 1 --ep 4
You should see the losses of one process under every layout, and each expert's load near 1/E.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import step06_pipeline as step06
from common.comm import Group, Mesh, all_gather, all_reduce, all_to_all, gather_objects, sum_over, world_size
from common.data import TokenData
from common.layout import cut, global_norm, layout_of, reduction_table, sum_gradients_over, sum_partial_gradients
from common.model import Decoder, ModelConfig
from common.moe import MOE_PRESETS, AddRows, Balance, ExpertLinear, Experts, MoE, MoEConfig, add_experts
from common.schedules import SCHEDULES, communicate, paths
from services import plots
from services.checks import check_ep, choose_chunks, choose_ep, mesh_sizes, split_layers
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import evaluate_stages, generate, pipeline_logits
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.pictures import describe, draw_timeline
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from step01_single_gpu import Trained, apply_recompute, learning_rate
from step03_zero import optimizer_and_sync, plan
from step04_tp_sp import (
    CopyToRanks,
    GatherTokens,
    ScatterTokens,
    SumFromRanks,
    gather_tokens,
    shard_block,
    shard_tensors,
)
from step05_cp_ring import own_positions, shard_context
from step06_pipeline import Later, Pipeline, keep_stage, scaled_loss, split_backward
from theory.flops import moe_flops_per_token, moe_layer_costs
from theory.memory import expert_activation_bytes, pp_activation_bytes
from theory.traffic import moe_traffic, partial_traffic, predictions, stage_traffic, zero_stage_traffic


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
    ep: int = 0  # ranks, among dp x cp, that share the experts; 0: 2 if that divides both numbers, else 1
    ep_mode: Literal["alltoall", "allgather"] = "alltoall"  # how tokens meet experts
    capacity_factor: float = 0.0  # most tokens of an expert, as a multiple of the mean; 0: no limit
    balance: Literal["loss", "bias", "none"] = "loss"  # what keeps the experts equally busy
    balance_weight: float = 0.01  # of --balance loss
    bias_speed: float = 0.001  # change of an expert's bias in a step, with --balance bias
    z_loss: float = 0.0  # weight of the router's z-loss

    def presets(self) -> dict[str, ModelConfig]:
        """The shapes that `--model` can name."""
        return MOE_PRESETS


def make_balance(config: Config, m: MoEConfig, device: torch.device) -> Balance:
    """How the flags want the experts to be kept busy."""
    micro_batches = config.global_batch_size // config.micro_batch_size
    numbers = config.balance_weight, config.bias_speed, config.z_loss, config.capacity_factor
    return Balance(m, micro_batches, device, config.balance, *numbers)


# --- expert parallelism


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


class Sent(NamedTuple):
    """One exchange as a rank saw it: rows to and from each rank of ep; rows of each tp rank after filling up."""

    to: list[int]
    came: list[int]
    rows: int


class ExpertParallel:
    """Replaces `MoE.run` where experts are dealt to the ranks of `ep`, or cut over `tp`.

    Set `trace` to a list to have every exchange recorded in it.
    """

    def __init__(self, ep: Group, tp: Group, sp: bool, mode: str):
        self.ep, self.tp, self.sp, self.mode = ep, tp, sp, mode
        self.trace: list[Sent] | None = None

    def __call__(self, experts: Experts, x: Tensor, gates: Tensor) -> Tensor:
        """x [tokens, dim], gates [tokens, all experts] -> the weighted sum of the experts' outputs [tokens, dim]."""
        n = self.ep.size
        if n == 1:
            return self.over_tp(experts, x, gates, even=True)
        if self.mode == "allgather":
            x, gates = (GatherTokens.apply(t[None], self.ep)[0] for t in (x, gates))
            part = self.over_tp(experts, x, gates.chunk(n, dim=1)[self.ep.rank], even=True)
            return ScatterTokens.apply(part[None], self.ep)[0]
        by_rank = gates.unflatten(1, (n, -1))
        wanted = (by_rank != 0).any(-1)
        rank, token = wanted.T.nonzero(as_tuple=True)  # sorted by rank
        to = wanted.sum(0)
        came = torch.empty_like(to)
        all_to_all(came, to, self.ep, purpose="(counts)").wait()
        to, came = to.tolist(), came.tolist()
        there = (SendRows.apply(t, self.ep, to, came) for t in (x.index_select(0, token), by_rank[token, rank]))
        out = self.over_tp(experts, *there, even=False)
        if self.trace is not None:
            self.trace.append(Sent(to, came, self.rows))
        back = SendRows.apply(out, self.ep, came, to)
        return AddRows.apply(back, token, len(x), x.dtype)

    def over_tp(self, experts: Experts, x: Tensor, gates: Tensor, even: bool) -> Tensor:
        """x [rows, dim], gates [rows, experts here] -> [rows, dim]; `even`: all tp ranks are known to have as many."""
        self.rows = len(x)
        if self.tp.size == 1:
            return experts(x, gates)
        if not self.sp:  # all tp ranks have the same rows
            x, gates = (CopyToRanks.apply(t, self.tp) for t in (x, gates))
            return SumFromRanks.apply(experts(x, gates), self.tp)
        if not even:
            own = torch.tensor([len(x)], device=x.device)
            everyones = own.new_empty(self.tp.size)
            all_gather(everyones, own, self.tp, "(counts)").wait()
            self.rows = int(everyones.max())
        filled = (F.pad(t, (0, 0, 0, self.rows - len(t))) for t in (x, gates))
        part = experts(*(GatherTokens.apply(t[None], self.tp)[0] for t in filled))
        return ScatterTokens.apply(part[None], self.tp)[0][: len(x)]


class InSequence:
    """Replaces `MoE.everyones` where `group` shares sequences; `order` int64 [seq]: which tokens its ranks hold."""

    def __init__(self, group: Group, order: Tensor):
        self.group, self.places = group, order.argsort()

    def __call__(self, chosen: Tensor) -> Tensor:
        """int64 [batch, seq/n, k] -> int32 [batch, seq, k]."""
        return gather_tokens(chosen.int(), self.group)()[:, self.places]


def shard_experts(model: Decoder, mesh: Mesh, config: Config, ep: int):
    """Deal the experts of the model, on the meta device, to `ep` of the data ranks and cut them over tp, in place.

    The mesh is (pp, dp, cp, tp), tp innermost. Adds the groups "ep", `ep` neighbours of the dp x cp ranks (with the
    same tp); "expert_data", the ranks that hold the same experts; "sequence", those that share sequences.
    """
    data, cp, tp, sp = mesh.sizes["dp"] * mesh.sizes["cp"], mesh["cp"], mesh["tp"], config.sp
    mesh.add("ep", ep, stride=tp.size)
    mesh.add("expert_data", data // ep, stride=ep * tp.size)
    mesh.add("sequence", cp.size * (tp.size if sp else 1), stride=1 if sp else tp.size)
    order = [own_positions(model.config.seq_len, rank, cp.size, config.cp_mode) for rank in range(cp.size)]
    order = torch.cat(order).to(mesh.device)
    for layer in model.model.layers.values():
        if not isinstance(layer.mlp, MoE):
            continue
        moe = layer.mlp
        moe.run = ExpertParallel(mesh["ep"], tp, sp, config.ep_mode)
        if mesh["sequence"].size > 1:
            moe.everyones = InSequence(mesh["sequence"], order)
            moe.own = order.chunk(mesh["sequence"].size)[mesh["sequence"].rank]
        for linear, dim in ((moe.experts.gate_proj, 1), (moe.experts.up_proj, 1), (moe.experts.down_proj, 2)):
            for group, at in ((mesh["ep"], 0), (tp, dim)):
                if group.size > 1:
                    linear.weight = cut(linear.weight, at, group)
            if ep > 1:
                record = layout_of(linear.weight)
                sums = *record.sum_over, "expert_data"
                linear.weight.parallel_layout = replace(record, sum_over=sums, replicas="expert_data")
        if tp.size > 1 and moe.shared_experts is not None:
            shard_block(moe.shared_experts, tp, sp, config.tp_overlap)
        if tp.size > 1 and sp:
            sum_gradients_over([moe.router.weight], "tp")


def take_counts(balance: Balance, groups: list[Group]) -> Tensor:
    """What the experts of all ranks counted in this step, summed over `groups` one after another."""
    for group in groups:
        all_reduce(balance.counted, group, "(metrics)").wait()
    return balance.take()


def split_experts(model: Decoder) -> Later:
    """Step 6's `split_backward`, with the experts: their weight gradients wait in the queue, too."""
    later = split_backward(model)
    for module in model.modules():
        if isinstance(module, ExpertLinear):
            module.later = later
    return later


# --- what it costs


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    world = world_size()
    check_ep(config, world)
    sizes = mesh_sizes(config, world)
    pp, dp, cp, tp = sizes.values()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    ep = choose_ep(config, m, dp * cp)
    with open_mesh(sizes, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        mesh.add("data", dp * cp, stride=tp)
        group, d, r = mesh["data"], mesh["dp"].rank, mesh["pp"].rank
        share = slice(d * config.global_batch_size // dp, (d + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)
        micro_batches = config.global_batch_size // dp // config.micro_batch_size
        v = choose_chunks(config)
        ways = paths(config.schedule, pp, v)
        lists = [SCHEDULES[config.schedule](pp, micro_batches, v, rank) for rank in range(pp)]
        program = communicate(lists, ways)[r]

        balance = make_balance(config, m, device)
        lengths = split_layers(config, m, len(ways[0]), moe_layer_costs(m))
        with torch.device("meta"):
            model = Decoder(m)  # the program of a single device
            add_experts(model, balance)
        n_parameters = sum(p.numel() for p in model.parameters())
        chunks = keep_stage(model, mesh, ways, lengths)  # these layers are mine
        shard_experts(model, mesh, config, ep)  # these experts are mine
        shard_tensors(model, mesh, config.sp, config.tp_overlap)  # these rows and columns are mine
        own = shard_context(model, mesh["cp"], config.cp_mode)  # these tokens are mine
        sum_gradients_over(model.parameters(), "dp")
        later = split_experts(model) if any(action.kind == "W" for action in lists[r]) else None
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        by_name = plan(model)[0], []  # units without hooks: the pipeline says when they are needed
        optimizer, sync = optimizer_and_sync(model, group, config, device, dtype, mesh, by_name)  # this slice is mine
        boundary = m.seq_len // cp // (tp if config.sp else 1), m.dim
        pipeline = Pipeline(chunks, ways, mesh, config.sp, boundary, dtype, later, sync)
        positions = own.to(device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        if config.zero == 0:
            require_same_parameters(model, group, mesh)
        if config.generate:
            logits_of = partial(pipeline_logits, pipeline, model, positions, mesh)
            text = generate(logits_of, m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        predicted, traffic = predictions(config, m, optimizer, sync, micro_batches)
        kept = partial(expert_activation_bytes, config, m, tp, cp, dtype)
        sent = partial(moe_traffic, config, m, tp, cp, ep, dtype)
        on_cpu = device.type == "cpu"
        predicted["activations"] = pp_activation_bytes(config, m, chunks, lists[r], tp, cp, dtype, on_cpu, kept)
        if config.zero:
            traffic = zero_stage_traffic(optimizer, pipeline, lists[r])
        traffic |= stage_traffic(config, m, pipeline, program, tp, cp, dtype, sent)
        traffic |= partial_traffic(optimizer, mesh, ["tp", "kv", "mirror"])
        flops, peak = moe_flops_per_token(m, config.recompute), world * peak_flops(device, dtype, config.peak_tflops)
        with Run(config, device, flops, peak, mesh) as run:
            run.say(f"{config.model}: {n_parameters:,} parameters, {dtype}, {device}")
            run.say(mesh.picture())
            dims = [*mesh.sizes, *(["ep", "expert_data"] if ep > 1 else [])]
            rows = [row for part in gather_objects(reduction_table(model, dims), mesh) for row in part]
            run.say(table(list({row[0]: row for row in rows}.values())))
            run.say(describe(config.schedule, ways, lists, lengths))
            run.say(run.memory_table(predicted))
            run.watch = sum(action.kind == "F" for action in lists[r])
            for step in run.steps(start):
                with run.phase("data"):
                    batch = data.batch(step, share)
                    tokens, targets = (x[:, own].to(device).split(config.micro_batch_size) for x in batch[:2])
                balance.scale = optimizer.loss_scale / balance.micro_batches
                sync.begin()
                run.measure(optimizer.tensors())
                sum_over(mesh["pp"], 0.0)  # the timelines of all ranks begin here
                end = partial(scaled_loss, model, targets, optimizer.loss_scale / batch.n_targets)
                total = pipeline.run(program, config.micro_batch_size, tokens.__getitem__, end, positions, run.phase)
                loss = total / optimizer.loss_scale
                sync.finish()
                sum_partial_gradients(optimizer, mesh, ["tp", "kv", "mirror"])
                counted = take_counts(balance, [group, mesh["pp"], *([mesh["tp"]] if config.sp else [])])
                more = health(run, loss, optimizer) | balance.metrics(counted)
                loss, stopping = sum_over(group, loss, run.stopping)
                loss, stopping = sum_over(mesh["pp"], loss, stopping)  # only the last stage has a loss
                (stopping,) = sum_over(mesh["tp"], stopping)  # a signal may reach one rank a step before another
                run.stopping = stopping > 0
                require_finite(loss, step, run)
                if observe is not None:
                    observe(step, optimizer)
                run.measure(optimizer.tensors())
                with run.phase("optimizer"):
                    dims, sliced = (["tp", "pp"], "data") if config.zero else (["tp", "ep", "pp"], "")
                    norm = global_norm(optimizer, mesh, dims, sliced)
                    grad_norm = optimizer.step(learning_rate(step, config), norm, loss)
                    if not optimizer.skipped:
                        balance.adjust(model, counted)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate_stages(pipeline, model, data, config, positions, d, dp)
                        loss_sum, n_targets = sum_over(mesh["pp"], *sum_over(group, *part))
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), config.global_batch_size * m.seq_len, **more)
                if config.check_replicas and run.due(config.check_replicas, step):
                    require_same_replicas(optimizer, mesh)
                if run.stopping or (config.save_every and run.due(config.save_every, step)):
                    save(run, step + 1, optimizer, config)
            if config.zero == 0:
                require_same_parameters(model, group, mesh)
            optimizer.ready()
            run.finish(predicted, traffic)
            draw_timeline(run, config.schedule, pipeline, lists, mesh)
            if mesh.rank == 0 and run.history:
                plots.traffic(run.out)
                if m.moe_layers:
                    plots.expert_load({"": run.out}, run.out / "expert_load.png")
    return Trained(model, optimizer, run.history)


if __name__ == "__main__":
    main(train, Config)
