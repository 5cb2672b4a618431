"""A second helping of step 2: gradients summed in fewer bits."""

from typing import Any

import torch
from torch import Tensor

from common.comm import Group, all_gather, all_to_all

BLOCK = 256  # values that share one scale in int8 compression


def quantise(values: Tensor) -> Tensor:
    """[..., 256] floats -> int8 [..., 260]: the values in units of scale = max/127, then the scale's four bytes."""
    scale = (values.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat(((values / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(blocks: Tensor) -> Tensor:
    """The inverse of `quantise`: int8 [..., 260] -> fp32 [..., 256]."""
    return blocks[..., :BLOCK] * blocks[..., BLOCK:].contiguous().view(torch.float32)


def narrow_sum(values: Tensor, group: Group, config: Any) -> tuple[Tensor, Tensor]:
    """Sum in 16 or 8 bits. Takes this rank's values [elements]; returns (sum over the group, what of ours was lost).

    Adding in so few bits would round at every rank, or overflow. So rank r receives slice r of everyone (all-to-all),
    adds up in fp32, and makes the sum narrow again for all to gather; what that loses, rank r keeps.
    """
    narrow, widen = (quantise, dequantise) if config.compress == "int8" else (Tensor.bfloat16, Tensor.float)
    own = values.view(group.size, -1, BLOCK)
    sent = narrow(own)
    lost = own - widen(sent)
    received = torch.empty_like(sent)
    all_to_all(received, sent, group).wait()
    total = widen(received).sum(0)
    summed = narrow(total)
    lost[group.rank] += total - widen(summed)
    all_gather(received.view(-1), summed.view(-1), group).wait()
    return widen(received).view(-1).to(values.dtype), lost.view(-1)


def topk_sum(values: Tensor, group: Group, config: Any) -> tuple[Tensor, Tensor]:
    """Sum only the largest values of each rank; takes and returns the same as `narrow_sum`.

    Every rank gathers everyone's k values (fp32) with their indices in the buffer (int32), and adds them up.
    """
    k = max(1, int(config.topk_fraction * len(values)))
    places = values.abs().topk(k).indices
    message = torch.stack((values[places].float().view(torch.int32), places.int()))
    everyone = message.new_empty(group.size, 2, k)
    all_gather(everyone.view(-1), message.view(-1), group).wait()
    lost, total = values.clone(), torch.zeros_like(values)
    lost[places] -= values[places].float()
    for numbers, at in everyone:
        total[at.long()] += numbers.view(torch.float32)
    return total, lost


COMPRESSED_SUMS = {"bf16": narrow_sum, "int8": narrow_sum, "topk": topk_sum}
