"""What theory says of a run: it is told sizes, as plain numbers, that are taken from the run's parts."""

from typing import Any

from torch import nn

from common.layout import layout_of
from common.model import wide
from common.schedules import Action, Place, consumer
from extras.services.seam import offered
from extras.theory import activations, shapes, traffic
from extras.theory.shapes import Shape
from extras.theory.traffic import Passes, Traffic
from extras.variants import Parts
from step01_single_gpu import OPTIMIZERS, RECOMPUTE
from step06_pipeline import TIED, plan


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


def passes_of(config: Any, parts: Parts) -> Passes:
    """What passes through this rank in a step."""
    m, dtype = shape(config, parts), next(parts.model.parameters()).dtype
    places, row = work_lists(config, parts)
    passed = [places[stage] for kind, _, stage in row if kind == "F"]
    layers = [n for place in passed for n in place.layers]
    begins, ends = (sum(getattr(place, end) is None for place in passed) for end in ("before", "after"))
    sums = len(layers), sum(map(m.has_experts, layers)), begins, ends
    own = config.global_batch_size // size(parts, "dp") * m.seq_len // size(parts, "cp")
    again = RECOMPUTE[config.recompute] is not RECOMPUTE["none"]  # whole layers
    return Passes(m, own / micro_batches(config, parts), *sums, dtype.itemsize, wide(dtype).itemsize, again)


def moment_bytes(config: Any, parts: Parts) -> int:
    """What the update rule keeps of its masters, as the rule's file says it; two numbers of each if it says nothing."""
    says = {file.__name__: file.moments for file in offered(type(config), "moments")}
    numbers = says.get(OPTIMIZERS[config.optimizer].__module__, lambda _name, master: 2 * master.numel())
    return sum(numbers(name, master) * master.itemsize for name, master in parts.optimizer.masters.items())


def added(config: Any, what: str, *about: Any) -> float:
    """Bytes that variants keep beside theory's, as their files say it: each one's `what(config, *about)`."""
    return sum(getattr(file, what)(config, *about) for file in offered(type(config), what))


def held_bytes(config: Any, parts: Parts) -> dict[str, float]:
    """Bytes of each kind of tensor on this rank."""
    w, on_cpu = passes_of(config, parts), next(parts.model.parameters()).device.type == "cpu"
    zero, units = getattr(config, "zero", 0), parts.units
    params = [param for param in parts.model.parameters() if param.requires_grad]
    n = cut = sum(param.numel() for param in params)
    if units:
        n, cut = (sum(unit.length * (unit.group.size if whole else 1) for unit in units) for whole in (True, False))
    batch, seq = config.micro_batch_size, w.m.seq_len // size(parts, "cp")
    about = size(parts, "tp"), getattr(config, "sp", False), config.recompute, on_cpu, config.loss_chunk
    micro_batch = activations.MicroBatch(w.m, batch, seq, w.e, w.wide, *about)
    places, row = work_lists(config, parts)
    split = any(action.kind == "W" for action in row)
    kept = {stage: activations.kept_of(micro_batch, place, split, in_forward=True) for stage, place in places.items()}
    for stage, one in kept.items():
        kept[stage] = one._replace(until_b=one.until_b + added(config, "waits", micro_batch, places[stage]))
    return {
        "parameters": (cut if zero == 3 else n) * w.e + added(config, "gathered", parts),
        "gradients": (cut if zero >= 2 else n) * w.wide,
        "masters": cut * w.wide * (w.wide != w.e),
        "moments": moment_bytes(config, parts),
        "activations": max(activations.kept_after_forward(row, kept, places, micro_batch.own * w.m.dim * w.e)),
    }


def data_traffic(config: Any, parts: Parts) -> dict[str, Traffic]:
    """What gradients and, under ZeRO, weights cost."""
    units, sent = parts.units, dict(gradients=Traffic())
    if not units:
        for param in [param for param in parts.model.parameters() if param.requires_grad]:
            group, n_bytes = parts.mesh[layout_of(param).data_dim], param.numel() * param.grad_dtype.itemsize
            sent["gradients"] += traffic.gradient_traffic(group.name, group.size, n_bytes, config.sync == "ring")
        return sent
    reduced, gathered = traffic.unit_travels(*module_runs(config, parts)) if config.zero >= 2 else ({}, {})
    for i, unit in enumerate(units):
        sizes = unit.flat.itemsize, next(iter(unit.named.values())).grad_dtype.itemsize
        about = unit.group.name, unit.group.size, len(unit.flat), *sizes
        sent["gradients"] += traffic.unit_traffic(*about, reduced.get(unit, 1), 0)
        times = gathered.get(unit, 1) if config.zero == 3 else 1
        sent[f"weights of unit {i}"] = traffic.unit_traffic(*about, 0, times)
    return sent


def module_runs(config: Any, parts: Parts) -> tuple[list, list, set[int], set]:
    """What ZeRO's units are used by in which order, as `extras.theory.traffic.unit_travels` wants it."""
    trunk, head = parts.model.model, parts.model.lm_head
    entries = [[trunk.embed_tokens], *([layer] for layer in trunk.layers.values()), [trunk.norm, head]]
    params = [set(nn.ModuleList(modules).parameters()) for modules in entries if None not in modules]
    uses = [[unit for unit in parts.optimizer.units if own & set(unit.named.values())] for own in params]
    first, number = int(trunk.embed_tokens is not None), {}
    number |= {int(name): first + i for i, name in enumerate(trunk.layers)}
    places, row = work_lists(config, parts)
    runs = []
    for kind, _, stage in row:
        place = places[stage]
        ends = [0] * (place.before is None), [len(params) - 1] * (place.after is None)
        runs.append((kind, [*ends[0], *(number[n] for n in place.layers), *ends[1]]))
    shared = {*uses[0]} & {*uses[-1]} if 0 in places and parts.way[-1] in places else set()
    return uses, runs, set(number.values()), shared


def pipeline_traffic(config: Any, parts: Parts, w: Passes) -> dict[str, Traffic]:
    """What crosses the boundaries of this rank's stages, and a tied matrix, which two ranks have."""
    rank, places = parts.pipeline.group.rank, parts.pipeline.places
    targets = (consumer(action, places) for action in lists_of(config, parts)[rank])
    sends = sum(to is not None and places[to.stage].rank != rank for to in targets)
    first, last = places[0].rank, places[-1].rank
    tied = sliced(parts, TIED) * w.wide if w.m.tied and first != last and rank in (first, last) else 0
    stages = sends * w.tokens / parts.pipeline.sp_ranks * w.m.dim * w.e
    return {name: Traffic({("pp", "send"): sent}) for name, sent in (("stages", stages), ("tied", tied))}


def partial_traffic(parts: Parts, n_bytes: int) -> Traffic:
    """Gradients of `n_bytes` an element that are parts of a sum over other dimensions than that of the data."""
    sent = Traffic()
    for name, param in parts.model.named_parameters():
        for dim in layout_of(param).partial_over:
            sent += traffic.sum_traffic(dim, size(parts, dim), n_bytes * sliced(parts, name))
    return sent


def sliced(parts: Parts, name: str) -> int:
    """Elements of a parameter's gradient that this rank has in the end: all, or those in its slice."""
    for unit in parts.units:
        if name in unit.named:
            return len(unit.view_shard(unit.master, name))
    return parts.model.get_parameter(name).numel()


def number_traffic(config: Any, parts: Parts, n_bytes: int) -> Traffic:
    """The loss, of `n_bytes`, and the squares of the norm, in fp64, are summed over ranks."""
    sent = Traffic()
    for dim in ("data" if hasattr(config, "cp") else "dp", "pp"):
        sent += traffic.sum_traffic(dim, size(parts, dim), n_bytes)
    for dim in parts.mesh.sizes if hasattr(config, "zero") else ():
        sent += traffic.sum_traffic(dim, size(parts, dim), 8)
    return sent


def sent_bytes(config: Any, parts: Parts) -> Traffic:
    """Bytes that this rank sends in a step, by (dimension, operation).

    What each mechanism of the steps sends, by theory's laws; and then what the files of variants that change it say:
    `sends(config, parts, w, said)` returns the mechanisms, by name, that send something else, or are new. It is that of
    a whole batch, if all experts are equally busy.
    """
    if parts.sync is None:
        return Traffic()
    w, (tp, cp, ep) = passes_of(config, parts), (size(parts, dim) for dim in ("tp", "cp", "ep"))
    sp = getattr(config, "sp", False)
    said = data_traffic(config, parts) | dict(
        partial=partial_traffic(parts, w.wide),
        blocks=traffic.tensor_traffic(w._replace(embeddings=0, heads=0), tp, sp),
        ends=traffic.tensor_traffic(w._replace(layers=0, routers=0), tp, sp),
        context=traffic.context_traffic(w, cp, tp) if cp > 1 else Traffic(),
        rows=traffic.row_traffic(w, ep, tp),
        counts=traffic.count_traffic(w, ep, cp * tp),
        numbers=number_traffic(config, parts, w.wide),
    )
    said |= pipeline_traffic(config, parts, w) if parts.pipeline is not None else {}
    for file in offered(type(config), "sends"):
        said |= file.sends(config, parts, w, said)
    return Traffic({key: n_bytes for key, n_bytes in sum(said.values(), Traffic()).items() if n_bytes})
