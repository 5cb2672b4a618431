"""A library: numbers in fewer bytes, for what is sent. Each function here makes a message, or undoes it.

quantise, dequantise    8 bits a number, in blocks of 256 with an fp32 scale each: 260 bytes a block
pick, put_back          the largest numbers alone, with their places: 8 bytes each (12 in fp64)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256


def quantise(values: Tensor) -> Tensor:
    """[n, length] floats -> int8 [n, blocks, 260]: values in units of max |value| / 127, and that scale."""
    blocks = F.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).float().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.cat(((blocks / scale).round().to(torch.int8), scale.view(torch.int8)), dim=-1)


def dequantise(blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`."""
    values = blocks[..., :BLOCK] * blocks[..., BLOCK:].contiguous().view(torch.float32)
    return values.flatten(-2)[..., :length].to(dtype)


def pick(values: Tensor, fraction: float) -> Tensor:
    """[n, length] floats -> int32 [n, k]: the bits of each row's largest values, and behind them their places."""
    places = values.abs().topk(max(1, int(fraction * values.shape[-1]))).indices
    return torch.cat((values.gather(-1, places).view(torch.int32), places.int()), dim=-1)


def put_back(message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pick`; what was not sent is zero."""
    words = dtype.itemsize // 4
    bits, places = message.tensor_split([message.shape[-1] * words // (words + 1)], dim=-1)
    values = torch.zeros(len(message), length, dtype=dtype, device=message.device)
    return values.scatter_(-1, places.long(), bits.flatten().view(dtype).view_as(places))
