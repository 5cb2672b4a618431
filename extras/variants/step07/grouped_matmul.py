"""Multiplies all experts of a layer in one grouped matmul, if a kernel supports it (`--expert-matmul grouped`).

torch's kernel accepts numbers of at most 32 bits, if the length of a row is a multiple of 16 bytes. On GPUs it is used
only for bf16 on Hopper and Blackwell. (On other GPUs it would copy the offsets to the host for each product, and loop
over experts there.) Otherwise experts are multiplied one by one, as in step 7. The host never waits for the GPU here,
because it knows the counts from the dispatch. In step 7, `ExpertLinear.forward` would be `multiply`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import step07_moe_ep as step07
from extras.variants import Parts


def ends(counts: list[int], like: Tensor) -> Tensor:
    """Returns where each expert's rows end, int32 [experts]. The copy to a GPU, from pinned memory, needs no wait."""
    where = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    return where.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else where


def can_group(*tensors: Tensor) -> bool:
    """Whether to use torch's kernel for these tensors. In a dry run, where tensors have no data, only for bf16."""
    if isinstance(tensors[0], FakeTensor) and tensors[0].dtype != torch.bfloat16:
        return False
    if tensors[0].is_cuda:
        major, _ = torch.cuda.get_device_capability(tensors[0].device)
        if major not in (9, 10) or any(t.dtype != torch.bfloat16 for t in tensors):
            return False
    return all(t.dtype.itemsize <= 4 and t.shape[-1] * t.dtype.itemsize % 16 == 0 and t.numel() for t in tensors)


def matmul(rows: Tensor, weights: Tensor, counts: list[int], way: str) -> Tensor:
    """Multiplies rows [n, in], the first counts[0] for expert 0 etc., by weights [experts, in, out] -> [n, out]."""
    if way == "grouped" and can_group(rows, weights, weights.mT):
        return torch._grouped_mm(rows, weights, offs=ends(counts, rows))
    return torch.cat([part @ w for part, w in zip(rows.split(counts), weights, strict=True)])


def outer(a: Tensor, b: Tensor, counts: list[int], way: str) -> Tensor:
    """Computes a^T b over the rows of each expert: a [n, out], b [n, in] -> [experts, out, in] (no rows: zero)."""
    if way == "grouped" and can_group(a, b):
        offs = ends(counts, a)
        products, empty = torch._grouped_mm(a.T, b, offs=offs), offs.diff(prepend=offs.new_zeros(1)) == 0
        return products.masked_fill_(empty[:, None, None], 0)  # which the kernel may leave uninitialised
    return torch.stack([x.T @ y for x, y in zip(a.split(counts), b.split(counts), strict=True)])


class Product(NamedTuple):
    """The functions that compute y, dx and dW of a linear layer, given (x, W), (dy, W) and (dy, x)."""

    y: Callable[[Tensor, Tensor], Tensor] = F.linear
    dx: Callable[[Tensor, Tensor], Tensor] = torch.matmul
    dw: Callable[[Tensor, Tensor], Tensor] = lambda dy, x: dy.flatten(0, -2).T @ x.flatten(0, -2)


def of_experts(way: str, counts: list[int]) -> Product:
    """The products of step 7's experts: x [n, in], sorted by expert, with `counts` rows each; W [experts, out, in]."""
    some = dict(counts=counts, way=way)  # way: --expert-matmul
    return Product(lambda x, w: matmul(x, w.mT, **some), partial(matmul, **some), partial(outer, **some))


class ProductLinear(torch.autograd.Function):
    """A linear layer with the given `Product`. With `later`, backward calls `later(weight, f)`; f() computes dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, product: Product, later: Callable | None = None) -> Tensor:
        """x [..., in] -> [..., out]."""
        ctx.save_for_backward(x)
        ctx.arguments = weight, product, later  # the parameter, because its values may move
        return product.y(x, weight)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy -> dx and dW (None with `later`). dW of an expert without rows is zero."""
        (weight, product, later), x, dy = ctx.arguments, ctx.saved_tensors[0].detach(), dy.contiguous()
        dw = None
        if weight.requires_grad:
            dw = later(weight, lambda: product.dw(dy, x)) if later else product.dw(dy, x)
        return product.dx(dy, weight) if ctx.needs_input_grad[0] else None, dw, None, None


def multiply(linear: step07.ExpertLinear, rows: Tensor, counts: list[int]) -> Tensor:
    """Replaces `ExpertLinear.forward`: one grouped product for all experts."""
    return ProductLinear.apply(rows, linear.weight, of_experts("grouped", counts))


@dataclass
class Flags:
    """Matrix products of experts."""

    expert_matmul: Literal["each", "grouped"] = "each"  # a matmul for each expert, or one for all if there is a kernel


def attach(config: Any, parts: Parts):
    """Replace the products of all experts on this rank."""
    if config.expert_matmul == "each" or "W" in parts.kinds:  # with W, split_backward.py uses these products
        return
    for module in parts.model.modules():
        if isinstance(module, step07.ExpertLinear):
            parts.instead(module, "forward", partial(multiply, module), by=__name__)
