"""Step 4: tensor and sequence parallelism. Ranks divide matrices and, between blocks, tokens.

A *block*, attention or the MLP, is two matrix products with something between: h(x A) B. Here x
[tokens, dim] is the block's input, A and B are matrices, and h is what comes between.

                 A: these, side by side    h                                       B
    MLP          gate_proj, up_proj        silu(gate) * up, each channel alone     down_proj
    attention    q_proj, k_proj, v_proj    attention: a key/value head and its     o_proj
                                           query heads need no other head

In Megatron-LM (Shoeybi et al. 2019) each matrix of A is sharded by columns (outputs), in attention
only between heads, and B by rows (inputs). In the MLP, rank i's part A_i is some columns of
gate_proj and the same columns of up_proj, and its B_i is the rows of down_proj that multiply the
results of these columns. All ranks of a tp group train on the same sequences, so they have the same
x. Rank i can then compute its term h(x A_i) B_i without the others, and the block's output is the
sum of these terms.

nn.Linear stores its weight as [out, in], so the matrices of A are cut along dim 0, B along dim 1.

AN EXAMPLE, without h: x = [1 2], two ranks.

    A = [1 3]      B = [1 0]      x A B = [16 33]
        [2 4]          [1 3]

    rank 0: column [1 2] of A, row [1 0] of B    x A_0 = 1*1 + 2*2 = 5     5 * [1 0]  = [5 0]
    rank 1: column [3 4] of A, row [1 3] of B    x A_1 = 1*3 + 2*4 = 11    11 * [1 3] = [11 33]
                                                                           their sum is [16 33]

So forward needs one all-reduce, of the block's output y. Backward needs one too, of dx, the
gradient of x. Let dy be that of y, the same on all ranks. y is the sum of x A_i B_i, so dx is the
sum of dy B_i^T A_i^T, of which each rank computes one term. With dy = [1 1], rank 0 has dy B_0^T =
[1 1] dot [1 0] = 1, so its term is 1 * [1 2]; rank 1 has [1 1] dot [1 3] = 4, and 4 * [3 4]. Their
sum is [13 18].

F AND G. Two operators do this, to which Shoeybi et al. gave names: *f* is where x enters the block,
and sums dx in backward; *g* is where y leaves it, and sums the terms in forward. In attention, for
tiny's 8 query heads and 4 key/value heads:

             .- f -> q heads 0-3, k v heads 0-1 -> attention -> o_proj, their rows -> g -.  rank 0
    x whole -|                                                                           |-> output
             '- f -> q heads 4-7, k v heads 2-3 -> attention -> o_proj, their rows -> g -'  rank 1

         class                      forward                    backward
    f    CopyToTensorParallel       identity: all have x       all-reduce the terms of dx
    g    ReduceFromTensorParallel   all-reduce the terms       identity: dL/d(term) = dL/d(sum)

(In the code, `enter_parallel` is f, and `leave_parallel` is g, with or without SP, which is below.)

Each of the n ranks calls backward on the same loss. Still gradients are not n times too large: all
ranks have the same dy; from it each computes what flows back to x through its own A_i and B_i, and
f adds these n different terms.

SEQUENCE PARALLELISM (SP; on unless --no-sp; Korthikanti et al. 2022) saves memory. Without it, all
n ranks compute the same norms and residual sums, x + block(norm(x)), on the same s tokens. An
all-reduce is a reduce-scatter, which gives each rank the sums of s/n tokens, and then an
all-gather. With SP, g does the reduce-scatter, and the next block's f the all-gather. In between, a
rank has s/n tokens: it computes 1/n of the norms and residual sums, and saves 1/n of the norms'
inputs. Unless layers are recomputed, a micro-batch sends as many bytes as without SP. A norm's
weight is whole on all ranks, but a rank now has only its own tokens' term of the gradient:
`sum_partial_gradients` adds these terms up over tp, once in a training step.

         class                             forward                  backward
    f    GatherFromSequenceParallel        all-gather the tokens    reduce-scatter the terms of dx
    g    ReduceScatterToSequenceParallel   reduce-scatter           all-gather

In Korthikanti et al. this f has the name g, and this g the name g-bar.

MEMORY. Even without SP, most of what a layer saves is divided by n. A rank also has 1/n of each
matrix, of its gradient and of its state. Not divided are mainly the inputs and outputs of the two
norms, the first row of step 1's table (4 dim of tiny's 18 dim), for each token of the sequence:

                               without SP    with SP
    inputs of the two norms    2 dim         2 dim/n
    their outputs              2 dim         2 dim (f's outputs: matrices need all tokens)
    sum                        4 dim         2 dim + 2 dim/n

Korthikanti et al. save only 2 dim/n of f's outputs, and gather the tokens again in backward. With
--recompute full a layer saves only its input: dim, with SP dim/n.

THE VOCABULARY. Each rank has a range of the token ids: their rows of the embedding and of the head.
In the embedding, tokens with other ids give zeros, and g sums. In the loss two numbers a token from
each rank are enough (`VocabParallelCrossEntropy`).

WHERE f AND g ARE in the code. `enter_parallel` and `leave_parallel` use the first two classes
above, or with SP the other two. One f serves q, k and v, another one gate and up. Both operators
wait immediately, because the next computation needs their result.

                       f is in                         g is in
    embed_tokens       - (ids have no gradient)        a forward hook
    attention, MLP     a forward pre-hook              a forward hook
    lm_head            a forward pre-hook              - (its logits stay sharded)

WHO HAS WHAT, with SP, for b sequences of s tokens, on n ranks of tp. Whole: all ranks have the same
tensor. Shard: each has its part. Partial: each has a term of a sum. DTensor calls these Replicate,
Shard and Partial.

                                           shape            value    gradient  remark
    embed_tokens, lm_head                  [vocab/n, dim]   shard    shard
    x between blocks, and norm(x)          [b, s/n, dim]    shard    shard     --no-sp: both whole
    weights of the norms                   [dim]            whole    partial   --no-sp: both whole
    f(norm(x))                             [b, s, dim]      whole    partial   f's backward sums it
    q_proj k_proj v_proj gate_proj up_proj [out/n, in]      shard    shard     columns of A
    q k v, heads' outputs; gate, up        [b, s, out/n]    shard    shard
    o_proj down_proj                       [out, in/n]      shard    shard     rows of B
    their output, before g                 [b, s, dim]      partial  whole     g's forward sums it
    output of embed_tokens, before g       [b, s, dim]      partial  whole     g's forward sums it
    logits                                 [b, s, vocab/n]  shard    shard

If n does not divide vocab or ffn_dim, the last shards are padded with zeros. These stay zeros,
because their gradients are zero, and so is what decay takes from them. A padded channel of the MLP
is 0, so down_proj's padding gets no gradient; and it is multiplied by zeros of down_proj, so the
padding of gate and up gets none. No token has a padded id, and the loss leaves padded logits out.

THE LAW. S: the bytes of a micro-batch's x, [micro_batch_size, s, dim]. An all-reduce of such a
tensor sends 2 (n-1)/n S, an all-gather or a reduce-scatter (n-1)/n S. So an f or a g sends (n-1)/n
times

                 f forward    f backward    g forward    g backward
    SP           S            S             S            S
    --no-sp      0            2 S           2 S          0

A layer has two f and two g, the embedding one g, the head one f. In a micro-batch a rank's f and g
together send over tp (n-1)/n times

                                        each layer         embedding and head
    with SP or without                  8 S                4 S
    SP, --recompute full                8 S + 3 S = 11 S   4 S
    --no-sp --recompute full            8 S + 2 S = 10 S   4 S

Recomputation repeats a layer's forward without its last g, whose output backward does not need:
with SP two f and a g, 3 S; without SP a g, 2 S. With --compile the last g is repeated, too.

In each micro-batch the loss all-gathers two numbers a token, of 4 bytes in bf16 and fp32: a rank
sends 2 (n-1) numbers for each token. With SP, the gradients of the norms' weights are all-reduced
once in a training step. For tiny (4 layers, 9 norms) with tp 2, dp 2, in fp32:

    S               4 x 256 x 128 x 4 bytes = 524,288
    a micro-batch   1/2 x (4 x 8 + 4) x 524,288 = 9,437,184, and for the loss (2-1) x 2 numbers of 4
                    bytes for each of its 4 x 256 tokens: 8,192
    norms           2 x 1/2 x 9 x 128 x 4 = 4,608
    over tp         4 micro-batches (32 sequences / dp 2 / 4) and the norms: 37,786,112 bytes
                    in a training step

Run it:    torchrun --nproc_per_node=4 step04_tp_sp.py --tp 2
You should see step 1's losses (on a GPU, with --dtype fp32 for both):
    python -m common.compare runs/step01_single_gpu runs/step04_tp_sp

PyTorch's own way: parallelize_module(layer, device_mesh["tp"], {"self_attn.q_proj":
ColwiseParallel(), "self_attn.o_proj": RowwiseParallel(), "input_layernorm": SequenceParallel(),
...}), and `with loss_parallel():`. With SP, PrepareModuleInput says where tokens are gathered, and
output_layouts=Shard(1) where terms are reduce-scattered.

Try this: in `CopyToTensorParallel.backward`, return dx_term, None, without the sum over ranks.
tests/test_step04.py::test_f fails, and the losses leave step 1's after the first update in
    torchrun --nproc_per_node=4 step04_tp_sp.py --tp 2 --no-sp
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import step03_zero as step03
from common import UserError
from common.comm import Group, Mesh, all_gather, all_reduce, reduce_scatter
from common.data import Data
from common.device import choose_device
from common.flags import AT_LEAST_2, flag
from common.launch import main
from common.layout import Shard, global_norm, note_record, record_of
from common.model import IGNORE, Decoder, ModelConfig, wide
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import clip, learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import ZERO, make_weights_and_optimizer


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """All-reduce: the sum of every rank's x, in a new tensor of x's dtype. x need not be
    contiguous.
    """
    x = x.clone(memory_format=torch.contiguous_format)  # all_reduce works in place
    all_reduce(x, group).wait()
    return x


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All-gather: x [batch, seq/n, dim], contiguous or not -> [batch, seq, dim], rank 0's tokens
    first.
    """
    shards = x.new_empty(group.size, *x.shape)  # [n, batch, seq/n, dim]
    all_gather(shards.view(-1), x.contiguous().view(-1), group).wait()
    return shards.movedim(0, 1).flatten(1, 2)  # [batch, n, seq/n, dim] -> [batch, seq, dim]


def sum_and_shard_tokens(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter: x [batch, seq, dim], contiguous or not -> [batch, seq/n, dim]: our tokens,
    summed over ranks.
    """
    shards = x.unflatten(1, (group.size, -1))  # [batch, n, seq/n, dim]
    shards = shards.movedim(1, 0).contiguous()  # [n, batch, seq/n, dim]
    own_shard = torch.empty_like(shards[0])
    reduce_scatter(own_shard.view(-1), shards.view(-1), group).wait()
    return own_shard


class CopyToTensorParallel(torch.autograd.Function):
    """f without SP. Forward is the identity; backward sums the ranks' terms of dx."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """x [batch, seq, dim] -> x."""
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, dx_term: Tensor):
        """This rank's term of dx [batch, seq, dim] -> dx."""
        return sum_over_ranks(dx_term, ctx.group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    """g without SP. Forward sums the ranks' terms; backward is the identity."""

    @staticmethod
    def forward(ctx, term: Tensor, group: Group) -> Tensor:
        """This rank's term [batch, seq, dim] -> the sum of all terms."""
        return sum_over_ranks(term, group)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy [batch, seq, dim] -> dy."""
        return dy, None


class GatherFromSequenceParallel(torch.autograd.Function):
    """f with SP. Forward gathers the tokens; backward reduce-scatters the terms of dx."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """x [batch, seq/n, dim] -> [batch, seq, dim]."""
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx, dx_term: Tensor):
        """This rank's term of dx [batch, seq, dim] -> dx of its tokens [batch, seq/n, dim]."""
        return sum_and_shard_tokens(dx_term, ctx.group), None


class ReduceScatterToSequenceParallel(torch.autograd.Function):
    """g with SP. Forward reduce-scatters the terms; backward gathers the gradient."""

    @staticmethod
    def forward(ctx, term: Tensor, group: Group) -> Tensor:
        """This rank's term [batch, seq, dim] -> its tokens of the sum, [batch, seq/n, dim]."""
        ctx.group = group
        return sum_and_shard_tokens(term, group)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy [batch, seq/n, dim] -> [batch, seq, dim]."""
        return gather_tokens(dy, ctx.group), None


def enter_parallel(x: Tensor, group: Group, sp: bool) -> Tensor:
    """Operator f: x [batch, seq, dim], with SP [batch, seq/n, dim] -> [batch, seq, dim]."""
    if sp:
        return GatherFromSequenceParallel.apply(x, group)
    return CopyToTensorParallel.apply(x, group)


def leave_parallel(term: Tensor, group: Group, sp: bool) -> Tensor:
    """Operator g: this rank's term [batch, seq, dim] -> the block's output [batch, seq, dim], with
    SP [batch, seq/n, dim].
    """
    if sp:
        return ReduceScatterToSequenceParallel.apply(term, group)
    return ReduceFromTensorParallel.apply(term, group)


def places_in(ids: range, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors of `tokens`' shape. The first, bool, says whether the token's id is one of `ids`,
    those of this rank. The second, int64, is its index in `ids`, or 0 if it is not there.
    """
    held = (tokens >= ids.start) & (tokens < ids.stop)
    return held, (tokens - ids.start).where(held, 0)


class VocabParallelEmbedding(nn.Module):
    """Embeds the tokens with an id in `ids`, the rows of this rank. Other tokens give zeros."""

    def __init__(self, weight: nn.Parameter, ids: range):
        super().__init__()
        self.weight = weight
        self.ids = ids

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, seq] -> this rank's term of the sum [batch, seq, dim]."""
        held, row = places_in(self.ids, tokens)
        return F.embedding(row, self.weight) * held[..., None]


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The summed cross entropy, the same on all ranks, of logits that are sharded over the
    vocabulary.

    A token's loss is log sum exp(all logits) - its target's logit. The first is the log sum exp of
    the ranks' own log sum exps. So each rank sends two numbers a token: its log sum exp, and the
    target's logit if it has that, else 0. An example with three words:

        rank 0    logits log 1, log 3    log sum exp: log 4    target's logit: log 3
        rank 1    logit  log 4           log sum exp: log 4    target's logit: 0
        both                             log(4 + 4) = log 8           log 3 + 0 = log 3

    The loss is log 8 - log 3 = -log(3/8): the softmax is 1/8 3/8 4/8. The gradient of the logits is
    softmax - one-hot, for which a rank needs nothing more. Forward computes it, and saves it
    instead of the logits.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ids: range, group: Group) -> Tensor:
        """logits [batch, seq, vocab/n]: the first len(ids) columns are those of `ids`, the rest is
        padding; targets int64 [batch, seq] -> summed loss, in nats.
        """
        # A sum of exponentials needs fp32. (Autograd casts the gradient to the dtype of the input)
        logits = logits.to(wide(logits.dtype))
        # This rank's two numbers for each token
        counted = targets != IGNORE
        held, column = places_in(ids, targets)
        column = column[..., None]
        logit_at_column = logits.gather(-1, column).squeeze(-1)
        own_target_logit = logit_at_column.where(held, 0.0)
        # Without padding. If this rank has no id, it is -inf: it adds 0 to the sum
        own_log_sum = logits[..., : len(ids)].logsumexp(-1)

        # Exchange
        sent = torch.stack((own_log_sum, own_target_logit))  # [2, batch, seq]
        received = sent.new_empty(group.size, *sent.shape)  # [n, 2, batch, seq]
        all_gather(received.view(-1), sent.view(-1), group).wait()
        log_sum = received[:, 0].logsumexp(0)
        target_logit = received[:, 1].sum(0)

        # The gradient, softmax - one-hot, [batch, seq, vocab/n]: one new tensor, then in place
        gradient = (logits - log_sum[..., None]).exp_()  # this rank's columns of the softmax
        gradient[..., len(ids) :] = 0.0  # padding
        # Subtract 1 in the target's column. If that is another rank's, `column` is 0, and so is
        # what is subtracted there
        one_if_held = held[..., None].to(gradient.dtype)
        gradient.scatter_add_(-1, column, -one_if_held)
        gradient.mul_(counted[..., None])  # 0 for tokens that are not counted
        ctx.save_for_backward(gradient)
        return (log_sum - target_logit).where(counted, 0.0).sum()

    @staticmethod
    def backward(ctx, loss_gradient: Tensor):
        """Return the logits' gradient, given the scalar gradient of the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * loss_gradient, None, None, None


def shard_param(weight: nn.Parameter, dim: int, group: Group) -> nn.Parameter:
    """Return a new parameter on the meta device, with the shape of this rank's shard along `dim`,
    and a record (common/layout.py) that notes the shard's place. Its numbers come later:
    `materialize` draws the whole matrix, and keeps this part.
    """
    full = weight.shape[dim]
    length = math.ceil(full / group.size)
    shape = list(weight.shape)
    shape[dim] = length
    local = nn.Parameter(torch.empty(shape, device="meta"))
    start = group.rank * length
    shard = Shard(dim, group.name, start=start, stop=start + length, full=full)
    note_record(local, shard=shard)
    return local


def by_columns(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """Shard a matrix A: its columns are dim 0 of the weight [out, in]."""
    return shard_param(weight, 0, mesh["tp"])


def by_rows(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """Shard a matrix B: its rows are dim 1 of the weight [out, in]."""
    return shard_param(weight, 1, mesh["tp"])


def by_heads(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """By columns, between heads. Raises UserError if tp does not divide the key/value heads."""
    heads = config.n_kv_heads
    if heads % mesh["tp"].size:
        raise UserError(
            f"--tp {mesh['tp'].size} must divide the {heads} key/value heads of the model"
        )
    return by_columns(weight, mesh, config)


# Megatron's ColumnParallelLinear is here an nn.Linear whose weight [out, in] has fewer outputs,
# RowParallelLinear one whose weight has fewer inputs
PLAN: dict[str, Callable[..., nn.Parameter]] = {
    # q gets whole heads, too: their number is a multiple of that of key/value heads
    "q_proj": by_columns,
    "k_proj": by_heads,
    "v_proj": by_heads,
    "o_proj": by_rows,
    "gate_proj": by_columns,
    "up_proj": by_columns,
    "down_proj": by_rows,
}


def shard_block(block: nn.Module, mesh: Mesh, config: ModelConfig):
    """Replace the weights of attention or MLP by this rank's shards."""
    for name, linear in block.named_children():
        linear.weight = PLAN[name](linear.weight, mesh, config)


def shard_vocabulary(model: Decoder, group: Group):
    """Shard embedding and head by token ids, in place; the loss then works on sharded logits."""
    trunk = model.model
    weight = shard_param(trunk.embed_tokens.weight, 0, group)
    if model.config.tied:
        model.lm_head.weight = weight
    else:
        model.lm_head.weight = shard_param(model.lm_head.weight, 0, group)
    shard = record_of(weight).shard  # the head's is the same
    ids = range(shard.start, min(shard.stop, shard.full))  # the last ranks may have fewer, or none
    trunk.embed_tokens = VocabParallelEmbedding(weight, ids)

    def sharded_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return VocabParallelCrossEntropy.apply(logits, targets, ids, group)

    model.loss = sharded_loss


def shard_tensors(model: Decoder, mesh: Mesh, sp: bool):
    """Shard a model on the meta device, in place: fewer rows or columns in each matrix; f and g
    around each block, g behind the embedding, and f before the head.

    Raises UserError if tp does not divide the key/value heads or, with SP, the tokens of a
    sequence.
    """
    config = model.config
    group = mesh["tp"]
    if group.size == 1:
        return
    if sp and config.seq_len % group.size:
        raise UserError(f"--tp {group.size} must divide the {config.seq_len} tokens of a sequence")

    def f_before(module: nn.Module, inputs: tuple) -> tuple:
        x, *others = inputs  # attention also gets cos and sin
        return (enter_parallel(x, group, sp), *others)

    def g_after(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return leave_parallel(output, group, sp)

    shard_vocabulary(model, group)
    model.model.embed_tokens.register_forward_hook(g_after)
    model.lm_head.register_forward_pre_hook(f_before)
    for layer in model.model.layers.values():
        for block in (layer.self_attn, layer.mlp):
            shard_block(block, mesh, config)
            block.register_forward_pre_hook(f_before)
            block.register_forward_hook(g_after)
    if sp:
        for name, param in model.named_parameters():
            # A norm is whole, but sees only this rank's tokens: its gradient is partial
            if name.endswith("norm.weight"):
                note_record(param, partial_over="tp")


def sum_partial_gradients(model: Decoder, gradients: dict[str, Tensor], mesh: Mesh):
    """Sum gradients that are partial, in place, over the group that their record names: here tp is
    the only one. Call it after `sync.finish`.

    Under ZeRO, `gradients` has only this rank's part of each. All ranks of a tp group have the same
    rank in dp, and their units have equal sizes, so their parts are the same elements of the norms.
    """
    sums = []
    for name, gradient in gradients.items():
        over = record_of(model.get_parameter(name)).partial_over
        if over is not None:
            sums.append(all_reduce(gradient, mesh[over]))
    for pending in sums:
        pending.wait()


@dataclass
class Config(step03.Config):
    """Tensor and sequence parallelism."""

    tp: int = flag(1, "ranks that divide each matrix", least=1)
    sp: bool = flag(True, "between the blocks, shard the tokens over tp", needs={"tp": AT_LEAST_2})
    zero: str = flag(
        "0",
        "ZeRO over dp: 0 none (to see tp alone), 1 optimizer state, 2 also gradients, 3 all",
        ZERO,
    )


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    # new: if tp does not divide the ranks, Mesh raises UserError
    dp = join_ranks(device) // config.tp
    # new: tp comes last, so its ranks are neighbours, usually on the fastest links
    mesh = Mesh(dp=dp, tp=config.tp)
    # Along tp all have the same sequences
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)  # new: this rank's rows and columns, f and g
    set_up_layers(model, config)
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        xs = tokens[own].to(device).split(config.micro_batch_size)
        ys = targets[own].to(device).split(config.micro_batch_size)
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum: this adds to the rank's gradients
            loss = loss + micro_loss.detach()
        sync.finish()  # now each gradient is the sum over dp
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # new: the norms', over tp
        all_reduce(loss, mesh["dp"]).wait()  # along tp all ranks already have the same loss

        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
