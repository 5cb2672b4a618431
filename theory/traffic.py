"""Bytes that a rank sends in one step, by (mesh dimension, operation)."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import comb
from typing import Any, NamedTuple

import torch

from common.model import ModelConfig
from common.moe import MoEConfig
from common.schedules import Action, Step

Traffic = dict[tuple[str, str], float]
BLOCK = 256  # values that share one scale in int8 compression


class Gradients(NamedTuple):
    """What is summed over `ranks` ranks of the mesh dimension `dim`: bytes in all, and elements of each bucket."""

    dim: str
    ranks: int
    nbytes: int
    buckets: list[int]


def gradient_traffic(config: Any, summed: list[Gradients]) -> Traffic:
    """Bytes each rank sends for its gradients in one step, without ZeRO: step 2's law, and those of --compress."""
    found: Traffic = {}
    for dim, n, n_bytes, buckets in summed:
        if config.compress in ("bf16", "int8"):
            block = 2 * BLOCK if config.compress == "bf16" else BLOCK + 4
            blocks = sum(-(-length // (n * BLOCK)) * n for length in buckets)
            found |= {(dim, operation): (n - 1) / n * blocks * block for operation in ("all_to_all", "all_gather")}
        elif config.compress == "topk":
            chosen = sum(max(1, int(config.topk_fraction * length)) for length in buckets)
            found[dim, "all_gather"] = (n - 1) * chosen * 8
        else:
            found[dim, "all_reduce"] = 2 * (n - 1) / n * n_bytes
    return found


class UnitShape(NamedTuple):
    """One of ZeRO's units: cut over `ranks` ranks of `dim` in slices of `length` elements; bytes of an element."""

    dim: str
    ranks: int
    length: int
    trained: bool
    gradient_bytes: int
    weight_bytes: int


def unit_traffic(units: list[UnitShape], times: list[tuple[int, int]]) -> Traffic:
    """Bytes each rank sends if gradient and weights of each unit travel so many `times`: (reductions, gatherings)."""
    found: Traffic = {}
    for unit, (reduced, gathered) in zip(units, times, strict=True):
        sent = (unit.ranks - 1) * unit.length
        for operation, n_bytes in (
            ("reduce_scatter", reduced * unit.gradient_bytes),
            ("all_gather", gathered * unit.weight_bytes),
        ):
            found[unit.dim, operation] = found.get((unit.dim, operation), 0) + sent * n_bytes
    return found


def zero_traffic(units: list[UnitShape], stage: int, gathered: list[int], micro_batches: int) -> Traffic:
    """Step 3's first table; `gathered`: how often stage 3 gathers each unit in a micro-batch."""
    times = []
    for unit, count in zip(units, gathered, strict=True):
        reduced = unit.trained * (1 if stage == 1 else micro_batches)
        times.append((reduced, micro_batches * count if stage == 3 else int(unit.trained)))
    return unit_traffic(units, times)


def zero_stage_traffic(
    units: list[UnitShape], stage: int, chunk_units: list[list[int]], actions: list[Action]
) -> Traffic:
    """ZeRO in a pipeline; `chunk_units`: the numbers of the units of each chunk.

    A unit's gradient travels once (stage 1) or each time that a chunk with it has gone backward; updated weights once,
    or (stage 3) each time that another chunk's turn begins.
    """
    turns: list[list[int]] = [[]]  # the units that are there, one turn after another
    for action in actions:
        if action.kind != "W" and chunk_units[action.chunk] != turns[-1]:
            turns.append(chunk_units[action.chunk])
    times = []
    for number, unit in enumerate(units):
        backs = sum("W" in action.kind and number in chunk_units[action.chunk] for action in actions)
        came = sum(number in after and number not in before for before, after in pairwise(turns))
        reduced = unit.trained * (1 if stage == 1 else backs)
        times.append((reduced, came if stage == 3 else int(unit.trained)))
    return unit_traffic(units, times)


def partial_traffic(summed: list[tuple[str, int, int]]) -> Traffic:
    """Bytes a rank sends in `sum_partial_gradients`, for (dimension, ranks, bytes of gradients) each."""
    return {(dim, "all_reduce (partial)"): 2 * (n - 1) / n * size for dim, n, size in summed if size and n > 1}


def muon_traffic(gathered: list[tuple[str, int, int]], e: int) -> Traffic:
    """Bytes a rank sends to make updates whole for Muon, of `e` bytes a number; for each all-gather (dimension, ranks,
    elements of one rank's part): a unit's slice under ZeRO, then this rank's part of the matrices that tp cuts.
    """
    found: Traffic = {}
    for dim, n, length in gathered:
        found[dim, "all_gather (muon)"] = found.get((dim, "all_gather (muon)"), 0) + (n - 1) * length * e
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}


def stage_traffic(
    config: Any,
    m: ModelConfig,
    chunks: list,
    program: list[Step],
    message: int,
    slices: int,
    tp: int,
    cp: int,
    dtype: torch.dtype,
    more: Callable[[Any, int], Traffic] = lambda chunk, times: {},
) -> Traffic:
    """Bytes a rank sends in one step: for its chunks over tp and cp (and what `more` says of a chunk that so many
    micro-batches pass), and over the boundaries: `message` bytes each, one of `slices` parts of the hidden states.
    """
    found: Traffic = defaultdict(float)
    passed = Counter(step.what.chunk for step in program if step.kind == "run" and step.what.kind == "F")
    for number, chunk in enumerate(chunks):
        layers, times = replace(m, n_layers=len(chunk.layers)), passed[number]
        local = replace(layers, seq_len=m.seq_len // cp)
        parts = tp_traffic(config, local, tp, dtype, times, int(chunk.first), int(chunk.last))
        for part in (parts, cp_traffic(config, layers, tp, cp, dtype, times), more(chunk, times)):
            for name, n_bytes in part.items():
                found[name] += n_bytes
    kinds = Counter(step.kind for step in program)
    found["pp", "send"] += kinds["send"] * message
    found["tp", "all_gather (boundary)"] += kinds["recv"] * message * (slices - 1)
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes}


def tp_traffic(
    config: Any, m: ModelConfig, n: int, dtype: torch.dtype, micro_batches: int, embeddings: int = 1, heads: int = 1
) -> dict[tuple[str, str], float]:
    """Bytes one of `n` ranks sends over tp in one step, by (mesh dimension, operation): step 4's table, k times.

    `embeddings`, `heads`: whether there are any (on a stage of a pipeline, step 6, there may be none).
    """
    e, wide = dtype.itemsize, max(4, dtype.itemsize)
    if n == 1:
        return {}
    tokens, layers = config.micro_batch_size * m.seq_len, m.n_layers
    unit = (n - 1) / n * tokens * m.dim * e
    combine = 2 * (n - 1) * tokens * wide * heads
    found: dict[tuple[str, str], float] = {}
    redone = config.recompute != "none"  # up to the input of a layer's last matmul
    if config.sp:
        gathers = 4 + 2 * config.tp_overlap + 2 * redone
        found["tp", "all_gather"] = micro_batches * ((gathers * layers + embeddings + heads) * unit + combine)
        found["tp", "reduce_scatter"] = micro_batches * ((4 + redone) * layers + embeddings + heads) * unit
    else:
        found["tp", "all_gather"] = micro_batches * combine
        found["tp", "all_reduce"] = micro_batches * ((4 + redone) * layers + embeddings + heads) * 2 * unit
    return found


def cp_traffic(config: Any, m: ModelConfig, tp: int, cp: int, dtype: torch.dtype, micro_batches: int) -> dict:
    """Bytes a rank sends over cp in one step, by (mesh dimension, operation): step 5's table, k L times."""
    if cp == 1:
        return {}
    times, passes = micro_batches * m.n_layers, 1 + (config.recompute != "none")  # of forward
    tokens, kv_heads = config.micro_batch_size * m.seq_len // cp, max(1, m.n_kv_heads // tp)
    kv = tokens * 2 * kv_heads * m.head_dim
    narrow, wide = kv * dtype.itemsize, kv * max(4, dtype.itemsize)
    if config.cp_mode == "allgather":
        return {
            ("cp", "all_gather"): times * passes * (cp - 1) * narrow,
            ("cp", "reduce_scatter"): times * (cp - 1) * wide,
        }
    if config.cp_mode == "ulysses":
        q, repeated = tokens * m.dim // tp * dtype.itemsize, narrow * max(kv_heads, cp) // kv_heads
        return {("cp", "all_to_all"): times * (1 + passes) * (cp - 1) / cp * (2 * q + repeated)}
    return {("cp", "send"): times * ((1 + passes) * (cp - 1) * narrow + cp * wide)}


def mean_rows(m: MoEConfig, tokens: int, ep: int) -> float:
    """Rows that a rank with so many tokens sends to the others, on average, if all sets of k experts are as likely."""
    elsewhere = comb(m.experts - m.experts // ep, m.experts_per_token) / comb(m.experts, m.experts_per_token)
    return (ep - 1) * tokens * (1 - elsewhere)


def ep_bytes(config: Any, m: MoEConfig, tokens: int, ep: int, e: int, sent: float, came: float) -> dict[str, float]:
    """Bytes a rank sends over ep in one layer, forward and backward: step 7's table, by operation.

    `tokens` of this rank, `e` bytes an element; rows `sent` to and that `came` from other ranks.
    """
    wide = max(4, e)
    if config.ep_mode == "allgather":
        there, home = tokens * (m.dim * e + m.experts * wide), tokens * m.dim * e
        return {"all_gather": (ep - 1) * (there + home), "reduce_scatter": (ep - 1) * (there + home)}
    row = 2 * m.dim * e + m.experts // ep * wide
    return {"all_to_all": (sent + came) * row, "all_to_all (counts)": 16 * (ep - 1)}


def expert_tp_bytes(config: Any, m: MoEConfig, rows: float, tp: int, ep: int, e: int, even: bool) -> dict[str, float]:
    """Bytes a rank sends over tp for the experts of one layer, forward and backward, by operation.

    `rows` on this rank, or with SP the most on any tp rank; `even`: their number did not have to be exchanged.
    """
    x, gates = rows * m.dim * e, rows * (m.experts // ep) * max(4, e)
    if not config.sp:
        return {"all_reduce": 2 * (tp - 1) / tp * (2 * x + gates)}
    passed = (tp - 1) * (2 * x + gates)
    return {"all_gather": passed + (0 if even else 16 * (tp - 1)), "reduce_scatter": passed}


def moe_traffic(
    config: Any, m: MoEConfig, tp: int, cp: int, ep: int, dtype: torch.dtype, chunk: Any, times: int
) -> Traffic:
    """Bytes a rank sends for the experts of a chunk in `times` micro-batches, if all are equally likely.

    Rows are whole: the mean to each rank is rounded. Less what step 4 has counted over tp for the MLPs whose place they
    take. If layers are done again, all of forward is, up to the last operator that keeps something for backward: where
    tokens travel, it is the sum of the rows that came home, else the sum inside the experts.
    """
    layers, again = sum(m.has_experts(int(number)) for number in chunk.layers), config.recompute != "none"
    if not layers:
        return {}
    found: Traffic = defaultdict(float)

    def add(dim: str, by_operation: dict[str, float], factor: float = 1):
        for operation, n_bytes in by_operation.items():
            found[dim, operation] += layers * times * factor * n_bytes

    n = cp * tp if config.sp else cp  # ranks that share a sequence
    e, wide, tokens = dtype.itemsize, max(4, dtype.itemsize), config.micro_batch_size * m.seq_len // n
    each, travels = round(mean_rows(m, tokens, ep) / max(1, ep - 1)), ep > 1 and config.ep_mode == "alltoall"
    rows, gates = (ep * each if travels else ep * tokens), m.experts // ep * wide
    if ep > 1:
        sent = (ep - 1) * each
        add("ep", ep_bytes(config, m, tokens, ep, e, sent, sent))
        there = dict(all_gather=(ep - 1) * tokens * (m.dim * e + m.experts * wide))
        if travels:
            there = {"all_to_all": sent * (2 * m.dim * e + gates), "all_to_all (counts)": 16 * (ep - 1)}
        add("ep", there, again)
    if n > 1 and (config.balance == "loss" or config.capacity_factor):
        add("sequence", {"all_gather": (n - 1) * tokens * m.experts_per_token * 4}, 1 + again)
    if tp > 1:
        add("tp", expert_tp_bytes(config, m, rows, tp, ep, e, even=not travels))
        x, unit = rows * m.dim * e, (tp - 1) * (config.micro_batch_size * m.seq_len // cp) * m.dim * e / tp
        if config.sp:
            counts = 16 * (tp - 1) if travels else 0
            add("tp", dict(all_gather=(tp - 1) * (x + rows * gates) + counts), again)
            add("tp", dict(reduce_scatter=(tp - 1) * x), again * travels)
        else:
            add("tp", dict(all_reduce=2 * (tp - 1) / tp * x), again * travels)
        mlp = dict(all_gather=2 + config.tp_overlap + again, reduce_scatter=2) if config.sp else dict(all_reduce=4)
        last = dict(reduce_scatter=1) if config.sp else dict(all_reduce=2)  # of a shared expert is done again, too
        for counted, factor in ((last, again),) if m.shared_experts else ((mlp, -1),):
            add("tp", {operation: count * unit for operation, count in counted.items()}, factor)
    return found
