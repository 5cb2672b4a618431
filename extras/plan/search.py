"""Finds the best of all legal layouts without timing them all, by branch and bound.

A step takes at least the time of its computation and exposed messages, spread evenly over the pipeline ranks. This is
the lower bound of a mesh. The search takes the meshes in the order of their bounds. It ends when the next bound is not
below the step time of the tenth best mesh so far, because no mesh that is left can be better. In a mesh, each layout
has its own bound, and only layouts that fit and could still win are simulated.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from common.schedules import SCHEDULES
from extras.plan.gpus import ROOM, Gpu
from extras.plan.layouts import RECOMPUTE, Layout, illegal, meshes, variants, zero_ways
from extras.plan.memory import Held, held, state_bytes
from extras.plan.seconds import Seconds, model_work, step_seconds
from extras.plan.shapes import Shape


class Found(NamedTuple):
    """A layout with its memory and its time."""

    layout: Layout
    held: Held
    seconds: Seconds


def evaluate(m: Shape, x: Layout, gpu: Gpu) -> Found:
    """The memory and the time of one layout."""
    return Found(x, held(m, x), step_seconds(m, x, gpu))


def floor_seconds(m: Shape, mesh: Layout, gpu: Gpu) -> float:
    """A lower bound for the seconds of a step, for all layouts of this mesh."""
    return mesh.micro_batches * model_work(m, mesh, gpu)[:5].sum() / mesh.pp


def fits(memory: Held, gpu: Gpu) -> bool:
    """Whether this memory fits on a GPU, with some room to spare."""
    return memory.total <= ROOM * gpu.memory


def leanest(m: Shape, mesh: Layout) -> list[Layout]:
    """Of a mesh's legal layouts, those that usually need the least memory: the last ZeRO stage, with 1f1b and v-min."""
    names = ["1f1b", "v-min"] if mesh.pp > 1 and "v-min" in SCHEDULES else ["1f1b"]
    each = [replace(mesh, schedule=name, zero=zero_ways(m, mesh)[-1]) for name in names]
    return [x for x in each if not illegal(m, x)]


def best_variant(m: Shape, mesh: Layout, gpu: Gpu, limit: float) -> Found | None:
    """The fastest of a mesh's layouts that fit, if its step takes less than `limit` seconds; else None."""
    winner, room = None, ROOM * gpu.memory
    bounds = [(step_seconds(m, x, gpu, simulated=False).step, i, x) for i, x in enumerate(variants(m, mesh))]
    for bound, _, x in sorted(bounds):
        if bound >= limit:
            break
        if max(sum(state_bytes(m, x, rank)) for rank in (0, x.pp - 1)) < room and fits(memory := held(m, x), gpu):
            seconds = step_seconds(m, x, gpu)
            if seconds.step < limit:
                winner, limit = Found(x, memory, seconds), seconds.step
    return winner


def search(
    m: Shape, world: int, batch: int, gpu: Gpu, count: int = 10, bar: Callable[[Iterable], Iterable] = iter
) -> list[Found]:
    """The best layout of each of the `count` best meshes; an empty list if nothing fits."""
    each = [replace(mesh, recompute=kind) for mesh in meshes(m, world, batch) for kind in RECOMPUTE]
    order = sorted((floor_seconds(m, mesh, gpu), number) for number, mesh in enumerate(bar(each)))
    best: dict[Layout, Found] = {}
    for floor, number in bar(order):
        name = replace(each[number], recompute="none")
        steps = sorted(one.seconds.step for one in best.values())
        limit = steps[count - 1] if len(steps) >= count else float("inf")
        if floor >= limit:
            break
        limit = min(limit, best[name].seconds.step) if name in best else limit
        least = (held(m, x) for x in leanest(m, each[number]))
        can_fit = any(0.8 * (memory.total - memory.moment) <= ROOM * gpu.memory for memory in least)
        if floor < limit and can_fit and (winner := best_variant(m, each[number], gpu, limit)):
            best[name] = winner
    return sorted(best.values(), key=lambda one: one.seconds.step)[:count]


def smallest(m: Shape, world: int, batch: int) -> tuple[Layout, Held] | None:
    """Of the layouts of `leanest`, that with the least memory, and this memory; None if no layout is legal."""
    some = (replace(mesh, recompute="full") for mesh in meshes(m, world, batch) if mesh.micro_batch_size == 1)
    return min(((x, held(m, x)) for mesh in some for x in leanest(m, mesh)), key=lambda one: one[1].total, default=None)
