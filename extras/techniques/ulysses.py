"""Ulysses in place of the ring (--cp-mode ulysses): swap tokens for heads, attend, and swap back.

In attention a head needs all tokens, and no other head. So a rank gives away the tokens of other
ranks' heads, and gets all tokens of its own (Jacobs et al. 2023, "DeepSpeed Ulysses"). With 2
ranks, 4 tokens t0 to t3 and 2 heads A and B:

                         rank 0                    rank 1
    before attention     t0 t1 of heads A B        t2 t3 of heads A B        [batch, s/n, heads, d]
    in attention         t0 t1 t2 t3 of head A     t0 t1 t2 t3 of head B     [batch, s, heads/n, d]
    after attention      t0 t1 of heads A B        t2 t3 of heads A B        [batch, s/n, heads, d]

Each swap is an all-to-all, and its backward is the reverse swap. Nothing hides the messages. n must
divide the heads (with tp, those of a rank). If there are fewer key/value heads than ranks, they are
repeated before the swap. The ring has no such limits.

LAW. Let the q of a rank's tokens have Q bytes, and k and v together B. In each layer and
micro-batch, a rank sends q, k, v and the output, and in backward the gradients of all four:

    (n-1)/n (2 Q + B) forward, and as many bytes backward

For tiny in fp32 with cp 4, Q = 4 sequences x 64 tokens x 8 heads x 16 x 4 bytes = 131,072 bytes.
B is the same: k and v have half as many heads each. So a rank sends 2 x 3/4 x 393,216 = 589,824
bytes; in the ring it sends 1,310,720.

Run it:    torchrun --nproc_per_node=4 -m extras step05_cp_ring.py --cp 4 --cp-mode ulysses
You should see step 1's losses.
"""

import torch
from torch import Tensor

from common import UserError
from common.comm import Group, all_to_all
from common.model import attend
from step05_cp_ring import CONTEXT, ContextMode, ordered_positions


class Swap(torch.autograd.Function):
    """Give away shards of one dimension, and gather those of another. Backward does the reverse.

    x [batch, s/n, heads, d], given 2, gathered 1 -> [batch, s, heads/n, d]; given 1, gathered 2 is
    the way back.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, given: int, gathered: int) -> Tensor:
        """One all-to-all: a shard for each rank."""
        ctx.group = group
        ctx.given = given
        ctx.gathered = gathered
        shards = x.unflatten(given, (group.size, -1)).movedim(given, 0).contiguous()
        received = torch.empty_like(shards)  # [n, ...]: a shard from each rank
        all_to_all(received, shards, group).wait()
        return received.movedim(0, gathered).flatten(gathered, gathered + 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The gradient of the output -> that of x."""
        return Swap.apply(grad, ctx.group, ctx.gathered, ctx.given), None, None, None


def check_heads(heads: int, kv_heads: int, n: int):
    """Raise UserError unless n ranks can get the same number of heads each. (With tp, these are the
    heads of one rank of tp.)
    """
    if heads % n or (kv_heads % n and n % kv_heads):
        raise UserError(
            f"--cp-mode ulysses: --cp {n} must divide a rank's {heads} heads, and divide its "
            f"{kv_heads} key/value heads or be a multiple of them: use --cp-mode zigzag"
        )


def swapped_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Replaces `attend`: q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d] -> like q. Raises
    UserError if heads do not suffice.
    """
    check_heads(q.shape[2], k.shape[2], group.size)
    copies = max(1, group.size // k.shape[2])  # of each key/value head, so that each rank gets one
    q = Swap.apply(q, group, 2, 1)
    k = Swap.apply(k.repeat_interleave(copies, 2), group, 2, 1)
    v = Swap.apply(v.repeat_interleave(copies, 2), group, 2, 1)
    return Swap.apply(attend(q, k, v), group, 1, 2)


CONTEXT["ulysses"] = ContextMode(ordered_positions, swapped_attention)
