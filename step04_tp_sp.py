"""Step 4: tensor and sequence parallelism. The matrices themselves are cut, and between them the tokens.

Megatron's pair (Shoeybi et al. 2019), on n ranks: cut the first matrix of a block by columns (its outputs), the second
by rows (its inputs); what lies between needs no communication, as heads and MLP channels do not look at one another.
(Columns and rows of W in x W; PyTorch stores weights as [out, in], where these are dimensions 0 and 1.)

                 +- q k v, heads 0-3 -- attention -- o_proj, rows of heads 0-3 -+
    x --- f -----+                                                              +-- g --- sum = the block's output
                 +- q k v, heads 4-7 -- attention -- o_proj, rows of heads 4-7 -+

    f   forward: nothing      backward: all-reduce        (every rank finds only its part of dx)
    g   forward: all-reduce   backward: nothing           (every rank has only its part of the sum)

Between blocks every rank still holds all s tokens of b sequences. SEQUENCE PARALLELISM (SP; Korthikanti et al. 2022)
splits them there: residual stream (h wide) and norms hold s/n tokens a rank, and f, g become the two halves of an
all-reduce, at the same price:

    x [b, s/n, h] -- all-gather --> [b, s, h] -- column, row --> partial [b, s, h] -- reduce-scatter --> [b, s/n, h]

        forward              backward                         forward               backward
    f   copy                 all-reduce             with SP   all-gather            reduce-scatter
    g   all-reduce           copy                             reduce-scatter        all-gather

A norm's weight then sees only s/n tokens, so its gradient is summed over tp: its layout record says so.

OVERLAP (--tp-overlap, default). q, k, v share one f, gate and up another: never one collective a matrix. In their
backward the collective of dx runs while the weight gradients are computed. With SP the gathered input is not kept but
gathered again, behind the computation of dx: two more all-gathers a layer, but all saved activations are divided by n.

VOCABULARY. Embedding and head, [vocab, h], are cut along dimension 0, the last part padded with rows that stay zero. A
rank looks up the tokens it has, others give zero, the sum is right. For the loss, two numbers a token suffice from each
rank: the log of its sum of exponentials, and the target's logit (or 0).

KEY/VALUE HEADS. With fewer of them than ranks, tp / kv_heads neighbouring ranks hold the same one and sum its gradient.

Bytes a rank sends per micro-batch, U = (n-1)/n b s h e (e bytes an element), L layers, forward and backward together:

    layers      8 L U  [+ 2 L U with SP and overlap: gathered again]     4 all-reduces a layer, or 4 gathers, 4 scatters
    embedding   2 U
    head        2 U + 2 (n-1) b s x 4 (8 in fp64)                        the two numbers a token
    --recompute 2 L U [with SP 3 L U]                                    again, but for the sum behind a layer's end

Run it:    torchrun --nproc_per_node=4 step04_tp_sp.py --tp 2
You should see step 1's losses, parameters and moments divided by tp, and with SP the activations too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step03_zero as step03
from common.comm import Group, Mesh, all_gather, all_reduce, reduce_scatter, sum_over, world_size
from common.data import TokenData
from common.layout import cut, global_norm, layout_of, reduction_table, sum_gradients_over, sum_partial_gradients
from common.model import MLP, Decoder, cross_entropy_and_gradients, project, scaled
from services.checks import check_tp, choose_tp
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import all_logits, evaluate, generate
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from step01_single_gpu import Trained, apply_recompute, learning_rate
from step03_zero import optimizer_and_sync
from theory.flops import flops_per_token
from theory.memory import tp_activation_bytes
from theory.traffic import partial_traffic, predictions, tp_traffic


@dataclass
class Config(step03.Config):
    """The flags so far and those of tensor parallelism."""

    tp: int = 0  # ranks that share each matrix; 0: 2 if the number of ranks is even, else 1
    sp: bool = True  # split the tokens over tp between the matrices
    tp_overlap: bool = True  # hide collectives behind weight gradients; with --sp keep s/n tokens and gather again


# --- collectives over tokens: start, then call what is returned for the result

Result = Callable[[], Tensor]


def gather_tokens(x: Tensor, group: Group) -> Result:
    """[batch, seq/n, dim] of every rank -> [batch, seq, dim]."""
    parts = x.new_empty(group.size, *x.shape)
    pending = all_gather(parts.view(-1), x.contiguous().view(-1), group)

    def result() -> Tensor:
        pending.wait()
        return parts.transpose(0, 1).flatten(1, 2)

    return result


def scatter_tokens(x: Tensor, group: Group) -> Result:
    """[batch, seq, dim] on every rank -> this rank's seq/n tokens of the sum, [batch, seq/n, dim]."""
    parts = x.unflatten(1, (group.size, -1)).transpose(0, 1).contiguous()
    own = torch.empty_like(parts[0])
    pending = reduce_scatter(own.view(-1), parts.view(-1), group)

    def result() -> Tensor:
        pending.wait()
        return own

    return result


def sum_tokens(x: Tensor, group: Group) -> Result:
    """[batch, seq, dim] on every rank, contiguous -> their sum, in place."""
    pending = all_reduce(x, group)

    def result() -> Tensor:
        pending.wait()
        return x

    return result


# --- the four conjugate operators


class CopyToRanks(torch.autograd.Function):
    """Megatron's f: forward the identity, backward an all-reduce. [batch, seq, dim] -> the same."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """Every rank goes on with the same x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Every rank has only its own part of the gradient."""
        return sum_tokens(grad.clone(memory_format=torch.contiguous_format), ctx.group)(), None


class SumFromRanks(torch.autograd.Function):
    """Megatron's g: forward an all-reduce, backward the identity. [batch, seq, dim] -> the same."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """Every rank has only its own part of the sum."""
        return sum_tokens(x.clone(memory_format=torch.contiguous_format), group)()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The sum's gradient is that of each part. (An all-reduce here would multiply it by n.)"""
        return grad, None


class GatherTokens(torch.autograd.Function):
    """f with sequence parallelism: forward an all-gather over tokens, backward a reduce-scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """[batch, seq/n, dim] -> [batch, seq, dim]."""
        ctx.group = group
        return gather_tokens(x, group)()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """[batch, seq, dim], each rank's own part -> the sum, for this rank's tokens."""
        return scatter_tokens(grad, ctx.group)(), None


class ScatterTokens(torch.autograd.Function):
    """g with sequence parallelism: forward a reduce-scatter over tokens, backward an all-gather."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """[batch, seq, dim], each rank's own part -> the sum, for this rank's tokens [batch, seq/n, dim]."""
        ctx.group = group
        return scatter_tokens(x, group)()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """[batch, seq/n, dim] -> [batch, seq, dim]."""
        return gather_tokens(grad, ctx.group)(), None


Later = Callable[[Callable[[], list[Tensor | None]]], list[None]]


class ColumnLinears(torch.autograd.Function):
    """f and the column-parallel matmuls behind it in one, so that their backward can overlap."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, sp: bool, later: Later | None, *weights: Tensor) -> tuple[Tensor, ...]:
        """x [batch, seq/n or seq, dim], weights [out/n, dim] -> one [batch, seq, out/n] for each."""
        ctx.group, ctx.sp, ctx.later = group, sp, later
        ctx.save_for_backward(x, *weights)
        full = gather_tokens(x, group)() if sp else x
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """Gather x again while dx is computed; sum dx over the ranks while the weight gradients are computed."""
        x, *weights = ctx.saved_tensors
        gathered = gather_tokens(x, ctx.group) if ctx.sp else lambda: x
        if ctx.needs_input_grad[0]:
            partial = grads[0] @ weights[0]
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                partial.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
            reduced = (scatter_tokens if ctx.sp else sum_tokens)(partial, ctx.group)
        full = gathered().flatten(0, -2)

        def weight_gradients() -> list[Tensor | None]:
            wanted = zip(grads, ctx.needs_input_grad[4:], strict=True)
            return [grad.flatten(0, -2).T @ full if want else None for grad, want in wanted]

        weight_grads = weight_gradients() if ctx.later is None else ctx.later(weight_gradients)
        return reduced() if ctx.needs_input_grad[0] else None, None, None, None, *weight_grads


# --- the layers


class ColumnProject:
    """Replaces `project`: several column-parallel linear layers of one input.

    `later`, which step 6 sets, takes weights and the function that finds their gradients, and returns a None for each.
    """

    def __init__(self, group: Group, sp: bool, overlap: bool):
        self.group, self.sp, self.overlap = group, sp, overlap
        self.later: Callable[[list[nn.Parameter], Callable], list[None]] | None = None

    @torch.compiler.disable
    def __call__(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        """x [batch, seq/n (SP) or seq, dim] -> [batch, seq, out/n] for each layer."""
        if self.overlap:
            weights = [linear.weight for linear in linears]
            later = partial(self.later, weights) if self.later else None
            return list(ColumnLinears.apply(x, self.group, self.sp, later, *weights))
        return project((GatherTokens if self.sp else CopyToRanks).apply(x, self.group), *linears)


class RowLinear(nn.Module):
    """Replaces a linear layer: its input channels are cut, so each rank finds a part of the sum."""

    def __init__(self, linear: nn.Linear, group: Group, sp: bool):
        super().__init__()
        self.weight, self.group, self.sp = linear.weight, group, sp
        self.multiply: Callable[[Tensor, Tensor], Tensor] = F.linear

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, in/n] -> [batch, seq/n (SP) or seq, out]."""
        return (ScatterTokens if self.sp else SumFromRanks).apply(self.multiply(x, self.weight), self.group)


class VocabEmbedding(nn.Module):
    """The embedding cut by rows: this rank looks up the tokens in `rows`, the others add theirs."""

    def __init__(self, weight: nn.Parameter, rows: range, group: Group, sp: bool):
        super().__init__()
        self.weight, self.rows, self.group, self.sp = weight, rows, group, sp

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq] -> [batch, seq/n (SP) or seq, dim]."""
        here = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        found = F.embedding((tokens - self.rows.start).where(here, 0), self.weight) * here[..., None]
        return (ScatterTokens if self.sp else SumFromRanks).apply(found, self.group)


class VocabCrossEntropy(torch.autograd.Function):
    """The chunked loss of common/model.py over a vocabulary that is cut: no rank ever sees another's logits."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, head: "VocabHead") -> Tensor:
        """hidden [batch, seq/n or seq, dim], weight [vocab/n, dim], targets int64 [batch, seq] -> scalar."""
        group = head.group
        full = gather_tokens(hidden, group)() if head.sp else hidden

        def combine(log_sum: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
            own = torch.stack((log_sum, picked))
            everyone = own.new_empty(group.size, *own.shape)
            all_gather(everyone.view(-1), own.view(-1), group).wait()
            return everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)

        loss, grad_hidden, grad_weight = cross_entropy_and_gradients(
            full.flatten(0, -2), weight, targets.flatten(), chunk_tokens, ctx.needs_input_grad[:2], head.rows, combine
        )
        if grad_hidden is not None:
            grad_hidden = (scatter_tokens if head.sp else sum_tokens)(grad_hidden.view_as(full), group)()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        """Scale the gradients found in forward by the incoming one, a scalar."""
        return *(None if grad is None else scaled(grad, grad_loss) for grad in ctx.saved_tensors), None, None, None


class VocabHead(nn.Module):
    """The head cut by rows of the vocabulary; `weight` beyond `rows` is padding."""

    def __init__(self, weight: nn.Parameter, rows: range, group: Group, sp: bool):
        super().__init__()
        self.weight, self.rows, self.group, self.sp = weight, rows, group, sp

    def loss(self, hidden: Tensor, targets: Tensor, chunk_tokens: int = 1024) -> Tensor:
        """The whole sum of cross entropies, the same on every rank: as `Head.loss`, hidden with seq/n tokens if SP."""
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        return VocabCrossEntropy.apply(hidden, weight, targets, chunk_tokens, self)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits for generation, gathered: [batch, seq/n or seq, dim] -> [batch, seq, vocab]; not differentiable."""
        vocab = layout_of(self.weight).splits[-1].full
        full = gather_tokens(hidden, self.group)() if self.sp else hidden
        own = F.linear(full, self.weight).transpose(1, 2)
        return gather_tokens(own, self.group)()[:, :vocab].transpose(1, 2)  # what comes after is padding


# --- cutting the model

COLUMN, HEADS, ROW = "column", "heads", "row"  # heads: by columns, too, but ranks may have to share a key/value head
STYLES = {  # weight of a block [out, in] -> how it is cut
    "q_proj": COLUMN,
    "k_proj": HEADS,
    "v_proj": HEADS,
    "o_proj": ROW,
    "gate_proj": COLUMN,
    "up_proj": COLUMN,
    "down_proj": ROW,
}


def shard_block(block: nn.Module, group: Group, sp: bool, overlap: bool, copies: int = 1):
    """Cut attention or an MLP, in place; `copies` ranks share each key/value head."""
    for name, linear in list(block.named_children()):
        style = STYLES[name]
        linear.weight = cut(linear.weight, int(style == ROW), group, copies if style == HEADS else 1)
        if style == HEADS and copies > 1:
            sum_gradients_over([linear.weight], "kv")
        if style == ROW:
            setattr(block, name, RowLinear(linear, group, sp))
    block.project = ColumnProject(group, sp, overlap)


def shard_tensors(model: Decoder, mesh: Mesh, sp: bool, overlap: bool):
    """Cut the model, on the meta device, over `mesh["tp"]`, in place. Adds the group "kv" to the mesh."""
    group = mesh["tp"]
    copies = max(1, group.size // model.config.n_kv_heads)
    mesh.add("kv", copies, stride=1)
    if group.size == 1:
        return
    for layer in model.model.layers.values():
        shard_block(layer.self_attn, group, sp, overlap, copies)
        if isinstance(layer.mlp, MLP):  # experts (step 7) are cut where they are dealt to ranks
            shard_block(layer.mlp, group, sp, overlap)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for owner, name, kind in ((model.model, "embed_tokens", VocabEmbedding), (model, "lm_head", VocabHead)):
        module = getattr(owner, name)
        if module is not None:  # a stage of a pipeline (step 6) may lack it
            weight = made.setdefault(module.weight, cut(module.weight, 0, group))  # tied matrices stay tied
            split = weight.parallel_layout.splits[-1]
            rows = range(min(split.start, split.full), min(split.stop, split.full))
            setattr(owner, name, kind(weight, rows, group, sp))
    if sp:
        sum_gradients_over([p for p in model.parameters() if p.dim() == 1], "tp")


# --- what it costs


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    world = world_size()
    check_tp(config, world)
    tp = choose_tp(config, world)
    dp = world // tp
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    with open_mesh({"dp": dp, "tp": tp}, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        group = mesh["dp"]
        share = slice(group.rank * config.global_batch_size // dp, (group.rank + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)

        with torch.device("meta"):
            model = Decoder(m)
        shard_tensors(model, mesh, config.sp, config.tp_overlap)
        sum_gradients_over(model.parameters(), "dp")
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        optimizer, sync = optimizer_and_sync(model, group, config, device, dtype, mesh)
        positions = torch.arange(m.seq_len, device=device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        if config.zero == 0:
            require_same_parameters(model, group)
        if config.generate:
            text = generate(partial(all_logits, model, positions), m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        micro_batches = config.global_batch_size // dp // config.micro_batch_size
        predicted, traffic = predictions(config, m, optimizer, sync, micro_batches)
        if tp > 1:
            predicted["activations"] = tp_activation_bytes(config, m, tp, dtype, device.type == "cpu")
            traffic |= tp_traffic(config, m, tp, dtype, micro_batches) | partial_traffic(optimizer, mesh, ["tp", "kv"])
        flops, peak = flops_per_token(m, config.recompute), world * peak_flops(device, dtype, config.peak_tflops)
        with Run(config, device, flops, peak, mesh) as run:
            n_parameters = sum(prod(layout_of(p).full_shape(p.shape)) for p in model.parameters())
            run.say(f"{config.model}: {n_parameters:,} parameters, {dtype}, {device}")
            run.say(mesh.picture())
            run.say(table(reduction_table(model, list(mesh.sizes))))
            run.say(run.memory_table(predicted))
            for step in run.steps(start):
                with run.phase("data"):
                    batch = data.batch(step, share)
                    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
                loss = torch.zeros((), device=device, dtype=torch.promote_types(dtype, torch.float32))
                sync.begin()
                run.measure(optimizer.tensors())
                for first in range(0, len(tokens), config.micro_batch_size):
                    rows = slice(first, first + config.micro_batch_size)
                    if rows.stop == len(tokens):
                        sync.last_micro_batch()
                    with run.phase("forward"):
                        loss_sum = model.lm_head.loss(sync.forward(tokens[rows], positions), targets[rows])
                        micro_loss = loss_sum / batch.n_targets
                    with run.phase("backward"):
                        (micro_loss * optimizer.loss_scale).backward()
                    loss += micro_loss.detach()
                sync.finish()
                sum_partial_gradients(optimizer, mesh, ["tp", "kv"])
                more = health(run, loss, optimizer)
                loss, stopping = sum_over(group, loss, run.stopping)
                (stopping,) = sum_over(mesh["tp"], stopping)  # a signal may reach one rank a step before another
                run.stopping = stopping > 0
                require_finite(loss, step, run)
                if observe is not None:
                    observe(step, optimizer)
                run.measure(optimizer.tensors())
                with run.phase("optimizer"):
                    norm = global_norm(optimizer, mesh, ["tp"], sliced="dp" if config.zero else "")
                    grad_norm = optimizer.step(learning_rate(step, config), norm, loss)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate(model, data, config, positions, group.rank, dp)
                        loss_sum, n_targets = sum_over(group, *part)
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), tokens.numel() * dp, **more)
                if config.check_replicas and run.due(config.check_replicas, step):
                    require_same_replicas(optimizer, mesh)
                if run.stopping or (config.save_every and run.due(config.save_every, step)):
                    save(run, step + 1, optimizer, config)
            if config.zero == 0:
                require_same_parameters(model, group)
            optimizer.ready()
            run.finish(predicted, traffic)
    return Trained(model, optimizer, run.history)


if __name__ == "__main__":
    main(train, Config)
