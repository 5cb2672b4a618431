"""Refuses layouts that cannot work, before anything is built, by the planner's rules (theory/layouts.py)."""

from dataclasses import fields
from math import prod
from typing import Any

from common import UserError
from common.comm import require_product
from common.model import PRESETS
from common.schedules import SCHEDULES
from extras.plan.layouts import Layout, broken
from extras.plan.shapes import shape_of

# Flags of the steps that need other flags (extras/variants/record.py).
NEEDS = [
    ("sync", "zero", 0),
    ("bucket_mb", "zero", 0),
    ("bucket_mb", "sync", "bucket"),
    ("sp", "tp"),
    ("cp_mode", "cp"),
    ("schedule", "pp"),
    ("chunks", "schedule", "interleaved", "rounds"),
    ("aux_loss_coeff", "balance", "loss"),
    ("ep_mode", "ep"),
]


def check_mesh(config: Any, world: int):
    """Refuse sizes that form no mesh of `world` ranks, before anything uses them. Raises UserError."""
    world, said = (config.dry_run, "--dry-run") if config.dry_run else (world, "--nproc_per_node")
    if world > 1 and not hasattr(config, "sync"):
        raise UserError(f"{said} {world}: step 1 knows one device; use {said} 1, or a later step")
    sizes = {dim: getattr(config, dim) for dim in ("pp", "cp", "tp") if hasattr(config, dim)}
    require_product(sizes | dict(dp=world // prod(sizes.values())), world, said)
    ep, ranks = getattr(config, "ep", 1), world // sizes.get("pp", 1)
    if ranks % ep:
        raise UserError(f"--ep {ep} must divide the {ranks} ranks of dp x cp x tp ({said})")


def layout_of_flags(config: Any, world: int) -> Layout:
    """The layout of a run of `world` ranks, or of a dry run. pp, cp, tp or ep is 1 if the step lacks its flag."""
    given = {field.name: getattr(config, field.name) for field in fields(Layout) if hasattr(config, field.name)}
    x = Layout(**given)
    return Layout(**given, dp=(config.dry_run or world) // (x.pp * x.cp * x.tp))


def check(config: Any, world: int):
    """Raises UserError for the first rule of theory/layouts.py, or of the schedule, that the layout breaks."""
    x = layout_of_flags(config, world)
    for message in broken(shape_of(PRESETS[config.model], config), x, SCHEDULES[x.schedule](config)):
        raise UserError(message)
