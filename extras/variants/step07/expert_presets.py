"""Models with experts (`--model tiny-moe`, `mixtral-8x7b`, `deepseek-v3-like`), which also set step 7's flags.

A ModelConfig has no experts: flags of step 7 set them. A flag that still has its default gets the model's value.
In step 7 these would be entries of PRESETS. (deepseek-v3-like has plain attention, not DeepSeek's latent attention:
672e9 weights, of which a token uses 38e9.)
"""

from dataclasses import fields
from typing import Any

import step07_moe_ep as step07
from common import UserError
from common.model import PRESETS, ModelConfig

PRESETS["tiny-moe"] = ModelConfig(128, 4, 8, 4, 352, vocab_size=257, seq_len=256)
PRESETS["mixtral-8x7b"] = ModelConfig(4096, 32, 32, 8, 14336, vocab_size=32000, seq_len=32768, rope_theta=1e6)
PRESETS["deepseek-v3-like"] = ModelConfig(7168, 61, 128, 128, 18432, vocab_size=129280, seq_len=4096)
EXPERTS: dict[str, dict[str, int]] = {
    "tiny-moe": dict(experts=8, experts_per_token=2, expert_dim=176),
    "mixtral-8x7b": dict(experts=8, experts_per_token=2),
    "deepseek-v3-like": dict(experts=256, experts_per_token=8, expert_dim=2048, shared_experts=1, dense_layers=3)
    | dict(expert_groups=8, groups_per_token=4),
}
SINCE = object  # every step lists these models; before step 7, `settle` refuses them


def settle(config: Any, world: int):
    """Set step 7's flags if the model is a preset with experts. Earlier steps raise UserError for such a model."""
    wanted = EXPERTS.get(config.model, {})
    if wanted and not isinstance(config, step07.Config):
        raise UserError(f"--model {config.model} has experts: use step 7")
    for field in fields(config):
        if field.name in wanted and getattr(config, field.name) == field.default:
            setattr(config, field.name, wanted[field.name])
