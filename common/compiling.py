"""--compile: torch.compile fuses norms, RoPE, SiLU and additions into a few kernels. You can follow
every step without this file.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.model import Decoder, DecoderLayer, summed_cross_entropy


def without_gradients(layer: DecoderLayer, forward: Callable, *inputs: Tensor) -> Tensor:
    """Run a layer's compiled forward while its parameters have no `.grad`.

    When a layer runs, its weights may have a `.grad`: in step 1 from the second micro-batch on,
    with buckets or ZeRO 1 from the first. torch.compile looks at it, too, and if that of a bf16
    weight is fp32 it compiles the layer only in pieces. (This is safe also when recomputation calls
    this function inside backward: the `.grad` is back before backward adds to it.)
    """
    # Not once and for all: from step 3 on, parameters are replaced after the layer is compiled
    params = list(layer.parameters())
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
