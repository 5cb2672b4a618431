"""Step 5: context parallelism. Ranks divide each sequence; only attention needs the tokens of other
ranks.

Each of n ranks holds s/n of a sequence's s tokens, and so 1/n of the activations: sequences can be
n times as long. Norms, matrices and the loss act on each token alone. But in attention, a query
attends to its own key and all earlier ones, which may be on other ranks.

Queries stay on their rank. Keys and values travel round a ring, always to the right: to the next
higher rank, and from the last to rank 0 (Liu et al. 2023, "Ring Attention"). There are n *hops*. In
hop h, rank r holds the k and v of rank r - h (mod n), and computes with those that its queries see.
Meanwhile, except in the last hop, it receives the next ones.

IN ORDER (--cp-mode ordered). Each of n = 4 ranks has a quarter of the tokens, rank 0 the first. A
cell below is the queries of one rank with the keys of one. `#`: all its pairs are needed, which we
count as 8 units of work. `+`: a query needs only its own key and earlier ones, about half of the
pairs, 4 units. `.`: none.

    keys of rank ->       0 1 2 3
    queries of rank 0     + . . .      4 units
    queries of rank 1     # + . .     12
    queries of rank 2     # # + .     20
    queries of rank 3     # # # +     28: all ranks wait for this one

ZIGZAG (--cp-mode zigzag, the default). To balance the work, the sequence is cut into 2n chunks, and
rank r has chunks r and 2n-1-r, an early one and a late one. A chunk is half as long as a shard
above, so a cell has a quarter of the pairs: + is 1 unit, and # is 2.

    keys of chunk ->          0 1 2 3 4 5 6 7
    rank 0    its chunk 0     + . . . . . . .
              its chunk 7     # # # # # # # +
    rank 1    its chunk 1     # + . . . . . .
              its chunk 6     # # # # # # + .
    rank 2    its chunk 2     # # + . . . . .
              its chunk 5     # # # # # + . .
    rank 3    its chunk 3     # # # + . . . .
              its chunk 4     # # # # + . . .

Each rank has 16 units, so none waits for 28. In each hop, too, all have the same work, 4 units.
Rank 1, for example, works on these pairs (chunk of queries, chunk of keys):

    hop 0    its own keys                 (1,1) +    (6,1) #    (6,6) +
    hop 1    rank 0's, chunks 0 and 7     (1,0) #    (6,0) #
    hop 2    rank 3's, chunks 3 and 4     (6,3) #    (6,4) #
    hop 3    rank 2's, chunks 2 and 5     (6,2) #    (6,5) #

In hop 0 our code computes all pairs of a rank's own tokens, and masks half of them: of each + its
half, and in zigzag all of a cell such as rank 1's (1,6), which no query needs. So hop 0 costs 8
units: in order rank 3 takes 4 x 8 = 32, in zigzag each rank 8 + 3 x 4 = 20.

THE SOFTMAX of a query needs all keys that the query sees, but in one hop a rank uses only some of
them, a *part*. For each part it computes the output o of attention to these keys alone, and their
lse = log sum exp(scores). Then it merges two parts, without approximation (online softmax, Milakov
and Gimelshein 2018; `merge` has an example):

    o = (e^lse1 o1 + e^lse2 o2) / (e^lse1 + e^lse2)        lse = log(e^lse1 + e^lse2)

`merge` computes these by sigmoid and logaddexp, which do not overflow; e^lse may.

BACKWARD. Of all k and v, forward keeps only the rank's own, to save memory. So k and v go round the
ring a second time, and dkv, the sum so far of their gradient, travels behind them:

    kv     n-1 messages    sent on when a hop begins; it arrives by the hop's end
    dkv    n messages      sent on at the end of a hop, when this rank's term is in it; it travels
                           during the next hop. The last message brings it home

What 3 ranks have at the end of each hop (kv2 is the k and v of rank 2, and dkv2 {2 0} the sum of
the terms of ranks 2 and 0):

                 hop 0               hop 1                 hop 2                    last message
    rank 0       kv0   dkv0 {0}      kv2   dkv2 {2 0}      kv1   dkv1 {1 2 0}       dkv0 {0 1 2}
    rank 1       kv1   dkv1 {1}      kv0   dkv0 {0 1}      kv2   dkv2 {2 0 1}       dkv1 {1 2 0}
    rank 2       kv2   dkv2 {2}      kv1   dkv1 {1 2}      kv0   dkv0 {0 1 2}       dkv2 {2 0 1}

POSITIONS. RoPE must rotate a token by its place in the whole sequence, not in its rank's shard. So
`train` passes positions to the model, and k is rotated before it travels.

GRADIENTS. Ranks of cp have the same weights and different tokens. So gradients and the loss are
summed over dp x cp, the group "data".

TARGETS are shifted before the sequence is sharded (common/data.py). Suppose that ranks shifted
their own tokens, with 16 tokens on 2 ranks, in zigzag. Rank 0 has chunks 0 and 3, tokens 0 to 3 and
12 to 15. So token 3 would get token 12 as its target instead of token 4, without any error. The
ranks' last tokens, 15 and 11, would have none.

THE LAW. For each layer and micro-batch, let B be the bytes of k and v on one rank, and G those of
their gradients. These travel in fp32 or wider, because each rank adds to them, so in bf16 G is 2 B,
else B. A rank sends over cp

    forward     (n-1) B             once more with --recompute full
    backward    (n-1) B + n G

For tiny in fp32 on 4 ranks:

    B = G                      2 (k and v) x 4 (sequences) x 64 (tokens) x 64 (channels) x 4 bytes
                               = 131,072
    forward and backward       3 B + 3 B + 4 G = 1,310,720 bytes

Can computation hide these messages? A forward hop sends B during two matrix products, a backward
hop at most B + G during five. A hop's bytes grow like s/n, the tokens on a rank, and its FLOPs like
their square. So in zigzag, with enough tokens, all messages can hide but the last dkv, which no
computation follows.

`part_attention` stores all scores of a part. With 8,192 tokens on a rank and 32 heads, one sequence
in fp32 takes 32 x 8,192^2 x 4 = 8.6 GB for the scores, and as much for each tensor that is computed
from them. Long sequences need a fused kernel (README, "Around the course").

Run it:    torchrun --nproc_per_node=4 step05_cp_ring.py --cp 4
You should see step 1's losses (on a GPU, with --dtype fp32 for both):
    python -m common.compare runs/step01_single_gpu runs/step05_cp_ring
In metrics.jsonl, `sent` over cp is the law's bytes x 4 layers x 8 micro-batches (32 sequences / 4):
in fp32 41,943,040.

PyTorch's own way, on GPUs: context_parallel of torch.distributed.tensor.experimental. With
positions = arange(s), around forward and backward:

    with context_parallel(
        device_mesh["cp"], buffers=[x, y, positions], buffer_seq_dims=[1, 1, 0]
    ):

It shards the buffers, in zigzag if 2n divides s, and replaces scaled_dot_product_attention. By
default it gathers k and v, as Llama 3 does (Dubey et al. 2024, 3.3.2).
set_rotate_method("alltoall"), of torch.distributed.tensor.experimental._attention, sends them round
a ring. Gradients must still be summed over dp x cp: give DDP or FSDP that mesh.

Try this: in `merge`, replace what is computed for `share` by share = 0.5. Then python -m pytest
tests/test_step05.py -k merge fails, and the losses leave step 1's from the first step on.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import step04_tp_sp as step04
from common import UserError
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.device import choose_device
from common.flags import AT_LEAST_2, flag
from common.launch import main
from common.layout import global_norm, note_record
from common.model import IGNORE, Decoder, wide
from common.run import Run
from common.shapes import model_shape
from step01_single_gpu import clip, learning_rate, set_up_layers
from step02_ddp import join_ranks
from step03_zero import make_weights_and_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients


def pass_on(x: Tensor, group: Group) -> tuple[Tensor, Pending]:
    """Send x to the right neighbour in the ring. Returns memory for the left one's x, and the
    message that fills it.
    """
    left = (group.rank - 1) % group.size
    right = (group.rank + 1) % group.size
    received = torch.empty_like(x)
    return received, exchange([(x, right)], [(received, left)], group)


def travel(kv: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Send k and v round the ring: yield (source, its k and v) n times, our own first. *Source* is
    the rank whose k and v we hold in this hop. kv: [2, batch, kv_heads, s/n, d].

    What follows a `yield` runs when the caller asks for the next pair. So the messages travel while
    the caller computes.
    """
    source = group.rank
    for _ in range(group.size - 1):
        next_kv, arriving = pass_on(kv, group)
        yield source, kv
        arriving.wait()
        kv = next_kv
        source = (source - 1) % group.size
    yield source, kv  # the last ones are not sent


class Visible(NamedTuple):
    """Which of our queries attend to which of the source's keys. Visible(slice(4, 8), slice(0, 8),
    False): our tokens 4 to 7 attend to all of the source's tokens 0 to 7, as each rank counts its
    own.
    """

    queries: slice  # of our tokens
    keys: slice  # of the source's tokens
    causal: bool  # query i attends only to keys 0 to i, not to all


def ordered_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """Positions of a rank's tokens, int64 [s/n]: shard r of n. UserError unless n divides s."""
    if seq_len % n:
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {n}")
    return torch.arange(seq_len).chunk(n)[rank]


def ordered_visible(rank: int, source: int, length: int) -> Visible | None:
    """Which queries of `rank` attend to which keys of `source`: to all of an earlier rank, and to
    the causal half of their own. Returns None for a later rank. Both ranks have `length` = s/n
    tokens.
    """
    whole = slice(0, length)
    if source > rank:
        return None
    return Visible(whole, whole, causal=source == rank)


def zigzag_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """Positions of a rank's tokens, int64 [s/n]: chunks r and 2n-1-r of 2n. Raises UserError unless
    2n divides s.
    """
    if seq_len % (2 * n):
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {2 * n}")
    chunks = torch.arange(seq_len).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


def zigzag_visible(rank: int, source: int, length: int) -> Visible:
    """As `ordered_visible`, for two chunks on each rank: in each hop all have equal work."""
    whole = slice(0, length)
    first = slice(0, length // 2)
    second = slice(length // 2, length)
    # Our own tokens are in order of position, so one causal mask is right for both chunks
    if source == rank:
        return Visible(whole, whole, causal=True)
    if source < rank:  # its first chunk precedes both of ours; its second one follows both
        return Visible(whole, first, causal=False)
    # Both of its chunks follow our first one, and precede our second one
    return Visible(second, whole, causal=False)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each kv head of x [batch, kv_heads, seq, d] for its query heads -> [batch, heads, seq,
    d]. This comes after the messages, which are shorter with fewer heads.
    """
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def scaled_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d) [batch, heads, queries, keys]. If `causal`, query i's scores with keys after
    i are -inf.
    """
    scores = (q @ k.mT) / math.sqrt(q.shape[-1])
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def part_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to this part of the keys alone, and lse = log sum exp(scores).

    q [batch, heads, queries, d]; k, v [batch, kv_heads, keys, d] -> o [as q], lse [batch, heads,
    queries], both in wide(q.dtype).
    """
    heads = q.shape[1]
    q = q.to(wide(q.dtype))
    k = repeat_heads(k.to(q.dtype), heads)
    v = repeat_heads(v.to(q.dtype), heads)
    scores = scaled_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    return probs @ v, lse


def merge(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor):
    """Merge another part of the keys into o [batch, heads, queries, d] and lse [batch, heads,
    queries], in place.

    A key weighs exp(score), and a part exp(lse), the sum over its keys. A part's o is the weighted
    average of its values. For example, two keys weigh 3 and 1, and have the values 10 and 2.
    Together they give (3 * 10 + 1 * 2) / 4 = 8. In two parts, o = 10, lse = log 3, and part_o = 2,
    part_lse = log 1. Then part_o has the share e^part_lse / (e^lse + e^part_lse) = 1 / (3 + 1) =
    0.25, which is also sigmoid(part_lse - lse). So o becomes 10 + 0.25 (2 - 10) = 8, and lse log 4.
    """
    share = torch.sigmoid(part_lse - lse)[..., None]  # 1 in hop 0, where lse is -inf
    o.lerp_(part_o, share)  # o + share (part_o - o)
    lse.copy_(torch.logaddexp(lse, part_lse))


def part_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of one part of the keys: its terms of dq, dk and dv, in wide(q.dtype). Shapes as in
    `part_attention`; o and lse are those of *all* keys.

    In FlashAttention's names (Dao et al. 2022, appendix B), forward is S = q k^T / sqrt(d), P =
    softmax(S), o = P v, and do, dP, ... are the gradients of o, P, ... For the keys of this part,

        P  = exp(S - lse)    this part's columns of the whole P, because lse is that of all keys
        dv = P^T do          dP = do v^T
        dS = P * (dP - D)    by elements; D, for each query, is the sum of P * dP over *all* keys
        dq = dS k / sqrt(d)  dk = dS^T q / sqrt(d)

    D needs no other part's keys, because o is that of all keys: sum_j P_j dP_j = sum_j P_j dot(do,
    v_j) = dot(do, o). dq is a sum over keys, so the terms of all parts add up.
    """
    heads = q.shape[1]
    kv_heads = k.shape[1]
    sqrt_d = math.sqrt(q.shape[-1])
    q = q.to(wide(q.dtype))
    do = do.to(q.dtype)
    k = repeat_heads(k.to(q.dtype), heads)
    v = repeat_heads(v.to(q.dtype), heads)
    probs = (scaled_scores(q, k, causal) - lse[..., None]).exp()  # P
    dprobs = do @ v.mT  # dP
    row_sums = (do * o).sum(-1, keepdim=True)  # D
    dscores = probs * (dprobs - row_sums)  # dS
    dq = (dscores @ k) / sqrt_d
    dk = (dscores.mT @ q) / sqrt_d
    dv = probs.mT @ do
    # A kv head serves several query heads: its gradient is the sum over them.
    dk = dk.unflatten(1, (kv_heads, -1)).sum(2)
    dv = dv.unflatten(1, (kv_heads, -1)).sum(2)
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    """Causal ring attention: queries stay on their rank, keys and values travel."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable[..., Visible | None]
    ) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> o, like q, accumulated in
        wide(q.dtype).
        """
        own_kv = torch.stack((k, v))
        # No keys yet: o is 0, and lse is log 0, -inf
        o = torch.zeros_like(q, dtype=wide(q.dtype))
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, source_kv in travel(own_kv, group):
            seen = visible(group.rank, source, q.shape[2])
            if seen is None:
                continue
            queries, keys, causal = seen
            source_k, source_v = source_kv[:, :, :, keys]
            part_o, part_lse = part_attention(q[:, :, queries], source_k, source_v, causal)
            # views: this changes o and lse
            merge(o[:, :, queries], lse[:, :, queries], part_o, part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own_kv, o, lse)
        ctx.group = group
        ctx.visible = visible
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """k and v travel as in forward, and dkv, in wide(q.dtype), behind them."""
        q, own_kv, o, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        dkv = torch.zeros_like(own_kv, dtype=wide(q.dtype))  # no terms yet
        arriving = Pending()  # the message that fills dkv; none in hop 0
        for source, source_kv in travel(own_kv, ctx.group):
            seen = ctx.visible(ctx.group.rank, source, q.shape[2])
            if seen is not None:
                queries, keys, causal = seen
                source_k, source_v = source_kv[:, :, :, keys]
                part_dq, part_dk, part_dv = part_gradients(
                    do[:, :, queries],
                    q[:, :, queries],
                    source_k,
                    source_v,
                    o[:, :, queries],  # over all keys
                    lse[:, :, queries],
                    causal,
                )
                dq[:, :, queries] += part_dq
            # From the left rank: the source's dkv, with the terms of earlier ranks. It travelled
            # during `part_gradients`
            arriving.wait()
            if seen is not None:
                dk, dv = dkv  # views
                dk[:, :, keys] += part_dk
                dv[:, :, keys] += part_dv
            dkv, arriving = pass_on(dkv, ctx.group)
        arriving.wait()  # our own dkv is back, complete
        dk, dv = dkv.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable[..., Visible | None]
) -> Tensor:
    """Ring attention in place of `attend`: q [batch, s/n, heads, head_dim]; k, v [batch, s/n,
    kv_heads, head_dim] -> like q. `visible`: `zigzag_visible` or `ordered_visible`.
    """
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    o = RingAttention.apply(q, k, v, group, visible)
    return o.transpose(1, 2)


class ContextMode(NamedTuple):
    """How a sequence is sharded, and how its shards attend to one another."""

    positions: Callable[[int, int, int], Tensor]  # (s, rank, n) -> int64 [s/n]: a rank's positions
    attention: Callable[..., Tensor]  # (q, k, v, group) -> like q: replaces `attend`


CONTEXT: dict[str, ContextMode] = {
    "zigzag": ContextMode(zigzag_positions, partial(ring_attention, visible=zigzag_visible)),
    "ordered": ContextMode(ordered_positions, partial(ring_attention, visible=ordered_visible)),
}


@dataclass
class Config(step04.Config):
    """Context parallelism."""

    cp: int = flag(1, "ranks that divide each sequence", least=1)
    cp_mode: str = flag(
        "zigzag",
        "how sequences are sharded, and how shards attend to one another",
        CONTEXT,
        needs={"cp": AT_LEAST_2},
    )


def shard_context(model: Decoder, mesh: Mesh, config: Config) -> Tensor:
    """Let the n ranks of `mesh["cp"]` divide each sequence. Returns the positions of this rank's
    tokens, int64 [s/n], on the CPU.

    Gradients are now summed, and ZeRO shards, over dp x cp: `mesh["data"]`. If n > 1, each layer's
    `attend` becomes ring attention. Raises UserError if n ranks cannot divide a sequence, or the
    ranks of tp (with SP) a rank's tokens.
    """
    group = mesh["cp"]
    # queue="gradients": so k and v never wait behind a large bucket (common/comm.py)
    mesh.add_groups_along("data", "dp", "cp", queue="gradients")
    for param in model.parameters():
        note_record(param, data_group="data")
    if group.size == 1:
        return torch.arange(model.config.seq_len)
    mode = CONTEXT[config.cp_mode]
    positions = mode.positions(model.config.seq_len, group.rank, group.size)
    tp = mesh["tp"].size
    if config.sp and len(positions) % tp:
        raise UserError(
            f"--tp {tp} must divide the {len(positions)} tokens that --cp leaves to a rank"
        )
    for layer in model.model.layers.values():
        # It needs only q, k, v now: CONTEXT has set `visible`
        layer.self_attn.attend = partial(mode.attention, group=group)
    return positions


def own_tokens(
    tokens: Tensor, targets: Tensor, own: slice, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Shard the global batch: keep this rank's sequences, and of these the tokens at its positions.

    tokens, targets int64 [global batch, s] -> int64 [own sequences, s/n], both, on the device of
    `positions`.
    """
    tokens = tokens[own].to(positions.device)
    targets = targets[own].to(positions.device)
    return tokens[:, positions], targets[:, positions]


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    dp = join_ranks(device) // (config.cp * config.tp)
    mesh = Mesh(dp=dp, cp=config.cp, tp=config.tp)  # new: cp
    own = mesh["dp"].share(config.global_batch_size, "--global-batch-size")
    shape = model_shape(config.model)
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)
    positions = shard_context(model, mesh, config).to(device)  # new
    set_up_layers(model, config)
    optimizer, sync = make_weights_and_optimizer(model, config, mesh, device, dtype)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh):
        tokens, targets = data.batch(step)
        n_targets = (targets != IGNORE).sum().clamp(min=1).to(device)  # of all ranks
        own_xs, own_ys = own_tokens(tokens, targets, own, positions)  # new
        xs = own_xs.split(config.micro_batch_size)
        ys = own_ys.split(config.micro_batch_size)
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y, positions) / n_targets  # new: positions. Scale once ...
            micro_loss.backward()  # ... then only sum: this adds to the rank's gradients
            loss = loss + micro_loss.detach()
        sync.finish()  # now each gradient is the sum over dp and cp
        sum_partial_gradients(model, optimizer.gradients(), mesh)
        all_reduce(loss, mesh["data"]).wait()  # new: dp x cp

        norm = global_norm(model, optimizer.gradients(), mesh, zero=config.zero != "0")
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip(optimizer.gradients(), norm, config.grad_clip)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
