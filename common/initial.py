"""Initial values. Each parameter is drawn whole, in fp32, on the CPU. Its numbers depend only on
the seed, its name, its shape and the number of layers, so all layouts begin with the same weights.
(On other CPUs, or with another PyTorch, the last bits may differ.)
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from common.layout import full_shape, record_of, shard_of
from common.model import Decoder


def draw(whole: Tensor, name: str, n_layers: int, seed: int) -> Tensor:
    """Fill `whole`, a whole parameter in fp32, with its initial numbers; return it.

    Norms start at one. Matrices are drawn from a normal distribution with standard deviation 0.02.
    For o_proj and down_proj it is 0.02 / sqrt(2 n_layers): the outputs of these 2 n_layers matrices
    are all added up in the residual stream, and the variance of a sum of N independent terms is N
    times that of one (Radford et al., GPT-2, section 2.3).
    """
    if whole.dim() == 1:  # a norm; there are no biases
        return whole.fill_(1.0)
    std = 0.02
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std = 0.02 / (2 * n_layers) ** 0.5
    # A seed for each name, so that a parameter's numbers do not depend on which others this rank
    # draws. 4 bytes of a hash: PyTorch's generator for CPUs uses only the low 32 bits of a seed
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
    return whole.normal_(0.0, std, generator=generator)


def materialize(
    model: Decoder,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
    names: Collection[str] | None = None,
):
    """Allocate and initialise parameters of a meta-device model: those in `names`, or all. ZeRO
    (step 3) calls it with `names`, once for each of its units. The first call also allocates the
    modules' buffers, tensors that are no parameters.

    A meta tensor has no memory, so each nn.Parameter is replaced by a new one. Therefore create
    optimizers, and hooks of parameters, after this call.
    """
    chosen = {}  # meta-device parameters by name
    for name, param in model.named_parameters():
        if names is None or name in names:
            chosen[name] = param
    # `draw_all` allocates each parameter whole, in fp32, and calls `draw`
    for name, whole in draw_all(chosen, model.config.n_layers, seed):
        param = chosen[name]
        part = whole
        record = record_of(param)  # layout.py; in steps 1 to 3 its `shard` is None
        if record.shard is not None:  # from step 4 on: this rank keeps only a shard
            part = shard_of(whole, record.shard)
        filled = nn.Parameter(part.to(device, dtype))
        filled.parallel_record = record
        replace_param(model, param, filled)
    materialize_buffers(model, device)  # only step 7 has any


def replace_param(model: nn.Module, old: nn.Parameter, new: nn.Parameter):
    """Put `new` in the place of `old` in all modules that have it: a tied matrix is in two."""
    for module in model.modules():
        # `list`, because the loop changes what it goes through
        for key, param in list(module.named_parameters(recurse=False)):
            if param is old:
                setattr(module, key, new)


def materialize_buffers(model: nn.Module, device: torch.device):
    """Allocate the buffers of a meta-device model, and fill them with zeros."""
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, key, torch.zeros_like(buffer, device=device))


# --- Speed ----------------------------------------------------------------------------------------


def draw_all(params: dict[str, Tensor], n_layers: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter and its initial numbers, whole and in fp32: the same numbers
    as by a loop of `draw`. Up to 8 threads draw, because one draws some 100 million numbers a
    second, and llama3-8b has 8 billion.

    params: name -> the parameter, or this rank's shard of it: then its record has the whole size.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # on this machine
    threads = max(1, min(8, (os.cpu_count() or 1) // ranks))
    draw_one = partial(draw, n_layers=n_layers, seed=seed)
    names = list(params)
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(names), threads):  # not all at once, which would fill memory
            some_names = names[start : start + threads]
            empty = [torch.empty(full_shape(params[name])) for name in some_names]
            wholes = pool.map(draw_one, empty, some_names)
            yield from zip(some_names, wholes, strict=True)
