"""Shape flags, such as --dim: a preset with other sizes is added to PRESETS, under a name that lists the changes."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from common import UserError
from common.model import PRESETS, ModelConfig
from extras.variants.record import spelled


@dataclass
class Flags:
    """Overrides of the preset's shape."""

    dim: int = 0  # override the preset's width of the residual stream; 0: as the preset
    n_layers: int = 0  # override the number of layers
    n_heads: int = 0  # override the number of query heads
    n_kv_heads: int = 0  # override the number of key/value heads
    ffn_dim: int = 0  # override the width of the MLP
    vocab_size: int = 0  # override the size of the vocabulary
    seq_len: int = 0  # override the sequence length, in tokens
    rope_theta: float = 0.0  # override RoPE's base; 0: as the preset
    rope_scaling: float = 0.0  # override Llama 3.1's factor for RoPE's long waves; 1: none, 0: as the preset
    norm_eps: float = 0.0  # override RMSNorm's epsilon; 0: as the preset
    tied: bool = None  # override whether embedding and head share one matrix


def check_shape(shape: ModelConfig):
    """Raise UserError, naming the flags to change, unless the sizes fit together."""
    dim, heads, kv_heads = shape.dim, shape.n_heads, shape.n_kv_heads
    if dim % (2 * heads):  # RoPE rotates pairs of components
        fix = f"choose --dim as a multiple of {2 * heads}, or change --n-heads"
        raise UserError(f"--dim {dim} does not split into {heads} heads of an even size: {fix}")
    if heads % kv_heads:
        fix = f"choose --n-kv-heads among the divisors of {heads}"
        raise UserError(f"--n-heads {heads} is not a multiple of --n-kv-heads {kv_heads}: {fix}")


def differing(shape: ModelConfig, preset: ModelConfig) -> str:
    """The flags that turn `preset` into `shape`, such as "--dim 64 --no-tied"."""
    changed = [name for name, value in vars(preset).items() if getattr(shape, name) != value]
    return " ".join(spelled(name, getattr(shape, name)) for name in changed)


def settle(config: Any, world: int):
    """Add the preset with its overrides to PRESETS, and set `config.model` to its new name. Raises UserError."""
    preset = PRESETS[config.model]
    flags = {field.name: getattr(config, field.name) for field in dataclasses.fields(Flags)}
    shape = dataclasses.replace(preset, **{k: value for k, value in flags.items() if value != getattr(Flags, k)})
    check_shape(shape)
    if shape != preset:
        config.model = f"{config.model} {differing(shape, preset)}"
        PRESETS[config.model] = shape
