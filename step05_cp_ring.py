"""Step 5: context parallelism. A sequence that is too long for one device is cut over its tokens; only attention talks.

s: tokens of the sequence. n: ranks that share it. q, k, v: queries, keys, values. Norms, matrices and the loss look at
one token at a time, so each rank runs them on its own s/n tokens. In attention a query looks at all keys before it, and
most of these are on other ranks. There are four ways to bring them together (--cp-mode):

    ring       k, v travel round in n-1 hops; each rank attends to what it holds (Liu et al. 2023, "Ring Attention")
    zigzag     (default) the same with 2n chunks: rank r holds chunks r and 2n-1-r, so all ranks have equal work
    allgather  k, v of all ranks are gathered once (Llama 3), on zigzag chunks; each rank keeps k, v of all s tokens
    ulysses    all-to-all: s/n tokens of all heads -> all tokens of 1/n heads, and back (Jacobs et al. 2023)

    ring, n = 4: keys of chunk ->   0 1 2 3      zigzag: keys of chunk ->   0 1 2 3 4 5 6 7
                 rank 0: queries 0  +            rank 0: queries 0 and 7    + . . . . . . .  and  # # # # # # # +
                 rank 1: queries 1  # +          rank 1: queries 1 and 6    # + . . . . . .  and  # # # # # # + .
                 rank 2: queries 2  # # +        rank 2: queries 2 and 5    # # + . . . . .  and  # # # # # + . .
                 rank 3: queries 3  # # # +      rank 3: queries 3 and 4    # # # + . . . .  and  # # # # + . . .
    +: half a #  work (2r+1)/n^2 of the whole    1/n of the whole, for every rank

MERGING. Part: k and v of one rank. Block: queries, and the keys they look at in one kernel call. d: the size of a head.
scores = q k^T / sqrt(d). Attention to one block i gives o_i, the softmax average of its values, and lse_i, the log of
the sum of exp(scores). Two blocks of keys together give, in fp32 at least,

    lse = log(e^lse_1 + e^lse_2)
    o   = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2   =   o_1 - sigmoid(lse_2 - lse_1) (o_1 - o_2)

Backward needs no merging: the shares of all blocks add up. do: the gradient of o. P = exp(scores - lse), with the lse
of all keys. D = sum(do * o) over a head = sum(P * (do v^T)) over *all* keys (FlashAttention, Dao et al. 2022).

    dv = P^T do      dS = P * (do v^T - D)      dq = dS k / sqrt(d)      dk = dS^T q / sqrt(d)      (*: by element)

k and v make the same journey again. dk and dv follow them, and each rank adds its share. One more hop brings them home.
With allgather, k and v are still there. One reduce-scatter adds the ranks' shares of dk and dv and brings them home.

POSITIONS. Targets are shifted first; then tokens and targets are cut. Every rank rotates q and k (RoPE) by its tokens'
places in the whole sequence, then sends. kv heads travel unrepeated (ulysses: repeated up to n, if they are fewer).

Bytes a rank sends per layer and micro-batch. K: the bytes of k and v of s/n tokens in the training dtype. W: those of
the same numbers in fp32 or wider (dk and dv are sums). Q: the bytes of q. K': K with kv heads repeated up to n.

    ring, zigzag   (n-1) K forward, (n-1) K + n W backward     allgather   (n-1) K forward, (n-1) W backward
    ulysses        (n-1)/n (2 Q + K') forward, again backward  --recompute  the forward's bytes once more

With tensor parallelism, all heads here are those of one tp rank. With --sp, cp cuts the tokens, then tp. All cp ranks
have the same weights. So their gradients are summed, and cut by ZeRO, over dp x cp: the mesh dimension "data".

Run it:    torchrun --nproc_per_node=4 step05_cp_ring.py --cp 4
You should see step 1's losses in every mode. Activations are divided by cp; allgather and ulysses keep a little more.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import step04_tp_sp as step04
from common.comm import Group, Mesh, all_gather, all_to_all, exchange, reduce_scatter
from common.layout import global_norm, note_gradient_sum, sum_partial_gradients
from common.model import Decoder, attend
from common.trainer import Trained, main, start
from step01_single_gpu import wrap_layers
from step03_zero import make_optimizer
from step04_tp_sp import shard_tensors


@dataclass
class Config(step04.Config):
    """The flags so far and those of context parallelism."""

    cp: int = 0  # ranks that share each sequence; 0: 2 if the ranks that --pp and --tp leave are an even number, else 1
    cp_mode: Literal["zigzag", "ring", "allgather", "ulysses"] = "zigzag"  # how queries meet the keys of other ranks


def reference_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch, s_q, heads, d] to keys and values [batch, s_k, kv_heads, d], from the formulas.

    `causal`: query i sees keys 0..i. Returns (out like q, lse [batch, heads, s_q]), lse in fp32 or wider.
    """
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", p, repeat_heads(v, q).to(p.dtype)).to(q.dtype), lse


def reference_block_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of (d_q, d_k, d_v), like q, k, v, given `out` and `lse` of attention to *all* keys."""
    p = (block_scores(q, k, causal) - lse[..., None]).exp()
    wide_q, wide_k, wide_v = (x.to(p.dtype) for x in (q, repeat_heads(k, q), repeat_heads(v, q)))
    d_out = d_out.to(p.dtype)
    delta = (d_out * out).sum(-1).transpose(1, 2)[..., None]  # D, [batch, heads, s_q, 1]
    d_s = p * (torch.einsum("bqhd,bkhd->bhqk", d_out, wide_v) - delta) * q.shape[-1] ** -0.5  # dS / sqrt(d)
    d_q = torch.einsum("bhqk,bkhd->bqhd", d_s, wide_k)
    d_k, d_v = (torch.einsum("bhqk,bqhd->bkhd", *both) for both in ((d_s, wide_q), (p, d_out)))
    d_k, d_v = (x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (d_k, d_v))  # over the queries of each kv head
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def repeat_heads(kv: Tensor, q: Tensor) -> Tensor:
    """[batch, seq, kv_heads, d] -> [batch, seq, heads, d], each repeated for the query heads it serves."""
    return kv.repeat_interleave(q.shape[2] // kv.shape[2], dim=2)


def block_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d), [batch, heads, s_q, s_k] in fp32 or wider, minus infinity where a query may not look."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), repeat_heads(k, q).to(wide)) * q.shape[-1] ** -0.5
    if causal:
        scores += torch.full_like(scores[0, 0], -torch.inf).triu(1)
    return scores


def has_flash_kernel(q: Tensor) -> bool:
    """Whether PyTorch has a kernel that returns the lse: on a CPU always, on CUDA for 16 bits from Ampere on."""
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256  # head sizes that CUDA's can take
    return not q.is_cuda or (fits and torch.cuda.get_device_capability(q.device) >= (8, 0))


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`reference_block` by PyTorch's flash-attention kernels where there is one; `causal` only with s_q = s_k."""
    if not has_flash_kernel(q):
        return reference_block(q, k, v, causal)
    aten = torch.ops.aten
    kernel = aten._scaled_dot_product_flash_attention if q.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    out, lse, *_ = kernel(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, causal)
    return out.transpose(1, 2), lse


def block_attention_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference_block_backward` by PyTorch's flash-attention kernels where there is one."""
    if not has_flash_kernel(q):
        return reference_block_backward(d_out, q, k, v, out, lse, causal)
    aten, tensors = torch.ops.aten, (*(x.transpose(1, 2) for x in (d_out, q, k, v, out)), lse)  # heads first
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        options = None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed[:0]
        grads = aten._scaled_dot_product_flash_attention_backward(*tensors, *options)
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, causal)
    return tuple(grad.transpose(1, 2) for grad in grads)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor):
    """Add a block of keys to a running softmax, in place: out [batch, s_q, heads, d], lse [batch, heads, s_q]."""
    share = torch.sigmoid(block_lse - lse).transpose(1, 2)[..., None]
    out -= share * (out - block_out)
    lse.copy_(torch.logaddexp(lse, block_lse))


def own_positions(seq_len: int, rank: int, n: int, mode: str) -> Tensor:
    """int64 [seq_len / n]: which tokens a rank holds. ring, ulysses: chunk `rank` of n. Else two chunks of 2n."""
    positions = torch.arange(seq_len)
    if n == 1 or mode in ("ring", "ulysses"):
        return positions.chunk(n)[rank]
    chunks = positions.chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank]))


def visible(rank: int, source: int, length: int, zigzag: bool) -> tuple[slice, slice, bool] | None:
    """What `rank` computes with the keys of rank `source`: (rows of our queries, rows of their keys, causal), or None.

    Zigzag: the two chunks of a smaller rank enclose those of a larger one. A smaller source's first chunk is past for
    all our queries, its second is future. A larger source's two chunks are both past, for our second chunk only.
    """
    everything, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == rank:  # rows are in order of position, so causal is right for two chunks too
        return everything, everything, True
    if zigzag:  # length^2 / 2 pairs either way, as in the own part
        return (everything, first, False) if source < rank else (second, everything, False)
    return (everything, everything, False) if source < rank else None


def around_the_ring(kv: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Yield (source, the kv of rank `source`) for every rank of the group, beginning with this one's `kv` (contiguous).

    The next part arrives while the caller computes with the present one. Two buffers: one is sent, the other filled.
    """
    n, r = group.size, group.rank
    buffers = kv.new_empty(min(2, n - 1), *kv.shape)
    for hop in range(n - 1):
        next_kv = buffers[hop % 2]
        sending = exchange([(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], group)
        yield (r - hop) % n, kv
        sending.wait()
        kv = next_kv
    yield (r + 1) % n, kv  # the last part, r - (n-1): there is nothing left to send


def add_part_gradients(
    d_out: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, block: tuple | None, d_q: Tensor, d_kv: Tensor
):
    """Add the gradients of a part kv [2, batch, s/n, kv_heads, d], of which `visible` said `block`, to d_q and d_kv."""
    if block is not None:
        rows, keys, causal = block
        (k, v), (d_k, d_v) = kv[:, :, keys], d_kv[:, :, keys]
        given = out[:, rows], lse[:, :, rows].contiguous(), causal  # (some rows of lse have gaps between heads)
        block_q, block_k, block_v = block_attention_backward(d_out[:, rows], q[:, rows], k, v, *given)
        d_q[:, rows] += block_q
        d_k += block_k
        d_v += block_v


def every_sequence(_source: int, block: tuple | None) -> list[tuple[slice, slice, slice, bool]]:
    """`visible`'s block for all sequences: [(sequences, query rows, key rows, causal)]; --documents replaces this."""
    return [] if block is None else [(slice(None), *block)]


class RingAttention(torch.autograd.Function):
    """Queries stay. The keys and values of all ranks come to them, part by part: round the ring, or gathered before."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, mode: str, cut=every_sequence) -> Tensor:
        """q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d] -> like q. `cut`: see `every_sequence`."""
        kept, wide, n, r = torch.stack((k, v)), torch.promote_types(q.dtype, torch.float32), group.size, group.rank
        if mode == "allgather":  # keep all ranks' parts, [n, 2, batch, s/n, kv_heads, d]; else only this one's
            parts = kept.new_empty(n, *kept.shape)
            all_gather(parts.view(-1), kept.view(-1), group).wait()
            kept = parts
        out, lse = torch.empty_like(q, dtype=wide), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide)
        own_first = ((i % n, kept[i % n]) for i in range(r, r + n))  # the own blocks make out and lse
        for source, kv in own_first if mode == "allgather" else around_the_ring(kept, group):
            for seqs, rows, keys, causal in cut(source, visible(r, source, q.shape[1], mode != "ring")):
                block_out, block_lse = block_attention(q[seqs, rows], *kv[:, seqs, keys], causal)
                if source == r:  # its blocks have every query once
                    out[seqs, rows], lse[seqs, :, rows] = block_out, block_lse
                else:
                    merge(out[seqs, rows], lse[seqs, :, rows], block_out, block_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kept, out, lse)
        ctx.group, ctx.mode, ctx.cut = group, mode, cut
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        """The parts come again (allgather: they are here). d_kv: a part's gradient; each rank adds its share to it.

        ring, zigzag: d_kv travels one hop behind its part, and is home after n hops. allgather: by a reduce-scatter.
        """
        q, kept, out, lse = ctx.saved_tensors
        group, n, r, allgather = ctx.group, ctx.group.size, ctx.group.rank, ctx.mode == "allgather"
        d_q, sending = torch.zeros_like(q, dtype=lse.dtype), None
        d_kvs = torch.empty(n if allgather else 2, *kept.shape[-5:], dtype=lse.dtype, device=q.device)  # -5: a part's
        next_d_kv = torch.empty_like(d_kvs[0])  # arrives from rank r-1; the last to arrive is our own part's gradient
        for hop, (source, kv) in enumerate(enumerate(kept) if allgather else around_the_ring(kept, group)):
            d_kv = d_kvs[source if allgather else hop % 2].zero_()  # a ring: one buffer is sent, the other filled
            for seqs, *block in ctx.cut(source, visible(r, source, q.shape[1], ctx.mode != "ring")):
                these = d_out[seqs], q[seqs], kv[:, seqs], out[seqs], lse[seqs]
                add_part_gradients(*these, block, d_q[seqs], d_kv[:, seqs])
            if not allgather:  # next_d_kv: this part's gradient so far, from rank r-1, which had the part one hop ago
                if sending is not None:
                    sending.wait()
                    d_kv += next_d_kv
                sending = exchange([(d_kv, (r + 1) % n)], [(next_d_kv, (r - 1) % n)], group)
        if allgather:
            sending = reduce_scatter(next_d_kv.view(-1), d_kvs.view(-1), group)
        sending.wait()
        return d_q.to(q.dtype), *next_d_kv.to(q.dtype), None, None, None


class SwapTokensAndHeads(torch.autograd.Function):
    """Ulysses' all-to-all: [batch, s/n, heads, d] -> [batch, s, heads/n, d], or back; each is the other's backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, to_heads: bool) -> Tensor:
        """`to_heads`: from our tokens of all heads to all tokens of our heads; else the reverse."""
        ctx.group, ctx.to_heads = group, to_heads
        cut, join = (2, 1) if to_heads else (1, 2)
        parts = x.unflatten(cut, (group.size, -1)).movedim(cut, 0).contiguous()
        swapped = torch.empty_like(parts)
        all_to_all(swapped, parts, group).wait()
        return swapped.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The reverse exchange."""
        return SwapTokensAndHeads.apply(grad, ctx.group, not ctx.to_heads), None, None


class ContextAttention:
    """Replaces `attend` where the sequence is cut: q, k, v of s/n tokens -> the output for them."""

    def __init__(self, group: Group, mode: str):
        self.group, self.mode, self.cut, self.attend = group, mode, every_sequence, attend  # --documents sets two
        self.positions = lambda seq_len, rank: own_positions(seq_len, rank, group.size, mode)  # --documents reads it

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d], rotated already; returns the output, like q."""
        if self.mode != "ulysses":
            return RingAttention.apply(q, k, v, self.group, self.mode, self.cut)
        if (copies := self.group.size // k.shape[2]) > 1:  # fewer kv heads than ranks: K' of the docstring
            k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        q, k, v = (SwapTokensAndHeads.apply(x, self.group, True) for x in (q, k, v))
        return SwapTokensAndHeads.apply(self.attend(q, k, v), self.group, False)


def shard_context(model: Decoder, mesh: Mesh, mode: str) -> Tensor:
    """Cut sequences over `mesh["cp"]`, in place. Adds the group "data" to the mesh.

    Replaces the attention core of every layer. Returns the positions of this rank's tokens, int64 [s/n].
    """
    group = mesh["cp"]
    mesh.add("data", mesh["dp"].size * group.size, stride=mesh["tp"].size)
    if group.size > 1:
        for layer in model.model.layers.values():
            layer.self_attn.attend = ContextAttention(group, mode)
        note_gradient_sum(model.parameters(), "cp")
    return own_positions(model.config.seq_len, group.rank, group.size, mode).to(mesh.device)


def train(config: Config, observe=None) -> Trained:
    """The whole run; `run` (common/trainer.py) is what surrounds it."""
    with start(config, observe) as run:
        mesh = run.mesh
        with torch.device("meta"):
            model = Decoder(run.shape)
        shard_tensors(model, mesh, config.sp, config.tp_overlap)  # step 4: these rows and columns are mine
        positions = shard_context(model, mesh, config.cp_mode)  # these tokens are mine
        note_gradient_sum(model.parameters(), "dp")
        wrap_layers(model, config)
        optimizer, sync = make_optimizer(model, config, run)  # step 3: this slice of the update is mine
        share = mesh["dp"].share(config.global_batch_size)  # step 2: these sequences are mine

        for step in run.steps(model, optimizer, sync, positions):
            batch, loss = run.batch(step, share), 0.0
            micro_batches = batch.micro_batches(config.micro_batch_size)
            sync.begin()
            for i, (tokens, targets) in enumerate(micro_batches):
                if i + 1 == len(micro_batches):
                    sync.last_micro_batch()
                with run.phase("forward"):
                    micro_loss = model.lm_head.loss(model(tokens, positions), targets) / batch.n_targets
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
