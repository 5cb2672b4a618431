"""The model of a saved run, whole, in one process: whatever its layout was, and its technique."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import step07_moe_ep as step07
from common import UserError
from common.checkpoint import Checkpoint
from common.comm import Mesh
from common.initial import materialize
from common.model import Decoder
from common.ranks import Ranks
from common.shapes import model_shape
from common.storage import find_sound
from extras.__main__ import techniques, with_flags


def build_model(flags: dict[str, Any]) -> Decoder:
    """The whole model of a run with these flags, on the meta device.

    It has experts if the flags have; all steps but step 7 train the same dense model.
    """
    shape = model_shape(flags["model"])
    with torch.device("meta"):
        model = Decoder(shape)
    if "experts" in flags:
        cls = with_flags(step07.Config, techniques())
        alone = flags | dict(pp=1, cp=1, tp=1, ep=1)
        config = cls(**{each.name: alone[each.name] for each in fields(cls) if each.name in alone})
        mesh = Mesh(pp=1, dp=1, cp=1, tp=1)
        mesh.add_groups_along("data", "dp", "cp", queue="gradients")
        step07.shard_experts(model, mesh, config)
    return model


def load_model(
    run: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Any], Decoder]:
    """The flags of a run and its model, which any number of ranks saved.

    `run`: a run directory, of which the newest sound checkpoint is read, or a checkpoint. Raises
    UserError if there is none.
    """
    folder = find_sound(run, Ranks())
    if folder is None:
        raise UserError(f"{run}: no checkpoint is there; a run saves some with --save-every")
    saved = Checkpoint(folder)
    model = build_model(saved.about["flags"])
    materialize(model, 0, device, dtype)
    values = {}
    for name in saved.pieces:
        values[name] = saved.whole_tensor(name, "values")
    if model.config.tied:  # saved once, as the embedding
        values["lm_head.weight"] = values["model.embed_tokens.weight"]
    model.load_state_dict(values)
    return saved.about["flags"], model
