"""A fused kernel for parts of the keys (--cp-mode flash and allgather-flash): no matrix of scores.

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

LAW. The messages of flash are those of step 5's zigzag, and those of allgather-flash are those of
allgather, to the byte.

On a GPU the kernel needs 16-bit numbers, compute capability 8.0 (Ampere) or later, and a head_dim
that is a multiple of 8 and at most 256. On a CPU, PyTorch's own flash kernel takes its place.

Run it:    torchrun --nproc_per_node=4 -m extras step05_cp_ring.py --cp 4 --cp-mode flash
You should see step 1's losses.
"""

from functools import partial

import torch
from torch import Tensor
from torch.ops import aten

from common import UserError
from common.model import ModelConfig
from common.trainer import choose_device
from extras.techniques.allgather_context import gathered_attention
from step05_cp_ring import (
    CONTEXT,
    Config,
    ContextMode,
    ring_attention,
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
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
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


def check_kernel(config: Config, shape: ModelConfig):
    """Raise UserError if the kernel does not support the GPU, the dtype or the head_dim."""
    device, dtype = choose_device(config)
    if device.type != "cuda":
        return
    if dtype.itemsize != 2 or torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError("--cp-mode: on a GPU flash needs --dtype bf16, and Ampere or later")
    if shape.head_dim % 8 or shape.head_dim > 256:
        raise UserError(
            f"--cp-mode: on a GPU flash needs a head_dim that is a multiple of 8 and at most 256, "
            f"and the model's is {shape.head_dim}: use zigzag or allgather"
        )


KERNEL = dict(part_forward=flash_attention, part_backward=flash_gradients)
in_ring = partial(ring_attention, visible_parts=zigzag_visible, **KERNEL)
after_gather = partial(gathered_attention, **KERNEL)
CONTEXT["flash"] = ContextMode(zigzag_positions, in_ring, check_kernel)
CONTEXT["allgather-flash"] = ContextMode(zigzag_positions, after_gather, check_kernel)
