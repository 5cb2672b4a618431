"""Step 4: tensor and sequence parallelism. Each matrix is cut, and so are the tokens between the blocks.

n = tp ranks, b sequences of s tokens, h = dim. Megatron's pair (Shoeybi et al. 2019): the first matrix of a block
is cut by columns (its outputs), the second by rows (its inputs). What lies between needs no communication, because
heads and MLP channels do not look at one another. (These are columns and rows of W in x W. PyTorch stores weights as
[out, in], so they are dimensions 0 and 1.)

                 +- q k v, heads 0-3 -- attention -- o_proj, rows of heads 0-3 -+
    x --- f -----+                                                              +-- g --- sum = the block's output
                 +- q k v, heads 4-7 -- attention -- o_proj, rows of heads 4-7 -+

    f   forward: nothing      backward: all-reduce        (every rank finds only its part of dx)
    g   forward: all-reduce   backward: nothing           (every rank has only its part of the sum)

Between blocks every rank still holds all s tokens. SEQUENCE PARALLELISM (SP;
Korthikanti et al. 2022) splits them there: residual stream and norms hold s/n tokens a rank. f and g become the two
halves of an all-reduce, at the same price:

    x [b, s/n, h] -- all-gather --> [b, s, h] -- column, row --> partial [b, s, h] -- reduce-scatter --> [b, s/n, h]

        forward              backward                         forward               backward
    f   nothing              all-reduce             with SP   all-gather            reduce-scatter
    g   all-reduce           nothing                          reduce-scatter        all-gather

In this table each operator's backward is the other one's forward. With SP norms see only s/n tokens, so their gradient
is summed over tp: their layout record says so.

q, k, v share one f; gate and up share another: never one collective a matrix. OVERLAP (--tp-overlap, default). In their
backward the collective of dx runs while the weight gradients are computed. With SP the gathered input is not kept. It
is gathered again while dx is computed: two more all-gathers a layer, but a layer then keeps 1/n (selective: more).

VOCABULARY. Embedding and head, [vocab, h], are cut along dimension 0. The last part is padded with rows that stay zero.
A rank looks up the tokens that it has, the others give zero, and the sum is right. For the loss each rank sends two
numbers a token: the log of its sum of exponentials, and the target's logit (or 0).

KEY/VALUE HEADS. If ranks outnumber them, tp / kv_heads neighbouring ranks hold the same head and sum its gradient.

Bytes that a rank sends over tp in each micro-batch. L: layers; e: bytes an element; U = (n-1)/n b s h e.

    layers      8 L U  [+ 2 L U with SP and overlap: gathered again]     4 all-reduces a layer, or 4 gathers, 4 scatters
    embedding   2 U
    head        2 U + 2 (n-1) b s x 4 (8 in fp64)                        the two numbers a token
    --recompute 2 L U [with SP 3 L U]                                    the forward again, without its last collective

Run it:    torchrun --nproc_per_node=4 step04_tp_sp.py --tp 2
You should see step 1's losses, parameters and gradients divided by tp, and with SP the activations too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step03_zero as step03
from common.comm import Group, Mesh, Pending, all_gather, all_reduce, reduce_scatter
from common.layout import cut, global_norm, layout_of, note_gradient_sum, sum_partial_gradients
from common.model import Decoder, Head, cross_entropy_and_gradients, project, scaled
from common.trainer import Trained, main, start
from step01_single_gpu import wrap_layers
from step03_zero import make_optimizer


@dataclass
class Config(step03.Config):
    """The flags so far and those of tensor parallelism."""

    tp: int = 0  # ranks that share each matrix; 0: 2 if the ranks that other flags leave are an even number, else 1
    sp: bool = True  # split the tokens over tp between the blocks
    tp_overlap: bool = True  # hide collectives behind weight gradients; with --sp keep s/n tokens and gather again
    compress_activations: Literal["none", "bf16", "int8"] = "none"  # round what layers send each other (tp, pp); lossy


# --- collectives over tokens, [..., tokens, dim]: each returns a Pending, whose `wait` returns the result


def keep_tokens(x: Tensor, group: Group) -> Pending:
    """The identity."""
    return Pending(group, []).returning(lambda: x.view_as(x))


def sum_tokens(x: Tensor, group: Group) -> Pending:
    """All-reduce: the sum of every rank's x."""
    total = x.clone(memory_format=torch.contiguous_format)
    return all_reduce(total, group).returning(lambda: total)


def gather_tokens(x: Tensor, group: Group) -> Pending:
    """All-gather: [..., tokens/n, dim] of every rank -> [..., tokens, dim]."""
    parts = x.new_empty(group.size, *x.shape)
    pending = all_gather(parts.view(-1), x.contiguous().view(-1), group)
    return pending.returning(lambda: parts.movedim(0, -3).flatten(-3, -2))


def scatter_tokens(x: Tensor, group: Group) -> Pending:
    """Reduce-scatter: [..., tokens, dim] on every rank -> this rank's tokens of the sum, [..., tokens/n, dim]."""
    parts = x.unflatten(-2, (group.size, -1)).movedim(-3, 0).contiguous()
    part = torch.empty_like(parts[0])
    return reduce_scatter(part.view(-1), parts.view(-1), group).returning(lambda: part)


class Conjugate(torch.autograd.Function):
    """Forward applies one collective over tokens, backward its conjugate: the same function with the two swapped."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, collective: Callable, conjugate: Callable) -> Tensor:
        """x [..., tokens or tokens/n, dim] -> what `collective` makes of it."""
        ctx.arguments = group, conjugate, collective
        return collective(x, group).wait()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of the output -> that of x."""
        return Conjugate.apply(grad, *ctx.arguments), None, None, None


def enter_block(x: Tensor, group: Group, sp: bool) -> Tensor:
    """Megatron's f: every rank goes on with all tokens, and finds only a part of their gradient."""
    return Conjugate.apply(x, group, *((gather_tokens, scatter_tokens) if sp else (keep_tokens, sum_tokens)))


def leave_block(x: Tensor, group: Group, sp: bool) -> Tensor:
    """Megatron's g: every rank has a part of the sum. Its gradient is that of each part, so it is not summed again."""
    return Conjugate.apply(x, group, *((scatter_tokens, gather_tokens) if sp else (sum_tokens, keep_tokens)))


class ColumnParallelLinear(torch.autograd.Function):
    """f and the column-parallel matmuls of one input in one function, so that their backward can overlap."""

    @staticmethod
    def forward(
        ctx, x: Tensor, group: Group, gather: Callable, reduce: Callable, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """x [batch, seq/n (SP) or seq, dim], weights [out/n, dim] -> one [batch, seq, out/n] for each.

        `gather`: what f does to x; `reduce`: what its backward does to dx.
        """
        ctx.group, ctx.gather, ctx.reduce = group, gather, reduce
        ctx.save_for_backward(x, *weights)
        full = gather(x, group).wait()
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """Gather x again while dx is computed; sum dx over the ranks while the weight gradients are computed."""
        x, *weights = ctx.saved_tensors
        gathering = ctx.gather(x, ctx.group)  # while dx is computed
        if ctx.needs_input_grad[0]:
            reducing = ctx.reduce(input_gradient(grads, weights), ctx.group)  # while dW is computed
        full, wanted = gathering.wait().flatten(0, -2), ctx.needs_input_grad[4:]
        dW = [dy.flatten(0, -2).T @ full if want else None for dy, want in zip(grads, wanted, strict=True)]
        return reducing.wait() if ctx.needs_input_grad[0] else None, None, None, None, *dW


def input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """dx [..., in] of linear layers of one input: the sum of dy W over their dy [..., out] and W [out, in]."""
    dx = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        dx.flatten(0, -2).addmm_(grad.flatten(0, -2), weight)
    return dx


class ColumnParallel:
    """Replaces `project`: several linear layers of one input, each cut by columns."""

    def __init__(self, group: Group, sp: bool, overlap: bool):
        self.group, self.sp, self.overlap = group, sp, overlap
        self.gather, self.reduce = (gather_tokens, scatter_tokens) if sp else (keep_tokens, sum_tokens)

    @torch.compiler.disable
    def __call__(self, x: Tensor, *linears: nn.Linear) -> list[Tensor]:
        """x [batch, seq/n (SP) or seq, dim] -> [batch, seq, out/n] for each layer."""
        if self.overlap:
            weights = [linear.weight for linear in linears]
            return list(ColumnParallelLinear.apply(x, self.group, self.gather, self.reduce, *weights))
        return project(enter_block(x, self.group, self.sp), *linears)


class RowParallelLinear(nn.Module):
    """Replaces a linear layer: its inputs are cut, so each rank finds a part of the sum."""

    def __init__(self, weight: nn.Parameter, group: Group, sp: bool):
        super().__init__()
        self.weight, self.group, self.sp = weight, group, sp

    def add(self, part: Tensor) -> Tensor:
        """This rank's part [batch, seq, out] -> the sum over the ranks [batch, seq/n (SP) or seq, out]."""
        return leave_block(part, self.group, self.sp)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[batch, seq, in/n] -> [batch, seq/n (SP) or seq, out]."""
        return self.add(F.linear(x, self.weight))


class VocabParallelEmbedding(nn.Module):
    """The embedding cut by rows: this rank looks up the tokens in `rows`, the others add theirs."""

    def __init__(self, weight: nn.Parameter, rows: range, group: Group, sp: bool):
        super().__init__()
        self.weight, self.rows, self.group, self.sp, self.look_up = weight, rows, group, sp, F.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq] -> [batch, seq/n (SP) or seq, dim]."""
        here = (tokens >= self.rows.start) & (tokens < self.rows.stop)
        found = self.look_up((tokens - self.rows.start).where(here, 0), self.weight) * here[..., None]
        return leave_block(found, self.group, self.sp)


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The chunked loss of common/model.py over a vocabulary that is cut: no logits travel but the target's."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, rows: range, group: Group, sp: bool
    ) -> Tensor:
        """hidden [batch, seq/n or seq, dim], weight [vocab/n, dim], targets int64 [batch, seq] -> scalar."""
        full = gather_tokens(hidden, group).wait() if sp else hidden

        def combine(log_sum: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
            ours = torch.stack((log_sum, picked))
            everyone = ours.new_empty(group.size, *ours.shape)
            all_gather(everyone.view(-1), ours.view(-1), group).wait()
            return everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)

        loss, grad_hidden, grad_weight = cross_entropy_and_gradients(
            full.flatten(0, -2), weight, targets.flatten(), chunk_tokens, ctx.needs_input_grad[:2], rows, combine
        )
        if grad_hidden is not None:
            grad_hidden = (scatter_tokens if sp else sum_tokens)(grad_hidden.view_as(full), group).wait()
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        """Scale the gradients found in forward by the incoming one, a scalar."""
        return *(None if grad is None else scaled(grad, grad_loss) for grad in ctx.saved_tensors), *[None] * 5


class VocabParallelHead(nn.Module):
    """The head, its outputs cut; `weight` from row len(rows) on is padding."""

    def __init__(self, weight: nn.Parameter, rows: range, group: Group, sp: bool):
        super().__init__()
        self.weight, self.rows, self.group, self.sp = weight, rows, group, sp
        self.cross_entropy = VocabParallelCrossEntropy

    def loss(self, hidden: Tensor, targets: Tensor, chunk_tokens: int = 4096) -> Tensor:
        """The whole sum of cross entropies, the same on every rank: as `Head.loss`, hidden with seq/n tokens if SP."""
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        return self.cross_entropy.apply(hidden, weight, targets, chunk_tokens, self.rows, self.group, self.sp)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits for generation, gathered: [batch, seq/n or seq, dim] -> [batch, seq, vocab]; not differentiable."""
        vocab = layout_of(self.weight).splits[-1].full
        full = gather_tokens(hidden, self.group).wait() if self.sp else hidden
        logits = gather_tokens(F.linear(full, self.weight).transpose(1, 2), self.group).wait()
        return logits[:, :vocab].transpose(1, 2)  # what comes after is padding


COLUMN, HEADS, ROW = "column", "heads", "row"
STYLES = dict(q_proj=COLUMN, k_proj=HEADS, v_proj=HEADS, o_proj=ROW, gate_proj=COLUMN, up_proj=COLUMN, down_proj=ROW)


def shard_block(block: nn.Module, group: Group, sp: bool, overlap: bool, copies: int):
    """Cut a block's own linear layers (attention, MLP), in place; `copies` ranks share each key/value head."""
    linears = {name: child for name, child in block.named_children() if isinstance(child, nn.Linear)}
    for name, linear in linears.items():
        style = STYLES[name]
        linear.weight = cut(linear.weight, int(style == ROW), group, copies if style == HEADS else 1)
        if style == HEADS and copies > 1:
            note_gradient_sum([linear.weight], "kv")
        if style == ROW:
            setattr(block, name, RowParallelLinear(linear.weight, group, sp))
    if linears:
        block.project = ColumnParallel(group, sp, overlap)


def shard_tensors(model: Decoder, mesh: Mesh, sp: bool, overlap: bool):
    """Cut the model, on the meta device, in place, over `mesh["tp"]` if that has several ranks; add "kv" to `mesh`."""
    group = mesh["tp"]
    copies = max(1, group.size // model.config.n_kv_heads)
    mesh.add("kv", copies, stride=1)
    if group.size == 1:
        return
    for layer in model.model.layers.values():
        for block in list(layer.modules()):
            shard_block(block, mesh.groups.get("narrow tp", group), sp, overlap, copies)  # --compress-activations
    kinds = {nn.Embedding: VocabParallelEmbedding, Head: VocabParallelHead}
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for owner in (model.model, model):
        for name, module in list(owner.named_children()):
            if type(module) in kinds:
                weight = parts.setdefault(module.weight, cut(module.weight, 0, group))  # tied matrices stay tied
                split = layout_of(weight).splits[-1]
                rows = range(min(split.start, split.full), min(split.stop, split.full))
                setattr(owner, name, kinds[type(module)](weight, rows, group, sp))
    if sp:
        note_gradient_sum([p for p in model.parameters() if p.dim() == 1], "tp")


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh = run.mesh
        with torch.device("meta"):
            model = Decoder(run.shape)
        shard_tensors(model, mesh, config.sp, config.tp_overlap)  # these rows and columns are mine
        note_gradient_sum(model.parameters(), "dp")
        wrap_layers(model, config)
        optimizer, sync = make_optimizer(model, config, run)  # step 3: this slice of the update is mine
        share = mesh["dp"].share(config.global_batch_size)  # step 2: these sequences are mine

        for step in run.steps(model, optimizer, sync):
            batch, loss = run.batch(step, share), 0.0
            micro_batches = batch.micro_batches(config.micro_batch_size)
            sync.begin()
            for i, (tokens, targets) in enumerate(micro_batches):
                if i + 1 == len(micro_batches):
                    sync.last_micro_batch()
                with run.phase("forward"):
                    micro_loss = model.lm_head.loss(model(tokens), targets) / batch.n_targets
                with run.phase("backward"):
                    (micro_loss * optimizer.loss_scale).backward()
                loss = loss + micro_loss.detach()
            sync.finish()
            sum_partial_gradients(optimizer, mesh, ["tp", "kv"])
            loss = run.global_loss(loss)
            with run.phase("optimizer"):
                norm = global_norm(optimizer, mesh, ["tp"], sliced=config.zero > 0)
                if run.accepts(loss, norm):
                    optimizer.step(run.learning_rate(step), norm)  # clips, and updates
                optimizer.zero_grad()
            run.end_step(loss, norm)
    return run.trained()


if __name__ == "__main__":
    main(train, Config)
