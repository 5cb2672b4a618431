"""Attends to parts of the keys by fused kernels (`--cp-kernel flash` or `cudnn`; Dao et al. 2022, "FlashAttention").

For each part of the keys, step 5 builds a matrix of scores, fp32 [batch, heads, queries, keys], which for s/n = 16,384
tokens and 32 heads has 34 GB. The kernels of `F.scaled_dot_product_attention` build none. They are called as private
operators, because the public function does not return lse, and its backward does not take one. Messages stay the same.

    on a GPU    dtype      GPU                                             head_dim
    flash       16 bits    Ampere or later                                 a multiple of 8 up to 256
    cudnn       16 bits    Hopper, Blackwell (capability 9.0 or 10.x)      a multiple of 8 up to 128

On a CPU both values use its flash kernel, for any dtype. `cudnn` takes 20 ms or more to plan for each new length, so
documents and windows, whose parts have many lengths, are refused with it. In step 5, `part_attention` and
`part_gradients` would be two of the four functions below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from common import UserError
from common.comm import Group, Pending, exchange
from common.model import wide
from extras.variants import Parts
from extras.variants.record import SET, Refusal
from extras.variants.step05.allgather import add_gradients, attend, attend_to
from step05_cp_ring import ring_attention, travel


def fits(q: Tensor, kernel: str = "flash") -> bool:
    """Whether a kernel takes q [..., head_dim]: on a CPU always, on a GPU as the table above says."""
    if not q.is_cuda:
        return True
    capability = torch.cuda.get_device_capability(q.device)
    known, most = (capability >= (8, 0), 256) if kernel == "flash" else (capability[0] in (9, 10), 128)
    return known and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= most


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Replaces `part_attention` of step 5. o has the dtype of q."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return forward(q, k, v, 0.0, causal)[:2]  # 0.0: no dropout


def flash_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `part_gradients` of step 5. All gradients have the dtype of q."""
    given = do, q, k, v, o, lse.contiguous()  # rows of lse may have gaps between heads
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout
    options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *options)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As `flash_attention`. cuDNN's lse is [batch, heads, queries, 1]."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.contiguous() for x in (q, k, v)), attn_bias=None, compute_log_sumexp=True, is_causal=causal
    )
    return o, lse.squeeze(-1)


def cudnn_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `flash_gradients`.

    All inputs are made contiguous, because PyTorch looks up cuDNN's plan by the shapes and strides of q, k, v alone.
    """
    given = (x.contiguous() for x in (do, q, k, v, o, lse[..., None]))
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout, and its offset
    options = seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given, *options)


FLASH, CUDNN = (flash_attention, flash_gradients), (cudnn_attention, cudnn_gradients)


class KernelRing(torch.autograd.Function):
    """Step 5's `RingAttention`, with any kernel."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, visible: Callable, kernel: tuple) -> Tensor:
        """q [batch, heads, s/n, d]; k, v [batch, kv_heads, s/n, d] -> like q."""
        ctx.group, ctx.visible, (attention, ctx.gradients) = group, visible, kernel
        own = torch.stack((k, v))
        o, lse = attend_to(ctx, travel(own, group), q, attention)
        ctx.save_for_backward(q, own, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor):
        """dkv follows k and v round the ring, as in step 5."""
        q, own, o, lse = ctx.saved_tensors
        right, left = (ctx.group.rank + 1) % ctx.group.size, (ctx.group.rank - 1) % ctx.group.size
        dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, own))
        arriving = Pending()
        for source, kv in travel(own, ctx.group):
            found = torch.zeros_like(dkv)
            add_gradients(ctx, (do, q, o, lse), source, kv, dq, found)
            arriving.wait()
            dkv += found
            outgoing, dkv = dkv, torch.empty_like(dkv)
            arriving = exchange([(outgoing, right)], [(dkv, left)], ctx.group)
        arriving.wait()
        return dq.to(q.dtype), *dkv.to(q.dtype), None, None, None


kernel_ring = partial(attend, KernelRing)


def with_kernel(inner: Callable, *qkv: Tensor, kernel: tuple, **more: Any) -> Tensor:
    """Wraps a layer's attention: pass it this kernel. Step 5's own ring takes none, so `kernel_ring` replaces it."""
    if getattr(inner, "func", None) is ring_attention:
        inner = partial(kernel_ring, **inner.keywords)
    return inner(*qkv, kernel=kernel, **more)


@dataclass
class Flags:
    """Kernels for parts of the keys."""

    cp_kernel: Literal["formula", "flash", "cudnn"] = "formula"  # how attention to a part of the keys is computed


WHOLE = "sequences are whole, and PyTorch's fused kernel computes attention already; leave it out"
PLANS = "cuDNN would make a new plan for each length; use --cp-kernel flash"
REFUSES = [
    Refusal(dict(cp_kernel=SET, window=(0,), cp=(1,)), WHOLE),
    Refusal(dict(cp_kernel=SET, window=(0,), cp_mode=("ulysses",)), WHOLE),
    Refusal(dict(cp_kernel=("cudnn",), window=SET), PLANS, None),
    Refusal(dict(cp_kernel=("cudnn",), documents=SET), PLANS, None),
]


def attach(config: Any, parts: Parts):
    """Let every layer use the kernel. Raises UserError."""
    if config.cp_kernel == "formula":
        return
    head_dim, cudnn = parts.model.config.head_dim, config.cp_kernel == "cudnn"
    sample = next(parts.model.parameters()).new_empty(0, head_dim)
    if not fits(sample, config.cp_kernel):
        gpu, most = ("Hopper or Blackwell with capability 9.0 or 10.x", 128) if cudnn else ("Ampere or later", 256)
        needs = f"--dtype bf16, a GPU that is {gpu}, and heads of a multiple of 8 up to {most}"
        raise UserError(f"--cp-kernel {config.cp_kernel}: on a GPU it needs {needs} (here {head_dim})")
    kernel = CUDNN if cudnn and sample.is_cuda else FLASH
    for layer in parts.model.model.layers.values():
        parts.around(layer.self_attn, "attend", partial(with_kernel, kernel=kernel), by=__name__)
