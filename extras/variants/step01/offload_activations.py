"""Stores activations on the host until backward (`--recompute offload`; Rhu et al. 2016, "vDNN").

What a layer saves for its backward is copied into pinned memory of the host, and backward copies it to the GPU again.
Weights and RoPE's tables stay, because the GPU holds them anyway. A tensor that several operators save is sent once
for each of them: the input of q_proj, k_proj and v_proj three times. With h = dim, k = kv heads x head_dim, f =
ffn_dim, a = heads, and e bytes an element, a layer sends e (10 h + 2 k + 4 f) + 4 a + 8 bytes a token to the host, and
back. Copies run on the stream that computes, so they are in order and the host never waits, but meanwhile the GPU
computes nothing. (Frameworks copy on a stream of their own.) In step 1 RECOMPUTE would have one more entry.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from common.model import Decoder
from extras.variants.record import SET, Refusal
from step01_single_gpu import RECOMPUTE


def to_host(here: set[int], tensor: Tensor) -> tuple[torch.device, Tensor]:
    """Called when autograd saves a tensor: returns its device and a host copy (itself, if its storage is in `here`)."""
    if tensor.untyped_storage()._cdata in here:
        return tensor.device, tensor
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, there.copy_(tensor, non_blocking=True)


def to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Copy a saved tensor back to its device, before backward computes with it."""
    return tensor.to(device, non_blocking=True)


def offloaded(forward: Callable, x: Tensor, *tables: Tensor, layer: nn.Module) -> Tensor:
    """Replaces a layer's forward: what the layer saves goes to the host, except its parameters and RoPE's `tables`."""
    here = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *tables)}
    with saved_tensors_hooks(partial(to_host, here), lambda saved: to_device(*saved)):
        return forward(x, *tables)


def offload_layers(model: Decoder):
    """Let each layer save its activations on the host."""
    for layer in model.model.layers.values():
        layer.forward = partial(offloaded, layer.forward, layer=layer)


RECOMPUTE["offload"] = offload_layers
REFUSES = [
    Refusal(dict(recompute=("offload",), dry_run=SET), "a dry run does not tell the host's memory from the GPU's", None)
]
