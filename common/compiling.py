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

    While it traces a layer, torch.compile also looks at the `.grad` of each weight. If the weight
    is bf16 and its `.grad` fp32 (`accumulate_wide` in step 1), it compiles the layer only as
    several smaller graphs, with slow Python between them. Weights have a `.grad` in step 1 from the
    second micro-batch on, and with step 2's buckets from the first. So it is put aside while the
    layer runs. (With --recompute, backward calls this function, too: the `.grad` is back before
    backward adds to it.)
    """
    # Listed at each call: from step 3 on, weights are drawn, as new parameters, after
    # `compile_model`
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
    """Compile the forward of each layer, and the loss. (Step 4's own loss, for a vocabulary that tp
    shards, stays as it is.)
    """
    for layer in model.model.layers.values():
        layer.forward = partial(without_gradients, layer, torch.compile(layer.forward))
    if model.loss is summed_cross_entropy:
        model.loss = torch.compile(model.loss)
