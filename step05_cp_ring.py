"""Step 5: context parallelism. A sequence too long for one device is cut over tokens; only attention has to talk.

Norms, matrices and loss look at one token at a time, so each rank runs them on its s/n tokens. In attention a query
looks at all keys before it, wherever they are. Four ways to bring them together (--cp-mode):

    ring       k, v travel round in n-1 hops, each rank attends to what it holds (Liu et al. 2023, "Ring Attention")
    zigzag     the same, but rank r holds chunks r and 2n-1-r of 2n, so that all have equal work
    allgather  k, v of all tokens are gathered once (Llama 3), on zigzag chunks; memory O(s) instead of O(s/n)
    ulysses    all-to-all: s/n tokens of all heads -> all tokens of 1/n heads, and back (Jacobs et al. 2023)

    ring, n = 4: keys of chunk ->   0 1 2 3      zigzag: keys of chunk ->   0 1 2 3 4 5 6 7
                 rank 0: queries 0  #            rank 0: queries 0 and 7    # . . . . . . .  and  # # # # # # # #
                 rank 1: queries 1  # #          rank 1: queries 1 and 6    # # . . . . . .  and  # # # # # # # .
                 rank 2: queries 2  # # #        rank 2: queries 2 and 5    # # # . . . . .  and  # # # # # # . .
                 rank 3: queries 3  # # # #      rank 3: queries 3 and 4    # # # # . . . .  and  # # # # # . . .
                 work (2r+1)/n^2 of the whole    1/n of the whole, for every rank

MERGING. Softmax over blocks of keys: a block gives its own softmax average o_i and lse_i = log sum exp(scores). Then

    lse = log(e^lse_1 + e^lse_2)
    o   = e^(lse_1 - lse) o_1 + e^(lse_2 - lse) o_2   =   o_1 - sigmoid(lse_2 - lse_1) (o_1 - o_2)

in fp32 at least. Backward needs no merging: with the final lse, P = exp(scores - lse) is right block by block, and with
D = sum(do * o) (FlashAttention, Dao et al. 2022)

    dv = P^T do      dS = P * (do v^T - D)      dq = dS k / sqrt(d)      dk = dS^T q / sqrt(d)

k and v make the same journey again; dk and dv follow them, each rank adding its part, and one more hop brings them
home.

POSITIONS. Tokens and targets are cut after the targets were shifted, and every rank rotates q and k (RoPE) by its
tokens' own positions before anything is exchanged. k and v travel with kv heads, never repeated to all query heads.

Bytes a rank sends per layer and micro-batch. K: the bytes of k and v of s/n tokens in the training dtype; W: those of
the same numbers in fp32 or wider (dk and dv, which are sums):

    ring, zigzag   (n-1) K forward, (n-1) K + n W backward     allgather   (n-1) K forward, (n-1) W backward
    ulysses        (n-1)/n (2 Q + K') forward, again backward; Q bytes of q, K' = K with kv heads repeated up to n

With tensor parallelism heads are cut first, and all this concerns the heads of a tp rank; with sequence parallelism
tokens are cut by cp, then by tp. All cp ranks have the same weights: gradients are summed, and cut by ZeRO, over the
dp x cp ranks together, the mesh dimension "data".

Run it:    torchrun --nproc_per_node=4 step05_cp_ring.py --cp 4 --tp 1
You should see step 1's losses in every mode, and activations divided by cp.
"""

from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import step04_tp_sp as step04
from common.comm import Group, all_gather, all_to_all, exchange, reduce_scatter, sum_over, world_size
from common.data import TokenData
from common.layout import global_norm, layout_of, reduction_table, sum_gradients_over, sum_partial_gradients
from common.model import Decoder, attend
from services.checks import check_cp, mesh_sizes5
from services.devices import choose_device, choose_dtype, peak_flops
from services.evaluation import evaluate, gather_logits, generate
from services.flags import main
from services.health import health, require_finite
from services.launch import open_mesh, require_same_flags
from services.replicas import require_same_parameters, require_same_replicas
from services.resume import resume, save
from services.run import Run
from services.tables import table
from step01_single_gpu import Trained, apply_recompute, learning_rate
from step03_zero import optimizer_and_sync
from step04_tp_sp import shard_tensors
from theory.flops import flops_per_token
from theory.memory import cp_activation_bytes
from theory.traffic import cp_traffic, partial_traffic, predictions, tp_traffic


@dataclass
class Config(step04.Config):
    """The flags so far and those of context parallelism."""

    cp: int = 0  # ranks that share each sequence; 0: 2 if the ranks (over --tp) are an even number, else 1
    cp_mode: Literal["zigzag", "ring", "allgather", "ulysses"] = "zigzag"  # how queries meet the keys of other ranks


# --- one block: some queries, some keys


def reference_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries [batch, s_q, heads, d] to keys and values [batch, s_k, kv_heads, d], from the formulas.

    `causal`: query i sees keys 0..i. Returns (out like q, lse [batch, heads, s_q]), lse in fp32 or wider.
    """
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse[..., None]).exp()
    out = torch.einsum("bhqk,bkhd->bqhd", probabilities, repeat_heads(v, q).to(scores.dtype))
    return out.to(q.dtype), lse


def reference_block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of (dq, dk, dv), given the *final* out and lse over all blocks; shapes as above."""
    probabilities = (block_scores(q, k, causal) - lse[..., None]).exp()
    grad, wide = grad_out.to(lse.dtype), lse.dtype
    delta = (grad * out.to(wide)).sum(-1).transpose(1, 2)[..., None]
    grad_v = torch.einsum("bhqk,bqhd->bkhd", probabilities, grad)
    grad_p = torch.einsum("bqhd,bkhd->bhqk", grad, repeat_heads(v, q).to(wide))
    grad_s = probabilities * (grad_p - delta) * q.shape[-1] ** -0.5
    grad_q = torch.einsum("bhqk,bkhd->bqhd", grad_s, repeat_heads(k, q).to(wide))
    grad_k = torch.einsum("bhqk,bqhd->bkhd", grad_s, q.to(wide))
    groups = (k.shape[2], q.shape[2] // k.shape[2])
    grad_k, grad_v = (g.unflatten(2, groups).sum(3) for g in (grad_k, grad_v))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def repeat_heads(kv: Tensor, q: Tensor) -> Tensor:
    """[batch, seq, kv_heads, d] -> [batch, seq, heads, d], each repeated for the query heads it serves."""
    return kv.repeat_interleave(q.shape[2] // kv.shape[2], dim=2)


def block_scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k^T / sqrt(d), [batch, heads, s_q, s_k] in fp32 or wider, minus infinity where a query may not look."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), repeat_heads(k, q).to(wide)) * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return scores


def is_fast(q: Tensor) -> bool:
    """Whether PyTorch has a flash kernel that returns the lse: on a CPU always; on CUDA from Ampere on, for 16 bits.

    Called directly, CUDA's takes head sizes that are multiples of 8, up to 256.
    """
    if not q.is_cuda:
        return True
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def block_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`reference_block` by PyTorch's flash-attention kernels where there is one; `causal` only with s_q = s_k."""
    if not is_fast(q):
        return reference_block(q, k, v, causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    aten = torch.ops.aten
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse


def block_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference_block_backward` by PyTorch's flash-attention kernels where there is one."""
    if not is_fast(q):
        return reference_block_backward(grad_out, q, k, v, out, lse, causal)
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    aten = torch.ops.aten
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
        grads = aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
        )
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, q, k, v, out, lse, 0.0, causal)
    return tuple(grad.transpose(1, 2) for grad in grads)


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor):
    """Add a block's keys to a running softmax, in place: out [batch, s_q, heads, d] and lse [batch, heads, s_q]."""
    share = torch.sigmoid(block_lse - lse).transpose(1, 2)[..., None]
    out -= share * (out - block_out)
    lse.copy_(torch.logaddexp(lse, block_lse))


# --- who holds and sees what


class Work(NamedTuple):
    """One block as a rank computed it: at which hop, whose keys, and how many query-key pairs."""

    hop: int
    source: int
    pairs: int


def own_positions(seq_len: int, rank: int, n: int, mode: str) -> Tensor:
    """int64 [seq_len / n]: which tokens of a sequence a rank holds. Two chunks from both ends for equal causal work."""
    if mode in ("ring", "ulysses"):
        return torch.arange(seq_len).chunk(n)[rank] if n > 1 else torch.arange(seq_len)
    chunks = torch.arange(seq_len).chunk(2 * n)
    return torch.cat((chunks[rank], chunks[2 * n - 1 - rank])) if n > 1 else torch.arange(seq_len)


def visible(own: int, source: int, length: int, zigzag: bool) -> tuple[slice, slice, bool] | None:
    """What rank `own` computes with the keys of rank `source`: (its query rows, their key rows, causal), or None.

    Zigzag: chunks r and 2n-1-r of earlier rank numbers enclose ours. A smaller source's first chunk is past for all our
    queries, its second is future; a larger source's two chunks are both past for our second chunk only.
    """
    everything, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == own:
        return everything, everything, True
    if zigzag:
        return (everything, first, False) if source < own else (second, everything, False)
    return (everything, everything, False) if source < own else None


def pairs(q: Tensor, k: Tensor, causal: bool) -> int:
    """Query-key pairs of a block; each costs 4 x head_dim x heads FLOPs forward."""
    return q.shape[1] * (q.shape[1] + 1) // 2 if causal else q.shape[1] * k.shape[1]


class RingAttention(torch.autograd.Function):
    """Keys and values go round; at every hop each rank attends to what it holds while the next part is on its way."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, zigzag: bool, trace: list[Work] | None) -> Tensor:
        """q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d]; returns the attention output, like q."""
        n, r, length = group.size, group.rank, q.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        kv = torch.stack((k, v))
        for hop in range(n):
            source = (r - hop) % n
            arriving = torch.empty_like(kv) if hop < n - 1 else None
            sending = exchange([(kv, (r + 1) % n)], [(arriving, (r - 1) % n)], group) if hop < n - 1 else None
            if block := visible(r, source, length, zigzag):
                rows, keys, causal = block
                part, part_lse = block_attention(q[:, rows], kv[0][:, keys], kv[1][:, keys], causal)
                if hop == 0:  # copies: what the kernel returned may be kept by selective recomputation
                    out, lse = part.to(wide, copy=True), part_lse.to(wide, copy=True)
                else:
                    merge(out[:, rows], lse[:, :, rows], part, part_lse)
                if trace is not None:
                    trace.append(Work(hop, source, pairs(q[:, rows], kv[0][:, keys], causal)))
            if hop < n - 1:
                sending.wait()
                kv = arriving
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.zigzag = group, zigzag
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        """The same journey; the gradients of keys and values follow one step behind, and need one hop more."""
        q, k, v, out, lse = ctx.saved_tensors
        group, n, r = ctx.group, ctx.group.size, ctx.group.rank
        kv, right, left = torch.stack((k, v)), (r + 1) % n, (r - 1) % n
        grad_q, so_far, following = torch.zeros_like(q, dtype=lse.dtype), None, None
        for hop in range(n):
            arriving = torch.empty_like(kv) if hop < n - 1 else None
            sending = exchange([(kv, right)], [(arriving, left)], group) if hop < n - 1 else None
            grad_kv = torch.zeros_like(kv, dtype=lse.dtype)
            if block := visible(r, (r - hop) % n, q.shape[1], ctx.zigzag):
                rows, keys, causal = block
                dq, dk, dv = block_attention_backward(
                    grad_out[:, rows], q[:, rows], kv[0][:, keys], kv[1][:, keys], out[:, rows],
                    lse[:, :, rows].contiguous(), causal,
                )  # fmt: skip
                grad_q[:, rows] += dq
                grad_kv[0][:, keys] += dk
                grad_kv[1][:, keys] += dv
            if following is not None:
                following.wait()
                grad_kv += so_far
            so_far = torch.empty_like(grad_kv)
            following = exchange([(grad_kv, right)], [(so_far, left)], group)
            if hop < n - 1:
                sending.wait()
                kv = arriving
        following.wait()
        return grad_q.to(q.dtype), so_far[0].to(k.dtype), so_far[1].to(v.dtype), None, None, None


class AllGatherAttention(torch.autograd.Function):
    """Keys and values of all tokens on every rank, gathered in one collective; queries are zigzag chunks."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, trace: list[Work] | None) -> Tensor:
        """Shapes as in RingAttention."""
        kv = torch.stack((k, v))
        parts = kv.new_empty(group.size, *kv.shape)
        all_gather(parts.view(-1), kv.view(-1), group).wait()
        full = in_sequence(parts)
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = [], []
        for rows, past, own in zigzag_rows(q.shape[1], group):
            out_rows, lse_rows = block_attention(q[:, rows], full[0][:, own], full[1][:, own], True)
            out_rows, lse_rows = out_rows.to(wide, copy=True), lse_rows.to(wide, copy=True)  # as in RingAttention
            if past.stop:
                before = block_attention(q[:, rows], full[0][:, past], full[1][:, past], False)
                merge(out_rows, lse_rows, *before)
            out.append(out_rows)
            lse.append(lse_rows)
            if trace is not None:
                count = pairs(q[:, rows], full[0][:, own], True) + pairs(q[:, rows], full[0][:, past], False)
                trace.append(Work(0, group.rank, count))
        out, lse = torch.cat(out, 1).to(q.dtype), torch.cat(lse, 2)
        ctx.save_for_backward(q, full, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        """dk and dv of all tokens, each rank's own part, are reduce-scattered to where k and v came from."""
        q, full, out, lse = ctx.saved_tensors
        grad_q, grad_kv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(full, dtype=lse.dtype)
        for rows, past, own in zigzag_rows(q.shape[1], ctx.group):
            for keys, causal in ((past, False), (own, True)):
                if keys.stop > keys.start:
                    dq, dk, dv = block_attention_backward(
                        grad_out[:, rows], q[:, rows], full[0][:, keys], full[1][:, keys], out[:, rows],
                        lse[:, :, rows].contiguous(), causal,
                    )  # fmt: skip
                    grad_q[:, rows] += dq
                    grad_kv[0][:, keys] += dk
                    grad_kv[1][:, keys] += dv
        parts = by_rank(grad_kv, ctx.group.size)
        home = torch.empty_like(parts[0])
        reduce_scatter(home.view(-1), parts.view(-1), ctx.group).wait()
        return grad_q.to(q.dtype), home[0].to(q.dtype), home[1].to(q.dtype), None, None


def zigzag_rows(length: int, group: Group) -> list[tuple[slice, slice, slice]]:
    """For both chunks of a rank: (its rows here, the keys before it, its own keys), the last two in the sequence."""
    c, found = length // 2, []
    for i, chunk in enumerate((group.rank, 2 * group.size - 1 - group.rank)):
        found.append((slice(i * c, (i + 1) * c), slice(0, chunk * c), slice(chunk * c, (chunk + 1) * c)))
    return found


def in_sequence(parts: Tensor) -> Tensor:
    """k and v of all ranks, two zigzag chunks each [n, 2, batch, s/n, ...] -> in sequence order [2, batch, s, ...]."""
    first, second = parts.chunk(2, dim=3)
    return torch.cat((*first, *second.flip(0)), dim=2)


def by_rank(full: Tensor, n: int) -> Tensor:
    """The inverse of `in_sequence`: [2, batch, s, ...] -> [n, 2, batch, s/n, ...]."""
    chunks = full.chunk(2 * n, dim=2)
    return torch.stack([torch.cat((chunks[r], chunks[2 * n - 1 - r]), dim=2) for r in range(n)])


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
    """Replaces `attend` where the sequence is cut: q, k, v of s/n tokens -> the output for them.

    Set `trace` to a list to have every block recorded in it.
    """

    def __init__(self, group: Group, mode: str):
        self.group, self.mode = group, mode
        self.trace: list[Work] | None = None

    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d], rotated already; returns the output, like q."""
        if self.mode == "allgather":
            return AllGatherAttention.apply(q, k, v, self.group, self.trace)
        if self.mode != "ulysses":
            return RingAttention.apply(q, k, v, self.group, self.mode == "zigzag", self.trace)
        copies = max(1, self.group.size // k.shape[2])
        k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        q, k, v = (SwapTokensAndHeads.apply(x, self.group, True) for x in (q, k, v))
        if self.trace is not None:
            self.trace.append(Work(0, self.group.rank, pairs(q, k, True) // self.group.size))
        return SwapTokensAndHeads.apply(attend(q, k, v), self.group, False)


def shard_context(model: Decoder, group: Group, mode: str) -> Tensor:
    """Cut sequences over `group`: swaps the attention core; returns the positions of this rank's tokens [s/n]."""
    if group.size > 1:
        for layer in model.model.layers.values():
            layer.self_attn.attend = ContextAttention(group, mode)
        sum_gradients_over(model.parameters(), group.name)
    return own_positions(model.config.seq_len, group.rank, group.size, mode)


# --- what it costs


def train(config: Config, observe=None) -> Trained:
    """The whole run. `observe(step, optimizer)`, if given, sees each step's complete gradients before the update."""
    world = world_size()
    check_cp(config, world)
    sizes = mesh_sizes5(config, world)
    dp, cp, tp = sizes.values()
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    m = config.model_config()
    with open_mesh(sizes, device, config.backend, config.timeout) as mesh:
        require_same_flags(config, mesh)
        mesh.add("data", dp * cp, stride=tp)
        group, d = mesh["data"], mesh["dp"].rank
        share = slice(d * config.global_batch_size // dp, (d + 1) * config.global_batch_size // dp)
        data = TokenData(config.dataset, m.seq_len, config.global_batch_size, config.seed, m.vocab_size)

        with torch.device("meta"):
            model = Decoder(m)
        shard_tensors(model, mesh, config.sp, config.tp_overlap)
        own = shard_context(model, mesh["cp"], config.cp_mode)
        sum_gradients_over(model.parameters(), "dp")
        apply_recompute(model, config.recompute)
        if config.compile:
            for layer in model.model.layers.values():
                layer.forward = torch.compile(layer.forward)
        optimizer, sync = optimizer_and_sync(model, group, config, device, dtype, mesh)
        positions = own.to(device)
        start = resume(optimizer, config, mesh) if config.resume else 0
        if config.zero == 0:
            require_same_parameters(model, group)
        if config.generate:
            logits_of = partial(gather_logits, model, positions, mesh["cp"])
            text = generate(logits_of, m.seq_len, config.generate, 400, config.seed)
            if mesh.rank == 0:
                print(text)
            return Trained(model, optimizer, [])

        micro_batches = config.global_batch_size // dp // config.micro_batch_size
        predicted, traffic = predictions(config, m, optimizer, sync, micro_batches)
        predicted["activations"] = cp_activation_bytes(config, m, tp, cp, dtype, device.type == "cpu")
        traffic |= tp_traffic(config, replace(m, seq_len=m.seq_len // cp), tp, dtype, micro_batches)
        traffic |= partial_traffic(optimizer, mesh, ["tp", "kv"])
        traffic |= cp_traffic(config, m, tp, cp, dtype, micro_batches)
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
                    tokens, targets = batch.tokens[:, own].to(device), batch.targets[:, own].to(device)
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
                    norm = global_norm(optimizer, mesh, ["tp"], sliced="data" if config.zero else "")
                    grad_norm = optimizer.step(learning_rate(step, config), norm, loss)
                if optimizer.loss_scale < 1:  # worse than an fp16 overflow, which skips a step and halves the scale
                    require_finite(grad_norm, step, run, "gradient norm")
                run.measure(optimizer.tensors())
                more |= dict(skipped=True) if optimizer.skipped else {}
                if config.eval_every and run.due(config.eval_every, step):
                    with run.phase("validation"):
                        part = evaluate(model, data, config, positions, d, dp)
                        loss_sum, n_targets = sum_over(group, *part)
                        more["validation_loss"] = loss_sum / max(1, n_targets)
                run.log(loss, grad_norm, learning_rate(step, config), tokens.numel() * dp * cp, **more)
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
