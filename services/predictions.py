"""What theory says of a run: it is told shapes, precision and layout, as plain numbers taken from the run's objects."""

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from common.layout import layout_of, replica_group
from services.devices import peak_flops
from services.muon import Muon
from theory import flops, memory, traffic
from theory.peak import Chunk, Rank, Unit
from theory.peak_layers import Sizes
from theory.traffic import Gradients, Traffic, UnitShape


class Costs(NamedTuple):
    """FLOPs of a token (model, executed), the peak FLOP/s of all ranks, bytes by kind and sent; work."""

    flops: tuple[float, float]
    peak: float
    memory: dict[str, int | None]
    traffic: Traffic
    work: dict[str, float]  # FLOPs that this rank executes in a step, of matmuls and of attention


def shape_of(unit: Any) -> UnitShape:
    """What theory knows of one of ZeRO's units."""
    group, weight_bytes = unit.group, unit.dtype.itemsize
    return UnitShape(group.name, group.size, unit.length, bool(unit.trained), unit.grad_dtype.itemsize, weight_bytes)


def unit_bytes(unit: UnitShape, wide: int) -> tuple[int, int, int, int]:
    """Bytes of a unit's weights and gradient, and of a slice of the gradient, as it is reduced and as it is summed."""
    whole, part = unit.length * unit.ranks, unit.length * unit.gradient_bytes
    return whole * unit.weight_bytes, whole * unit.gradient_bytes, part, unit.length * wide


def summed_gradients(run: Any, sync: Any) -> list[Gradients]:
    """What is summed over which ranks, without ZeRO."""
    params = [p for p in run.model.parameters() if p.requires_grad]
    groups = {param: replica_group(param, run.mesh) for param in params}
    buckets = getattr(sync, "buckets", [])
    return [
        Gradients(
            dim,
            group.size,
            sum(p.numel() * p.grad_dtype.itemsize for p in params if groups[p].name == dim),
            [len(bucket.flat) for bucket in buckets if bucket.group.name == dim],
        )
        for dim, group in {group.name: group for group in [run.mesh.data, *groups.values()]}.items()
    ]


def held_bytes(optimizer: Any, name: str) -> int:
    """Bytes of a parameter's complete gradient on this rank: all of it, or what lies in its slice."""
    if hasattr(optimizer, "units"):
        unit = next(unit for unit in optimizer.units if name in unit.named)
        itemsize = (unit.grad_dtype if unit.stage == 1 else unit.wide).itemsize
        return len(unit.cut(unit.master, name)) * itemsize if name in unit.trained else 0
    param = optimizer.params.get(name)
    return 0 if param is None else param.numel() * param.grad_dtype.itemsize


def partial_sums(run: Any) -> list[tuple[str, int, int]]:
    """(dimension, ranks, bytes) of what `sum_partial_gradients` sums."""
    params, dims = dict(run.model.named_parameters()), [d for d in ("tp", "kv", "mirror") if d in run.mesh.groups]
    return [
        (
            d,
            run.mesh[d].size,
            sum(held_bytes(run.optimizer, n) for n, p in params.items() if d in layout_of(p).partial_over),
        )
        for d in dims
    ]


class MuonWork(NamedTuple):
    """What --optimizer muon does on one rank in a step."""

    hidden: int  # elements that it updates
    sent: Traffic
    flops: float


def muon_work(optimizer: Any, mesh: Any) -> MuonWork:
    """From the shapes of a rank's pieces and the cuts of their parameters."""
    rules = [update.rule for update in getattr(optimizer, "updates", ())] or [optimizer.inner]
    rules = [rule for rule in rules if isinstance(rule, Muon)]
    gathered = [(rule.unit.group.name, rule.unit.group.size, rule.unit.length) for rule in rules if rule.unit]
    done = 0.0
    for muon, name in [(rule, name) for rule in rules for name in rule.hidden]:
        param, (_, low, high) = muon.params[name], muon.own_part(name)
        layout, n = layout_of(param), (high - low) * param.shape[-2:].numel()
        for split in layout.splits:
            if split.dim - param.dim() >= -2:
                gathered.append((split.over, mesh[split.over].size, n))
                n *= mesh[split.over].size // split.copies
        done += (high - low) * flops.newton_schulz_flops(*layout.full_shape(param.shape)[-2:])
    hidden = sum(piece.numel() for rule in rules for piece in rule.hidden.values())
    return MuonWork(hidden, traffic.muon_traffic(gathered, rules[0].dtype.itemsize) if rules else {}, done)


def predict(run: Any, sync: Any) -> Costs:
    """All of it, for one rank and step; `run`: a Trainer that knows its model, optimizer and pipeline."""
    config, m, mesh, dtype, on_cpu = run.config, run.shape, run.mesh, run.dtype, run.device.type == "cpu"
    tp, cp = (mesh[dim].size if dim in mesh.groups else 1 for dim in ("tp", "cp"))
    moe = hasattr(m, "experts")
    per_token = (flops.moe_flops_per_token if moe else flops.flops_per_token)(m, config.recompute)
    peak = mesh.world * peak_flops(run.device, dtype, config.peak_tflops)
    units = [shape_of(unit) for unit in getattr(run.optimizer, "units", [])]
    muon = muon_work(run.optimizer, mesh)
    if units:
        held = memory.zero_memory_rows(config, m, units, dtype, on_cpu, muon.hidden)
    else:
        params = list(run.model.parameters())
        n, factored = sum(p.numel() for p in params), sum(sum(p.shape) for p in params)
        held = memory.memory_rows(config, m, n, factored, dtype, on_cpu, muon.hidden)
    work = work_of(run, tp, cp)
    work["matmul"] += muon.flops
    if not mesh.sizes:
        return Costs(per_token, peak, held, {}, work)

    sent = gradients_sent(run, sync, units) | muon.sent
    if hasattr(config, "tp"):
        sent |= traffic.partial_traffic(partial_sums(run))
    if run.pipeline is not None:
        pipeline, layout = run.pipeline, (tp, cp, dtype)
        kept = passed = None
        if moe:
            kept = partial(memory.expert_activation_bytes, config, m, *layout)
            passed = partial(traffic.moe_traffic, config, m, tp, cp, mesh["ep"].size, dtype)
        more = dict(more=kept) if kept else {}
        held["activations"] = memory.pp_activation_bytes(
            config, m, pipeline.chunks, pipeline.program, pipeline.slices, *layout, on_cpu, **more, rank=mesh["cp"].rank
        )
        size = config.micro_batch_size * pipeline.wire[0] * pipeline.wire[1] * dtype.itemsize
        sent |= traffic.stage_traffic(
            config, m, pipeline.chunks, pipeline.program, size, pipeline.slices, *layout, *([passed] if passed else [])
        )
    elif hasattr(config, "tp"):
        local = traffic.replace(m, seq_len=m.seq_len // cp)
        rank = mesh["cp"].rank if cp > 1 else 0
        held["activations"] = memory.cp_activation_bytes(config, m, tp, cp, dtype, on_cpu, rank)
        sent |= traffic.tp_traffic(config, local, tp, dtype, micro_batches(run))
        sent |= traffic.cp_traffic(config, m, tp, cp, dtype, micro_batches(run))
    return Costs(per_token, peak, held, sent, work)


def predict_peak(run: Any, held: dict[str, int | None]) -> float | None:
    """The most bytes that this rank holds at any moment of a step; `held`: the bytes by kind of `predict`.

    None where it is not known: on a CPU, whose kernels differ, with --compress, which keeps what it did not send, and
    with --optimizer muon, whose update has matrices of its own.
    """
    config, m, mesh, e = run.config, run.shape, run.mesh, run.dtype.itemsize
    if run.device.type == "cpu" or getattr(config, "compress", "none") != "none" or config.optimizer == "muon":
        return None
    tp, cp, ep = (mesh[dim].size if dim in mesh.groups else 1 for dim in ("tp", "cp", "ep"))
    wide, units, zero = max(4, e), getattr(run.optimizer, "units", []), getattr(config, "zero", 0)
    tokens, sp = config.micro_batch_size * m.seq_len // cp, tp > 1 and config.sp
    sizes = Sizes(
        *(m, config.micro_batch_size, tokens, tokens // tp if sp else tokens, e, wide, tp, sp),
        *(tp > 1 and config.tp_overlap, cp, mesh["cp"].rank if cp > 1 else 0, getattr(config, "cp_mode", "")),
        *(run.pipeline is not None and run.pipeline.store is not None, config.recompute, ep),
        *(getattr(config, "ep_mode", "") == "alltoall", getattr(config, "capacity_factor", 0.0), config.fuse_gradients),
    )
    grown = wide if config.grad_dtype == "fp32" else e
    kept = zero == 0 and getattr(config, "sync", "naive") == "naive"
    apart = held["gradients"] if zero or kept else 0
    shapes = [Unit(tuple(unit.named), *unit_bytes(shape_of(unit), wide)) for unit in units]
    rank = Rank(
        sizes, sum(n or 0 for n in held.values()) - held["activations"] - apart, grown / e, m.tied, zero, shapes, kept
    )
    numbers = {unit: number for number, unit in enumerate(units)}
    if run.pipeline is None:
        uses = [[numbers[unit] for unit in units] for units in getattr(run.optimizer, "uses", [])]
        rank.micro_batches(list(range(m.n_layers)), micro_batches(run), uses)
    else:
        pipeline = run.pipeline
        chunks = [Chunk([int(n) for n in chunk.layers], chunk.first, chunk.last) for chunk in pipeline.chunks]
        found = getattr(run.optimizer, "chunk_units", [[]] * len(chunks))
        found = [[numbers[unit] for unit in units] for units in found]
        rank.pipeline(pipeline.program, chunks, pipeline.slices, pipeline.placements, mesh["pp"].rank, found)
    summed = [size for _, ranks, size in partial_sums(run) if ranks > 1] if hasattr(config, "tp") else []
    matrices = [wide * p.numel() for p in run.model.parameters() if p.dim() > 1]
    copies = wide * sum(p.numel() for p in run.model.parameters()) if zero == 0 and grown < wide else 0
    if config.optimizer == "adafactor":  # the update of a matrix is still there while that of the next is made
        copies += max(a + b for a, b in pairwise(matrices))
    if zero == 1 and grown < wide:  # slices of gradients in fp32: of all units, or of one after the other
        together = sum if len(run.optimizer.updates) == 1 else max
        copies = together(unit.sum for unit in shapes)
    rank.update(max(summed, default=0), copies)
    return rank.memory.peak


def work_of(run: Any, tp: int, cp: int) -> dict[str, float]:
    """FLOPs that this rank executes in a step."""
    layers, rank = range(run.shape.n_layers), run.mesh["cp"].rank if cp > 1 else 0
    passed = [(layers, True, micro_batches(run))]
    if run.pipeline is not None:
        times = Counter(action.chunk for action in run.pipeline.actions if action.kind == "F")
        passed = [([int(n) for n in c.layers], c.last, times[i]) for i, c in enumerate(run.pipeline.chunks)]
    split = run.config.fuse_gradients or (run.pipeline is not None and run.pipeline.store is not None)
    return flops.rank_flops(run.config, run.shape, passed, tp, cp, rank, split)


def micro_batches(run: Any) -> int:
    """Micro-batches of a rank in a step."""
    ranks = run.mesh["dp"].size if run.mesh.sizes else 1
    return run.config.global_batch_size // ranks // run.config.micro_batch_size


def gradients_sent(run: Any, sync: Any, units: list[UnitShape]) -> Traffic:
    """Bytes sent for gradients and, under ZeRO, for weights."""
    if not units:
        return traffic.gradient_traffic(run.config, summed_gradients(run, sync))
    stage, optimizer = run.config.zero, run.optimizer
    sums = traffic.replica_traffic(units, stage, optimizer.replicas.size)
    if run.pipeline is None:
        uses = Counter(unit for units in (*optimizer.uses, *optimizer.uses[1:-1]) for unit in units)  # and in backward
        gathered = [uses[unit] for unit in optimizer.units]
        return sums | traffic.zero_traffic(units, stage, gathered, micro_batches(run))
    numbers = {unit: number for number, unit in enumerate(optimizer.units)}
    chunk_units = [[numbers[unit] for unit in units] for units in optimizer.chunk_units]
    return sums | traffic.zero_stage_traffic(units, stage, chunk_units, run.pipeline.actions)
