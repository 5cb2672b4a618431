"""What theory says of a run: it is told shapes, precision and layout, as plain numbers taken from the run's objects."""

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from common.layout import layout_of, replica_group
from services.devices import peak_flops
from services.muon import Muon
from services.offload import on_host
from theory import flops, memory, traffic
from theory.peak import Chunk, Rank
from theory.peak_gradients import Bucket, Compressed, FirstKept, Matrices, MuonUnit, Sync, Unit, Zero
from theory.peak_layers import Sizes
from theory.tape import Memory
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


def rules_of(optimizer: Any) -> list[Any]:
    """The rules of the update, one after another."""
    return [update.rule for update in getattr(optimizer, "updates", ())] or [optimizer.inner]


def muon_unit(rule: Muon, mesh: Any) -> MuonUnit:
    """The shapes of what a rule updates, and the cuts of its parameters."""
    matrices = []
    for name, piece in rule.hidden.items():
        param, (_, low, high) = rule.params[name], rule.own_part(name)
        splits = [(split, split.dim - param.dim()) for split in layout_of(param).splits]
        cuts = [(split.over, mesh[split.over].size, split.copies, dim) for split, dim in splits if dim >= -2]
        matrices.append(Matrices(high - low, *param.shape[-2:], piece.numel(), cuts))
    if rule.unit is None:
        return MuonUnit("", 1, sum(found.own for found in matrices), matrices)
    return MuonUnit(rule.unit.group.name, rule.unit.group.size, rule.unit.length, matrices)


def muon_work(optimizer: Any, mesh: Any) -> MuonWork:
    """From the shapes of a rank's pieces and the cuts of their parameters."""
    rules = [rule for rule in rules_of(optimizer) if isinstance(rule, Muon)]
    units, hidden, done = [muon_unit(rule, mesh) for rule in rules], 0, 0.0
    gathered = [unit[:3] for unit in units if unit.dim]
    for count, rows, columns, own, cuts in [matrices for unit in units for matrices in unit.matrices]:
        shape = {-2: rows, -1: columns}
        for over, ranks, copies, dim in cuts:
            gathered.append((over, ranks, count * shape[-2] * shape[-1]))
            shape[dim] *= ranks // copies
        hidden, done = hidden + own, done + count * flops.newton_schulz_flops(shape[-2], shape[-1])
    return MuonWork(hidden, traffic.muon_traffic(gathered, rules[0].dtype.itemsize) if rules else {}, done)


def factored_numbers(param: Any) -> int:
    """What Adafactor keeps of a parameter: means of the rows and the columns of its matrices; all, if it has none."""
    return sum(param.numel() // n for n in param.shape[-2:]) if param.dim() > 1 else param.numel()


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
        n, factored = sum(p.numel() for p in params), sum(map(factored_numbers, params))
        held = memory.memory_rows(config, m, n, factored, dtype, on_cpu, muon.hidden)
    work = work_of(run, tp, cp)
    work["matmul"] += muon.flops
    if config.optimizer == "adafactor":  # rows' means times columns'
        work["matmul"] += sum(2.0 * param.numel() for param in run.model.parameters() if param.dim() > 1)
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


def sync_of(run: Any, shapes: list[Unit], memory: Memory) -> Sync:
    """How gradients are summed."""
    config, sync = run.config, getattr(run, "sync", None)
    if shapes:
        return Zero(memory, config.zero, shapes)
    if getattr(config, "compress", "none") != "none":
        names = {param: name for name, param in run.model.named_parameters()}
        buckets = [b for b in sync.buckets if b.group.size > 1]
        buckets = [Bucket(tuple(map(names.get, b.params)), len(b.flat), b.group.size) for b in buckets]
        return Compressed(memory, buckets, sync.buckets[0].flat.itemsize, config.compress, config.topk_fraction)
    return Sync(memory) if hasattr(sync, "buckets") else FirstKept(memory)


def updates_of(run: Any, wide: int) -> list[tuple[float, MuonUnit | None]]:
    """What the update does on the device, one group of weights after another: bytes of copies, and what Muon does."""
    optimizer, config = run.optimizer, run.config
    rules = [rule if isinstance(rule, Muon) else None for rule in rules_of(optimizer)]
    muon = [rule and muon_unit(rule, run.mesh) for rule in rules]
    cast = wide * (config.grad_dtype == "same" and run.dtype.itemsize < wide)  # to what gradients grow
    if hasattr(optimizer, "updates"):  # ZeRO's slices grow in stage 1 alone, and not here if they go to the host
        cast *= config.zero == 1 and not on_host(config)
        copies = [cast * sum(unit.length for unit in update.units) for update in optimizer.updates]
        return list(zip(copies, muon, strict=True))
    hidden = sum(found.own for found in muon[0].matrices) if muon[0] else 0  # the update takes their copies' place
    copies = cast * (sum(param.numel() for param in optimizer.params.values()) - hidden)
    if config.optimizer == "adafactor":  # the update of a matrix is still there while that of the next is made
        matrices = [wide * param.numel() for param in optimizer.params.values() if param.dim() > 1]
        copies += max(a + b for a, b in pairwise(matrices))
    return [(copies, muon[0])]


def predict_peak(run: Any, held: dict[str, int | None]) -> float | None:
    """The most bytes that this rank holds at any moment of a step; `held`: the bytes by kind of `predict`.

    With --compress, of a step that finds what the one before has not sent. None on a CPU, whose kernels differ.
    """
    config, m, mesh, e = run.config, run.shape, run.mesh, run.dtype.itemsize
    if run.device.type == "cpu":
        return None
    tp, cp, ep = (mesh[dim].size if dim in mesh.groups else 1 for dim in ("tp", "cp", "ep"))
    wide, units = max(4, e), getattr(run.optimizer, "units", [])
    tokens, sp = config.micro_batch_size * m.seq_len // cp, tp > 1 and config.sp
    sizes = Sizes(
        *(m, config.micro_batch_size, tokens, tokens // tp if sp else tokens, e, wide, tp, sp),
        *(tp > 1 and config.tp_overlap, cp, mesh["cp"].rank if cp > 1 else 0, getattr(config, "cp_mode", "")),
        *(run.pipeline is not None and run.pipeline.store is not None, config.recompute, ep),
        *(getattr(config, "ep_mode", "") == "alltoall", getattr(config, "capacity_factor", 0.0)),
        *(traffic.compressing(config), config.fuse_gradients),
    )
    grown = wide if config.grad_dtype == "fp32" else e
    shapes = [Unit(tuple(unit.named), *unit_bytes(shape_of(unit), wide)) for unit in units]
    sync = sync_of(run, shapes, Memory())
    apart = {"activations"} if type(sync) in (Sync, Compressed) else {"activations", "gradients"}
    rank = Rank(sizes, sum(n or 0 for kind, n in held.items() if kind not in apart), grown / e, m.tied, sync)
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
    rank.update(max(summed, default=0), updates_of(run, wide), 8 if e == 8 else 2, 0 if on_host(config) else wide)
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
