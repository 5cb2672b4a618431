"""Activations wait in host memory for their backward (`--recompute offload`).

What a layer saves for its backward is copied into pinned memory of the host, and copied back when
backward needs it. Between the two, the GPU's memory is free for other layers.

    forward      layer 0 -> host    layer 1 -> host    layer 2 -> host
    backward                                           layer 2 <- host    layer 1 <- host    ...

Weights and RoPE's tables stay, because the GPU holds them anyway. Copies are queued on the stream
that computes. So the host never waits, but while a copy runs the GPU computes nothing; frameworks
use a stream of their own, and copy during other layers' computation.

THE LAW. A tensor that several operators save is sent once for each: q_proj, k_proj and v_proj each
send their common input. With h = dim, k = kv heads x head_dim, f = ffn_dim, a = heads, and e bytes
a number, a layer sends e (10 h + 2 k + 4 f) + 4 a + 8 bytes a token to the host, and back; for tiny
in bf16 on a GPU 5,672. With `--recompute full,offload` a layer keeps only its input, and sends e h:
256.

Source: Rhu et al. 2016, "vDNN"; torch.autograd.graph.save_on_cpu, which also copies weights.

Run it:    python -m extras step01_single_gpu.py --recompute offload
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.model import Decoder
from step01_single_gpu import RECOMPUTE, recompute_layers, recompute_nothing


def memory_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor: the same for all its views."""
    return tensor.untyped_storage()._cdata


def to_host(stays: set[int], tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Called when autograd saves a tensor: its device, and a copy on the host unless it stays."""
    if memory_of(tensor) in stays:
        return tensor.device, tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, copy.copy_(tensor, non_blocking=True)


def to_device(saved: tuple[torch.device, Tensor]) -> Tensor:
    """Called when backward needs the tensor."""
    device, tensor = saved
    return tensor.to(device, non_blocking=True)


def offloaded(forward: Callable, layer: nn.Module, x: Tensor, *tables: Tensor) -> Tensor:
    """The forward of a layer, which saves its activations on the host. `tables`: those of RoPE."""
    stays = {memory_of(tensor) for tensor in (*layer.parameters(), *tables)}
    with saved_tensors_hooks(partial(to_host, stays), to_device):
        return forward(x, *tables)


def offload_layers(layers: Callable, model: Decoder, **options: Any):
    """Let each layer save its activations on the host. `layers`: another entry of RECOMPUTE, which
    says what it saves.
    """
    layers(model, **options)
    for layer in model.model.layers.values():
        layer.forward = partial(offloaded, layer.forward, layer)


RECOMPUTE["offload"] = partial(offload_layers, recompute_nothing)
RECOMPUTE["full,offload"] = partial(offload_layers, recompute_layers)
