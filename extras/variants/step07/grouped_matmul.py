"""One matmul for all experts of a layer (`--expert-matmul grouped`), instead of one for each, where a kernel takes it.

torch's kernel takes up to 32 bits and rows of a multiple of 16 bytes; on a GPU, bf16 on Hopper and Blackwell. (On other
GPUs it would copy the offsets to the host for each product, and loop there.) All else goes expert by expert, as in step
7. The host never waits for the GPU here: it knows the counts from the dispatch. In step 7, `ExpertLinear.forward` would
be the three lines of `GroupedLinear.forward`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import step07_moe_ep as step07
from extras.variants import Parts

SINCE = step07.Config


def ends(counts: list[int], like: Tensor) -> Tensor:
    """int32 [experts]: where each expert's rows end. From pinned memory the copy does not stop the host."""
    where = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return where.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else where


def can_group(*tensors: Tensor) -> bool:
    """Whether torch's kernel takes these. For tensors without numbers, of a dry run, it has a rule for bf16 alone."""
    if isinstance(tensors[0], FakeTensor) and tensors[0].dtype != torch.bfloat16:
        return False
    if tensors[0].is_cuda:
        major, _ = torch.cuda.get_device_capability(tensors[0].device)
        if major not in (9, 10) or any(t.dtype != torch.bfloat16 for t in tensors):
            return False
    return all(t.dtype.itemsize <= 4 and t.shape[-1] * t.dtype.itemsize % 16 == 0 and t.numel() for t in tensors)


def each_matmul(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows [n, in], the first counts[0] of them times weights[0] [in, out], and so on -> [n, out]."""
    return torch.cat([part @ w for part, w in zip(rows.split(counts), weights, strict=True)])


def each_outer(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """a [n, out], b [n, in] -> [experts, out, in]: a^T b over the rows of each expert, zero if it has none."""
    return torch.stack([x.T @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])


def grouped_matmul(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """As `each_matmul`."""
    if can_group(rows, weights, weights.mT):
        return torch._grouped_mm(rows, weights, offs=ends(counts, rows))
    return each_matmul(rows, weights, counts)


def grouped_outer(a: Tensor, b: Tensor, counts: list[int]) -> Tensor:
    """As `each_outer`."""
    if can_group(a, b):
        offs = ends(counts, a)
        outer, empty = torch._grouped_mm(a.T, b, offs=offs), offs.diff(prepend=offs.new_zeros(1)) == 0
        return outer.masked_fill_(empty[:, None, None], 0)  # which the kernel may have left unwritten
    return each_outer(a, b, counts)


PRODUCTS = {"each": (each_matmul, each_outer), "grouped": (grouped_matmul, grouped_outer)}  # by --expert-matmul


class GroupedLinear(torch.autograd.Function):
    """rows [n, in] sorted by expert, weight [experts, out, in] -> [n, out]."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        """`counts` of the rows for each expert."""
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return grouped_matmul(rows, weight.mT, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """d rows [n, in] and d weight, zero for an expert without rows."""
        (rows, weight), grad = ctx.saved_tensors, grad.contiguous()
        grad_rows = grouped_matmul(grad, weight, ctx.counts) if ctx.needs_input_grad[0] else None
        return grad_rows, grouped_outer(grad, rows, ctx.counts) if ctx.needs_input_grad[1] else None, None


def group(linear: step07.ExpertLinear, rows: Tensor, counts: list[int]) -> Tensor:
    """Replaces `ExpertLinear.forward`."""
    return GroupedLinear.apply(rows, linear.weight, counts)


@dataclass
class Flags:
    """Products of experts."""

    expert_matmul: Literal["each", "grouped"] = "each"  # a product for each expert, or one for all, where a kernel can


def attach(config: Any, parts: Parts):
    """Replace the products of all experts on this rank."""
    if config.expert_matmul == "each" or "W" in parts.kinds:  # then split_backward.py takes these products
        return
    for module in parts.model.modules():
        if isinstance(module, step07.ExpertLinear):
            parts.instead(module, "forward", partial(group, module), by=__name__)
