"""All-gather in place of the ring (--cp-mode allgather): gather all keys and values, then attend.

Llama 3 was trained in this way (Dubey et al. 2024, section 3.3.2). As in the ring, queries stay on
their rank, and sequences are sharded in zigzag, so that all ranks have the same work. With 2 ranks:

    tokens of rank 0        chunks 0 and 3 of 4
    gathered                0 3 1 2            keys and values of rank 0, then those of rank 1
    sorted by position      0 1 2 3
    queries of chunk 0      keys 0             causal
    queries of chunk 3      keys 0 1 2, 3      all pairs, and the causal half

One all-gather replaces the ring's messages. Nothing hides it, but attention is PyTorch's own, once
for each chunk, and merges nothing. Its mask has a boolean for each query and key of a chunk, and
for backward a rank keeps the keys and values of all ranks: for very long sequences use a ring.

LAW. Let the k and v of a rank's tokens have B bytes, and their gradients, in fp32 or wider, G. In
each layer and micro-batch, a rank sends

    (n-1) B forward, (n-1) G backward          in the ring (n-1) B forward, (n-1) B + n G backward

For tiny in fp32 with cp 4, B = G = 4 sequences x 64 tokens x 2 x 4 heads x 16 x 4 bytes = 131,072
bytes. So a rank sends 6 B = 786,432 bytes; in the ring it sends 10 B = 1,310,720.

Run it:    torchrun --nproc_per_node=4 -m extras step05_cp_ring.py --cp 4 --cp-mode allgather
You should see step 1's losses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from common.comm import Group
from common.model import wide
from step04_tp_sp import gather_tokens, sum_and_shard_tokens
from step05_cp_ring import CONTEXT, ContextMode, zigzag_positions


class GatherKeys(torch.autograd.Function):
    """Gather the tokens of all ranks. Backward sums the ranks' terms of the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group) -> Tensor:
        """x [batch, s/n, width] -> [batch, s, width]: rank 0's tokens, rank 1's, ..."""
        ctx.group = group
        return gather_tokens(x, group)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """This rank's term [batch, s, width] -> dx [batch, s/n, width], summed in fp32 or wider."""
        dx = sum_and_shard_tokens(dy.to(wide(dy.dtype)), ctx.group)
        return dx.to(dy.dtype), None


def gather_in_order(x: Tensor, group: Group) -> Tensor:
    """Two chunks [batch, s/n, heads, d] -> all tokens in order of position [batch, s, heads, d]."""
    gathered = GatherKeys.apply(x.flatten(2), group).unflatten(2, x.shape[2:])
    chunks = gathered.chunk(2 * group.size, 1)
    first_chunks = chunks[0::2]  # rank r has chunk r first: 0, 1, ...
    second_chunks = chunks[1::2]  # and then chunk 2n-1-r: 2n-1, 2n-2, ...
    return torch.cat((*first_chunks, *reversed(second_chunks)), 1)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    """Replaces `attend`: q [batch, s/n, heads, d]; k, v [batch, s/n, kv_heads, d] -> like q."""
    keys_and_values = gather_in_order(torch.cat((k, v), -1), group)  # one message for both
    k, v = keys_and_values.transpose(1, 2).chunk(2, -1)
    outputs = []
    own_chunks = (group.rank, 2 * group.size - 1 - group.rank)
    for chunk, q_chunk in zip(own_chunks, q.transpose(1, 2).chunk(2, 2), strict=True):
        length = q_chunk.shape[2]
        end = (chunk + 1) * length
        # Query i of the chunk is token end - length + i, and sees the keys up to its own
        visible = torch.ones(length, end, dtype=torch.bool, device=q.device).tril(end - length)
        o = F.scaled_dot_product_attention(
            q_chunk, k[:, :, :end], v[:, :, :end], attn_mask=visible, enable_gqa=True
        )
        outputs.append(o)
    return torch.cat(outputs, 2).transpose(1, 2)


CONTEXT["allgather"] = ContextMode(zigzag_positions, gathered_attention)
