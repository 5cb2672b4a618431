"""The best layouts among all legal ones, found without timing them all.

A bound comes first: a step is never shorter than its computation and its exposed messages, dealt evenly to all ranks.
Meshes, each with one kind of recomputation, are taken in the order of their bounds. As soon as the next bound is longer
than the tenth best step, the search is over, and nothing better can be left. Within a mesh, a schedule is bounded by
the least bubble it could have; only what fits, and could still win, is simulated.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from theory.flops import moe_flops_per_token
from theory.footprint import Held, held
from theory.gpus import ROOM, Gpu
from theory.layouts import RECOMPUTE, Layout, meshes, schedules, zero_stages
from theory.recipes import RECIPES, Recipe
from theory.seconds import Seconds, least_bubble, model_costs, piece_of, rank_work, step_seconds
from theory.shapes import Shape, model_flops

COURSE = RECIPES["course"]
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


def evaluate(m: Shape, layout: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> Found:
    """All that is known of one layout."""
    return Found(layout, held(m, layout, recipe), step_seconds(m, layout, gpu, recipe))


def floor_seconds(m: Shape, mesh: Layout, gpu: Gpu, recipe: Recipe = COURSE) -> float:
    """No layout of this mesh with this recomputation has a shorter step."""
    return mesh.micro_batches * sum(model_costs(m, piece_of(mesh), gpu, recipe)) / mesh.pp


def fits(memory: Held, gpu: Gpu) -> bool:
    """Whether a plan may hold so much."""
    return memory.total <= ROOM * gpu.memory


def best_variant(m: Shape, mesh: Layout, gpu: Gpu, limit: float, recipe: Recipe = COURSE) -> tuple[Found | None, int]:
    """The best schedule and ZeRO stage of a mesh with a step under `limit` seconds, if any; how many were timed."""
    winner, timed, n = None, 0, mesh.micro_batches
    ways = []
    for schedule, chunks in schedules(m, mesh.pp):
        way = replace(mesh, schedule=schedule, chunks=chunks)
        busy, _, costs = rank_work(m, piece_of(mesh), gpu, recipe, schedule, mesh.pp, chunks)
        ways.append((n * sum(busy.values()) + least_bubble(way, *costs), len(ways), way))
    for bound, _, way in sorted(ways):
        if bound >= limit:
            break
        for zero in zero_stages(mesh):
            layout = replace(way, zero=zero)
            if step_seconds(m, layout, gpu, recipe, simulated=False).step < limit:
                memory = held(m, layout, recipe)
                if fits(memory, gpu):
                    timed += 1
                    seconds = step_seconds(m, layout, gpu, recipe)
                    if seconds.step < limit:
                        winner, limit = Found(layout, memory, seconds), seconds.step
    return winner, timed


def search(
    m: Shape, world: int, gbs: int, gpu: Gpu, count: int = 10, bar: Bar = iter, recipe: Recipe = COURSE
) -> Search:
    """The `count` best meshes, each with its best schedule, ZeRO stage and recomputation; empty if none fits."""
    all_meshes = list(meshes(m, world, gbs))
    tries = [replace(mesh, recompute=kind) for mesh in all_meshes for kind in RECOMPUTE]
    order = sorted((floor_seconds(m, mesh, gpu, recipe), number) for number, mesh in enumerate(bar(tries)))
    best: dict[Layout, Found] = {}
    timed = 0
    for floor, number in bar(order):
        mesh = tries[number]
        name = replace(mesh, recompute="none")
        steps = sorted(found.seconds.step for found in best.values())
        limit = steps[count - 1] if len(steps) >= count else float("inf")
        if floor >= limit:
            break
        limit = min(limit, best[name].seconds.step) if name in best else limit
        least = held(m, replace(mesh, zero=zero_stages(mesh)[-1]), recipe, moments=False).total  # 1F1B waits for least
        if floor < limit and 0.9 * least <= ROOM * gpu.memory:
            winner, more = best_variant(m, mesh, gpu, limit, recipe)
            timed += more
            if winner:
                best[name] = winner
    found = sorted(best.values(), key=lambda found: found.seconds.step)[:count]
    return Search(found, count_legal(m, all_meshes), timed)


@cache
def number_of_ways(m: Shape, pp: int) -> int:
    """Legal schedules of a pipeline."""
    return len(schedules(m, pp))


def count_legal(m: Shape, found: list[Layout]) -> int:
    """How many layouts these meshes have, with all schedules, ZeRO stages and kinds of recomputation."""
    return sum(number_of_ways(m, mesh.pp) * len(zero_stages(mesh)) for mesh in found) * len(RECOMPUTE)


def smallest(m: Shape, world: int, gbs: int, recipe: Recipe = COURSE) -> Found | None:
    """The layout that needs the least memory (its seconds are not known: None); None if no layout is legal."""
    best = None
    for mesh in meshes(m, world, gbs):
        if mesh.mbs == 1:
            for zero in (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,):
                layout = replace(mesh, zero=zero, recompute="full")
                memory = held(m, layout, recipe)
                if best is None or memory.total < best.held.total:
                    best = Found(layout, memory, None)
    return best


def rates(m: Shape, found: Found, gpu: Gpu) -> dict[str, float]:
    """MFU (work of the model), HFU (all that is done), tokens/s of a GPU."""
    layout, step = found.layout, found.seconds.step
    tokens = layout.gbs * m.seq_len / layout.world / step
    model = model_flops(m)
    executed = model * (4 / 3 if layout.recompute == "full" else 1)
    if m.mlp_matrices == 3 and m.latent is None:
        model, executed = moe_flops_per_token(m, layout.recompute)
    return dict(mfu=model * tokens / gpu.flops, hfu=executed * tokens / gpu.flops, tokens=tokens)
