"""--compile: torch.compile fuses norms, RoPE, SiLU and additions into a few kernels. No step needs
this file to be understood.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.model import Decoder, DecoderLayer, summed_cross_entropy


def without_gradients(layer: DecoderLayer, forward: Callable, *inputs: Tensor) -> Tensor:
    """Run a layer's compiled forward while its parameters have no `.grad`.

    From the second micro-batch on, weights have a `.grad`. torch.compile looks at it, too, and if
    that of a bf16 weight is fp32 it compiles the layer only in pieces. (Hiding it is safe also when
    recomputation calls this inside backward: it is back before backward adds to it.)
    """
    params = list(layer.parameters())  # at each call: from step 3 on they are replaced later
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        return forward(*inputs)
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


def compile_model(model: Decoder):
    """Compile the forward of each layer, and the loss unless ranks share the vocabulary."""
    for layer in model.model.layers.values():
        layer.forward = partial(without_gradients, layer, torch.compile(layer.forward))
    if model.loss is summed_cross_entropy:
        model.loss = torch.compile(model.loss)
