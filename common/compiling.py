"""--compile: torch.compile compiles each layer and, without tp, the loss. Norms, RoPE, SiLU and
additions become a few kernels; matrix products and attention keep theirs.

The compiled code has a *graph break*, where Python runs between two compiled parts, if ranks
communicate in a layer (tp, cp, ep), or if Python must know how many rows each expert has.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.model import Decoder, DecoderLayer, summed_cross_entropy


def run_with_grads_hidden(layer: DecoderLayer, compiled: Callable, *inputs: Tensor) -> Tensor:
    """Run a layer's compiled forward while its parameters have no `.grad`.

    While torch.compile traces a layer (goes through its Python code once, and records its
    operations), it also looks at the `.grad` of each weight. At an fp32 `.grad` of a bf16 weight it
    stops: a graph break. Step 2's buckets are such gradients, which exist before the first forward.
    So each `.grad` is put aside while the layer runs, and is back before backward adds to it. With
    --recompute, backward runs the forward again, and so calls this function, too.
    """
    # Listed at each call: `materialize` replaces all parameters after `compile_model` has run
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
        layer.forward = partial(run_with_grads_hidden, layer, compiled)
    if model.loss is summed_cross_entropy:
        model.loss = torch.compile(model.loss)
