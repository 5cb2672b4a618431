"""The value of --model: a preset of common/model.py, perhaps with changes.

    tiny                      the preset
    tiny,n_layers=8,dim=256   the preset with 8 layers and dim 256

All other fields keep the preset's values: in the second example ffn_dim is still tiny's 352.
"""

from dataclasses import fields, replace
from typing import Any

from common import UserError
from common.model import PRESETS, ModelConfig


def model_shape(text: str) -> ModelConfig:
    """The shape that a value of --model describes. Raises UserError if there is no such preset or
    field, or if a value cannot work.
    """
    preset, *changes = text.split(",")
    if preset not in PRESETS:
        raise UserError(f"--model {preset}: choose from {', '.join(PRESETS)}")
    kinds = {field.name: field.type for field in fields(ModelConfig)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in kinds:
            raise UserError(
                f"--model {text}: {name!r} is not a field of ModelConfig: use {', '.join(kinds)}"
            )
        kind = kinds[name]
        try:
            values[name] = convert(kind, value)
        except (KeyError, ValueError):
            expected = "True or False" if kind is bool else f"of type {kind.__name__}"
            raise UserError(f"--model {text}: {name} must be {expected}, not {value!r}") from None
    shape = replace(PRESETS[preset], **values)
    check_shape(shape, text)
    return shape


def convert(kind: type, value: str) -> bool | int | float:
    """The value of a field of type `kind`. Raises KeyError or ValueError."""
    if kind is bool:
        return {"True": True, "False": False}[value]
    return kind(value)


def check_shape(shape: ModelConfig, text: str):
    """Raise UserError if a field has a value that cannot work. `text`: the value of --model."""
    for name, value in vars(shape).items():
        # nan fails every comparison, so it is refused, too
        if not isinstance(value, bool) and not 0 < value < float("inf"):
            raise UserError(f"--model {text}: {name} is {value}, and must be above 0, and finite")
    if shape.dim % (2 * shape.n_heads):  # RoPE rotates pairs of a head's channels
        raise UserError(
            f"--model {text}: dim / n_heads, here {shape.dim} / {shape.n_heads}, must be a whole, "
            "even number"
        )
    if shape.n_heads % shape.n_kv_heads:
        raise UserError(
            f"--model {text}: n_kv_heads {shape.n_kv_heads} must divide n_heads {shape.n_heads}"
        )
