"""Step 5: context parallelism. A sequence that is too long for one device is cut; only attention looks at other tokens.

n ranks share s tokens. Norms, matrices and the loss look at one token at a time. In attention a query looks at all keys
before it. So queries stay, and keys and values travel round a ring: a rank computes with the part that is here while
the next one arrives (Liu et al. 2023, "Ring Attention"). With tokens in order the last of 4 ranks has the most work:

    keys of part ->         0 1 2 3
    rank 0: queries of 0    + . . .       # every pair of a query and a key      . none: the keys are later
    rank 1: queries of 1    # + . .       + the causal half
    rank 2: queries of 2    # # + .
    rank 3: queries of 3    # # # +

ZIGZAG. Early queries see few keys, late ones many. So rank r gets chunks r and 2n-1-r of 2n: the same work for all.

    keys of chunk ->   0 1 2 3 4 5 6 7          0 1 2 3 4 5 6 7
    rank 0: queries 0  + . . . . . . .   and 7  # # # # # # # +      hop 0: our own chunks, + and # +
    rank 1: queries 1  # + . . . . . .   and 6  # # # # # # + .      hop h: those of rank r-h (mod n), always # #
    rank 2: queries 2  # # + . . . . .   and 5  # # # # # + . .      so in each hop all ranks have the same work
    rank 3: queries 3  # # # + . . . .   and 4  # # # # + . . .

In backward k and v make the journey again. The sums of their gradients follow, one hop behind; the n-th message brings
them home. Of s/n tokens, k and v have B bytes and their gradients (fp32) G. In a layer and micro-batch a rank sends
(n-1) B forward and (n-1) B + n G backward. This grows with s, the work with s^2/n: long sequences hide it.

Targets were shifted before the cut (common/data.py). Shifted after the cut, each chunk's last token would lose its
target: the classic mistake.

Run it:    torchrun --nproc_per_node=4 step05_cp_ring.py --cp 4
You should see step 1's losses, and `sent` over cp: the formula x layers x micro-batches (+ 12 bytes of the norm).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import step04_tp_sp as step04
from common import UserError
from common.comm import Group, Mesh, Pending, all_reduce, exchange
from common.data import Data
from common.layout import global_norm, note_layout
from common.model import IGNORE, PRESETS, Decoder, wide
from common.trainer import Run, among, choose_device, main
from step01_single_gpu import RECOMPUTE, learning_rate
from step02_ddp import join_ranks
from step03_zero import make_optimizer
from step04_tp_sp import shard_tensors, sum_partial_gradients


def zigzag_positions(seq_len: int, rank: int, n: int) -> Tensor:
    """int64 [seq_len / n]: the tokens of a rank, chunks r and 2n-1-r of 2n. Raises UserError."""
    if seq_len % (2 * n):
        raise UserError(f"--cp {n}: the sequence length {seq_len} must be a multiple of {2 * n}")
    chunks = torch.arange(seq_len).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def zigzag_visible(rank: int, source: int, length: int) -> list[tuple]:
    """What `rank` computes with k, v of `source`: (queries, keys, causal). Two indices of [batch, heads, length, d]."""
    both, first, second = np.s_[:, :, :length], np.s_[:, :, : length // 2], np.s_[:, :, length // 2 :]
    if source == rank:
        return [(both, both, True)]  # rows are in order of position, so causal is right for both chunks together
    # A smaller rank's first chunk is before both of ours. Both chunks of a larger rank are before our second one.
    return [(both, first, False) if source < rank else (second, both, False)]


def has_kernel(q: Tensor) -> bool:
    """Whether PyTorch's flash attention takes q: on a CPU always, on CUDA 16 bits from Ampere on."""
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return not q.is_cuda or (fits and torch.cuda.get_device_capability(q.device) >= (8, 0))


def same_heads(q: Tensor, *tensors: Tensor) -> list[Tensor]:
    """All in fp32 or wider, and with as many heads as q: a kv head is repeated for the query heads that it serves."""
    return [x.to(wide(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (q, *tensors)]


def scaled_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d) [batch, heads, s_q, s_k], minus infinity where a query may not look."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return scores + torch.full_like(scores[0, 0], -torch.inf).triu(1) if causal else scores


def part_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to one part of the keys, and lse, the log of sum exp(scores). `causal` only with s_q = s_k.

    q [batch, heads, s_q, d]; k, v [batch, kv_heads, s_k, d] -> o like q, lse [batch, heads, s_q].
    """
    if has_kernel(q):  # the formulas below without a matrix [s_q, s_k] in memory; it takes fewer kv heads itself
        kernel = "_scaled_dot_product_flash_attention" + ("" if q.is_cuda else "_for_cpu")
        return getattr(torch.ops.aten, kernel)(q, k, v, 0.0, causal)[:2]  # 0.0: no dropout
    q, k, v = same_heads(q, k, v)
    scores = scaled_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def part_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's share of the gradients of q, k and v, given `o` and `lse` of attention to *all* keys.

    With that lse, P is this part's columns of the softmax over all keys. So the shares of all parts add up:

    P = exp(scores - lse)    dS = P * (do v^T - rowsum(do * o))
    dv = P^T do              dq = dS k / sqrt(d)                      dk = dS^T q / sqrt(d)
    """
    if has_kernel(q):
        given = do, q, k, v, o, lse.contiguous()  # rows of lse may have gaps between heads
        if not q.is_cuda:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout
        options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *options)
    kv_heads = k.shape[1]
    q, k, v, o, do = same_heads(q, k, v, o, do)
    p = (scaled_scores(q, k, causal) - lse[..., None]).exp()
    ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (ds.mT @ q, p.mT @ do))
    return ds @ k, dk, dv


def merge(o: Tensor, lse: Tensor, part_o: Tensor, part_lse: Tensor):
    """Add another part of the keys to a softmax, in place: o [batch, heads, s_q, d], lse [batch, heads, s_q].

    The result is the average of both outputs, weighted by their sums of exponentials:
    o = (e^lse o + e^part_lse part_o) / (e^lse + e^part_lse). The second weight is sigmoid(part_lse - lse).
    """
    o.lerp_(part_o.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


class RingAttention(torch.autograd.Function):
    """Causal attention of queries that stay to keys and values that travel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> like q."""
        n, r = group.size, group.rank
        own = kv = torch.stack((k, v))
        o = torch.zeros_like(q, dtype=wide(q.dtype))  # no keys yet: o is 0, and lse is log 0 = -inf
        lse = torch.full_like(o[..., 0], -torch.inf)
        for hop in range(n):
            if hop + 1 < n:  # send on what is here, to the right, and receive from the left ...
                next_kv = torch.empty_like(kv)
                sending = exchange([(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], group)
            source = (r - hop) % n  # whose part is here
            for rows, keys, causal in visible(r, source, q.shape[2]):  # ... and compute with it meanwhile
                merge(o[rows], lse[rows], *part_attention(q[rows], kv[0][keys], kv[1][keys], causal))
            if hop + 1 < n:
                sending.wait()
                kv = next_kv
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own, o, lse)
        ctx.group, ctx.visible = group, visible
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """k, v travel as in forward. The sum of their gradients follows, one hop behind; each rank adds its share."""
        q, kv, o, lse = ctx.saved_tensors
        n, r = ctx.group.size, ctx.group.rank
        dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, kv))
        arriving = Pending()  # nothing yet
        for hop in range(n):
            if hop + 1 < n:
                next_kv = torch.empty_like(kv)
                sending = exchange([(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], ctx.group)
            share, source = torch.zeros_like(dkv), (r - hop) % n
            for rows, keys, causal in ctx.visible(r, source, q.shape[2]):
                given = do[rows], q[rows], kv[0][keys], kv[1][keys], o[rows], lse[rows], causal
                part_dq, part_dk, part_dv = part_gradients(*given)
                dq[rows] += part_dq
                share[0][keys] += part_dk
                share[1][keys] += part_dv
            arriving.wait()  # dkv: what the ranks before us have added for this part
            dkv += share
            outgoing, dkv = dkv, torch.empty_like(dkv)
            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)
            if hop + 1 < n:
                sending.wait()
                kv = next_kv
        arriving.wait()  # the gradient of our own part is home
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable = zigzag_visible) -> Tensor:
    """q [batch, seq/n, heads, head_dim]; k, v [batch, seq/n, kv_heads, head_dim] -> like q."""
    return RingAttention.apply(*(x.transpose(1, 2) for x in (q, k, v)), group, visible).transpose(1, 2)


class ContextMode(NamedTuple):
    """How a sequence is cut, and how its parts attend to one another."""

    positions: Callable[[int, int, int], Tensor]  # (seq_len, rank, n) -> int64 [seq_len / n]: a rank's positions
    attention: Callable[[Tensor, Tensor, Tensor, Group], Tensor]  # as ring_attention


CONTEXT = {"zigzag": ContextMode(zigzag_positions, ring_attention)}


@dataclass
class Config(step04.Config):
    """Context parallelism."""

    cp: int = 1  # ranks that share each sequence
    cp_mode: str = among(CONTEXT, "zigzag")  # how queries meet the keys of other ranks


def shard_context(model: Decoder, mesh: Mesh, mode: ContextMode, sp: bool = True) -> Tensor:
    """Let the ranks of `mesh["cp"]` share each sequence. Returns the positions of this rank's tokens, int64 [seq / n].

    Attention goes round the ring; RoPE is told the positions, and k travels already rotated. These ranks hold the same
    weights and see different tokens, like those of dp. So gradients are summed, and ZeRO cuts, over dp x cp:
    `mesh["data"]`. Raises UserError.
    """
    group, tp, seq_len = mesh["cp"], mesh["tp"], model.config.seq_len
    mesh.join("data", "dp", "cp")  # the group of all dp x cp ranks; with --cp 4 on 4 ranks that of mesh["cp"]
    for param in model.parameters():
        note_layout(param, data_group="data")
    if group.size == 1:
        return torch.arange(seq_len)
    positions = mode.positions(seq_len, group.rank, group.size)
    if sp and len(positions) % tp.size:
        raise UserError(
            f"--cp {group.size} leaves a rank {len(positions)} tokens, no multiple of --tp {tp.size}: use --no-sp"
        )
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
    optimizer, sync = make_optimizer(model, config, mesh, device, dtype)  # step 3: this slice is mine (--zero)

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
        sum_partial_gradients(model, optimizer.gradients(), mesh)  # over tp: of norms that saw a part (SP)
        all_reduce(loss, mesh["data"]).wait()

        gradients = optimizer.gradients()
        norm = global_norm(model, gradients, mesh, sliced=config.zero > 0)
        run.require_finite(step, loss=loss.item(), grad_norm=norm)
        clip_coef = min(1.0, config.grad_clip / norm) if config.grad_clip and norm else 1.0
        for gradient in gradients.values():
            gradient.mul_(clip_coef)
        lr = learning_rate(step, config)
        optimizer.step(lr)
        optimizer.zero_grad()
        run.record(step, tokens.numel(), loss=loss.item(), grad_norm=norm, lr=lr)


if __name__ == "__main__":
    main(train, Config)
