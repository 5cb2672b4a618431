"""What theory says of a run: it is told sizes, as plain numbers, that are taken from the run's parts."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from common.layout import layout_of
from common.model import wide
from common.schedules import goes_to
from step06_pipeline import TIED, plan
from theory import flops, memory, traffic
from theory.flops import Experts
from theory.traffic import Traffic, Work


def size(parts: SimpleNamespace, dim: str) -> int:
    """Ranks along a dimension; 1 if the step does not have it."""
    return parts.mesh[dim].size if hasattr(parts, "mesh") and dim in parts.mesh.groups else 1


def experts_of(config: Any, parts: SimpleNamespace) -> Experts | None:
    """What stands in place of the MLPs."""
    if not hasattr(config, "experts"):
        return None
    return Experts(config.experts, config.experts_per_token, config.expert_dim or parts.model.config.ffn_dim)


def flops_per_token(config: Any, parts: SimpleNamespace) -> tuple[float, float]:
    """(model, executed)."""
    return flops.flops_per_token(parts.model.config, config.recompute == "full", experts_of(config, parts))


def micro_batches(config: Any, parts: SimpleNamespace) -> int:
    """Of a rank in a step."""
    return -(-config.global_batch_size // size(parts, "dp") // config.micro_batch_size)


def stages_of(config: Any, parts: SimpleNamespace) -> list[tuple[int, bool, bool]]:
    """(layers, whether it begins with the embedding, whether it ends with the head) of each stage of this rank."""
    if not hasattr(parts, "pipeline"):
        return [(parts.model.config.n_layers, True, True)]
    pipeline = parts.pipeline
    mine = [place for place in pipeline.places if place.rank == pipeline.group.rank]
    return [(len(place.layers), place.before is None, place.after is None) for place in mine]


def work_of(config: Any, parts: SimpleNamespace) -> Work:
    """What this rank does in a step."""
    m, times, stages = parts.model.config, micro_batches(config, parts), stages_of(config, parts)
    dtype = next(parts.model.parameters()).dtype
    layers, begins, ends = (times * sum(column) for column in zip(*stages, strict=True))
    tokens = config.micro_batch_size * m.seq_len // size(parts, "cp")
    return Work(m, tokens, layers, begins, ends, dtype.itemsize, wide(dtype).itemsize, config.recompute == "full")


def in_flight(lists: list[list], rank: int) -> int:
    """The most forwards of a rank that still wait for their backward."""
    return max(accumulate({"F": 1, "B": -1}.get(action.kind, 0) for action in lists[rank]))


def held_bytes(config: Any, parts: SimpleNamespace) -> dict[str, float]:
    """Bytes of each kind of tensor on this rank."""
    m, w, on_cpu = parts.model.config, work_of(config, parts), next(parts.model.parameters()).device.type == "cpu"
    stage, units = getattr(config, "zero", 0), getattr(parts.optimizer, "units", [])
    params = [param for param in parts.model.parameters() if param.requires_grad]
    n = cut = sum(param.numel() for param in params)
    if units:
        n, cut = (sum(unit.length * (unit.group.size if whole else 1) for unit in units) for whole in (True, False))
    tp, sp = size(parts, "tp"), getattr(config, "sp", False)
    about = (w.tokens, w.e, w.wide, tp, sp)
    layer = memory.layer_bytes(m, *about, w.recompute, on_cpu, experts_of(config, parts))
    stages = stages_of(config, parts)
    kept = sum(layers * layer + ends * memory.end_bytes(m, *about, on_cpu) for layers, _, ends in stages) / len(stages)
    waiting = 1
    if hasattr(parts, "pipeline"):
        waiting = in_flight(plan(config, micro_batches(config, parts))[1], parts.pipeline.group.rank)
    return {
        "parameters": (cut if stage == 3 else n) * w.e,
        "gradients": (cut if stage >= 2 else n) * w.wide,
        "masters": cut * w.wide * (w.wide != w.e),
        "moments": cut * w.wide * {"adamw": 2, "sgd": 0}.get(config.optimizer, 2),
        "activations": waiting * kept,
    }


def data_traffic(config: Any, parts: SimpleNamespace) -> Traffic:
    """What gradients and, under ZeRO, weights cost."""
    found, m, w = Traffic(), micro_batches(config, parts), work_of(config, parts)
    stage, units = getattr(config, "zero", 0), getattr(parts.optimizer, "units", [])
    if not units:
        for param in parts.model.parameters():
            dim = layout_of(param).data_group
            found += traffic.gradient_traffic(dim, size(parts, dim), param.numel() * w.wide, config.sync == "ring")
        return found
    gathered = traffic.gatherings(*gathering(config, parts)) if stage == 3 else dict.fromkeys(units, 1)
    for unit in units:
        about = unit.group.name, unit.group.size, len(unit.flat), w.e, w.wide
        found += traffic.unit_traffic(*about, m if stage >= 2 else 1, gathered[unit])
    return found


def gathering(config: Any, parts: SimpleNamespace) -> tuple[list, list[tuple[str, list[int]]], int]:
    """What ZeRO 3 computes with in which order, as `theory.traffic.gatherings` wants it."""
    uses, m = parts.optimizer.uses, micro_batches(config, parts)
    first = int(parts.model.model.embed_tokens is not None)
    if not hasattr(parts, "pipeline"):
        return uses, [("F", [*range(len(uses))]), ("B", [*range(len(uses))])] * m, first
    places, lists = plan(config, m)
    number = {name: first + i for i, name in enumerate(parts.model.model.layers)}
    runs = []
    for action in lists[parts.pipeline.group.rank]:
        place = places[action.stage]
        ends = [0] * (place.before is None), [len(uses) - 1] * (place.after is None)
        runs.append((action.kind, [*ends[0], *(number[str(n)] for n in place.layers), *ends[1]]))
    return uses, runs, first


def pipeline_traffic(config: Any, parts: SimpleNamespace) -> Traffic:
    """What crosses the boundaries of this rank's stages, and a tied matrix, which two ranks have."""
    w, rank = work_of(config, parts), parts.pipeline.group.rank
    places, lists = plan(config, micro_batches(config, parts))
    targets = (goes_to(action, places) for action in lists[rank])
    sends = sum(to is not None and places[to.stage].rank != rank for to in targets)
    sent = sends * w.tokens / parts.pipeline.sp_ranks * w.m.dim * w.e
    first, last = places[0].rank, places[-1].rank
    if w.m.tied and first != last and rank in (first, last):
        sent += sliced(parts, TIED) * w.wide
    return Traffic({("pp", "send"): sent})


def sliced(parts: SimpleNamespace, name: str) -> int:
    """Elements of a parameter's gradient that this rank has in the end: all, or those in its slice."""
    for unit in getattr(parts.optimizer, "units", ()):
        if name in unit.named:
            return len(unit.part(unit.master, name))
    return parts.model.get_parameter(name).numel()


def sent_bytes(config: Any, parts: SimpleNamespace) -> Traffic:
    """Bytes that this rank sends in a step, by (dimension, operation), if no variant changes them."""
    if not hasattr(parts, "mesh"):
        return Traffic()
    w, tp, cp, ep = work_of(config, parts), *(size(parts, dim) for dim in ("tp", "cp", "ep"))
    found = data_traffic(config, parts)
    if tp > 1:
        partial = [name for name, p in parts.model.named_parameters() if "tp" in layout_of(p).partial_over]
        found += traffic.tensor_traffic(w, tp, config.sp)
        found += traffic.sum_traffic("tp", tp, w.wide * sum(sliced(parts, name) for name in partial))
    if cp > 1:
        found += traffic.context_traffic(w, cp, tp)
    if hasattr(config, "experts"):
        found += traffic.expert_traffic(w, ep, cp, experts_of(config, parts))
    if hasattr(parts, "pipeline"):
        found += pipeline_traffic(config, parts)
        found += traffic.sum_traffic("pp", size(parts, "pp"), w.wide)  # the loss
    data = "data" if "data" in parts.mesh.groups else "dp"
    found += traffic.sum_traffic(data, size(parts, data), w.wide)  # the loss
    for dim in parts.mesh.sizes if hasattr(config, "zero") else ():
        found += traffic.sum_traffic(dim, size(parts, dim), 8)  # the squares of the norm, fp64
    return Traffic({key: n_bytes for key, n_bytes in found.items() if n_bytes})
