"""The bytes that one rank of the course's trainer sends in a step, from the numbers of a layout alone.

A run asks the same formulas (theory/traffic.py) with what its own objects say. Here the parameters of a rank are lists
of numbers, laid out in ZeRO's units: one for each layer, for the embedding, for the head, and for a layer's experts.
"""

from collections import Counter
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from common.schedules import SCHEDULES, communicate, place_stages
from theory import traffic
from theory.footprint import E, Stage, course_config, rank_stages
from theory.layouts import Layout, network
from theory.shapes import Shape
from theory.traffic import Gradients, Traffic, UnitShape

WIDE = 4  # bytes of a gradient's element


class Param(NamedTuple):
    """Elements on one rank; the dimensions, besides that of the data ranks, over which the gradient is summed."""

    elements: int
    summed: tuple[str, ...] = ()


Units = dict[tuple[str, str], list[Param]]  # (part of the model, mesh dimension that holds it alike) -> parameters


def layer_units(m: Shape, layout: Layout, number: int) -> Units:
    """The parameters of one layer, in the order of its modules."""
    tp, ep, copies = layout.tp, layout.ep, max(1, layout.tp // m.n_kv_heads)
    tokens = ("tp",) if layout.sp and tp > 1 else ()  # these see only the rank's own tokens
    norm, square = Param(m.dim, tokens), Param(m.dim * m.dim // tp)
    kv = Param(m.dim * m.n_kv_heads * m.head_dim * copies // tp, ("kv",) if copies > 1 else ())
    params, name = [norm, square, kv, kv, square, norm], f"layers.{number}"
    if not m.has_experts(number):
        return {(name, "data"): params + [Param(m.dim * m.ffn_dim // tp)] * 3}
    router, experts = Param(m.experts * m.dim, tokens), [Param(m.experts // ep * m.dim * m.expert_width // tp)] * 3
    shared = [Param(m.dim * m.shared_experts * m.expert_width // tp)] * 3 if m.shared_experts else []
    if ep == 1:
        return {(name, "data"): [*params, router, *experts, *shared]}
    return {(name, "data"): [*params, router, *shared], (name, "expert_data"): experts}


def rank_units(m: Shape, layout: Layout, stages: tuple[Stage, ...]) -> list[Units]:
    """The parameters of each stage of a rank. A tied matrix is the embedding's, in the first stage and in the last."""
    placements = place_stages(layout.schedule, layout.pp, layout.chunks)
    ends = {place.rank for line in placements for place in (line[0], *line[-1:] * m.tied)}
    rows, tokens = -(-m.vocab_size // layout.tp) * m.dim, ("tp",) if layout.sp and layout.tp > 1 else ()
    found: list[Units] = []
    for stage in stages:
        head = [Param(m.dim, tokens)] + [Param(rows)] * (not m.tied)
        units = {("embedding", "data"): [Param(rows)]} if stage.first or (stage.last and m.tied) else {}
        for number in stage.layers:
            units |= layer_units(m, layout, number)
        units |= {("head", "data"): head} if stage.last else {}
        for (part, _), params in units.items():
            if layout.schedule == "dualpipe" or (part == "embedding" and len(ends) == 2):  # two pipeline ranks have it
                params[:] = [param._replace(summed=(*param.summed, "mirror")) for param in params]
        found.append(units)
    return found


def sent_bytes(m: Shape, layout: Layout, rank: int = 0, data_rank: int = 0) -> Traffic:
    """Bytes by (mesh dimension, operation) of a step in bf16, as the ledger of a run books them.

    `rank` counts in the pipeline, `data_rank` among the dp x cp ranks: it says which slice of a unit ZeRO gives it.
    What depends on the routing to experts is a mean.
    """
    config, way = course_config(layout), (layout.schedule, layout.pp, layout.chunks)
    stages = rank_stages(m, *way, "balanced")[rank]
    chunks = rank_units(m, layout, stages)
    units = {key: params for chunk in chunks for key, params in chunk.items()}
    ranks = {"data": network(layout, "shard").ranks, "expert_data": network(layout, "expert shard").ranks}
    data_rank %= ranks["data"]  # among those over which ZeRO cuts
    lists = [SCHEDULES[layout.schedule](layout.pp, layout.micro_batches, layout.chunks, r) for r in range(layout.pp)]

    held: Counter[str] = Counter()  # bytes of gradients on this rank, by the dimension over which they are partial
    shapes = []
    for (_, dim), params in units.items():
        elements = sum(param.elements for param in params)
        length = -(-elements // ranks[dim]) if layout.zero else elements
        start = (data_rank if dim == "data" else data_rank // layout.ep) * length if layout.zero else 0
        shapes.append(UnitShape(dim, ranks[dim], length, True, WIDE, E))
        for param, (a, b) in zip(params, pairwise(accumulate((p.elements for p in params), initial=0)), strict=True):
            here = max(0, min(b, start + length) - max(a, start))
            held.update(dict.fromkeys(param.summed, here * WIDE))
    if layout.zero:
        numbers = {key: number for number, key in enumerate(units)}
        turns = [[numbers[key] for key in chunk] for chunk in chunks]
        if layout.replicas > 1:
            shapes = [shape._replace(dim="shard" if shape.dim == "data" else shape.dim) for shape in shapes]
        sent = traffic.zero_stage_traffic(shapes, layout.zero, turns, lists[rank])
        sent |= traffic.replica_traffic(shapes, layout.zero, layout.replicas)
    else:
        sums = {dim: sum(unit.length * WIDE for unit in shapes if unit.dim == dim) for dim in ranks}
        summed = [Gradients(dim, ranks[dim], n_bytes, []) for dim, n_bytes in sums.items()]
        sent = traffic.gradient_traffic(config, summed)

    copies = max(1, layout.tp // m.n_kv_heads)
    sent |= traffic.partial_traffic(
        [("tp", layout.tp, held["tp"]), ("kv", copies, held["kv"]), ("mirror", 2, held["mirror"])]
    )
    program = communicate(lists, place_stages(*way))[rank]
    slices = 1 if layout.sp else layout.tp
    message = layout.mbs * (m.seq_len // layout.cp) * m.dim * E // layout.tp
    cut = (layout.tp, layout.cp)
    passed = partial(traffic.moe_traffic, config, m, *cut, layout.ep, torch.bfloat16)
    sent |= traffic.stage_traffic(config, m, list(stages), program, message, slices, *cut, torch.bfloat16, passed)
    return {name: n_bytes for name, n_bytes in sent.items() if n_bytes}
