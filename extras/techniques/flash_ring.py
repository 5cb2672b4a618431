"""The ring with a fused kernel for parts of the keys (--cp-mode flash): no matrix of scores.

For each part of the keys, step 5's formulas build a matrix of scores, fp32 [batch, heads, queries,
keys]. For s/n = 16,384 tokens and 32 heads it has 16,384 x 16,384 x 32 x 4 bytes = 34 GB.
FlashAttention (Dao et al. 2022; Dao 2023) computes block by block, and stores only the output o and
lse = log sum exp(scores), one number for each query and head. `merge` needs exactly these two. In
backward the kernel computes the scores again, and needs lse:

    forward     kernel(q, k, v of a part)                  -> the part's o and lse, which are merged
    backward    kernel(do, q, k, v of a part, o, lse)      -> the part's terms of dq, dk and dv

The point is the second line: this o and this lse are those of *all* keys. Then exp(scores - lse) is
the part's share of the whole softmax, and the terms of all parts add up, as in `part_gradients`.
F.scaled_dot_product_attention does not return lse, so we call the operators behind it.

LAW. The messages are those of step 5's zigzag, to the byte.

On a GPU the kernel needs 16-bit numbers, compute capability 8.0 (Ampere) or later, and a head_dim
that is a multiple of 8 and at most 256. On a CPU, PyTorch's own flash kernel takes its place.

Run it:    torchrun --nproc_per_node=4 -m extras step05_cp_ring.py --cp 4 --cp-mode flash
You should see step 1's losses.
"""

import torch
from torch import Tensor
from torch.ops import aten

from common import UserError
from common.comm import Group, Pending
from common.model import wide
from step05_cp_ring import (
    CONTEXT,
    ContextMode,
    merge,
    pass_on,
    travel,
    zigzag_positions,
    zigzag_visible,
)

NO_DROPOUT = 0.0


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`part_attention` by the kernel -> o, like q, and lse [batch, heads, queries], wide."""
    if q.is_cuda:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, NO_DROPOUT, causal)
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, NO_DROPOUT, causal)
    return o, lse


def flash_gradients(
    do: Tensor, q: Tensor, o: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`part_gradients` by the kernel -> dq, dk and dv, in the dtype of q. o, lse: of *all* keys."""
    lse = lse.contiguous()  # that of the second chunk alone is a view
    if not q.is_cuda:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(do, q, k, v, o, lse, NO_DROPOUT, causal)
    lengths = (None, None, q.shape[2], k.shape[2])  # None: the same for all sequences of the batch
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    backward = aten._scaled_dot_product_flash_attention_backward
    return backward(do, q, k, v, o, lse, *lengths, NO_DROPOUT, causal, unused, unused[:0])


def check_kernel(q: Tensor):
    """Raise UserError if the kernel does not support the GPU, the dtype or the head_dim."""
    if not q.is_cuda:
        return
    if q.dtype.itemsize != 2 or torch.cuda.get_device_capability(q.device) < (8, 0):
        raise UserError("--cp-mode: on a GPU flash needs --dtype bf16, and Ampere or later")
    head_dim = q.shape[-1]
    if head_dim % 8 or head_dim > 256:
        raise UserError(
            f"--cp-mode: on a GPU flash needs a head_dim that is a multiple of 8 and at most 256, "
            f"and the model's is {head_dim}: use zigzag or allgather"
        )


class FlashRing(torch.autograd.Function):
    """`RingAttention` of step 5, in zigzag, by the kernel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> o, like q."""
        own_kv = torch.stack((k, v))
        o = torch.zeros_like(q, dtype=wide(q.dtype))
        lse = torch.full_like(o[..., 0], -torch.inf)
        for source, source_kv in travel(own_kv, group):
            queries, keys, causal = zigzag_visible(group.rank, source, q.shape[2])
            source_k, source_v = source_kv[:, :, :, keys]
            part_o, part_lse = flash_attention(q[:, :, queries], source_k, source_v, causal)
            merge(o[:, :, queries], lse[:, :, queries], part_o.to(o.dtype), part_lse)
        o = o.to(q.dtype)
        ctx.save_for_backward(q, own_kv, o, lse)
        ctx.group = group
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """dq, dk and dv; k, v and the sums of dk and dv travel as in step 5."""
        q, own_kv, o, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        received = torch.zeros_like(own_kv, dtype=dq.dtype)
        arriving = Pending()
        for source, source_kv in travel(own_kv, ctx.group):
            queries, keys, causal = zigzag_visible(ctx.group.rank, source, q.shape[2])
            of_queries = [x[:, :, queries] for x in (do, q, o, lse)]
            part_dq, *part_dkv = flash_gradients(*of_queries, *source_kv[:, :, :, keys], causal)
            arriving.wait()
            dq[:, :, queries] += part_dq
            received[:, :, :, keys] += torch.stack(part_dkv)
            received, arriving = pass_on(received, ctx.group)
        arriving.wait()
        dk, dv = received.to(q.dtype)
        return dq.to(q.dtype), dk, dv, None


def flash_ring(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Replaces `attend`: q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d] -> like q. Raises
    UserError if the kernel cannot do it.
    """
    check_kernel(q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return FlashRing.apply(q, k, v, group).transpose(1, 2)


CONTEXT["flash"] = ContextMode(zigzag_positions, flash_ring)
