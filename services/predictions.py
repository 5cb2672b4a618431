"""What theory says of a run: it is told sizes, as plain numbers, that are taken from the run's parts."""

from typing import Any

from common.comm import Group
from common.layout import layout_of
from common.model import wide
from common.schedules import Action, Place, consumer
from services.seam import offered
from step01_single_gpu import OPTIMIZERS
from step06_pipeline import TIED, plan
from theory import activations, shapes, traffic
from theory.shapes import Shape
from theory.traffic import Passes, Traffic
from variants import Parts


def size(parts: Parts, dim: str) -> int:
    """Ranks along a dimension; 1 if the step does not have it."""
    return parts.mesh[dim].size if dim in parts.mesh.groups else 1


def shape(config: Any, parts: Parts) -> Shape:
    """The model, with the experts that the flags ask for."""
    return shapes.shape_of(parts.model.config, config)


def flops_per_token(config: Any, parts: Parts) -> tuple[float, float]:
    """(model, executed)."""
    return shapes.flops_per_token(shape(config, parts), config.recompute == "full")


def micro_batches(config: Any, parts: Parts) -> int:
    """Of a rank in a step."""
    return -(-config.global_batch_size // size(parts, "dp") // config.micro_batch_size)


def lists_of(config: Any, parts: Parts) -> list[list[Action]]:
    """What each rank of a pipeline does in a step."""
    return plan(config, micro_batches(config, parts))[1]


def work_lists(config: Any, parts: Parts) -> tuple[dict[int, Place], list[Action]]:
    """This rank's stages, and what it does with them in a step."""
    m, n = parts.model.config, micro_batches(config, parts)
    if parts.pipeline is None:
        return {0: Place(0, range(m.n_layers), None, None)}, [Action(kind, i, 0) for i in range(n) for kind in "FB"]
    rank, places = parts.pipeline.group.rank, parts.pipeline.places
    return {stage: place for stage, place in enumerate(places) if place.rank == rank}, lists_of(config, parts)[rank]


def layers_again(config: Any) -> str:
    """What of whole layers is recomputed: the core of attention (variants/attention_scores.py) sends nothing of tp."""
    return "none" if config.recompute == "attention" else config.recompute


def passes_of(config: Any, parts: Parts) -> Passes:
    """What passes through this rank in a step."""
    m, dtype = shape(config, parts), next(parts.model.parameters()).dtype
    places, row = work_lists(config, parts)
    passed = [places[stage] for kind, _, stage in row if kind == "F"]
    layers = [n for place in passed for n in place.layers]
    begins, ends = (sum(getattr(place, end) is None for place in passed) for end in ("before", "after"))
    sums = len(layers), sum(map(m.has_experts, layers)), begins, ends
    tokens = config.micro_batch_size * m.seq_len // size(parts, "cp")
    return Passes(m, tokens, *sums, dtype.itemsize, wide(dtype).itemsize, layers_again(config) != "none")


def moment_bytes(config: Any, parts: Parts) -> int:
    """What the update rule keeps of its masters, as the rule's file says it; two numbers of each if it says nothing."""
    says = {file.__name__: file.moments for file in offered(type(config), "moments")}
    numbers = says.get(OPTIMIZERS[config.optimizer].__module__, lambda _name, master: 2 * master.numel())
    return sum(numbers(name, master) * master.itemsize for name, master in parts.optimizer.masters.items())


def waits(config: Any, p: activations.Piece, place: Place) -> float:
    """Bytes of a micro-batch on a stage that variants keep beside theory's, as their files say it."""
    return sum(file.waits(config, p, place) for file in offered(type(config), "waits"))


def held_bytes(config: Any, parts: Parts) -> dict[str, float]:
    """Bytes of each kind of tensor on this rank."""
    w, on_cpu = passes_of(config, parts), next(parts.model.parameters()).device.type == "cpu"
    stage, units = getattr(config, "zero", 0), parts.units
    params = [param for param in parts.model.parameters() if param.requires_grad]
    n = cut = sum(param.numel() for param in params)
    if units:
        n, cut = (sum(unit.length * (unit.group.size if whole else 1) for unit in units) for whole in (True, False))
    batch, seq = config.micro_batch_size, w.m.seq_len // size(parts, "cp")
    about = size(parts, "tp"), getattr(config, "sp", False), layers_again(config), on_cpu, config.loss_chunk
    piece = activations.Piece(w.m, batch, seq, w.e, w.wide, *about)
    places, row = work_lists(config, parts)
    split = any(action.kind == "W" for action in row)
    kept = {stage: activations.kept_of(piece, place, split, in_forward=True) for stage, place in places.items()}
    kept = {s: one._replace(until_b=one.until_b + waits(config, piece, places[s])) for s, one in kept.items()}
    return {
        "parameters": (cut + n * getattr(config, "zero_keep", False) if stage == 3 else n) * w.e,
        "gradients": (cut if stage >= 2 else n) * w.wide,
        "masters": cut * w.wide * (w.wide != w.e),
        "moments": moment_bytes(config, parts),
        "activations": max(activations.kept_along(row, kept)),
    }


def summed(sync: str, group: Group, n_bytes: int) -> Traffic:
    """What step 2 sends to sum a gradient; with --sync server, the first rank to each other one."""
    if sync == "server":
        return Traffic({(group.name, "send"): n_bytes * (group.size - 1 if group.rank == 0 else 1) * (group.size > 1)})
    return traffic.gradient_traffic(group.name, group.size, n_bytes, sync in ("ring", "hierarchical"))


def data_traffic(config: Any, parts: Parts) -> Traffic:
    """What gradients and, under ZeRO, weights cost."""
    found, w = Traffic(), passes_of(config, parts)
    stage, units = getattr(config, "zero", 0), parts.units
    if not units:
        for param in parts.model.parameters():
            dim = layout_of(param).data_dim
            found += summed(config.sync, parts.mesh[dim], param.numel() * w.wide)
        return found
    reduced, gathered = traffic.unit_travels(*module_runs(config, parts)) if stage >= 2 else ({}, {})
    for unit in units:
        again = stage == 3 and not getattr(config, "zero_keep", False)
        times = reduced.get(unit, 1), gathered.get(unit, 1) if again else 1
        found += traffic.unit_traffic(unit.group.name, unit.group.size, len(unit.flat), w.e, w.wide, *times)
    return found


def module_runs(config: Any, parts: Parts) -> tuple[list, list, set[int], set]:
    """What ZeRO's units are used by in which order, as `theory.traffic.unit_travels` wants it."""
    trunk, head = parts.model.model, parts.model.lm_head
    modules = [m for m in (trunk.embed_tokens, *trunk.layers.values(), trunk.norm, head) if m is not None]
    params = [set(module.parameters()) for module in modules]
    uses = [[unit for unit in parts.optimizer.units if own & set(unit.named.values())] for own in params]
    first, number = int(trunk.embed_tokens is not None), {}
    number |= {int(name): first + i for i, name in enumerate(trunk.layers)}
    places, row = work_lists(config, parts)
    runs = []
    for kind, _, stage in row:
        place, last = places[stage], len(modules) - 1
        ends = [0] * (place.before is None), [last - 1, last] * (place.after is None)
        runs.append((kind, [*ends[0], *(number[n] for n in place.layers), *ends[1]]))
    shared = {*uses[0]} & {*uses[-1]} if 0 in places and parts.way[-1] in places else set()
    return uses, runs, set(number.values()), shared


def pipeline_traffic(config: Any, parts: Parts) -> Traffic:
    """What crosses the boundaries of this rank's stages, and a tied matrix, which two ranks have."""
    w, rank, places = passes_of(config, parts), parts.pipeline.group.rank, parts.pipeline.places
    row, found = lists_of(config, parts)[rank], Traffic()
    targets = (consumer(action, places) for action in row)
    sends = sum(to is not None and places[to.stage].rank != rank for to in targets)
    sent = sends * w.tokens / parts.pipeline.sp_ranks * w.m.dim * w.e
    if getattr(config, "pp_scatter", False):
        sides = ((dict(F="before", B="after").get(kind), stage) for kind, _, stage in row)
        others = [getattr(places[stage], side) for side, stage in sides if side]
        tp, comes = size(parts, "tp"), sum(at is not None and places[at].rank != rank for at in others)
        sent, found["tp", "all_gather"] = sent / tp, comes * w.tokens * w.m.dim * w.e * (tp - 1) / tp
    first, last = places[0].rank, places[-1].rank
    if w.m.tied and first != last and rank in (first, last):
        sent += sliced(parts, TIED) * w.wide
    return found + Traffic({("pp", "send"): sent})


def partial_traffic(parts: Parts, n_bytes: int) -> Traffic:
    """Gradients of `n_bytes` an element that are parts of a sum over other dimensions than that of the data."""
    found = Traffic()
    for name, param in parts.model.named_parameters():
        for dim in layout_of(param).partial_over:
            found += traffic.sum_traffic(dim, size(parts, dim), n_bytes * sliced(parts, name))
    return found


def sliced(parts: Parts, name: str) -> int:
    """Elements of a parameter's gradient that this rank has in the end: all, or those in its slice."""
    for unit in parts.units:
        if name in unit.named:
            return len(unit.view_shard(unit.master, name))
    return parts.model.get_parameter(name).numel()


def sent_bytes(config: Any, parts: Parts) -> Traffic:
    """Bytes that this rank sends in a step, by (dimension, operation), if no variant changes them."""
    if parts.sync is None:
        return Traffic()
    w, tp, cp, ep = passes_of(config, parts), *(size(parts, dim) for dim in ("tp", "cp", "ep"))
    found = data_traffic(config, parts) + partial_traffic(parts, w.wide)
    if tp > 1:
        found += traffic.tensor_traffic(w, tp, config.sp)
    if cp > 1:
        found += traffic.context_traffic(w._replace(recompute=config.recompute != "none"), cp, tp)
    if hasattr(config, "experts"):
        found += traffic.expert_traffic(w, ep, cp, tp)
    if parts.pipeline is not None:
        found += pipeline_traffic(config, parts)
        found += traffic.sum_traffic("pp", size(parts, "pp"), w.wide)  # the loss
    data = "data" if "data" in parts.mesh.groups else "dp"
    found += traffic.sum_traffic(data, size(parts, data), w.wide)  # the loss
    for dim in parts.mesh.sizes if hasattr(config, "zero") else ():
        found += traffic.sum_traffic(dim, size(parts, dim), 8)  # the squares of the norm, fp64
    return Traffic({key: n_bytes for key, n_bytes in found.items() if n_bytes})
