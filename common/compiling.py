"""--compile: torch.compile compiles each layer and, without tp, the loss. Norms, RoPE, SiLU and
additions become a few kernels; matrix products and attention keep theirs.

Where ranks communicate, in layers with tp, cp or experts, the compiled code has a *graph break*:
Python runs between two compiled parts.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.model import Decoder, DecoderLayer, summed_cross_entropy


def run_without_grads(layer: DecoderLayer, compiled: Callable, *inputs: Tensor) -> Tensor:
    """Run a layer's compiled forward while its parameters have no `.grad`.

    In bf16, step 1 keeps each `.grad` in fp32, and the first backward creates it. While
    torch.compile traces a layer, it also looks at the `.grad` of each weight. So the second
    micro-batch would trace the layer again, and break its graph, because `.grad` has another dtype
    than the weight.

    Therefore each `.grad` is put aside while the layer runs, and is back before backward adds to
    it. With --recompute, backward runs the forward again, and so calls this function, too.
    """
    # Listed at each call: from step 3 on, `materialize` replaces all after `compile_model`
    params = list(layer.parameters())
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        return compiled(*inputs)
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient


def compile_model(model: Decoder):
    """Wrap the forward of each layer, and the loss unless tp shards it, in torch.compile, which
    compiles them when they are first called.
    """
    for layer in model.model.layers.values():
        compiled = torch.compile(layer.forward)
        # An attribute of this object: `layer(x)` calls it, not the method of its class
        layer.forward = partial(run_without_grads, layer, compiled)
    if model.loss is summed_cross_entropy:
        model.loss = torch.compile(model.loss)
