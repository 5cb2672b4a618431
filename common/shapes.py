"""The value of --model: a preset of common/model.py, perhaps with changes. You can follow every
step without this file.
"""

from dataclasses import fields, replace
from typing import Any

from common import UserError
from common.model import PRESETS, ModelConfig


def model_shape(text: str) -> ModelConfig:
    """A preset, perhaps with changes: "tiny" or "tiny,n_layers=8,dim=256". Raises UserError."""
    preset, *changes = text.split(",")
    if preset not in PRESETS:
        raise UserError(f"--model {preset}: choose from {', '.join(PRESETS)}")
    kinds = {field.name: field.type for field in fields(ModelConfig)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise UserError(f"--model {text}: {name!r} is none of {', '.join(kinds)}")
        kind = kinds[name]
        try:
            if kind is not bool:
                values[name] = kind(value)
            elif value in ("True", "False"):
                values[name] = value == "True"
            else:
                raise ValueError
        except ValueError:
            expected = "True or False" if kind is bool else f"of type {kind.__name__}"
            raise UserError(f"--model {text}: {name} must be {expected}, not {value!r}") from None
    shape = replace(PRESETS[preset], **values)
    check_shape(shape, text)
    return shape


def check_shape(shape: ModelConfig, text: str):
    """Raise UserError unless a decoder can have this shape. `text`: the value of --model."""
    for name, value in vars(shape).items():
        if not isinstance(value, bool) and not 0 < value < float("inf"):  # false for nan, too
            raise UserError(f"--model {text}: {name} is {value}, and must be above 0, and finite")
    if shape.dim % (2 * shape.n_heads):  # RoPE rotates pairs of a head's channels
        raise UserError(
            f"--model {text}: dim {shape.dim} / n_heads {shape.n_heads} must be an even number"
        )
    if shape.n_heads % shape.n_kv_heads:
        raise UserError(
            f"--model {text}: n_kv_heads {shape.n_kv_heads} must divide n_heads {shape.n_heads}"
        )
