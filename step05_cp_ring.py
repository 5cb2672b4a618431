"""Step 5: context parallelism. A sequence too long for one device is sharded; only attention looks at other tokens.

n ranks share a sequence of s tokens, s/n each. Norms, matrices and the loss look at one token at a time. In attention a
query looks at its own key and all before it. So queries stay, and keys and values travel round a ring: a rank computes
with those that it holds while the next ones arrive (Liu et al. 2023, "Ring Attention"). In backward they travel again,
and with them the sum of their gradients. k and v are sent on before a rank computes: n-1 messages. The sum is sent when
the rank has added its term: n messages, of which the last brings it home. With 3 ranks, kv1 is k and v of rank 1:

    backward     hop 0               hop 1                 hop 2                    last message
    rank 0       kv0   dkv0 = 0      kv2   dkv2 = 2+0      kv1   dkv1 = 1+2+0       dkv0 = 0+1+2
    rank 1       kv1   dkv1 = 1      kv0   dkv0 = 0+1      kv2   dkv2 = 2+0+1       dkv1 = 1+2+0
    rank 2       kv2   dkv2 = 2      kv1   dkv1 = 1+2      kv0   dkv0 = 0+1+2       dkv2 = 2+0+1
    (in forward, kv as here)               dkv2 = 2+0: the sum of what ranks 2 and 0 have found for kv2

A softmax needs all keys, and only some are here. ONLINE SOFTMAX (Milakov and Gimelshein 2018) puts the outputs of
several parts of the keys together: `merge` does it, and its docstring has an example.

ZIGZAG. Early queries see few keys, late ones many. So rank r gets chunks r and 2n-1-r of 2n: the same work for all.

    keys of chunk ->   0 1 2 3 4 5 6 7          0 1 2 3 4 5 6 7      # every pair of a query and a key
    rank 0: queries 0  + . . . . . . .   and 7  # # # # # # # +      + the causal half; . none: the keys are later
    rank 1: queries 1  # + . . . . . .   and 6  # # # # # # + .      hop 0: our own chunks, + and # +
    rank 2: queries 2  # # + . . . . .   and 5  # # # # # + . .      hop h: those of rank r-h (mod n), always # #
    rank 3: queries 3  # # # + . . . .   and 4  # # # # + . . .      so in each hop all ranks have the same work

k and v of s/n tokens have B bytes together, and their gradients, in fp32, G. In a layer and micro-batch a rank sends
(n-1) B forward and (n-1) B + n G backward (and (n-1) B again with --recompute full). It grows with s, work with s^2/n.

Targets were shifted before the sequence was sharded (common/data.py). Shifted afterwards, the last token of a rank's
first chunk would get the first one of its second chunk as target, on every rank but the last: nothing would fail.

Run it:    torchrun --nproc_per_node=4 step05_cp_ring.py --cp 4
You should see step 1's losses, and `sent` over cp: the formula x layers x micro-batches (+ 12 bytes of the norm).
"""

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
from common.layout import global_norm, note_layout
from common.model import IGNORE, PRESETS, Decoder, wide
from common.trainer import Run, among, choose_device, main
from step01_single_gpu import RECOMPUTE, learning_rate, scale
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients


def travel(kv: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """The ring. Yield (rank, its k and v) n times, first our own; kv [2, batch, kv_heads, s/n, d] is k and v.

    While the caller computes with what it was given, that goes on to the right neighbour, and the next comes in.
    """
    n, r = group.size, group.rank
    for hop in range(n - 1):
        next_kv = torch.empty_like(kv)
        passing = exchange([(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], group)
        yield (r - hop) % n, kv
        passing.wait()
        kv = next_kv
    yield (r + 1) % n, kv


def zigzag_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """int64 [s/n]: the tokens of a rank, chunks r and 2n-1-r of 2n. Raises UserError unless 2n divides s."""
    if seq_len % (2 * n):
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {2 * n}")
    chunks = torch.arange(seq_len).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def zigzag_visible(rank: int, source: int, length: int) -> list[tuple[slice, slice, bool]]:
    """What `rank` computes with k and v of `source`: (queries, keys, causal), slices of the s/n = `length` tokens."""
    whole, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:  # the diagonal: tokens are in order of position, so causal is right for both chunks together
        return [(whole, whole, True)]
    if source < rank:  # the past: its first chunk is before both of ours, its second one after both
        return [(whole, first, False)]
    return [(second, whole, False)]  # the future: both of its chunks are after our first one, and before our second


def same_heads(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """All in fp32 or wider, and with as many heads as q: a kv head is repeated for the query heads that it serves."""
    return [x.to(wide(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, *tensors)]


def scaled_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d) [batch, heads, queries, keys]. `causal`, with as many keys as queries: -inf for later keys."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores + torch.full_like(scores[0, 0], -torch.inf).triu(1) if causal else scores


def part_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention as if these were all keys, and lse = log sum exp(scores): how much these keys weigh, for `merge`.

    q [batch, heads, queries, d]; k, v [batch, kv_heads, keys, d] -> o like q, lse [batch, heads, queries]; in fp32.
    """
    q, k, v = same_heads(q, k, v)
    scores = scaled_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def merge(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor):  # a fused kernel's part_o may have 16 bits
    """Add another part of the keys to a softmax, in place: o [batch, heads, queries, d], lse [batch, heads, queries].

    An output is an average of values, weighted by exp(score). Let two keys weigh 3 and 1, and have the values 10 and 2:
    together they give (3 * 10 + 1 * 2) / 4 = 8. In two parts: o = 10, lse = log 3; part_o = 2, part_lse = log 1. Then
    part_o has the share 1 / (3+1) = sigmoid(log 1 - log 3) = 0.25. So o becomes 10 + 0.25 (2 - 10) = 8, lse log 4.
    """
    o.lerp_(part_o.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])  # o + share (part_o - o)
    lse.copy_(torch.logaddexp(lse, part_lse))  # log(e^lse + e^part_lse)


def part_gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool) -> tuple:
    """What this part of the keys adds to dq, and its dk and dv; from `o`, `lse` of attention to *all* keys; in fp32.

    With that lse, P is these columns of the softmax over all keys: so what all parts find is simply added up. The names
    are those of FlashAttention (Dao et al. 2022, appendix B): forward is S = q k^T / sqrt(d), P = softmax(S), o = P v.
    """
    kv_heads, scale = k.shape[1], q.shape[-1] ** -0.5
    q, k, v, o, do = same_heads(q, k, v, o, do)
    p = (scaled_scores(q, k, causal) - lse[..., None]).exp()
    dp = do @ v.mT
    delta = (do * o).sum(-1, keepdim=True)  # FlashAttention's D, of all keys j: sum P_j dP_j = sum P_j (do v_j) = do o
    ds = p * (dp - delta)  # the backward of a softmax
    dq = ds @ k * scale
    dk = ds.mT @ q * scale
    dv = p.mT @ do
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))  # over the query heads that a kv head serves
    return dq, dk, dv


class RingAttention(torch.autograd.Function):
    """Causal attention of queries that stay to keys and values that travel. Alone, a rank sends nothing: n may be 1."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d], perhaps strided -> like q; sums: wide(q.dtype)."""
        own = torch.stack((k, v))
        o = torch.zeros_like(q, dtype=wide(q.dtype))  # no keys yet: o is 0, and lse is log 0 = -inf
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, kv in travel(own, group):
            for queries, keys, causal in visible(group.rank, source, q.shape[2]):
                k, v = kv[:, :, :, keys]
                part_o, part_lse = part_attention(q[:, :, queries], k, v, causal)
                merge(o[:, :, queries], lse[:, :, queries], part_o, part_lse)  # views: this changes o and lse
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own, o, lse)
        ctx.group, ctx.visible = group, visible
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """k and v travel as in forward. The sum of their gradients, in wide(q.dtype), follows when ours are added."""
        q, own, o, lse = ctx.saved_tensors
        n, r = ctx.group.size, ctx.group.rank
        dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, own))
        arriving = Pending()  # of dkv: nothing yet
        for source, kv in travel(own, ctx.group):
            found = torch.zeros_like(dkv)  # by this rank, for kv
            for queries, keys, causal in ctx.visible(r, source, q.shape[2]):
                k, v = kv[:, :, :, keys]
                do_i, q_i, o_i, lse_i = (x[:, :, queries] for x in (do, q, o, lse))  # these queries, over all keys
                part_dq, part_dk, part_dv = part_gradients(do_i, q_i, k, v, o_i, lse_i, causal)
                dq[:, :, queries] += part_dq
                found[0, :, :, keys] += part_dk
                found[1, :, :, keys] += part_dv
            arriving.wait()  # dkv: what the ranks before us have found for kv
            dkv += found
            outgoing, dkv = dkv, torch.empty_like(dkv)  # the new dkv is valid after `arriving.wait()`
            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)
        arriving.wait()  # the gradient of our own k and v is home
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable = zigzag_visible) -> Tensor:
    """q [batch, s/n, heads, head_dim]; k, v [batch, s/n, kv_heads, head_dim] -> like q."""
    return RingAttention.apply(*(x.transpose(1, 2) for x in (q, k, v)), group, visible).transpose(1, 2)


class ContextMode(NamedTuple):
    """How a sequence is sharded, and how its shards attend to one another."""

    positions: Callable[[int, int, int], Tensor]  # (s, rank, n) -> int64 [s/n]: a rank's positions
    attention: Callable[[Tensor, Tensor, Tensor, Group], Tensor]  # as ring_attention


CONTEXT = {"zigzag": ContextMode(zigzag_positions, ring_attention)}


@dataclass
class Config(step04.Config):
    """Context parallelism."""

    cp: int = 1  # ranks that share each sequence
    cp_mode: str = among(CONTEXT, "zigzag")  # how queries meet the keys of other ranks


def shard_context(model: Decoder, mesh: Mesh, mode: ContextMode, sp: bool) -> Tensor:
    """Let the ranks of `mesh["cp"]` share each sequence. Returns the positions of this rank's tokens, int64 [s/n].

    Attention goes round the ring; RoPE is told the positions, and k travels already rotated. These ranks hold the same
    weights and see different tokens, like those of dp. So gradients are summed, and ZeRO shards, over dp x cp:
    `mesh["data"]`. Raises UserError.
    """
    group, tp, seq_len = mesh["cp"], mesh["tp"], model.config.seq_len
    mesh.join("data", "dp", "cp")  # all dp x cp ranks. With dp = 1 those of mesh["cp"], in a process group of their own
    for param in model.parameters():
        note_layout(param, data_dim="data")
    if group.size == 1:
        return torch.arange(seq_len)
    positions = mode.positions(seq_len, group.rank, group.size)
    if sp and len(positions) % tp.size:
        raise UserError(f"--tp {tp.size} must divide the {len(positions)} tokens that --cp leaves a rank: use --no-sp")
    for layer in model.model.layers.values():
        layer.self_attn.attend = partial(mode.attention, group=group)
    return positions


def train(config: Config, run: Run):
    """The whole run."""
    device, dtype = choose_device(config)
    mesh = Mesh(dp=join_ranks(device) // (config.cp * config.tp), cp=config.cp, tp=config.tp)
    mine = mesh["dp"].share(config.global_batch_size, "--global-batch-size")  # step 2: these sequences are mine
    shape = PRESETS[config.model]
    data = Data(config.dataset, shape, config.global_batch_size, config.seed)
    with torch.device("meta"):
        model = Decoder(shape)
    shard_tensors(model, mesh, config.sp)  # step 4: these rows and columns are mine
    here = shard_context(model, mesh, CONTEXT[config.cp_mode], config.sp).to(device)  # these tokens of them are mine
    RECOMPUTE[config.recompute](model)
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this shard is mine (--zero)

    for step in run.steps(model=model, optimizer=optimizer, sync=sync, data=data, mesh=mesh, positions=here):
        tokens, targets = (x.to(device) for x in data.batch(step))
        n_targets = (targets != IGNORE).sum().clamp(min=1)  # of all ranks
        xs, ys = (x[mine][:, here].split(config.micro_batch_size) for x in (tokens, targets))
        loss = 0.0
        sync.begin(len(xs))
        for x, y in zip(xs, ys, strict=True):
            micro_loss = model(x, y, here) / n_targets  # scale once ...
            micro_loss.backward()  # ... then only sum,
            loss = loss + micro_loss.detach()
        sync.finish()  # also over ranks
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms that saw a shard of the tokens
        all_reduce(loss, mesh["data"]).wait()

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
