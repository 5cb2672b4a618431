"""A variant for every step: --fuse-gradients lets backward do in one kernel what autograd does in several.

With 16-bit weights and fp32 sums in `.grad`, e.g. of bf16, autograd makes a weight gradient in 16 bits, casts it, and
adds it: 2 + (2 + 4) + (4 + 4 + 4) = 20 bytes for each parameter and micro-batch. Instead,

    linear layers   the matmul adds its fp32 product to the sum by itself: 4 + 4 bytes, while it computes, and nothing
                    is rounded to 16 bits (Megatron-LM's gradient_accumulation_fusion). Where several layers read one x,
                    the next matmul adds to dx, too, in place of 6 bytes for each element of x and layer
    head            the same, in the loss, chunk by chunk. The loss finds dW in *forward*, so it is told then by which
                    factor backward is going to scale it. There is no second sum of vocab x dim
    embedding       only the rows of tokens that occur are read and written
    experts         PyTorch's grouped matmul cannot add, so the product of 16 bits is added without the cast: 10 + 2
                    bytes, and 4 to clear experts without a token
    RoPE            the gradient of a rotation is the rotation back: 14 bytes for each element of q and k, in forward as
                    in backward. Autograd needs 28 and 46

These are the layers plain or cut by step 4. Norms and routers stay with autograd, and with --grad-dtype same the head.
Hooks on a parameter's `.grad` run as ever, after the addition.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.comm import Group, Pending
from common.model import Decoder, add_product, scaled
from common.model import project as plain_project
from common.moe import ExpertLinear, GroupedLinear


class FusedLinear(torch.autograd.Function):
    """Linear layers of one input, as step 4's ColumnParallelLinear, whose backward adds dW to `.grad` by itself."""

    @staticmethod
    def forward(
        ctx, x: Tensor, group: Group | None, gather: Callable, reduce: Callable, *weights: nn.Parameter
    ) -> tuple[Tensor, ...]:
        """x [batch, seq, in], weights [out, in] -> [batch, seq, out] for each; `gather` x before, `reduce` dx after."""
        ctx.arguments = group, gather, reduce, weights  # themselves: a saved one may come back without its `.grad`
        ctx.save_for_backward(x)
        full = gather(x, group).wait()
        return tuple(F.linear(full, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        """dy of each -> dx. Gathers beside dx, reduces beside dW."""
        (group, gather, reduce, weights), (x,) = ctx.arguments, ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        gathering = gather(x, group)
        if ctx.needs_input_grad[0]:
            dx = flat[0] @ weights[0]
            for dy, weight in zip(flat[1:], weights[1:], strict=True):
                dx.addmm_(dy, weight)
            reducing = reduce(dx.unflatten(0, grads[0].shape[:-1]), group)
        full = gathering.wait().flatten(0, -2)
        for dy, weight in zip(flat, weights, strict=True):
            if weight.requires_grad:
                add_product(total(weight), dy.T, full)
        return reducing.wait() if ctx.needs_input_grad[0] else None, *[None] * (3 + len(weights))


class FusedCrossEntropy(torch.autograd.Function):
    """A head's loss, which adds dW to `.grad` in forward."""

    @staticmethod
    def forward(ctx, loss: Any, factor: float, hidden: Tensor, weight: nn.Parameter, *more: Any) -> Tensor:
        """`loss` (ChunkedCrossEntropy, or step 4's) of hidden, weight and more; `factor`: its gradient in backward."""
        ctx.factor = factor
        keep = lambda grad_hidden, _: ctx.save_for_backward(grad_hidden)  # noqa: E731
        wanted = ctx.needs_input_grad[2], (total(weight), factor)
        return loss.forward(SimpleNamespace(needs_input_grad=wanted, save_for_backward=keep), hidden, weight, *more)

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        """Scale the gradient of hidden. Raises RuntimeError (on a GPU, where its kernel runs) for another factor."""
        (grad_hidden,) = ctx.saved_tensors
        as_told = (grad_loss / ctx.factor - 1).abs() < 1e-3
        torch._assert_async(as_told, f"--fuse-gradients: the loss was to be scaled by {ctx.factor}")
        return None, None, None if grad_hidden is None else scaled(grad_hidden, grad_loss), *[None] * 9


class FusedLookUp(torch.autograd.Function):
    """Rows of an embedding, whose backward adds to those rows of `.grad`, in a fixed order (as common/moe.py)."""

    @staticmethod
    def forward(ctx, tokens: Tensor, weight: nn.Parameter) -> Tensor:
        """tokens int64 [batch, seq], weight [rows, dim] -> [batch, seq, dim]."""
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Nothing is left for autograd."""
        sums, place = total(ctx.weight), ctx.saved_tensors[0].flatten()
        rows = grad.flatten(0, -2).to(sums.dtype)
        sums.index_put_((place,), rows, accumulate=True) if sums.is_cuda else sums.index_add_(0, place, rows)
        return None, None


class FusedGrouped(GroupedLinear):
    """The linear layer of all experts, whose backward adds dW to `.grad` without a cast."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: nn.Parameter, counts: Tensor) -> Tensor:
        """As GroupedLinear."""
        ctx.weight = weight
        return GroupedLinear.forward(ctx, x, weight, counts)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dx."""
        dx, dW, _ = GroupedLinear.backward(ctx, grad)
        if dW is not None:
            total(ctx.weight).add_(dW)
        return dx, None, None


class Rotation(torch.autograd.Function):
    """RoPE, whose backward rotates back. Each of four kernels computes half of the elements."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As `apply_rope`."""
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """dx."""
        return rotated(grad, *ctx.saved_tensors, -1.0), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """`apply_rope` of x [batch, seq, heads, head_dim] by the angles times `sign`, which is 1 or -1."""
    out, half = torch.empty_like(x), x.shape[-1] // 2
    (first, second), (cos, sin) = x.chunk(2, -1), (table[..., :half] for table in (cos, sin))
    torch.addcmul(first * cos, second, sin, value=-sign, out=out[..., :half])
    torch.addcmul(second * cos, first, sin, value=sign, out=out[..., half:])
    return out


def total(weight: nn.Parameter) -> Tensor:
    """`weight.grad`, made if it is not there yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return weight.grad


def stay(x: Tensor, group: Group | None) -> Pending:
    """No communication: the `gather` and the `reduce` of layers that are not cut by columns."""
    return Pending(group, []).returning(lambda: x.view_as(x))


def fused_project(group: Group | None, gather: Callable, reduce: Callable, x: Tensor, *linears: nn.Module) -> list:
    """Instead of `project`, or of step 4's with --tp-overlap."""
    return list(FusedLinear.apply(x, group, gather, reduce, *(linear.weight for linear in linears)))


def fused_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """Instead of the forward of a linear layer, plain or (with `add`) cut by rows."""
    (y,) = FusedLinear.apply(x, None, stay, stay, linear.weight)
    return linear.add(y) if hasattr(linear, "add") else y


def fused_cross_entropy(loss: Any, factor: Callable[[], float], hidden: Tensor, weight: Tensor, *more: Any) -> Tensor:
    """Instead of the `apply` of a head's loss; `factor()`: what this step's losses are scaled by."""
    if not weight.requires_grad or weight.grad_dtype.itemsize == 2:  # an evaluation; 16 bits lose small addends
        return loss.apply(hidden, weight, *more)
    return FusedCrossEntropy.apply(loss, factor(), hidden, weight, *more)


def fuse_block(block: nn.Module):
    """Take one module of a layer, in place."""
    project = getattr(block, "project", None)
    if project is plain_project:
        block.project = partial(fused_project, None, stay, stay)
    if getattr(project, "overlap", False):
        block.project = partial(fused_project, project.group, project.gather, project.reduce)
    if hasattr(block, "rotate"):
        block.rotate = Rotation.apply
    if isinstance(block, nn.Linear) or hasattr(block, "add"):
        block.forward = partial(fused_linear, block)
    if isinstance(block, ExpertLinear):
        block.forward = lambda x, counts: FusedGrouped.apply(x, block.weight, counts)


def make_room(model: Decoder):
    """Make the `.grad` of a head that has none, before its first forward, whose memory counts as activations."""
    if model.lm_head is not None and model.lm_head.weight.requires_grad:
        total(model.lm_head.weight)


def fuse_gradients(model: Decoder, factor: Callable[[], float]):
    """Take all layers, the embedding and the head of what a rank has of the model, in place."""
    for layer in model.model.layers.values():
        for block in layer.modules():
            fuse_block(block)
    embedding, head = model.model.embed_tokens, model.lm_head
    if isinstance(embedding, nn.Embedding):
        embedding.forward = lambda tokens: FusedLookUp.apply(tokens, embedding.weight)
    elif embedding is not None:
        embedding.look_up = FusedLookUp.apply
    if head is not None:
        head.cross_entropy = SimpleNamespace(apply=partial(fused_cross_entropy, head.cross_entropy, factor))
