"""A library that packs numbers into smaller messages. The second function of each pair unpacks them.

quantise, dequantise    8 bits a number, and an fp32 scale for each 256 of them: 1 + 4/256 bytes a number
pick, put_back          only the largest numbers, each with its place: 8 bytes (12 in fp64)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers with one scale


def in_blocks(values: Tensor) -> Tensor:
    """Splits [..., length] into [..., blocks, 256], padded with zeros."""
    return F.pad(values, (0, -values.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def quantise(values: Tensor) -> Tensor:
    """Rounds [..., length] floats to int8 [..., length + 4 blocks]: multiples of a scale, then the scales, fp32."""
    blocks = in_blocks(values)
    scales = (blocks.abs().amax(-1, keepdim=True).float() / 127).clamp(min=torch.finfo(torch.float32).tiny)
    whole = (blocks / scales).round().to(torch.int8).flatten(-2)[..., : values.shape[-1]]
    return torch.cat((whole, scales.flatten(-2).contiguous().view(torch.int8)), dim=-1)


def dequantise(message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantise`."""
    scales = message[..., length:].clone(memory_format=torch.contiguous_format)  # a copy begins at a whole float
    values = in_blocks(message[..., :length]) * scales.view(torch.float32)[..., None]
    return values.flatten(-2)[..., :length].to(dtype)


def pick(values: Tensor, fraction: float) -> Tensor:
    """Picks the largest values: [n, length] floats -> int32 [n, k], each row with their bits, then their places."""
    places = values.abs().topk(max(1, int(fraction * values.shape[-1]))).indices
    return torch.cat((values.gather(-1, places).view(torch.int32), places.int()), dim=-1)


def put_back(message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `pick`: numbers that were not sent become zero."""
    words = dtype.itemsize // 4
    bits, places = message.tensor_split([message.shape[-1] * words // (words + 1)], dim=-1)
    values = torch.zeros(len(message), length, dtype=dtype, device=message.device)
    return values.scatter_(-1, places.long(), bits.flatten().view(dtype).view_as(places))
