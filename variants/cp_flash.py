"""Fused kernels for parts of the keys (`--cp-kernel flash`; Dao et al. 2022, "FlashAttention").

Step 5's formulas make a matrix of scores, fp32 [batch, heads, queries, keys]. That is simple, and exact in fp32; with
s/n = 16,384 tokens and 32 heads it is 34 GB. The kernels that PyTorch has behind `F.scaled_dot_product_attention` make
no such matrix, read 16 bits, and take fewer key/value heads than query heads as they are. They are private operators:
the public function does not return lse, and its backward does not take one.

Use it on a GPU with --dtype bf16, for any sequence that is long enough for --cp. Messages stay the same. What it
needs: on a GPU 16 bits, Ampere or later, and heads of a multiple of 8 up to 256; on a CPU nothing.

In step 5, `part_attention` and `part_gradients` would be the two below.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from common import UserError
from step05_cp_ring import Config
from variants import Parts

SINCE = Config


@dataclass
class Flags:
    """Kernels of context parallelism."""

    cp_kernel: Literal["formula", "flash"] = "formula"  # how a part of the keys is computed; flash: fused, for GPUs


def check(config: Any, world: int):
    """It must matter. Raises UserError."""
    if config.cp_kernel == "flash" and (config.cp == 1 or config.cp_mode == "ulysses"):
        why = "--cp is 1" if config.cp == 1 else "with --cp-mode ulysses sequences are whole"
        raise UserError(f"--cp-kernel flash: {why}, and attention is PyTorch's fused one already; leave it out")


def fits(q: Tensor) -> bool:
    """Whether the kernels take q [..., head_dim]: on a CPU always, on CUDA 16 bits from Ampere on."""
    small = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return not q.is_cuda or (small and torch.cuda.get_device_capability(q.device) >= (8, 0))


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As `part_attention` of step 5; o has the dtype of q."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return forward(q, k, v, 0.0, causal)[:2]  # 0.0: no dropout


def flash_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `part_gradients` of step 5; in the dtype of q."""
    given = do, q, k, v, o, lse.contiguous()  # rows of lse may have gaps between heads
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout
    options = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:0]
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, *options)


FLASH = flash_attention, flash_gradients


def with_kernels(attend: Callable, q: Tensor, *others: Tensor, **more: Any) -> Tensor:
    """Around attention of step 5: the same, with these kernels."""
    return attend(q, *others, kernel=FLASH, **more)


def attach(config: Any, parts: Parts):
    """Let every layer use the kernels. Raises UserError."""
    if config.cp_kernel != "flash":
        return
    shape = parts.model.config
    if not fits(next(parts.model.parameters()).new_empty(0, shape.head_dim)):
        needs = "--dtype bf16, an Ampere GPU or a later one, and heads of a multiple of 8 up to 256"
        raise UserError(f"--cp-kernel flash: on a GPU it needs {needs} (here {shape.head_dim})")
    for layer in parts.model.model.layers.values():
        parts.around(layer.self_attn, "attend", with_kernels, by=__name__)
