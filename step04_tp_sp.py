"""Step 4: tensor and sequence parallelism. Each matrix is sharded; between the blocks, the tokens are sharded too.

A *block*, attention or the MLP, computes act(x A) B. In Megatron (Shoeybi et al. 2019) A is sharded by columns
(outputs), B by rows (inputs). Rank i computes z_i = act(x A_i) alone, because attention heads and MLP channels are
independent, and then z_i B_i, a term of the block's output z_0 B_0 + z_1 B_1. Such a term is called *partial*.

             .- f -> q k v, heads 0-3 -> attention -> o_proj, rows of heads 0-3 -> g -.       rank 0
    x whole -|                                                                        |-> the block's output
             '- f -> q k v, heads 4-7 -> attention -> o_proj, rows of heads 4-7 -> g -'       rank 1

                             forward                              backward
    f   enter_block          identity: all ranks have x           all-reduce: dx is a sum, each rank has a term
    g   leave_block          all-reduce: each rank has a term     identity: dL/d(term) = dL/d(sum)

f and g are hooks: g(o_proj(attend(q_proj(f(x)), ...))), likewise for the MLP. embed_tokens has a g, lm_head an f.

SEQUENCE PARALLELISM (SP; on unless --no-sp; Korthikanti et al. 2022). An all-reduce is a reduce-scatter, then an all-
gather: g does the first, the next f the second. In between, norms and residual sums see s/n of the s tokens:

    f   enter_block          all-gather the tokens                reduce-scatter: sum dx and shard its tokens
    g   leave_block          reduce-scatter                       all-gather

    on a rank                                    shape, with SP    over tp   gradient
    x between blocks: norms, residual sums       [b, s/n, dim]     shard     shard     without SP whole, [b, s, dim]
    weights of the norms                         [dim]             whole     partial   without SP whole
    f(x)                                         [b, s, dim]       whole     partial   so f's backward sums it
    q_proj k_proj v_proj gate_proj up_proj       [out/n, in]       shard     shard     ColumnParallelLinear
    q k v and heads' outputs; gate, up, product  [b, s, width/n]   shard     shard
    o_proj down_proj                             [out, in/n]       shard     shard     RowParallelLinear
    their output, before g                       [b, s, dim]       partial   whole     so g's forward sums it

Run it:    torchrun --nproc_per_node=4 step04_tp_sp.py --tp 2
You should see step 1's losses. S: the bytes of [b, s, dim]. Per micro-batch a rank sends over tp (n-1)/n x 8 S a layer
(--recompute full repeats the forward, except its last g: 11 S; 10 S without SP), (n-1)/n x 4 S for embedding and head,
and, for the loss, 2 numbers a token to each other rank (0.09 % here). Per step: norms' gradients, global norm (0.01 %).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step03_zero as step03
from common import UserError
from common.comm import Group, Mesh, all_gather, all_reduce, reduce_scatter
from common.data import Data
from common.layout import Shard, global_norm, layout_of, note_layout
from common.model import IGNORE, PRESETS, Decoder, ModelConfig, wide
from common.trainer import Run, among, choose_device, main
from step01_single_gpu import RECOMPUTE, learning_rate, scale
from step02_ddp import join_ranks
from step03_zero import STAGES, make_optimizer


def unchanged(x: Tensor, group: Group) -> Tensor:
    """The identity."""
    return x.view_as(x)  # a view: autograd treats a returned input as a special case


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """All-reduce: the sum of every rank's x, in a new tensor. x need not be contiguous, and stays unchanged."""
    x = x.clone(memory_format=torch.contiguous_format)  # all_reduce works in place
    all_reduce(x, group).wait()
    return x


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All-gather: x [batch, seq/n, dim], contiguous or not -> [batch, seq, dim]: rank 0's tokens, rank 1's, ..."""
    shards = x.new_empty(group.size, *x.shape)  # [n, batch, seq/n, dim]
    all_gather(shards.view(-1), x.contiguous().view(-1), group).wait()
    return shards.movedim(0, 1).flatten(1, 2)


def sum_and_shard_tokens(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter: x [batch, seq, dim], contiguous or not -> [batch, seq/n, dim]: our tokens, summed over ranks."""
    shards = x.unflatten(1, (group.size, -1)).movedim(1, 0).contiguous()  # [n, batch, seq/n, dim]
    ours = torch.empty_like(shards[0])
    reduce_scatter(ours.view(-1), shards.view(-1), group).wait()
    return ours


class Conjugate(torch.autograd.Function):
    """An f or a g, conjugates in Megatron: forward runs `forwards`, and backward its counterpart `backwards`."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, forwards: Callable, backwards: Callable) -> Tensor:
        """x [batch, seq or seq/n, dim] -> forwards(x)."""
        ctx.group, ctx.backwards = group, backwards
        return forwards(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of the output -> that of x."""
        return ctx.backwards(grad, ctx.group), None, None, None


def enter_block(x: Tensor, group: Group, sp: bool) -> Tensor:
    """f. Forward: identity (SP: all-gather the tokens). Backward: all-reduce (SP: reduce-scatter)."""
    if sp:
        return Conjugate.apply(x, group, gather_tokens, sum_and_shard_tokens)
    return Conjugate.apply(x, group, unchanged, sum_over_ranks)


def leave_block(x: Tensor, group: Group, sp: bool) -> Tensor:
    """g. Forward: all-reduce (SP: reduce-scatter). Backward: identity (SP: all-gather)."""
    if sp:
        return Conjugate.apply(x, group, sum_and_shard_tokens, gather_tokens)
    return Conjugate.apply(x, group, sum_over_ranks, unchanged)


class VocabParallelEmbedding(nn.Module):
    """Embeds the tokens with an id in `ids`, the rows of this rank. Other tokens give zeros; g sums over the ranks."""

    def __init__(self, weight: nn.Parameter, ids: range):
        super().__init__()
        self.weight, self.ids = weight, ids

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq] -> this rank's term of the sum [batch, seq, dim]."""
        held = (tokens >= self.ids.start) & (tokens < self.ids.stop)
        row = (tokens - self.ids.start) % len(self.weight)  # an arbitrary row for a token of another rank; masked below
        return F.embedding(row, self.weight) * held[..., None]


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The summed cross entropy, the same on all ranks, of logits that are sharded over the vocabulary.

    A token's loss is log sum exp(all logits) - its target's logit. So each rank sends the others two numbers a token:
    its own log sum exp, and the target's logit if it has that, else 0. The gradient of the logits is softmax - one-hot:
    forward computes and saves it, so backward sends nothing.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ids: range, group: Group) -> Tensor:
        """logits [batch, seq, vocab/n], of `ids` and of padding; targets int64 [batch, seq] -> summed loss, in nats."""
        logits = logits.to(wide(logits.dtype))  # for the sum of exponentials; autograd casts the gradient back
        held = (targets >= ids.start) & (targets < ids.stop)
        column = ((targets - ids.start) % logits.shape[-1])[..., None]  # any column, if another rank has it
        picked = logits.gather(-1, column).squeeze(-1).where(held, 0.0)
        ours = torch.stack((logits[..., : len(ids)].logsumexp(-1), picked))  # later columns are padding
        everyone = ours.new_empty(group.size, *ours.shape)  # [n, 2, batch, seq]
        all_gather(everyone.view(-1), ours.view(-1), group).wait()
        log_sum, picked = everyone[:, 0].logsumexp(0), everyone[:, 1].sum(0)

        gradient = (logits - log_sum[..., None]).exp_()  # our shard of the softmax
        gradient[..., len(ids) :] = 0.0
        gradient.scatter_add_(-1, column, -held[..., None].to(gradient.dtype))  # the one-hot, if we hold the target
        ctx.save_for_backward(gradient.mul_((targets != IGNORE)[..., None]))
        return (log_sum - picked).where(targets != IGNORE, 0.0).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Return the logits' gradient, given the scalar gradient that autograd passes for the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None


def shard_param(weight: nn.Parameter, dim: int, group: Group) -> nn.Parameter:
    """Return this rank's shard of a meta-device parameter along `dim`; in a group of one, the parameter itself.

    Shards are equally long, so the last ones may be padded. The record (common/layout.py) notes the shard's place.
    """
    if group.size == 1:
        return weight
    full, shape = weight.shape[dim], list(weight.shape)
    shape[dim] = length = -(-full // group.size)
    local = nn.Parameter(torch.empty(shape, device="meta"), weight.requires_grad)
    shard = Shard(dim, group.name, group.rank * length, (group.rank + 1) * length, full)
    local.parallel_layout = replace(layout_of(weight), shards=(*layout_of(weight).shards, shard))
    return local


def shard_heads(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """Shard k_proj or v_proj by whole key/value heads. Raises UserError if tp does not divide them."""
    if config.n_kv_heads % mesh["tp"].size:
        raise UserError(f"--tp {mesh['tp'].size} must divide the {config.n_kv_heads} key/value heads of the model")
    return shard_param(weight, 0, mesh["tp"])


COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
SHARD_DIMS = dict.fromkeys(COLUMNS, 0) | dict.fromkeys(ROWS, 1)  # a weight is [out, in]: dim 0 has the columns of A
HEADS = dict(k_proj=shard_heads, v_proj=shard_heads)  # q_proj needs no check: n_kv_heads divides n_heads


def shard_tensors(model: Decoder, mesh: Mesh, sp: bool):
    """Shard a model on the meta device, in place: fewer rows or columns in each matrix, f and g around each block.

    Here Megatron's ColumnParallelLinear is an nn.Linear with fewer outputs, and RowParallelLinear has fewer inputs.
    q, k and v share one f; gate and up share another. So one collective serves several matrices. Raises UserError.
    """
    config, trunk, group = model.config, model.model, mesh["tp"]
    if group.size == 1:
        return
    if sp and config.seq_len % group.size:
        raise UserError(f"--tp {group.size} must divide the {config.seq_len} tokens of a sequence; or use --no-sp")
    blocks = [block for layer in trunk.layers.values() for block in (layer.self_attn, layer.mlp)]
    for block in blocks:
        for name, linear in block.named_children():
            if name in HEADS:
                linear.weight = HEADS[name](linear.weight, mesh, config)  # attention infers its number of heads from it
            else:
                linear.weight = shard_param(linear.weight, SHARD_DIMS[name], group)

    trunk.embed_tokens.weight = shard_param(trunk.embed_tokens.weight, 0, group)
    model.lm_head.weight = trunk.embed_tokens.weight if config.tied else shard_param(model.lm_head.weight, 0, group)
    shard = layout_of(model.lm_head.weight).shards[-1]
    ids = range(shard.start, min(shard.stop, shard.full))  # the last ranks may have fewer, or none
    trunk.embed_tokens = VocabParallelEmbedding(trunk.embed_tokens.weight, ids)
    model.loss = lambda logits, targets: VocabParallelCrossEntropy.apply(logits, targets, ids, group)

    for module in (*blocks, model.lm_head):  # f and g are attributes, so that other code can replace them
        module.enter = lambda x: enter_block(x, group, sp)
        module.register_forward_pre_hook(lambda module, inputs: (module.enter(inputs[0]), *inputs[1:]))
    for module in (trunk.embed_tokens, *blocks):
        module.leave = lambda x: leave_block(x, group, sp)
        module.register_forward_hook(lambda module, _inputs, output: module.leave(output))
    for param in model.parameters():
        if sp and param.dim() == 1:  # a norm
            note_layout(param, partial_over=(*layout_of(param).partial_over, group.name))


def sum_partial_gradients(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh):
    """Sum gradients, in place, over the groups that their records name in `partial_over`: one all-reduce per group.

    Call it after `sync.finish`. Under ZeRO, gradients are shards, of the same elements on all ranks of the group.
    """
    params = dict(model.named_parameters())
    for group in mesh.groups.values():
        grads = [grad for name, grad in gradients.items() if group.name in layout_of(params[name]).partial_over]
        if grads and group.size > 1:
            flat = torch.cat([grad.flatten() for grad in grads])
            all_reduce(flat, group).wait()
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))


@dataclass
class Config(step03.Config):
    """Tensor and sequence parallelism."""

    tp: int = 1  # ranks that share each matrix
    sp: bool = True  # between the blocks, shard the tokens over tp
    zero: int = among(STAGES, 0)  # ZeRO over dp: 0 none (to see tp alone), 1 optimizer state, 2 also gradients, 3 all


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    mesh = Mesh(dp=join_ranks(device) // config.tp, tp=config.tp)  # tp is last: neighbours on the fastest links
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = PRESETS[config.model]
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)  # these rows and columns are mine
    RECOMPUTE[config.recompute](model)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this shard is mine (--zero)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine].split(config.micro_batch_size) for x in (tokens, targets))
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum,
            loss = loss + micro_loss.detach()
        sync.finish()  # also over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # of norms: with SP a rank saw only its tokens
        all_reduce(loss, mesh["dp"]).wait()  # along tp all ranks already have the same loss

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
