"""--compile: torch.compile compiles each layer and, without tp, the loss. Norms, RoPE, SiLU and
additions become a few kernels; matrix products and attention keep theirs. (Where ranks communicate,
in layers with tp, cp or experts, the compiled code has a *graph break*: Python runs between two
compiled parts.) You can follow every step without this file.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.model import Decoder, DecoderLayer, summed_cross_entropy


def run_without_grads(layer: DecoderLayer, compiled: Callable, *inputs: Tensor) -> Tensor:
    """Run a layer's compiled forward while its parameters have no `.grad`.

    The problem: in bf16, step 1 keeps each `.grad` in fp32, and while torch.compile traces a layer,
    it also looks at the `.grad` of each weight. In the first micro-batch there is none yet. In the
    second there is one, so the layer is traced again; and where a `.grad` has another dtype than
    its weight, tracing breaks the graph. (With step 2's buckets there is a `.grad` from the first
    micro-batch on, with step 3's ZeRO never.)

    The cure: each `.grad` is put aside while the layer runs. (With --recompute, backward runs the
    forward again, and so calls this function, too. The `.grad` is back before backward adds to it.)
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
    """Wrap the forward of each layer, and the loss, in torch.compile, which compiles them when they
    are first called. (Step 4's own loss, for a vocabulary that tp shards, stays as it is.)
    """
    for layer in model.model.layers.values():
        compiled = torch.compile(layer.forward)
        # An attribute of this object: `layer(x)` calls it, not the method of its class
        layer.forward = partial(run_without_grads, layer, compiled)
    if model.loss is summed_cross_entropy:
        model.loss = torch.compile(model.loss)
