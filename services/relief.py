"""What to say when a GPU's memory is full: what fills it, and which flags would save most. By theory, without a GPU.

theory/footprint.py counts the bytes of the fullest rank for 16-bit training with AdamW; here they are those of the
run's own precision and update rule. (Activations are scaled by the bytes of a number: exact for 16 bits.)
"""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from common import UserError
from services.checks import check, choose_chunks, choose_ep, mesh_sizes
from services.devices import choose_device, choose_dtype
from services.offload import on_host
from services.tables import human
from theory import footprint
from theory.layouts import Layout
from theory.memory import MOMENTS
from theory.recipes import RECIPES
from theory.shapes import of_preset

HALVED = ("micro_batch_size", "zero_replicas")
DOUBLED = ("tp", "cp", "pp", "ep")
VALUES = dict(recompute=("selective", "full"), zero=(1, 2, 3), offload_optimizer=("cpu",), offload_params=("cpu",))
VALUES |= dict(schedule=("1f1b",), dtype=("bf16",))


def sizes_of(config: Any, world: int) -> dict[str, int]:
    """Ranks along each dimension, ep among them, with what the flags leave open filled in."""
    sizes = mesh_sizes(config, world)
    if hasattr(config, "ep"):
        sizes["ep"] = choose_ep(config, config.model_config(), sizes["dp"] * sizes["cp"])
    return sizes


def layout_of(config: Any, world: int) -> Layout:
    """The planner's record of a run's flags."""
    sizes, more = sizes_of(config, world), {}
    if hasattr(config, "pp"):
        schedule = config.schedule
        if schedule == "zb-auto":  # which of the two it is like is a matter of its memory
            schedule = "zb-h1" if config.zb_memory <= 1 else "zb-h2"
        more |= dict(schedule=schedule, chunks=choose_chunks(config))
    for name in ("zero", "sp", "cp_mode"):
        more |= {name: getattr(config, name)} if hasattr(config, name) else {}
    more["replicas"] = getattr(config, "zero_replicas", 1)
    more = dict(zero=0) | more | dict(mbs=config.micro_batch_size, gbs=config.global_batch_size)
    return Layout(**sizes, **more, recompute=config.recompute)


def device_bytes(config: Any, world: int) -> dict[str, float]:
    """Bytes by kind on the fullest of `world` ranks' GPUs; what is offloaded does not count."""
    dtype = choose_dtype(config.dtype, choose_device(config.device))
    e, wide = dtype.itemsize, max(4, dtype.itemsize)
    state = 4 * (e == 2) + MOMENTS.get(config.optimizer, 0) * wide
    gradient = e if config.grad_dtype == "same" else wide
    recipe = RECIPES["course"]._replace(weight=e, gradient=gradient, state=state)
    found = footprint.held(of_preset(config.model_config()), layout_of(config, world), recipe)
    host, on_disk = on_host(config), getattr(config, "offload_optimizer", "none") == "disk"
    return {
        "parameters": 0.0 if "parameters" in host else found.weights,
        "gradients": found.gradients,
        "masters and moments": 0.0 if on_disk or "moments" in host else found.optimizer,
        "activations": found.activations * e / footprint.E,
        "buffers": found.buffers + found.logits,
    }


def words(change: dict[str, Any]) -> str:
    """A changed flag as it is written."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())


def changes(config: Any, world: int) -> Iterator[dict[str, Any]]:
    """Single flags of this step, changed to what takes less memory, if the change is legal."""
    known, sizes = {field.name for field in fields(config)}, sizes_of(config, world)
    now = {name: size for name, size in sizes.items() if name in known}
    tries = [{name: getattr(config, name) // 2} for name in HALVED if getattr(config, name, 1) > 1]
    tries += [{name: 2 * now[name]} for name in DOUBLED if name in now]
    tries += [{name: value} for name, values in VALUES.items() if name in known for value in values]
    for change in tries:
        changed = replace(config, **now | change)
        try:
            check(changed, world)
        except UserError:
            continue
        yield change


def savings(config: Any, world: int) -> list[tuple[float, dict[str, Any]]]:
    """(Bytes saved, change), the most first; of each flag its best value. Nothing that saves nothing."""
    before, best = sum(device_bytes(config, world).values()), {}
    now = {name: size for name, size in sizes_of(config, world).items() if hasattr(config, name)}
    for change in changes(config, world):
        saved = before - sum(device_bytes(replace(config, **now | change), world).values())
        (flag,) = change
        if saved > 0 and saved > best.get(flag, (0.0, {}))[0]:
            best[flag] = saved, change
    return sorted(best.values(), key=lambda entry: -entry[0])


def out_of_memory(error: Exception, config: Any, world: int) -> str:
    """One line for a GPU that is full: what was asked for, the largest kinds of memory, the three best flags."""
    said = [re.search(pattern, str(error)) for pattern in (r"allocate ([\d.]+ \w+)", r"capacity of ([\d.]+ \w+)")]
    asked, capacity = (match.group(1) if match else "" for match in said)
    held = device_bytes(config, world)
    largest = sorted(held.items(), key=lambda entry: -entry[1])[:3]
    flags = [f"{words(change)} (saves {human(saved)})" for saved, change in savings(config, world)[:3]]
    return (
        f"the GPU's memory{f' of {capacity}' * bool(capacity)} is full"
        f"{f', {asked} more was asked for' * bool(asked)}; by theory a rank needs {human(sum(held.values()))}: "
        + ", ".join(f"{kind} {human(n)}" for kind, n in largest)
        + (f"; use {', or '.join(flags)}" if flags else "; use more ranks, or a smaller --model or --seq-len")
    )
