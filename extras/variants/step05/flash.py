"""Computes attention to parts of the keys by a fused kernel (`--cp-kernel flash`; Dao et al. 2022, "FlashAttention").

For each part of the keys, step 5 builds a matrix of scores, fp32 [batch, heads, queries, keys], which for s/n = 16,384
tokens and 32 heads has 34 GB. The flash kernel of `F.scaled_dot_product_attention` builds none. Here its private
operators are called, because the public function neither returns lse nor accepts one in backward. Messages stay the
same. On a GPU the kernel needs Ampere or later, a 16-bit dtype, and a head_dim that is a multiple of 8 and at most 256;
a CPU has no such limits. In step 5, `part_attention` and `part_gradients` would be the first two functions below.
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


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Replaces `part_attention` of step 5 by the flash kernel. The output o has the dtype of q."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return forward(q, k, v, 0.0, causal)[:2]  # 0.0: no dropout


def flash_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces `part_gradients` of step 5 by the kernel's backward. All gradients have the dtype of q."""
    given = do, q, k, v, o, lse.contiguous()  # a slice of the queries is not contiguous
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is off
    options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *options)


FLASH = flash_attention, flash_gradients


class KernelRing(torch.autograd.Function):
    """Step 5's `RingAttention` with any kernel: a pair of functions, for forward and backward (see allgather.py)."""

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
        """Send k and v round the ring, followed by their summed gradients in `dkv`, as in chapter 5."""
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


def with_kernel(inner: Callable, *qkv: Tensor, **more: Any) -> Tensor:
    """Wraps a layer's attention: give it the kernel FLASH. Step 5's ring takes no kernel: `kernel_ring` replaces it."""
    if getattr(inner, "func", None) is ring_attention:
        inner = partial(kernel_ring, **inner.keywords)
    return inner(*qkv, kernel=FLASH, **more)


@dataclass
class Flags:
    """Attention to a part of the keys."""

    cp_kernel: Literal["formula", "flash"] = "formula"  # how attention to a part of the keys is computed


WHOLE = "sequences are whole, and PyTorch's fused kernel computes attention already; leave it out"
REFUSES = [
    Refusal(dict(cp_kernel=SET, window=(0,), cp=(1,)), WHOLE),
    Refusal(dict(cp_kernel=SET, window=(0,), cp_mode=("ulysses",)), WHOLE),
]


def fits(q: Tensor) -> bool:
    """Whether the kernel accepts q [..., head_dim]: always on a CPU; on a GPU under the conditions at the top."""
    if not q.is_cuda:
        return True
    recent = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return recent and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def attach(config: Any, parts: Parts):
    """Let every layer use the kernel. Raises UserError if the kernel does not fit (see `fits`)."""
    if config.cp_kernel == "formula":
        return
    head_dim = parts.model.config.head_dim
    if not fits(next(parts.model.parameters()).new_empty(0, head_dim)):
        needs = "--dtype bf16, a GPU that is Ampere or later, and heads of a multiple of 8 up to 256"
        raise UserError(f"--cp-kernel flash: on a GPU it needs {needs} (here {head_dim})")
    for layer in parts.model.model.layers.values():
        parts.around(layer.self_attn, "attend", with_kernel, by=__name__)
