"""The best layouts among all legal ones, found without timing them all.

A bound comes first: a step is never shorter than its computation and its exposed messages, dealt evenly to all ranks.
Meshes, each with one kind of recomputation, are taken in the order of their bounds. As soon as the next bound is longer
than the tenth best step, the search is over, and nothing better can be left. Within a mesh, a schedule is bounded by
the least bubble it could have; only what fits, and could still win, is simulated.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from common.schedules import SCHEDULES
from extras.theory.footprint import COURSE, Recipe, held
from extras.theory.gpus import ROOM, Gpu
from extras.theory.layouts import RECOMPUTE, Layout, expert_ways, illegal, meshes, schedules, zero_ways
from extras.theory.memory import Held, state_bytes
from extras.theory.seconds import (
    Seconds,
    add,
    hidden_seconds,
    layer_layout,
    least_bubble,
    model_work,
    most_hidden,
    rank_work,
    step_seconds,
    total,
)
from extras.theory.shapes import Shape, flops_per_token

Bar = Callable[[Iterable], Iterable]


class Found(NamedTuple):
    """A layout with what it costs."""

    layout: Layout
    held: Held
    seconds: Seconds


class Search(NamedTuple):
    """The best layouts, one of each mesh; how many layouts are legal, and how many were looked at."""

    best: list[Found]
    legal: int
    timed: int


def evaluate(m: Shape, x: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> Found:
    """All that is known of one layout."""
    return Found(x, held(m, x, recipe), step_seconds(m, x, gpu, recipe))


def floor_seconds(m: Shape, mesh: Layout, gpu: Gpu) -> float:
    """No layout of this mesh with this recomputation has a shorter step."""
    parts = add(*model_work(m, layer_layout(mesh), gpu, COURSE))
    return mesh.micro_batches * (total(parts) - mesh.ep_overlap * most_hidden(parts)) / mesh.pp


def fits(memory: Held, gpu: Gpu) -> bool:
    """Whether a plan may hold so much."""
    return memory.total <= ROOM * gpu.memory


def lean(m: Shape, mesh: Layout) -> list[Layout]:
    """The mesh with those schedules of which one lets least wait; a V needs two layers of each rank."""
    names = ["1f1b", "v-min"] if mesh.pp > 1 and "v-min" in SCHEDULES else ["1f1b"]
    return [x for name in names if not illegal(m, x := replace(mesh, schedule=name, ep_overlap=False))]


def best_variant(m: Shape, mesh: Layout, gpu: Gpu, limit: float) -> tuple[Found | None, int]:
    """The best schedule and way of ZeRO of a mesh with a step under `limit` seconds, if any; how many were timed."""
    winner, timed, n, ways, room = None, 0, mesh.micro_batches, [], ROOM * gpu.memory
    for schedule, chunks in schedules(m, mesh):
        way = replace(mesh, schedule=schedule, chunks=chunks)
        busy, _, costs = rank_work(m, layer_layout(way), gpu, COURSE, schedule, mesh.pp, chunks)
        ways.append((n * (total(busy) - hidden_seconds(way, busy)) + least_bubble(way, *costs), len(ways), way))
    for bound, _, way in sorted(ways):
        if bound >= limit:
            break
        for zero in zero_ways(m, mesh):
            x = replace(way, **zero)
            state = max(sum(state_bytes(m, x, rank)) for rank in (0, x.pp - 1))  # of some rank, so no more than `held`
            if state < room and step_seconds(m, x, gpu, COURSE, simulated=False).step < limit:
                memory = held(m, x, COURSE)
                if fits(memory, gpu):
                    timed += 1
                    seconds = step_seconds(m, x, gpu, COURSE)
                    if seconds.step < limit:
                        winner, limit = Found(x, memory, seconds), seconds.step
    return winner, timed


def search(m: Shape, world: int, batch: int, gpu: Gpu, count: int = 10, bar: Bar = iter) -> Search:
    """The `count` best meshes, each with the best of its `variants`; empty if none fits."""
    all_meshes = list(meshes(m, world, batch))
    tries = [
        replace(mesh, recompute=kind, **way)
        for mesh in all_meshes
        for kind, way in product(RECOMPUTE, expert_ways(mesh))
    ]
    order = sorted((floor_seconds(m, mesh, gpu), number) for number, mesh in enumerate(bar(tries)))
    best: dict[tuple, Found] = {}
    timed = 0
    for floor, number in bar(order):
        mesh = tries[number]
        name = mesh.pp, mesh.cp, mesh.tp, mesh.ep, mesh.micro_batch_size
        steps = sorted(one.seconds.step for one in best.values())
        limit = steps[count - 1] if len(steps) >= count else float("inf")
        if floor >= limit:
            break
        limit = min(limit, best[name].seconds.step) if name in best else limit
        memory = (held(m, replace(x, **zero_ways(m, mesh)[-1]), COURSE) for x in lean(m, mesh))
        if floor < limit and any(0.8 * (least.total - least.moment) <= ROOM * gpu.memory for least in memory):
            winner, more = best_variant(m, mesh, gpu, limit)
            timed += more
            if winner:
                best[name] = winner
    fastest = sorted(best.values(), key=lambda one: one.seconds.step)[:count]
    return Search(fastest, count_legal(m, all_meshes), timed)


def count_legal(m: Shape, some: list[Layout]) -> int:
    """How many layouts these meshes have, with all their `variants`."""
    legal, ways = 0, {}
    for x in (replace(mesh, **way) for mesh in some for way in expert_ways(mesh)):
        key = x.pp, min(x.micro_batches, 2), x.micro_batches % x.pp == 0, x.ep_overlap  # what a schedule asks for
        if key not in ways:
            ways[key] = len(schedules(m, x))
        legal += ways[key] * len(zero_ways(m, x)) * len(RECOMPUTE)
    return legal


def smallest(m: Shape, world: int, batch: int) -> Found | None:
    """The layout that needs the least memory (its seconds are not known: None); None if no layout is legal."""
    best, least = None, float("inf")
    for mesh in (mesh for mesh in meshes(m, world, batch) if mesh.micro_batch_size == 1):
        for way, zero in product(lean(m, mesh), zero_ways(m, mesh)):
            x = replace(way, recompute="full", **zero)
            memory = held(m, x, COURSE)
            if memory.total < least:
                best, least = Found(x, memory, None), memory.total
    return best


def rates(m: Shape, one: Found, gpu: Gpu) -> dict[str, float]:
    """MFU (work of the model), HFU (all that is done), tokens/s of a GPU."""
    x = one.layout
    tokens = x.global_batch_size * m.seq_len / x.world / one.seconds.step
    model, executed = flops_per_token(m, x.recompute == "full")
    return dict(mfu=model * tokens / gpu.flops, hfu=executed * tokens / gpu.flops, tokens=tokens)
